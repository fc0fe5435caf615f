//! Storage under a cache: the [`Backing`] trait, the requests to it ([`IoRequest`], [`Alignment`]),
//! and [`Guarded`], which turns panics of a backing into errors.

use super::buf::Span;
use super::{IoBuf, IoBufMut, IoError, Operation};
use crate::error::ErrorKind;
use crate::sync::blocking;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use thiserror::Error;

/// Storage a cache can stand on: numbered bytes that can be read, written, synced and cut.
///
/// [`DiskFile`](super::DiskFile) is the one that comes with the crate. Implement it for storage of
/// your own and hand it to `Cache::open_backing`.
///
/// # What the cache promises
/// - Memory and positions of a transfer are multiples of [`alignment`](Self::alignment). Lengths
///   are too, but for the last write before the end of the file: it ends where the file ends.
/// - Two writes of the same bytes never overlap in time; reads and writes of different bytes may,
///   from several threads.
/// - [`set_len`](Self::set_len) overlaps no write, and no other `set_len`.
/// - The bytes of an [`IoBuf`] do not change during a write, nor until it has ended: what was
///   written of a folio is one state of it.
///
/// # What a backing promises
/// - One call is one attempt. It may transfer fewer bytes than asked: the cache continues. It may
///   fail with [`Interrupted`](io::ErrorKind::Interrupted) or
///   [`WouldBlock`](io::ErrorKind::WouldBlock): the cache tries again, the latter a bounded number
///   of times. Every other error goes to the caller as it is.
/// - The storage never gets longer than the end of the last byte written, or what
///   [`set_len`](Self::set_len) or [`allocate`](Self::allocate) said. Bytes between an old end and
///   a later write are zeros.
/// - A read sees every write that returned before it began.
/// - It does not call back into the cache.
/// - It does not panic. A call that does is one that failed.
/// - It fits the stack it is called on. Calls come from the thread that uses the cache, and from
///   threads of the cache, whose stack is 256 KiB. Larger buffers belong on the heap.
/// - It relies on no signal there: threads of the cache block all but those that a thread raises
///   by itself (SIGBUS, SIGSEGV, SIGILL, SIGFPE, SIGTRAP, SIGSYS), and a thread or process that a
///   backing starts from one inherits that mask.
pub trait Backing: Send + Sync + Debug {
    /// Reads into `target` from `position_bytes` on. Returns how many bytes it filled, from the
    /// first on; 0 only at or behind the end. Bytes of `target` after those may hold anything.
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize>;

    /// Writes `source` at `position_bytes`. Returns how many bytes it took, from the first on.
    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize>;

    /// Acts as [`read_at`](Self::read_at), into several consecutive buffers. Only the last of them
    /// may be shorter than a multiple of [`alignment`](Self::alignment). The default implementation
    /// fills the first one.
    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        match targets.iter_mut().find(|target| !target.is_empty()) {
            Some(first) => self.read_at(first, position_bytes),
            None => Ok(0),
        }
    }

    /// Acts as [`write_at`](Self::write_at), from several consecutive buffers. Only the last of
    /// them may be shorter than a multiple of [`alignment`](Self::alignment). The default
    /// implementation stores the first one.
    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        match sources.iter().find(|source| !source.is_empty()) {
            Some(first) => self.write_at(first, position_bytes),
            None => Ok(0),
        }
    }

    /// Where the cache may make such a transfer by itself, without calling the backing: it hands
    /// the kernel many at a time (io_uring). `None`: it calls `*_at` from a thread, one a transfer.
    ///
    /// The cache may still make any transfer with `*_at` instead, whatever this says.
    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        let _ = request;
        None
    }

    /// Sees what the kernel answered to a transfer made by [`submission`](Self::submission), and
    /// says what the cache is to take it for. Called once a transfer, by the thread that waits for
    /// it. [`Interrupted`](io::ErrorKind::Interrupted): the cache tries again with `*_at`.
    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        let _ = request;
        answer
    }

    /// Makes every write and [`set_len`](Self::set_len) that returned before durable.
    ///
    /// After an error it must not return `Ok` before that is true: not because a second try found
    /// nothing left to write.
    fn sync_data(&self) -> io::Result<()>;

    /// Acts as [`sync_data`](Self::sync_data), and also makes the metadata (times, owner) durable.
    fn sync_all(&self) -> io::Result<()>;

    /// Returns the length in bytes.
    fn len_bytes(&self) -> io::Result<u64>;

    /// Truncates the storage to `length_bytes`, or extends it with zeros.
    fn set_len(&self, length_bytes: u64) -> io::Result<()>;

    /// Sets storage aside for bytes that will be written, and which are zeros until then: writing
    /// them neither has to look for room nor makes the storage longer. It is longer after this
    /// call, if it was shorter. What was written there stays.
    ///
    /// The cache asks for its own swap file only, and goes on whatever the answer is. A backing
    /// that does not implement it does nothing.
    fn allocate(&self, bytes: Range<u64>) -> io::Result<()> {
        let _ = bytes;
        Ok(())
    }

    /// Memory, positions and lengths must be multiples of this: powers of two from 1 to 4096, or
    /// the backing is refused when it is opened. Never changes.
    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    /// Returns a path or a name, for messages.
    fn describe(&self) -> String;

    /// An identity that tells this file from others, so that a file opened twice has one cache:
    /// `None` if every open is a file of its own.
    fn identity(&self) -> Option<FileIdentity> {
        None
    }

    /// The device it stands on: files that say the same share a flusher and a part of what may be
    /// dirty, and may hold each other up when the storage is full, slow, or does not answer. Files
    /// of different devices do not. By default the device of [`identity`](Self::identity); `None`
    /// is a device of its own. Never changes.
    fn device(&self) -> Option<DeviceIdentity> {
        self.identity().map(FileIdentity::device)
    }

    /// Whether transfers reach the device directly, for the statistics. May change while open.
    fn direct(&self) -> DirectStatus {
        DirectStatus::Custom
    }
}

/// Which device it is: what files share that may hold each other up.
///
/// A file system of the kernel is known by its number, anything else by one of your own. The two
/// never meet: a number of your own is equal to no file system's, whatever it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceIdentity {
    is_custom: bool,
    number: u64,
}

impl DeviceIdentity {
    /// A device of your own: the same number is the same device.
    pub const fn custom(number: u64) -> Self {
        Self { is_custom: true, number }
    }

    /// The file system an open file is on, for a backing that stands on it.
    ///
    /// # Errors
    /// Taken from `fstat`.
    pub fn of_file(file: impl AsFd) -> io::Result<Self> {
        FileIdentity::of_file(file).map(FileIdentity::device)
    }

    /// The number of the file system (`st_dev`), or your own.
    pub const fn number(self) -> u64 {
        self.number
    }
}

/// Which file it is, for as long as it is open somewhere.
///
/// A file of the kernel is known by device and inode, anything else by numbers of your own. The
/// two never meet: numbers of your own are equal to no file's, whatever they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    device: DeviceIdentity,
    inode: u64,
}

impl FileIdentity {
    /// An identity of your own: the same numbers are the same file. The first is that of its
    /// [device](DeviceIdentity::custom).
    pub const fn custom(device: u64, inode: u64) -> Self {
        Self { device: DeviceIdentity::custom(device), inode }
    }

    /// Returns the identity of an open file, for a backing that represents that very file: an open
    /// of its path in the cache shares its pages.
    ///
    /// # Errors
    /// Taken from `fstat`.
    pub fn of_file(file: impl AsFd) -> io::Result<Self> {
        Ok(Self::of(crate::sys::file::status(file.as_fd())?))
    }

    pub(crate) fn of(status: crate::sys::file::Status) -> Self {
        let device = DeviceIdentity { is_custom: false, number: status.device };
        Self { device, inode: status.inode }
    }

    /// The device it is on: a file system, or a device of your own.
    pub const fn device(self) -> DeviceIdentity {
        self.device
    }

    /// The file in it (`st_ino`), or the second number of your own.
    pub const fn inode(self) -> u64 {
        self.inode
    }
}

/// How the transfers of a file reach its storage.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DirectStatus {
    /// Between frames and device, past the kernel's page cache (`O_DIRECT`).
    Direct,
    /// Through the kernel's page cache.
    Buffered {
        /// Why not directly.
        reason: String,
    },
    /// The storage is not a file of the kernel.
    Custom,
}

/// A transfer about to be made, or just made: asked about by [`Backing::submission`], judged by
/// [`Backing::completed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IoRequest {
    /// [`Read`](Operation::Read) or [`Write`](Operation::Write).
    pub operation: Operation,
    /// The first byte.
    pub position_bytes: u64,
    /// How many bytes.
    pub length_bytes: usize,
    /// The transfer's natural alignment, up to 4096: of its addresses in memory; its
    /// position, and the length of each of its buffers but the last.
    pub alignment: Alignment,
}

impl IoRequest {
    /// The request of a transfer of these spans.
    pub(super) fn new(operation: Operation, position_bytes: u64, spans: &[Span]) -> Self {
        let (mut addresses, mut offsets) = (ALIGNMENT_BYTES_MAX, ALIGNMENT_BYTES_MAX);
        let (mut length_bytes, mut last) = (0, position_bytes);
        for span in spans {
            addresses |= span.start().addr() as u64;
            offsets |= last;
            last = span.len() as u64;
            length_bytes += span.len();
        }
        let lowest_bit = |bits: u64| bits & bits.wrapping_neg();
        let alignment =
            Alignment { memory_bytes: lowest_bit(addresses), offset_bytes: lowest_bit(offsets) };
        Self { operation, position_bytes, length_bytes, alignment }
    }

    /// Whether the transfer can start as it is where `needed` is the rule.
    pub(super) fn fits(&self, needed: Alignment) -> bool {
        self.alignment.memory_bytes >= needed.memory_bytes
            && self.alignment.offset_bytes >= needed.offset_bytes
    }
}

/// How the cache may make a transfer by itself.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Submission<'a> {
    /// The file, with the transfer's positions.
    pub file: BorrowedFd<'a>,
    /// How many of its bytes, from the first on: at least one, at most all. The cache makes the
    /// rest with `*_at`.
    pub length_bytes: usize,
}

impl<'a> Submission<'a> {
    /// The first `length_bytes` bytes of the transfer go to or come from `file`.
    pub fn new(file: BorrowedFd<'a>, length_bytes: usize) -> Self {
        Self { file, length_bytes }
    }
}

/// Name of a backing whose `describe` panics.
const NAMELESS: &str = "a backing";

/// A backing of a user's, none of whose panics gets out.
///
/// Around every backing that is handed to the cache; everything is the backing's, but that a call
/// which panics is one that failed. The cache calls backings on threads that others need (the
/// flusher's, the engine's), with locks held and transfers in flight.
#[derive(Debug)]
pub(crate) struct Guarded {
    backing: Arc<dyn Backing>,
    /// Asked once: a transfer relies on it, and it never changes.
    alignment: Alignment,
    identity: Option<FileIdentity>,
    device: Option<DeviceIdentity>,
}

impl Guarded {
    /// Asks the backing what never changes.
    ///
    /// # Errors
    /// That panics; an alignment that frames do not have.
    pub(crate) fn new(backing: Arc<dyn Backing>) -> crate::error::Result<Self> {
        let asked = guard(|| Ok((backing.alignment(), backing.identity(), backing.device())));
        let (alignment, identity, device) = asked.map_err(|source| IoError {
            file: NAMELESS.to_owned(),
            operation: Operation::Len,
            position_bytes: 0,
            length_bytes: 0,
            source,
        })?;
        let guarded = Self { backing, alignment, identity, device };
        if alignment.is_valid() {
            return Ok(guarded);
        }
        let Alignment { memory_bytes, offset_bytes } = alignment;
        let file = guarded.describe();
        Err(ErrorKind::InvalidAlignment { file, memory_bytes, offset_bytes }.into())
    }
}

/// Makes a call and returns its answer, or an error if it panics. The state that a panic leaves
/// behind is the backing's affair.
fn guard<T>(call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let panicked = |_| Err(io::Error::other("the backing panicked"));
    blocking::apart(|| catch_unwind(AssertUnwindSafe(call))).unwrap_or_else(panicked)
}

impl Backing for Guarded {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        guard(|| self.backing.read_at(target, position_bytes))
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        guard(|| self.backing.write_at(source, position_bytes))
    }

    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        guard(|| self.backing.read_vectored_at(targets, position_bytes))
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        guard(|| self.backing.write_vectored_at(sources, position_bytes))
    }

    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        guard(|| Ok(self.backing.submission(request))).ok().flatten()
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        guard(|| self.backing.completed(request, answer))
    }

    fn sync_data(&self) -> io::Result<()> {
        guard(|| self.backing.sync_data())
    }

    fn sync_all(&self) -> io::Result<()> {
        guard(|| self.backing.sync_all())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        guard(|| self.backing.len_bytes())
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        guard(|| self.backing.set_len(length_bytes))
    }

    fn allocate(&self, bytes: Range<u64>) -> io::Result<()> {
        guard(|| self.backing.allocate(bytes))
    }

    fn alignment(&self) -> Alignment {
        self.alignment
    }

    fn describe(&self) -> String {
        guard(|| Ok(self.backing.describe())).unwrap_or_else(|_| NAMELESS.to_owned())
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.identity
    }

    fn device(&self) -> Option<DeviceIdentity> {
        self.device
    }

    fn direct(&self) -> DirectStatus {
        guard(|| Ok(self.backing.direct())).unwrap_or(DirectStatus::Custom)
    }
}

/// No backing may ask for more: frames lie at, and folios start at, multiples of this.
pub(crate) const ALIGNMENT_BYTES_MAX: u64 = 4096;

/// The last position there is: the kernel counts with a sign.
pub(crate) const POSITION_BYTES_MAX: u64 = i64::MAX as u64;

/// Transfers of a backing are multiples of these: powers of two, from 1 to 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// For addresses in memory.
    pub memory_bytes: u64,
    /// For positions and lengths.
    pub offset_bytes: u64,
}

impl Alignment {
    /// No requirement.
    pub const NONE: Self = Self { memory_bytes: 1, offset_bytes: 1 };

    /// Returns `true` if both are powers of two that frames and folios can satisfy.
    pub fn is_valid(self) -> bool {
        [self.memory_bytes, self.offset_bytes]
            .into_iter()
            .all(|bytes| bytes.is_power_of_two() && bytes <= ALIGNMENT_BYTES_MAX)
    }

    /// Returns the distance between positions where a transfer can be continued.
    pub(crate) fn granule_bytes(self) -> u64 {
        self.memory_bytes.max(self.offset_bytes)
    }
}

/// A range of bytes that does not lie below 2^63.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{length_bytes} bytes at position {position_bytes} do not end below 2^63")]
pub struct PositionOutOfRange {
    /// Where the range starts.
    pub position_bytes: u64,
    /// How long it is.
    pub length_bytes: u64,
}

impl From<PositionOutOfRange> for io::Error {
    fn from(error: PositionOutOfRange) -> Self {
        Self::new(io::ErrorKind::InvalidInput, error)
    }
}

/// Returns the end of a range, if it is below 2^63.
pub(crate) fn range_end(position_bytes: u64, length: usize) -> Result<u64, PositionOutOfRange> {
    let length_bytes = length as u64;
    position_bytes
        .checked_add(length_bytes)
        .filter(|end| *end <= POSITION_BYTES_MAX)
        .ok_or(PositionOutOfRange { position_bytes, length_bytes })
}

/// Rounds `value` down to a multiple of `granule`, a power of two.
pub(crate) fn round_down(value: usize, granule: u64) -> usize {
    debug_assert!(granule.is_power_of_two());
    value & !(granule as usize - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;

    fn request(position_bytes: u64, spans: &[(usize, usize)]) -> IoRequest {
        let span = |(address, length)| {
            Span::new(NonNull::new(std::ptr::without_provenance_mut(address)).unwrap(), length)
        };
        let spans: Vec<_> = spans.iter().copied().map(span).collect();
        IoRequest::new(Operation::Read, position_bytes, &spans)
    }

    fn alignment(position_bytes: u64, spans: &[(usize, usize)]) -> (u64, u64) {
        let found = request(position_bytes, spans).alignment;
        (found.memory_bytes, found.offset_bytes)
    }

    #[test]
    fn a_request_is_as_aligned_as_its_least_aligned_part() {
        assert_eq!(alignment(0, &[(8192, 4096)]), (4096, 4096));
        assert_eq!(alignment(512, &[(4100, 4096)]), (4, 512));
        assert_eq!(alignment(1, &[(1, 1)]), (1, 1));
        assert_eq!(alignment(0, &[(4096, 512), (16384, 4096)]), (4096, 512), "an inner length");
        assert_eq!(alignment(0, &[(4096, 4096), (16384, 100)]), (4096, 4096), "the last length");
        assert_eq!(alignment(1 << 40, &[(4096, 4096), (16386, 4096)]), (2, 4096));
        assert_eq!(request(0, &[(4096, 4096), (16384, 100)]).length_bytes, 4196);
    }

    #[test]
    fn a_request_fits_where_it_is_aligned_at_least_so() {
        let needed = Alignment { memory_bytes: 4, offset_bytes: 512 };
        assert!(request(1024, &[(4100, 700)]).fits(needed));
        assert!(!request(1024, &[(4101, 512)]).fits(needed));
        assert!(!request(1025, &[(4100, 512)]).fits(needed));
        assert!(!request(1024, &[(4100, 700), (8192, 512)]).fits(needed));
        assert!(request(1, &[(1, 1)]).fits(Alignment::NONE));
    }

    #[test]
    fn rounding_down_keeps_multiples_and_cuts_the_rest() {
        for granule in [1, 2, 512, 4096] {
            for value in [0, 1, 511, 512, 513, 4095, 4096, 4097, usize::MAX] {
                let rounded = round_down(value, granule);
                assert_eq!(rounded, value / granule as usize * granule as usize);
            }
        }
    }

    #[test]
    fn ranges_end_below_two_to_the_63() {
        assert_eq!(range_end(0, 0), Ok(0));
        assert_eq!(range_end(POSITION_BYTES_MAX, 0), Ok(POSITION_BYTES_MAX));
        assert_eq!(range_end(POSITION_BYTES_MAX - 1, 1), Ok(POSITION_BYTES_MAX));
        for (position_bytes, length) in
            [(POSITION_BYTES_MAX, 1), (1 << 63, 0), (u64::MAX, 1), (u64::MAX, usize::MAX)]
        {
            let error = range_end(position_bytes, length).unwrap_err();
            assert_eq!(error.position_bytes, position_bytes);
            let error = io::Error::from(error);
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            assert!(error.get_ref().is_some_and(|inner| inner.is::<PositionOutOfRange>()));
        }
    }

    #[test]
    fn alignments_are_powers_of_two_that_a_page_can_honour() {
        let valid =
            |memory_bytes, offset_bytes| Alignment { memory_bytes, offset_bytes }.is_valid();
        assert!(Alignment::NONE.is_valid());
        assert!(valid(4, 512) && valid(512, 4096) && valid(4096, 1));
        assert!(!valid(0, 512) && !valid(512, 0) && !valid(3, 512) && !valid(512, 8192));
    }

    #[test]
    fn a_transfer_is_taken_up_again_at_multiples_of_both() {
        let alignment = Alignment { memory_bytes: 4, offset_bytes: 512 };
        assert_eq!(alignment.granule_bytes(), 512);
        assert_eq!(Alignment { memory_bytes: 4096, offset_bytes: 512 }.granule_bytes(), 4096);
    }
}

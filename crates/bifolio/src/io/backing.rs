//! Storage under a cache: the [`Backing`] trait, and [`Guarded`], which turns panics of a backing
//! into errors.

use super::{Alignment, IoBuf, IoBufMut, IoRequest, Submission};
use crate::error::{Error, ErrorKind, io_error};
use crate::sync::blocking;
use std::fmt::{self, Debug};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Storage under a cache: a sequence of bytes that can be read, written, synced and truncated.
///
/// [`DiskFile`](super::DiskFile) is the implementation of this crate. Implement the trait for other
/// storage and pass it to `Cache::open_backing`.
///
/// # What the cache guarantees
/// - Memory and positions of a transfer are multiples of
///   [`alignment`](DirectBacking::alignment). So are lengths, except for the last write before the
///   end of file, which ends at the end of file.
/// - Two writes of the same bytes never overlap in time; reads, and writes of different bytes, may,
///   from several threads.
/// - [`set_len`](Self::set_len) overlaps no write, and no other `set_len`.
/// - The bytes of an [`IoBuf`] do not change during a write, nor between the attempts of a
///   continued one: what is written of a folio is one consistent state of it.
///
/// # What a backing guarantees
/// - One call is one attempt. It may transfer fewer bytes than requested: the cache continues. It
///   may fail with [`Interrupted`](io::ErrorKind::Interrupted) or
///   [`WouldBlock`](io::ErrorKind::WouldBlock): the cache retries, in the latter case a bounded
///   number of times. Every other error is returned to the caller unchanged.
/// - The storage never gets longer than the end of the last byte written, or what
///   [`set_len`](Self::set_len) or [`fallocate`](DirectBacking::fallocate) set. Bytes between an
///   old end and a later write are zeros.
/// - A read sees every write that returned before it began.
/// - It does not call back into the cache.
/// - It does not panic. A call that panics counts as failed.
/// - It fits on the stack of its callers: the threads that use the cache, and threads of the cache,
///   whose stack is 256 KiB. Larger buffers belong on the heap.
/// - It relies on no signals there: threads of the cache block all signals but the synchronous ones
///   (SIGBUS, SIGSEGV, SIGILL, SIGFPE, SIGTRAP, SIGSYS), and a thread or process that a backing
///   starts from one inherits that mask.
pub trait Backing: Send + Sync {
    /// Reads into `target` from `position_bytes` on. Returns how many bytes it filled, from the
    /// first on; 0 only at or beyond the end. The bytes of `target` after those are unspecified.
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize>;

    /// Writes `source` at `position_bytes`. Returns how many bytes it wrote, from the first on.
    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize>;

    /// Makes every write, [`set_len`](Self::set_len) and [`fallocate`](DirectBacking::fallocate)
    /// that returned before durable.
    ///
    /// After an error it must not return `Ok` until that is true; in particular, not because a
    /// second attempt found nothing left to write.
    fn sync_data(&self) -> io::Result<()>;

    /// Returns the length in bytes.
    fn len_bytes(&self) -> io::Result<u64>;

    /// Truncates the storage to `length_bytes`, or extends it with zeros.
    fn set_len(&self, length_bytes: u64) -> io::Result<()>;

    /// Returns a path or a name, for messages.
    fn describe(&self) -> String;

    /// Returns this backing with its [`DirectBacking`] calls, if it has any.
    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        None
    }
}

impl Debug for dyn Backing + '_ {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Backing").field(&self.describe()).finish()
    }
}

impl Debug for dyn DirectBacking + '_ {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("DirectBacking").field(&self.describe()).finish()
    }
}

/// Calls of a [`Backing`] that know more of their device: aligned and vectored transfers,
/// submissions to io_uring, allocation, and the identity of the file. All have defaults that use
/// the calls of [`Backing`] alone; a backing that implements some returns itself from
/// [`Backing::as_direct`].
pub trait DirectBacking: Backing {
    /// Returns the required alignment of memory, positions and lengths: powers of two from 1 to
    /// 4096, otherwise the open fails. Never changes.
    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    /// Reads into several consecutive buffers, otherwise like [`read_at`](Backing::read_at). Only
    /// the last buffer may be shorter than a multiple of [`alignment`](Self::alignment). The
    /// default implementation fills the first one.
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

    /// Writes several consecutive buffers, otherwise like [`write_at`](Backing::write_at). Only the
    /// last buffer may be shorter than a multiple of [`alignment`](Self::alignment). The default
    /// implementation stores the first one.
    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        match sources.iter().find(|source| !source.is_empty()) {
            Some(first) => self.write_at(first, position_bytes),
            None => Ok(0),
        }
    }

    /// Returns the file through which the cache may make such a transfer itself, without calling
    /// the backing: it submits many to the kernel at a time (io_uring). With `None` it calls `*_at`
    /// on a thread, once per transfer.
    ///
    /// The cache may still make any transfer with `*_at` instead.
    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        let _ = request;
        None
    }

    /// Converts the kernel's result of a transfer made through [`submission`](Self::submission)
    /// into the result that the cache uses. Called once per transfer, by the thread that waits for
    /// it. After [`Interrupted`](io::ErrorKind::Interrupted) the cache retries with `*_at`.
    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        let _ = request;
        answer
    }

    /// Makes the data durable like [`sync_data`](Backing::sync_data), and the metadata (times,
    /// owner), too. The default implementation calls `sync_data`.
    fn sync_all(&self) -> io::Result<()> {
        self.sync_data()
    }

    /// Changes the allocation of a range that is not empty, as `mode` says. It may lie past the end
    /// in part or as a whole. The call overlaps no write, no [`set_len`](Backing::set_len), and no
    /// other `fallocate`; a read of the range that overlaps it may return old or new bytes.
    ///
    /// The cache calls it for `File::allocate`, `punch_hole` and `zero_range`, and, to allocate,
    /// for its swap file, where it ignores a failure. The default implementation fails with
    /// [`Unsupported`](io::ErrorKind::Unsupported), which the caller of these functions gets.
    ///
    /// A call that fails may have changed part of the range. One that fails with `Unsupported` has
    /// changed nothing.
    fn fallocate(&self, mode: FallocateMode, bytes: Range<u64>) -> io::Result<()> {
        let _ = (mode, bytes);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the position of the first byte at or after `position_bytes` that is not in a hole, a
    /// range without storage that reads as zeros; `None` if there is none before the end. The
    /// default implementation knows no holes.
    fn seek_data(&self, position_bytes: u64) -> io::Result<Option<u64>> {
        Ok((position_bytes < self.len_bytes()?).then_some(position_bytes))
    }

    /// Returns the position of the first byte at or after `position_bytes` that is in a hole; the
    /// end counts as one. `None` if `position_bytes` is at or past the end. The default
    /// implementation knows no holes.
    fn seek_hole(&self, position_bytes: u64) -> io::Result<Option<u64>> {
        let len_bytes = self.len_bytes()?;
        Ok((position_bytes < len_bytes).then_some(len_bytes))
    }

    /// Returns an identity that distinguishes this file from others, so that a file opened twice is
    /// cached once; `None` if every open is a separate file.
    fn identity(&self) -> Option<FileIdentity> {
        None
    }

    /// Returns how transfers reach the storage, for the statistics. May change while open.
    fn direct(&self) -> DirectStatus {
        DirectStatus::Custom
    }

    /// Returns a descriptor of the file named by [`identity`](Self::identity) by which the cache
    /// learns whether the file was changed while it was closed, so that it may keep pages
    /// ([`CacheBuilder::kept_files`](crate::CacheBuilder::kept_files)). It cannot write, and no
    /// other code sets leases or signals of its open file description. What the backing reads are
    /// the bytes of the file. `None`, the default: pages are not kept.
    fn watchable(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A change of the allocation of a range ([`DirectBacking::fallocate`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FallocateMode {
    /// Allocates storage: writing the range needs no further allocation. Bytes that were not
    /// written are zeros. The storage is then at least as long as the end of the range.
    Allocate,
    /// Allocates storage and leaves the length unchanged.
    AllocateKeepLen,
    /// Frees storage: the range reads as zeros. The length is unchanged.
    PunchHole,
    /// Zeroes the range, with storage allocated. The length is unchanged.
    ZeroRange,
}

/// The device that files share, and on which they can delay each other: a file system of the
/// kernel by its number, or a custom one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DeviceIdentity {
    is_custom: bool,
    number: u64,
}

impl DeviceIdentity {
    pub(crate) const fn number(self) -> u64 {
        self.number
    }
}

/// Identifies a file while it is open.
///
/// A file of the kernel is identified by device and inode, anything else by custom numbers. Custom
/// numbers never equal those of a kernel file. Files of one device share a flusher and a part of
/// the dirty limit, and can delay each other when the storage is full, slow, or hangs; files of
/// different devices, and files without an identity, cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    device: DeviceIdentity,
    inode: u64,
}

impl FileIdentity {
    /// Returns a custom identity: equal numbers are the same file, and an equal `device` is the
    /// same device.
    pub const fn custom(device: u64, inode: u64) -> Self {
        Self { device: DeviceIdentity { is_custom: true, number: device }, inode }
    }

    /// Returns the identity of an open file, for a backing that represents that very file: an open
    /// of its path in the cache shares its pages.
    ///
    /// # Errors
    /// Returns the error of `fstat`.
    #[doc(hidden)]
    pub fn of_file(file: impl AsFd) -> io::Result<Self> {
        Ok(Self::of(crate::sys::file::status(file.as_fd())?))
    }

    pub(crate) fn of(status: crate::sys::file::Status) -> Self {
        Self::of_numbers(status.device, status.inode)
    }

    /// Returns the identity of a file of the kernel.
    pub(crate) const fn of_numbers(device: u64, inode: u64) -> Self {
        Self { device: DeviceIdentity { is_custom: false, number: device }, inode }
    }

    /// Returns the numbers of the device and of the file.
    pub(crate) const fn numbers(self) -> (u64, u64) {
        (self.device.number, self.inode)
    }

    pub(crate) const fn is_custom(self) -> bool {
        self.device.is_custom
    }

    pub(crate) const fn device(self) -> DeviceIdentity {
        self.device
    }
}

/// How the transfers of a file reach its storage.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DirectStatus {
    /// Between frames and device, bypassing the kernel's page cache (`O_DIRECT`).
    Direct,
    /// Through the kernel's page cache.
    Buffered {
        /// Why transfers are not direct.
        reason: String,
    },
    /// The storage is not a kernel file.
    Custom,
}

/// A user's backing; a call that panics counts as failed. The cache calls backings on threads that
/// serve other files, with locks held and transfers in flight.
#[derive(Debug)]
pub(crate) struct Guarded {
    backing: Arc<dyn Backing>,
    /// Queried once: transfers rely on it, and it never changes.
    alignment: Alignment,
    identity: Option<FileIdentity>,
}

impl Guarded {
    /// # Errors
    /// A query panics, or frames cannot satisfy the alignment.
    pub(crate) fn new(backing: Arc<dyn Backing>) -> crate::error::Result<Self> {
        let asked = guard(|| {
            let direct = backing.as_direct().map(|direct| (direct.alignment(), direct.identity()));
            Ok(direct.unwrap_or((Alignment::NONE, None)))
        });
        let (alignment, identity) = asked
            .map_err(|source| io_error("a backing", "query of the alignment", None, source))?;
        let guarded = Self { backing, alignment, identity };
        if alignment.is_valid() {
            return Ok(guarded);
        }
        let Alignment { memory_bytes, offset_bytes } = alignment;
        let text = format!(
            "the alignment of the backing is {memory_bytes} bytes in memory and {offset_bytes} of \
             positions: each must be a power of two from 1 to 4096"
        );
        Err(Error::new(ErrorKind::Config, text).in_file(guarded.describe()))
    }
}

/// The defaults of [`DirectBacking`] over a backing that has no such calls.
#[derive(Debug)]
struct Plain<'a>(&'a dyn Backing);

impl Backing for Plain<'_> {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.0.read_at(target, position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        self.0.write_at(source, position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.0.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.0.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        self.0.describe()
    }
}

impl DirectBacking for Plain<'_> {}

/// Makes a call; fails if it panics. The backing is responsible for its state after a panic.
fn guard<T>(call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let panicked = |_| Err(io::Error::other("the backing panicked"));
    blocking::apart(|| catch_unwind(AssertUnwindSafe(call))).unwrap_or_else(panicked)
}

impl Guarded {
    fn directly<T>(&self, call: impl FnOnce(&dyn DirectBacking) -> io::Result<T>) -> io::Result<T> {
        guard(|| match self.backing.as_direct() {
            Some(direct) => call(direct),
            None => call(&Plain(&*self.backing)),
        })
    }
}

impl Backing for Guarded {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        guard(|| self.backing.read_at(target, position_bytes))
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        guard(|| self.backing.write_at(source, position_bytes))
    }

    fn sync_data(&self) -> io::Result<()> {
        guard(|| self.backing.sync_data())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        guard(|| self.backing.len_bytes())
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        guard(|| self.backing.set_len(length_bytes))
    }

    fn describe(&self) -> String {
        guard(|| Ok(self.backing.describe())).unwrap_or_else(|_| "a backing".to_owned())
    }
}

impl DirectBacking for Guarded {
    fn alignment(&self) -> Alignment {
        self.alignment
    }

    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        self.directly(|direct| direct.read_vectored_at(targets, position_bytes))
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        self.directly(|direct| direct.write_vectored_at(sources, position_bytes))
    }

    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        let submission = || self.backing.as_direct().and_then(|direct| direct.submission(request));
        guard(|| Ok(submission())).ok().flatten()
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        self.directly(|direct| direct.completed(request, answer))
    }

    fn sync_all(&self) -> io::Result<()> {
        self.directly(|direct| direct.sync_all())
    }

    fn fallocate(&self, mode: FallocateMode, bytes: Range<u64>) -> io::Result<()> {
        self.directly(|direct| direct.fallocate(mode, bytes))
    }

    fn seek_data(&self, position_bytes: u64) -> io::Result<Option<u64>> {
        self.directly(|direct| direct.seek_data(position_bytes))
    }

    fn seek_hole(&self, position_bytes: u64) -> io::Result<Option<u64>> {
        self.directly(|direct| direct.seek_hole(position_bytes))
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.identity
    }

    fn direct(&self) -> DirectStatus {
        self.directly(|direct| Ok(direct.direct())).unwrap_or(DirectStatus::Custom)
    }

    fn watchable(&self) -> Option<BorrowedFd<'_>> {
        let watchable = || self.backing.as_direct().and_then(|direct| direct.watchable());
        guard(|| Ok(watchable())).ok().flatten()
    }
}

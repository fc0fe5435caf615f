//! Whole transfers: a [`Transfer`] with the memory it moves, composed of a backing's single
//! attempts.
//!
//! `file` and `writeback` push transfers into the engine's queues, and call the functions for syncs
//! and lengths; this file calls a [`Backing`](super::Backing). Each operation ends complete, or
//! with one [`Error`] that says what is missing. A ring makes first attempts only; its completion
//! is handled like the result of an attempt made here with a plain call. This is the only place
//! that continues transfers:
//!
//! - a short transfer is continued from its last position rounded down to the backing's alignment:
//!   bytes in between are transferred twice, which is harmless;
//! - EINTR is retried at once, EAGAIN after a short sleep; both a bounded number of times;
//! - a write that makes no progress is an error (`WriteZero`). A read that makes none has reached
//!   the end of file: certainly if it returned nothing, otherwise if the backing's length confirms
//!   it. (A backing that was continued before the position it had reached may have stopped short of
//!   that position a second time; taking that for the end of file would turn the rest of the file
//!   into zeros.)
//!
//! Nothing here retries anything else, or decides what an error means for a page.
//!
//! Longer than 600 lines only with its tests, which use its private items.
//!
//! # Safety
//! Creates buffers from the pieces of a transfer: `push` requires IO-1 for all of them until the
//! transfer is complete.
#![allow(unsafe_code)]

use super::buf::Span;
use super::{DirectBacking, FallocateMode, IoBuf, IoBufMut};
use crate::error::{Error, io_error, of_range};
use crate::sync::{Ordering, blocking, fence};
use smallvec::SmallVec;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;
use std::{io, slice, thread};

/// Consecutive interruptions before EINTR is returned: a backing that always returns EINTR is
/// broken.
pub(super) const INTERRUPTIONS_MAX: u32 = 1000;
/// Consecutive refusals (EAGAIN) before one is returned.
pub(super) const REFUSALS_MAX: u32 = 10;
/// Consecutive reads without progress before the end of file after which the backing is considered
/// broken.
pub(super) const STALLS_MAX: u32 = 10;
/// Sleep after the first refusal; it doubles with each, to 51 ms: 102 ms in total.
const REFUSAL_SLEEP_MIN: Duration = Duration::from_micros(100);

/// Fills consecutive buffers from `position_bytes` on. `first` is the result of the first attempt,
/// if it was already made. Returns the number of bytes before the end of file.
pub(super) fn read_full(
    backing: &dyn DirectBacking,
    targets: &mut [IoBufMut<'_>],
    position_bytes: u64,
    mut first: Option<io::Result<usize>>,
) -> Result<usize, Error> {
    let length = targets.iter().map(IoBufMut::len).sum();
    let granule = backing.alignment().granule_bytes();
    let whole = Range { position_bytes, length };
    let fail = |done, source| whole.error(backing, Operation::Read, done, source);
    range_end(position_bytes, length).map_err(|error| fail(0, error))?;
    let (mut done, mut stalls) = (0, 0);
    while done < length {
        let restart = round_down(done, granule);
        let attempt = || read_once(backing, targets, restart, position_bytes);
        let count = persist(first.take(), attempt)
            .and_then(|count| check_count(count, length - restart))
            .map_err(|error| fail(done, error))?;
        let reached = restart + count;
        if reached > done {
            (done, stalls) = (reached, 0);
        } else if count == 0 || position_bytes + reached as u64 >= len_bytes(backing)? {
            // Fewer than before: the file was truncated meanwhile.
            return Ok(reached);
        } else if stalls == STALLS_MAX {
            return Err(fail(done, io::ErrorKind::UnexpectedEof.into()));
        } else {
            stalls += 1;
        }
    }
    Ok(done)
}

/// Writes consecutive buffers at `position_bytes`. `first` is the result of the first attempt, if
/// it was already made. Returns the length of the buffers.
pub(super) fn write_full(
    backing: &dyn DirectBacking,
    sources: &[IoBuf<'_>],
    position_bytes: u64,
    mut first: Option<io::Result<usize>>,
) -> Result<usize, Error> {
    let length = sources.iter().map(IoBuf::len).sum();
    let granule = backing.alignment().granule_bytes();
    let whole = Range { position_bytes, length };
    let fail = |done, source| whole.error(backing, Operation::Write, done, source);
    range_end(position_bytes, length).map_err(|error| fail(0, error))?;
    let mut done = 0;
    while done < length {
        let restart = round_down(done, granule);
        let attempt = || write_once(backing, sources, restart, position_bytes);
        let count = persist(first.take(), attempt)
            .and_then(|count| check_count(count, length - restart))
            .map_err(|error| fail(done, error))?;
        if restart + count <= done {
            return Err(fail(done, io::ErrorKind::WriteZero.into()));
        }
        done = restart + count;
    }
    Ok(done)
}

/// Makes one attempt at the buffers without their first `skipped` bytes.
fn read_once(
    backing: &dyn DirectBacking,
    targets: &mut [IoBufMut<'_>],
    skipped: usize,
    position_bytes: u64,
) -> io::Result<usize> {
    // Release: pairs with the Acquire fence in `read_validated` (READ-O3): an optimistic reader of
    // the previous use of the memory that sees a byte which is written here sees its Entry changed.
    // (Another thread may have removed the Entry.)
    fence(Ordering::Release);
    let position_bytes = position_bytes + skipped as u64;
    match targets {
        [only] => backing.read_at(&mut only.suffix(skipped), position_bytes),
        _ if skipped == 0 => backing.read_vectored_at(targets, position_bytes),
        _ => {
            let length = targets.iter().map(IoBufMut::len).sum();
            backing.read_vectored_at(&mut IoBufMut::part(targets, skipped..length), position_bytes)
        }
    }
}

/// Makes one attempt at the buffers without their first `skipped` bytes.
fn write_once(
    backing: &dyn DirectBacking,
    sources: &[IoBuf<'_>],
    skipped: usize,
    position_bytes: u64,
) -> io::Result<usize> {
    let position_bytes = position_bytes + skipped as u64;
    match sources {
        [only] => backing.write_at(&only.suffix(skipped), position_bytes),
        _ if skipped == 0 => backing.write_vectored_at(sources, position_bytes),
        _ => {
            let length = sources.iter().map(IoBuf::len).sum();
            backing.write_vectored_at(&IoBuf::part(sources, skipped..length), position_bytes)
        }
    }
}

pub(crate) fn sync_data(backing: &dyn DirectBacking) -> Result<(), Error> {
    blocking::check("a sync");
    persist(None, || backing.sync_data())
        .map_err(|error| io_error(backing.describe(), "sync of data", None, error))
}

/// Makes everything written before and the metadata of the file durable.
pub(crate) fn sync_all(backing: &dyn DirectBacking) -> Result<(), Error> {
    blocking::check("a sync");
    persist(None, || backing.sync_all())
        .map_err(|error| io_error(backing.describe(), "sync", None, error))
}

pub(crate) fn set_len(backing: &dyn DirectBacking, length_bytes: u64) -> Result<(), Error> {
    let fail = |error| {
        let operation = format!("change of length to {length_bytes} bytes");
        io_error(backing.describe(), operation, None, error)
    };
    range_end(length_bytes, 0).map_err(fail)?;
    persist(None, || backing.set_len(length_bytes)).map_err(fail)
}

pub(crate) fn fallocate(
    backing: &dyn DirectBacking,
    mode: FallocateMode,
    bytes: std::ops::Range<u64>,
) -> Result<(), Error> {
    persist(None, || backing.fallocate(mode, bytes.clone())).map_err(|source| {
        let operation = match mode {
            FallocateMode::Allocate | FallocateMode::AllocateKeepLen => "allocation",
            FallocateMode::PunchHole => "punch of a hole",
            FallocateMode::ZeroRange => "zeroing",
        };
        let operation = format!("{operation} of {}", of_range(&bytes));
        io_error(backing.describe(), operation, Some(bytes.clone()), source)
    })
}

pub(crate) fn seek_data(backing: &dyn DirectBacking, position: u64) -> Result<Option<u64>, Error> {
    persist(None, || backing.seek_data(position))
        .map_err(|error| seek_error(backing, "data", position, error))
}

pub(crate) fn seek_hole(backing: &dyn DirectBacking, position: u64) -> Result<Option<u64>, Error> {
    persist(None, || backing.seek_hole(position))
        .map_err(|error| seek_error(backing, "a hole", position, error))
}

pub(crate) fn len_bytes(backing: &dyn DirectBacking) -> Result<u64, Error> {
    persist(None, || backing.len_bytes())
        .map_err(|error| io_error(backing.describe(), "query of the length", None, error))
}

/// Repeats the call until the result is neither EINTR nor EAGAIN, or was so too often. `first` is
/// the result of the first call, if it was already made.
fn persist<T>(
    mut first: Option<io::Result<T>>,
    mut call: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let (mut interruptions, mut refusals) = (0, 0);
    loop {
        let answer = first.take().unwrap_or_else(&mut call);
        match answer.as_ref().map_err(io::Error::kind).err() {
            Some(io::ErrorKind::Interrupted) if interruptions < INTERRUPTIONS_MAX => {
                interruptions += 1;
            }
            Some(io::ErrorKind::WouldBlock) if refusals < REFUSALS_MAX => {
                thread::sleep(REFUSAL_SLEEP_MIN * (1 << refusals));
                refusals += 1;
            }
            _ => return answer,
        }
    }
}

/// Fails if a backing claims more than was requested: it is broken, and its results are useless.
fn check_count(count: usize, asked: usize) -> io::Result<usize> {
    if count <= asked {
        return Ok(count);
    }
    let problem = format!("the backing reports {count} bytes for a request of {asked}");
    Err(io::Error::new(io::ErrorKind::InvalidData, problem))
}

/// Position and length of a transfer, for errors.
struct Range {
    position_bytes: u64,
    length: usize,
}

impl Range {
    /// Returns the error of the transfer after `done` of its bytes.
    fn error(
        &self,
        backing: &dyn DirectBacking,
        operation: Operation,
        done: usize,
        source: io::Error,
    ) -> Error {
        let position_bytes = self.position_bytes.saturating_add(done as u64);
        let left = position_bytes..position_bytes.saturating_add((self.length - done) as u64);
        let operation = format!("{} of {}", operation.name(), of_range(&left));
        io_error(backing.describe(), operation, Some(left), source)
    }
}

fn seek_error(
    backing: &dyn DirectBacking,
    wanted: &str,
    position: u64,
    source: io::Error,
) -> Error {
    let operation = format!("search for {wanted} from position {position}");
    io_error(backing.describe(), operation, Some(position..position), source)
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// From the storage to memory.
    Read,
    /// From memory to the storage.
    Write,
}

impl Operation {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// A transfer that is about to be made, for [`DirectBacking::submission`], or was made, for
/// [`DirectBacking::completed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IoRequest {
    /// Its direction.
    pub operation: Operation,
    /// Position of the first byte.
    pub position_bytes: u64,
    /// Length in bytes.
    pub length_bytes: usize,
    /// The transfer's natural alignment, up to 4096: of its addresses in memory; of its position,
    /// and of the lengths of its buffers except the last.
    pub alignment: Alignment,
}

impl IoRequest {
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

    /// Returns `true` if the transfer satisfies the alignment `needed`.
    pub(super) fn fits(&self, needed: Alignment) -> bool {
        self.alignment.memory_bytes >= needed.memory_bytes
            && self.alignment.offset_bytes >= needed.offset_bytes
    }
}

/// File and length of a transfer that the cache makes itself.
#[derive(Clone, Copy, Debug)]
pub struct Submission<'a> {
    /// The file, at the positions of the transfer.
    pub file: BorrowedFd<'a>,
    /// Number of bytes, from the first on: at least one, at most all. The cache transfers the rest
    /// with `*_at`.
    pub length_bytes: usize,
}

/// Maximum alignment of a backing: frames and folios start at multiples of this.
pub(crate) const ALIGNMENT_BYTES_MAX: u64 = 4096;

/// Largest position: the kernel's positions are signed.
pub(crate) const POSITION_BYTES_MAX: u64 = i64::MAX as u64;

/// Required alignment of transfers: powers of two from 1 to 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Alignment of addresses in memory.
    pub memory_bytes: u64,
    /// Alignment of positions and lengths.
    pub offset_bytes: u64,
}

impl Alignment {
    /// No requirement.
    pub const NONE: Self = Self { memory_bytes: 1, offset_bytes: 1 };

    /// Returns `true` if both are powers of two that frames and folios can satisfy.
    pub(crate) fn is_valid(self) -> bool {
        [self.memory_bytes, self.offset_bytes]
            .into_iter()
            .all(|bytes| bytes.is_power_of_two() && bytes <= ALIGNMENT_BYTES_MAX)
    }

    /// Returns the distance between positions where a transfer can be continued.
    pub(crate) fn granule_bytes(self) -> u64 {
        self.memory_bytes.max(self.offset_bytes)
    }
}

/// Returns the end of a range, if it is below 2^63.
pub(crate) fn range_end(position_bytes: u64, length: usize) -> io::Result<u64> {
    let length_bytes = length as u64;
    position_bytes.checked_add(length_bytes).filter(|end| *end <= POSITION_BYTES_MAX).ok_or_else(
        || {
            let problem =
                format!("{length_bytes} bytes at position {position_bytes} do not end below 2^63");
            io::Error::new(io::ErrorKind::InvalidInput, problem)
        },
    )
}

/// Rounds `value` down to a multiple of `granule`, a power of two.
pub(crate) fn round_down(value: usize, granule: u64) -> usize {
    debug_assert!(granule.is_power_of_two());
    value & !(granule as usize - 1)
}

/// A read or write of some bytes of a backing.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) backing: Arc<dyn DirectBacking>,
    pub(crate) operation: Operation,
    pub(crate) position_bytes: u64,
    pub(crate) pieces: Pieces,
}

/// Result of a transfer: bytes before the end of file, or all bytes of a write.
pub(crate) type Answer = Result<usize, Error>;

impl Transfer {
    pub(super) fn request(&self) -> IoRequest {
        IoRequest::new(self.operation, self.position_bytes, self.pieces.spans())
    }

    /// Makes the whole transfer with plain calls.
    ///
    /// # Safety
    /// IO-1 must hold for the pieces.
    pub(super) unsafe fn run(self) -> Answer {
        // SAFETY: the caller's contract.
        unsafe { self.finish(|_| None) }
    }

    /// Acts as [`Self::run`], for a thread that has no queue.
    ///
    /// # Safety
    /// IO-1 must hold for the pieces.
    pub(crate) unsafe fn run_alone(self) -> Answer {
        blocking::check_in_queue("a transfer", 0);
        blocking::note_pushed();
        // SAFETY: the caller's contract.
        let answer = unsafe { self.run() };
        blocking::note_handed_out(1);
        answer
    }

    /// Completes a transfer whose first attempt was made by a ring, with result `answer`.
    ///
    /// # Safety
    /// IO-1 must hold for the pieces; the ring no longer accesses them.
    pub(super) unsafe fn continue_after(
        self,
        request: &IoRequest,
        answer: io::Result<usize>,
    ) -> Answer {
        // SAFETY: the caller's contract.
        unsafe { self.finish(|backing| Some(backing.completed(request, answer))) }
    }

    /// # Safety
    /// IO-1 must hold for the pieces.
    unsafe fn finish(
        mut self,
        first: impl FnOnce(&dyn DirectBacking) -> Option<io::Result<usize>>,
    ) -> Answer {
        let backing = Arc::clone(&self.backing);
        let position = self.position_bytes;
        let first = first(&*backing);
        match self.operation {
            Operation::Write => {
                // SAFETY: IO-1, the caller's contract.
                let sources = unsafe { self.pieces.sources() };
                write_full(&*backing, sources, position, first)
            }
            Operation::Read => {
                // SAFETY: IO-1, the caller's contract.
                let targets = unsafe { self.pieces.targets() };
                read_full(&*backing, targets, position, first)
            }
        }
    }
}

/// Maximum pages per transfer, unless a single folio is larger: 1 MiB. This also bounds the number
/// of pieces.
pub(crate) const RUN_PAGES_MAX: u64 = 256;

/// The memory of one transfer: ranges of frames, in file order. Folios in adjacent frames form one
/// piece.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    spans: SmallVec<[Span; 1]>,
}

impl Pieces {
    /// Collects the first `length_bytes` bytes of `parts`, pairs of address and length.
    pub(crate) fn of(length_bytes: u64, parts: impl Iterator<Item = (*mut u8, u64)>) -> Self {
        let mut pieces = Self::default();
        let mut left_bytes = length_bytes;
        for (start, part_bytes) in parts {
            let part_bytes = left_bytes.min(part_bytes);
            let start = NonNull::new(start).expect("frames are not at address 0");
            pieces.push(start, part_bytes as usize);
            left_bytes -= part_bytes;
        }
        pieces
    }

    /// Appends `length_bytes` bytes of frame memory at `start`.
    pub(crate) fn push(&mut self, start: NonNull<u8>, length_bytes: usize) {
        match self.spans.last_mut() {
            Some(last) if last.end() == start.as_ptr() => last.grow(length_bytes),
            _ => self.spans.push(Span::new(start, length_bytes)),
        }
        debug_assert!(self.spans.len() as u64 <= RUN_PAGES_MAX, "too many pieces");
    }

    /// Returns the pieces. Several pieces are on the heap: their address does not change when the
    /// value moves.
    pub(super) fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Returns the pieces as buffers to be filled.
    ///
    /// # Safety
    /// IO-1 must hold for all of them while the buffers exist, and these must be the only writers.
    pub(super) unsafe fn targets(&mut self) -> &mut [IoBufMut<'_>] {
        let spans = self.spans.as_mut_slice();
        // SAFETY: an `IoBufMut` is a transparent `Span`; they are borrowed uniquely as long as the
        // result exists.
        unsafe { slice::from_raw_parts_mut(spans.as_mut_ptr().cast(), spans.len()) }
    }

    /// Returns the pieces as buffers to be stored.
    ///
    /// # Safety
    /// IO-1 must hold for all of them while the buffers exist.
    pub(super) unsafe fn sources(&self) -> &[IoBuf<'_>] {
        let spans = self.spans.as_slice();
        // SAFETY: an `IoBuf` is a transparent `Span`; they are borrowed as long as the result.
        unsafe { slice::from_raw_parts(spans.as_ptr().cast(), spans.len()) }
    }
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
        let end_of = |position, length| range_end(position, length).unwrap();
        assert_eq!(end_of(0, 0), 0);
        assert_eq!(end_of(POSITION_BYTES_MAX, 0), POSITION_BYTES_MAX);
        assert_eq!(end_of(POSITION_BYTES_MAX - 1, 1), POSITION_BYTES_MAX);
        for (position_bytes, length) in
            [(POSITION_BYTES_MAX, 1), (1 << 63, 0), (u64::MAX, 1), (u64::MAX, usize::MAX)]
        {
            let error = range_end(position_bytes, length).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            let text = format!("{length} bytes at position {position_bytes} do not end below 2^63");
            assert_eq!(error.to_string(), text);
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

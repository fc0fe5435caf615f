//! Whole transfers: a [`Transfer`] with the memory it moves, composed of a backing's single
//! attempts.
//!
//! `file` and `writeback` push transfers into the engine's queues, and call the functions for syncs
//! and lengths; this file calls a [`Backing`]. Each operation ends complete, or with one
//! [`IoError`] that says what is missing. A ring makes first attempts only; its completion is
//! handled like the result of an attempt made here with a plain call. This is the only place that
//! continues transfers:
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
//! # Safety
//! Creates buffers from the pieces of a transfer: `push` requires IO-1 for all of them until the
//! transfer is complete.
#![allow(unsafe_code)]

use super::backing::{range_end, round_down};
use super::buf::Span;
use super::{Backing, IoBuf, IoBufMut, IoError, IoRequest, Operation};
use crate::sync::{Ordering, blocking, fence};
use smallvec::SmallVec;
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
    backing: &dyn Backing,
    targets: &mut [IoBufMut<'_>],
    position_bytes: u64,
    mut first: Option<io::Result<usize>>,
) -> Result<usize, IoError> {
    let length = targets.iter().map(IoBufMut::len).sum();
    let granule = backing.alignment().granule_bytes();
    let whole = Range { position_bytes, length };
    let fail = |done, source| whole.error(backing, Operation::Read, done, source);
    range_end(position_bytes, length).map_err(|error| fail(0, error.into()))?;
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
    backing: &dyn Backing,
    sources: &[IoBuf<'_>],
    position_bytes: u64,
    mut first: Option<io::Result<usize>>,
) -> Result<usize, IoError> {
    let length = sources.iter().map(IoBuf::len).sum();
    let granule = backing.alignment().granule_bytes();
    let whole = Range { position_bytes, length };
    let fail = |done, source| whole.error(backing, Operation::Write, done, source);
    range_end(position_bytes, length).map_err(|error| fail(0, error.into()))?;
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
    backing: &dyn Backing,
    targets: &mut [IoBufMut<'_>],
    skipped: usize,
    position_bytes: u64,
) -> io::Result<usize> {
    // Release: pairs with the Acquire fence in `read_validated` (O3): an optimistic reader of the
    // previous use of the memory that sees a byte which is written here sees its Entry changed.
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
    backing: &dyn Backing,
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

/// Makes everything written before durable.
pub(crate) fn sync_data(backing: &dyn Backing) -> Result<(), IoError> {
    blocking::check("a sync");
    persist(None, || backing.sync_data())
        .map_err(|error| plain_error(backing, Operation::SyncData, 0, error))
}

/// Makes everything written before and the metadata of the file durable.
pub(crate) fn sync_all(backing: &dyn Backing) -> Result<(), IoError> {
    blocking::check("a sync");
    persist(None, || backing.sync_all())
        .map_err(|error| plain_error(backing, Operation::SyncAll, 0, error))
}

/// Truncates or extends the file.
pub(crate) fn set_len(backing: &dyn Backing, length_bytes: u64) -> Result<(), IoError> {
    let fail = |error| plain_error(backing, Operation::SetLen, length_bytes, error);
    range_end(length_bytes, 0).map_err(|error| fail(error.into()))?;
    persist(None, || backing.set_len(length_bytes)).map_err(fail)
}

/// Allocates storage.
pub(crate) fn allocate(backing: &dyn Backing, bytes: std::ops::Range<u64>) -> io::Result<()> {
    persist(None, || backing.allocate(bytes.clone()))
}

/// Returns the length of the file.
pub(crate) fn len_bytes(backing: &dyn Backing) -> Result<u64, IoError> {
    persist(None, || backing.len_bytes())
        .map_err(|error| plain_error(backing, Operation::Len, 0, error))
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
        backing: &dyn Backing,
        operation: Operation,
        done: usize,
        source: io::Error,
    ) -> IoError {
        IoError {
            file: backing.describe(),
            operation,
            position_bytes: self.position_bytes.saturating_add(done as u64),
            length_bytes: (self.length - done) as u64,
            source,
        }
    }
}

fn plain_error(
    backing: &dyn Backing,
    operation: Operation,
    position_bytes: u64,
    source: io::Error,
) -> IoError {
    IoError { file: backing.describe(), operation, position_bytes, length_bytes: 0, source }
}

/// A read or write of some bytes of a backing.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// The backing that stores the bytes.
    pub(crate) backing: Arc<dyn Backing>,
    /// [`Operation::Read`] or [`Operation::Write`].
    pub(crate) operation: Operation,
    /// Position of the first byte.
    pub(crate) position_bytes: u64,
    /// The memory to fill or to store.
    pub(crate) pieces: Pieces,
}

/// Result of a transfer: bytes before the end of file, or all bytes of a write.
pub(super) type Answer = Result<usize, IoError>;

impl Transfer {
    /// Returns the request to the backing.
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
        first: impl FnOnce(&dyn Backing) -> Option<io::Result<usize>>,
    ) -> Answer {
        let backing = Arc::clone(&self.backing);
        let position = self.position_bytes;
        let first = first(&*backing);
        if self.operation == Operation::Write {
            // SAFETY: IO-1, the caller's contract.
            let sources = unsafe { self.pieces.sources() };
            write_full(&*backing, sources, position, first)
        } else {
            // SAFETY: IO-1, the caller's contract.
            let targets = unsafe { self.pieces.targets() };
            read_full(&*backing, targets, position, first)
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

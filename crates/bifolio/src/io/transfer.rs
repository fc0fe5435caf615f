//! Whole transfers: a [`Transfer`] with the memory it moves, and how one is made of a backing's
//! single attempts.
//!
//! Pushed into the engine's queues by `file` and `writeback`, which also call the functions for
//! syncs and lengths; calls a [`Backing`]. Each ends with everything done, or with one [`IoError`]
//! that says what was left. A ring makes first attempts only; its answer is taken as if the attempt
//! had been made here, with a plain call. This is the one place that continues transfers:
//!
//! - a short transfer is continued from the last place where the backing can be taken up again,
//!   its alignment rounded down: bytes in between are transferred twice, which is harmless;
//! - EINTR is tried again at once, EAGAIN after a short sleep; both a bounded number of times;
//! - a write that makes no progress is an error (`WriteZero`). A read that makes none has come to
//!   the end: surely if it got nothing, otherwise if the backing's length says so. (A backing that
//!   was taken up before the place it had reached may have stopped short of it a second time, and
//!   taking that for the end would turn the rest of the file into zeros.)
//!
//! Nothing here retries anything else, or decides what an error means for a page.
//!
//! # Safety
//! Makes buffers of a transfer's pieces: IO-1 is promised for all of them when the transfer is
//! pushed, until it is complete.
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

/// Interruptions in a row before one is passed on; a backing that always answers EINTR is broken.
pub(super) const INTERRUPTIONS_MAX: u32 = 1000;
/// Refusals (EAGAIN) in a row before one is passed on.
pub(super) const REFUSALS_MAX: u32 = 10;
/// Reads in a row that got no further, and not to the end, before the backing is called broken.
pub(super) const STALLS_MAX: u32 = 10;
/// The sleep after the first refusal; it doubles with each, to 51 ms: 102 ms altogether.
const REFUSAL_SLEEP_MIN: Duration = Duration::from_micros(100);

/// Fills a row of buffers, one behind the other, from `position_bytes` on. `first` is the answer
/// to the first attempt, if it has been made already. Returns how many bytes there were before the
/// end.
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
            // Less than before means that somebody cut the file meanwhile.
            return Ok(reached);
        } else if stalls == STALLS_MAX {
            return Err(fail(done, io::ErrorKind::UnexpectedEof.into()));
        } else {
            stalls += 1;
        }
    }
    Ok(done)
}

/// Writes a row of buffers, one behind the other, at `position_bytes`. `first` is the answer to the
/// first attempt, if it has been made already. Returns how many bytes the row has.
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

/// One attempt at all of the row but the first `skipped` bytes.
fn read_once(
    backing: &dyn Backing,
    targets: &mut [IoBufMut<'_>],
    skipped: usize,
    position_bytes: u64,
) -> io::Result<usize> {
    // Release: pairs with the Acquire fence in `read_validated` (O3): an optimistic reader of the
    // memory's last life that sees a byte which is written here sees that its Entry is gone. (The
    // thread that took the Entry away may be another one.)
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

/// One attempt at all of the row but the first `skipped` bytes.
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

/// Makes everything written before durable, and the file's metadata.
pub(crate) fn sync_all(backing: &dyn Backing) -> Result<(), IoError> {
    blocking::check("a sync");
    persist(None, || backing.sync_all())
        .map_err(|error| plain_error(backing, Operation::SyncAll, 0, error))
}

/// Cuts or grows the file.
pub(crate) fn set_len(backing: &dyn Backing, length_bytes: u64) -> Result<(), IoError> {
    let fail = |error| plain_error(backing, Operation::SetLen, length_bytes, error);
    range_end(length_bytes, 0).map_err(|error| fail(error.into()))?;
    persist(None, || backing.set_len(length_bytes)).map_err(fail)
}

/// Sets storage aside.
pub(crate) fn allocate(backing: &dyn Backing, bytes: std::ops::Range<u64>) -> io::Result<()> {
    persist(None, || backing.allocate(bytes.clone()))
}

/// Asks how long the file is.
pub(crate) fn len_bytes(backing: &dyn Backing) -> Result<u64, IoError> {
    persist(None, || backing.len_bytes())
        .map_err(|error| plain_error(backing, Operation::Len, 0, error))
}

/// Calls until the answer is neither EINTR nor EAGAIN, or has been so too often; `first` is the
/// answer to the first call, if it has been made.
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

/// A backing that claims more than it was asked for is broken; nothing it said can be used.
fn check_count(count: usize, asked: usize) -> io::Result<usize> {
    if count <= asked {
        return Ok(count);
    }
    let problem = format!("the backing says {count} bytes, of {asked} it was asked for");
    Err(io::Error::new(io::ErrorKind::InvalidData, problem))
}

/// The pieces of a transfer.
struct Range {
    position_bytes: u64,
    length: usize,
}

impl Range {
    /// The error after `done` bytes of it.
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

/// Bytes that are to go from a backing to memory or the other way.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// The storage of the bytes.
    pub(crate) backing: Arc<dyn Backing>,
    /// [`Operation::Read`] or [`Operation::Write`].
    pub(crate) operation: Operation,
    /// The first byte.
    pub(crate) position_bytes: u64,
    /// The memory.
    pub(crate) pieces: Pieces,
}

/// The result of a transfer: bytes before the end of a file, or all bytes of a write.
pub(super) type Answer = Result<usize, IoError>;

impl Transfer {
    /// The request to the backing.
    pub(super) fn request(&self) -> IoRequest {
        IoRequest::new(self.operation, self.position_bytes, self.pieces.spans())
    }

    /// Makes the whole transfer with plain calls.
    ///
    /// # Safety
    /// IO-1 holds for the pieces.
    pub(super) unsafe fn run(self) -> Answer {
        // SAFETY: the caller's contract.
        unsafe { self.finish(|_| None) }
    }

    /// Ends a transfer whose first attempt, made by a ring, was answered by `answer`.
    ///
    /// # Safety
    /// IO-1 holds for the pieces; the ring is done with them.
    pub(super) unsafe fn continue_after(
        self,
        request: &IoRequest,
        answer: io::Result<usize>,
    ) -> Answer {
        // SAFETY: the caller's contract.
        unsafe { self.finish(|backing| Some(backing.completed(request, answer))) }
    }

    /// # Safety
    /// IO-1 holds for the pieces.
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

/// The most pages one transfer moves, unless a single folio has more: 1 MiB. So it has no more
/// pieces, either.
pub(crate) const RUN_PAGES_MAX: u64 = 256;

/// The memory of one transfer: runs of frames, in the order of the bytes. Folios whose frames
/// follow each other make one piece.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    spans: SmallVec<[Span; 1]>,
}

impl Pieces {
    /// Those of memory, each with its length, that have `length_bytes` bytes together.
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

    /// Adds `length_bytes` bytes of frame memory at `start`, behind what there is.
    pub(crate) fn push(&mut self, start: NonNull<u8>, length_bytes: usize) {
        match self.spans.last_mut() {
            Some(last) if last.end() == start.as_ptr() => last.grow(length_bytes),
            _ => self.spans.push(Span::new(start, length_bytes)),
        }
        debug_assert!(self.spans.len() as u64 <= RUN_PAGES_MAX, "too many pieces");
    }

    /// The pieces as they are. A row of several lies on the heap: it stays where it is when the
    /// pieces move.
    pub(super) fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The pieces as buffers to be filled.
    ///
    /// # Safety
    /// IO-1 holds for all of them while the buffers live, which are the only writers.
    pub(super) unsafe fn targets(&mut self) -> &mut [IoBufMut<'_>] {
        let spans = self.spans.as_mut_slice();
        // SAFETY: an `IoBufMut` is a transparent `Span`; they are borrowed uniquely as long as the
        // result lives.
        unsafe { slice::from_raw_parts_mut(spans.as_mut_ptr().cast(), spans.len()) }
    }

    /// The pieces as buffers to be stored.
    ///
    /// # Safety
    /// IO-1 holds for all of them while the buffers live.
    pub(super) unsafe fn sources(&self) -> &[IoBuf<'_>] {
        let spans = self.spans.as_slice();
        // SAFETY: an `IoBuf` is a transparent `Span`; they are borrowed as long as the result.
        unsafe { slice::from_raw_parts(spans.as_ptr().cast(), spans.len()) }
    }
}

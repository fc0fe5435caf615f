//! Whole transfers: a [`Transfer`] with the memory it moves, composed of a backing's single
//! attempts.
//!
//! Each operation ends complete, or with one [`Error`] that says what is missing. A ring makes
//! first attempts only. This is the only place that continues transfers:
//!
//! - a short transfer is continued from its last position rounded down to the backing's alignment:
//!   bytes in between are transferred twice, which is harmless;
//! - EINTR is retried at once, EAGAIN after a short sleep; both a bounded number of times;
//! - a write that makes no progress is an error (`WriteZero`). A read that makes none has reached
//!   the end of file: certainly if it returned nothing, otherwise if the backing's length confirms
//!   it. (A backing that was continued before the position it had reached may have stopped short of
//!   that position a second time.)
//!
//! # Safety
//! Creates buffers from the pieces of a transfer: `push` requires IO-1 for all of them until the
//! transfer is complete.
#![allow(unsafe_code)]

use super::request::{Span, range_end, round_down};
use super::{DirectBacking, FallocateMode, IoBuf, IoBufMut, IoRequest, Operation};
use crate::error::{Error, io_error, of_range};
use crate::sync::{Ordering, blocking, fence};
use crate::sys::Retries;
use smallvec::SmallVec;
use std::fmt::Display;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::{io, slice};

/// Consecutive refusals (EAGAIN) of a backing before one is returned: 102 ms of sleep in total.
pub(super) const REFUSALS_MAX: u32 = 10;
/// Consecutive reads without progress before the end of file after which the backing is considered
/// broken.
pub(super) const STALLS_MAX: u32 = 10;

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
    let range = (position_bytes, length);
    let fail = |done, source| transfer_error(backing, Operation::Read, range, done, source);
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
    let range = (position_bytes, length);
    let fail = |done, source| transfer_error(backing, Operation::Write, range, done, source);
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

/// Makes one attempt to read into the buffers, without their first `skipped` bytes.
fn read_once(
    backing: &dyn DirectBacking,
    targets: &mut [IoBufMut<'_>],
    skipped: usize,
    position_bytes: u64,
) -> io::Result<usize> {
    if skipped > 0 {
        let length = targets.iter().map(IoBufMut::len).sum();
        let part = &mut IoBufMut::part(targets, skipped..length);
        return read_once(backing, part, 0, position_bytes + skipped as u64);
    }
    // Release: pairs with the Acquire fence in `read_validated` (READ-O3): an optimistic reader of
    // the previous use of the memory that sees a byte which is written here sees its Entry changed.
    // (Another thread may have removed the Entry.)
    fence(Ordering::Release);
    match targets {
        [only] => backing.read_at(only, position_bytes),
        _ => backing.read_vectored_at(targets, position_bytes),
    }
}

/// Makes one attempt to write the buffers, without their first `skipped` bytes.
fn write_once(
    backing: &dyn DirectBacking,
    sources: &[IoBuf<'_>],
    skipped: usize,
    position_bytes: u64,
) -> io::Result<usize> {
    if skipped > 0 {
        let length = sources.iter().map(IoBuf::len).sum();
        let part = &IoBuf::part(sources, skipped..length);
        return write_once(backing, part, 0, position_bytes + skipped as u64);
    }
    match sources {
        [only] => backing.write_at(only, position_bytes),
        _ => backing.write_vectored_at(sources, position_bytes),
    }
}

pub(crate) fn sync_data(backing: &dyn DirectBacking) -> Result<(), Error> {
    blocking::check("a sync");
    call(backing, "sync of data", None, || backing.sync_data())
}

pub(crate) fn sync_all(backing: &dyn DirectBacking) -> Result<(), Error> {
    blocking::check("a sync");
    call(backing, "sync", None, || backing.sync_all())
}

pub(crate) fn set_len(backing: &dyn DirectBacking, length_bytes: u64) -> Result<(), Error> {
    call(backing, format_args!("change of length to {length_bytes} bytes"), None, || {
        range_end(length_bytes, 0)?;
        backing.set_len(length_bytes)
    })
}

pub(crate) fn fallocate(
    backing: &dyn DirectBacking,
    mode: FallocateMode,
    bytes: Range<u64>,
) -> Result<(), Error> {
    let operation = match mode {
        FallocateMode::Allocate | FallocateMode::AllocateKeepLen => "allocation",
        FallocateMode::PunchHole => "punch of a hole",
        FallocateMode::ZeroRange => "zeroing",
    };
    let operation = format!("{operation} of {}", of_range(&bytes));
    call(backing, operation, Some(bytes.clone()), || backing.fallocate(mode, bytes.clone()))
}

pub(crate) fn seek_data(backing: &dyn DirectBacking, position: u64) -> Result<Option<u64>, Error> {
    let operation = format_args!("search for data from position {position}");
    call(backing, operation, Some(position..position), || backing.seek_data(position))
}

pub(crate) fn seek_hole(backing: &dyn DirectBacking, position: u64) -> Result<Option<u64>, Error> {
    let operation = format_args!("search for a hole from position {position}");
    call(backing, operation, Some(position..position), || backing.seek_hole(position))
}

pub(crate) fn len_bytes(backing: &dyn DirectBacking) -> Result<u64, Error> {
    call(backing, "query of the length", None, || backing.len_bytes())
}

/// Makes a call of the backing that is no transfer; the error names it and its range.
fn call<T>(
    backing: &dyn DirectBacking,
    operation: impl Display,
    range: Option<Range<u64>>,
    call: impl FnMut() -> io::Result<T>,
) -> Result<T, Error> {
    persist(None, call).map_err(|source| io_error(backing.describe(), operation, range, source))
}

/// Repeats the call until the result is neither EINTR nor EAGAIN, or was so too often. `first` is
/// the result of the first call, if it was already made.
fn persist<T>(
    mut first: Option<io::Result<T>>,
    mut call: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let mut retries = Retries::FEW;
    retries.refusals_left = REFUSALS_MAX;
    loop {
        match first.take().unwrap_or_else(&mut call) {
            Err(error) if retries.after(&error) => {}
            answer => return answer,
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

fn transfer_error(
    backing: &dyn DirectBacking,
    operation: Operation,
    (position_bytes, length): (u64, usize),
    done: usize,
    source: io::Error,
) -> Error {
    let start = position_bytes.saturating_add(done as u64);
    let left = start..start.saturating_add((length - done) as u64);
    let operation = format!("{} of {}", operation.name(), of_range(&left));
    io_error(backing.describe(), operation, Some(left), source)
}

#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) backing: Arc<dyn DirectBacking>,
    pub(crate) operation: Operation,
    pub(crate) position_bytes: u64,
    pub(crate) pieces: Pieces,
}

/// Result of a transfer: bytes before the end of file, or all bytes of a write.
pub(crate) type TransferResult = Result<usize, Error>;

impl Transfer {
    pub(super) fn request(&self) -> IoRequest {
        IoRequest::new(self.operation, self.position_bytes, self.pieces.spans())
    }

    /// Makes the transfer with plain calls: the whole, or what is left after the `first` attempt.
    ///
    /// # Safety
    /// IO-1 must hold for the pieces; no ring accesses them.
    pub(super) unsafe fn run(mut self, first: Option<io::Result<usize>>) -> TransferResult {
        let (backing, position) = (&*self.backing, self.position_bytes);
        match self.operation {
            Operation::Write => {
                // SAFETY: IO-1, the caller's contract.
                let sources = unsafe { self.pieces.sources() };
                write_full(backing, sources, position, first)
            }
            Operation::Read => {
                // SAFETY: IO-1, the caller's contract.
                let targets = unsafe { self.pieces.targets() };
                read_full(backing, targets, position, first)
            }
        }
    }

    /// Makes the whole transfer with plain calls, in a thread that has no queue.
    ///
    /// # Safety
    /// IO-1 must hold for the pieces.
    pub(crate) unsafe fn run_alone(self) -> TransferResult {
        blocking::check_in_queue("a transfer", 0);
        blocking::note_pushed();
        // SAFETY: the caller's contract.
        let answer = unsafe { self.run(None) };
        blocking::note_handed_out(1);
        answer
    }
}

/// Maximum pages, and pieces, per transfer, unless a single folio is larger: 1 MiB.
pub(crate) const RUN_PAGES_MAX: u64 = 256;

/// The memory of one transfer: ranges of frames, in file order, merged where they are adjacent.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    spans: SmallVec<[Span; 1]>,
}

impl Pieces {
    /// Collects the first `length_bytes` bytes of `parts`, addresses and lengths.
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

    pub(crate) fn push(&mut self, start: NonNull<u8>, length_bytes: usize) {
        match self.spans.last_mut() {
            Some(last) if last.end() == start.as_ptr() => last.grow(length_bytes),
            _ => self.spans.push(Span::new(start, length_bytes)),
        }
        debug_assert!(self.spans.len() as u64 <= RUN_PAGES_MAX, "too many pieces");
    }

    /// Returns the pieces. Several are on the heap, so that a move does not change their address.
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

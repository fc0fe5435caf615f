//! Whole transfers, made of a backing's single attempts.
//!
//! Called by the engine (`engine/life.rs`), by `writeback` for syncs and lengths; calls a
//! [`Backing`]. Each function ends with everything done, or with one [`IoError`] that says what was
//! left. The first attempt may have been made elsewhere, by a ring: its answer is taken as if it
//! had been made here. This is the one place that continues transfers:
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

use std::io;
use std::thread;
use std::time::Duration;

use super::align::{range_end, round_down};
use super::{Backing, IoBuf, IoBufMut, IoError, Operation};
use crate::sync::blocking;

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
pub(crate) fn read_full(
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
pub(crate) fn write_full(
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

/// What was to be transferred.
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

//! Writes and pins that wait for nothing: an attempt returns what is in the way.
//!
//! A write goes folio by folio, like one that waits (`file/write.rs`), in two steps: the folio is
//! locked, then the bytes are copied. Between the steps the server takes the lock of the call,
//! which its future may take at any time, so nothing is waited for in the second. A write that
//! makes the file longer holds the right to do so for one folio at a time.

use super::super::write::{Growth, Piece, Unwritten};
use super::super::{File, PageRef, read::Obstacle};
use crate::error::Error;
use crate::fill::{AccessMode, Locked, TryFind, Wait};
use crate::inode::NoRoom;
use crate::page::{FolioId, PAGE_SHIFT};
use crate::stats::Counter;
use std::ops::Range;

/// Condition that an attempt needs before it can be made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::file) enum Need {
    /// Nothing: the call is complete.
    Nothing,
    /// Another attempt at once.
    Retry,
    /// The bytes of the next page.
    Page,
    /// The lock of the next folio, or the end of its eviction.
    Lock,
    /// The end of a write-out of this folio.
    WriteOut(FolioId),
    Frames,
    /// Room under the limit of dirty bytes.
    Room,
    /// The right to change the length.
    Length,
    /// A thread of its own: the call may have to wait with locks held.
    Thread,
}

impl From<Obstacle> for Need {
    fn from(obstacle: Obstacle) -> Self {
        match obstacle {
            Obstacle::None => Self::Nothing,
            Obstacle::Absent => Self::Page,
            Obstacle::Busy => Self::Lock,
        }
    }
}

/// Reason why an attempt has not succeeded.
#[derive(Debug)]
pub(super) enum Stopped {
    By(Need),
    Failed(Error),
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

pub(super) type Attempt<T> = std::result::Result<T, Stopped>;

/// A folio that is locked for a piece of a write. If it was made for that and is not written, its
/// drop removes it.
#[derive(Debug)]
pub(super) struct Target<'f> {
    file: &'f File,
    locked: Option<Locked<'f>>,
    growth: Option<Growth<'f>>,
}

impl Target<'_> {
    /// Writes `bytes`, which start at `position`, into the folio.
    pub(super) fn write(mut self, position: u64, bytes: &[u8]) -> Attempt<()> {
        let (file, end) = (self.file, position + bytes.len() as u64);
        // As in `write_folio`, under the folio lock.
        if end > file.len() && self.growth.is_none() {
            return Err(Stopped::By(Need::Retry));
        }
        let piece = Piece { bytes, position, follows: false, lsn: None };
        if let Some(locked) = &self.locked {
            file.copy_into(locked, &piece).map_err(stopped)?;
        }
        if let Some(growth) = &mut self.growth {
            growth.reach(end);
        }
        self.locked = None;
        file.handle.inode.memory.counters.add(Counter::WriteBytes, bytes.len() as u64);
        Ok(())
    }
}

impl Drop for Target<'_> {
    fn drop(&mut self) {
        if let Some(locked) = self.locked.take() {
            self.file.undo_write(locked);
        }
    }
}

impl File {
    /// Returns the part of `bytes` that lies in the folio of its first byte.
    pub(super) fn first_piece(&self, bytes: Range<u64>) -> Range<u64> {
        let folio_end = (bytes.start | (self.folio_bytes() - 1)).saturating_add(1);
        bytes.start..bytes.end.min(folio_end)
    }

    /// Locks the folio that a write replaces `piece` in. Waits for nothing but frames, and for
    /// these only if `wait` allows it.
    pub(super) fn try_lock_target(&self, piece: &Range<u64>, wait: Wait) -> Attempt<Target<'_>> {
        let inode = &self.handle.inode;
        let growth = if piece.end > self.len() {
            if self.handle.waits_to_grow() {
                return Err(Stopped::By(Need::Thread));
            }
            let resizing = inode.try_lock_resizing().ok_or(Stopped::By(Need::Length))?;
            Some(Growth { growing: self.uncover(&resizing, piece.end)?, resizing })
        } else {
            None
        };
        let access = AccessMode::Write { start: piece.start, end: piece.end };
        let found = self.handle.fill().try_lock_folio(piece.start >> PAGE_SHIFT, access, wait)?;
        Ok(Target { file: self, locked: Some(locked_in(found)?), growth })
    }

    /// Writes `bytes` at `position` into a folio that was just read, if the file is long enough.
    pub(super) fn write_to_filled(
        &self,
        locked: &Locked<'_>,
        position: u64,
        bytes: &[u8],
    ) -> Attempt<()> {
        if position + bytes.len() as u64 > self.len() {
            return Err(Stopped::By(Need::Retry));
        }
        let piece = Piece { bytes, position, follows: false, lsn: None };
        self.copy_into(locked, &piece).map_err(stopped)?;
        self.handle.inode.memory.counters.add(Counter::WriteBytes, bytes.len() as u64);
        Ok(())
    }

    /// Pins `range` if its folio is in memory, or can be made without waiting.
    pub(super) fn try_pin<F>(&self, range: &Range<u64>, wait: Wait) -> Attempt<PageRef<'_, F>> {
        if let Some(pin) = self.pin_hit(range) {
            return Ok(pin);
        }
        self.check_pin(range)?;
        if self.handle.fill().absent_at(range.start).is_some() {
            return Err(Stopped::By(Need::Page));
        }
        if let Some(pin) = self.pin_resident(range) {
            return Ok(pin);
        }
        let index = range.start >> PAGE_SHIFT;
        let found = self.handle.fill().try_lock_folio(index, AccessMode::Cache, wait)?;
        let locked = locked_in(found)?;
        self.pin_locked(range, &locked).ok_or(Stopped::By(Need::Retry))
    }
}

fn locked_in(found: TryFind<'_>) -> Attempt<Locked<'_>> {
    Err(Stopped::By(match found {
        TryFind::Locked(locked) => return Ok(locked),
        TryFind::Absent => Need::Page,
        TryFind::Busy => Need::Lock,
        TryFind::WriteOut(folio) => Need::WriteOut(folio.id()),
        TryFind::NoFrame => Need::Frames,
    }))
}

fn stopped(unwritten: Unwritten) -> Stopped {
    match unwritten {
        Unwritten::MustResize => Stopped::By(Need::Retry),
        Unwritten::NoRoom(NoRoom::DirtyLimit) => Stopped::By(Need::Room),
        // Only a write with an LSN needs a larger table of them.
        Unwritten::NoRoom(NoRoom::Lsns) => Stopped::By(Need::Thread),
        Unwritten::Failed(error) => Stopped::Failed(error),
    }
}

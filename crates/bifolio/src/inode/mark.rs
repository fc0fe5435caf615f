//! Marking folios dirty: the room that a folio reserves in the dirty limit, and its LSN if the file
//! has a write gate; and requests to write them soon.

use super::Inode;
use crate::dirt::{ChangeLsn, HeldBack, Lsns, Refusal};
use crate::page::{Folio, FolioId, FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reason why a folio cannot become dirty now. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// The limit of dirty pages is reached.
    DirtyLimit,
    /// The table of LSNs must grow.
    Lsns,
}

/// Reservation for a folio in the dirty limit; released on drop.
#[derive(Debug)]
#[must_use]
pub(crate) struct RoomForDirt<'a> {
    pub(crate) inode: &'a Inode,
    /// Pages that are counted: 0 if the folio is dirty already, or is never written out.
    pub(crate) counted_pages: u64,
}

impl RoomForDirt<'_> {
    /// Marks the folio dirty. The caller has kept its lock since [`Inode::make_room`].
    pub(crate) fn mark_dirty(mut self, folio: &FolioRef<'_>, locked: &LockedFolio<'_>) {
        let inode = self.inode;
        if std::mem::take(&mut self.counted_pages) > 0 {
            inode.store.drop_slot(locked);
            let marked = inode.dirty.mark_counted(&inode.memory.folios, folio.id());
            debug_assert!(marked.is_new, "{:?} became dirty without its lock", folio.id());
            inode.enlist_if(marked.must_enlist);
            inode.device.iter().for_each(|device| inode.flusher.note_dirty(device));
        } else if inode.device.is_none() {
            inode.mark_dirty(folio, locked);
        }
    }
}

impl Drop for RoomForDirt<'_> {
    fn drop(&mut self) {
        self.inode.dirty.pages.sub(self.counted_pages);
    }
}

impl Inode {
    /// Marks the folio dirty, and adds a change to those of a file with a write gate, if the dirty
    /// limit and the memory for LSNs allow; `writeback::wait_for_room` waits for the former. Waits
    /// for a write-out of the folio in flight (WRITEBACK-3).
    pub(crate) fn try_mark_dirty(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
        change: Option<ChangeLsn>,
    ) -> std::result::Result<(), NoRoom> {
        let room = self.make_room(locked)?;
        if change.is_some_and(|change| !self.try_add_lsn(folio.id(), change)) {
            return Err(NoRoom::Lsns);
        }
        room.mark_dirty(folio, locked);
        Ok(())
    }

    /// Reserves room for the folio in the dirty limit, without other changes. Waits like
    /// [`Self::try_mark_dirty`].
    pub(crate) fn make_room(
        &self,
        locked: &LockedFolio<'_>,
    ) -> std::result::Result<RoomForDirt<'_>, NoRoom> {
        self.wait_for_write_out(locked);
        // Clean or dirty: under the folio lock, and with no write-out in flight, it stays so.
        let is_dirty = locked.flags.write_state().is_dirty();
        let is_counted = !is_dirty && self.is_evictable;
        let pages = if is_counted { locked.pages() } else { 0 };
        let has_room = match &self.device {
            _ if !is_counted => true,
            Some(device) => self.flusher.try_add(device, pages, self.has_gate()),
            // The smallest cache can have one dirty folio of any size.
            None => {
                let max_pages = self.memory.unswapped_pages_max().max(pages);
                self.dirty.pages.try_add_alone(pages, max_pages)
            }
        };
        if !has_room {
            return Err(NoRoom::DirtyLimit);
        }
        Ok(RoomForDirt { inode: self, counted_pages: pages })
    }

    /// Marks the folio dirty, regardless of the limit. Waits for a write-out of it in flight
    /// (WRITEBACK-3).
    pub(crate) fn mark_dirty(&self, folio: &FolioRef<'_>, locked: &LockedFolio<'_>) {
        self.wait_for_write_out(locked);
        self.store.drop_slot(locked);
        self.mark(folio.id());
        if let Some(device) = &self.device {
            self.flusher.note_dirty(device);
        }
    }

    /// Marks a folio, locked and possibly frozen, as stored to through a map.
    pub(crate) fn mark_stored(&self, folio: &Folio, id: FolioId) {
        if !folio.flags.write_state().is_dirty() {
            self.store.drop_slot(folio);
            self.mark(id);
        }
    }

    pub(crate) fn mark(&self, id: FolioId) {
        let marked = self.dirty.mark(&self.memory.folios, id);
        self.enlist_if(marked.must_enlist);
    }

    /// Returns `true` if the file has nothing dirty or in flight: its next mark enlists it again.
    pub(crate) fn delist(&self) -> bool {
        let is_clean = self.dirty.delist();
        if is_clean && self.has_gate() {
            self.free_lsns();
        }
        is_clean
    }

    /// Puts the file on the flusher's list of files that may have something dirty.
    pub(crate) fn enlist_if(&self, must_enlist: bool) {
        if must_enlist && let Some(device) = &self.device {
            self.flusher.enlist(device, &self.this, |files| &mut files.dirty);
        }
    }

    fn wait_for_write_out(&self, locked: &LockedFolio<'_>) {
        if locked.flags.write_state().is_writing() {
            self.memory.counters.add(Counter::WritebackWait, 1);
            // Of a memory file, it is being evicted.
            let since = self.device.is_none().then(Instant::now);
            locked.flags.wait_for_writeback();
            self.memory.note_stall(since);
        }
    }

    /// GATE-W2 and GATE-P2: adds a change to a folio, which the caller has locked and marks dirty
    /// next. Returns `false`, with nothing changed, if the table of LSNs must grow first.
    pub(crate) fn try_add_lsn(&self, id: FolioId, change: ChangeLsn) -> bool {
        self.dirty.with_lsns(|lsns| lsns.add(id, change))
    }

    pub(crate) fn free_lsns(&self) {
        let slots = self.dirty.with_lsns(Lsns::shrink);
        self.memory.arena.uncharge(Lsns::bytes_of(slots));
    }

    pub(crate) fn held_back(&self) -> Option<Refusal> {
        let gate = self.gate.get()?;
        let held = self.dirty.with_lsns(|lsns| lsns.held_back(gate.durable()))?;
        Some(self.refusal(held, gate.failure()))
    }

    /// Returns the error of a gate that holds these folios back.
    pub(crate) fn refusal(&self, held: HeldBack, cause: Option<Arc<io::Error>>) -> Refusal {
        let held_bytes = held.folios * self.mapping.folio_bytes();
        Refusal { file: self.name(), held, held_bytes, cause }
    }

    /// Asks the flusher to write out the dirty folios in `range` (bytes) soon. Returns `false` for
    /// a memory file, which it does not write. Never waits.
    pub(crate) fn write_soon(&self, range: Range<u64>) -> bool {
        let Some(device) = &self.device else { return false };
        if device.call_for(&self.this, range) {
            self.flusher.send(device, Duration::ZERO);
        }
        true
    }

    /// Asks for a locked folio like [`Self::write_soon`].
    pub(crate) fn write_folio_soon(&self, locked: &LockedFolio<'_>) -> bool {
        let start = locked.index() * PAGE_BYTES;
        self.write_soon(start..start + locked.pages() * PAGE_BYTES)
    }
}

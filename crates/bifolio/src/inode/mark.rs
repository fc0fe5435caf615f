//! Marking folios dirty: the room that a folio reserves in the dirty limit, and its LSN if the file
//! has a write gate.

use super::Inode;
use crate::dirt::{ChangeLsn, HeldBack, Lsns, Refusal};
use crate::page::{FolioId, FolioRef, LockedFolio};
use std::io;
use std::sync::Arc;

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
}

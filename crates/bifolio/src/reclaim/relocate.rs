//! Moving a folio to other frames, so that an extent of frames becomes free (`extents.rs`).
//!
//! It costs a copy of a small folio. Nobody waits for more than that: readers without references
//! try again, lookups meet a frozen folio. Whoever holds a reference keeps the folio where it is.
//! A dirty folio is not moved (WRITEBACK-1), unless it is one of a memory file, for which nobody
//! looks by the dirty list, and which has nowhere to go: so that its chunk can be emptied.

use super::{Reclaim, ReclaimLock};
use crate::page::{Flag, FolioId, FolioRef, LockedFolio, Part, WriteState};
use crate::stats::Counter;
use crate::sync::Ordering;
use crate::writeback::{Cleaner, Inode};

impl Reclaim {
    /// Moves a folio to a partial slot in another extent; on its lists it keeps its place. Tells
    /// whether that worked: not if it is in use right now, dirty or being written, if it lies
    /// beside its neighbours of the file, or if there is no partial slot.
    pub(super) fn migrate(&self, reclaim_lock: &ReclaimLock<'_>, id: FolioId) -> bool {
        let Ok(folio) = self.memory.folios.try_get(id) else { return false };
        let Some(locked) = folio.try_lock() else { return false };
        let Some(inode) = reclaim_lock.owner(&locked) else { return false };
        let is_movable = locked.flags.get(Flag::Uptodate)
            && locked.flags.write_state() == WriteState::Clean
            && !stands_in_extent(inode, &locked, id);
        if !is_movable {
            return false;
        }
        let Some(target) = self.arena().allocate_partial(locked.order(), id) else { return false };
        self.relocate(inode, folio, locked, target)
    }

    /// Moves a dirty folio of a memory file out of a chunk that is being emptied, to a free slot of
    /// another one. Tells whether that worked: not if it is in use right now or being written, or
    /// if there is no such slot.
    pub(super) fn move_out(&self, reclaim_lock: &ReclaimLock<'_>, id: FolioId) -> bool {
        let Ok(folio) = self.memory.folios.try_get(id) else { return false };
        let Some(locked) = folio.try_lock() else { return false };
        let Some(inode) = reclaim_lock.owner(&locked) else { return false };
        let is_movable = inode.store.cleaner() != Cleaner::Flusher
            && locked.flags.get(Flag::Uptodate)
            && locked.flags.write_state() == WriteState::Dirty;
        if !is_movable {
            return false;
        }
        let Some(target) = self.arena().allocate_elsewhere(locked.order()) else { return false };
        self.relocate(inode, folio, locked, target)
    }

    fn relocate(
        &self,
        inode: &Inode,
        folio: FolioRef<'_>,
        locked: LockedFolio<'_>,
        target: FolioId,
    ) -> bool {
        let memory = &self.memory;
        // As in a fill: without an owner until it is in the table.
        let new = memory.folios.start(target, 0, locked.index(), locked.order());
        let new_locked = new.lock_new();
        new_locked.take_after(&locked);
        // A collapse of one.
        let gone = inode.collapse(vec![Part { lock: locked, folio }], &new, &new_locked);
        let Some(frozen) = gone.and_then(|mut gone| gone.pop()) else { return false };
        new_locked.settle_after(&frozen);
        if frozen.folio().flags.write_state() == WriteState::Dirty {
            inode.pass_dirt(std::slice::from_ref(&frozen), target);
        } else {
            // In a memory file, the slot is where its bytes are (rule 4 of `page`).
            new_locked.set_slot(frozen.folio().slot());
        }
        memory.lru.replace(&memory.folios, frozen.id(), target);
        memory.counters.add(Counter::PgRelocate, 1);
        frozen.free();
        true
    }
}

/// Whether a neighbour in the file is its neighbour in memory: then the two had better stay so.
fn stands_in_extent(inode: &Inode, locked: &LockedFolio<'_>, id: FolioId) -> bool {
    let table = inode.mapping.table();
    let stands_at = |index: u64, frame: Option<u32>| {
        let entry = table.load(index, Ordering::Relaxed);
        entry.is_folio() && frame == Some(entry.frame())
    };
    let (first, end) = (locked.index(), locked.index() + locked.pages());
    let follows = first > 0 && stands_at(first - 1, id.0.checked_sub(1));
    follows || (end < table.pages() && stands_at(end, id.0.checked_add(locked.pages() as u32)))
}

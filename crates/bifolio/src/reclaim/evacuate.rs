//! Evacuating a chunk: its last folios are evicted wherever they stand in the lists, so that the
//! chunk can serve another folio size, or go back to the kernel. Those of memory files that have
//! nowhere to go are moved to other chunks. What is pinned stays, or finds no room; what lies
//! around it serves the other size.
//!
//! MOVING a folio to other frames, out of a chunk or so that an extent of frames becomes free
//! (`extents.rs`), costs a copy of a small folio. Nobody waits for more than that: readers without
//! references try again, lookups meet a frozen folio. A holder of a reference keeps the folio where
//! it is. A dirty folio is not moved (WRITEBACK-1), unless it is one of a memory file, for which
//! nobody looks by the dirty list, and which has nowhere to go: so that its chunk can be emptied.

use super::scan::{EvictOutcome, ScanCounts};
use super::{ROUND_PAGES, Reclaim, ReclaimLock};
use crate::memory::{Evacuation, FrameKind, ListKind, Purpose};
use crate::page::{Flag, FolioId, FolioRef, LockedFolio, Part, WriteState};
use crate::stats::Counter;
use crate::sync::Ordering;
use crate::writeback::{Cleaner, Inode};

/// Chunks that are tried before one round gives up.
const CHUNKS_TRIED_MAX: usize = 8;

impl Reclaim {
    /// Empties a chunk for a folio, or as much of one as can be. Failing that, gives one back of
    /// which too little is resident for such a folio: a whole one may take its place; or free
    /// frames between those that stay. For a page of a region, gives any chunk back, or free frames
    /// of what stays.
    pub(super) fn evacuate_for(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        kind: FrameKind,
    ) -> ScanCounts {
        let arena = &self.memory.arena;
        let FrameKind::Arena { order, .. } = kind else {
            let (mut counts, is_gained) = self.evacuate_any(reclaim_lock);
            if !is_gained {
                counts.reclaimed_pages += u64::from(arena.retire_pages(ROUND_PAGES as u32));
            }
            return counts;
        };
        let purpose = Purpose::Order(order);
        let next = |tried: &[usize]| arena.begin_evacuation(purpose, tried);
        let (mut counts, is_gained) = self.evacuate(reclaim_lock, next, purpose);
        if !is_gained {
            let next = |tried: &[usize]| arena.begin_evacuation_of_part(order, tried);
            let (more, is_gained) = self.evacuate(reclaim_lock, next, Purpose::Vacate);
            counts.add(&more);
            if !is_gained {
                counts.reclaimed_pages += u64::from(arena.retire_for(order)) << order;
            }
        }
        counts
    }

    /// Empties any chunk and gives it back to the kernel.
    pub(super) fn evacuate_to_release(&self, reclaim_lock: &ReclaimLock<'_>) -> ScanCounts {
        self.evacuate_any(reclaim_lock).0
    }

    fn evacuate_any(&self, reclaim_lock: &ReclaimLock<'_>) -> (ScanCounts, bool) {
        let next = |tried: &[usize]| self.memory.arena.begin_evacuation(Purpose::Vacate, tried);
        self.evacuate(reclaim_lock, next, Purpose::Vacate)
    }

    /// Empties the chunks that `next` names until something is gained; whether anything was.
    fn evacuate(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        next: impl Fn(&[usize]) -> Option<Evacuation>,
        purpose: Purpose,
    ) -> (ScanCounts, bool) {
        let memory = &self.memory;
        let mut counts = ScanCounts::default();
        let mut tried = Vec::new();
        while tried.len() < CHUNKS_TRIED_MAX {
            let Some(evacuation) = next(&tried) else { break };
            if tried.is_empty() {
                memory.lru.drain_all(&memory.folios);
            }
            tried.push(evacuation.chunk());
            for id in &evacuation.folios {
                let (outcome, pages) = self.evict_from_chunk(reclaim_lock, *id);
                counts.note(outcome, pages);
            }
            if memory.arena.finish_evacuation(&evacuation, purpose) {
                // Room is progress, even if it was there before.
                counts.reclaimed_pages = counts.reclaimed_pages.max(1);
                return (counts, true);
            }
            if counts.swapping_pages > 0 && !self.swapper.is_late() {
                // This one first.
                break;
            }
        }
        (counts, false)
    }

    /// Evicts one folio of a chunk that is being emptied.
    fn evict_from_chunk(&self, reclaim_lock: &ReclaimLock<'_>, id: FolioId) -> (EvictOutcome, u64) {
        let memory = &self.memory;
        let pages = memory.folio(id).pages();
        // Frozen or free: on its way out.
        let Ok(folio) = memory.folios.try_get(id) else { return (EvictOutcome::Busy, pages) };
        let was_listed = memory.lru.isolate_one(&memory.folios, id);
        let kind = ListKind::of(folio.folio());
        let (mut outcome, mut kept) = self.pageout_one(reclaim_lock, folio);
        let is_to_swap = outcome == EvictOutcome::Unswapped && was_listed;
        if is_to_swap && !self.swapper.is_late() {
            kept = self.leave_to_swapper(kept.into_iter().collect()).pop();
            if kept.is_none() {
                outcome = EvictOutcome::Swapping;
            }
        }
        if outcome == EvictOutcome::Evicted {
            memory.counters.add(Counter::PgEvacuate, 1);
        }
        if let Some(folio) = kept
            && was_listed
        {
            memory.lru.put_back(&memory.folios, &mut vec![folio], kind);
        }
        let has_no_place = matches!(outcome, EvictOutcome::Unwritten | EvictOutcome::Unswapped);
        if has_no_place && self.move_out(reclaim_lock, id) {
            return (EvictOutcome::Moved, pages);
        }
        (outcome, pages)
    }

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
        new_locked.copy_usage_of(&locked);
        // A collapse of one.
        let gone = inode.collapse(vec![Part { lock: locked, folio }], &new, &new_locked);
        let Some(frozen) = gone.and_then(|mut gone| gone.pop()) else { return false };
        new_locked.take_first_use_of(&frozen);
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

//! Evacuates a chunk: evicts its folios, whatever their positions in the lists, so that the chunk
//! can serve another folio size or be returned to the kernel. Folios of memory files that cannot be
//! evicted are moved to other chunks. Pinned folios, and those that find no room, stay; the pages
//! between them serve the other size.
//!
//! MOVING a folio to other frames, out of a chunk or to free an extent (`compact.rs`), copies a
//! small folio. No thread waits longer than that: readers without references retry, and lookups
//! wait for the frozen folio. A folio with other references is not moved. A dirty folio is not
//! moved either (WRITEBACK-1), except one of a memory file that cannot be evicted, so that its
//! chunk can be emptied: no sync searches for it on the dirty list.

use super::scan::{EvictOutcome, ScanCounts};
use super::{ROUND_PAGES, Reclaim, ReclaimLock};
use crate::memory::{Evacuation, FrameKind, ListKind, Purpose};
use crate::page::{Flag, FolioId, FolioRef, LockedFolio, OldFolio, WriteState};
use crate::stats::Counter;
use crate::sync::Ordering;
use crate::writeback::{Cleaner, Inode};

/// Number of chunks that a round tries before it gives up.
const CHUNKS_TRIED_MAX: usize = 8;

impl Reclaim {
    /// Empties a chunk, or as much of one as possible, for a folio. If that fails, empties a chunk
    /// that is too little resident for such a folio, so that a whole one may take its place, or
    /// else returns the free frames of the remaining chunks. For a region page, returns any chunk
    /// to the kernel, or free frames.
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

    /// Empties any chunk and returns it to the kernel.
    pub(super) fn evacuate_to_release(&self, reclaim_lock: &ReclaimLock<'_>) -> ScanCounts {
        self.evacuate_any(reclaim_lock).0
    }

    fn evacuate_any(&self, reclaim_lock: &ReclaimLock<'_>) -> (ScanCounts, bool) {
        let next = |tried: &[usize]| self.memory.arena.begin_evacuation(Purpose::Vacate, tried);
        self.evacuate(reclaim_lock, next, Purpose::Vacate)
    }

    /// Empties the chunks that `next` returns until memory is gained. Returns `true` if it was.
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
                // Free room counts as progress even if it existed before.
                counts.reclaimed_pages = counts.reclaimed_pages.max(1);
                return (counts, true);
            }
            if counts.swapping_pages > 0 && !self.swapper.is_late() {
                // The swapper must finish with this chunk first.
                break;
            }
        }
        (counts, false)
    }

    /// Evicts one folio of a chunk that is being emptied.
    fn evict_from_chunk(&self, reclaim_lock: &ReclaimLock<'_>, id: FolioId) -> (EvictOutcome, u64) {
        let memory = &self.memory;
        let pages = memory.folio(id).pages();
        // Frozen or free: another thread is freeing it.
        let Ok(folio) = memory.folios.try_get(id) else { return (EvictOutcome::Busy, pages) };
        let was_listed = memory.lru.isolate_one(&memory.folios, id);
        let kind = ListKind::of(folio.folio());
        let (mut outcome, mut kept) = self.pageout_one(reclaim_lock, folio);
        let is_to_swap = outcome == EvictOutcome::Unswapped && was_listed;
        if is_to_swap && !self.swapper.is_late() {
            kept = self.queue_for_swap(kept.into_iter().collect()).pop();
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
        let cannot_evict = matches!(outcome, EvictOutcome::Unwritten | EvictOutcome::Unswapped);
        if cannot_evict && self.move_out(reclaim_lock, id) {
            return (EvictOutcome::Moved, pages);
        }
        (outcome, pages)
    }

    /// Moves a folio to a partial slot in another extent; it keeps its position on its list.
    /// Returns `false` if the folio is in use, dirty or under write-back, if it is adjacent to its
    /// neighbours in the file, or if there is no partial slot.
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
    /// another chunk. Returns `false` if it is in use or under write-back, or if there is no such
    /// slot.
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
        // As in a fill, the folio has no owner until it is in the table.
        let new = memory.folios.start(target, 0, locked.index(), locked.order());
        let new_locked = new.lock_new();
        new_locked.copy_usage_of(&locked);
        // A collapse of a single folio.
        let gone = inode.collapse(vec![OldFolio { lock: locked, folio }], &new, &new_locked);
        let Some(frozen) = gone.and_then(|mut gone| gone.pop()) else { return false };
        new_locked.take_first_use_of(&frozen);
        if frozen.folio().flags.write_state() == WriteState::Dirty {
            inode.pass_dirt(std::slice::from_ref(&frozen), target);
        } else {
            // In a memory file, the slot has a copy of its bytes (rule 4 of `page`).
            new_locked.set_slot(frozen.folio().slot());
        }
        memory.lru.replace(&memory.folios, frozen.id(), target);
        memory.counters.add(Counter::PgRelocate, 1);
        frozen.free();
        true
    }
}

/// Returns `true` if a neighbour in the file is also adjacent in memory: such folios should stay
/// together.
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

//! Evacuating a chunk: its last folios are evicted wherever they stand in the lists, so that the
//! chunk can serve another folio size, or go back to the kernel. Those of memory files that have
//! nowhere to go are moved to other chunks. What is pinned stays, or finds no room; what lies
//! around it serves the other size.

use super::pageout::EvictOutcome;
use super::scan::ScanCounts;
use super::{ROUND_PAGES, Reclaim, ReclaimLock};
use crate::memory::{Evacuation, FrameKind, ListKind, Purpose};
use crate::page::FolioId;
use crate::stats::Counter;

/// Chunks that are tried before one round gives up.
const CHUNKS_TRIED_MAX: usize = 8;

impl Reclaim {
    /// Empties a chunk for a folio, or as much of one as can be. Failing that, gives one back of
    /// which too little is resident for such a folio: a whole one may take its place. For a page of
    /// a region, gives any back, or free frames of what stays.
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
            counts.add(&self.evacuate(reclaim_lock, next, Purpose::Vacate).0);
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
}

//! Evacuating a chunk: its last folios are evicted wherever they stand in the lists, so that the
//! chunk can serve another folio size, or go back to the kernel.

use super::pageout::Verdict;
use super::scan::ScanCounts;
use super::{Reclaim, Turn};
use crate::folio::FolioId;
use crate::frames::FrameKind;
use crate::lru::ListKind;
use crate::stats::Counter;

/// Chunks that are tried before one round gives up.
const CHUNKS_TRIED_MAX: usize = 8;

impl Reclaim {
    /// Empties a chunk of another order, for a folio. Failing that, gives one back that is too
    /// small for such a folio: a whole one may take its place. For a page of a region, gives any
    /// back.
    pub(super) fn evacuate_for(&self, turn: &Turn<'_>, kind: FrameKind) -> ScanCounts {
        let FrameKind::Arena { order, .. } = kind else { return self.evacuate_to_release(turn) };
        let wanted_pages = 1 << order;
        let fits = |other, pages| other != order && pages >= wanted_pages;
        let mut counts = self.evacuate(turn, fits, false);
        if counts.reclaimed_pages == 0 {
            counts.add(&self.evacuate(turn, |_, pages| pages < wanted_pages, true));
        }
        counts
    }

    /// Empties any chunk and gives it back to the kernel.
    pub(super) fn evacuate_to_release(&self, turn: &Turn<'_>) -> ScanCounts {
        self.evacuate(turn, |_, _| true, true)
    }

    fn evacuate(
        &self,
        turn: &Turn<'_>,
        wanted: impl Fn(u8, u32) -> bool,
        release: bool,
    ) -> ScanCounts {
        let memory = &self.memory;
        let mut counts = ScanCounts::default();
        let mut tried = Vec::new();
        while tried.len() < CHUNKS_TRIED_MAX {
            let Some(evacuation) = memory.arena.begin_evacuation(&wanted, &tried) else { break };
            if tried.is_empty() {
                memory.lru.drain_all(&memory.folios);
            }
            tried.push(evacuation.chunk());
            for id in &evacuation.folios {
                let (verdict, pages) = self.evict_from_chunk(turn, *id);
                counts.note(verdict, pages);
            }
            if memory.arena.finish_evacuation(&evacuation, release) {
                // An empty chunk is progress, even if it was empty before.
                counts.reclaimed_pages = counts.reclaimed_pages.max(1);
                break;
            }
        }
        counts
    }

    /// Evicts one folio of a chunk that is being emptied.
    fn evict_from_chunk(&self, turn: &Turn<'_>, id: FolioId) -> (Verdict, u64) {
        let memory = &self.memory;
        let pages = memory.folio(id).pages();
        // Frozen or free: on its way out.
        let Ok(folio) = memory.folios.try_get(id) else { return (Verdict::Busy, pages) };
        let was_listed = memory.lru.isolate_one(&memory.folios, id);
        let kind = ListKind::of(folio.folio());
        let (verdict, kept) = self.pageout_one(turn, folio);
        if verdict == Verdict::Evicted {
            memory.counters.add(Counter::PgEvacuate, 1);
        }
        if let Some(folio) = kept
            && was_listed
        {
            memory.lru.put_back(&memory.folios, &mut vec![folio], kind);
        }
        (verdict, pages)
    }
}

//! Pages in regions ([`InPlace`](super::InPlace)), as the bound and reclaim know them: a descriptor
//! and a page of the budget for each, and a hint of how they were read recently.
//!
//! The descriptors are here and not in `maps`, because the arena charges them under its lock, and
//! the sizes that it computes there include them.

use super::budget::Budget;
use crate::page::{Folio, FolioId, Folios, NO_FOLIO, PAGE_BYTES};
use crate::sync::Ordering;
use std::sync::atomic::AtomicU64;

const DESCRIPTORS_PER_PAGE: u32 = (PAGE_BYTES / size_of::<Folio>() as u64) as u32;

/// The descriptors of region pages, under the arena's lock.
///
/// To the arena, such a page is a descriptor and a page of the budget; the region knows its
/// address. These descriptors follow those of the frames. They are charged by the page, when the
/// first one on the page is used, and never released. Free ones are linked through themselves.
#[derive(Debug)]
pub(crate) struct RegionPages {
    free: u32,
    /// Number of descriptors that have been charged.
    known: u32,
    /// Number of descriptors in use, and of pages.
    pub(crate) used: u64,
}

impl Default for RegionPages {
    fn default() -> Self {
        Self { free: NO_FOLIO, known: 0, used: 0 }
    }
}

impl RegionPages {
    /// Takes a free descriptor and charges its page; `None` if the budget does not allow it. The
    /// descriptors begin at `first`.
    pub(crate) fn take(
        &mut self,
        budget: &mut Budget,
        first: u32,
        folios: &Folios,
    ) -> Option<FolioId> {
        if !budget.try_take(PAGE_BYTES) {
            return None;
        }
        if self.free == NO_FOLIO && !self.charge_more(budget, first, folios) {
            budget.give_back(PAGE_BYTES);
            return None;
        }
        let id = FolioId(self.free);
        // Relaxed: as in `link`.
        self.free = folios.get(id).lru_next.load(Ordering::Relaxed);
        self.used += 1;
        Some(id)
    }

    /// Returns the bytes of the descriptors that have been charged.
    pub(crate) fn descriptor_bytes(&self) -> u64 {
        u64::from(self.known / DESCRIPTORS_PER_PAGE) * PAGE_BYTES
    }

    /// Frees the descriptor of a frozen folio, and its page.
    pub(crate) fn give_back(&mut self, budget: &mut Budget, id: FolioId, folios: &Folios) {
        self.link(id.0, folios);
        self.used -= 1;
        budget.give_back(PAGE_BYTES);
    }

    /// Charges a page of descriptors and adds them to the free ones.
    fn charge_more(&mut self, budget: &mut Budget, first: u32, folios: &Folios) -> bool {
        let next = first + self.known;
        let is_room = (next + DESCRIPTORS_PER_PAGE) as usize <= folios.len();
        if !is_room || !budget.try_take(PAGE_BYTES) {
            return false;
        }
        folios.init_free(FolioId(next), DESCRIPTORS_PER_PAGE as usize);
        self.known += DESCRIPTORS_PER_PAGE;
        (next..next + DESCRIPTORS_PER_PAGE).rev().for_each(|number| self.link(number, folios));
        true
    }

    fn link(&mut self, number: u32, folios: &Folios) {
        // Relaxed: a free descriptor is on no list of the LRU, and the arena's lock orders this.
        folios.get(FolioId(number)).lru_next.store(self.free, Ordering::Relaxed);
        self.free = number;
    }
}

/// A read of at least this many pages counts as sequential.
const RUN_PAGES_MIN: u64 = 16;

/// Recent reads of a cache into its regions: runs of adjacent pages, or single pages. A hint to
/// reclaim: a random reader waits for each page, and benefits from a larger cache.
#[derive(Debug)]
pub(crate) struct RecentReads {
    remembered_pages: u64,
    /// Pages to be evicted until the last read of a run is forgotten.
    run_pages_left: AtomicU64,
    /// Pages to be evicted until the last read of fewer pages is forgotten.
    single_pages_left: AtomicU64,
}

impl RecentReads {
    pub(crate) fn new(remembered_pages: u64) -> Self {
        let (run_pages_left, single_pages_left) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { remembered_pages, run_pages_left, single_pages_left }
    }

    /// Notes that `pages` adjacent pages are about to be read.
    pub(crate) fn note_read(&self, pages: u64) {
        let left =
            if pages >= RUN_PAGES_MIN { &self.run_pages_left } else { &self.single_pages_left };
        left.store(self.remembered_pages, Ordering::Relaxed);
    }

    /// Adds `pages` to the evicted pages. Callers serialize.
    pub(crate) fn note_evicted(&self, pages: u64) {
        for left in [&self.run_pages_left, &self.single_pages_left] {
            // Relaxed, and not one atomic operation: a concurrent read may be forgotten.
            let left_pages = left.load(Ordering::Relaxed).saturating_sub(pages);
            left.store(left_pages, Ordering::Relaxed);
        }
    }

    /// Returns `true` if recent reads were of single pages, each with a waiting thread.
    pub(crate) fn are_single(&self) -> bool {
        let remembers = |left: &AtomicU64| left.load(Ordering::Relaxed) > 0;
        remembers(&self.single_pages_left) && !remembers(&self.run_pages_left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_single_pages_are_remembered_until_enough_is_evicted() {
        let (run_pages_left, single_pages_left) = (AtomicU64::new(0), AtomicU64::new(0));
        let reads = RecentReads { remembered_pages: 128, run_pages_left, single_pages_left };
        assert!(!reads.are_single());
        reads.note_read(RUN_PAGES_MIN - 1);
        assert!(reads.are_single());
        reads.note_read(RUN_PAGES_MIN);
        reads.note_evicted(127);
        assert!(!reads.are_single());
        reads.note_read(1);
        assert!(!reads.are_single());
        reads.note_evicted(2);
        assert!(reads.are_single());
        reads.note_evicted(128);
        assert!(!reads.are_single());
    }
}

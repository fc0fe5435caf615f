//! Region pages: descriptors whose page is in a region, not in a frame of the arena.
//!
//! To the arena, such a page is a descriptor and a page of the budget; the region knows its address
//! (`mod.rs`). The descriptors of region pages follow those of the frames. They are charged by the
//! page, when the first one on the page is used, and never released. Free descriptors are linked
//! through the descriptors themselves.

use crate::memory::arena::{Arena, ArenaState, DESCRIPTOR_BYTES, PAGE_BYTES};
use crate::page::{FolioId, Folios, NO_FOLIO};
use crate::sync::Ordering;

/// Number of descriptors that are charged together.
const DESCRIPTORS_PER_PAGE: u32 = (PAGE_BYTES / DESCRIPTOR_BYTES) as u32;

/// The descriptors of region pages, under the arena's lock.
#[derive(Debug)]
pub(in crate::memory) struct RegionPages {
    /// First free descriptor.
    free: u32,
    /// Number of descriptors that have been charged.
    known: u32,
    /// Number of descriptors in use, and of pages.
    pub(in crate::memory) used: u64,
}

impl Default for RegionPages {
    fn default() -> Self {
        Self { free: NO_FOLIO, known: 0, used: 0 }
    }
}

impl Arena {
    /// Returns `true` if a folio's page is in a region.
    pub(crate) fn is_region_page(&self, id: FolioId) -> bool {
        id.0 >= self.frames()
    }

    /// Allocates a descriptor and charges a page; `None` if the budget does not allow it.
    pub(crate) fn allocate_region_page(&self, folios: &Folios) -> Option<FolioId> {
        let mut state = self.state.lock();
        let found = state.take_region_page(self.frames(), folios);
        self.publish(&state);
        found
    }

    /// Frees the descriptor, which the caller has frozen, and its page.
    pub(crate) fn free_region_page(&self, id: FolioId, folios: &Folios) {
        let mut state = self.state.lock();
        state.link_region_page(id.0, folios);
        state.region_pages.used -= 1;
        state.budget.give_back(PAGE_BYTES);
        self.publish(&state);
    }
}

impl ArenaState {
    fn take_region_page(&mut self, first: u32, folios: &Folios) -> Option<FolioId> {
        if !self.budget.try_take(PAGE_BYTES) {
            return None;
        }
        if self.region_pages.free == NO_FOLIO && !self.add_region_page(first, folios) {
            self.budget.give_back(PAGE_BYTES);
            return None;
        }
        let id = FolioId(self.region_pages.free);
        // Relaxed: as in `link_region_page`.
        self.region_pages.free = folios.get(id).lru_next.load(Ordering::Relaxed);
        self.region_pages.used += 1;
        Some(id)
    }

    /// Charges a page of descriptors and adds them to the free ones.
    fn add_region_page(&mut self, first: u32, folios: &Folios) -> bool {
        let next = first + self.region_pages.known;
        let is_room = (next + DESCRIPTORS_PER_PAGE) as usize <= folios.len();
        if !is_room || !self.budget.try_take(PAGE_BYTES) {
            return false;
        }
        folios.init_free(FolioId(next), DESCRIPTORS_PER_PAGE as usize);
        self.region_pages.known += DESCRIPTORS_PER_PAGE;
        for number in (next..next + DESCRIPTORS_PER_PAGE).rev() {
            self.link_region_page(number, folios);
        }
        true
    }

    fn link_region_page(&mut self, number: u32, folios: &Folios) {
        // Relaxed: a free descriptor is on no list of the LRU, and the arena's lock orders this.
        folios.get(FolioId(number)).lru_next.store(self.region_pages.free, Ordering::Relaxed);
        self.region_pages.free = number;
    }
}

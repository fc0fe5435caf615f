//! Region pages: descriptors whose page is in a region, not in a frame of the arena.
//!
//! To the arena, such a page is a descriptor and a page of the budget; the region knows its address
//! (`mod.rs`). The descriptors of region pages follow those of the frames. They are charged by the
//! page, when the first one on the page is used, and never released. Free descriptors are linked
//! through the descriptors themselves.

use crate::memory::Budget;
use crate::page::{Folio, FolioId, Folios, NO_FOLIO, PAGE_BYTES};
use crate::sync::Ordering;

/// Number of descriptors that are charged together.
const DESCRIPTORS_PER_PAGE: u32 = (PAGE_BYTES / size_of::<Folio>() as u64) as u32;

/// The descriptors of region pages, under the arena's lock.
#[derive(Debug)]
pub(crate) struct RegionPages {
    /// First free descriptor.
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

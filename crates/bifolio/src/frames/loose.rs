//! Loose pages: descriptors whose page lies in a region, not in a frame of the arena.
//!
//! To the arena such a page is a descriptor and a page of the budget; where its bytes are, the
//! region knows (`region.rs`). Loose descriptors stand behind those of the frames. Each is charged
//! with its page of descriptors when it is first used, and never given back; the free ones are
//! linked through the descriptors themselves.

use super::arena::{Arena, DESCRIPTOR_BYTES, PAGE_BYTES, State};
use super::chunk::CHUNK_PAGES;
use crate::folio::{FolioId, Folios, NO_FOLIO};
use crate::sync::Ordering;

/// Descriptors that are charged together.
const DESCRIPTORS_PER_PAGE: u32 = (PAGE_BYTES / DESCRIPTOR_BYTES) as u32;

/// The loose descriptors, under the arena's lock.
#[derive(Debug)]
pub(super) struct Loose {
    /// The first free one, the number of a descriptor.
    free: u32,
    /// How many were ever charged.
    known: u32,
    used: u64,
}

impl Default for Loose {
    fn default() -> Self {
        Self { free: NO_FOLIO, known: 0, used: 0 }
    }
}

impl Loose {
    /// Pages that are in use.
    pub(super) fn pages(&self) -> u64 {
        self.used
    }
}

impl Arena {
    /// Whether a folio's page lies in a region.
    pub(crate) fn is_loose(&self, id: FolioId) -> bool {
        id.0 >= self.first_loose()
    }

    fn first_loose(&self) -> u32 {
        self.chunks() as u32 * CHUNK_PAGES
    }

    /// Whether there is any loose page.
    pub(crate) fn has_loose(&self) -> bool {
        self.loose_pages.load(Ordering::Relaxed) > 0
    }

    /// Takes a descriptor and a page of the budget; `None` if that allows none.
    pub(crate) fn allocate_loose(&self, folios: &Folios) -> Option<FolioId> {
        let mut state = self.state.lock();
        let found = state.take_loose(self.first_loose(), folios);
        self.publish(&state);
        found
    }

    /// Gives both back. The descriptor is frozen.
    pub(crate) fn free_loose(&self, id: FolioId, folios: &Folios) {
        let mut state = self.state.lock();
        state.put_loose(id, folios);
        self.publish(&state);
    }
}

impl State {
    fn take_loose(&mut self, first: u32, folios: &Folios) -> Option<FolioId> {
        if !self.budget.try_take(PAGE_BYTES) {
            return None;
        }
        if self.loose.free == NO_FOLIO && !self.add_loose(first, folios) {
            self.budget.give_back(PAGE_BYTES);
            return None;
        }
        let id = FolioId(self.loose.free);
        // Relaxed: as in `put_loose`.
        self.loose.free = folios.get(id).lru_next.load(Ordering::Relaxed);
        self.loose.used += 1;
        Some(id)
    }

    /// Charges a page of descriptors and makes them free ones.
    fn add_loose(&mut self, first: u32, folios: &Folios) -> bool {
        let next = first + self.loose.known;
        let is_room = (next + DESCRIPTORS_PER_PAGE) as usize <= folios.len();
        if !is_room || !self.budget.try_take(PAGE_BYTES) {
            return false;
        }
        folios.init_free(FolioId(next), DESCRIPTORS_PER_PAGE as usize);
        self.loose.known += DESCRIPTORS_PER_PAGE;
        for number in (next..next + DESCRIPTORS_PER_PAGE).rev() {
            self.link_loose(FolioId(number), folios);
        }
        true
    }

    /// Gives a page of the budget back, and the descriptor.
    fn put_loose(&mut self, id: FolioId, folios: &Folios) {
        self.link_loose(id, folios);
        self.loose.used -= 1;
        self.budget.give_back(PAGE_BYTES);
    }

    fn link_loose(&mut self, id: FolioId, folios: &Folios) {
        // Relaxed: a free descriptor is on no list of the LRU, and the arena's lock orders this.
        folios.get(id).lru_next.store(self.loose.free, Ordering::Relaxed);
        self.loose.free = id.0;
    }
}

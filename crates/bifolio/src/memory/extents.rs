//! Extents: which free slot a folio gets, so that neighbours find room beside each other.
//!
//! Called by `arena.rs` under its lock. An extent is 64 KiB of frames, or one larger folio. An
//! extent of which three quarters are free is *sparse*. The free slots of all others are *partial*:
//! folios that make room in an extent are moved there (`reclaim::extents`).
//!
//! ```text
//!   a fill: the slot behind its neighbour in the file;
//!           else, with a neighbour, the start of a sparse extent: two files that are filled at the
//!             same time do not alternate in one;
//!           else the lowest free slot of the first chunk that has any
//!   a move: the fullest extent of a chunk, from its end
//! ```

use super::arena::State;
use super::chunk::{CHUNK_PAGES, Chunk};
use crate::page::FolioId;
use std::collections::VecDeque;

/// Pages of an extent.
pub(crate) const EXTENT_PAGES: u32 = 16;

/// Where the free slots of one order are.
#[derive(Debug, Default)]
pub(super) struct Available {
    /// Chunks with sparse extents, the one that has had some longest first: it probably has most.
    sparse: VecDeque<u32>,
    /// Chunks with partial slots.
    partial: VecDeque<u32>,
}

impl Available {
    /// Chunks that have free slots; one that has both kinds comes twice.
    pub(super) fn chunks(&self) -> impl Iterator<Item = usize> {
        self.sparse.iter().chain(&self.partial).map(|number| *number as usize)
    }
}

/// The lists that a chunk is on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Listed {
    sparse: bool,
    partial: bool,
}

impl Chunk {
    fn extent_slots(&self) -> u32 {
        (EXTENT_PAGES >> self.order()).max(1)
    }

    fn extents(&self) -> u32 {
        self.slots().div_ceil(self.extent_slots())
    }

    /// The free slots of an extent, as the lowest bits.
    fn extent_bits(&self, extent: u32) -> u64 {
        let first = extent * self.extent_slots();
        let mask = (1 << self.extent_slots()) - 1;
        self.free_word(first) >> (first % u64::BITS) & mask
    }

    fn free_in_extent(&self, extent: u32) -> u32 {
        self.extent_bits(extent).count_ones()
    }

    /// Three quarters of it are free.
    fn is_sparse(&self, extent: u32) -> bool {
        self.free_in_extent(extent) * 4 >= self.extent_slots() * 3
    }

    /// Free slots of the extent of `slot`, if that is a sparse one.
    pub(super) fn sparse_slots_beside(&self, slot: u32) -> u32 {
        let extent = slot / self.extent_slots();
        if self.is_sparse(extent) { self.free_in_extent(extent) } else { 0 }
    }

    /// Free slots in sparse extents, counted anew.
    pub(super) fn count_sparse_slots(&self) -> u32 {
        (0..self.extents())
            .map(|extent| self.sparse_slots_beside(extent * self.extent_slots()))
            .sum()
    }

    fn lowest_free_of(&self, extent: u32) -> Option<u32> {
        let bits = self.extent_bits(extent);
        (bits != 0).then(|| extent * self.extent_slots() + bits.trailing_zeros())
    }

    /// An extent that is all free; else a sparse one.
    fn sparse_extent(&self) -> Option<u32> {
        let whole =
            (0..self.extents()).find(|extent| self.free_in_extent(*extent) == self.extent_slots());
        whole.or_else(|| (0..self.extents()).find(|extent| self.is_sparse(*extent)))
    }

    /// The last free slot of the extent with the fewest, but neither of a sparse one nor of
    /// `avoid`.
    fn partial_slot(&self, avoid: Option<u32>) -> Option<u32> {
        let partial = |extent: &u32| {
            self.extent_bits(*extent) != 0 && !self.is_sparse(*extent) && Some(*extent) != avoid
        };
        let extent = (0..self.extents())
            .filter(partial)
            .min_by_key(|extent| self.free_in_extent(*extent))?;
        let last = u64::BITS - 1 - self.extent_bits(extent).leading_zeros();
        Some(extent * self.extent_slots() + last)
    }
}

impl State {
    /// The slot for a fill, as the head of the file says.
    pub(super) fn slot_for(&self, order: u8, near: Option<FolioId>) -> Option<(usize, u32)> {
        let beside = |near| self.slot_after(near, order).or_else(|| self.sparse_slot(order));
        near.and_then(beside).or_else(|| {
            let number = self.available[order as usize].chunks().next()?;
            let chunk = &self.chunks[number];
            let slot = (0..chunk.extents()).find_map(|extent| chunk.lowest_free_of(extent))?;
            Some((number, slot))
        })
    }

    /// A free slot where neighbours have no room anyway, but not in the extent of `avoid`.
    pub(super) fn partial_slot(&self, order: u8, avoid: Option<FolioId>) -> Option<(usize, u32)> {
        self.available[order as usize].partial.iter().take(2).find_map(|number| {
            let number = *number as usize;
            let chunk = &self.chunks[number];
            let avoid = avoid.filter(|id| (id.0 / CHUNK_PAGES) as usize == number);
            let avoid = avoid.map(|id| ((id.0 % CHUNK_PAGES) >> order) / chunk.extent_slots());
            Some((number, chunk.partial_slot(avoid)?))
        })
    }

    /// The first slot of a sparse extent.
    pub(super) fn sparse_slot(&self, order: u8) -> Option<(usize, u32)> {
        let number = *self.available[order as usize].sparse.front()? as usize;
        let chunk = &self.chunks[number];
        Some((number, chunk.lowest_free_of(chunk.sparse_extent()?)?))
    }

    /// The slot that follows folio `near`, if it is free and of the same order.
    fn slot_after(&self, near: FolioId, order: u8) -> Option<(usize, u32)> {
        let frame = near.0 + (1 << order);
        let (number, page) = ((frame / CHUNK_PAGES) as usize, frame % CHUNK_PAGES);
        let chunk = self.chunks.get(number).filter(|chunk| chunk.is_for(order))?;
        let slot = page >> order;
        chunk.is_free(slot).then_some((number, slot))
    }

    /// Puts a chunk on the lists it belongs to, and takes it off the others.
    pub(super) fn list(&mut self, number: usize) {
        let chunk = &self.chunks[number];
        let is_listed = chunk.is_in_service() && !chunk.draining;
        let sparse = is_listed && chunk.sparse_slots() > 0;
        let partial = is_listed && chunk.free_slots() > chunk.sparse_slots();
        self.set_listed(number, Listed { sparse, partial });
    }

    /// Takes a chunk off all lists: it is about to be cut anew, or given back.
    pub(super) fn unlist(&mut self, number: usize) {
        self.set_listed(number, Listed::default());
    }

    fn set_listed(&mut self, number: usize, listed: Listed) {
        let chunk = &mut self.chunks[number];
        let before = std::mem::replace(&mut chunk.listed, listed);
        let available = &mut self.available[chunk.order() as usize];
        relist(&mut available.sparse, number, before.sparse, listed.sparse);
        relist(&mut available.partial, number, before.partial, listed.partial);
    }
}

fn relist(list: &mut VecDeque<u32>, number: usize, was_listed: bool, is_listed: bool) {
    if is_listed && !was_listed {
        list.push_back(number as u32);
    } else if was_listed && !is_listed {
        // The chunk in use is at the front of the list.
        if let Some(at) = list.iter().position(|listed| *listed as usize == number) {
            list.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::arena::Arena;
    use super::super::chunk::CHUNK_BYTES;
    use super::*;
    use crate::config::HugePages;
    use crate::page::Folios;
    use crate::sys::probe::Features;

    /// An arena of two chunks and their descriptors.
    struct World {
        arena: Arena,
        folios: Folios,
    }

    impl World {
        fn new() -> Self {
            let bound_bytes = 2 * (CHUNK_BYTES + 64 * u64::from(CHUNK_PAGES));
            let features = Features::probe(&[]);
            let arena = Arena::new(bound_bytes, 2 * CHUNK_BYTES, HugePages::Never, features);
            let folios = Folios::without_reaper(2 * CHUNK_PAGES as usize);
            Self { arena: arena.unwrap(), folios }
        }

        fn allocate(&self, near: Option<u32>) -> u32 {
            let near = near.map(FolioId);
            self.arena.allocate(0, near, &self.folios).unwrap().expect("a free frame").0
        }

        /// Takes all frames, then frees these.
        fn with_free(free: impl IntoIterator<Item = u32>) -> Self {
            let world = Self::new();
            for frame in 0..2 * CHUNK_PAGES {
                assert_eq!(world.allocate(None), frame);
            }
            for frame in free {
                world.arena.free(FolioId(frame));
            }
            world
        }
    }

    #[test]
    fn a_folio_whose_next_slot_is_taken_begins_an_extent() {
        let world = World::new();
        let first = world.allocate(None);
        let other = world.allocate(None);
        assert_eq!((first, other), (0, 1));
        let elsewhere = world.allocate(Some(first));
        assert_eq!(elsewhere, EXTENT_PAGES);
        assert_eq!(world.allocate(Some(other)), 2);
        assert_eq!(world.allocate(Some(elsewhere)), EXTENT_PAGES + 1);
    }

    #[test]
    fn a_folio_without_a_neighbour_takes_the_lowest_free_slot() {
        let free = [(100..107), (32..48), (64..80)];
        let world = World::with_free(free.into_iter().flatten());
        for frame in (32..48).chain(64..80).chain(100..107) {
            assert_eq!(world.allocate(None), frame);
        }
    }

    #[test]
    fn migrated_folios_go_to_partial_extents_of_others() {
        let sparse = 160..172;
        let world = World::with_free(sparse.chain([33, 35, 40, 64, 600]));
        let partial = |from| world.arena.allocate_partial(0, FolioId(from)).map(|id| id.0);
        assert_eq!(partial(70), Some(40), "the last slot of another extent");
        assert_eq!(partial(32), Some(64));
        assert_eq!(partial(0), Some(35));
        assert_eq!(partial(0), Some(33));
        assert_eq!(partial(0), Some(600));
        assert_eq!(partial(0), None);
    }

    #[test]
    fn lists_and_counts_follow_the_slots() {
        let world = World::with_free([]);
        let mut random = fastrand::Rng::with_seed(1);
        let mut used: Vec<u32> = (0..2 * CHUNK_PAGES).collect();
        for step in 0..20_000 {
            // Mostly full, mostly empty, by turns.
            let frees = random.u32(..100) < if step / 2000 % 2 == 0 { 60 } else { 40 };
            if frees && !used.is_empty() {
                world.arena.free(FolioId(used.swap_remove(random.usize(..used.len()))));
            } else if used.len() < 2 * CHUNK_PAGES as usize {
                let near = used.last().copied().filter(|_| random.bool());
                let frame = world.allocate(near);
                assert!(!used.contains(&frame), "{frame} was handed out twice");
                used.push(frame);
            }
            let state = world.arena.state.lock();
            for (number, chunk) in state.chunks.iter().enumerate() {
                assert_eq!(chunk.sparse_slots(), chunk.count_sparse_slots());
                let available = &state.available[0];
                let sparse = available.sparse.contains(&(number as u32));
                let partial = available.partial.contains(&(number as u32));
                assert_eq!(sparse, chunk.sparse_slots() > 0);
                assert_eq!(partial, chunk.free_slots() > chunk.sparse_slots());
                assert_eq!(chunk.listed, Listed { sparse, partial });
            }
        }
    }
}

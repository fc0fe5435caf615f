//! Extents: chooses the slot of a new folio, so that folios of neighbouring pages get adjacent
//! frames.
//!
//! Called by `arena.rs` under its lock. An extent is 64 KiB of frames, or one larger folio. An
//! extent that is at least three quarters free is *sparse*. The free slots of all other extents are
//! *partial*: `reclaim::compact` moves folios to them when it empties an extent.
//!
//! ```text
//!   fill: the slot after that of its neighbour in the file;
//!         else, with a neighbour, the start of a sparse extent, so that two files that are
//!           filled at the same time do not alternate in one extent;
//!         else the lowest free slot of the first chunk that has any
//!   move: the fullest extent of a chunk, from its end
//! ```

use super::arena::ArenaState;
use super::chunk::{CHUNK_PAGES, Chunk};
use crate::page::FolioId;
use std::collections::VecDeque;

/// Pages of an extent.
pub(crate) const EXTENT_PAGES: u32 = 16;

/// Chunks with free slots of one order.
#[derive(Debug, Default)]
pub(super) struct Available {
    /// Chunks with sparse extents. The chunk listed longest is first: it probably has the most.
    sparse: VecDeque<u32>,
    /// Chunks with partial slots.
    partial: VecDeque<u32>,
}

impl Available {
    /// Returns the chunks that have free slots. A chunk with both kinds appears twice.
    pub(super) fn chunks(&self) -> impl Iterator<Item = usize> {
        self.sparse.iter().chain(&self.partial).map(|number| *number as usize)
    }
}

/// The lists that contain a chunk.
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

    /// Returns the free slots of an extent as the lowest bits of a word.
    fn extent_bits(&self, extent: u32) -> u64 {
        let first = extent * self.extent_slots();
        let mask = (1 << self.extent_slots()) - 1;
        self.free_word(first) >> (first % u64::BITS) & mask
    }

    fn free_in_extent(&self, extent: u32) -> u32 {
        self.extent_bits(extent).count_ones()
    }

    /// Returns `true` if at least three quarters of the extent are free.
    fn is_sparse(&self, extent: u32) -> bool {
        self.free_in_extent(extent) * 4 >= self.extent_slots() * 3
    }

    /// Returns the number of free slots in the extent of `slot` if that extent is sparse, otherwise
    /// 0.
    pub(super) fn sparse_slots_beside(&self, slot: u32) -> u32 {
        let extent = slot / self.extent_slots();
        if self.is_sparse(extent) { self.free_in_extent(extent) } else { 0 }
    }

    /// Counts the free slots in sparse extents.
    pub(super) fn count_sparse_slots(&self) -> u32 {
        (0..self.extents())
            .map(|extent| self.sparse_slots_beside(extent * self.extent_slots()))
            .sum()
    }

    fn lowest_free_of(&self, extent: u32) -> Option<u32> {
        let bits = self.extent_bits(extent);
        (bits != 0).then(|| extent * self.extent_slots() + bits.trailing_zeros())
    }

    /// Returns an extent that is completely free, or else a sparse one.
    fn sparse_extent(&self) -> Option<u32> {
        let whole =
            (0..self.extents()).find(|extent| self.free_in_extent(*extent) == self.extent_slots());
        whole.or_else(|| (0..self.extents()).find(|extent| self.is_sparse(*extent)))
    }

    /// Returns the last free slot of the extent with the fewest free slots, ignoring sparse extents
    /// and `avoid`.
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

impl ArenaState {
    /// Chooses the slot for a fill; see the [module documentation](self).
    pub(super) fn slot_for(&self, order: u8, near: Option<FolioId>) -> Option<(usize, u32)> {
        let beside = |near| self.slot_after(near, order).or_else(|| self.sparse_slot(order));
        near.and_then(beside).or_else(|| {
            let number = self.available[order as usize].chunks().next()?;
            let chunk = &self.chunks[number];
            let slot = (0..chunk.extents()).find_map(|extent| chunk.lowest_free_of(extent))?;
            Some((number, slot))
        })
    }

    /// Chooses a free slot in an extent that is not sparse, and not in the extent of `avoid`.
    pub(super) fn partial_slot(&self, order: u8, avoid: Option<FolioId>) -> Option<(usize, u32)> {
        self.available[order as usize].partial.iter().take(2).find_map(|number| {
            let number = *number as usize;
            let chunk = &self.chunks[number];
            let avoid = avoid.filter(|id| (id.0 / CHUNK_PAGES) as usize == number);
            let avoid = avoid.map(|id| ((id.0 % CHUNK_PAGES) >> order) / chunk.extent_slots());
            Some((number, chunk.partial_slot(avoid)?))
        })
    }

    /// Returns the first free slot of a sparse extent.
    pub(super) fn sparse_slot(&self, order: u8) -> Option<(usize, u32)> {
        let number = *self.available[order as usize].sparse.front()? as usize;
        let chunk = &self.chunks[number];
        Some((number, chunk.lowest_free_of(chunk.sparse_extent()?)?))
    }

    /// Returns the slot that follows folio `near`, if it is free and of the same order.
    fn slot_after(&self, near: FolioId, order: u8) -> Option<(usize, u32)> {
        let frame = near.0 + (1 << order);
        let (number, page) = ((frame / CHUNK_PAGES) as usize, frame % CHUNK_PAGES);
        let chunk = self.chunks.get(number).filter(|chunk| chunk.is_for(order))?;
        let slot = page >> order;
        chunk.is_free(slot).then_some((number, slot))
    }

    /// Adds a chunk to the lists that it belongs to, and removes it from the others.
    pub(super) fn list(&mut self, number: usize) {
        let chunk = &self.chunks[number];
        let is_listed = chunk.is_in_service() && !chunk.draining;
        let sparse = is_listed && chunk.sparse_slots() > 0;
        let partial = is_listed && chunk.free_slots() > chunk.sparse_slots();
        self.set_listed(number, Listed { sparse, partial });
    }

    /// Removes a chunk from all lists before it is cut for another order or returned to the kernel.
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
        // The chunk that allocations use is at the front of the list.
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

        /// Allocates all frames, then frees those in `free`.
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
            // Alternates between mostly full and mostly empty.
            let frees = random.u32(..100) < if step / 2000 % 2 == 0 { 60 } else { 40 };
            if frees && !used.is_empty() {
                world.arena.free(FolioId(used.swap_remove(random.usize(..used.len()))));
            } else if used.len() < 2 * CHUNK_PAGES as usize {
                let near = used.last().copied().filter(|_| random.bool());
                let frame = world.allocate(near);
                assert!(!used.contains(&frame), "frame {frame} was allocated twice");
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

//! Extents: which free slot a folio gets, so that neighbours find room beside each other.
//!
//! Called by `arena.rs` under its lock. An extent is 64 KiB of frames, or one larger folio. Of some
//! extents most slots are free: those are *sparse*, and are filled from the front by what comes in.
//! The free slots of all others are *partial*: what has to make room in an extent is moved there
//! (`reclaim::extents`), and misses take them when there is nothing else.
//!
//! ```text
//!   a miss: behind its neighbour in the file, if that slot is free; else,
//!           if the neighbour came just now, where an extent begins: two files that are filled at
//!             the same time do not take turns in one;
//!           else the next slot of the open extent, which all such misses fill together, so that
//!             what is in a row came, and will leave, at the same time
//!   a move: the fullest extent of a chunk, from its end
//! ```
//!
//! A miss whose neighbour came just now, and that gets a partial slot, is *crowded*: it is part of
//! a file that is being filled, and there is no extent for it. For an extent of those, one is
//! wanted, and reclaim clears one at a higher price (`reclaim::extents`).

use super::arena::State;
use super::chunk::{CHUNK_PAGES, Chunk};
use crate::page::FolioId;
use std::collections::VecDeque;

/// Pages of an extent.
pub(crate) const EXTENT_PAGES: u32 = 16;

/// How many of the slots that were taken last are remembered: a file that is being filled has its
/// last one among them, unless more than so many are filled at the same time.
pub(super) const LATELY: usize = 8;

/// The most crowded folios that are remembered: what was filled long ago wants no extents now.
const CROWDED_MAX: u32 = CHUNK_PAGES;

/// An extent: its chunk, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    chunk: usize,
    extent: u32,
}

/// Where the free slots of one order are.
#[derive(Debug, Default)]
pub(super) struct Available {
    /// Chunks with sparse extents, the one that has had some longest first: it probably has most.
    sparse: VecDeque<u32>,
    /// Chunks with partial slots.
    partial: VecDeque<u32>,
    /// The extent that misses without a neighbour fill.
    open: Option<Extent>,
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
    /// The slot for a miss, as the head of the file says.
    pub(super) fn slot_for(&mut self, order: u8, near: Option<FolioId>) -> Option<(usize, u32)> {
        if let Some(near) = near {
            let behind = self.slot_after(near, order);
            let crowded = behind.is_none() && self.lately.contains(&near);
            let found = if crowded { self.sparse_slot(order) } else { behind };
            if found.is_some() {
                return found;
            }
        }
        let open = self.available[order as usize].open;
        let in_open = open.and_then(|open| self.slot_of_extent(open, order));
        in_open.or_else(|| {
            let (chunk, slot) = self.sparse_slot(order)?;
            let extent = slot / self.chunks[chunk].extent_slots();
            self.available[order as usize].open = Some(Extent { chunk, extent });
            Some((chunk, slot))
        })
    }

    /// Remembers what a miss got.
    pub(super) fn note_taken(&mut self, id: FolioId) {
        self.lately.rotate_right(1);
        self.lately[0] = id;
    }

    /// Remembers that a miss got a partial slot.
    pub(super) fn note_crowded(&mut self, near: Option<FolioId>) {
        if near.is_some_and(|near| self.lately.contains(&near)) {
            self.crowded = (self.crowded + 1).min(CROWDED_MAX);
        }
    }

    pub(super) fn wants_extents(&self) -> bool {
        self.crowded >= EXTENT_PAGES
    }

    /// Whether an extent is wanted, which it is no longer then.
    pub(super) fn take_wanted_extent(&mut self) -> bool {
        let is_wanted = self.wants_extents();
        self.crowded -= if is_wanted { EXTENT_PAGES } else { 0 };
        is_wanted
    }

    /// A free slot where neighbours have no room anyway, but not in the extent of `avoid`.
    pub(super) fn partial_slot(&self, order: u8, avoid: Option<FolioId>) -> Option<(usize, u32)> {
        let avoid = avoid.map(|id| self.extent_of(id));
        self.available[order as usize].partial.iter().take(2).find_map(|number| {
            let number = *number as usize;
            let avoided = avoid.filter(|avoid| avoid.chunk == number).map(|avoid| avoid.extent);
            Some((number, self.chunks[number].partial_slot(avoided)?))
        })
    }

    /// The first slot of a sparse extent.
    pub(super) fn sparse_slot(&self, order: u8) -> Option<(usize, u32)> {
        let number = *self.available[order as usize].sparse.front()? as usize;
        let chunk = &self.chunks[number];
        Some((number, chunk.lowest_free_of(chunk.sparse_extent()?)?))
    }

    fn extent_of(&self, id: FolioId) -> Extent {
        let chunk = (id.0 / CHUNK_PAGES) as usize;
        let slot = (id.0 % CHUNK_PAGES) >> self.chunks[chunk].order();
        Extent { chunk, extent: slot / self.chunks[chunk].extent_slots() }
    }

    fn slot_of_extent(&self, extent: Extent, order: u8) -> Option<(usize, u32)> {
        let chunk = &self.chunks[extent.chunk];
        let usable = chunk.is_for(order) && extent.extent < chunk.extents();
        let slot = usable.then(|| chunk.lowest_free_of(extent.extent)).flatten()?;
        Some((extent.chunk, slot))
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
    fn misses_without_a_neighbour_fill_one_row_after_the_other() {
        let world = World::with_free((100..107).chain(32..48).chain(64..80));
        for frame in (32..48).chain(64..80) {
            assert_eq!(world.allocate(None), frame);
        }
        // Nothing else is left.
        let partial = (0..7).map(|_| world.allocate(None)).collect::<Vec<_>>();
        assert!(partial.iter().all(|frame| (100..107).contains(frame)), "{partial:?}");
    }

    #[test]
    fn a_file_whose_next_slot_was_taken_just_now_begins_a_row() {
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
    fn a_page_whose_neighbour_came_long_ago_goes_to_the_open_row() {
        let world = World::new();
        for frame in 0..=LATELY as u32 {
            assert_eq!(world.allocate(None), frame);
        }
        assert_eq!(world.allocate(Some(0)), LATELY as u32 + 1);
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
    fn rows_are_wanted_by_what_comes_in_order_and_finds_none() {
        // Every other frame of the second chunk; extents of the first one are free, to begin with.
        let scattered = (CHUNK_PAGES..2 * CHUNK_PAGES).step_by(2);
        let world = World::with_free((0..32).chain(scattered));
        // A folio without a neighbour wants no extent, whether it finds one or not.
        for _ in 0..64 {
            world.allocate(None);
        }
        assert!(!world.arena.wants_extents() && !world.arena.take_wanted_extent());
        let mut last = world.allocate(None);
        for _ in 0..2 * EXTENT_PAGES {
            last = world.allocate(Some(last));
        }
        assert!(world.arena.wants_extents());
        assert!(world.arena.take_wanted_extent() && world.arena.take_wanted_extent());
        assert!(!world.arena.wants_extents() && !world.arena.take_wanted_extent());
    }

    #[test]
    fn a_file_that_finds_rows_wants_none() {
        let world = World::with_free((0..64).chain((100..200).step_by(2)));
        let mut last = world.allocate(None);
        for _ in 0..63 {
            last = world.allocate(Some(last));
        }
        assert_eq!(last, 63);
        assert!(!world.arena.wants_extents());
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

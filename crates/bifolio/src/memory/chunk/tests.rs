//! Tests of chunks: the states of pages and slots, and the choice of a slot.

use super::super::arena::Arena;
use super::*;
use crate::config::HugePages;
use crate::page::{Folios, MemorySource};
use crate::sys::probe::Features;

fn chunk_of(size: ChunkSize, order: u8) -> Chunk {
    let mut chunk = Chunk::vacant(size);
    chunk.cut(order);
    chunk
}

const SMALLEST: ChunkSize = ChunkSize(4);
const LARGEST: ChunkSize = ChunkSize(9);

#[test]
fn the_size_of_chunks_follows_from_the_bound() {
    const MIB: u64 = 1 << 20;
    for (bound_bytes, pages) in [
        (256 << 10, 16),
        (4 * MIB - 1, 16),
        (4 * MIB, 32),
        (16 * MIB, 128),
        (32 * MIB - 1, 128),
        (32 * MIB, 512),
        (1 << 42, 512),
    ] {
        let size = ChunkSize::of(bound_bytes);
        assert_eq!((size.pages(), size.bytes()), (pages, u64::from(pages) * PAGE_BYTES));
        assert_eq!(size.place_of(7 * pages + 5), (7, 5));
        assert_eq!(size.frame_of(7, 5), 7 * pages + 5);
    }
}

#[test]
fn every_slot_is_allocated_once_at_every_order() {
    for size in [SMALLEST, LARGEST] {
        for order in 0..=size.0 {
            let mut chunk = chunk_of(size, order);
            let all = chunk.slots();
            let mut taken = Vec::new();
            while let Some(slots) = chunk.free.first_run(1) {
                assert_eq!(slots.len(), 1);
                chunk.take(slots.start);
                taken.push(slots.start << order);
            }
            assert_eq!(taken.len() as u32, all);
            assert_eq!((chunk.free_pages(), chunk.used_pages()), (0, size.pages()));
            assert_eq!(chunk.folios().collect::<Vec<_>>(), taken);
            taken.into_iter().for_each(|first| chunk.put(first));
            assert!(chunk.is_empty() && chunk.free_slots == all);
        }
    }
}

#[test]
fn a_lent_slot_is_neither_free_nor_used() {
    for order in 0..LARGEST.0 - 1 {
        let mut chunk = chunk_of(LARGEST, order);
        let slots = chunk.slots();
        chunk.take(0);
        assert_eq!(chunk.free.first_run(2), Some(1..3));
        chunk.set_lent(1..3, true);
        assert_eq!(chunk.free.first_run(u32::MAX), Some(3..slots).filter(|rest| !rest.is_empty()));
        assert_eq!((chunk.free_slots, chunk.lent_pages()), (slots - 3, 2 << order));
        assert_eq!(chunk.folios().collect::<Vec<_>>(), [0]);
        assert_eq!((chunk.lent.first_run(u32::MAX), chunk.used_pages()), (Some(1..3), 1 << order));
        chunk.put(0);
        assert!(chunk.is_empty());
        chunk.set_lent(1..3, false);
        assert_eq!((chunk.free_slots, chunk.lent.first_run(u32::MAX)), (slots, None));
        assert_eq!(chunk.sparse_slots, slots);
    }
}

#[test]
fn ranges_are_set_counted_and_found_across_words() {
    for range in [0..1, 63..65, 0..64, 5..200, 448..512, 0..512] {
        let mut bits = SlotBits::default();
        bits.set(range.clone(), true);
        assert_eq!((bits.count(), bits.next(0, true)), (range.end - range.start, range.start));
        assert_eq!(bits.next(range.start, false), range.end);
        assert_eq!(bits.first_run(u32::MAX), Some(range.clone()));
        assert_eq!(bits.first_run(1), Some(range.start..range.start + 1));
        assert!(bits.has(range.start) && !bits.has(range.end));
        bits.set(range, false);
        assert_eq!(bits, SlotBits::default());
    }
}

/// An arena of two chunks and their descriptors.
struct World {
    arena: Arena,
    folios: Folios,
}

impl World {
    const PAGES: u32 = 2 << LARGEST.0;

    fn new() -> Self {
        let bound_bytes = 64 << 20;
        let features = Features::probe(&[]);
        let arena = Arena::new(
            &MemorySource::Private,
            bound_bytes,
            bound_bytes,
            HugePages::Never,
            features,
        )
        .unwrap();
        arena.set_bound(2 * LARGEST.cost_bytes());
        let folios = Folios::without_reaper(arena.frames() as usize);
        Self { arena, folios }
    }

    fn allocate(&self, near: Option<u32>) -> u32 {
        let near = near.map(FolioId);
        self.arena.allocate(0, near, &self.folios).unwrap().expect("a free frame").0
    }

    /// Allocates all frames, then frees those in `free`.
    fn with_free(free: impl IntoIterator<Item = u32>) -> Self {
        let world = Self::new();
        for frame in 0..Self::PAGES {
            assert_eq!(world.allocate(None), frame);
        }
        for frame in free {
            world.arena.free([FolioId(frame)]);
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
    let partial = |from| world.arena.allocate_elsewhere(0, Some(FolioId(from))).map(|id| id.0);
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
    let mut used: Vec<u32> = (0..World::PAGES).collect();
    for step in 0..20_000 {
        // Alternates between mostly full and mostly empty.
        let frees = random.u32(..100) < if step / 2000 % 2 == 0 { 60 } else { 40 };
        if frees && !used.is_empty() {
            world.arena.free([FolioId(used.swap_remove(random.usize(..used.len())))]);
        } else if used.len() < World::PAGES as usize {
            let near = used.last().copied().filter(|_| random.bool());
            let frame = world.allocate(near);
            assert!(!used.contains(&frame), "frame {frame} was allocated twice");
            used.push(frame);
        }
        let state = world.arena.state.lock();
        for (number, chunk) in state.chunks.iter().enumerate() {
            assert_eq!(chunk.sparse_slots, chunk.count_sparse_slots());
            let available = &state.available[0];
            let sparse = available.sparse.contains(&(number as u32));
            let partial = available.partial.contains(&(number as u32));
            assert_eq!(sparse, chunk.sparse_slots > 0);
            assert_eq!(partial, chunk.free_slots > chunk.sparse_slots);
            assert_eq!(chunk.listed, Listed { sparse, partial });
        }
    }
}

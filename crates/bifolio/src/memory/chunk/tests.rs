//! Tests of chunks: the states of pages and slots, and the choice of a slot.

use super::super::arena::Arena;
use super::*;
use crate::config::HugePages;
use crate::page::Folios;
use crate::sys::probe::Features;

/// Returns the lowest free slot.
fn first_free(chunk: &Chunk) -> Option<u32> {
    Some(chunk.free.next(0, true)).filter(|slot| *slot < chunk.slots())
}

fn chunk_of(order: u8, resident_pages: u32) -> Chunk {
    let mut chunk = Chunk::vacant();
    chunk.begin(0..resident_pages, order);
    chunk
}

#[test]
fn every_slot_is_allocated_once_at_every_order() {
    for order in 0..=ORDER_MAX {
        let mut chunk = chunk_of(order, CHUNK_PAGES - 5);
        let mut taken = Vec::new();
        while let Some(slot) = first_free(&chunk) {
            chunk.take(slot);
            taken.push(slot);
        }
        let expected = (CHUNK_PAGES - 5) >> order;
        assert_eq!(taken, (0..expected).collect::<Vec<_>>(), "order {order}");
        assert_eq!((chunk.free_pages(), chunk.folios().count()), (0, expected as usize));
        for slot in taken {
            chunk.put(slot << order);
        }
        assert!(chunk.is_empty());
    }
}

#[test]
fn a_retired_page_is_neither_free_nor_used_nor_resident() {
    for order in 0..ORDER_MAX {
        let mut chunk = chunk_of(order, CHUNK_PAGES);
        let slots = chunk.slots();
        chunk.take(0);
        let second = 1 << order..2 << order;
        chunk.retire(second.start..second.start + 1);
        assert_eq!((chunk.free_slots(), chunk.used_pages()), (slots - 2, 1 << order));
        assert_eq!(chunk.resident_pages(), CHUNK_PAGES - 1);
        assert_eq!(chunk.folios().collect::<Vec<_>>(), [0]);
        assert_eq!(chunk.revivable(order, 1, false), Some(second.clone()));
        assert_eq!(chunk.revivable(order, 0, false), None);
        chunk.revive(second);
        assert_eq!((chunk.free_slots(), chunk.resident_pages()), (slots - 1, CHUNK_PAGES));
        assert_eq!(chunk.revivable(order, 512, false), None);
    }
}

#[test]
fn a_recut_chunk_has_slots_between_its_old_folios() {
    let mut chunk = chunk_of(4, CHUNK_PAGES);
    for slot in 0..3 {
        chunk.take(slot);
    }
    chunk.put(1 << 4);
    chunk.cut(0);
    assert_eq!((chunk.free_slots(), chunk.used_pages()), (CHUNK_PAGES - 32, 32));
    assert!(!chunk.is_all_of(0) && first_free(&chunk) == Some(16));
    chunk.take(16);
    chunk.cut(4);
    assert_eq!((chunk.free_slots(), first_free(&chunk)), (29, Some(3)));
    assert!(!chunk.is_all_of(4), "a small folio is in it");
    // Each folio frees its own pages, whatever order the chunk is cut for.
    chunk.put(0);
    assert_eq!((chunk.free_slots(), first_free(&chunk)), (30, Some(0)));
    chunk.put(16);
    assert!(chunk.is_all_of(4) && chunk.is_free(1));
    chunk.cut(9);
    assert!(!chunk.has_slot_of(9) && chunk.has_slot_of(8));
    chunk.put(32);
    assert!(chunk.is_empty() && first_free(&chunk) == Some(0));
}

#[test]
fn adjacent_folios_are_distinguished() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut chunk = chunk_of(0, CHUNK_PAGES);
    let mut folios: Vec<(u32, u8)> = Vec::new();
    for _ in 0..20_000 {
        if random.bool() && !folios.is_empty() {
            chunk.put(folios.swap_remove(random.usize(..folios.len())).0);
        } else {
            let order = random.u8(0..=5);
            chunk.cut(order);
            let Some(slot) = first_free(&chunk) else { continue };
            chunk.take(slot);
            folios.push((slot << order, order));
        }
        let mut firsts: Vec<_> = folios.iter().map(|folio| folio.0).collect();
        firsts.sort_unstable();
        assert_eq!(chunk.folios().collect::<Vec<_>>(), firsts);
        let pages = folios.iter().map(|folio| 1 << folio.1).sum::<u32>();
        assert_eq!((chunk.used_pages(), chunk.used.count()), (pages, pages));
        let foreign = folios.iter().filter(|folio| folio.1 != chunk.order()).count();
        assert_eq!(chunk.is_all_of(chunk.order()), foreign == 0);
    }
}

#[test]
fn ranges_are_set_counted_and_found_across_words() {
    for range in [0..1, 63..65, 0..64, 5..200, 448..512, 0..512] {
        let mut bits = PageBits::default();
        bits.set(range.clone(), true);
        assert_eq!(bits.iter().collect::<Vec<_>>(), range.clone().collect::<Vec<_>>());
        assert_eq!((bits.count(), bits.next(0, true)), (range.end - range.start, range.start));
        assert_eq!(bits.next(range.start, false), range.end);
        assert_eq!(bits.count_in(0..range.start + 1), 1);
        let mut others = PageBits::ALL;
        others.set(range.clone(), false);
        assert_eq!((others.count(), others.or(&bits)), (512 - bits.count(), PageBits::ALL));
        assert!(bits.has(range.start) && !bits.has(range.end) && !others.has(range.start));
    }
}

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

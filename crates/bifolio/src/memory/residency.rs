//! Resident frames: makes chunks resident, empties chunks, and lends single slots to the budget
//! where no chunk can be emptied.
//!
//! Frames are made resident a chunk at a time: by the thread that allocates, when it needs one;
//! ahead of need, in the background; or all at once, when the cache is built. The kernel zeroes a
//! chunk for as long as several reads of the device take; ahead of need, no miss waits for it, and
//! the arena's lock is released meanwhile: the chunk is charged and marked first.
//!
//! `reclaim` evicts or moves the folios of a chunk that is *evacuated* between
//! [`Arena::begin_evacuation`] and [`Arena::finish_evacuation`]. *Lent* slots are returned to the
//! kernel, at the price of a huge page, and no longer charged. When the bound allows another chunk,
//! lent slots of the right order are made resident before a vacant chunk is, so raising and
//! lowering the bound does not use up the address space.

use super::arena::Arena;
use super::chunk::{ArenaState, Chunk, Listed, PAGE_BYTES};
use crate::page::{FolioId, Folios};
use std::collections::BinaryHeap;
use std::io;
use std::ops::Range;

impl Arena {
    /// Makes a chunk's worth of frames resident for folios of `order` if the bound allows it.
    /// Returns `true` if that added a free slot.
    pub(super) fn grow(
        &self,
        state: &mut ArenaState,
        order: u8,
        folios: &Folios,
    ) -> io::Result<bool> {
        let lends = |chunk: &Chunk| chunk.is_for(order) && chunk.lent_pages() > 0;
        if state.lent_pages > 0
            && state.budget.left_bytes() >= self.chunk_size.bytes()
            && let Some(number) = state.chunks.iter().position(lends)
        {
            self.take_lent_back(state, number)?;
            return Ok(true);
        }
        let Some(number) = state.begin_growth() else { return Ok(false) };
        let populated = self.populate(number);
        self.end_growth(state, number, order, populated, folios)?;
        Ok(true)
    }

    /// Makes a chunk resident ahead of need. Returns `false` if none was wanted. Fails if the
    /// kernel refuses memory that the bound allows.
    pub(crate) fn preallocate(&self, folios: &Folios) -> io::Result<bool> {
        self.grow_if(ArenaState::wants_chunk, folios)
    }

    /// Makes chunks resident until no more than `left_bytes` are left of the bound. Fails if the
    /// kernel refuses memory that the bound allows.
    pub(crate) fn grow_until(&self, left_bytes: u64, folios: &Folios) -> io::Result<()> {
        let has_more = |state: &ArenaState| {
            state.budget.left_bytes() >= left_bytes + self.chunk_size.cost_bytes()
        };
        while self.grow_if(has_more, folios)? {}
        Ok(())
    }

    /// Makes one more chunk resident if `wants` accepts the state. The kernel is asked without the
    /// arena's lock. Returns `true` if there is a new chunk.
    fn grow_if(&self, wants: impl Fn(&ArenaState) -> bool, folios: &Folios) -> io::Result<bool> {
        let begun = {
            let mut state = self.state.lock();
            let begun = if wants(&state) { state.begin_growth() } else { None };
            state.is_allocating_chunk = begun.is_some();
            self.publish(&state);
            begun
        };
        let Some(number) = begun else { return Ok(false) };
        let populated = self.populate(number);
        let mut state = self.state.lock();
        let order = state.last_order;
        let ended = self.end_growth(&mut state, number, order, populated, folios);
        state.is_allocation_refused = ended.is_err();
        state.is_allocating_chunk = false;
        self.grown.notify_all();
        self.publish(&state);
        ended.map(|()| true)
    }

    fn populate(&self, number: usize) -> io::Result<()> {
        let range = self.location_of(number, 0..self.chunk_size.pages());
        self.features.populate(&self.memory, range, self.has_huge_chunks())
    }

    /// Ends the growth. If the chunk is resident, cuts it into free slots of `order`; otherwise
    /// reverts everything.
    fn end_growth(
        &self,
        state: &mut ArenaState,
        number: usize,
        order: u8,
        populated: io::Result<()>,
        folios: &Folios,
    ) -> io::Result<()> {
        if let Err(error) = populated {
            let (offset_bytes, bytes) = self.location_of(number, 0..self.chunk_size.pages());
            let _ = self.memory.release(offset_bytes, bytes);
            state.cancel_growth(number);
            return Err(error);
        }
        let chunk = &mut state.chunks[number];
        if !chunk.has_descriptors {
            let first = FolioId(self.chunk_size.frame_of(number, 0));
            folios.init_free(first, self.chunk_size.pages() as usize);
            chunk.has_descriptors = true;
        }
        chunk.cut(order);
        state.free_pages += u64::from(self.chunk_size.pages());
        state.list(number);
        Ok(())
    }

    /// Returns the offset in the arena and the length of pages of a chunk, both in bytes.
    fn location_of(&self, number: usize, pages: Range<u32>) -> (usize, usize) {
        let first = self.chunk_size.frame_of(number, pages.start) as usize;
        let count = (pages.end - pages.start) as usize;
        (first * PAGE_BYTES as usize, count * PAGE_BYTES as usize)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Vacate,
    /// The emptied chunk is for folios of this order.
    Order(u8),
}

impl Chunk {
    fn can_serve(&self, purpose: Purpose) -> bool {
        self.is_in_service() && !self.draining && Purpose::Order(self.order()) != purpose
    }
}

/// A chunk that is being emptied. The caller must finish the evacuation.
#[derive(Debug)]
#[must_use]
pub(crate) struct Evacuation {
    pub(crate) chunk: usize,
    pub(crate) folios: Vec<FolioId>,
}

impl Arena {
    /// Returns the chunks with the fewest used pages, at most `count_max`, of those that can serve
    /// `purpose` but do not yet. The emptiest is last.
    pub(crate) fn emptiest_chunks(&self, purpose: Purpose, count_max: usize) -> Vec<usize> {
        let mut state = self.state.lock();
        self.empty_stocks(&mut state);
        let mut emptiest = BinaryHeap::new();
        let able = state.chunks.iter().enumerate().filter(|(_, chunk)| chunk.can_serve(purpose));
        for (number, chunk) in able {
            let found = (chunk.used_pages(), number);
            if emptiest.len() < count_max {
                emptiest.push(found);
            } else if emptiest.peek().is_some_and(|fullest| found < *fullest) {
                emptiest.pop();
                emptiest.push(found);
            }
        }
        self.publish(&state);
        emptiest.into_sorted_vec().into_iter().rev().map(|(_, number)| number).collect()
    }

    /// Starts to empty a chunk. Returns `None` if it does not serve `purpose` any more.
    pub(crate) fn begin_evacuation(&self, number: usize, purpose: Purpose) -> Option<Evacuation> {
        let mut state = self.state.lock();
        self.empty_stocks(&mut state);
        let chunk = &mut state.chunks[number];
        if !chunk.can_serve(purpose) {
            self.publish(&state);
            return None;
        }
        chunk.draining = true;
        let id_of = |first: u32| FolioId(self.chunk_size.frame_of(number, first));
        let folios = chunk.folios().map(id_of).collect();
        state.set_listed(number, Listed::default());
        self.publish(&state);
        Some(Evacuation { chunk: number, folios })
    }

    /// Ends an evacuation. An empty chunk is returned to the kernel or is cut for the wanted order.
    /// Returns `true` if memory was gained.
    pub(crate) fn finish_evacuation(&self, evacuation: &Evacuation, purpose: Purpose) -> bool {
        let number = evacuation.chunk;
        let mut state = self.state.lock();
        state.chunks[number].draining = false;
        state.list(number);
        let gained = state.chunks[number].is_empty()
            && match purpose {
                Purpose::Vacate => self.release_chunk(&mut state, number),
                Purpose::Order(order) => self.recut(&mut state, number, order),
            };
        self.publish(&state);
        gained
    }

    /// Cuts an empty chunk for folios of `order`, or returns it to the kernel if it has lent slots:
    /// a whole one may take its place. Returns `true` unless the kernel refused it.
    pub(super) fn recut(&self, state: &mut ArenaState, number: usize, order: u8) -> bool {
        if state.chunks[number].lent_pages() > 0 {
            return self.release_chunk(state, number);
        }
        state.set_listed(number, Listed::default());
        state.chunks[number].cut(order);
        state.list(number);
        true
    }

    /// Returns an empty chunk to the kernel, and `true` if the kernel took it. Its descriptors stay
    /// resident and charged.
    fn release_chunk(&self, state: &mut ArenaState, number: usize) -> bool {
        let (offset_bytes, bytes) = self.location_of(number, 0..self.chunk_size.pages());
        if self.memory.release(offset_bytes, bytes).is_err() {
            // The kernel refused, so the chunk stays charged and in service.
            return false;
        }
        state.set_listed(number, Listed::default());
        let chunk = &state.chunks[number];
        debug_assert!(chunk.is_empty(), "{chunk:?}");
        let resident_pages = u64::from(chunk.free_pages());
        state.lent_pages -= u64::from(chunk.lent_pages());
        state.vacate(number);
        state.free_pages -= resident_pages;
        state.frame_pages -= resident_pages;
        state.budget.give_back(resident_pages * PAGE_BYTES);
        true
    }

    /// Lends free slots of `pages_max` pages, but at least one slot, to the budget. Returns the
    /// number of their pages, fewer if no slot is free or the kernel refuses.
    pub(crate) fn lend(&self, pages_max: u64) -> u64 {
        let mut state = self.state.lock();
        self.empty_stocks(&mut state);
        let mut lent_pages = 0;
        while lent_pages < pages_max
            && let Some(pages) = self.lend_run(&mut state, pages_max - lent_pages)
        {
            lent_pages += pages;
        }
        self.publish(&state);
        lent_pages
    }

    /// Lends free slots until the bound allows another chunk. Returns `true` if it does, and lends
    /// nothing if all free slots together are too few.
    pub(crate) fn lend_for_chunk(&self) -> bool {
        let mut state = self.state.lock();
        self.empty_stocks(&mut state);
        let wanted_bytes = self.chunk_size.cost_bytes();
        let missing_pages = |state: &ArenaState| {
            wanted_bytes.saturating_sub(state.budget.left_bytes()).div_ceil(PAGE_BYTES)
        };
        if state.vacant_chunks == 0 || missing_pages(&state) > state.free_pages {
            return false;
        }
        let mut missing = missing_pages(&state);
        while missing > 0 && self.lend_run(&mut state, missing).is_some() {
            missing = missing_pages(&state);
        }
        self.publish(&state);
        missing == 0
    }

    /// Lends the first run of free slots of a chunk, preferably one that has lent slots already.
    /// Returns the number of pages.
    fn lend_run(&self, state: &mut ArenaState, pages_max: u64) -> Option<u64> {
        let is_candidate =
            |chunk: &Chunk| chunk.is_in_service() && !chunk.draining && chunk.free_pages() > 0;
        let chunks = state.chunks.iter().enumerate().filter(|(_, chunk)| is_candidate(chunk));
        let (number, chunk) =
            chunks.min_by_key(|(_, chunk)| (chunk.lent_pages() == 0, chunk.order()))?;
        let slots_max = (pages_max >> chunk.order()).clamp(1, u32::MAX.into()) as u32;
        let slots = chunk.free.first_run(slots_max)?;
        let pages = chunk.pages_of(&slots);
        if self.has_huge_chunks() {
            // The kernel would make a huge page of the chunk, with pages that are not charged.
            let (offset_bytes, bytes) = self.location_of(number, 0..self.chunk_size.pages());
            self.memory.refuse_huge_pages_in(offset_bytes, bytes).ok()?;
        }
        let (offset_bytes, bytes) = self.location_of(number, pages);
        self.memory.release(offset_bytes, bytes).ok()?;
        state.chunks[number].set_lent(slots, true);
        let pages = bytes as u64 / PAGE_BYTES;
        state.free_pages -= pages;
        state.frame_pages -= pages;
        state.lent_pages += pages;
        state.budget.give_back(bytes as u64);
        state.list(number);
        Some(pages)
    }

    /// Makes the lent slots of a chunk free, as far as the bound allows.
    fn take_lent_back(&self, state: &mut ArenaState, number: usize) -> io::Result<()> {
        while let Some(slots) = state.chunks[number].lent.first_run(u32::MAX) {
            let pages = state.chunks[number].pages_of(&slots);
            let (offset_bytes, bytes) = self.location_of(number, pages);
            if !state.budget.try_take(bytes as u64) {
                return Ok(());
            }
            if let Err(error) = self.features.populate(&self.memory, (offset_bytes, bytes), false) {
                let _ = self.memory.release(offset_bytes, bytes);
                state.budget.give_back(bytes as u64);
                return Err(error);
            }
            state.chunks[number].set_lent(slots, false);
            let pages = bytes as u64 / PAGE_BYTES;
            state.free_pages += pages;
            state.frame_pages += pages;
            state.lent_pages -= pages;
            state.list(number);
        }
        if self.has_huge_chunks() {
            let (offset_bytes, bytes) = self.location_of(number, 0..self.chunk_size.pages());
            self.memory.prefer_huge_pages_in(offset_bytes, bytes);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::HugePages;
    use crate::page::{Folios, MemorySource};
    use crate::sys::memory::kernel_flags;
    use crate::sys::probe::{Feature, Features};
    use bifolio_testing::skip;

    const MIB: u64 = 1 << 20;

    fn arena_of(bound_bytes: u64, bound_bytes_max: u64) -> (Arena, Folios) {
        let features = Features::probe(&[]);
        let arena = Arena::new(
            &MemorySource::Private,
            bound_bytes,
            bound_bytes_max,
            HugePages::Auto,
            features,
        )
        .unwrap();
        let folios = Folios::without_reaper(arena.frames() as usize);
        (arena, folios)
    }

    /// Allocates until nothing is left.
    fn fill(arena: &Arena, order: u8, folios: &Folios) -> Vec<FolioId> {
        std::iter::from_fn(|| arena.allocate(order, None, folios).unwrap()).collect()
    }

    #[test]
    fn what_is_left_of_the_bound_beyond_whole_chunks_is_for_tables() {
        for (bound_bytes, chunk_bytes) in [
            (256 << 10, 64 << 10),
            (3 * MIB + 4096, 64 << 10),
            (31 * MIB, 512 << 10),
            (32 * MIB, 2 * MIB),
            (63 * MIB, 2 * MIB),
            (80 * MIB, 2 * MIB),
        ] {
            let (arena, folios) = arena_of(bound_bytes, bound_bytes);
            assert_eq!(arena.chunk_bytes(), chunk_bytes);
            let chunk_cost_bytes = chunk_bytes + chunk_bytes / 64;
            let whole = bound_bytes / chunk_cost_bytes;
            assert_eq!(arena.obtainable_pages(), whole * chunk_bytes / PAGE_BYTES);
            fill(&arena, 2, &folios);
            assert_eq!(arena.usage().frame_bytes, whole * chunk_bytes);
            let tables = (0..).take_while(|_| arena.charge(PAGE_BYTES)).count() as u64;
            assert_eq!(tables, bound_bytes % chunk_cost_bytes / PAGE_BYTES);
        }
    }

    #[test]
    fn unused_chunks_cost_nothing_and_allocation_stops_at_the_last() {
        let (large, folios) = arena_of(4 * MIB, 64 << 30);
        assert_eq!(large.state.lock().chunks.capacity(), 0);
        assert!(large.allocate(0, None, &folios).unwrap().is_some());
        assert_eq!(large.state.lock().chunks.len(), 1);
        let (small, folios) = arena_of(4 * MIB, 4 * MIB);
        small.set_bound(1 << 40);
        assert_eq!(fill(&small, 0, &folios).len(), small.frames() as usize);
        assert_eq!(small.obtainable_pages(), 0, "no chunk is left for what the bound allows");
    }

    #[test]
    fn lent_slots_make_room_and_are_taken_back() {
        for order in [0, 2] {
            let (arena, folios) = arena_of(MIB, MIB);
            let all = fill(&arena, order, &folios);
            let before = arena.usage();
            // One folio stays in each chunk.
            for id in all.iter().filter(|id| id.0 % 16 != 0) {
                arena.free([*id]);
            }
            let free_pages = arena.obtainable_pages();
            assert!(arena.lend_for_chunk(), "a chunk for folios of another order");
            let large = arena.allocate(4, None, &folios).unwrap().unwrap();
            arena.lend(u64::MAX);
            assert_eq!(arena.lend(1), 0, "all free slots are lent");
            let least = arena.usage();
            assert_eq!(least.frame_bytes, before.frame_bytes - (free_pages - 16) * PAGE_BYTES);
            assert_eq!(least.free_pages, 0);
            let more = fill(&arena, order, &folios);
            // The large folio has the place of one of 15 chunks.
            assert_eq!(more.len(), 14 * (all.len() / 15 - 1));
            assert!(arena.usage().used_bytes <= MIB);
            for id in all.iter().filter(|id| id.0 % 16 == 0).chain(&more).chain([&large]) {
                arena.free([*id]);
            }
            assert_eq!(fill(&arena, 4, &folios).len() as u64, before.frame_bytes >> 16);
        }
    }

    #[test]
    fn the_kernel_makes_no_huge_page_of_a_chunk_with_lent_slots() {
        let (arena, folios) = arena_of(64 * MIB, 64 * MIB);
        if !arena.features.has(Feature::TransparentHugePages) {
            let reports = format!("{:?}", arena.features.reports());
            return skip(Feature::TransparentHugePages, reports);
        }
        let may_be_huge = |arena: &Arena| {
            let flags = kernel_flags(arena.base());
            !flags.contains(&"nh".to_owned()) && flags.contains(&"hg".to_owned())
        };
        let all = fill(&arena, 0, &folios);
        assert!(may_be_huge(&arena));
        arena.free([all[7]]);
        assert_eq!(arena.lend(1), 1);
        assert!(!may_be_huge(&arena), "the chunk has a hole");
        arena.set_bound(70 * MIB);
        assert_eq!(arena.allocate(0, None, &folios).unwrap(), Some(all[7]));
        assert!(may_be_huge(&arena), "the chunk is whole again");
        let (small, folios) = arena_of(31 * MIB, 31 * MIB);
        small.allocate(0, None, &folios).unwrap();
        assert!(!may_be_huge(&small), "chunks of 512 KiB");
    }
}

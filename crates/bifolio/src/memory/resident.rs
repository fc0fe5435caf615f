//! Which frames are resident: how chunks are made resident and emptied, and how single pages are
//! given back where a chunk cannot be emptied.
//!
//! Frames are made resident in need, by the thread that allocates; ahead of need, in the
//! background; or, all that are worth having, when the cache is built. Where the bound allows a
//! whole chunk, that is one that was vacant, as a huge page. What is less than that goes where
//! pages are retired, to the end of a chunk that is there in part: so a bound that is raised in
//! small steps does not leave a part of a chunk behind with each, and address space does not run
//! out before the bound does.
//!
//! The kernel zeroes 2 MiB for a chunk, which takes as long as several reads of the device; done
//! ahead, no miss waits for it. Ahead of need the arena's lock is not held meanwhile: the chunk is
//! charged and marked, and becomes everybody's when its pages are there.
//!
//! A chunk is emptied for folios of another order, or to give its memory back. `reclaim` evicts or
//! moves what is in it between [`Arena::begin_evacuation`] and [`Arena::finish_evacuation`];
//! nothing is allocated in it meanwhile.

use super::arena::{Arena, DESCRIPTOR_BYTES, FRAME_BYTES, PAGE_BYTES, State, place_of};
use super::chunk::{CHUNK_BYTES, CHUNK_PAGES, Chunk, Role};
use crate::page::{FolioId, Folios};
use std::io;
use std::ops::Range;

/// A part of a chunk, where the bound ends, is one of so many of what is there, or more; what is
/// less is left to tables.
const PARTS_WORTHWHILE: u64 = 32;

/// Pages of a chunk on their way to be resident.
#[derive(Debug)]
struct ChunkAllocation {
    chunk: usize,
    pages: Range<u32>,
    /// How many of them are not resident yet.
    new_pages: u32,
    /// Pages whose descriptors have been in use before.
    known_pages: u32,
    cost_bytes: u64,
}

impl State {
    /// Whether less than a chunk is free while the bound allows another whole one.
    pub(super) fn wants_chunk(&self) -> bool {
        let is_short = self.frame_pages > 0 && self.free_pages < u64::from(CHUNK_PAGES);
        let has_place = self.vacant_chunks > 0 && !self.is_allocation_refused;
        is_short && has_place && self.affordable_pages(0) == CHUNK_PAGES
    }

    /// Pages that may be made resident for folios of `order`: a whole chunk, or, where the bound
    /// ends, what is worth having. Some room is left for the tables then, so that a small cache
    /// need not evacuate for each of them.
    pub(super) fn affordable_pages(&self, order: u8) -> u32 {
        self.affordable_pages_of(self.budget.left_bytes(), order)
    }

    /// As many, if so much were left of the bound.
    fn affordable_pages_of(&self, left_bytes: u64, order: u8) -> u32 {
        let left = left_bytes / FRAME_BYTES;
        if left >= u64::from(CHUNK_PAGES) {
            return CHUNK_PAGES;
        }
        // Pages that are not huge cost the device requests: 6 % of them a scan 15 % of its speed.
        let worthwhile = (self.budget.bound_bytes / PAGE_BYTES / 8).min(64);
        let worthwhile = worthwhile.max(self.frame_pages / PARTS_WORTHWHILE);
        // Where regions have nearly everything, some is worth more than none.
        let worthwhile = if self.frame_pages < worthwhile { 1 } else { worthwhile };
        let pages = ((left - left / 16) >> order) << order;
        if pages >= worthwhile.max(1) { pages as u32 } else { 0 }
    }

    /// Where pages for folios of `order` are to come, and which, if so much is left of the bound.
    fn place_to_grow(&mut self, left_bytes: u64, order: u8) -> Option<(usize, Range<u32>)> {
        let pages_max = self.affordable_pages_of(left_bytes, order);
        if pages_max == 0 {
            let vacant = self.vacant_chunk();
            // A chunk whose descriptors stayed may fit where a new one does not.
            let known = |chunk: &usize| self.chunks[*chunk].descriptor_pages == CHUNK_PAGES;
            if let Some(chunk) = vacant.filter(known)
                && left_bytes >= CHUNK_BYTES
            {
                return Some((chunk, 0..CHUNK_PAGES));
            }
            // Retired pages come back one by one, but for the room of tables: whoever takes that
            // has a chunk emptied for the next of them.
            let left_pages = (left_bytes / PAGE_BYTES).saturating_sub(self.table_room_pages());
            return self.revivable(order, left_pages.min(CHUNK_PAGES.into()) as u32, true);
        }
        let whole = (pages_max == CHUNK_PAGES).then(|| self.vacant_chunk()).flatten();
        if let Some(chunk) = whole {
            return Some((chunk, 0..CHUNK_PAGES));
        }
        let revivable = self.revivable(order, pages_max, false);
        revivable.or_else(|| Some((self.vacant_chunk()?, 0..pages_max)))
    }

    /// Pages of the bound that are kept for tables, while there are chunks to be emptied.
    fn table_room_pages(&self) -> u64 {
        let kept = self.budget.bound_bytes / PAGE_BYTES / 256;
        if self.spends_table_room { 0 } else { kept.min(u64::from(CHUNK_PAGES) / 16) }
    }

    /// Retired pages in a chunk for folios of `order`.
    fn revivable(&self, order: u8, pages_max: u32, known: bool) -> Option<(usize, Range<u32>)> {
        if self.retired_pages == 0 || pages_max < 1 << order {
            return None;
        }
        let chunks = self.chunks.iter().enumerate().filter(|(_, chunk)| chunk.is_for(order));
        let mut found = chunks.filter_map(|(number, chunk)| {
            Some((number, chunk.revivable(order, pages_max, known)?))
        });
        found.next()
    }

    /// The first chunk that is not in use. Those that never were cost nothing: there is address
    /// space for as many as the machine's memory, perhaps.
    fn vacant_chunk(&mut self) -> Option<usize> {
        if self.vacant_chunks == 0 {
            return None;
        }
        let known = self.chunks.iter().position(|chunk| chunk.role == Role::Vacant);
        if known.is_none() && self.chunks.len() < self.chunks_max {
            self.chunks.push(Chunk::vacant());
            return Some(self.chunks.len() - 1);
        }
        known
    }

    /// Charges pages of a chunk that are to be made resident.
    fn begin_chunk_allocation(
        &mut self,
        number: usize,
        pages: Range<u32>,
    ) -> Option<ChunkAllocation> {
        let chunk = &self.chunks[number];
        let (new_pages, known_pages) = (chunk.retired_in(pages.clone()), chunk.descriptor_pages);
        let descriptors = u64::from(pages.end.saturating_sub(known_pages));
        let cost_bytes = u64::from(new_pages) * PAGE_BYTES + descriptors * DESCRIPTOR_BYTES;
        if new_pages == 0 || !self.budget.try_take(cost_bytes) {
            return None;
        }
        if chunk.role == Role::Vacant {
            self.chunks[number].role = Role::Allocating;
            self.vacant_chunks -= 1;
        }
        self.frame_pages += u64::from(new_pages);
        Some(ChunkAllocation { chunk: number, pages, new_pages, known_pages, cost_bytes })
    }

    /// Takes back what [`Self::begin_chunk_allocation`] did.
    fn cancel_chunk_allocation(&mut self, allocation: &ChunkAllocation) {
        if self.chunks[allocation.chunk].role == Role::Allocating {
            self.chunks[allocation.chunk].role = Role::Vacant;
            self.vacant_chunks += 1;
        }
        self.frame_pages -= u64::from(allocation.new_pages);
        self.budget.give_back(allocation.cost_bytes);
    }
}

impl Arena {
    /// Makes frames resident for folios of `order`, if the bound allows what is worth having;
    /// whether there is a free slot more.
    pub(super) fn grow(&self, state: &mut State, order: u8, folios: &Folios) -> io::Result<bool> {
        let left_bytes = state.budget.left_bytes();
        let Some((chunk, pages)) = state.place_to_grow(left_bytes, order) else {
            return Ok(false);
        };
        let Some(allocation) = state.begin_chunk_allocation(chunk, pages) else { return Ok(false) };
        let populated = self.populate(&allocation);
        self.end_growth(state, &allocation, order, populated, folios)?;
        Ok(true)
    }

    /// Makes a chunk resident that will be needed soon; whether there was one.
    ///
    /// # Errors
    /// The kernel refuses memory that the bound allows.
    pub(crate) fn preallocate(&self, folios: &Folios) -> io::Result<bool> {
        self.grow_if(State::wants_chunk, folios)
    }

    /// Makes chunks resident until no more than `left_bytes` are left of the bound.
    ///
    /// # Errors
    /// As [`Self::preallocate`].
    pub(crate) fn grow_until(&self, left_bytes: u64, folios: &Folios) -> io::Result<()> {
        let has_more = |state: &State| {
            state.budget.left_bytes() >= left_bytes + u64::from(CHUNK_PAGES) * FRAME_BYTES
        };
        while self.grow_if(has_more, folios)? {}
        Ok(())
    }

    fn grow_if(&self, wants: impl Fn(&State) -> bool, folios: &Folios) -> io::Result<bool> {
        let allocation = {
            let mut state = self.state.lock();
            let vacant = if wants(&state) { state.vacant_chunk() } else { None };
            let allocation =
                vacant.and_then(|chunk| state.begin_chunk_allocation(chunk, 0..CHUNK_PAGES));
            state.is_allocating_chunk = allocation.is_some();
            self.publish(&state);
            allocation
        };
        let Some(allocation) = allocation else { return Ok(false) };
        let populated = self.populate(&allocation);
        let mut state = self.state.lock();
        let order = state.last_order;
        let ended = self.end_growth(&mut state, &allocation, order, populated, folios);
        state.is_allocation_refused = ended.is_err();
        state.is_allocating_chunk = false;
        self.grown.notify_all();
        self.publish(&state);
        ended.map(|()| true)
    }

    fn populate(&self, allocation: &ChunkAllocation) -> io::Result<()> {
        let (offset_bytes, bytes) = place_of(allocation.chunk, &allocation.pages);
        let is_whole = allocation.pages == (0..CHUNK_PAGES);
        if !is_whole && !self.keep_small(allocation.chunk) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let huge = self.may_use_huge_pages() && is_whole;
        self.memory.populate(offset_bytes, bytes, huge, &self.features)
    }

    /// Makes pages that are there free ones, in a chunk that was vacant as slots of `order`; or
    /// takes everything back.
    fn end_growth(
        &self,
        state: &mut State,
        allocation: &ChunkAllocation,
        order: u8,
        populated: io::Result<()>,
        folios: &Folios,
    ) -> io::Result<()> {
        let ChunkAllocation { chunk: number, ref pages, new_pages, known_pages, .. } = *allocation;
        if let Err(error) = populated {
            let (offset_bytes, bytes) = place_of(number, pages);
            let _ = self.memory.release(offset_bytes, bytes);
            state.cancel_chunk_allocation(allocation);
            return Err(error);
        }
        if pages.end > known_pages {
            let first_new = FolioId(number as u32 * CHUNK_PAGES + known_pages);
            folios.init_free(first_new, (pages.end - known_pages) as usize);
        }
        state.unused_pages += u64::from(new_pages);
        let chunk = &mut state.chunks[number];
        chunk.descriptor_pages = known_pages.max(pages.end);
        if chunk.role == Role::Allocating {
            chunk.begin(pages.clone(), order);
            state.retired_pages += u64::from(CHUNK_PAGES - new_pages);
            state.free_pages += u64::from(chunk.free_pages());
        } else {
            let free_before = u64::from(chunk.free_pages());
            chunk.revive(pages.clone());
            state.retired_pages -= u64::from(new_pages);
            state.free_pages += u64::from(chunk.free_pages()) - free_before;
            if chunk.retired_pages() == 0 && self.may_use_huge_pages() {
                let offset_bytes = number * CHUNK_BYTES as usize;
                self.memory.prefer_huge_pages_in(offset_bytes, CHUNK_BYTES as usize);
            }
        }
        state.list(number);
        Ok(())
    }
}

/// The reason to empty a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To give it back to the kernel.
    Vacate,
    /// For folios of this order.
    Order(u8),
}

/// A chunk that is being emptied; finish or cancel it.
#[derive(Debug)]
#[must_use]
pub(crate) struct Evacuation {
    chunk: usize,
    /// The folios in it when the evacuation began.
    pub(crate) folios: Vec<FolioId>,
}

impl Evacuation {
    /// The number of the chunk.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk
    }
}

impl Arena {
    /// Starts to empty the chunk with the least loss, of those that can serve `purpose`
    /// and do not, and are not in `tried`.
    pub(crate) fn begin_evacuation(&self, purpose: Purpose, tried: &[usize]) -> Option<Evacuation> {
        let fits = |chunk: &Chunk| match purpose {
            Purpose::Vacate => true,
            Purpose::Order(order) => {
                chunk.resident_pages() >= 1 << order && !chunk.is_all_of(order)
            }
        };
        self.begin_evacuation_of(fits, tried)
    }

    /// Starts to empty a chunk that cannot serve folios of `order`, because too little of it is
    /// resident.
    pub(crate) fn begin_evacuation_of_part(
        &self,
        order: u8,
        tried: &[usize],
    ) -> Option<Evacuation> {
        self.begin_evacuation_of(|chunk| chunk.resident_pages() < 1 << order, tried)
    }

    fn begin_evacuation_of(
        &self,
        fits: impl Fn(&Chunk) -> bool,
        tried: &[usize],
    ) -> Option<Evacuation> {
        let mut state = self.state.lock();
        let candidates = state.chunks.iter().enumerate().filter(|(number, chunk)| {
            let is_idle = chunk.is_in_service() && !chunk.draining && !tried.contains(number);
            is_idle && fits(chunk)
        });
        let (number, _) = candidates.min_by_key(|(_, chunk)| chunk.loss())?;
        let chunk = &mut state.chunks[number];
        chunk.draining = true;
        let id_of = |first: u32| FolioId(number as u32 * CHUNK_PAGES + first);
        let folios = chunk.folios().map(id_of).collect();
        state.unlist(number);
        self.publish(&state);
        Some(Evacuation { chunk: number, folios })
    }

    /// Ends an evacuation. An empty chunk goes back to the kernel, or is free for any order; of one
    /// that could not be emptied, what has become free serves the order it was wanted for. Tells
    /// whether anything was gained.
    pub(crate) fn finish_evacuation(&self, evacuation: &Evacuation, purpose: Purpose) -> bool {
        let number = evacuation.chunk;
        let mut state = self.state.lock();
        state.chunks[number].draining = false;
        let is_empty = state.chunks[number].is_empty();
        let gained = match purpose {
            Purpose::Vacate if is_empty => self.release_chunk(&mut state, number),
            Purpose::Order(order) => {
                let is_cut = state.cut_around(number, order);
                // Of what has holes everywhere, a whole one may take the place.
                is_cut || is_empty && self.release_chunk(&mut state, number)
            }
            Purpose::Vacate => false,
        };
        if state.chunks[number].is_in_service() {
            state.list(number);
        }
        self.publish(&state);
        gained
    }

    /// Gives an empty chunk back to the kernel; whether it took it. Its descriptors stay, and stay
    /// charged.
    fn release_chunk(&self, state: &mut State, number: usize) -> bool {
        let offset_bytes = number * CHUNK_BYTES as usize;
        if self.memory.release(offset_bytes, CHUNK_BYTES as usize).is_err() {
            // The kernel keeps it, so it stays charged and in service.
            return false;
        }
        let chunk = &mut state.chunks[number];
        let resident_pages = u64::from(chunk.resident_pages());
        state.retired_pages -= u64::from(chunk.retired_pages());
        state.free_pages -= u64::from(chunk.free_pages());
        state.unused_pages -= resident_pages;
        chunk.vacate();
        state.spends_table_room = false;
        state.vacant_chunks += 1;
        state.frame_pages -= resident_pages;
        state.budget.give_back(resident_pages * PAGE_BYTES);
        true
    }

    /// Gives free frames back to the kernel, wherever they are, until pages for a folio of `order`
    /// can be made resident in a row; whether they can. None if all that are free are too few.
    pub(crate) fn retire_for(&self, order: u8) -> bool {
        loop {
            let mut state = self.state.lock();
            state.spends_table_room = true;
            let left_bytes = state.budget.left_bytes();
            if state.place_to_grow(left_bytes, order).is_some() {
                return true;
            }
            let all_bytes = left_bytes + state.unused_pages * PAGE_BYTES;
            let is_in_vain = state.place_to_grow(all_bytes, order).is_none();
            drop(state);
            if is_in_vain || self.retire_pages(1 << order) == 0 {
                return false;
            }
        }
    }

    /// Gives free frames that stand in a row, at most `pages_max`, back to the kernel: those of
    /// chunks that have been broken already before others. Tells how many.
    pub(crate) fn retire_pages(&self, pages_max: u32) -> u32 {
        let mut state = self.state.lock();
        let found = state.free_pages_to_retire(pages_max);
        let Some((number, pages)) = found else { return 0 };
        let count = pages.end - pages.start;
        let (offset_bytes, bytes) = place_of(number, &pages);
        if !self.keep_small(number) || self.memory.release(offset_bytes, bytes).is_err() {
            return 0;
        }
        let chunk = &mut state.chunks[number];
        let free_before = u64::from(chunk.free_pages());
        chunk.retire(pages);
        let free_after = u64::from(chunk.free_pages());
        state.free_pages = state.free_pages + free_after - free_before;
        state.unused_pages -= u64::from(count);
        state.retired_pages += u64::from(count);
        state.frame_pages -= u64::from(count);
        state.budget.give_back(u64::from(count) * PAGE_BYTES);
        state.list(number);
        self.publish(&state);
        count
    }
}

impl State {
    /// Cuts a chunk, which is on no list, for folios of `order`, around those that are in it; not
    /// if there is no room for one.
    fn cut_around(&mut self, number: usize, order: u8) -> bool {
        let pages_max = self.affordable_pages(order);
        let chunk = &self.chunks[number];
        let has_room =
            chunk.has_slot_of(order) || chunk.revivable(order, pages_max, false).is_some();
        if has_room {
            self.cut(number, order);
        }
        has_room
    }

    /// The pages that [`Arena::retire_pages`] takes: where little is lost.
    fn free_pages_to_retire(&self, pages_max: u32) -> Option<(usize, Range<u32>)> {
        let is_candidate = |chunk: &Chunk| {
            let is_idle = chunk.is_in_service() && !chunk.draining;
            is_idle && chunk.used_pages() < chunk.resident_pages()
        };
        let chunks = self.chunks.iter().enumerate().filter(|(_, chunk)| is_candidate(chunk));
        let (number, chunk) =
            chunks.min_by_key(|(_, chunk)| (chunk.retired_pages() == 0, chunk.order()))?;
        Some((number, chunk.first_free_pages(pages_max)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::HugePages;
    use crate::sys::memory::kernel_flags;
    use crate::sys::probe::{Feature, Features};
    use bifolio_testing::skip;

    #[test]
    fn a_chunk_where_the_bound_ends_leaves_room_for_tables() {
        // A whole chunk first, then what is left of the bound, for folios of each size.
        for (order, room_pages) in [(0, 10), (3, 16), (5, 32)] {
            let bound_bytes = (u64::from(CHUNK_PAGES) + 160) * FRAME_BYTES;
            let features = Features::probe(&[]);
            let arena = Arena::new(bound_bytes, 2 * CHUNK_BYTES, HugePages::Never, features);
            let arena = arena.unwrap();
            let folios = Folios::without_reaper(2 * CHUNK_PAGES as usize);
            while arena.allocate(order, None, &folios).unwrap().is_some() {}
            let pages = u64::from(CHUNK_PAGES) + 160 - room_pages;
            assert_eq!(arena.usage().frame_bytes, pages * PAGE_BYTES, "order {order}");
            let tables = (0..).take_while(|_| arena.charge(PAGE_BYTES)).count() as u64;
            assert_eq!(tables, room_pages, "order {order}");
            assert!(arena.usage().used_bytes <= bound_bytes);
        }
    }

    #[test]
    fn small_pages_are_a_small_part_only_of_small_caches() {
        for (chunks, rest_pages, has_part) in [(3, 100, true), (16, 400, true), (32, 500, false)] {
            let bound_bytes = (chunks * u64::from(CHUNK_PAGES) + rest_pages) * FRAME_BYTES;
            let features = Features::probe(&[]);
            let space_bytes = (chunks + 2) * CHUNK_BYTES;
            let arena = Arena::new(bound_bytes, space_bytes, HugePages::Never, features).unwrap();
            let folios = Folios::without_reaper((chunks as usize + 2) * CHUNK_PAGES as usize);
            while arena.allocate(0, None, &folios).unwrap().is_some() {}
            let part_bytes = arena.usage().frame_bytes - chunks * CHUNK_BYTES;
            assert_eq!(part_bytes > 0, has_part, "{chunks} chunks: {part_bytes}");
        }
    }

    #[test]
    fn unused_chunks_cost_nothing_and_no_more_come_than_fit() {
        let features = || Features::probe(&[]);
        let chunks_max = Arena::chunks_max(CHUNK_BYTES);
        let pages_max = chunks_max as usize * CHUNK_PAGES as usize;
        let folios = Folios::without_reaper(pages_max);
        let bound_bytes = 2 * chunks_max * CHUNK_BYTES;
        let large = Arena::new(bound_bytes, 1 << 40, HugePages::Never, features()).unwrap();
        assert_eq!(large.state.lock().chunks.capacity(), 0);
        assert!(large.allocate(0, None, &folios).unwrap().is_some());
        assert_eq!(large.state.lock().chunks.len(), 1);
        let small = Arena::new(bound_bytes, CHUNK_BYTES, HugePages::Never, features()).unwrap();
        let found = (0..).take_while(|_| small.allocate(0, None, &folios).unwrap().is_some());
        assert_eq!(found.count(), pages_max);
        assert_eq!(small.obtainable_pages(), 0, "no place is left for what the bound allows");
    }

    #[test]
    fn the_kernel_makes_no_huge_page_of_a_chunk_with_holes() {
        let features = Features::probe(&[]);
        if !features.has(Feature::TransparentHugePages) {
            return skip(Feature::TransparentHugePages, format!("{:?}", features.reports()));
        }
        let folios = Folios::without_reaper(16 * CHUNK_PAGES as usize);
        let pages = u64::from(CHUNK_PAGES);
        let bound_bytes = (pages + 200) * FRAME_BYTES;
        let arena = Arena::new(bound_bytes, 4 * CHUNK_BYTES, HugePages::Auto, features).unwrap();
        let may_be_huge = |frame: u64| {
            let flags = kernel_flags(arena.base().wrapping_add((frame * PAGE_BYTES) as usize));
            !flags.contains(&"nh".to_owned()) && flags.contains(&"hg".to_owned())
        };
        let all = (0..pages + 188).map(|_| arena.allocate(0, None, &folios).unwrap().unwrap());
        let all: Vec<_> = all.collect();
        assert!(may_be_huge(0) && !may_be_huge(pages), "a whole one, and part of one");
        arena.free(all[7]);
        assert_eq!(arena.retire_pages(1), 1);
        assert!(!may_be_huge(0), "it has a hole");
        arena.set_bound(2 * pages * FRAME_BYTES);
        arena.allocate(0, None, &folios).unwrap().unwrap();
        assert!(may_be_huge(0) && !may_be_huge(pages), "it is whole again");
    }
}

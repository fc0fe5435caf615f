//! Resident frames: makes chunks resident, empties chunks, and returns single pages to the kernel
//! where a chunk cannot be emptied.
//!
//! Frames are made resident when an allocation needs one, by the thread that allocates; ahead of
//! need, in the background; or all at once, when the cache is built. Where the bound allows a whole
//! chunk, a vacant chunk becomes resident as a huge page. Fewer pages go to retired pages and to
//! the end of a partly resident chunk. So raising the bound in small steps does not create a
//! partial chunk with each step, and address space does not run out before the bound does.
//!
//! The kernel zeroes 2 MiB for a chunk, which takes as long as several reads of the device; when
//! this happens ahead of need, no miss waits for it. The arena's lock is then released meanwhile:
//! the chunk is charged and marked first, and can be used once its pages are resident.
//!
//! A chunk is emptied for folios of another order, or to return its memory. `reclaim` evicts or
//! moves its folios between [`Arena::begin_evacuation`] and [`Arena::finish_evacuation`]; nothing
//! is allocated in it meanwhile.

use super::arena::{Arena, ArenaState, DESCRIPTOR_BYTES, FRAME_BYTES, PAGE_BYTES, location_of};
use super::chunk::{CHUNK_BYTES, CHUNK_PAGES, Chunk, Role};
use crate::page::{FolioId, Folios};
use std::io;
use std::ops::Range;

/// Divisor of the smallest partial chunk, where the bound ends, that is made resident: it must add
/// at least 1/32 of the resident frames. Otherwise its pages are left to tables.
const PARTIAL_CHUNK_DIVISOR: u64 = 32;

/// Pages of a chunk that are being made resident.
#[derive(Debug)]
struct ChunkAllocation {
    chunk: usize,
    pages: Range<u32>,
    /// Number of `pages` that are not resident yet.
    new_pages: u32,
    /// Number of leading pages of the chunk whose descriptors are already charged.
    known_pages: u32,
    cost_bytes: u64,
}

impl ArenaState {
    /// Returns `true` if less than a chunk is free and the bound allows another whole one.
    pub(super) fn wants_chunk(&self) -> bool {
        let is_short = self.frame_pages > 0 && self.free_pages < u64::from(CHUNK_PAGES);
        let has_space = self.vacant_chunks > 0 && !self.is_allocation_refused;
        is_short && has_space && self.affordable_pages(0) == CHUNK_PAGES
    }

    /// Returns the number of pages that may be made resident for folios of `order`: a whole chunk,
    /// or, where the bound ends, a part that is worth having. In the second case some room is kept
    /// for tables, so that a small cache need not evacuate a chunk for each of them.
    pub(super) fn affordable_pages(&self, order: u8) -> u32 {
        self.affordable_pages_of(self.budget.left_bytes(), order)
    }

    /// Returns [`Self::affordable_pages`] for `left_bytes` left of the bound.
    pub(super) fn affordable_pages_of(&self, left_bytes: u64, order: u8) -> u32 {
        let left = left_bytes / FRAME_BYTES;
        if left >= u64::from(CHUNK_PAGES) {
            return CHUNK_PAGES;
        }
        // Small pages cost more device requests: a cache with 6 % of small pages scans 15 % more
        // slowly.
        let worthwhile = (self.budget.bound_bytes / PAGE_BYTES / 8).min(64);
        let worthwhile = worthwhile.max(self.frame_pages / PARTIAL_CHUNK_DIVISOR);
        // If regions use nearly all memory, a few pages are worth more than none.
        let worthwhile = if self.frame_pages < worthwhile { 1 } else { worthwhile };
        let pages = ((left - left / 16) >> order) << order;
        if pages >= worthwhile.max(1) { pages as u32 } else { 0 }
    }

    /// Chooses the chunk and the pages to make resident for folios of `order`, if `left_bytes` are
    /// left of the bound.
    fn pages_to_add(&mut self, left_bytes: u64, order: u8) -> Option<(usize, Range<u32>)> {
        let pages_max = self.affordable_pages_of(left_bytes, order);
        if pages_max == 0 {
            let vacant = self.vacant_chunk();
            // A chunk whose descriptors are already charged may fit where a new one does not.
            let known = |chunk: &usize| self.chunks[*chunk].descriptor_pages == CHUNK_PAGES;
            if let Some(chunk) = vacant.filter(known)
                && left_bytes >= CHUNK_BYTES
            {
                return Some((chunk, 0..CHUNK_PAGES));
            }
            // Single retired pages are revived, except for the room kept for tables: otherwise the
            // next table would need an evacuation.
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

    /// Returns the number of pages of the bound that are kept for tables while chunks can still be
    /// emptied.
    fn table_room_pages(&self) -> u64 {
        let kept = self.budget.bound_bytes / PAGE_BYTES / 256;
        if self.spends_table_room { 0 } else { kept.min(u64::from(CHUNK_PAGES) / 16) }
    }

    /// Returns retired pages in a chunk for folios of `order`.
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

    /// Returns the first vacant chunk. Chunks that were never used have no state here: the address
    /// space may have room for as many chunks as the machine has memory.
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

    /// Charges pages of a chunk before they are made resident.
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

    /// Reverts [`Self::begin_chunk_allocation`].
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
    /// Makes frames resident for folios of `order` if the bound allows enough of them. Returns
    /// `true` if that added a free slot.
    pub(super) fn grow(
        &self,
        state: &mut ArenaState,
        order: u8,
        folios: &Folios,
    ) -> io::Result<bool> {
        let left_bytes = state.budget.left_bytes();
        let Some((chunk, pages)) = state.pages_to_add(left_bytes, order) else {
            return Ok(false);
        };
        let Some(allocation) = state.begin_chunk_allocation(chunk, pages) else { return Ok(false) };
        let populated = self.populate(&allocation);
        self.end_growth(state, &allocation, order, populated, folios)?;
        Ok(true)
    }

    /// Makes a chunk resident ahead of need. Returns `false` if none was wanted.
    ///
    /// # Errors
    /// The kernel refuses memory that the bound allows.
    pub(crate) fn preallocate(&self, folios: &Folios) -> io::Result<bool> {
        self.grow_if(ArenaState::wants_chunk, folios)
    }

    /// Makes chunks resident until no more than `left_bytes` are left of the bound.
    ///
    /// # Errors
    /// The kernel refuses memory that the bound allows.
    pub(crate) fn grow_until(&self, left_bytes: u64, folios: &Folios) -> io::Result<()> {
        let has_more = |state: &ArenaState| {
            state.budget.left_bytes() >= left_bytes + u64::from(CHUNK_PAGES) * FRAME_BYTES
        };
        while self.grow_if(has_more, folios)? {}
        Ok(())
    }

    fn grow_if(&self, wants: impl Fn(&ArenaState) -> bool, folios: &Folios) -> io::Result<bool> {
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
        let (offset_bytes, bytes) = location_of(allocation.chunk, &allocation.pages);
        let is_whole = allocation.pages == (0..CHUNK_PAGES);
        if !is_whole {
            self.keep_small(allocation.chunk)?;
        }
        let huge = self.may_use_huge_pages() && is_whole;
        self.memory.populate(offset_bytes, bytes, huge, &self.features)
    }

    /// Ends the allocation. If the pages are resident, makes them free, in a vacant chunk as slots
    /// of `order`; otherwise reverts everything.
    fn end_growth(
        &self,
        state: &mut ArenaState,
        allocation: &ChunkAllocation,
        order: u8,
        populated: io::Result<()>,
        folios: &Folios,
    ) -> io::Result<()> {
        let ChunkAllocation { chunk: number, ref pages, new_pages, known_pages, .. } = *allocation;
        if let Err(error) = populated {
            let (offset_bytes, bytes) = location_of(number, pages);
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
    /// To return it to the kernel.
    Vacate,
    /// To use it for folios of this order.
    Order(u8),
}

/// A chunk that is being emptied. The caller must finish the evacuation.
#[derive(Debug)]
#[must_use]
pub(crate) struct Evacuation {
    chunk: usize,
    /// The folios in the chunk when the evacuation began.
    pub(crate) folios: Vec<FolioId>,
}

impl Evacuation {
    /// Returns the number of the chunk.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk
    }
}

impl Arena {
    /// Starts to empty the chunk with the least loss among those that can serve `purpose` but do
    /// not yet, except the chunks in `tried`.
    pub(crate) fn begin_evacuation(&self, purpose: Purpose, tried: &[usize]) -> Option<Evacuation> {
        let fits = |chunk: &Chunk| match purpose {
            Purpose::Vacate => true,
            Purpose::Order(order) => {
                chunk.resident_pages() >= 1 << order && !chunk.is_all_of(order)
            }
        };
        self.begin_evacuation_of(fits, tried)
    }

    /// Starts to empty a chunk that is too little resident to serve folios of `order`.
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
        self.empty_stocks(&mut state);
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

    /// Ends an evacuation. An empty chunk is returned to the kernel or is cut for the wanted order.
    /// If the chunk is not empty, its free pages serve the order it was wanted for. Returns `true`
    /// if memory was gained.
    pub(crate) fn finish_evacuation(&self, evacuation: &Evacuation, purpose: Purpose) -> bool {
        let number = evacuation.chunk;
        let mut state = self.state.lock();
        state.chunks[number].draining = false;
        let is_empty = state.chunks[number].is_empty();
        let gained = match purpose {
            Purpose::Vacate if is_empty => self.release_chunk(&mut state, number),
            Purpose::Order(order) => {
                let is_cut = state.cut_around(number, order);
                // If every slot contains a retired page, a whole chunk may take its place.
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

    /// Returns an empty chunk to the kernel, and `true` if the kernel took it. Its descriptors stay
    /// resident and charged.
    fn release_chunk(&self, state: &mut ArenaState, number: usize) -> bool {
        let offset_bytes = number * CHUNK_BYTES as usize;
        if self.memory.release(offset_bytes, CHUNK_BYTES as usize).is_err() {
            // The kernel refused, so the chunk stays charged and in service.
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

    /// Returns scattered free frames to the kernel until a run of pages for a folio of `order` can
    /// be made resident. Returns `true` if it can, and returns no frames if all free frames
    /// together are too few.
    pub(crate) fn retire_for(&self, order: u8) -> bool {
        loop {
            let mut state = self.state.lock();
            state.spends_table_room = true;
            let left_bytes = state.budget.left_bytes();
            if state.pages_to_add(left_bytes, order).is_some() {
                return true;
            }
            let all_bytes = left_bytes + state.unused_pages * PAGE_BYTES;
            let too_few = state.pages_to_add(all_bytes, order).is_none();
            drop(state);
            if too_few || self.retire_pages(1 << order) == 0 {
                return false;
            }
        }
    }

    /// Returns a run of free frames, at most `pages_max`, to the kernel, and their number. Prefers
    /// chunks that are already broken.
    pub(crate) fn retire_pages(&self, pages_max: u32) -> u32 {
        let mut state = self.state.lock();
        self.empty_stocks(&mut state);
        let found = state.free_pages_to_retire(pages_max);
        let Some((number, pages)) = found else { return 0 };
        let count = pages.end - pages.start;
        let (offset_bytes, bytes) = location_of(number, &pages);
        let released =
            self.keep_small(number).and_then(|()| self.memory.release(offset_bytes, bytes));
        if released.is_err() {
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

impl ArenaState {
    /// Cuts a chunk that is on no list for folios of `order`, around the folios in it. Returns
    /// `false` if it has no room for one.
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

    /// Chooses the pages that [`Arena::retire_pages`] returns to the kernel, where the loss is
    /// small.
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

/// The bound and the bytes charged against it. Pure arithmetic under the arena's lock.
#[derive(Debug)]
pub(super) struct Budget {
    pub(super) bound_bytes: u64,
    pub(super) used_bytes: u64,
}

impl Budget {
    pub(super) fn new(bound_bytes: u64) -> Self {
        Self { bound_bytes, used_bytes: 0 }
    }

    /// Returns the number of bytes that can still be charged.
    pub(super) fn left_bytes(&self) -> u64 {
        self.bound_bytes.saturating_sub(self.used_bytes)
    }

    /// Returns the number of bytes charged above the bound.
    pub(super) fn excess_bytes(&self) -> u64 {
        self.used_bytes.saturating_sub(self.bound_bytes)
    }

    /// Charges `bytes` if they fit.
    #[must_use]
    pub(super) fn try_take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.left_bytes();
        if fits {
            self.used_bytes += bytes;
        }
        fits
    }

    pub(super) fn give_back(&mut self, bytes: u64) {
        debug_assert!(
            bytes <= self.used_bytes,
            "cannot release {bytes} bytes: only {} are charged",
            self.used_bytes
        );
        self.used_bytes -= bytes;
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
        // A whole chunk, then the rest of the bound, for folios of each size.
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
    fn only_small_caches_use_a_partial_chunk() {
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
    fn unused_chunks_cost_nothing_and_allocation_stops_at_the_last() {
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
        assert_eq!(small.obtainable_pages(), 0, "no chunk is left for what the bound allows");
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
        assert!(may_be_huge(0) && !may_be_huge(pages), "one whole chunk, one partial chunk");
        arena.free(all[7]);
        assert_eq!(arena.retire_pages(1), 1);
        assert!(!may_be_huge(0), "the chunk has a hole");
        arena.set_bound(2 * pages * FRAME_BYTES);
        arena.allocate(0, None, &folios).unwrap().unwrap();
        assert!(may_be_huge(0) && !may_be_huge(pages), "the chunk is whole again");
    }
}

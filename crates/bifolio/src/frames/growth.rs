//! Making chunks resident: in need, by whoever allocates; ahead of need, in the background; or all
//! that are worth having, when the cache is built.
//!
//! The kernel zeroes 2 MiB for a chunk, which takes as long as several reads of the device; done
//! ahead, no miss waits for it. Ahead of need the arena's lock is not held meanwhile: the chunk is
//! charged and marked, and becomes everybody's when its pages are there.

use super::arena::{Arena, DESCRIPTOR_BYTES, FRAME_BYTES, PAGE_BYTES, State};
use super::chunk::{CHUNK_BYTES, CHUNK_PAGES, Chunk, Role};
use crate::folio::{FolioId, Folios};
use std::io;

/// A chunk on its way to be resident.
#[derive(Debug)]
struct Growth {
    chunk: usize,
    pages: u32,
    /// Pages whose descriptors have been in use before.
    known_pages: u32,
    cost_bytes: u64,
}

impl State {
    /// Whether less than a chunk is free while the bound allows another whole one.
    pub(super) fn wants_chunk(&self) -> bool {
        let is_short = self.frame_pages > 0 && self.free_pages < u64::from(CHUNK_PAGES);
        is_short && !self.is_growth_refused && self.affordable_pages(0) == CHUNK_PAGES
    }

    /// The first chunk that is not in use. Those that never were cost nothing: there is address
    /// space for as many as the machine's memory, perhaps.
    fn vacant_chunk(&mut self) -> Option<usize> {
        let known = self.chunks.iter().position(|chunk| chunk.role == Role::Vacant);
        if known.is_none() && self.chunks.len() < self.chunks_max {
            self.chunks.push(Chunk::vacant());
            return Some(self.chunks.len() - 1);
        }
        known
    }

    /// Charges the first vacant chunk, with so many pages.
    fn begin_growth(&mut self, pages: u32) -> Option<Growth> {
        let chunk = self.vacant_chunk()?;
        let known_pages = self.chunks[chunk].descriptor_pages;
        let descriptors = u64::from(pages.saturating_sub(known_pages));
        let cost_bytes = u64::from(pages) * PAGE_BYTES + descriptors * DESCRIPTOR_BYTES;
        if pages == 0 || !self.budget.try_take(cost_bytes) {
            return None;
        }
        self.chunks[chunk].role = Role::Growing;
        self.frame_pages += u64::from(pages);
        Some(Growth { chunk, pages, known_pages, cost_bytes })
    }
}

impl Arena {
    /// Makes a vacant chunk resident, if the bound allows one worth having.
    pub(super) fn add_chunk(
        &self,
        state: &mut State,
        order: u8,
        folios: &Folios,
    ) -> io::Result<Option<usize>> {
        let pages = state.affordable_pages(order);
        let Some(growth) = state.begin_growth(pages) else { return Ok(None) };
        let populated = self.populate(&growth);
        self.end_growth(state, growth, order, populated, folios).map(Some)
    }

    /// Makes a chunk resident that will be needed soon; whether there was one.
    ///
    /// # Errors
    /// The kernel refuses memory that the bound allows.
    pub(crate) fn grow_ahead(&self, folios: &Folios) -> io::Result<bool> {
        self.grow_if(State::wants_chunk, folios)
    }

    /// Makes chunks resident until no more than `left_bytes` are left of the bound.
    ///
    /// # Errors
    /// As [`Self::grow_ahead`].
    pub(crate) fn grow_until(&self, left_bytes: u64, folios: &Folios) -> io::Result<()> {
        let has_more = |state: &State| {
            state.budget.left_bytes() >= left_bytes + u64::from(CHUNK_PAGES) * FRAME_BYTES
        };
        while self.grow_if(has_more, folios)? {}
        Ok(())
    }

    fn grow_if(&self, wants: impl Fn(&State) -> bool, folios: &Folios) -> io::Result<bool> {
        let growth = {
            let mut state = self.state.lock();
            let growth = if wants(&state) { state.begin_growth(CHUNK_PAGES) } else { None };
            state.is_growing = growth.is_some();
            self.publish(&state);
            growth
        };
        let Some(growth) = growth else { return Ok(false) };
        let populated = self.populate(&growth);
        let mut state = self.state.lock();
        let order = state.last_order;
        let ended = self.end_growth(&mut state, growth, order, populated, folios);
        state.is_growth_refused = ended.is_err();
        state.is_growing = false;
        self.grown.notify_all();
        self.publish(&state);
        ended.map(|_| true)
    }

    fn populate(&self, growth: &Growth) -> io::Result<()> {
        let offset_bytes = growth.chunk * CHUNK_BYTES as usize;
        let frame_bytes = growth.pages as usize * PAGE_BYTES as usize;
        let huge = self.may_use_huge_pages() && growth.pages == CHUNK_PAGES;
        self.memory.populate(offset_bytes, frame_bytes, huge, &self.features)
    }

    /// Cuts a chunk whose pages are there into slots of `order`, or takes everything back.
    fn end_growth(
        &self,
        state: &mut State,
        growth: Growth,
        order: u8,
        populated: io::Result<()>,
        folios: &Folios,
    ) -> io::Result<usize> {
        let Growth { chunk: number, pages, known_pages, cost_bytes } = growth;
        if let Err(error) = populated {
            let offset_bytes = number * CHUNK_BYTES as usize;
            let _ = self.memory.release(offset_bytes, pages as usize * PAGE_BYTES as usize);
            state.chunks[number].role = Role::Vacant;
            state.frame_pages -= u64::from(pages);
            state.budget.give_back(cost_bytes);
            return Err(error);
        }
        if pages > known_pages {
            let first_new = FolioId(number as u32 * CHUNK_PAGES + known_pages);
            folios.init_free(first_new, (pages - known_pages) as usize);
        }
        let chunk = &mut state.chunks[number];
        chunk.pages = pages;
        chunk.descriptor_pages = known_pages.max(pages);
        chunk.cut(order);
        self.tell_if_whole(chunk, number);
        state.free_pages += u64::from(state.chunks[number].free_pages());
        state.list(number);
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::HugePages;
    use crate::sys::probe::Features;

    #[test]
    fn a_chunk_where_the_bound_ends_leaves_room_for_tables() {
        const FRAME_BYTES: u64 = PAGE_BYTES + DESCRIPTOR_BYTES;
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
    fn chunks_that_were_never_in_use_cost_nothing_and_no_more_come_than_fit() {
        let features = || Features::probe(&[]);
        let folios = Folios::without_reaper(3 * CHUNK_PAGES as usize);
        let bound_bytes = 5 * CHUNK_BYTES;
        let large = Arena::new(bound_bytes, 1 << 40, HugePages::Never, features()).unwrap();
        assert_eq!(large.state.lock().chunks.capacity(), 0);
        assert!(large.allocate(0, None, &folios).unwrap().is_some());
        assert_eq!(large.state.lock().chunks.len(), 1);
        let small = Arena::new(bound_bytes, 3 * CHUNK_BYTES, HugePages::Never, features()).unwrap();
        let found = (0..).take_while(|_| small.allocate(0, None, &folios).unwrap().is_some());
        assert_eq!(found.count(), 3 * CHUNK_PAGES as usize);
    }
}

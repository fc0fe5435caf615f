//! Emptying chunks: for folios of another order, or to give their memory back; and giving back
//! single pages where a chunk cannot be emptied.
//!
//! `reclaim` evicts, or moves, what is in the chunk, between [`Arena::begin_evacuation`] and
//! [`Arena::finish_evacuation`]; nothing is allocated in it meanwhile.

use super::arena::{Arena, PAGE_BYTES, State, place_of};
use super::chunk::{CHUNK_BYTES, CHUNK_PAGES, Chunk};
use crate::page::FolioId;
use std::ops::Range;

/// What a chunk is emptied for.
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
    /// Starts to empty the chunk with the fewest pages in use, of those that can serve `purpose`
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
        let (number, _) = candidates.min_by_key(|(_, chunk)| chunk.used_pages())?;
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
        self.tell_before_release(number);
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
        state.vacant_chunks += 1;
        state.frame_pages -= resident_pages;
        state.budget.give_back(resident_pages * PAGE_BYTES);
        true
    }

    /// Gives free frames that stand in a row, at most `pages_max`, back to the kernel: those of
    /// chunks that have been broken already before others. Tells how many.
    pub(crate) fn retire_pages(&self, pages_max: u32) -> u32 {
        let mut state = self.state.lock();
        let found = state.free_pages_to_retire(pages_max);
        let Some((number, pages)) = found else { return 0 };
        let count = pages.end - pages.start;
        let (offset_bytes, bytes) = place_of(number, &pages);
        self.tell_before_release(number);
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

    /// What [`Arena::retire_pages`] takes: where little is lost.
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

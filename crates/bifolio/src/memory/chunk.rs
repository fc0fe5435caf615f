//! Chunks of frames, cut into slots for folios of one order at a time; the bound; and the choice of
//! the slot for a new folio. Pure bookkeeping, under the lock of `arena.rs`.
//!
//! All chunks of a cache have one size (`config::chunk_bytes`). Only an empty chunk is cut for
//! another order. A slot is free, used or *lent*: not resident, not charged (`residency.rs`).
//!
//! Folios of neighbouring pages should get adjacent frames. An *extent* is 64 KiB of frames, or one
//! larger folio. An extent that is at least three quarters free is *sparse*. The free slots of all
//! other extents are *partial*: reclaim moves folios to them when it empties an extent.
//!
//! ```text
//!   fill: the slot after that of its neighbour in the file;
//!         else, with a neighbour, the start of a sparse extent, so that two files that are
//!           filled at the same time do not alternate in one extent;
//!         else the lowest free slot of the first chunk that has any
//!   move: the fullest extent of a chunk, from its end
//! ```

use super::budget::Budget;
use super::region_pages::RegionPages;
use crate::config;
use crate::page::FolioId;
use std::collections::VecDeque;
use std::ops::Range;

pub(super) const PAGE_BYTES: u64 = 4096;
pub(super) const DESCRIPTOR_BYTES: u64 = 64;
pub(super) const FRAME_BYTES: u64 = PAGE_BYTES + DESCRIPTOR_BYTES;

/// log2 of the pages of the largest folio, and of the largest chunk.
pub(crate) const ORDER_MAX: u8 = 9;

/// Pages of an extent; no chunk is smaller.
pub(crate) const EXTENT_PAGES: u32 = 16;
const _: () = assert!(config::CHUNK_BYTES_MIN == EXTENT_PAGES as u64 * PAGE_BYTES);
const _: () = assert!(config::CHUNK_BYTES_MAX == PAGE_BYTES << ORDER_MAX);

/// The size of a cache's chunks: log2 of their pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkSize(u8);

impl ChunkSize {
    pub(super) fn of(bound_bytes: u64) -> Self {
        Self((config::chunk_bytes(bound_bytes) / PAGE_BYTES).ilog2() as u8)
    }

    pub(super) fn pages(self) -> u32 {
        1 << self.0
    }

    pub(super) fn bytes(self) -> u64 {
        PAGE_BYTES << self.0
    }

    pub(super) fn cost_bytes(self) -> u64 {
        FRAME_BYTES << self.0
    }

    pub(super) fn place_of(self, frame: u32) -> (usize, u32) {
        ((frame >> self.0) as usize, frame & (self.pages() - 1))
    }

    pub(super) fn frame_of(self, number: usize, page: u32) -> u32 {
        ((number as u32) << self.0) + page
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Vacant,
    /// The chunk is charged; a thread makes it resident without holding the arena's lock.
    Allocating,
    /// Resident but for the lent slots, and cut into slots of `order`.
    Slots {
        order: u8,
    },
}

#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) role: Role,
    /// `true` once its descriptors have been charged. They stay resident.
    pub(super) has_descriptors: bool,
    /// `true` while the chunk is evacuated: nothing is allocated in it.
    pub(super) draining: bool,
    pub(super) listed: Listed,
    size: ChunkSize,
    free_slots: u32,
    sparse_slots: u32,
    pub(super) free: SlotBits,
    pub(super) lent: SlotBits,
}

impl Chunk {
    pub(super) fn vacant(size: ChunkSize) -> Self {
        Self {
            role: Role::Vacant,
            has_descriptors: false,
            draining: false,
            listed: Listed::default(),
            size,
            free_slots: 0,
            sparse_slots: 0,
            free: SlotBits::default(),
            lent: SlotBits::default(),
        }
    }

    pub(super) fn order(&self) -> u8 {
        match self.role {
            Role::Vacant | Role::Allocating => 0,
            Role::Slots { order } => order,
        }
    }

    pub(super) fn slots(&self) -> u32 {
        self.size.pages() >> self.order()
    }

    pub(super) fn pages_of(&self, slots: &Range<u32>) -> Range<u32> {
        slots.start << self.order()..slots.end << self.order()
    }

    pub(super) fn used_pages(&self) -> u32 {
        (self.slots() - self.free_slots - self.lent.count()) << self.order()
    }

    pub(super) fn lent_pages(&self) -> u32 {
        self.lent.count() << self.order()
    }

    pub(super) fn free_pages(&self) -> u32 {
        self.free_slots << self.order()
    }

    pub(super) fn is_in_service(&self) -> bool {
        matches!(self.role, Role::Slots { .. })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.is_in_service() && self.used_pages() == 0
    }

    /// Cuts the chunk, which is empty and has no lent slots, into free slots of `order`.
    pub(super) fn cut(&mut self, order: u8) {
        self.role = Role::Slots { order };
        self.free = SlotBits::default();
        self.free.set(0..self.slots(), true);
        self.free_slots = self.slots();
        self.sparse_slots = self.count_sparse_slots();
    }

    pub(super) fn is_for(&self, order: u8) -> bool {
        self.role == Role::Slots { order } && !self.draining
    }

    /// Changes slots of one extent.
    fn set_free(&mut self, slots: Range<u32>, free: bool) {
        let (first, count) = (slots.start, slots.end - slots.start);
        let sparse_before = self.sparse_slots_beside(first);
        self.free.set(slots, free);
        self.free_slots = if free { self.free_slots + count } else { self.free_slots - count };
        self.sparse_slots = self.sparse_slots + self.sparse_slots_beside(first) - sparse_before;
    }

    pub(super) fn take(&mut self, slot: u32) {
        debug_assert!(self.free.has(slot), "slot {slot} is already in use");
        self.set_free(slot..slot + 1, false);
    }

    /// Allocates the free pages from `first` on, at most `pages_max` and in one extent, as a folio
    /// each, in a chunk that is cut for single pages.
    pub(super) fn take_run(&mut self, first: u32, pages_max: u32) -> Range<u32> {
        debug_assert!(self.order() == 0 && self.free.has(first), "page {first} is in use");
        let extent_end = (first / EXTENT_PAGES + 1) * EXTENT_PAGES;
        let run = first..self.free.next(first, false).min(extent_end).min(first + pages_max);
        self.set_free(run.clone(), false);
        run
    }

    pub(super) fn put(&mut self, first: u32) {
        let slot = first >> self.order();
        debug_assert!(!self.free.has(slot) && !self.lent.has(slot), "page {first} freed twice");
        self.set_free(slot..slot + 1, true);
    }

    pub(super) fn set_lent(&mut self, slots: Range<u32>, lent: bool) {
        self.free.set(slots.clone(), !lent);
        self.lent.set(slots, lent);
        self.free_slots = self.free.count();
        self.sparse_slots = self.count_sparse_slots();
    }

    pub(super) fn folios(&self) -> impl Iterator<Item = u32> + '_ {
        let is_used = |slot: &u32| !self.free.has(*slot) && !self.lent.has(*slot);
        (0..self.slots()).filter(is_used).map(|slot| slot << self.order())
    }

    fn extent_slots(&self) -> u32 {
        (EXTENT_PAGES >> self.order()).max(1)
    }

    fn extents(&self) -> u32 {
        self.slots().div_ceil(self.extent_slots())
    }

    fn extent_bits(&self, extent: u32) -> u64 {
        let first = extent * self.extent_slots();
        let mask = (1 << self.extent_slots()) - 1;
        self.free.word(first) >> (first % u64::BITS) & mask
    }

    fn free_in_extent(&self, extent: u32) -> u32 {
        self.extent_bits(extent).count_ones()
    }

    /// Returns `true` if at least three quarters of the extent are free.
    fn is_sparse(&self, extent: u32) -> bool {
        self.free_in_extent(extent) * 4 >= self.extent_slots() * 3
    }

    /// Returns the number of free slots in the extent of `slot` if it is sparse, otherwise 0.
    pub(super) fn sparse_slots_beside(&self, slot: u32) -> u32 {
        let extent = slot / self.extent_slots();
        if self.is_sparse(extent) { self.free_in_extent(extent) } else { 0 }
    }

    pub(super) fn count_sparse_slots(&self) -> u32 {
        let sparse = (0..self.extents()).filter(|extent| self.is_sparse(*extent));
        sparse.map(|extent| self.free_in_extent(extent)).sum()
    }

    fn lowest_free_of(&self, extent: u32) -> Option<u32> {
        let bits = self.extent_bits(extent);
        (bits != 0).then(|| extent * self.extent_slots() + bits.trailing_zeros())
    }

    /// Returns the first slot of an extent that is completely free, or else of a sparse one.
    fn sparse_slot(&self) -> Option<u32> {
        let is_whole = |extent: &u32| self.free_in_extent(*extent) == self.extent_slots();
        let mut extents = 0..self.extents();
        let whole = extents.clone().find(is_whole);
        self.lowest_free_of(whole.or_else(|| extents.find(|extent| self.is_sparse(*extent)))?)
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

#[derive(Debug, Default)]
pub(super) struct Available {
    /// Chunks with sparse extents. The chunk listed longest is first: it probably has the most.
    sparse: VecDeque<u32>,
    partial: VecDeque<u32>,
}

impl Available {
    /// Returns the chunks that have free slots. A chunk with both kinds appears twice.
    pub(super) fn chunks(&self) -> impl Iterator<Item = usize> {
        self.sparse.iter().chain(&self.partial).map(|number| *number as usize)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Listed {
    sparse: bool,
    partial: bool,
}

#[derive(Debug)]
pub(super) struct ArenaState {
    pub(super) budget: Budget,
    pub(super) chunk_size: ChunkSize,
    /// Chunks that have been in use at some time, from the first one on.
    pub(super) chunks: Vec<Chunk>,
    pub(super) chunks_max: usize,
    pub(super) available: [Available; ORDER_MAX as usize + 1],
    pub(super) free_pages: u64,
    pub(super) frame_pages: u64,
    pub(super) lent_pages: u64,
    /// Vacant chunks, out of `chunks_max`.
    pub(super) vacant_chunks: u64,
    /// No chunk before this one is vacant.
    pub(super) first_vacant: usize,
    /// `true` while a chunk is made resident ahead of need.
    pub(super) is_allocating_chunk: bool,
    pub(super) last_order: u8,
    /// `true` after the kernel refused memory that the bound allows. Chunks are then allocated only
    /// when an allocation needs one, not ahead of need.
    pub(super) is_allocation_refused: bool,
    pub(super) region_pages: RegionPages,
}

impl ArenaState {
    pub(super) fn frame_bytes(&self) -> u64 {
        (self.frame_pages + self.region_pages.used) * PAGE_BYTES
    }

    pub(super) fn folio_pages_max(&self) -> u64 {
        let left_pages = self.budget.left_bytes() / FRAME_BYTES;
        let pages = self.frame_pages + self.region_pages.used + left_pages;
        pages.saturating_sub(u64::from(self.chunk_size.pages()) - 1)
    }

    pub(super) fn obtainable_pages(&self) -> u64 {
        self.free_pages + self.growable_pages()
    }

    pub(super) fn empty_chunk(&self, order: u8) -> Option<usize> {
        let others = (0..self.available.len()).filter(|other| *other != usize::from(order));
        let mut listed = others.flat_map(|other| self.available[other].chunks());
        listed.find(|number| self.chunks[*number].is_empty())
    }

    pub(super) fn take(&mut self, number: usize, slot: u32) -> FolioId {
        let chunk = &mut self.chunks[number];
        chunk.take(slot);
        let order = chunk.order();
        self.free_pages -= 1 << order;
        self.list(number);
        FolioId(self.chunk_size.frame_of(number, slot << order))
    }

    /// Allocates the free pages from `page` on, at most `pages_max` and in one extent, as a folio
    /// each. Returns their frames.
    pub(super) fn take_run(&mut self, number: usize, page: u32, pages_max: u32) -> Range<u32> {
        let run = self.chunks[number].take_run(page, pages_max);
        self.free_pages -= u64::from(run.end - run.start);
        self.list(number);
        let first = self.chunk_size.frame_of(number, 0);
        first + run.start..first + run.end
    }

    pub(super) fn put_run(&mut self, frames: Range<u32>) {
        for frame in frames {
            self.put(FolioId(frame));
        }
    }

    pub(super) fn put(&mut self, id: FolioId) {
        let (number, page) = self.chunk_size.place_of(id.0);
        let chunk = &mut self.chunks[number];
        chunk.put(page);
        self.free_pages += 1 << chunk.order();
        self.list(number);
    }

    /// Returns `true` if less than a chunk is free and the bound allows another one.
    pub(super) fn wants_chunk(&self) -> bool {
        let is_short = self.frame_pages > 0 && self.free_pages < self.chunk_size.pages().into();
        is_short
            && self.vacant_chunks > 0
            && !self.is_allocation_refused
            && self.growable_pages() > 0
    }

    /// Returns the number of pages that can be made resident, in whole chunks; a hint.
    pub(super) fn growable_pages(&self) -> u64 {
        let chunk_pages = u64::from(self.chunk_size.pages());
        let chunks = self.budget.left_bytes() / self.chunk_size.cost_bytes();
        (chunks * chunk_pages).min(self.vacant_chunks * chunk_pages + self.lent_pages)
    }

    /// Returns the first vacant chunk. Chunks that were never used have no state here: the address
    /// space may have room for as many chunks as the machine has memory.
    fn vacant_chunk(&mut self) -> Option<usize> {
        if self.vacant_chunks == 0 {
            return None;
        }
        let is_vacant = |number: &usize| self.chunks[*number].role == Role::Vacant;
        let known = (self.first_vacant..self.chunks.len()).find(is_vacant);
        self.first_vacant = known.unwrap_or(self.chunks.len());
        if known.is_none() && self.chunks.len() < self.chunks_max {
            self.chunks.push(Chunk::vacant(self.chunk_size));
            return Some(self.chunks.len() - 1);
        }
        known
    }

    /// Makes a chunk vacant, which was charged.
    pub(super) fn vacate(&mut self, number: usize) {
        let has_descriptors = self.chunks[number].has_descriptors;
        self.chunks[number] = Chunk { has_descriptors, ..Chunk::vacant(self.chunk_size) };
        self.vacant_chunks += 1;
        self.first_vacant = self.first_vacant.min(number);
    }

    /// Returns the bytes of a vacant chunk, and of its descriptors unless they are charged already.
    fn cost_of(&self, number: usize) -> u64 {
        match self.chunks[number].has_descriptors {
            true => self.chunk_size.bytes(),
            false => self.chunk_size.cost_bytes(),
        }
    }

    /// Takes a vacant chunk, and charges it with its descriptors. Returns `None` if the bound
    /// leaves no room for one.
    pub(super) fn begin_growth(&mut self) -> Option<usize> {
        if self.budget.left_bytes() < self.chunk_size.bytes() {
            return None;
        }
        let number = self.vacant_chunk()?;
        let cost_bytes = self.cost_of(number);
        if !self.budget.try_take(cost_bytes) {
            return None;
        }
        self.chunks[number].role = Role::Allocating;
        self.vacant_chunks -= 1;
        self.frame_pages += u64::from(self.chunk_size.pages());
        Some(number)
    }

    pub(super) fn cancel_growth(&mut self, number: usize) {
        self.vacate(number);
        self.frame_pages -= u64::from(self.chunk_size.pages());
        self.budget.give_back(self.cost_of(number));
    }

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
            let avoid = avoid.map(|id| self.chunk_size.place_of(id.0));
            let avoid = avoid.filter(|(avoided, _)| *avoided == number);
            let avoid = avoid.map(|(_, page)| (page >> order) / chunk.extent_slots());
            Some((number, chunk.partial_slot(avoid)?))
        })
    }

    pub(super) fn sparse_slot(&self, order: u8) -> Option<(usize, u32)> {
        let number = *self.available[order as usize].sparse.front()? as usize;
        Some((number, self.chunks[number].sparse_slot()?))
    }

    /// Returns the slot that follows folio `near`, if it is free and of the same order.
    fn slot_after(&self, near: FolioId, order: u8) -> Option<(usize, u32)> {
        let (number, page) = self.chunk_size.place_of(near.0 + (1 << order));
        let chunk = self.chunks.get(number).filter(|chunk| chunk.is_for(order))?;
        let slot = page >> order;
        chunk.free.has(slot).then_some((number, slot))
    }

    /// Adds a chunk to the lists that it belongs to, and removes it from the others.
    pub(super) fn list(&mut self, number: usize) {
        let chunk = &self.chunks[number];
        let is_listed = chunk.is_in_service() && !chunk.draining;
        let sparse = is_listed && chunk.sparse_slots > 0;
        let partial = is_listed && chunk.free_slots > chunk.sparse_slots;
        self.set_listed(number, Listed { sparse, partial });
    }

    /// Makes the lists of a chunk those of `listed`: none before it is evacuated, cut or returned
    /// to the kernel.
    pub(super) fn set_listed(&mut self, number: usize, listed: Listed) {
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

const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = (1 << ORDER_MAX) / WORD_BITS as usize;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlotBits([u64; WORDS]);

impl SlotBits {
    fn word(&self, at: u32) -> u64 {
        self.0[(at / WORD_BITS) as usize]
    }

    /// Returns `true` if bit `at` is set; `false` if it is past the last one.
    fn has(&self, at: u32) -> bool {
        at < 1 << ORDER_MAX && self.word(at) & (1 << (at % WORD_BITS)) != 0
    }

    fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    fn set(&mut self, bits: Range<u32>, value: bool) {
        for number in bits.start / WORD_BITS..bits.end.div_ceil(WORD_BITS) {
            let base = number * WORD_BITS;
            let start = bits.start.max(base) - base;
            let end = bits.end.min(base + WORD_BITS) - base;
            let mask = (u64::MAX >> (WORD_BITS - (end - start))) << start;
            let word = &mut self.0[number as usize];
            *word = if value { *word | mask } else { *word & !mask };
        }
    }

    /// Returns the first bit at or after `from` that equals `value`, or the number of bits if there
    /// is none.
    fn next(&self, from: u32, value: bool) -> u32 {
        let mut at = from;
        while at < 1 << ORDER_MAX {
            let word = if value { self.word(at) } else { !self.word(at) };
            let ahead = word >> (at % WORD_BITS);
            if ahead != 0 {
                return at + ahead.trailing_zeros();
            }
            at = (at / WORD_BITS + 1) * WORD_BITS;
        }
        1 << ORDER_MAX
    }

    pub(super) fn first_run(&self, length_max: u32) -> Option<Range<u32>> {
        let start = self.next(0, true);
        let end = self.next(start, false).min(start.saturating_add(length_max));
        (start < end).then_some(start..end)
    }
}

#[cfg(test)]
mod tests;

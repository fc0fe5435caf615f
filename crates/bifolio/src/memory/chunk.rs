//! Chunks: 2 MiB of frames, cut into slots for folios of one order at a time, and the choice of the
//! slot for a new folio. Pure bookkeeping, under the lock of `arena.rs`.
//!
//! Memory is taken from the kernel in chunks (one huge page each), and folio sizes change by chunk:
//! each slot fits one folio of the chunk's order. The authoritative state is kept by page:
//!
//! ```text
//!   page       retired   free   used        retired: not resident, not charged
//!   slot       free: all its pages are      (of the order the chunk is cut for)
//! ```
//!
//! So a chunk can be cut for another order while it still holds folios of the previous one
//! (*foreign* folios): the pages between them form the new slots. A chunk that is only partly
//! resident, because the bound ends in it or because pinned folios kept part of it when the bound
//! shrank, has retired pages.
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

use super::ORDER_MAX;
use super::arena::ArenaState;
use crate::page::FolioId;
use std::collections::VecDeque;
use std::ops::Range;

/// Bytes of a chunk.
pub(crate) const CHUNK_BYTES: u64 = 2 << 20;
/// Pages of a chunk.
pub(crate) const CHUNK_PAGES: u32 = 512;
const _: () = assert!(1 << ORDER_MAX == CHUNK_PAGES);
/// Pages of an extent.
pub(crate) const EXTENT_PAGES: u32 = 16;

/// The use of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Not resident.
    Vacant,
    /// Charged; a thread makes it resident without holding the arena's lock.
    Allocating,
    /// Resident, at least in part, and cut into slots of `order`.
    Slots { order: u8 },
}

/// The state of one chunk; see the [module documentation](self).
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) role: Role,
    /// Number of leading pages whose descriptors have been charged. Descriptors stay resident.
    pub(super) descriptor_pages: u32,
    /// `true` while the chunk is evacuated: nothing is allocated in it.
    pub(super) draining: bool,
    /// Lists of its order that contain the chunk.
    pub(super) listed: Listed,
    free_slots: u32,
    /// Free slots in sparse extents.
    sparse_slots: u32,
    used_pages: u32,
    /// Number of folios whose order differs from the chunk's.
    foreign_folios: u32,
    /// Bit i: slot i is free.
    free: PageBits,
    /// Bit i: page i belongs to a folio.
    used: PageBits,
    /// Bit i: page i is the first page of a folio. A folio ends where the next one, or an unused
    /// page, begins.
    heads: PageBits,
    retired: PageBits,
    /// `true` if the chunk has been partly resident since it was last vacant: the kernel may not
    /// use a huge page for it.
    is_broken: bool,
}

impl Chunk {
    pub(super) fn vacant() -> Self {
        Self {
            role: Role::Vacant,
            descriptor_pages: 0,
            draining: false,
            listed: Listed::default(),
            free_slots: 0,
            sparse_slots: 0,
            used_pages: 0,
            foreign_folios: 0,
            free: PageBits::default(),
            used: PageBits::default(),
            heads: PageBits::default(),
            retired: PageBits::ALL,
            is_broken: false,
        }
    }

    pub(super) fn order(&self) -> u8 {
        match self.role {
            Role::Vacant | Role::Allocating => 0,
            Role::Slots { order } => order,
        }
    }

    pub(super) fn slots(&self) -> u32 {
        CHUNK_PAGES >> self.order()
    }

    fn pages_of(&self, slot: u32) -> Range<u32> {
        slot << self.order()..(slot + 1) << self.order()
    }

    pub(super) fn used_pages(&self) -> u32 {
        self.used_pages
    }

    /// Returns a sort key for evacuation, smallest loss first: the used pages in quarters of a
    /// chunk, then whether the chunk may still be one huge page, then the used pages. A chunk that
    /// was broken already is therefore chosen before a whole one that holds about as many pages.
    pub(super) fn loss(&self) -> (u32, bool, u32) {
        const ROUGHLY: u32 = CHUNK_PAGES / 4;
        (self.used_pages.min(CHUNK_PAGES - 1) / ROUGHLY, !self.is_broken, self.used_pages)
    }

    pub(super) fn retired_pages(&self) -> u32 {
        self.retired.count()
    }

    /// Returns the number of resident pages.
    pub(super) fn resident_pages(&self) -> u32 {
        CHUNK_PAGES - self.retired_pages()
    }

    pub(super) fn free_slots(&self) -> u32 {
        self.free_slots
    }

    /// Returns the number of pages in free slots. Other free pages cannot hold a folio of the
    /// chunk's order.
    pub(super) fn free_pages(&self) -> u32 {
        self.free_slots << self.order()
    }

    pub(super) fn is_in_service(&self) -> bool {
        matches!(self.role, Role::Slots { .. })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.is_in_service() && self.used_pages == 0
    }

    /// Returns `true` if the chunk is cut for folios of `order` and holds no others.
    pub(super) fn is_all_of(&self, order: u8) -> bool {
        self.role == Role::Slots { order } && self.foreign_folios == 0
    }

    /// Cuts the chunk into slots of `order`; its folios stay where they are.
    pub(super) fn cut(&mut self, order: u8) {
        self.role = Role::Slots { order };
        let lost = self.used.or(&self.retired);
        self.free = PageBits::default();
        for slot in 0..self.slots() {
            if lost.count_in(self.pages_of(slot)) == 0 {
                self.free.set(slot..slot + 1, true);
            }
        }
        self.free_slots = self.free.count();
        self.sparse_slots = self.count_sparse_slots();
        let is_foreign = |first: &u32| self.end_of_folio(*first) - first != 1 << order;
        self.foreign_folios = self.heads.iter().filter(is_foreign).count() as u32;
    }

    /// Puts a chunk with the resident pages `pages` into service, cut into slots of `order`.
    pub(super) fn begin(&mut self, pages: Range<u32>, order: u8) {
        self.is_broken = pages != (0..CHUNK_PAGES);
        self.retired.set(pages, false);
        self.cut(order);
    }

    /// Makes an empty chunk vacant: none of its pages is resident any more.
    pub(super) fn vacate(&mut self) {
        debug_assert!(self.is_empty(), "{self:?}");
        let (descriptor_pages, listed) = (self.descriptor_pages, self.listed);
        *self = Self { descriptor_pages, listed, ..Self::vacant() };
    }

    /// Returns `true` if folios of `order` can be allocated in the chunk.
    pub(super) fn is_for(&self, order: u8) -> bool {
        self.role == Role::Slots { order } && !self.draining
    }

    pub(super) fn sparse_slots(&self) -> u32 {
        self.sparse_slots
    }

    /// Returns the bits of the 64 slots around `slot`.
    pub(super) fn free_word(&self, slot: u32) -> u64 {
        self.free.word(slot)
    }

    pub(super) fn is_free(&self, slot: u32) -> bool {
        self.free.has(slot)
    }

    fn set_free(&mut self, slot: u32, free: bool) {
        let sparse_before = self.sparse_slots_beside(slot);
        self.free.set(slot..slot + 1, free);
        self.free_slots = if free { self.free_slots + 1 } else { self.free_slots - 1 };
        self.sparse_slots = self.sparse_slots + self.sparse_slots_beside(slot) - sparse_before;
    }

    /// Updates the slots of pages whose state has changed.
    fn note_changed(&mut self, pages: Range<u32>) {
        let order = self.order();
        for slot in pages.start >> order..=(pages.end - 1) >> order {
            let own = self.pages_of(slot);
            let free = self.used.count_in(own.clone()) + self.retired.count_in(own) == 0;
            if free != self.is_free(slot) {
                self.set_free(slot, free);
            }
        }
    }

    /// Allocates the slot, which must be free, to a folio.
    pub(super) fn take(&mut self, slot: u32) {
        debug_assert!(self.is_free(slot), "slot {slot} is already in use");
        let pages = self.pages_of(slot);
        self.used_pages += pages.end - pages.start;
        self.heads.set(pages.start..pages.start + 1, true);
        self.used.set(pages, true);
        self.set_free(slot, false);
    }

    /// Allocates the free pages from `first` on, at most `pages_max` and in one extent, as a folio
    /// each, in a chunk that is cut for single pages.
    pub(super) fn take_run(&mut self, first: u32, pages_max: u32) -> Range<u32> {
        debug_assert!(self.order() == 0 && self.is_free(first), "page {first} is in use");
        let extent_end = (first / EXTENT_PAGES + 1) * EXTENT_PAGES;
        let run = first..self.free.next(first, false).min(extent_end).min(first + pages_max);
        let sparse_before = self.sparse_slots_beside(first);
        self.heads.set(run.clone(), true);
        self.used.set(run.clone(), true);
        self.free.set(run.clone(), false);
        self.used_pages += run.end - run.start;
        self.free_slots -= run.end - run.start;
        self.sparse_slots = self.sparse_slots + self.sparse_slots_beside(first) - sparse_before;
        run
    }

    fn end_of_folio(&self, first: u32) -> u32 {
        self.heads.next(first + 1, true).min(self.used.next(first, false))
    }

    /// Frees the pages of the folio whose first page is `first`. Returns their number.
    pub(super) fn put(&mut self, first: u32) -> u32 {
        debug_assert!(self.heads.has(first), "page {first} freed twice");
        let pages = first..self.end_of_folio(first);
        let count = pages.end - pages.start;
        self.used_pages -= count;
        self.foreign_folios -= u32::from(count != 1 << self.order());
        self.heads.set(first..first + 1, false);
        self.used.set(pages.clone(), false);
        if count == 1 << self.order() {
            // The folio fills exactly one slot.
            self.set_free(first >> self.order(), true);
        } else {
            self.note_changed(pages);
        }
        count
    }

    /// Returns the first run of free pages, cut to `pages_max`, whether or not they form a slot.
    pub(super) fn first_free_pages(&self, pages_max: u32) -> Option<Range<u32>> {
        let lost = self.used.or(&self.retired);
        let start = lost.next(0, false);
        let end = lost.next(start, true).min(start.saturating_add(pages_max));
        (start < end).then_some(start..end)
    }

    /// Marks free pages as retired: they are returned to the kernel.
    pub(super) fn retire(&mut self, pages: Range<u32>) {
        self.is_broken = true;
        self.retired.set(pages.clone(), true);
        self.note_changed(pages);
    }

    /// Marks retired pages as free: they are resident.
    pub(super) fn revive(&mut self, pages: Range<u32>) {
        self.retired.set(pages.clone(), false);
        self.note_changed(pages);
    }

    /// Returns the number of retired pages in a range.
    pub(super) fn retired_in(&self, pages: Range<u32>) -> u32 {
        self.retired.count_in(pages)
    }

    /// Returns, as pages, the first run of slots of `order` that would be free if their retired
    /// pages were resident, as long as at most `pages_max` pages are retired. With `known`, only
    /// considers pages whose descriptors are charged.
    pub(super) fn revivable(&self, order: u8, pages_max: u32, known: bool) -> Option<Range<u32>> {
        if self.retired_pages() == 0 {
            return None;
        }
        let pages_of = |slot: u32| slot << order..(slot + 1) << order;
        let is_wanted = |slot: &u32| {
            let own = pages_of(*slot);
            self.used.count_in(own.clone()) == 0 && self.retired.count_in(own) > 0
        };
        let slots = if known { self.descriptor_pages } else { CHUNK_PAGES } >> order;
        let first = (0..slots).find(is_wanted)?;
        let start = pages_of(first).start;
        let fits = |slot: &u32| self.retired.count_in(start..pages_of(*slot).end) <= pages_max;
        let last = (first..slots).take_while(|slot| is_wanted(slot) && fits(slot)).last()?;
        Some(start..pages_of(last).end)
    }

    /// Returns `true` if the chunk has a free slot of `order`, or would have one if it were cut for
    /// `order`.
    pub(super) fn has_slot_of(&self, order: u8) -> bool {
        let lost = self.used.or(&self.retired);
        (0..CHUNK_PAGES >> order).any(|slot| lost.count_in(slot << order..(slot + 1) << order) == 0)
    }

    /// Returns the first page of each folio in the chunk.
    pub(super) fn folios(&self) -> impl Iterator<Item = u32> + '_ {
        self.heads.iter()
    }
}

/// Extents of the chunk.
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

/// The choice of a slot.
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

const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = (CHUNK_PAGES / WORD_BITS) as usize;

/// One bit for each page of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageBits([u64; WORDS]);

impl PageBits {
    /// All bits set.
    pub(super) const ALL: Self = Self([u64::MAX; WORDS]);

    /// Returns the word that contains bit `at`.
    pub(super) fn word(&self, at: u32) -> u64 {
        self.0[(at / WORD_BITS) as usize]
    }

    /// Returns `true` if bit `at` is set; `false` if it is past the last one.
    pub(super) fn has(&self, at: u32) -> bool {
        at < CHUNK_PAGES && self.word(at) & (1 << (at % WORD_BITS)) != 0
    }

    /// Returns the number of set bits.
    pub(super) fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns the number of set bits in `bits`.
    pub(super) fn count_in(&self, bits: Range<u32>) -> u32 {
        words_of(bits).map(|(number, mask)| (self.0[number] & mask).count_ones()).sum()
    }

    /// Sets or clears the bits of `bits`.
    pub(super) fn set(&mut self, bits: Range<u32>, value: bool) {
        for (number, mask) in words_of(bits) {
            let word = &mut self.0[number];
            *word = if value { *word | mask } else { *word & !mask };
        }
    }

    /// Returns the first bit at or after `from` that equals `value`, or [`CHUNK_PAGES`] if there is
    /// none.
    pub(super) fn next(&self, from: u32, value: bool) -> u32 {
        let mut at = from;
        while at < CHUNK_PAGES {
            let word = if value { self.word(at) } else { !self.word(at) };
            let ahead = word >> (at % WORD_BITS);
            if ahead != 0 {
                return at + ahead.trailing_zeros();
            }
            at = (at / WORD_BITS + 1) * WORD_BITS;
        }
        CHUNK_PAGES
    }

    /// Returns the union of both sets.
    pub(super) fn or(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|number| self.0[number] | other.0[number]))
    }

    /// Returns the set bits in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let next = |from| Some(self.next(from, true)).filter(|at| *at < CHUNK_PAGES);
        std::iter::successors(next(0), move |at| next(at + 1))
    }
}

/// Returns the index of each word that `bits` overlaps, with the mask of those bits.
fn words_of(bits: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    (bits.start / WORD_BITS..bits.end.div_ceil(WORD_BITS)).map(move |number| {
        let base = number * WORD_BITS;
        let start = bits.start.max(base) - base;
        let end = bits.end.min(base + WORD_BITS) - base;
        let mask = if start < end { (u64::MAX >> (WORD_BITS - (end - start))) << start } else { 0 };
        (number as usize, mask)
    })
}

#[cfg(test)]
mod tests;

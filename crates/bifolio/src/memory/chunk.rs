//! A chunk: 2 MiB of frames, cut into slots for folios of one order at a time. Pure bookkeeping.
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

use super::ORDER_MAX;
use super::extents::Listed;
use std::ops::Range;

/// Bytes of a chunk.
pub(crate) const CHUNK_BYTES: u64 = 2 << 20;
/// Pages of a chunk.
pub(crate) const CHUNK_PAGES: u32 = 512;
const _: () = assert!(1 << ORDER_MAX == CHUNK_PAGES);

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
mod tests {
    use super::*;

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
}

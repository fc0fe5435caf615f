//! The flat table of a mapping: an array of Entries, reserved at once, populated on touch.
//!
//! Loads are wait-free and never fail; the array never moves, because readers follow its address
//! without a lock. What was touched is charged against the memory bound by whoever inserts
//! ([`Table::is_charged`]), a table page (512 Entries, 2 MiB of file) at a time. A table may be for
//! far more than will ever be touched: walks look only at what is charged, and cost nothing for
//! the rest. What names nothing any more can be given back (`give_back.rs`).
//! (The bitmap that tells is not charged itself; a page of it stands for 64 GiB of file.)
//!
//! # Safety
//! Vouches that its words are valid when zero, as reserved memory is.
#![allow(unsafe_code)]

use super::bitmap::Bitmap;
use super::entry::Entry;
use super::give_back::{Fillers, Filling, Listed};
use crate::sync::{AtomicU64, Ordering, store_owned};
use crate::sys::array::{ReservedArray, ZeroValid};
use crate::sys::copy;

/// Entries in a page of the table: what is charged at once.
const ENTRIES_PER_TABLE_PAGE: u64 = 512;
/// What a page of the table costs, bytes.
pub(crate) const TABLE_PAGE_BYTES: u64 = 4096;

/// One word of reserved memory.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(super) struct Word(pub(super) AtomicU64);

// SAFETY: an atomic word is valid when zero and needs no dropping.
unsafe impl ZeroValid for Word {}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Table {
    entries: ReservedArray<Word>,
    /// One bit for each table page that has been charged.
    charged: Bitmap,
    /// How many that are.
    charged_pages: AtomicU64,
    pub(super) fillers: Fillers,
    pub(super) listed: Listed,
    /// The page of the table that is looked at next (`give_back.rs`).
    pub(super) looked_at: AtomicU64,
}

impl Table {
    /// Reserves a table for `pages` pages.
    pub(crate) fn new(pages: u64) -> std::io::Result<Self> {
        let entries = usize::try_from(pages).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            entries: ReservedArray::new(entries)?,
            charged: Bitmap::new(pages.div_ceil(ENTRIES_PER_TABLE_PAGE))?,
            charged_pages: AtomicU64::new(0),
            fillers: Fillers::default(),
            listed: Listed::default(),
            looked_at: AtomicU64::new(0),
        })
    }

    /// How many pages the table can describe.
    pub(crate) fn pages(&self) -> u64 {
        self.entries.len() as u64
    }

    /// The first position of the file that has no Entry.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.pages().saturating_mul(super::PAGE_BYTES)
    }

    /// The Entry of a page; panics past the end of the table, which is a bug of ours.
    #[inline(always)]
    pub(crate) fn load(&self, index: u64, ordering: Ordering) -> Entry {
        Entry(self.word(index).load(ordering))
    }

    /// Address of the first Entry, for the hit path, which checks the index by the file's length.
    #[cfg(not(all(test, loom)))]
    #[inline(always)]
    pub(crate) fn as_ptr(&self) -> *const AtomicU64 {
        self.entries.as_ptr().cast()
    }

    #[inline(always)]
    pub(crate) fn word(&self, index: u64) -> &AtomicU64 {
        &self.entries.get(index as usize).0
    }

    /// Brings an Entry closer that will be looked at soon.
    pub(crate) fn touch(&self, index: u64) {
        copy::prefetch_lines(std::ptr::from_ref(self.word(index)).cast(), 1);
    }

    /// Stores an Entry that only the caller may change (MAPPING-1).
    pub(super) fn store(&self, index: u64, entry: Entry, ordering: Ordering) {
        store_owned(self.word(index), entry.0, ordering);
    }

    /// Marks the page for the replacement policy, if its Entry is READY; `false`: it is no longer
    /// the Entry `seen`.
    pub(crate) fn mark_referenced(&self, index: u64, seen: Entry) -> bool {
        !seen.is_ready()
            || seen.is_referenced()
            || self.exchange_mark(index, seen, seen.with_referenced())
    }

    /// Clears the mark and tells whether it was set.
    pub(crate) fn test_and_clear_referenced(&self, index: u64) -> bool {
        let seen = self.load(index, Ordering::Relaxed);
        let referenced = seen.is_referenced();
        if referenced {
            self.exchange_mark(index, seen, seen.without_referenced());
        }
        referenced
    }

    /// A lost race leaves the mark as the winner wants it, and is told: it is a hint.
    fn exchange_mark(&self, index: u64, seen: Entry, next: Entry) -> bool {
        // Relaxed: the mark publishes nothing (MAPPING-1: the CAS hits only a word that stands).
        let exchange = (Ordering::Relaxed, Ordering::Relaxed);
        self.word(index).compare_exchange(seen.0, next.0, exchange.0, exchange.1).is_ok()
    }

    /// For who is about to insert a folio, until that is done: what is charged stays charged. Waits
    /// while pages are given back.
    pub(crate) fn fill(&self) -> Filling<'_> {
        self.fillers.enter()
    }

    /// The first page of the table at or after `page` that is charged.
    pub(super) fn next_charged(&self, page: u64) -> Option<u64> {
        self.charged.next(page)
    }

    /// Whether any Entry of a page of the table is one that `is_wanted`. The first ones first.
    pub(super) fn any_of(&self, page: u64, is_wanted: impl Fn(Entry) -> bool) -> bool {
        let first = page * ENTRIES_PER_TABLE_PAGE;
        let mut entries = first..(first + ENTRIES_PER_TABLE_PAGE).min(self.pages());
        // Acquire: pairs with the Release in `unlink`: who sees the first page of a folio gone sees
        // the others gone.
        entries.any(|index| is_wanted(self.load(index, Ordering::Acquire)))
    }

    /// Gives the memory of a page of the table back, if the kernel takes it: all its Entries are
    /// holes now. Nobody is filling.
    pub(super) fn discharge(&self, page: u64) -> bool {
        let first = page * ENTRIES_PER_TABLE_PAGE;
        let end = (first + ENTRIES_PER_TABLE_PAGE).min(self.pages());
        let is_given = self.entries.release(first as usize..end as usize, |word| {
            word.0.store(Entry::HOLE.0, Ordering::Relaxed);
        });
        if is_given {
            self.charged.clear(page);
            self.charged_pages.fetch_sub(1, Ordering::Relaxed);
        }
        is_given
    }

    /// Whether the table page of `index` has been charged against the bound.
    pub(crate) fn is_charged(&self, index: u64) -> bool {
        self.charged.is_set(index / ENTRIES_PER_TABLE_PAGE)
    }

    /// One page behind those at `index` and after it that were never charged, and so are holes;
    /// `index` if its own was charged.
    pub(crate) fn end_of_uncharged(&self, index: u64) -> u64 {
        if self.is_charged(index) {
            return index;
        }
        (index / ENTRIES_PER_TABLE_PAGE + 1) * ENTRIES_PER_TABLE_PAGE
    }

    /// Notes that the table page of `index` has been charged; `false` if somebody else had done so.
    pub(crate) fn set_charged(&self, index: u64) -> bool {
        let fresh = self.charged.set(index / ENTRIES_PER_TABLE_PAGE);
        if fresh {
            self.charged_pages.fetch_add(1, Ordering::Relaxed);
        }
        fresh
    }

    /// What has been charged for this table, bytes.
    pub(crate) fn charged_bytes(&self) -> u64 {
        self.charged_pages.load(Ordering::Relaxed) * TABLE_PAGE_BYTES
    }

    /// The first page from `index` on whose Entry names a folio; skips what was never charged.
    pub(crate) fn next_folio(&self, index: u64) -> Option<u64> {
        self.next(index, Entry::is_folio)
    }

    /// The first page from `index` on whose Entry is not a hole; skips what was never charged.
    pub(crate) fn next_occupied(&self, index: u64) -> Option<u64> {
        self.next(index, |entry| entry != Entry::HOLE)
    }

    /// Looks at the Entries of charged table pages only: it touches no others.
    fn next(&self, index: u64, is_wanted: impl Fn(Entry) -> bool) -> Option<u64> {
        let mut index = index;
        loop {
            let table_page = self.charged.next(index / ENTRIES_PER_TABLE_PAGE)?;
            let first = table_page * ENTRIES_PER_TABLE_PAGE;
            let next_first = first + ENTRIES_PER_TABLE_PAGE;
            let mut pages = index.max(first)..next_first.min(self.pages());
            if let Some(found) = pages.find(|page| is_wanted(self.load(*page, Ordering::Relaxed))) {
                return Some(found);
            }
            index = next_first;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Pages of a file of 2^50 bytes.
    const PAGES_HUGE: u64 = 1 << 38;

    /// A table with these Entries, its pages charged.
    fn table_with(pages: u64, entries: &[(u64, Entry)]) -> Table {
        let table = Table::new(pages).unwrap();
        for (index, entry) in entries {
            table.set_charged(*index);
            table.store(*index, *entry, Ordering::Relaxed);
        }
        table
    }

    /// Minor faults of this thread so far.
    fn faults() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // The command, in brackets, may hold anything; the tenth field is the eighth behind it.
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        fields.split(' ').nth(7).unwrap().parse().unwrap()
    }

    #[test]
    fn walks_find_folios_and_values_in_small_and_huge_tables() {
        let (folio, value) = (Entry::folio(3, 0, 0), Entry::value(5));
        for pages in [511, 512, 513, 1500, 70_000, PAGES_HUGE + 1] {
            let last = pages - 1;
            let table = table_with(pages, &[(0, value), (last / 2, value), (last, folio)]);
            assert_eq!(table.next_folio(0), Some(last));
            assert_eq!(table.next_folio(pages), None);
            assert_eq!(table.next_occupied(0), Some(0));
            assert_eq!(table.next_occupied(1), Some(last / 2));
            assert_eq!(table.next_occupied(last / 2 + 1), Some(last));
            assert_eq!(table.next_occupied(pages), None);
        }
    }

    #[test]
    fn a_walk_passes_charged_pages_that_hold_nothing() {
        let table = table_with(PAGES_HUGE, &[(PAGES_HUGE - 1, Entry::value(5))]);
        for index in [0, 600, 1 << 20, 1 << 37] {
            assert!(table.set_charged(index));
        }
        assert_eq!(table.next_occupied(0), Some(PAGES_HUGE - 1));
        assert_eq!(table.next_folio(0), None);
    }

    #[test]
    fn charges_are_counted_once() {
        let table = Table::new(PAGES_HUGE).unwrap();
        assert!(table.set_charged(0) && !table.set_charged(511) && table.set_charged(512));
        assert!(table.set_charged(PAGES_HUGE - 1) && !table.is_charged(1 << 20));
        assert_eq!(table.charged_bytes(), 3 * TABLE_PAGE_BYTES);
    }

    #[test]
    fn a_walk_over_a_huge_file_touches_next_to_nothing() {
        let folio = Entry::folio(3, 0, 0);
        let places = [7, 1 << 30, (1 << 37) + 12_345, PAGES_HUGE - 1];
        let table = table_with(PAGES_HUGE, &places.map(|index| (index, folio)));
        let before = faults();
        let first = table.next_folio(0);
        let found = std::iter::successors(first, |index| table.next_folio(index + 1));
        assert_eq!(found.collect::<Vec<_>>(), places);
        assert_eq!(table.charged_bytes(), 4 * TABLE_PAGE_BYTES);
        // Of the bitmap's words alone, without the levels above, it would be 16384.
        let faults = faults() - before;
        assert!(faults < 64, "{faults} pages touched");
    }
}

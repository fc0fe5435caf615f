//! The flat table of a mapping: an array of Entries, reserved at once, populated on touch.
//!
//! Loads are wait-free and never fail; the array never moves, because readers follow its address
//! without a lock. What was touched is charged against the memory bound by whoever inserts
//! ([`Table::is_charged`]), a table page (512 Entries, 2 MiB of file) at a time.
//!
//! # Safety
//! Vouches that its words are valid when zero, as reserved memory is.
#![allow(unsafe_code)]

use super::entry::Entry;
use crate::sync::{AtomicU64, Ordering, store_owned};
use crate::sys::array::{ReservedArray, ZeroValid};

/// Entries in a page of the table: what is charged at once.
const ENTRIES_PER_TABLE_PAGE: u64 = 512;
/// What a page of the table costs, bytes.
pub(crate) const TABLE_PAGE_BYTES: u64 = 4096;

#[derive(Debug, Default)]
#[repr(transparent)]
struct Word(AtomicU64);

// SAFETY: an atomic word is valid when zero and needs no dropping.
unsafe impl ZeroValid for Word {}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Table {
    entries: ReservedArray<Word>,
    /// One bit for each table page that has been charged.
    charged: ReservedArray<Word>,
}

impl Table {
    /// Reserves a table for `pages` pages.
    pub(crate) fn new(pages: u64) -> std::io::Result<Self> {
        let pages = usize::try_from(pages).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        let table_pages = pages.div_ceil(ENTRIES_PER_TABLE_PAGE as usize);
        Ok(Self {
            entries: ReservedArray::new(pages)?,
            charged: ReservedArray::new(table_pages.div_ceil(64))?,
        })
    }

    /// How many pages the table can describe.
    pub(crate) fn pages(&self) -> u64 {
        self.entries.len() as u64
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

    /// Stores an Entry that only the caller may change (MAPPING-1).
    pub(super) fn store(&self, index: u64, entry: Entry, ordering: Ordering) {
        store_owned(self.word(index), entry.0, ordering);
    }

    /// Marks the page for the replacement policy, if its Entry is READY and still `seen`.
    pub(crate) fn mark_referenced(&self, index: u64, seen: Entry) {
        if seen.is_ready() && !seen.is_referenced() {
            self.exchange_mark(index, seen, seen.with_referenced());
        }
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

    /// A lost race leaves the mark as the winner wants it: it is a hint.
    fn exchange_mark(&self, index: u64, seen: Entry, next: Entry) {
        // Relaxed: the mark publishes nothing (MAPPING-1: the CAS hits only a word that stands).
        let exchange = (Ordering::Relaxed, Ordering::Relaxed);
        let _ = self.word(index).compare_exchange(seen.0, next.0, exchange.0, exchange.1);
    }

    /// Whether the table page of `index` has been charged against the bound.
    pub(crate) fn is_charged(&self, index: u64) -> bool {
        let (word, bit) = self.charge_bit(index);
        word.load(Ordering::Relaxed) & bit != 0
    }

    /// Notes that the table page of `index` has been charged; `false` if somebody else had done so.
    pub(crate) fn set_charged(&self, index: u64) -> bool {
        let (word, bit) = self.charge_bit(index);
        word.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    /// What has been charged for this table, bytes.
    pub(crate) fn charged_bytes(&self) -> u64 {
        let words = (0..self.charged.len()).map(|i| self.charged.get(i));
        let pages: u32 = words.map(|word| word.0.load(Ordering::Relaxed).count_ones()).sum();
        u64::from(pages) * TABLE_PAGE_BYTES
    }

    /// The first page from `index` on whose Entry names a folio; skips what was never charged.
    pub(crate) fn next_folio(&self, index: u64) -> Option<u64> {
        let mut index = index;
        while index < self.pages() {
            if !self.is_charged(index) {
                index = (index / ENTRIES_PER_TABLE_PAGE + 1) * ENTRIES_PER_TABLE_PAGE;
            } else if self.load(index, Ordering::Relaxed).is_folio() {
                return Some(index);
            } else {
                index += 1;
            }
        }
        None
    }

    fn charge_bit(&self, index: u64) -> (&AtomicU64, u64) {
        let table_page = index / ENTRIES_PER_TABLE_PAGE;
        (&self.charged.get((table_page / 64) as usize).0, 1 << (table_page % 64))
    }
}

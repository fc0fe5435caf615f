//! Which pages of a region raw writers have stored to.
//!
//! Known from the page tables where the kernel takes the protection of a page away by itself
//! (`Feature::WriteProtectAsync`); elsewhere the first store to each clean page is a fault, and a
//! bit is set by whoever serves it.

use crate::sync::{AtomicU64, Mutex, Ordering};
use crate::sys::array::ReservedArray;
use crate::sys::pagemap::Pagemap;
use std::io;
use std::ops::Range;

/// See the head of the file.
#[derive(Debug)]
pub(super) enum Stores {
    PageTables(Pagemap),
    Faults(FaultedStores),
}

/// One bit a page, set before its protection goes.
#[derive(Debug)]
pub(super) struct FaultedStores {
    bits: ReservedArray<AtomicU64>,
    /// A bit and the protection of its page change together.
    changing: Mutex<()>,
}

impl FaultedStores {
    /// For `pages` pages, none of which was stored to.
    pub(super) fn new(pages: u64) -> io::Result<Self> {
        let words = usize::try_from(pages.div_ceil(64)).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(Self { bits: ReservedArray::new(words)?, changing: Mutex::new(()) })
    }

    /// Notes a store to a page, which `admit` lets go on.
    pub(super) fn note(
        &self,
        index: u64,
        admit: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let _changing = self.changing.lock();
        // Relaxed: the lock orders it with `forget`; who only looks repeats it in a section.
        self.word(index).fetch_or(1 << (index % 64), Ordering::Relaxed);
        admit()
    }

    /// Forgets stores, and lets `protect` see to it that the next ones are noted.
    pub(super) fn forget(
        &self,
        pages: Range<u64>,
        protect: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let _changing = self.changing.lock();
        for first in words_of(&pages) {
            // Relaxed: as in `note`.
            self.word(first).fetch_and(!mask_of(first, &pages), Ordering::Relaxed);
        }
        protect()
    }

    /// Visits the pages of `pages` that were stored to.
    pub(super) fn visit(&self, pages: Range<u64>, mut visit: impl FnMut(Range<u64>)) {
        for first in words_of(&pages) {
            let mut word = self.word(first).load(Ordering::Relaxed) & mask_of(first, &pages);
            while word != 0 {
                let index = first + u64::from(word.trailing_zeros());
                visit(index..index + 1);
                word &= word - 1;
            }
        }
    }

    fn word(&self, index: u64) -> &AtomicU64 {
        self.bits.get((index / 64) as usize)
    }
}

/// The first page of each word that has one of `pages`.
fn words_of(pages: &Range<u64>) -> impl Iterator<Item = u64> + use<> {
    (pages.start / 64 * 64..pages.end).step_by(64)
}

/// Which bits of the word that begins with page `first` are in `pages`.
fn mask_of(first: u64, pages: &Range<u64>) -> u64 {
    let from = u64::MAX << pages.start.saturating_sub(first).min(63);
    let count = (pages.end - first).min(64);
    from & (u64::MAX >> (64 - count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(stores: &FaultedStores, pages: Range<u64>) -> Vec<u64> {
        let mut found = Vec::new();
        stores.visit(pages, |range| found.extend(range));
        found
    }

    #[test]
    fn stores_are_found_in_their_range_until_they_are_forgotten() {
        let stores = FaultedStores::new(1000).unwrap();
        for index in [0, 63, 64, 127, 128, 700, 999] {
            stores.note(index, || Ok(())).unwrap();
        }
        assert_eq!(stored(&stores, 0..1000), [0, 63, 64, 127, 128, 700, 999]);
        assert_eq!(stored(&stores, 63..128), [63, 64, 127]);
        assert_eq!(stored(&stores, 65..127), []);
        assert_eq!(stored(&stores, 700..701), [700]);
        stores.forget(64..128, || Ok(())).unwrap();
        assert_eq!(stored(&stores, 0..1000), [0, 63, 128, 700, 999]);
        stores.forget(999..1000, || Ok(())).unwrap();
        assert_eq!(stored(&stores, 128..1000), [128, 700]);
    }
}

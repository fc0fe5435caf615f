//! How pages come into regions of late: in rows, or one by one. A hint to reclaim.
//!
//! Who reads in order wants long transfers, and room ahead of him; who faults here and there waits
//! for each page, behind whatever else is on its way, and wants all memory there is.

use crate::memory::Arena;
use crate::sync::Ordering;
use std::sync::atomic::AtomicU64;

/// Who reads so many pages at once reads in order.
const ROW_PAGES_MIN: u64 = 16;
/// What came is remembered while this part of the bound leaves, and at most so many pages: more
/// than leave at once.
const MEMORY_PART_OF_BOUND: u64 = 4;
const MEMORY_PAGES_MAX: u64 = 8192;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct RegionReads {
    memory_pages: u64,
    /// So many pages of regions may still leave until the last row that was read is forgotten.
    rows_left: AtomicU64,
    /// The same for what is no row.
    singles_left: AtomicU64,
}

impl RegionReads {
    /// Of a cache with these frames.
    pub(crate) fn new(arena: &Arena) -> Self {
        let memory_pages = (arena.bound_pages() / MEMORY_PART_OF_BOUND).min(MEMORY_PAGES_MAX);
        let (rows_left, singles_left) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { memory_pages, rows_left, singles_left }
    }

    /// So many pages in a row are about to be read.
    pub(crate) fn note_read(&self, pages: u64) {
        let left = if pages >= ROW_PAGES_MIN { &self.rows_left } else { &self.singles_left };
        left.store(self.memory_pages, Ordering::Relaxed);
    }

    /// So many pages have left. One caller at a time.
    pub(crate) fn note_left(&self, pages: u64) {
        for left in [&self.rows_left, &self.singles_left] {
            // Relaxed, and no one operation: a reader who comes meanwhile may be forgotten.
            let left_pages = left.load(Ordering::Relaxed).saturating_sub(pages);
            left.store(left_pages, Ordering::Relaxed);
        }
    }

    /// Whether those who read of late read single pages, and wait for each.
    pub(crate) fn are_single(&self) -> bool {
        let remembers = |left: &AtomicU64| left.load(Ordering::Relaxed) > 0;
        remembers(&self.singles_left) && !remembers(&self.rows_left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_single_pages_are_remembered_until_enough_has_left() {
        let (rows_left, singles_left) = (AtomicU64::new(0), AtomicU64::new(0));
        let reads = RegionReads { memory_pages: 128, rows_left, singles_left };
        assert!(!reads.are_single());
        reads.note_read(ROW_PAGES_MIN - 1);
        assert!(reads.are_single());
        reads.note_read(ROW_PAGES_MIN);
        reads.note_left(127);
        assert!(!reads.are_single());
        reads.note_read(1);
        assert!(!reads.are_single());
        reads.note_left(2);
        assert!(reads.are_single());
        reads.note_left(128);
        assert!(!reads.are_single());
    }
}

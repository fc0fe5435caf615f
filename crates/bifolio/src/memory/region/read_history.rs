//! How pages were read into regions recently: in runs of adjacent pages, or one by one. A hint to
//! reclaim.
//!
//! A sequential reader benefits from long transfers and from readahead; a thread that faults at
//! random waits for each page, queued behind other transfers, and benefits from a larger cache.

use crate::memory::Arena;
use crate::sync::Ordering;
use std::sync::atomic::AtomicU64;

/// A read of at least this many pages counts as sequential.
const RUN_PAGES_MIN: u64 = 16;
/// A read is remembered until this part of the bound has been evicted from regions, or at most
/// [`MEMORY_PAGES_MAX`], which is more than one batch evicts.
const MEMORY_DIVISOR: u64 = 4;
const MEMORY_PAGES_MAX: u64 = 8192;

/// Recent reads into the regions of a cache, by kind.
#[derive(Debug)]
pub(crate) struct RegionReads {
    memory_pages: u64,
    /// Region pages to be evicted until the last read of a run is forgotten.
    run_pages_left: AtomicU64,
    /// Region pages to be evicted until the last read of fewer pages is forgotten.
    single_pages_left: AtomicU64,
}

impl RegionReads {
    /// Creates the state for a cache with these frames.
    pub(crate) fn new(arena: &Arena) -> Self {
        let memory_pages = (arena.bound_pages() / MEMORY_DIVISOR).min(MEMORY_PAGES_MAX);
        let (run_pages_left, single_pages_left) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { memory_pages, run_pages_left, single_pages_left }
    }

    /// Notes that `pages` adjacent pages are about to be read.
    pub(crate) fn note_read(&self, pages: u64) {
        let left =
            if pages >= RUN_PAGES_MIN { &self.run_pages_left } else { &self.single_pages_left };
        left.store(self.memory_pages, Ordering::Relaxed);
    }

    /// Adds `pages` to the evicted pages. Callers serialize.
    pub(crate) fn note_evicted(&self, pages: u64) {
        for left in [&self.run_pages_left, &self.single_pages_left] {
            // Relaxed, and not one atomic operation: a concurrent read may be forgotten.
            let left_pages = left.load(Ordering::Relaxed).saturating_sub(pages);
            left.store(left_pages, Ordering::Relaxed);
        }
    }

    /// Returns `true` if recent reads were of single pages, each with a waiting thread.
    pub(crate) fn are_single(&self) -> bool {
        let remembers = |left: &AtomicU64| left.load(Ordering::Relaxed) > 0;
        remembers(&self.single_pages_left) && !remembers(&self.run_pages_left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_single_pages_are_remembered_until_enough_is_evicted() {
        let (run_pages_left, single_pages_left) = (AtomicU64::new(0), AtomicU64::new(0));
        let reads = RegionReads { memory_pages: 128, run_pages_left, single_pages_left };
        assert!(!reads.are_single());
        reads.note_read(RUN_PAGES_MIN - 1);
        assert!(reads.are_single());
        reads.note_read(RUN_PAGES_MIN);
        reads.note_evicted(127);
        assert!(!reads.are_single());
        reads.note_read(1);
        assert!(!reads.are_single());
        reads.note_evicted(2);
        assert!(reads.are_single());
        reads.note_evicted(128);
        assert!(!reads.are_single());
    }
}

//! How pages were read recently, into the arena or into regions: in runs of adjacent pages, or one
//! by one. A hint to reclaim.
//!
//! A sequential reader benefits from long transfers, readahead and adjacent frames; a random reader
//! waits for each page, and benefits from a larger cache.

use super::Arena;
use crate::sync::Ordering;
use std::cell::Cell;
use std::sync::atomic::AtomicU64;

/// A read of at least this many pages counts as sequential.
const RUN_PAGES_MIN: u64 = 16;
/// A read is remembered until this part of the bound has been evicted, or at most
/// [`MEMORY_PAGES_MAX`], which is more than one batch evicts.
const MEMORY_DIVISOR: u64 = 4;
const MEMORY_PAGES_MAX: u64 = 8192;

thread_local! {
    /// Number of pages that this thread has filled one after the other, or a multiple of
    /// [`RUN_PAGES_MIN`] more.
    static RUN_PAGES: Cell<u64> = const { Cell::new(0) };
}

/// Recent reads of a cache into its arena, or into its regions, by kind.
#[derive(Debug)]
pub(crate) struct RecentReads {
    memory_pages: u64,
    /// Pages to be evicted until the last read of a run is forgotten.
    run_pages_left: AtomicU64,
    /// Pages to be evicted until the last read of fewer pages is forgotten.
    single_pages_left: AtomicU64,
}

impl RecentReads {
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

    /// Notes that this thread is about to fill a page, whose predecessor in the file is resident if
    /// `follows` is set. After as many of those as a run has, it fills pages in order. (A random
    /// reader of a file that is half resident does so once in 30,000 pages.)
    pub(crate) fn note_fill(&self, follows: bool) {
        let run_pages = if follows { RUN_PAGES.get() + 1 } else { 1 };
        RUN_PAGES.set(run_pages % RUN_PAGES_MIN);
        if run_pages == RUN_PAGES_MIN {
            self.run_pages_left.store(self.memory_pages, Ordering::Relaxed);
        }
    }

    /// Returns `true` if there were recent reads of many adjacent pages.
    pub(crate) fn have_runs(&self) -> bool {
        self.run_pages_left.load(Ordering::Relaxed) > 0
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
        let reads = RecentReads { memory_pages: 128, run_pages_left, single_pages_left };
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

    #[test]
    fn pages_filled_in_order_are_a_run() {
        let (run_pages_left, single_pages_left) = (AtomicU64::new(0), AtomicU64::new(0));
        let fills = RecentReads { memory_pages: 128, run_pages_left, single_pages_left };
        fills.note_fill(false);
        (2..RUN_PAGES_MIN).for_each(|_| fills.note_fill(true));
        assert!(!fills.have_runs());
        (0..RUN_PAGES_MIN).for_each(|_| fills.note_fill(false));
        assert!(!fills.have_runs());
        (1..RUN_PAGES_MIN).for_each(|_| fills.note_fill(true));
        assert!(fills.have_runs());
        fills.note_evicted(128);
        assert!(!fills.have_runs());
    }
}

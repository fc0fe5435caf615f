//! How pages were read into regions recently: in runs of adjacent pages, or one by one. A hint to
//! reclaim: a random reader waits for each page, and benefits from a larger cache.

use crate::memory::Arena;
use crate::sync::Ordering;
use std::sync::atomic::AtomicU64;

/// A read of at least this many pages counts as sequential.
const RUN_PAGES_MIN: u64 = 16;

/// Recent reads of a cache into its regions, by kind.
#[derive(Debug)]
pub(crate) struct RecentReads {
    remembered_pages: u64,
    /// Pages to be evicted until the last read of a run is forgotten.
    run_pages_left: AtomicU64,
    /// Pages to be evicted until the last read of fewer pages is forgotten.
    single_pages_left: AtomicU64,
}

impl RecentReads {
    pub(crate) fn new(arena: &Arena) -> Self {
        let remembered_pages = arena.remembered_pages();
        let (run_pages_left, single_pages_left) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { remembered_pages, run_pages_left, single_pages_left }
    }

    /// Notes that `pages` adjacent pages are about to be read.
    pub(crate) fn note_read(&self, pages: u64) {
        let left =
            if pages >= RUN_PAGES_MIN { &self.run_pages_left } else { &self.single_pages_left };
        left.store(self.remembered_pages, Ordering::Relaxed);
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
        let reads = RecentReads { remembered_pages: 128, run_pages_left, single_pages_left };
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

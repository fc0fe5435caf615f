//! Length of a run of reads in order, hits among them.
//!
//! A reader whose pages another one has read ahead misses nothing. Where it misses at last, the
//! length of its run tells that it is sequential. A scan of a B-tree reads an inner page now and
//! then: a run may skip a few pages, and continues after one read elsewhere.

use super::readers::SKIPPED_PAGES_MAX;
use crate::page::PAGE_BYTES;
use crate::sync::{AtomicU64, Ordering};
use std::ops::Range;

/// Number of pages read in order after which a miss begins a reader, and a run is remembered.
pub(super) const ORDERED_PAGES_MIN: u64 = 4;
/// Bytes that a run may skip.
const SKIPPED_BYTES_MAX: u64 = SKIPPED_PAGES_MAX * PAGE_BYTES;

/// Bytes of the run that the last read belongs to, and of the one before it.
///
/// They are counted as reads continue one another: threads that share a handle and read at random
/// never make a long run.
#[derive(Debug, Default)]
pub(super) struct ReadOrder {
    bytes: AtomicU64,
    earlier_bytes: AtomicU64,
    earlier_end: AtomicU64,
}

impl ReadOrder {
    /// Records a read of `range`, after one that ended at `last_end`.
    pub(super) fn note(&self, last_end: u64, range: &Range<u64>) {
        let mut bytes = range.end - range.start;
        let run_bytes = load(&self.bytes);
        if is_near(last_end, range.start) {
            bytes += run_bytes;
        } else {
            if is_near(load(&self.earlier_end), range.start) {
                bytes += load(&self.earlier_bytes);
            }
            if run_bytes >= ORDERED_PAGES_MIN * PAGE_BYTES {
                self.earlier_bytes.store(run_bytes, Ordering::Relaxed);
                self.earlier_end.store(last_end, Ordering::Relaxed);
            }
        }
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// Returns the number of pages of the run that a read from page `first_page` on continues; 0 if
    /// it continues none.
    pub(super) fn pages_up_to(&self, first_page: u64, last_end: u64) -> u64 {
        let earlier = (&self.earlier_bytes, load(&self.earlier_end));
        let mut runs = [(&self.bytes, last_end), earlier].into_iter();
        let position = first_page * PAGE_BYTES;
        let found = runs.find(|(_, end)| is_near(end & !(PAGE_BYTES - 1), position));
        found.map_or(0, |(bytes, _)| load(bytes) / PAGE_BYTES)
    }
}

fn load(value: &AtomicU64) -> u64 {
    value.load(Ordering::Relaxed)
}

fn is_near(end: u64, position: u64) -> bool {
    (end..=end.saturating_add(SKIPPED_BYTES_MAX)).contains(&position)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Reads pages, and returns the length of the run before the last of them.
    fn run_before_last(pages: &[u64]) -> u64 {
        let (order, mut last_end, mut found) = (ReadOrder::default(), 0, 0);
        for page in pages {
            found = order.pages_up_to(*page, last_end);
            order.note(last_end, &(page * PAGE_BYTES..(page + 1) * PAGE_BYTES));
            last_end = (page + 1) * PAGE_BYTES;
        }
        found
    }

    #[test]
    fn a_run_skips_pages_and_continues_after_a_read_elsewhere() {
        assert_eq!(run_before_last(&[100, 101, 102, 103, 104]), 4);
        assert_eq!(run_before_last(&[100, 101, 105, 106, 107]), 4);
        assert_eq!(run_before_last(&[100, 101, 102, 103, 9000, 104]), 4);
        assert_eq!(run_before_last(&[100, 101, 102, 103, 9000, 104, 105, 20, 107]), 6);
        assert_eq!(run_before_last(&[100, 101, 102, 103, 200, 300, 400]), 0);
        assert_eq!(run_before_last(&[100, 101, 102, 103, 99]), 0, "backwards");
    }

    #[test]
    fn random_reads_make_no_run() {
        let (order, mut random) = (ReadOrder::default(), fastrand::Rng::with_seed(1));
        let mut last_end = 0;
        for _ in 0..100_000 {
            let page = random.u64(0..1 << 16);
            assert!(order.pages_up_to(page, last_end) < ORDERED_PAGES_MIN);
            order.note(last_end, &(page * PAGE_BYTES..(page + 1) * PAGE_BYTES));
            // Another thread may store its own.
            last_end = random.u64(0..1 << 16) * PAGE_BYTES;
        }
    }
}

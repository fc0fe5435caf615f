//! Length of a run of reads in order, hits among them.
//!
//! A reader whose pages another one has read ahead misses nothing. Where it misses at last, the
//! length of its run tells that it is sequential. A scan of a B-tree reads an inner page now and
//! then: a run may skip a few pages, and continues after one read elsewhere.

use crate::page::PAGE_BYTES;
use crate::sync::{AtomicU64, Ordering};
use std::ops::Range;

/// Number of pages read in order after which a miss begins a reader, and a run is remembered.
pub(super) const ORDERED_PAGES_MIN: u64 = 4;
/// Pages that a reader may skip where it has read all that was issued.
pub(super) const SKIPPED_PAGES_MAX: u64 = 4;
/// Bytes that a run may skip.
const SKIPPED_BYTES_MAX: u64 = SKIPPED_PAGES_MAX * PAGE_BYTES;

/// The run that the last read belongs to, and the one before it: their bytes, and where they end.
///
/// They are counted as reads continue one another: threads that share a handle and read at random
/// never make a long run. All accesses are relaxed: threads may mix up their reads, which changes
/// only what is read ahead.
#[derive(Debug, Default)]
pub(super) struct ReadOrder {
    bytes: AtomicU64,
    end: AtomicU64,
    earlier_bytes: AtomicU64,
    earlier_end: AtomicU64,
}

impl ReadOrder {
    /// Returns where the last read ended, in bytes.
    pub(super) fn last_end(&self) -> u64 {
        load(&self.end)
    }

    /// Records a read of `range`.
    pub(super) fn note(&self, range: &Range<u64>) {
        let last_end = self.last_end();
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
        self.end.store(range.end, Ordering::Relaxed);
    }

    /// Returns the number of pages of the run that a read from page `first_page` on continues; 0 if
    /// it continues none.
    pub(super) fn pages_up_to(&self, first_page: u64) -> u64 {
        let runs = [(&self.bytes, &self.end), (&self.earlier_bytes, &self.earlier_end)];
        let position = first_page * PAGE_BYTES;
        let mut runs = runs.into_iter();
        let found = runs.find(|(_, end)| is_near(load(end) & !(PAGE_BYTES - 1), position));
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
        let (order, mut found) = (ReadOrder::default(), 0);
        for page in pages {
            found = order.pages_up_to(*page);
            order.note(&(page * PAGE_BYTES..(page + 1) * PAGE_BYTES));
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
        for _ in 0..100_000 {
            let page = random.u64(0..1 << 16);
            assert!(order.pages_up_to(page) < ORDERED_PAGES_MIN);
            order.note(&(page * PAGE_BYTES..(page + 1) * PAGE_BYTES));
            // Another thread may store its own.
            let end = random.u64(0..1 << 16) * PAGE_BYTES;
            order.end.store(end, Ordering::Relaxed);
        }
    }
}

//! What the engine counts.

use crate::sync::{AtomicU64, Ordering};

/// What the engine has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EngineCounts {
    /// Calls of `io_uring_enter`.
    pub(crate) ring_enters: u64,
    /// Transfers whose first attempt a ring made.
    pub(crate) ring_transfers: u64,
    /// Transfers made with plain calls: alone in their queue, or where there is no ring.
    pub(crate) plain_transfers: u64,
}

/// The counters behind [`EngineCounts`].
#[derive(Debug, Default)]
pub(super) struct Counts {
    ring_enters: AtomicU64,
    ring_transfers: AtomicU64,
    plain_transfers: AtomicU64,
}

impl Counts {
    pub(super) fn add_ring_enter(&self) {
        add(&self.ring_enters, 1);
    }

    pub(super) fn add_ring_transfers(&self, count: u64) {
        add(&self.ring_transfers, count);
    }

    pub(super) fn add_plain_transfers(&self, count: u64) {
        add(&self.plain_transfers, count);
    }

    pub(super) fn snapshot(&self) -> EngineCounts {
        // Relaxed: statistics; each counter stands for itself.
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EngineCounts {
            ring_enters: load(&self.ring_enters),
            ring_transfers: load(&self.ring_transfers),
            plain_transfers: load(&self.plain_transfers),
        }
    }
}

fn add(counter: &AtomicU64, count: u64) {
    if count > 0 {
        // Relaxed: statistics.
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

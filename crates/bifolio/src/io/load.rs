//! Shares of a device in what all devices have in progress: pages in read, staging memory, threads
//! for faults. A device that hangs leaves a part to the others.

use crate::sync::{AtomicU64, Condvar, Mutex, Ordering, Share, blocking};
use std::sync::Arc;
use std::time::Duration;

const BOUND_DIVISOR: u64 = 2;
/// A device gets no further page that would leave less than 1/SHARE_DIVISOR of the pages that other
/// devices do not use.
const SHARE_DIVISOR: u64 = 4;
/// Upper bound on a sleep whose wake-up was missed.
const SLEEP_MAX: Duration = Duration::from_millis(5);

/// Shares of a device ([`Share`]): what it has in progress.
///
/// | resource | all devices | a single device | a caller at the limit |
/// |---|---|---|---|
/// | pages in read | half of the bound | 3/8 of the bound | waits here, or reads less ahead |
/// | staging memory (`maps/region/staging.rs`) | all of it | 7/8 | waits, or reads less ahead |
/// | threads for faults (`maps/faults/threads.rs`) | 80 | 4 | waits in a queue of the device |
///
/// A single device may also have half of the bound dirty, so 1/8 of the bound is left to others. A
/// device without pages in read may start one read, even if others have the whole limit. The swap
/// counts as a device of its own.
///
/// A thread that waits here holds no transfer, no frame and no staging memory (IO-5). The thread
/// that ends a read wakes the waiters that it sees; others wake up by themselves ([`SLEEP_MAX`]).
#[derive(Clone, Debug)]
pub(crate) struct Load {
    all: Arc<Loads>,
    pub(crate) reading: Share,
    pub(crate) staging: Share,
    pub(crate) faults: Share,
}

/// Loads of all devices of a cache, and the threads that wait.
#[derive(Debug, Default)]
pub(crate) struct Loads {
    reading: Arc<AtomicU64>,
    staging: Arc<AtomicU64>,
    faults: Arc<AtomicU64>,
    reading_pages_max: AtomicU64,
    waiting: AtomicU64,
    gate: Mutex<()>,
    ended: Condvar,
}

impl Loads {
    pub(crate) fn new_load(self: &Arc<Self>) -> Load {
        let [reading, staging, faults] =
            [&self.reading, &self.staging, &self.faults].map(Share::new);
        Load { all: Arc::clone(self), reading, staging, faults }
    }

    pub(crate) fn set_bound(&self, bound_pages: u64) {
        self.reading_pages_max.store(bound_pages / BOUND_DIVISOR, Ordering::Relaxed);
    }
}

impl Load {
    /// Counts up to `wanted` pages that are about to be read, and returns their number: at least
    /// `least`. Returns `None` if the device has reached its share. Undone by [`Self::end_read`].
    pub(crate) fn try_begin_read(&self, least: u64, wanted: u64) -> Option<u64> {
        let max = self.all.reading_pages_max.load(Ordering::Relaxed);
        let pages = wanted.min(self.reading.room(max, SHARE_DIVISOR)) / least * least;
        if pages > 0 && self.reading.try_add(pages, max, SHARE_DIVISOR).is_some() {
            return Some(pages);
        }
        (self.reading.own() == 0).then(|| {
            self.reading.add(least);
            least
        })
    }

    /// Counts pages like [`Self::try_begin_read`], and waits until it succeeds.
    pub(crate) fn begin_read(&self, least: u64, wanted: u64) -> u64 {
        loop {
            if let Some(pages) = self.try_begin_read(least, wanted) {
                return pages;
            }
            blocking::check("reads of the same device");
            let mut gate = self.all.gate.lock();
            self.all.waiting.fetch_add(1, Ordering::Relaxed);
            self.all.ended.wait_for(&mut gate, SLEEP_MAX);
            self.all.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn end_read(&self, pages: u64) {
        if pages == 0 {
            return;
        }
        self.reading.sub(pages);
        if self.all.waiting.load(Ordering::Relaxed) > 0 {
            drop(self.all.gate.lock());
            self.all.ended.notify_all();
        }
    }
}

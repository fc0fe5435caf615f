//! Pages in the hands of readers that wait for a device: how many of them one device may have.
//!
//! A device may leave reads without an answer for as long as it likes. Until then the frames that
//! are to be filled are of no use to anybody, nor is the staging memory of those in regions, nor
//! the thread that serves a fault. So a device has a share of each (`sync/share.rs`), as it has of
//! what may be dirty (`throttle.rs`):
//!
//! | what | all devices | one alone | who finds no room |
//! |---|---|---|---|
//! | pages under reads | half of the bound | 3/8 of the bound | waits here, or reads less ahead |
//! | staging memory (`memory/region/staging.rs`) | all of it | 7/8 | waits, or reads less ahead |
//! | threads for faults (`file/faults/threads.rs`) | 80 | 4 | waits in a queue of the device |
//!
//! With the half of the bound that a device alone may have dirty, an eighth is left to others. One
//! that has nothing under reads may begin one, however much others have. Memory files read from the
//! swap, which counts as a device of its own.
//!
//! A thread that waits here waits for reads of its own device, which end when that answers. It
//! holds no transfer, no frame and no staging memory (IO-5). Whoever ends a read wakes those that
//! wait, if it sees some; one that is not seen looks again by itself after a moment.

use super::flusher::Flusher;
use super::inode::Inode;
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering, Share, blocking};
use std::sync::Arc;
use std::time::Duration;

/// The part of the bound that may be under reads.
const PART_OF_BOUND: u64 = 2;
/// Of what others leave, one part of so many stays when a device has all it may have.
const PARTS: u64 = 4;
/// How long somebody sleeps whom nobody has seen.
const SLEEP_MAX: Duration = Duration::from_millis(5);

/// A device's shares.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    /// Pages under reads, or about to be.
    reading: Share,
    /// Pages of staging memory.
    pub(crate) staging: Share,
    /// Threads that serve faults.
    pub(crate) faults: Share,
}

/// Pages that all devices of a cache have together, and the threads that wait.
#[derive(Debug, Default)]
pub(super) struct Loads {
    reading: Arc<AtomicU64>,
    staging: Arc<AtomicU64>,
    faults: Arc<AtomicU64>,
    /// Follows the bound.
    reading_pages_max: AtomicU64,
    waiting: AtomicU64,
    gate: Mutex<()>,
    ended: Condvar,
}

impl Loads {
    /// Of one more device.
    pub(super) fn new_load(&self) -> Load {
        let [reading, staging, faults] =
            [&self.reading, &self.staging, &self.faults].map(Share::new);
        Load { reading, staging, faults }
    }

    /// Fits what may be under reads to the bound.
    pub(super) fn set_bound(&self, bound_pages: u64) {
        self.reading_pages_max.store(bound_pages / PART_OF_BOUND, Ordering::Relaxed);
    }

    fn wait(&self) {
        let mut gate = self.gate.lock();
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.ended.wait_for(&mut gate, SLEEP_MAX);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    fn wake(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            drop(self.gate.lock());
            self.ended.notify_all();
        }
    }
}

impl Flusher {
    /// The swap's shares.
    pub(super) fn swap_load(&self) -> &Load {
        &self.swap_load
    }
}

impl Inode {
    /// Counts up to `wanted` pages that are about to be read, and answers how many: not fewer than
    /// `least`, unless it is none, because its device has enough. To be given back with
    /// [`Self::end_read`].
    pub(crate) fn try_begin_read(&self, least: u64, wanted: u64) -> Option<u64> {
        let (reading, max) = (&self.load.reading, &self.flusher.loads.reading_pages_max);
        let max = max.load(Ordering::Relaxed);
        let pages = wanted.min(reading.room(max, PARTS)) / least * least;
        if pages > 0 && reading.try_add(pages, max, PARTS).is_some() {
            return Some(pages);
        }
        (reading.own() == 0).then(|| {
            reading.add(least);
            least
        })
    }

    /// As [`Self::try_begin_read`]; waits until it is some.
    pub(crate) fn begin_read(&self, least: u64, wanted: u64) -> u64 {
        loop {
            if let Some(pages) = self.try_begin_read(least, wanted) {
                return pages;
            }
            blocking::check("reads of the same device");
            self.flusher.loads.wait();
        }
    }

    /// Counts pages that are about to be read all the same: the caller could not know before.
    pub(crate) fn begin_read_at_once(&self, pages: u64) {
        self.load.reading.add(pages);
    }

    /// So many pages are not under a read any more.
    pub(crate) fn end_read(&self, pages: u64) {
        if pages > 0 {
            self.load.reading.sub(pages);
            self.flusher.loads.wake();
        }
    }
}

//! The background thread: keeps some frames free, so that an allocation rarely has to reclaim.
//!
//! Woken when fewer than LOW pages are obtainable and those who allocate do not keep up by
//! themselves (`Reclaim::replace_frames`), or when a chunk should be made resident before somebody
//! has to wait for that; works until there are HIGH (twice as many), in short turns, so
//! that an allocation that must reclaim by itself gets its turn in between. Dirty folios in
//! its way are the swapper's, for which it waits, as long as that is not slow, or the flusher's.

use super::Reclaim;
use super::scan::{ScanCounts, WriteOut};
use crate::error::{ErrorKind, Result};
use crate::memory::CHUNK_PAGES;
use crate::stats::Counter;
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, blocking};
use crate::sys::process::OwnedThread;
use std::sync::Arc;
use std::time::Duration;

/// How long it waits for the swapper before it looks again.
const SWAP_PAUSE: Duration = Duration::from_millis(10);

/// Requests to the thread.
#[derive(Debug, Default)]
pub(super) struct Signal {
    /// It is to work, or does. Looked at for every allocation while memory is short: without the
    /// lock.
    work: AtomicBool,
    end: Mutex<bool>,
    changed: Condvar,
}

/// The running thread; dropping it ends the thread and waits for it.
#[derive(Debug)]
pub(crate) struct Background {
    reclaim: Arc<Reclaim>,
    thread: OwnedThread,
}

impl Background {
    /// Starts the thread.
    pub(crate) fn start(reclaim: Arc<Reclaim>) -> Result<Self> {
        let shared = Arc::clone(&reclaim);
        let thread = OwnedThread::start("bifolio-reclaim", move || shared.run());
        Ok(Self { reclaim, thread: thread.map_err(ErrorKind::Thread)? })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if !self.thread.is_left_behind() {
            *self.reclaim.signal.end.lock() = true;
            self.reclaim.signal.changed.notify_all();
        }
    }
}

impl Reclaim {
    /// Wakes the thread if fewer than LOW pages are obtainable, or a chunk should be made resident.
    pub(super) fn wake_if_low(&self) {
        let is_low = || self.arena().wants_chunk() || self.is_short_of(self.low_pages());
        // Relaxed, here and below: what is to be done is found out under other locks.
        if !self.is_at_work() && is_low() && !self.signal.work.swap(true, Ordering::Relaxed) {
            // Behind the lock the thread has seen the flag, or waits already.
            drop(self.signal.end.lock());
            self.signal.changed.notify_one();
        }
    }

    /// Whether the thread has been woken and is not done.
    pub(super) fn is_at_work(&self) -> bool {
        self.signal.work.load(Ordering::Relaxed)
    }

    /// Whether fewer pages can be had without reclaim; for regions, too, if there are any.
    pub(super) fn is_short_of(&self, pages: u64) -> bool {
        let arena = self.arena();
        arena.obtainable_pages() < pages || arena.has_region_pages() && arena.left_pages() < pages
    }

    /// How many pages a round is to free. Pages of regions leave in larger rounds: while some are
    /// written out, the next are unmapped.
    fn round_pages(&self, high_pages: u64) -> u64 {
        if !self.arena().has_region_pages() {
            return super::ROUND_PAGES;
        }
        high_pages.saturating_sub(self.arena().left_pages()).max(super::ROUND_PAGES)
    }

    fn run(&self) {
        let _serving = blocking::serve();
        loop {
            {
                let mut end = self.signal.end.lock();
                while !self.is_at_work() && !*end {
                    self.signal.changed.wait(&mut end);
                }
                if *end {
                    return;
                }
            }
            self.memory.counters.add(Counter::BackgroundReclaim, 1);
            self.refill();
            self.signal.work.store(false, Ordering::Relaxed);
        }
    }

    /// Makes memory resident that the bound allows, then reclaims until HIGH pages are obtainable
    /// or nothing comes of it.
    fn refill(&self) {
        // A refusal is for whoever is in need to tell.
        while self.arena().preallocate(&self.memory.folios).unwrap_or(false) {}
        let high_pages = 2 * self.low_pages();
        let swap_rounds = self.swapper.rounds();
        while self.is_short_of(high_pages) && !*self.signal.end.lock() {
            let (ended, coming_pages) = (self.flusher.ended(), self.swapper.coming_pages());
            let is_enough = !self.is_short_of(high_pages.saturating_sub(coming_pages));
            let counts = if is_enough {
                ScanCounts::default()
            } else {
                let reclaim_lock = self.lock();
                let free_pages = self.arena().usage().free_pages;
                if self.arena().obtainable_pages() >= high_pages && free_pages >= CHUNK_PAGES.into()
                {
                    // Pages for regions are short, and the arena has some that it does not need.
                    self.evacuate_to_release(&reclaim_lock)
                } else {
                    let wanted_pages = coming_pages + self.round_pages(high_pages);
                    self.shrink(&reclaim_lock, wanted_pages, WriteOut::MemoryFiles)
                }
            };
            if counts.reclaimed_pages == 0 {
                let is_in_vain = self.swapper.has_trouble_after(swap_rounds);
                if is_in_vain || self.swapper.coming_pages() == 0 {
                    return;
                }
                self.flusher.wait_for_progress(ended, SWAP_PAUSE);
            }
        }
    }
}

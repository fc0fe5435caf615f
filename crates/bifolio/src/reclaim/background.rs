//! The background reclaim thread, woken when fewer than LOW pages are obtainable and allocations do
//! not keep up (`Reclaim::replace_frames`), or when a chunk should be made resident ahead of need.
//! Works until HIGH pages (twice LOW) are obtainable, in short rounds, so that an allocation can
//! reclaim in between.

use super::outcome::{ScanCounts, WriteOut};
use super::{Reclaim, ReclaimThread};
use crate::error::Result;
use crate::memory::Purpose;
use crate::page::PAGE_BYTES;
use crate::stats::Counter;
use crate::sync::{Ordering, blocking};
use std::sync::Arc;
use std::time::Duration;

const SWAP_PAUSE: Duration = Duration::from_millis(10);

impl ReclaimThread {
    pub(crate) fn background(reclaim: &Arc<Reclaim>) -> Result<Self> {
        let end = |reclaim: &Reclaim| {
            *reclaim.signal.end.lock() = true;
            reclaim.signal.changed.notify_all();
        };
        Self::start("bifolio-reclaim", reclaim, |shared| shared.run(), end)
    }
}

impl Reclaim {
    /// Wakes the thread if fewer than LOW pages are obtainable, or a chunk should be made resident.
    pub(super) fn wake_if_low(&self) {
        let is_low = || self.arena().wants_chunk() || self.is_short_of(self.low_pages());
        // Relaxed, here and below: the work itself is found under other locks.
        if !self.is_at_work() && is_low() && !self.signal.work.swap(true, Ordering::Relaxed) {
            // Once this lock has been held, the thread has seen the flag or is waiting.
            drop(self.signal.end.lock());
            self.signal.changed.notify_one();
        }
    }

    pub(super) fn is_at_work(&self) -> bool {
        self.signal.work.load(Ordering::Relaxed)
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn is_idle(&self) -> bool {
        !self.is_at_work() && self.swapper.pages() == 0
    }

    /// Waits until memory is short, then reclaims until enough is free. Ends with the last `Cache`.
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
    /// or no progress is possible.
    fn refill(&self) {
        // An allocation that needs the memory reports a refusal.
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
                let free_bytes = self.arena().usage().free_pages * PAGE_BYTES;
                let has_spare = free_bytes >= self.arena().chunk_bytes();
                if self.arena().obtainable_pages() >= high_pages && has_spare {
                    // Region pages are short, and the arena has free frames that it does not need.
                    self.evacuate(&reclaim_lock, Purpose::Vacate).0
                } else {
                    // Larger rounds for region pages: some are unmapped while others are written.
                    let has_regions = self.arena().has_region_pages();
                    let left_pages =
                        if has_regions { self.arena().left_pages() } else { high_pages };
                    let short_pages = high_pages.saturating_sub(left_pages);
                    let wanted_pages = coming_pages + short_pages.max(super::ROUND_PAGES);
                    self.shrink(&reclaim_lock, wanted_pages, WriteOut::MemoryFiles)
                }
            };
            if counts.reclaimed_pages == 0 {
                let is_refused = self.swapper.has_trouble_after(swap_rounds);
                if is_refused || self.swapper.coming_pages() == 0 {
                    return;
                }
                self.flusher.wait_for_progress(ended, SWAP_PAUSE);
            }
        }
    }
}

//! The dirty limit, hard for the whole cache, of which one device may have three quarters of what
//! the others leave ([`Share`]), and the gate at which writers wait.
//!
//! THROTTLED WRITERS. A page that becomes dirty is counted before its bytes change, under the folio
//! lock, if there is room (`DirtyPages::try_add`). A writer that finds no room waits at the gate,
//! without a folio lock, until a completion makes room, or its device is in trouble. So at most
//! `dirty_max` is dirty, except for stores through maps, which cannot be refused. A write to a
//! dirty page is never throttled.
//!
//! PROTOCOL THROTTLE, of the gate, as two columns (model-checked in `loom_throttle`):
//!
//! ```text
//!  WRITER                                     COMPLETION, or FAILED ROUND
//!  T1 lock the gate                           C1 subtract the written dirty pages; or trouble
//!  T2 no room on its device, and no trouble   C2 lock the gate; any waiters? notify all;
//!     there since it arrived? then wait          unlock
//!     (unlocks), T2 again
//!  T3 unlock
//! ```
//!
//! No wake-up is lost: T2 checks under the gate's lock, and C2 follows C1. All devices share one
//! gate, since a completion on one makes room on others: a writer that still finds no room waits
//! again. Reclaim waits at the same gate, for a short time only, for dirty folios that it has met.

use crate::sync::{self, AtomicU64, Condvar, Mutex, Ordering, Share};
use std::sync::Arc;
use std::time::Instant;

/// Part of the remaining budget that a device with the most dirty pages allowed keeps free.
const SHARE_DIVISOR: u64 = 4;

/// Pages that are dirty or being written out; a page that is both counts twice.
#[derive(Clone, Debug)]
pub(crate) struct DirtyPages {
    share: Share,
    devices: Arc<AtomicU64>,
}

impl DirtyPages {
    pub(crate) fn new(all: &Arc<AtomicU64>, devices: &Arc<AtomicU64>) -> Self {
        Self { share: Share::new(all), devices: Arc::clone(devices) }
    }

    pub(crate) fn alone(all: &Arc<AtomicU64>) -> Self {
        Self::new(all, &Arc::new(AtomicU64::new(0)))
    }

    /// Counts pages regardless of the limit.
    pub(crate) fn add(&self, pages: u64) {
        self.note_added(Some(self.share.add(pages)));
    }

    pub(crate) fn sub(&self, pages: u64) {
        if pages == 0 {
            return;
        }
        let before_pages = self.share.sub(pages);
        debug_assert!(before_pages >= pages, "{pages} of {before_pages} dirty pages are clean");
        if before_pages == pages {
            self.devices.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Counts pages if that keeps the total at `max_pages` or less. The total is exact; one device
    /// may exceed its share by what several threads add at the same time.
    pub(crate) fn try_add(&self, pages: u64, max_pages: u64) -> bool {
        self.note_added(self.share.try_add(pages, max_pages, SHARE_DIVISOR))
    }

    /// Counts pages like [`Self::try_add`], without a share for other devices.
    pub(crate) fn try_add_alone(&self, pages: u64, max_pages: u64) -> bool {
        self.note_added(self.share.try_add_any(pages, max_pages))
    }

    fn note_added(&self, before_pages: Option<u64>) -> bool {
        if before_pages == Some(0) {
            self.devices.fetch_add(1, Ordering::Relaxed);
        }
        before_pages.is_some()
    }

    pub(crate) fn has_room(&self, pages: u64, max_pages: u64) -> bool {
        self.share.has_room(pages, max_pages, SHARE_DIVISOR)
    }

    pub(crate) fn all(&self) -> u64 {
        self.share.all()
    }

    pub(crate) fn own(&self) -> u64 {
        self.share.own()
    }

    /// Returns the number of dirty pages above which the flusher works for this device: the share
    /// of `background_pages` that corresponds to what other devices leave of `max_pages`, and at
    /// most the mean per device if all together have more than `background_pages`.
    pub(crate) fn background_pages(&self, background_pages: u64, max_pages: u64) -> u64 {
        let left_pages = u128::from(self.left_of(max_pages));
        let part = u128::from(background_pages) * left_pages / u128::from(max_pages.max(1));
        let mean = background_pages / self.devices.load(Ordering::Relaxed).max(1);
        let is_much = self.share.all() > background_pages;
        if is_much { mean.min(part as u64) } else { part as u64 }
    }

    pub(crate) fn left_of(&self, pages: u64) -> u64 {
        self.share.left_of(pages)
    }
}

pub(crate) fn part_of(left_pages: u64) -> u64 {
    sync::part_of(left_pages, SHARE_DIVISOR)
}

#[derive(Debug)]
pub(crate) struct Throttle {
    /// Number of waiters.
    gate: Mutex<u64>,
    released: Condvar,
}

impl Throttle {
    pub(crate) fn new() -> Self {
        Self { gate: Mutex::new(0), released: Condvar::new() }
    }

    /// Waits while `must_wait` returns `true`, at most until `deadline` (T1..T3).
    pub(crate) fn hold_while(&self, deadline: Instant, must_wait: impl Fn() -> bool) {
        let mut waiting = self.gate.lock();
        *waiting += 1;
        while must_wait() {
            if self.released.wait_until(&mut waiting, deadline).timed_out() {
                break;
            }
        }
        *waiting -= 1;
    }

    /// Makes all waiters check again (C2). The caller has changed what they check.
    pub(crate) fn release(&self) {
        if *self.gate.lock() > 0 {
            self.released.notify_all();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn devices_that_take_nothing_leave_room_to_the_next() {
        let all = Arc::new(AtomicU64::new(0));
        let mut free = 1024;
        for _ in 0..4 {
            let device = DirtyPages::alone(&all);
            while device.try_add(1, 1024) {}
            assert!(!device.has_room(1, 1024));
            assert_eq!(device.own(), free - free / 4);
            free /= 4;
            assert_eq!(all.load(Ordering::Relaxed), 1024 - free);
        }
        assert_eq!(free, 4);
    }

    #[test]
    fn a_device_may_have_one_folio_however_large() {
        let all = Arc::new(AtomicU64::new(0));
        let (first, second) = (DirtyPages::alone(&all), DirtyPages::alone(&all));
        assert!(first.try_add(512, 1024));
        assert!(!first.try_add(512, 1024), "more than its part");
        assert!(second.try_add(512, 1024));
        assert!(!DirtyPages::alone(&all).try_add(1, 1024), "more than all may have");
        second.sub(512);
        assert!(second.has_room(512, 1024));
    }

    #[test]
    fn many_devices_with_little_dirt_are_much_together() {
        let (all, devices) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let many: Vec<_> = (0..8).map(|_| DirtyPages::new(&all, &devices)).collect();
        many.iter().for_each(|device| device.add(40));
        assert_eq!(devices.load(Ordering::Relaxed), 8);
        assert_eq!(many[0].background_pages(256, 1024), 32);
        many[1..].iter().for_each(|device| device.sub(40));
        assert_eq!(devices.load(Ordering::Relaxed), 1);
        assert_eq!(many[0].background_pages(256, 1024), 256);
        many[1].add(512);
        assert_eq!(many[0].background_pages(256, 1024), 128);
    }
}

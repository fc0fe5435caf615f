//! Shared flushes (`dirt/flush.rs`): the columns at its head.
//!
//! The device has a word per thread, and knows what a flush has made durable of each; a flush
//! covers what it finds when it begins. A thread dirties its word before its sync, and the leader
//! writes out the requested words.

use super::world::{join_all, model_bounded, spawn};
use crate::dirt::flush::{Flushes, Wants};
use crate::sync::{AtomicU64, Ordering};
use std::sync::Arc;

#[derive(Debug)]
struct Device {
    flushes: Flushes<&'static str>,
    dirty: [AtomicU64; 3],
    written: [AtomicU64; 3],
    durable: [AtomicU64; 3],
    in_flight: AtomicU64,
    /// Flushes so far, flushes with metadata, and the number of the flush that fails, counted from
    /// 1.
    count: AtomicU64,
    with_metadata: AtomicU64,
    fails: u64,
}

impl Device {
    fn new(fails: u64) -> Arc<Self> {
        let words = || [(); 3].map(|()| AtomicU64::new(0));
        Arc::new(Self {
            flushes: Flushes::default(),
            dirty: words(),
            written: words(),
            durable: words(),
            in_flight: AtomicU64::new(0),
            count: AtomicU64::new(0),
            with_metadata: AtomicU64::new(0),
            fails,
        })
    }

    fn lead(&self, wants: Wants) -> Result<(), &'static str> {
        // Relaxed: no other thread may be here.
        assert_eq!(self.in_flight.fetch_add(1, Ordering::Relaxed), 0, "two flushes at a time");
        for (word, dirty) in self.written.iter().zip(&self.dirty).take(wants.end as usize) {
            word.store(dirty.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        let taken = self.written.each_ref().map(|word| word.load(Ordering::Relaxed));
        let nth = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        self.with_metadata.fetch_add(u64::from(wants.metadata), Ordering::Relaxed);
        if nth != self.fails {
            for (word, taken) in self.durable.iter().zip(taken) {
                word.store(taken, Ordering::Relaxed);
            }
        }
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        if nth == self.fails { Err("failed") } else { Ok(()) }
    }

    /// Writes and syncs. Returns `true` on success.
    fn sync(&self, own: usize) -> bool {
        self.dirty[own].store(7, Ordering::Relaxed);
        let wants = Wants { metadata: own == 0, end: own as u64 + 1 };
        let flushed = self.flushes.flush(wants, |wants| self.lead(wants));
        if flushed.result.is_ok() {
            let durable = self.durable[own].load(Ordering::Relaxed);
            assert_eq!(durable, 7, "the flush began before the write");
        }
        flushed.result.is_ok()
    }
}

/// A caller that gets `Ok` is covered by the flush, and flushes do not overlap.
/// Dies with: FLUSH-F1 that joins the round in flight; FLUSH-F5 that opens no new round; FLUSH-F3
/// that does not wait; no wake-up at FLUSH-F7; `notify_one` there; a round that uses the request of
/// the last caller only.
#[test]
fn loom_flush_covers_every_caller_that_gets_ok() {
    model_bounded(2, || {
        let device = Device::new(0);
        let others = [1, 2].map(|own| spawn(&device, move |device: &Device| device.sync(own)));
        assert!(device.sync(0));
        assert_eq!(join_all(others), [true, true]);
        let count = device.count.load(Ordering::Relaxed);
        assert!((1..=3).contains(&count));
        assert_eq!(device.with_metadata.load(Ordering::Relaxed), 1, "one caller requested it");
    });
}

/// A failed flush is reported to all callers that shared it, and to no others.
/// Dies with: an answer that is `Ok` for the followers.
#[test]
fn loom_flush_failure_is_reported_to_all_that_shared_it() {
    model_bounded(2, || {
        let device = Device::new(1);
        let others = [1, 2].map(|own| spawn(&device, move |device: &Device| device.sync(own)));
        let own = device.sync(0);
        let [first, second] = join_all(others);
        assert!(!(own && first && second), "the failure was not reported");
        let count = device.count.load(Ordering::Relaxed);
        assert_eq!(count > 1, own || first || second);
    });
}

//! The gate of writers (`writeback/throttle.rs`) against completions: the columns of `flusher.rs`.
//!
//! A wait of the model has no deadline: a wake-up that is lost is a deadlock, which loom reports.

use super::world::{model, spawn};
use crate::sync::{AtomicU64, Ordering};
use crate::writeback::throttle::Throttle;
use std::sync::Arc;
use std::time::Instant;

/// Dirty pages and the gate.
#[derive(Debug)]
struct Shared {
    dirty_pages: AtomicU64,
    throttle: Throttle,
}

impl Shared {
    fn new(dirty_pages: u64) -> Arc<Self> {
        let dirty_pages = AtomicU64::new(dirty_pages);
        Arc::new(Self { dirty_pages, throttle: Throttle::new() })
    }

    fn dirty_pages(&self) -> u64 {
        self.dirty_pages.load(Ordering::Relaxed)
    }

    /// A writer at a gate that lets one dirty page through.
    fn write(&self) {
        self.throttle.hold_while(Instant::now(), || self.dirty_pages() > 1);
        self.dirty_pages.fetch_add(1, Ordering::Relaxed);
    }

    /// The write-out of one page has ended.
    fn complete(&self) {
        self.dirty_pages.fetch_sub(1, Ordering::Relaxed);
        self.throttle.release_if(|| self.dirty_pages() <= 1);
    }
}

/// A writer that is held is let go by the completion that makes room.
/// Dies with: C2 that notifies nobody; C2 before C1; T2 before T1.
#[test]
fn loom_throttle_a_completion_releases_the_writer() {
    model(|| {
        let shared = Shared::new(3);
        let writer = spawn(&shared, Shared::write);
        shared.complete();
        shared.complete();
        writer.join().unwrap();
        assert_eq!(shared.dirty_pages(), 2);
    });
}

/// Of two writers that are held, none is forgotten. Dies with: `notify_one` in C2.
#[test]
fn loom_throttle_every_writer_is_released() {
    model(|| {
        let shared = Shared::new(2);
        let writers = [(); 2].map(|()| {
            spawn(&shared, |shared: &Shared| {
                shared.throttle.hold_while(Instant::now(), || shared.dirty_pages() > 1);
            })
        });
        shared.complete();
        for writer in writers {
            writer.join().unwrap();
        }
    });
}

/// When nothing can come of waiting, nobody waits, however much is dirty.
/// Dies with: a `set_stuck` that wakes nobody; T2 that does not look at it.
#[test]
fn loom_throttle_nobody_waits_in_vain() {
    model(|| {
        let shared = Shared::new(3);
        let writer = spawn(&shared, Shared::write);
        shared.throttle.set_stuck(true);
        writer.join().unwrap();
        assert!(shared.throttle.is_stuck());
    });
}

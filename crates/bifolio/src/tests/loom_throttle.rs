//! The gate of writers (`dirt/throttle.rs`) against completions, on one device and on two: the
//! columns at its head.
//!
//! A wait in the model has no deadline: a lost wake-up is a deadlock, which loom reports.

use super::world::{model, spawn};
use crate::dirt::throttle::{DirtyPages, Throttle};
use crate::sync::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Instant;

/// Maximum number of dirty pages; a device may have six if the other has none.
const MAX_PAGES: u64 = 8;

/// The dirty pages of two devices, and the gate.
#[derive(Debug)]
struct Shared {
    all: Arc<AtomicU64>,
    devices: [DirtyPages; 2],
    /// Not 0 if the first device is in trouble.
    trouble: AtomicU64,
    throttle: Throttle,
}

impl Shared {
    fn new(dirty_pages: [u64; 2]) -> Arc<Self> {
        let all = Arc::new(AtomicU64::new(0));
        let devices = dirty_pages.map(|pages| {
            let device = DirtyPages::alone(&all);
            device.add(pages);
            device
        });
        let (trouble, throttle) = (AtomicU64::new(0), Throttle::new());
        Arc::new(Self { all, devices, trouble, throttle })
    }

    fn hold(&self, device: usize) {
        self.throttle.hold_while(Instant::now(), || !self.devices[device].has_room(1, MAX_PAGES));
    }

    /// Makes a page dirty as soon as there is room.
    fn write(&self, device: usize) {
        while !self.devices[device].try_add(1, MAX_PAGES) {
            self.hold(device);
        }
        assert!(self.all.load(Ordering::Relaxed) <= MAX_PAGES);
    }

    /// Completes the write-out of some pages.
    fn complete(&self, device: usize, pages: u64) {
        self.devices[device].sub(pages);
        self.throttle.release();
    }
}

/// A throttled writer is released by the completion that makes room.
/// Dies with: THROTTLE-C2 without a notification; THROTTLE-C2 before THROTTLE-C1; THROTTLE-T2
/// before THROTTLE-T1.
#[test]
fn loom_throttle_a_completion_releases_the_writer() {
    model(|| {
        let shared = Shared::new([7, 0]);
        let writer = spawn(&shared, |shared| shared.write(0));
        shared.complete(0, 1);
        shared.complete(0, 1);
        writer.join().unwrap();
        assert_eq!(shared.devices[0].own(), 6);
    });
}

/// Two throttled writers are both released. Dies with: `notify_one` in THROTTLE-C2.
#[test]
fn loom_throttle_every_writer_is_released() {
    model(|| {
        let shared = Shared::new([7, 0]);
        let writers = [(); 2].map(|()| spawn(&shared, |shared: &Shared| shared.hold(0)));
        shared.complete(0, 2);
        for writer in writers {
            writer.join().unwrap();
        }
    });
}

/// Two writers of two devices never exceed the limit of dirty pages, and both continue when there
/// is room for both: the completion of one device releases the writer of the other.
/// Dies with: `try_add` that loads and then adds; a gate per device.
#[test]
fn loom_throttle_two_devices_share_the_dirty_limit() {
    model(|| {
        let shared = Shared::new([6, 2]);
        let writer = spawn(&shared, |shared| shared.write(1));
        shared.complete(0, 3);
        shared.write(0);
        writer.join().unwrap();
        assert_eq!(shared.all.load(Ordering::Relaxed), 7);
    });
}

/// Where waiting is pointless, no writer waits, however many pages are dirty.
/// Dies with: trouble that wakes no thread; THROTTLE-T2 that does not check for it.
#[test]
fn loom_throttle_no_writer_waits_without_a_prospect() {
    model(|| {
        let shared = Shared::new([8, 0]);
        let writer = spawn(&shared, |shared| {
            shared.throttle.hold_while(Instant::now(), || {
                let has_room = shared.devices[0].has_room(1, MAX_PAGES);
                !has_room && shared.trouble.load(Ordering::Relaxed) == 0
            });
        });
        shared.trouble.store(1, Ordering::Relaxed);
        shared.throttle.release();
        writer.join().unwrap();
    });
}

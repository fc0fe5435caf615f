//! Writers that are held at the gate (`throttle.rs`), until there is room for what they make dirty.
//!
//! Called by `inode.rs`; T1 to T3 of the protocol in `flusher.rs`.

use super::device::Device;
use super::flusher::Flusher;
use crate::io::IoError;
use crate::memory::Memory;
use crate::stats::Counter;
use crate::sync::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest a writer is held while its device answers nothing.
const STALL_MAX: Duration = Duration::from_secs(10);
/// How often a writer that is held asks for another round.
const ASK_EVERY: Duration = Duration::from_millis(50);

impl Flusher {
    /// Holds a writer until there is room for so many more dirty pages on a device. The caller
    /// holds no folio lock.
    ///
    /// # Errors
    /// Why there will be none; `None` if the device does not answer.
    pub(super) fn wait_for_room(
        &self,
        device: &Arc<Device>,
        memory: &Memory,
        pages: u64,
    ) -> std::result::Result<(), Option<Arc<IoError>>> {
        let begun = Instant::now();
        let result = self.wait_for_room_since(begun, device, pages);
        let nanoseconds = begun.elapsed().as_nanos() as u64;
        memory.counters.add(Counter::ThrottleWait, 1);
        memory.counters.add(Counter::ThrottleNs, nanoseconds);
        self.stall_ns_max.fetch_max(nanoseconds, Ordering::Relaxed);
        result
    }

    fn wait_for_room_since(
        &self,
        begun: Instant,
        device: &Arc<Device>,
        pages: u64,
    ) -> std::result::Result<(), Option<Arc<IoError>>> {
        let _held = device.hold();
        let round = device.rounds_begun();
        let has_room = || device.dirty_pages.has_room(pages, self.max_pages());
        let (mut answers, mut since) = (device.answers(), begun);
        loop {
            self.call(device);
            if device.dirty_pages.all() + pages > self.max_pages() {
                self.call_neighbours(device, pages);
            }
            self.throttle.hold_while(Instant::now() + ASK_EVERY, || {
                !has_room() && device.trouble_after(round).is_none()
            });
            if has_room() {
                return Ok(());
            }
            if let Some(cause) = device.trouble_after(round) {
                return Err(Some(cause));
            }
            if device.answers() != answers {
                (answers, since) = (device.answers(), Instant::now());
            } else if since.elapsed() > STALL_MAX {
                return Err(None);
            }
        }
    }

    /// Has others write out as much as a writer waits for: all that may be dirty is, and too little
    /// of it may be on its own device, or on any other that answers, for a round.
    fn call_neighbours(&self, device: &Arc<Device>, pages: u64) {
        let devices = self.roster.lock().active.snapshot();
        for other in devices {
            let is_idle = other.dirty_pages.own() == 0 || other.is_stuck();
            if !is_idle && !Arc::ptr_eq(&other, device) {
                other.want_written(pages);
                self.call(&other);
            }
        }
    }

    /// The longest a writer was held so far, nanoseconds.
    pub(crate) fn stall_ns_max(&self) -> u64 {
        self.stall_ns_max.load(Ordering::Relaxed)
    }
}

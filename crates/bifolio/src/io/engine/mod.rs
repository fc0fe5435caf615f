//! The engine: many transfers at once, with few system calls.
//!
//! Made with the cache, above the arena; used by `file` and `writeback`, which push transfers with
//! their owners into a queue and are handed the owners back when the kernel is done.
//!
//! ```text
//!   Queue<T> -------- transfers of one thread, with their owners            queue.rs
//!     |-- Lease         one ring of the pool, while anything is in flight     rings.rs
//!     '-- FallbackQueue   transfers that threads make with plain calls        queue.rs
//!           '-- Workers     the threads; they run other jobs, too             workers.rs
//! ```
//!
//! Where io_uring cannot be had, or is masked, everything goes by the threads. That changes nothing
//! of what a queue does. Neither files nor memory are registered with the rings: measured in pages
//! read at random (4 KiB, O_DIRECT, EPYC family 25 model 17), both together were worth 0 of 68,000
//! a second and 5 % of the processor's time, which does not pay for keeping them true.
//!
//! It knows no folios and does not take apart a transfer of several that failed.

mod queue;
mod rings;
mod workers;

use std::sync::Arc;
use std::thread;

use self::rings::Rings;
use self::workers::{THREADS_MAX, Urgency, Workers};
use super::{Backing, DeviceIdentity};
use crate::config::IO_DEPTH_MAX;
use crate::sys::probe::{Feature, Features};

pub(crate) use queue::Queue;
pub(crate) use rings::EngineCounts;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Engine {
    depth: usize,
    rings: Rings,
    workers: Workers,
}

impl Engine {
    /// An engine whose queues keep up to `depth` transfers in flight, 1 to [`IO_DEPTH_MAX`].
    pub(crate) fn new(features: &Features, depth: usize) -> Arc<Self> {
        Self::with_threads(features, depth, THREADS_MAX)
    }

    /// As [`Self::new`], with at most `threads_max` threads, which may be 0.
    pub(super) fn with_threads(features: &Features, depth: usize, threads_max: usize) -> Arc<Self> {
        let depth = depth.clamp(1, IO_DEPTH_MAX);
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let rings_max = if features.has(Feature::IoUring) { (2 * cpus).clamp(2, 16) } else { 0 };
        let rings = Rings::new(rings_max, depth);
        Arc::new(Self { depth, rings, workers: Workers::new(threads_max) })
    }

    /// A queue for the calling thread. Costs nothing before it is used.
    pub(crate) fn queue<T>(&self) -> Queue<'_, T> {
        Queue::new(self)
    }

    /// Runs `job`, which transfers to or from `backing`, on another thread, now; not at all, if
    /// there is none for it: answers whether it does. It may use queues, and may be the last to
    /// know the engine.
    pub(crate) fn spawn(
        &self,
        backing: &Arc<dyn Backing>,
        job: impl FnOnce() + Send + 'static,
    ) -> bool {
        self.workers.offer(lane_of(backing), Urgency::Now, Box::new(job)).is_ok()
    }

    /// The work of the engine so far.
    pub(crate) fn counts(&self) -> EngineCounts {
        self.rings.counts.snapshot()
    }
}

/// The device of a backing, told from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Lane {
    Of(DeviceIdentity),
    /// A backing that is a device of its own, by its address.
    Alone(usize),
}

fn lane_of(backing: &Arc<dyn Backing>) -> Lane {
    backing.device().map_or_else(|| Lane::Alone(Arc::as_ptr(backing).addr()), Lane::Of)
}

//! The engine: many transfers at once, with few system calls.
//!
//! ```text
//!   Queue<T> -------- transfers of one thread, with their owners            queue.rs
//!     |-- Lease         one ring of the pool, while anything is in flight     rings.rs
//!     '-- FallbackQueue   transfers that threads make with plain calls        threads.rs
//!           '-- Workers     the threads, which also run other jobs
//! ```
//!
//! Where io_uring is unavailable or masked, threads make every transfer. Neither files nor memory
//! are registered with the rings: for random reads (4 KiB, O_DIRECT) that saves 5 % of CPU time and
//! gains no throughput (EPYC family 25 model 17).

mod lane;
mod queue;
mod rings;
mod threads;

use std::sync::Arc;
use std::{io, thread};

use self::rings::Rings;
use self::threads::{THREADS_MAX, Workers};
use crate::config::IO_DEPTH_MAX;
use crate::sync::{AtomicU64, Ordering};
use crate::sys::probe::{Feature, Features};

pub(crate) use lane::{Lane, lane_of};
pub(crate) use queue::Queue;
pub(crate) use rings::EngineCounts;
pub(crate) use threads::Urgency;

#[derive(Debug)]
pub(crate) struct Engine {
    depth: usize,
    features: Features,
    rings: Rings,
    workers: Workers,
}

impl Engine {
    /// Creates an engine whose queues keep up to `depth` transfers in flight, 1 to
    /// [`IO_DEPTH_MAX`].
    pub(crate) fn new(features: &Features, depth: usize) -> Arc<Self> {
        Self::with_threads(features, depth, THREADS_MAX)
    }

    pub(super) fn with_threads(features: &Features, depth: usize, threads_max: usize) -> Arc<Self> {
        let depth = depth.clamp(1, IO_DEPTH_MAX);
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let rings_max = if features.has(Feature::IoUring) { (2 * cpus).clamp(2, 16) } else { 0 };
        let rings = Rings::new(rings_max, depth);
        let features = features.clone();
        Arc::new(Self { depth, features, rings, workers: Workers::new(threads_max) })
    }

    /// Runs `job`, which transfers to or from a device, on another thread. The job may use queues,
    /// and may hold the last reference to the engine.
    ///
    /// # Errors
    /// No thread is available that it may use (`EAGAIN`): it is dropped.
    pub(crate) fn spawn(
        &self,
        lane: Lane,
        urgency: Urgency,
        job: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let refused = |_| io::Error::from_raw_os_error(libc::EAGAIN);
        self.workers.offer(lane, urgency, Box::new(job)).map_err(refused)
    }

    pub(crate) fn counts(&self) -> EngineCounts {
        // Relaxed: statistics; each counter stands for itself.
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = &self.rings.counts;
        EngineCounts {
            ring_enters: load(&counts.ring_enters),
            ring_transfers: load(&counts.ring_transfers),
            plain_transfers: load(&counts.plain_transfers),
        }
    }
}

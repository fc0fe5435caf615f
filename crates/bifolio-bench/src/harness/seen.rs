//! The view of a timed loop of single calls: how long each took, and when it ended.
//!
//! Filled by the loop, call by call; becomes the trial's [`Measured`] when the meter has stopped.

use std::time::Duration;

use super::intervals::OperationsByInterval;
use super::latency::Latencies;
use super::meter::{Cost, Measured};

/// Calls so far.
#[derive(Debug)]
pub(crate) struct Seen {
    latencies: Latencies,
    intervals: OperationsByInterval,
}

impl Seen {
    /// None yet; `expected` is how long the trial should take, and decides how finely time is cut.
    pub(crate) fn new(expected: Duration) -> Self {
        Self { latencies: Latencies::default(), intervals: OperationsByInterval::new(expected) }
    }

    /// One call, that ended `since_start`.
    pub(crate) fn add(&mut self, since_start: Duration, latency: Duration) {
        self.latencies.add(latency);
        self.intervals.add(since_start, 1);
    }

    /// How many calls there were.
    pub(crate) fn calls(&self) -> u64 {
        self.latencies.calls()
    }

    /// The trial, with nothing verified and no misses known.
    pub(crate) fn measured(self, bytes: u64, cost: Cost, syscalls_known: u64) -> Measured {
        Measured {
            operations: self.latencies.calls(),
            bytes,
            misses: 0,
            syscalls_known,
            cost,
            latencies: self.latencies,
            intervals: self.intervals,
            verified_bytes: 0,
        }
    }
}

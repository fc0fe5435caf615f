//! Results of a timed loop of single calls: duration and end of each.
//!
//! Filled by the loop, call by call; converted to the trial's [`Measured`] when the meter has
//! stopped.

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
    /// Creates it empty; `expected` is the expected duration of the trial, which determines the
    /// length of the intervals.
    pub(crate) fn new(expected: Duration) -> Self {
        Self { latencies: Latencies::default(), intervals: OperationsByInterval::new(expected) }
    }

    /// Adds one call, that ended `since_start`.
    pub(crate) fn add(&mut self, since_start: Duration, latency: Duration) {
        self.latencies.add(latency);
        self.intervals.add_timed(since_start, latency);
    }

    /// Returns the number of calls.
    pub(crate) fn calls(&self) -> u64 {
        self.latencies.calls()
    }

    /// Returns the trial, with nothing verified and no misses known.
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

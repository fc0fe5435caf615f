//! The view of a timed loop of single calls: how long each took, and when it ended.
//!
//! Filled by the loop, call by call; becomes the turn's [`Measured`] when the meter has stopped.

use std::time::Duration;

use super::latency::Latencies;
use super::meter::{Cost, Measured};
use super::stretches::OperationsByStretch;

/// Calls so far.
#[derive(Debug)]
pub(crate) struct Seen {
    latencies: Latencies,
    stretches: OperationsByStretch,
}

impl Seen {
    /// None yet; `expected` is how long the turn should take, and decides how finely time is cut.
    pub(crate) fn new(expected: Duration) -> Self {
        Self { latencies: Latencies::default(), stretches: OperationsByStretch::new(expected) }
    }

    /// One call, that ended `since_start`.
    pub(crate) fn add(&mut self, since_start: Duration, latency: Duration) {
        self.latencies.add(latency);
        self.stretches.add(since_start, 1);
    }

    /// How many calls there were.
    pub(crate) fn calls(&self) -> u64 {
        self.latencies.calls()
    }

    /// The turn, with nothing verified and no misses known.
    pub(crate) fn measured(self, bytes: u64, cost: Cost, syscalls_known: u64) -> Measured {
        Measured {
            operations: self.latencies.calls(),
            bytes,
            misses: 0,
            syscalls_known,
            cost,
            latencies: self.latencies,
            stretches: self.stretches,
            verified_bytes: 0,
        }
    }
}

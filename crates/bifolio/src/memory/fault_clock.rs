//! Orders the reading of messages about faults against the waking of those who sent them.

use crate::sync::Ordering;
use std::sync::atomic::AtomicU64;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct FaultClock(AtomicU64);

/// Of all regions.
pub(crate) static FAULT_CLOCK: FaultClock = FaultClock(AtomicU64::new(0));

impl FaultClock {
    /// To be asked before messages are read.
    pub(crate) fn now(&self) -> u64 {
        // Acquire: pairs with the AcqRel in `advance`: who waited was woken before.
        self.0.load(Ordering::Acquire)
    }

    /// To be asked when somebody was woken: messages read from this time on were sent later.
    pub(super) fn advance(&self) -> u64 {
        // AcqRel: Release pairs with the Acquire in `now`; Acquire only keeps it in its place.
        self.0.fetch_add(1, Ordering::AcqRel) + 1
    }
}

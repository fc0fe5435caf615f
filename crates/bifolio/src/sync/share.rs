//! Shares: how much of something that all devices need one device may have.
//!
//! A device may not answer for as long as it likes, and whatever is given to those who wait for it
//! is gone for so long: pages under reads, staging memory, threads that serve faults, dirty pages.
//! So each device has a share of them, which is a part of what the others leave (three quarters,
//! say). Whatever one that hangs has taken, a quarter of the rest stays for the next: the first has
//! 3/4, the second 3/16, ..., without a list of who is healthy, and a device that is alone has
//! most. (As switches share the memory of their ports: a queue may have so many times what is
//! free.) Where that is less than one, one stays. So the number of devices that can hang and leave
//! something to another grows with the logarithm of what there is: with quarters four of 64, and
//! six of 1024.
//!
//! Counters, and no more: a thread that finds no room waits elsewhere. What all have is exact where
//! [`Share::try_add`] counts it; what one device has may be more than its part by what several
//! threads add at the same time.

use super::{AtomicU64, Ordering};
use std::sync::Arc;

/// The amount that one device has of something, and the amount that all have.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    all: Arc<AtomicU64>,
    own: Arc<AtomicU64>,
}

impl Share {
    /// Of one more device.
    pub(crate) fn new(all: &Arc<AtomicU64>) -> Self {
        Self { all: Arc::clone(all), own: Arc::new(AtomicU64::new(0)) }
    }

    /// The amount that all devices have.
    pub(crate) fn all(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }

    /// The amount that this device has.
    pub(crate) fn own(&self) -> u64 {
        self.own.load(Ordering::Relaxed)
    }

    /// The part of `max` that the others leave.
    pub(crate) fn left_of(&self, max: u64) -> u64 {
        max.saturating_sub(self.all().saturating_sub(self.own()))
    }

    /// Counts, however much there is; answers what the device had before.
    pub(crate) fn add(&self, count: u64) -> u64 {
        self.all.fetch_add(count, Ordering::Relaxed);
        self.add_own(count)
    }

    fn add_own(&self, count: u64) -> u64 {
        self.own.fetch_add(count, Ordering::Relaxed)
    }

    /// Counts no longer; answers what the device had before.
    pub(crate) fn sub(&self, count: u64) -> u64 {
        self.all.fetch_sub(count, Ordering::Relaxed);
        self.own.fetch_sub(count, Ordering::Relaxed)
    }

    /// Counts, if there is room among `max`, of which all but one in `rest` of what others leave
    /// may be this device's. One that has nothing may have as much as it needs. Answers what it had
    /// before.
    pub(crate) fn try_add(&self, count: u64, max: u64, rest: u64) -> Option<u64> {
        let has_room = |all| self.has_room_beside(all, count, max, rest).then_some(all + count);
        self.all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, has_room).ok()?;
        Some(self.add_own(count))
    }

    /// Counts, if all have no more than `max` then, whoever has it. Answers as [`Self::try_add`].
    pub(crate) fn try_add_any(&self, count: u64, max: u64) -> Option<u64> {
        let has_room = |all: u64| (all + count <= max).then_some(all + count);
        self.all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, has_room).ok()?;
        Some(self.add_own(count))
    }

    /// How much more this device may have now, if one in `rest` of what others leave stays.
    pub(crate) fn room(&self, max: u64, rest: u64) -> u64 {
        let part = part_of(self.left_of(max), rest);
        part.saturating_sub(self.own()).min(max.saturating_sub(self.all()))
    }

    /// Whether it is the same device's.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.own, &other.own)
    }

    /// Whether there is room for so much now.
    pub(crate) fn has_room(&self, count: u64, max: u64, rest: u64) -> bool {
        self.has_room_beside(self.all(), count, max, rest)
    }

    fn has_room_beside(&self, all: u64, count: u64, max: u64, rest: u64) -> bool {
        let own = self.own();
        let part = part_of(max.saturating_sub(all.saturating_sub(own)), rest);
        all + count <= max && (own + count <= part || own == 0)
    }
}

/// The part of what others leave that one device may have: all but one in `rest`, and but one at
/// least, for the next. Of the last one, all.
pub(crate) fn part_of(left: u64, rest: u64) -> u64 {
    left - (left / rest).max(1).min(left.saturating_sub(1))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_device_leaves_one_to_the_next_of_however_few() {
        let taken_by = |share: &Share, max, rest| {
            let room = share.room(max, rest);
            share.add(room);
            room
        };
        for (max, rest, expected) in [(16, 8, [14, 1, 1, 0]), (8, 4, [6, 1, 1, 0])] {
            let all = Arc::default();
            let devices: Vec<_> = (0..4).map(|_| Share::new(&all)).collect();
            let taken: Vec<_> = devices.iter().map(|own| taken_by(own, max, rest)).collect();
            assert_eq!(taken, expected);
            let all = Arc::default();
            let devices: Vec<_> = (0..4).map(|_| Share::new(&all)).collect();
            let added: Vec<_> = devices
                .iter()
                .map(|own| (0..).take_while(|_| own.try_add(1, max, rest).is_some()).count() as u64)
                .collect();
            assert_eq!(added, expected);
        }
    }
}

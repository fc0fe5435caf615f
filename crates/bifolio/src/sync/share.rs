//! Shares of the devices in a common resource: dirty pages, pages in read, threads.

use super::{AtomicU64, Ordering};
use std::sync::Arc;

/// The amount of a resource that one device holds, and the amount that all devices hold: a limit on
/// how much of a common resource one device may take.
///
/// A device may stop answering, and keep what its requests hold for that long. So each device may
/// take only a part, such as three quarters, of what the others leave free: the first has 3/4, the
/// second 3/16, and so on, and at least one remains.
///
/// These are only counters: a thread that finds no room waits elsewhere. The total is exact where
/// [`Share::try_add`] counts it; the amount of one device may exceed its part by what several
/// threads add at the same time.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    all: Arc<AtomicU64>,
    own: Arc<AtomicU64>,
}

impl Share {
    pub(crate) fn new(all: &Arc<AtomicU64>) -> Self {
        Self { all: Arc::clone(all), own: Arc::new(AtomicU64::new(0)) }
    }

    pub(crate) fn all(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }

    pub(crate) fn own(&self) -> u64 {
        self.own.load(Ordering::Relaxed)
    }

    pub(crate) fn left_of(&self, max: u64) -> u64 {
        max.saturating_sub(self.all().saturating_sub(self.own()))
    }

    /// Adds `count` without a limit. Returns the previous amount of the device.
    pub(crate) fn add(&self, count: u64) -> u64 {
        self.all.fetch_add(count, Ordering::Relaxed);
        self.own.fetch_add(count, Ordering::Relaxed)
    }

    pub(crate) fn sub(&self, count: u64) -> u64 {
        self.all.fetch_sub(count, Ordering::Relaxed);
        self.own.fetch_sub(count, Ordering::Relaxed)
    }

    /// Adds `count` if the total stays within `max` and this device within `1 - 1/rest` of what the
    /// other devices leave free. A device that holds nothing is only limited by `max`. Returns the
    /// previous amount of the device.
    pub(crate) fn try_add(&self, count: u64, max: u64, rest: u64) -> Option<u64> {
        let has_room = |all| self.has_room_beside(all, count, max, rest).then_some(all + count);
        self.all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, has_room).ok()?;
        Some(self.own.fetch_add(count, Ordering::Relaxed))
    }

    /// Adds `count` if the total stays within `max`, without a limit per device. Returns the
    /// previous amount of the device.
    pub(crate) fn try_add_any(&self, count: u64, max: u64) -> Option<u64> {
        let has_room = |all: u64| (all + count <= max).then_some(all + count);
        self.all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, has_room).ok()?;
        Some(self.own.fetch_add(count, Ordering::Relaxed))
    }

    /// Returns how much more this device may take now, with one in `rest` of what the others leave
    /// kept in reserve.
    pub(crate) fn room(&self, max: u64, rest: u64) -> u64 {
        let part = part_of(self.left_of(max), rest);
        part.saturating_sub(self.own()).min(max.saturating_sub(self.all()))
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.own, &other.own)
    }

    pub(crate) fn has_room(&self, count: u64, max: u64, rest: u64) -> bool {
        self.has_room_beside(self.all(), count, max, rest)
    }

    fn has_room_beside(&self, all: u64, count: u64, max: u64, rest: u64) -> bool {
        let own = self.own();
        let part = part_of(max.saturating_sub(all.saturating_sub(own)), rest);
        all + count <= max && (own + count <= part || own == 0)
    }
}

/// Returns the part of `left`, which the other devices leave free, that one device may take: `left`
/// minus one in `rest`, which counts as at least 1; all of it if `left` is 1.
pub(crate) fn part_of(left: u64, rest: u64) -> u64 {
    left - (left / rest).max(1).min(left.saturating_sub(1))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_device_leaves_at_least_one_for_the_next() {
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

//! The only source of atomics, locks and spinning: the real ones, those of loom in a model run, or
//! the real ones with a seeded scheduler (`tests/chaos.rs`).
//!
//! This module is below everything that shares memory. Other modules never name `std::sync::atomic`
//! or `parking_lot` directly, so every protocol can run unchanged under the model checker (`cargo x
//! loom`). The types switch on `all(test, loom)`: a model run of a crate that merely depends on
//! this one does not switch them.
//!
//! Statistics (`stats`) do not use it: counters are not part of any protocol.

pub(crate) mod blocking;
#[cfg(all(test, not(any(loom, bifolio_chaos))))]
#[path = "../tests/counted.rs"]
pub(crate) mod counted;
#[cfg(all(feature = "fork", not(any(all(test, loom), bifolio_chaos))))]
pub(crate) mod locks;
#[cfg(all(test, not(loom)))]
#[path = "../tests/test_hook.rs"]
pub(crate) mod test_hook;
pub(crate) mod waiters;
mod weak_list;
#[cfg(not(any(all(test, loom), bifolio_chaos)))]
pub(crate) use real::*;
pub(crate) use weak_list::WeakList;

use std::sync::Arc;

#[cfg(all(bifolio_chaos, not(all(test, loom))))]
#[path = "../tests/chaos.rs"]
mod chaos;
#[cfg(all(bifolio_chaos, not(all(test, loom))))]
pub(crate) use chaos::*;

#[cfg(all(test, loom))]
#[path = "../tests/model.rs"]
mod model;
#[cfg(all(test, loom))]
pub(crate) use model::*;

/// The real primitives: `std` atomics and `parking_lot` locks. The locks are one word, do not
/// poison (a panic of a user's callback must not become an error of the cache) and have a condition
/// variable with deadlines. With the feature `fork` they are those of `locks.rs`.
#[cfg(not(any(all(test, loom), bifolio_chaos)))]
mod real {
    #[cfg(test)]
    pub(crate) use super::counted::Mutex;
    #[cfg(feature = "fork")]
    pub(crate) use super::locks as plain;
    #[cfg(not(feature = "fork"))]
    pub(crate) use parking_lot as plain;
    #[cfg(not(test))]
    pub(crate) use plain::Mutex;
    pub(crate) use plain::{Condvar, MutexGuard, RwLock, RwLockReadGuard};
    pub(crate) use std::hint::spin_loop;
    pub(crate) use std::sync::atomic::{
        AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence,
    };
    pub(crate) use std::thread::yield_now;

    /// Sleeps long enough for a preempted thread to run.
    pub(crate) fn sleep_briefly() {
        std::thread::sleep(std::time::Duration::from_micros(50));
    }

    /// Stores `value` into a word of which only the caller may change the state now.
    ///
    /// A plain store. The model run uses a read-modify-write instead (see `tests/model.rs`).
    #[inline(always)]
    pub(crate) fn store_owned(word: &AtomicU64, value: u64, ordering: Ordering) {
        word.store(value, ordering);
    }

    pub(crate) fn word_of(word: &AtomicU32) -> &AtomicU32 {
        word
    }
}

/// Orders a store before a load of another word. If two threads each store, call this and load the
/// other's word, at least one sees the other's store.
pub(crate) fn barrier_of_store_and_load() {
    // SeqCst: pairs with the same fence in the other thread.
    fence(Ordering::SeqCst);
}

/// Waits a little longer each round, for another thread that is about to finish.
///
/// Used only where the other thread needs a few instructions (a frozen folio): the first rounds
/// spin, later ones yield, the last ones sleep, so that a waiter never starves the thread it waits
/// for.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    rounds: u32,
}

impl Backoff {
    const SPINS: u32 = 6;
    const YIELDS: u32 = 64;

    pub(crate) fn wait(&mut self) {
        if self.rounds < Self::SPINS {
            for _ in 0..1 << self.rounds {
                spin_loop();
            }
        } else if self.rounds < Self::YIELDS {
            yield_now();
        } else {
            sleep_briefly();
        }
        self.rounds = self.rounds.saturating_add(1);
    }
}

/// The amount of a resource that one device holds, and the amount that all devices hold: a limit on
/// how much of a common resource one device may take.
///
/// A device may stop answering, and whatever its waiting requests hold is unavailable for that
/// long. So each device may take only a part, such as three quarters, of what the other devices
/// leave free: the first has 3/4, the second 3/16, and so on, without a list of healthy devices. If
/// the reserve is less than one, one remains. So the number of devices that can hang while another
/// can still proceed grows with the logarithm of the total: with quarters, four of 64 and six of
/// 1024.
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

    /// Returns the part of `max` that the other devices leave free.
    pub(crate) fn left_of(&self, max: u64) -> u64 {
        max.saturating_sub(self.all().saturating_sub(self.own()))
    }

    /// Adds `count` without a limit. Returns the previous amount of the device.
    pub(crate) fn add(&self, count: u64) -> u64 {
        self.all.fetch_add(count, Ordering::Relaxed);
        self.add_own(count)
    }

    fn add_own(&self, count: u64) -> u64 {
        self.own.fetch_add(count, Ordering::Relaxed)
    }

    /// Subtracts `count`. Returns the previous amount of the device.
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
        Some(self.add_own(count))
    }

    /// Adds `count` if the total stays within `max`, without a limit per device. Returns the
    /// previous amount of the device.
    pub(crate) fn try_add_any(&self, count: u64, max: u64) -> Option<u64> {
        let has_room = |all: u64| (all + count <= max).then_some(all + count);
        self.all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, has_room).ok()?;
        Some(self.add_own(count))
    }

    /// Returns how much more this device may take now, with one in `rest` of what the others leave
    /// kept in reserve.
    pub(crate) fn room(&self, max: u64, rest: u64) -> u64 {
        let part = part_of(self.left_of(max), rest);
        part.saturating_sub(self.own()).min(max.saturating_sub(self.all()))
    }

    /// Returns `true` if both are the share of the same device.
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

/// Returns the part of `left`, which the other devices leave free, that one device may take: all
/// but one in `rest`, and all but at least one. Of the last one, all.
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

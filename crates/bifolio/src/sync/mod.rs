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
pub(crate) mod counted;
pub(crate) mod futex;
pub(crate) mod inside;
pub(crate) mod lock_wakers;
pub(crate) mod share;
#[cfg(all(test, not(loom)))]
#[path = "../tests/test_hook.rs"]
pub(crate) mod test_hook;
mod weak_list;
#[cfg(not(any(all(test, loom), bifolio_chaos)))]
pub(crate) use real::*;
pub(crate) use share::Share;
pub(crate) use weak_list::WeakList;

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
/// variable with deadlines.
#[cfg(not(any(all(test, loom), bifolio_chaos)))]
mod real {
    #[cfg(test)]
    pub(crate) use super::counted::Mutex;
    #[cfg(not(test))]
    pub(crate) use parking_lot::Mutex;
    pub(crate) use parking_lot::{Condvar, MutexGuard, RwLock, RwLockReadGuard};
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

    /// Returns the word for a system call.
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

    /// Waits one round.
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

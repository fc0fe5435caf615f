//! The one door to atomics, locks and spinning: the real ones, loom's in a model run, or the real
//! ones with a seeded scheduler's interference (`tests/chaos.rs`).
//!
//! Stands below everything that shares memory. Code above never names `std::sync::atomic` or
//! `parking_lot` itself, so every protocol can be run whole under the model checker
//! (`cargo x loom`), where the types switch on `all(test, loom)`: a model run of a crate that
//! merely depends on this one does not flip our types.
//!
//! It does not hold statistics (`stats`): counters are not part of any protocol.

pub(crate) mod blocking;
#[cfg(all(test, not(any(loom, bifolio_chaos))))]
pub(crate) mod counted;
pub(crate) mod futex;
pub(crate) mod inside;
#[cfg(all(test, not(loom)))]
#[path = "../tests/meanwhile.rs"]
pub(crate) mod meanwhile;
pub(crate) mod share;
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

/// The real primitives: `std` atomics and `parking_lot` locks, because those are one word, do not
/// poison (a panic of a user's callback must not turn into an error of ours) and have a condition
/// variable that can wait with a deadline.
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

    /// Sleeps long enough for a descheduled thread to run.
    pub(crate) fn sleep_briefly() {
        std::thread::sleep(std::time::Duration::from_micros(50));
    }

    /// Stores `value` into a word that only the caller may change to a new state now.
    ///
    /// A plain store. The model run uses a read-modify-write instead (see its twin).
    #[inline(always)]
    pub(crate) fn store_owned(word: &AtomicU64, value: u64, ordering: Ordering) {
        word.store(value, ordering);
    }

    /// The word itself, for the kernel.
    pub(crate) fn word_of(word: &AtomicU32) -> &AtomicU32 {
        word
    }
}

/// Between a store and a load of another word, on each of two sides: one of the two sees what the
/// other has stored.
pub(crate) fn barrier_of_store_and_load() {
    // SeqCst: pairs with the same on the other side.
    fence(Ordering::SeqCst);
}

/// Waits a little longer each time, for a window that somebody else is about to close.
///
/// Used only where the other side holds the window open for a few instructions (a frozen folio):
/// the first rounds stay on the CPU, the later ones give it up, the last ones sleep, so that a
/// waiter never starves the thread it waits for.
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

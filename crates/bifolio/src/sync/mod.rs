//! The only source of atomics, locks and spinning: the real ones, those of loom in a model run
//! (`cargo x loom`), or the real ones with a seeded scheduler (`tests/chaos.rs`). And what is built
//! of them alone:
//!
//! ```text
//!   mod.rs         which primitives; a barrier, a backoff
//!   blocking.rs    what may wait for what, checked in debug builds
//!   round_wait.rs  the loop of waits for memory, for the swap and for write-outs
//!   waiters.rs     threads and tasks that wait for a folio
//!   share.rs       what a device may take of a common resource
//!   atomic_run.rs  a run of numbers that threads take one by one
//!   weak_list.rs   files and devices, without keeping them
//!   locks.rs       locks without a table of the process (feature `fork`)
//! ```
//!
//! The types switch on `all(test, loom)`: a model run of a crate that merely depends on this one
//! does not switch them. Statistics (`stats`) do not use it: counters are in no protocol.

mod atomic_run;
pub(crate) mod blocking;
#[cfg(all(test, not(any(loom, bifolio_chaos))))]
#[path = "../tests/counted.rs"]
pub(crate) mod counted;
#[cfg(all(feature = "fork", not(any(all(test, loom), bifolio_chaos))))]
pub(crate) mod locks;
mod round_wait;
mod share;
#[cfg(all(test, not(loom)))]
#[path = "../tests/test_hook.rs"]
pub(crate) mod test_hook;
pub(crate) mod waiters;
mod weak_list;
pub(crate) use atomic_run::AtomicRun;
#[cfg(not(any(all(test, loom), bifolio_chaos)))]
pub(crate) use real::*;
pub(crate) use round_wait::{CallScope, RoundWait, WaitBudget, WaitProgress, wait_in_rounds};
pub(crate) use share::{Share, part_of};
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

/// The real primitives: `std` atomics and `parking_lot` locks, which do not poison: a panic of a
/// user's callback must not become an error of the cache. With the feature `fork` they are those of
/// `locks.rs`.
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

    pub(crate) fn sleep_briefly() {
        std::thread::sleep(std::time::Duration::from_micros(50));
    }

    /// Stores `value` into a word of which only the caller may change the state now. (In a model
    /// run by a read-modify-write, see `tests/model.rs`.)
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

/// A wait that is a little longer each round, for another thread that needs a few instructions (a
/// frozen folio): the last rounds sleep, so that a waiter never starves the thread it waits for.
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

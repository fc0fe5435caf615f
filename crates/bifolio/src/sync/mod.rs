//! The one door to atomics, locks and spinning: the real ones, loom's in a model run, or the real
//! ones with a seeded scheduler's interference (`chaos.rs`).
//!
//! Stands below everything that shares memory. Code above never names `std::sync::atomic` or
//! `parking_lot` itself, so every protocol can be run whole under the model checker
//! (`cargo x loom`), where the types switch on `all(test, loom)`: a model run of a crate that
//! merely depends on this one does not flip our types.
//!
//! It does not hold statistics (`stats`): counters are not part of any protocol.

pub(crate) mod blocking;
pub(crate) mod futex;
pub(crate) mod share;
mod weak_list;
pub(crate) use share::Share;
pub(crate) use weak_list::WeakList;
#[cfg(not(any(all(test, loom), bifolio_chaos)))]
mod real;
#[cfg(not(any(all(test, loom), bifolio_chaos)))]
pub(crate) use real::*;

#[cfg(all(bifolio_chaos, not(all(test, loom))))]
mod chaos;
#[cfg(all(bifolio_chaos, not(all(test, loom))))]
pub(crate) use chaos::*;

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, loom))]
pub(crate) use model::*;

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

//! The gate at which writers wait while too much is dirty: see the protocol in `flusher.rs`.

use crate::sync::{Condvar, Mutex};
use std::time::Instant;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Throttle {
    gate: Mutex<Gate>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct Gate {
    waiting: u64,
    is_stuck: bool,
}

impl Throttle {
    /// An open gate.
    pub(crate) fn new() -> Self {
        Self { gate: Mutex::new(Gate::default()), released: Condvar::new() }
    }

    /// Waits while there is too much, but not while nothing can come of it, nor longer than until
    /// `deadline` (T1-T3).
    pub(crate) fn hold_while(&self, deadline: Instant, is_too_much: impl Fn() -> bool) {
        let mut gate = self.gate.lock();
        gate.waiting += 1;
        while is_too_much() && !gate.is_stuck {
            if self.released.wait_until(&mut gate, deadline).timed_out() {
                break;
            }
        }
        gate.waiting -= 1;
    }

    /// Lets everybody go, if it is time (C2). The caller has taken off what is done before.
    pub(crate) fn release_if(&self, is_enough: impl Fn() -> bool) {
        let gate = self.gate.lock();
        if gate.waiting > 0 && is_enough() {
            self.released.notify_all();
        }
    }

    /// Whether nobody is held, however much there is.
    pub(crate) fn is_stuck(&self) -> bool {
        self.gate.lock().is_stuck
    }

    /// Says whether waiting is in vain.
    pub(crate) fn set_stuck(&self, is_stuck: bool) {
        let mut gate = self.gate.lock();
        gate.is_stuck = is_stuck;
        if is_stuck {
            self.released.notify_all();
        }
    }
}

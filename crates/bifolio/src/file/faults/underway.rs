//! What is under way: who is at work for the faults of a region just now.
//!
//! Whoever serves a fault has the file open for that time. The thread that met the fault goes on a
//! moment earlier: if it drops the last map then, the file would be closed, and its last bytes
//! written, by whoever serves, some time later. So a map that is dropped waits for the services
//! that have begun; not for ever, because one of them may be waiting for something that the dropper
//! holds.

use crate::sync::{Condvar, Mutex};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a map that is dropped waits: a service that takes longer closes the file.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// See the head of the file.
#[derive(Debug, Default)]
pub(in crate::file) struct Underway {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    begun: u64,
    /// The numbers of those that have not ended.
    running: Vec<u64>,
}

/// A service that has begun; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Service {
    underway: Arc<Underway>,
    number: u64,
}

impl Underway {
    pub(super) fn begin(self: &Arc<Self>) -> Service {
        let mut state = self.state.lock();
        state.begun += 1;
        let number = state.begun;
        state.running.push(number);
        Service { underway: Arc::clone(self), number }
    }

    /// Waits until all that have begun have ended, for a second at the most.
    pub(in crate::file) fn wait_for_begun(&self) {
        let mut state = self.state.lock();
        let (begun, until) = (state.begun, Instant::now() + WAIT_MAX);
        while state.running.iter().any(|number| *number <= begun) {
            if self.ended.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.underway.state.lock().running.retain(|number| *number != self.number);
        self.underway.ended.notify_all();
    }
}

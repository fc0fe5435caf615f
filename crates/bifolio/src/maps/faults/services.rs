//! Services of faults in progress, by region.
//!
//! A thread that serves a fault holds the file open. The faulting thread continues
//! slightly earlier: if it then drops the last map, the serving thread would close the file later,
//! and write its last bytes. So the drop of a map waits for the services that have started. The
//! wait is bounded, because a service may be waiting for something that the dropping thread holds.

use crate::sync::{Condvar, Mutex};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Upper bound on the wait of a map's drop: a longer service closes the file itself.
const WAIT_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct RunningServices {
    state: Mutex<ServicesState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct ServicesState {
    begun: u64,
    running: Vec<u64>,
}

/// Service in progress; ends on drop.
#[derive(Debug)]
pub(super) struct Service {
    services: Arc<RunningServices>,
    number: u64,
}

impl RunningServices {
    pub(super) fn begin(self: &Arc<Self>) -> Service {
        let mut state = self.state.lock();
        state.begun += 1;
        let number = state.begun;
        state.running.push(number);
        Service { services: Arc::clone(self), number }
    }

    /// Waits until all services that have started are done, at most for a second.
    pub(crate) fn wait_for_begun(&self) {
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
        self.services.state.lock().running.retain(|number| *number != self.number);
        self.services.ended.notify_all();
    }
}

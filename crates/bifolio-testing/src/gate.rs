//! A gate that holds calls until a test lets them go, so that no test has to guess with sleeps.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// How long anyone waits before the test is called stuck.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Closed when made; whoever arrives waits until it is opened. Clones are the same gate.
#[derive(Clone, Debug, Default)]
pub struct Gate {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    open: bool,
    arrivals: u64,
}

impl Gate {
    /// A closed gate.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets everyone go, those who wait and those who come.
    pub fn open(&self) {
        self.shared.state.lock().expect("no panic under the lock").open = true;
        self.shared.changed.notify_all();
    }

    /// Waits until `count` calls have arrived at the gate since it was made.
    ///
    /// # Panics
    /// If that takes a minute.
    pub fn wait_for_arrivals(&self, count: u64) {
        self.wait_while(|state| state.arrivals < count);
    }

    /// Arrives, and waits until the gate is open.
    pub fn pass(&self) {
        self.shared.state.lock().expect("no panic under the lock").arrivals += 1;
        self.shared.changed.notify_all();
        self.wait_while(|state| !state.open);
    }

    fn wait_while(&self, mut condition: impl FnMut(&mut State) -> bool) {
        let state = self.shared.state.lock().expect("no panic under the lock");
        let waited = self.shared.changed.wait_timeout_while(state, WAIT_MAX, &mut condition);
        let timed_out = waited.expect("no panic under the lock").1.timed_out();
        assert!(!timed_out, "stuck at a gate for {WAIT_MAX:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_gate_holds_who_arrives_until_it_opens() {
        let gate = Gate::new();
        thread::scope(|scope| {
            let held = scope.spawn(|| gate.pass());
            gate.wait_for_arrivals(1);
            assert!(!held.is_finished());
            gate.open();
            held.join().unwrap();
        });
        gate.pass();
        gate.wait_for_arrivals(2);
    }
}

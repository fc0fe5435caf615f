//! A gate that holds calls until a test opens it, so that no test depends on sleeps.
//!
//! A test that fails does not come to open its gates, and what they hold may be what its unwinding
//! waits for: threads of a scope, the last handle of a file. So a thread that panics opens the
//! gates that it has made, before anything is unwound.

use std::cell::RefCell;
use std::panic;
use std::sync::{Arc, Condvar, Mutex, Once, Weak};
use std::time::Duration;

/// Time after which a waiting test fails as stuck.
const WAIT_MAX: Duration = Duration::from_secs(60);

thread_local! {
    /// Gates that this thread has created.
    static MADE_HERE: RefCell<Vec<Weak<Shared>>> = const { RefCell::new(Vec::new()) };
}

/// A gate, created closed: threads wait at it until it is opened, or until the thread that created
/// it panics. Clones are the same gate.
#[derive(Clone, Debug)]
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
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |panic| {
                open_those_made_here();
                before(panic);
            }));
        });
        let shared = Arc::new(Shared::default());
        MADE_HERE.with_borrow_mut(|made| {
            made.retain(|gate| gate.strong_count() > 0);
            made.push(Arc::downgrade(&shared));
        });
        Self { shared }
    }

    /// Opens the gate for all threads that wait or arrive later.
    pub fn open(&self) {
        self.shared.open();
    }

    /// Waits until `count` calls have arrived at the gate since it was created.
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

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}

impl Shared {
    fn open(&self) {
        self.state.lock().expect("no panic under the lock").open = true;
        self.changed.notify_all();
    }
}

/// Opens the gates of a thread that panics.
fn open_those_made_here() {
    let made = MADE_HERE.try_with(|made| made.try_borrow().map(|made| made.clone()));
    let made = made.ok().and_then(Result::ok).unwrap_or_default();
    made.iter().filter_map(Weak::upgrade).for_each(|gate| gate.open());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_thread_that_panics_opens_its_gates_and_no_others() {
        let others = Gate::new();
        let failing = thread::spawn(|| {
            let gate = Gate::new();
            // The scope waits for the thread before it goes on to unwind.
            thread::scope(|scope| {
                scope.spawn(|| gate.pass());
                gate.wait_for_arrivals(1);
                panic!("as a test does that fails");
            });
        });
        assert!(failing.join().is_err());
        assert!(!others.shared.state.lock().unwrap().open);
    }

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

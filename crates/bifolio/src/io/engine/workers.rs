//! A few threads that run jobs.
//!
//! Used by queues for transfers no ring makes (`queue.rs`), and by `file` for what nobody waits
//! for. A thread is started when a job comes and nobody is idle, up to [`THREADS_MAX`]; it stays
//! until the engine goes. Nothing here waits for a job, but for the end: dropping the workers runs
//! what is left and joins the threads.
//!
//! A job may never end: storage hangs. So each job names its *lane*, the device whose storage it
//! calls, and of one lane at most [`LANE_HELPERS_MAX`] run at a time: a device that hangs keeps
//! that many threads and no more. Jobs of a lane that is full wait in a list, and so do jobs for
//! which there is no thread. That list is as long as their makers allow (each transfer in flight is
//! one at most), and no progress may depend on a job in it: what must be done soon or not at all is
//! offered as [`Urgency::Now`], may have as many threads again, and comes back to its maker where
//! there is none for it.
//!
//! A forked child has no threads, and a copy of the list that it leaves alone.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::Lane;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::sys::process::{Origin, OwnedThread};

/// The most threads: enough for two devices that hang, and others that do not.
pub(super) const THREADS_MAX: usize = 6 * LANE_HELPERS_MAX;
/// The most jobs of one device that run at a time, unless they are urgent.
const LANE_HELPERS_MAX: usize = 16;

/// How soon a job is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// When there is a thread: it makes something faster, or is done by others meanwhile.
    Whenever,
    /// Now, or not at all.
    Now,
}

impl Urgency {
    /// How many jobs of a lane may run beside this one, and this one.
    fn lane_max(self) -> usize {
        match self {
            Self::Whenever => LANE_HELPERS_MAX,
            Self::Now => 2 * LANE_HELPERS_MAX,
        }
    }
}

/// A job for a worker.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads_max: usize,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// A forked child inherits this value, but no threads.
    origin: Origin,
}

#[derive(Default)]
struct State {
    /// Jobs whose lane has room for them: they count as running.
    ready: VecDeque<(Lane, Job)>,
    /// Jobs whose lane is full.
    waiting: VecDeque<(Lane, Job)>,
    /// How many jobs of a lane run; none stands for 0.
    running: HashMap<Lane, usize>,
    threads: Vec<OwnedThread>,
    /// Threads that run no job.
    idle: usize,
    is_ending: bool,
}

impl State {
    fn has_room(&self, lane: Lane, urgency: Urgency) -> bool {
        self.running.get(&lane).is_none_or(|running| *running < urgency.lane_max())
    }

    fn begin(&mut self, lane: Lane, job: Job) {
        *self.running.entry(lane).or_default() += 1;
        self.ready.push_back((lane, job));
    }

    /// A job of the lane has ended: the next that waited for that may run.
    fn end(&mut self, lane: Lane) {
        self.idle += 1;
        if let Some(running) = self.running.get_mut(&lane) {
            *running -= 1;
            if *running == 0 {
                self.running.remove(&lane);
            }
        }
        if self.has_room(lane, Urgency::Whenever)
            && let Some(at) = self.waiting.iter().position(|(other, _)| *other == lane)
            && let Some((lane, job)) = self.waiting.remove(at)
        {
            self.begin(lane, job);
        }
    }

    /// Whether a thread will have nothing to do when all jobs that are ready run.
    fn has_spare(&self) -> bool {
        self.idle > self.ready.len()
    }
}

impl Workers {
    /// No threads yet.
    pub(super) fn new(threads_max: usize) -> Self {
        Self { shared: Arc::new(Shared::new()), threads_max }
    }

    /// Lets a thread run `job`, of the device `lane`. Gives it back if there is no thread and none
    /// can be started, or if it is urgent and all threads that it may have are at work.
    pub(super) fn offer(&self, lane: Lane, urgency: Urgency, job: Job) -> Result<(), Job> {
        let mut state = self.shared.state.lock();
        let has_room = state.has_room(lane, urgency);
        if has_room && !state.has_spare() && state.threads.len() < self.threads_max {
            self.start_thread(&mut state);
        }
        let is_late = urgency == Urgency::Now && !(has_room && state.has_spare());
        if state.threads.is_empty() || is_late {
            return Err(job);
        }
        if has_room {
            state.begin(lane, job);
            self.shared.changed.notify_one();
        } else {
            state.waiting.push_back((lane, job));
        }
        Ok(())
    }

    fn start_thread(&self, state: &mut State) {
        let shared = Arc::clone(&self.shared);
        match OwnedThread::start("bifolio-io", move || shared.run()) {
            Ok(thread) => {
                state.threads.push(thread);
                state.idle += 1;
            }
            Err(error) => log::debug!("cannot start a thread for I/O: {error}"),
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if self.shared.origin.is_forked() {
            // The lock may be held for ever, and there is nobody to wait for.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let threads = {
            let mut state = self.shared.state.lock();
            state.is_ending = true;
            std::mem::take(&mut state.threads)
        };
        self.shared.changed.notify_all();
        // Joins them, but for this one: the last owner of the engine may have been a job.
        drop(threads);
    }
}

impl Shared {
    fn new() -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), origin: Origin::here() }
    }

    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some((lane, job)) = state.ready.pop_front() {
                state.idle -= 1;
                // A job that panics has been reported by the runtime; the thread goes on.
                MutexGuard::unlocked(&mut state, || drop(catch_unwind(AssertUnwindSafe(job))));
                state.end(lane);
            } else if state.is_ending {
                // Jobs that wait for their lane are run by the threads at work there.
                return;
            } else {
                self.changed.wait(&mut state);
            }
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Shared").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_lane_that_hangs_leaves_threads_to_others() {
        let workers = Workers::new(THREADS_MAX);
        let (let_go, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let hang = || {
            let held = Arc::clone(&held);
            Box::new(move || assert!(held.lock().recv().is_err()))
        };
        for _ in 0..3 * LANE_HELPERS_MAX {
            assert!(
                workers.offer(Lane::Alone(1), Urgency::Whenever, hang()).is_ok(),
                "waits in the list"
            );
        }
        let urgent = (0..)
            .take_while(|_| workers.offer(Lane::Alone(1), Urgency::Now, hang()).is_ok())
            .count();
        assert!(urgent <= 2 * LANE_HELPERS_MAX, "{urgent} beside those that were not");
        let (done, all_done) = mpsc::channel();
        for urgency in [Urgency::Whenever, Urgency::Now] {
            let done = done.clone();
            let job = Box::new(move || done.send(urgency).unwrap());
            assert!(workers.offer(Lane::Alone(2), urgency, job).is_ok());
            assert_eq!(all_done.recv().unwrap(), urgency);
        }
        assert!(workers.shared.state.lock().threads.len() <= THREADS_MAX);
        drop(let_go);
    }
}

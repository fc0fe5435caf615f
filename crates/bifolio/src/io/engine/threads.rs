//! Transfers that no ring makes: a queue's thread and its helpers make them with plain calls
//! ([`FallbackQueue`]); and the few threads that run these and other jobs ([`Workers`]).
//!
//! A thread is started when a job is offered and no thread is idle, up to [`THREADS_MAX`]; it runs
//! until the engine is dropped. Nothing waits for a job until then: dropping the workers runs the
//! remaining jobs and joins the threads.
//!
//! A job may never end, because storage can hang. So each job names its *lane*, the device that it
//! calls, and at most [`LANE_HELPERS_MAX`] jobs of one lane run at a time. Jobs of a full lane, or
//! without a thread, wait in a list, which the callers bound (at most one job per transfer in
//! flight), and on which no progress may depend: what must run soon or not at all is
//! [`Urgency::Now`], may use as many threads again, and is returned if no thread is available. A
//! job that other threads rely on is [`Urgency::Always`]; its callers bound how many of those there
//! are.
//!
//! A forked child has no threads, and a copy of the list that it ignores.
//!
//! # Safety
//! Makes transfers for which `Queue::push` required IO-1.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::lane::Lane;
use crate::io::transfer::{Transfer, TransferResult};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::sys::process::{Origin, OwnedThread};
use crate::sys::ring::Bell;

/// Maximum number of threads: enough for two hung devices and others that work.
pub(super) const THREADS_MAX: usize = 6 * LANE_HELPERS_MAX;
/// Maximum number of jobs of one device that run at a time, unless urgent.
const LANE_HELPERS_MAX: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// When a thread is available: the job only saves time, or another thread may do it first.
    Whenever,
    /// Immediately, or not at all.
    Now,
    /// Immediately, on a thread beyond the limits if need be.
    Always,
}

pub(super) type Job = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads_max: usize,
}

struct Shared {
    state: Mutex<WorkersState>,
    changed: Condvar,
    /// Detects a fork: a child inherits this value, but no threads.
    origin: Origin,
}

#[derive(Default)]
struct WorkersState {
    /// Jobs whose lane has room for them; they count as running.
    ready: VecDeque<(Lane, Job)>,
    waiting: VecDeque<(Lane, Job)>,
    /// Running jobs per lane; absent if 0.
    running: HashMap<Lane, usize>,
    threads: Vec<OwnedThread>,
    idle: usize,
    is_ending: bool,
}

impl WorkersState {
    fn has_room(&self, lane: Lane, urgency: Urgency) -> bool {
        let running_max = match urgency {
            Urgency::Whenever => LANE_HELPERS_MAX,
            Urgency::Now => 2 * LANE_HELPERS_MAX,
            Urgency::Always => usize::MAX,
        };
        self.running.get(&lane).is_none_or(|running| *running < running_max)
    }

    fn begin(&mut self, lane: Lane, job: Job) {
        *self.running.entry(lane).or_default() += 1;
        self.ready.push_back((lane, job));
    }

    /// Ends a job of the lane: the next waiting one may run.
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

    /// Returns `true` if a thread will be idle once all ready jobs run.
    fn has_spare(&self) -> bool {
        self.idle > self.ready.len()
    }
}

impl Workers {
    pub(super) fn new(threads_max: usize) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Shared { state, changed, origin: Origin::here() };
        Self { shared: Arc::new(shared), threads_max }
    }

    /// Queues `job`, of the device `lane`, for a thread. Returns it if no thread exists and none
    /// can be started, or if it is urgent and all threads that it may use are busy.
    pub(super) fn offer(&self, lane: Lane, urgency: Urgency, job: Job) -> Result<(), Job> {
        let mut state = self.shared.state.lock();
        let has_room = state.has_room(lane, urgency);
        let may_start = state.threads.len() < self.threads_max || urgency == Urgency::Always;
        if has_room && !state.has_spare() && may_start {
            self.start_thread(&mut state);
        }
        let is_late = urgency != Urgency::Whenever && !(has_room && state.has_spare());
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

    fn start_thread(&self, state: &mut WorkersState) {
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
            // The lock may be held forever, and no thread exists to be joined.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let threads = {
            let mut state = self.shared.state.lock();
            state.is_ending = true;
            std::mem::take(&mut state.threads)
        };
        self.shared.changed.notify_all();
        // Joins all but this thread: the last owner of the engine may have been a job.
        drop(threads);
    }
}

impl Shared {
    /// Runs jobs until the engine ends. A job that panics ends alone.
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some((lane, job)) = state.ready.pop_front() {
                state.idle -= 1;
                // The runtime has already reported a panic of the job; the thread continues.
                MutexGuard::unlocked(&mut state, || drop(catch_unwind(AssertUnwindSafe(job))));
                state.end(lane);
            } else if state.is_ending {
                // Jobs that wait for their lane are run by the threads that work on it.
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

/// Transfers of one queue that no ring makes.
///
/// Workers come as helpers, one per *ticket*; while the queue's thread would otherwise wait, it
/// takes transfers itself. So a queue waits only for threads that work on one of its transfers, and
/// makes progress even if every worker is busy, or is the queue's own thread.
#[derive(Debug, Default)]
pub(super) struct FallbackQueue {
    pub(super) state: Mutex<FallbackState>,
    finished: Condvar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Helpers {
    Working,
    Called,
    None,
}

#[derive(Debug, Default)]
pub(super) struct FallbackState {
    pub(super) submitted: VecDeque<(usize, Transfer)>,
    pub(super) done: Vec<(usize, TransferResult)>,
    /// Helpers that were called and have not arrived yet.
    pub(super) tickets: usize,
    /// Rung by a helper that is done.
    pub(super) bell: Option<Arc<Bell>>,
}

impl FallbackQueue {
    /// Returns how many more helpers to call if the queue's thread takes `own` transfers itself.
    /// They count as called.
    pub(super) fn call_helpers(&self, own: usize) -> usize {
        let mut state = self.state.lock();
        let missing = state.submitted.len().saturating_sub(state.tickets + own);
        state.tickets += missing;
        missing
    }

    /// Makes one transfer of the queue, if one is left: the work of a ticket.
    pub(super) fn help(&self) {
        let taken = {
            let mut state = self.state.lock();
            state.tickets -= 1;
            state.submitted.pop_front()
        };
        let Some((token, transfer)) = taken else { return };
        // SAFETY: `Queue::push` required IO-1; the queue waits for every transfer that was taken,
        // and keeps its owner until then.
        let answer = unsafe { transfer.run(None) };
        let bell = {
            let mut state = self.state.lock();
            state.done.push((token, answer));
            state.bell.clone()
        };
        self.finished.notify_one();
        bell.iter().for_each(|bell| bell.ring());
    }

    /// Returns what helpers do for the `count` transfers that are submitted and not complete.
    pub(super) fn helpers_for(&self, count: usize) -> Helpers {
        let state = self.state.lock();
        if state.submitted.len() < count {
            Helpers::Working
        } else if state.tickets > 0 {
            Helpers::Called
        } else {
            Helpers::None
        }
    }

    /// Waits until an answer exists. A helper must be at work.
    pub(super) fn wait_for_done(&self) {
        let mut state = self.state.lock();
        while state.done.is_empty() {
            self.finished.wait(&mut state);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_hung_lane_does_not_use_up_all_threads() {
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
                "the job waits in the list"
            );
        }
        let urgent = (0..)
            .take_while(|_| workers.offer(Lane::Alone(1), Urgency::Now, hang()).is_ok())
            .count();
        assert!(urgent <= 2 * LANE_HELPERS_MAX, "{urgent} urgent jobs besides the others");
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

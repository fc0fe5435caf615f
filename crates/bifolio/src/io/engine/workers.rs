//! A few threads that run jobs, in the order they come.
//!
//! Used by queues for transfers no ring makes (`todos.rs`), and by `file` for what nobody waits
//! for. A thread is started when a job comes and nobody is idle, up to [`THREADS_MAX`]; it stays
//! until the engine goes. Jobs wait in a list that is as long as their makers allow: each transfer
//! in flight and each read-ahead of a handle is one at most. Nothing here waits for a job, but for
//! the end: dropping the workers runs what is left and joins the threads.
//!
//! A forked child has no threads, and a copy of the list that it leaves alone.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::sys::thread::OwnedThread;

/// The most threads.
pub(super) const THREADS_MAX: usize = 16;

/// What a worker runs.
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
    process: u32,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: Vec<OwnedThread>,
    /// Threads that wait for a job.
    idle: usize,
    is_ending: bool,
}

impl Workers {
    /// No threads yet.
    pub(super) fn new(threads_max: usize) -> Self {
        Self { shared: Arc::new(Shared::new()), threads_max }
    }

    /// Lets a thread run `job`. Gives it back if there is no thread and none can be started.
    pub(super) fn offer(&self, job: Job) -> Result<(), Job> {
        let mut state = self.shared.state.lock();
        if state.jobs.len() >= state.idle && state.threads.len() < self.threads_max {
            self.start_thread(&mut state);
        }
        if state.threads.is_empty() {
            return Err(job);
        }
        state.jobs.push_back(job);
        self.shared.changed.notify_one();
        Ok(())
    }

    fn start_thread(&self, state: &mut State) {
        let shared = Arc::clone(&self.shared);
        match OwnedThread::start("bifolio-io", move || shared.run()) {
            Ok(thread) => state.threads.push(thread),
            Err(error) => log::debug!("cannot start a thread for I/O: {error}"),
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if self.shared.is_forked() {
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
        Self { state: Mutex::default(), changed: Condvar::new(), process: std::process::id() }
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                // A job that panics has been reported by the runtime; the thread goes on.
                MutexGuard::unlocked(&mut state, || drop(catch_unwind(AssertUnwindSafe(job))));
            } else if state.is_ending {
                return;
            } else {
                state.idle += 1;
                self.changed.wait(&mut state);
                state.idle -= 1;
            }
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Shared").finish_non_exhaustive()
    }
}

//! Threads for requests that may wait for a device.
//!
//! The session has a fixed number of threads, and each serves a request until it is answered. If a
//! device hangs, the requests for its files would soon hold all of them. So a thread that would be
//! the last free one does not serve such a request itself: it passes it to a [`Workers`] thread,
//! which exists while there is work and for a few seconds afterwards.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Maximum number of worker threads, which is that of requests that may hang. Further ones queue.
pub const WORKERS_MAX: usize = 512;
/// Maximum length of all writes that wait in workers, bytes.
const WRITE_BYTES_MAX: usize = 64 << 20;
/// Time for which an idle worker stays.
const IDLE_MAX: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce() + Send>;

/// The threads of a session, and additional workers.
#[derive(Clone)]
pub struct Workers {
    shared: Arc<Shared>,
}

struct Shared {
    /// Number of session threads that may serve a request that waits: all but one.
    waiting_max: usize,
    /// Session threads that serve such a request now.
    waiting: AtomicUsize,
    queue: Mutex<Queue>,
    work_arrived: Condvar,
    /// Length of the writes that wait in workers.
    write_bytes: AtomicUsize,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    workers: usize,
    idle_workers: usize,
}

/// Permission to wait in a session thread; given back on drop.
pub struct MayWait<'a>(&'a AtomicUsize);

impl Drop for MayWait<'_> {
    fn drop(&mut self) {
        // Relaxed: only counts; the requests synchronize by their own locks.
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Workers {
    /// Creates the workers of a session with this number of threads.
    pub fn new(session_threads: usize) -> Self {
        let shared = Shared {
            waiting_max: session_threads.saturating_sub(1),
            waiting: AtomicUsize::new(0),
            queue: Mutex::default(),
            work_arrived: Condvar::new(),
            write_bytes: AtomicUsize::new(0),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Returns permission to wait in the calling session thread, unless it is the last free one.
    pub fn may_wait(&self) -> Option<MayWait<'_>> {
        let waiting = &self.shared.waiting;
        // Relaxed: as in `MayWait::drop`.
        let others = waiting.fetch_add(1, Ordering::Relaxed);
        let permission = MayWait(waiting);
        (others < self.shared.waiting_max).then_some(permission)
    }

    /// Runs a job that may wait: in this session thread, or in a worker if it is the last free one.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        match self.may_wait() {
            Some(_permission) => job(),
            None => self.spawn(job),
        }
    }

    /// Runs a write: in this session thread, or, with a copy of its bytes, in a worker if it is the
    /// last free one. A request comes with its bytes, so while the copies take
    /// [`WRITE_BYTES_MAX`], the last session thread, too, waits for the device.
    pub fn run_write(&self, bytes: &[u8], write: impl FnOnce(&[u8]) + Send + 'static) {
        if let Some(_permission) = self.may_wait() {
            return write(bytes);
        }
        let shared = &self.shared;
        // Relaxed: only the value counts.
        let copies = shared.write_bytes.fetch_add(bytes.len(), Ordering::Relaxed) + bytes.len();
        // Given back even if the write panics.
        let counted = scopeguard::guard((Arc::clone(shared), bytes.len()), |(shared, length)| {
            shared.write_bytes.fetch_sub(length, Ordering::Relaxed);
        });
        if copies > WRITE_BYTES_MAX {
            drop(counted);
            return write(bytes);
        }
        let bytes = bytes.to_vec();
        self.spawn(move || {
            write(&bytes);
            drop((bytes, counted));
        });
    }

    /// Runs a job in a worker.
    pub fn spawn(&self, job: impl FnOnce() + Send + 'static) {
        let mut queue = self.shared.queue.lock();
        queue.jobs.push_back(Box::new(job));
        let needs_worker = queue.jobs.len() > queue.idle_workers && queue.workers < WORKERS_MAX;
        if !needs_worker {
            self.shared.work_arrived.notify_one();
            return;
        }
        queue.workers += 1;
        drop(queue);
        let shared = Arc::clone(&self.shared);
        let started =
            thread::Builder::new().name("mount-worker".into()).spawn(move || shared.work());
        if started.is_err() {
            // No thread: the jobs run here. The caller then waits, but no request is lost.
            self.shared.work();
        }
    }
}

impl Shared {
    /// Runs jobs until none has arrived for [`IDLE_MAX`]. A job that panics has written its
    /// message; its request is answered with an error when the reply is dropped.
    fn work(&self) {
        let mut queue = self.queue.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                let _panicked = parking_lot::MutexGuard::unlocked(&mut queue, || {
                    catch_unwind(AssertUnwindSafe(job))
                });
                continue;
            }
            queue.idle_workers += 1;
            let wait = self.work_arrived.wait_for(&mut queue, IDLE_MAX);
            queue.idle_workers -= 1;
            if wait.timed_out() && queue.jobs.is_empty() {
                queue.workers -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::resume_unwind;
    use std::sync::mpsc;

    #[test]
    fn the_last_free_session_thread_never_waits() {
        let workers = Workers::new(3);
        let (first, second) = (workers.may_wait(), workers.may_wait());
        assert!(first.is_some() && second.is_some());
        assert!(workers.may_wait().is_none());
        drop(first);
        assert!(workers.may_wait().is_some());
    }

    #[test]
    fn jobs_run_while_others_hang() {
        let workers = Workers::new(1);
        let (release, hang) = mpsc::channel::<()>();
        let hang = Arc::new(Mutex::new(hang));
        for _ in 0..8 {
            let hang = Arc::clone(&hang);
            workers.run(move || assert!(hang.lock().recv().is_err()));
        }
        let (done, is_done) = mpsc::channel();
        workers.run(move || done.send(thread::current().id()).unwrap());
        assert_ne!(is_done.recv().unwrap(), thread::current().id());
        drop(release);
    }

    #[test]
    fn jobs_that_panic_leave_workers_for_others() {
        let workers = Workers::new(1);
        for _ in 0..WORKERS_MAX {
            workers.run(|| resume_unwind(Box::new(())));
        }
        let (done, is_done) = mpsc::channel();
        workers.run(move || done.send(()).unwrap());
        is_done.recv_timeout(Duration::from_secs(60)).expect("the job never runs");
    }
}

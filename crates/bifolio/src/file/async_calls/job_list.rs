//! Calls that wait on threads, by what they wait for: calls with one key share a wait.
//!
//! PROTOCOL JOBS, as two columns:
//!
//! ```text
//!   caller, or server                         thread
//!   A1 add: queue the call under its key      T1 next: take all calls of a key that no thread
//!   A2 a new key, and few threads? one more      serves; none is left? it ends
//!   A3 start it                               T2 serve them
//!   A4 could not start? take all calls, if    T3 done: the key is free again, behind the others;
//!      no thread is left                         without calls, it is forgotten
//! ```
//!
//! Each step but A3 and T2 is one critical section. A call that is added while its key is served
//! is taken after T3. A thread ends in the section that found nothing to do, so a key that is added
//! later counts without it. `loom_job_list.rs` checks that each call is served, and by one thread
//! of its key at a time.

use crate::sync::Mutex;
use std::collections::VecDeque;

#[derive(Debug)]
pub(crate) struct JobList<K, T>(Mutex<JobState<K, T>>);

#[derive(Debug)]
struct JobState<K, T> {
    queues: VecDeque<JobQueue<K, T>>,
    threads: usize,
}

#[derive(Debug)]
struct JobQueue<K, T> {
    key: K,
    calls: VecDeque<T>,
    is_served: bool,
}

impl<K, T> Default for JobList<K, T> {
    fn default() -> Self {
        Self(Mutex::new(JobState { queues: VecDeque::new(), threads: 0 }))
    }
}

impl<K: Copy + PartialEq, T> JobList<K, T> {
    /// Queues a call. Returns `true` if the caller must start a thread (A1, A2).
    #[must_use]
    pub(crate) fn add(&self, key: K, call: T, threads_max: usize) -> bool {
        let mut state = self.0.lock();
        if let Some(queue) = state.queues.iter_mut().find(|queue| queue.key == key) {
            queue.calls.push_back(call);
            return false;
        }
        state.queues.push_back(JobQueue { key, calls: VecDeque::from([call]), is_served: false });
        let must_start = state.threads < threads_max;
        state.threads += usize::from(must_start);
        must_start
    }

    /// Takes the calls of the next key. Returns `None` if the thread must end (T1).
    pub(crate) fn next(&self) -> Option<(K, VecDeque<T>)> {
        let mut state = self.0.lock();
        let Some(queue) = state.queues.iter_mut().find(|queue| !queue.is_served) else {
            state.threads -= 1;
            return None;
        };
        queue.is_served = true;
        Some((queue.key, std::mem::take(&mut queue.calls)))
    }

    /// Notes that the calls of a key that were taken are served (T3).
    pub(crate) fn done(&self, key: K) {
        let mut state = self.0.lock();
        let Some(at) = state.queues.iter().position(|queue| queue.key == key) else { return };
        let Some(mut queue) = state.queues.remove(at) else { return };
        if !queue.calls.is_empty() {
            queue.is_served = false;
            state.queues.push_back(queue);
        }
    }

    /// Notes that a thread could not be started. Returns the calls that no thread will serve (A4).
    pub(crate) fn give_up(&self) -> Vec<T> {
        let mut state = self.0.lock();
        state.threads -= 1;
        if state.threads > 0 {
            return Vec::new();
        }
        state.queues.drain(..).flat_map(|queue| queue.calls).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_always_wanted_does_not_starve_the_others() {
        let list = JobList::default();
        assert!(list.add("busy", 1, 1));
        assert!(!list.add("other", 2, 1), "one thread is enough");
        assert_eq!(list.next(), Some(("busy", VecDeque::from([1]))));
        assert!(!list.add("busy", 3, 1));
        list.done("busy");
        assert_eq!(list.next(), Some(("other", VecDeque::from([2]))));
        list.done("other");
        assert_eq!(list.next(), Some(("busy", VecDeque::from([3]))));
        list.done("busy");
        assert_eq!(list.next(), None);
        assert!(list.add("busy", 4, 1), "the thread has ended");
    }
}

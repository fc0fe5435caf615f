//! Calls that wait on threads (`file/async_calls/job_list.rs`): each is served once, by one thread
//! of its key at a time.

use super::world::model;
use crate::file::async_calls::job_list::JobList;
use crate::sync::{AtomicU32, Ordering};
use std::sync::Arc;

/// Calls, the number that was served, and whether a thread serves each of the keys.
#[derive(Default)]
struct Shared {
    list: JobList<usize, u32>,
    served: AtomicU32,
    busy: [AtomicU32; 2],
}

impl Shared {
    /// Adds a call, and acts as the thread that serves it if one must be started.
    fn add(&self, key: usize, call: u32, threads_max: usize) {
        if self.list.add(key, call, threads_max) {
            self.serve();
        }
    }

    fn serve(&self) {
        while let Some((key, calls)) = self.list.next() {
            assert_eq!(self.busy[key].swap(1, Ordering::Relaxed), 0, "two threads of one key");
            for call in calls {
                self.served.fetch_add(call, Ordering::Relaxed);
            }
            self.busy[key].store(0, Ordering::Relaxed);
            self.list.done(key);
        }
    }
}

fn check(threads_max: usize, keys: [usize; 3]) {
    model(move || {
        let shared = Arc::new(Shared::default());
        let other = Arc::clone(&shared);
        let other = loom::thread::spawn(move || {
            other.add(keys[0], 1, threads_max);
            other.add(keys[1], 10, threads_max);
        });
        shared.add(keys[2], 100, threads_max);
        other.join().unwrap();
        assert_eq!(shared.served.load(Ordering::Relaxed), 111);
    });
}

/// Dies with: a `done` that forgets a key with calls, or leaves it as served.
#[test]
fn loom_job_list_serves_calls_of_one_key() {
    check(2, [0, 0, 0]);
}

/// Dies with: a `next` that ends a thread outside of the section that found nothing.
#[test]
fn loom_job_list_serves_two_keys_with_one_thread() {
    check(1, [0, 1, 0]);
}

/// A second thread, of another key, does not take the calls of the first. Dies with: a `next` that
/// takes a key which is served.
#[test]
fn loom_job_list_serves_a_key_by_one_thread() {
    check(2, [0, 1, 0]);
}

/// A thread that cannot be started gives up only what no other thread serves. Dies with: a
/// `give_up` that takes the calls while another thread runs.
#[test]
fn loom_job_list_gives_up_what_no_thread_serves() {
    model(|| {
        let shared = Arc::new(Shared::default());
        let other = Arc::clone(&shared);
        let other = loom::thread::spawn(move || {
            let must_start = other.list.add(0, 1, 2);
            if must_start {
                other.serve();
            }
            must_start
        });
        let given_up = match shared.list.add(1, 10, 2) {
            true => shared.list.give_up(),
            false => Vec::new(),
        };
        let has_thread = other.join().unwrap();
        assert!(!(has_thread && given_up.contains(&1)), "a call whose thread runs is given up");
        let served = shared.served.load(Ordering::Relaxed);
        // The other thread may have come later, and serves what is left then, or has ended before.
        assert_eq!(served + given_up.iter().sum::<u32>(), 11);
    });
}

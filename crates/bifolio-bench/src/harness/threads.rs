//! Threads that start together, on their own CPUs or on any.
//!
//! Called once for each timed window. What a thread needs (a descriptor, a handle) it makes before
//! the barrier; a thread that fails there still comes to the barrier, so the others never wait for
//! ever.

use std::sync::Barrier;
use std::thread;

use super::cpus;
use crate::error::Result;

/// Runs `prepare`, then, once all threads have, `body`, in one thread for each of `cpus`.
pub(crate) fn run_pinned<S, T: Send>(
    cpus: &[usize],
    prepare: impl Fn(usize) -> Result<S> + Sync,
    body: impl Fn(S) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let prepare =
        |index: usize| cpus::pin_current_thread(cpus[index]).and_then(|()| prepare(index));
    run_together(cpus.len(), prepare, body)
}

/// The same in `count` threads on any CPU: a thread that is started while these run, by what they
/// call, must not stay on the CPU of its parent.
pub(crate) fn run_together<S, T: Send>(
    count: usize,
    prepare: impl Fn(usize) -> Result<S> + Sync,
    body: impl Fn(S) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let barrier = Barrier::new(count);
    let run_one = |index: usize| {
        let prepared = prepare(index);
        barrier.wait();
        body(prepared?)
    };
    thread::scope(|scope| {
        let run_one = &run_one;
        let handles: Vec<_> = (0..count).map(|index| scope.spawn(move || run_one(index))).collect();
        handles.into_iter().map(|handle| handle.join().expect("a worker panicked")).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_thread_that_fails_to_prepare_holds_up_nobody() {
        let cpu = cpus::allowed()[0];
        let prepare = |index: usize| {
            if index == 0 { Err(Error::Refused("no".into())) } else { Ok(index) }
        };
        assert!(run_pinned(&[cpu, cpu], prepare, Ok).is_err());
        let all = run_pinned(&[cpu, cpu, cpu], Ok, |index| Ok(index * 2)).unwrap();
        assert_eq!(all, [0, 2, 4]);
    }
}

//! Threads that start together, on their own CPUs or on any.
//!
//! Called once for each timed window. A thread creates its resources (a descriptor, a handle)
//! before the barrier; a thread that fails there still reaches the barrier, so the others never
//! wait forever.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// Runs `count` threads on any CPU: a thread that the program starts while these run must not
/// inherit one CPU from its parent.
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

/// Runs `work` in a thread on `cpu`.
pub(crate) fn run_on<T: Send>(cpu: usize, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let pinned = || cpus::pin_current_thread(cpu).and_then(|()| work());
    thread::scope(|scope| scope.spawn(pinned).join().expect("a worker panicked"))
}

/// Runs `work` in a thread on the first CPU, while `step` is repeated on the second: at least once
/// before `work` begins, and once more after each check whether it has ended.
pub(crate) fn run_beside<T: Send>(
    [here, there]: [usize; 2],
    work: impl FnOnce() -> Result<T> + Send,
    mut step: impl FnMut() -> Result<()> + Send,
) -> Result<T> {
    let ended = AtomicBool::new(false);
    let both_ready = Barrier::new(2);
    let beside = || -> Result<()> {
        let first = cpus::pin_current_thread(there).and_then(|()| step());
        both_ready.wait();
        first?;
        // Relaxed: says when to stop, and publishes nothing.
        while !ended.load(Ordering::Relaxed) {
            step()?;
        }
        Ok(())
    };
    let pinned = || {
        let pinned = cpus::pin_current_thread(here);
        both_ready.wait();
        pinned.and_then(|()| work())
    };
    thread::scope(|scope| {
        let beside = scope.spawn(beside);
        let worked = scope.spawn(pinned).join();
        // Relaxed: see above.
        ended.store(true, Ordering::Relaxed);
        beside.join().expect("a worker panicked")?;
        worked.expect("a worker panicked")
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use rustix::thread::CpuSet;

    use super::*;
    use crate::error::Error;

    #[test]
    fn a_thread_that_fails_to_prepare_blocks_no_other() {
        let cpu = cpus::allowed()[0];
        let prepare = |index: usize| {
            if index == 0 { Err(Error::Refused("no".into())) } else { Ok(index) }
        };
        assert!(run_pinned(&[cpu, cpu], prepare, Ok).is_err());
        let all = run_pinned(&[cpu, cpu, cpu], Ok, |index| Ok(index * 2)).unwrap();
        assert_eq!(all, [0, 2, 4]);
    }

    #[test]
    fn a_step_is_repeated_beside_the_work_until_it_ends() {
        let cpu = cpus::allowed()[0];
        let steps = AtomicUsize::new(0);
        let step = || {
            steps.fetch_add(1, Ordering::Relaxed);
            thread::yield_now();
            Ok(())
        };
        let seen = || {
            let begin = steps.load(Ordering::Relaxed);
            while steps.load(Ordering::Relaxed) < begin + 3 {
                thread::yield_now();
            }
            Ok(begin)
        };
        assert!(run_beside([cpu, cpu], seen, step).unwrap() >= 1);
        let failed = || Err::<(), _>(Error::Refused("no".into()));
        assert!(run_beside([cpu, cpu], failed, step).is_err());
        assert!(run_beside([cpu, cpu], || Ok(1), failed).is_err());
        assert!(run_beside([CpuSet::MAX_CPU - 1, cpu], || Ok(1), step).is_err(), "no such CPU");
        assert_eq!(run_on(cpu, || Ok(cpus::allowed())).unwrap(), [cpu]);
    }
}

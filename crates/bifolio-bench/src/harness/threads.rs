//! Threads that start together, on their own CPUs or on any.
//!
//! A thread creates its resources (a descriptor, a handle) before the barrier; a thread that fails
//! there still reaches the barrier, so the others never wait forever.

use std::ops::Range;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::cpus;
use super::measured::Measured;
use crate::error::Result;

/// Runs `prepare`, then, once all `count` threads have, `body`, on any CPU: a thread that the
/// program starts while these run must not inherit one CPU from its parent.
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

/// The time in which threads work, from the start of one of them.
pub(crate) struct Window<'a> {
    start: Instant,
    duration: Duration,
    is_over: &'a AtomicBool,
}

impl Window<'_> {
    /// Returns `true` once the time of one of the threads is over: all end together.
    pub(crate) fn is_over(&self) -> bool {
        // Relaxed: says when to stop, and publishes nothing.
        let is_over = self.is_over.load(Ordering::Relaxed) || self.start.elapsed() >= self.duration;
        if is_over {
            // Relaxed: see above.
            self.is_over.store(true, Ordering::Relaxed);
        }
        is_over
    }
}

/// Operations of one thread, and when they were made.
pub(crate) type Work = (u64, Range<Instant>);

/// Runs `body` for `duration` in one thread for each of `cpus`, with what `prepare` returns for it.
/// It returns the number of its operations, and looks at the window after some of them.
pub(crate) fn run_for<S>(
    cpus: &[usize],
    duration: Duration,
    prepare: impl Fn(usize) -> Result<S> + Sync,
    body: impl Fn(S, &Window<'_>) -> Result<u64> + Sync,
) -> Result<Measured> {
    let (is_over, awake) = (AtomicBool::new(false), AtomicUsize::new(0));
    let prepare = |index: usize| {
        cpus::pin_current_thread(cpus[index])?;
        prepare(index)
    };
    let works = run_together(
        cpus.len(),
        |index| Ok(prepare(index)),
        |prepared| {
            // A thread that sleeps at the barrier starts later than the one that wakes it.
            // Relaxed: counts threads, and publishes nothing.
            awake.fetch_add(1, Ordering::Relaxed);
            while awake.load(Ordering::Relaxed) < cpus.len() {
                thread::yield_now();
            }
            let prepared = prepared?;
            let start = Instant::now();
            let operations = body(prepared, &Window { start, duration, is_over: &is_over })?;
            Ok((operations, start..Instant::now()))
        },
    )?;
    Ok(sum_of_threads(works))
}

/// Returns the result of threads; a word of each operation was verified. Threads that share a CPU
/// work one after the other, so the time is that from the first start to the last end.
fn sum_of_threads(threads: Vec<Work>) -> Measured {
    let operations = threads.iter().map(|(operations, _)| operations).sum();
    let start = threads.iter().map(|(_, time)| time.start).min();
    let end = threads.iter().map(|(_, time)| time.end).max();
    let seconds = start.zip(end).map_or(0.0, |(start, end)| (end - start).as_secs_f64());
    let measured = Measured::of_rate(operations, operations as f64 / seconds);
    Measured { verified_bytes: operations * size_of::<u64>() as u64, ..measured }
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
    let (ended, both_ready) = (AtomicBool::new(false), Barrier::new(2));
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
    thread::scope(|scope| {
        let beside = scope.spawn(beside);
        let pinned = || {
            let pinned = cpus::pin_current_thread(here);
            both_ready.wait();
            pinned.and_then(|()| work())
        };
        let worked = scope.spawn(pinned).join();
        // Relaxed: see above.
        ended.store(true, Ordering::Relaxed);
        beside.join().expect("a worker panicked")?;
        worked.expect("a worker panicked")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_thread_that_fails_to_prepare_blocks_no_other() {
        let cpu = cpus::allowed()[0];
        let run = |fails: usize| {
            let prepare = |index| {
                if index == fails { Err(Error::Refused("no".into())) } else { Ok(index) }
            };
            run_for(&[cpu; 3], Duration::ZERO, prepare, |index, window| {
                Ok(if window.is_over() { index as u64 } else { 100 })
            })
        };
        assert!(run(0).is_err());
        assert_eq!(run(9).unwrap().calls.operations, 3);
    }

    #[test]
    fn threads_that_work_one_after_the_other_are_not_faster_than_one() {
        let start = Instant::now();
        let second = |number| start + Duration::from_secs(number);
        let work = |from| (100, second(from)..second(from + 1));
        let rate = |threads| Measured::rate(&sum_of_threads(threads));
        assert_eq!(rate(vec![work(0), work(0)]), 200.0);
        assert_eq!(rate(vec![work(1), work(0)]), 100.0);
    }
}

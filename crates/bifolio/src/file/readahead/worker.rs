//! Readahead worker: fills queued runs in order, a limited part of them at a time.
//!
//! `readahead` has two workers per handle. A disk that serves requests one after the other may
//! report no completion before its queue is empty (virtio with one queue does so): requests that
//! were submitted together complete together, at the end. A reader that waits for the first page of
//! a window would then wait for the last page of all windows, and the device would be idle while
//! the reader uses them. So only a part is in flight, in the order of the claims. The next runs are
//! prepared, and are submitted before the completed ones are made READY.
//!
//! ```text
//!   readahead --> push --> queue of runs --> in flight --> finish: installed, READY
//!                  '--> a worker of the engine, unless one serves the queue already; it ends
//!                       when the queue is empty and nothing is in flight
//! ```
//!
//! A queue has one worker at a time: two would have twice as much in flight. More in flight than
//! one window makes a sequential scan slower.

use crate::fill::{FillQueue, ReadIo};
use crate::inode::Inode;
use crate::page::PAGE_BYTES;
use crate::sync::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Divisor of the bound for the largest window of each stream (of at least two streams). Each may
/// have two windows ahead, together half of the bound.
pub(super) const WINDOW_DIVISOR: u64 = 4;
pub(super) const STREAMS_MIN: u64 = 2;

/// Queue of runs to read, with at most one worker that serves it.
#[derive(Debug)]
pub(super) struct ReadaheadWorker {
    waiting: Mutex<ReadaheadQueue<ReadIo>>,
    in_flight_bytes_max: u64,
}

impl ReadaheadWorker {
    /// Creates an empty queue with at most `in_flight_bytes_max` bytes in flight, unless a single
    /// run has more.
    pub(super) fn new(in_flight_bytes_max: u64) -> Arc<Self> {
        Arc::new(Self { waiting: Mutex::default(), in_flight_bytes_max })
    }

    /// Queues a run of a file. Returns `true` if it will be read. If no worker thread is available,
    /// drops it and the whole queue: the caller may own transfers, and so cannot wait for those of
    /// other threads (IO-5).
    pub(super) fn push(self: &Arc<Self>, inode: &Arc<Inode>, run: ReadIo) -> bool {
        if !self.waiting.lock().join([run]) {
            return true;
        }
        let (worker, of) = (Arc::clone(self), Arc::clone(inode));
        let is_served = inode.engine.spawn(&inode.store.reader(), move || worker.serve(&of));
        if !is_served {
            self.give_up();
        }
        is_served
    }

    /// Drops all queued runs, because no worker serves the queue.
    fn give_up(&self) {
        let left = std::mem::take(&mut *self.waiting.lock());
        // Dropped without the lock: a run removes its folios from the table.
        drop(left);
    }

    /// Reads the queued runs until the queue is empty.
    fn serve(&self, inode: &Inode) {
        let mut serving = Serving { worker: self, is_over: false };
        let mut queue = FillQueue::new(&inode.engine);
        let pages_max = self.in_flight_pages_max(inode);
        loop {
            let next = |pages| self.waiting.lock().next(pages, pages_max, ReadIo::pages);
            while let Some(run) = next(queue.pages()) {
                queue.add(run, ());
            }
            queue.begin();
            if let Some(ended) = queue.next_ended() {
                // A later read of a page that could not be read reports the error.
                drop(ended.publish(&inode.memory.folios, drop));
            } else if queue.pages() > 0 {
                queue.wait();
            } else if self.waiting.lock().close() {
                serving.is_over = true;
                return;
            }
        }
    }

    fn in_flight_pages_max(&self, inode: &Inode) -> u64 {
        // At most a window, in a small cache.
        let parts = WINDOW_DIVISOR * STREAMS_MIN;
        let bound_bytes = inode.memory.arena.bound_bytes();
        let of_frames = self.in_flight_bytes_max.min(bound_bytes / parts) / PAGE_BYTES;
        inode.page_space.pages_in_flight(of_frames)
    }
}

/// Guard of the worker that serves a queue. If the worker panics, the queued runs are dropped, so
/// that no thread waits for their pages.
#[derive(Debug)]
struct Serving<'p> {
    worker: &'p ReadaheadWorker,
    is_over: bool,
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.worker.give_up();
        }
    }
}

/// Queued runs, in order, and the state of their worker.
#[derive(Debug)]
struct ReadaheadQueue<R> {
    runs: VecDeque<R>,
    is_served: bool,
}

impl<R> Default for ReadaheadQueue<R> {
    fn default() -> Self {
        Self { runs: VecDeque::new(), is_served: false }
    }
}

impl<R> ReadaheadQueue<R> {
    /// Queues runs. Returns `true` if the caller must start a worker.
    fn join(&mut self, runs: impl IntoIterator<Item = R>) -> bool {
        self.runs.extend(runs);
        !std::mem::replace(&mut self.is_served, true)
    }

    /// Returns the next run if it may be submitted with `in_flight` pages in flight, at most `max`.
    fn next(
        &mut self,
        in_flight_pages: u64,
        pages_max: u64,
        pages_of: impl Fn(&R) -> u64,
    ) -> Option<R> {
        let pages = pages_of(self.runs.front()?);
        let may_start = in_flight_pages == 0 || in_flight_pages + pages <= pages_max;
        if may_start { self.runs.pop_front() } else { None }
    }

    /// Returns `true` if the queue is empty: then the worker stops serving it.
    fn close(&mut self) -> bool {
        self.is_served = !self.runs.is_empty();
        !self.is_served
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_submitted_in_order_within_the_limit_but_always_one() {
        let mut queue = ReadaheadQueue::default();
        queue.join(vec![300, 100]);
        queue.join(vec![156, 1]);
        let mut next = |in_flight_pages| queue.next(in_flight_pages, 256, |pages| *pages);
        assert_eq!(next(1), None);
        assert_eq!(next(0), Some(300), "one run is always allowed");
        assert_eq!(next(300), None);
        assert_eq!((next(0), next(100)), (Some(100), Some(156)));
        assert_eq!(next(256), None);
        assert_eq!((next(255), next(0)), (Some(1), None));
    }

    #[test]
    fn a_queue_has_one_worker_and_closes_only_when_it_is_empty() {
        let mut queue = ReadaheadQueue::default();
        assert!(queue.join(vec![1]), "there is no worker yet");
        assert!(!queue.join(vec![2]));
        assert!(queue.next(0, 256, |_| 1).is_some());
        assert!(!queue.close(), "one run is queued");
        assert!(!queue.join(Vec::new()), "the worker that could not close it still serves it");
        assert!(queue.next(0, 256, |_| 1).is_some() && queue.close());
        assert!(queue.join(vec![3]), "the next run starts a worker again");
    }

    #[test]
    fn a_worker_that_dies_leaves_a_queue_that_the_next_serves() {
        let worker = ReadaheadWorker::new(0);
        assert!(worker.waiting.lock().join(Vec::new()));
        drop(Serving { worker: &worker, is_over: false });
        assert!(worker.waiting.lock().join(Vec::new()), "there is no worker");
        drop(Serving { worker: &worker, is_over: true });
        assert!(
            !worker.waiting.lock().join(Vec::new()),
            "another worker may have the queue already"
        );
    }
}

//! The worker: what is read ahead arrives in order, a part of it at a time.
//!
//! Used by `readahead`, two for each handle. A disk that serves one request after the other may
//! answer none of them before it has none left (virtio on one queue does): what was asked of it
//! at once arrives at once, at the end. Whoever waits for the first page of a window would wait for
//! the last one of all that were asked for, and while that is then used there would be nothing for
//! the device to do. So only a part is in flight, the runs in the order in which they were claimed;
//! the rest stands ready, and leaves before those that have come are made READY.
//!
//! ```text
//!   readahead --> push --> queue of runs --> in flight --> finish: installed, READY
//!                  '--> a worker of the engine, unless one serves the queue already; it ends
//!                       when the queue is empty and nothing is in flight
//! ```
//!
//! One worker at a time: two of them would have twice as much in flight. A 4 GiB file in order, 512
//! MiB of memory, windows of 8 MiB, GiB a second: 3.35 with one window in flight, 3.21 with half of
//! one, 2.9 with two, all that was asked for, and then a third more of CPU; an O_DIRECT loop with
//! 8 MiB in flight that copies to memory as cold, 3.41.

use super::super::read_io::ReadIo;
use super::{STREAMS_MIN, WINDOW_PART_OF_BOUND};
use crate::page::PAGE_BYTES;
use crate::sync::Mutex;
use crate::writeback::Inode;
use std::collections::VecDeque;
use std::sync::Arc;

/// Pages of a region in flight, unless a single run has more: 1 MiB. To install them takes the CPU
/// about as long as the device takes to read them. (Sequential passes of two threads over four
/// times the bound, thousand pages a second, two runs of each: 430 so, 380 with 2 MiB, 390 with 512
/// KiB, 360 with 256 KiB, 342 with all at once.)
const REGION_PAGES_MAX: u64 = 256;

/// See the head of the file.
#[derive(Debug)]
pub(super) struct ReadaheadWorker {
    waiting: Mutex<ReadaheadQueue<ReadIo>>,
    in_flight_bytes_max: u64,
}

impl ReadaheadWorker {
    /// An empty queue, of which at most `in_flight_bytes_max` bytes are in flight, unless a single
    /// run has more.
    pub(super) fn new(in_flight_bytes_max: u64) -> Arc<Self> {
        Arc::new(Self { waiting: Mutex::default(), in_flight_bytes_max })
    }

    /// Leaves a run of a file to the worker; whether it is read. Where there is no worker for it,
    /// it is given up with all that is in the queue: the caller may own transfers, and so cannot
    /// wait for those of others (IO-5).
    pub(super) fn push(self: &Arc<Self>, inode: &Arc<Inode>, run: ReadIo) -> bool {
        if !self.waiting.lock().join([run]) {
            return true;
        }
        let (worker, of) = (Arc::clone(self), Arc::clone(inode));
        let is_served = inode.engine.spawn(inode.store.reader(), move || worker.serve(&of));
        if !is_served {
            self.give_up();
        }
        is_served
    }

    /// Nobody serves the queue any more, and nobody waits for what is in it.
    fn give_up(&self) {
        let left = std::mem::take(&mut *self.waiting.lock());
        // Not under the lock: a run takes its folios out of the table.
        drop(left);
    }

    /// Reads what is in the queue, until nothing is left.
    fn serve(&self, inode: &Inode) {
        let mut serving = Serving { worker: self, is_over: false };
        let mut queue = inode.engine.queue();
        let pages_max = self.in_flight_pages_max(inode);
        let mut in_flight_pages = 0;
        let mut ended: VecDeque<(ReadIo, _)> = VecDeque::new();
        loop {
            let next = |in_flight_pages| {
                self.waiting.lock().next(in_flight_pages, pages_max, ReadIo::pages)
            };
            while let Some(run) = next(in_flight_pages) {
                in_flight_pages += run.pages();
                run.start(&mut queue, (), |run, ()| {
                    in_flight_pages -= run.pages();
                    ended.push_back((run, Ok(0)));
                });
            }
            queue.begin();
            if let Some((run, answer)) = ended.pop_front() {
                // A page that cannot be read is an error for whoever reads it.
                drop(run.finish(&inode.memory.folios, answer, drop));
            } else if in_flight_pages > 0 {
                queue.complete(1, |(run, ()), answer| {
                    in_flight_pages -= run.pages();
                    ended.push_back((run, answer));
                });
            } else if self.waiting.lock().close() {
                serving.is_over = true;
                return;
            }
        }
    }

    fn in_flight_pages_max(&self, inode: &Inode) -> u64 {
        if inode.page_space.staging().is_some() {
            return REGION_PAGES_MAX;
        }
        // In a small cache no more than a window.
        let parts = WINDOW_PART_OF_BOUND * STREAMS_MIN;
        let bound_bytes = inode.memory.arena.usage().bound_bytes;
        self.in_flight_bytes_max.min(bound_bytes / parts) / PAGE_BYTES
    }
}

/// A worker's time at the queue. If the worker dies, so do the runs: nobody waits for their pages.
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

/// The plans to be read, in order, and whether somebody is at it.
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
    /// Runs join the queue; whether the caller is to send somebody who serves it.
    fn join(&mut self, runs: impl IntoIterator<Item = R>) -> bool {
        self.runs.extend(runs);
        !std::mem::replace(&mut self.is_served, true)
    }

    /// The next run, if it may leave while so many pages are in flight, of at most so many.
    fn next(
        &mut self,
        in_flight_pages: u64,
        pages_max: u64,
        pages_of: impl Fn(&R) -> u64,
    ) -> Option<R> {
        let pages = pages_of(self.runs.front()?);
        let may_leave = in_flight_pages == 0 || in_flight_pages + pages <= pages_max;
        if may_leave { self.runs.pop_front() } else { None }
    }

    /// The thread that serves the queue may go, if it is empty.
    fn close(&mut self) -> bool {
        self.is_served = !self.runs.is_empty();
        !self.is_served
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_leave_in_order_and_few_at_a_time_but_never_none() {
        let mut line = ReadaheadQueue::default();
        line.join(vec![300, 100]);
        line.join(vec![156, 1]);
        let mut next = |in_flight_pages| line.next(in_flight_pages, 256, |pages| *pages);
        assert_eq!(next(1), None);
        assert_eq!(next(0), Some(300), "one run may always leave");
        assert_eq!(next(300), None);
        assert_eq!((next(0), next(100)), (Some(100), Some(156)));
        assert_eq!(next(256), None);
        assert_eq!((next(255), next(0)), (Some(1), None));
    }

    #[test]
    fn a_line_is_served_by_one_and_closed_only_when_it_is_empty() {
        let mut line = ReadaheadQueue::default();
        assert!(line.join(vec![1]), "nobody is there yet");
        assert!(!line.join(vec![2]));
        assert!(line.next(0, 256, |_| 1).is_some());
        assert!(!line.close(), "one is left");
        assert!(!line.join(Vec::new()), "who could not close it is still there");
        assert!(line.next(0, 256, |_| 1).is_some() && line.close());
        assert!(line.join(vec![3]), "the next one sends somebody again");
    }

    #[test]
    fn a_worker_that_dies_leaves_a_line_that_the_next_one_serves() {
        let worker = ReadaheadWorker::new(0);
        assert!(worker.waiting.lock().join(Vec::new()));
        drop(Serving { worker: &worker, is_over: false });
        assert!(worker.waiting.lock().join(Vec::new()), "nobody is there");
        drop(Serving { worker: &worker, is_over: true });
        assert!(!worker.waiting.lock().join(Vec::new()), "the queue may be another's already");
    }
}

//! Readahead: starts to fill pages before they are read.
//!
//! Each handle tracks its own readers, which [`Streams`] detects:
//!
//! ```text
//!   miss at page p ------------> Streams::on_access --> plan: pages, mark  (readers.rs)
//!   read of a marked page ---'                            |
//!                                                         v
//!   claim the absent folios, as runs of up to 1 MiB; stop when frames run short
//!                                                         |
//!   ReadaheadWorker::push --> queue of runs  <------------'
//!     '--> a worker of the engine, unless one serves the queue already, reads the runs in order,
//!          a part of them at a time, until the queue is empty
//! ```
//!
//! After a miss, the reader reads a small plan itself, in the transfer that it waits for anyway.
//! Otherwise it never waits here: it claims frames that are free, or can be freed without I/O,
//! hands the runs over and continues. Errors are not reported: the folio is removed from the table,
//! and the next read of it gets the error.
//!
//! All windows of a handle together stay below half of the bound, and those of a file as far as its
//! readers are known ([`Fronts`]): pages ahead of a scan are not evicted for its own windows.
//!
//! An access continues one of the known sequential readers, which gets its next window; or it is a
//! miss where the windows of another handle end ([`Fronts`]), and continues that reader; or it is a
//! miss at page 0, where an earlier miss ended, or after some pages that were read in order, and
//! begins another one; or it is random: it is remembered as a candidate, and plans nothing. But
//! where most random misses were continued, such as by range scans of a B-tree, the next one begins
//! a reader at once, on trial, so that a range waits once. Hits need not be reported, except those
//! on a page that a plan has marked. A plan may name resident pages: the caller skips them, or the
//! plan, if another reader is that far ahead.
//!
//! A handle has two queues, each with one worker at most: two would have twice as much in flight. A
//! disk that serves requests one after the other may report no completion before its queue is empty
//! (virtio with one queue does so), and a reader that waits for the first page of a window would
//! wait for the last page of all windows. So only a part is in flight, in the order of the claims.
//! The next runs are prepared, and are submitted before the completed ones are made READY.

mod access;
mod fronts;
mod order;
mod readers;
mod reads;
#[cfg(all(test, not(loom)))]
mod window_tests;

use crate::fill::{FillQueue, ReadIo};
use crate::inode::Inode;
use crate::io::{Urgency, lane_of};
use crate::page::PAGE_BYTES;
use crate::sync::{AtomicU8, AtomicU64, Mutex, Ordering};
pub use access::Access;
use arrayvec::ArrayVec;
pub(super) use fronts::Fronts;
use order::ReadOrder;
pub(super) use readers::Plan;
use readers::{PageAccess, Sequential, WindowLimits};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Number of sequential readers of one handle that are tracked at a time.
const STREAMS: usize = 4;

/// Index that no page has.
const NO_MARK: u64 = u64::MAX;
/// Bytes of an advised range in flight, at most.
const ADVISED_BYTES_MAX: u64 = 8 << 20;

#[derive(Debug)]
pub(crate) struct Readahead {
    /// Created with the first readahead: many handles are of files of one page.
    at_work: OnceLock<Box<AtWork>>,
    /// Pages whose first use starts the next window; read without the lock.
    marks: [AtomicU64; STREAMS],
    next_mark: AtomicU64,
    /// The announced [`Access`].
    access: AtomicU8,
    order: ReadOrder,
    window_bytes_max: u64,
    /// Those of the file.
    fronts: Arc<Fronts>,
}

/// State of a handle that reads ahead, or may do so.
#[derive(Debug)]
pub(super) struct AtWork {
    streams: Mutex<Streams>,
    windows: Arc<ReadaheadWorker>,
    /// Worker that reads advised ranges, which may be much larger: no window waits behind them.
    pub(super) advised: Arc<ReadaheadWorker>,
}

impl Readahead {
    pub(super) fn new(window_bytes_max: u64, fronts: Arc<Fronts>) -> Self {
        Self {
            at_work: OnceLock::new(),
            marks: std::array::from_fn(|_| AtomicU64::new(NO_MARK)),
            next_mark: AtomicU64::new(0),
            access: AtomicU8::new(Access::Normal as u8),
            order: ReadOrder::default(),
            window_bytes_max,
            fronts,
        }
    }

    pub(super) fn at_work(&self) -> &AtWork {
        self.at_work.get_or_init(|| {
            Box::new(AtWork {
                streams: Mutex::default(),
                windows: ReadaheadWorker::new(self.window_bytes_max),
                advised: ReadaheadWorker::new(ADVISED_BYTES_MAX),
            })
        })
    }

    /// Returns `true` if a read at `position` continues where the last one ended.
    pub(super) fn continues(&self, position: u64) -> bool {
        self.order.last_end() == position
    }

    pub(super) fn set_access(&self, access: Access) {
        self.access.store(access as u8, Ordering::Relaxed);
        *self.at_work().streams.lock() = Streams::default();
    }

    fn is(&self, access: Access) -> bool {
        self.access.load(Ordering::Relaxed) == access as u8
    }

    /// Returns `true` unless data is read only once: then reads mark no pages as used.
    pub(super) fn is_reused(&self) -> bool {
        !self.is(Access::NoReuse)
    }

    /// Removes the marks in `pages`. Returns `true` if there were any.
    fn take_mark(&self, pages: &Range<u64>) -> bool {
        let mut found = false;
        for mark in &self.marks {
            let page = mark.load(Ordering::Relaxed);
            if pages.contains(&page) {
                // Relaxed: the mark orders nothing; only one of two readers starts the window.
                let exchange = (Ordering::Relaxed, Ordering::Relaxed);
                found |= mark.compare_exchange(page, NO_MARK, exchange.0, exchange.1).is_ok();
            }
        }
        found
    }

    fn set_mark_of(&self, plan: &Plan) {
        if let Some(page) = plan.mark {
            let slot = self.next_mark.fetch_add(1, Ordering::Relaxed) as usize % STREAMS;
            self.marks[slot].store(page, Ordering::Relaxed);
        }
    }
}

#[derive(Debug, Default)]
struct Streams {
    /// Sequential readers, the last used first; the last in the list is replaced.
    sequential: ArrayVec<Sequential, STREAMS>,
    /// Ranges of misses that continued no reader, the last one first.
    candidates: ArrayVec<Range<u64>, STREAMS>,
    /// A bit for each of the last random misses: 1 if it was continued. The last is the lowest.
    continued: u16,
}

/// Number of continued misses among the last 16 above which a random miss begins a reader.
const CONTINUED_MIN: u32 = u16::BITS / 2 + 1;

impl Streams {
    /// Records an access. Returns the pages to read now, if any.
    /// `continued` returns the reader of another handle that a miss continues.
    fn on_access(
        &mut self,
        access: &PageAccess,
        limits: &WindowLimits,
        continued: impl FnOnce() -> Option<Sequential>,
    ) -> Option<Plan> {
        debug_assert!(access.first_page < access.end_page, "{access:?}");
        if let Some(at) = self.sequential.iter().position(|stream| stream.is_met_by(access)) {
            self.sequential[..=at].rotate_right(1);
            if self.sequential[0].passes_trial(access) {
                self.note_continued();
            }
            return self.sequential[0].advance(access, limits);
        }
        let miss = access.miss?;
        let continues_read = self.continues_read(access);
        if let Some(stream) = continued() {
            push_front(&mut self.sequential, stream);
            return self.sequential[0].advance(access, limits);
        }
        let is_in_order = access.first_page == 0 || access.is_in_order();
        let is_known = limits.is_announced || is_in_order || continues_read;
        if !is_known {
            let is_rest_of_one = |earlier: &Range<u64>| {
                earlier.contains(&access.first_page) && earlier.end == access.end_page
            };
            if self.candidates.iter().any(is_rest_of_one) {
                return None;
            }
            let are_mostly_continued = self.continued.count_ones() >= CONTINUED_MIN;
            self.continued <<= 1;
            if !are_mostly_continued {
                push_front(&mut self.candidates, access.first_page..access.end_page);
                return None;
            }
        }
        let (mut stream, plan) = Sequential::start(access, miss, limits);
        stream.is_on_trial = !is_known;
        push_front(&mut self.sequential, stream);
        plan
    }

    /// Records that one of the last random misses was continued.
    fn note_continued(&mut self) {
        // The lowest clear bit: the last miss of which it is not known.
        self.continued |= self.continued.wrapping_add(1);
    }

    /// Returns `true` if the access starts where a candidate ended, or in its last page. Removes
    /// that candidate.
    fn continues_read(&mut self, access: &PageAccess) -> bool {
        let follows = |earlier: &Range<u64>| {
            let starts_there = (earlier.end - 1..=earlier.end).contains(&access.first_page);
            starts_there && access.end_page > earlier.end
        };
        let found = self.candidates.iter().position(follows);
        if let Some(at) = found {
            self.candidates.remove(at);
            self.note_continued();
        }
        found.is_some()
    }
}

/// Inserts `item` in front; the last item is dropped if the list is full.
fn push_front<T, const N: usize>(list: &mut ArrayVec<T, N>, item: T) {
    if list.is_full() {
        list.pop();
    }
    list.insert(0, item);
}

/// Divisor of the bound for the largest window of each reader (of at least two readers). Each may
/// have two windows ahead, together half of the bound.
const WINDOW_DIVISOR: u64 = 4;
const STREAMS_MIN: u64 = 2;

/// Queue of runs to read, with at most one worker that serves it.
#[derive(Debug)]
pub(super) struct ReadaheadWorker {
    waiting: Mutex<ReadaheadQueue<ReadIo>>,
    /// Most bytes in flight, unless a single run has more.
    in_flight_bytes_max: u64,
}

impl ReadaheadWorker {
    fn new(in_flight_bytes_max: u64) -> Arc<Self> {
        Arc::new(Self { waiting: Mutex::default(), in_flight_bytes_max })
    }

    /// Queues runs of a file. Returns `true` if they will be read. If no worker thread is
    /// available, drops the whole queue: the caller may own transfers, and must not wait for others
    /// (IO-5).
    fn push(self: &Arc<Self>, inode: &Arc<Inode>, runs: impl IntoIterator<Item = ReadIo>) -> bool {
        if !self.waiting.lock().join(runs) {
            return true;
        }
        let (worker, of) = (Arc::clone(self), Arc::clone(inode));
        let reader = inode.store.reader().expect("pages without storage are not read ahead");
        let job = move || worker.serve(&of);
        let is_served = inode.engine.spawn(lane_of(&reader), Urgency::Now, job).is_ok();
        if !is_served {
            self.give_up();
        }
        is_served
    }

    fn give_up(&self) {
        let left = std::mem::take(&mut *self.waiting.lock());
        // Dropped without the lock: a run removes its folios from the table.
        drop(left);
    }

    /// Reads the queued runs in their order, with a limited part of them in flight, until none is
    /// left.
    fn serve(&self, inode: &Inode) {
        let mut serving = WorkerGuard { worker: self, is_over: false };
        let mut queue = FillQueue::new(&inode.engine);
        // At most a window, in a small cache.
        let part_bytes = inode.memory.arena.bound_bytes() / (WINDOW_DIVISOR * STREAMS_MIN);
        let of_frames = self.in_flight_bytes_max.min(part_bytes) / PAGE_BYTES;
        let pages_max = inode.page_space.pages_in_flight(of_frames);
        loop {
            let next = |pages| self.waiting.lock().next(pages, pages_max, ReadIo::pages);
            while let Some(run) = next(queue.pages) {
                queue.add(run, ());
            }
            queue.transfers.begin();
            if let Some(ended) = queue.ended.pop_front() {
                // A later read of a page that could not be read reports the error.
                drop(ended.publish(&inode.memory.folios, drop));
            } else if queue.pages > 0 {
                queue.wait();
            } else if self.waiting.lock().close() {
                serving.is_over = true;
                return;
            }
        }
    }
}

/// Guard of a worker: if it panics, the queued runs are dropped, so that nothing waits for them.
#[derive(Debug)]
struct WorkerGuard<'p> {
    worker: &'p ReadaheadWorker,
    is_over: bool,
}

impl Drop for WorkerGuard<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.worker.give_up();
        }
    }
}

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

    /// Marks the queue as unserved if it is empty, and returns `true`: the worker stops then.
    fn close(&mut self) -> bool {
        self.is_served = !self.runs.is_empty();
        !self.is_served
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Cache, OpenOptions};

    #[cfg(feature = "maps")]
    #[test]
    fn windows_of_a_map_are_parts_of_its_staging_memory() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let options = OpenOptions::new().write(true).mappable(true);
        let file = cache.memory_file_with("mappable", &options).unwrap();
        file.set_len(64 << 20).unwrap();
        let handle = &file.handle;
        let window_pages = handle.inode.page_space.ops().unwrap().window_pages();
        handle.readahead.set_access(Access::Sequential);
        let plan = handle.plan_after_miss(0..1).unwrap();
        assert!(plan.pages.end - plan.pages.start <= window_pages, "{plan:?}");
    }

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
        drop(WorkerGuard { worker: &worker, is_over: false });
        assert!(worker.waiting.lock().join(Vec::new()), "there is no worker");
        drop(WorkerGuard { worker: &worker, is_over: true });
        assert!(
            !worker.waiting.lock().join(Vec::new()),
            "another worker may have the queue already"
        );
    }
}

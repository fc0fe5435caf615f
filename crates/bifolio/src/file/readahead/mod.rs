//! Readahead: starts to fill pages before they are read.
//!
//! Called by `read.rs` and `advice.rs`. `window.rs` computes the windows and does no I/O. Each
//! handle tracks its own readers:
//!
//! ```text
//!   miss at page p ------------> Streams::on_access --> plan: pages, mark   (window.rs)
//!   read of a marked page ---'                            |
//!                                                         v
//!   claim the absent folios, as runs of up to 1 MiB; stop when frames run short
//!                                                         |
//!   a worker of the engine <------------------------------'
//!     reads the runs in order, a part of them at a time                       (worker.rs)
//! ```
//!
//! The reader never waits here: it claims frames that are free, or can be freed without I/O, hands
//! the runs over and continues. If it then reaches a page that is being filled, it waits for the
//! folio lock. Errors are not reported: the folio is removed from the table, and the next read of
//! it gets the error.
//!
//! The first use of a page that was read ahead does not count as a second use: see
//! `page/optimistic.rs`. So pages behind a scan are evicted first, and pages ahead of it are not
//! evicted for its own windows: all windows of a handle together stay below half of the bound.

mod window;
mod worker;

use super::fill::{ReadIoClaim, Wait};
use super::handle::Handle;
use super::read_io::ReadIo;
use crate::page::{Flag, PAGE_BYTES, pages_of};
use crate::stats::Counter;
use crate::sync::{AtomicBool, AtomicU8, AtomicU64, Mutex, Ordering};
use std::ops::Range;
use std::sync::{Arc, OnceLock};
pub(super) use window::Mode;
pub(super) use window::Plan;
use window::{PageAccess, STREAMS, Settings, Streams};
use worker::ReadaheadWorker;

/// Index that no page has.
const NO_MARK: u64 = u64::MAX;
/// Divisor of the bound for the largest window of each stream (of at least two streams). Each may
/// have two windows ahead, together half of the bound.
const WINDOW_DIVISOR: u64 = 4;
const STREAMS_MIN: u64 = 2;
/// Windows that fit in the staging memory, for a file in a region. Two would be enough to read one
/// while the other is used if one device had all of it; but a device gets less, and the second
/// window would be split into two short reads.
const WINDOWS_STAGED: u64 = 4;
/// Bytes of an advised range in flight, at most.
const ADVISED_BYTES_MAX: u64 = 8 << 20;

/// Access history of a handle.
#[derive(Debug)]
pub(crate) struct Readahead {
    /// Created with the first readahead: many handles are of files of one page.
    at_work: OnceLock<Box<AtWork>>,
    /// Pages whose first use starts the next window; read without the lock.
    marks: [AtomicU64; STREAMS],
    next_mark: AtomicU64,
    mode: AtomicU8,
    /// Set unless data is read only once.
    reuse: AtomicBool,
    /// Position where the last read ended, in bytes.
    last_end: AtomicU64,
    window_bytes_max: u64,
}

/// State of a handle that reads ahead, or may do so.
#[derive(Debug)]
struct AtWork {
    streams: Mutex<Streams>,
    /// Worker that reads the windows.
    windows: Arc<ReadaheadWorker>,
    /// Worker that reads advised ranges, which may be much larger: no window waits behind them.
    advised: Arc<ReadaheadWorker>,
}

impl Readahead {
    /// Creates an empty history; windows have at most `window_bytes_max` bytes.
    pub(super) fn new(window_bytes_max: u64) -> Self {
        Self {
            at_work: OnceLock::new(),
            marks: std::array::from_fn(|_| AtomicU64::new(NO_MARK)),
            next_mark: AtomicU64::new(0),
            mode: AtomicU8::new(Mode::Normal as u8),
            reuse: AtomicBool::new(true),
            last_end: AtomicU64::new(0),
            window_bytes_max,
        }
    }

    fn at_work(&self) -> &AtWork {
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
        self.last_end.load(Ordering::Relaxed) == position
    }

    /// Sets the announced access pattern of this handle's readers.
    pub(super) fn set_mode(&self, mode: Mode) {
        self.mode.store(mode as u8, Ordering::Relaxed);
        *self.at_work().streams.lock() = Streams::default();
    }

    /// Sets whether reads of this handle mark pages as used.
    pub(super) fn set_reuse(&self, reuse: bool) {
        self.reuse.store(reuse, Ordering::Relaxed);
    }

    /// Returns the value set by [`Self::set_reuse`].
    pub(super) fn is_reused(&self) -> bool {
        self.reuse.load(Ordering::Relaxed)
    }

    fn mode(&self) -> Mode {
        let modes = [Mode::Normal, Mode::Sequential, Mode::Random];
        modes[usize::from(self.mode.load(Ordering::Relaxed))]
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

    fn set_mark(&self, page: u64) {
        let slot = self.next_mark.fetch_add(1, Ordering::Relaxed) as usize % STREAMS;
        self.marks[slot].store(page, Ordering::Relaxed);
    }
}

impl Handle {
    /// Records a read: starts the next window if a mark was in `bytes`.
    pub(super) fn note_read(&self, bytes: Range<u64>) {
        self.readahead.last_end.store(bytes.end, Ordering::Relaxed);
        self.follow_marks(pages_of(&bytes));
    }

    /// Starts the next window if a mark is in `pages`.
    pub(super) fn follow_marks(&self, pages: Range<u64>) {
        if self.readahead.take_mark(&pages) {
            let access = PageAccess { first_page: pages.start, end_page: pages.end, miss: None };
            self.read_ahead(self.plan_after(&access));
        }
    }

    /// Starts the next window if the reader has passed a mark on its way to the page `index`, which
    /// is being filled and which it waits for. For readers whose hits are not seen.
    pub(super) fn follow_passed_marks(&self, index: u64) {
        let behind_pages = self.readahead.window_bytes_max / PAGE_BYTES;
        if self.readahead.take_mark(&(index.saturating_sub(behind_pages)..index + 1)) {
            let access = PageAccess { first_page: index, end_page: index + 1, miss: None };
            if let Some(stopped) = self.read_ahead(self.plan_after(&access)) {
                self.note_cut(stopped);
            }
        }
    }

    /// Plans readahead after a read of `pages` that missed the first of them.
    pub(super) fn plan_after_miss(&self, pages: Range<u64>) -> Option<Plan> {
        let miss = Some(pages.start);
        self.plan_after(&PageAccess { first_page: pages.start, end_page: pages.end, miss })
    }

    fn plan_after(&self, access: &PageAccess) -> Option<Plan> {
        let mapping = &self.inode.mapping;
        let mode = self.readahead.mode();
        if self.readahead.window_bytes_max == 0 || mode == Mode::Random {
            return None;
        }
        let bound_bytes = self.reclaim.memory.arena.usage().bound_bytes;
        let file_pages = mapping.len_bytes().div_ceil(PAGE_BYTES);
        if file_pages <= 1 << mapping.order() {
            // The file has one folio: nothing follows it.
            return None;
        }
        let mut streams = self.readahead.at_work().streams.lock();
        let parts = WINDOW_DIVISOR * streams.known().max(STREAMS_MIN);
        let max_bytes = self.readahead.window_bytes_max.min(bound_bytes / parts);
        let staging = self.inode.page_space.staging();
        let staged_max = staging.map_or(u64::MAX, |staging| staging.pages() / WINDOWS_STAGED);
        let folio_pages = 1 << mapping.order();
        let max_pages = (max_bytes / PAGE_BYTES).min(staged_max).max(folio_pages);
        streams.on_access(access, &Settings { max_pages, mode }, file_pages)
    }

    /// Starts to read a plan. Returns the page at which frames ran short, if they did.
    pub(super) fn read_ahead(&self, plan: Option<Plan>) -> Option<u64> {
        let plan = plan?;
        if let Some(mark) = plan.mark {
            self.readahead.set_mark(mark);
        }
        self.start_reading(&self.readahead.at_work().windows, plan.pages())
    }

    /// Records that a plan was read only up to page `end`, for lack of frames. A reader whose hits
    /// are not seen must not take its next miss, there, for a page that was evicted before its use.
    pub(super) fn note_cut(&self, end: u64) {
        self.readahead.at_work().streams.lock().cut(end);
    }

    /// Starts to read the absent pages of an advised range, without waiting. Stops when frames run
    /// short.
    pub(super) fn start_reading_advised(&self, pages: Range<u64>) {
        self.start_reading(&self.readahead.at_work().advised, [pages]);
    }

    /// Queues the absent pages of some ranges for `worker`. Stops when frames or workers run short,
    /// and returns the page. The device starts with the first runs while the rest is being claimed.
    fn start_reading(
        &self,
        worker: &Arc<ReadaheadWorker>,
        ranges: impl IntoIterator<Item = Range<u64>>,
    ) -> Option<u64> {
        ranges
            .into_iter()
            .find_map(|pages| self.claim_ahead(pages, |run| worker.push(&self.inode, run)))
    }

    /// Claims the absent folios of `pages` until `take` refuses a run. Returns the page where that
    /// happened, or where frames ran short.
    fn claim_ahead(&self, pages: Range<u64>, mut take: impl FnMut(ReadIo) -> bool) -> Option<u64> {
        let memory = &self.inode.memory;
        let mut left = pages;
        while let Some((absent, seen)) = self.next_absent(left.clone()) {
            left.start = match self.claim_read_io(absent..left.end, seen, Wait::Never) {
                Ok(ReadIoClaim::New(run)) => {
                    for id in run.folios() {
                        memory.folio(*id).flags.set(Flag::Readahead);
                    }
                    memory.counters.add(Counter::Readahead, run.folios().len() as u64);
                    let end = run.first_page() + run.pages();
                    if !take(run) {
                        return Some(absent);
                    }
                    end
                }
                Ok(ReadIoClaim::Taken) => self.end_of_folio(absent),
                Ok(ReadIoClaim::NoFrame) | Err(_) => return Some(absent),
            };
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Cache, OpenOptions};

    #[test]
    fn windows_of_a_map_are_parts_of_its_staging_memory() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let options = OpenOptions::new().write(true).mappable(true);
        let file = cache.memory_file_with("mappable", &options).unwrap();
        file.set_len(64 << 20).unwrap();
        let handle = &file.handle;
        let staging_pages = handle.inode.page_space.staging().unwrap().pages();
        handle.readahead.set_mode(Mode::Sequential);
        let plan = handle.plan_after_miss(0..1).unwrap();
        let longest = plan.pages().into_iter().map(|pages| pages.end - pages.start).max();
        assert!(longest.unwrap() <= staging_pages / WINDOWS_STAGED, "{longest:?}");
        assert_eq!(staging_pages % WINDOWS_STAGED, 0);
    }
}

//! The flusher: writes dirty folios out before anybody has to wait for that.
//!
//! One thread for all files of a cache. It works when
//! - dirt is older than `dirty_age_ms_max`: that much is lost at the most if the machine stops;
//! - more than `dirty_bytes_background` is dirty: then down to half of that, the oldest first, so
//!   that reclaim finds clean folios at the end of its list;
//! - reclaim came upon dirty folios: then as many;
//! - advice asks for a range of a file.
//!
//! Writers who outrun the device are held at `dirty_bytes_max`, after their write, with no lock
//! held, and go on with the first completion that makes room.
//!
//! PROTOCOL of the throttle, as two columns (model-checked in `loom_throttle`):
//!
//! ```text
//!  WRITER                                     COMPLETION
//!  T1 lock the gate                           C1 dirty pages -= those that are done
//!  T2 dirty pages > max, and not stuck?       C2 lock the gate; anybody waiting, and
//!     then wait (unlocks), T2 again              dirty pages <= max? notify all; unlock
//!  T3 unlock
//! ```
//!
//! No wake-up is lost: T2 looks under the gate, and C2 comes after C1.
//!
//! A flusher that gets nowhere (the device refuses everything, or all dirty folios are locked) says
//! that it is *stuck*: nobody is held then, and reclaim says what the matter is. Nor is anybody
//! held once the thread has ended.

use super::batch::{Progress, Written};
use super::inode::Inode;
use super::sync::ALL_BYTES;
use super::throttle::Throttle;
use crate::error::{ErrorKind, Result};
use crate::lru::Memory;
use crate::mapping::PAGE_BYTES;
use crate::stats::Counter;
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, Ordering};
use crate::sys::thread::OwnedThread;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the flusher stays with one file before it looks at the others.
const TURN_MAX: Duration = Duration::from_secs(1);
/// The longest a writer is held, if completions come but none makes room.
const STALL_MAX: Duration = Duration::from_secs(10);
/// How often dirt is looked at in the age it may reach.
const TICKS_PER_AGE: u32 = 4;
/// The most often.
const TICK_MIN: Duration = Duration::from_millis(5);

/// When the flusher works; `None` is a part of the bound.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FlusherSettings {
    pub(crate) background_bytes: Option<u64>,
    pub(crate) max_bytes: Option<u64>,
    pub(crate) age_max: Duration,
}

/// Ranges that wait to be written out soon, at the most. What does not fit waits for its age.
const RANGES_MAX: usize = 256;

#[derive(Debug, Default)]
struct Signal {
    work: bool,
    end: bool,
    /// Folios that reclaim wants clean.
    wanted_folios: u64,
    /// Bytes of files that are to be written out soon.
    ranges: Vec<(Weak<Inode>, Range<u64>)>,
}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Flusher {
    settings: FlusherSettings,
    /// The thresholds, pages: they follow the bound.
    background_pages: AtomicU64,
    max_pages: AtomicU64,
    /// Two of the largest folios of any file: a writer of those is not held for the first one.
    floor_pages: AtomicU64,
    files: Mutex<Vec<Weak<Inode>>>,
    signal: Mutex<Signal>,
    signalled: Condvar,
    /// Mirrors `Signal::work`: a writer need not take the lock to find it set.
    is_working: AtomicBool,
    throttle: Throttle,
    stall_ns_max: AtomicU64,
}

impl Flusher {
    /// A flusher without its thread: see [`FlusherThread`].
    pub(crate) fn new(settings: FlusherSettings, bound_bytes: u64) -> Self {
        let flusher = Self {
            settings,
            background_pages: AtomicU64::new(0),
            max_pages: AtomicU64::new(0),
            floor_pages: AtomicU64::new(0),
            files: Mutex::default(),
            signal: Mutex::default(),
            signalled: Condvar::new(),
            is_working: AtomicBool::new(false),
            throttle: Throttle::new(),
            stall_ns_max: AtomicU64::new(0),
        };
        flusher.set_bound(bound_bytes);
        flusher
    }

    /// Fits the thresholds to the bound: a quarter of it dirty sets the flusher to work, half of it
    /// holds writers, unless the caller has chosen. Much: random writes leave in the order of their
    /// places, and the more there are the faster the device takes them.
    pub(crate) fn set_bound(&self, bound_bytes: u64) {
        let max = self.settings.max_bytes.unwrap_or(u64::MAX).min(bound_bytes / 2);
        let background = self.settings.background_bytes.unwrap_or(bound_bytes / 4).min(max);
        self.background_pages.store(background / PAGE_BYTES, Ordering::Relaxed);
        self.max_pages.store(max / PAGE_BYTES, Ordering::Relaxed);
    }

    /// Looks after a file from now on.
    pub(crate) fn enlist(&self, inode: &Arc<Inode>) {
        let folio_pages = 1 << inode.mapping.order();
        self.floor_pages.fetch_max(2 * folio_pages, Ordering::Relaxed);
        let mut files = self.files.lock();
        files.retain(|file| file.strong_count() > 0);
        files.push(Arc::downgrade(inode));
    }

    /// Pages have become dirty.
    pub(super) fn note_dirty(&self, memory: &Memory) {
        let dirty_pages = memory.dirty_pages.load(Ordering::Relaxed);
        let much = dirty_pages > self.background_pages.load(Ordering::Relaxed);
        if much && !self.is_working.load(Ordering::Relaxed) {
            self.kick(0);
        }
    }

    /// Reclaim has found so many dirty folios in its way.
    pub(crate) fn clean_ahead(&self, folios: u64) {
        self.kick(folios);
    }

    /// What is dirty in a range of a file, in bytes, is to be written out soon. Waits for nothing.
    pub(crate) fn write_soon(&self, inode: &Arc<Inode>, range: Range<u64>) {
        let mut signal = self.signal.lock();
        let file = Arc::downgrade(inode);
        let is_full = signal.ranges.len() >= RANGES_MAX;
        // Who goes through a file step by step asks for one range.
        match signal.ranges.last_mut() {
            Some((other, last)) if Weak::ptr_eq(other, &file) && last.end == range.start => {
                last.end = range.end;
            }
            _ if is_full => return,
            _ => signal.ranges.push((file, range)),
        }
        self.wake(&mut signal);
    }

    fn wake(&self, signal: &mut Signal) {
        signal.work = true;
        self.is_working.store(true, Ordering::Relaxed);
        self.signalled.notify_one();
    }

    fn kick(&self, wanted_folios: u64) {
        let mut signal = self.signal.lock();
        signal.wanted_folios = signal.wanted_folios.max(wanted_folios);
        self.wake(&mut signal);
    }

    /// A write-out has ended.
    pub(super) fn note_progress(&self, memory: &Memory) {
        self.throttle.release_if(|| !self.is_too_dirty(memory));
    }

    fn is_too_dirty(&self, memory: &Memory) -> bool {
        let max_pages = self.max_pages.load(Ordering::Relaxed);
        let max_pages = max_pages.max(self.floor_pages.load(Ordering::Relaxed));
        memory.dirty_pages.load(Ordering::Relaxed) > max_pages
    }

    /// Holds a writer while too much is dirty. The caller holds no lock.
    pub(crate) fn hold_writer(&self, memory: &Memory) {
        if !self.is_too_dirty(memory) || self.throttle.is_stuck() {
            return;
        }
        let begun = Instant::now();
        self.kick(0);
        self.throttle.hold_while(begun + STALL_MAX, || self.is_too_dirty(memory));
        let nanoseconds = begun.elapsed().as_nanos() as u64;
        memory.counters.add(Counter::ThrottleWait, 1);
        memory.counters.add(Counter::ThrottleNs, nanoseconds);
        self.stall_ns_max.fetch_max(nanoseconds, Ordering::Relaxed);
    }

    /// The longest a writer was held so far, nanoseconds.
    pub(crate) fn stall_ns_max(&self) -> u64 {
        self.stall_ns_max.load(Ordering::Relaxed)
    }

    fn run(&self, memory: &Memory) {
        let tick = (self.settings.age_max / TICKS_PER_AGE).max(TICK_MIN);
        let mut looked_for_stores = Instant::now();
        loop {
            let (wanted_folios, ranges) = {
                let mut signal = self.signal.lock();
                if !signal.work && !signal.end {
                    self.signalled.wait_for(&mut signal, tick);
                }
                if signal.end {
                    return;
                }
                signal.work = false;
                let ranges = std::mem::take(&mut signal.ranges);
                (std::mem::take(&mut signal.wanted_folios), ranges)
            };
            for (inode, range) in ranges {
                inode.upgrade().inspect(|inode| inode.write_out_soon(range));
            }
            if looked_for_stores.elapsed() >= tick {
                looked_for_stores = Instant::now();
                self.look_for_stores();
            }
            let has_written = self.flush(memory, wanted_folios);
            self.is_working.store(self.signal.lock().work, Ordering::Relaxed);
            // Writers who found it working did not call it; a mark missed here waits for a tick.
            if has_written {
                self.note_dirty(memory);
            }
        }
    }

    /// The files, one after the other: only the one that is at hand is kept from being freed.
    fn files(&self) -> impl Iterator<Item = Arc<Inode>> + use<> {
        let files = self.files.lock().clone();
        files.into_iter().filter_map(|file| file.upgrade())
    }

    /// What was stored through maps begins to age when it is found.
    fn look_for_stores(&self) {
        for inode in self.files() {
            if let Err(error) = inode.mark_stored_in(&ALL_BYTES) {
                log::warn!("{}: {error}", inode.name());
            }
        }
    }

    /// Writes out what is old, what is too much, and what is wanted; tells whether anything was.
    fn flush(&self, memory: &Memory, wanted_folios: u64) -> bool {
        let mut total = Written::default();
        for inode in self.files() {
            let old = inode.dirty.older_than(self.settings.age_max);
            total.add(inode.write_out_until(old, |_| u64::MAX));
        }
        let background_pages = self.background_pages.load(Ordering::Relaxed);
        let dirty_pages = || memory.dirty_pages.load(Ordering::Relaxed);
        let is_much = dirty_pages() > background_pages;
        let target_pages = if is_much { background_pages / 2 } else { u64::MAX };
        for inode in self.files() {
            // What all files have together: many small shares are much, too.
            let wanted_folios = wanted_folios.saturating_sub(total.folios);
            let until = Instant::now() + TURN_MAX;
            let left = |progress: Progress| {
                // What was refused is dirty again, and would be tried again at once.
                if progress.has_failed || Instant::now() > until || self.signal.lock().end {
                    return 0;
                }
                let excess_pages = dirty_pages().saturating_sub(target_pages);
                let excess_folios = excess_pages.div_ceil(1 << inode.mapping.order());
                let wanted_folios = wanted_folios.saturating_sub(progress.begun_folios);
                excess_folios.saturating_sub(progress.in_flight_folios).max(wanted_folios)
            };
            total.add(inode.write_out_until(u64::MAX, left));
        }
        if total.folios > 0 {
            memory.counters.add(Counter::FlusherRound, 1);
            memory.counters.add(Counter::FlusherFolio, total.folios);
        }
        let in_vain = total.folios == 0 && (total.error.is_some() || self.is_too_dirty(memory));
        self.throttle.set_stuck(in_vain);
        total.folios > 0
    }
}

/// The running thread; dropping it ends the thread and waits for it.
#[derive(Debug)]
pub(crate) struct FlusherThread {
    flusher: Arc<Flusher>,
    thread: Option<OwnedThread>,
}

impl FlusherThread {
    /// Starts the thread.
    pub(crate) fn start(flusher: Arc<Flusher>, memory: Arc<Memory>) -> Result<Self> {
        let shared = Arc::clone(&flusher);
        let thread = OwnedThread::start("bifolio-flush", move || shared.run(&memory));
        Ok(Self { flusher, thread: Some(thread.map_err(ErrorKind::Thread)?) })
    }
}

impl Drop for FlusherThread {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take_if(|thread| !thread.is_left_behind()) else { return };
        self.flusher.signal.lock().end = true;
        self.flusher.signalled.notify_all();
        drop(thread);
        // Nobody writes out any more for those whose files live on.
        self.flusher.throttle.set_stuck(true);
    }
}

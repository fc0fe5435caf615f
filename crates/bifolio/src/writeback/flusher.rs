//! The flusher: threads that write dirty folios back in the background.
//!
//! It serves each device separately, in rounds (`device.rs`), when
//! - a folio has been dirty for longer than `dirty_age_max`;
//! - more than `dirty_background` is dirty, or a device's share of that: then it writes down
//!   to half of it, the oldest first;
//! - reclaim, which writes to no device, has met dirty folios: then it writes as many;
//! - a writer is throttled;
//! - advice requests it for a range of a file.
//!
//! THREADS. A round may never end, if the storage hangs. So one thread always listens: before a
//! thread starts a round, it starts another thread, up to [`THREADS_MAX`], unless one listens
//! already. During a round the next device waits [`NEXT_DEVICE_DELAY`] for the thread, so that many
//! devices that respond need two threads, and each device that hangs occupies one.
//!
//! THROTTLED WRITERS. A page that becomes dirty is counted before its bytes change, under the folio
//! lock, if there is room (`DirtyPages::try_add`). A writer that finds no room waits at the gate,
//! without a folio lock, until a completion makes room, or its device is in trouble. So at most
//! `dirty_max` is dirty, except for stores through maps, which cannot be refused. A write to a
//! dirty page is never throttled.
//!
//! PROTOCOL THROTTLE, of the gate, as two columns (model-checked in `loom_throttle`):
//!
//! ```text
//!  WRITER                                     COMPLETION, or FAILED ROUND
//!  T1 lock the gate                           C1 subtract the written dirty pages; or trouble
//!  T2 no room on its device, and no trouble   C2 lock the gate; any waiters? notify all;
//!     there since it arrived? then wait          unlock
//!     (unlocks), T2 again
//!  T3 unlock
//! ```
//!
//! No wake-up is lost: T2 checks under the gate's lock, and C2 follows C1. All devices share one
//! gate, since a completion on one makes room on others: a writer that still finds no room waits
//! again. Reclaim waits at the same gate, for a short time only, for dirty folios that it has met.

use super::ALL_BYTES;
use super::batch::{Progress, Written};
use super::device::{Device, Files, Refusal, Round};
use super::throttle::{DirtyPages, Throttle, part_of};
use crate::config;
use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::io::{DeviceIdentity, DirectBacking, FileIdentity, Load, Loads};
use crate::memory::Memory;
use crate::page::PAGE_BYTES;
use crate::stats::{Counter, DeviceStats};
use crate::sync::{
    AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, WeakList, blocking,
};
use crate::sys::process::{Origin, OwnedThread};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Time that a round spends on one file before it checks the others.
const FILE_TIME_MAX: Duration = Duration::from_secs(1);
/// Checks of the age of dirty folios per maximum age.
const TICKS_PER_AGE: u32 = 4;
/// Minimum interval between these checks.
const TICK_MIN: Duration = Duration::from_millis(5);
/// Maximum number of threads: fewer hanging devices than that block no other device.
const THREADS_MAX: usize = 64;
/// Time that a device waits for a thread that is in another round.
const NEXT_DEVICE_DELAY: Duration = Duration::from_millis(5);
/// Pause after a round in which the device wrote nothing.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Number of the oldest folios of a file that are written to probe a device that wrote nothing:
/// one bad block does not count as a failure of the whole device.
const PROBED_FOLIOS: u64 = 8;
/// Divisor: files with write gates leave this part of the dirty limit to other files.
const PART_FOR_LOGS: u64 = 4;
/// Maximum folios of a round on behalf of reclaim.
const WANTED_FOLIOS_MAX: u64 = 256;

/// Thresholds of the flusher; `None` is a part of the bound.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FlusherSettings {
    pub(crate) background_bytes: Option<u64>,
    pub(crate) max_bytes: Option<u64>,
    pub(crate) age_max: Duration,
}

/// Limits that follow from a bound, pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    bound_pages: u64,
    background_pages: u64,
    pub(super) max_pages: u64,
}

/// Pages above the background threshold that still count as just above it.
const JUST_PAGES: u64 = 16;

#[derive(Debug)]
pub(crate) struct Flusher {
    settings: FlusherSettings,
    background_pages: AtomicU64,
    max_pages: AtomicU64,
    /// Dirty limit of files with write gates, pages: falls before that of the others does
    /// (`room.rs`). They get a part of it.
    pub(super) gated_max_pages: AtomicU64,
    /// Lower bound on the dirty limit, pages: two of the largest folios of any file, so that a
    /// writer of such folios is not throttled for the first one.
    floor_pages: AtomicU64,
    dirty_devices: Arc<AtomicU64>,
    pub(super) roster: Mutex<Roster>,
    /// Signalled when a device is called, and when the threads must stop.
    called: Condvar,
    is_ending: AtomicBool,
    pub(super) throttle: Throttle,
    /// Number of write-outs that have ended, successful or not.
    ended: AtomicU64,
    pub(super) stall_ns_max: AtomicU64,
    /// Pages that devices may have in reads.
    pub(crate) loads: Arc<Loads>,
    pub(crate) swap_load: Load,
}

#[derive(Debug)]
pub(super) struct Roster {
    devices: WeakList<Device>,
    /// Devices that several files can share, by identity.
    identified: HashMap<DeviceIdentity, Weak<Device>>,
    /// Devices that may have something dirty, or stores through maps.
    pub(super) active: WeakList<Device>,
    /// Devices that wait for a round, by the earliest time of the round, and a number.
    calls: BTreeMap<(Instant, u64), Arc<Device>>,
    next_call: u64,
    next_tick: Instant,
    threads: Vec<OwnedThread>,
    listening: usize,
    on_rounds: usize,
}

impl Roster {
    fn call_at(&mut self, from: Instant, device: Arc<Device>) {
        self.next_call += 1;
        self.calls.insert((from, self.next_call), device);
    }

    /// Calls the devices that may have something to do because time has passed.
    fn call_those_that_age(&mut self, now: Instant) {
        for _ in 0..self.active.len() {
            let Some(device) = self.active.pop() else { break };
            // No round begins while the roster is locked.
            if !device.is_called() && device.delist() {
                continue;
            }
            self.active.push(Arc::downgrade(&device));
            if device.call() {
                self.call_at(now, device);
            }
        }
    }
}

impl Flusher {
    pub(crate) fn new(settings: FlusherSettings, bound_bytes: u64) -> Self {
        let loads = Arc::<Loads>::default();
        let flusher = Self {
            settings,
            background_pages: AtomicU64::new(0),
            max_pages: AtomicU64::new(0),
            gated_max_pages: AtomicU64::new(0),
            floor_pages: AtomicU64::new(0),
            dirty_devices: Arc::new(AtomicU64::new(0)),
            roster: Mutex::new(Roster {
                devices: WeakList::default(),
                identified: HashMap::new(),
                active: WeakList::default(),
                calls: BTreeMap::new(),
                next_call: 0,
                next_tick: Instant::now(),
                threads: Vec::new(),
                listening: 0,
                on_rounds: 0,
            }),
            called: Condvar::new(),
            is_ending: AtomicBool::new(false),
            throttle: Throttle::new(),
            ended: AtomicU64::new(0),
            stall_ns_max: AtomicU64::new(0),
            swap_load: loads.new_load(),
            loads,
        };
        flusher.set_bound(bound_bytes);
        flusher
    }

    /// Sets the thresholds from the bound, unless the caller has chosen: the flusher starts when a
    /// quarter of it is dirty, and writers are throttled at two thirds. A single device may have
    /// half. The more random writes are sorted by position, the faster the device writes them.
    pub(crate) fn set_bound(&self, bound_bytes: u64) {
        let Limits { bound_pages, background_pages, max_pages } = self.limits_of(bound_bytes);
        self.background_pages.store(background_pages, Ordering::Relaxed);
        self.max_pages.store(max_pages, Ordering::Relaxed);
        self.gated_max_pages.store(max_pages, Ordering::Relaxed);
        self.loads.set_bound(bound_pages);
        self.throttle.release();
    }

    pub(super) fn limits_of(&self, bound_bytes: u64) -> Limits {
        let max =
            self.settings.max_bytes.unwrap_or(u64::MAX).min(config::dirty_bytes_max(bound_bytes));
        let background = self.settings.background_bytes.unwrap_or(bound_bytes / 4).min(max);
        Limits {
            bound_pages: bound_bytes / PAGE_BYTES,
            background_pages: background / PAGE_BYTES,
            max_pages: max / PAGE_BYTES,
        }
    }

    /// Returns the device of a file over `backing`, whose folios have `1 << order` pages.
    pub(crate) fn device_of(
        &self,
        backing: &dyn DirectBacking,
        memory: &Memory,
        order: u8,
    ) -> Arc<Device> {
        self.floor_pages.fetch_max(2 << order, Ordering::Relaxed);
        let identity = backing.identity().map(FileIdentity::device);
        let name = backing.describe();
        let mut roster = self.roster.lock();
        if let Some(known) = identity.and_then(|it| roster.identified.get(&it)?.upgrade()) {
            return known;
        }
        let dirty_pages = DirtyPages::new(&memory.dirty_pages, &self.dirty_devices);
        let load = self.loads.new_load();
        let device = Arc::new(Device::new(identity, name, dirty_pages, load));
        if roster.devices.push(Arc::downgrade(&device)) {
            roster.identified.retain(|_, device| device.strong_count() > 0);
        }
        if let Some(identity) = identity {
            roster.identified.insert(identity, Arc::downgrade(&device));
        }
        device
    }

    /// Puts a file on one of the lists of its device.
    pub(crate) fn enlist(
        &self,
        device: &Arc<Device>,
        file: &Weak<Inode>,
        list: impl FnOnce(&mut Files) -> &mut WeakList<Inode>,
    ) {
        if device.enlist(file, list) {
            self.roster.lock().active.push(Arc::downgrade(device));
        }
    }

    pub(crate) fn call(&self, device: &Arc<Device>) {
        if device.call() {
            self.send(device, Duration::ZERO);
        }
    }

    /// Sends a thread to serve a device that was called.
    pub(super) fn send(&self, device: &Arc<Device>, pause: Duration) {
        // A device that wrote nothing is not asked again at once.
        let pause = if device.is_stuck() { pause.max(RETRY_PAUSE) } else { pause };
        self.roster.lock().call_at(Instant::now() + pause, Arc::clone(device));
        self.called.notify_one();
    }

    /// Called when pages of a device have become dirty.
    pub(crate) fn note_dirty(&self, device: &Arc<Device>) {
        if self.is_much(device) {
            if !device.is_called() {
                self.call(device);
            }
            return;
        }
        // All devices together may have just come above the threshold.
        let background_pages = self.background_pages.load(Ordering::Relaxed);
        let excess_pages = device.dirty_pages.all().checked_sub(background_pages);
        if excess_pages.is_some_and(|pages| (1..=JUST_PAGES).contains(&pages)) {
            self.call_others();
        }
    }

    fn background_pages(&self, device: &Device) -> u64 {
        let max_pages = self.max_pages.load(Ordering::Relaxed);
        let background_pages = self.background_pages.load(Ordering::Relaxed);
        device.dirty_pages.background_pages(background_pages, max_pages)
    }

    fn is_much(&self, device: &Device) -> bool {
        device.dirty_pages.own() > self.background_pages(device)
    }

    pub(super) fn max_pages(&self) -> u64 {
        self.max_pages.load(Ordering::Relaxed).max(self.floor_pages.load(Ordering::Relaxed))
    }

    /// Returns the maximum number of dirty pages that `limits` allow.
    pub(super) fn max_pages_of(&self, limits: Limits) -> u64 {
        limits.max_pages.max(self.floor_pages.load(Ordering::Relaxed))
    }

    /// Counts pages of a device that are about to become dirty. Returns `false` if there is no
    /// room.
    pub(crate) fn try_add(&self, device: &Device, pages: u64, has_gate: bool) -> bool {
        device.dirty_pages.try_add(pages, self.max_pages_for(has_gate))
    }

    /// Returns the maximum number of dirty pages for a write to a file. Files with a gate leave a
    /// part to others: one of these may be the log.
    pub(super) fn max_pages_for(&self, has_gate: bool) -> u64 {
        if !has_gate {
            return self.max_pages();
        }
        let gated_max_pages = self.gated_max_pages.load(Ordering::Relaxed);
        without_part_for_logs(gated_max_pages.max(self.floor_pages.load(Ordering::Relaxed)))
    }

    /// Called when a write-out has ended, or pages were freed after theirs.
    pub(crate) fn note_freed(&self) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        self.throttle.release();
    }

    /// Returns the number of write-outs that have ended, for [`Self::wait_for_progress`].
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }

    /// Waits until a write-out ends, for at most `max`. Returns at once if one has ended since the
    /// count was `ended`.
    pub(crate) fn wait_for_progress(&self, ended: u64, max: Duration) {
        self.throttle.hold_while(Instant::now() + max, || self.ended() == ended);
    }

    pub(crate) fn device_stats(&self) -> Vec<DeviceStats> {
        let max_pages = self.max_pages();
        self.devices().map(|device| device.stats(max_pages)).collect()
    }

    /// Returns the trouble of a device that accepts no writes, if there is one.
    pub(crate) fn trouble(&self) -> Option<Error> {
        self.devices().find_map(|device| device.trouble_after(0))
    }

    /// Returns what write gates hold back: the bytes in all files, and the reason for one of them.
    pub(crate) fn held_back(&self) -> Option<Refusal> {
        let files = self.devices().flat_map(|device| device.dirty_files().collect::<Vec<_>>());
        let refusals = files.filter_map(|inode| inode.held_back());
        refusals.reduce(|one, two| {
            let held_bytes = one.held_bytes + two.held_bytes;
            Refusal { held_bytes, ..if one.cause.is_some() { one } else { two } }
        })
    }

    pub(super) fn devices(&self) -> impl Iterator<Item = Arc<Device>> + use<> {
        self.roster.lock().devices.snapshot()
    }

    fn tick(&self) -> Duration {
        (self.settings.age_max / TICKS_PER_AGE).max(TICK_MIN)
    }

    fn run(self: &Arc<Self>, memory: &Arc<Memory>) {
        let _serving = blocking::serve();
        let mut roster = self.roster.lock();
        while let Some(device) = self.next_device(&mut roster) {
            roster.listening -= 1;
            roster.on_rounds += 1;
            if roster.listening == 0
                && let Err(error) = self.start_thread(&mut roster, memory)
            {
                log::debug!("cannot start another thread of the flusher: {error}");
            }
            MutexGuard::unlocked(&mut roster, || self.go(device, memory));
            roster.on_rounds -= 1;
            roster.listening += 1;
        }
    }

    /// Waits for a device to serve. Returns `None` when the threads must stop.
    fn next_device(&self, roster: &mut MutexGuard<'_, Roster>) -> Option<Arc<Device>> {
        loop {
            if self.is_ending.load(Ordering::Relaxed) {
                return None;
            }
            let now = Instant::now();
            if now >= roster.next_tick {
                roster.next_tick = now + self.tick();
                roster.call_those_that_age(now);
            }
            let delay = if roster.on_rounds > 0 { NEXT_DEVICE_DELAY } else { Duration::ZERO };
            let mut until = roster.next_tick;
            if let Some(oldest) = roster.calls.first_entry() {
                let from = oldest.key().0 + delay;
                if from <= now {
                    return Some(oldest.remove());
                }
                until = until.min(from);
            }
            self.called.wait_until(roster, until);
        }
    }

    fn start_thread(
        self: &Arc<Self>,
        roster: &mut Roster,
        memory: &Arc<Memory>,
    ) -> std::io::Result<()> {
        if roster.threads.len() >= THREADS_MAX {
            return Ok(());
        }
        let (flusher, memory) = (Arc::clone(self), Arc::clone(memory));
        let thread = OwnedThread::start("bifolio-flush", move || flusher.run(&memory))?;
        roster.threads.push(thread);
        roster.listening += 1;
        Ok(())
    }

    fn go(&self, device: Arc<Device>, memory: &Memory) {
        let round = device.begin_round(self.tick());
        for (inode, range) in &round.ranges {
            inode.upgrade().inspect(|inode| inode.write_out_soon(range));
        }
        if round.looks_for_stores {
            // A store through a map starts to age when it is found.
            let mapped = device.files.lock().mapped.snapshot();
            mapped.for_each(|inode| inode.find_stores_soon(&ALL_BYTES));
        }
        let total = self.flush(&device, memory, &round);
        let taken = total.folios;
        let is_stuck = device.end_round(&round, total.error, total.held.is_some());
        self.throttle.release();
        // A thread that found the flusher serving the device did not call it.
        if taken > 0 && self.is_much(&device) || round.is_probe && !is_stuck {
            device.call();
        }
        if device.end_service() {
            self.send(&device, Duration::ZERO);
        }
        if memory.dirty_pages.load(Ordering::Relaxed)
            > self.background_pages.load(Ordering::Relaxed)
        {
            self.call_others();
        }
    }

    /// Calls devices with more dirty pages than the mean, because the total is high. Does nothing
    /// while other devices wait for a round they could have now: the last of those calls again.
    /// A device that write gates kept from writing is called once one of them opens.
    fn call_others(&self) {
        let roster = self.roster.lock();
        let now = Instant::now();
        if roster.calls.keys().next().is_some_and(|(from, _)| *from <= now) {
            return;
        }
        let devices = roster.active.snapshot();
        drop(roster);
        for device in devices {
            let can_write = !device.is_stuck() && !device.is_held_back();
            if !device.is_called() && can_write && self.is_much(&device) {
                self.call(&device);
            }
        }
    }

    /// Writes out old folios, folios above the threshold, and those that were requested.
    fn flush(&self, device: &Device, memory: &Memory, round: &Round) -> Written {
        let mut total = Written::default();
        if round.is_probe {
            for inode in device.dirty_files() {
                let left = |progress: Progress| PROBED_FOLIOS.saturating_sub(progress.begun_folios);
                total.add(inode.write_out_until(u64::MAX, left));
            }
        } else {
            for inode in device.dirty_files() {
                let old = inode.dirty.older_than(self.settings.age_max);
                total.add(inode.write_out_until(old, |_| u64::MAX));
            }
            self.flush_excess(device, round.wanted_folios, &mut total);
        }
        if total.folios > 0 {
            memory.counters.add(Counter::FlusherFolio, total.folios);
        }
        total
    }

    fn flush_excess(&self, device: &Device, wanted_folios: u64, total: &mut Written) {
        let dirty_pages = || device.dirty_pages.own();
        let target_pages = if device.held.load(Ordering::Relaxed) > 0 {
            let part_pages = part_of(device.dirty_pages.left_of(self.max_pages()));
            self.background_pages(device).min(part_pages).min(dirty_pages()) / 2
        } else if self.is_much(device) {
            self.background_pages(device) / 2
        } else {
            u64::MAX
        };
        for inode in device.dirty_files() {
            // The total of all files counts, too: many small shares add up.
            let wanted_folios = wanted_folios.min(WANTED_FOLIOS_MAX).saturating_sub(total.folios);
            let until = Instant::now() + FILE_TIME_MAX;
            let left = |progress: Progress| {
                // A page that was refused is dirty again, and would be retried at once.
                let is_over = Instant::now() > until || self.is_ending.load(Ordering::Relaxed);
                if progress.has_failed || is_over {
                    return 0;
                }
                let excess_pages = dirty_pages().saturating_sub(target_pages);
                let excess_folios = excess_pages.div_ceil(1 << inode.mapping.order());
                let wanted_folios = wanted_folios.saturating_sub(progress.begun_folios);
                excess_folios.saturating_sub(progress.in_flight_folios).max(wanted_folios)
            };
            total.add(inode.write_out_until(u64::MAX, left));
        }
    }
}

/// Returns the part of a limit that files with write gates may have.
pub(super) fn without_part_for_logs(max_pages: u64) -> u64 {
    max_pages - max_pages / PART_FOR_LOGS
}

/// Running threads. Drop stops and joins them. They stay while a file is open.
#[derive(Debug)]
pub(crate) struct FlusherThreads {
    flusher: Arc<Flusher>,
    /// A forked child inherits this value, but no threads.
    origin: Origin,
}

impl FlusherThreads {
    pub(crate) fn start(flusher: Arc<Flusher>, memory: &Arc<Memory>) -> Result<Self> {
        flusher.start_thread(&mut flusher.roster.lock(), memory).map_err(Error::thread)?;
        Ok(Self { flusher, origin: Origin::here() })
    }
}

impl Drop for FlusherThreads {
    fn drop(&mut self) {
        if self.origin.is_forked() {
            // After a fork the lock may be held forever, and there is no thread to join.
            std::mem::forget(Arc::clone(&self.flusher));
            return;
        }
        let threads = {
            let mut roster = self.flusher.roster.lock();
            self.flusher.is_ending.store(true, Ordering::Relaxed);
            roster.calls.clear();
            std::mem::take(&mut roster.threads)
        };
        self.flusher.called.notify_all();
        drop(threads);
    }
}

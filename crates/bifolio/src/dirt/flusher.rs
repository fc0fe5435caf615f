//! The flusher as all others see it: the limits of what is dirty, the devices, and the calls that
//! ask for a round. `writeback/flusher.rs` has its threads, and says when a device has a round.

use super::device::{Device, Files};
use super::throttle::{DirtyPages, Throttle};
use crate::config;
use crate::error::Error;
use crate::io::{DeviceIdentity, DirectBacking, FileIdentity, Load, Loads};
use crate::memory::Memory;
use crate::page::PAGE_BYTES;
use crate::stats::DeviceStats;
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, WeakList};
use crate::sys::process::OwnedThread;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Checks of the age of dirty folios per maximum age.
const TICKS_PER_AGE: u32 = 4;
/// Minimum interval between these checks.
const TICK_MIN: Duration = Duration::from_millis(5);
/// Time that a device waits for a thread that is in another round.
const NEXT_DEVICE_DELAY: Duration = Duration::from_millis(5);
/// Pause after a round in which the device wrote nothing.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Divisor: files with write gates leave this part of the dirty limit to other files.
const PART_FOR_LOGS: u64 = 4;

/// Thresholds of the flusher; `None` is a part of the bound.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FlusherSettings {
    pub(crate) background_bytes: Option<u64>,
    pub(crate) max_bytes: Option<u64>,
    pub(crate) age_max: Duration,
}

/// DirtyLimits that follow from a bound, pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirtyLimits {
    bound_pages: u64,
    background_pages: u64,
    pub(crate) max_pages: u64,
}

/// Pages above the background threshold that still count as just above it.
const JUST_PAGES: u64 = 16;

#[derive(Debug)]
pub(crate) struct Flusher<F> {
    pub(crate) settings: FlusherSettings,
    pub(crate) background_pages: AtomicU64,
    max_pages: AtomicU64,
    /// Dirty limit of files with write gates, pages: falls before that of the others does
    /// (`writeback/room.rs`). They get a part of it.
    pub(crate) gated_max_pages: AtomicU64,
    /// Lower bound on the dirty limit, pages: two of the largest folios of any file, so that a
    /// writer of such folios is not throttled for the first one.
    floor_pages: AtomicU64,
    dirty_devices: Arc<AtomicU64>,
    pub(crate) roster: Mutex<Roster<F>>,
    /// Signalled when a device is called, and when the threads must stop.
    pub(crate) called: Condvar,
    pub(crate) is_ending: AtomicBool,
    pub(crate) throttle: Throttle,
    /// Number of write-outs that have ended, successful or not.
    ended: AtomicU64,
    pub(crate) stall_ns_max: AtomicU64,
    /// Pages that devices may have in reads.
    pub(crate) loads: Arc<Loads>,
    pub(crate) swap_load: Load,
}

#[derive(Debug)]
pub(crate) struct Roster<F> {
    devices: WeakList<Device<F>>,
    /// Devices that several files can share, by identity.
    identified: HashMap<DeviceIdentity, Weak<Device<F>>>,
    /// Devices that may have something dirty, or stores through maps.
    pub(crate) active: WeakList<Device<F>>,
    /// Devices that wait for a round, by the earliest time of the round, and a number.
    pub(crate) calls: BTreeMap<(Instant, u64), Arc<Device<F>>>,
    next_call: u64,
    next_tick: Instant,
    pub(crate) threads: Vec<OwnedThread>,
    pub(crate) listening: usize,
    pub(crate) on_rounds: usize,
}

impl<F> Roster<F> {
    fn call_at(&mut self, from: Instant, device: Arc<Device<F>>) {
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

impl<F> Flusher<F> {
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
        let DirtyLimits { bound_pages, background_pages, max_pages } = self.limits_of(bound_bytes);
        self.background_pages.store(background_pages, Ordering::Relaxed);
        self.max_pages.store(max_pages, Ordering::Relaxed);
        self.gated_max_pages.store(max_pages, Ordering::Relaxed);
        self.loads.set_bound(bound_pages);
        self.throttle.release();
    }

    pub(crate) fn limits_of(&self, bound_bytes: u64) -> DirtyLimits {
        let max =
            self.settings.max_bytes.unwrap_or(u64::MAX).min(config::dirty_bytes_max(bound_bytes));
        let background = self.settings.background_bytes.unwrap_or(bound_bytes / 4).min(max);
        DirtyLimits {
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
    ) -> Arc<Device<F>> {
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
        device: &Arc<Device<F>>,
        file: &Weak<F>,
        list: impl FnOnce(&mut Files<F>) -> &mut WeakList<F>,
    ) {
        if device.enlist(file, list) {
            self.roster.lock().active.push(Arc::downgrade(device));
        }
    }

    pub(crate) fn call(&self, device: &Arc<Device<F>>) {
        if device.call() {
            self.send(device, Duration::ZERO);
        }
    }

    /// Sends a thread to serve a device that was called.
    pub(crate) fn send(&self, device: &Arc<Device<F>>, pause: Duration) {
        // A device that wrote nothing is not asked again at once.
        let pause = if device.is_stuck() { pause.max(RETRY_PAUSE) } else { pause };
        self.roster.lock().call_at(Instant::now() + pause, Arc::clone(device));
        self.called.notify_one();
    }

    /// Called when pages of a device have become dirty.
    pub(crate) fn note_dirty(&self, device: &Arc<Device<F>>) {
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

    pub(crate) fn background_pages(&self, device: &Device<F>) -> u64 {
        let max_pages = self.max_pages.load(Ordering::Relaxed);
        let background_pages = self.background_pages.load(Ordering::Relaxed);
        device.dirty_pages.background_pages(background_pages, max_pages)
    }

    pub(crate) fn is_much(&self, device: &Device<F>) -> bool {
        device.dirty_pages.own() > self.background_pages(device)
    }

    pub(crate) fn max_pages(&self) -> u64 {
        self.max_pages.load(Ordering::Relaxed).max(self.floor_pages.load(Ordering::Relaxed))
    }

    /// Returns the maximum number of dirty pages that `limits` allow.
    pub(crate) fn max_pages_of(&self, limits: DirtyLimits) -> u64 {
        limits.max_pages.max(self.floor_pages.load(Ordering::Relaxed))
    }

    /// Counts pages of a device that are about to become dirty. Returns `false` if there is no
    /// room.
    pub(crate) fn try_add(&self, device: &Device<F>, pages: u64, has_gate: bool) -> bool {
        device.dirty_pages.try_add(pages, self.max_pages_for(has_gate))
    }

    /// Returns the maximum number of dirty pages for a write to a file. Files with a gate leave a
    /// part to others: one of these may be the log.
    pub(crate) fn max_pages_for(&self, has_gate: bool) -> u64 {
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

    pub(crate) fn stall_ns_max(&self) -> u64 {
        self.stall_ns_max.load(Ordering::Relaxed)
    }

    pub(crate) fn device_stats(&self) -> Vec<DeviceStats> {
        let max_pages = self.max_pages();
        self.devices().map(|device| device.stats(max_pages)).collect()
    }

    /// Returns the trouble of a device that accepts no writes, if there is one.
    pub(crate) fn trouble(&self) -> Option<Error> {
        self.devices().find_map(|device| device.trouble_after(0))
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = Arc<Device<F>>> + use<F> {
        self.roster.lock().devices.snapshot()
    }

    pub(crate) fn tick(&self) -> Duration {
        (self.settings.age_max / TICKS_PER_AGE).max(TICK_MIN)
    }

    /// Waits for a device to serve. Returns `None` when the threads must stop.
    pub(crate) fn next_device(
        &self,
        roster: &mut MutexGuard<'_, Roster<F>>,
    ) -> Option<Arc<Device<F>>> {
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

    /// Calls devices with more dirty pages than the mean, because the total is high. Does nothing
    /// while other devices wait for a round they could have now: the last of those calls again.
    /// A device that write gates kept from writing is called once one of them opens.
    pub(crate) fn call_others(&self) {
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
}

/// Returns the part of a limit that files with write gates may have.
pub(crate) fn without_part_for_logs(max_pages: u64) -> u64 {
    max_pages - max_pages / PART_FOR_LOGS
}

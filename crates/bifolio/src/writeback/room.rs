//! Waits for less dirt: of throttled writers (THROTTLE-T1..T3), and
//! of a dirty limit that falls with the bound.
//!
//! A FALLING LIMIT. What is dirty must fit in the new shares before the new limit counts: pages
//! that cannot be written must not keep the share of others. Each step ends after some time without
//! progress:
//! 1. GATES: files with a write gate get the new limit, the others keep the old one, so that the
//!    log can be written. The gates are asked until their files fit.
//! 2. ANSWERS: each device with more than its new share writes something, or all of the excess,
//!    while all others still work with the old limit.
//! 3. SHARES: all files get the new limit, and the devices, which answer, write the excess.

use super::gate::{gate_failures, shut_gate};
use crate::dirt::{Limits, part_of, without_part_for_logs};
use crate::error::{Error, ErrorKind, Result, write_error};
use crate::inode::{Device, Flusher, Inode};
use crate::page::PAGE_BYTES;
use crate::stats::Counter;
use crate::sync::{Ordering, blocking};
use std::io::ErrorKind::TimedOut;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Upper bound on the time that a writer waits for a device that does not answer, and a sync for a
/// pin that does not end.
pub(super) const STALL_MAX: Duration = Duration::from_secs(10);
/// Interval at which a waiting writer requests another flusher round.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// Upper bound on the time without progress of the third step: less than writers wait.
const SHARES_STALL_MAX: Duration = Duration::from_secs(3);

/// Part of the dirty limit that all devices leave to another one.
const ALL_DEVICES_DIVISOR: u64 = 16;

const BEHIND_GATES: &str = "dirty in files with write gates";
const ON_ONE_DEVICE: &str = "dirty on one device";

/// Waits until a folio with some of `bytes` of a file may become dirty. Called without a folio
/// lock.
///
/// # Errors
/// The device accepts no writes, and the dirty limit is reached.
pub(crate) fn wait_for_room(inode: &Inode, device: &Arc<Device>, bytes: Range<u64>) -> Result<()> {
    blocking::check_user("less dirt");
    let pages = 1 << inode.mapping.order();
    let waited = inode.flusher.wait_for_room(device, inode, pages);
    waited.map_err(|cause| inode.unwritable(bytes, cause))
}

impl Flusher {
    /// Throttles a writer, which holds no folio lock, until `pages` more may be dirty on a device.
    ///
    /// # Errors
    /// The device's error, if it refuses writes; `None` if it does not answer.
    fn wait_for_room(
        &self,
        device: &Arc<Device>,
        inode: &Inode,
        pages: u64,
    ) -> std::result::Result<(), Option<Error>> {
        let begun = Instant::now();
        let result = self.wait_for_room_without_count(device, inode, pages);
        let nanoseconds = begun.elapsed().as_nanos() as u64;
        inode.memory.counters.add(Counter::ThrottleWait, 1);
        inode.memory.counters.add(Counter::ThrottleNs, nanoseconds);
        self.stall_ns_max.fetch_max(nanoseconds, Ordering::Relaxed);
        result
    }

    fn wait_for_room_without_count(
        &self,
        device: &Arc<Device>,
        inode: &Inode,
        pages: u64,
    ) -> std::result::Result<(), Option<Error>> {
        let max_pages = || self.max_pages_for(inode.has_gate());
        let has_room = || device.dirty_pages.has_room(pages, max_pages());
        let mut wait = WriteOutWait::begin(self, device, inode);
        loop {
            self.call(device);
            if device.dirty_pages.all() + pages > max_pages() {
                self.call_neighbours(device, pages);
            }
            wait.hold_while(|| !has_room());
            if has_room() {
                return Ok(());
            }
            wait.check(STALL_MAX)?;
        }
    }

    /// Makes other devices, which may have too few dirty pages for a round, write out as much.
    fn call_neighbours(&self, device: &Arc<Device>, pages: u64) {
        let devices = self.roster.lock().active.snapshot();
        for other in devices {
            let is_idle = other.dirty_pages.own() == 0 || other.is_stuck();
            if !is_idle && !Arc::ptr_eq(&other, device) {
                other.want_written(pages);
                self.call(&other);
            }
        }
    }
}

/// Wait for write-outs of a device, which writes meanwhile as for a throttled writer.
#[derive(Debug)]
pub(super) struct WriteOutWait<'w> {
    flusher: &'w Flusher,
    device: &'w Device,
    inode: &'w Inode,
    /// Number of rounds of the device, and of failed calls of the file's gate, before the wait.
    round: u64,
    failures: u64,
    /// Device answers and durable LSN at the last progress, which was seen at `since`.
    last: (u64, u64),
    since: Instant,
}

impl<'w> WriteOutWait<'w> {
    pub(super) fn begin(flusher: &'w Flusher, device: &'w Device, inode: &'w Inode) -> Self {
        device.held.fetch_add(1, Ordering::Relaxed);
        Self {
            flusher,
            device,
            inode,
            round: device.rounds_begun(),
            failures: gate_failures(inode),
            last: (device.answers(), inode.known_durable()),
            since: Instant::now(),
        }
    }

    /// Waits while `must_wait`, which takes no lock, returns `true` and the device is not in
    /// trouble, for at most [`ASK_EVERY`].
    pub(super) fn hold_while(&self, must_wait: impl Fn() -> bool) {
        let deadline = Instant::now() + ASK_EVERY;
        self.flusher.throttle.hold_while(deadline, || {
            must_wait() && self.device.trouble_after(self.round).is_none()
        });
    }

    /// Fails if the device or the file's gate refuses, and, with `None`, if neither has made
    /// progress for `stall_max`.
    pub(super) fn check(&mut self, stall_max: Duration) -> std::result::Result<(), Option<Error>> {
        let shut = || shut_gate(self.inode, self.device, self.failures);
        let cause = self.device.trouble_after(self.round).or_else(shut);
        if cause.is_some() {
            return Err(cause);
        }
        // Written folios of other files do not count for a wait for the file's gate.
        let now = (self.device.answers(), self.inode.known_durable());
        let is_open = || self.inode.held_back().is_none();
        if now.1 != self.last.1 || now.0 != self.last.0 && is_open() {
            (self.last, self.since) = (now, Instant::now());
        } else if self.since.elapsed() > stall_max {
            return Err(None);
        }
        Ok(())
    }
}

impl Drop for WriteOutWait<'_> {
    fn drop(&mut self) {
        self.device.held.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Dirty pages that a lower bound does not allow.
struct Excess {
    device: Arc<Device>,
    inode: Arc<Inode>,
    pages: u64,
    max_pages: u64,
    limit: &'static str,
}

impl Flusher {
    /// Lowers the dirty limits to those of `bound_bytes`, once the dirty pages fit. Blocks for
    /// write gates and devices.
    ///
    /// # Errors
    /// [`ErrorKind::BoundInUse`]; some limits may be lowered, so the caller sets the old bound.
    pub(crate) fn lower_bound(&self, bound_bytes: u64) -> Result<()> {
        let limits = self.limits_of(bound_bytes);
        self.gated_max_pages.store(limits.max_pages, Ordering::Relaxed);
        self.write_excess(bound_bytes, STALL_MAX, || self.gated_excess(limits))?;
        for device in self.devices() {
            let answers = device.answers();
            self.write_excess(bound_bytes, STALL_MAX, || {
                let is_silent = device.answers() == answers;
                is_silent.then(|| self.excess_of(&device, limits)).flatten()
            })?;
        }
        self.set_bound(bound_bytes);
        self.write_excess(bound_bytes, SHARES_STALL_MAX, || {
            let of_one = self.devices().find_map(|device| self.excess_of(&device, limits));
            of_one.or_else(|| self.excess_of_all(limits))
        })
    }

    /// Returns the dirty pages of files with write gates, if they leave a log too little room.
    fn gated_excess(&self, limits: Limits) -> Option<Excess> {
        let files = self.devices().flat_map(|device| {
            let files: Vec<_> = device.dirty_files().filter(|inode| inode.has_gate()).collect();
            files.into_iter().map(move |inode| (Arc::clone(&device), inode))
        });
        let pages_of = |inode: &Inode| inode.dirty_bytes() / PAGE_BYTES;
        let files: Vec<_> = files.map(|(device, it)| (pages_of(&it), device, it)).collect();
        let pages = files.iter().map(|(pages, ..)| pages).sum();
        let (_, device, inode) = files.into_iter().max_by_key(|(pages, ..)| *pages)?;
        let max_pages = part_of(without_part_for_logs(self.max_pages_of(limits)));
        let limit = BEHIND_GATES;
        (pages > max_pages).then_some(Excess { device, inode, pages, max_pages, limit })
    }

    /// Returns the pages of a device that exceed its share, whatever the other devices have.
    fn excess_of(&self, device: &Arc<Device>, limits: Limits) -> Option<Excess> {
        let (pages, max_pages) = (device.dirty_pages.own(), part_of(self.max_pages_of(limits)));
        if pages <= max_pages {
            return None;
        }
        // None of a file that was just closed, with its last pages.
        let inode = device.dirty_files().next()?;
        let device = Arc::clone(device);
        Some(Excess { device, inode, pages, max_pages, limit: ON_ONE_DEVICE })
    }

    /// Returns the pages of all devices if they leave nothing to another one.
    fn excess_of_all(&self, limits: Limits) -> Option<Excess> {
        let limit_pages = self.max_pages_of(limits);
        let max_pages = limit_pages - (limit_pages / ALL_DEVICES_DIVISOR).max(1);
        let device = self.devices().max_by_key(|device| device.dirty_pages.own())?;
        let pages = device.dirty_pages.all();
        let inode = device.dirty_files().next()?;
        let limit = "dirty on all devices";
        (pages > max_pages).then_some(Excess { device, inode, pages, max_pages, limit })
    }

    /// Writes out the excess. Fails on a refusal, or without progress for `stall_max`.
    fn write_excess(
        &self,
        bound_bytes: u64,
        stall_max: Duration,
        excess: impl Fn() -> Option<Excess>,
    ) -> Result<()> {
        blocking::check_user("less dirt");
        // The least excess for one limit, and its time.
        let (mut least, mut since) = (u64::MAX, Instant::now());
        while let Some(found) = excess() {
            let mut wait = WriteOutWait::begin(self, &found.device, &found.inode);
            loop {
                self.call(&found.device);
                let ended = self.ended();
                wait.hold_while(|| self.ended() == ended);
                let Some(next) = excess() else { return Ok(()) };
                if !next.is_same(&found) {
                    (least, since) = (u64::MAX, Instant::now());
                    break;
                }
                if next.pages < least {
                    (least, since) = (next.pages, Instant::now());
                }
                let checked = wait.check(Duration::MAX);
                let is_over = since.elapsed() > stall_max;
                if checked.is_err() || is_over {
                    return Err(next.refuse(bound_bytes, checked.err().flatten()));
                }
                // Another file has most of it now.
                if next.limit == BEHIND_GATES && !Arc::ptr_eq(&next.inode, &found.inode) {
                    break;
                }
            }
        }
        Ok(())
    }
}

impl Excess {
    fn is_same(&self, other: &Self) -> bool {
        let is_of_one = self.limit == ON_ONE_DEVICE;
        self.limit == other.limit && (!is_of_one || Arc::ptr_eq(&self.device, &other.device))
    }

    /// Returns the error of a bound that cannot fall because of this excess.
    fn refuse(&self, bound_bytes: u64, cause: Option<Error>) -> Error {
        let file = self.inode.name();
        let (used_bytes, max_bytes) = (self.pages * PAGE_BYTES, self.max_pages * PAGE_BYTES);
        let held_back = || self.inode.held_back().map(|it| it.to_io_error(TimedOut));
        let no_answer = || write_error(file, 0..used_bytes, TimedOut.into());
        let cause = cause.or_else(held_back).unwrap_or_else(no_answer);
        let text = format!(
            "the bound cannot fall to {bound_bytes} bytes: {used_bytes} bytes are {}, of which \
             {max_bytes} may be (CacheBuilder::dirty_max): {cause}",
            self.limit
        );
        Error::new(ErrorKind::BoundInUse, text).because(Arc::new(cause))
    }
}

//! Waits for less dirt: of throttled writers (THROTTLE-T1..T3), and of a dirty limit that falls
//! with the bound. Both run rounds, in the loop of `sync/round_wait.rs`: call the flusher, then
//! wait at the gate for what it writes. A [`WriteOutWait`] says what counts as progress, and what
//! as a refusal.
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
use crate::dirt::{DirtyLimits, part_of, without_part_for_logs};
use crate::error::{Error, ErrorKind, Result, write_error};
use crate::inode::{Device, Flusher, Inode};
use crate::page::PAGE_BYTES;
use crate::stats::Counter;
use crate::sync::{Ordering, RoundWait, WaitBudget, WaitProgress, blocking, wait_in_rounds};
use std::io::ErrorKind::TimedOut;
use std::ops::{ControlFlow, Range};
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
pub(crate) fn wait_for_room(
    inode: &Arc<Inode>,
    device: &Arc<Device>,
    bytes: Range<u64>,
) -> Result<()> {
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
        inode: &Arc<Inode>,
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

    /// Runs rounds until there is room: each calls the device, and its neighbours if the limit of
    /// all devices is reached, and waits at the gate for a moment.
    fn wait_for_room_without_count(
        &self,
        device: &Arc<Device>,
        inode: &Arc<Inode>,
        pages: u64,
    ) -> std::result::Result<(), Option<Error>> {
        let max_pages = || self.max_pages_for(inode.has_gate());
        let has_room = || device.dirty_pages.has_room(pages, max_pages());
        let budget = WaitBudget::of_wait(STALL_MAX);
        let mut wait = WriteOutWait::begin(self, (device, inode), budget);
        wait.counts_answers = true;
        wait_in_rounds(&mut wait, |wait| {
            self.call(device);
            if device.dirty_pages.all() + pages > max_pages() {
                self.call_neighbours(device, pages);
            }
            wait.hold_while(|| !has_room());
            Ok(if has_room() { ControlFlow::Break(()) } else { ControlFlow::Continue(None) })
        })
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

/// Wait for write-outs of a device, which writes meanwhile as for a throttled writer. Its rounds
/// wait at the gate, so it needs no pauses.
#[derive(Debug)]
struct WriteOutWait<'w> {
    flusher: &'w Flusher,
    budget: WaitBudget,
    /// Set if all that is written counts as progress, and not only less that is left.
    counts_answers: bool,
    asked: Asked,
    /// Set until the round ends in which the wait got another goal: it is not judged by it.
    has_turned: bool,
}

/// The device and the file that a wait looks at, and their state when it began to.
#[derive(Debug)]
struct Asked {
    device: Arc<Device>,
    inode: Arc<Inode>,
    /// Number of rounds of the device, and of failed calls of the file's gate, before the wait.
    round: u64,
    failures: u64,
    /// Device answers and durable LSN at the last progress.
    last: (u64, u64),
}

impl<'w> WriteOutWait<'w> {
    fn begin(
        flusher: &'w Flusher,
        (device, inode): (&Arc<Device>, &Arc<Inode>),
        budget: WaitBudget,
    ) -> Self {
        let asked = Asked::begin(device, inode);
        Self { flusher, budget, counts_answers: false, asked, has_turned: false }
    }

    /// Waits for another goal from now on, with as much time as for the first.
    fn turn_to(&mut self, device: &Arc<Device>, inode: &Arc<Inode>) {
        self.asked = Asked::begin(device, inode);
        self.has_turned = true;
        self.budget.begin_anew();
    }

    /// Waits while `must_wait`, which takes no lock, returns `true` and the device is not in
    /// trouble, for at most [`ASK_EVERY`].
    fn hold_while(&self, must_wait: impl Fn() -> bool) {
        let deadline = Instant::now() + ASK_EVERY;
        let Asked { device, round, .. } = &self.asked;
        self.flusher
            .throttle
            .hold_while(deadline, || must_wait() && device.trouble_after(*round).is_none());
    }
}

impl RoundWait for WriteOutWait<'_> {
    /// The refusal of the device, or of the file's gate.
    type Found = Option<Error>;
    /// `None` if neither has answered in time.
    type Error = Option<Error>;

    fn budget(&mut self) -> &mut WaitBudget {
        &mut self.budget
    }

    fn progress(&mut self, _refusal: &Option<Error>) -> WaitProgress {
        if std::mem::take(&mut self.has_turned) {
            return WaitProgress::ForAnyThread;
        }
        if !self.counts_answers {
            return WaitProgress::None;
        }
        // Written folios of other files do not count for a wait for the file's gate.
        let Asked { device, inode, last, .. } = &mut self.asked;
        let now = (device.answers(), inode.known_durable());
        let is_open = || inode.held_back().is_none();
        if now.1 == last.1 && (now.0 == last.0 || !is_open()) {
            return WaitProgress::None;
        }
        *last = now;
        WaitProgress::Own
    }

    fn is_hopeless(&mut self, refusal: &mut Option<Error>) -> bool {
        let Asked { device, inode, round, failures, .. } = &self.asked;
        let shut = || shut_gate(inode, device, *failures);
        *refusal = device.trouble_after(*round).or_else(shut);
        refusal.is_some()
    }

    fn fail(&mut self, refusal: Option<Error>) -> std::result::Result<(), Option<Error>> {
        Err(refusal)
    }
}

impl Asked {
    fn begin(device: &Arc<Device>, inode: &Arc<Inode>) -> Self {
        device.held.fetch_add(1, Ordering::Relaxed);
        Self {
            device: Arc::clone(device),
            inode: Arc::clone(inode),
            round: device.rounds_begun(),
            failures: gate_failures(inode),
            last: (device.answers(), inode.known_durable()),
        }
    }
}

impl Drop for Asked {
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
    fn gated_excess(&self, limits: DirtyLimits) -> Option<Excess> {
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
    fn excess_of(&self, device: &Arc<Device>, limits: DirtyLimits) -> Option<Excess> {
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
    fn excess_of_all(&self, limits: DirtyLimits) -> Option<Excess> {
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
        let Some(mut found) = excess() else { return Ok(()) };
        let budget = WaitBudget::of_wait(stall_max);
        let mut wait = WriteOutWait::begin(self, (&found.device, &found.inode), budget);
        let waited = wait_in_rounds(&mut wait, |wait| {
            if found.limit == BEHIND_GATES && !Arc::ptr_eq(&found.inode, &wait.asked.inode) {
                // Another file has most of it now.
                wait.asked = Asked::begin(&found.device, &found.inode);
            }
            self.call(&wait.asked.device);
            let ended = self.ended();
            wait.hold_while(|| self.ended() == ended);
            let Some(next) = excess() else { return Ok(ControlFlow::Break(())) };
            if !next.is_same(&found) {
                wait.turn_to(&next.device, &next.inode);
            }
            wait.budget.note_left(next.pages);
            found = next;
            Ok(ControlFlow::Continue(None))
        });
        waited.map_err(|refusal| found.refuse(bound_bytes, refusal))
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

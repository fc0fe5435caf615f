//! A dirty limit that falls with the bound: what is dirty must fit in the new shares before the new
//! limit counts. Otherwise pages that cannot be written would keep the share of other files: of the
//! log that a write gate waits for, or of the files on other devices.
//!
//! Called by `Reclaim::set_bound`. Each step ends after some time without progress:
//! 1. GATES: files with a write gate get the new limit, the others keep the old one, so that the
//!    log can be written. The gates are asked until their files fit.
//! 2. ANSWERS: each device with more than its new share writes something, or all of the excess. A
//!    device that hangs is found here, while all others still work with the old limit.
//! 3. SHARES: all files get the new limit, and the devices, which answer, write the excess.

use super::device::Device;
use super::flusher::{Flusher, Limits};
use super::throttle::{STALL_MAX, WriteOutWait, part_of};
use crate::error::{Error, ErrorKind, Result, write_error};
use crate::inode::Inode;
use crate::page::PAGE_BYTES;
use crate::sync::blocking;
use std::io::ErrorKind::TimedOut;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Upper bound on the time without progress of the third step, in which writers of all devices may
/// wait: less than they wait before they fail.
const SHARES_STALL_MAX: Duration = Duration::from_secs(3);

/// Divisor: all devices leave this part of the dirty limit to another one. So much is left by two
/// that have as much as they may.
const ALL_DEVICES_DIVISOR: u64 = 16;

const BEHIND_GATES: &str = "dirty in files with write gates";
const ON_ONE_DEVICE: &str = "dirty on one device";

/// Dirty pages that a lower bound does not allow.
struct Excess {
    device: Arc<Device>,
    inode: Arc<Inode>,
    pages: u64,
    max_pages: u64,
    limit: &'static str,
}

impl Flusher {
    /// Lowers the limits to those of a lower bound, once what is dirty fits. Blocks for write gates
    /// and devices.
    ///
    /// # Errors
    /// [`ErrorKind::BoundInUse`]. Some limits may be lower: the caller sets the old bound.
    pub(crate) fn lower_bound(&self, bound_bytes: u64) -> Result<()> {
        let limits = self.limits_of(bound_bytes);
        self.set_gated_limit(limits);
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

    /// Returns the dirty pages of files with write gates, if they exceed the part that leaves room
    /// for a log on the same device.
    fn gated_excess(&self, limits: Limits) -> Option<Excess> {
        let files = self.devices().flat_map(|device| {
            let files: Vec<_> = device.dirty_files().filter(|inode| inode.has_gate()).collect();
            files.into_iter().map(move |inode| (Arc::clone(&device), inode))
        });
        let pages_of = |inode: &Inode| inode.dirty_bytes() / PAGE_BYTES;
        let files = files.map(|(device, inode)| (pages_of(&inode), device, inode));
        let files: Vec<_> = files.collect();
        let pages = files.iter().map(|(pages, ..)| pages).sum();
        let (_, device, inode) = files.into_iter().max_by_key(|(pages, ..)| *pages)?;
        let max_pages = part_of(self.gated_pages_of(limits));
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

    /// Returns the pages of all devices if they leave nothing to another one, with the device that
    /// has most of them.
    fn excess_of_all(&self, limits: Limits) -> Option<Excess> {
        let limit_pages = self.max_pages_of(limits);
        let max_pages = limit_pages - (limit_pages / ALL_DEVICES_DIVISOR).max(1);
        let device = self.devices().max_by_key(|device| device.dirty_pages.own())?;
        let pages = device.dirty_pages.all();
        let inode = device.dirty_files().next()?;
        let limit = "dirty on all devices";
        (pages > max_pages).then_some(Excess { device, inode, pages, max_pages, limit })
    }

    /// Writes out until there is no excess. Fails if a device or a write gate refuses, or makes no
    /// progress for `stall_max`.
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

    /// Returns the error of a bound that cannot fall because of it.
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

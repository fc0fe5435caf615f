//! The flusher: threads that write dirty folios back in the background.
//!
//! It serves each device separately, in rounds (`dirt/device.rs`), when
//! - a folio has been dirty for longer than `dirty_age_max`;
//! - more than `dirty_background` is dirty, or a device's share of that: then it writes down
//!   to half of it, the oldest first;
//! - reclaim, which writes to no device, has met dirty folios: then it writes as many;
//! - a writer is throttled;
//! - advice requests it for a range of a file.
//!
//! THREADS. A round may never end, if the storage hangs. So one thread always listens: before a
//! thread starts a round, it starts another thread, up to [`THREADS_MAX`], unless one listens
//! already. During a round the next device waits `NEXT_DEVICE_DELAY` for the thread, so that many
//! devices that respond need two threads, and each device that hangs occupies one.

use super::batch::{Progress, Written};
use super::sync::Writeback;
use crate::dirt::{self, Refusal, Round, part_of};
use crate::error::{Error, Result};
use crate::inode::{Device, Flusher, Inode};
use crate::memory::Memory;
use crate::page::ALL_BYTES;
use crate::stats::Counter;
use crate::sync::{MutexGuard, Ordering, blocking};
use crate::sys::process::{Origin, OwnedThread};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time that a round spends on one file before it checks the others.
const FILE_TIME_MAX: Duration = Duration::from_secs(1);
/// Maximum number of threads: fewer hanging devices than that block no other device.
const THREADS_MAX: usize = 64;
/// Number of the oldest folios of a file that are written to probe a device that wrote nothing:
/// one bad block does not count as a failure of the whole device.
const PROBED_FOLIOS: u64 = 8;
/// Maximum folios of a round on behalf of reclaim.
const WANTED_FOLIOS_MAX: u64 = 256;

impl Flusher {
    /// Returns what write gates hold back: the bytes in all files, and the reason for one of them.
    pub(crate) fn held_back(&self) -> Option<Refusal> {
        let files = self.devices().flat_map(|device| device.dirty_files().collect::<Vec<_>>());
        let refusals = files.filter_map(|inode| inode.held_back());
        refusals.reduce(|one, two| {
            let held_bytes = one.held_bytes + two.held_bytes;
            Refusal { held_bytes, ..if one.cause.is_some() { one } else { two } }
        })
    }

    /// Serves devices until the threads must stop. Starts another thread before a round if no
    /// thread would listen meanwhile: a device that hangs keeps its thread only.
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

    /// Starts another thread of the flusher, unless there are enough. The caller has locked the
    /// roster.
    fn start_thread(
        self: &Arc<Self>,
        roster: &mut dirt::Roster<Inode>,
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

    /// Runs one round of a device: the ranges that were asked for, stores through maps that are
    /// due, then old and excess folios. Blocks for the device.
    fn go(&self, device: Arc<Device>, memory: &Memory) {
        let round = device.begin_round(self.tick());
        for (inode, range) in &round.ranges {
            inode.upgrade().inspect(|inode| Writeback::of(inode).write_out_soon(range));
        }
        if round.looks_for_stores {
            // A store through a map starts to age when it is found.
            let mapped = device.files.lock().mapped.snapshot();
            mapped.for_each(|inode| Writeback::of(&inode).find_stores_soon(&ALL_BYTES));
        }
        let total = self.flush(&device, memory, &round);
        let taken = total.folios;
        device.delist_clean_files(Inode::delist);
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

    /// Writes out old folios, folios above the threshold, and those that were requested.
    fn flush(&self, device: &Device, memory: &Memory, round: &Round<Inode>) -> Written {
        let mut total = Written::default();
        if round.is_probe {
            for inode in device.dirty_files() {
                let left = |progress: Progress| PROBED_FOLIOS.saturating_sub(progress.begun_folios);
                total.add(Writeback::of(&inode).write_out_until(u64::MAX, left));
            }
        } else {
            for inode in device.dirty_files() {
                let old = inode.dirty.older_than(self.settings.age_max);
                total.add(Writeback::of(&inode).write_out_until(old, |_| u64::MAX));
            }
            self.flush_excess(device, round.wanted_folios, &mut total);
        }
        if total.folios > 0 {
            memory.counters.add(Counter::FlusherFolio, total.folios);
        }
        total
    }

    /// Writes out what a device has above its target, and what reclaim wants clean: half of what
    /// writers that wait have left to it, or of the background threshold. Each file has a limited
    /// time, so that no file keeps the others waiting.
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
            total.add(Writeback::of(&inode).write_out_until(u64::MAX, left));
        }
    }
}

/// Asks for `rounds` rounds of the file's device. Returns `true` if the file was on the list of
/// dirty files all the time.
#[cfg(all(test, not(loom)))]
pub(crate) fn stays_listed_for(inode: &Inode, rounds: u64) -> bool {
    let device = inode.device.as_ref().expect("a file over storage");
    let end = device.rounds_begun() + rounds;
    let is_listed = || device.dirty_files().any(|file| std::ptr::eq(&*file, inode));
    while device.rounds_begun() < end {
        inode.flusher.call(device);
        if !is_listed() {
            return false;
        }
    }
    true
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

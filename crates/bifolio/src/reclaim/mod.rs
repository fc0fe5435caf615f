//! Reclaim: who gets a frame, and which folio must go for it. The bound is hard.
//!
//! Called by `file` (a miss, a new table page) and `cache` (another bound); calls `memory`, `page`
//! and `writeback`. Nothing above asks the arena for memory.
//!
//! ```text
//!   allocate --> arena has a frame ------------------------------> done (below LOW: evict a
//!      ^            | no                                            little, or wake the thread)
//!      |            v
//!      |     direct reclaim, one thread at a time:
//!      |       shrink: scan the inactive tail, ever larger shares of it     scan.rs
//!      |         folio by folio: busy? used? dirty -> the flusher; evict    scan.rs
//!      |           dirty, of a memory file -> the swapper                   swapper.rs
//!      |         by extents: what lies beside goes too, or moves away      extents.rs, evacuate.rs
//!      |       freed the wrong sizes? evacuate a chunk                      evacuate.rs
//!      |       frames now? done, with the reclaim lock: nobody else was faster
//!      '--- yes -- freed anything?
//!                   | no: drain the batches, sweep both lists; still nothing?
//!                   |     others are in the middle of something: wait a moment, again
//!                   v     everything is pinned or unwritable: Full
//! ```
//!
//! Invariants:
//! - RECLAIM-1: a sweep looks at each folio once and is bounded by the lists' lengths; there are at
//!   most [`SWEEPS_MAX`] of them in a row that find nobody at work, and a time limit while folios
//!   are busy, or others take what a round has freed. So an allocation ends: with a frame or with
//!   an error.
//! - RECLAIM-2: whoever takes folios off their tables for lack of memory holds the reclaim lock,
//!   or, as the swapper does, references to the files that were taken with it. (On advice, a handle
//!   keeps the file: `invalidate.rs`.) A file is freed only after its table is empty, the reclaim
//!   lock was taken once more, and nobody else has a reference to it: nobody in here looks at it.
//! - RECLAIM-3: no storage is waited for with the reclaim lock: one device must not stop the files
//!   of others.
//!
//! # Safety
//! [`ReclaimLock::owner`] follows a folio's owner; the reclaim lock keeps that alive.
//!
//! Lock order: `rebounding`, the reclaim lock, then folio locks (only ever tried), then what
//! `memory` and `writeback` take.
#![allow(unsafe_code)]

mod background;
mod charges;
mod evacuate;
mod extents;
mod invalidate;
mod retry_budget;
mod scan;
mod swapper;
mod unmap;
mod unmap_batch;

pub(crate) use background::Background;
pub(crate) use retry_budget::CallScope;
pub(crate) use swapper::SwapThread;

use crate::ablation::Ablation;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Arena, CHUNK_PAGES, FrameKind, Memory};
use crate::page::{FolioId, FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;
use crate::swap::Swap;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, blocking};
use crate::writeback::{Flusher, Inode, Services};
use retry_budget::{RetryBudget, SWEEP_PAUSE};
use scan::{ScanCounts, WriteOut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages a round of reclaim tries to free, as the kernel's SWAP_CLUSTER_MAX.
const ROUND_PAGES: u64 = 32;
/// Sweeps without a success after which everything counts as pinned: a thread that holds a
/// reference for a moment may have lost its CPU.
const SWEEPS_MAX: u32 = 10;
/// The fewest pages kept free ahead of need, if that is not too much of the bound: 2 MiB. Fewer
/// than a step of readahead takes would leave the reader to reclaim, and neighbours without room
/// beside each other.
const LOW_PAGES_MIN: u64 = 512;
/// The part of the bound that is kept free ahead of need; more where pages of regions leave in
/// large batches, and come in large windows: with half as much a reader in order waits for frames.
const LOW_PART: u64 = 64;
const LOW_PART_OF_REGIONS: u64 = 32;
/// The same while pages of regions come one by one: nobody runs out of frames then, and what is
/// free is no hit. (In 32 MiB of 128, in no order: misses 0.79 of all touches, with 2 to 4 MiB free
/// 0.81.)
const LOW_PART_OF_SINGLES: u64 = 128;
/// The most pages kept free ahead of need: 16 MiB.
const LOW_PAGES_MAX: u64 = 4096;

/// The part of the bound that is left for tables when memory is populated.
const PART_NOT_POPULATED: u64 = 32;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Reclaim {
    pub(crate) memory: Arc<Memory>,
    flusher: Arc<Flusher>,
    swap: Option<Arc<Swap>>,
    unmap_batch_folios: usize,
    ablation: Ablation,
    wait_max: Duration,
    /// RECLAIM-2.
    lock: Mutex<()>,
    /// Extents of frames that wait for the swap; for the holder of the reclaim lock.
    /// Held by whoever changes the bound, for one failure puts back what it found; and by who has
    /// found no memory because of that, and tries for the last time.
    rebounding: Mutex<()>,
    /// How often that was tried.
    rebounds: AtomicU64,
    /// Asks the background thread to work, or to end.
    signal: background::Signal,
    /// Folios on their way to the swap.
    swapper: swapper::Swapper,
}

/// Proof that the caller is the one who reclaims (RECLAIM-2).
#[derive(Debug)]
struct ReclaimLock<'r> {
    _guard: MutexGuard<'r, ()>,
}

impl ReclaimLock<'_> {
    /// The inode a locked folio belongs to; `None` once it has left its table.
    fn owner(&self, locked: &LockedFolio<'_>) -> Option<&Inode> {
        // SAFETY: an inode is freed only after its table is empty and the reclaim lock was taken
        // once more after that; we have held the reclaim lock since before the folio was locked
        // (RECLAIM-2).
        unsafe { Inode::owner(locked) }
    }

    /// The file an isolated folio belongs to, kept from being freed; `None` once the folio has left
    /// its table.
    fn keep_owner(&self, isolated: &FolioRef<'_>) -> Option<Arc<Inode>> {
        // SAFETY: as in `owner_of_isolated`: what came off a list was handed over with the lock of
        // the swapper's line; an inode that was freed before our reclaim_lock had left this folio.
        unsafe { Inode::owner(isolated.folio()) }?.keep()
    }

    /// The file of a folio that was just isolated.
    fn owner_of_isolated(&self, isolated: &FolioRef<'_>) -> Option<&Inode> {
        // SAFETY: as in `owner`; the folio came off a list, whose lock we took after the reclaim
        // lock, and our reference keeps it from a life with another inode.
        unsafe { Inode::owner(isolated.folio()) }
    }

    /// Brings the Entry of a folio closer that was just isolated.
    fn touch_entry(&self, isolated: &FolioRef<'_>) {
        if let Some(inode) = self.owner_of_isolated(isolated) {
            inode.mapping.table().touch(isolated.folio().index());
        }
    }
}

impl Reclaim {
    pub(crate) fn new(services: &Services, config: &Config) -> Self {
        Self {
            memory: Arc::clone(&services.memory),
            flusher: Arc::clone(&services.flusher),
            swap: services.swap.clone(),
            unmap_batch_folios: config.unmap_batch_folios,
            ablation: config.ablation,
            wait_max: Duration::from_millis(config.reclaim_wait_ms_max),
            lock: Mutex::new(()),
            rebounding: Mutex::new(()),
            rebounds: AtomicU64::new(0),
            signal: background::Signal::default(),
            swapper: swapper::Swapper::default(),
        }
    }

    fn arena(&self) -> &Arena {
        &self.memory.arena
    }

    /// Below this many obtainable pages the background thread is woken.
    fn low_pages(&self) -> u64 {
        let bound_pages = self.arena().bound_pages();
        if self.arena().has_region_pages() && self.memory.region_reads.are_single() {
            return (bound_pages / LOW_PART_OF_SINGLES).clamp(ROUND_PAGES, LOW_PAGES_MAX);
        }
        let at_least = LOW_PAGES_MIN.min(bound_pages / 16).max(1);
        let part = if self.arena().has_region_pages() { LOW_PART_OF_REGIONS } else { LOW_PART };
        (bound_pages / part).clamp(at_least, LOW_PAGES_MAX)
    }

    /// Finds frames for a folio; evicts if it must.
    ///
    /// Blocks while others' I/O has to end first. The folio is free: `Folios::start` it.
    /// With `may_swap`, it is of a file that has a swap, and may wait for that as for its own.
    pub(crate) fn allocate(&self, kind: FrameKind, may_swap: bool) -> Result<FolioId> {
        blocking::check("frames");
        let id = match self.take_frames(kind)? {
            Some(id) => id,
            None => self.wait_for_frames(kind, may_swap)?,
        };
        self.replace_frames(kind);
        Ok(id)
    }

    #[cold]
    fn wait_for_frames(&self, kind: FrameKind, may_swap: bool) -> Result<FolioId> {
        let since = Some(Instant::now());
        let mut retry_budget = RetryBudget::new(self, kind.pages() * PAGE_BYTES);
        retry_budget.may_swap = may_swap;
        loop {
            self.memory.soundness.check()?;
            if let Some(id) = self.reclaim_for(kind, &mut retry_budget)? {
                self.memory.note_stall(since);
                return Ok(id);
            }
        }
    }

    /// As [`Self::allocate`], but waits for nobody: evicts only what is clean, and only if nobody
    /// else is reclaiming. For callers with transfers in flight (IO-5), or who can do without.
    pub(crate) fn try_allocate(&self, kind: FrameKind) -> Result<Option<FolioId>> {
        let found = self.take_free(kind)?;
        if found.is_some() {
            return Ok(found);
        }
        if self.swapper.coming_pages() > 0 {
            // Others wait for those. What is clean would have to go for what is dirty: pages that
            // have just come would make room for the next.
            return Ok(None);
        }
        {
            let Some(guard) = self.lock.try_lock() else { return Ok(None) };
            self.memory.counters.add(Counter::DirectReclaim, 1);
            let reclaim_lock = ReclaimLock { _guard: guard };
            self.shrink(&reclaim_lock, ROUND_PAGES.max(kind.pages()), WriteOut::Nothing);
        }
        self.take_frames(kind)
    }

    /// Takes frames that are free, and evicts a little if few are left. Waits for nothing.
    pub(crate) fn take_free(&self, kind: FrameKind) -> Result<Option<FolioId>> {
        let found = self.take_frames(kind)?;
        if found.is_some() {
            self.replace_frames(kind);
        }
        Ok(found)
    }

    /// Frames for a folio, from what is free or one round of reclaim makes free; waits for nothing,
    /// not even for another thread that reclaims. What must be written out first is left to those
    /// who do that, so that a later call may succeed.
    pub(crate) fn allocate_at_once(&self, kind: FrameKind) -> Result<Option<FolioId>> {
        let found = self.take_free(kind)?;
        if found.is_some() {
            return Ok(found);
        }
        let Some(guard) = self.lock.try_lock() else { return Ok(None) };
        let reclaim_lock = ReclaimLock { _guard: guard };
        self.memory.counters.add(Counter::DirectReclaim, 1);
        self.shrink(&reclaim_lock, ROUND_PAGES.max(kind.pages()), WriteOut::MemoryFiles);
        let found = self.take_frames(kind)?;
        if found.is_some() {
            return Ok(found);
        }
        self.evacuate_for(&reclaim_lock, kind);
        self.take_frames(kind)
    }

    fn take_frames(&self, kind: FrameKind) -> Result<Option<FolioId>> {
        let folios = &self.memory.folios;
        let found = match kind {
            FrameKind::Arena { order, near } => self.arena().allocate(order, near, folios),
            FrameKind::Region => Ok(self.arena().allocate_region_page(folios)),
        };
        found.map_err(frames_refused)
    }

    /// Makes the bound's memory resident, but for what tables may want.
    pub(crate) fn populate(&self) -> Result<()> {
        let left_bytes = self.arena().usage().bound_bytes / PART_NOT_POPULATED;
        self.arena().grow_until(left_bytes, &self.memory.folios).map_err(frames_refused)
    }

    /// Evicts a little if fewer than LOW pages are obtainable; waits for nobody. Who reads here and
    /// there pays for itself, 5 us in 32 misses: the background thread would run where it is woken,
    /// on the reader's processor, 0.1 ms in 500, and then the two would want the same locks (0.009
    /// of 0.072 system calls a miss of `read_many`). The thread is for what takes more: room in
    /// order, for folios with neighbours, and pages that are to be swapped out, where it is wrong
    /// to pick those that are clean, because extents are freed by many that go together.
    fn replace_frames(&self, kind: FrameKind) {
        let (arena, low_pages) = (self.arena(), self.low_pages());
        let takes_more = self.swap.is_some() || arena.has_region_pages() || arena.wants_chunk();
        if takes_more || self.is_short_of(low_pages / 4 * 3) {
            return self.wake_if_low();
        }
        let is_scattered = matches!(kind, FrameKind::Arena { near: None, .. });
        if !is_scattered || !self.is_short_of(low_pages) || self.is_at_work() {
            return;
        }
        // The holder of the reclaim lock does the same.
        let Some(guard) = self.lock.try_lock() else { return };
        if self.shrink_a_little(&ReclaimLock { _guard: guard }).reclaimed_pages == 0 {
            self.wake_if_low();
        }
    }

    /// Sets the bound, giving memory back first if it shrinks. On failure the old bound stands.
    pub(crate) fn set_bound(&self, bound_bytes: u64) -> Result<()> {
        let mut retry_budget = RetryBudget::new(self, PAGE_BYTES);
        retry_budget.standing = Some(self.rebounding.lock());
        let changed = self.try_set_bound(bound_bytes, &mut retry_budget);
        // Release: pairs with the Acquire in `RetryBudget::new`: whoever sees this finds the bound
        // that stands now; whoever does not learns in `was_rebound` that there was another.
        self.rebounds.fetch_add(1, Ordering::Release);
        changed
    }

    fn try_set_bound<'r>(
        &'r self,
        bound_bytes: u64,
        retry_budget: &mut RetryBudget<'r>,
    ) -> Result<()> {
        let before_bytes = self.arena().usage().bound_bytes;
        self.arena().set_bound(bound_bytes);
        while self.arena().excess_bytes() > 0 {
            let excess_pages = self.arena().excess_bytes() / PAGE_BYTES;
            let counts = self.give_memory_back(&self.lock(), excess_pages + 1, retry_budget);
            if let Err(error) = self.decide(counts, retry_budget) {
                self.arena().set_bound(before_bytes);
                return Err(error);
            }
        }
        self.flusher.set_bound(bound_bytes);
        Ok(())
    }

    fn lock(&self) -> ReclaimLock<'_> {
        blocking::check("the reclaim lock to reclaim");
        ReclaimLock { _guard: self.lock.lock() }
    }

    /// Waits until nobody is in the middle of reclaiming (RECLAIM-2).
    pub(crate) fn wait_for_turn(&self) {
        drop(self.lock());
    }

    /// One round for an allocation that found nothing: frames, if it made some; an error when there
    /// is no hope. Only an allocation tells whether there are frames, so it is tried whenever that
    /// matters, with the reclaim lock: what a round has freed is its own first.
    fn reclaim_for<'r>(
        &'r self,
        kind: FrameKind,
        retry_budget: &mut RetryBudget<'r>,
    ) -> Result<Option<FolioId>> {
        let counts = {
            let reclaim_lock = self.lock();
            // Somebody may have freed enough while we waited for the reclaim lock.
            let found = self.take_frames(kind)?;
            if found.is_some() {
                return Ok(found);
            }
            self.memory.counters.add(Counter::DirectReclaim, 1);
            let mut counts =
                self.shrink(&reclaim_lock, ROUND_PAGES.max(kind.pages()), WriteOut::MemoryFiles);
            if counts.reclaimed_pages > 0 {
                let found = self.take_frames(kind)?;
                if found.is_some() {
                    return Ok(found);
                }
                // Folios of other sizes went: empty a chunk of those.
                counts.add(&self.evacuate_for(&reclaim_lock, kind));
            } else if !self.awaits_swapper(retry_budget) {
                counts = self.sweep(&reclaim_lock);
                // The rest of the chunk has been counted by the sweep already, but for folios
                // that somebody is just making: those are on no list yet.
                let evacuated = self.evacuate_for(&reclaim_lock, kind);
                counts.reclaimed_pages += evacuated.reclaimed_pages;
                counts.busy_pages = counts.busy_pages.max(evacuated.busy_pages);
            }
            if counts.reclaimed_pages == 0 && self.give_tables_back() {
                counts.reclaimed_pages = 1;
            }
            let found = self.take_frames(kind)?;
            if found.is_some() {
                return Ok(found);
            }
            counts
        };
        let counts = retry_budget.note_round(counts, kind.pages());
        self.decide(counts, retry_budget).map(|()| None)
    }

    /// Gives a chunk back to the kernel or, where pins keep each of them in use, free frames: as
    /// many as `pages_max`, if there are so many.
    fn give_memory_back(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        pages_max: u64,
        retry_budget: &RetryBudget<'_>,
    ) -> ScanCounts {
        let evacuated = self.evacuate_to_release(reclaim_lock);
        if evacuated.reclaimed_pages > 0 {
            return evacuated;
        }
        let mut counts = ScanCounts::default();
        if self.arena().usage().free_pages == 0 {
            counts = self.shrink(reclaim_lock, ROUND_PAGES, WriteOut::MemoryFiles);
            if counts.reclaimed_pages == 0 && !self.awaits_swapper(retry_budget) {
                counts = self.sweep(reclaim_lock);
            }
        }
        let mut left_pages = pages_max;
        while left_pages > 0 {
            let retired = self.arena().retire_pages(left_pages.min(CHUNK_PAGES.into()) as u32);
            if retired == 0 {
                break;
            }
            left_pages -= u64::from(retired);
        }
        // Pages of regions have been given back as they went; others may have them by now.
        counts.reclaimed_pages = counts.reclaimed_pages.max(pages_max - left_pages);
        if counts.reclaimed_pages == 0 && self.give_tables_back() {
            counts.reclaimed_pages = 1;
        }
        counts
    }

    #[cold]
    fn full(&self, counts: ScanCounts, wanted_bytes: u64) -> Error {
        self.memory.counters.add(Counter::AllocationFailure, 1);
        let usage = self.arena().usage();
        Error::from(ErrorKind::Full {
            bound_bytes: usage.bound_bytes,
            pinned_bytes: counts.pinned_pages * PAGE_BYTES,
            unwritten_bytes: counts.unwritten_pages * PAGE_BYTES,
            unswappable_bytes: self.memory.lru.unlisted_pages() * PAGE_BYTES,
            busy_bytes: counts.busy_pages * PAGE_BYTES,
            metadata_bytes: usage.used_bytes - usage.frame_bytes,
            wanted_bytes,
            free_bytes: usage.free_pages * PAGE_BYTES
                + usage.bound_bytes.saturating_sub(usage.used_bytes),
            cause: if counts.unwritten_pages > 0 { self.trouble() } else { None },
            refused: self.memory.unmap_refusal.last.lock().clone(),
        })
    }

    /// After a round: go on, wait a moment, or give up.
    fn decide<'r>(
        &'r self,
        mut counts: ScanCounts,
        retry_budget: &mut RetryBudget<'r>,
    ) -> Result<()> {
        if counts.reclaimed_pages > 0 {
            retry_budget.note_freed();
            retry_budget.ended = self.flusher.ended();
            return Ok(());
        }
        retry_budget.futile_sweeps += 1;
        if retry_budget.may_swap {
            self.help_swapper();
        }
        // What is to be swapped out is, or will be, on its way: unless the swap takes nothing.
        let swappable_pages = counts.unswapped_pages + counts.swapping_pages + self.swapper.pages();
        if self.swapper.has_trouble_after(retry_budget.swap_rounds + swapper::ROUNDS_MAX) {
            counts.unwritten_pages += swappable_pages;
        } else {
            counts.busy_pages += swappable_pages;
        }
        if retry_budget.is_hopeless(counts.busy_pages > 0) || retry_budget.is_over() {
            if self.was_rebound(retry_budget) {
                return Ok(());
            }
            return Err(self.full(counts, retry_budget.wanted_bytes));
        }
        self.memory.counters.add(Counter::AllocationWait, 1);
        if counts.busy_pages > 0 {
            // Folios left to the flusher may be clean before that; nobody waits for one device.
            self.flusher.wait_for_progress(retry_budget.ended, SWEEP_PAUSE);
        } else {
            std::thread::sleep(retry_budget.sweep_pause());
        }
        retry_budget.ended = self.flusher.ended();
        Ok(())
    }

    /// There was no memory: returns `true` if the bound was another one meanwhile, which may not
    /// have stood. Waits for a change of the bound, up to the call's deadline; sweeps are counted
    /// anew then, and until the caller's wait is over the bound stays.
    #[cold]
    fn was_rebound<'r>(&'r self, retry_budget: &mut RetryBudget<'r>) -> bool {
        if retry_budget.standing.is_some() {
            return false;
        }
        blocking::check("a change of the bound");
        let standing = loop {
            if let Some(standing) = self.rebounding.try_lock() {
                break standing;
            }
            if retry_budget.is_over() {
                return false;
            }
            std::thread::sleep(SWEEP_PAUSE);
        };
        let (before, may_swap) = (retry_budget.rebounds, retry_budget.may_swap);
        *retry_budget = RetryBudget::new(self, retry_budget.wanted_bytes);
        retry_budget.may_swap = may_swap;
        if retry_budget.rebounds == before {
            return false;
        }
        retry_budget.standing = Some(standing);
        true
    }
}

#[cold]
fn frames_refused(source: std::io::Error) -> Error {
    ErrorKind::Memory { purpose: "frames", source }.into()
}

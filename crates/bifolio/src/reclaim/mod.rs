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
mod evacuate;
mod extents;
mod invalidate;
mod retry_budget;
mod scan;
mod swapper;
mod unmap;
mod unmap_batch;

pub(crate) use background::Background;
pub(crate) use swapper::SwapThread;

use crate::ablation::Ablation;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Arena, CHUNK_PAGES, FrameKind, Memory};
use crate::page::{FolioId, FolioRef, LockedFolio, PAGE_BYTES, TABLE_PAGE_BYTES};
use crate::stats::Counter;
use crate::swap::{GROUP_BYTES, Swap};
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
/// The part of the bound that metadata may have before pages of tables are given back for more:
/// what they say of pages that left is of use.
const PART_OF_METADATA: u64 = 8;
/// The part of the bound that memory files with a swap leave to reads of what is swapped out.
const PART_FOR_READS: u64 = 8;

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
    awaited_extents: extents::AwaitedExtents,
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
            awaited_extents: extents::AwaitedExtents::default(),
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
        if self.memory.region_reads.are_single() {
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
        let wanted_bytes = kind.pages() * PAGE_BYTES;
        let (mut since, mut retry_budget) = (None, RetryBudget::new(self, wanted_bytes));
        retry_budget.may_swap = may_swap;
        let mut found = self.take_frames(kind)?;
        while found.is_none() {
            self.memory.soundness.check()?;
            since.get_or_insert_with(Instant::now);
            found = self.reclaim_for(kind, &mut retry_budget)?;
        }
        self.replace_frames(kind);
        self.memory.note_stall(since);
        Ok(found.expect("the loop ends with frames"))
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

    /// As [`Self::charge_table`], but evicts nothing; whether it is charged now.
    pub(crate) fn try_charge_table(&self, inode: &Arc<Inode>, index: u64) -> bool {
        let table = inode.mapping.table();
        if table.is_charged(index) {
            return true;
        }
        if !self.arena().charge(TABLE_PAGE_BYTES) {
            return false;
        }
        if table.set_charged(index) {
            self.memory.tables.enlist(inode);
        } else {
            // Somebody else was faster.
            self.arena().uncharge(TABLE_PAGE_BYTES);
        }
        true
    }

    /// Charges metadata; evicts if it must.
    pub(crate) fn charge(&self, bytes: u64) -> Result<()> {
        let mut retry_budget = RetryBudget::new(self, PAGE_BYTES);
        while !self.arena().charge(bytes) {
            self.make_room_for_metadata(&mut retry_budget)?;
        }
        Ok(())
    }

    /// Charges the table page of `index` before it is touched; evicts if it must.
    pub(crate) fn charge_table(&self, inode: &Arc<Inode>, index: u64) -> Result<()> {
        let mut retry_budget = RetryBudget::new(self, PAGE_BYTES);
        while !self.try_charge_table(inode, index) {
            self.make_room_for_metadata(&mut retry_budget)?;
        }
        Ok(())
    }

    /// Charges what the slots of a folio more of a memory file cost, before it is made, so that to
    /// swap a page takes no memory; evicts if it must. Refuses pages for which, with the
    /// swap full, only memory would be left that reads of swapped out ones need.
    pub(crate) fn charge_slots(&self, kind: FrameKind) -> Result<()> {
        let Some(swap) = &self.swap else { return Ok(()) };
        let pages = kind.pages();
        let bound_pages = self.arena().bound_pages();
        let memory_pages = bound_pages - bound_pages / PART_FOR_READS;
        if swap.pages() + pages > u64::from(swap.capacity_slots_max()) + memory_pages {
            let unwritten_pages = self.memory.unswapped_pages.load(Ordering::Relaxed);
            let counts = ScanCounts { unwritten_pages, ..ScanCounts::default() };
            return Err(self.full(counts, pages * PAGE_BYTES));
        }
        self.leave_room_for_reads(kind)?;
        let mut retry_budget = RetryBudget::new(self, PAGE_BYTES);
        while swap.is_short_for(pages) {
            if !self.arena().charge(GROUP_BYTES) {
                self.make_room_for_metadata(&mut retry_budget)?;
            } else if !swap.grow() {
                self.arena().uncharge(GROUP_BYTES);
            }
        }
        Ok(())
    }

    /// New pages of a memory file leave a few frames free for reads of what is swapped out, and
    /// what such a read brings is clean and can go for the next. So those pages can be read
    /// whatever the reason is why no more can be swapped out: a device that is full, or fails.
    ///
    /// (Who then writes to what was read makes its slot free, and that has storage for another.)
    fn leave_room_for_reads(&self, kind: FrameKind) -> Result<()> {
        let (arena, pages) = (self.arena(), kind.pages());
        // More than what overwrites leave: to write to what is in the swap makes room there.
        let kept_pages = (self.low_pages() / 2)
            .max(2 * self.memory.pages_left_to_others())
            .max(pages)
            .min(arena.bound_pages() / PART_FOR_READS);
        let kept_pages = kept_pages / pages * pages;
        let (mut since, mut retry_budget) = (None, RetryBudget::new(self, pages * PAGE_BYTES));
        retry_budget.may_swap = true;
        while !arena.has_room_for(kind, kept_pages + pages) {
            since.get_or_insert_with(Instant::now);
            let counts = self.free_a_round(kind, &retry_budget);
            let counts = retry_budget.note_round(counts, pages);
            self.decide(counts, &mut retry_budget)?;
        }
        self.memory.note_stall(since);
        Ok(())
    }

    /// Evicts what is wanted first, or else anything; makes frames of this kind of what is free.
    fn free_a_round(&self, kind: FrameKind, retry_budget: &RetryBudget) -> ScanCounts {
        let reclaim_lock = self.lock();
        self.memory.counters.add(Counter::DirectReclaim, 1);
        let counts =
            self.shrink(&reclaim_lock, ROUND_PAGES.max(kind.pages()), WriteOut::MemoryFiles);
        if counts.reclaimed_pages > 0 || self.awaits_swapper(retry_budget) {
            return counts;
        }
        let mut counts = self.sweep(&reclaim_lock);
        if counts.reclaimed_pages == 0 {
            // What is free may be in pieces, in chunks that are cut for other folios.
            counts.reclaimed_pages = self.evacuate_for(&reclaim_lock, kind).reclaimed_pages;
        }
        counts
    }

    fn make_room_for_metadata<'r>(&'r self, retry_budget: &mut RetryBudget<'r>) -> Result<()> {
        blocking::check("room for metadata");
        let usage = self.arena().usage();
        let metadata_bytes = usage.used_bytes - usage.frame_bytes;
        if metadata_bytes > usage.bound_bytes / PART_OF_METADATA && self.give_tables_back() {
            return Ok(());
        }
        let counts = self.give_memory_back(1, retry_budget);
        let counts = retry_budget.note_round(counts, 1);
        self.decide(counts, retry_budget)
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
            let counts = self.give_memory_back(excess_pages + 1, retry_budget);
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

    /// Gives back pages of tables that name nothing any more; whether there were any.
    fn give_tables_back(&self) -> bool {
        let given = self.memory.tables.give_back(ROUND_PAGES);
        self.arena().uncharge(given * TABLE_PAGE_BYTES);
        given > 0
    }

    /// Gives a chunk back to the kernel or, where pins keep each of them in use, free frames: as
    /// many as `pages_max`, if there are so many.
    fn give_memory_back(&self, pages_max: u64, retry_budget: &RetryBudget) -> ScanCounts {
        let reclaim_lock = self.lock();
        let evacuated = self.evacuate_to_release(&reclaim_lock);
        if evacuated.reclaimed_pages > 0 {
            return evacuated;
        }
        let mut counts = ScanCounts::default();
        if self.arena().usage().free_pages == 0 {
            counts = self.shrink(&reclaim_lock, ROUND_PAGES, WriteOut::MemoryFiles);
            if counts.reclaimed_pages == 0 && !self.awaits_swapper(retry_budget) {
                counts = self.sweep(&reclaim_lock);
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
            retry_budget.note_progress();
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

    /// There was no memory: whether the bound was another one meanwhile, which may not have stood.
    /// Waits for whoever changes it; the budget begins anew then, and until it is over nobody does.
    #[cold]
    fn was_rebound<'r>(&'r self, retry_budget: &mut RetryBudget<'r>) -> bool {
        if retry_budget.standing.is_some() {
            return false;
        }
        blocking::check("a change of the bound");
        let standing = self.rebounding.lock();
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

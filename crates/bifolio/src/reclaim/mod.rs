//! Reclaim: allocates all frames, and evicts folios when none are free. The bound is hard.
//!
//! ```text
//!   allocate --> arena has a frame ------------------------------> done (below LOW: evict a few
//!      ^            | no                                            folios, or wake the thread)
//!      |            v
//!      |     direct reclaim, one thread at a time:
//!      |       shrink: scan growing shares of OLD and ACTIVE, from the tails scan.rs
//!      |         each folio: busy? used? dirty -> the flusher; evict        scan.rs
//!      |           dirty, of a memory file -> the swapper                   swapper.rs
//!      |         by extent: evict or move the neighbours       evacuate.rs
//!      |       freed the wrong sizes? evacuate a chunk                      evacuate.rs
//!      |       frames now? done, still under the reclaim lock
//!      '--- yes -- freed anything?
//!                   | no: drain the batches, sweep all lists; still nothing?
//!                   |     other threads use folios: wait a moment, try again
//!                   v     everything is pinned or unwritable: Full
//! ```
//!
//! Invariants:
//! - RECLAIM-1: a sweep examines each folio once and is bounded by the lengths of the lists. At
//!   most [`SWEEPS_MAX`] consecutive sweeps may find no folio busy, and a time limit holds while
//!   folios are busy or other threads take the frames that a round has freed. So an allocation ends
//!   with a frame or with an error.
//! - RECLAIM-2: a thread that removes folios from their tables to free memory holds the reclaim
//!   lock, or, like the swapper, references to their files that were taken under it. (On advice, a
//!   handle keeps the file: `invalidate.rs`.) A file is freed only after its table is empty, the
//!   reclaim lock was taken once more, and no other thread has a reference to the file: then no
//!   code in this module accesses it.
//! - RECLAIM-3: no thread waits for storage while it holds the reclaim lock: one device must not
//!   stop the files of others.
//!
//! # Safety
//! [`ReclaimLock::owner`] dereferences a folio's owner, which the reclaim lock keeps alive.
#![allow(unsafe_code)]

mod background;
mod evacuate;
mod invalidate;
mod mapped;
mod memory_wait;
mod outcome;
mod reserve;
mod scan;
mod swap_queue;
mod swapper;
mod victims;
mod wait;

pub use invalidate::{Evicted, Kept};
pub(crate) use mapped::MappedScan;
pub(crate) use outcome::{EvictOutcome, ScanControl, ScanCounts, Unswapped, WriteOut, is_pinned};

use crate::config::{Ablation, Config};
use crate::error::{Error, Result};
use crate::inode::{Flusher, Inode, Services, removal};
use crate::memory::{Arena, FrameKind, Memory, Unlisted};
use crate::page::{Entry, Folio, FolioId, FolioRef, LockedFolio, PAGE_BYTES, TABLE_PAGE_BYTES};
use crate::store::Swap;
use crate::sync::{AtomicBool, AtomicU64, Backoff, Condvar, Mutex, MutexGuard, blocking};
use crate::sys::memory::MemoryLimit;
use crate::sys::process::OwnedThread;
use std::cell::Cell;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};
use swap_queue::Swapper;

/// First pause between sweeps without success: readers hold a batch for less time.
const SWEEP_PAUSE: Duration = Duration::from_millis(1);
/// Number of pages that a round of reclaim tries to free, as the kernel's SWAP_CLUSTER_MAX.
const ROUND_PAGES: u64 = 32;
/// Number of sweeps without success after which all folios count as pinned. Several, because a
/// thread that holds a reference briefly may have lost its CPU.
const SWEEPS_MAX: u32 = 10;
/// Lower bound on the pages kept free ahead of need while pages are read in runs, unless that is
/// too large a part of the bound: 2 MiB. With fewer than one readahead step takes, the reader
/// itself would have to reclaim, and neighbouring pages would not find adjacent frames.
const LOW_PAGES_MIN: u64 = 512;
/// Lower bound while pages are read one by one: readers evict a batch of pages themselves.
const LOW_PAGES_MIN_OF_SINGLES: u64 = 64;
/// Part of the bound that is kept free ahead of need. It is larger with regions, whose pages are
/// evicted in large batches and read in large windows: with half of it, a sequential reader waits
/// for frames.
const LOW_DIVISOR: u64 = 64;
const LOW_DIVISOR_OF_REGIONS: u64 = 32;
/// The part while pages of regions are read one by one: such readers do not run out of frames, and
/// free pages produce no hits.
const LOW_DIVISOR_OF_SINGLES: u64 = 128;
/// Upper bound on these pages: 16 MiB.
const LOW_PAGES_MAX: u64 = 4096;

/// Part of the bound that is left for tables when memory is populated.
const UNPOPULATED_DIVISOR: u64 = 32;

thread_local! {
    static IS_HASTY: Cell<bool> = const { Cell::new(false) };
}

#[derive(Debug)]
pub(crate) struct Reclaim {
    pub(crate) memory: Arc<Memory>,
    flusher: Arc<Flusher>,
    pub(crate) swap: Option<Arc<Swap>>,
    /// Evicts folios in place; `None` if no file can be.
    mapped: Option<Box<dyn MappedVictims>>,
    pub(crate) unmap_batch_folios: usize,
    ablation: Ablation,
    wait_max: Duration,
    lock: Mutex<()>,
    /// Held while the bound changes, because a failed change restores the previous bound. Also held
    /// by an allocation that failed because of such a change, while it tries for the last time.
    rebounding: Mutex<()>,
    setting_bound: Mutex<()>,
    rebounds: AtomicU64,
    /// Held by the only call that may wait for memory while it has pins ([`Reclaim::pin_alone`]).
    pinning: Mutex<()>,
    signal: Signal,
    swapper: Swapper,
}

/// Evicts folios whose pages are in place.
pub(crate) trait MappedVictims: Debug + Send + Sync {
    /// Begins to collect the victims of a scan.
    fn begin<'t>(
        &self,
        reclaim: &'t Reclaim,
        reclaim_lock: &'t ReclaimLock<'t>,
        control: ScanControl,
    ) -> Box<dyn MappedScan<'t> + 't>;

    /// Writes and evicts those of `folios` that are in place, each with its file, for the swapper.
    /// Leaves the folios of the arena.
    fn swap_out(&self, reclaim: &Reclaim, folios: &mut Vec<(Arc<Inode>, FolioRef<'_>)>);
}

/// Calls of the background thread.
#[derive(Debug, Default)]
struct Signal {
    /// `true` while the thread works or should. Read without the lock, by every allocation while
    /// memory is short.
    work: AtomicBool,
    end: Mutex<bool>,
    changed: Condvar,
}

/// Allocations of a call that has pins, for which other calls may be waiting: they fail as soon as
/// a sweep finds nothing to evict, instead of after [`SWEEPS_MAX`] sweeps or at the call's
/// deadline.
#[derive(Debug)]
#[must_use]
pub(crate) struct Haste {
    was_hasty: bool,
    _not_send: PhantomData<*const ()>,
}

impl Haste {
    pub(crate) fn begin() -> Self {
        Self { was_hasty: IS_HASTY.replace(true), _not_send: PhantomData }
    }
}

impl Drop for Haste {
    fn drop(&mut self) {
        IS_HASTY.set(self.was_hasty);
    }
}

/// Proof that the caller holds the reclaim lock (RECLAIM-2).
#[derive(Debug)]
pub(crate) struct ReclaimLock<'r> {
    _guard: MutexGuard<'r, ()>,
}

impl ReclaimLock<'_> {
    /// Returns the inode of a locked folio; `None` once the folio was removed from its table.
    pub(crate) fn owner(&self, locked: &LockedFolio<'_>) -> Option<&Inode> {
        // SAFETY: an inode is freed only after its table is empty and the reclaim lock was taken
        // once more after that; this thread has held the reclaim lock since before it locked the
        // folio (RECLAIM-2).
        unsafe { Inode::owner(locked) }
    }

    /// Returns the file of a folio that is isolated, or on a list whose lock the caller holds;
    /// `None` once the folio was removed from its table.
    pub(crate) fn owner_of_isolated(&self, folio: &Folio) -> Option<&Inode> {
        // SAFETY: as in `owner`. The lock of the list that the folio is on, or came off, was taken
        // after the reclaim lock, or, for one from the swapper's queue, that queue's lock before
        // it: an inode that was freed before then had removed the folio from its table. A reference
        // of the caller, or the lock of the list, which the last put takes first (LRU-2), keeps the
        // folio from being reused by another inode.
        unsafe { Inode::owner(folio) }
    }
}

#[derive(Debug)]
pub(crate) struct ReclaimThread {
    reclaim: Arc<Reclaim>,
    end: fn(&Reclaim),
    thread: OwnedThread,
}

impl ReclaimThread {
    fn start(
        name: &str,
        reclaim: &Arc<Reclaim>,
        run: impl FnOnce(&Reclaim) + Send + 'static,
        end: fn(&Reclaim),
    ) -> Result<Self> {
        let shared = Arc::clone(reclaim);
        let thread = OwnedThread::start(name, move || run(&shared)).map_err(Error::thread)?;
        Ok(Self { reclaim: Arc::clone(reclaim), end, thread })
    }
}

impl Drop for ReclaimThread {
    fn drop(&mut self) {
        if !self.thread.is_of_parent() {
            (self.end)(&self.reclaim);
        }
    }
}

impl Reclaim {
    pub(crate) fn new(
        services: &Services,
        config: &Config,
        mapped: Option<Box<dyn MappedVictims>>,
    ) -> Self {
        Self {
            memory: Arc::clone(&services.memory),
            flusher: Arc::clone(&services.flusher),
            swap: services.swap.clone(),
            mapped,
            unmap_batch_folios: config.unmap_batch_folios,
            ablation: config.ablation,
            wait_max: config.reclaim_wait_max,
            lock: Mutex::new(()),
            rebounding: Mutex::new(()),
            setting_bound: Mutex::new(()),
            rebounds: AtomicU64::new(0),
            pinning: Mutex::new(()),
            signal: Signal::default(),
            swapper: Swapper::default(),
        }
    }

    fn arena(&self) -> &Arena {
        &self.memory.arena
    }

    /// Returns the number of obtainable pages below which the background thread is woken.
    fn low_pages(&self) -> u64 {
        let bound_pages = self.arena().bound_pages();
        if self.arena().has_region_pages() && self.memory.region_reads.are_single() {
            return (bound_pages / LOW_DIVISOR_OF_SINGLES).clamp(ROUND_PAGES, LOW_PAGES_MAX);
        }
        let has_runs = self.arena().has_region_pages() || self.arena().is_filled_in_runs();
        let at_least = if has_runs { LOW_PAGES_MIN } else { LOW_PAGES_MIN_OF_SINGLES };
        let at_least = at_least.min(bound_pages / 16).max(1);
        let part =
            if self.arena().has_region_pages() { LOW_DIVISOR_OF_REGIONS } else { LOW_DIVISOR };
        (bound_pages / part).clamp(at_least, LOW_PAGES_MAX)
    }

    /// Allocates frames for a folio, and evicts others if necessary.
    ///
    /// Blocks while I/O of other threads must end first. The returned folio is free:
    /// `Folios::start` it. A call for a memory file may wait for the swap as for its own storage.
    pub(crate) fn allocate(&self, kind: FrameKind, inode: &Inode) -> Result<FolioId> {
        blocking::check("frames");
        let id = match self.take_frames(kind)? {
            Some(id) => id,
            None => self.wait_for_frames(kind, inode.store.slots().is_some())?,
        };
        self.replace_frames(kind);
        Ok(id)
    }

    /// Allocates like [`Self::allocate`] but waits for no other thread: evicts only clean folios,
    /// and only if no other thread is reclaiming. For callers with transfers in flight (IO-5), and
    /// for those that can continue without frames.
    pub(crate) fn try_allocate(&self, kind: FrameKind) -> Result<Option<FolioId>> {
        let found = self.take_free(kind)?;
        if found.is_some() {
            return Ok(found);
        }
        if self.swapper.coming_pages() > 0 {
            // Other threads wait for those pages. Evicting clean folios instead would make recently
            // read pages pay for dirty ones.
            return Ok(None);
        }
        {
            let Some(guard) = self.lock.try_lock() else { return Ok(None) };
            let reclaim_lock = ReclaimLock { _guard: guard };
            self.shrink(&reclaim_lock, ROUND_PAGES.max(kind.pages()), WriteOut::Nothing);
        }
        self.take_frames(kind)
    }

    /// Takes free frames, and evicts a few folios if few frames are left. Never waits.
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
            FrameKind::Arena { order, near } => self.arena().take(order, near, folios),
            FrameKind::Region => Ok(self.arena().allocate_region_page(folios)),
        };
        found.map_err(frames_refused)
    }

    /// Charges like [`Self::charge_table`] but evicts nothing. Returns `true` if it is charged.
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
            // Another thread has charged it.
            self.arena().uncharge(TABLE_PAGE_BYTES);
        }
        true
    }

    /// Charges a new page with Entry `seen`, if that takes no slots of the swap and no eviction.
    pub(crate) fn try_charge_page(&self, inode: &Arc<Inode>, index: u64, seen: Entry) -> bool {
        !inode.store.reserves_slots(seen) && self.try_charge_table(inode, index)
    }

    /// Counts a new folio of `inode` as unlisted if only its file can free its pages, because it
    /// has no swap. Returns `None` for all other files.
    ///
    /// # Errors
    /// Such pages would use the memory that other files need.
    pub(crate) fn count_unlisted(&self, inode: &Inode) -> Result<Option<Unlisted<'_>>> {
        if inode.is_evictable {
            return Ok(None);
        }
        let pages = 1 << inode.mapping.order();
        // The smallest caches may have one folio, however large.
        let pages_max = self.memory.unswapped_pages_max().max(pages);
        let counted = self.memory.lru.try_count_unlisted(pages, pages_max);
        let full = || self.full(ScanCounts::default(), pages * PAGE_BYTES);
        counted.ok_or_else(full).map(Some)
    }

    /// Makes all memory that the bound allows resident, except for a part for tables. Fails before
    /// it touches any if a control group of the process allows less.
    pub(crate) fn prefault(&self) -> Result<()> {
        let bound_bytes = self.arena().bound_bytes();
        let left_bytes = bound_bytes / UNPOPULATED_DIVISOR;
        if let Some(limit) = MemoryLimit::of_process() {
            limit.check(bound_bytes - left_bytes).map_err(frames_refused)?;
        }
        self.arena().grow_until(left_bytes, &self.memory.folios).map_err(frames_refused)
    }

    /// Evicts a few folios if fewer than LOW pages are obtainable. Never waits.
    ///
    /// A random reader evicts inline: the reclaim thread would run on the CPU that wakes it, the
    /// reader's, and both would contend for the same locks. The thread is woken for larger work:
    /// runs of adjacent frames for sequential fills, and pages to be swapped out.
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
        let Some(guard) = self.lock.try_lock() else { return };
        if self.shrink_a_little(&ReclaimLock { _guard: guard }).reclaimed_pages == 0 {
            self.wake_if_low();
        }
    }

    /// Returns `true` if fewer than `pages` are obtainable, in the arena or for regions.
    pub(super) fn is_short_of(&self, pages: u64) -> bool {
        let arena = self.arena();
        arena.obtainable_pages() < pages || arena.has_region_pages() && arena.left_pages() < pages
    }

    /// Returns the number of pages that can be taken without an eviction: the background thread,
    /// which may be at work, leaves more than HIGH alone, and a charge for a table may cost the
    /// bound its last chunk. A hint.
    pub(crate) fn spare_pages(&self) -> u64 {
        let arena = self.arena();
        let left_pages = if arena.has_region_pages() { arena.left_pages() } else { u64::MAX };
        let kept_pages = 2 * self.low_pages() + arena.chunk_bytes() / PAGE_BYTES;
        arena.obtainable_pages().min(left_pages).saturating_sub(kept_pages)
    }

    /// Waits for the right to wait for memory with pins, which one call has. Returns `None` after
    /// the time that a call may wait for memory. The caller has no pins.
    pub(crate) fn pin_alone(&self) -> Option<MutexGuard<'_, ()>> {
        blocking::check("another call that pins");
        let begun = Instant::now();
        loop {
            let pinning = self.pinning.try_lock();
            if pinning.is_some() || begun.elapsed() > self.wait_max {
                return pinning;
            }
            std::thread::sleep(SWEEP_PAUSE);
        }
    }

    fn lock(&self) -> ReclaimLock<'_> {
        blocking::check("the reclaim lock to reclaim");
        ReclaimLock { _guard: self.lock.lock() }
    }

    /// Waits until no thread that held the reclaim lock at the call still holds it (RECLAIM-2).
    pub(crate) fn wait_for_reclaim(&self) {
        drop(self.lock());
    }

    /// Frees a file without handles, storage and dirty pages, with its pages. Waits for threads
    /// that move one of them.
    pub(crate) fn free_closed(&self, inode: Arc<Inode>) {
        let mut backoff = Backoff::default();
        loop {
            removal::remove_closed(&inode);
            self.wait_for_reclaim();
            if inode.mapping.resident_folios() == 0 {
                return Inode::free(inode);
            }
            backoff.wait();
        }
    }
}

#[cold]
fn frames_refused(source: std::io::Error) -> Error {
    Error::memory("frames", source)
}

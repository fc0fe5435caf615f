//! The swapper: the thread that swaps out the folios of a queue (`swap_queue.rs`).
//!
//! No other thread waits unconditionally for that thread. So a swap that hangs blocks only it, and
//! callers that can get memory nowhere else.
//!
//! PROTOCOL SWAPPER, as two columns:
//!
//! ```text
//!  THE HOLDER OF THE RECLAIM LOCK               THE SWAPPER'S THREAD
//!  P1 isolate a folio that is to be swapped     P3 take all of the queue; with the reclaim lock:
//!     out (scan.rs, evacuate.rs)                   take a reference to the file of each; release
//!  P2 add it to the queue, with its                the reclaim lock
//!     reference, if there is room; wake the     P4 write back, file by file (of a region:
//!     thread                                       UNMAP-B1..B9, with its own bounce buffer)
//!                                               P5 with the reclaim lock: evict clean folios; put
//!                                                  the others back on their list; clear extents;
//!                                                  wake the threads that wait
//! ```
//!
//! A folio is in the queue, or taken from it, once; it is on no list then (LRU-1). Its reference
//! keeps its frames but not its file: the file may be closed meanwhile, and the folio then has no
//! owner at P3. A file found at P3 is kept until it is written.
//!
//! COMING. A thread that needs as many pages as are queued, or were taken from the queue, waits for
//! them instead of scanning for more. A round that is slow (`swap_queue.rs`), or that follows a
//! refused one, does not count: clean folios are evicted instead.
//!
//! TROUBLE, as for a device (`dirt/device.rs`): the swap accepted nothing and refused
//! something in the last round. A caller that finds only folios to be swapped out fails after some
//! rounds that began after the call, if the last one was refused.

use super::memory_wait::{Goal, MemoryWait};
use super::outcome::{ScanCounts, WriteOut};
use super::scan::EvictedBatch;
use super::swap_queue::SWAP_PAGES;
use super::{Reclaim, ReclaimThread};
use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::page::{FolioId, FolioRef, PAGE_BYTES};
use crate::store::Swap;
use crate::sync::{Ordering, blocking, wait_in_rounds};
use crate::writeback::Writeback;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::time::Instant;

/// Upper bound on the pages in the queue: while one transfer is in flight, the next is collected.
/// In a small cache, a part of the bound.
const QUEUE_PAGES_MAX: u64 = 2 * SWAP_PAGES;
const QUEUE_DIVISOR: u64 = 4;
/// Every n-th sweep scans although swap-out is pending, perhaps of folios of another order.
const SWEEPS_WITH_SWAPPER: u32 = 8;

impl Reclaim {
    /// P2: queues isolated folios for the swapper. Returns those for which there is no room.
    pub(super) fn queue_for_swap<'a>(&self, folios: Vec<FolioRef<'a>>) -> Vec<FolioRef<'a>> {
        let pages_max = self.queue_pages_max();
        let mut queue = self.swapper.queue.lock();
        if !queue.is_served || queue.is_ending {
            return folios;
        }
        let mut refused = Vec::new();
        for folio in folios {
            let pages = folio.folio().pages();
            if queue.pages > 0 && queue.pages + pages > pages_max {
                refused.push(folio);
                continue;
            }
            queue.pages += pages;
            self.swapper.pages.fetch_add(pages, Ordering::Relaxed);
            queue.folios.push(folio.into_id());
        }
        drop(queue);
        self.swapper.called.notify_one();
        refused
    }

    pub(super) fn awaits_swapper(&self, wait: &MemoryWait<'_>) -> bool {
        let is_due = (wait.sweeps.futile + 1).is_multiple_of(SWEEPS_WITH_SWAPPER);
        !is_due && self.swapper.coming_pages() > 0
    }

    pub(super) fn has_room_in_queue(&self) -> bool {
        let pages_max = self.queue_pages_max();
        self.swapper.queue.lock().pages + SWAP_PAGES.min(pages_max) <= pages_max
    }

    fn queue_pages_max(&self) -> u64 {
        if self.swapper.is_in_trouble() {
            // Enough to detect that the swap accepts pages again.
            return super::ROUND_PAGES;
        }
        let part = self.arena().bound_pages() / QUEUE_DIVISOR;
        QUEUE_PAGES_MAX.min(part).max(super::ROUND_PAGES)
    }

    /// Blocks a writer until one more folio of `inode` may be dirty without a slot. The caller
    /// holds no folio lock.
    ///
    /// # Errors
    /// The swap accepts nothing, or nothing in time; or all folios that might be evicted are
    /// pinned.
    pub(crate) fn wait_for_swap(&self, inode: &Inode, bytes: Range<u64>) -> Result<()> {
        blocking::check("the swap to write dirty pages");
        let Some(swap) = &self.swap else { return Ok(()) };
        let pages = 1 << inode.mapping.order();
        let since = Some(Instant::now());
        let mut wait = MemoryWait::new(self, pages * PAGE_BYTES);
        wait.goal = Goal::Swapped { inode, bytes, taken: swap.answers().taken };
        wait.may_swap = true;
        wait_in_rounds(&mut wait, |wait| {
            if self.may_be_unswapped(pages) {
                return Ok(ControlFlow::Break(()));
            }
            Ok(ControlFlow::Continue(self.find_unswapped(wait)))
        })?;
        self.memory.note_stall(since);
        Ok(())
    }

    /// Queues folios of memory files for the swapper. While the swap is slow, few clean folios are
    /// evicted for that: it does not help here.
    fn find_unswapped(&self, wait: &MemoryWait<'_>) -> ScanCounts {
        let reclaim_lock = self.lock();
        if (wait.sweeps.futile + 1).is_multiple_of(SWEEPS_WITH_SWAPPER) {
            return self.sweep(&reclaim_lock);
        }
        let wanted_pages = if self.swapper.is_late() { 1 } else { super::ROUND_PAGES };
        self.shrink(&reclaim_lock, wanted_pages, WriteOut::MemoryFiles)
    }

    pub(super) fn may_be_unswapped(&self, pages: u64) -> bool {
        let max_pages = self.memory.unswapped_pages_max().max(pages);
        self.memory.unswapped_pages.load(Ordering::Relaxed) + pages <= max_pages
    }

    /// Runs rounds until the thread must end; what is queued then returns to its lists.
    fn run_swapper(&self, swap: &Swap) {
        let _serving = blocking::serve();
        while let Some(chosen) = self.swapper.next_round() {
            self.run_round(swap, chosen);
        }
        let mut queue = self.swapper.queue.lock();
        queue.is_served = false;
        let left = std::mem::take(&mut queue.folios);
        drop(queue);
        let left = left.into_iter().map(|id| self.memory.folios.adopt(id));
        let memory = &self.memory;
        memory.lru.put_back(&memory.folios, &mut left.collect(), None);
    }

    /// Returns the error of a device or the swap that refuses writes, if any.
    pub(super) fn trouble(&self) -> Option<Error> {
        let refused_by_swap = || self.swap.as_ref()?.answers().last_refusal;
        self.flusher.trouble().or_else(refused_by_swap)
    }

    /// Runs a round on the calling thread, which waits for the swap anyway, if folios are queued
    /// and no round is in progress. The caller has no transfer in flight and does not hold the
    /// reclaim lock.
    pub(super) fn help_swapper(&self) {
        let Some(swap) = &self.swap else { return };
        let chosen = self.swapper.queue.lock().begin_round();
        if let Some(chosen) = chosen {
            self.run_round(swap, chosen);
        }
    }

    fn run_round(&self, swap: &Swap, chosen: Vec<FolioId>) {
        // One round at a time, with no transfer in flight.
        swap.set_storage_aside();
        let before = swap.answers();
        let pages = self.swap_round(chosen);
        let after = swap.answers();
        let (has_taken, has_refused) = (after.taken > before.taken, after.refused > before.refused);
        self.swapper.end_round(pages, has_taken, has_refused);
        self.flusher.note_freed();
    }

    /// Does P3 to P5. Returns the number of pages.
    fn swap_round(&self, chosen: Vec<FolioId>) -> u64 {
        let memory = &*self.memory;
        let mut pages = 0;
        let mut owned = Vec::new();
        {
            let reclaim_lock = self.lock();
            for id in chosen {
                let folio = memory.folios.adopt(id);
                pages += folio.folio().pages();
                // A folio without an owner was truncated: its last reference is put here.
                let inode = reclaim_lock.owner_of_isolated(folio.folio()).and_then(Inode::keep);
                owned.extend(inode.map(|inode| (inode, folio)));
            }
        }
        if let Some(mapped) = &self.mapped {
            mapped.swap_out(self, &mut owned);
        }
        // P4: one batch for each file, one after the other. The swap records errors.
        owned.sort_by_key(|(inode, _)| inode.address);
        for of_file in owned.chunk_by(|one, other| one.0.address == other.0.address) {
            let folios = of_file.iter().filter_map(|(_, folio)| folio.try_clone()).collect();
            drop(Writeback::of(&of_file[0].0).write_out_folios(folios));
        }
        if !owned.is_empty() {
            self.evict_swapped(owned.into_iter().map(|(_, folio)| folio).collect());
        }
        pages
    }

    /// Does P5 for folios of the arena.
    fn evict_swapped(&self, folios: Vec<FolioRef<'_>>) {
        let memory = &self.memory;
        let reclaim_lock = self.lock();
        let (mut kept, mut evicted) = (Vec::new(), EvictedBatch::default());
        for folio in folios {
            let (_, folio) = self.evict(&reclaim_lock, folio, false, &mut evicted);
            kept.extend(folio);
        }
        memory.lru.put_back(&memory.folios, &mut kept, None);
        evicted.free(self, &reclaim_lock, &mut ScanCounts::default());
    }
}

impl ReclaimThread {
    /// Starts the swapper's thread, if there is a swap. It runs while any file is open.
    pub(crate) fn swapper(reclaim: &Arc<Reclaim>) -> Result<Option<Self>> {
        let Some(swap) = reclaim.swap.clone() else { return Ok(None) };
        reclaim.swapper.queue.lock().is_served = true;
        let end = |reclaim: &Reclaim| {
            reclaim.swapper.queue.lock().is_ending = true;
            reclaim.swapper.called.notify_all();
        };
        Self::start("bifolio-swap", reclaim, move |shared| shared.run_swapper(&swap), end).map(Some)
    }
}

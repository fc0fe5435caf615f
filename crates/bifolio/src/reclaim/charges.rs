//! Charges for memory other than frames: table pages, swap slots, and the share of pages that
//! cannot be evicted.
//!
//! Charging evicts folios if necessary. The thread that frees memory in a round charges it while it
//! still holds the reclaim lock.

use super::retry_budget::RetryBudget;
use super::scan::{ScanCounts, WriteOut};
use super::{ROUND_PAGES, Reclaim};
use crate::error::Result;
use crate::memory::{FrameKind, Unlisted};
use crate::page::{PAGE_BYTES, TABLE_PAGE_BYTES};
use crate::stats::Counter;
use crate::swap::{GROUP_BYTES, GROUP_SLOTS};
use crate::sync::{Ordering, blocking};
use crate::writeback::Inode;
use std::sync::Arc;
use std::time::Instant;

/// Part of the bound that metadata may use before unused table pages are freed. They are kept until
/// then because the shadows in them are useful.
const METADATA_DIVISOR: u64 = 8;
/// Part of the bound that metadata of memory files may use.
const KEPT_DIVISOR: u64 = 2;
/// Part of the bound that memory files with a swap cannot use, so that swapped pages can be read.
const READS_DIVISOR: u64 = 8;

impl Reclaim {
    /// Charges like [`Self::charge_table`] but evicts nothing. Returns `true` if the page is
    /// charged.
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

    /// Charges metadata, and evicts folios if necessary.
    pub(crate) fn charge(&self, bytes: u64) -> Result<()> {
        self.make_room_until(|| self.arena().charge(bytes))
    }

    /// Charges the table page of `index` before it is touched, and evicts folios if necessary.
    ///
    /// # Errors
    /// No memory; for a memory file, also if the metadata of memory files has used its part of the
    /// bound.
    pub(crate) fn charge_table(&self, inode: &Arc<Inode>, index: u64) -> Result<()> {
        if inode.store.keeps_values() && !inode.mapping.table().is_charged(index) {
            self.check_kept(TABLE_PAGE_BYTES)?;
        }
        self.make_room_until(|| self.try_charge_table(inode, index))
    }

    /// Charges the slots of a new folio of a memory file before it is created, so that swapping a
    /// page out allocates no memory. Evicts folios if necessary. Refuses the folio if, with the
    /// swap full, its pages would use the memory that reads of swapped pages need.
    pub(crate) fn charge_slots(&self, kind: FrameKind) -> Result<()> {
        let Some(swap) = &self.swap else { return Ok(()) };
        let pages = kind.pages();
        let bound_pages = self.arena().bound_pages();
        let memory_pages = bound_pages - bound_pages / READS_DIVISOR;
        if swap.pages() + pages > u64::from(swap.capacity_slots_max()) + memory_pages {
            let unwritten_pages = self.memory.unswapped_pages.load(Ordering::Relaxed);
            let counts = ScanCounts { unwritten_pages, ..ScanCounts::default() };
            return Err(self.full(counts, pages * PAGE_BYTES));
        }
        self.keep_room_for_reads(kind)?;
        while swap.is_short_for(pages) {
            self.check_kept(GROUP_BYTES)?;
            self.charge(GROUP_BYTES)?;
            if !swap.grow() {
                self.arena().uncharge(GROUP_BYTES);
            }
        }
        Ok(())
    }

    /// Refuses metadata of memory files beyond their part of the bound: eviction does not free it,
    /// and other files need tables, too.
    fn check_kept(&self, more_bytes: u64) -> Result<()> {
        let kept_bytes = || {
            let slots = self.swap.as_ref().map_or(0, |swap| u64::from(swap.capacity_slots()));
            let slots_bytes = slots / u64::from(GROUP_SLOTS) * GROUP_BYTES;
            self.memory.tables.kept_pages() * TABLE_PAGE_BYTES + slots_bytes
        };
        let max_bytes = self.arena().usage().bound_bytes / KEPT_DIVISOR;
        while kept_bytes() + more_bytes > max_bytes {
            if !self.give_tables_back() {
                return Err(self.full(ScanCounts::default(), more_bytes));
            }
        }
        Ok(())
    }

    /// Counts a new folio of `inode` as unlisted if only its file can free its pages, because it
    /// has no swap. Returns `None` for all other files.
    ///
    /// # Errors
    /// Such pages would use the memory that other files need.
    pub(crate) fn count_unlisted(&self, inode: &Inode) -> Result<Option<Unlisted<'_>>> {
        if inode.is_evictable() {
            return Ok(None);
        }
        let pages = 1 << inode.mapping.order();
        // The smallest caches may have one folio, however large.
        let pages_max = self.memory.unswapped_pages_max().max(pages);
        let counted = self.memory.lru.try_count_unlisted(pages, pages_max);
        let full = || self.full(ScanCounts::default(), pages * PAGE_BYTES);
        counted.ok_or_else(full).map(Some)
    }

    /// Keeps a few frames free for reads of swapped pages when new pages of a memory file are
    /// created. A page that is read back is clean and can be evicted for the next one, so swapped
    /// pages can be read even if no more can be swapped out because the device is full or fails.
    ///
    /// (A write to a page that was read back frees its slot, which then has storage for another
    /// page.)
    fn keep_room_for_reads(&self, kind: FrameKind) -> Result<()> {
        let (arena, pages) = (self.arena(), kind.pages());
        // More than overwrites keep free: a write to a swapped page frees a slot.
        let kept_pages = (self.low_pages() / 2)
            .max(2 * self.memory.other_files_pages_min())
            .max(pages)
            .min(arena.bound_pages() / READS_DIVISOR);
        let kept_pages = kept_pages / pages * pages;
        if arena.has_room_for(kind, kept_pages + pages) {
            return Ok(());
        }
        let since = Some(Instant::now());
        let mut retry_budget = RetryBudget::new(self, pages * PAGE_BYTES);
        retry_budget.may_swap = true;
        while !arena.has_room_for(kind, kept_pages + pages) {
            let counts = self.free_a_round(kind, &retry_budget);
            let counts = retry_budget.note_round(counts, pages);
            self.decide(counts, &mut retry_budget)?;
        }
        self.memory.note_stall(since);
        Ok(())
    }

    /// Evicts folios in the order of the lists or else any, and converts free memory to frames of
    /// this kind.
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
            // The free pages may be scattered, in chunks that are cut for other folios.
            counts.reclaimed_pages = self.evacuate_for(&reclaim_lock, kind).reclaimed_pages;
        }
        if counts.reclaimed_pages == 0 && self.give_tables_back() {
            counts.reclaimed_pages = 1;
        }
        counts
    }

    /// Frees memory until `charge` succeeds.
    fn make_room_until(&self, charge: impl Fn() -> bool) -> Result<()> {
        if charge() {
            return Ok(());
        }
        blocking::check("room for metadata");
        let mut retry_budget = RetryBudget::new(self, PAGE_BYTES);
        loop {
            let usage = self.arena().usage();
            let metadata_bytes = usage.used_bytes - usage.frame_bytes;
            if metadata_bytes > usage.bound_bytes / METADATA_DIVISOR
                && self.give_tables_back()
                && charge()
            {
                return Ok(());
            }
            let counts = {
                let reclaim_lock = self.lock();
                let counts = self.give_memory_back(&reclaim_lock, 1, &retry_budget);
                // Under the reclaim lock, so that the thread that freed the memory gets it first.
                if charge() {
                    return Ok(());
                }
                counts
            };
            let counts = retry_budget.note_round(counts, 1);
            self.decide(counts, &mut retry_budget)?;
        }
    }

    /// Frees table pages that hold no folio and no slot. Returns `true` if there were any.
    pub(super) fn give_tables_back(&self) -> bool {
        let given = self.memory.tables.give_back(ROUND_PAGES);
        self.arena().uncharge(given * TABLE_PAGE_BYTES);
        given > 0
    }
}

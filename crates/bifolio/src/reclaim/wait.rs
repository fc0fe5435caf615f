//! Waits for memory: of an allocation that found no frames, of a charge for a table page or swap
//! slots, and of a lower bound.
//!
//! Each round runs under the reclaim lock; the thread that frees memory takes or charges it before
//! it releases the lock.
//!
//! All these waits, and that of a writer for the swap (`swapper.rs`), run rounds that free
//! something, for this thread or others, in the loop of `sync/round_wait.rs`; a [`MemoryWait`] says
//! what counts as progress, what as a refusal, and how long to go on without.

use super::memory_wait::MemoryWait;
use super::outcome::{ScanCounts, WriteOut};
use super::{IS_HASTY, ROUND_PAGES, Reclaim, ReclaimLock};
use crate::error::{Error, Result, Usage};
use crate::inode::Inode;
use crate::memory::FrameKind;
use crate::page::{Entry, FolioId, PAGE_BYTES, TABLE_PAGE_BYTES};
use crate::stats::Counter;
use crate::store::{GROUP_BYTES, GROUP_SLOTS, Swap};
use crate::sync::{Ordering, WaitBudget, blocking, wait_in_rounds};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

/// Part of the bound that metadata may use before unused table pages are freed. They are kept until
/// then because the shadows in them are useful.
const METADATA_DIVISOR: u64 = 8;
/// Pages that are lent at once for metadata, if no chunk can be emptied.
const LENT_PAGES: u64 = 8;
/// Part of the bound that metadata of memory files may use.
const KEPT_DIVISOR: u64 = 2;
/// Part of the bound that memory files with a swap cannot use, so that swapped pages can be read.
const READS_DIVISOR: u64 = 8;
/// Part of the time that a call may wait after which a change of the bound gives up if it does not
/// get on: the calls that wait for it have time left.
const REBOUND_DIVISOR: u32 = 4;

impl Reclaim {
    /// Waits for frames, with the reclaim lock in each round. A call for a memory file (`may_swap`)
    /// runs rounds of the swapper itself.
    #[cold]
    pub(super) fn wait_for_frames(&self, kind: FrameKind, may_swap: bool) -> Result<FolioId> {
        let since = Some(Instant::now());
        let mut wait = MemoryWait::new(self, kind.pages() * PAGE_BYTES);
        wait.may_swap = may_swap;
        let id = wait_in_rounds(&mut wait, |wait| {
            self.memory.soundness.check()?;
            self.reclaim_for(kind, wait)
        })?;
        self.memory.note_stall(since);
        Ok(id)
    }

    /// Runs one round for an allocation that found no frames, and tries it again at each step,
    /// under the reclaim lock: the thread that freed frames gets them first.
    fn reclaim_for(
        &self,
        kind: FrameKind,
        wait: &mut MemoryWait<'_>,
    ) -> Result<ControlFlow<FolioId, ScanCounts>> {
        let reclaim_lock = self.lock();
        // Another thread may have freed enough while this one waited for the reclaim lock.
        if let Some(found) = self.take_frames(kind)? {
            return Ok(ControlFlow::Break(found));
        }
        let mut counts = ScanCounts::default();
        let kept_bytes = 2 * self.low_pages() * PAGE_BYTES;
        let free_bytes = self.arena().usage().free_pages * PAGE_BYTES;
        // A chunk is free, all its pages together, beyond what is kept free ahead of need.
        if free_bytes >= kept_bytes + self.arena().chunk_bytes() {
            // Frames of other sizes are free: they serve before anything is evicted.
            counts = self.evacuate_for(&reclaim_lock, kind);
        }
        if counts.reclaimed_pages == 0 {
            let wanted_pages = ROUND_PAGES.max(kind.pages());
            counts = self.shrink(&reclaim_lock, wanted_pages, WriteOut::MemoryFiles);
        }
        if counts.reclaimed_pages > 0 {
            if let Some(found) = self.take_frames(kind)? {
                return Ok(ControlFlow::Break(found));
            }
            // Folios of other sizes were evicted: empty a chunk of those.
            counts.add(&self.evacuate_for(&reclaim_lock, kind));
        } else if !self.awaits_swapper(wait) {
            counts = self.sweep(&reclaim_lock);
            // The sweep has already counted the rest of the chunk, except for folios that are being
            // created: those are on no list yet.
            let evacuated = self.evacuate_for(&reclaim_lock, kind);
            counts.reclaimed_pages += evacuated.reclaimed_pages;
            counts.busy_pages = counts.busy_pages.max(evacuated.busy_pages);
        }
        let counts = self.or_give_tables_back(counts);
        Ok(match self.take_frames(kind)? {
            Some(found) => ControlFlow::Break(found),
            None => ControlFlow::Continue(wait.note_round(counts, kind.pages())),
        })
    }

    /// Returns a chunk to the kernel, of `chunks` if it has enough, or, if pins keep every chunk in
    /// use, free slots of `pages_max` pages.
    pub(super) fn give_memory_back(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        pages_max: u64,
        chunks: &mut Vec<usize>,
        wait: &MemoryWait<'_>,
    ) -> ScanCounts {
        debug_assert!(pages_max > 0, "no memory is wanted");
        let evacuated = self.vacate_next_of(reclaim_lock, chunks);
        if evacuated.reclaimed_pages > 0 {
            return evacuated;
        }
        let mut counts = ScanCounts::default();
        if self.arena().usage().free_pages == 0 {
            counts = self.shrink(reclaim_lock, ROUND_PAGES, WriteOut::MemoryFiles);
            if counts.reclaimed_pages == 0 && !self.awaits_swapper(wait) {
                counts = self.sweep(reclaim_lock);
            }
        }
        // Region pages are returned as they are evicted; other threads may have taken them already.
        counts.reclaimed_pages = counts.reclaimed_pages.max(self.arena().lend(pages_max));
        self.or_give_tables_back(counts)
    }

    /// Sets the bound, after freeing memory if it shrinks. On failure the old bound is kept. What
    /// is used already fits in the shares of the new bound before it counts.
    pub(crate) fn set_bound(&self, bound_bytes: u64) -> Result<()> {
        let _alone = self.setting_bound.lock();
        let before_bytes = self.arena().bound_bytes();
        let descriptor_bytes = self.arena().descriptor_bytes();
        if bound_bytes < before_bytes.min(descriptor_bytes) {
            return Err(Error::below_descriptors(bound_bytes, descriptor_bytes));
        }
        let is_lower = bound_bytes < before_bytes;
        if is_lower {
            self.check_reserved(bound_bytes)?;
        }
        // Before `rebounding` is held: allocations wait for that.
        let lowered = if is_lower { self.flusher.lower_bound(bound_bytes) } else { Ok(()) };
        let changed = lowered.and_then(|()| self.change_bound(before_bytes, bound_bytes));
        self.flusher.set_bound(if changed.is_ok() { bound_bytes } else { before_bytes });
        changed
    }

    /// Sets the bound, and frees memory until what is used fits; sets the former one otherwise.
    /// Allocations that fail meanwhile try again.
    fn change_bound(&self, before_bytes: u64, bound_bytes: u64) -> Result<()> {
        let mut wait = MemoryWait::new(self, PAGE_BYTES);
        wait.budget = WaitBudget::of_call(self.wait_max / REBOUND_DIVISOR);
        wait.standing = Some(self.rebounding.lock());
        self.arena().set_bound(bound_bytes);
        let changed = self.fit_in_bound(&mut wait);
        let changed = changed.map_err(|error| error.of_bound(bound_bytes));
        if changed.is_err() {
            self.arena().set_bound(before_bytes);
        }
        // Release: pairs with the Acquire in `MemoryWait::new`: an allocation that sees this
        // increment also sees the current bound; one that does not learns in `was_rebound` that the
        // bound has changed.
        self.rebounds.fetch_add(1, Ordering::Release);
        changed
    }

    /// Frees memory until what is used fits in a bound that has just changed, and memory files
    /// leave their share to other files.
    fn fit_in_bound(&self, wait: &mut MemoryWait<'_>) -> Result<()> {
        self.check_kept(0)?;
        let memory = &self.memory;
        let excess_of = |pages: u64| pages.saturating_sub(memory.unswapped_pages_max());
        if excess_of(memory.lru.unlisted_pages()) > 0 {
            return Err(self.full(ScanCounts::default(), PAGE_BYTES));
        }
        let mut chunks = Vec::new();
        wait_in_rounds(wait, |wait| {
            let unswapped_pages = memory.unswapped_pages.load(Ordering::Relaxed);
            let used_pages = self.arena().excess_bytes().div_ceil(PAGE_BYTES);
            let excess_pages = used_pages.max(excess_of(unswapped_pages));
            if excess_pages == 0 {
                return Ok(ControlFlow::Break(()));
            }
            wait.budget.note_left(excess_pages);
            let mut counts = self.give_memory_back(&self.lock(), excess_pages, &mut chunks, wait);
            if counts.reclaimed_pages == 0 && !self.may_fit(counts.pinned_pages) {
                // Pages that are busy, as of a device that hangs, make no difference.
                counts.busy_pages = 0;
            }
            Ok(ControlFlow::Continue(counts))
        })
    }

    /// Returns `true` if the bound allows `pinned_pages` besides the descriptors and what is
    /// reserved.
    fn may_fit(&self, pinned_pages: u64) -> bool {
        let reserved_bytes = self.memory.reserved_bytes.load(Ordering::Relaxed);
        let fixed_bytes = self.arena().descriptor_bytes() + pinned_pages * PAGE_BYTES;
        fixed_bytes + reserved_bytes <= self.arena().bound_bytes()
    }

    /// Returns the error of a call that found no memory: what the pages of the bound are used for,
    /// and the cause why some cannot be written.
    #[cold]
    pub(super) fn full(&self, counts: ScanCounts, wanted_bytes: u64) -> Error {
        if !IS_HASTY.get() {
            self.memory.counters.add(Counter::AllocationFailure, 1);
        }
        let usage = self.arena().usage();
        let gate = self.flusher.held_back();
        let of_gate = || Some(gate.as_ref()?.to_io_error(std::io::ErrorKind::WouldBlock));
        let cause = (counts.unwritten_pages > 0).then(|| self.trouble()).flatten();
        let used = Usage {
            bound: usage.bound_bytes,
            pinned: counts.pinned_pages * PAGE_BYTES,
            unwritten: counts.unwritten_pages * PAGE_BYTES,
            unswappable: self.memory.lru.unlisted_pages() * PAGE_BYTES,
            busy: counts.busy_pages * PAGE_BYTES,
            metadata: self.memory.metadata_bytes(&usage),
            reserved: self.memory.reserved_bytes.load(Ordering::Relaxed),
            wanted: wanted_bytes,
            free: usage.free_pages * PAGE_BYTES
                + usage.bound_bytes.saturating_sub(usage.used_bytes),
            gated: gate.as_ref().map_or(0, |gate| gate.held_bytes),
        };
        let refused = self.memory.unmap_refusal.lock().clone();
        Error::full(&used, cause.or_else(of_gate), refused)
    }

    pub(crate) fn charge(&self, bytes: u64) -> Result<()> {
        self.make_room_until(|| self.arena().charge(bytes))
    }

    /// Charges the table page of `index` before it is touched, and evicts folios if necessary.
    ///
    /// # Errors
    /// No memory; for a memory file, also if the metadata of memory files has used its part of the
    /// bound.
    pub(crate) fn charge_table(&self, inode: &Arc<Inode>, index: u64) -> Result<()> {
        let table = inode.mapping.table();
        let kept_pages = table.kept_among(u64::from(!table.is_charged(index)));
        if kept_pages > 0 {
            self.check_kept(kept_pages * TABLE_PAGE_BYTES)?;
        }
        self.make_room_until(|| self.try_charge_table(inode, index))
    }

    /// Charges the memory that a new page with Entry `seen` needs besides frames: for its table
    /// and, if it is new in a memory file, for slots of the swap.
    ///
    /// # Errors
    /// As [`Self::charge_table`]; the swap accepts nothing.
    pub(crate) fn charge_page(
        &self,
        inode: &Arc<Inode>,
        index: u64,
        seen: Entry,
        kind: FrameKind,
    ) -> Result<()> {
        self.charge_table(inode, index)?;
        if !inode.store.reserves_slots(seen) {
            return Ok(());
        }
        self.charge_slots(kind).map_err(|full| {
            let swap =
                self.swap.iter().find(|it| self.swapper.is_in_trouble() && it.has_free_slots());
            let cause = swap.and_then(|swap| swap.answers().last_refusal);
            let Some(cause) = cause else { return full };
            let start = inode.mapping.head_index(index) * PAGE_BYTES;
            inode.unwritable(start..start + inode.mapping.folio_bytes(), Some(cause))
        })
    }

    /// Charges the slots of a new folio of a memory file, so that swapping a page out allocates no
    /// memory. Refuses the folio if, with the swap full, its pages would use the memory that reads
    /// of swapped pages need.
    fn charge_slots(&self, kind: FrameKind) -> Result<()> {
        let Some(swap) = &self.swap else { return Ok(()) };
        let pages = kind.pages();
        let bound_pages = self.arena().bound_pages();
        let memory_pages =
            self.arena().folio_pages_max().saturating_sub(bound_pages / READS_DIVISOR);
        if swap.pages() + pages > u64::from(swap.slots.capacity_max()) + memory_pages {
            let unwritten_pages = self.memory.unswapped_pages.load(Ordering::Relaxed);
            let counts = ScanCounts { unwritten_pages, ..ScanCounts::default() };
            return Err(self.full(counts, pages * PAGE_BYTES));
        }
        self.keep_room_for_reads(swap, kind)?;
        while swap.is_short_for(pages) {
            self.check_kept(GROUP_BYTES)?;
            self.charge(GROUP_BYTES)?;
            if !swap.slots.grow() {
                self.arena().uncharge(GROUP_BYTES);
            }
        }
        Ok(())
    }

    /// Refuses metadata of memory files beyond their part of the bound: eviction does not free it,
    /// and other files need tables, too.
    pub(super) fn check_kept(&self, more_bytes: u64) -> Result<()> {
        let kept_bytes = || {
            let slots = self.swap.as_ref().map_or(0, |swap| u64::from(swap.slots.capacity()));
            let slots_bytes = slots / u64::from(GROUP_SLOTS) * GROUP_BYTES;
            self.memory.tables.kept_pages() * TABLE_PAGE_BYTES + slots_bytes
        };
        let max_bytes = self.arena().bound_bytes() / KEPT_DIVISOR;
        while kept_bytes() + more_bytes > max_bytes {
            if !self.give_tables_back() {
                return Err(self.full(ScanCounts::default(), more_bytes));
            }
        }
        Ok(())
    }

    /// Keeps a few frames free when new pages of a memory file are created, so that swapped pages
    /// can be read even if no more can be swapped out: a page that is read back is clean.
    fn keep_room_for_reads(&self, swap: &Swap, kind: FrameKind) -> Result<()> {
        let (arena, pages) = (self.arena(), kind.pages());
        // More than overwrites keep free: a write to a swapped page frees a slot.
        let kept_pages = (self.low_pages() / 2)
            .max(2 * self.memory.other_files_pages_min())
            .max(pages)
            .min(arena.bound_pages() / READS_DIVISOR);
        let kept_pages = kept_pages / pages * pages;
        // Overwrites may make pages dirty that have a copy in the swap, up to the limit.
        let least_pages = self.memory.other_files_pages_min() + pages;
        let has_frames = || arena.has_room_for(kind, kept_pages + pages);
        let has_room = || has_frames() && self.may_be_unswapped(least_pages);
        if has_room() {
            return Ok(());
        }
        let since = Some(Instant::now());
        let mut wait = MemoryWait::new(self, pages * PAGE_BYTES);
        wait.may_swap = true;
        wait_in_rounds(&mut wait, |wait| {
            if has_room() {
                return Ok(ControlFlow::Break(()));
            }
            let counts = self.free_a_round(kind, wait);
            let is_pinned = self.is_reserve_pinned(swap, &counts, pages);
            if is_pinned && has_frames() && self.may_be_unswapped(pages) {
                return Ok(ControlFlow::Break(()));
            }
            Ok(ControlFlow::Continue(wait.note_round(counts, pages)))
        })?;
        self.memory.note_stall(since);
        Ok(())
    }

    /// Returns `true` if pinned pages alone have used up what is kept for overwrites, as the round
    /// with the result `counts` shows: it left nothing to swap out, although the swap accepts pages
    /// and has a slot for each, with `pages` more. Refusing those would help no overwrite.
    fn is_reserve_pinned(&self, swap: &Swap, counts: &ScanCounts, pages: u64) -> bool {
        let swappable_pages = counts.unswapped_pages + counts.swapping_pages + self.swapper.pages();
        let is_useless = counts.reclaimed_pages + swappable_pages == 0;
        let capacity_max = u64::from(swap.slots.capacity_max());
        is_useless && !self.swapper.is_in_trouble() && swap.pages() + pages <= capacity_max
    }

    /// Evicts folios in the order of the lists or else any, or empties a chunk for this kind.
    fn free_a_round(&self, kind: FrameKind, wait: &MemoryWait<'_>) -> ScanCounts {
        let reclaim_lock = self.lock();
        let counts =
            self.shrink(&reclaim_lock, ROUND_PAGES.max(kind.pages()), WriteOut::MemoryFiles);
        if counts.reclaimed_pages > 0 || self.awaits_swapper(wait) {
            return counts;
        }
        let mut counts = self.sweep(&reclaim_lock);
        if counts.reclaimed_pages == 0 {
            // The free pages may be scattered, in chunks that are cut for other folios.
            counts.reclaimed_pages = self.evacuate_for(&reclaim_lock, kind).reclaimed_pages;
        }
        self.or_give_tables_back(counts)
    }

    /// Frees memory until `charge` succeeds.
    fn make_room_until(&self, charge: impl Fn() -> bool) -> Result<()> {
        if charge() {
            return Ok(());
        }
        blocking::check("room for metadata");
        let mut chunks = Vec::new();
        wait_in_rounds(&mut MemoryWait::new(self, PAGE_BYTES), |wait| {
            let usage = self.arena().usage();
            let metadata_bytes = self.memory.metadata_bytes(&usage);
            if metadata_bytes > usage.bound_bytes / METADATA_DIVISOR
                && self.give_tables_back()
                && charge()
            {
                return Ok(ControlFlow::Break(()));
            }
            let reclaim_lock = self.lock();
            let counts = self.give_memory_back(&reclaim_lock, LENT_PAGES, &mut chunks, wait);
            // Under the reclaim lock, so that the thread that freed the memory gets it first.
            if charge() {
                return Ok(ControlFlow::Break(()));
            }
            Ok(ControlFlow::Continue(wait.note_round(counts, 1)))
        })
    }

    /// Adds a page to `counts`, without which none is free, if there are table pages to free.
    fn or_give_tables_back(&self, counts: ScanCounts) -> ScanCounts {
        let is_given = counts.reclaimed_pages == 0 && self.give_tables_back();
        ScanCounts { reclaimed_pages: counts.reclaimed_pages + u64::from(is_given), ..counts }
    }

    /// Frees table pages that hold no folio and no slot. Returns `true` if there were any.
    pub(super) fn give_tables_back(&self) -> bool {
        let given = self.memory.tables.give_back(ROUND_PAGES);
        self.arena().uncharge(given * TABLE_PAGE_BYTES);
        given > 0
    }
}

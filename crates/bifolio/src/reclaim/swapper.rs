//! The swapper: pages of memory files on their way to the swap, and the thread that writes them.
//!
//! The holder of the reclaim lock chooses folios and leaves them here; they are written without it,
//! by a thread that nobody else waits for, or by one that wants memory for a memory file. So a swap
//! that does not answer holds up those, and whoever wants memory that nothing else can give him,
//! and no other file.
//!
//! ```text
//!  THE HOLDER OF THE RECLAIM LOCK               THE SWAPPER'S THREAD
//!  P1 isolate a folio that is to be swapped     P3 take the line; with the reclaim lock: whose is
//!     out (scan.rs, evacuate.rs)                   each? keep their files alive; let go of the
//!  P2 into the line, with its reference, if        reclaim lock
//!     there is room; call the thread
//!                                               P4 write out, file by file (of a region: B1 to B9
//!                                                  of `unmap.rs`, with a bounce buffer of its own)
//!                                               P5 with the reclaim lock: evict what is clean; the
//!                                                  others go back to their list; clear extents;
//!                                                  wake whoever waits
//! ```
//!
//! A folio is in the line, or taken, once: it is on no list then (LRU-1). Its reference keeps its
//! frames, and not its file: that may be closed meanwhile, and the folio is without an owner at P3.
//! A file that P3 has found is kept while it is written.
//!
//! COMING. What is in the line and what the thread has taken will be free soon: who needs as much
//! waits for it, instead of looking for more. Unless the swap is *slow*: a round that takes longer
//! than [`SLOW`] counts for nothing, as one after a round in vain; what is clean goes, wherever it
//! is.
//!
//! TROUBLE, as a device has it (`writeback/device.rs`): a round in which the swap took nothing and
//! refused something. Whoever finds nothing but what is to be swapped out fails after some rounds,
//! the last of them in vain, that began after he came: then the swap was asked on his behalf.

use super::retry_budget::{RetryBudget, SWEEP_PAUSE};
use super::scan::{EvictOutcome, ScanControl, ScanCounts, WriteOut, is_pinned};
use super::unmap::{Owners, Unmapping};
use super::{Reclaim, ReclaimLock};
use crate::error::{ErrorKind, Result};
use crate::io::IoError;
use crate::memory::{ListKind, Regions, RegionsSize};
use crate::page::{FolioId, FolioRef, PAGE_BYTES};
use crate::stats::Counter;
use crate::swap::Swap;
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering, blocking};
use crate::sys::process::OwnedThread;
use crate::writeback::{Cleaner, Inode};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages that leave together, if there are so many: a transfer of 1 MiB.
pub(super) const SWAP_PAGES: u64 = 256;
/// The most pages in the line: while one transfer is on its way, the next are chosen. In a small
/// cache a part of the bound.
const LINE_PAGES_MAX: u64 = 2 * SWAP_PAGES;
const LINE_PART_OF_BOUND: u64 = 4;
/// Every so many of them look for more, though enough is on its way to the swap: that may be of
/// the wrong size.
const SWEEPS_WITH_SWAPPER: u32 = 8;
/// Rounds that are in vain before a writer is told: what one cannot write another may.
pub(super) const ROUNDS_MAX: u64 = super::SWEEPS_MAX as u64;
/// How long a round is waited for by those who might find something else.
const SLOW: Duration = Duration::from_millis(50);

/// See the head of the file.
#[derive(Debug, Default)]
pub(super) struct Swapper {
    line: Mutex<Line>,
    called: Condvar,
    /// Pages in the line, and those that were taken.
    pages: AtomicU64,
}

#[derive(Debug, Default)]
struct Line {
    /// Isolated folios, each with its reference.
    folios: Vec<FolioId>,
    pages: u64,
    /// When the round began that is under way.
    since: Option<Instant>,
    /// Rounds that have begun, and the last one if it was in vain.
    rounds: u64,
    trouble: Option<u64>,
    /// There is somebody to take what is in the line.
    is_served: bool,
    is_ending: bool,
}

impl Swapper {
    /// Pages that will be free soon; none while the swap is slow, or in trouble.
    pub(super) fn coming_pages(&self) -> u64 {
        let pages = self.pages();
        if pages == 0 || self.line.lock().is_late() { 0 } else { pages }
    }

    /// Whether those who could do something else do not wait for the swap: it is slow, or takes
    /// nothing.
    pub(super) fn is_late(&self) -> bool {
        self.line.lock().is_late()
    }

    /// Pages in the line, and those that were taken.
    pub(super) fn pages(&self) -> u64 {
        // Relaxed: a hint; what was freed is found under other locks.
        self.pages.load(Ordering::Relaxed)
    }

    /// Rounds that have begun.
    pub(super) fn rounds(&self) -> u64 {
        self.line.lock().rounds
    }

    /// Whether the last round was in vain, and is none of the first so many.
    pub(super) fn has_trouble_after(&self, round: u64) -> bool {
        self.line.lock().trouble.is_some_and(|trouble| trouble > round)
    }

    /// Whether the last round was in vain.
    pub(super) fn is_in_trouble(&self) -> bool {
        self.has_trouble_after(0)
    }

    /// P3: waits for folios, and for the round that is under way; `None` when all is to end.
    fn next_round(&self) -> Option<Vec<FolioId>> {
        let mut line = self.line.lock();
        loop {
            if line.is_ending {
                return None;
            }
            let chosen = line.begin_round();
            if chosen.is_some() {
                return chosen;
            }
            self.called.wait(&mut line);
        }
    }

    /// P5: a round has ended.
    fn end_round(&self, pages: u64, has_taken: bool, has_refused: bool) {
        let mut line = self.line.lock();
        line.since = None;
        if has_taken {
            line.trouble = None;
        } else if has_refused {
            line.trouble = Some(line.rounds);
        }
        self.pages.fetch_sub(pages, Ordering::Relaxed);
        let is_called = !line.folios.is_empty();
        drop(line);
        if is_called {
            self.called.notify_one();
        }
    }
}

impl Line {
    fn is_late(&self) -> bool {
        self.trouble.is_some() || self.since.is_some_and(|since| since.elapsed() > SLOW)
    }

    /// Takes what is there, if anything is, and nobody is at it: one round at a time.
    fn begin_round(&mut self) -> Option<Vec<FolioId>> {
        if self.folios.is_empty() || self.since.is_some() {
            return None;
        }
        self.rounds += 1;
        self.since = Some(Instant::now());
        self.pages = 0;
        Some(std::mem::take(&mut self.folios))
    }
}

impl Reclaim {
    /// P2: leaves isolated folios to the swapper. Answers those for which there is no room.
    pub(super) fn leave_to_swapper<'a>(&self, folios: Vec<FolioRef<'a>>) -> Vec<FolioRef<'a>> {
        let pages_max = self.line_pages_max();
        let mut line = self.swapper.line.lock();
        if !line.is_served || line.is_ending {
            return folios;
        }
        let mut refused = Vec::new();
        for folio in folios {
            let pages = folio.folio().pages();
            if line.pages > 0 && line.pages + pages > pages_max {
                refused.push(folio);
                continue;
            }
            line.pages += pages;
            self.swapper.pages.fetch_add(pages, Ordering::Relaxed);
            line.folios.push(folio.into_id());
        }
        drop(line);
        self.swapper.called.notify_one();
        refused
    }

    /// Whether what is on its way to the swap is waited for before more is looked for: most times.
    pub(super) fn awaits_swapper(&self, retry_budget: &RetryBudget) -> bool {
        let is_due = (retry_budget.futile_sweeps + 1).is_multiple_of(SWEEPS_WITH_SWAPPER);
        !is_due && self.swapper.coming_pages() > 0
    }

    /// The memory that regions need beside their pages, in batches of so many.
    pub(crate) fn regions_size(&self, batch: usize) -> RegionsSize {
        Regions::size_for(self.arena(), batch, self.swap.is_some())
    }

    /// Whether a folio of a region that was just isolated is for the swapper, clean or not; an
    /// error says why it stays; `None`: its file has no swap.
    pub(super) fn choose_for_swap(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        folio: &FolioRef<'_>,
        second_chance: bool,
    ) -> Option<std::result::Result<(), EvictOutcome>> {
        let inode = reclaim_lock
            .owner_of_isolated(folio)
            .filter(|inode| inode.store.cleaner() == Cleaner::Swapper)?;
        // Hints, without the lock: the swapper looks again.
        if second_chance && inode.mapping.test_and_clear_referenced(folio.folio()) {
            return Some(Err(EvictOutcome::Activate));
        }
        let index = folio.folio().index();
        let is_held = inode.page_space.is_held(index);
        Some(if is_held || is_pinned(folio) { Err(EvictOutcome::Pinned) } else { Ok(()) })
    }

    /// Whether the line has room for a transfer.
    pub(super) fn has_room_in_line(&self) -> bool {
        let pages_max = self.line_pages_max();
        self.swapper.line.lock().pages + SWAP_PAGES.min(pages_max) <= pages_max
    }

    fn line_pages_max(&self) -> u64 {
        if self.swapper.is_in_trouble() {
            // Enough to find out whether the swap takes pages again.
            return super::ROUND_PAGES;
        }
        let part = self.arena().bound_pages() / LINE_PART_OF_BOUND;
        LINE_PAGES_MAX.min(part).max(super::ROUND_PAGES)
    }

    /// Holds a writer until a folio of `inode` more may be in memory alone. The caller holds no
    /// folio lock. (Before that little is free, for most, and reclaim has called the swapper.)
    ///
    /// # Errors
    /// The swap takes nothing, or nothing in time. All that might go is pinned.
    pub(crate) fn wait_for_swap(&self, inode: &Inode, bytes: Range<u64>) -> Result<()> {
        blocking::check("less that is in memory alone");
        let Some(swap) = &self.swap else { return Ok(()) };
        let pages = 1 << inode.mapping.order();
        let since = Some(Instant::now());
        let mut retry_budget = RetryBudget::new(self, pages * PAGE_BYTES);
        let mut taken = swap.answers().taken;
        while !self.may_be_unswapped(pages) {
            let ended = self.flusher.ended();
            let counts = self.find_unswapped(&mut retry_budget);
            self.help_swapper();
            if swap.answers().taken > taken {
                // What that has made room for may be others' by now.
                taken = swap.answers().taken;
                retry_budget.note_swapped();
                retry_budget.swap_rounds = self.swapper.rounds();
                continue;
            }
            // As in `decide`; what is busy, but not with the swap, makes no room here.
            let refused = self.swapper.has_trouble_after(retry_budget.swap_rounds + ROUNDS_MAX);
            if refused || retry_budget.is_over() {
                let cause = swap.answers().last_refusal.filter(|_| self.swapper.is_in_trouble());
                return Err(inode.unwritable(bytes, cause));
            }
            let others = [counts.unswapped_pages, counts.swapping_pages, counts.busy_pages];
            if retry_budget.is_hopeless(others.iter().sum::<u64>() + self.swapper.pages() > 0) {
                if self.was_rebound(&mut retry_budget) {
                    continue;
                }
                return Err(self.full(counts, retry_budget.wanted_bytes));
            }
            self.flusher.wait_for_progress(ended, SWEEP_PAUSE);
        }
        self.memory.note_stall(since);
        Ok(())
    }

    /// Leaves folios of memory files to the swapper. What is clean makes no room for what is in
    /// memory alone, and others want it: while the swap is late, little of it goes.
    fn find_unswapped(&self, retry_budget: &mut RetryBudget) -> ScanCounts {
        retry_budget.futile_sweeps += 1;
        let reclaim_lock = self.lock();
        if retry_budget.futile_sweeps.is_multiple_of(SWEEPS_WITH_SWAPPER) {
            return self.sweep(&reclaim_lock);
        }
        let wanted_pages = if self.swapper.is_late() { 1 } else { super::ROUND_PAGES };
        self.shrink(&reclaim_lock, wanted_pages, WriteOut::MemoryFiles)
    }

    /// Why the swap takes nothing, if its storage refuses what it has slots for.
    pub(crate) fn refusal_of_swap(&self) -> Option<Arc<IoError>> {
        let swap = self.swap.as_ref().filter(|_| self.swapper.is_in_trouble())?;
        swap.answers().last_refusal.filter(|_| swap.has_free_slots())
    }

    fn may_be_unswapped(&self, pages: u64) -> bool {
        let max_pages = self.memory.unswapped_pages_max().max(pages);
        self.memory.unswapped_pages.load(Ordering::Relaxed) + pages <= max_pages
    }

    fn run_swapper(&self, swap: &Swap) {
        let _serving = blocking::serve();
        while let Some(chosen) = self.swapper.next_round() {
            self.go_on_round(swap, chosen);
        }
        let mut line = self.swapper.line.lock();
        line.is_served = false;
        let left = std::mem::take(&mut line.folios);
        drop(line);
        let left = left.into_iter().map(|id| self.memory.folios.adopt(id));
        let memory = &self.memory;
        memory.lru.put_back(&memory.folios, &mut left.collect(), ListKind::Inactive);
    }

    /// Why something cannot be written.
    pub(super) fn trouble(&self) -> Option<Arc<IoError>> {
        let refused_by_swap = || self.swap.as_ref()?.answers().last_refusal;
        self.flusher.trouble().or_else(refused_by_swap)
    }

    /// Does what the thread would do, if there is something and nobody is at it: for those who wait
    /// for the swap anyway, because their file is there. A wake-up less; where others want the
    /// processor that is most of the time. Nothing is in flight, and no reclaim_lock held.
    pub(super) fn help_swapper(&self) {
        let Some(swap) = &self.swap else { return };
        let chosen = self.swapper.line.lock().begin_round();
        if let Some(chosen) = chosen {
            self.go_on_round(swap, chosen);
        }
    }

    fn go_on_round(&self, swap: &Swap, chosen: Vec<FolioId>) {
        // One round at a time; nothing is in flight.
        swap.set_storage_aside();
        let before = swap.answers();
        let pages = self.swap_round(chosen);
        let after = swap.answers();
        let (has_taken, has_refused) = (after.taken > before.taken, after.refused > before.refused);
        self.swapper.end_round(pages, has_taken, has_refused);
        self.flusher.note_freed();
    }

    /// P3 to P5; how many pages that were.
    fn swap_round(&self, chosen: Vec<FolioId>) -> u64 {
        let memory = &*self.memory;
        let mut pages = 0;
        let (mut in_arena, mut leaving) = (Vec::new(), ByFile::default());
        let (mut in_regions, mut inodes) = (Vec::new(), Vec::new());
        {
            let reclaim_lock = self.lock();
            for id in chosen {
                let folio = memory.folios.adopt(id);
                pages += folio.folio().pages();
                // One without an owner was cut: its last reference goes here.
                let Some(inode) = reclaim_lock.keep_owner(&folio) else { continue };
                if memory.arena.is_region_page(id) {
                    in_regions.push(folio);
                    if !inodes.iter().any(|other| Arc::ptr_eq(other, &inode)) {
                        inodes.push(inode);
                    }
                } else {
                    if let Some(own) = folio.try_clone() {
                        leaving.add(inode, own);
                    }
                    in_arena.push(folio);
                }
            }
        }
        if !in_regions.is_empty() {
            let mut counts = ScanCounts::default();
            let control =
                ScanControl { second_chance: false, ..ScanControl::reclaim(WriteOut::MemoryFiles) };
            let mut unmapping = Unmapping::new(self, Owners::Kept(&inodes), control);
            in_regions.into_iter().for_each(|folio| unmapping.add(folio, &mut counts));
            unmapping.finish(&mut counts);
        }
        if !in_arena.is_empty() {
            leaving.write_out();
            self.evict_swapped(in_arena);
        }
        pages
    }

    /// P5 for folios of the arena.
    fn evict_swapped(&self, folios: Vec<FolioRef<'_>>) {
        let memory = &self.memory;
        memory.counters.add(Counter::PageOut, folios.len() as u64);
        let reclaim_lock = self.lock();
        let (mut kept, mut evicted) = (Vec::new(), Vec::new());
        for folio in folios {
            let (id, pages) = (folio.id(), folio.folio().pages());
            let (outcome, folio) = self.evict_or_keep(&reclaim_lock, folio, false);
            kept.extend(folio);
            if outcome == EvictOutcome::Evicted {
                evicted.push((id, pages));
            }
        }
        memory.lru.put_back(&memory.folios, &mut kept, ListKind::Inactive);
        self.compact(&reclaim_lock, &evicted, &mut ScanCounts::default());
    }
}

/// Folios of memory files that are about to be swapped out, by their files, which are kept
/// meanwhile.
#[derive(Debug, Default)]
pub(super) struct ByFile<'a>(Vec<(Arc<Inode>, Vec<FolioRef<'a>>)>);

impl<'a> ByFile<'a> {
    pub(super) fn add(&mut self, inode: Arc<Inode>, folio: FolioRef<'a>) {
        match self.0.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &inode)) {
            Some((_, folios)) => folios.push(folio),
            None => self.0.push((inode, vec![folio])),
        }
    }

    /// P4: one batch for each file, one after the other. Errors are noted by the swap.
    fn write_out(self) {
        for (inode, folios) in self.0 {
            drop(inode.write_out_folios(folios));
        }
    }
}

/// The running thread; dropping it ends the thread and waits for it. It stays while a file is open.
#[derive(Debug)]
pub(crate) struct SwapThread {
    reclaim: Arc<Reclaim>,
    thread: OwnedThread,
}

impl SwapThread {
    /// Starts the thread, if there is a swap.
    pub(crate) fn start(reclaim: &Arc<Reclaim>) -> Result<Option<Self>> {
        let Some(swap) = reclaim.swap.clone() else { return Ok(None) };
        reclaim.swapper.line.lock().is_served = true;
        let shared = Arc::clone(reclaim);
        let thread = OwnedThread::start("bifolio-swap", move || shared.run_swapper(&swap));
        let thread = thread.map_err(ErrorKind::Thread)?;
        Ok(Some(Self { reclaim: Arc::clone(reclaim), thread }))
    }
}

impl Drop for SwapThread {
    fn drop(&mut self) {
        if !self.thread.is_left_behind() {
            self.reclaim.swapper.line.lock().is_ending = true;
            self.reclaim.swapper.called.notify_all();
        }
    }
}

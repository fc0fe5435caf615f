//! Scans the LRU lists: chooses which folios to examine, in which order and how many. Each isolated
//! folio is evicted (`evict.rs`), put back, or queued to be written. Never waits for storage.

use super::evict::EvictedBatch;
use super::swapper::SWAP_PAGES;
use super::unmap::{Owners, Unmapping};
use super::{Reclaim, ReclaimLock};
use crate::inode::{Cleaner, Inode};
use crate::memory::{EXTENT_PAGES, ListKind, ListSizes};
use crate::page::{BATCH_SLOTS, Flag, FolioRef, PAGE_BYTES};
use crate::stats::Counter;

/// log2 of the first share of a list to scan, one 4096th; the last share is all of it.
const PRIORITY_MAX: u32 = 12;

/// Isolated folios of memory files that are to be swapped out.
#[derive(Debug, Default)]
struct Unswapped<'a> {
    folios: Vec<FolioRef<'a>>,
    pages: u64,
    /// Those of `pages` that are in regions, clean or dirty. No more of them are evicted than
    /// wanted.
    region_page_count: u64,
}

impl<'a> Unswapped<'a> {
    fn add(&mut self, folio: FolioRef<'a>) {
        self.pages += folio.folio().pages();
        self.folios.push(folio);
    }

    fn add_region_page(&mut self, folio: FolioRef<'a>) {
        self.region_page_count += folio.folio().pages();
        self.add(folio);
    }

    /// Returns the number of pages worth scanning to fill a transfer.
    fn scan_pages(&self) -> u64 {
        if self.pages == self.region_page_count { 0 } else { SWAP_PAGES }
    }
}

/// Number of pages that are isolated at once while extents are cleared: an extent of frames, which
/// is all that is evicted if folios are evicted in the order in which they were filled. Few,
/// because each may free another extent.
const STEP_PAGES: u64 = EXTENT_PAGES as u64;

/// Upper bound on the batches that are moved from FRESH to OLD before victims are chosen, so that
/// the first eviction of a cache does not move all of its pages.
const AGED_BATCHES_MAX: u64 = 32;

/// Pages that a scan may still isolate from each list, so that it examines no folio twice: those
/// that stay return to the heads.
#[derive(Clone, Copy, Debug)]
struct Unscanned {
    /// Of OLD, and of FRESH, whose folios pass through OLD.
    inactive_pages: u64,
    active_pages: u64,
}

impl Unscanned {
    fn new(sizes: ListSizes) -> Self {
        Self { inactive_pages: sizes.inactive_pages(), active_pages: sizes.active_pages }
    }

    /// Returns the list to evict from, and the number of pages to isolate from its tail at most:
    /// the excess of OLD, else pages of ACTIVE. If one list was scanned wholly, the other is
    /// scanned beyond its share.
    fn choose(&self, sizes: ListSizes, evicts_early: bool) -> Option<(ListKind, u64)> {
        let old_excess_pages = match sizes.active_pages {
            0 => sizes.old_pages,
            _ => sizes.old_excess_pages(evicts_early),
        };
        if self.inactive_pages > 0 && old_excess_pages > 0 {
            Some((ListKind::Old, old_excess_pages.min(self.inactive_pages)))
        } else if self.active_pages > 0 && sizes.active_pages > 0 {
            Some((ListKind::Active, self.active_pages))
        } else if self.inactive_pages > 0 && sizes.old_pages > 0 {
            Some((ListKind::Old, self.inactive_pages))
        } else {
            None
        }
    }

    fn note(&mut self, kind: ListKind, pages: u64) {
        let left = match kind {
            ListKind::Active => &mut self.active_pages,
            ListKind::Fresh | ListKind::Old => &mut self.inactive_pages,
        };
        *left = left.saturating_sub(pages);
    }
}

/// Options for a scan of the lists.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScanControl {
    /// `true` if recently used folios are kept.
    pub(super) second_chance: bool,
    pub(super) write_out: WriteOut,
    /// Counter of the evicted folios.
    pub(super) counter: Counter,
}

impl ScanControl {
    /// Returns the options of reclaim: recently used folios get a second chance.
    pub(super) fn reclaim(write_out: WriteOut) -> Self {
        Self { second_chance: true, write_out, counter: Counter::PgSteal }
    }
}

/// The results of a scan, in pages.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScanCounts {
    pub(super) reclaimed_pages: u64,
    /// Referenced by pins or by calls in progress.
    pub(super) pinned_pages: u64,
    /// Dirty, and the device refuses to write them, or a write gate to let them pass.
    pub(super) unwritten_pages: u64,
    /// Locked, under I/O, or queued for the flusher.
    pub(super) busy_pages: u64,
    /// Dirty, and queued for the flusher. Counted as busy, too.
    pub(super) dirty_pages: u64,
    /// Of memory files: to be swapped out, but not queued.
    pub(super) unswapped_pages: u64,
    /// Of memory files: queued for the swap.
    pub(super) swapping_pages: u64,
}

impl ScanCounts {
    pub(super) fn add(&mut self, other: &ScanCounts) {
        self.reclaimed_pages += other.reclaimed_pages;
        self.pinned_pages += other.pinned_pages;
        self.unwritten_pages += other.unwritten_pages;
        self.busy_pages += other.busy_pages;
        self.dirty_pages += other.dirty_pages;
        self.unswapped_pages += other.unswapped_pages;
        self.swapping_pages += other.swapping_pages;
    }

    pub(super) fn note(&mut self, outcome: EvictOutcome, pages: u64) {
        match outcome {
            EvictOutcome::Evicted => self.reclaimed_pages += pages,
            EvictOutcome::Pinned => self.pinned_pages += pages,
            EvictOutcome::Unwritten => self.unwritten_pages += pages,
            EvictOutcome::Busy => self.busy_pages += pages,
            EvictOutcome::Dirty => {
                self.dirty_pages += pages;
                self.busy_pages += pages;
            }
            EvictOutcome::Unswapped => self.unswapped_pages += pages,
            EvictOutcome::Swapping => self.swapping_pages += pages,
            EvictOutcome::Activate | EvictOutcome::Moved => {}
        }
    }
}

impl Reclaim {
    /// Frees about `wanted_pages`, scanning growing shares of the lists; fewer if enough pages are
    /// queued for the swap.
    pub(super) fn shrink(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        wanted_pages: u64,
        write_out: WriteOut,
    ) -> ScanCounts {
        self.shrink_until(reclaim_lock, wanted_pages, write_out, 0)
    }

    /// Returns `true` if `wanted_pages` are free or will be once the pages queued for the swap are
    /// written.
    fn is_enough(&self, freed_pages: u64, wanted_pages: u64, control: ScanControl) -> bool {
        if freed_pages >= wanted_pages || self.swap.is_none() {
            return freed_pages >= wanted_pages;
        }
        let waits = control.write_out == WriteOut::MemoryFiles;
        let coming_pages = if waits { self.swapper.coming_pages() } else { 0 };
        freed_pages + coming_pages >= wanted_pages || coming_pages > 0 && !self.has_room_in_queue()
    }

    /// Frees about a round's clean pages, if the smallest share of the lists has them.
    pub(super) fn shrink_a_little(&self, reclaim_lock: &ReclaimLock<'_>) -> ScanCounts {
        self.shrink_until(reclaim_lock, super::ROUND_PAGES, WriteOut::Nothing, PRIORITY_MAX)
    }

    fn shrink_until(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        wanted_pages: u64,
        write_out: WriteOut,
        priority_min: u32,
    ) -> ScanCounts {
        let mut total = ScanCounts::default();
        let control = ScanControl::reclaim(write_out);
        let mut unmapping = Unmapping::new(self, Owners::ReclaimLock(reclaim_lock), control);
        for priority in (priority_min..=PRIORITY_MAX).rev() {
            let listed_pages = self.memory.lru.sizes().listed_pages();
            let scan_pages = (listed_pages >> priority).max(super::ROUND_PAGES).min(listed_pages);
            let left_pages = wanted_pages.saturating_sub(total.reclaimed_pages);
            let scanned =
                self.shrink_lists(reclaim_lock, scan_pages, left_pages, control, &mut unmapping);
            total.add(&scanned);
            if self.is_enough(total.reclaimed_pages, wanted_pages, control) {
                break;
            }
        }
        unmapping.finish(&mut total);
        total
    }

    /// Drains every batch, then examines every folio once, recently used or not: the last resort.
    pub(super) fn sweep(&self, reclaim_lock: &ReclaimLock<'_>) -> ScanCounts {
        self.memory.counters.add(Counter::LruDrain, 1);
        self.memory.lru.drain_all(&self.memory.folios);
        let mut fresh_pages = self.memory.lru.sizes().fresh_pages;
        while fresh_pages > 0 {
            let aged_pages = self.memory.lru.age(&self.memory.folios, fresh_pages, |_| {});
            fresh_pages = fresh_pages.saturating_sub(aged_pages.max(1));
        }
        // Each list is scanned twice: the first scan may only clear the readers' marks.
        let active_pages = self.memory.lru.sizes().active_pages;
        self.shrink_active(reclaim_lock, active_pages);
        self.shrink_active(reclaim_lock, self.memory.lru.sizes().active_pages);
        let mut control = ScanControl::reclaim(WriteOut::MemoryFiles);
        let first = self.shrink_lists_wholly(reclaim_lock, control);
        if first.reclaimed_pages > 0 {
            return first;
        }
        self.shrink_active(reclaim_lock, self.memory.lru.sizes().active_pages);
        // Readers may mark folios as fast as this thread scans: now hot folios are evicted, too.
        control.second_chance = false;
        let mut counts = self.shrink_lists_wholly(reclaim_lock, control);
        counts.busy_pages += self.unseen_pages(&counts);
        counts
    }

    /// Returns the pinned and the busy pages that a sweep finds.
    #[cfg(test)]
    pub(crate) fn sweep_once(&self) -> (u64, u64) {
        let counts = self.sweep(&self.lock());
        (counts.pinned_pages, counts.busy_pages)
    }

    /// Returns the number of used pages that a sweep with the result `counts` has not examined
    /// because another thread works on them. They are on no list (about to be filled, or isolated)
    /// or frozen on a list (about to be truncated). Unlisted folios and those of the swapper do not
    /// count.
    fn unseen_pages(&self, counts: &ScanCounts) -> u64 {
        let (usage, sizes) = (self.arena().usage(), self.memory.lru.sizes());
        let used_pages = (usage.frame_bytes / PAGE_BYTES).saturating_sub(usage.free_pages);
        let listable_pages = used_pages.saturating_sub(self.memory.lru.unlisted_pages());
        let listed_pages = sizes.listed_pages();
        let judged_pages = counts.reclaimed_pages
            + counts.pinned_pages
            + counts.unwritten_pages
            + counts.busy_pages
            + counts.unswapped_pages
            + counts.swapping_pages;
        let known_pages = listed_pages.min(judged_pages) + self.swapper.pages();
        listable_pages.saturating_sub(known_pages)
    }

    /// Scans all lists like [`Self::shrink_lists`], until a round's pages are free, and ends all
    /// unmapping.
    fn shrink_lists_wholly(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        control: ScanControl,
    ) -> ScanCounts {
        let mut unmapping = Unmapping::new(self, Owners::ReclaimLock(reclaim_lock), control);
        let (wanted_pages, scan_pages) =
            (super::ROUND_PAGES, self.memory.lru.sizes().listed_pages());
        let mut counts =
            self.shrink_lists(reclaim_lock, scan_pages, wanted_pages, control, &mut unmapping);
        unmapping.finish(&mut counts);
        counts
    }

    /// Scans up to `scan_pages` at the tails of OLD and ACTIVE, until `wanted_pages` are free, or
    /// will be once the pages queued for the swap are written.
    fn shrink_lists<'t>(
        &'t self,
        reclaim_lock: &ReclaimLock<'_>,
        scan_pages: u64,
        wanted_pages: u64,
        control: ScanControl,
        unmapping: &mut Unmapping<'t>,
    ) -> ScanCounts {
        let memory = &self.memory;
        let mut counts = ScanCounts::default();
        let mut scanned_pages = 0;
        let mut batch = Vec::with_capacity(BATCH_SLOTS);
        let mut unswapped = Unswapped::default();
        let evicts_early = memory.arena_fills.have_runs();
        let step_pages = if evicts_early { STEP_PAGES } else { BATCH_SLOTS as u64 };
        let sizes = memory.lru.sizes();
        let mut unscanned = Unscanned::new(sizes);
        while !self.is_enough(
            counts.reclaimed_pages + unswapped.region_page_count,
            wanted_pages,
            control,
        ) {
            self.age_fresh(reclaim_lock);
            // The swap is written in batches: a few more folios are scanned to fill one.
            let more_pages = unswapped.scan_pages().max(unmapping.scan_pages());
            let scan_pages = scan_pages.max(more_pages.min(sizes.listed_pages()));
            let left_pages = scan_pages.saturating_sub(scanned_pages).min(step_pages);
            let chosen = unscanned.choose(memory.lru.sizes(), evicts_early);
            let Some((kind, pages_max)) = chosen else { break };
            memory.lru.isolate(&memory.folios, kind, pages_max.min(left_pages), &mut batch);
            if batch.is_empty() {
                break;
            }
            let isolated_pages = batch.iter().map(|folio| folio.folio().pages()).sum::<u64>();
            unscanned.note(kind, isolated_pages);
            scanned_pages += isolated_pages;
            memory.counters.add(Counter::PgScan, batch.len() as u64);
            // Region folios are unmapped in their own batches.
            for folio in batch.extract_if(.., |folio| memory.arena.is_region_page(folio.id())) {
                let is_wanted = control.write_out == WriteOut::MemoryFiles;
                let choose = || self.choose_for_swap(reclaim_lock, &folio, control.second_chance);
                match is_wanted.then(choose).flatten() {
                    Some(Ok(())) => unswapped.add_region_page(folio),
                    Some(Err(outcome)) => unmapping.keep(folio, outcome, &mut counts),
                    None => unmapping.add(folio, &mut counts),
                }
            }
            self.shrink_folio_list(reclaim_lock, &mut batch, control, &mut counts, &mut unswapped);
            if unswapped.pages >= SWAP_PAGES {
                self.swap(&mut unswapped, control, unmapping, &mut counts);
            }
        }
        self.swap(&mut unswapped, control, unmapping, &mut counts);
        counts
    }

    /// Queues the collected folios for the swapper, if that is wanted. Region folios that are not
    /// queued are added to the unmapping, because they may be clean.
    fn swap<'t>(
        &'t self,
        unswapped: &mut Unswapped<'t>,
        control: ScanControl,
        unmapping: &mut Unmapping<'t>,
        counts: &mut ScanCounts,
    ) {
        let Unswapped { folios, .. } = std::mem::take(unswapped);
        if folios.is_empty() {
            return;
        }
        let is_wanted = control.write_out == WriteOut::MemoryFiles;
        let left = if is_wanted { self.queue_for_swap(folios) } else { folios };
        let mut kept = Vec::new();
        for folio in left {
            if self.memory.arena.is_region_page(folio.id()) {
                unmapping.add(folio, counts);
            } else {
                counts.note(EvictOutcome::Unswapped, folio.folio().pages());
                kept.push(folio);
            }
        }
        self.memory.lru.put_back(&self.memory.folios, &mut kept);
    }

    /// Moves the folios that FRESH has beyond its share to OLD, and clears their marks: uses this
    /// soon after a fill do not count.
    fn age_fresh(&self, reclaim_lock: &ReclaimLock<'_>) {
        let (lru, folios) = (&self.memory.lru, &self.memory.folios);
        for _ in 0..AGED_BATCHES_MAX {
            let sizes = lru.sizes();
            let excess_pages = sizes.fresh_excess_pages();
            if excess_pages == 0 {
                return;
            }
            if sizes.is_crowded() {
                lru.age(folios, excess_pages, |_| {});
                continue;
            }
            lru.age(folios, excess_pages, |folio| {
                if let Some(inode) = reclaim_lock.owner_of_listed(folio) {
                    inode.mapping.test_and_clear_referenced(folio);
                }
            });
        }
    }

    /// Examines each isolated folio; those that stay return to a list, except those to be swapped
    /// out.
    fn shrink_folio_list<'a>(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        batch: &mut Vec<FolioRef<'a>>,
        control: ScanControl,
        counts: &mut ScanCounts,
        unswapped: &mut Unswapped<'a>,
    ) {
        let (mut used, mut unused) = (Vec::new(), Vec::new());
        let mut evicted = EvictedBatch::default();
        batch.iter().for_each(|folio| reclaim_lock.touch_entry(folio));
        for folio in batch.drain(..) {
            let pages = folio.folio().pages();
            let (outcome, kept) =
                self.evict_or_keep(reclaim_lock, folio, control.second_chance, &mut evicted);
            if outcome != EvictOutcome::Unswapped {
                counts.note(outcome, pages);
            }
            match outcome {
                EvictOutcome::Activate => used.extend(kept),
                EvictOutcome::Unswapped => {
                    kept.into_iter().for_each(|folio| unswapped.add(folio));
                }
                _ => unused.extend(kept),
            }
        }
        self.activate(&mut used);
        self.memory.lru.put_back(&self.memory.folios, &mut unused);
        evicted.free(self, reclaim_lock, counts);
    }

    /// Puts isolated folios that were used at the head of ACTIVE.
    pub(super) fn activate(&self, used: &mut Vec<FolioRef<'_>>) {
        let is_new = |folio: &&FolioRef<'_>| !folio.folio().flags.get(Flag::Active);
        self.memory.counters.add(Counter::PgActivate, used.iter().filter(is_new).count() as u64);
        self.memory.lru.move_to(&self.memory.folios, used, ListKind::Active);
    }

    /// Moves folios that were not used recently from the tail of ACTIVE to the head of OLD.
    fn shrink_active(&self, reclaim_lock: &ReclaimLock<'_>, scan_pages: u64) {
        let memory = &self.memory;
        let mut scanned_pages = 0;
        let mut batch = Vec::with_capacity(BATCH_SLOTS);
        while scanned_pages < scan_pages {
            let left_pages = scan_pages - scanned_pages;
            memory.lru.isolate(&memory.folios, ListKind::Active, left_pages, &mut batch);
            if batch.is_empty() {
                break;
            }
            scanned_pages += batch.iter().map(|folio| folio.folio().pages()).sum::<u64>();
            let (mut used, mut unused): (Vec<_>, Vec<_>) =
                batch.drain(..).partition(|folio| test_and_clear_referenced(reclaim_lock, folio));
            memory.counters.add(Counter::PgDeactivate, unused.len() as u64);
            memory.lru.put_back(&memory.folios, &mut used);
            memory.lru.move_to(&memory.folios, &mut unused, ListKind::Old);
        }
    }
}

/// Returns `true` if a reader has marked any page of the folio since the last scan. A locked folio
/// is in use.
fn test_and_clear_referenced(reclaim_lock: &ReclaimLock<'_>, folio: &FolioRef<'_>) -> bool {
    let Some(locked) = folio.try_lock() else { return true };
    let Some(inode) = reclaim_lock.owner(&locked) else { return false };
    inode.mapping.test_and_clear_referenced(&locked)
}

/// Treatment of dirty folios of memory files. Those of files with a backing are always queued for
/// the flusher: a device may hang, and only the flusher may wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteOut {
    /// They stay: the caller cannot wait for the swap.
    Nothing,
    /// They are queued for the swapper.
    MemoryFiles,
}

/// Result of trying to evict a folio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvictOutcome {
    /// Evicted; its frame is free.
    Evicted,
    /// Locked, or under I/O.
    Busy,
    /// Used since the last scan.
    Activate,
    /// Dirty; the flusher has been asked to write it.
    Dirty,
    /// Of a memory file, and must be swapped out first.
    Unswapped,
    /// Of a memory file, and queued for the swap.
    Swapping,
    /// Dirty, and its write-back failed, or its write gate does not let it pass.
    Unwritten,
    /// Other threads hold references.
    Pinned,
    /// Moved to other frames.
    Moved,
}

impl EvictOutcome {
    /// Returns the outcome for a dirty folio of `inode`, and asks the flusher to write it if that
    /// is its task.
    pub(super) fn of_dirty(inode: &Inode) -> Self {
        match inode.store.cleaner() {
            Cleaner::Flusher if inode.clean_soon() => Self::Dirty,
            Cleaner::Swapper => Self::Unswapped,
            Cleaner::Flusher | Cleaner::None => Self::Unwritten,
        }
    }
}

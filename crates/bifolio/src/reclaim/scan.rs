//! Scans the LRU lists: chooses which folios to examine, in which order and how many, and evicts
//! each isolated folio, puts it back, or queues it to be written. Never waits for storage.

use super::swapper::SWAP_PAGES;
use super::unmap::{Owners, Unmapping};
use super::{Reclaim, ReclaimLock};
use crate::memory::{EXTENT_PAGES, ListKind, Shadow};
use crate::page::{BATCH_SLOTS, EvictError, Flag, FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;
use crate::writeback::{Cleaner, Inode};

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

/// Number of pages of the inactive list that are scanned at once: an extent of frames, which is all
/// that is evicted if folios are evicted in the order in which they were filled. Few, because each
/// may free another extent.
const STEP_PAGES: u64 = EXTENT_PAGES as u64;

/// Options for a scan of the inactive list.
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
    /// Frees about `wanted_pages`, scanning growing shares of the inactive list; fewer if enough
    /// pages are queued for the swap.
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

    /// Frees about a round's clean pages, if the smallest share of the list has them.
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
            let sizes = self.memory.lru.sizes();
            let share = |pages: u64| (pages >> priority).max(super::ROUND_PAGES);
            if sizes.is_inactive_low() || sizes.inactive_pages == 0 {
                self.shrink_active(reclaim_lock, share(sizes.active_pages));
            }
            let inactive_pages = self.memory.lru.sizes().inactive_pages;
            let looked_at = share(inactive_pages).min(inactive_pages);
            let left_pages = wanted_pages.saturating_sub(total.reclaimed_pages);
            let scanned =
                self.shrink_inactive(reclaim_lock, looked_at, left_pages, control, &mut unmapping);
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
        // Each list is scanned twice: the first scan may only clear the readers' marks.
        let active_pages = self.memory.lru.sizes().active_pages;
        self.shrink_active(reclaim_lock, active_pages);
        self.shrink_active(reclaim_lock, self.memory.lru.sizes().active_pages);
        let inactive_pages = self.memory.lru.sizes().inactive_pages;
        let mut control = ScanControl::reclaim(WriteOut::MemoryFiles);
        let first = self.shrink_inactive_wholly(reclaim_lock, inactive_pages, control);
        if first.reclaimed_pages > 0 {
            return first;
        }
        self.shrink_active(reclaim_lock, self.memory.lru.sizes().active_pages);
        // Readers may mark folios as fast as this thread scans: now hot folios are evicted, too.
        let inactive_pages = self.memory.lru.sizes().inactive_pages;
        control.second_chance = false;
        let mut counts = self.shrink_inactive_wholly(reclaim_lock, inactive_pages, control);
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
        let listed_pages = sizes.inactive_pages + sizes.active_pages;
        let judged_pages = counts.reclaimed_pages
            + counts.pinned_pages
            + counts.unwritten_pages
            + counts.busy_pages
            + counts.unswapped_pages
            + counts.swapping_pages;
        let known_pages = listed_pages.min(judged_pages) + self.swapper.pages();
        listable_pages.saturating_sub(known_pages)
    }

    /// Scans like [`Self::shrink_inactive`], until a round's pages are free, and ends all
    /// unmapping.
    fn shrink_inactive_wholly(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        scan_pages: u64,
        control: ScanControl,
    ) -> ScanCounts {
        let mut unmapping = Unmapping::new(self, Owners::ReclaimLock(reclaim_lock), control);
        let wanted_pages = super::ROUND_PAGES;
        let mut counts =
            self.shrink_inactive(reclaim_lock, scan_pages, wanted_pages, control, &mut unmapping);
        unmapping.finish(&mut counts);
        counts
    }

    /// Scans up to `scan_pages` of the inactive tail, until `wanted_pages` are free, or will be
    /// once the pages queued for the swap are written.
    fn shrink_inactive<'t>(
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
        // Folios that stay go to the head and are not scanned twice.
        let listed_pages = memory.lru.sizes().inactive_pages;
        while !self.is_enough(
            counts.reclaimed_pages + unswapped.region_page_count,
            wanted_pages,
            control,
        ) {
            // The swap is written in batches: a few more folios are scanned to fill one.
            let more_pages = unswapped.scan_pages().max(unmapping.scan_pages());
            let scan_pages = scan_pages.max(more_pages.min(listed_pages));
            let left_pages = scan_pages.saturating_sub(scanned_pages).min(STEP_PAGES);
            memory.lru.isolate(&memory.folios, ListKind::Inactive, left_pages, &mut batch);
            if batch.is_empty() {
                break;
            }
            memory.counters.add(Counter::PgScan, batch.len() as u64);
            scanned_pages += batch.iter().map(|folio| folio.folio().pages()).sum::<u64>();
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
        self.memory.lru.put_back(&self.memory.folios, &mut kept, ListKind::Inactive);
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
        let (mut active, mut inactive) = (Vec::new(), Vec::new());
        let mut evicted = Vec::new();
        batch.iter().for_each(|folio| reclaim_lock.touch_entry(folio));
        for folio in batch.drain(..) {
            let (id, pages) = (folio.id(), folio.folio().pages());
            let (outcome, kept) = self.evict_or_keep(reclaim_lock, folio, control.second_chance);
            if outcome != EvictOutcome::Unswapped {
                counts.note(outcome, pages);
            }
            match outcome {
                EvictOutcome::Evicted => evicted.push((id, pages)),
                EvictOutcome::Activate => active.extend(kept),
                EvictOutcome::Unswapped => {
                    kept.into_iter().for_each(|folio| unswapped.add(folio));
                }
                _ => inactive.extend(kept),
            }
        }
        let lru = &self.memory.lru;
        self.memory.counters.add(Counter::PgActivate, active.len() as u64);
        lru.put_back(&self.memory.folios, &mut active, ListKind::Active);
        lru.put_back(&self.memory.folios, &mut inactive, ListKind::Inactive);
        self.compact(reclaim_lock, &evicted, counts);
    }

    /// Moves folios that were not used recently from the active tail to the inactive head.
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
            for folio in &unused {
                folio.folio().flags.set(Flag::Workingset);
            }
            memory.lru.put_back(&memory.folios, &mut used, ListKind::Active);
            memory.lru.put_back(&memory.folios, &mut unused, ListKind::Inactive);
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

impl Reclaim {
    /// Evicts a folio that the caller has isolated, or returns it with the reason.
    ///
    /// With `second_chance`, a recently used folio stays. A dirty one always stays.
    pub(super) fn evict_or_keep<'a>(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        folio: FolioRef<'a>,
        second_chance: bool,
    ) -> (EvictOutcome, Option<FolioRef<'a>>) {
        let Some(locked) = folio.try_lock() else { return (EvictOutcome::Busy, Some(folio)) };
        let Some(inode) = reclaim_lock.owner(&locked) else {
            // Truncated: the thread that puts the last reference frees it.
            return (EvictOutcome::Pinned, Some(folio));
        };
        if locked.flags.write_state().is_writing() {
            let outcome = match inode.store.cleaner() {
                Cleaner::Flusher => EvictOutcome::Busy,
                Cleaner::Swapper | Cleaner::None => EvictOutcome::Swapping,
            };
            return (outcome, Some(folio));
        }
        if second_chance && inode.mapping.test_and_clear_referenced(&locked) {
            return (EvictOutcome::Activate, Some(folio));
        }
        // Checked before the references, because a thread that is about to write it back holds one,
        // too.
        if locked.flags.write_state().is_dirty() {
            let mut outcome = EvictOutcome::of_dirty(inode);
            if outcome == EvictOutcome::Dirty && inode.is_shut_for(folio.id()) {
                outcome = EvictOutcome::Unwritten;
            }
            return (outcome, Some(folio));
        }
        if is_pinned(&folio) {
            self.memory.counters.add(Counter::PgPinned, 1);
            return (EvictOutcome::Pinned, Some(folio));
        }
        self.evict(inode, folio, locked)
    }

    /// Evicts like [`Self::evict_or_keep`], but if the folio is dirty, asks the flusher to write
    /// this folio.
    pub(super) fn pageout_one<'a>(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        folio: FolioRef<'a>,
    ) -> (EvictOutcome, Option<FolioRef<'a>>) {
        let (outcome, folio) = self.evict_or_keep(reclaim_lock, folio, false);
        if outcome == EvictOutcome::Dirty {
            folio.iter().for_each(|folio| self.write_soon_one(reclaim_lock, folio));
        }
        (outcome, folio)
    }

    fn write_soon_one(&self, reclaim_lock: &ReclaimLock<'_>, folio: &FolioRef<'_>) {
        let Some(locked) = folio.try_lock() else { return };
        let Some(inode) = reclaim_lock.owner(&locked) else { return };
        let start = locked.index() * PAGE_BYTES;
        inode.write_soon(start..start + locked.pages() * PAGE_BYTES);
    }

    /// Returns the shadow for the eviction of a folio.
    pub(super) fn shadow_of(&self, locked: &LockedFolio<'_>) -> Shadow {
        let workingset = locked.flags.get(Flag::Workingset) || locked.flags.get(Flag::Active);
        self.memory.lru.make_shadow(locked.pages(), workingset)
    }

    /// Counts an eviction in `counter`.
    pub(super) fn note_eviction(&self, locked: &LockedFolio<'_>, counter: Counter) {
        let unused = locked.flags.get(Flag::Readahead);
        self.memory.counters.add(counter, 1);
        self.memory.counters.add(Counter::ReadaheadUnused, u64::from(unused));
    }

    fn evict<'a>(
        &self,
        inode: &Inode,
        folio: FolioRef<'a>,
        locked: LockedFolio<'_>,
    ) -> (EvictOutcome, Option<FolioRef<'a>>) {
        match inode.evict(folio, &locked, self.shadow_of(&locked)) {
            Ok(frozen) => {
                self.note_eviction(&locked, Counter::PgSteal);
                // E5: the next folio in this frame must not be locked.
                drop(locked);
                frozen.free();
                (EvictOutcome::Evicted, None)
            }
            Err(EvictError::Referenced(folio)) => {
                self.memory.counters.add(Counter::PgPinned, 1);
                (EvictOutcome::Pinned, Some(folio))
            }
            Err(EvictError::Dirty(folio)) => (EvictOutcome::Busy, Some(folio)),
        }
    }
}

/// Returns `true` if there are more references than the table's and the isolation's: a hint, the
/// freeze decides.
pub(super) fn is_pinned(folio: &FolioRef<'_>) -> bool {
    folio.folio().references() > 2
}

//! Scanning the lists: which folios are looked at, in which order, and how many; and what becomes
//! of those that were isolated: kept, left to others to be written out, evicted. Nothing here waits
//! for storage.

use super::swapper::SWAP_PAGES;
use super::unmap::{Owners, Unmapping};
use super::{Reclaim, ReclaimLock};
use crate::memory::{EXTENT_PAGES, ListKind, Shadow};
use crate::page::{BATCH_SLOTS, EvictError, Flag, FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;
use crate::writeback::{Cleaner, Inode};

/// The first share of a list that is looked at: one 4096th; the last one is all of it.
const PRIORITY_MAX: u32 = 12;

/// Isolated folios of memory files that are to be swapped out.
#[derive(Debug, Default)]
struct Unswapped<'a> {
    folios: Vec<FolioRef<'a>>,
    pages: u64,
    /// Of those, pages in regions, clean or not: no more of them leave than are wanted.
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

    /// How many pages are worth looking at.
    fn scan_pages(&self) -> u64 {
        if self.pages == self.region_page_count { 0 } else { SWAP_PAGES }
    }
}

/// Pages of the inactive list that are looked at in one go: an extent of frames, which is all that
/// goes where folios leave in the order in which they came. Few, as each may free another extent.
const STEP_PAGES: u64 = EXTENT_PAGES as u64;

/// How a scan of the inactive list goes about it.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScanControl {
    /// Folios that were used lately stay.
    pub(super) second_chance: bool,
    pub(super) write_out: WriteOut,
    /// The counter of the evicted folios.
    pub(super) counter: Counter,
}

impl ScanControl {
    /// As reclaim does; who is used lately has a second chance.
    pub(super) fn reclaim(write_out: WriteOut) -> Self {
        Self { second_chance: true, write_out, counter: Counter::PgSteal }
    }
}

/// The result of a scan, pages.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScanCounts {
    pub(super) reclaimed_pages: u64,
    /// Held by pins, holds, or calls in progress.
    pub(super) pinned_pages: u64,
    /// Dirty, and the device does not take them.
    pub(super) unwritten_pages: u64,
    /// Locked, under I/O, or left to the flusher.
    pub(super) busy_pages: u64,
    /// Dirty.
    pub(super) dirty_pages: u64,
    /// Of memory files: to be swapped out, and not on their way.
    pub(super) unswapped_pages: u64,
    /// Of memory files: on their way to the swap.
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
    /// Frees `wanted_pages` or so, looking at ever larger shares of the inactive list; fewer if so
    /// many are on their way to the swap.
    pub(super) fn shrink(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        wanted_pages: u64,
        write_out: WriteOut,
    ) -> ScanCounts {
        self.shrink_until(reclaim_lock, wanted_pages, write_out, 0)
    }

    /// Whether so many pages are free, or will be when what is on its way to the swap is there.
    fn is_enough(&self, freed_pages: u64, wanted_pages: u64, control: ScanControl) -> bool {
        if freed_pages >= wanted_pages || self.swap.is_none() {
            return freed_pages >= wanted_pages;
        }
        let waits = control.write_out == WriteOut::MemoryFiles;
        let coming_pages = if waits { self.swapper.coming_pages() } else { 0 };
        freed_pages + coming_pages >= wanted_pages || coming_pages > 0 && !self.has_room_in_line()
    }

    /// Frees a round's pages or so of what is clean, if the smallest share of the list has them.
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

    /// The last resort: drains every batch, then looks at every folio once, marks or not.
    pub(super) fn sweep(&self, reclaim_lock: &ReclaimLock<'_>) -> ScanCounts {
        self.memory.counters.add(Counter::LruDrain, 1);
        self.memory.lru.drain_all(&self.memory.folios);
        // Twice round each list: the first may only clear the readers' marks.
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
        // Readers may mark folios as fast as we look: what is hot goes too, now.
        let inactive_pages = self.memory.lru.sizes().inactive_pages;
        control.second_chance = false;
        let mut counts = self.shrink_inactive_wholly(reclaim_lock, inactive_pages, control);
        counts.busy_pages += self.unseen_pages(&counts);
        counts
    }

    /// Pages that a sweep finds pinned, and busy.
    #[cfg(test)]
    pub(crate) fn sweep_once(&self) -> (u64, u64) {
        let counts = self.sweep(&self.lock());
        (counts.pinned_pages, counts.busy_pages)
    }

    /// Pages in use that a sweep which came to `counts` has not judged: somebody is in the middle
    /// of something with them. They are on no list (about to be filled, isolated), or frozen there
    /// (about to leave with a cut). Those that come to no list are not among them, nor those that
    /// are the swapper's.
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

    /// As [`Self::shrink_inactive`], until a round's pages are free; nothing is under way then.
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

    /// Looks at up to `scan_pages` of the inactive tail, until `wanted_pages` are free, or will be
    /// when what is on its way to the swap is there.
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
        // What stays goes to the head, and is not looked at twice.
        let listed_pages = memory.lru.sizes().inactive_pages;
        while !self.is_enough(
            counts.reclaimed_pages + unswapped.region_page_count,
            wanted_pages,
            control,
        ) {
            // Folios leave for the swap together: a few more are looked at for that.
            let more_pages = unswapped.scan_pages().max(unmapping.scan_pages());
            let scan_pages = scan_pages.max(more_pages.min(listed_pages));
            let left_pages = scan_pages.saturating_sub(scanned_pages).min(STEP_PAGES);
            memory.lru.isolate(&memory.folios, ListKind::Inactive, left_pages, &mut batch);
            if batch.is_empty() {
                break;
            }
            memory.counters.add(Counter::PgScan, batch.len() as u64);
            scanned_pages += batch.iter().map(|folio| folio.folio().pages()).sum::<u64>();
            // Those of regions leave in batches of their own.
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

    /// Leaves what was gathered to the swapper, if that is wanted. What stays is looked at here if
    /// it is in a region, where it may be clean.
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
        let left = if is_wanted { self.leave_to_swapper(folios) } else { folios };
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

    /// Judges each isolated folio; those that stay go back to a list, but for what is to be
    /// swapped out.
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

    /// Moves what was not used lately from the active tail to the inactive head.
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

/// Whether a reader marked any page of the folio since the last look. One that is locked is being
/// used right now.
fn test_and_clear_referenced(reclaim_lock: &ReclaimLock<'_>, folio: &FolioRef<'_>) -> bool {
    let Some(locked) = folio.try_lock() else { return true };
    let Some(inode) = reclaim_lock.owner(&locked) else { return false };
    inode.mapping.test_and_clear_referenced(&locked)
}

/// The way of a scan with dirty folios of memory files. Those of files with a backing are always
/// left to the flusher, which is told: a device may take for ever, and nobody else is to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteOut {
    /// They stay: the caller cannot wait for what is swapped out.
    Nothing,
    /// They are left to the swapper.
    MemoryFiles,
}

/// Why a folio stays, or that it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvictOutcome {
    /// Gone; its frame is free.
    Evicted,
    /// Locked, or under I/O: somebody is in the middle of something.
    Busy,
    /// Used since the last look.
    Activate,
    /// To be written out first, by the flusher, which has been told.
    Dirty,
    /// Of a memory file, and to be swapped out first.
    Unswapped,
    /// Of a memory file, and on its way to the swap.
    Swapping,
    /// Dirty, and its write-out failed.
    Unwritten,
    /// Others hold references.
    Pinned,
    /// It is in other frames now.
    Moved,
}

impl EvictOutcome {
    /// Of a dirty folio, which is left to whoever cleans the file: the flusher is told.
    pub(super) fn of_dirty(inode: &Inode) -> Self {
        match inode.store.cleaner() {
            Cleaner::Flusher if inode.clean_soon() => Self::Dirty,
            Cleaner::Swapper => Self::Unswapped,
            Cleaner::Flusher | Cleaner::Nobody => Self::Unwritten,
        }
    }
}

impl Reclaim {
    /// Evicts a folio the caller has isolated, or gives it back with the reason.
    ///
    /// With `second_chance`, one that was used lately stays. A dirty one stays, too.
    pub(super) fn evict_or_keep<'a>(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        folio: FolioRef<'a>,
        second_chance: bool,
    ) -> (EvictOutcome, Option<FolioRef<'a>>) {
        let Some(locked) = folio.try_lock() else { return (EvictOutcome::Busy, Some(folio)) };
        let Some(inode) = reclaim_lock.owner(&locked) else {
            // Truncated: whoever still holds it frees it with the last put.
            return (EvictOutcome::Pinned, Some(folio));
        };
        if locked.flags.write_state().is_writing() {
            let outcome = match inode.store.cleaner() {
                Cleaner::Flusher => EvictOutcome::Busy,
                Cleaner::Swapper | Cleaner::Nobody => EvictOutcome::Swapping,
            };
            return (outcome, Some(folio));
        }
        if second_chance && inode.mapping.test_and_clear_referenced(&locked) {
            return (EvictOutcome::Activate, Some(folio));
        }
        // Before the references: whoever is about to write it out holds one, too.
        if locked.flags.write_state().is_dirty() {
            return (EvictOutcome::of_dirty(inode), Some(folio));
        }
        if is_pinned(&folio) {
            self.memory.counters.add(Counter::PgPinned, 1);
            return (EvictOutcome::Pinned, Some(folio));
        }
        self.evict(inode, folio, locked)
    }

    /// As [`Self::evict_or_keep`], but asks the flusher for this one, if it is dirty.
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

    /// The mark that an eviction leaves for the replacement policy.
    pub(super) fn shadow_of(&self, locked: &LockedFolio<'_>) -> Shadow {
        let workingset = locked.flags.get(Flag::Workingset) || locked.flags.get(Flag::Active);
        self.memory.lru.make_shadow(locked.pages(), workingset)
    }

    /// Counts an eviction, as reclaim's or as another's.
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
                // E5: the next life of the frame must not find it locked.
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

/// More references than the table's and the isolation's: a hint, the freeze decides.
pub(super) fn is_pinned(folio: &FolioRef<'_>) -> bool {
    folio.folio().references() > 2
}

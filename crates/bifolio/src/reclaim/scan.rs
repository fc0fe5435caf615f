//! Scans of the LRU lists: which folios are examined, in which order and how many. Each isolated
//! folio is evicted, put back, or queued to be written. Never waits for storage.
//!
//! ```text
//!   shrink      growing shares of the lists of each class that gives pages (victims.rs), until it
//!               is enough
//!     round     isolate a few at the tails of OLD and ACTIVE of a class, and sort them:
//!       evict   one folio of the arena, or the reason why it stays
//!       swap    folios of memory files, for the swapper                      swapper.rs
//!       unmap   folios in place, many together                               mapped.rs
//! ```
//!
//! The frames of folios that are evicted together are freed together ([`EvictedBatch`]).

use super::mapped::MappedScan;
use super::outcome::{EvictOutcome, ScanControl, ScanCounts, Unswapped, WriteOut, is_pinned};
use super::swap_queue::SWAP_PAGES;
use super::victims::{groups, part_of};
use super::{Reclaim, ReclaimLock};
use crate::inode::Inode;
use crate::memory::{EXTENT_PAGES, Giver, ListKind, ListSizes, Shadow};
use crate::page::{
    BATCH_SLOTS, ClassId, EvictError, Flag, FolioRef, Frozen, LockedFolio, PAGE_BYTES,
};
use crate::stats::{Counter, FileCounts};
use crate::writeback::is_shut_for;

/// log2 of the first share of a list to scan, one 4096th; the last share is all of it.
const PRIORITY_MAX: u32 = 12;

/// Number of pages that are isolated at once while extents are cleared: an extent of frames, which
/// is all that is evicted if folios are evicted in the order in which they were filled. Few,
/// because each may free another extent.
const STEP_PAGES: u64 = EXTENT_PAGES as u64;

/// Upper bound on the batches that the first eviction of a cache moves from FRESH to OLD.
const AGED_BATCHES_MAX: u64 = 32;

/// Pages that a scan may still isolate from each list: it examines no folio twice.
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

#[derive(Debug)]
struct Scan<'t> {
    reclaim: &'t Reclaim,
    reclaim_lock: &'t ReclaimLock<'t>,
    control: ScanControl,
    counts: ScanCounts,
    /// Victims in place; `None` until there is one.
    unmapping: Option<Box<dyn MappedScan<'t> + 't>>,
    unswapped: Unswapped<'t>,
}

impl<'t> Scan<'t> {
    fn new(reclaim: &'t Reclaim, reclaim_lock: &'t ReclaimLock<'t>, control: ScanControl) -> Self {
        let (counts, unswapped) = Default::default();
        Self { reclaim, reclaim_lock, control, counts, unmapping: None, unswapped }
    }

    fn freed_pages(&self) -> u64 {
        self.counts.reclaimed_pages + self.unswapped.leaving_pages
    }

    /// Returns `true` if `wanted_pages` are free, or will be once the swap has written.
    fn is_enough(&self, wanted_pages: u64) -> bool {
        let freed_pages = self.freed_pages();
        if freed_pages >= wanted_pages || self.reclaim.swap.is_none() {
            return freed_pages >= wanted_pages;
        }
        let coming_pages =
            if self.writes_memory_files() { self.reclaim.swapper.coming_pages() } else { 0 };
        freed_pages + coming_pages >= wanted_pages
            || coming_pages > 0 && !self.reclaim.has_room_in_queue()
    }

    fn writes_memory_files(&self) -> bool {
        self.control.write_out == WriteOut::MemoryFiles
    }

    /// Scans a share of the lists of each class of a group, until it is enough: each class gives
    /// its part of what is missing, which it has no more.
    fn round_of(&mut self, group: &mut [Giver], priority: u32, wanted_pages: u64) {
        let missing_pages = wanted_pages.saturating_sub(self.freed_pages());
        let group_pages = group.iter().map(|giver| giver.pages).sum();
        for giver in group {
            let before_pages = self.freed_pages();
            let part_pages = part_of(giver, group_pages, missing_pages);
            self.round(giver.class, priority, before_pages + part_pages);
            let given_pages = self.freed_pages().saturating_sub(before_pages);
            giver.pages = giver.pages.saturating_sub(given_pages);
        }
    }

    /// Scans a share of the lists of a class, one in 2 to the power of `priority`, at the tails of
    /// OLD and ACTIVE, until it is enough.
    fn round(&mut self, class: ClassId, priority: u32, wanted_pages: u64) {
        debug_assert!(priority <= PRIORITY_MAX, "{priority}");
        let memory = &self.reclaim.memory;
        let sizes = memory.lru.sizes_of(class);
        let listed_pages = sizes.listed_pages();
        let share_pages = (listed_pages >> priority).max(super::ROUND_PAGES).min(listed_pages);
        let evicts_early = memory.arena.is_filled_in_runs();
        let step_pages = if evicts_early { STEP_PAGES } else { BATCH_SLOTS as u64 };
        let (mut unscanned, mut scanned_pages) = (Unscanned::new(sizes), 0);
        let mut batch = Vec::with_capacity(BATCH_SLOTS);
        while !self.is_enough(wanted_pages) {
            self.age_fresh(class);
            // The swap is written in batches: a few more folios are scanned to fill one.
            let to_unmap_pages = self.unmapping.as_ref().map_or(0, |it| it.scan_pages());
            let more_pages = self.unswapped.scan_pages().max(to_unmap_pages);
            let scan_pages = share_pages.max(more_pages.min(listed_pages));
            let left_pages = scan_pages.saturating_sub(scanned_pages).min(step_pages);
            let chosen = unscanned.choose(memory.lru.sizes_of(class), evicts_early);
            let Some((kind, pages_max)) = chosen else { break };
            let pages_max = pages_max.min(left_pages);
            memory.lru.isolate(&memory.folios, (class, kind), pages_max, &mut batch);
            if batch.is_empty() {
                break;
            }
            let isolated_pages = batch.iter().map(|folio| folio.folio().pages()).sum::<u64>();
            unscanned.note(kind, isolated_pages);
            scanned_pages += isolated_pages;
            memory.counters.add(Counter::PgScan, batch.len() as u64);
            self.collect_mapped(&mut batch);
            self.evict_all(&mut batch);
            if self.unswapped.pages >= SWAP_PAGES {
                self.queue_unswapped();
            }
        }
        self.queue_unswapped();
    }

    /// Takes the folios in place out of a batch.
    fn collect_mapped(&mut self, batch: &mut Vec<FolioRef<'t>>) {
        let arena = &self.reclaim.memory.arena;
        let Some(mapped) = &self.reclaim.mapped else { return };
        if batch.iter().any(|folio| arena.is_region_page(folio.id())) {
            let begin = || mapped.begin(self.reclaim, self.reclaim_lock, self.control);
            let unmapping = self.unmapping.get_or_insert_with(begin);
            unmapping.collect(batch, &mut self.unswapped, &mut self.counts);
        }
    }

    /// Evicts isolated folios; those that stay return to a list, except those to be swapped out.
    fn evict_all(&mut self, batch: &mut Vec<FolioRef<'t>>) {
        let (reclaim, reclaim_lock) = (self.reclaim, self.reclaim_lock);
        let (mut used, mut unused) = (Vec::new(), Vec::new());
        let mut evicted = EvictedBatch::default();
        for folio in batch.iter().map(FolioRef::folio) {
            let inode = reclaim_lock.owner_of_isolated(folio);
            inode.inspect(|inode| inode.mapping.table().touch(folio.index()));
        }
        for folio in batch.drain(..) {
            let pages = folio.folio().pages();
            let (outcome, kept) =
                reclaim.evict(reclaim_lock, folio, self.control.second_chance, &mut evicted);
            match outcome {
                EvictOutcome::Activate => used.extend(kept),
                EvictOutcome::Unswapped => {
                    kept.into_iter().for_each(|folio| self.unswapped.add(folio));
                    continue;
                }
                _ => unused.extend(kept),
            }
            self.counts.note(outcome, pages);
        }
        reclaim.activate(&mut used);
        reclaim.memory.lru.put_back(&reclaim.memory.folios, &mut unused, None);
        evicted.free(reclaim, reclaim_lock, &mut self.counts);
    }

    /// Queues the collected folios for the swapper, if that is wanted. Folios of maps that are not
    /// queued may be clean: they are unmapped.
    fn queue_unswapped(&mut self) {
        let Unswapped { folios, .. } = std::mem::take(&mut self.unswapped);
        if folios.is_empty() {
            return;
        }
        let memory = &self.reclaim.memory;
        let mut left =
            if self.writes_memory_files() { self.reclaim.queue_for_swap(folios) } else { folios };
        if let Some(unmapping) = &mut self.unmapping {
            unmapping.add_all(&mut left, &mut self.counts);
        }
        for folio in &left {
            self.counts.note(EvictOutcome::Unswapped, folio.folio().pages());
        }
        memory.lru.put_back(&memory.folios, &mut left, None);
    }

    /// Moves the folios that FRESH of a class has beyond its share to OLD, and clears their marks.
    fn age_fresh(&self, class: ClassId) {
        let (lru, folios) = (&self.reclaim.memory.lru, &self.reclaim.memory.folios);
        for _ in 0..AGED_BATCHES_MAX {
            let sizes = lru.sizes_of(class);
            let excess_pages = sizes.fresh_excess_pages();
            if excess_pages == 0 {
                return;
            }
            if sizes.is_crowded() {
                lru.age(folios, class, excess_pages, |_| {});
                continue;
            }
            lru.age(folios, class, excess_pages, |folio| {
                if let Some(inode) = self.reclaim_lock.owner_of_isolated(folio) {
                    inode.mapping.test_and_clear_referenced(folio);
                }
            });
        }
    }

    fn finish(self) -> ScanCounts {
        let mut counts = self.counts;
        if let Some(unmapping) = self.unmapping {
            unmapping.finish(&mut counts);
        }
        counts
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
        self.shrink_all(reclaim_lock, &mut self.givers(), wanted_pages, write_out)
    }

    /// Frees about `wanted_pages` of one class.
    pub(super) fn shrink_one(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        class: ClassId,
        wanted_pages: u64,
        write_out: WriteOut,
    ) -> ScanCounts {
        let mut giver = [Giver { class, order: 0, pages: u64::MAX }];
        self.shrink_all(reclaim_lock, &mut giver, wanted_pages, write_out)
    }

    fn shrink_all(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        givers: &mut [Giver],
        wanted_pages: u64,
        write_out: WriteOut,
    ) -> ScanCounts {
        let mut scan = Scan::new(self, reclaim_lock, ScanControl::reclaim(write_out));
        for group in groups(givers) {
            for priority in (0..=PRIORITY_MAX).rev() {
                scan.round_of(group, priority, wanted_pages);
                if scan.is_enough(wanted_pages) {
                    return scan.finish();
                }
            }
        }
        scan.finish()
    }

    /// Frees about a round's clean pages, if the smallest share of the lists has them.
    pub(super) fn shrink_a_little(&self, reclaim_lock: &ReclaimLock<'_>) -> ScanCounts {
        let mut scan = Scan::new(self, reclaim_lock, ScanControl::reclaim(WriteOut::Nothing));
        if let Some(group) = groups(&mut self.givers()).next() {
            scan.round_of(group, PRIORITY_MAX, super::ROUND_PAGES);
        }
        scan.finish()
    }

    /// Drains every batch, then examines every folio, recently used or not, above a floor or below:
    /// the last resort.
    pub(super) fn sweep(&self, reclaim_lock: &ReclaimLock<'_>) -> ScanCounts {
        let classes: Vec<_> = self.memory.lru.classes.all().collect();
        let (counts, is_last) = self.sweep_all(reclaim_lock, &classes);
        let unseen_pages = if is_last { self.unseen_pages(&counts) } else { 0 };
        ScanCounts { busy_pages: counts.busy_pages + unseen_pages, ..counts }
    }

    /// Sweeps one class, as [`Self::sweep`] does all.
    pub(super) fn sweep_class(&self, reclaim_lock: &ReclaimLock<'_>, class: ClassId) -> ScanCounts {
        let (counts, is_last) = self.sweep_all(reclaim_lock, &[class]);
        // Pages that another thread works on, as in `unseen_pages`.
        let class_pages = self.memory.lru.classes.counts(class).pages;
        let unseen_pages = class_pages.saturating_sub(counts.judged_pages());
        let unseen_pages = if is_last { unseen_pages } else { 0 };
        ScanCounts { busy_pages: counts.busy_pages + unseen_pages, ..counts }
    }

    /// Returns the counts of a sweep, and `true` if it has examined every folio and freed none.
    fn sweep_all(&self, reclaim_lock: &ReclaimLock<'_>, classes: &[ClassId]) -> (ScanCounts, bool) {
        let lru = &self.memory.lru;
        lru.drain_all(&self.memory.folios);
        for class in classes {
            let mut fresh_pages = lru.sizes_of(*class).fresh_pages;
            while fresh_pages > 0 {
                let aged_pages = lru.age(&self.memory.folios, *class, fresh_pages, |_| {});
                fresh_pages = fresh_pages.saturating_sub(aged_pages.max(1));
            }
            // Each list is scanned twice: the first scan may only clear the readers' marks.
            self.shrink_active(reclaim_lock, *class);
            self.shrink_active(reclaim_lock, *class);
        }
        let scan_all = |second_chance| {
            let control = ScanControl::reclaim(WriteOut::MemoryFiles);
            let mut scan = Scan::new(self, reclaim_lock, ScanControl { second_chance, ..control });
            classes.iter().for_each(|class| scan.round(*class, 0, super::ROUND_PAGES));
            scan.finish()
        };
        let first = scan_all(true);
        if first.reclaimed_pages > 0 {
            return (first, false);
        }
        classes.iter().for_each(|class| self.shrink_active(reclaim_lock, *class));
        // Readers may mark folios as fast as this thread scans: now hot folios are evicted, too.
        (scan_all(false), true)
    }

    /// Returns the pinned and the busy pages that a sweep finds.
    #[cfg(test)]
    pub(crate) fn sweep_once(&self) -> (u64, u64) {
        let counts = self.sweep(&self.lock());
        (counts.pinned_pages, counts.busy_pages)
    }

    /// Returns the number of used pages that a sweep with the result `counts` did not examine
    /// because another thread works on them: on no list (about to be filled, or isolated), or
    /// frozen on a list (about to be truncated). Excludes unlisted folios and those of the swapper.
    fn unseen_pages(&self, counts: &ScanCounts) -> u64 {
        let (usage, sizes) = (self.arena().usage(), self.memory.lru.sizes());
        let used_pages = (usage.frame_bytes / PAGE_BYTES).saturating_sub(usage.free_pages);
        let listable_pages = used_pages.saturating_sub(self.memory.lru.unlisted_pages());
        let listed_pages = sizes.listed_pages();
        let known_pages = listed_pages.min(counts.judged_pages()) + self.swapper.pages();
        listable_pages.saturating_sub(known_pages)
    }

    pub(crate) fn activate(&self, used: &mut Vec<FolioRef<'_>>) {
        let is_new = |folio: &&FolioRef<'_>| !folio.folio().flags.get(Flag::Active);
        self.memory.counters.add(Counter::PgActivate, used.iter().filter(is_new).count() as u64);
        for folio in used.iter().filter(is_new).map(FolioRef::folio) {
            self.memory.lru.working_set(folio.flags.class()).note_useful(folio.pages());
        }
        self.memory.lru.put_back(&self.memory.folios, used, Some(ListKind::Active));
    }

    /// Moves all folios of a class that were not used recently from the tail of ACTIVE to the head
    /// of OLD.
    fn shrink_active(&self, reclaim_lock: &ReclaimLock<'_>, class: ClassId) {
        let memory = &self.memory;
        let (scan_pages, mut scanned_pages) = (memory.lru.sizes_of(class).active_pages, 0);
        let mut batch = Vec::with_capacity(BATCH_SLOTS);
        while scanned_pages < scan_pages {
            let left_pages = scan_pages - scanned_pages;
            let list = (class, ListKind::Active);
            memory.lru.isolate(&memory.folios, list, left_pages, &mut batch);
            if batch.is_empty() {
                break;
            }
            scanned_pages += batch.iter().map(|folio| folio.folio().pages()).sum::<u64>();
            let (mut used, mut unused): (Vec<_>, Vec<_>) =
                batch.drain(..).partition(|folio| test_and_clear_referenced(reclaim_lock, folio));
            memory.lru.put_back(&memory.folios, &mut used, None);
            memory.lru.put_back(&memory.folios, &mut unused, Some(ListKind::Old));
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

/// Folios that were evicted together, unlocked, and whose frames are freed together.
#[derive(Debug, Default)]
pub(super) struct EvictedBatch<'a>(pub(super) Vec<Frozen<'a>>);

impl EvictedBatch<'_> {
    /// Frees the frames, and if pages were read in runs recently, clears the extents around them.
    pub(super) fn free(
        mut self,
        reclaim: &Reclaim,
        reclaim_lock: &ReclaimLock<'_>,
        counts: &mut ScanCounts,
    ) {
        let memory = &reclaim.memory;
        let is_compacted = memory.arena.is_filled_in_runs();
        let place = |frozen: &Frozen<'_>| (frozen.id(), frozen.folio().pages());
        let places: Vec<_> = self.0.iter().filter(|_| is_compacted).map(place).collect();
        let pages = self.0.iter().map(|frozen| frozen.folio().pages()).sum();
        Frozen::free_all(&mut self.0);
        memory.arena.note_evicted(pages);
        reclaim.compact(reclaim_lock, &places, counts);
    }
}

impl Reclaim {
    /// Evicts a folio that the caller has isolated, or returns it with the reason.
    ///
    /// With `second_chance`, a recently used folio stays. A dirty one always stays. One that is
    /// evicted is added to `evicted`.
    pub(super) fn evict<'a>(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        folio: FolioRef<'a>,
        second_chance: bool,
        evicted: &mut EvictedBatch<'a>,
    ) -> (EvictOutcome, Option<FolioRef<'a>>) {
        #[cfg(all(test, not(loom)))]
        crate::sync::test_hook::reach("before a victim is locked");
        let Some(locked) = folio.try_lock() else { return (EvictOutcome::Busy, Some(folio)) };
        let Some(inode) = reclaim_lock.owner(&locked) else {
            // Truncated: the thread that puts the last reference frees it.
            return (EvictOutcome::Pinned, Some(folio));
        };
        if locked.flags.write_state().is_writing() {
            let is_for_device = inode.device.is_some();
            let outcome = if is_for_device { EvictOutcome::Busy } else { EvictOutcome::Swapping };
            return (outcome, Some(folio));
        }
        if second_chance && inode.mapping.test_and_clear_referenced(&locked) {
            return (EvictOutcome::Activate, Some(folio));
        }
        // Before the references: a thread that is about to write it back holds one.
        if locked.flags.write_state().is_dirty() {
            let mut outcome = EvictOutcome::of_dirty(inode);
            if outcome == EvictOutcome::Dirty && is_shut_for(inode, folio.id()) {
                outcome = EvictOutcome::Unwritten;
            }
            return (outcome, Some(folio));
        }
        if is_pinned(&folio) {
            return (EvictOutcome::Pinned, Some(folio));
        }
        match inode.evict(folio, &locked, self.shadow_of(&locked)) {
            Ok(frozen) => {
                self.note_eviction(inode, &locked, Counter::PgSteal);
                frozen.note_removed();
                evicted.0.push(frozen);
                (EvictOutcome::Evicted, None)
            }
            Err(EvictError::Referenced(folio)) => (EvictOutcome::Pinned, Some(folio)),
            Err(EvictError::Dirty(folio)) => (EvictOutcome::Busy, Some(folio)),
        }
    }

    /// Returns the shadow for the eviction of an isolated folio.
    pub(crate) fn shadow_of(&self, locked: &LockedFolio<'_>) -> Shadow {
        let set = self.memory.lru.working_set(locked.flags.class());
        match ListKind::of(locked) {
            ListKind::Active => set.make_far_shadow(),
            ListKind::Fresh | ListKind::Old => set.make_shadow(locked.pages()),
        }
    }

    pub(crate) fn note_eviction(&self, inode: &Inode, locked: &LockedFolio<'_>, counter: Counter) {
        let unused = u64::from(locked.flags.get(Flag::Readahead));
        self.memory.counters.add(counter, 1);
        self.memory.counters.add(Counter::ReadaheadUnused, unused);
        self.memory.lru.classes.note_eviction(locked.flags.class(), locked.pages());
        FileCounts::add(&inode.counts.evicted_folios, 1);
        FileCounts::add(&inode.counts.readahead_unused, unused);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::page::{Lookup, PAGE_BYTES};
    use crate::reclaim::outcome::WriteOut;
    use crate::sync::{Ordering, test_hook};
    use crate::{Access, Cache, OpenOptions};
    use std::sync::mpsc;
    use std::time::Duration;

    /// A page is written after it was chosen as a victim.
    #[test]
    fn a_victim_that_becomes_dirty_stays() {
        const PAGES: u64 = 1024;
        const WRITTEN: usize = 32;
        let hour = Duration::from_secs(60 * 60);
        let cache = Cache::builder().memory(1 << 20).dirty_age_max(hour).build().unwrap();
        let disk = tempfile::tempfile().unwrap();
        disk.set_len(PAGES * PAGE_BYTES).unwrap();
        let file = cache.open_fd(disk.into(), &OpenOptions::new().write(true)).unwrap();
        file.set_access(Access::Random);
        let (writer, (tell, told)) = (file.clone(), mpsc::channel());
        // The pages that were read first are examined first. Only those in memory can be written
        // while this thread reclaims.
        test_hook::set("before a victim is locked", move || {
            let inode = &writer.handle.inode;
            let mapping = &inode.mapping;
            let is_resident =
                |page: &u64| mapping.table().load(*page, Ordering::Relaxed).is_folio();
            for page in (0..PAGES).filter(is_resident).take(WRITTEN) {
                writer.write_all_at(&[9], page * PAGE_BYTES).unwrap();
                let found = mapping.get_folio(&inode.memory.folios, page);
                let Lookup::Folio(folio) = found else { panic!("{found:?}") };
                // A written page is marked as used, and would stay for that.
                mapping.test_and_clear_referenced(&folio.lock());
                tell.send(page).unwrap();
            }
        });
        let (mut byte, mut written) = ([1], Vec::new());
        // The thread of reclaim, which has no hook, may be ahead for a whole round.
        for _ in 0..100 {
            for page in 0..PAGES {
                file.read_exact_at(&mut byte, page * PAGE_BYTES).unwrap();
            }
            written.extend(told.try_iter());
            if !written.is_empty() {
                break;
            }
        }
        assert_eq!(written.len(), WRITTEN, "readers evict pages themselves");
        for page in written {
            file.read_exact_at(&mut byte, page * PAGE_BYTES).unwrap();
            assert_eq!(byte, [9], "page {page}");
        }
    }

    /// One call asks for more than the class of the lowest order has above its floor, as often as
    /// there are shares of its lists.
    #[test]
    fn a_class_gives_what_it_has_above_its_floor_whatever_is_asked_for() {
        const INDEX_PAGES: u64 = 1024;
        const FLOOR_PAGES: u64 = INDEX_PAGES - 40;
        const BATCH_REST_PAGES: u64 = 31;
        for others_order in [128, 0] {
            let cache = Cache::builder().memory(16 << 20).readahead_max(0).build().unwrap();
            let [index, table] = ["index", "table"].map(|name| cache.class(name).unwrap());
            index.set_order(0);
            table.set_order(others_order);
            let sizes = [("index", INDEX_PAGES), ("table", 2 * INDEX_PAGES)];
            let files = sizes.map(|(name, pages)| {
                let disk = tempfile::tempfile().unwrap();
                disk.set_len(pages * PAGE_BYTES).unwrap();
                let file = cache.open_fd(disk.into(), &OpenOptions::new().class(name)).unwrap();
                file.read_exact_at(&mut vec![0; (pages * PAGE_BYTES) as usize], 0).unwrap();
                file
            });
            index.set_floor(FLOOR_PAGES * PAGE_BYTES).unwrap();
            let reclaim = &files[0].handle.reclaim;
            reclaim.memory.lru.drain_all(&reclaim.memory.folios);
            let counts = reclaim.shrink(&reclaim.lock(), 1000, WriteOut::Nothing);
            assert!(counts.reclaimed_pages >= 1000, "{counts:?}");
            let resident_pages = index.stats().resident_bytes / PAGE_BYTES;
            assert!(resident_pages >= FLOOR_PAGES - BATCH_REST_PAGES, "{resident_pages}");
        }
    }
}

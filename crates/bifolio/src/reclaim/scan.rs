//! Scanning the lists: which folios are looked at, in which order, and how many.

use super::pageout::{Verdict, WriteOut};
use super::spiller::SPILL_PAGES;
use super::unmap::{Owners, Unmapping};
use super::{Reclaim, Turn};
use crate::folio::{BATCH_SLOTS, Flag, FolioRef};
use crate::frames::ROW_PAGES;
use crate::lru::ListKind;
use crate::mapping::PAGE_BYTES;
use crate::stats::Counter;

/// The first share of a list that is looked at: one 4096th; the last one is all of it.
const PRIORITY_MAX: u32 = 12;

/// Isolated folios of memory files that are to be spilled.
#[derive(Debug, Default)]
struct Unspilled<'a> {
    folios: Vec<FolioRef<'a>>,
    pages: u64,
    /// Of those, pages in regions, clean or not: no more of them leave than are wanted.
    loose_pages: u64,
}

impl<'a> Unspilled<'a> {
    fn add(&mut self, folio: FolioRef<'a>) {
        self.pages += folio.folio().pages();
        self.folios.push(folio);
    }

    fn add_loose(&mut self, folio: FolioRef<'a>) {
        self.loose_pages += folio.folio().pages();
        self.add(folio);
    }

    /// How many pages are worth looking at.
    fn scan_pages(&self) -> u64 {
        if self.pages == self.loose_pages { 0 } else { SPILL_PAGES }
    }
}

/// Pages of the inactive list that are looked at in one go: a row of frames, which is all that goes
/// where folios leave in the order in which they came. Few, as each may free another row.
const STEP_PAGES: u64 = ROW_PAGES as u64;

/// How a scan of the inactive list goes about it.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    /// What was used lately stays.
    pub(super) second_chance: bool,
    pub(super) write_out: WriteOut,
    /// What counts the evicted folios.
    pub(super) counter: Counter,
}

impl How {
    /// As reclaim does; who is used lately has a second chance.
    pub(super) fn reclaim(write_out: WriteOut) -> Self {
        Self { second_chance: true, write_out, counter: Counter::PgSteal }
    }
}

/// What a scan came to, pages.
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
    /// Of memory files: to be spilled, and not on their way.
    pub(super) unspilled_pages: u64,
    /// Of memory files: on their way to the spill.
    pub(super) spilling_pages: u64,
}

impl ScanCounts {
    pub(super) fn add(&mut self, other: &ScanCounts) {
        self.reclaimed_pages += other.reclaimed_pages;
        self.pinned_pages += other.pinned_pages;
        self.unwritten_pages += other.unwritten_pages;
        self.busy_pages += other.busy_pages;
        self.dirty_pages += other.dirty_pages;
        self.unspilled_pages += other.unspilled_pages;
        self.spilling_pages += other.spilling_pages;
    }

    pub(super) fn note(&mut self, verdict: Verdict, pages: u64) {
        match verdict {
            Verdict::Evicted => self.reclaimed_pages += pages,
            Verdict::Pinned => self.pinned_pages += pages,
            Verdict::Unwritten => self.unwritten_pages += pages,
            Verdict::Busy => self.busy_pages += pages,
            Verdict::Dirty => {
                self.dirty_pages += pages;
                self.busy_pages += pages;
            }
            Verdict::Unspilled => self.unspilled_pages += pages,
            Verdict::Spilling => self.spilling_pages += pages,
            Verdict::Activate | Verdict::Moved => {}
        }
    }
}

impl Reclaim {
    /// Frees `wanted_pages` or so, looking at ever larger shares of the inactive list; fewer if so
    /// many are on their way to the spill.
    pub(super) fn shrink(
        &self,
        turn: &Turn<'_>,
        wanted_pages: u64,
        write_out: WriteOut,
    ) -> ScanCounts {
        self.shrink_until(turn, wanted_pages, write_out, 0)
    }

    /// Whether so many pages are free, or will be when what is on its way to the spill is there.
    fn is_enough(&self, freed_pages: u64, wanted_pages: u64, how: How) -> bool {
        if freed_pages >= wanted_pages || self.spill.is_none() {
            return freed_pages >= wanted_pages;
        }
        let waits = how.write_out == WriteOut::MemoryFiles;
        let coming_pages = if waits { self.spiller.coming_pages() } else { 0 };
        freed_pages + coming_pages >= wanted_pages || coming_pages > 0 && !self.has_room_in_line()
    }

    /// Frees a round's pages or so of what is clean, if the smallest share of the list has them.
    pub(super) fn shrink_a_little(&self, turn: &Turn<'_>) -> ScanCounts {
        self.shrink_until(turn, super::ROUND_PAGES, WriteOut::Nothing, PRIORITY_MAX)
    }

    fn shrink_until(
        &self,
        turn: &Turn<'_>,
        wanted_pages: u64,
        write_out: WriteOut,
        priority_min: u32,
    ) -> ScanCounts {
        let mut total = ScanCounts::default();
        let how = How::reclaim(write_out);
        let mut unmapping = Unmapping::new(self, Owners::Turn(turn), how);
        for priority in (priority_min..=PRIORITY_MAX).rev() {
            let sizes = self.memory.lru.sizes();
            let share = |pages: u64| (pages >> priority).max(super::ROUND_PAGES);
            if sizes.is_inactive_low() || sizes.inactive_pages == 0 {
                self.shrink_active(turn, share(sizes.active_pages));
            }
            let inactive_pages = self.memory.lru.sizes().inactive_pages;
            let looked_at = share(inactive_pages).min(inactive_pages);
            let left_pages = wanted_pages.saturating_sub(total.reclaimed_pages);
            let scanned = self.shrink_inactive(turn, looked_at, left_pages, how, &mut unmapping);
            total.add(&scanned);
            if self.is_enough(total.reclaimed_pages, wanted_pages, how) {
                break;
            }
        }
        unmapping.finish(&mut total);
        total
    }

    /// The last resort: drains every batch, then looks at every folio once, marks or not.
    pub(super) fn sweep(&self, turn: &Turn<'_>) -> ScanCounts {
        self.memory.counters.add(Counter::LruDrain, 1);
        self.memory.lru.drain_all(&self.memory.folios);
        // Twice round each list: the first may only clear the readers' marks.
        let active_pages = self.memory.lru.sizes().active_pages;
        self.shrink_active(turn, active_pages);
        self.shrink_active(turn, self.memory.lru.sizes().active_pages);
        let inactive_pages = self.memory.lru.sizes().inactive_pages;
        let mut how = How::reclaim(WriteOut::MemoryFiles);
        let first = self.shrink_inactive_wholly(turn, inactive_pages, how);
        if first.reclaimed_pages > 0 {
            return first;
        }
        self.shrink_active(turn, self.memory.lru.sizes().active_pages);
        // Readers may mark folios as fast as we look: what is hot goes too, now.
        let inactive_pages = self.memory.lru.sizes().inactive_pages;
        how.second_chance = false;
        let mut counts = self.shrink_inactive_wholly(turn, inactive_pages, how);
        counts.busy_pages += self.unseen_pages(&counts);
        counts
    }

    /// Pages that a sweep finds pinned, and busy.
    #[cfg(test)]
    pub(crate) fn sweep_once(&self) -> (u64, u64) {
        let counts = self.sweep(&self.take_turn());
        (counts.pinned_pages, counts.busy_pages)
    }

    /// Pages in use that a sweep which came to `counts` has not judged: somebody is in the middle
    /// of something with them. They are on no list (about to be filled, isolated), or frozen there
    /// (about to leave with a cut). Those that come to no list are not among them, nor those that
    /// are the spiller's.
    fn unseen_pages(&self, counts: &ScanCounts) -> u64 {
        let (usage, sizes) = (self.arena().usage(), self.memory.lru.sizes());
        let used_pages = (usage.frame_bytes / PAGE_BYTES).saturating_sub(usage.free_pages);
        let listable_pages = used_pages.saturating_sub(self.memory.lru.unlisted_pages());
        let listed_pages = sizes.inactive_pages + sizes.active_pages;
        let judged_pages = counts.reclaimed_pages
            + counts.pinned_pages
            + counts.unwritten_pages
            + counts.busy_pages
            + counts.unspilled_pages
            + counts.spilling_pages;
        let known_pages = listed_pages.min(judged_pages) + self.spiller.pages();
        listable_pages.saturating_sub(known_pages)
    }

    /// As [`Self::shrink_inactive`], until a round's pages are free; nothing is under way then.
    fn shrink_inactive_wholly(&self, turn: &Turn<'_>, scan_pages: u64, how: How) -> ScanCounts {
        let mut unmapping = Unmapping::new(self, Owners::Turn(turn), how);
        let wanted_pages = super::ROUND_PAGES;
        let mut counts = self.shrink_inactive(turn, scan_pages, wanted_pages, how, &mut unmapping);
        unmapping.finish(&mut counts);
        counts
    }

    /// Looks at up to `scan_pages` of the inactive tail, until `wanted_pages` are free, or will be
    /// when what is on its way to the spill is there.
    fn shrink_inactive<'t>(
        &'t self,
        turn: &Turn<'_>,
        scan_pages: u64,
        wanted_pages: u64,
        how: How,
        unmapping: &mut Unmapping<'t>,
    ) -> ScanCounts {
        let memory = &self.memory;
        let mut counts = ScanCounts::default();
        let mut scanned_pages = 0;
        let mut batch = Vec::with_capacity(BATCH_SLOTS);
        let mut unspilled = Unspilled::default();
        while !self.is_enough(counts.reclaimed_pages + unspilled.loose_pages, wanted_pages, how) {
            // What leaves for the spill leaves together: a few more are looked at for that.
            let scan_pages = scan_pages.max(unspilled.scan_pages()).max(unmapping.scan_pages());
            let left_pages = scan_pages.saturating_sub(scanned_pages).min(STEP_PAGES);
            memory.lru.isolate(&memory.folios, ListKind::Inactive, left_pages, &mut batch);
            if batch.is_empty() {
                break;
            }
            memory.counters.add(Counter::PgScan, batch.len() as u64);
            scanned_pages += batch.iter().map(|folio| folio.folio().pages()).sum::<u64>();
            // Those of regions leave in batches of their own.
            for folio in batch.extract_if(.., |folio| memory.arena.is_loose(folio.id())) {
                let is_wanted = how.write_out == WriteOut::MemoryFiles;
                let choose = || self.choose_for_spill(turn, &folio, how.second_chance);
                match is_wanted.then(choose).flatten() {
                    Some(Ok(())) => unspilled.add_loose(folio),
                    Some(Err(verdict)) => unmapping.keep(folio, verdict, &mut counts),
                    None => unmapping.add(folio, &mut counts),
                }
            }
            self.shrink_folio_list(turn, &mut batch, how, &mut counts, &mut unspilled);
            if unspilled.pages >= SPILL_PAGES {
                self.spill(&mut unspilled, how, unmapping, &mut counts);
            }
        }
        self.spill(&mut unspilled, how, unmapping, &mut counts);
        counts
    }

    /// Leaves what was gathered to the spiller, if that is wanted. What stays is looked at here if
    /// it is in a region, where it may be clean.
    fn spill<'t>(
        &'t self,
        unspilled: &mut Unspilled<'t>,
        how: How,
        unmapping: &mut Unmapping<'t>,
        counts: &mut ScanCounts,
    ) {
        let Unspilled { folios, .. } = std::mem::take(unspilled);
        if folios.is_empty() {
            return;
        }
        let is_wanted = how.write_out == WriteOut::MemoryFiles;
        let left = if is_wanted { self.leave_to_spiller(folios) } else { folios };
        let mut kept = Vec::new();
        for folio in left {
            if self.memory.arena.is_loose(folio.id()) {
                unmapping.add(folio, counts);
            } else {
                counts.note(Verdict::Unspilled, folio.folio().pages());
                kept.push(folio);
            }
        }
        self.memory.lru.put_back(&self.memory.folios, &mut kept, ListKind::Inactive);
    }

    /// Judges each isolated folio; those that stay go back to a list, but for what is to be
    /// spilled.
    fn shrink_folio_list<'a>(
        &self,
        turn: &Turn<'_>,
        batch: &mut Vec<FolioRef<'a>>,
        how: How,
        counts: &mut ScanCounts,
        unspilled: &mut Unspilled<'a>,
    ) {
        let (mut active, mut inactive) = (Vec::new(), Vec::new());
        let mut evicted = Vec::new();
        batch.iter().for_each(|folio| turn.touch_entry(folio));
        for folio in batch.drain(..) {
            let (id, pages) = (folio.id(), folio.folio().pages());
            let (verdict, kept) = self.evict_or_keep(turn, folio, how.second_chance);
            if verdict != Verdict::Unspilled {
                counts.note(verdict, pages);
            }
            match verdict {
                Verdict::Evicted => evicted.push((id, pages)),
                Verdict::Activate => active.extend(kept),
                Verdict::Unspilled => {
                    kept.into_iter().for_each(|folio| unspilled.add(folio));
                }
                _ => inactive.extend(kept),
            }
        }
        let lru = &self.memory.lru;
        self.memory.counters.add(Counter::PgActivate, active.len() as u64);
        lru.put_back(&self.memory.folios, &mut active, ListKind::Active);
        lru.put_back(&self.memory.folios, &mut inactive, ListKind::Inactive);
        self.clear_rows(turn, &evicted, counts);
    }

    /// Moves what was not used lately from the active tail to the inactive head.
    fn shrink_active(&self, turn: &Turn<'_>, scan_pages: u64) {
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
                batch.drain(..).partition(|folio| test_and_clear_referenced(turn, folio));
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
fn test_and_clear_referenced(turn: &Turn<'_>, folio: &FolioRef<'_>) -> bool {
    let Some(locked) = folio.try_lock() else { return true };
    let Some(inode) = turn.owner(&locked) else { return false };
    inode.mapping.test_and_clear_referenced(&locked)
}

//! Clearing extents of frames: what lies beside an evicted folio goes too, or makes room.
//!
//! Called by `scan.rs` with what it has evicted. Folios leave one by one, in the order of their
//! ages, and what an eviction frees would lie scattered between what stays. So an extent in which
//! much is free, or would be soon, is cleared at once:
//!
//! ```text
//!   an extent after an eviction:   [free] [old] [young] [used] [old] [old] [old] [dirty] ...
//!     old: clean, and in the oldest quarter of the inactive list. Looked at as if their turn had
//!       come.
//!     others: moved to partial slots (`evacuate.rs`), where they keep their place on their lists.
//!     What is locked, pinned, or beside its neighbours in the file stays where it is. If that is
//!     too much, or too little is gained, nothing is done.
//!     dirty: stays, too (WRITEBACK-1), until it has been written out. The flusher is told which
//!       pages of files that are. An extent with little to be swapped out is *awaited*: that goes
//!       to the swap with the next folios that leave for it (`swapper.rs`), and the extent is
//!       cleared then.
//! ```
//!
//! Where most folios are dirty, that clears hardly an extent: each has some, and to swap out what
//! stays costs a write, which is in vain if the page is dirty again before it leaves. So that is
//! done where extents are wanted: the arena counts pages that came in order and found no extent
//! with room (`memory::extents`), and for an extent of those one extent is cleared, whatever is
//! dirty in it, of those at hand the one where least is. It takes a few: what has come into extents
//! leaves by extents.
//!
//! What comes into an extent comes at the same time, then: so it is old at the same time, and there
//! is less and less to move. Large folios are extents in themselves. Bounded: an extent is looked
//! at once for each folio evicted from it, and once more when it has been awaited.

use super::scan::{EvictOutcome, ScanCounts};
use super::swapper::ByFile;
use super::{Reclaim, ReclaimLock};
use crate::memory::{EXTENT_PAGES, ListKind};
use crate::page::{Flag, FolioId, LockedFolio, PAGE_BYTES, WriteState};
use crate::stats::Counter;
use crate::swap::Swap;
use crate::sync::Mutex;
use crate::writeback::Cleaner;
use std::collections::VecDeque;
use std::ops::Range;

/// Pages of an extent that must be free or old for the rest to be moved.
const GAIN_PAGES_MIN: u64 = 5;
/// Pages that may stay.
const LEFT_PAGES_MAX: u64 = 3;
/// Pages that are swapped out to clear an extent that nobody waits for.
const SWAPPED_PAGES_MAX: u64 = 4;
/// Extents that are awaited at the same time; the oldest is forgotten for another.
const AWAITED_MAX: usize = 32;

/// An extent, and the pages of each of its folios.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Extent {
    number: u32,
    pages: u64,
}

impl Extent {
    fn of(id: FolioId, pages: u64) -> Self {
        Self { number: id.0 / EXTENT_PAGES, pages }
    }

    fn frames(self) -> Range<u32> {
        self.number * EXTENT_PAGES..(self.number + 1) * EXTENT_PAGES
    }

    /// Pages of so many of its folios.
    fn pages_of(self, folios: usize) -> u64 {
        folios as u64 * self.pages
    }
}

/// Extents that are to be cleared when what is dirty in them has been swapped out, the oldest
/// first.
#[derive(Debug, Default)]
pub(super) struct AwaitedExtents(Mutex<VecDeque<Extent>>);

impl AwaitedExtents {
    fn add(&self, extent: Extent) {
        let mut extents = self.0.lock();
        if extents.contains(&extent) {
            return;
        }
        if extents.len() == AWAITED_MAX {
            extents.pop_front();
        }
        extents.push_back(extent);
    }

    fn next(&self) -> Option<Extent> {
        self.0.lock().pop_front()
    }
}

/// The content of an extent.
#[derive(Debug, Default)]
struct Survey {
    free: usize,
    old: Vec<FolioId>,
    movable: Vec<FolioId>,
    dirty: Vec<FolioId>,
    fixed: usize,
}

impl Survey {
    /// Whether enough of the extent is free, or would be soon.
    fn is_worth_it(&self, extent: Extent) -> bool {
        extent.pages_of(self.free + self.old.len()) >= GAIN_PAGES_MIN
    }

    /// Whether too much stays in the extent while what is dirty does.
    fn is_blocked(&self, extent: Extent) -> bool {
        extent.pages_of(self.fixed + self.dirty.len()) > LEFT_PAGES_MAX
    }

    /// The cost of clearing the extent: copies, and writes, which are dear.
    fn cost(&self) -> usize {
        4 * self.dirty.len() + self.movable.len()
    }
}

impl Reclaim {
    /// Clears the extents of the evicted folios, given by where they were and their pages, as far
    /// as that is worth it, or extents are wanted.
    pub(super) fn compact(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        evicted: &[(FolioId, u64)],
        counts: &mut ScanCounts,
    ) {
        let small = evicted.iter().filter(|(_, pages)| *pages < u64::from(EXTENT_PAGES));
        let mut extents: Vec<_> = small.map(|(id, pages)| Extent::of(*id, *pages)).collect();
        extents.sort_unstable();
        extents.dedup();
        let mut others = Vec::new();
        for extent in extents {
            let survey = self.survey(extent);
            if extent.pages_of(survey.fixed) > LEFT_PAGES_MAX {
                continue;
            }
            if survey.is_worth_it(extent) {
                let unswapped = self.have_written(reclaim_lock, &survey.dirty);
                if unswapped == 0 || !survey.is_blocked(extent) {
                    self.compact_extent(reclaim_lock, extent, survey, counts);
                    continue;
                }
                if extent.pages_of(unswapped) <= SWAPPED_PAGES_MAX {
                    self.awaited_extents.add(extent);
                    continue;
                }
            }
            others.push((survey.cost(), extent));
        }
        if self.arena().wants_extents() {
            self.compact_wanted_extents(reclaim_lock, others, counts);
        }
    }

    /// Clears as many extents as are wanted, if there are so many, the cheapest first; they are
    /// given with what that costs.
    fn compact_wanted_extents(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        mut extents: Vec<(usize, Extent)>,
        counts: &mut ScanCounts,
    ) {
        extents.sort_unstable();
        for (_, extent) in extents {
            if !self.arena().take_wanted_extent() {
                break;
            }
            // Folios that made room in other extents since may be here.
            let survey = self.survey(extent);
            if !survey.is_blocked(extent) {
                self.compact_extent(reclaim_lock, extent, survey, counts);
            } else if self.have_written(reclaim_lock, &survey.dirty) > 0 {
                self.awaited_extents.add(extent);
            }
        }
    }

    /// Tells the flusher of dirty folios; answers how many of them are to be swapped out.
    fn have_written(&self, reclaim_lock: &ReclaimLock<'_>, dirty: &[FolioId]) -> usize {
        let mut unswapped = 0;
        for id in dirty {
            let Ok(folio) = self.memory.folios.try_get(*id) else { continue };
            let Some(locked) = folio.try_lock() else { continue };
            let Some(inode) = reclaim_lock.owner(&locked) else { continue };
            if inode.store.cleaner() != Cleaner::Flusher {
                unswapped += usize::from(inode.store.cleaner() == Cleaner::Swapper);
                continue;
            }
            let start = locked.index() * PAGE_BYTES;
            inode.write_soon(start..start + locked.pages() * PAGE_BYTES);
        }
        unswapped
    }

    /// Takes awaited extents, with about so many dirty pages at the most, and adds those to what is
    /// about to be swapped out. (What stays keeps its slot, while it is clean: so only where each
    /// page has one.)
    pub(super) fn take_awaited_rows<'a>(
        &'a self,
        reclaim_lock: &ReclaimLock<'_>,
        pages_max: u64,
        leaving: &mut ByFile<'a>,
    ) -> Vec<Extent> {
        let has_slot = |swap: &Swap| swap.pages() <= u64::from(swap.capacity_slots_max());
        if !self.swap.as_deref().is_some_and(has_slot) {
            return Vec::new();
        }
        let (mut extents, mut pages) = (Vec::new(), 0);
        while pages < pages_max
            && let Some(extent) = self.awaited_extents.next()
        {
            let survey = self.survey(extent);
            for id in &survey.dirty {
                let Ok(folio) = self.memory.folios.try_get(*id) else { continue };
                let keep_owner = |locked: LockedFolio<'_>| reclaim_lock.owner(&locked)?.keep();
                let Some(inode) = folio.try_lock().and_then(keep_owner) else { continue };
                if inode.store.cleaner() == Cleaner::Swapper {
                    leaving.add(inode, folio);
                }
            }
            pages += survey.dirty.len() as u64 * extent.pages;
            extents.push(extent);
        }
        extents
    }

    /// Clears these extents, now that their dirty folios were swapped out as far as that could be.
    pub(super) fn clear_awaited_rows(&self, reclaim_lock: &ReclaimLock<'_>, extents: Vec<Extent>) {
        for extent in extents {
            let survey = self.survey(extent);
            if !survey.is_blocked(extent) {
                self.compact_extent(reclaim_lock, extent, survey, &mut ScanCounts::default());
            }
        }
    }

    fn compact_extent(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        extent: Extent,
        survey: Survey,
        counts: &mut ScanCounts,
    ) {
        let mut left = survey.fixed;
        for id in survey.movable {
            left += usize::from(!self.migrate(reclaim_lock, id));
            if extent.pages_of(left) > LEFT_PAGES_MAX {
                return;
            }
        }
        for id in survey.old {
            self.evict_early(reclaim_lock, id, counts);
        }
    }

    /// Looks at an extent; hints, all of it.
    fn survey(&self, extent: Extent) -> Survey {
        let memory = &self.memory;
        let mut survey = Survey::default();
        let mut on_list = Vec::with_capacity(EXTENT_PAGES as usize);
        for frame in extent.frames().step_by(extent.pages as usize) {
            let folio = memory.folio(FolioId(frame));
            let flags = &folio.flags;
            if folio.references() == 0 {
                survey.free += 1;
            } else if folio.pages() != extent.pages || !flags.get(Flag::OnLru) {
                survey.fixed += 1;
            } else if flags.write_state() == WriteState::Clean {
                on_list.push(FolioId(frame));
            } else {
                survey.dirty.push(FolioId(frame));
            }
        }
        survey.old = memory.lru.old_among(&memory.folios, &on_list);
        on_list.retain(|id| !survey.old.contains(id));
        survey.movable = on_list;
        survey
    }

    /// Evicts a folio whose turn has not quite come; one in use becomes active and is moved.
    fn evict_early(&self, reclaim_lock: &ReclaimLock<'_>, id: FolioId, counts: &mut ScanCounts) {
        let memory = &self.memory;
        let Ok(folio) = memory.folios.try_get(id) else { return };
        if !memory.lru.isolate_one(&memory.folios, id) {
            return;
        }
        let pages = folio.folio().pages();
        memory.counters.add(Counter::PgScan, 1);
        let (outcome, kept) = self.evict_or_keep(reclaim_lock, folio, true);
        counts.note(outcome, pages);
        let Some(folio) = kept else { return };
        let kind = match outcome {
            EvictOutcome::Activate => ListKind::Active,
            _ => ListKind::Inactive,
        };
        let id = folio.id();
        memory.lru.put_back(&memory.folios, &mut vec![folio], kind);
        if kind == ListKind::Active {
            self.migrate(reclaim_lock, id);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn extent(number: u32) -> Extent {
        Extent { number, pages: 1 }
    }

    #[test]
    fn awaited_rows_are_few_and_the_oldest_is_forgotten() {
        let extents = AwaitedExtents::default();
        for number in (0..AWAITED_MAX as u32).chain([0, 1]) {
            extents.add(extent(number));
        }
        extents.add(extent(100));
        assert_eq!(extents.next(), Some(extent(1)));
        let rest: Vec<_> = std::iter::from_fn(|| extents.next()).collect();
        assert_eq!((rest.len(), rest[0], rest[30]), (31, extent(2), extent(100)));
    }

    #[test]
    fn a_row_of_larger_folios_is_judged_by_its_pages() {
        let extent = Extent { number: 3, pages: 4 };
        assert_eq!(extent.frames(), 48..64);
        let survey = |free| Survey { free, fixed: 1, ..Survey::default() };
        assert!(!survey(1).is_worth_it(extent) && survey(2).is_worth_it(extent));
        assert!(survey(2).is_blocked(extent));
        assert!(!survey(4).is_blocked(Extent { number: 3, pages: 2 }));
    }

    #[test]
    fn dirty_pages_block_an_extent_and_cost_more_than_a_copy() {
        let ids = |count: u32| (0..count).map(FolioId).collect::<Vec<_>>();
        let survey = Survey { free: 3, old: ids(2), movable: ids(7), dirty: ids(3), fixed: 1 };
        assert!(survey.is_worth_it(extent(0)) && survey.is_blocked(extent(0)));
        let moved = Survey { movable: ids(10), dirty: ids(0), ..survey };
        assert!(!moved.is_blocked(extent(0)));
        let half = Survey { free: 2, old: ids(2), movable: ids(9), dirty: ids(3), fixed: 0 };
        assert!(
            !half.is_worth_it(extent(0))
                && !half.is_blocked(extent(0))
                && half.cost() > moved.cost()
        );
    }
}

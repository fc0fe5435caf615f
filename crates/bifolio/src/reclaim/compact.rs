//! Clears extents of frames: when a folio is evicted, its neighbours in memory are evicted or
//! moved, too.
//!
//! Called by `scan.rs` and `swapper.rs` with the folios that they have evicted. Folios are evicted
//! one by one, in the order of their age, so that without this step the freed frames would be
//! scattered between the remaining folios. A scan of a file would then be read into scattered
//! frames, at half the speed after random writes. So an extent that is or soon will be mostly free
//! is cleared at once:
//!
//! ```text
//!   an extent after an eviction:   [free] [old] [young] [used] [old] [old] [old] [dirty] ...
//!     old: clean, and in the oldest quarter of the inactive list. Evicted now, unless in use.
//!     young, used: moved to partial slots (`evacuate.rs`), and keep their positions on the lists.
//!     fixed: locked, pinned, or adjacent to their neighbours in the file. They stay. If there
//!       are too many of them, or too little is gained, nothing is done.
//!     dirty: stay, too (WRITEBACK-1). The flusher is asked to write these pages.
//! ```
//!
//! The folios that then fill the extent are of the same age, so they become old together, and less
//! and less must be moved. A large folio is an extent by itself. The work is bounded: an extent is
//! examined once for each folio evicted from it.

use super::scan::{EvictOutcome, ScanCounts};
use super::{Reclaim, ReclaimLock};
use crate::memory::{EXTENT_PAGES, ListKind};
use crate::page::{Flag, FolioId, PAGE_BYTES, WriteState};
use crate::stats::Counter;
use crate::writeback::Cleaner;
use std::ops::Range;

/// Pages of an extent that must be free or old before the others are moved.
const GAIN_PAGES_MIN: u64 = 5;
/// Pages that may remain in a cleared extent.
const REMAINING_PAGES_MAX: u64 = 3;

/// An extent, and the number of pages of each of its folios.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Extent {
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

    /// Returns the number of pages of `folios` of its folios.
    fn pages_of(self, folios: usize) -> u64 {
        folios as u64 * self.pages
    }
}

/// Folios of an extent, by state.
#[derive(Debug, Default)]
struct Survey {
    free: usize,
    old: Vec<FolioId>,
    movable: Vec<FolioId>,
    dirty: Vec<FolioId>,
    fixed: usize,
}

impl Survey {
    /// Returns `true` if enough of the extent is free or old.
    fn is_worth_it(&self, extent: Extent) -> bool {
        extent.pages_of(self.free + self.old.len()) >= GAIN_PAGES_MIN
    }

    /// Returns `true` if too many pages must stay in the extent.
    fn is_blocked(&self, extent: Extent) -> bool {
        extent.pages_of(self.fixed + self.dirty.len()) > REMAINING_PAGES_MAX
    }
}

impl Reclaim {
    /// Clears the extents of evicted folios, given by their former frames and their pages, if that
    /// is worth it.
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
        for extent in extents {
            let survey = self.survey(extent);
            let is_held = extent.pages_of(survey.fixed) > REMAINING_PAGES_MAX;
            if is_held || !survey.is_worth_it(extent) {
                continue;
            }
            self.have_written(reclaim_lock, &survey.dirty);
            if !survey.is_blocked(extent) {
                self.compact_extent(reclaim_lock, extent, survey, counts);
            }
        }
    }

    /// Asks the flusher to write dirty folios.
    fn have_written(&self, reclaim_lock: &ReclaimLock<'_>, dirty: &[FolioId]) {
        for id in dirty {
            let Ok(folio) = self.memory.folios.try_get(*id) else { continue };
            let Some(locked) = folio.try_lock() else { continue };
            let Some(inode) = reclaim_lock.owner(&locked) else { continue };
            if inode.store.cleaner() == Cleaner::Flusher {
                let start = locked.index() * PAGE_BYTES;
                inode.write_soon(start..start + locked.pages() * PAGE_BYTES);
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
            if extent.pages_of(left) > REMAINING_PAGES_MAX {
                return;
            }
        }
        for id in survey.old {
            self.evict_early(reclaim_lock, id, counts);
        }
    }

    /// Examines an extent. The results are hints.
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

    /// Evicts a folio that is not at the tail of its list yet. A folio in use becomes active and is
    /// moved.
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
    fn an_extent_of_larger_folios_is_judged_by_its_pages() {
        let extent = Extent { number: 3, pages: 4 };
        assert_eq!(extent.frames(), 48..64);
        let survey = |free| Survey { free, fixed: 1, ..Survey::default() };
        assert!(!survey(1).is_worth_it(extent) && survey(2).is_worth_it(extent));
        assert!(survey(2).is_blocked(extent));
        assert!(!survey(4).is_blocked(Extent { number: 3, pages: 2 }));
    }

    #[test]
    fn dirty_pages_block_an_extent() {
        let ids = |count: u32| (0..count).map(FolioId).collect::<Vec<_>>();
        let survey = Survey { free: 3, old: ids(2), movable: ids(7), dirty: ids(3), fixed: 1 };
        assert!(survey.is_worth_it(extent(0)) && survey.is_blocked(extent(0)));
        assert!(!Survey { dirty: ids(2), ..survey }.is_blocked(extent(0)));
        let half = Survey { free: 2, old: ids(2), movable: ids(9), dirty: ids(3), fixed: 0 };
        assert!(!half.is_worth_it(extent(0)) && !half.is_blocked(extent(0)));
    }
}

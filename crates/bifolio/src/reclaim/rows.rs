//! Clearing rows of frames: what lies beside an evicted folio goes too, or makes room.
//!
//! Called by `scan.rs` with what it has evicted. Folios leave one by one, in the order of their
//! ages, and what an eviction frees would lie scattered between what stays. So a row in which much
//! is free, or would be soon, is cleared at once:
//!
//! ```text
//!   a row after an eviction:   [free] [old] [young] [used] [old] [old] [old] [dirty] ...
//!     old: clean, and in the oldest quarter of the inactive list. Looked at as if their turn had
//!       come.
//!     others: moved to odd slots (`relocate.rs`), where they keep their place on their lists.
//!     What is locked, pinned, or beside its neighbours in the file stays where it is. If that is
//!     too much, or too little is gained, nothing is done.
//!     dirty: stays, too (WRITEBACK-1), until it has been written out. The flusher is told which
//!       pages of files that are. A row with a little that is to be spilled is *awaited*: that goes
//!       to the spill with the next folios that leave for it (`spiller.rs`), and the row is cleared
//!       then.
//! ```
//!
//! Where most folios are dirty, that clears hardly a row: each has some, and to spill what stays
//! costs a write, which is in vain if the page is dirty again before it leaves. So that is done
//! where rows are wanted: the arena counts pages that came in order and found no row with room
//! (`frames::rows`), and for a row of those one row is cleared, whatever is dirty in it, of those
//! at hand the one where least is. It takes a few: what has come into rows leaves by rows.
//!
//! What comes into a row comes at the same time, then: so it is old at the same time, and there is
//! less and less to move. Large folios are rows in themselves. Bounded: a row is looked at once for
//! each folio evicted from it, and once more when it has been awaited.

use super::pageout::Verdict;
use super::scan::ScanCounts;
use super::spiller::ByFile;
use super::{Reclaim, Turn};
use crate::folio::{Flag, FolioId, LockedFolio, WriteState};
use crate::frames::ROW_PAGES;
use crate::lru::ListKind;
use crate::mapping::PAGE_BYTES;
use crate::spill::Spill;
use crate::stats::Counter;
use crate::sync::Mutex;
use std::collections::VecDeque;
use std::ops::Range;

/// Pages of a row that must be free or old for the rest to be moved.
const GAIN_PAGES_MIN: u64 = 5;
/// Pages that may stay.
const LEFT_PAGES_MAX: u64 = 3;
/// Pages that are spilled to clear a row that nobody waits for.
const SPILLED_PAGES_MAX: u64 = 4;
/// Rows that are awaited at the same time; the oldest is forgotten for another.
const AWAITED_MAX: usize = 32;

/// A row, and the pages of each of its folios.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Row {
    number: u32,
    pages: u64,
}

impl Row {
    fn of(id: FolioId, pages: u64) -> Self {
        Self { number: id.0 / ROW_PAGES, pages }
    }

    fn frames(self) -> Range<u32> {
        self.number * ROW_PAGES..(self.number + 1) * ROW_PAGES
    }

    /// Pages of so many of its folios.
    fn pages_of(self, folios: usize) -> u64 {
        folios as u64 * self.pages
    }
}

/// Rows that are to be cleared when what is dirty in them has been spilled, the oldest first.
#[derive(Debug, Default)]
pub(super) struct AwaitedRows(Mutex<VecDeque<Row>>);

impl AwaitedRows {
    fn add(&self, row: Row) {
        let mut rows = self.0.lock();
        if rows.contains(&row) {
            return;
        }
        if rows.len() == AWAITED_MAX {
            rows.pop_front();
        }
        rows.push_back(row);
    }

    fn next(&self) -> Option<Row> {
        self.0.lock().pop_front()
    }
}

/// What is in a row.
#[derive(Debug, Default)]
struct Survey {
    free: usize,
    old: Vec<FolioId>,
    movable: Vec<FolioId>,
    dirty: Vec<FolioId>,
    fixed: usize,
}

impl Survey {
    /// Whether enough of the row is free, or would be soon.
    fn is_worth_it(&self, row: Row) -> bool {
        row.pages_of(self.free + self.old.len()) >= GAIN_PAGES_MIN
    }

    /// Whether too much stays in the row while what is dirty does.
    fn is_blocked(&self, row: Row) -> bool {
        row.pages_of(self.fixed + self.dirty.len()) > LEFT_PAGES_MAX
    }

    /// What it costs to clear the row: copies, and writes, which are dear.
    fn cost(&self) -> usize {
        4 * self.dirty.len() + self.movable.len()
    }
}

impl Reclaim {
    /// Clears the rows of the evicted folios, given by where they were and their pages, as far as
    /// that is worth it, or rows are wanted.
    pub(super) fn clear_rows(
        &self,
        turn: &Turn<'_>,
        evicted: &[(FolioId, u64)],
        counts: &mut ScanCounts,
    ) {
        let small = evicted.iter().filter(|(_, pages)| *pages < u64::from(ROW_PAGES));
        let mut rows: Vec<_> = small.map(|(id, pages)| Row::of(*id, *pages)).collect();
        rows.sort_unstable();
        rows.dedup();
        let mut others = Vec::new();
        for row in rows {
            let survey = self.survey(row);
            if row.pages_of(survey.fixed) > LEFT_PAGES_MAX {
                continue;
            }
            if survey.is_worth_it(row) {
                let unspilled = self.have_written(turn, &survey.dirty);
                if unspilled == 0 || !survey.is_blocked(row) {
                    self.clear_row(turn, row, survey, counts);
                    continue;
                }
                if row.pages_of(unspilled) <= SPILLED_PAGES_MAX {
                    self.awaited_rows.add(row);
                    continue;
                }
            }
            others.push((survey.cost(), row));
        }
        if self.arena().wants_rows() {
            self.clear_wanted_rows(turn, others, counts);
        }
    }

    /// Clears as many rows as are wanted, if there are so many, the cheapest first; they are given
    /// with what that costs.
    fn clear_wanted_rows(
        &self,
        turn: &Turn<'_>,
        mut rows: Vec<(usize, Row)>,
        counts: &mut ScanCounts,
    ) {
        rows.sort_unstable();
        for (_, row) in rows {
            if !self.arena().take_wanted_row() {
                break;
            }
            // What has made room in other rows since may be here.
            let survey = self.survey(row);
            if !survey.is_blocked(row) {
                self.clear_row(turn, row, survey, counts);
            } else if self.have_written(turn, &survey.dirty) > 0 {
                self.awaited_rows.add(row);
            }
        }
    }

    /// Tells the flusher of dirty folios; answers how many of them are to be spilled.
    fn have_written(&self, turn: &Turn<'_>, dirty: &[FolioId]) -> usize {
        let mut unspilled = 0;
        for id in dirty {
            let Ok(folio) = self.memory.folios.try_get(*id) else { continue };
            let Some(locked) = folio.try_lock() else { continue };
            let Some(inode) = turn.owner(&locked) else { continue };
            if inode.is_memory_file() {
                unspilled += usize::from(inode.is_evictable());
                continue;
            }
            let start = locked.index() * PAGE_BYTES;
            self.flusher.write_soon(inode, start..start + locked.pages() * PAGE_BYTES);
        }
        unspilled
    }

    /// Takes awaited rows, with about so many dirty pages at the most, and adds those to what is
    /// about to be spilled. (What stays keeps its slot, while it is clean: so only where each page
    /// has one.)
    pub(super) fn take_awaited_rows<'a>(
        &'a self,
        turn: &Turn<'_>,
        pages_max: u64,
        leaving: &mut ByFile<'a>,
    ) -> Vec<Row> {
        let has_slot = |spill: &Spill| spill.pages() <= u64::from(spill.capacity_slots_max());
        if !self.spill.as_deref().is_some_and(has_slot) {
            return Vec::new();
        }
        let (mut rows, mut pages) = (Vec::new(), 0);
        while pages < pages_max
            && let Some(row) = self.awaited_rows.next()
        {
            let survey = self.survey(row);
            for id in &survey.dirty {
                let Ok(folio) = self.memory.folios.try_get(*id) else { continue };
                let keep_owner = |locked: LockedFolio<'_>| turn.owner(&locked)?.keep();
                let Some(inode) = folio.try_lock().and_then(keep_owner) else { continue };
                if inode.is_evictable() && inode.is_memory_file() {
                    leaving.add(inode, folio);
                }
            }
            pages += survey.dirty.len() as u64 * row.pages;
            rows.push(row);
        }
        rows
    }

    /// What was dirty in these rows has been spilled, as far as that could be.
    pub(super) fn clear_awaited_rows(&self, turn: &Turn<'_>, rows: Vec<Row>) {
        for row in rows {
            let survey = self.survey(row);
            if !survey.is_blocked(row) {
                self.clear_row(turn, row, survey, &mut ScanCounts::default());
            }
        }
    }

    fn clear_row(&self, turn: &Turn<'_>, row: Row, survey: Survey, counts: &mut ScanCounts) {
        let mut left = survey.fixed;
        for id in survey.movable {
            left += usize::from(!self.move_away(turn, id));
            if row.pages_of(left) > LEFT_PAGES_MAX {
                return;
            }
        }
        for id in survey.old {
            self.evict_early(turn, id, counts);
        }
    }

    /// Looks at a row; hints, all of it.
    fn survey(&self, row: Row) -> Survey {
        let memory = &self.memory;
        let mut survey = Survey::default();
        let mut on_list = Vec::with_capacity(ROW_PAGES as usize);
        for frame in row.frames().step_by(row.pages as usize) {
            let folio = memory.folio(FolioId(frame));
            let flags = &folio.flags;
            if folio.references() == 0 {
                survey.free += 1;
            } else if folio.pages() != row.pages || !flags.get(Flag::OnLru) {
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
    fn evict_early(&self, turn: &Turn<'_>, id: FolioId, counts: &mut ScanCounts) {
        let memory = &self.memory;
        let Ok(folio) = memory.folios.try_get(id) else { return };
        if !memory.lru.isolate_one(&memory.folios, id) {
            return;
        }
        let pages = folio.folio().pages();
        memory.counters.add(Counter::PgScan, 1);
        let (verdict, kept) = self.evict_or_keep(turn, folio, true);
        counts.note(verdict, pages);
        let Some(folio) = kept else { return };
        let kind = match verdict {
            Verdict::Activate => ListKind::Active,
            _ => ListKind::Inactive,
        };
        let id = folio.id();
        memory.lru.put_back(&memory.folios, &mut vec![folio], kind);
        if kind == ListKind::Active {
            self.move_away(turn, id);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn row(number: u32) -> Row {
        Row { number, pages: 1 }
    }

    #[test]
    fn awaited_rows_are_few_and_the_oldest_is_forgotten() {
        let rows = AwaitedRows::default();
        for number in (0..AWAITED_MAX as u32).chain([0, 1]) {
            rows.add(row(number));
        }
        rows.add(row(100));
        assert_eq!(rows.next(), Some(row(1)));
        let rest: Vec<_> = std::iter::from_fn(|| rows.next()).collect();
        assert_eq!((rest.len(), rest[0], rest[30]), (31, row(2), row(100)));
    }

    #[test]
    fn a_row_of_larger_folios_is_judged_by_its_pages() {
        let row = Row { number: 3, pages: 4 };
        assert_eq!(row.frames(), 48..64);
        let survey = |free| Survey { free, fixed: 1, ..Survey::default() };
        assert!(!survey(1).is_worth_it(row) && survey(2).is_worth_it(row));
        assert!(survey(2).is_blocked(row));
        assert!(!survey(4).is_blocked(Row { number: 3, pages: 2 }));
    }

    #[test]
    fn what_is_dirty_blocks_a_row_and_costs_more_than_a_copy() {
        let ids = |count: u32| (0..count).map(FolioId).collect::<Vec<_>>();
        let survey = Survey { free: 3, old: ids(2), movable: ids(7), dirty: ids(3), fixed: 1 };
        assert!(survey.is_worth_it(row(0)) && survey.is_blocked(row(0)));
        let moved = Survey { movable: ids(10), dirty: ids(0), ..survey };
        assert!(!moved.is_blocked(row(0)));
        let half = Survey { free: 2, old: ids(2), movable: ids(9), dirty: ids(3), fixed: 0 };
        assert!(
            !half.is_worth_it(row(0)) && !half.is_blocked(row(0)) && half.cost() > moved.cost()
        );
    }
}

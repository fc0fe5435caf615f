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
//!     too much, or too little is gained, nothing is done. What is dirty stays, too (WRITEBACK-1);
//!     it may be clean when the row is looked at again, with its next eviction.
//! ```
//!
//! What comes into a row comes at the same time, then: so it is old at the same time, and there is
//! less and less to move. Large folios are rows in themselves. Bounded: a row is looked at once for
//! each folio evicted from it.

use super::pageout::Verdict;
use super::scan::ScanCounts;
use super::{Reclaim, Turn};
use crate::folio::{Flag, FolioId, WriteState};
use crate::frames::ROW_PAGES;
use crate::lru::ListKind;
use crate::stats::Counter;
use std::ops::Range;

/// The part of a row, in 16ths, that must be free or old for the rest to be moved.
const GAIN_MIN: usize = 5;
/// The part, in 16ths, that may stay.
const LEFT_MAX: usize = 3;

/// What is in a row.
#[derive(Debug, Default)]
struct Survey {
    free: usize,
    old: Vec<FolioId>,
    movable: Vec<FolioId>,
    fixed: usize,
}

impl Reclaim {
    /// Clears the rows of the evicted folios, given by where they were and their pages, as far as
    /// that is worth it.
    pub(super) fn clear_rows(
        &self,
        turn: &Turn<'_>,
        evicted: &[(FolioId, u64)],
        counts: &mut ScanCounts,
    ) {
        let small = evicted.iter().filter(|(_, pages)| *pages < u64::from(ROW_PAGES));
        let mut rows: Vec<_> = small.map(|(id, pages)| (id.0 / ROW_PAGES, *pages)).collect();
        rows.sort_unstable();
        rows.dedup();
        for (row, pages) in rows {
            let frames = row * ROW_PAGES..(row + 1) * ROW_PAGES;
            self.clear_row(turn, frames, pages, counts);
        }
    }

    fn clear_row(&self, turn: &Turn<'_>, frames: Range<u32>, pages: u64, counts: &mut ScanCounts) {
        let survey = self.survey(frames, pages);
        let slots = (u64::from(ROW_PAGES) / pages) as usize;
        let gained = survey.free + survey.old.len();
        if gained * 16 < GAIN_MIN * slots || survey.fixed * 16 > LEFT_MAX * slots {
            return;
        }
        let mut left = survey.fixed;
        for id in survey.movable {
            left += usize::from(!self.move_away(turn, id));
            if left * 16 > LEFT_MAX * slots {
                return;
            }
        }
        for id in survey.old {
            self.evict_early(turn, id, counts);
        }
    }

    /// Looks at a row of folios of `pages` pages each; hints, all of it.
    fn survey(&self, frames: Range<u32>, pages: u64) -> Survey {
        let memory = &self.memory;
        let mut survey = Survey::default();
        let mut on_list = Vec::with_capacity(ROW_PAGES as usize);
        for frame in frames.step_by(pages as usize) {
            let folio = memory.folio(FolioId(frame));
            let flags = &folio.flags;
            if folio.references() == 0 {
                survey.free += 1;
            } else if folio.pages() != pages || !flags.get(Flag::OnLru) {
                survey.fixed += 1;
            } else if flags.write_state() == WriteState::Clean {
                on_list.push(FolioId(frame));
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

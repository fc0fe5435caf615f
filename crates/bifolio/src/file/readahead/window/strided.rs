//! Strided readers: pieces at equal distances, with gaps that are not read.
//!
//! `mod.rs` creates one per handle. It is detected by the distances between consecutive misses that
//! continue no other reader.
//!
//! ```text
//!      distance
//!   |-------------|
//!   [==]          [==]          [==]          [==]          [==]          [==]
//!   learnt        learnt        learnt        position      mark          planned
//! ```
//!
//! The mark is the first piece of the last plan: when the reader reaches it, the next pieces are
//! planned, twice as many each time. A miss on a planned piece means that it was evicted before its
//! use: then half as many are planned. Distances may be negative.

use super::{Limits, PageAccess, Plan};
use arrayvec::ArrayVec;

/// Pieces of one plan, at most.
pub(super) const PIECES_MAX: usize = 16;
/// Consecutive equal distances that make a stride.
const REPEATS_MIN: u32 = 3;

/// Detector of strides, and the strided reader, if there is one.
#[derive(Debug, Default)]
pub(super) struct Strided {
    /// First page of the last miss that continued no reader.
    last_page: Option<u64>,
    /// Distance of that miss from the one before, and the number of times in sequence it was seen.
    distance: i64,
    repeats: u32,
    reader: Option<Reader>,
}

/// Reader with a known distance.
#[derive(Debug)]
struct Reader {
    distance: i64,
    piece_pages: u64,
    /// First page of the piece where the reader was last seen.
    position: u64,
    /// Number of pieces planned from there on.
    planned: u64,
    /// Number of pieces of the last plan, before it was cut.
    count: u64,
    /// Piece that is marked.
    marked: Option<u64>,
}

impl Strided {
    /// Records a miss that continued no reader.
    pub(super) fn note(&mut self, access: &PageAccess) {
        let before = self.last_page.replace(access.first_page);
        let Some(before) = before else { return };
        let distance = access.first_page.wrapping_sub(before).cast_signed();
        self.repeats = if distance == self.distance { self.repeats + 1 } else { 1 };
        self.distance = distance;
    }

    /// Returns the first pieces, if the recorded misses are a stride.
    pub(super) fn start(&mut self, access: &PageAccess, limits: &Limits) -> Option<Plan> {
        let leaves_gaps = access.pages() <= self.distance.unsigned_abs() / 2;
        if self.repeats < REPEATS_MIN || !leaves_gaps {
            return None;
        }
        let reader = Reader {
            distance: self.distance,
            piece_pages: access.pages(),
            position: access.first_page,
            planned: 0,
            count: 1,
            marked: None,
        };
        self.reader.insert(reader).issue(limits)
    }

    /// Returns by how many pieces the reader has advanced, if the access belongs to it: a miss on
    /// one of its pieces up to the first one not planned, or a hit on the mark.
    pub(super) fn steps_to(&self, access: &PageAccess) -> Option<u64> {
        self.reader.as_ref()?.steps_to(access)
    }

    /// Advances the reader by `steps` pieces. Returns the next ones.
    pub(super) fn advance(
        &mut self,
        steps: u64,
        access: &PageAccess,
        limits: &Limits,
    ) -> Option<Plan> {
        self.reader.as_mut()?.advance(steps, access, limits)
    }
}

impl Reader {
    fn steps_to(&self, access: &PageAccess) -> Option<u64> {
        if access.miss.is_none() {
            let marked = self.marked?;
            let mark = self.piece(marked)?;
            return (access.first_page..access.end_page).contains(&mark).then_some(marked);
        }
        let way = access.first_page.wrapping_sub(self.position).cast_signed();
        let is_on_a_piece = way % self.distance == 0;
        let steps = u64::try_from(way / self.distance).ok()?;
        (is_on_a_piece && steps <= self.planned + 1).then_some(steps)
    }

    fn advance(&mut self, steps: u64, access: &PageAccess, limits: &Limits) -> Option<Plan> {
        if steps == 0 {
            // This is the same piece again.
            return None;
        }
        self.position = self.piece(steps)?;
        if access.miss.is_some() && steps <= self.planned {
            self.count = (self.count / 2).max(1);
            self.planned = 0;
        } else {
            self.count = (self.count * 2).min(PIECES_MAX as u64);
            self.planned = self.planned.saturating_sub(steps);
        }
        self.issue(limits)
    }

    /// Issues the next `count` pieces within the file.
    fn issue(&mut self, limits: &Limits) -> Option<Plan> {
        let first = self.planned + 1;
        self.count = self.count.min((limits.max_pages / self.piece_pages).max(1));
        let piece_pages = self.piece_pages.min(limits.max_pages);
        let mut pieces = ArrayVec::new();
        for number in first..first + self.count {
            let Some(start) = self.piece(number) else { break };
            if start >= limits.file_pages {
                break;
            }
            pieces.push(start..(start + piece_pages).min(limits.file_pages));
        }
        self.planned += pieces.len() as u64;
        self.marked = (!pieces.is_empty()).then_some(first);
        let mark = Some(pieces.first()?.start);
        Some(Plan { pieces, mark })
    }

    /// Returns the first page of a piece, counted from the position of the reader; `None` before
    /// the start of the file.
    fn piece(&self, number: u64) -> Option<u64> {
        let way = self.distance.checked_mul(number.try_into().ok()?)?;
        self.position.checked_add_signed(way)
    }
}

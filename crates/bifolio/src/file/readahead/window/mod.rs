//! The arithmetic of readahead: who reads in order, and which pages they will want next.
//!
//! Called by `readahead`, which tells what was read and carries out the plans; calls nothing. Pure:
//! no I/O, no clock, no atomics. Counts in pages; whoever carries a plan out rounds to folios.
//!
//! ```text
//!   access --> on the way of the strided reader?           the next pieces      strided.rs
//!          --> on the way of one of the sequential ones?   the next window      sequential.rs
//!          --> a miss at page 0, or where an earlier miss ended?   a new sequential reader
//!          --> any other miss                              random: nothing, but it is remembered
//! ```
//!
//! Reads in no order take no place from readers who have one: they are remembered apart, as
//! candidates. Hits need not be told, except those on a page that a plan has marked.
//!
//! A plan is never larger than [`Settings::max_pages`] and never goes past the file. It may name
//! pages that are resident already: to leave those out is for whoever carries it out.

mod sequential;
mod strided;
#[cfg(test)]
mod tests;

use arrayvec::ArrayVec;
use sequential::Sequential;
use std::ops::Range;
use strided::{PIECES_MAX, Strided};

/// Sequential readers of one handle who do not disturb each other.
pub(super) const STREAMS: usize = 4;

/// The access that the readers of a handle announce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Mode {
    /// Nothing: watch them.
    Normal,
    /// Read in order: large windows, from the first read on, wherever it is.
    Sequential,
    /// Read without order: plan nothing.
    Random,
}

/// The limits of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    /// Pages of the largest plan, at least 1. Two of them may be ahead of each stream.
    pub max_pages: u64,
    /// The access that the readers have announced.
    pub mode: Mode,
}

/// Pages that were read, or are being read: the pages from `first_page` up to `end_page`, at least
/// one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    /// The first page touched.
    pub first_page: u64,
    /// The page behind the last one touched.
    pub end_page: u64,
    /// The first page of these that was neither there nor on its way. A page that somebody is
    /// reading right now is no miss: it was not evicted, it is late.
    pub miss: Option<u64>,
}

impl Access {
    fn pages(&self) -> u64 {
        self.end_page - self.first_page
    }
}

/// The pages to be read now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pieces: ArrayVec<Range<u64>, PIECES_MAX>,
    /// A read of this page is to be told of again: it starts the next plan.
    pub mark: Option<u64>,
}

impl Plan {
    /// How far the piece that has page `index` reaches; one page if none has it.
    pub fn end_from(&self, index: u64) -> u64 {
        let piece = self.pieces.iter().find(|piece| piece.contains(&index));
        piece.map_or(index + 1, |piece| piece.end)
    }

    /// The ranges of pages, as they will be wanted: one for a sequential reader, which after a miss
    /// begins at the miss; the pieces to come, without the gaps, for a strided one.
    pub fn pages(self) -> impl IntoIterator<Item = Range<u64>> {
        self.pieces
    }
}

/// Where a plan must end.
#[derive(Clone, Copy, Debug)]
struct Limits {
    max_pages: u64,
    file_pages: u64,
}

/// The readers of one handle.
#[derive(Debug, Default)]
pub(super) struct Streams {
    /// The one used last comes first; the one at the end makes room.
    sequential: ArrayVec<Sequential, STREAMS>,
    strided: Strided,
    /// Reads that missed and followed nothing, the last one first.
    candidates: ArrayVec<Range<u64>, STREAMS>,
}

impl Streams {
    /// How many sequential readers are known, those who have stopped perhaps among them.
    pub(super) fn known(&self) -> u64 {
        self.sequential.len() as u64
    }

    /// Something was read of a file of `file_pages` pages; what to read now, if anything.
    pub(super) fn on_access(
        &mut self,
        access: &Access,
        settings: &Settings,
        file_pages: u64,
    ) -> Option<Plan> {
        debug_assert!(access.first_page < access.end_page, "{access:?}");
        if settings.mode == Mode::Random {
            return None;
        }
        let limits = Limits { max_pages: settings.max_pages.max(1), file_pages };
        if let Some(steps) = self.strided.steps_to(access) {
            return self.strided.advance(steps, access, &limits);
        }
        if let Some(at) = self.sequential.iter().position(|stream| stream.is_met_by(access)) {
            self.sequential[..=at].rotate_right(1);
            return self.sequential[0].advance(access, &limits);
        }
        let miss = access.miss?;
        self.on_stray_miss(access, miss, settings.mode, &limits)
    }

    /// The last plan of the reader who was met last was carried out up to page `end` only.
    pub(super) fn cut(&mut self, end: u64) {
        if let Some(stream) = self.sequential.first_mut() {
            stream.cut(end);
        }
    }

    /// A miss that is on nobody's way.
    fn on_stray_miss(
        &mut self,
        access: &Access,
        miss: u64,
        mode: Mode,
        limits: &Limits,
    ) -> Option<Plan> {
        if mode == Mode::Sequential || access.first_page == 0 || self.goes_on(access) {
            self.strided.note(access);
            let (stream, plan) = Sequential::start(access, miss, mode, limits);
            push_front(&mut self.sequential, stream);
            return plan;
        }
        let is_rest_of_one = |earlier: &Range<u64>| {
            earlier.contains(&access.first_page) && earlier.end == access.end_page
        };
        if self.candidates.iter().any(is_rest_of_one) {
            return None;
        }
        push_front(&mut self.candidates, access.first_page..access.end_page);
        self.strided.note(access);
        self.strided.start(access, limits)
    }

    /// Whether the access starts where a candidate ended, or in its last page. That one is then
    /// none any more.
    fn goes_on(&mut self, access: &Access) -> bool {
        let follows = |earlier: &Range<u64>| {
            let starts_there = (earlier.end - 1..=earlier.end).contains(&access.first_page);
            starts_there && access.end_page > earlier.end
        };
        let found = self.candidates.iter().position(follows);
        found.map(|at| self.candidates.remove(at)).is_some()
    }
}

/// Puts `item` first; the last one goes if there is no room.
fn push_front<T, const N: usize>(list: &mut ArrayVec<T, N>, item: T) {
    if list.is_full() {
        list.pop();
    }
    list.insert(0, item);
}

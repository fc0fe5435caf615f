//! Readahead windows: detects sequential and strided readers, and plans the pages they read next.
//!
//! `readahead` reports reads and carries out the plans. Pure: no I/O, no clock, no atomics, no
//! calls to other modules. Counts pages; the caller rounds to folios.
//!
//! ```text
//!   access --> continues the strided reader?               the next pieces      strided.rs
//!          --> continues one of the sequential readers?    the next window      sequential.rs
//!          --> a miss at page 0, or where an earlier miss ended?   a new sequential reader
//!          --> any other miss                              random: remembered, plans nothing
//! ```
//!
//! Random reads do not displace known readers: they are remembered separately, as candidates. Hits
//! need not be reported, except those on a page that a plan has marked.
//!
//! A plan is never larger than [`Settings::max_pages`] and never passes the end of file. It may
//! name resident pages: the caller skips them.

mod sequential;
mod strided;
#[cfg(test)]
mod tests;

use arrayvec::ArrayVec;
use sequential::Sequential;
use std::ops::Range;
use strided::{PIECES_MAX, Strided};

/// Number of sequential readers of one handle that are tracked at a time.
pub(super) const STREAMS: usize = 4;

/// Access pattern that the readers of a handle announce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Mode {
    /// No announcement: detect the pattern.
    Normal,
    /// Sequential: large windows from the first read on, at any position.
    Sequential,
    /// Random: plan nothing.
    Random,
}

/// Limits of plans.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    /// Pages of the largest plan, at least 1. Each stream may have two of them ahead.
    pub max_pages: u64,
    /// Announced access pattern.
    pub mode: Mode,
}

/// Pages that were read, or are being read: from `first_page` up to `end_page`, at least one.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageAccess {
    /// First page accessed.
    pub first_page: u64,
    /// Page after the last one accessed.
    pub end_page: u64,
    /// First of these pages that was neither resident nor being filled. A page that is being filled
    /// is no miss: it was not evicted, it is late.
    pub miss: Option<u64>,
}

impl PageAccess {
    fn pages(&self) -> u64 {
        self.end_page - self.first_page
    }
}

/// Plan: pages to read now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pieces: ArrayVec<Range<u64>, PIECES_MAX>,
    /// Page whose read must be reported: it starts the next plan.
    pub mark: Option<u64>,
}

impl Plan {
    /// Returns the end of the piece that contains page `index`; `index + 1` if none does.
    pub fn end_from(&self, index: u64) -> u64 {
        let piece = self.pieces.iter().find(|piece| piece.contains(&index));
        piece.map_or(index + 1, |piece| piece.end)
    }

    /// Returns the ranges of pages in the order of their use: one for a sequential reader, which
    /// after a miss starts at the miss; the next pieces, without the gaps, for a strided one.
    pub fn pages(self) -> impl IntoIterator<Item = Range<u64>> {
        self.pieces
    }
}

/// Limits of a plan in a file.
#[derive(Clone, Copy, Debug)]
struct Limits {
    max_pages: u64,
    file_pages: u64,
}

/// Readers of one handle.
#[derive(Debug, Default)]
pub(super) struct Streams {
    /// Sequential readers, the last used first; the last in the list is replaced.
    sequential: ArrayVec<Sequential, STREAMS>,
    strided: Strided,
    /// Ranges of misses that continued no reader, the last one first.
    candidates: ArrayVec<Range<u64>, STREAMS>,
}

impl Streams {
    /// Returns the number of known sequential readers, including those that may have stopped.
    pub(super) fn known(&self) -> u64 {
        self.sequential.len() as u64
    }

    /// Records an access to a file of `file_pages` pages. Returns the pages to read now, if any.
    pub(super) fn on_access(
        &mut self,
        access: &PageAccess,
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

    /// Records that the last plan of the reader last seen was read only up to page `end`.
    pub(super) fn cut(&mut self, end: u64) {
        if let Some(stream) = self.sequential.first_mut() {
            stream.cut(end);
        }
    }

    /// Handles a miss that continues no known reader.
    fn on_stray_miss(
        &mut self,
        access: &PageAccess,
        miss: u64,
        mode: Mode,
        limits: &Limits,
    ) -> Option<Plan> {
        if mode == Mode::Sequential || access.first_page == 0 || self.continues_read(access) {
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

    /// Returns `true` if the access starts where a candidate ended, or in its last page. Removes
    /// that candidate.
    fn continues_read(&mut self, access: &PageAccess) -> bool {
        let follows = |earlier: &Range<u64>| {
            let starts_there = (earlier.end - 1..=earlier.end).contains(&access.first_page);
            starts_there && access.end_page > earlier.end
        };
        let found = self.candidates.iter().position(follows);
        found.map(|at| self.candidates.remove(at)).is_some()
    }
}

/// Inserts `item` in front; the last item is dropped if the list is full.
fn push_front<T, const N: usize>(list: &mut ArrayVec<T, N>, item: T) {
    if list.is_full() {
        list.pop();
    }
    list.insert(0, item);
}

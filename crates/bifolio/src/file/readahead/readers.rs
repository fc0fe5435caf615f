//! Sequential readers of a file, and the pages ahead of them.
//!
//! Plans are pure: no I/O, no clock, no atomics. They count pages, and the caller rounds to folios.
//! A plan is never larger than [`WindowLimits::max_pages`] and never passes the end of file.
//!
//! A reader has windows ahead of it.
//!
//! ```text
//!                   read          mark
//!        ..........[====]---------[#################]
//!                                 the last window   planned_end
//! ```
//!
//! The mark is the first page of the last window: when the reader enters it, the next window is
//! issued, so that between one and two windows are ahead. After a miss the reader is already inside
//! the new window. The mark is then the page after those it reads now, so that it must return
//! before more is read; or the first page, if it reads the whole window. A large window is issued
//! in steps, with a mark for each: otherwise a device that has completed everything would be idle
//! while the reader copies a window.
//!
//! Windows grow, fast while they are small. A reader detected in the middle of the file, such as a
//! range scan of a B-tree, may stop soon: after the first, its windows are at most as long as what
//! it has read. It may skip a few pages, such as inner pages of the tree, also where a window ends.
//!
//! A miss in a window that was issued means that pages were evicted before their use, or that
//! frames were short. Then the windows of this reader stay below half of the last one, until
//! enough of them had no miss.

use super::order::{ORDERED_PAGES_MIN, SKIPPED_PAGES_MAX};
use std::mem;
use std::ops::Range;

/// Ratio of the first window to the request, at least.
const INITIAL_FACTOR: u64 = 4;
/// Divisor of the largest window: a window below this part grows by [`SMALL_GROWTH`], a larger one
/// doubles.
const SMALL_DIVISOR: u64 = 16;
const SMALL_GROWTH: u64 = 4;
/// Number of steps in which a large window is issued.
const STEPS: u64 = 4;
/// Pages of a transfer, and of the smallest step. A window with smaller steps is issued whole.
pub(super) const TRANSFER_PAGES: u64 = 256;
/// Divisor of the largest window for the pages to which that of a reader in order shrinks at most,
/// unless a transfer is less: misses of many readers, for lack of frames, must not divide their
/// transfers.
const SMALLEST_DIVISOR: u64 = 8;
/// Windows without a miss after which the ceiling set by a miss is doubled.
const CLEAN_WINDOWS: u32 = 8;

/// WindowLimits of plans.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowLimits {
    /// Pages of the largest plan, at least 1. Each stream may have two of them ahead.
    pub(super) max_pages: u64,
    pub(super) file_pages: u64,
    /// Set if reads are announced to be sequential.
    pub(super) is_announced: bool,
}

/// Pages that were read, or are being read: from `first_page` up to `end_page`, at least one.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageAccess {
    pub(super) first_page: u64,
    pub(super) end_page: u64,
    /// First of these pages that was neither resident nor being filled.
    pub(super) miss: Option<u64>,
    /// Pages before these that were read in order, by hits or misses; 0 if that is not known.
    pub(super) pages_in_order: u64,
}

impl PageAccess {
    pub(super) fn hit(pages: &Range<u64>) -> Self {
        Self { first_page: pages.start, end_page: pages.end, miss: None, pages_in_order: 0 }
    }

    /// Returns `true` if enough pages before these were read in order to expect more.
    pub(super) fn is_in_order(&self) -> bool {
        self.pages_in_order >= ORDERED_PAGES_MIN
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Pages in the order of their use. After a miss they start at the miss.
    pub(super) pages: Range<u64>,
    /// Page whose read must be reported: it starts the next plan.
    pub(super) mark: Option<u64>,
}

impl Plan {
    /// Returns the end of the planned pages if they contain page `index`, else `index + 1`.
    pub(crate) fn end_from(&self, index: u64) -> u64 {
        if self.pages.contains(&index) { self.pages.end } else { index + 1 }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Sequential {
    /// First page of a reader that did not begin at page 0 and was not announced.
    found_at: Option<u64>,
    /// Pages of the last access.
    read: Range<u64>,
    /// End of the pages that have been issued, from `read` on.
    planned_end: u64,
    /// Pages of the last window, before it was cut at the end of file.
    window_pages: u64,
    mark: Option<u64>,
    /// Upper bound of windows, set by a miss, in pages.
    ceiling_pages: u64,
    clean_windows: u32,
    /// Set for a reader that a single random miss began, until it reads on.
    pub(super) is_on_trial: bool,
}

impl Sequential {
    pub(super) fn start(
        access: &PageAccess,
        miss: u64,
        limits: &WindowLimits,
    ) -> (Self, Option<Plan>) {
        let request_pages = access.end_page - access.first_page;
        let initial = initial_pages(request_pages, limits.max_pages)
            .max(access.pages_in_order.min(limits.max_pages));
        let window_pages =
            if limits.is_announced { initial.max(limits.max_pages / 2) } else { initial };
        let read = access.first_page..access.end_page;
        let reads_on = limits.is_announced || read.start == 0;
        let found_at = read.start.saturating_sub(access.pages_in_order);
        let mut new = Self {
            found_at: (!reads_on).then_some(found_at),
            planned_end: read.start,
            read,
            window_pages,
            mark: None,
            ceiling_pages: u64::MAX,
            clean_windows: 0,
            is_on_trial: false,
        };
        let plan = new.issue_at_miss(miss, limits);
        (new, plan)
    }

    /// Returns `true` if the access belongs to this reader: a miss at or after its last read and at
    /// most a few pages past those issued for it, or a hit in its last window.
    pub(super) fn is_met_by(&self, access: &PageAccess) -> bool {
        match (access.miss, self.mark) {
            (Some(_), _) => {
                let end = self.planned_end.max(self.read.end).saturating_add(SKIPPED_PAGES_MAX);
                (self.read.start..=end).contains(&access.first_page)
            }
            (None, Some(mark)) => access.end_page > mark && access.first_page < self.planned_end,
            (None, None) => false,
        }
    }

    /// Returns the end of the pages issued for the reader.
    pub(super) fn planned_end(&self) -> u64 {
        self.planned_end
    }

    /// Returns `true` if a miss at page `index` is where the pages issued for the reader end, or a
    /// few pages past them.
    pub(super) fn ends_at(&self, index: u64) -> bool {
        (self.planned_end..=self.planned_end.saturating_add(SKIPPED_PAGES_MAX)).contains(&index)
    }

    /// Ends the trial of a reader that reads on. Returns `true` if it was on trial.
    pub(super) fn passes_trial(&mut self, access: &PageAccess) -> bool {
        // Another thread may have missed the same pages.
        let reads_on = self.read != (access.first_page..access.end_page);
        reads_on && mem::take(&mut self.is_on_trial)
    }

    /// Advances the reader to an access that [`is_met_by`](Self::is_met_by) has matched. Returns
    /// its next window.
    pub(super) fn advance(&mut self, access: &PageAccess, limits: &WindowLimits) -> Option<Plan> {
        let before = mem::replace(&mut self.read, access.first_page..access.end_page);
        // The file may have been truncated.
        self.planned_end = self.planned_end.min(limits.file_pages);
        match access.miss {
            // Another thread has planned for the same miss, and is about to claim its pages.
            Some(miss) if miss < self.planned_end && self.read == before => None,
            None => {
                self.grow(limits.max_pages);
                self.issue_step(access.end_page, limits)
            }
            Some(miss) => {
                if miss < self.planned_end {
                    self.shrink(access, limits.max_pages);
                } else {
                    self.grow(limits.max_pages);
                }
                self.issue_at_miss(miss, limits)
            }
        }
    }

    /// Records that the plan issued last ends before page `end`.
    pub(super) fn cut(&mut self, end: u64) {
        if self.read.end < end {
            self.planned_end = self.planned_end.min(end);
        }
    }

    fn issue_at_miss(&mut self, miss: u64, limits: &WindowLimits) -> Option<Plan> {
        let window_end = miss.saturating_add(self.window_pages);
        let mark = if self.read.end < window_end { self.read.end } else { miss };
        self.issue(miss..window_end, mark, limits)
    }

    /// Handles a read of the mark: issues up to two windows ahead of it, one at a time, and sets
    /// the next mark one step further.
    fn issue_step(&mut self, read_end: u64, limits: &WindowLimits) -> Option<Plan> {
        let start = self.planned_end.max(read_end);
        let step_pages = self.step_pages();
        let mark = self.mark.map_or(start, |mark| mark.saturating_add(step_pages)).max(read_end);
        let ahead_pages = (2 * self.window_pages).saturating_sub(step_pages);
        let end = mark.saturating_add(ahead_pages).min(start.saturating_add(self.window_pages));
        self.issue(start..end, mark.min(start), limits)
    }

    /// Returns the distance between marks. A large window is issued in steps, so that the device
    /// always has some of it to read.
    fn step_pages(&self) -> u64 {
        let is_large = self.window_pages >= STEPS * TRANSFER_PAGES;
        if is_large { self.window_pages / STEPS } else { self.window_pages }
    }

    /// Issues some of the next pages. Sets no mark if they reach the end of file.
    fn issue(&mut self, pages: Range<u64>, mark: u64, limits: &WindowLimits) -> Option<Plan> {
        let (start, end) = (pages.start, pages.end.min(limits.file_pages));
        self.mark = (end < limits.file_pages).then_some(mark);
        if start >= end {
            return None;
        }
        self.planned_end = end;
        Some(Plan { pages: start..end, mark: self.mark })
    }

    /// Doubles the window, or more while it is small, up to the ceiling: the pages were used before
    /// they were evicted. Does not exceed what the reader has read.
    fn grow(&mut self, max_pages: u64) {
        self.clean_windows += 1;
        if self.clean_windows == CLEAN_WINDOWS {
            self.clean_windows = 0;
            self.ceiling_pages = self.ceiling_pages.saturating_mul(2);
        }
        // The window is at least as large as a request, within the limit.
        let largest = self.ceiling_pages.max(self.request_pages()).min(max_pages);
        let is_small = self.window_pages < largest / SMALL_DIVISOR;
        let grown = self.window_pages * if is_small { SMALL_GROWTH } else { 2 };
        let initial = initial_pages(self.request_pages(), max_pages);
        let read_pages =
            self.found_at.map_or(u64::MAX, |start| self.read.end.saturating_sub(start));
        self.window_pages = grown.min(read_pages).max(initial).min(largest);
    }

    fn shrink(&mut self, access: &PageAccess, max_pages: u64) {
        self.clean_windows = 0;
        let transfer = TRANSFER_PAGES.min(max_pages / SMALLEST_DIVISOR).min(self.window_pages);
        let least = if access.is_in_order() { transfer.max(1) } else { 1 };
        self.ceiling_pages = whole_transfers(self.window_pages / 2).max(least);
        self.window_pages = self.ceiling_pages.max(self.request_pages()).min(max_pages);
    }

    fn request_pages(&self) -> u64 {
        self.read.end - self.read.start
    }
}

/// Rounds the pages of a window down to whole transfers, unless they are less than one.
pub(super) fn whole_transfers(pages: u64) -> u64 {
    if pages < TRANSFER_PAGES { pages } else { pages - pages % TRANSFER_PAGES }
}

fn initial_pages(request_pages: u64, max_pages: u64) -> u64 {
    // A request beyond the largest window makes no difference, and must not overflow.
    let wanted = request_pages.min(max_pages).saturating_mul(INITIAL_FACTOR);
    wanted.checked_next_power_of_two().unwrap_or(max_pages).min(max_pages)
}

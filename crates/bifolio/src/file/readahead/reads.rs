//! Readahead of a handle: its reads, as they are reported, and the windows that they start. The
//! head of `mod.rs` has the picture.

use super::readers::{PageAccess, Plan, WindowLimits, whole_transfers};
use super::{Access, ReadaheadWorker, STREAMS_MIN, WINDOW_DIVISOR};
use crate::file::Handle;
use crate::fill::{ReadIo, ReadIoClaim, Wait};
use crate::page::{Flag, PAGE_BYTES, pages_of};
use crate::stats::{Counter, FileCounts};
use std::ops::Range;
use std::sync::Arc;

/// Upper bound on the pages of a transfer that reads a plan together with the pages that the reader
/// waits for: 128 KiB.
const JOINED_PAGES_MAX: u64 = 32;

impl Handle {
    /// Records a read: starts the next window if a mark was in `bytes`.
    pub(in crate::file) fn note_read(&self, bytes: Range<u64>) {
        self.note_order(&bytes);
        self.follow_marks(pages_of(&bytes));
    }

    /// Records where a read begins and ends, without a look for marks.
    pub(in crate::file) fn note_order(&self, bytes: &Range<u64>) {
        self.readahead.order.note(bytes);
    }

    /// Starts the next window if a mark is in `pages`.
    pub(in crate::file) fn follow_marks(&self, pages: Range<u64>) {
        if self.readahead.take_mark(&pages) {
            self.read_ahead(self.plan_after(&PageAccess::hit(&pages)));
        }
    }

    /// Starts the next window if the reader has passed a mark on its way to the page `index`, which
    /// it waits for. For readers whose hits are not seen.
    pub(crate) fn follow_passed_marks(&self, index: u64) {
        let behind_pages = self.readahead.window_bytes_max / PAGE_BYTES;
        if self.readahead.take_mark(&(index.saturating_sub(behind_pages)..index + 1)) {
            let access = PageAccess::hit(&(index..index + 1));
            if let Some(stopped) = self.read_ahead(self.plan_after(&access)) {
                self.note_cut(stopped);
            }
        }
    }

    /// Plans readahead after a read of `pages` that missed the first of them.
    pub(crate) fn plan_after_miss(&self, pages: Range<u64>) -> Option<Plan> {
        let pages_in_order = self.readahead.order.pages_up_to(pages.start);
        let miss = Some(pages.start);
        self.plan_after(&PageAccess { miss, pages_in_order, ..PageAccess::hit(&pages) })
    }

    /// Plans readahead after an access, within the window that the bound leaves to each reader.
    /// Returns `None` for a file of one folio and where none is wanted.
    fn plan_after(&self, access: &PageAccess) -> Option<Plan> {
        let mapping = &self.inode.mapping;
        if self.readahead.window_bytes_max == 0 || self.readahead.is(Access::Random) {
            return None;
        }
        let bound_bytes = self.reclaim.memory.arena.bound_bytes();
        let file_pages = mapping.len_bytes().div_ceil(PAGE_BYTES);
        if file_pages <= 1 << mapping.order() {
            // The file has one folio: nothing follows it.
            return None;
        }
        let mut streams = self.readahead.at_work().streams.lock();
        let readers = (streams.sequential.len() as u64).max(self.readahead.fronts.count());
        let parts = WINDOW_DIVISOR * readers.max(STREAMS_MIN);
        let max_bytes = self.readahead.window_bytes_max.min(bound_bytes / parts);
        let max_pages = self.inode.page_space.window_pages(max_bytes / PAGE_BYTES);
        let max_pages = whole_transfers(max_pages.max(1 << mapping.order()));
        let is_announced = self.readahead.is(Access::Sequential);
        let fronts = &self.readahead.fronts;
        let limits = WindowLimits { max_pages, file_pages, is_announced };
        let plan = streams.on_access(access, &limits, || fronts.continued_by(access))?;
        let reader = &streams.sequential[0];
        if !reader.is_on_trial {
            fronts.note(&plan, reader);
        }
        Some(plan)
    }

    /// Extends a run that reads `pages` by the rest of a small plan: one transfer takes less time
    /// than another thread needs to begin a second one. Returns the plan if there is more of it to
    /// read; otherwise sets its mark.
    pub(in crate::file) fn join_plan(
        &self,
        run: &mut ReadIo,
        pages: &Range<u64>,
        plan: Option<Plan>,
    ) -> Option<Plan> {
        let plan = plan?;
        let run_end = run.end_page();
        let planned_end = self.inode.mapping.end_of_unit(plan.end_from(pages.start) - 1);
        let is_small = planned_end - run.first <= JOINED_PAGES_MAX;
        if is_small && (pages.end..planned_end).contains(&run_end) {
            run.make_room(planned_end - run_end);
            self.fill().extend_run(run, planned_end, Wait::Never);
            self.mark_read_ahead(run, run_end);
        }
        if plan.pages.start < run.first || run.end_page() < plan.pages.end {
            return Some(plan);
        }
        self.readahead.set_mark_of(&plan);
        None
    }

    /// Marks the folios of a run from page `index` on as read ahead.
    fn mark_read_ahead(&self, run: &ReadIo, index: u64) {
        let (memory, order) = (&self.inode.memory, self.inode.mapping.order());
        let wanted_folios = index.saturating_sub(run.first).div_ceil(1 << order) as usize;
        let ahead = run.folios.ids().get(wanted_folios..).unwrap_or_default();
        for id in ahead {
            memory.folio(*id).flags.set(Flag::Readahead);
        }
        memory.counters.add(Counter::Readahead, ahead.len() as u64);
        FileCounts::add(&self.inode.counts.readahead_folios, ahead.len() as u64);
    }

    /// Starts to read a plan. Returns the page at which frames ran short, if they did.
    pub(crate) fn read_ahead(&self, plan: Option<Plan>) -> Option<u64> {
        let plan = plan?;
        self.readahead.set_mark_of(&plan);
        if let Some(led_end) = self.led_end(&plan.pages) {
            self.note_cut(led_end);
            self.readahead.fronts.cut(&plan, led_end);
            return None;
        }
        let windows = &self.readahead.at_work().windows;
        let stopped = self.start_reading(windows, plan.pages.clone());
        if let Some(end) = stopped {
            self.readahead.fronts.cut(&plan, end);
        }
        stopped
    }

    /// Returns the first absent page of a plan whose first half is not absent: another reader of
    /// the file is ahead, and continues there. Reading the rest would divide its requests.
    fn led_end(&self, pages: &Range<u64>) -> Option<u64> {
        let (absent, _) = self.fill().next_absent(pages.clone())?;
        let is_led = absent - pages.start > pages.end - absent;
        is_led.then_some(absent)
    }

    /// Records that a plan was read only up to page `end`: frames ran short, or another reader is
    /// ahead. A reader whose hits are not seen must not take its next miss, there, for a page that
    /// was evicted before its use.
    pub(crate) fn note_cut(&self, end: u64) {
        if let Some(stream) = self.readahead.at_work().streams.lock().sequential.first_mut() {
            stream.cut(end);
        }
    }

    /// Queues the absent pages among `pages` for `worker`. Stops when frames or workers run short,
    /// and returns the page. The device starts with the first runs while the rest is being claimed.
    pub(in crate::file) fn start_reading(
        &self,
        worker: &Arc<ReadaheadWorker>,
        mut pages: Range<u64>,
    ) -> Option<u64> {
        loop {
            match self.fill().claim_next(&mut pages, Wait::Never) {
                Ok(ReadIoClaim::New(run)) => {
                    let start = run.first;
                    self.mark_read_ahead(&run, start);
                    if !worker.push(&self.inode, [run]) {
                        return Some(start);
                    }
                }
                Ok(ReadIoClaim::Taken) => return None,
                Ok(ReadIoClaim::NoFrame) | Err(_) => return Some(pages.start),
            }
        }
    }

    /// Queues the absent pages of all `ranges` for `worker` at once, which may then begin their
    /// transfers with one call. Stops when frames run short.
    pub(in crate::file) fn start_reading_each(
        &self,
        worker: &Arc<ReadaheadWorker>,
        ranges: impl Iterator<Item = Range<u64>>,
    ) {
        let mut runs = Vec::new();
        'ranges: for mut pages in ranges {
            loop {
                match self.fill().claim_next(&mut pages, Wait::Never) {
                    Ok(ReadIoClaim::New(run)) => {
                        self.mark_read_ahead(&run, run.first);
                        runs.push(run);
                    }
                    Ok(ReadIoClaim::Taken) => break,
                    Ok(ReadIoClaim::NoFrame) | Err(_) => break 'ranges,
                }
            }
        }
        if !runs.is_empty() {
            worker.push(&self.inode, runs);
        }
    }
}

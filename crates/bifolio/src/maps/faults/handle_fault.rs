//! Fault handling: fills the pages of a region that a thread accesses.

use crate::error::{Error, Result};
use crate::file::Handle;
use crate::fill::{AccessMode, Batch, Delivery, Locked, ReadIo, ReadIoClaim, Wait};
use crate::maps::pages;
use crate::maps::region::Region;
use crate::page::{Entry, Lookup, PAGE_BYTES};
use crate::sync::{Ordering, blocking};
use std::ops::Range;

/// Pages filled around a sequential fault: 128 KiB, as in the kernel.
const AROUND_PAGES: u64 = 32;

type Refused = (u64, Error);

impl Handle {
    /// Fills the absent pages among `pages`, and starts readahead. `is_write`: they are about to be
    /// stored to.
    ///
    /// # Errors
    /// The first page that cannot be filled: an error of the storage, no memory, or a page past the
    /// end of file.
    pub(crate) fn handle_fault(
        &self,
        region: &Region,
        pages: Range<u64>,
        is_write: bool,
    ) -> std::result::Result<(), Refused> {
        let mut left = pages;
        while left.start < left.end {
            left.start = self.handle_first_fault(region, left.clone(), is_write)?;
        }
        Ok(())
    }

    /// Fills the first of `pages`, and possibly more. Returns the first page to check next.
    fn handle_first_fault(
        &self,
        region: &Region,
        pages: Range<u64>,
        is_write: bool,
    ) -> std::result::Result<u64, Refused> {
        let index = pages.start;
        let mapping = &self.inode.mapping;
        // Read once: the file may grow or be truncated at any moment.
        let len_bytes = mapping.len_bytes();
        let pages = index..pages.end.min(len_bytes.div_ceil(PAGE_BYTES));
        let refused = |error| (index, error);
        if index * PAGE_BYTES >= len_bytes {
            return Err(refused(self.inode.past_end(index * PAGE_BYTES, 1)));
        }
        // Acquire: pairs with the Release in `unlink`, as in `claim_run`.
        let seen = mapping.table().load(index, Ordering::Acquire);
        if let Some(answer) = self.pass_resident(region, &pages, seen) {
            return answer.map_err(refused);
        }
        // The length may have changed since. A truncation that precedes the insertion of the page
        // is detected under the folio lock (`Mapping::was_cut`); a later one finds the page in the
        // table and waits for its lock. So no page stays past the end of file.
        let claimed = if self.inode.store.is_absent(seen) {
            let plan = self.plan_after_miss(pages.clone());
            let end = plan.as_ref().map_or(index + 1, |plan| plan.end_from(index));
            let end = pages.end.max(end.min(index + AROUND_PAGES));
            (self.fill().claim_run(index..end, seen, Wait::ForFrames).map_err(refused)?, plan)
        } else {
            (ReadIoClaim::Taken, None)
        };
        let (ReadIoClaim::New(mut run), plan) = claimed else {
            // Folio of another thread, or a hole.
            if seen.is_folio() {
                self.follow_passed_marks(index);
            }
            return self.await_page(region, index, is_write).map_err(refused);
        };
        let end = run.end_page();
        let will_be_stored = is_write && run.pages() == 1;
        run.target.will_be_stored = will_be_stored;
        let mut failed = None;
        let mut deliver = |_, delivery: Delivery<'_>| match delivery {
            Delivery::Folio(locked) if will_be_stored => {
                self.inode.mark_stored(&locked.lock, locked.folio.id());
            }
            Delivery::Failed { error, folios: 1, .. } => failed = Some(error),
            // One bad byte fails a whole run; the first folio alone may be readable.
            Delivery::Folio(_) | Delivery::Failed { .. } => {}
        };
        let mut batch = Batch::in_order(&self.inode);
        batch.start(run, 0, &mut deliver);
        if plan.is_some() {
            // Submits its own transfer first, which the faulting thread waits for.
            batch.begin();
            if let Some(stopped) = self.read_ahead(plan) {
                self.note_cut(stopped);
            }
        }
        batch.finish(&mut deliver);
        let is_there = || mapping.table().load(index, Ordering::Relaxed).is_ready();
        match failed {
            Some(error) => Err(refused(error)),
            // The run failed: fill the page alone.
            None if end > index + 1 && !is_there() => {
                self.handle_first_fault(region, index..index + 1, is_write)
            }
            None => Ok(end),
        }
    }

    /// Waits for a page that another thread fills, or fills a hole with zeros. Returns the page to
    /// check next.
    fn await_page(&self, region: &Region, index: u64, is_write: bool) -> Result<u64> {
        let is_missing = || is_missing(region, index);
        let Some(locked) =
            self.fill().find_folio_while(index, AccessMode::Cache, Some(&is_missing))?
        else {
            // The page was filled since, or is past the end of file.
            return Ok(index);
        };
        if is_write && !locked.was_resident {
            self.inode.mark_stored(&locked.lock, locked.folio.id());
        }
        Ok(index + 1)
    }

    /// Returns the page to check next if the first of `pages`, whose Entry is `seen`, is present or
    /// can be restored. Returns `None` if it has no folio, or one that is being filled or evicted.
    fn pass_resident(
        &self,
        region: &Region,
        pages: &Range<u64>,
        seen: Entry,
    ) -> Option<Result<u64>> {
        if !seen.is_folio() {
            return None;
        }
        let end = pages.start + region.resident_from(pages.clone());
        if end > pages.start {
            let table = self.inode.mapping.table();
            let is_absent = |next: &u64| !table.load(*next, Ordering::Relaxed).is_ready();
            return Some(Ok((pages.start + 1..end).find(is_absent).unwrap_or(end)));
        }
        seen.is_ready().then(|| self.restore_discarded(region, pages.start))
    }

    /// Restores a page that its folio should have and that the program has discarded. A clean page
    /// is read again. Returns the page to check next.
    ///
    /// # Errors
    /// The page was dirty, and its bytes are lost: it is removed from the table, and syncs report
    /// it.
    fn restore_discarded(&self, region: &Region, index: u64) -> Result<u64> {
        let inode = &*self.inode;
        let Some(room) = self.fill().room(1, true, Wait::ForFrames) else { return Ok(index) };
        let folio = match inode.mapping.get_folio(&inode.memory.folios, index) {
            Lookup::Folio(folio) => folio,
            Lookup::Absent(_) => return Ok(index),
            Lookup::Refused => return Err(self.inode.too_many_pins(index)),
        };
        let Some(lock) = folio.lock_while(&|| is_missing(region, index)) else { return Ok(index) };
        let locked = Locked { lock, folio, was_resident: true };
        if locked.lock.owner() != inode.address || !locked.is_uptodate() {
            return Ok(index);
        }
        blocking::check("the end of a write-out");
        locked.lock.flags.wait_for_writeback();
        if !region.is_discarded(index) {
            // It was filled since, or is swapped out: the faulting thread can retry.
            return Ok(index + 1);
        }
        if locked.lock.flags.write_state().is_dirty() {
            return Err(pages::lose_discarded(inode, &locked.folio, &locked.lock));
        }
        inode.mapping.mark_absent(&locked.lock);
        let mut run = ReadIo::new(&self.inode, index, room);
        run.push(locked);
        run.read_first(inode).map(|_| index + 1)
    }
}

/// Returns `true` if the kernel has no page there. If it has one, the faulting thread can continue
/// even when the folio lock is held: its holder may be a caller that keeps it for any time, and
/// that is about to access another page.
fn is_missing(region: &Region, index: u64) -> bool {
    region.resident_from(index..index + 1) == 0
}

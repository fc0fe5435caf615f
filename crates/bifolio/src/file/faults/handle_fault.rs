//! Bringing pages of a region in because somebody touches them.

use super::super::fill::{Locked, ReadIoClaim, Wait};
use super::super::handle::{Access, Handle};
use super::super::read_io::ReadIo;
use super::super::read_many::{Batch, Delivery};
use crate::error::{Error, Result};
use crate::page::{Entry, Lookup, PAGE_BYTES};
use crate::sync::{Ordering, blocking};
use std::ops::Range;

/// Pages that come with a page that is touched in order: 128 KiB, as the kernel does.
const AROUND_PAGES: u64 = 32;

/// A page that cannot be had, and why.
type Refused = (u64, Error);

impl Handle {
    /// Brings in what is absent of `pages`, and what else will be wanted. With `is_write` they are
    /// about to be stored to.
    ///
    /// # Errors
    /// The first page that cannot be had: the storage's error, no memory, or it lies behind the end
    /// of the file.
    pub(crate) fn handle_fault(
        &self,
        pages: Range<u64>,
        is_write: bool,
    ) -> std::result::Result<(), Refused> {
        let mut left = pages;
        while left.start < left.end {
            left.start = self.handle_first_fault(left.clone(), is_write)?;
        }
        Ok(())
    }

    /// Brings in the first of `pages`, and perhaps more; the first page that is to be looked at
    /// next.
    fn handle_first_fault(
        &self,
        pages: Range<u64>,
        is_write: bool,
    ) -> std::result::Result<u64, Refused> {
        let index = pages.start;
        let mapping = &self.inode.mapping;
        // Read once: the file may grow or be cut at any moment.
        let len_bytes = mapping.len_bytes();
        let pages = index..pages.end.min(len_bytes.div_ceil(PAGE_BYTES));
        let refused = |error| (index, error);
        if index * PAGE_BYTES >= len_bytes {
            return Err(refused(self.past_end(index * PAGE_BYTES, 1)));
        }
        // Acquire: pairs with the Release in `unlink`, as in `claim_read_io`.
        let seen = mapping.table().load(index, Ordering::Acquire);
        if let Some(answer) = self.pass_resident(&pages, seen) {
            return answer.map_err(refused);
        }
        // The length may be another by now. A cut that comes before the page is in the table is
        // found under its lock (`Mapping::was_cut`); one that comes later finds the page there, and
        // waits for that lock: so none is left behind the end.
        let claimed = if self.inode.is_absent(seen) {
            let plan = self.plan_after_miss(pages.clone());
            let end = plan.as_ref().map_or(index + 1, |plan| plan.end_from(index));
            let end = pages.end.max(end.min(index + AROUND_PAGES));
            (self.claim_read_io(index..end, seen, Wait::ForFrames).map_err(refused)?, plan)
        } else {
            (ReadIoClaim::Taken, None)
        };
        let (ReadIoClaim::New(mut run), plan) = claimed else {
            // Somebody else's, or a hole.
            if seen.is_folio() {
                self.follow_passed_marks(index);
            }
            return self.await_page(index, is_write).map_err(refused);
        };
        let end = run.first_page() + run.pages();
        run.will_be_stored = is_write && run.pages() == 1;
        let will_be_stored = run.will_be_stored;
        let mut failed = None;
        let mut deliver = |_, delivery: Delivery<'_>| match delivery {
            Delivery::Folio(locked) if will_be_stored => {
                self.inode.mark_stored(&locked.lock, locked.folio.id());
            }
            Delivery::Folio(_) => {}
            Delivery::Failed { error, folios: 1, .. } => failed = Some(error),
            // One bad byte fails a whole run: by itself the first folio may be good.
            Delivery::Failed { .. } => {}
        };
        let mut batch = Batch::in_order(&self.inode);
        batch.start(run, 0, &mut deliver);
        if plan.is_some() {
            // Its own transfer first: somebody is waiting for that.
            batch.begin();
            if let Some(stopped) = self.read_ahead(plan) {
                self.note_cut(stopped);
            }
        }
        batch.finish(&mut deliver);
        let is_there = || mapping.table().load(index, Ordering::Relaxed).is_ready();
        match failed {
            Some(error) => Err(refused(error)),
            // A run that failed: the page by itself.
            None if end > index + 1 && !is_there() => {
                self.handle_first_fault(index..index + 1, is_write)
            }
            None => Ok(end),
        }
    }

    /// Waits for a page that somebody else brings in, or puts zeros in a hole; which page is to be
    /// looked at next.
    fn await_page(&self, index: u64, is_write: bool) -> Result<u64> {
        let is_missing = || self.is_missing(index);
        let Some(locked) = self.find_folio_while(index, Access::Cache, Some(&is_missing))? else {
            // It came meanwhile, or is behind the end.
            return Ok(index);
        };
        if is_write && !locked.was_resident {
            self.inode.mark_stored(&locked.lock, locked.folio.id());
        }
        Ok(index + 1)
    }

    /// Answers which page is to be looked at next if the first of `pages`, which has `seen`, is
    /// there or can be brought back; `None` if it has no folio, or one on its way in or out.
    fn pass_resident(&self, pages: &Range<u64>, seen: Entry) -> Option<Result<u64>> {
        if !seen.is_folio() {
            return None;
        }
        let end = pages.start + self.resident_from(pages);
        if end > pages.start {
            let table = self.inode.mapping.table();
            let is_absent = |next: &u64| !table.load(*next, Ordering::Relaxed).is_ready();
            return Some(Ok((pages.start + 1..end).find(is_absent).unwrap_or(end)));
        }
        seen.is_ready().then(|| self.restore_discarded(pages.start))
    }

    /// Brings back a page that its folio should have and that is not there: the program has thrown
    /// it away. What was clean is read again. Answers which page is to be looked at next.
    ///
    /// # Errors
    /// It was dirty, and its bytes are lost: it leaves the table, and syncs are told.
    fn restore_discarded(&self, index: u64) -> Result<u64> {
        let inode = &*self.inode;
        let Some(region) = inode.page_space.region() else { return Ok(index + 1) };
        let Some(room) = self.room(1, true, Wait::ForFrames) else { return Ok(index) };
        let folio = match inode.mapping.get_folio(&inode.memory.folios, index) {
            Lookup::Folio(folio) => folio,
            Lookup::Absent(_) => return Ok(index),
            Lookup::Refused => return Err(self.too_many_pins(index)),
        };
        let Some(lock) = folio.lock_while(&|| self.is_missing(index)) else { return Ok(index) };
        let locked = Locked { lock, folio, was_resident: true };
        if locked.lock.owner() != inode.address() || !locked.is_uptodate() {
            return Ok(index);
        }
        blocking::check("the end of a write-out");
        locked.lock.flags.wait_for_writeback();
        if !region.is_discarded(index) {
            // It came meanwhile, or is swapped out: whoever touched it can go on.
            return Ok(index + 1);
        }
        if locked.lock.flags.write_state().is_dirty() {
            return Err(inode.lose_discarded(&locked.folio, &locked.lock).into());
        }
        inode.mapping.mark_absent(&locked.lock);
        let mut run = ReadIo::new(&self.inode, index, room);
        run.push(locked);
        run.read_first(inode).map(|_| index + 1)
    }

    /// How many of `pages` the kernel finds there, from the first one on.
    fn resident_from(&self, pages: &Range<u64>) -> u64 {
        self.inode.page_space.region().map_or(0, |region| region.resident_from(pages.clone()))
    }

    /// Whether the kernel finds no page there. Where there is one whose lock somebody has, who
    /// touched it can go on: the lock may be held for as long as a caller likes, one who is about
    /// to touch another page.
    fn is_missing(&self, index: u64) -> bool {
        self.resident_from(&(index..index + 1)) == 0
    }
}

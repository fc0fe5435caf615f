//! Syncs: everything dirty at the call is on the device when they return, or an error tells.

use super::batch::{Added, WriteBatch, Written};
use super::errors::ErrorCursor;
use super::inode::Inode;
use crate::error::{ErrorKind, Result};
use crate::folio::{Flag, FolioRef, LockedFolio};
use crate::io::{self, IoError};
use crate::mapping::{Lookup, PAGE_BYTES};
use crate::stats::Counter;
use crate::sync::Backoff;
use std::ops::Range;
use std::sync::Arc;

/// Folios that are gathered before they are put in order and written: what a write-out needs
/// beside the bound is a reference to each.
const GATHERED_MAX: usize = 1024;

impl Inode {
    /// Writes `folios` and their dirty neighbours out, in the order of their places, and waits for
    /// it. Answers what it came to, and which of them were busy.
    pub(crate) fn write_out_folios<'a>(
        &'a self,
        mut folios: Vec<FolioRef<'a>>,
    ) -> (Written, Vec<FolioRef<'a>>) {
        folios.sort_unstable_by_key(|folio| folio.folio().index());
        let mut busy = Vec::new();
        let mut batch = WriteBatch::new(self);
        for folio in folios {
            let again = folio.try_clone();
            if batch.add(folio) == Added::Busy {
                busy.extend(again);
            }
        }
        (batch.finish(), busy)
    }

    /// Writes a folio out if it is dirty, with its dirty neighbours, and waits for it. Unlocks it
    /// for the I/O.
    ///
    /// The error is recorded for every handle, and the folio is dirty as before.
    pub(crate) fn write_out<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: LockedFolio<'a>,
    ) -> std::result::Result<(), Arc<IoError>> {
        let Some(own) = folio.try_clone() else { return Ok(()) };
        // One write-out of a folio at a time. Holding the lock keeps others from starting one.
        locked.flags.wait_for_writeback();
        let mut batch = WriteBatch::new(self);
        let added = batch.add_locked(own, locked);
        debug_assert_eq!(added, Added::Done);
        batch.finish().error.map_or(Ok(()), Err)
    }

    /// Writes out what was marked dirty before the number `end`, the oldest first, and waits for
    /// it. With `patient`, also what is busy now. Tries every folio, whatever happens to the
    /// others; errors are recorded. Ends early once `folios_max` have been written.
    pub(super) fn write_out_until(&self, end: u64, folios_max: u64, patient: bool) -> Written {
        let mut total = Written::default();
        let mut backoff = Backoff::default();
        let mut next = 0;
        while next < end && total.folios < folios_max {
            let gathered_max = GATHERED_MAX.min((folios_max - total.folios) as usize);
            let oldest = self.dirty.oldest(&self.memory, next..end, gathered_max);
            if oldest.is_cut_short && oldest.folios.is_empty() {
                backoff.wait();
            }
            next = oldest.next;
            let (written, busy) = self.write_out_folios(oldest.folios);
            total.add(written);
            if patient {
                self.write_out_busy(busy);
            }
        }
        total
    }

    /// Writes out everything that is dirty at the call and waits for what is in flight.
    pub(crate) fn write_out_all(&self) {
        self.write_out_until(self.dirty.now(), u64::MAX, true);
        self.dirty.wait_for_in_flight();
    }

    /// Writes out what is dirty in `range` (bytes) at the call, and waits for what is in flight
    /// there.
    fn write_out_range(&self, range: Range<u64>) {
        let end = range.end.min(self.mapping.len_bytes()).div_ceil(PAGE_BYTES);
        let mut index = self.mapping.head_index(range.start / PAGE_BYTES);
        while index < end {
            let gathered = self.gather_unwritten(&mut index, end);
            let again = gathered.iter().filter_map(FolioRef::try_clone).collect();
            let (_, busy) = self.write_out_folios(again);
            self.write_out_busy(busy);
            for folio in gathered {
                folio.folio().flags.wait_for_writeback();
            }
        }
    }

    /// References to folios from page `index` on that are dirty or on their way to the device;
    /// leaves `index` where the next call goes on.
    fn gather_unwritten(&self, index: &mut u64, end: u64) -> Vec<FolioRef<'_>> {
        let mut gathered = Vec::new();
        while gathered.len() < GATHERED_MAX {
            let found = self.mapping.table().next_folio(*index).filter(|found| *found < end);
            *index = found.map_or(end, |found| self.mapping.head_index(found));
            if found.is_none() {
                break;
            }
            if let Lookup::Folio(folio) =
                self.mapping.get_folio(&self.memory.folios, *index, &mut 0)
            {
                let flags = &folio.folio().flags;
                if flags.get(Flag::Dirty) || flags.get(Flag::Writeback) {
                    gathered.push(folio);
                }
            }
            *index += 1 << self.mapping.order();
        }
        gathered
    }

    /// Writes out what was busy, one by one, waiting for each.
    fn write_out_busy<'a>(&'a self, busy: Vec<FolioRef<'a>>) {
        for folio in busy {
            let locked = folio.lock();
            if locked.owner() == self.address() {
                // The error is recorded; the caller asks for it.
                let _ = self.write_out(&folio, locked);
            }
        }
    }

    /// Makes everything durable that was written before the call, in all of the file or in a range
    /// of it.
    ///
    /// `cursor` is the handle's: it is told of errors of others once. Blocks for the device.
    pub(crate) fn sync(
        &self,
        cursor: &ErrorCursor,
        range: Option<Range<u64>>,
        metadata: bool,
    ) -> Result<()> {
        let Some(writer) = self.writer.get() else { return Ok(()) };
        let errors_before = self.errors.count();
        match range {
            None => self.write_out_all(),
            Some(range) => self.write_out_range(range),
        }
        if let Some(error) = self.errors.check_since(cursor, errors_before) {
            return Err(ErrorKind::Writeback(error).into());
        }
        self.memory.counters.add(Counter::Sync, 1);
        let synced = if metadata { io::sync_all(&**writer) } else { io::sync_data(&**writer) };
        synced.map_err(crate::error::Error::from)
    }
}

//! Syncs: everything dirty at the call is on the device when they return, or an error tells.

use super::batch::{ALL_PAGES, Added, Progress, WriteBatch, Written};
use super::errors::ErrorCursor;
use super::inode::Inode;
use super::store::Store;
use crate::error::{ErrorKind, Result};
use crate::folio::{Flag, FolioRef};
use crate::io;
use crate::mapping::{Lookup, PAGE_BYTES};
use crate::stats::Counter;
use crate::sync::Backoff;
use std::ops::Range;

/// Folios that are gathered before they are put in order and written; what a write-out needs
/// beside the bound is a reference to each, 16 bytes. Many: random writes in the order of their
/// places reach the device 1.6 times as fast as in sorted parts of an eighth of this, measured.
const GATHERED_MAX: u64 = 32_768;
/// Folios of one batch, or so: a cut of the file waits for the batch that is on its way.
const BATCH_FOLIOS_MAX: u64 = GATHERED_MAX;
/// Folios that are gathered in one go, with the dirty list locked: two transfers of 1 MiB. If they
/// are in order already they leave before more are gathered.
const PART_FOLIOS: u64 = 512;

/// A whole file.
pub(super) const ALL_BYTES: Range<u64> = 0..u64::MAX;

impl Inode {
    /// Writes `folios` and their dirty neighbours out, in the order of their places, and waits for
    /// it. Answers what it came to, and which of them were busy.
    pub(crate) fn write_out_folios<'a>(
        &'a self,
        folios: Vec<FolioRef<'a>>,
    ) -> (Written, Vec<FolioRef<'a>>) {
        let mut busy = Vec::new();
        let mut batch = WriteBatch::new(self, ALL_PAGES);
        batch.add_all(folios, &mut busy);
        (batch.finish(), busy)
    }

    /// Writes out what was marked dirty before the number `end`, the oldest first, and waits for
    /// it. With `patient`, also what is busy now. Tries every folio, whatever happens to the
    /// others; errors are recorded. Ends early once `left`, which is told how far it has come, says
    /// that no more folios are wanted.
    pub(super) fn write_out_until(
        &self,
        end: u64,
        left: impl Fn(Progress) -> u64,
        patient: bool,
    ) -> Written {
        let mut total = Written::default();
        let (mut next, mut progress) = (0, Progress::default());
        while next < end && left(progress) > 0 {
            let mut busy = Vec::new();
            let mut batch = WriteBatch::new(self, ALL_PAGES);
            let left = |of_batch| left(progress.and(of_batch));
            self.add_oldest(&mut batch, &mut next, end, left, &mut busy);
            let of_batch = batch.progress();
            let written = batch.finish();
            progress.begun_folios += of_batch.begun_folios;
            progress.has_failed |= written.error.is_some();
            total.add(written);
            if patient {
                self.write_out_busy(busy, ALL_PAGES);
            }
        }
        total
    }

    /// Gives the oldest dirty folios with numbers from `next` up to `end` to the batch, until that
    /// is large or no more are wanted; leaves `next` where the next batch goes on.
    fn add_oldest<'a>(
        &'a self,
        batch: &mut WriteBatch<'a>,
        next: &mut u64,
        end: u64,
        left: impl Fn(Progress) -> u64,
        busy: &mut Vec<FolioRef<'a>>,
    ) {
        let mut backoff = Backoff::default();
        while *next < end && batch.progress().begun_folios < BATCH_FOLIOS_MAX {
            let left_folios = left(batch.progress());
            if left_folios == 0 {
                return;
            }
            let oldest = self.gather_oldest(next, end, left_folios.min(GATHERED_MAX));
            if oldest.is_empty() && *next < end {
                // A few instructions of somebody who will find it dirty.
                backoff.wait();
            }
            batch.add_all(oldest, busy);
        }
    }

    /// References to the oldest dirty folios with numbers from `next` up to `end`: `folios_max`, or
    /// fewer if they are in order; leaves `next` where the next call goes on. None before `end` if
    /// the first is frozen for the moment.
    fn gather_oldest(&self, next: &mut u64, end: u64, folios_max: u64) -> Vec<FolioRef<'_>> {
        let mut gathered: Vec<FolioRef<'_>> = Vec::new();
        while *next < end && (gathered.len() as u64) < folios_max {
            let wanted = PART_FOLIOS.min(folios_max - gathered.len() as u64);
            let last = gathered.last().map(FolioRef::id);
            let mut part = self.dirty.oldest(&self.memory, *next..end, wanted as usize, last);
            *next = part.next;
            let is_over = part.is_cut_short || is_in_order(&part.folios);
            gathered.append(&mut part.folios);
            if is_over {
                break;
            }
        }
        gathered
    }

    /// Writes out everything that is dirty at the call and waits for what is in flight.
    pub(crate) fn write_out_all(&self) {
        if let Err(error) = self.mark_stored_in(&ALL_BYTES) {
            log::error!("{}: {error}", self.name());
        }
        self.write_out_marked();
    }

    /// The same, but for what was stored through maps and nobody has marked.
    fn write_out_marked(&self) {
        self.write_out_until(self.dirty.now(), |_| u64::MAX, true);
        self.dirty.wait_for_in_flight();
    }

    /// Writes out what is dirty in `range` (bytes), but for what is busy: that is for another time.
    pub(super) fn write_out_soon(&self, range: Range<u64>) {
        if let Err(error) = self.mark_stored_in(&range) {
            log::warn!("{}: {error}", self.name());
        }
        self.write_out_range(range, false);
    }

    /// Writes out what is dirty in `range` (bytes) at the call. Neighbours outside stay: what
    /// becomes of them is not this caller's. With `patient`, also what is busy now, and waits for
    /// what is in flight there.
    fn write_out_range(&self, range: Range<u64>, patient: bool) {
        let end = range.end.min(self.mapping.len_bytes()).div_ceil(PAGE_BYTES);
        let mut index = self.mapping.head_index(range.start / PAGE_BYTES);
        let within = index..end;
        while index < end {
            let gathered = self.gather_unwritten(&mut index, end);
            let again = gathered.iter().filter_map(FolioRef::try_clone).collect();
            let mut busy = Vec::new();
            let mut batch = WriteBatch::new(self, within.clone());
            batch.add_all(again, &mut busy);
            batch.finish();
            if patient {
                self.write_out_busy(busy, within.clone());
                for folio in gathered {
                    folio.folio().flags.wait_for_writeback();
                }
            }
        }
    }

    /// References to folios from page `index` on that are dirty or on their way to the device;
    /// leaves `index` where the next call goes on.
    fn gather_unwritten(&self, index: &mut u64, end: u64) -> Vec<FolioRef<'_>> {
        let mut gathered = Vec::new();
        while (gathered.len() as u64) < GATHERED_MAX {
            let found = self.mapping.table().next_folio(*index).filter(|found| *found < end);
            *index = found.map_or(end, |found| self.mapping.head_index(found));
            if found.is_none() {
                break;
            }
            if let Lookup::Folio(folio) = self.mapping.get_folio(&self.memory.folios, *index) {
                let flags = &folio.folio().flags;
                if flags.get(Flag::Dirty) || flags.get(Flag::Writeback) {
                    gathered.push(folio);
                }
            }
            *index += 1 << self.mapping.order();
        }
        gathered
    }

    /// Writes out what was busy, one by one, waiting for each. Errors are recorded.
    fn write_out_busy<'a>(&'a self, busy: Vec<FolioRef<'a>>, within: Range<u64>) {
        for folio in busy {
            let locked = folio.lock();
            // One write-out of a folio at a time. The lock keeps others from starting one.
            locked.flags.wait_for_writeback();
            let mut batch = WriteBatch::new(self, within.clone());
            let Some(own) = folio.try_clone() else { continue };
            let added = batch.add_locked(own, locked);
            debug_assert_eq!(added, Added::Done);
            batch.finish();
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
        let Store::Disk(disk) = &self.store else { return Ok(()) };
        let Some(writer) = disk.writer() else { return Ok(()) };
        self.mark_stored_in(range.as_ref().unwrap_or(&ALL_BYTES))?;
        let errors_before = self.errors.count();
        match range {
            None => self.write_out_marked(),
            Some(range) => self.write_out_range(range, true),
        }
        if let Some(error) = self.errors.check_since(cursor, errors_before) {
            return Err(ErrorKind::Writeback(error).into());
        }
        self.memory.counters.add(Counter::Sync, 1);
        let synced = if metadata { io::sync_all(&**writer) } else { io::sync_data(&**writer) };
        synced.map_err(crate::error::Error::from)
    }
}

/// Whether most of the folios are followed by their neighbours: nothing is gained by sorting more.
fn is_in_order(folios: &[FolioRef<'_>]) -> bool {
    let follows = |pair: &[FolioRef<'_>]| {
        let (before, folio) = (pair[0].folio(), pair[1].folio());
        before.index() + before.pages() == folio.index()
    };
    let following = folios.windows(2).filter(|pair| follows(pair)).count();
    following * 8 >= folios.len() * 7
}

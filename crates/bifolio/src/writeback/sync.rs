//! Syncs: when one returns, everything dirty at the call is on the device, or an error is returned.

use super::ALL_PAGES;
use super::batch::{Added, Progress, WriteBatch, Written};
use super::gate;
use super::room::STALL_MAX;
use crate::dirt::{DirtyFolios, ErrorCursor, HeldBack, Opened, Refusal, Walk, Wants};
use crate::error::Result;
use crate::inode::Inode;
use crate::page::{ALL_BYTES, FolioId, FolioRef, Mapping, PAGE_BYTES};
use crate::stats::Counter;
use crate::sync::{Backoff, Ordering};
use std::ops::Range;
use std::time::Duration;

/// Folios gathered before they are sorted and written; each costs a reference of 16 bytes beside
/// the bound. The number is high because sorted random writes reach the device 1.6 times as fast as
/// with an eighth of it.
const GATHERED_MAX: u64 = 32_768;
/// Approximate folios of one batch: a truncation of the file waits for the batch in progress.
const BATCH_FOLIOS_MAX: u64 = GATHERED_MAX;
/// Folios gathered in one step, with the dirty list locked: two transfers of 1 MiB. If they are in
/// order already, they are written before more are gathered.
const WALK_FOLIOS: u64 = 512;

/// Units of a range that are looked up one by one, at most: fewer than a walk over a list of some
/// length visits.
const ASKED_MAX: u64 = 512;

/// Maximum dirty bytes of a file for which syncs of the whole file share the write-out as well as
/// the flush: the device needs about as long for them as for a flush.
const SHARED_BYTES_MAX: u64 = 1 << 20;

/// The write-back of a file: its write-outs and syncs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Writeback<'a> {
    inode: &'a Inode,
}

impl<'a> Writeback<'a> {
    pub(crate) fn of(inode: &'a Inode) -> Self {
        Self { inode }
    }

    /// Writes `folios` and adjacent dirty folios, in the order of their positions, and waits.
    /// Returns the result, and those of `folios` that were busy.
    pub(crate) fn write_out_folios(
        self,
        folios: Vec<FolioRef<'a>>,
    ) -> (Written, Vec<FolioRef<'a>>) {
        let mut busy = Vec::new();
        let mut batch = WriteBatch::new(self.inode, ALL_PAGES);
        batch.add_all(folios, &mut busy);
        (batch.finish(), busy)
    }

    /// Writes out the folios marked dirty before the number `end`, the oldest first, and waits for
    /// them, but not for busy ones. Tries every folio even if others fail; errors are recorded.
    /// Ends early when `left`, which gets the progress, returns that no more folios are wanted.
    pub(super) fn write_out_until(self, end: u64, left: impl Fn(Progress) -> u64) -> Written {
        self.write_out(&Wanted { end, pages: ALL_PAGES, patient: false }, left)
    }

    /// Writes out the `wanted` folios and waits: the only path from the dirty list to the storage.
    /// `left` as in [`Self::write_out_until`]. If the write gate holds folios back, a patient
    /// write-out has the log made durable; others ask for that in the background.
    fn write_out(self, wanted: &Wanted, left: impl Fn(Progress) -> u64) -> Written {
        let mut total = Written::default();
        let mut opened = match self.inode.gate.get() {
            Some(it) if wanted.patient => gate::open_for_all(it, self.inode),
            _ => Ok(()),
        };
        #[cfg(all(test, not(loom)))]
        crate::sync::test_hook::reach("before folios are written out");
        let mut progress = Progress::default();
        let mut source = FolioSource::new(self.inode, wanted);
        let mut backoff = Backoff::default();
        while !source.is_over() && left(progress) > 0 {
            let mut busy = Vec::new();
            let mut batch = WriteBatch::new(self.inode, wanted.pages.clone());
            let left = |of_batch: Progress| {
                left(Progress {
                    begun_folios: progress.begun_folios + of_batch.begun_folios,
                    in_flight_folios: of_batch.in_flight_folios,
                    has_failed: progress.has_failed || of_batch.has_failed,
                })
            };
            let is_delayed = source.fill(&mut batch, left, &mut busy);
            let of_batch = batch.progress();
            let mut written = batch.finish();
            if wanted.patient {
                written.held = None;
                written.add(self.write_out_busy(busy, &wanted.pages, &mut opened));
            }
            progress.begun_folios += of_batch.begun_folios;
            progress.has_failed |= written.error.is_some();
            total.add(written);
            if is_delayed && of_batch.begun_folios == 0 {
                // For another thread; nothing is in flight here, and no lock held (IO-5).
                backoff.wait();
            }
        }
        if let Some(held) = total.held {
            let opened = wanted.patient.then_some(opened);
            let Range { start, end } = wanted.pages;
            let bytes = start * PAGE_BYTES..end.saturating_mul(PAGE_BYTES);
            total.refusal = gate::end_held_back(self.inode, held, opened, &bytes);
        }
        total
    }

    pub(super) fn write_out_soon(self, range: &Range<u64>) {
        self.find_stores_soon(range);
        self.write_out_dirty(pages_of(range), false);
    }

    pub(super) fn find_stores_soon(self, range: &Range<u64>) {
        if let Err(error) = self.inode.find_stores(range, false) {
            log::warn!("{}: {error}", self.inode.name());
        }
    }

    /// Writes out the folios with some of `pages` that are dirty at the call, and waits. Adjacent
    /// folios outside are not written: their errors would not belong to this caller.
    fn write_out_dirty(self, pages: Range<u64>, patient: bool) -> Written {
        let end = self.inode.dirty.now();
        self.write_out(&Wanted { end, pages, patient }, |_| u64::MAX)
    }

    /// Writes out busy folios one by one, and has the log made durable for each. Those that a
    /// `PageRefMut` without an LSN keeps locked are held back.
    fn write_out_busy(
        self,
        busy: Vec<FolioRef<'a>>,
        within: &Range<u64>,
        opened: &mut Opened,
    ) -> Written {
        let mut total = Written::default();
        let mut patience = STALL_MAX;
        for folio in busy {
            let own_gate = self.inode.gate.get();
            let locked = own_gate.map_or_else(
                || Some(self.inode.lock_folio(&folio)),
                |_| gate::lock(self.inode, &folio, patience),
            );
            let Some(locked) = locked else {
                total.held = HeldBack::sum(total.held, Some(HeldBack::one_pinned()));
                // The write-out fails already.
                patience = Duration::ZERO;
                continue;
            };
            // A folio has one write-out at a time. The lock prevents another one.
            locked.flags.wait_for_writeback();
            if let Some(it) = own_gate {
                gate::open_for(it, self.inode, folio.id(), opened);
            }
            let mut batch = WriteBatch::new(self.inode, within.clone());
            let Some(own) = folio.try_clone() else { continue };
            let added = batch.add_locked(own, locked);
            debug_assert_ne!(added, Added::Busy);
            total.add(batch.finish());
        }
        total
    }

    /// Finds the stores in `range` before a sync. Returns whether stores are tracked, and `None` if
    /// the file has no storage that accepts writes.
    fn begin_sync(self, range: &Range<u64>) -> Result<Option<bool>> {
        if !self.inode.store.is_writable() {
            return Ok(None);
        }
        gate::check_outside_gate(self.inode)?;
        self.inode.find_stores(range, true).map(Some)
    }

    /// Makes everything durable that was written before the call, in the whole file or in a range
    /// of it.
    ///
    /// `cursor` belongs to the handle, which reports earlier errors once. Blocks for the device.
    pub(crate) fn sync(
        self,
        cursor: &ErrorCursor,
        range: Option<Range<u64>>,
        metadata: bool,
    ) -> Result<()> {
        let range = range.unwrap_or(ALL_BYTES);
        let Some(_) = self.begin_sync(&range)? else { return Ok(()) };
        // SYNC-S1..S5.
        let errors_before = self.inode.errors.count();
        let mut wants = Wants { metadata, end: 0 };
        let mut refusal = None;
        if range == ALL_BYTES
            && self.inode.dirty.len() * self.inode.mapping.folio_bytes() <= SHARED_BYTES_MAX
        {
            wants.end = self.inode.dirty.now();
        } else {
            refusal = self.write_out_range(&range)?;
        }
        self.finish_sync(cursor, wants, errors_before, refusal)
    }

    /// Writes everything in `range` (bytes) that was written before the call, without a flush.
    /// Otherwise like [`Self::sync`].
    pub(crate) fn write_back(self, cursor: &ErrorCursor, range: Range<u64>) -> Result<()> {
        let Some(_) = self.begin_sync(&range)? else { return Ok(()) };
        let errors_before = self.inode.errors.count();
        let refusal = self.write_out_range(&range)?;
        // Of other threads, which found the pages before this one.
        self.inode.dirty.wait_for_in_flight();
        self.inode.errors.check_since(cursor, errors_before)?;
        Refusal::check(refusal)
    }

    /// Writes out what is dirty in `range` (bytes), and makes the storage as long as the part of it
    /// that lies in the file. Returns the refusal of the write gate, if there is one.
    fn write_out_range(self, range: &Range<u64>) -> Result<Option<Refusal>> {
        let refusal = self.write_out_dirty(pages_of(range), true).refusal;
        // The storage gets no longer by pages that the gate holds back.
        if *range != ALL_BYTES && refusal.is_none() {
            self.inode.extend_backing(range.end)?;
        }
        Ok(refusal)
    }

    /// Returns the point in time before which everything dirty has been marked.
    pub(crate) fn checkpoint(self) -> CheckpointMark {
        // SYNC-S1 and SYNC-S2.
        let errors = self.inode.errors.count();
        CheckpointMark { errors, end: self.inode.dirty.now() }
    }

    /// Makes everything durable that was written before `mark`. Otherwise like [`Self::sync`].
    pub(crate) fn sync_checkpoint(self, cursor: &ErrorCursor, mark: CheckpointMark) -> Result<()> {
        let Some(may_have_stores) = self.begin_sync(&ALL_BYTES)? else { return Ok(()) };
        // Stores are found only now, later than the mark although they may be older.
        let end = if may_have_stores { self.inode.dirty.now() } else { mark.end };
        let wanted = Wanted { end, pages: ALL_PAGES, patient: true };
        let refusal = self.write_out(&wanted, |_| u64::MAX).refusal;
        let wants = Wants { metadata: false, end: 0 };
        self.finish_sync(cursor, wants, mark.errors, refusal)
    }

    /// Writes out what the syncs want that share the round, flushes the device, and reports errors
    /// since there were `errors_before`.
    fn finish_sync(
        self,
        cursor: &ErrorCursor,
        wants: Wants,
        errors_before: u64,
        refusal: Option<Refusal>,
    ) -> Result<()> {
        let flushed = self.inode.flushes.flush(wants, |wants| {
            let wanted = Wanted { end: wants.end, pages: ALL_PAGES, patient: true };
            let mut refusal = None;
            if wants.end > 0 {
                refusal = self.write_out(&wanted, |_| u64::MAX).refusal;
            }
            self.inode.dirty.wait_for_in_flight();
            self.inode.dirty.begin_flush();
            let flushed = self.inode.store.flush(wants.metadata);
            self.inode.dirty.end_flush(flushed.is_ok());
            flushed?;
            Refusal::check(refusal)
        });
        let counters = &self.inode.memory.counters;
        counters.add(Counter::Sync, 1);
        counters.add(if flushed.is_shared { Counter::SyncShared } else { Counter::DeviceFlush }, 1);
        self.inode.errors.check_since(cursor, errors_before)?;
        flushed.result?;
        Refusal::check(refusal)
    }

    /// Makes everything durable that was written before the call, if it is not already. `cursor`
    /// reports errors as in [`Self::sync`].
    pub(crate) fn make_durable(self, cursor: &ErrorCursor) -> Result<()> {
        if !self.inode.store.is_writable() {
            return Ok(());
        }
        self.inode.find_stores(&ALL_BYTES, true)?;
        if !self.inode.is_durable() {
            return self.sync(cursor, None, false);
        }
        self.inode.errors.check_since(cursor, self.inode.errors.count())
    }
}

/// Point in time: which folios had been marked dirty, and how many write-outs had failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckpointMark {
    end: u64,
    errors: u64,
}

#[derive(Debug)]
struct Wanted {
    /// Only folios whose marking has a number below this.
    end: u64,
    pages: Range<u64>,
    /// Set to wait for busy folios, and for the write gate, too.
    patient: bool,
}

/// Source of the folios of a write-out: a walk over the list or, for few pages, a lookup of each.
#[derive(Debug)]
struct FolioSource<'a> {
    inode: &'a Inode,
    wanted: &'a Wanted,
    origin: FolioOrigin<'a>,
}

#[derive(Debug)]
enum FolioOrigin<'a> {
    List(Walk<'a>),
    /// Pages that were not looked up yet.
    Table(Range<u64>),
}

impl<'a> FolioSource<'a> {
    fn new(inode: &'a Inode, wanted: &'a Wanted) -> Self {
        let end = wanted.pages.end.min(inode.mapping.table().pages());
        let pages = wanted.pages.start.min(end)..end;
        let units = (pages.end - pages.start) >> inode.mapping.order();
        let origin = if units <= ASKED_MAX && units < inode.dirty.len() {
            FolioOrigin::Table(pages)
        } else {
            FolioOrigin::List(inode.dirty.walk(wanted.end))
        };
        Self { inode, wanted, origin }
    }

    fn is_over(&self) -> bool {
        match &self.origin {
            FolioOrigin::List(walk) => walk.is_over(),
            FolioOrigin::Table(pages) => pages.is_empty(),
        }
    }

    /// Adds folios to the batch, the oldest first, until it is large or no more are wanted. Returns
    /// `true` if it ended before a folio that is frozen at the moment.
    fn fill(
        &mut self,
        batch: &mut WriteBatch<'a>,
        left: impl Fn(Progress) -> u64,
        busy: &mut Vec<FolioRef<'a>>,
    ) -> bool {
        while !self.is_over() && batch.progress().begun_folios < BATCH_FOLIOS_MAX {
            let left_folios = left(batch.progress());
            if left_folios == 0 {
                return false;
            }
            let gathered = self.gather(left_folios.min(GATHERED_MAX));
            batch.add_all(gathered.folios, busy);
            if gathered.is_cut_short {
                return true;
            }
        }
        false
    }

    /// Returns references to the next folios: `folios_max`, or fewer if they are in order or the
    /// next is frozen.
    fn gather(&mut self, folios_max: u64) -> DirtyFolios<'a> {
        let mut gathered = DirtyFolios { folios: Vec::new(), is_cut_short: false };
        while !self.is_over() && (gathered.folios.len() as u64) < folios_max {
            let wanted = WALK_FOLIOS.min(folios_max - gathered.folios.len() as u64);
            let mut found = self.next_folios(wanted);
            gathered.is_cut_short = found.is_cut_short;
            let is_over = found.is_cut_short || is_in_order(&found.folios);
            gathered.folios.append(&mut found.folios);
            if is_over {
                break;
            }
        }
        gathered
    }

    /// Returns the next folios of the walk or of the table, at most `folios_max`; an impatient
    /// write-out passes over frozen ones.
    fn next_folios(&mut self, folios_max: u64) -> DirtyFolios<'a> {
        let (inode, wanted) = (self.inode, self.wanted);
        let folios = &inode.memory.folios;
        match &mut self.origin {
            FolioOrigin::List(walk) => {
                walk.next_folios(folios, &wanted.pages, folios_max as usize, !wanted.patient)
            }
            FolioOrigin::Table(pages) => {
                let ids = folios_in(&inode.mapping, pages.clone());
                let mut found = inode.dirty.among(folios, &ids, inode.address, wanted.end);
                found.is_cut_short &= wanted.patient;
                if !found.is_cut_short {
                    *pages = pages.end..pages.end;
                }
                found
            }
        }
    }
}

/// Returns the folios that the table names at these pages.
fn folios_in(mapping: &Mapping, pages: Range<u64>) -> Vec<FolioId> {
    let table = mapping.table();
    let mut ids = Vec::new();
    let mut index = mapping.head_index(pages.start);
    while let Some(found) = table.next_folio(index).filter(|found| *found < pages.end) {
        let head = mapping.head_index(found);
        // Acquire: pairs with the Release in READ-I1, as in `get_folio`.
        let seen = table.load(head, Ordering::Acquire);
        if seen.is_folio() {
            ids.push(seen.folio_id());
        }
        index = head + (1 << mapping.order());
    }
    ids
}

fn pages_of(bytes: &Range<u64>) -> Range<u64> {
    let end = bytes.end.div_ceil(PAGE_BYTES);
    if bytes.is_empty() { end..end } else { bytes.start / PAGE_BYTES..end }
}

/// Returns `true` if most of the folios are followed by the adjacent one: sorting more gains
/// nothing.
fn is_in_order(folios: &[FolioRef<'_>]) -> bool {
    let follows = |pair: &[FolioRef<'_>]| {
        let (before, folio) = (pair[0].folio(), pair[1].folio());
        before.index() + before.pages() == folio.index()
    };
    let following = folios.windows(2).filter(|pair| follows(pair)).count();
    following * 8 >= folios.len() * 7
}

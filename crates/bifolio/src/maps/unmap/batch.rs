//! Unmaps a batch: takes pages of one region from raw writers with one flush (UNMAP-B3..B7),
//! and writes the dirty ones (UNMAP-B8 and UNMAP-B9).
//!
//! Unmapping sets a state for each folio; a folio that could not be unmapped is unchanged.
//!
//! Some folios are then written while others are collected for the next transfer. The bounce buffer
//! of the swapper has two halves: one for copies in flight, one for folios being collected. They
//! swap when there are enough for a transfer. Other threads write nothing: their bounce buffer has
//! one part, which is empty again when the batch ends.
//!
//! # Safety
//! Unmaps pages of folios that the caller has frozen, and copies between these pages and the bounce
//! buffer.
#![allow(unsafe_code)]

use crate::inode::Inode;
use crate::maps::kernel::pages::PageRange;
use crate::maps::region::{BounceBuffer, Region};
use crate::memory::Memory;
use crate::page::{Flag, FolioRef, Frozen, LockedFolio, PAGE_BYTES};
use crate::reclaim::EvictOutcome;
use crate::stats::Counter;
use crate::sync::MutexGuard;
use crate::sys::copy;
use crate::writeback::{CopyAt, InFlight, NO_LSN, WriteBatch, WriteVictim};
use std::io;
use std::ops::Range;
use std::ptr::NonNull;

const PAGE: usize = PAGE_BYTES as usize;

/// A batch of frozen folios of one region; see the [module documentation](self).
#[derive(Debug)]
pub(super) struct UnmapBatch<'d, 't> {
    inode: &'d Inode,
    region: &'d Region,
    bounce_buffer: &'d mut BounceBuffer,
    /// Page of the bounce buffer for the next copy of a page that seems clean.
    spare: usize,
    /// Folios that have a page come first; both parts are sorted by index.
    pub(super) victims: Vec<Victim<'t>>,
    /// Number of folios that have a page.
    there: usize,
}

/// A frozen folio.
#[derive(Debug)]
pub(super) struct Victim<'t> {
    pub(super) lock: LockedFolio<'t>,
    pub(super) frozen: Frozen<'t>,
    /// Address for its last bytes, written once it was unmapped if they are needed.
    pub(super) copy: CopyAt,
    pub(super) state: VictimState,
    /// Page of the bounce buffer with the copy made when it seemed clean.
    before: Option<usize>,
    /// `true` if the program has discarded its page.
    is_discarded: bool,
}

/// The result of unmapping a folio.
#[derive(Debug)]
pub(super) enum VictimState {
    /// It is clean and unmapped.
    Evict,
    /// It is unmapped and must be written.
    WriteOut(InFlight),
    /// It was not unmapped.
    Keep(EvictOutcome),
    /// It is unmapped and dirty, and must not be written now.
    PutBack,
    /// It is unmapped, and its last bytes cannot be read.
    Lose(io::Error),
}

impl<'d, 't> UnmapBatch<'d, 't> {
    /// Creates a batch of `folios`, sorted by index. Their copies use the bounce buffer from page
    /// `first` on, which has two pages for each.
    pub(super) fn new(
        inode: &'d Inode,
        region: &'d Region,
        bounce_buffer: &'d mut BounceBuffer,
        first: usize,
        mut folios: Vec<(LockedFolio<'t>, Frozen<'t>)>,
    ) -> Self {
        let has_page = |lock: &LockedFolio<'_>| lock.flags.get(Flag::Uptodate);
        folios.sort_by_key(|(lock, _)| !has_page(lock));
        let there = folios.iter().filter(|(lock, _)| has_page(lock)).count();
        let spare = first + folios.len();
        let victims = (first..).zip(folios).map(|(page, (lock, frozen))| {
            let copy = CopyAt(NonNull::new(bounce_buffer.address(page)).expect("mapped memory"));
            Victim {
                lock,
                frozen,
                copy,
                state: VictimState::Evict,
                before: None,
                is_discarded: false,
            }
        });
        let victims = victims.collect();
        Self { inode, region, bounce_buffer, spare, victims, there }
    }

    /// Unmaps the pages, dirty ones only if the caller `may_write` them. Returns the number of
    /// flushes requested.
    pub(super) fn take(&mut self, may_write: bool) -> u64 {
        let region = self.region;
        let _section = region.section();
        let is_tracked = region.is_tracked();
        let all = 0..self.victims.len();
        if self.inode.memory.soundness.is_lost() {
            self.stay(all);
            return 0;
        }
        self.find_discarded(is_tracked);
        if is_tracked && let Err(error) = self.find_stores() {
            self.note_refused("cannot search pages of maps for stores", &error);
            self.stay(all);
        }
        if !may_write {
            self.keep_dirty();
        }
        let has_page = |at: &usize| self.victims[*at].is_going() && !self.victims[*at].is_discarded;
        let going: Vec<usize> = (0..self.there).filter(has_page).collect();
        let indices: Vec<u64> = going.iter().map(|at| self.victims[*at].lock.index()).collect();
        // Runs of adjacent pages are one range.
        let ranges: Vec<_> = runs_of(&indices).map(|run| self.region.range_of(&run)).collect();
        if !is_tracked {
            self.copy_dirty(&going);
        // SAFETY: pages of frozen folios, which are resident (REGION-1): UNMAP-B5.
        } else if let Err(error) = unsafe { self.bounce_buffer.page_pipe.keep(&ranges) } {
            self.note_refused("cannot keep pages of maps while they are unmapped", &error);
            region.regions.note_not_kept(&error);
            self.stay(going);
            self.begin();
            return 0;
        }
        let (gone, staying, flushes) = self.unmap(&going, &ranges);
        self.inode.memory.counters.add(Counter::Unmap, gone.len() as u64);
        if staying.is_empty() && !gone.is_empty() {
            self.inode.memory.unmap_refusal.clear();
        }
        if is_tracked {
            match self.take_kept(&going) {
                Ok(()) => self.find_late_stores(&gone, may_write),
                // The last bytes are only in a pipe of this process. No more than its contents were
                // requested, so other code has read from the pipe or closed it.
                Err(error) => {
                    self.bounce_buffer.page_pipe.discard();
                    for at in gone {
                        let copy = io::Error::new(error.kind(), error.to_string());
                        self.victims[at].state = VictimState::Lose(copy);
                    }
                }
            }
        }
        self.stay(staying);
        self.begin();
        flushes
    }

    fn note_refused(&self, what: &str, error: &io::Error) {
        log::warn!("{}: {what}: {error}", self.inode.name());
        self.inode.memory.unmap_refusal.note(what, error);
    }

    /// UNMAP-B6. Returns the folios that were unmapped, those that were not, and the number of
    /// flushes requested.
    fn unmap(&self, going: &[usize], ranges: &[PageRange]) -> (Vec<usize>, Vec<usize>, u64) {
        let unmapper = &self.region.regions.unmapper;
        // SAFETY: pages of frozen folios; the pipe keeps what raw writers stored there.
        let all = unsafe { unmapper.unmap(ranges) };
        let Some(error) = all.error else { return (going.to_vec(), Vec::new(), all.flushes_asked) };
        self.note_refused("cannot unmap pages of maps", &error);
        let done_bytes: usize = ranges[..all.ranges_done].iter().map(|r| r.length_bytes).sum();
        let (mut gone, mut staying) = (going[..done_bytes / PAGE].to_vec(), Vec::new());
        let mut flushes = all.flushes_asked;
        // Part of the failed range may be unmapped: unmap one by one to find out.
        for at in &going[gone.len()..] {
            let index = self.victims[*at].lock.index();
            // SAFETY: as above; unmapping a page twice has no effect.
            let one = unsafe { unmapper.unmap(&[self.region.range_at(index)]) };
            flushes += one.flushes_asked;
            if one.error.is_none() { gone.push(*at) } else { staying.push(*at) }
        }
        (gone, staying, flushes)
    }

    /// Finds pages that the program has discarded. Those of clean folios need no unmapping; those
    /// of dirty folios stay, for the next access or write-back to find. Only examines pages that
    /// will be read.
    fn find_discarded(&mut self, is_tracked: bool) {
        let is_read = |victim: &Victim<'_>| is_tracked || victim.is_dirty();
        let read = self.victims[..self.there].iter().filter(|victim| is_read(victim));
        let indices: Vec<u64> = read.map(|victim| victim.lock.index()).collect();
        for index in runs_of(&indices).flat_map(|run| self.region.discarded_among(run)) {
            let at = self.victims[..self.there].partition_point(|it| it.lock.index() < index);
            let victim = &mut self.victims[at];
            if victim.is_dirty() {
                victim.state = VictimState::Keep(EvictOutcome::Unwritten);
            } else {
                victim.is_discarded = true;
            }
        }
    }

    /// UNMAP-B4: copies the pages that seem clean, and then marks the folios that raw writers
    /// stored to as dirty.
    fn find_stores(&mut self) -> io::Result<()> {
        let mut indices = Vec::new();
        let is_read = |victim: &&mut Victim<'_>| !victim.is_dirty() && !victim.is_discarded;
        for victim in self.victims[..self.there].iter_mut().filter(is_read) {
            let target = self.bounce_buffer.address(self.spare);
            // SAFETY: a page of the bounce buffer, which this batch owns.
            let target = unsafe { std::slice::from_raw_parts_mut(target, PAGE) };
            // SAFETY: a page of a frozen folio that is resident (REGION-1).
            unsafe { copy::copy_out(self.region.address(victim.lock.index()), target) };
            victim.before = Some(self.spare);
            self.spare += 1;
            indices.push(victim.lock.index());
        }
        let mut stored = Vec::new();
        for pages in runs_of(&indices) {
            self.region.visit_written(pages, |found| stored.extend(found))?;
        }
        for victim in &mut self.victims[..self.there] {
            if stored.binary_search(&victim.lock.index()).is_ok() {
                self.inode.mark_stored(victim.frozen.folio(), victim.frozen.id());
            }
        }
        Ok(())
    }

    /// UNMAP-B4: keeps dirty folios, because they may not be written.
    fn keep_dirty(&mut self) {
        // The swapper or the flusher writes them.
        for victim in &mut self.victims {
            if victim.is_going() && victim.is_dirty() {
                victim.state = VictimState::Keep(EvictOutcome::of_dirty(self.inode));
            }
        }
    }

    /// UNMAP-B7: begins the write-back of dirty folios. Not before: a sync would take a folio that
    /// stays after all for one in flight, wait for it, and miss the next write-back. While they are
    /// frozen, a sync that finds them on the dirty list waits.
    fn begin(&mut self) {
        let zeros_from = self.there;
        for (at, victim) in self.victims.iter_mut().enumerate() {
            if !matches!(victim.state, VictimState::Evict) || !victim.is_dirty() {
                continue;
            }
            victim.state = VictimState::WriteOut(self.inode.begin_write_of_victim(&victim.frozen));
            if at >= zeros_from {
                // SAFETY: a page of the bounce buffer, which this batch owns.
                unsafe { copy::zero(victim.copy.0.as_ptr(), PAGE) };
            }
        }
    }

    /// UNMAP-B5 without raw writers: the bytes do not change.
    fn copy_dirty(&mut self, going: &[usize]) {
        for victim in going.iter().map(|at| &self.victims[*at]) {
            if victim.is_dirty() {
                // SAFETY: a page of the bounce buffer, which this batch owns.
                let target =
                    unsafe { std::slice::from_raw_parts_mut(victim.copy.0.as_ptr(), PAGE) };
                // SAFETY: a page of a frozen folio that is resident (REGION-1).
                unsafe { copy::copy_out(self.region.address(victim.lock.index()), target) };
            }
        }
    }

    /// UNMAP-B7: reads the last bytes from the pipe. (Pages that were not unmapped may still
    /// change.)
    fn take_kept(&mut self, going: &[usize]) -> io::Result<()> {
        // Copies of adjacent folios are adjacent.
        for run in going.chunk_by(|before, next| before + 1 == *next) {
            let (start, bytes) = (self.victims[run[0]].copy.0.as_ptr(), run.len() * PAGE);
            // SAFETY: pages of the bounce buffer, which this batch owns.
            unsafe { self.bounce_buffer.page_pipe.take(start, bytes) }?;
        }
        Ok(())
    }

    /// UNMAP-B7: finds folios that seemed clean and were stored to between UNMAP-B4 and the
    /// unmapping.
    fn find_late_stores(&mut self, gone: &[usize], may_write: bool) {
        for at in gone {
            let victim = &mut self.victims[*at];
            let Some(before) = victim.before.filter(|_| !victim.is_dirty()) else { continue };
            // SAFETY: a page of the bounce buffer that no thread writes any more.
            let before =
                unsafe { std::slice::from_raw_parts(self.bounce_buffer.address(before), PAGE) };
            // SAFETY: as above.
            let last = unsafe { std::slice::from_raw_parts(victim.copy.0.as_ptr(), PAGE) };
            if before != last {
                self.inode.memory.counters.add(Counter::StoredLate, 1);
                self.inode.mark_stored(victim.frozen.folio(), victim.frozen.id());
                if !may_write {
                    victim.state = VictimState::PutBack;
                }
            }
        }
    }

    /// Marks folios that were not unmapped.
    fn stay(&mut self, staying: impl IntoIterator<Item = usize>) {
        for at in staying {
            self.victims[at].state = VictimState::Keep(EvictOutcome::Busy);
        }
    }
}

impl Victim<'_> {
    fn is_going(&self) -> bool {
        !matches!(self.state, VictimState::Keep(_) | VictimState::Lose(_))
    }

    fn is_dirty(&self) -> bool {
        self.lock.flags.write_state().is_dirty()
    }
}

impl Inode {
    /// Begins the write-out of a folio, locked and frozen; its bytes follow later.
    fn begin_write_of_victim(&self, frozen: &Frozen<'_>) -> InFlight {
        self.mark_stored(frozen.folio(), frozen.id());
        // A file in a region has no gate.
        let in_flight = self.dirty.begin(&self.memory.folios, frozen.id(), NO_LSN);
        // The number of its marking was there (rule 4 of `page`).
        frozen.folio().set_slot(0);
        in_flight.expect("marked just now, under its lock")
    }
}

/// Returns the runs of adjacent pages in a sorted list.
fn runs_of(indices: &[u64]) -> impl Iterator<Item = Range<u64>> + '_ {
    let follows = |before: &u64, next: &u64| before + 1 == *next;
    indices.chunk_by(follows).map(|run| run[0]..run[0] + run.len() as u64)
}

/// Number of folios that are written together, if there are enough: a transfer of 1 MiB.
const TRANSFER_FOLIOS: usize = 256;

/// Number of folios per transfer while threads wait for single pages, so that each waits for no
/// longer transfer: the device needs 300 us for 1 MiB.
const PORTION_FOLIOS: usize = 32;

/// Unmapped folios of one file that are written back; see the [module documentation](self).
#[derive(Debug)]
pub(super) struct UnmappedBatch<'t> {
    pub(super) inode: &'t Inode,
    /// The write-back in flight, which ends before the copies and the locks are released. `None`
    /// until a folio must be written: a thread that may not wait never writes.
    batch: Option<WriteBatch<'t>>,
    in_flight: Vec<Unmapped<'t>>,
    gathered: Vec<Unmapped<'t>>,
    write_victims: Vec<WriteVictim<'t>>,
    pub(super) bounce_buffer: MutexGuard<'t, BounceBuffer>,
    /// Number of parts of the bounce buffer: two if one is written while the other fills.
    parts: usize,
    /// Index of the part for collected folios.
    half: usize,
    /// Pages of that part in use, including gaps for folios that were unmapped with the others but
    /// are not written.
    pages_used: usize,
}

/// A folio that is locked and in the table; its page is only at `copy`.
#[derive(Debug)]
pub(super) struct Unmapped<'t> {
    // The lock is dropped before the reference.
    pub(super) lock: LockedFolio<'t>,
    pub(super) folio: FolioRef<'t>,
    pub(super) copy: CopyAt,
}

impl<'t> UnmappedBatch<'t> {
    /// Creates an empty batch. Waits until the bounce buffer is free: the swapper's if `writes`,
    /// else the common one.
    pub(super) fn new(inode: &'t Inode, region: &'t Region, writes: bool) -> Self {
        let regions = &region.regions;
        let bounce_buffer =
            if writes { regions.swap_bounce_buffer() } else { regions.bounce_buffer() };
        Self {
            inode,
            batch: None,
            in_flight: Vec::new(),
            gathered: Vec::new(),
            write_victims: Vec::new(),
            bounce_buffer,
            parts: if writes { 2 } else { 1 },
            half: 0,
            pages_used: 0,
        }
    }

    /// Returns the number of folios.
    pub(super) fn folios(&self) -> usize {
        self.in_flight.len() + self.gathered.len()
    }

    /// Returns `true` if enough folios are collected for a transfer.
    pub(super) fn is_a_transfer(&self) -> bool {
        self.gathered.len() >= TRANSFER_FOLIOS
    }

    fn half_pages(&self) -> usize {
        self.bounce_buffer.pages() / self.parts
    }

    /// Returns the pages of the bounce buffer that hold no copies.
    pub(super) fn room(&self) -> Range<usize> {
        let half_pages = self.half_pages();
        let first = self.half * half_pages;
        first + self.pages_used..first + half_pages
    }

    /// Adds a folio whose write-back has begun; its copy is on `page` of the bounce buffer.
    pub(super) fn add(&mut self, page: usize, left: Unmapped<'t>, in_flight: InFlight) {
        self.pages_used = page + 1 - self.half * self.half_pages();
        let again = left.folio.try_clone();
        let folio = again.expect("a folio that was just frozen has two references");
        self.write_victims.push(WriteVictim { folio, in_flight, copy: Some(left.copy) });
        self.gathered.push(left);
    }

    /// Waits for the folios in flight and returns them. Starts to write the collected folios, and
    /// waits for all but the last transfer of them. Nothing is frozen.
    pub(super) fn rotate(&mut self, memory: &Memory) -> Vec<Unmapped<'t>> {
        self.batch.iter_mut().for_each(WriteBatch::finish_all);
        let ended = std::mem::take(&mut self.in_flight);
        memory.counters.add(Counter::PageOut, self.gathered.len() as u64);
        let are_single = memory.region_reads.are_single();
        let portion_folios = if are_single { PORTION_FOLIOS } else { TRANSFER_FOLIOS };
        let victims = std::mem::take(&mut self.write_victims);
        if !victims.is_empty() {
            let batch = self.batch.get_or_insert_with(|| WriteBatch::of_victims(self.inode));
            batch.start_victims(victims, portion_folios);
        }
        self.in_flight = std::mem::take(&mut self.gathered);
        self.half = (self.half + 1) % self.parts;
        self.pages_used = 0;
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_pages_are_one_range() {
        let runs = |indices: &[u64]| runs_of(indices).collect::<Vec<_>>();
        assert_eq!(runs(&[3, 4, 5, 9, 11, 12]), [3..6, 9..10, 11..13]);
        assert_eq!(runs(&[]), []);
    }
}

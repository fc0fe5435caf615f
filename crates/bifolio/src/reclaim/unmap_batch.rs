//! A batch that is unmapped: pages of one region are taken from raw writers, with one flush (B3 to
//! B7 of `unmap.rs`); and what becomes of them then (B8 and B9).
//!
//! Unmapping leaves a state for each folio; one that could not be unmapped stays as it was.
//!
//! Then some are written out while others are gathered for the next transfer. The bounce buffer of
//! the swapper has two halves: one with the copies of what is in flight, one for what is gathered.
//! When that is enough for a transfer, they change places. Others write nothing out: their bounce
//! buffer is one part, and empty again when the pages are judged.
//!
//! # Safety
//! Unmaps pages of folios that the caller has frozen, and copies between them and the bounce
//! buffer.
#![allow(unsafe_code)]

use super::scan::EvictOutcome;
use crate::memory::{BounceBuffer, Memory, Region};
use crate::page::{Flag, FolioRef, Frozen, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;
use crate::sync::MutexGuard;
use crate::sys::copy;
use crate::sys::memory::PageRange;
use crate::writeback::{CopyAt, InFlight, Inode, WriteBatch, WriteVictim};
use std::io;
use std::ops::Range;
use std::ptr::NonNull;

const PAGE: usize = PAGE_BYTES as usize;

/// See the head of the file.
#[derive(Debug)]
pub(super) struct UnmapBatch<'d, 't> {
    inode: &'d Inode,
    region: &'d Region,
    bounce_buffer: &'d mut BounceBuffer,
    /// The bounce buffer's page for the next copy of one that seems clean.
    spare: usize,
    /// Those that have a page come first, both in the order of their places.
    pub(super) victims: Vec<Victim<'t>>,
    /// How many that are.
    there: usize,
}

/// One folio, frozen.
#[derive(Debug)]
pub(super) struct Victim<'t> {
    pub(super) lock: LockedFolio<'t>,
    pub(super) frozen: Frozen<'t>,
    /// Where its last bytes are, once it was unmapped, if somebody wants them.
    pub(super) copy: CopyAt,
    pub(super) state: VictimState,
    /// The bounce buffer's page with what it held when it seemed clean.
    before: Option<usize>,
    /// The program has thrown its page away.
    is_discarded: bool,
}

/// What becomes of it.
#[derive(Debug)]
pub(super) enum VictimState {
    /// It is clean, and unmapped.
    Goes,
    /// It is unmapped, and to be written out.
    Leaves(InFlight),
    /// It was not unmapped.
    Stays(EvictOutcome),
    /// It was unmapped, is dirty, and is not to be written out now.
    Returns,
    /// It was unmapped, and its last bytes cannot be had.
    Lost(io::Error),
}

impl<'d, 't> UnmapBatch<'d, 't> {
    /// Of these folios, which are in order; their copies come to the bounce buffer from page
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
                state: VictimState::Goes,
                before: None,
                is_discarded: false,
            }
        });
        let victims = victims.collect();
        Self { inode, region, bounce_buffer, spare, victims, there }
    }

    /// Takes the pages. Dirty ones go only if the caller `may_write` them out. Answers how many
    /// flushes were asked for.
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
            self.note_refused("stores to pages of maps cannot be looked for", &error);
            self.stay(all);
        }
        if !may_write {
            self.keep_dirty();
        }
        let has_page = |at: &usize| self.victims[*at].is_going() && !self.victims[*at].is_discarded;
        let going: Vec<usize> = (0..self.there).filter(has_page).collect();
        let indices: Vec<u64> = going.iter().map(|at| self.victims[*at].lock.index()).collect();
        // Those in a row together.
        let ranges: Vec<_> = runs_of(&indices).map(|run| self.region.range_of(&run)).collect();
        if !is_tracked {
            self.copy_dirty(&going);
        // SAFETY: pages of frozen folios, which are there (REGION-1): B5.
        } else if let Err(error) = unsafe { self.bounce_buffer.page_pipe.keep(&ranges) } {
            self.note_refused("pages of maps cannot be kept while they are unmapped", &error);
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
                // The last bytes are in a pipe of this process and nowhere else, and it was asked
                // for no more than it has: somebody else has read from it, or closed it.
                Err(error) => {
                    self.bounce_buffer.page_pipe.discard();
                    for at in gone {
                        let copy = io::Error::new(error.kind(), error.to_string());
                        self.victims[at].state = VictimState::Lost(copy);
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

    /// B6. Answers which folios were unmapped, which were not, and how many flushes were asked for.
    fn unmap(&self, going: &[usize], ranges: &[PageRange]) -> (Vec<usize>, Vec<usize>, u64) {
        let unmapper = &self.region.regions.unmapper;
        // SAFETY: pages of folios that are frozen; what raw writers stored there is kept.
        let all = unsafe { unmapper.unmap(ranges) };
        let Some(error) = all.error else { return (going.to_vec(), Vec::new(), all.flushes_asked) };
        self.note_refused("pages of maps cannot be unmapped", &error);
        let done_bytes: usize = ranges[..all.ranges_done].iter().map(|r| r.length_bytes).sum();
        let (mut gone, mut staying) = (going[..done_bytes / PAGE].to_vec(), Vec::new());
        let mut flushes = all.flushes_asked;
        // Part of the range that failed may be gone: one by one, to know which.
        for at in &going[gone.len()..] {
            let index = self.victims[*at].lock.index();
            // SAFETY: as above; one that is gone stays so.
            let one = unsafe { unmapper.unmap(&[self.region.range_at(index)]) };
            flushes += one.flushes_asked;
            if one.error.is_none() { gone.push(*at) } else { staying.push(*at) }
        }
        (gone, staying, flushes)
    }

    /// Finds pages that the program has thrown away: those of clean folios need no unmapping;
    /// those of dirty ones stay, for whoever touches them or writes them out to find. Looks only
    /// where pages are going to be read.
    fn find_discarded(&mut self, is_tracked: bool) {
        let is_read = |victim: &Victim<'_>| is_tracked || victim.is_dirty();
        let read = self.victims[..self.there].iter().filter(|victim| is_read(victim));
        let indices: Vec<u64> = read.map(|victim| victim.lock.index()).collect();
        for index in runs_of(&indices).flat_map(|run| self.region.discarded_among(run)) {
            let at = self.victims[..self.there].partition_point(|it| it.lock.index() < index);
            let victim = &mut self.victims[at];
            if victim.is_dirty() {
                victim.state = VictimState::Stays(EvictOutcome::Unwritten);
            } else {
                victim.is_discarded = true;
            }
        }
    }

    /// B4: marks those that raw writers stored to as dirty; keeps a copy of those that seem clean,
    /// made before the look.
    fn find_stores(&mut self) -> io::Result<()> {
        let mut indices = Vec::new();
        let is_read = |victim: &&mut Victim<'_>| !victim.is_dirty() && !victim.is_discarded;
        for victim in self.victims[..self.there].iter_mut().filter(is_read) {
            let target = self.bounce_buffer.address(self.spare);
            // SAFETY: a page of the bounce buffer, which is ours.
            let target = unsafe { std::slice::from_raw_parts_mut(target, PAGE) };
            // SAFETY: a page of a frozen folio that is there (REGION-1).
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

    /// B4: dirty folios stay, unless they may be written out.
    fn keep_dirty(&mut self) {
        // The swapper's, or the flusher's.
        for victim in &mut self.victims {
            if victim.is_going() && victim.is_dirty() {
                victim.state = VictimState::Stays(EvictOutcome::of_dirty(self.inode));
            }
        }
    }

    /// B7: the write-out of dirty folios begins. Not before: one that stays after all would have
    /// been on its way in the eyes of a sync, which waits for that and not for the next one. While
    /// they are frozen a sync that finds them on the dirty list waits.
    fn begin(&mut self) {
        let zeros_from = self.there;
        for (at, victim) in self.victims.iter_mut().enumerate() {
            if !matches!(victim.state, VictimState::Goes) || !victim.is_dirty() {
                continue;
            }
            victim.state = VictimState::Leaves(self.inode.begin_write_of_victim(&victim.frozen));
            if at >= zeros_from {
                // SAFETY: a page of the bounce buffer, which is ours.
                unsafe { copy::zero(victim.copy.0.as_ptr(), PAGE) };
            }
        }
    }

    /// B5, where there are no raw writers: the bytes stand still.
    fn copy_dirty(&mut self, going: &[usize]) {
        for victim in going.iter().map(|at| &self.victims[*at]) {
            if victim.is_dirty() {
                // SAFETY: a page of the bounce buffer, which is ours.
                let target =
                    unsafe { std::slice::from_raw_parts_mut(victim.copy.0.as_ptr(), PAGE) };
                // SAFETY: a page of a frozen folio that is there (REGION-1).
                unsafe { copy::copy_out(self.region.address(victim.lock.index()), target) };
            }
        }
    }

    /// B7: the last bytes of what was kept. (What was not unmapped after all goes on changing.)
    fn take_kept(&mut self, going: &[usize]) -> io::Result<()> {
        // The copies of neighbours are neighbours.
        for row in going.chunk_by(|before, next| before + 1 == *next) {
            let (start, bytes) = (self.victims[row[0]].copy.0.as_ptr(), row.len() * PAGE);
            // SAFETY: pages of the bounce buffer, which is ours.
            unsafe { self.bounce_buffer.page_pipe.take(start, bytes) }?;
        }
        Ok(())
    }

    /// B7: those that seemed clean, and were stored to between the look and the unmapping.
    fn find_late_stores(&mut self, gone: &[usize], may_write: bool) {
        for at in gone {
            let victim = &mut self.victims[*at];
            let Some(before) = victim.before.filter(|_| !victim.is_dirty()) else { continue };
            // SAFETY: a page of the bounce buffer that nobody writes any more.
            let before =
                unsafe { std::slice::from_raw_parts(self.bounce_buffer.address(before), PAGE) };
            // SAFETY: as above.
            let last = unsafe { std::slice::from_raw_parts(victim.copy.0.as_ptr(), PAGE) };
            if before != last {
                self.inode.memory.counters.add(Counter::StoredLate, 1);
                self.inode.mark_stored(victim.frozen.folio(), victim.frozen.id());
                if !may_write {
                    victim.state = VictimState::Returns;
                }
            }
        }
    }

    /// Folios that were not unmapped stay as they are.
    fn stay(&mut self, staying: impl IntoIterator<Item = usize>) {
        for at in staying {
            self.victims[at].state = VictimState::Stays(EvictOutcome::Busy);
        }
    }
}

impl Victim<'_> {
    fn is_going(&self) -> bool {
        !matches!(self.state, VictimState::Stays(_) | VictimState::Lost(_))
    }

    fn is_dirty(&self) -> bool {
        self.lock.flags.write_state().is_dirty()
    }
}

/// The rows of pages in a list that is in order.
fn runs_of(indices: &[u64]) -> impl Iterator<Item = Range<u64>> + '_ {
    let follows = |before: &u64, next: &u64| before + 1 == *next;
    indices.chunk_by(follows).map(|run| run[0]..run[0] + run.len() as u64)
}

/// Folios that are written out together, if there are so many: a transfer of 1 MiB.
const TRANSFER_FOLIOS: usize = 256;

/// The same while somebody waits for single pages. Each waits behind no more than this: the device
/// takes 300 us for 1 MiB.
const PORTION_FOLIOS: usize = 32;

/// See the head of the file. All of one file.
#[derive(Debug)]
pub(super) struct UnmappedBatch<'t> {
    pub(super) inode: &'t Inode,
    /// What is in flight ends before the copies and the locks go. None as long as nothing is to be
    /// written out: whoever may not wait never writes out.
    batch: Option<WriteBatch<'t>>,
    in_flight: Vec<Unmapped<'t>>,
    gathered: Vec<Unmapped<'t>>,
    leaving: Vec<WriteVictim<'t>>,
    pub(super) bounce_buffer: MutexGuard<'t, BounceBuffer>,
    /// Parts of it: two where one is written out while the other fills.
    parts: usize,
    /// Which part of the bounce buffer is for what is gathered, from 0.
    half: usize,
    /// So many pages of it have copies, and gaps: of those that were unmapped with them and did not
    /// leave.
    pages_used: usize,
}

/// One folio: locked, in the table, its page nowhere but at `copy`.
#[derive(Debug)]
pub(super) struct Unmapped<'t> {
    // The lock goes before the reference.
    pub(super) lock: LockedFolio<'t>,
    pub(super) folio: FolioRef<'t>,
    pub(super) copy: CopyAt,
}

impl<'t> UnmappedBatch<'t> {
    /// None yet. Waits until the bounce buffer is free: that of those who write out, or of the
    /// others.
    pub(super) fn new(inode: &'t Inode, region: &'t Region, writes: bool) -> Self {
        let regions = &region.regions;
        let bounce_buffer =
            if writes { regions.swap_bounce_buffer() } else { regions.bounce_buffer() };
        Self {
            inode,
            batch: None,
            in_flight: Vec::new(),
            gathered: Vec::new(),
            leaving: Vec::new(),
            bounce_buffer,
            parts: if writes { 2 } else { 1 },
            half: 0,
            pages_used: 0,
        }
    }

    /// How many there are.
    pub(super) fn folios(&self) -> usize {
        self.in_flight.len() + self.gathered.len()
    }

    /// Whether enough are gathered.
    pub(super) fn is_a_transfer(&self) -> bool {
        self.gathered.len() >= TRANSFER_FOLIOS
    }

    fn half_pages(&self) -> usize {
        self.bounce_buffer.pages() / self.parts
    }

    /// The pages of the bounce buffer that have no copies.
    pub(super) fn room(&self) -> Range<usize> {
        let half_pages = self.half_pages();
        let first = self.half * half_pages;
        first + self.pages_used..first + half_pages
    }

    /// Gathers a folio whose write-out has begun; its copy is on `page` of the bounce buffer.
    pub(super) fn add(&mut self, page: usize, left: Unmapped<'t>, in_flight: InFlight) {
        self.pages_used = page + 1 - self.half * self.half_pages();
        let again = left.folio.try_clone();
        let folio = again.expect("a folio that was just frozen has two references");
        self.leaving.push(WriteVictim { folio, in_flight, copy: Some(left.copy) });
        self.gathered.push(left);
    }

    /// Waits for what is in flight and gives it back; starts to write out what was gathered, and
    /// waits for all but the last portion of it. Nothing is frozen.
    pub(super) fn rotate(&mut self, memory: &Memory) -> Vec<Unmapped<'t>> {
        self.batch.iter_mut().for_each(WriteBatch::finish_all);
        let ended = std::mem::take(&mut self.in_flight);
        memory.counters.add(Counter::PageOut, self.gathered.len() as u64);
        let are_single = memory.region_reads.are_single();
        let portion_folios = if are_single { PORTION_FOLIOS } else { TRANSFER_FOLIOS };
        let leaving = std::mem::take(&mut self.leaving);
        if !leaving.is_empty() {
            let batch = self.batch.get_or_insert_with(|| WriteBatch::of_victims(self.inode));
            batch.start_victims(leaving, portion_folios);
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
    fn pages_in_a_row_are_one_range() {
        let runs = |indices: &[u64]| runs_of(indices).collect::<Vec<_>>();
        assert_eq!(runs(&[3, 4, 5, 9, 11, 12]), [3..6, 9..10, 11..13]);
        assert_eq!(runs(&[]), []);
    }
}

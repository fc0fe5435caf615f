//! Unmapping: evicts folios of regions in batches, with one TLB flush on the other CPUs for each
//! batch.
//!
//! Raw writers may store to the pages at any time, and only the unmapping stops them. So the pages
//! are unmapped first, as in the kernel, and what is written is a copy of the bytes that they held
//! when the last translation was gone.
//!
//! PROTOCOL UNMAP, as two columns:
//!
//! ```text
//!  EVICT a batch (here)                         RAW ACCESS, LOOKUP (fault, read_at, pin ...)
//!  B1 try to lock each folio again and          store through a translation: reaches the page
//!     repeat every check                          before B6: found by B4, or by B7
//!  B2 freeze it: no READY, no other reference   lookup: finds the frozen Entry; waits, at the
//!  B3 take the section (REGION-3)                 latest until B8
//!  B4 copy each page that seems clean, then     sync: searches for stores in its own section,
//!     mark those that were stored to dirty        waits for folios that are frozen or in flight
//!  B5 keep the pages in a pipe                  access after B6: a fault, which is a lookup
//!  B6 unmap all: one call, one flush
//!  B7 read the last bytes from the pipe. A
//!     clean page that differs from its copy
//!     was stored to after B4: dirty. Begin
//!     the write-back: nothing can fail now
//!  B8 clean: remove from the table, free        lookup: finds a value or a hole; fills again
//!     dirty: unfreeze, keep locked              lookup: finds it, waits for its lock until B9
//!  B9 write the copies. Written: freeze again,
//!     remove from the table, free               reference of a waiter: the freeze fails, the
//!     Not written, or referenced: put the         page is put back from the copy, and the
//!     page back from the copy                     waiter gets it
//! ```
//!
//! The Entry names the folio from B2 to B8 or B9: the address belongs to the index, and B6 would
//! discard an earlier fill (REGION-2).
//!
//! Why this suffices, and which tests show it (`loom_unmap_*` are in `src/tests/loom_unmap.rs`, the
//! others in `tests/maps/`):
//! - Stores through stale translations: the flush of B6 comes before the bytes of B7 are read, and
//!   only those are written. (Protecting the pages before the write-back instead needs a flush for
//!   each 2 MiB touched, and loses a store between the last check and the unmapping.)
//!   `loom_unmap_vs_store`; `threads.rs`.
//! - Folios wait for their batch without a lock: B1 repeats every check. `loom_unmap_vs_lookup`,
//!   `loom_unmap_vs_sync`; `model.rs`.
//! - Pins: B2 fails if there is any reference besides the table's and this thread's.
//!   `loom_unmap_vs_pin`.
//! - Partial batches: [`Unmapping::finish`] ends every scan. `tests/maps/batches.rs`.
//! - Folios that stay are put back on a list in one function: [`Unmapping::keep`].
//!
//! B5 and B7 rely on a store between them reaching the kept page, not a copy of it. The kernel
//! copies a page unless it knows that a single mapping uses it. These pages are not shared: they
//! are not inherited by a fork, are installed by `UFFDIO_COPY`, and are not merged with equal ones
//! (`Reservation::refuse_merging`). One case remains: a page that was swapped in from a device that
//! needs stable pages (zram) while it is still being written there. Its first store is lost if it
//! falls between B5 and B6.
//!
//! Pages pinned by a device cannot be detected (`MapMut::pin_mut` is for those): `PAGEMAP_SCAN`,
//! `vmsplice` and `MADV_DONTNEED` do not report pins. `UFFDIO_MOVE` does, but takes one range per
//! call and flushes for each, which takes twice as long for scattered pages.
//!
//! The size of a batch is counted in runs of adjacent pages ([`Runs`]): if folios are evicted in
//! the order in which they were filled, one flush covers some hundreds of them. An unmapping costs
//! the other CPUs one interrupt, and one more for each concurrent first store to a protected page.
//!
//! Steps B3 to B7 are in `batch.rs`. A thread with the reclaim lock evicts clean folios;
//! dirty ones are written by the swapper (`swapper.rs`), without that lock. While some folios are
//! written (B9), it unmaps the next.

mod batch;
use crate::inode::{Cleaner, Inode};
use crate::maps::region::Region;
use crate::page::{Flag, FolioRef, Frozen, LockedFolio};
use crate::reclaim::is_pinned;
use crate::reclaim::{EvictOutcome, ScanControl, ScanCounts, Unswapped, WriteOut};
use crate::reclaim::{Reclaim, ReclaimLock};
use crate::stats::Counter;
use crate::sync::yield_now;
use batch::{UnmapBatch, Unmapped, UnmappedBatch, Victim, VictimState};
use std::ops::Range;
use std::sync::Arc;

/// Upper bound on the folios of a batch that exceeds the configured size because its folios are
/// adjacent.
const IN_RUNS_MAX: usize = 256;

/// The folios that one scan evicts from regions; see the [module documentation](self).
#[derive(Debug)]
pub(crate) struct Unmapping<'t> {
    reclaim: &'t Reclaim,
    owners: Owners<'t>,
    control: ScanControl,
    /// Isolated folios that wait for a batch.
    waiting: Vec<FolioRef<'t>>,
    /// Runs of adjacent pages among `waiting`.
    runs: Runs,
    /// Unmapped folios that are to be written.
    unmapped_batch: Option<UnmappedBatch<'t>>,
}

impl<'t> Unmapping<'t> {
    pub(crate) fn new(reclaim: &'t Reclaim, owners: Owners<'t>, control: ScanControl) -> Self {
        let (waiting, runs) = (Vec::new(), Runs::default());
        Self { reclaim, owners, control, waiting, runs, unmapped_batch: None }
    }

    /// Returns `true` if folios may be written: the holder of the reclaim lock waits for no
    /// storage.
    fn may_write(&self) -> bool {
        matches!(self.owners, Owners::Kept(_)) && self.control.write_out == WriteOut::MemoryFiles
    }

    /// Returns `true` if a dirty folio of the file must be queued for the swapper.
    fn is_for_swapper(&self, inode: &Inode) -> bool {
        inode.store.cleaner() == Cleaner::Swapper && !self.may_write()
    }

    /// Returns the number of folios that may wait if they are adjacent.
    fn waiting_max(&self) -> usize {
        let batch = self.reclaim.unmap_batch_folios;
        let room = self.reclaim.regions_size(batch).batch_folios();
        room.min(IN_RUNS_MAX).max(batch)
    }

    /// Returns the number of pages worth scanning to fill a batch.
    pub(crate) fn scan_pages(&self) -> u64 {
        if self.waiting.is_empty() { 0 } else { self.reclaim.unmap_batch_folios as u64 }
    }

    /// Takes the folios of regions out of a `batch` of isolated folios: to be swapped out, or to be
    /// unmapped with others. Leaves the folios of the arena.
    pub(crate) fn collect(
        &mut self,
        batch: &mut Vec<FolioRef<'t>>,
        unswapped: &mut Unswapped<'t>,
        counts: &mut ScanCounts,
    ) {
        let arena = &self.reclaim.memory.arena;
        for folio in batch.extract_if(.., |folio| arena.is_region_page(folio.id())) {
            match self.choose_for_swap(&folio) {
                Some(Ok(())) => unswapped.add_leaving(folio),
                Some(Err(outcome)) => self.keep(folio, outcome, counts),
                None => self.add(folio, counts),
            }
        }
    }

    /// Takes the folios of regions out of `folios`, to be unmapped with others.
    pub(crate) fn add_all(&mut self, folios: &mut Vec<FolioRef<'t>>, counts: &mut ScanCounts) {
        let arena = &self.reclaim.memory.arena;
        let of_regions = folios.extract_if(.., |folio| arena.is_region_page(folio.id()));
        of_regions.for_each(|folio| self.add(folio, counts));
    }

    /// Decides whether the swapper gets an isolated folio, clean or dirty. An error is the reason
    /// why it stays; `None` means that its file has no swap, or that nothing is swapped now.
    fn choose_for_swap(
        &self,
        folio: &FolioRef<'_>,
    ) -> Option<std::result::Result<(), EvictOutcome>> {
        let Owners::ReclaimLock(reclaim_lock) = self.owners else { return None };
        let inode = reclaim_lock
            .owner_of_isolated(folio)
            .filter(|_| self.control.write_out == WriteOut::MemoryFiles)
            .filter(|inode| inode.store.cleaner() == Cleaner::Swapper)?;
        // Hints, read without the lock: the swapper checks again.
        if self.control.second_chance && inode.mapping.test_and_clear_referenced(folio.folio()) {
            return Some(Err(EvictOutcome::Activate));
        }
        let is_held = inode.page_space.is_held(folio.folio().index());
        Some(if is_held || is_pinned(folio) { Err(EvictOutcome::Pinned) } else { Ok(()) })
    }

    /// Adds an isolated folio of a region.
    pub(crate) fn add(&mut self, folio: FolioRef<'t>, counts: &mut ScanCounts) {
        let batch = self.reclaim.unmap_batch_folios;
        self.runs.add(folio.folio().index(), batch);
        self.waiting.push(folio);
        if self.runs.count >= batch || self.waiting.len() >= self.waiting_max() {
            self.unmap_waiting(counts);
        }
    }

    /// Ends all unmapping and writing: every folio is then evicted or back on a list.
    pub(crate) fn finish(mut self, counts: &mut ScanCounts) {
        self.unmap_waiting(counts);
        self.end_unmapped(counts);
    }

    /// Puts a folio that stays back on its list, or on the active one if it was used.
    pub(crate) fn keep(&self, folio: FolioRef<'t>, outcome: EvictOutcome, counts: &mut ScanCounts) {
        counts.note(outcome, folio.folio().pages());
        let memory = &self.reclaim.memory;
        if outcome == EvictOutcome::Activate {
            return self.reclaim.activate(&mut vec![folio]);
        }
        if outcome == EvictOutcome::Pinned {
            memory.counters.add(Counter::PgPinned, 1);
        }
        memory.lru.put_back(&memory.folios, &mut vec![folio]);
    }

    fn unmap_waiting(&mut self, counts: &mut ScanCounts) {
        self.runs = Runs::default();
        let mut locked: Vec<(&'t Inode, LockedFolio<'t>, FolioRef<'t>)> = Vec::new();
        for folio in std::mem::take(&mut self.waiting) {
            match self.recheck(&folio) {
                Ok((inode, lock)) => locked.push((inode, lock, folio)),
                Err(outcome) => self.keep(folio, outcome, counts),
            }
        }
        locked.sort_unstable_by_key(|(inode, lock, _)| (inode.address, lock.index()));
        let mut left = locked.into_iter().peekable();
        while let Some((inode, lock, folio)) = left.next() {
            let mut of_one = vec![(lock, folio)];
            while let Some((_, lock, folio)) =
                left.next_if(|(other, ..)| std::ptr::eq(*other, inode))
            {
                of_one.push((lock, folio));
            }
            self.unmap_of(inode, of_one, counts);
        }
    }

    /// B2: freezes the folios that have no other references.
    fn freeze(
        &self,
        inode: &Inode,
        folios: impl Iterator<Item = (LockedFolio<'t>, FolioRef<'t>)>,
        counts: &mut ScanCounts,
    ) -> Vec<(LockedFolio<'t>, Frozen<'t>)> {
        let mut frozen = Vec::new();
        for (lock, folio) in folios {
            match inode.mapping.begin_eviction(folio, &lock) {
                Ok(folio) => frozen.push((lock, folio)),
                Err(folio) => {
                    drop(lock);
                    self.keep(folio, EvictOutcome::Pinned, counts);
                }
            }
        }
        frozen
    }

    /// B1: locks the folio and repeats every check.
    fn recheck(
        &self,
        folio: &FolioRef<'t>,
    ) -> std::result::Result<(&'t Inode, LockedFolio<'t>), EvictOutcome> {
        let lock = folio.try_lock().ok_or(EvictOutcome::Busy)?;
        // Truncated: the thread that puts the last reference frees it.
        let inode = self.owners.owner(&lock).ok_or(EvictOutcome::Pinned)?;
        debug_assert!(!lock.flags.get(Flag::OnLru), "isolated folios are on no list (LRU-1)");
        if lock.flags.write_state().is_writing() {
            return Err(EvictOutcome::Busy);
        }
        if self.control.second_chance && inode.mapping.test_and_clear_referenced(&lock) {
            return Err(EvictOutcome::Activate);
        }
        let region = inode.page_space.region().expect("a region page is a region's");
        if is_pinned(folio) && lock.flags.write_state().is_dirty() {
            // A thread that is about to write it back holds a reference, too; and the flusher must
            // be asked.
            let is_kept = inode.store.cleaner() != Cleaner::Flusher || region.is_kept(lock.index());
            return Err(if is_kept { EvictOutcome::Pinned } else { EvictOutcome::of_dirty(inode) });
        }
        if lock.flags.write_state().is_dirty() && self.is_for_swapper(inode) {
            return Err(EvictOutcome::Unswapped);
        }
        if is_pinned(folio) || region.is_held(lock.index()) {
            return Err(EvictOutcome::Pinned);
        }
        Ok((inode, lock))
    }

    /// Does B2 to B8 for folios of one file, sorted by index: as many at a time as there is room
    /// for copies. Waiting for room happens while nothing is frozen.
    fn unmap_of(
        &mut self,
        inode: &'t Inode,
        folios: Vec<(LockedFolio<'t>, FolioRef<'t>)>,
        counts: &mut ScanCounts,
    ) {
        let region = inode.page_space.region().expect("a region page is a region's");
        // The flusher writes the others.
        let may_write = self.may_write() && inode.store.cleaner() == Cleaner::Swapper;
        let mut left = folios.into_iter();
        while left.len() > 0 {
            let room = self.room_for(left.len(), inode, region, counts);
            let count = left.len().min(room.len() / 2);
            let batch = self.freeze(inode, left.by_ref().take(count), counts);
            let count = batch.len();
            if count == 0 {
                continue;
            }
            let unmapped_batch = self.unmapped_batch.as_mut().expect("made just now");
            let bounce_buffer = &mut unmapped_batch.bounce_buffer;
            let mut unmap_batch = UnmapBatch::new(inode, region, bounce_buffer, room.start, batch);
            let flushes = unmap_batch.take(may_write);
            let victims = unmap_batch.victims;
            self.reclaim.memory.counters.add(Counter::UnmapFlush, flushes);
            let mut returning = Vec::new();
            for (page, victim) in (room.start..).zip(victims) {
                returning.extend(self.finish_victim(inode, page, victim, counts));
            }
            // This may take a while if the kernel has no memory; nothing is frozen any more.
            for left in returning {
                self.put_back(inode, left, EvictOutcome::Dirty, counts);
            }
            let reads = &self.reclaim.memory.region_reads;
            reads.note_evicted(count as u64);
            if reads.are_single() {
                // Yields: the reader that was just woken may be queued on this CPU.
                yield_now();
            }
        }
    }

    /// Returns the pages of the bounce buffer for `folios` more folios of the file, two for each,
    /// or for some of them: no more than the pipe can keep at a time.
    fn room_for(
        &mut self,
        folios: usize,
        inode: &'t Inode,
        region: &'t Region,
        counts: &mut ScanCounts,
    ) -> Range<usize> {
        let is_other = |batch: &UnmappedBatch<'_>| !std::ptr::eq(batch.inode, inode);
        if self.unmapped_batch.as_ref().is_some_and(is_other) {
            self.end_unmapped(counts);
        }
        let may_write = self.may_write();
        let mut batch = self
            .unmapped_batch
            .take()
            .unwrap_or_else(|| UnmappedBatch::new(inode, region, may_write));
        if batch.room().len() < 2 * folios || batch.is_a_transfer() {
            let ended = batch.rotate(&self.reclaim.memory);
            self.finish_written(inode, ended, counts);
        }
        let (room, places) = (batch.room(), batch.bounce_buffer.page_pipe.places());
        self.unmapped_batch = Some(batch);
        room.start..room.end.min(room.start + 2 * places)
    }

    /// B8 for one folio, whose copy is on `page` of the bounce buffer. Returns it if it must be put
    /// back.
    fn finish_victim(
        &mut self,
        inode: &'t Inode,
        page: usize,
        victim: Victim<'t>,
        counts: &mut ScanCounts,
    ) -> Option<Unmapped<'t>> {
        let Victim { lock, frozen, copy, state, .. } = victim;
        match state {
            VictimState::Evict => self.evict(inode, lock, frozen, counts),
            VictimState::Keep(outcome) => {
                let folio = inode.mapping.cancel_eviction(frozen, &lock);
                drop(lock);
                self.keep(folio, outcome, counts);
            }
            VictimState::WriteOut(in_flight) => {
                let unmapped_batch = self.unmapped_batch.as_mut().expect("where its copy is");
                let folio = frozen.unfreeze();
                unmapped_batch.add(page, Unmapped { lock, folio, copy }, in_flight);
            }
            VictimState::Lose(error) => {
                let folio = frozen.unfreeze();
                let table_reference = inode.lose(&folio, &lock, &error);
                drop((lock, table_reference));
            }
            VictimState::PutBack => {
                return Some(Unmapped { lock, folio: frozen.unfreeze(), copy });
            }
        }
        None
    }

    /// Evicts a folio that is clean and unmapped.
    fn evict(
        &self,
        inode: &Inode,
        lock: LockedFolio<'t>,
        frozen: Frozen<'t>,
        counts: &mut ScanCounts,
    ) {
        counts.note(EvictOutcome::Evicted, lock.pages());
        let shadow = self.reclaim.shadow_of(&lock);
        self.reclaim.note_eviction(&lock, self.control.counter);
        inode.end_eviction(frozen, lock, shadow);
    }

    /// Writes the unmapped folios, and waits for it.
    fn end_unmapped(&mut self, counts: &mut ScanCounts) {
        let Some(mut batch) = self.unmapped_batch.take() else { return };
        while batch.folios() > 0 {
            let ended = batch.rotate(&self.reclaim.memory);
            self.finish_written(batch.inode, ended, counts);
        }
    }

    /// Does the end of B9.
    fn finish_written(&self, inode: &'t Inode, ended: Vec<Unmapped<'t>>, counts: &mut ScanCounts) {
        for Unmapped { lock, folio, copy } in ended {
            let is_dirty = lock.flags.write_state().is_dirty();
            let outcome = if is_dirty { EvictOutcome::Unwritten } else { EvictOutcome::Busy };
            match if is_dirty { Err(folio) } else { folio.try_freeze(1) } {
                Ok(frozen) => self.evict(inode, lock, frozen, counts),
                Err(folio) => self.put_back(inode, Unmapped { lock, folio, copy }, outcome, counts),
            }
        }
    }

    /// Copies the bytes of an unmapped folio back to its address, and keeps the folio; or removes
    /// it from the table if that fails.
    fn put_back(
        &self,
        inode: &'t Inode,
        left: Unmapped<'t>,
        outcome: EvictOutcome,
        counts: &mut ScanCounts,
    ) {
        let Unmapped { lock, folio, copy } = left;
        let table_reference = inode.put_back(&folio, &lock, copy);
        drop(lock);
        if table_reference.is_none() {
            self.keep(folio, outcome, counts);
        }
    }
}

/// Writes and evicts those of `folios` that are in regions, each with its file, for the swapper.
/// Leaves the folios of the arena.
pub(crate) fn swap_out_mapped(reclaim: &Reclaim, folios: &mut Vec<(Arc<Inode>, FolioRef<'_>)>) {
    let arena = &reclaim.memory.arena;
    let of_regions = folios.extract_if(.., |(_, folio)| arena.is_region_page(folio.id()));
    let (mut inodes, of_regions): (Vec<_>, Vec<_>) = of_regions.unzip();
    inodes.dedup_by(|inode, before| Arc::ptr_eq(inode, before));
    if of_regions.is_empty() {
        return;
    }
    let mut counts = ScanCounts::default();
    let control =
        ScanControl { second_chance: false, ..ScanControl::reclaim(WriteOut::MemoryFiles) };
    let mut unmapping = Unmapping::new(reclaim, Owners::Kept(&inodes), control);
    of_regions.into_iter().for_each(|folio| unmapping.add(folio, &mut counts));
    unmapping.finish(&mut counts);
}

/// The guarantee that a folio's file is alive.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Owners<'t> {
    /// The reclaim lock is held (RECLAIM-2).
    ReclaimLock(&'t ReclaimLock<'t>),
    /// References to these files are held; the caller handles only their folios.
    Kept(&'t [Arc<Inode>]),
}

impl<'t> Owners<'t> {
    /// Returns the file that a locked folio belongs to; `None` once it was removed from its table.
    fn owner(self, locked: &LockedFolio<'_>) -> Option<&'t Inode> {
        match self {
            Self::ReclaimLock(reclaim_lock) => reclaim_lock.owner(locked),
            Self::Kept(inodes) => {
                let address = locked.owner();
                inodes.iter().find(|inode| inode.address == address).map(|inode| &**inode)
            }
        }
    }
}

/// Counts the runs of adjacent pages in a batch, because a flush is due for that many ranges, and
/// the kernel treats adjacent pages as one. A run has no more folios than a batch may have runs: a
/// batch of one is one folio.
#[derive(Debug, Default)]
struct Runs {
    count: usize,
    /// Folios of the last run.
    folios: usize,
    /// Index that would extend the last run.
    next_index: u64,
}

impl Runs {
    /// Adds a folio at page `index`; no run has more than `folios_max`. Its file does not matter:
    /// the count only measures work.
    fn add(&mut self, index: u64, folios_max: usize) {
        if self.count == 0 || index != self.next_index || self.folios >= folios_max {
            self.count += 1;
            self.folios = 0;
        }
        self.folios += 1;
        self.next_index = index + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(indices: &[u64], folios_max: usize) -> usize {
        let mut runs = Runs::default();
        indices.iter().for_each(|index| runs.add(*index, folios_max));
        runs.count
    }

    #[test]
    fn adjacent_folios_are_one_run_up_to_its_maximum() {
        assert_eq!(runs(&[], 31), 0);
        assert_eq!(runs(&[7, 8, 9, 20, 21, 3], 31), 3);
        assert_eq!(runs(&[9, 8, 7], 31), 3, "only ascending folios form a run");
        assert_eq!(runs(&[7, 8, 9, 10, 11], 2), 3);
        assert_eq!(runs(&[7, 8, 9], 1), 3, "a batch of one is one folio");
        assert_eq!(runs(&[0, 1], 31), 1);
    }
}

//! Unmapping: folios of regions are evicted a batch at a time, with one flush of the other CPUs'
//! translations for all of them.
//!
//! After a proposal for the kernel's `shrink_folio_list` (2026), which unmaps dirty folios one by
//! one but flushes once for 31 of them before their write-out. Raw writers may be at work on the
//! pages all the time, and nothing stops them but the unmapping itself. So the pages are unmapped
//! first, as in the kernel, and what is written out is a copy of what they held when the last
//! translation was gone:
//!
//! ```text
//!  EVICT a batch (here)                         RAW ACCESS, LOOKUP (fault, read_at, pin ...)
//!  B1 lock each folio again (try) and look      store through a translation: lands in the page
//!     at everything again                         before B6: found by B4, or by B7
//!  B2 freeze it: no READY, no reference         lookup: finds the Entry, frozen; waits, at the
//!  B3 take the section (REGION-3)                 most until B8
//!  B4 who was stored to? dirty                  a sync: looks for stores in a section of its own,
//!     (a copy of each that seems clean, first)    waits for who is frozen, or in flight
//!  B5 keep the pages, beyond their unmapping    access after B6: a fault, which is a lookup
//!  B6 unmap all: one call, one flush
//!  B7 read what was kept: the last bytes.
//!     Clean, and other bytes than before?
//!     It was stored to after B4: dirty
//!     writing, now that nothing can fail
//!  B8 clean: out of the table, free             lookup: a value, a hole; it fills the page anew
//!     dirty: unfrozen, but locked               lookup: gets it, waits for its lock, until B9
//!  B9 write the copies out; written: freeze
//!     again, out of the table, free.            a waiter's reference: the freeze fails, the page
//!     Not written, or wanted: the copy goes       is put back from the copy, and he has it
//!     back to its place
//! ```
//!
//! The Entry names the folio from B2 to B8 or B9: the place belongs to the index, and a fill that
//! came before B6 would be wiped by it (REGION-2).
//!
//! Why this is enough, and which tests say so (`loom_unmap_*` are in `src/tests/loom_unmap.rs`, the
//! others in `tests/maps/`):
//! - Stores through stale translations: the flush of B6 comes before the bytes of B7 are read, and
//!   only those are written. (To protect the pages before the write-out takes a flush for each 2
//!   MiB touched: 0.49 a page where pages are scattered, against 0.03 here; and a store between the
//!   last look and the unmapping would be lost.) `loom_unmap_vs_store`; `threads.rs`.
//! - Folios wait for their batch without a lock: B1 repeats every check. `loom_unmap_vs_lookup`,
//!   `loom_unmap_vs_sync`; `model.rs`.
//! - Pins: B2 fails for who has any reference beside the table's and ours. `loom_unmap_vs_pin`.
//! - Half-full batches: [`Unmapping::finish`] ends every scan. `tests/maps/batches.rs`.
//! - What stays is put back on a list in one place: [`Unmapping::keep`].
//!
//! B5 and B7 rely on it that a store between them goes to the page that is kept, and to no copy of
//! it. The kernel copies a page that it does not know to be one mapping's alone. Nobody shares
//! these: they are not inherited by a fork, come by `UFFDIO_COPY`, and are not merged with equal
//! ones (`Reservation::refuse_merging`). What is left is a page that comes back from a swap device
//! which needs stable pages (zram) while it is being written there: its first store, if that falls
//! between B5 and B6, is lost.
//!
//! A page that a device has pinned is not told from others (for those is `MapMut::pin_mut`):
//! neither `PAGEMAP_SCAN` nor `vmsplice` nor `MADV_DONTNEED` knows pins. `UFFDIO_MOVE` does, but it
//! takes one range a call and flushes for each: 1.2 to 1.5 us for a scattered page, against 0.6 to
//! 0.7 here.
//!
//! A batch is so many rows of neighbours ([`Rows`]): where folios leave in the order in which they
//! came, a flush is due for some hundreds of them. An unmapping costs the other CPUs an interrupt,
//! and one more for each first store to a protected page that meets it on its way.
//!
//! The steps from B3 to B7 are in `unmap_batch.rs`. Whoever reclaims, with the reclaim lock, takes
//! what is clean; what is to be written out is the swapper's (`swapper.rs`), without that lock.
//! While some folios are written out (B9), it unmaps the next.

use super::scan::{EvictOutcome, ScanControl, ScanCounts, WriteOut, is_pinned};
use super::unmap_batch::{UnmapBatch, Unmapped, UnmappedBatch, Victim, VictimState};
use super::{Reclaim, ReclaimLock};
use crate::memory::{ListKind, Region};
use crate::page::{Flag, FolioRef, Frozen, LockedFolio};
use crate::stats::Counter;
use crate::sync::yield_now;
use crate::writeback::{Cleaner, Inode};
use std::ops::Range;
use std::sync::Arc;

/// The most folios of a batch that is larger than what was asked for because they lie in rows.
const IN_ROWS_MAX: usize = 256;

/// See the head of the file. One scan's: what is in it belongs to that.
#[derive(Debug)]
pub(super) struct Unmapping<'t> {
    reclaim: &'t Reclaim,
    owners: Owners<'t>,
    control: ScanControl,
    /// Isolated, and nothing else.
    waiting: Vec<FolioRef<'t>>,
    /// How those lie.
    rows: Rows,
    /// Unmapped, and to be written out.
    unmapped_batch: Option<UnmappedBatch<'t>>,
}

impl<'t> Unmapping<'t> {
    pub(super) fn new(reclaim: &'t Reclaim, owners: Owners<'t>, control: ScanControl) -> Self {
        let (waiting, rows) = (Vec::new(), Rows::default());
        Self { reclaim, owners, control, waiting, rows, unmapped_batch: None }
    }

    /// Whether the folios may be written out: the holder of the reclaim lock waits for no storage.
    fn may_write(&self) -> bool {
        matches!(self.owners, Owners::Kept(_)) && self.control.write_out == WriteOut::MemoryFiles
    }

    /// Whether a dirty folio of the file is for the swapper to take.
    fn is_left_to_swapper(&self, inode: &Inode) -> bool {
        inode.store.cleaner() == Cleaner::Swapper && !self.may_write()
    }

    /// How many folios may wait, where they lie in rows.
    fn waiting_max(&self) -> usize {
        let batch = self.reclaim.unmap_batch_folios;
        let room = self.reclaim.regions_size(batch).batch_folios();
        room.min(IN_ROWS_MAX).max(batch)
    }

    /// How many pages are worth looking at: enough for a batch.
    pub(super) fn scan_pages(&self) -> u64 {
        if self.waiting.is_empty() { 0 } else { self.reclaim.unmap_batch_folios as u64 }
    }

    /// Takes an isolated folio of a region.
    pub(super) fn add(&mut self, folio: FolioRef<'t>, counts: &mut ScanCounts) {
        let batch = self.reclaim.unmap_batch_folios;
        self.rows.add(folio.folio().index(), batch);
        self.waiting.push(folio);
        if self.rows.count >= batch || self.waiting.len() >= self.waiting_max() {
            self.unmap_waiting(counts);
        }
    }

    /// Everything that waits, for a batch or for a transfer, has gone or is back on a list then.
    pub(super) fn finish(mut self, counts: &mut ScanCounts) {
        self.unmap_waiting(counts);
        self.end_unmapped(counts);
    }

    /// What stays goes back to where it came from, or to the active list.
    pub(super) fn keep(&self, folio: FolioRef<'t>, outcome: EvictOutcome, counts: &mut ScanCounts) {
        counts.note(outcome, folio.folio().pages());
        let memory = &self.reclaim.memory;
        let (kind, counter) = match outcome {
            EvictOutcome::Activate => (ListKind::Active, Some(Counter::PgActivate)),
            EvictOutcome::Pinned => (ListKind::Inactive, Some(Counter::PgPinned)),
            _ => (ListKind::Inactive, None),
        };
        counter.inspect(|counter| memory.counters.add(*counter, 1));
        memory.lru.put_back(&memory.folios, &mut vec![folio], kind);
    }

    fn unmap_waiting(&mut self, counts: &mut ScanCounts) {
        self.rows = Rows::default();
        let mut locked: Vec<(&'t Inode, LockedFolio<'t>, FolioRef<'t>)> = Vec::new();
        for folio in std::mem::take(&mut self.waiting) {
            match self.look_again(&folio) {
                Ok((inode, lock)) => locked.push((inode, lock, folio)),
                Err(outcome) => self.keep(folio, outcome, counts),
            }
        }
        locked.sort_unstable_by_key(|(inode, lock, _)| (inode.address(), lock.index()));
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

    /// B2: of these folios, those that nobody else has a reference to.
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

    /// B1.
    fn look_again(
        &self,
        folio: &FolioRef<'t>,
    ) -> std::result::Result<(&'t Inode, LockedFolio<'t>), EvictOutcome> {
        let lock = folio.try_lock().ok_or(EvictOutcome::Busy)?;
        // Truncated: whoever still holds it frees it with the last put.
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
            // Whoever is about to write it out holds a reference, too; and it must be told.
            let is_kept = inode.store.cleaner() != Cleaner::Flusher || region.is_kept(lock.index());
            return Err(if is_kept { EvictOutcome::Pinned } else { EvictOutcome::of_dirty(inode) });
        }
        if lock.flags.write_state().is_dirty() && self.is_left_to_swapper(inode) {
            return Err(EvictOutcome::Unswapped);
        }
        if is_pinned(folio) || region.is_held(lock.index()) {
            return Err(EvictOutcome::Pinned);
        }
        Ok((inode, lock))
    }

    /// B2 to B8, for folios of one file in order: as many at a time as there is room for copies,
    /// which may have to be waited for; nothing is frozen then.
    fn unmap_of(
        &mut self,
        inode: &'t Inode,
        folios: Vec<(LockedFolio<'t>, FolioRef<'t>)>,
        counts: &mut ScanCounts,
    ) {
        let region = inode.page_space.region().expect("a region page is a region's");
        // Others are written out by the flusher.
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
                returning.extend(self.settle(inode, page, victim, counts));
            }
            // Which may take a while, when the kernel has no memory: nothing is frozen any more.
            for left in returning {
                self.put_back(inode, left, EvictOutcome::Dirty, counts);
            }
            let reads = &self.reclaim.memory.region_reads;
            reads.note_evicted(count as u64);
            if reads.are_single() {
                // Who was woken by his page may have this processor. (The kernel lets the reclaim
                // thread run where it was woken, which is there: of a thousand misses in no order
                // one waited 0.9 ms for it, in a cache of 32 MiB, and waits 0.36 ms.)
                yield_now();
            }
        }
    }

    /// Pages of the bounce buffer for `folios` more folios of the file, two for each, or for some
    /// of them: no more than can be kept at a time.
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
            self.settle_written(inode, ended, counts);
        }
        let (room, places) = (batch.room(), batch.bounce_buffer.page_pipe.places());
        self.unmapped_batch = Some(batch);
        room.start..room.end.min(room.start + 2 * places)
    }

    /// B8. Its copy is on `page` of the bounce buffer. Answers what is to be put back.
    fn settle(
        &mut self,
        inode: &'t Inode,
        page: usize,
        victim: Victim<'t>,
        counts: &mut ScanCounts,
    ) -> Option<Unmapped<'t>> {
        let Victim { lock, frozen, copy, state, .. } = victim;
        match state {
            VictimState::Goes => self.evict(inode, lock, frozen, counts),
            VictimState::Stays(outcome) => {
                let folio = inode.mapping.cancel_eviction(frozen, &lock);
                drop(lock);
                self.keep(folio, outcome, counts);
            }
            VictimState::Leaves(in_flight) => {
                let unmapped_batch = self.unmapped_batch.as_mut().expect("where its copy is");
                let folio = frozen.unfreeze();
                unmapped_batch.add(page, Unmapped { lock, folio, copy }, in_flight);
            }
            VictimState::Lost(error) => {
                let folio = frozen.unfreeze();
                let table_reference = inode.lose(&folio, &lock, &error);
                drop((lock, table_reference));
            }
            VictimState::Returns => {
                return Some(Unmapped { lock, folio: frozen.unfreeze(), copy });
            }
        }
        None
    }

    /// The folio is clean and unmapped: it goes.
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

    /// Writes out what was unmapped, and waits for it.
    fn end_unmapped(&mut self, counts: &mut ScanCounts) {
        let Some(mut batch) = self.unmapped_batch.take() else { return };
        while batch.folios() > 0 {
            let ended = batch.rotate(&self.reclaim.memory);
            self.settle_written(batch.inode, ended, counts);
        }
    }

    /// The end of B9.
    fn settle_written(&self, inode: &'t Inode, ended: Vec<Unmapped<'t>>, counts: &mut ScanCounts) {
        for Unmapped { lock, folio, copy } in ended {
            let is_dirty = lock.flags.write_state().is_dirty();
            let outcome = if is_dirty { EvictOutcome::Unwritten } else { EvictOutcome::Busy };
            match if is_dirty { Err(folio) } else { folio.try_freeze(1) } {
                Ok(frozen) => self.evict(inode, lock, frozen, counts),
                Err(folio) => self.put_back(inode, Unmapped { lock, folio, copy }, outcome, counts),
            }
        }
    }

    /// The bytes of an unmapped folio go back to their place, and it stays; or it leaves the table.
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

/// How it is known that a folio's file is alive.
#[derive(Clone, Copy, Debug)]
pub(super) enum Owners<'t> {
    /// By the reclaim lock (RECLAIM-2).
    ReclaimLock(&'t ReclaimLock<'t>),
    /// These files are kept; folios of others are none of the caller's.
    Kept(&'t [Arc<Inode>]),
}

impl<'t> Owners<'t> {
    /// The file that a locked folio belongs to; `None` once it has left its table.
    fn owner(self, locked: &LockedFolio<'_>) -> Option<&'t Inode> {
        match self {
            Self::ReclaimLock(reclaim_lock) => reclaim_lock.owner(locked),
            Self::Kept(inodes) => {
                let address = locked.owner();
                inodes.iter().find(|inode| inode.address() == address).map(|inode| &**inode)
            }
        }
    }
}

/// How many folios a batch has is counted in rows: one flush is due for so many places, and
/// neighbours are one place to the kernel. A row has no more folios than a batch may have rows: a
/// batch of one is one folio.
#[derive(Debug, Default)]
struct Rows {
    count: usize,
    /// Folios of the last one, and which page would make it longer.
    folios: usize,
    next_index: u64,
}

impl Rows {
    /// The next folio is at page `index`; no row has more than `folios_max`. Of which file it is
    /// does not matter: the count is a measure of work, no promise.
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

    fn rows(indices: &[u64], folios_max: usize) -> usize {
        let mut rows = Rows::default();
        indices.iter().for_each(|index| rows.add(*index, folios_max));
        rows.count
    }

    #[test]
    fn neighbours_are_one_row_as_far_as_a_row_may_reach() {
        assert_eq!(rows(&[], 31), 0);
        assert_eq!(rows(&[7, 8, 9, 20, 21, 3], 31), 3);
        assert_eq!(rows(&[9, 8, 7], 31), 3, "only what comes in order");
        assert_eq!(rows(&[7, 8, 9, 10, 11], 2), 3);
        assert_eq!(rows(&[7, 8, 9], 1), 3, "one flush a folio stays one flush a folio");
        assert_eq!(rows(&[0, 1], 31), 1);
    }
}

//! Unmapping: evicts folios of regions in batches, with one TLB flush on the other CPUs for each
//! batch.
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
//! Why this suffices:
//! - The flush of B6 comes before the bytes of B7 are read, and only those are written: a store
//!   through a stale translation is in them. (Protecting the pages before the write-back instead
//!   needs a flush for each 2 MiB touched, and loses a store between the last check and B6.)
//! - Folios wait for their batch without a lock: B1 repeats every check.
//! - Pins: B2 fails if there is any reference besides the table's and this thread's.
//!
//! B5 and B7 rely on a store between them reaching the kept page, not a copy of it. The kernel
//! copies a page unless it knows that a single mapping uses it. These pages are not shared: they
//! are not inherited by a fork, are installed by `UFFDIO_COPY`, and are not merged with equal ones
//! (`Reservation::refuse_merging`). One case remains: a page that was swapped in from a device that
//! needs stable pages (zram) while it is still being written there. Its first store is lost if it
//! falls between B5 and B6.
//!
//! The column is [`Unmapping::evict_collected`]. A thread with the reclaim lock evicts clean
//! folios; the swapper writes the dirty ones, without that lock, from its own bounce buffer. That
//! has two halves: while the copies in one are written (B9), the next folios are unmapped into the
//! other.
//!
//! Length: the steps of the column stand below it, in its order.
//!
//! # Safety
//! Unmaps pages of frozen folios, and copies between these pages and the bounce buffer.
#![allow(unsafe_code)]

use crate::dirt::{InFlight, NO_LSN};
use crate::inode::Inode;
use crate::maps::kernel::pages::PageRange;
use crate::maps::pages;
use crate::maps::region::{BounceBuffer, Region, Regions, RegionsSize};
use crate::page::{Flag, FolioRef, Frozen, LockedFolio, PAGE_BYTES};
use crate::reclaim::{
    EvictOutcome, MappedScan, MappedVictims, Reclaim, ReclaimLock, ScanControl, ScanCounts,
    Unswapped, WriteOut, is_pinned,
};
use crate::stats::Counter;
use crate::sync::{MutexGuard, yield_now};
use crate::sys::copy;
use crate::sys::is_forbidden;
use crate::sys::probe::Feature;
use crate::writeback::{CopyAt, WriteBatch, WriteVictim};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

const PAGE: usize = PAGE_BYTES as usize;

/// Upper bound on the folios of a batch that exceeds the configured size because its folios are
/// adjacent.
const IN_RUNS_MAX: usize = 256;

/// Number of folios that are written together, if there are enough: a transfer of 1 MiB.
const TRANSFER_FOLIOS: usize = 256;

/// Number of folios per transfer while threads wait for single pages, so that each waits for no
/// longer transfer: the device needs 300 us for 1 MiB.
const PORTION_FOLIOS: usize = 32;

#[derive(Debug)]
struct Unmapping<'t> {
    reclaim: &'t Reclaim,
    owners: Owners<'t>,
    control: ScanControl,
    /// Isolated folios that wait for a batch.
    collected: Vec<FolioRef<'t>>,
    runs: Runs,
    /// Copies of pages that were unmapped; `None` until there is a first batch.
    copies: Option<Copies<'t>>,
}

type LockedVictim<'t> = (&'t Inode, LockedFolio<'t>, FolioRef<'t>);

impl<'t> Unmapping<'t> {
    fn new(reclaim: &'t Reclaim, owners: Owners<'t>, control: ScanControl) -> Self {
        let (collected, runs) = (Vec::new(), Runs::default());
        Self { reclaim, owners, control, collected, runs, copies: None }
    }

    /// The column EVICT for all collected folios: those of one file at a time, as many as there is
    /// room for copies.
    fn evict_collected(&mut self, counts: &mut ScanCounts) {
        // B1
        let mut locked = self.lock_collected(counts);
        while let Some((inode, ..)) = locked.front() {
            let inode = *inode;
            let of_file = locked.iter().take_while(|(other, ..)| std::ptr::eq(*other, inode));
            let room = self.make_room(inode, of_file.count(), counts);
            let folios = locked.drain(..room.len() / 2).collect();
            // B2
            let frozen = self.freeze(folios, counts);
            let count = frozen.len();
            if count == 0 {
                continue;
            }
            let mut batch = self.batch_of(inode, room.start, frozen);
            {
                // B3
                let _section = batch.region.section.lock();
                // B4
                batch.find_stores();
                #[cfg(all(test, not(loom)))]
                crate::sync::test_hook::reach("between the check and the unmapping");
                // B5
                let going = batch.keep_pages();
                // B6
                batch.unmap(&going);
                // B7
                batch.take_last_bytes(&going);
                batch.begin_writes();
            }
            // B8
            let mut returning = Vec::new();
            for (page, victim) in (room.start..).zip(batch.victims) {
                returning.extend(self.release(inode, page, victim, counts));
            }
            // This may take a while if the kernel has no memory; nothing is frozen any more.
            for unmapped in returning {
                self.put_back(inode, unmapped, EvictOutcome::Dirty, counts);
            }
            // B9
            if self.copies.as_ref().is_some_and(|copies| copies.gathered.len() >= TRANSFER_FOLIOS) {
                self.write_copies(counts);
            }
            let reads = &self.reclaim.memory.region_reads;
            reads.note_evicted(count as u64);
            if reads.are_single() {
                // Yields: the reader that was just woken may be queued on this CPU.
                yield_now();
            }
        }
    }

    /// B1: locks the collected folios and repeats every check. Returns them by file and index.
    fn lock_collected(&mut self, counts: &mut ScanCounts) -> VecDeque<LockedVictim<'t>> {
        self.runs = Runs::default();
        let mut locked: Vec<LockedVictim<'t>> = Vec::new();
        for folio in std::mem::take(&mut self.collected) {
            match self.recheck(&folio) {
                Ok((inode, lock)) => locked.push((inode, lock, folio)),
                Err(outcome) => self.keep(folio, outcome, counts),
            }
        }
        locked.sort_unstable_by_key(|(inode, lock, _)| (inode.address, lock.index()));
        locked.into()
    }

    /// UNMAP-B1: locks an isolated folio, and checks again that it can be evicted. Returns the
    /// reason if it stays.
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
        let region = region_of(inode);
        let is_dirty = lock.flags.write_state().is_dirty();
        if is_dirty && is_pinned(folio) {
            // A thread that is about to write it back holds a reference, too; and the flusher must
            // be asked.
            let is_unseen =
                || !region.written_unseen.among(&(lock.index()..lock.index() + 1)).is_empty();
            let is_kept = inode.device.is_none() || is_unseen();
            return Err(if is_kept { EvictOutcome::Pinned } else { EvictOutcome::of_dirty(inode) });
        }
        if is_dirty && inode.store.slots().is_some() && !self.is_swapper() {
            return Err(EvictOutcome::Unswapped);
        }
        if is_pinned(folio) || region.stray_pages.is_held(lock.index()) {
            return Err(EvictOutcome::Pinned);
        }
        Ok((inode, lock))
    }

    /// B2: freezes the folios that have no other references.
    fn freeze(
        &self,
        folios: Vec<LockedVictim<'t>>,
        counts: &mut ScanCounts,
    ) -> Vec<(LockedFolio<'t>, Frozen<'t>)> {
        let mut frozen = Vec::with_capacity(folios.len());
        for (inode, lock, folio) in folios {
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

    /// B8 for a folio, whose copy is on `page` of the bounce buffer. Returns it if it must be put
    /// back.
    fn release(
        &mut self,
        inode: &'t Inode,
        page: usize,
        victim: Victim<'t>,
        counts: &mut ScanCounts,
    ) -> Option<UnmappedFolio<'t>> {
        let Victim { lock, frozen, copy, fate, .. } = victim;
        match fate {
            Fate::Evict => self.free(inode, lock, frozen, counts),
            Fate::Keep(outcome) => {
                let folio = inode.mapping.cancel_eviction(frozen, &lock);
                drop(lock);
                self.keep(folio, outcome, counts);
            }
            Fate::Write(in_flight) => {
                let unmapped = UnmappedFolio { lock, folio: frozen.unfreeze(), copy };
                self.copies.as_mut().expect("where its copy is").add(page, unmapped, in_flight);
            }
            Fate::Lose(error) => {
                let folio = frozen.unfreeze();
                let table_reference = pages::lose(inode, &folio, &lock, &error);
                drop((lock, table_reference));
            }
            Fate::PutBack => return Some(UnmappedFolio { lock, folio: frozen.unfreeze(), copy }),
            Fate::Unmap => unreachable!("B6 decides"),
        }
        None
    }

    /// B9: waits for the folios in flight, and frees them or puts them back. Starts to write those
    /// that were gathered meanwhile.
    fn write_copies(&mut self, counts: &mut ScanCounts) {
        let Some(copies) = &mut self.copies else { return };
        let (inode, written) = (copies.inode, copies.start_next());
        for UnmappedFolio { lock, folio, copy } in written {
            let is_dirty = lock.flags.write_state().is_dirty();
            let outcome = if is_dirty { EvictOutcome::Unwritten } else { EvictOutcome::Busy };
            match if is_dirty { Err(folio) } else { folio.try_freeze(1) } {
                Ok(frozen) => self.free(inode, lock, frozen, counts),
                Err(folio) => {
                    self.put_back(inode, UnmappedFolio { lock, folio, copy }, outcome, counts)
                }
            }
        }
    }

    fn free(
        &self,
        inode: &Inode,
        lock: LockedFolio<'t>,
        frozen: Frozen<'t>,
        counts: &mut ScanCounts,
    ) {
        counts.note(EvictOutcome::Evicted, lock.pages());
        let shadow = self.reclaim.shadow_of(&lock);
        self.reclaim.note_eviction(inode, &lock, self.control.counter);
        let entry_after = |_| inode.store.entry_after(&lock, Some(shadow));
        inode.mapping.end_eviction(&frozen, &lock, entry_after);
        inode.store.note_out_of_table(&lock);
        drop(lock);
        frozen.free();
    }

    /// Copies the bytes of an unmapped folio back to its address, and keeps the folio; or removes
    /// it from the table if that fails.
    fn put_back(
        &self,
        inode: &'t Inode,
        unmapped: UnmappedFolio<'t>,
        outcome: EvictOutcome,
        counts: &mut ScanCounts,
    ) {
        let UnmappedFolio { lock, folio, copy } = unmapped;
        let copy = copy.0.as_ptr();
        let table_reference = pages::put_back(region_of(inode), inode, &folio, &lock, copy);
        drop(lock);
        if table_reference.is_none() {
            self.keep(folio, outcome, counts);
        }
    }

    fn keep(&self, folio: FolioRef<'t>, outcome: EvictOutcome, counts: &mut ScanCounts) {
        counts.note(outcome, folio.folio().pages());
        let memory = &self.reclaim.memory;
        if outcome == EvictOutcome::Activate {
            return self.reclaim.activate(&mut vec![folio]);
        }
        memory.lru.put_back(&memory.folios, &mut vec![folio], None);
    }

    /// Returns the pages of the bounce buffer for up to `folios` folios of the file, two for each,
    /// and no more than the pipe can keep at a time. Waits for room while nothing is frozen.
    fn make_room(
        &mut self,
        inode: &'t Inode,
        folios: usize,
        counts: &mut ScanCounts,
    ) -> Range<usize> {
        if self.copies.as_ref().is_some_and(|copies| !std::ptr::eq(copies.inode, inode)) {
            self.write_all(counts);
        }
        let is_swapper = self.is_swapper();
        let room = self.copies.get_or_insert_with(|| Copies::new(inode, is_swapper)).room();
        if room.len() < 2 * folios {
            self.write_copies(counts);
        }
        let copies = self.copies.as_ref().expect("made just now");
        let (room, places) = (copies.room(), copies.bounce_buffer.page_pipe.places());
        room.start..room.end.min(room.start + 2 * folios.min(places))
    }

    /// Creates the batch of victims that are unmapped together, each with its page of the bounce
    /// buffer from `first` on.
    fn batch_of(
        &mut self,
        inode: &'t Inode,
        first: usize,
        folios: Vec<(LockedFolio<'t>, Frozen<'t>)>,
    ) -> UnmapBatch<'_, 't> {
        let may_write = self.is_swapper() && inode.store.slots().is_some();
        let bounce_buffer = &mut *self.copies.as_mut().expect("made for them").bounce_buffer;
        let spare = first + folios.len();
        let victims = (first..).zip(folios).map(|(page, (lock, frozen))| {
            let copy = CopyAt(NonNull::new(bounce_buffer.address(page)).expect("mapped memory"));
            // A folio that was allocated and never written has no page.
            let has_page = lock.flags.get(Flag::Uptodate);
            let fate = if has_page { Fate::Unmap } else { Fate::Evict };
            Victim { lock, frozen, copy, before: None, fate }
        });
        let victims = victims.collect();
        UnmapBatch { inode, region: region_of(inode), bounce_buffer, spare, may_write, victims }
    }

    /// Ends all unmapping and writing: every folio is then evicted or back on a list.
    fn end(&mut self, counts: &mut ScanCounts) {
        self.evict_collected(counts);
        self.write_all(counts);
    }

    fn write_all(&mut self, counts: &mut ScanCounts) {
        let are_left = |it: &Copies<'_>| !(it.in_flight.is_empty() && it.gathered.is_empty());
        while self.copies.as_ref().is_some_and(are_left) {
            self.write_copies(counts);
        }
        self.copies = None;
    }

    /// Returns `true` if folios of memory files may be written: the holder of the reclaim lock
    /// waits for no storage.
    fn is_swapper(&self) -> bool {
        matches!(self.owners, Owners::Kept(_)) && self.control.write_out == WriteOut::MemoryFiles
    }

    /// Decides whether the swapper gets an isolated folio, clean or dirty. An error is the reason
    /// why it stays; `None` means that its file has no swap, or that nothing is swapped now.
    fn choose_for_swap(
        &self,
        folio: &FolioRef<'_>,
    ) -> Option<std::result::Result<(), EvictOutcome>> {
        let Owners::ReclaimLock(reclaim_lock) = self.owners else { return None };
        let inode = reclaim_lock
            .owner_of_isolated(folio.folio())
            .filter(|_| self.control.write_out == WriteOut::MemoryFiles)
            .filter(|inode| inode.store.slots().is_some())?;
        // Hints, read without the lock: the swapper checks again.
        if self.control.second_chance && inode.mapping.test_and_clear_referenced(folio.folio()) {
            return Some(Err(EvictOutcome::Activate));
        }
        let is_held = region_of(inode).stray_pages.is_held(folio.folio().index());
        Some(if is_held || is_pinned(folio) { Err(EvictOutcome::Pinned) } else { Ok(()) })
    }

    fn add(&mut self, folio: FolioRef<'t>, counts: &mut ScanCounts) {
        let batch = self.reclaim.unmap_batch_folios;
        self.runs.add(folio.folio().index(), batch);
        self.collected.push(folio);
        // As many more as there are copies for, if they are adjacent.
        let room = regions_size(self.reclaim, batch).bounce_buffer_pages as usize / 2;
        if self.runs.count >= batch || self.collected.len() >= room.min(IN_RUNS_MAX).max(batch) {
            self.evict_collected(counts);
        }
    }
}

impl<'t> MappedScan<'t> for Unmapping<'t> {
    fn scan_pages(&self) -> u64 {
        if self.collected.is_empty() { 0 } else { self.reclaim.unmap_batch_folios as u64 }
    }

    fn collect(
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

    fn add_all(&mut self, folios: &mut Vec<FolioRef<'t>>, counts: &mut ScanCounts) {
        let arena = &self.reclaim.memory.arena;
        let of_regions = folios.extract_if(.., |folio| arena.is_region_page(folio.id()));
        of_regions.for_each(|folio| self.add(folio, counts));
    }

    fn finish(mut self: Box<Self>, counts: &mut ScanCounts) {
        self.end(counts);
    }
}

/// Evicts the folios of regions.
#[derive(Debug)]
pub(crate) struct RegionVictims;

impl MappedVictims for RegionVictims {
    fn begin<'t>(
        &self,
        reclaim: &'t Reclaim,
        reclaim_lock: &'t ReclaimLock<'t>,
        control: ScanControl,
    ) -> Box<dyn MappedScan<'t> + 't> {
        Box::new(Unmapping::new(reclaim, Owners::ReclaimLock(reclaim_lock), control))
    }

    fn swap_out(&self, reclaim: &Reclaim, folios: &mut Vec<(Arc<Inode>, FolioRef<'_>)>) {
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
        unmapping.end(&mut counts);
    }
}

fn region_of(inode: &Inode) -> &Region {
    Region::of(&inode.page_space).expect("a region page is a region's")
}

/// Frozen folios of one file, sorted by index: B3 to B7.
#[derive(Debug)]
struct UnmapBatch<'d, 't> {
    inode: &'d Inode,
    region: &'d Region,
    bounce_buffer: &'d mut BounceBuffer,
    /// Page of the bounce buffer for the next copy of a page that seems clean.
    spare: usize,
    may_write: bool,
    victims: Vec<Victim<'t>>,
}

#[derive(Debug)]
struct Victim<'t> {
    lock: LockedFolio<'t>,
    frozen: Frozen<'t>,
    /// Address for the folio's last bytes, written after the unmapping if they are needed.
    copy: CopyAt,
    /// Page of the bounce buffer with the folio's bytes at B4, if the folio seemed clean.
    before: Option<usize>,
    fate: Fate,
}

/// Decision about a frozen folio.
#[derive(Debug)]
enum Fate {
    /// The folio has a page, which is to be unmapped.
    Unmap,
    /// The folio is clean, and has no page any more.
    Evict,
    /// The folio is dirty, has no page any more, and is written.
    Write(InFlight),
    Keep(EvictOutcome),
    /// The folio is unmapped and dirty, and must not be written now.
    PutBack,
    /// The folio is unmapped, and its last bytes cannot be read.
    Lose(io::Error),
}

impl Victim<'_> {
    fn is_dirty(&self) -> bool {
        self.lock.flags.write_state().is_dirty()
    }

    fn is_going(&self) -> bool {
        matches!(self.fate, Fate::Unmap)
    }
}

impl UnmapBatch<'_, '_> {
    /// B4: copies the pages that seem clean, and then marks the folios that raw writers stored to
    /// as dirty. Dirty folios stay if they are not written here: the swapper or the flusher does
    /// that.
    fn find_stores(&mut self) {
        if self.inode.memory.soundness.is_lost() {
            self.victims.iter_mut().for_each(|it| it.fate = Fate::Keep(EvictOutcome::Busy));
        }
        self.find_discarded();
        if self.region.is_tracked()
            && let Err(error) = self.search_clean_pages()
        {
            self.stay("cannot search pages of maps for stores", &error);
        }
        for victim in self.victims.iter_mut().filter(|_| !self.may_write) {
            if victim.is_dirty() && matches!(victim.fate, Fate::Unmap | Fate::Evict) {
                victim.fate = Fate::Keep(EvictOutcome::of_dirty(self.inode));
            }
        }
    }

    /// Finds pages that the program has discarded, among those that will be read. Clean folios need
    /// no unmapping; dirty ones stay, for the next access or write-back to find.
    fn find_discarded(&mut self) {
        let is_tracked = self.region.is_tracked();
        let is_read = |victim: &&Victim<'_>| victim.is_going() && (is_tracked || victim.is_dirty());
        let indices: Vec<u64> =
            self.victims.iter().filter(is_read).map(|victim| victim.lock.index()).collect();
        for index in runs_of(&indices).flat_map(|run| self.region.discarded_among(run)) {
            let at = self.victims.partition_point(|victim| victim.lock.index() < index);
            let victim = &mut self.victims[at];
            victim.fate =
                if victim.is_dirty() { Fate::Keep(EvictOutcome::Unwritten) } else { Fate::Evict };
        }
    }

    /// Finds stores to the clean victims by one scan for each run of them (UNMAP-B4). Copies each
    /// page before, for the comparison after the unmapping.
    fn search_clean_pages(&mut self) -> io::Result<()> {
        let mut indices = Vec::new();
        for victim in self.victims.iter_mut().filter(|it| it.is_going() && !it.is_dirty()) {
            let index = victim.lock.index();
            // SAFETY: a frozen folio, and a page of the bounce buffer without a copy.
            unsafe { copy_page(self.region, index, self.bounce_buffer.address(self.spare)) };
            victim.before = Some(self.spare);
            self.spare += 1;
            indices.push(index);
        }
        let mut stored = Vec::new();
        for pages in runs_of(&indices) {
            self.region.visit_written(pages, |found| stored.extend(found))?;
        }
        for victim in self.victims.iter().filter(|victim| victim.before.is_some()) {
            if stored.binary_search(&victim.lock.index()).is_ok() {
                self.inode.mark_stored(victim.frozen.folio(), victim.frozen.id());
            }
        }
        Ok(())
    }

    /// B5: keeps the pages to be unmapped in the pipe. Without raw writers, the bytes do not
    /// change: then it copies those of dirty folios. Returns the positions of the victims whose
    /// pages are going.
    fn keep_pages(&mut self) -> Vec<usize> {
        let going = |batch: &Self| -> Vec<usize> {
            (0..batch.victims.len()).filter(|at| batch.victims[*at].is_going()).collect()
        };
        let all = going(self);
        if self.region.is_tracked() {
            let ranges = self.ranges_of(&all);
            // SAFETY: pages of frozen folios, which are resident (REGION-1).
            if let Err(error) = unsafe { self.bounce_buffer.page_pipe.keep(&ranges) } {
                if is_forbidden(&error) {
                    // Pages of maps for writing cannot be evicted: there are no new ones.
                    let features = &self.region.addresses.regions.features;
                    features.withdraw(Feature::WriteProtectAsync, "vmsplice", &error);
                }
                self.stay("cannot keep pages of maps while they are unmapped", &error);
            }
            return going(self);
        }
        for victim in all.iter().map(|at| &self.victims[*at]).filter(|it| it.is_dirty()) {
            let index = victim.lock.index();
            // SAFETY: a frozen folio, and a page of the bounce buffer without a copy.
            unsafe { copy_page(self.region, index, victim.copy.0.as_ptr()) };
        }
        all
    }

    /// B6: unmaps the pages of the victims at `going`. Folios whose pages the kernel refuses to
    /// unmap stay.
    fn unmap(&mut self, going: &[usize]) {
        let (unmapper, ranges) = (&self.region.addresses.regions.unmapper, self.ranges_of(going));
        // SAFETY: pages of frozen folios; the pipe keeps what raw writers stored there.
        let all = unsafe { unmapper.unmap(&ranges) };
        let done_bytes: usize = ranges[..all.ranges_done].iter().map(|it| it.length_bytes).sum();
        let (mut gone, mut flushes) = (done_bytes / PAGE, all.flushes_asked);
        going[..gone].iter().for_each(|at| self.victims[*at].fate = Fate::Evict);
        // Part of the failed range may be unmapped: unmap one by one to find out.
        for at in &going[gone..] {
            let victim = &mut self.victims[*at];
            // SAFETY: as above; unmapping a page twice has no effect.
            let one =
                unsafe { unmapper.unmap(&[self.region.addresses.range_at(victim.lock.index())]) };
            flushes += one.flushes_asked;
            if one.error.is_none() {
                victim.fate = Fate::Evict;
                gone += 1;
            }
        }
        let memory = &self.inode.memory;
        memory.counters.add(Counter::UnmapFlush, flushes);
        memory.counters.add(Counter::Unmap, gone as u64);
        if let Some(error) = all.error {
            self.stay("cannot unmap pages of maps", &error);
        }
        if gone > 0 && gone == going.len() {
            *memory.unmap_refusal.lock() = None;
        }
    }

    /// B7: reads the last bytes of the victims at `going` from the pipe, and finds those that were
    /// stored to since B4.
    fn take_last_bytes(&mut self, going: &[usize]) {
        if !self.region.is_tracked() {
            return;
        }
        // The last bytes are only in a pipe of this process. No more than its contents were
        // requested, so if this fails, other code has read from the pipe or closed it.
        let lost = self.take_kept(going).err();
        if lost.is_some() {
            self.bounce_buffer.page_pipe.discard();
        }
        for at in going {
            let victim = &mut self.victims[*at];
            if !matches!(victim.fate, Fate::Evict) {
                continue;
            }
            if let Some(error) = &lost {
                victim.fate = Fate::Lose(io::Error::new(error.kind(), error.to_string()));
                continue;
            }
            let Some(before) = victim.before.filter(|_| !victim.is_dirty()) else { continue };
            // SAFETY: a page of the bounce buffer that no thread writes any more.
            let before = unsafe { page_at(self.bounce_buffer.address(before)) };
            // SAFETY: as above.
            if before != unsafe { page_at(victim.copy.0.as_ptr()) } {
                self.inode.memory.counters.add(Counter::StoredLate, 1);
                self.inode.mark_stored(victim.frozen.folio(), victim.frozen.id());
                if !self.may_write {
                    victim.fate = Fate::PutBack;
                }
            }
        }
    }

    /// Takes the pages from the pipe, also those that were not unmapped and may still change.
    fn take_kept(&mut self, going: &[usize]) -> io::Result<()> {
        // Copies of adjacent folios are adjacent.
        for run in going.chunk_by(|before, next| before + 1 == *next) {
            let start = self.victims[run[0]].copy.0.as_ptr();
            // SAFETY: pages of the bounce buffer that no other batch uses.
            unsafe { self.bounce_buffer.page_pipe.take(start, run.len() * PAGE) }?;
        }
        Ok(())
    }

    /// B7: begins the write-back of dirty folios. Not before: a sync would take a folio that stays
    /// after all for one in flight, wait for it, and miss the next write-back. While they are
    /// frozen, a sync that finds them on the dirty list waits.
    fn begin_writes(&mut self) {
        let inode = self.inode;
        for victim in &mut self.victims {
            if !matches!(victim.fate, Fate::Evict) || !victim.is_dirty() {
                continue;
            }
            let (folio, id) = (victim.frozen.folio(), victim.frozen.id());
            inode.mark_stored(folio, id);
            // A file in a region has no gate.
            let in_flight = inode.dirty.begin(&inode.memory.folios, id, NO_LSN);
            // The number of its marking was there (rule 4 of `page`).
            folio.set_slot(0);
            victim.fate = Fate::Write(in_flight.expect("marked just now, under its lock"));
            if !victim.lock.flags.get(Flag::Uptodate) {
                // SAFETY: a page of the bounce buffer that no other batch uses.
                unsafe { copy::zero(victim.copy.0.as_ptr(), PAGE) };
            }
        }
    }

    /// Keeps the folios whose pages are not unmapped, because of `error`.
    fn stay(&mut self, what: &str, error: &io::Error) {
        log::warn!("{}: {what}: {error}", self.inode.name());
        *self.inode.memory.unmap_refusal.lock() = Some(format!("{what}: {error}"));
        for victim in self.victims.iter_mut().filter(|victim| victim.is_going()) {
            victim.fate = Fate::Keep(EvictOutcome::Busy);
        }
    }

    /// Returns the pages of the victims at `positions`; runs of adjacent pages are one range.
    fn ranges_of(&self, positions: &[usize]) -> Vec<PageRange> {
        let indices = positions.iter().map(|at| self.victims[*at].lock.index()).collect::<Vec<_>>();
        runs_of(&indices).map(|run| self.region.addresses.range_of(&run)).collect()
    }
}

/// Copies the page at `index` of the region to `target`.
///
/// # Safety
/// It is the page of a frozen folio that is uptodate; `target` is as for [`page_at`].
unsafe fn copy_page(region: &Region, index: u64, target: *mut u8) {
    // SAFETY: the caller's contract.
    let target = unsafe { page_at(target) };
    // SAFETY: the page is resident (REGION-1), and `target` is in no region.
    unsafe { copy::copy_out(region.addresses.address(index), target) };
}

/// Returns a page of the bounce buffer as a slice.
///
/// # Safety
/// `address` is that of a page of the bounce buffer, which only the caller uses for as long.
unsafe fn page_at<'a>(address: *mut u8) -> &'a mut [u8] {
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(address, PAGE) }
}

fn runs_of(indices: &[u64]) -> impl Iterator<Item = Range<u64>> + '_ {
    let follows = |before: &u64, next: &u64| before + 1 == *next;
    indices.chunk_by(follows).map(|run| run[0]..run[0] + run.len() as u64)
}

/// Copies of unmapped folios of one file, and their write-back.
#[derive(Debug)]
struct Copies<'t> {
    inode: &'t Inode,
    /// The write-back in flight, which ends before the copies and the locks are released. `None`
    /// until a folio must be written: a thread that may not wait never writes.
    batch: Option<WriteBatch<'t>>,
    in_flight: Vec<UnmappedFolio<'t>>,
    gathered: Vec<UnmappedFolio<'t>>,
    write_victims: Vec<WriteVictim<'t>>,
    bounce_buffer: MutexGuard<'t, BounceBuffer>,
    /// Number of parts of the bounce buffer: two if one is written while the other fills.
    parts: usize,
    part: usize,
    /// Pages of that part in use, including gaps for folios that were unmapped with the others but
    /// are not written.
    pages_used: usize,
}

/// A dirty folio between B8 and B9: locked and in the table; its page is only at `copy`.
#[derive(Debug)]
struct UnmappedFolio<'t> {
    // The lock is dropped before the reference.
    lock: LockedFolio<'t>,
    folio: FolioRef<'t>,
    copy: CopyAt,
}

impl<'t> Copies<'t> {
    /// Waits until the bounce buffer is free: the swapper's if `writes`, else the common one.
    fn new(inode: &'t Inode, writes: bool) -> Self {
        let regions = &region_of(inode).addresses.regions;
        let swap_bounce_buffer = regions.swap_bounce_buffer.as_ref().filter(|_| writes);
        let bounce_buffer = swap_bounce_buffer.unwrap_or(&regions.bounce_buffer).lock();
        Self {
            inode,
            batch: None,
            in_flight: Vec::new(),
            gathered: Vec::new(),
            write_victims: Vec::new(),
            bounce_buffer,
            parts: 1 + usize::from(writes),
            part: 0,
            pages_used: 0,
        }
    }

    fn room(&self) -> Range<usize> {
        let part_pages = self.bounce_buffer.pages() / self.parts;
        let first = self.part * part_pages;
        first + self.pages_used..first + part_pages
    }

    /// Adds a folio whose write-back has begun; its copy is on `page` of the bounce buffer.
    fn add(&mut self, page: usize, unmapped: UnmappedFolio<'t>, in_flight: InFlight) {
        self.pages_used += page + 1 - self.room().start;
        let again = unmapped.folio.try_clone();
        let folio = again.expect("a folio that was just frozen has two references");
        self.write_victims.push(WriteVictim { folio, in_flight, copy: Some(unmapped.copy) });
        self.gathered.push(unmapped);
    }

    /// Waits for the folios in flight and returns them. Starts to write those that are gathered,
    /// and waits for all but the last transfer of them. Nothing is frozen.
    fn start_next(&mut self) -> Vec<UnmappedFolio<'t>> {
        self.batch.iter_mut().for_each(WriteBatch::finish_all);
        let memory = &self.inode.memory;
        let are_single = memory.region_reads.are_single();
        let portion_folios = if are_single { PORTION_FOLIOS } else { TRANSFER_FOLIOS };
        let victims = std::mem::take(&mut self.write_victims);
        if !victims.is_empty() {
            let batch = self.batch.get_or_insert_with(|| WriteBatch::of_victims(self.inode));
            batch.start_victims(victims, portion_folios);
        }
        self.part = (self.part + 1) % self.parts;
        self.pages_used = 0;
        std::mem::replace(&mut self.in_flight, std::mem::take(&mut self.gathered))
    }
}

/// Returns the memory that regions need besides their pages, for batches of `batch` folios.
pub(super) fn regions_size(reclaim: &Reclaim, batch: usize) -> RegionsSize {
    Regions::size_for(&reclaim.memory.arena, batch, reclaim.swap.is_some())
}

/// The guarantee that a folio's file is alive.
#[derive(Clone, Copy, Debug)]
enum Owners<'t> {
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
    folios: usize,
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

    #[test]
    fn adjacent_pages_are_one_range() {
        let runs = |indices: &[u64]| runs_of(indices).collect::<Vec<_>>();
        assert_eq!(runs(&[3, 4, 5, 9, 11, 12]), [3..6, 9..10, 11..13]);
        assert_eq!(runs(&[]), []);
    }
}

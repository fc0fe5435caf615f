//! Folios on their way out of memory, and what they leave in the table, as the store says.
//!
//! Called by `reclaim`, which has locked the folios. Those of a region are unmapped first
//! (`reclaim/unmap.rs`) and, if they are dirty, written from a copy of their last bytes, which
//! `reclaim` keeps until the write-out has ended. That begins ([`Inode::begin_write_of_victim`])
//! once the page is unmapped, while the folio is frozen: a sync that no longer finds the page finds
//! the folio on the dirty list, where it waits for the end of the freeze, or in flight.
//!
//! # Safety
//! Copies between frames of folios that the caller has locked.
#![allow(unsafe_code)]

use super::Inode;
use crate::error::{Error, ErrorKind, Result};
use crate::io::{IoError, Operation};
use crate::memory::{Region, Shadow};
use crate::page::{
    Entry, EvictError, Flag, Folio, FolioId, FolioRef, Frozen, LockedFolio, Lookup, PAGE_BYTES,
    Part,
};
use crate::sync::blocking;
use crate::sys::copy;
use crate::writeback::batch::{CopyAt, WriteBatch, WriteVictim};
use crate::writeback::dirty::InFlight;
use crate::writeback::store::Cleaner;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two attempts to get memory from the kernel.
const PAUSE: Duration = Duration::from_millis(10);
/// How long they go on: who waits holds the reclaim lock, and the lock of the folio.
const PUT_BACK_MAX: Duration = Duration::from_secs(2);

impl Inode {
    /// Evicts a folio (`Mapping::evict`) and leaves what finds its bytes again.
    pub(crate) fn evict<'a>(
        &self,
        folio: FolioRef<'a>,
        locked: &LockedFolio<'_>,
        shadow: Shadow,
    ) -> std::result::Result<Frozen<'a>, EvictError<'a>> {
        debug_assert!(!self.page_space.is_in_place(), "a region's pages are unmapped first");
        let frozen =
            self.mapping.evict(folio, locked, |page| self.store.left_by(locked, page, shadow))?;
        self.store.note_out_of_table(locked);
        Ok(frozen)
    }

    /// Ends the eviction of a folio that is frozen, not dirty, and unmapped; and frees it.
    pub(crate) fn end_eviction(&self, frozen: Frozen<'_>, locked: LockedFolio<'_>, shadow: Shadow) {
        let leave = |page| self.store.left_by(&locked, page, shadow);
        self.mapping.end_eviction(&frozen, &locked, leave);
        self.store.note_out_of_table(&locked);
        // E5: the next life of the frame must not find it locked.
        drop(locked);
        frozen.free();
    }

    /// The bytes of a locked folio are no longer wanted, dirty or not; no write-out of it is in
    /// flight. It is about to leave the table.
    pub(in crate::writeback) fn forget_content(&self, folio: &Folio, id: FolioId) {
        self.store.drop_slot(folio);
        self.dirty.forget(&self.memory.folios, id);
        self.store.note_gone(folio.pages());
    }

    /// Gives back what `seen`, an Entry without a folio, names at the head `index`, if anything.
    pub(in crate::writeback) fn forget_absent(&self, index: u64, seen: Entry) {
        if seen.as_value().is_some() && self.mapping.take_value(index, seen) {
            self.store.give_back(seen, 1 << self.mapping.order());
        }
    }

    /// Lets the folio `new`, just started and locked, take the place of `old`, with their bytes
    /// (`Mapping::collapse`). Returns `None`, and changes nothing, if one of those is in use.
    /// Before `new` is unlocked, the caller settles who is dirty and who has a slot.
    pub(crate) fn collapse<'a>(
        &'a self,
        old: Vec<Part<'a>>,
        new: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
    ) -> Option<Vec<Frozen<'a>>> {
        let arena = &self.memory.arena;
        let copied: Vec<_> = old.iter().map(|part| (part.folio.id(), part.lock.pages())).collect();
        let copy = || {
            let mut target = arena.address(new.id());
            for (id, pages) in copied {
                let length = (pages * PAGE_BYTES) as usize;
                // SAFETY: a frame whose lock the caller holds, so that nobody changes it.
                let bytes = unsafe { std::slice::from_raw_parts(arena.address(id), length) };
                // SAFETY: a part, of that length, of the frames of a folio that is in no table yet
                // and whose lock the caller holds: nobody else writes it.
                unsafe { copy::copy_in(target, bytes) };
                target = target.wrapping_add(length);
            }
        };
        let for_table = new.try_clone()?;
        self.mapping.collapse(&self.memory.folios, old, locked, for_table, copy).ok()
    }

    /// The folio `new`, locked, has the bytes of all of `old` since a collapse: it is dirty from
    /// now on, and they are not, in one step.
    pub(crate) fn pass_dirt(&self, old: &[Frozen<'_>], new: FolioId) {
        // Before: what is dirty has a number where the slot would be (rule 4 of `page`).
        old.iter().for_each(|frozen| self.store.drop_slot(frozen.folio()));
        self.dirty.replace(&self.memory.folios, old.iter().map(Frozen::id), new);
    }
}

/// Folios of a region: their pages are unmapped first.
impl Inode {
    /// The folio, locked and perhaps frozen, holds bytes that were stored through a map.
    pub(crate) fn mark_stored(&self, folio: &Folio, id: FolioId) {
        if !folio.flags.write_state().is_dirty() {
            self.store.drop_slot(folio);
            self.mark(id);
        }
    }

    /// The write-out of a folio, locked and frozen, begins; its bytes will be given later.
    pub(crate) fn begin_write_of_victim(&self, frozen: &Frozen<'_>) -> InFlight {
        self.mark_stored(frozen.folio(), frozen.id());
        let in_flight = self.dirty.begin(&self.memory.folios, frozen.id());
        // The number of its marking stood there (rule 4 of `page`).
        frozen.folio().set_slot(0);
        in_flight.expect("marked just now, under its lock")
    }

    /// Puts the bytes of an unmapped folio back in their place, where readers find them, locked as
    /// it is. If the kernel has no memory for it, waits for some, with a bound, where they are
    /// nowhere else. Then the folio leaves the table: the table's reference is answered. Bytes that
    /// were clean are read in anew; for those that are lost the cache is poisoned.
    pub(crate) fn put_back<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
        copy: CopyAt,
    ) -> Option<FolioRef<'a>> {
        if !locked.flags.get(Flag::Uptodate) {
            // Allocated and never written: it had no page. Whoever fills it would wipe one that
            // raw writers have found meanwhile.
            return None;
        }
        let pages = locked.index()..locked.index() + 1;
        let is_dirty = locked.flags.write_state().is_dirty();
        let begun = Instant::now();
        while let Err(error) = self.install(pages.clone(), copy.0.as_ptr(), is_dirty).1 {
            if !is_dirty {
                return Some(self.remove_unfilled(folio, locked));
            }
            if begun.elapsed() >= PUT_BACK_MAX || self.memory.soundness.is_lost() {
                return Some(self.lose(folio, locked, &std::io::Error::other(error)));
            }
            blocking::check_frozen("memory for a page that is put back");
            log::warn!("{}: {error}; {:?} waits for it", self.name(), folio.id());
            std::thread::sleep(PAUSE);
        }
        self.mapping.restore_ready(locked);
        None
    }

    /// The bytes of an unmapped, dirty folio cannot be had back: the cache is poisoned, so that
    /// nobody takes its place for a hole, or reads old bytes in. The table's reference is answered.
    pub(crate) fn lose<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
        error: &std::io::Error,
    ) -> FolioRef<'a> {
        self.memory.soundness.lose("a page of a map cannot be put back", error);
        self.forget_content(locked, folio.id());
        self.mapping.remove(folio, locked, &self.memory.folios, |_| Entry::HOLE)
    }

    /// A page of a locked folio that is dirty is not there: its bytes are lost. It leaves the
    /// table, and every handle is told by its next sync.
    #[cold]
    pub(crate) fn lose_discarded<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
    ) -> IoError {
        self.errors.record(Arc::new(self.discarded(locked.index())));
        self.forget_content(locked, folio.id());
        drop(self.mapping.remove(folio, locked, &self.memory.folios, |_| Entry::HOLE));
        self.discarded(locked.index())
    }

    /// Why the page at `index` cannot be written.
    #[cold]
    pub(in crate::writeback) fn discarded(&self, index: u64) -> IoError {
        let source = "the program has thrown the page away (madvise or munmap on a map)";
        IoError {
            file: self.name(),
            operation: Operation::Write,
            position_bytes: index * PAGE_BYTES,
            length_bytes: PAGE_BYTES,
            source: std::io::Error::other(source),
        }
    }

    /// Stores to the file's region are looked for from now on, and what is written out is copied.
    /// Waits, if they were not before, for the write-outs that are in flight.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn track_stores(&self, region: &Region) -> std::io::Result<()> {
        region.track()?;
        if !region.is_copied() {
            // A write-out that begins behind this sees that stores are looked for; one that has
            // begun before has ended then.
            self.dirty.wait_for_in_flight();
            region.note_copied();
        }
        Ok(())
    }

    /// Pages with bytes of `range` that were stored to through maps are dirty from now on: with
    /// `patient`, also those whose lock somebody has, which others find the next time they look.
    ///
    /// # Errors
    /// The kernel does not tell. Then every resident page may have been stored to, and the caller
    /// treats all of them as dirty.
    pub(in crate::writeback) fn mark_stored_in(
        &self,
        range: &Range<u64>,
        patient: bool,
    ) -> Result<()> {
        let Some(region) = self.page_space.tracked() else {
            return Ok(());
        };
        match self.mark_stored_in_region(region, range, patient) {
            // A page that has left was looked at when it was unmapped (B4 of `reclaim/unmap.rs`).
            Err(_) if self.mapping.resident_folios() == 0 => Ok(()),
            marked => marked,
        }
    }

    fn mark_stored_in_region(
        &self,
        region: &Region,
        range: &Range<u64>,
        patient: bool,
    ) -> Result<()> {
        let end = range.end.min(self.mapping.len_bytes()).div_ceil(PAGE_BYTES);
        let pages = range.start / PAGE_BYTES..end;
        if pages.is_empty() {
            return Ok(());
        }
        let mut written = Vec::new();
        {
            // REGION-3: what is not found here is on its way, or on the dirty list.
            let _section = region.section();
            region.visit_written(pages, |pages| written.push(pages)).map_err(not_told)?;
        }
        for index in written.into_iter().flatten() {
            let Lookup::Folio(folio) = self.mapping.get_folio(&self.memory.folios, index) else {
                continue;
            };
            let locked = if patient { Some(folio.lock()) } else { folio.try_lock() };
            let Some(locked) = locked else { continue };
            let is_ours = locked.owner() == self.address() && locked.flags.get(Flag::Uptodate);
            if !is_ours || locked.flags.write_state().is_dirty() {
                continue;
            }
            // It may have been written out since the look: what was seen then is out of date.
            let mut is_stored = false;
            region.visit_written(index..index + 1, |_| is_stored = true).map_err(not_told)?;
            if is_stored {
                self.mark_stored(&locked, folio.id());
            }
        }
        Ok(())
    }
}

impl<'a> WriteBatch<'a> {
    /// Starts to write out victims, in portions of so many, which are a transfer each; waits for
    /// all but the last one. The caller keeps their locks and copies until they have ended; those
    /// that failed are dirty again then.
    pub(crate) fn start_victims(&mut self, victims: Vec<WriteVictim<'a>>, portion_folios: usize) {
        debug_assert_eq!(self.inode.store.cleaner(), Cleaner::Swapper, "the flusher's stay");
        let mut left = victims.into_iter();
        while left.len() > 0 {
            self.finish_all();
            self.start(left.by_ref().take(portion_folios).collect());
            self.begin();
        }
    }
}

fn not_told(source: std::io::Error) -> Error {
    ErrorKind::Memory { purpose: "the list of pages that were stored to", source }.into()
}

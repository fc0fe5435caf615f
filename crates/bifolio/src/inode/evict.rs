//! Eviction: removes folios from memory, and leaves in the table what the store needs to find their
//! bytes.
//!
//! `reclaim` calls this with the folios locked. Folios of a region are unmapped first
//! (`maps/unmap/mod.rs`) and, if dirty, written from a copy of their last bytes, which `reclaim`
//! keeps until the write-out has ended. That begins ([`Inode::begin_write_of_victim`]) once the
//! page is unmapped, while the folio is frozen: a sync that no longer finds the page finds the
//! folio on the dirty list, where it waits for the end of the freeze, or in flight.
//!
//! # Safety
//! Copies between frames of folios that the caller has locked.
#![allow(unsafe_code)]

use super::Inode;
use crate::error::{Error, Result, write_error};
use crate::maps::region::Region;
use crate::memory::Shadow;
use crate::page::{
    Entry, EvictError, Flag, Folio, FolioId, FolioRef, Frozen, LockedFolio, Lookup, OldFolio,
    PAGE_BYTES,
};
use crate::sync::blocking;
use crate::sys::copy;
use crate::writeback::{CopyAt, InFlight, NO_LSN};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Pause between attempts to get memory from the kernel.
const PAUSE: Duration = Duration::from_millis(10);
/// Upper bound on these attempts: the thread that waits holds the reclaim lock and the folio lock.
const PUT_BACK_MAX: Duration = Duration::from_secs(2);

impl Inode {
    /// Evicts a folio (`Mapping::evict`), and leaves in the table where its bytes are.
    pub(crate) fn evict<'a>(
        &self,
        folio: FolioRef<'a>,
        locked: &LockedFolio<'_>,
        shadow: Shadow,
    ) -> std::result::Result<Frozen<'a>, EvictError<'a>> {
        debug_assert!(!self.page_space.is_in_place(), "a region's pages are unmapped first");
        let frozen = self
            .mapping
            .evict(folio, locked, |page| self.store.evicted_entry(locked, page, shadow))?;
        self.store.note_out_of_table(locked);
        Ok(frozen)
    }

    /// Ends the eviction of a folio that is frozen, clean and unmapped, and frees it.
    pub(crate) fn end_eviction(&self, frozen: Frozen<'_>, locked: LockedFolio<'_>, shadow: Shadow) {
        let entry_after = |page| self.store.evicted_entry(&locked, page, shadow);
        self.mapping.end_eviction(&frozen, &locked, entry_after);
        self.store.note_out_of_table(&locked);
        // READ-E5: the frame must not be locked when it is reused.
        drop(locked);
        frozen.free();
    }

    /// Drops the content of a locked folio, dirty or not, that is about to be removed from the
    /// table. No write-out of it is in flight.
    pub(crate) fn forget_content(&self, folio: &Folio, id: FolioId) {
        self.store.drop_slot(folio);
        self.dirty.forget(&self.memory.folios, id);
        self.store.note_removed_pages(folio.pages());
    }

    /// Frees the location named by `seen`, an Entry without a folio at the head `index`, if any.
    pub(crate) fn forget_absent(&self, index: u64, seen: Entry) {
        if seen.as_value().is_some() && self.mapping.take_value(index, seen) {
            self.store.give_back(seen, 1 << self.mapping.order());
        }
    }

    /// Replaces the folios `old` by the folio `new`, just started and locked, and copies their
    /// bytes (`Mapping::collapse`). Returns `None`, with nothing changed, if another thread uses
    /// one of them. The caller moves the dirty state and the slots before it unlocks `new`.
    pub(crate) fn collapse<'a>(
        &'a self,
        old: Vec<OldFolio<'a>>,
        new: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
    ) -> Option<Vec<Frozen<'a>>> {
        let arena = &self.memory.arena;
        let copied: Vec<_> = old.iter().map(|part| (part.folio.id(), part.lock.pages())).collect();
        let copy = || {
            let mut target = arena.address(new.id());
            for (id, pages) in copied {
                let length = (pages * PAGE_BYTES) as usize;
                // SAFETY: a frame whose lock the caller holds, so that no thread changes it.
                let bytes = unsafe { std::slice::from_raw_parts(arena.address(id), length) };
                // SAFETY: a part, of that length, of the frames of a folio that is in no table yet
                // and whose lock the caller holds: no other thread writes it.
                unsafe { copy::copy_in(target, bytes) };
                target = target.wrapping_add(length);
            }
        };
        let for_table = new.try_clone()?;
        self.mapping.collapse(&self.memory.folios, old, locked, for_table, copy).ok()
    }

    /// Moves the dirty state from `old` to `new`, locked, which has their bytes since a collapse,
    /// in one step.
    pub(crate) fn pass_dirt(&self, old: &[Frozen<'_>], new: FolioId) {
        // Done first: a dirty folio has its number where the slot would be (rule 4 of `page`).
        old.iter().for_each(|frozen| self.store.drop_slot(frozen.folio()));
        self.dirty.replace(&self.memory.folios, old.iter().map(Frozen::id), new);
    }
}

/// Folios of a region: their pages are unmapped first.
impl Inode {
    /// Marks a folio, locked and possibly frozen, as stored to through a map.
    pub(crate) fn mark_stored(&self, folio: &Folio, id: FolioId) {
        if !folio.flags.write_state().is_dirty() {
            self.store.drop_slot(folio);
            self.mark(id);
        }
    }

    /// Begins the write-out of a folio, locked and frozen; its bytes follow later.
    pub(crate) fn begin_write_of_victim(&self, frozen: &Frozen<'_>) -> InFlight {
        self.mark_stored(frozen.folio(), frozen.id());
        // A file in a region has no gate.
        let in_flight = self.dirty.begin(&self.memory.folios, frozen.id(), NO_LSN);
        // The number of its marking was there (rule 4 of `page`).
        frozen.folio().set_slot(0);
        in_flight.expect("marked just now, under its lock")
    }

    /// Restores the bytes of an unmapped folio in its page, where readers find them. The folio
    /// stays locked. If the kernel has no memory, waits for some, up to a limit, if the bytes are
    /// nowhere else. After that the folio is removed from the table, and the table's reference is
    /// returned. Clean bytes are read again by the next access; if dirty bytes are lost, the cache
    /// is poisoned.
    pub(crate) fn put_back<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
        copy: CopyAt,
    ) -> Option<FolioRef<'a>> {
        if !locked.flags.get(Flag::Uptodate) {
            // Allocated and never written: it had no page. The thread that fills it would overwrite
            // one that raw writers have found since.
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

    /// Gives up an unmapped, dirty folio whose bytes cannot be restored: poisons the cache, so that
    /// no access takes the page for a hole, or reads old bytes. Returns the table's reference.
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

    /// Removes a locked, dirty folio from the table whose page is missing: its bytes are lost.
    /// Every handle reports this at its next sync. The file keeps its length: if the backing cannot
    /// be extended for that, returns this error, and the folio stays.
    #[cold]
    pub(crate) fn lose_discarded<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
    ) -> Error {
        if let Err(error) = self.extend_backing((locked.index() + 1) * PAGE_BYTES) {
            return error;
        }
        self.errors.record(self.discarded(locked.index()));
        self.forget_content(locked, folio.id());
        drop(self.mapping.remove(folio, locked, &self.memory.folios, |_| Entry::HOLE));
        self.discarded(locked.index())
    }

    /// Returns the error for a discarded page at `index`, which cannot be written.
    #[cold]
    pub(crate) fn discarded(&self, index: u64) -> Error {
        let source = "the program has discarded the page (madvise or munmap on a map)";
        let range = index * PAGE_BYTES..(index + 1) * PAGE_BYTES;
        write_error(self.name(), range, std::io::Error::other(source))
    }

    /// Starts to track stores to the file's region, and to copy pages for write-outs. If tracking
    /// was off, waits for the write-outs in flight.
    ///
    /// # Errors
    /// The kernel refuses to track stores.
    pub(crate) fn track_stores(&self, region: &Region) -> std::io::Result<()> {
        region.track()?;
        if !region.is_copied() {
            // A write-out that begins after this sees that stores are tracked; one that began
            // before has ended then.
            self.dirty.wait_for_in_flight();
            region.note_copied();
        }
        Ok(())
    }

    /// Marks the pages with bytes of `range` that were stored to through maps as dirty. With
    /// `patient`, waits for pages whose lock another thread holds; otherwise the next scan finds
    /// them.
    ///
    /// # Errors
    /// The kernel cannot tell. Then every resident page may have been stored to, and the caller
    /// treats all of them as dirty.
    pub(crate) fn mark_stored_in(&self, range: &Range<u64>, patient: bool) -> Result<()> {
        let Some(region) = self.page_space.tracked() else {
            return Ok(());
        };
        match self.mark_stored_in_region(region, range, patient) {
            // An evicted page was checked when it was unmapped (UNMAP-B4).
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
            // REGION-3: a store not found here is in flight, or on the dirty list.
            let _section = region.section();
            region.visit_written(pages, |pages| written.push(pages)).map_err(not_told)?;
        }
        for index in written.into_iter().flatten() {
            let Lookup::Folio(folio) = self.mapping.get_folio(&self.memory.folios, index) else {
                continue;
            };
            let locked = if patient { Some(folio.lock()) } else { folio.try_lock() };
            let Some(locked) = locked else { continue };
            let is_ours = locked.owner() == self.address && locked.flags.get(Flag::Uptodate);
            if !is_ours || locked.flags.write_state().is_dirty() {
                continue;
            }
            // It may have been written out since the scan: the result of the scan is out of date.
            let mut is_stored = false;
            region.visit_written(index..index + 1, |_| is_stored = true).map_err(not_told)?;
            if is_stored {
                self.mark_stored(&locked, folio.id());
            }
        }
        Ok(())
    }
}

fn not_told(source: std::io::Error) -> Error {
    Error::memory("the list of pages that were stored to", source)
}

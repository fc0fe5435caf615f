//! Write-outs of folios of a region that are unmapped already: from a copy of their last bytes.
//!
//! Called by `reclaim/unmap.rs`, which has locked the folios, and keeps the copies until all has
//! ended. The write-out begins ([`Inode::begin_write_of_victim`]) once the page is unmapped, while
//! the folio is frozen: a sync that no longer finds the page finds the folio on the dirty list,
//! where it waits for the end of the freeze, or in flight.

use super::batch::{CopyAt, WriteBatch, WriteVictim};
use super::dirty::InFlight;
use super::inode::Inode;
use super::store::Cleaner;
use crate::error::{Error, ErrorKind, Result};
use crate::io::{IoError, Operation};
use crate::memory::Region;
use crate::page::{Entry, Flag, Folio, FolioId, FolioRef, Frozen, LockedFolio, Lookup, PAGE_BYTES};
use crate::sync::blocking;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two attempts to get memory from the kernel.
const PAUSE: Duration = Duration::from_millis(10);
/// How long they go on: who waits holds the reclaim lock, and the lock of the folio.
const PUT_BACK_MAX: Duration = Duration::from_secs(2);

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
    pub(super) fn discarded(&self, index: u64) -> IoError {
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
    pub(super) fn mark_stored_in(&self, range: &Range<u64>, patient: bool) -> Result<()> {
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

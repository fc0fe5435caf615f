//! Stores through maps: they are found in the page tables, not announced. A sync, a write-out of
//! old pages and a change of the length look for them first ([`Inode::find_stores`]).

use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::maps::region::Region;
use crate::page::{Flag, Lookup, PAGE_BYTES};
use std::ops::Range;

impl Inode {
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

    /// Finds the pages with bytes of `range` that were stored to through maps, and marks them as
    /// dirty. With `patient`, waits for pages whose lock another thread holds; otherwise the next
    /// call finds them. Returns `true` if there may have been stores.
    ///
    /// # Errors
    /// The kernel cannot tell. Then every resident page may have been stored to, and the caller
    /// treats all of them as dirty.
    pub(crate) fn find_stores(&self, range: &Range<u64>, patient: bool) -> Result<bool> {
        let Some(region) = self.page_space.tracked() else {
            return Ok(false);
        };
        match self.find_stores_in(region, range, patient) {
            // An evicted page was checked when it was unmapped (UNMAP-B4).
            Err(_) if self.mapping.resident_folios() == 0 => Ok(true),
            found => found.map(|()| true),
        }
    }

    fn find_stores_in(&self, region: &Region, range: &Range<u64>, patient: bool) -> Result<()> {
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

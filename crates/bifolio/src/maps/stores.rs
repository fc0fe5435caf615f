//! Stores through maps: they are found in the page tables, not announced. A sync, a write-out of
//! old pages and a change of the length look for them first ([`Inode::find_stores`]).
//!
//! A store through a map does not wait for a write. So pages of a file that is mapped for writing
//! are protected, then copied, then written from the copies.
//!
//! The order matters: a store after the protection is detected and makes the page dirty again, even
//! if the copy has it; a store before it is in the copy.
//!
//! No batch waits for staging memory for its copies (IO-5): a transfer takes fewer pages, or waits
//! for others of its own batch. While other batches have all of it, a batch writes one page at a
//! time, from memory of its own.
//!
//! # Safety
//! Creates slices of its share of the staging memory.
#![allow(unsafe_code)]

use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::maps::region::{Region, Staged};
use crate::memory::StagedPages;
use crate::page::{Flag, Lookup, PAGE_BYTES};
use crate::sys::copy;
use crate::sys::probe::Feature;
use crate::writeback::{WriteBatch, WriteIo, WriteVictim};
use smallvec::SmallVec;
use std::cell::UnsafeCell;
use std::ops::Range;

impl Inode {
    /// Starts to track stores to the file's region, and to copy pages for write-outs. If tracking
    /// was off, waits for the write-outs in flight.
    ///
    /// # Errors
    /// The kernel refuses to track stores.
    pub(crate) fn track_stores(&self, region: &Region) -> Result<()> {
        if let Some(reason) = region.addresses.regions.features.why_not(Feature::WriteProtectAsync)
        {
            return Err(Error::cannot_map("for writing ", &reason));
        }
        let tracked = region.track(|| self.dirty.wait_for_in_flight());
        let is_first =
            tracked.map_err(|source| Error::memory("watching the stores of a map", source))?;
        if let Some(device) = self.device.as_ref().filter(|_| is_first) {
            self.flusher.enlist(device, &self.this, |files| &mut files.mapped);
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
        let region = Region::of(&self.page_space).filter(|region| region.is_tracked());
        let Some(region) = region else {
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
            let _section = region.section.lock();
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

/// Minimum pages of a transfer that is worth its cost, if more staging memory is expected soon.
const PAGES_MIN: usize = 64;

#[derive(Debug)]
pub(crate) enum WriteCopies {
    Staged(Staged),
    Own(Box<OwnPage>),
}

#[derive(Debug)]
#[repr(align(4096))]
pub(crate) struct OwnPage(UnsafeCell<[u8; PAGE_BYTES as usize]>);

impl WriteCopies {
    fn pages(&self) -> usize {
        match self {
            Self::Staged(staged) => staged.pages(),
            Self::Own(_) => 1,
        }
    }

    /// Returns the address of a copy; the following copies are adjacent.
    pub(crate) fn address(&self, page: usize) -> *mut u8 {
        match self {
            Self::Staged(staged) => staged.address(page),
            Self::Own(own) => own.0.get().cast(),
        }
    }

    fn fill(&mut self, folios: &[WriteVictim<'_>], inode: &Inode) {
        for (page, victim) in folios.iter().enumerate() {
            let (source, target) = (victim.start(inode), self.address(page));
            // SAFETY: a page of the memory that this owns exclusively; nothing is in flight.
            let target = unsafe { std::slice::from_raw_parts_mut(target, PAGE_BYTES as usize) };
            // SAFETY: the page of a folio that is uptodate is present while the reference to it is
            // held (REGION-1, REGION-4); the target is no part of a region.
            unsafe { copy::copy_out(source, target) };
        }
    }
}

impl<'a> WriteBatch<'a> {
    /// Starts to write adjacent pages of a region that raw writers may store to meanwhile, from
    /// copies. Returns the folios, and does nothing, if they can be written from where they are.
    pub(crate) fn start_copied(
        &mut self,
        folios: SmallVec<[WriteVictim<'a>; 1]>,
    ) -> Option<SmallVec<[WriteVictim<'a>; 1]>> {
        let Some(region) = Region::of(&self.inode.page_space) else { return Some(folios) };
        if folios[0].copy.is_some() {
            // Victims have copies already.
            return Some(folios);
        }
        let first = folios[0].folio.folio().index();
        if !region.discarded_among(first..first + folios.len() as u64).is_empty() {
            self.end_discarded(folios);
            return None;
        }
        // Loaded after the write-outs have begun: a write-out that misses it is waited for before
        // any store (`Inode::track_stores`).
        if !region.is_tracked() {
            return Some(folios);
        }
        self.start_copies(folios, region);
        None
    }

    /// Ends the write-out of adjacent folios of which some pages are missing, and retries each
    /// alone.
    #[cold]
    fn end_discarded(&mut self, folios: SmallVec<[WriteVictim<'a>; 1]>) {
        let (index, is_alone) = (folios[0].folio.folio().index(), folios.len() == 1);
        let run = WriteIo::unwritten(folios);
        if is_alone {
            let error = self.inode.discarded(index);
            log::error!("{error}");
            return self.end(run, Some(error));
        }
        self.failed.push(run);
    }

    /// Starts to write adjacent pages from copies, as many in one transfer as there is memory for.
    fn start_copies(&mut self, mut folios: SmallVec<[WriteVictim<'a>; 1]>, region: &Region) {
        debug_assert_eq!(self.inode.mapping.order(), 0, "a folio of a region is a page");
        while !folios.is_empty() {
            let mut copies = self.memory_for_copies(folios.len(), region);
            let rest = folios.drain(copies.pages()..).collect();
            let first = folios[0].folio.folio().index();
            #[cfg(all(test, not(loom)))]
            crate::sync::test_hook::reach("before pages are protected");
            if let Err(error) = region.protect(first..first + folios.len() as u64) {
                // The pages count as stored to, and will be written again.
                log::warn!("{}: stores cannot be watched: {error}", self.inode.name());
            }
            copies.fill(&folios, self.inode);
            self.start_from(folios, Some(copies));
            folios = rest;
        }
    }

    /// Allocates memory for the copies of up to `pages` pages, at least one.
    fn memory_for_copies(&mut self, pages: usize, region: &Region) -> WriteCopies {
        let staging = &region.addresses.regions.staging;
        loop {
            let is_alone = self.started() == 0;
            match staging.try_take_for_copies(pages, &self.inode.load.staging) {
                Some(staged) if is_alone || staged.pages() >= pages.min(PAGES_MIN) => {
                    return WriteCopies::Staged(staged);
                }
                None if is_alone => {
                    let page = UnsafeCell::new([0; PAGE_BYTES as usize]);
                    return WriteCopies::Own(Box::new(OwnPage(page)));
                }
                // Our own transfers have the rest, or part of it.
                _ => self.wait_for_some(),
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::cache::Cache;
    use crate::file::{File, OpenOptions};
    use crate::maps::map::MapMut;
    use crate::page::PAGE_BYTES;
    use crate::sync::test_hook;
    use std::os::unix::fs::FileExt as _;
    use std::sync::atomic::{AtomicU8, Ordering};

    /// A page that is mapped for writing, and its storage. `None` if this kernel cannot map it.
    struct Stored {
        cache: Cache,
        file: File,
        map: MapMut,
        storage: std::fs::File,
    }

    impl Stored {
        /// Creates a page whose first byte, 1, is on storage: the page is clean and protected.
        fn new() -> Option<Self> {
            let cache = Cache::builder().memory(4 << 20).build().unwrap();
            let storage = tempfile::tempfile().unwrap();
            let options = OpenOptions::new().read(true).write(true).mappable(true);
            let file = cache.open_fd(storage.try_clone().unwrap().into(), &options).ok()?;
            file.set_len(PAGE_BYTES).unwrap();
            let map = file.map_mut(0..PAGE_BYTES).ok()?;
            let mut page = Self { cache, file, map, storage };
            page.byte().store(1, Ordering::Relaxed);
            page.file.sync_data().unwrap();
            Some(page)
        }

        /// Returns the first byte in the map, for as long as a test runs.
        fn byte(&mut self) -> &'static AtomicU8 {
            // SAFETY: a byte of the map, which outlives its uses in the tests below; all of these
            // are atomic.
            unsafe { AtomicU8::from_ptr(self.map.as_mut_ptr()) }
        }

        fn on_storage(&self) -> u8 {
            let mut found = [0];
            self.storage.read_exact_at(&mut found, 0).unwrap();
            found[0]
        }
    }

    #[test]
    fn a_store_before_the_protection_of_its_page_is_in_the_copy() {
        let Some(mut page) = Stored::new() else { return };
        let byte = page.byte();
        byte.store(2, Ordering::Relaxed);
        test_hook::set("before pages are protected", move || byte.store(3, Ordering::Relaxed));
        page.file.sync_data().unwrap();
        assert!(test_hook::has_run(), "this thread wrote the page from a copy");
        page.file.sync_data().unwrap();
        assert_eq!(page.on_storage(), 3);
    }

    #[test]
    fn a_store_between_the_check_and_the_unmapping_is_kept() {
        let Some(mut page) = Stored::new() else { return };
        let byte = page.byte();
        let store = move || byte.store(2, Ordering::Relaxed);
        test_hook::set("between the check and the unmapping", store);
        page.file.handle.reclaim.sweep_once();
        assert!(test_hook::has_run(), "this thread evicted the page");
        assert_eq!(page.cache.stats().maps.stored_late_pages, 1);
        page.file.sync_data().unwrap();
        assert_eq!((byte.load(Ordering::Relaxed), page.on_storage()), (2, 2));
    }
}

//! Stores through maps: they are found in the page tables, not announced. A sync, a write-out of
//! old pages and a change of the length look for them first ([`find_stores`]).
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

use crate::error::{Error, Result, write_error};
use crate::inode::{Inode, WriteSource};
use crate::maps::region::Region;
use crate::memory::StagedPages;
use crate::page::{Flag, Lookup, PAGE_BYTES};
use crate::sys::copy;
use crate::sys::probe::Feature;
use std::cell::UnsafeCell;
use std::ops::Range;

/// Starts to track stores to the region of `inode`, and to copy pages for write-outs. If tracking
/// was off, waits for the write-outs in flight.
///
/// # Errors
/// The kernel refuses to track stores.
pub(super) fn track(region: &Region, inode: &Inode) -> Result<()> {
    if let Some(reason) = region.addresses.regions.features.why_not(Feature::WriteProtectAsync) {
        return Err(Error::cannot_map("for writing ", &reason));
    }
    let tracked = region.track(|| inode.dirty.wait_for_in_flight());
    let is_first =
        tracked.map_err(|source| Error::memory("watching the stores of a map", source))?;
    if let Some(device) = inode.device.as_ref().filter(|_| is_first) {
        inode.flusher.enlist(device, &inode.this, |files| &mut files.mapped);
    }
    Ok(())
}

/// Marks the folios in `range` dirty that the program has stored to. Returns `true` if stores are
/// tracked. A patient search waits for folio locks; others pass over locked folios.
pub(super) fn find_stores(
    region: &Region,
    inode: &Inode,
    range: &Range<u64>,
    patient: bool,
) -> Result<bool> {
    if !region.is_tracked() {
        return Ok(false);
    }
    match mark_stored(region, inode, range, patient) {
        // An evicted page was checked when it was unmapped (UNMAP-B4).
        Err(_) if inode.mapping.resident_folios() == 0 => Ok(true),
        found => found.map(|()| true),
    }
}

/// Asks the kernel which pages were stored to, and marks their folios. Each is looked at again with
/// its lock held, because a write-out may have protected it since.
fn mark_stored(region: &Region, inode: &Inode, range: &Range<u64>, patient: bool) -> Result<()> {
    let end = range.end.min(inode.mapping.len_bytes()).div_ceil(PAGE_BYTES);
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
        let Lookup::Folio(folio) = inode.mapping.get_folio(&inode.memory.folios, index) else {
            continue;
        };
        let locked = if patient { Some(folio.lock()) } else { folio.try_lock() };
        let Some(locked) = locked else { continue };
        let is_ours = locked.owner() == inode.address && locked.flags.get(Flag::Uptodate);
        if !is_ours || locked.flags.write_state().is_dirty() {
            continue;
        }
        // It may have been written out since the scan: the result of the scan is out of date.
        let mut is_stored = false;
        region.visit_written(index..index + 1, |_| is_stored = true).map_err(not_told)?;
        if is_stored {
            inode.mark_stored(&locked, folio.id());
        }
    }
    Ok(())
}

fn not_told(source: std::io::Error) -> Error {
    Error::memory("the list of pages that were stored to", source)
}

/// Minimum pages of a transfer that is worth its cost, if more staging memory is expected soon.
const PAGES_MIN: usize = 64;

/// A copy of one page, for a batch that gets no staging memory.
#[derive(Debug)]
#[repr(align(4096))]
struct OwnPage(UnsafeCell<[u8; PAGE_BYTES as usize]>);

// SAFETY: a page of the heap, which only the owner of the box accesses.
unsafe impl StagedPages for OwnPage {
    fn pages(&self) -> usize {
        1
    }

    fn address(&self, page: usize) -> *mut u8 {
        assert_eq!(page, 0, "of a single page");
        self.0.get().cast()
    }

    fn extend(&mut self, _pages: usize) {}

    fn shrink(&mut self, _pages: usize) {}
}

/// Returns the error for a discarded page at `index`, which cannot be written.
#[cold]
pub(super) fn discarded(inode: &Inode, index: u64) -> Error {
    let source = "the program has discarded the page (madvise or munmap on a map)";
    let range = index * PAGE_BYTES..(index + 1) * PAGE_BYTES;
    write_error(inode.name(), range, std::io::Error::other(source))
}

/// Returns where a write-out of `pages` takes the bytes from: copies, if the program may store to
/// the pages meanwhile.
pub(super) fn write_source(region: &Region, inode: &Inode, pages: Range<u64>) -> WriteSource {
    let first = pages.start;
    if !region.discarded_among(pages).is_empty() {
        return WriteSource::Discarded(discarded(inode, first));
    }
    // Loaded after the write-outs have begun: a write-out that misses it is waited for before any
    // store (`track`).
    if region.is_tracked() { WriteSource::Copies } else { WriteSource::Pages }
}

/// Protects `pages`, so that later stores are found, and copies them, as many as there is memory
/// for. Returns `None` if there is none.
pub(super) fn copy_for_write(
    region: &Region,
    inode: &Inode,
    pages: Range<u64>,
    is_alone: bool,
) -> Option<Box<dyn StagedPages>> {
    let wanted = (pages.end - pages.start) as usize;
    let copies = memory_for_copies(region, inode, wanted, is_alone)?;
    let pages = pages.start..pages.start + copies.pages() as u64;
    #[cfg(all(test, not(loom)))]
    crate::sync::test_hook::reach("before pages are protected");
    if let Err(error) = region.protect(pages.clone()) {
        // The pages count as stored to, and will be written again.
        log::warn!("{}: stores cannot be watched: {error}", inode.name());
    }
    copy_pages(region, pages, &*copies);
    Some(copies)
}

fn copy_pages(region: &Region, pages: Range<u64>, copies: &dyn StagedPages) {
    for (number, index) in pages.enumerate() {
        let (source, target) = (region.addresses.address(index), copies.address(number));
        // SAFETY: a page of the memory that the caller has just taken; nothing is in flight.
        let target = unsafe { std::slice::from_raw_parts_mut(target, PAGE_BYTES as usize) };
        // SAFETY: the page of a folio that is uptodate is present while the reference to it is held
        // (REGION-1, REGION-4), as its write-out does; the target is no part of a region.
        unsafe { copy::copy_out(source, target) };
    }
}

/// Allocates memory for the copies of up to `pages` pages, at least one.
fn memory_for_copies(
    region: &Region,
    inode: &Inode,
    pages: usize,
    is_alone: bool,
) -> Option<Box<dyn StagedPages>> {
    let staging = &region.addresses.regions.staging;
    match staging.try_take_for_copies(pages, &inode.load.staging) {
        Some(staged) if is_alone || staged.pages() >= pages.min(PAGES_MIN) => {
            Some(Box::new(staged))
        }
        None if is_alone => Some(Box::new(OwnPage(UnsafeCell::new([0; PAGE_BYTES as usize])))),
        // The batch's own transfers have the rest, or part of it.
        _ => None,
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

//! The contents of locked folios: zeros, and the pages of a map, which are installed whole.
//!
//! # Safety
//! Creates slices of frames whose folios the caller has locked.
#![allow(unsafe_code)]

use super::Inode;
use crate::error::{Error, Result};
use crate::page::{Flag, FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;
use crate::sys::copy;
use std::ops::Range;

static ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

impl Inode {
    /// Zeroes some of a locked folio's bytes, counted from its first, in memory.
    pub(crate) fn zero_folio(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
        bytes: Range<u64>,
    ) {
        let end = bytes.end.min(locked.pages() * PAGE_BYTES);
        let length = end.saturating_sub(bytes.start) as usize;
        let target = self.frame_of(folio).wrapping_add(bytes.start as usize);
        // SAFETY: part of a frame whose lock the caller holds, so it is its only writer.
        unsafe { copy::zero(target, length) };
    }

    /// Zeroes a locked folio and makes it uptodate.
    ///
    /// # Errors
    /// The kernel has no memory for a page of a region.
    pub(crate) fn fill_with_zeros(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
    ) -> Result<()> {
        if self.page_space.is_in_place() {
            return self.install_page(locked, ZEROS.as_ptr(), false);
        }
        self.zero_folio(folio, locked, 0..u64::MAX);
        self.mapping.mark_uptodate(locked);
        Ok(())
    }

    /// Installs the bytes of locked folios that are not uptodate, as adjacent whole pages, where
    /// readers of a map see them. Does nothing for folios in the arena. Returns how many are
    /// installed, from the first on: all, unless there is an error.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub(crate) fn install(
        &self,
        pages: Range<u64>,
        source: *const u8,
        will_be_stored: bool,
    ) -> (u64, Result<()>) {
        // SAFETY: the callers pass that many pages of memory of their own, in no region.
        let (there, installed) = unsafe { self.page_space.install(pages, source, will_be_stored) };
        if self.page_space.is_in_place() {
            self.memory.counters.add(Counter::MapIn, there);
        }
        let refused = |source| Error::memory("a page of a map", source);
        (there, installed.map_err(refused))
    }

    /// Installs the page at `source` for a locked folio of a region that is not uptodate, and makes
    /// it uptodate. Before that it ceases to read as zeros: raw writers continue once it is
    /// installed, and their stores must be visible at once.
    ///
    /// # Errors
    /// The kernel has no memory for it; the folio is unchanged.
    pub(crate) fn install_page(
        &self,
        locked: &LockedFolio<'_>,
        source: *const u8,
        will_be_stored: bool,
    ) -> Result<()> {
        let pages = locked.index()..locked.index() + 1;
        let was_allocated = locked.flags.get(Flag::Allocated);
        // Readers that see the old state of the page have begun before it is installed: `copy` is a
        // system call, and a thread that waited for it continues after that.
        locked.flags.clear(Flag::Allocated);
        let (_, installed) = self.install(pages, source, will_be_stored);
        #[cfg(all(test, not(loom)))]
        crate::sync::test_hook::reach("before the page is uptodate");
        if installed.is_ok() {
            self.mapping.mark_uptodate(locked);
        } else if was_allocated {
            locked.flags.set(Flag::Allocated);
        }
        installed
    }
}

/// Returns the bytes of a folio at `start`, page by page. No thread may change them: the folio is
/// locked and not yet uptodate, or a write-out of it is in flight.
pub(crate) fn pages_of_still<'a>(
    folio: &'a FolioRef<'_>,
    start: *const u8,
) -> impl Iterator<Item = &'a [u8; PAGE_BYTES as usize]> {
    let descriptor = folio.folio();
    let is_writing = descriptor.flags.write_state().is_writing();
    debug_assert!(is_writing || !descriptor.flags.get(Flag::Uptodate));
    let pages = descriptor.pages() as usize;
    // SAFETY: the pages of a frame whose reference the caller holds, or of the buffer that the
    // folio is filled or written from. No thread changes them: a writer needs the lock and waits
    // for the write-out (WRITEBACK-3).
    let bytes = unsafe { std::slice::from_raw_parts(start.cast(), pages) };
    bytes.iter()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::cache::Cache;
    use crate::file::{File, OpenOptions};
    use crate::page::PAGE_BYTES;
    use crate::sync::test_hook;

    /// Once `install` has installed an allocated page, which raw writers may then store to, no
    /// reader takes it for zeros.
    fn check_while_not_uptodate(install: impl FnOnce(&File)) {
        let cache = Cache::builder().memory(4 << 20).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let Ok(file) = cache.memory_file_with("stores", &options) else { return };
        file.set_len(PAGE_BYTES).unwrap();
        file.allocate(0..PAGE_BYTES).unwrap();
        assert_eq!(file.read_resident(&mut [1; 8], 0), 8, "allocated and never written");
        assert_eq!(file.seek_data(0).unwrap(), None);
        let other = file.clone();
        test_hook::set("before the page is uptodate", move || {
            assert_eq!(other.read_resident(&mut [1; 8], 0), 0, "readers wait for the lock");
            assert_eq!(other.seek_data(0).unwrap(), Some(0));
        });
        install(&file);
        assert!(test_hook::has_run(), "this thread installed the page");
    }

    #[test]
    fn an_allocated_page_that_a_map_may_store_to_is_no_hole() {
        check_while_not_uptodate(|file| drop(file.pin(0..8).unwrap()));
    }

    #[test]
    fn an_allocated_page_that_is_being_replaced_is_no_hole() {
        check_while_not_uptodate(|file| {
            file.write_all_at(&[9; PAGE_BYTES as usize], 0).unwrap();
        });
    }
}

//! Installs and unmaps the pages of a region.
//!
//! # Safety
//! Passes memory of its callers to the kernel, which copies it, and unmaps pages of folios that are
//! frozen.
#![allow(unsafe_code)]

use crate::error::{Error, Result, write_error};
use crate::inode::{Inode, NoRoom};
use crate::maps::region::Region;
use crate::page::{BATCH_SLOTS, Entry, Flag, FolioRef, Frozen, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;
use crate::sync::blocking;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Pause between attempts to get memory from the kernel.
const PAUSE: Duration = Duration::from_millis(10);
/// Upper bound on these attempts: the thread that waits holds the reclaim lock and the folio lock.
const PUT_BACK_MAX: Duration = Duration::from_secs(2);

/// Folios of a region unmapped with one TLB flush.
const UNMAPPED_TOGETHER: usize = BATCH_SLOTS;

impl Inode {
    fn install(
        &self,
        region: &Region,
        pages: Range<u64>,
        source: *const u8,
        will_be_stored: bool,
    ) -> (u64, Result<()>) {
        // SAFETY: the callers pass that many pages of memory of their own, in no region.
        let (there, installed) = unsafe { region.install(pages, source, will_be_stored) };
        self.memory.counters.add(Counter::MapIn, there);
        (there, installed.map_err(|source| Error::memory("a page of a map", source)))
    }

    /// Installs a page of `bytes`, followed by zeros, for a locked folio of a region that is not
    /// uptodate, and makes it uptodate. Before that it ceases to read as zeros: raw writers
    /// continue once it is installed, and their stores must be visible at once. Returns `None`, and
    /// does nothing, for a folio of the arena.
    ///
    /// # Errors
    /// The kernel has no memory for it; the folio is unchanged.
    pub(crate) fn install_page(
        &self,
        locked: &LockedFolio<'_>,
        bytes: &[u8],
        will_be_stored: bool,
    ) -> Option<Result<()>> {
        let region = Region::of(&self.page_space)?;
        let mut page = [0; PAGE_BYTES as usize];
        page[..bytes.len()].copy_from_slice(bytes);
        let pages = locked.index()..locked.index() + 1;
        let was_allocated = locked.flags.get(Flag::Allocated);
        // Readers that see the old state of the page have begun before it is installed: that is a
        // system call, and a thread that waited for it continues after that.
        locked.flags.clear(Flag::Allocated);
        let (_, installed) = self.install(region, pages, page.as_ptr(), will_be_stored);
        #[cfg(all(test, not(loom)))]
        crate::sync::test_hook::reach("before the page is uptodate");
        if installed.is_ok() {
            self.mapping.mark_uptodate(locked);
        } else if was_allocated {
            locked.flags.set(Flag::Allocated);
        }
        Some(installed)
    }

    /// Writes `bytes`, followed by zeros, as a page of a region that is not present. A store to it
    /// would fault, and the thread that serves the fault would wait for the lock that the caller
    /// holds. Returns `false`, and does nothing, for a page of the arena.
    pub(crate) fn write_page<E: From<NoRoom> + From<Error>>(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
        bytes: &[u8],
    ) -> std::result::Result<bool, E> {
        if !self.page_space.is_in_place() {
            return Ok(false);
        }
        let room = self.make_room(locked)?;
        // The old bytes, possibly in the swap, are the page's content until this has succeeded.
        self.install_page(locked, bytes, true).transpose()?;
        room.mark_dirty(folio, locked);
        Ok(true)
    }

    /// Restores the bytes of an unmapped folio, from the caller's copy, in its page, where readers
    /// find them. The folio stays locked. If the kernel has no memory, waits for some, up to a
    /// limit, if the bytes are nowhere else. After that the folio is removed from the table, and
    /// the table's reference is returned. Clean bytes are read again by the next access; if dirty
    /// bytes are lost, the cache is poisoned.
    pub(crate) fn put_back<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
        copy: *const u8,
    ) -> Option<FolioRef<'a>> {
        if !locked.flags.get(Flag::Uptodate) {
            // Allocated and never written: it had no page. The thread that fills it would overwrite
            // one that raw writers have found since.
            return None;
        }
        let region = Region::of(&self.page_space)?;
        let pages = locked.index()..locked.index() + 1;
        let is_dirty = locked.flags.write_state().is_dirty();
        let begun = Instant::now();
        while let Err(error) = self.install(region, pages.clone(), copy, is_dirty).1 {
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
}

/// Treatment of a region's page that a pin still references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PinnedPages {
    /// The page stays until its references are dropped, or becomes part of the next folio there.
    Kept,
    /// The page is zeroed for maps and for the holders of references, and is no hole.
    Zeroed,
}

/// Folios being removed from the table. Those of a region are unmapped several at a time, with one
/// TLB flush.
#[derive(Debug)]
pub(crate) struct Removal<'a> {
    inode: &'a Inode,
    pinned: PinnedPages,
    frozen: Vec<(Frozen<'a>, LockedFolio<'a>)>,
    /// Set if the references of the LRU batches were drained.
    is_drained: bool,
}

impl<'a> Removal<'a> {
    pub(crate) fn new(inode: &'a Inode, pinned: PinnedPages) -> Self {
        Self { inode, pinned, frozen: Vec::new(), is_drained: false }
    }

    /// Removes a folio from the table, dirty or not. No write-out of it is in flight.
    pub(crate) fn remove(&mut self, folio: FolioRef<'a>, locked: LockedFolio<'a>) {
        let inode = self.inode;
        let Some(region) = Region::of(&inode.page_space) else {
            return inode.unlink(folio, locked);
        };
        // REGION-4: other threads may have referenced the page before, and still do.
        let frozen = match region.stray_pages.is_held(locked.index()) {
            true => Err(folio),
            false => self.freeze(folio, &locked),
        };
        match frozen {
            Ok(frozen) => self.frozen.push((frozen, locked)),
            // Allocated and never written: there is no page.
            Err(folio) if !locked.flags.get(Flag::Uptodate) => inode.unlink(folio, locked),
            // Another thread references the bytes.
            Err(folio) => match self.pinned {
                PinnedPages::Kept => {
                    let space = inode.page_space.ops();
                    space.map(|it| inode.memory.orphans.note(folio.id(), it, locked.index()));
                    inode.unlink(folio, locked);
                }
                PinnedPages::Zeroed => {
                    // The storage of a file with a backing may have other bytes, if clearing it
                    // failed.
                    inode.mark_dirty(&folio, &locked);
                    inode.clearing.get().map(|it| it.mark(&locked, None));
                    let start = locked.index() * PAGE_BYTES;
                    inode.zero_in_place(&folio, &locked, start..start + PAGE_BYTES);
                }
            },
        }
        if self.frozen.len() == UNMAPPED_TOGETHER {
            self.finish();
        }
    }

    fn freeze(
        &mut self,
        folio: FolioRef<'a>,
        locked: &LockedFolio<'a>,
    ) -> std::result::Result<Frozen<'a>, FolioRef<'a>> {
        let frozen = self.inode.mapping.begin_eviction(folio, locked);
        if frozen.is_ok() || std::mem::replace(&mut self.is_drained, true) {
            return frozen;
        }
        self.finish();
        let memory = &self.inode.memory;
        memory.lru.drain_all(&memory.folios);
        frozen.or_else(|folio| self.inode.mapping.begin_eviction(folio, locked))
    }

    pub(crate) fn finish(&mut self) {
        let inode = self.inode;
        if self.frozen.is_empty() {
            return;
        }
        let Some(region) = Region::of(&inode.page_space) else { return };
        let indices = self.frozen.iter().map(|(frozen, _)| frozen.folio().index());
        let ranges: Vec<_> = indices.map(|index| region.addresses.range_at(index)).collect();
        // SAFETY: pages of folios that are frozen and whose bytes are no longer needed.
        let flushes = unsafe { region.addresses.unmap_unwanted(&ranges) };
        // No thread fills such a page again if that failed: the cache is poisoned.
        inode.memory.counters.add(Counter::UnmapFlush, flushes.unwrap_or(0));
        for (frozen, locked) in self.frozen.drain(..) {
            inode.forget_content(&locked, frozen.id());
            inode.mapping.end_eviction(&frozen, &locked, |_| Entry::HOLE);
            drop(locked);
            frozen.free();
        }
    }
}

impl Drop for Removal<'_> {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::cache::Cache;
    use crate::file::{File, OpenOptions};
    use crate::page::{ALL_BYTES, PAGE_BYTES};
    use crate::sync::test_hook;
    use crate::sys::memory::free_pages;
    use crate::writeback::Writeback;

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

    /// The page is missing as if the program had discarded it.
    #[test]
    fn a_poisoned_cache_blames_no_program_for_a_page_that_it_does_not_write() {
        let cache = Cache::builder().memory(4 << 20).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let Ok(file) = cache.open_fd(tempfile::tempfile().unwrap().into(), &options) else {
            return;
        };
        file.write_all_at(&[9; PAGE_BYTES as usize], 0).unwrap();
        let inode = &file.handle.inode;
        let page = inode.page_space.base();
        // SAFETY: a page of the region, whose bytes the test does without.
        unsafe { free_pages(page, PAGE_BYTES as usize) }.unwrap();
        let source = std::io::Error::from_raw_os_error(libc::ENOMEM);
        inode.memory.soundness.lose("test", &source);
        let error = Writeback::of(inode).write_back(&inode.errors.sample(), ALL_BYTES).unwrap_err();
        assert!(error.to_string().contains("the cache is poisoned: test"), "{error}");
    }
}

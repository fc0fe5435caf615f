//! Installs and unmaps the pages of a region, for its inode.
//!
//! # Safety
//! Passes memory of its callers to the kernel, which copies it, and unmaps pages of folios that are
//! frozen.
#![allow(unsafe_code)]

use super::stores;
use crate::error::{Error, Result};
use crate::inode::{Inode, MappedPages, MappedRemoval, PinnedPages, WriteSource};
use crate::maps::region::Region;
use crate::memory::StagedPages;
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

impl MappedPages for Region {
    fn find_stores(&self, inode: &Inode, range: &Range<u64>, patient: bool) -> Result<bool> {
        stores::find_stores(self, inode, range, patient)
    }

    /// Before the page is installed it ceases to read as zeros: raw writers continue once it is,
    /// and their stores must be visible at once.
    fn install_page(
        &self,
        inode: &Inode,
        locked: &LockedFolio<'_>,
        bytes: &[u8],
        will_be_stored: bool,
    ) -> Result<()> {
        let mut page = [0; PAGE_BYTES as usize];
        page[..bytes.len()].copy_from_slice(bytes);
        let pages = locked.index()..locked.index() + 1;
        let was_allocated = locked.flags.get(Flag::Allocated);
        // Readers that see the old state of the page have begun before it is installed: that is a
        // system call, and a thread that waited for it continues after that.
        locked.flags.clear(Flag::Allocated);
        let (_, installed) = install(self, inode, pages, page.as_ptr(), will_be_stored);
        #[cfg(all(test, not(loom)))]
        crate::sync::test_hook::reach("before the page is uptodate");
        if installed.is_ok() {
            inode.mapping.mark_uptodate(locked);
        } else if was_allocated {
            locked.flags.set(Flag::Allocated);
        }
        installed
    }

    fn begin_removal<'a>(
        &'a self,
        inode: &'a Inode,
        pinned: PinnedPages,
    ) -> Box<dyn MappedRemoval<'a> + 'a> {
        let frozen = Vec::new();
        Box::new(RegionRemoval { inode, region: self, pinned, frozen, is_drained: false })
    }

    fn write_source(&self, inode: &Inode, pages: Range<u64>) -> WriteSource {
        stores::write_source(self, inode, pages)
    }

    fn copy_for_write(
        &self,
        inode: &Inode,
        pages: Range<u64>,
        is_alone: bool,
    ) -> Option<Box<dyn StagedPages>> {
        stores::copy_for_write(self, inode, pages, is_alone)
    }

    fn serves_in_thread(&self) -> bool {
        self.addresses.userfault.signals
    }
}

fn install(
    region: &Region,
    inode: &Inode,
    pages: Range<u64>,
    source: *const u8,
    will_be_stored: bool,
) -> (u64, Result<()>) {
    // SAFETY: the callers pass that many pages of memory of their own, in no region.
    let (there, installed) = unsafe { region.install(pages, source, will_be_stored) };
    inode.memory.counters.add(Counter::MapIn, there);
    (there, installed.map_err(|source| Error::memory("a page of a map", source)))
}

/// Restores the bytes of an unmapped folio, from the caller's copy, in its page, where readers find
/// them. The folio stays locked. If the kernel has no memory, waits for some, up to a limit, if the
/// bytes are nowhere else. After that the folio is removed from the table, and the table's
/// reference is returned. Clean bytes are read again by the next access; if dirty bytes are lost,
/// the cache is poisoned.
pub(super) fn put_back<'a>(
    region: &Region,
    inode: &'a Inode,
    folio: &FolioRef<'a>,
    locked: &LockedFolio<'_>,
    copy: *const u8,
) -> Option<FolioRef<'a>> {
    if !locked.flags.get(Flag::Uptodate) {
        // Allocated and never written: it had no page. The thread that fills it would overwrite one
        // that raw writers have found since.
        return None;
    }
    let pages = locked.index()..locked.index() + 1;
    let is_dirty = locked.flags.write_state().is_dirty();
    let begun = Instant::now();
    while let Err(error) = install(region, inode, pages.clone(), copy, is_dirty).1 {
        if !is_dirty {
            return Some(inode.remove_unfilled(folio, locked));
        }
        if begun.elapsed() >= PUT_BACK_MAX || inode.memory.soundness.is_lost() {
            return Some(lose(inode, folio, locked, &std::io::Error::other(error)));
        }
        blocking::check_frozen("memory for a page that is put back");
        log::warn!("{}: {error}; {:?} waits for it", inode.name(), folio.id());
        std::thread::sleep(PAUSE);
    }
    inode.mapping.restore_ready(locked);
    None
}

/// Gives up an unmapped, dirty folio whose bytes cannot be restored: poisons the cache, so that no
/// access takes the page for a hole, or reads old bytes. Returns the table's reference.
pub(super) fn lose<'a>(
    inode: &'a Inode,
    folio: &FolioRef<'a>,
    locked: &LockedFolio<'_>,
    error: &std::io::Error,
) -> FolioRef<'a> {
    inode.memory.soundness.lose("a page of a map cannot be put back", error);
    inode.forget_content(locked, folio.id());
    inode.mapping.remove(folio, locked, &inode.memory.folios, |_| Entry::HOLE)
}

/// Removes a locked, dirty folio from the table whose page is missing: its bytes are lost. Every
/// handle reports this at its next sync. The file keeps its length: if the backing cannot be
/// extended for that, returns this error, and the folio stays.
#[cold]
pub(super) fn lose_discarded<'a>(
    inode: &'a Inode,
    folio: &FolioRef<'a>,
    locked: &LockedFolio<'_>,
) -> Error {
    if let Err(error) = inode.extend_backing((locked.index() + 1) * PAGE_BYTES) {
        return error;
    }
    inode.errors.record(stores::discarded(inode, locked.index()));
    inode.forget_content(locked, folio.id());
    drop(inode.mapping.remove(folio, locked, &inode.memory.folios, |_| Entry::HOLE));
    stores::discarded(inode, locked.index())
}

/// Folios of a region being removed from the table, unmapped several at a time, with one TLB flush.
#[derive(Debug)]
struct RegionRemoval<'a> {
    inode: &'a Inode,
    region: &'a Region,
    pinned: PinnedPages,
    frozen: Vec<(Frozen<'a>, LockedFolio<'a>)>,
    /// Set if the references of the LRU batches were drained.
    is_drained: bool,
}

impl<'a> MappedRemoval<'a> for RegionRemoval<'a> {
    fn remove(&mut self, folio: FolioRef<'a>, locked: LockedFolio<'a>) {
        let (inode, region) = (self.inode, self.region);
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
                    if let Some(space) = inode.page_space.ops() {
                        inode.memory.orphans.note(folio.id(), space, locked.index());
                    }
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

    fn finish(&mut self) {
        let (inode, region) = (self.inode, self.region);
        if self.frozen.is_empty() {
            return;
        }
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

impl<'a> RegionRemoval<'a> {
    /// Freezes a folio that is to be removed. If another thread holds a reference, ends the
    /// unmapping in progress and drains the LRU batches, once, because those may hold it.
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
}

impl Drop for RegionRemoval<'_> {
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

//! Access hints, prefetch, eviction and residency: the counterparts of `posix_fadvise`, `madvise`,
//! `mincore` and `cachestat`.

use super::hit::GROUP;
use super::open::Registry;
use super::{Access, File};
use crate::error::Result;
use crate::fill::{AccessMode, Batch, Delivery};
use crate::inode::Inode;
use crate::page::{Flag, PAGE_BYTES, pages_of};
use crate::reclaim::{Evicted, Reclaim};
use crate::sync::Ordering;
use arrayvec::ArrayVec;
use std::ops::{Range, RangeBounds};
use std::sync::Arc;

impl File {
    /// Announces the order of the reads through this handle and its clones. Affects later reads
    /// only; does no I/O and never waits.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// use bifolio::{Access, OpenOptions};
    /// let tree = cache.open(&path, &OpenOptions::new())?;
    /// tree.set_access(Access::Random);
    /// let compaction = cache.open(&path, &OpenOptions::new())?;
    /// compaction.set_access(Access::NoReuse);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_access(&self, access: Access) {
        self.handle.readahead.set_access(access);
    }

    /// Starts to read the bytes of `range` and returns. Limited to the file, a quarter of the
    /// cache, and memory that is free or can be freed without I/O.
    ///
    /// # Errors
    /// A closed cache; a handle that is not opened for reading; a range beyond 2^63. Bytes that
    /// cannot be read are reported by the read that needs them.
    pub fn prefetch(&self, range: impl RangeBounds<u64>) -> Result<()> {
        let range = self.range_of(range);
        self.check_advised(&range)?;
        let bound_bytes = self.handle.reclaim.memory.arena.bound_bytes();
        let end = range.end.min(self.len()).min(range.start.saturating_add(bound_bytes / 4));
        let advised = &self.handle.readahead.at_work().advised;
        self.handle.start_reading(advised, pages_of(&(range.start..end)));
        Ok(())
    }

    /// Starts to read the bytes of each range and returns, like [`File::prefetch`]: for records at
    /// random, such as those of the next batch. All ranges together are limited to a quarter of
    /// the cache; those beyond it are not read.
    ///
    /// The iterator runs while the call holds no lock.
    ///
    /// # Errors
    /// Those of [`File::prefetch`]. Ranges before the invalid one may have been started.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// file.prefetch_many([90, 3, 41].map(|record| record * 1024..(record + 1) * 1024))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn prefetch_many(&self, ranges: impl IntoIterator<Item = Range<u64>>) -> Result<()> {
        let mut left = self.handle.reclaim.memory.arena.bound_bytes() / (4 * PAGE_BYTES);
        let mut ranges = ranges.into_iter();
        let mut group = ArrayVec::<Range<u64>, GROUP>::new();
        while left > 0 {
            group.extend(ranges.by_ref().take(GROUP));
            if group.is_empty() {
                break;
            }
            self.prefetch_group(&group, &mut left)?;
            group.clear();
        }
        Ok(())
    }

    /// Starts to read a group of ranges, whose transfers begin together, up to `left` pages.
    fn prefetch_group(&self, group: &[Range<u64>], left: &mut u64) -> Result<()> {
        group.iter().try_for_each(|range| self.check_advised(range))?;
        self.hit_path.touch_entries(group.iter().map(|range| range.start));
        let mut all = ArrayVec::<Range<u64>, GROUP>::new();
        for range in group {
            let range = range.start..range.end.min(self.len());
            if range.is_empty() {
                continue;
            }
            let mut pages = pages_of(&range);
            if all.last().is_some_and(|last: &Range<u64>| last.end == pages.start + 1) {
                // The page in which the range before ends.
                pages.start += 1;
            }
            pages.end = pages.end.min(pages.start + *left);
            *left -= pages.end - pages.start;
            all.push(pages);
        }
        self.handle.start_reading_each(&self.handle.readahead.at_work().advised, all.into_iter());
        Ok(())
    }

    /// Reads `range` into the cache, and waits. Holes of a memory file get pages. The part past the
    /// end of file is ignored. A range that exceeds the cache may evict its first pages.
    ///
    /// # Errors
    /// A closed cache; a handle that is not opened for reading; a range beyond 2^63; the error of
    /// the first page that cannot be read or allocated.
    pub fn populate(&self, range: impl RangeBounds<u64>) -> Result<()> {
        let range = self.range_of(range);
        self.check_advised(&range)?;
        let range = range.start..range.end.min(self.len());
        if range.is_empty() { Ok(()) } else { self.fill_range(range) }
    }

    /// Reads all non-resident pages of `range`, with a full queue of transfers. Retries pages of
    /// maps that could not be read before, and restores those that were discarded.
    pub(crate) fn fill_range(&self, range: Range<u64>) -> Result<()> {
        let handle = &self.handle;
        handle.check_readable()?;
        let (pages, mapping) = (pages_of(&range), &handle.inode.mapping);
        handle.inode.page_space.clear_poison(pages.clone())?;
        let mut batch = Batch::new(&handle.inode);
        // Failed pages are tried once more below, page by page, and reported.
        let mut deliver = |_, _: Delivery<'_>| {};
        // Pages past the end are refused below.
        let end = pages.end.min(self.len().div_ceil(PAGE_BYTES));
        let added = batch.add(handle.fill(), pages.start..end, 0, &mut deliver);
        batch.finish(&mut deliver);
        added?;
        for index in pages.clone() {
            // Relaxed: a page that is not READY yet is waited for.
            if index >= end || !mapping.table().load(index, Ordering::Relaxed).is_ready() {
                handle.fill().lock_folio(index, AccessMode::Cache)?;
            }
        }
        handle.mapper().map_or(Ok(()), |mapper| mapper.restore(handle, pages))
    }

    /// Evicts the folios of `range` that are clean and not in use. The result counts them and, by
    /// reason, those that stay.
    ///
    /// Dirty folios start to be written back; to evict everything, sync first. A folio that lies
    /// partly outside the range stays, unless the rest is past the end of file, as do mapped and
    /// pinned pages and those of memory files. Folios that cannot be evicted now become the first
    /// to be evicted when memory is short.
    ///
    /// Does not wait, except on a file that can be mapped, for a thread that reclaims memory.
    ///
    /// # Errors
    /// A closed cache; a handle that is not opened for reading; a range beyond 2^63.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// use bifolio::OpenOptions;
    /// let file = cache.open(&path, &OpenOptions::new())?;
    /// file.populate(40_000..60_000)?;
    /// let evicted = file.evict(40_960..)?;
    /// assert_eq!(evicted.folios, 5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn evict(&self, range: impl RangeBounds<u64>) -> Result<Evicted> {
        let range = self.range_of(range);
        self.check_advised(&range)?;
        Ok(evict(&self.handle.reclaim, &self.handle.inode, range))
    }

    fn check_advised(&self, range: &Range<u64>) -> Result<()> {
        self.handle.check_readable()?;
        self.handle.check_range(range).map(drop)
    }
}

/// Evicts the folios of a range of a file, and starts the write-out of those that are dirty.
pub(super) fn evict(reclaim: &Reclaim, inode: &Arc<Inode>, range: Range<u64>) -> Evicted {
    if range.is_empty() {
        return Evicted::default();
    }
    let evicted = reclaim.invalidate(inode, range.clone());
    // Stores to pages that are mapped may not have been found yet. An empty range only asks.
    let may_have_stores = || !matches!(inode.find_stores(&(0..0), false), Ok(false));
    if evicted.kept.dirty > 0 || evicted.kept.mapped > 0 && may_have_stores() {
        inode.write_soon(range);
    }
    evicted
}

impl Registry {
    pub(crate) fn evict_all(&self) -> Result<Evicted> {
        self.check()?;
        self.free_kept();
        let mut total = Evicted::default();
        for inode in self.inodes() {
            total += evict(&self.reclaim, &inode, 0..u64::MAX >> 1);
        }
        Ok(total)
    }
}

/// Page counts of a range, by state. A snapshot: other threads may change the pages at any time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Residency {
    /// Pages of the range that lie in the file.
    pub pages: u64,
    /// Pages that are in memory and filled.
    pub resident: u64,
    /// Pages that are newer than the device.
    pub dirty: u64,
    /// Pages that are being written to the device or to the swap.
    pub writeback: u64,
    /// Pages that were in memory and have been evicted.
    pub evicted: u64,
}

impl File {
    /// Returns how much of a range of bytes is in memory. Pages past the end of file do not count.
    /// Never waits. The cost is proportional to the pages that are or were in memory.
    ///
    /// # Errors
    /// The cache is closed; a range beyond 2^63.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// use bifolio::OpenOptions;
    /// let file = cache.open(&path, &OpenOptions::new().write(true))?;
    /// file.write_all_at(&[1; 8192], 0)?;
    /// let residency = file.residency(0..file.len())?;
    /// assert_eq!((residency.pages, residency.resident, residency.dirty), (25, 2, 2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn residency(&self, range: impl RangeBounds<u64>) -> Result<Residency> {
        let range = self.range_of(range);
        self.handle.check_usable()?;
        self.handle.check_range(&range)?;
        let inode = &self.handle.inode;
        let (mapping, memory) = (&inode.mapping, &inode.memory);
        let end = range.end.min(self.len());
        let pages = if range.start < end { pages_of(&(range.start..end)) } else { 0..0 };
        let mut all = Residency { pages: pages.end - pages.start, ..Residency::default() };
        // The trace of an eviction is only in the Entry at the head of a unit.
        let mut index = mapping.head_index(pages.start);
        while let Some(found) =
            mapping.table().next_occupied(index).filter(|found| *found < pages.end)
        {
            index = mapping.end_of_unit(found);
            let count = index.min(pages.end) - found.max(pages.start);
            let peeked = mapping.peek(&memory.folios, found, |_, folio| {
                let write_state = folio.flags.write_state();
                all.resident += count * u64::from(folio.flags.get(Flag::Uptodate));
                all.dirty += count * u64::from(write_state.is_dirty());
                all.writeback += count * u64::from(write_state.is_writing());
            });
            if peeked.is_err_and(|entry| inode.store.shadow_of(entry).is_some()) {
                all.evicted += count;
            }
        }
        Ok(all)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::page::Lookup;
    use crate::{Cache, OpenOptions};

    /// A frozen folio is being evicted by another thread.
    #[test]
    fn a_folio_that_another_thread_evicts_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [7; 8192]).unwrap();
        let cache = Cache::builder().memory(4 << 20).readahead_max(0).build().unwrap();
        let file = cache.open(&path, &OpenOptions::new()).unwrap();
        file.read_exact_at(&mut [0; 8192], 0).unwrap();
        let inode = &file.handle.inode;
        let memory = &inode.memory;
        memory.lru.drain_all(&memory.folios);
        let Lookup::Folio(folio) = inode.mapping.get_folio(&memory.folios, 0) else {
            unreachable!("just read")
        };
        let frozen = folio.try_freeze(1).unwrap();
        let outcome = file.evict(0..8192).unwrap();
        assert_eq!((outcome.folios, outcome.kept.gone), (1, 1));
        assert_eq!(outcome.kept.total(), 1);
        drop(frozen.unfreeze());
        assert_eq!(file.evict(0..8192).unwrap().folios, 1);
    }
}

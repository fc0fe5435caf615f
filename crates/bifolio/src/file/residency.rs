//! Residency: what a cache has of a file. The answer to `mincore` and `cachestat`.

use super::File;
use super::handle::Handle;
use crate::error::{ErrorKind, Result};
use crate::page::{Entry, Flag, Folio, pages_of};
use std::ops::Range;

/// What the cache has of one page, or had. A snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PageResidency {
    /// In memory, with its bytes.
    pub resident: bool,
    /// Newer in memory than on its device; a page of a memory file: only in memory.
    pub dirty: bool,
    /// On its way to the device, or to the swap.
    pub writeback: bool,
    /// Not in memory, but it was.
    pub evicted: bool,
    /// Evicted so lately that the active list, had it been that much longer, would have kept it.
    pub recently_evicted: bool,
}

/// How many pages of a range are in which state. A snapshot: others may change it meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Residency {
    /// Pages of the range that are in the file.
    pub pages: u64,
    /// Pages that are in memory, with their bytes.
    pub resident: u64,
    /// Pages that are newer in memory than on their device.
    pub dirty: u64,
    /// Pages on their way to the device.
    pub writeback: u64,
    /// Pages that are not in memory, but were.
    pub evicted: u64,
    /// Of those, pages that were evicted lately: reading them again soon means that the cache is
    /// too small, by this much at the least.
    pub recently_evicted: u64,
}

impl Residency {
    fn add(&mut self, page: PageResidency) {
        self.resident += u64::from(page.resident);
        self.dirty += u64::from(page.dirty);
        self.writeback += u64::from(page.writeback);
        self.evicted += u64::from(page.evicted);
        self.recently_evicted += u64::from(page.recently_evicted);
    }
}

impl File {
    /// How much of a range of bytes is in memory; pages that hold a byte of it count. What is
    /// behind the end of the file does not. Reads nothing, waits for nobody, and takes as long as
    /// there are pages that are or were in memory: a hole of any length costs little.
    ///
    /// # Errors
    /// The cache is closed; a range beyond 2^63.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// use bifolio::OpenOptions;
    /// let file = cache.open(&path, &OpenOptions::new().write(true))?;
    /// file.write_all_at(&[1; 8192], 0)?;
    /// let residency = file.residency(0..file.len())?;
    /// assert_eq!((residency.pages, residency.resident, residency.dirty), (25, 2, 2));
    /// # Ok(())
    /// # }
    /// ```
    pub fn residency(&self, range: Range<u64>) -> Result<Residency> {
        let pages = self.handle.pages_in_file(&range)?;
        let mut residency = Residency { pages: pages.end - pages.start, ..Residency::default() };
        self.handle.visit_pages(pages, |_, page| residency.add(page));
        Ok(residency)
    }

    /// As [`File::residency`], page by page: one element for each page of the range that is in the
    /// file.
    ///
    /// # Errors
    /// As [`File::residency`]; no memory for so many.
    pub fn residency_by_page(&self, range: Range<u64>) -> Result<Vec<PageResidency>> {
        let pages = self.handle.pages_in_file(&range)?;
        let first = pages.start;
        let mut all = Vec::new();
        let count = (pages.end - first) as usize;
        let purpose = "a list of pages";
        let source = std::io::ErrorKind::OutOfMemory.into();
        all.try_reserve_exact(count).map_err(|_| ErrorKind::Memory { purpose, source })?;
        all.resize(count, PageResidency::default());
        self.handle.visit_pages(pages, |index, page| all[(index - first) as usize] = page);
        Ok(all)
    }
}

impl Handle {
    /// The pages that hold bytes of `range` and of the file.
    fn pages_in_file(&self, range: &Range<u64>) -> Result<Range<u64>> {
        self.check_usable()?;
        self.range_end(range.start, range.end.saturating_sub(range.start))?;
        let end = range.end.min(self.inode.mapping.len_bytes());
        if range.start >= end {
            return Ok(0..0);
        }
        Ok(pages_of(&(range.start..end)))
    }

    /// Visits those of `pages` that are in memory, or were.
    fn visit_pages(&self, pages: Range<u64>, mut visit: impl FnMut(u64, PageResidency)) {
        let table = self.inode.mapping.table();
        // What an eviction leaves is at the head of a unit only.
        let mut index = self.inode.mapping.head_index(pages.start);
        while let Some(found) = table.next_occupied(index).filter(|found| *found < pages.end) {
            let end = self.inode.mapping.end_of_unit(found);
            let page = self.residency_of(found);
            for index in found.max(pages.start)..end.min(pages.end) {
                visit(index, page);
            }
            index = end;
        }
    }

    /// What is true of the unit whose first page is `head`.
    fn residency_of(&self, head: u64) -> PageResidency {
        let folios = &self.inode.memory.folios;
        let peeked = self.inode.mapping.peek(folios, head, |_, folio| folio_residency(folio));
        peeked.unwrap_or_else(|entry| self.absent_residency(entry))
    }

    fn absent_residency(&self, entry: Entry) -> PageResidency {
        let Some(shadow) = self.inode.store.shadow_of(entry) else {
            return PageResidency::default();
        };
        let recently_evicted = self.inode.memory.lru.is_near_refault(shadow);
        PageResidency { evicted: true, recently_evicted, ..PageResidency::default() }
    }
}

fn folio_residency(folio: &Folio) -> PageResidency {
    let write_state = folio.flags.write_state();
    PageResidency {
        resident: folio.flags.get(Flag::Uptodate),
        dirty: write_state.is_dirty(),
        writeback: write_state.is_writing(),
        ..PageResidency::default()
    }
}

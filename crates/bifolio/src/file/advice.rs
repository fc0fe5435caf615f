//! Advice: what the caller knows about the reads to come. And what a caller can learn: residency,
//! the answer to `mincore` and `cachestat`.

use super::File;
use super::handle::Handle;
use super::readahead::Mode;
use super::registry::Registry;
use crate::error::{ErrorKind, Result};
use crate::outcome::Outcome;
use crate::page::{Entry, Flag, Folio, pages_of};
use crate::reclaim::Reclaim;
use crate::writeback::Inode;
use std::ops::Range;
use std::sync::Arc;

/// What will be done with a file, or with a range of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Advice {
    /// For the handle: watch the reads, and read ahead where they are sequential or strided. How
    /// it is from the beginning.
    Normal,
    /// For the handle: reads are sequential; read ahead from the first one on, and much.
    Sequential,
    /// For the handle: reads have no order; read nothing ahead.
    Random,
    /// For the handle, until [`Advice::Normal`]: what is read will not be read again. Reads leave
    /// no mark of use, so that what they bring in goes before what others use.
    NoReuse,
    /// For the range: it will be read soon; start to read it now.
    WillNeed,
    /// For the range: it will not be needed soon. It goes first when memory is wanted; until then
    /// it stays.
    Cold,
    /// For the range: it will not be needed. Evict it now, and say what stays, and why.
    DontNeed,
    /// For the range: read it now, and wait for it. What is a hole of a memory file gets pages.
    PopulateRead,
    /// As [`Advice::PopulateRead`], for a handle that is open for writing; in a file with a
    /// [`MapMut`](crate::MapMut) its pages can be stored to without a fault then, and count as
    /// changed.
    PopulateWrite,
}

impl File {
    /// Takes advice. What is for the handle is for all reads through it and its clones, wherever;
    /// `range` is not looked at. The rest is for the bytes of `range`; none is for none, and what
    /// is behind the end of the file does not matter.
    ///
    /// [`Advice::DontNeed`] evicts what is clean and nobody's; the [`Outcome`] counts the folios
    /// that went and, by reason, those that stay. It starts the write-out of what is dirty and
    /// does not wait for it (sync first, to evict everything; pages of memory files are swapped out
    /// by reclaim only). A folio only part of which lies in the range stays, unless the rest is
    /// behind the end of the file; maps and pins are left alone. What could not go now goes first
    /// when memory is wanted.
    ///
    /// [`Advice::WillNeed`] starts to read the range and returns: as much of it as fits into a
    /// quarter of the cache, and for which frames are free, or can be freed without I/O.
    ///
    /// `PopulateRead` and `PopulateWrite` block for the device. The others do not; `DontNeed` may
    /// wait, in a file that can be mapped, while somebody else is reclaiming.
    ///
    /// # Errors
    /// The handle was not opened for what the advice takes; a range beyond 2^63; for
    /// `PopulateRead` and `PopulateWrite`, the first page that cannot be had.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// use bifolio::{Advice, OpenOptions};
    /// let file = cache.open(&path, &OpenOptions::new())?;
    /// file.advise(0..file.len(), Advice::Random)?;
    /// file.advise(40_000..60_000, Advice::PopulateRead)?;
    /// let outcome = file.advise(40_960..u64::MAX >> 1, Advice::DontNeed)?;
    /// println!("{outcome}");
    /// assert_eq!(outcome.evicted, 5);
    /// # Ok(())
    /// # }
    /// ```
    pub fn advise(&self, range: Range<u64>, advice: Advice) -> Result<Outcome> {
        let handle = &self.handle;
        handle.check_readable()?;
        handle.range_end(range.start, range.end.saturating_sub(range.start))?;
        let readahead = &handle.readahead;
        match advice {
            Advice::Normal => {
                readahead.set_mode(Mode::Normal);
                readahead.set_reuse(true);
            }
            Advice::Sequential => readahead.set_mode(Mode::Sequential),
            Advice::Random => readahead.set_mode(Mode::Random),
            Advice::NoReuse => readahead.set_reuse(false),
            Advice::WillNeed => handle.start_reading_range(&range),
            Advice::Cold => handle.reclaim.demote(&handle.inode, range),
            Advice::DontNeed => return Ok(evict(&handle.reclaim, &handle.inode, range)),
            Advice::PopulateRead => self.populate_in_file(range, false)?,
            Advice::PopulateWrite => self.populate_in_file(range, true)?,
        }
        Ok(Outcome::default())
    }

    fn populate_in_file(&self, range: Range<u64>, for_writing: bool) -> Result<()> {
        if for_writing {
            self.handle.check_writable()?;
        }
        let range = range.start..range.end.min(self.len());
        if range.is_empty() {
            return Ok(());
        }
        self.populate(range.clone())?;
        match self.handle.inode.page_space.tracked() {
            Some(region) if for_writing => {
                let purpose = "stores to a map";
                let admitted = region.admit_stores(pages_of(&range));
                admitted.map_err(|source| ErrorKind::Memory { purpose, source }.into())
            }
            _ => Ok(()),
        }
    }
}

impl Handle {
    fn start_reading_range(&self, range: &Range<u64>) {
        let bound_bytes = self.reclaim.memory.arena.usage().bound_bytes;
        let len_bytes = self.inode.mapping.len_bytes();
        let end = range.end.min(len_bytes).min(range.start.saturating_add(bound_bytes / 4));
        self.start_reading_advised(pages_of(&(range.start..end)));
    }
}

/// `DontNeed` for a range of a file.
fn evict(reclaim: &Reclaim, inode: &Arc<Inode>, range: Range<u64>) -> Outcome {
    if range.is_empty() {
        return Outcome::default();
    }
    let outcome = reclaim.invalidate(inode, range.clone());
    let has_stores = inode.page_space.tracked().is_some();
    if outcome.remaining.dirty > 0 || has_stores {
        inode.write_soon(range);
    }
    outcome
}

impl Registry {
    /// Takes advice for all files.
    pub(crate) fn advise_all(&self, advice: Advice) -> Result<Outcome> {
        self.check()?;
        let mut total = Outcome::default();
        for inode in self.inodes() {
            match advice {
                Advice::DontNeed => total += evict(&self.reclaim, &inode, 0..u64::MAX >> 1),
                Advice::Cold => self.reclaim.demote(&inode, 0..u64::MAX >> 1),
                _ => {
                    let problem = format!("{advice:?} is not for all files");
                    return Err(ErrorKind::Config { name: "advice", problem }.into());
                }
            }
        }
        Ok(total)
    }
}

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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::page::Lookup;
    use crate::{Cache, OpenOptions};

    /// A folio that is frozen is on its way out by somebody else's hand.
    #[test]
    fn a_folio_that_somebody_else_evicts_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [7; 8192]).unwrap();
        let cache = Cache::builder().memory(4 << 20).readahead_bytes_max(0).build().unwrap();
        let file = cache.open(&path, &OpenOptions::new()).unwrap();
        file.read_exact_at(&mut [0; 8192], 0).unwrap();
        let inode = &file.handle.inode;
        let memory = &inode.memory;
        memory.lru.drain_all(&memory.folios);
        let Lookup::Folio(folio) = inode.mapping.get_folio(&memory.folios, 0) else {
            unreachable!("just read")
        };
        let frozen = folio.try_freeze(1).unwrap();
        let outcome = file.advise(0..8192, Advice::DontNeed).unwrap();
        assert_eq!((outcome.evicted, outcome.remaining.gone), (1, 1));
        assert_eq!(outcome.remaining.total(), 1);
        drop(frozen.unfreeze());
        assert_eq!(file.advise(0..8192, Advice::DontNeed).unwrap().evicted, 1);
    }
}

//! Access advice, and residency: the counterparts of `posix_fadvise`, `madvise`, `mincore` and
//! `cachestat`.

use super::File;
use super::handle::Handle;
use super::readahead::Mode;
use super::registry::Registry;
use crate::error::{ErrorKind, Result};
use crate::outcome::Outcome;
use crate::page::{Flag, Folio, pages_of};
use crate::reclaim::Reclaim;
use crate::writeback::Inode;
use std::ops::Range;
use std::sync::Arc;

/// Access pattern or request for a file or a range of it, given to [`File::advise`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Advice {
    /// For the handle: detects sequential reads and reads ahead of them. The default.
    Normal,
    /// For the handle: reads are sequential. Reads ahead from the first read on, with large
    /// windows.
    Sequential,
    /// For the handle: reads are random. Reads nothing ahead.
    Random,
    /// For the handle, until [`Advice::Normal`]: data is read only once. Reads do not mark pages as
    /// used, so their pages are evicted before others.
    NoReuse,
    /// For the range: it will be read soon. Starts reading it.
    WillNeed,
    /// For the range: it is not needed soon. Its pages are evicted first when memory is short, and
    /// stay until then.
    Cold,
    /// For the range: it is not needed. Evicts it immediately and reports the pages that stay, by
    /// reason.
    DontNeed,
    /// For the range: reads it and waits. Holes of a memory file get pages.
    PopulateRead,
    /// For the range: reads it and waits, like [`Advice::PopulateRead`], and prepares it for
    /// stores. Needs a handle that is open for writing. In a file with a [`MapMut`](crate::MapMut),
    /// stores to these pages no longer fault, and the pages count as changed.
    PopulateWrite,
}

impl File {
    /// Applies `advice`. Advice for the handle affects all reads through it and its clones, and
    /// ignores `range`. Other advice affects the bytes of `range`; an empty range has no effect,
    /// and the part past the end of file is ignored.
    ///
    /// [`Advice::DontNeed`] evicts folios that are clean and not in use. The [`Outcome`] counts the
    /// evicted folios and, by reason, those that stay. Dirty folios start to be written back,
    /// without waiting; to evict everything, sync first. Pages of memory files are swapped out only
    /// by reclaim. A folio that lies partly outside the range stays, unless the rest is past the
    /// end of file. Mapped and pinned pages stay. Folios that cannot be evicted now become the
    /// first to be evicted when memory is short.
    ///
    /// [`Advice::WillNeed`] starts to read the range and returns. It is limited to a quarter of the
    /// cache, and to frames that are free or can be freed without I/O.
    ///
    /// `PopulateRead` and `PopulateWrite` block for the device. The others do not, except that
    /// `DontNeed` on a file that can be mapped may wait while another thread reclaims memory.
    ///
    /// # Errors
    /// A handle that is not opened for reading or writing as the advice needs; a range beyond 2^63;
    /// for `PopulateRead` and `PopulateWrite`, the error of the first page that cannot be read or
    /// allocated.
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
        let bound_bytes = self.reclaim.memory.arena.bound_bytes();
        let len_bytes = self.inode.mapping.len_bytes();
        let end = range.end.min(len_bytes).min(range.start.saturating_add(bound_bytes / 4));
        self.start_reading_advised(pages_of(&(range.start..end)));
    }
}

/// Applies [`Advice::DontNeed`] to a range of a file.
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
    /// Applies `advice` to all files.
    pub(crate) fn advise_all(&self, advice: Advice) -> Result<Outcome> {
        self.check()?;
        let mut total = Outcome::default();
        for inode in self.inodes() {
            match advice {
                Advice::DontNeed => total += evict(&self.reclaim, &inode, 0..u64::MAX >> 1),
                Advice::Cold => self.reclaim.demote(&inode, 0..u64::MAX >> 1),
                _ => {
                    let problem = format!("{advice:?} does not apply to all files");
                    return Err(ErrorKind::Config { name: "advice", problem }.into());
                }
            }
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
    /// Evicted pages that were evicted recently. Reading them again soon means that the cache is
    /// too small by at least this many pages.
    pub recently_evicted: u64,
}

impl File {
    /// Returns how much of a range of bytes is in memory. Pages that hold a byte of the range
    /// count; pages past the end of file do not. Reads nothing and never waits. The cost is
    /// proportional to the pages that are or were in memory: a hole of any length costs little.
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
        Ok(self.handle.residency_of(pages))
    }
}

impl Handle {
    /// Returns the pages that hold bytes of `range` and lie in the file.
    fn pages_in_file(&self, range: &Range<u64>) -> Result<Range<u64>> {
        self.check_usable()?;
        self.range_end(range.start, range.end.saturating_sub(range.start))?;
        let end = range.end.min(self.inode.mapping.len_bytes());
        if range.start >= end {
            return Ok(0..0);
        }
        Ok(pages_of(&(range.start..end)))
    }

    /// Counts `pages` by state.
    fn residency_of(&self, pages: Range<u64>) -> Residency {
        let (mapping, memory) = (&self.inode.mapping, &self.inode.memory);
        let mut all = Residency { pages: pages.end - pages.start, ..Residency::default() };
        // The trace of an eviction is only in the Entry at the head of a unit.
        let mut index = mapping.head_index(pages.start);
        while let Some(found) =
            mapping.table().next_occupied(index).filter(|found| *found < pages.end)
        {
            index = mapping.end_of_unit(found);
            let count = index.min(pages.end) - found.max(pages.start);
            let peeked = mapping.peek(&memory.folios, found, |_, folio| all.add(folio, count));
            if let Err(entry) = peeked
                && let Some(shadow) = self.inode.store.shadow_of(entry)
            {
                all.evicted += count;
                all.recently_evicted += count * u64::from(memory.lru.is_near_refault(shadow));
            }
        }
        all
    }
}

impl Residency {
    /// Counts `pages` pages of a folio.
    fn add(&mut self, folio: &Folio, pages: u64) {
        let write_state = folio.flags.write_state();
        self.resident += pages * u64::from(folio.flags.get(Flag::Uptodate));
        self.dirty += pages * u64::from(write_state.is_dirty());
        self.writeback += pages * u64::from(write_state.is_writing());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::page::Lookup;
    use crate::{Cache, OpenOptions};

    /// A frozen folio is being evicted by another thread.
    #[test]
    fn a_folio_that_another_thread_evicts_is_gone() {
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

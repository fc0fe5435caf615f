//! Advice: what the caller knows about the reads to come.

use super::File;
use super::handle::Handle;
use super::readahead::Mode;
use super::registry::Registry;
use crate::error::{ErrorKind, Result};
use crate::outcome::Outcome;
use crate::page::pages_of;
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
            self.check_writable()?;
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
        reclaim.write_soon(inode, range);
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

//! Collapse: many small folios of a memory file become one large one.
//!
//! What readers and writers see meanwhile is `page/collapse.rs`; here is what comes before (the
//! folios are brought in, the frames found, the locks taken) and after (dirt, slots, the lists).

use super::File;
use super::access::Access;
use crate::config;
use crate::error::{CollapseRefusal, ErrorKind, Result};
use crate::memory::FrameKind;
use crate::page::{Flag, FolioRef, Frozen, PAGE_BYTES, PAGE_SHIFT, Part};
use crate::stats::Counter;
use crate::sys::process;
use crate::writeback::Cleaner;
use std::ops::Range;
use std::time::Duration;

/// How often folios that are in use are tried again, and the pause before: a reader holds a batch
/// for less.
const ATTEMPTS_MAX: u32 = 10;
const PAUSE: Duration = Duration::from_millis(1);

impl File {
    /// Makes one folio of all the folios in `range` of a memory file: a power of two of bytes, up
    /// to 2 MiB, from a multiple of that. Reads of it need fewer references then, its bytes lie in
    /// one piece, and it is swapped out, though not read back, as a whole. Readers and writers may
    /// be at work: they see the bytes as they are, before and after.
    ///
    /// Blocks for memory, and for I/O where pages are swapped out.
    ///
    /// # Errors
    /// Not a memory file; a range that cannot be a folio, has a hole, or is pinned or in use
    /// ([`ErrorKind::CannotCollapse`]); no memory; the swap's. Then everything is as it was.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let cache = bifolio::Cache::builder().memory(16 << 20).build()?;
    /// let file = cache.memory_file("table")?;
    /// file.write_all_at(&vec![7; 2 << 20], 0)?;
    /// file.collapse(0..2 << 20)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn collapse(&self, range: Range<u64>) -> Result<()> {
        let handle = &self.handle;
        handle.check_sound()?;
        handle.check_memory_file("collapse folios")?;
        handle.check_unmappable("collapse folios")?;
        let order = self.collapse_order(&range)?;
        // Before the new one: that may take the only chunk there is, and then there would be no
        // room for these, nor for anybody.
        let mut old = self.read_in(&range)?;
        if old.len() == 1 {
            return Ok(());
        }
        let new = match self.start_large(&range, order) {
            Ok(new) => new,
            Err(_) => {
                // They may lie in every chunk there is, and no chunk is emptied of what is held.
                drop(old);
                let new = self.start_large(&range, order)?;
                old = self.read_in(&range)?;
                new
            }
        };
        for _ in 0..ATTEMPTS_MAX {
            let is_one_already = old.len() == 1;
            if is_one_already || self.try_collapse(old, &new) {
                return Ok(());
            }
            std::thread::sleep(PAUSE);
            old = self.read_in(&range)?;
        }
        Err(self.cannot_collapse(&range, CollapseRefusal::InUse))
    }

    /// A folio of that size for the range, not in the table yet.
    fn start_large(&self, range: &Range<u64>, order: u8) -> Result<FolioRef<'_>> {
        let may_swap = self.handle.inode.store.cleaner() == Cleaner::Swapper;
        let kind = FrameKind::Arena { order, near: None };
        let id = self.handle.reclaim.allocate(kind, may_swap)?;
        let folios = &self.handle.inode.memory.folios;
        Ok(folios.start(id, 0, range.start >> PAGE_SHIFT, order))
    }

    fn collapse_order(&self, range: &Range<u64>) -> Result<u8> {
        let refuse = || self.cannot_collapse(range, CollapseRefusal::NotAFolio);
        let length = range.end.checked_sub(range.start).ok_or_else(refuse)?;
        let order = config::folio_order(length).map_err(|_| refuse())?;
        let is_aligned = range.start.is_multiple_of(length) && length >= self.folio_bytes();
        let len_bytes = self.len().next_multiple_of(self.folio_bytes());
        if is_aligned && range.end <= len_bytes { Ok(order) } else { Err(refuse()) }
    }

    /// References to all folios of the range, in order.
    fn read_in(&self, range: &Range<u64>) -> Result<Vec<FolioRef<'_>>> {
        let mut held: Vec<FolioRef<'_>> = Vec::new();
        let mut index = range.start >> PAGE_SHIFT;
        while index * PAGE_BYTES < range.end {
            let Some(found) = self.handle.find_folio(index, Access::NoAlloc)? else {
                return Err(self.cannot_collapse(range, CollapseRefusal::Hole));
            };
            index = found.lock.index() + found.lock.pages();
            held.push(found.folio);
        }
        Ok(held)
    }

    /// Whether it worked: not while anybody else uses one of the folios.
    fn try_collapse(&self, old: Vec<FolioRef<'_>>, new: &FolioRef<'_>) -> bool {
        let inode = &*self.handle.inode;
        let memory = &*inode.memory;
        // The references of batches would stand in the way.
        memory.lru.drain_all(&memory.folios);
        let Some(parts) = self.lock_all(old) else { return false };
        let lock = new.lock();
        let (Some(gone), Some(for_lru)) = (inode.collapse(parts, new, &lock), new.try_clone())
        else {
            return false;
        };
        // Only here do dirty bytes change their folio. Nobody looks for them by the dirty list of a
        // memory file, which has no syncs; the folios stay locked, those that go are frozen.
        inode.pass_dirt(&gone, new.id());
        if inode.is_evictable() {
            memory.lru.add(&memory.folios, for_lru, process::current_cpu());
        } else {
            memory.lru.note_unlisted(&lock);
        }
        drop(lock);
        gone.into_iter().for_each(Frozen::free);
        memory.counters.add(Counter::Collapse, 1);
        true
    }

    /// The locks of all folios of a run, if all can be had, and all are the file's.
    fn lock_all<'a>(&self, folios: Vec<FolioRef<'a>>) -> Option<Vec<Part<'a>>> {
        let lock = |folio: FolioRef<'a>| {
            let lock = folio.try_lock()?;
            let is_ours = lock.owner() == self.handle.inode.address();
            let is_still = lock.flags.get(Flag::Uptodate) && !lock.flags.write_state().is_writing();
            (is_ours && is_still).then_some(Part { lock, folio })
        };
        folios.into_iter().map(lock).collect()
    }

    #[cold]
    fn cannot_collapse(&self, range: &Range<u64>, refusal: CollapseRefusal) -> crate::error::Error {
        let file = self.handle.inode.name();
        let (position_bytes, length_bytes) = (range.start, range.end.saturating_sub(range.start));
        ErrorKind::CannotCollapse { file, position_bytes, length_bytes, refusal }.into()
    }
}

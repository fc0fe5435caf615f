//! Changes of the length of a file: truncation and growth; and the collapse of small folios into a
//! large one.
//!
//! Changes of the length and of the backing happen while no write-back is in flight (WRITEBACK-4).
//! A truncation first sets the length and truncates the backing, then zeroes the rest of the folio
//! that contains the end (FILE-1), then removes the folios past the end, dirty or not. If the
//! backing or the swap fails, the old length is restored and nothing is lost.
//!
//! The view of readers and writers during a collapse is in `page/collapse.rs`. Here are the steps
//! before it (reading the folios in, allocating frames, taking the locks) and after it (dirty
//! state, swap slots, the lists).

use super::File;
use super::fill::Locked;
use super::handle::AccessMode;
use super::options::check_len_max;
use super::own_pins;
use super::registry::no_table;
use crate::config;
use crate::error::{CollapseRefusal, ErrorKind, Result};
use crate::io::FallocateMode;
use crate::memory::{FrameKind, PageSpace};
use crate::page::{Flag, FolioRef, Frozen, LockedFolio, Lookup, OldFolio, PAGE_BYTES, PAGE_SHIFT};
use crate::stats::Counter;
use crate::sys::process;
use crate::writeback::Resizing;
use std::ops::Range;
use std::time::Duration;

/// Guard held while a file in a region grows: faults past the old end wait instead of failing (G1
/// to G3 of `memory/region/stray_pages.rs`).
#[derive(Debug)]
struct Growing<'a> {
    page_space: Option<&'a PageSpace>,
    /// File with a backing and its length before, if raw writers may store past its end.
    uncovered: Option<(&'a File, u64)>,
}

impl Growing<'_> {
    fn end(&mut self) {
        if let Some(page_space) = self.page_space.take() {
            page_space.end_growth();
        }
    }
}

impl Drop for Growing<'_> {
    fn drop(&mut self) {
        self.end();
        // A raw store past the old end, made since the bytes there were zeroed, is part of the file
        // now. A write-out of its page ended at the old length.
        if let Some((file, before_bytes)) = self.uncovered
            && file.len() > before_bytes
            && let Some(Locked { folio, lock, .. }) =
                file.handle.find_resident(before_bytes >> PAGE_SHIFT)
        {
            file.handle.inode.mark_stored(&lock, folio.id());
        }
    }
}

/// Growth in progress: no other thread changes the length.
#[derive(Debug)]
pub(super) struct Growth<'a> {
    growing: Growing<'a>,
    resizing: Resizing<'a>,
}

impl Growth<'_> {
    /// Sets the length to `len_bytes` if the file is shorter. Its last bytes must be in place. A
    /// gap becomes part of the file; later writes of the same growth fill it.
    pub(super) fn reach(&mut self, len_bytes: u64) {
        self.resizing.extend(len_bytes);
        self.growing.end();
    }

    /// Changes the allocation of the backing.
    pub(super) fn fallocate(&self, mode: FallocateMode, bytes: Range<u64>) -> Result<()> {
        Ok(self.resizing.fallocate(mode, bytes)?)
    }
}

impl File {
    /// Sets the length of the file to `len_bytes`: truncates it, or grows it with zeros. The file
    /// on the device has that length when the call returns; it is durable after a sync. Blocks for
    /// its own I/O, and for write-backs of the file that are in flight.
    ///
    /// Pinned bytes past the new end stay readable through the pin, with any content.
    ///
    /// # Errors
    /// An error of the storage or the swap, after which the length is unchanged; a handle that is
    /// not open for writing; a length beyond the maximum that the file was opened with.
    pub fn set_len(&self, len_bytes: u64) -> Result<()> {
        let handle = &self.handle;
        handle.check_writable()?;
        handle.range_end(len_bytes, 0)?;
        handle.check_len(len_bytes)?;
        let inode = &handle.inode;
        let resizing = inode.lock_resizing();
        if len_bytes >= inode.mapping.len_bytes() {
            let _growing = self.uncover(&resizing, len_bytes)?;
            return Ok(resizing.set_len(len_bytes)?);
        }
        own_pins::check(inode, &(inode.mapping.head_index(len_bytes >> PAGE_SHIFT)..u64::MAX))?;
        // A truncation must not fail later because it cannot read the bytes it has to zero.
        let _tail = self.hold_tail(len_bytes)?;
        self.cut(&resizing, len_bytes)
    }

    /// Returns the length in bytes that the file may grow to:
    /// [`OpenOptions::len_max`](crate::OpenOptions::len_max) of the first open, or as raised since.
    pub fn len_max(&self) -> u64 {
        self.handle.inode.len_max_bytes()
    }

    /// Raises the length that the file may grow to, `len_max`, to `bytes`, for all of its handles
    /// until the last one is closed. Has no effect if the file may already grow to that.
    ///
    /// Other threads may use the file meanwhile: no page moves, and pins stay valid. Blocks only
    /// for other changes of the length, which may wait for their I/O.
    ///
    /// # Cost
    /// A few system calls, and address space: an 8-byte Entry for each 4 KiB of file up to `bytes`,
    /// at least as much as the file had before. It becomes memory, within the bound, as pages are
    /// cached, and is freed with the file. Outside of the bound it costs a few hundred bytes. Hits
    /// on pages below the `len_max` of the open cost what they did. Those above it have their
    /// Entries in another array, and take about twice as long: if you know at the open how long
    /// the file will be, say so there. Raise it by much rather than often.
    ///
    /// # Errors
    /// A handle that is not open for writing; a file that can be mapped
    /// ([`ErrorKind::IsMappable`]), whose address space is fixed; more than 4 PiB
    /// ([`ErrorKind::Config`]); address space that the system refuses ([`ErrorKind::Memory`]).
    /// Nothing has changed then.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("log");
    /// use bifolio::{Cache, ErrorKind, OpenOptions};
    /// let cache = Cache::builder().memory(4 << 20).build()?;
    /// let options = OpenOptions::new().write(true).create(true).len_max(1 << 20);
    /// let log = cache.open(&path, &options)?;
    /// log.set_len(1 << 20)?;
    /// let refused = log.append(b"record").unwrap_err();
    /// assert!(matches!(refused.kind(), ErrorKind::TooLong { .. }));
    ///
    /// log.raise_len_max(1 << 30)?;
    /// assert_eq!(log.append(b"record")?, 1 << 20);
    /// # Ok(())
    /// # }
    /// ```
    pub fn raise_len_max(&self, bytes: u64) -> Result<()> {
        let handle = &self.handle;
        handle.check_writable()?;
        if bytes <= self.len_max() {
            return Ok(());
        }
        handle.check_unmappable("raise len_max")?;
        check_len_max(bytes, 0)?;
        let resizing = handle.inode.lock_resizing();
        if bytes <= self.len_max() {
            // Another thread has raised it further.
            return Ok(());
        }
        resizing.raise_len_max(bytes).map_err(no_table)
    }

    fn cut(&self, resizing: &Resizing<'_>, len_bytes: u64) -> Result<()> {
        let before_bytes = self.len();
        resizing.set_len(len_bytes)?;
        // The last page of a memory file may have been a hole, and been written and swapped out
        // since: then it may be unreadable.
        self.forget_behind(len_bytes).inspect_err(|_| resizing.undo_cut(before_bytes))
    }

    /// Removes everything past the new end of the file, which has been truncated to `len_bytes`
    /// bytes. Changes nothing if it fails, which is possible only for a memory file.
    pub(super) fn forget_behind(&self, len_bytes: u64) -> Result<()> {
        let inode = &self.handle.inode;
        inode.mapping.begin_walk_behind_end();
        self.zero_tail(len_bytes)?;
        inode.remove_folios_from(len_bytes.next_multiple_of(self.folio_bytes()));
        Ok(())
    }

    /// Waits until no other thread changes the length, and prepares the file to grow to
    /// `len_bytes`.
    pub(super) fn begin_growth(&self, len_bytes: u64) -> Result<Growth<'_>> {
        let resizing = self.handle.inode.lock_resizing();
        Ok(Growth { growing: self.uncover(&resizing, len_bytes)?, resizing })
    }

    /// Waits until no other thread changes the length, and prepares the file to grow by
    /// `length_bytes` at its end. Returns the position of the first new byte.
    pub(super) fn begin_append(&self, length_bytes: u64) -> Result<(u64, Growth<'_>)> {
        let resizing = self.handle.inode.lock_resizing();
        let position = self.len();
        let end = self.handle.range_end(position, length_bytes)?;
        self.handle.check_len(end)?;
        Ok((position, Growth { growing: self.uncover(&resizing, end)?, resizing }))
    }

    /// Truncates the file to `len_bytes` again after an append that failed.
    pub(super) fn undo_append(&self, growth: &Growth<'_>, len_bytes: u64) -> Result<()> {
        if self.len() > len_bytes { self.cut(&growth.resizing, len_bytes) } else { Ok(()) }
    }

    /// Prepares the file to grow to `len_bytes` bytes, if it is shorter: zeroes everything that raw
    /// writers have stored past its end, and removes pages that were poisoned for faults on
    /// truncated old_folios. The caller keeps the returned guard until the growth has succeeded or
    /// failed.
    fn uncover(&self, _alone: &Resizing<'_>, len_bytes: u64) -> Result<Growing<'_>> {
        let before_bytes = self.len();
        if len_bytes <= before_bytes {
            return Ok(Growing { page_space: None, uncovered: None });
        }
        let page_space = &self.handle.inode.page_space;
        let mut growing = Growing { page_space: Some(page_space), uncovered: None };
        let purpose = "pages past the end of a file";
        let begun = page_space.begin_growth(before_bytes, len_bytes);
        begun.map_err(|source| ErrorKind::Memory { purpose, source })?;
        let pages = before_bytes.div_ceil(PAGE_BYTES)..len_bytes.div_ceil(PAGE_BYTES);
        for index in page_space.orphaned_among(pages) {
            // A reference to the truncated page exists, and maps see the page: it stays and is
            // zeroed, as for a partial write.
            let end = (index + 1) * PAGE_BYTES;
            if let Err(error) =
                self.handle.lock_folio(index, AccessMode::Write { start: end - 1, end })
            {
                self.handle.inode.remove_folios_from(before_bytes.next_multiple_of(PAGE_BYTES));
                return Err(error);
            }
        }
        if page_space.tracked().is_some() {
            self.zero_tail(before_bytes)?;
            let ends_in_page = !before_bytes.is_multiple_of(PAGE_BYTES);
            growing.uncovered =
                (ends_in_page && !self.is_memory_file()).then_some((self, before_bytes));
        }
        Ok(growing)
    }

    /// Returns a reference to the folio of a memory file that contains `len_bytes`. The bytes past
    /// it must be zeroed in memory, because there is no backing to do it.
    fn hold_tail(&self, len_bytes: u64) -> Result<Option<FolioRef<'_>>> {
        let is_inside = len_bytes & (self.folio_bytes() - 1) != 0;
        if !is_inside || self.handle.inode.store.zeroes_what_is_cut() {
            return Ok(None);
        }
        let found = self.handle.find_folio(len_bytes >> PAGE_SHIFT, AccessMode::Read)?;
        Ok(found.map(|locked| locked.folio))
    }

    /// Zeroes the bytes past the end in the folio that contains the end; in a file with a backing,
    /// only if the folio is resident.
    fn zero_tail(&self, len_bytes: u64) -> Result<()> {
        let inode = &self.handle.inode;
        let head = inode.mapping.head_index(len_bytes >> PAGE_SHIFT);
        if len_bytes == head * PAGE_BYTES {
            return Ok(());
        }
        own_pins::check(inode, &(head..head + 1))?;
        let tail = |lock: &LockedFolio<'_>| len_bytes..(lock.index() + lock.pages()) * PAGE_BYTES;
        if !inode.store.zeroes_what_is_cut() {
            // Resident, unless the page was written and swapped out since the check.
            return self.zero_in_memory(head, tail);
        }
        if let Some(Locked { folio, lock, .. }) = self.handle.find_resident(head) {
            inode.zero_in_place(&folio, &lock, tail(&lock));
        }
        Ok(())
    }
}

/// Attempts at folios that are in use. The pause between attempts is longer than a reader holds a
/// batch.
const ATTEMPTS_MAX: u32 = 10;
const PAUSE: Duration = Duration::from_millis(1);

impl File {
    /// Replaces all folios in `range` of a memory file by one. The length of the range must be a
    /// power of two, at most 2 MiB, and its start a multiple of that. Reads of the range then need
    /// fewer references, its bytes are contiguous, and it is swapped out as a whole (but not read
    /// back as one). Concurrent readers and writers see the same bytes before and after.
    ///
    /// Blocks like a read of the range if pages are swapped out, but does not wait for the memory
    /// of the new folio: if no contiguous memory is free, it asks reclaim for some and fails. A
    /// later call may succeed.
    ///
    /// # Errors
    /// Not a memory file; a range that cannot be a folio, has a hole, is pinned or in use, or does
    /// not fit in free memory ([`ErrorKind::CannotCollapse`]); the errors of a read. The file is
    /// then unchanged.
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
        let mut refusal = CollapseRefusal::InUse;
        for attempt in 0..ATTEMPTS_MAX {
            if attempt > 0 {
                std::thread::sleep(PAUSE);
            }
            // Waits for memory before anything is held, and not afterwards: other callers may wait
            // for the memory that a collapse holds, up to 4 MiB.
            if self.read_in(&range)? {
                return Ok(());
            }
            let Some(new) = self.try_start_large(&range, order)? else {
                return Err(self.cannot_collapse(&range, CollapseRefusal::NoRoom));
            };
            let Some(old) = self.hold_all(&range) else {
                // Evicted again, possibly for the new folio.
                refusal = CollapseRefusal::NoRoom;
                continue;
            };
            if old.len() == 1 || self.try_collapse(old, &new) {
                return Ok(());
            }
            refusal = CollapseRefusal::InUse;
        }
        Err(self.cannot_collapse(&range, refusal))
    }

    /// Allocates a folio of this order for the range, not in the table yet. Returns `None` if no
    /// frames are free for it.
    fn try_start_large(&self, range: &Range<u64>, order: u8) -> Result<Option<FolioRef<'_>>> {
        let kind = FrameKind::Arena { order, near: None };
        let found = self.handle.reclaim.allocate_at_once(kind)?;
        let folios = &self.handle.inode.memory.folios;
        Ok(found.map(|id| folios.start(id, 0, range.start >> PAGE_SHIFT, order)))
    }

    fn collapse_order(&self, range: &Range<u64>) -> Result<u8> {
        let refuse = || self.cannot_collapse(range, CollapseRefusal::NotAFolio);
        let length = range.end.checked_sub(range.start).ok_or_else(refuse)?;
        let order = config::folio_order(length).map_err(|_| refuse())?;
        let is_aligned = range.start.is_multiple_of(length) && length >= self.folio_bytes();
        let len_bytes = self.len().next_multiple_of(self.folio_bytes());
        if is_aligned && range.end <= len_bytes { Ok(order) } else { Err(refuse()) }
    }

    /// Reads in all pages of the range, one by one. Returns `true` if a single folio already holds
    /// them all.
    fn read_in(&self, range: &Range<u64>) -> Result<bool> {
        let mut index = range.start >> PAGE_SHIFT;
        let mut folios = 0;
        while index * PAGE_BYTES < range.end {
            let Some(found) = self.handle.find_folio(index, AccessMode::NoAlloc)? else {
                return Err(self.cannot_collapse(range, CollapseRefusal::Hole));
            };
            index = found.lock.index() + found.lock.pages();
            folios += 1;
        }
        Ok(folios == 1)
    }

    /// Returns references to all folios of the range, in order, if all are resident. Never waits.
    fn hold_all(&self, range: &Range<u64>) -> Option<Vec<FolioRef<'_>>> {
        let inode = &self.handle.inode;
        let mut held: Vec<FolioRef<'_>> = Vec::new();
        let mut index = range.start >> PAGE_SHIFT;
        while index * PAGE_BYTES < range.end {
            let found = inode.mapping.try_get_folio(&inode.memory.folios, index);
            let Some(Lookup::Folio(folio)) = found else { return None };
            index = folio.folio().index() + folio.folio().pages();
            held.push(folio);
        }
        Some(held)
    }

    /// Returns `true` if the collapse succeeded. It fails while another thread uses one of the
    /// folios.
    fn try_collapse(&self, old: Vec<FolioRef<'_>>, new: &FolioRef<'_>) -> bool {
        let inode = &*self.handle.inode;
        let memory = &*inode.memory;
        // References of LRU batches would prevent the freeze.
        memory.lru.drain_all(&memory.folios);
        let Some(old_folios) = self.lock_all(old) else { return false };
        // The new folio is dirty if one of the old ones is.
        let Some(_room) = inode.room_for_collapse(&old_folios) else { return false };
        let lock = new.lock();
        let (Some(gone), Some(for_lru)) = (inode.collapse(old_folios, new, &lock), new.try_clone())
        else {
            return false;
        };
        // A memory file has no syncs, so no thread looks for its bytes by the dirty list; the new
        // folio stays locked, and the old ones are frozen.
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

    /// Locks all folios of a run. Returns `None` unless all can be locked and all belong to the
    /// file.
    fn lock_all<'a>(&self, folios: Vec<FolioRef<'a>>) -> Option<Vec<OldFolio<'a>>> {
        let lock = |folio: FolioRef<'a>| {
            let lock = folio.try_lock()?;
            let is_ours = lock.owner() == self.handle.inode.address();
            let is_still = lock.flags.get(Flag::Uptodate) && !lock.flags.write_state().is_writing();
            (is_ours && is_still).then_some(OldFolio { lock, folio })
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Cache;
    use crate::file::fill::Locked;
    use crate::io::{DiskFile, DiskOptions};
    use crate::page::WriteState;
    use crate::sync::Ordering::Relaxed;
    use crate::sync::test_hook;
    use crate::sys::probe::Features;
    use std::fs;
    use std::sync::Arc;

    /// The page that will contain the end was a hole when the truncation checked; it was written
    /// and swapped out before the length changed.
    #[test]
    fn a_cut_whose_last_page_cannot_be_read_leaves_the_length() {
        const PAGES: u64 = 600;
        let directory = tempfile::tempdir().unwrap();
        let swap = directory.path().join("swap");
        let options =
            DiskOptions { read: true, write: true, create: true, ..DiskOptions::default() };
        let storage = DiskFile::open_with(&swap, &options, &Features::probe(&[])).unwrap();
        let builder = Cache::builder().memory(1 << 20).swap_backing(Arc::new(storage));
        let cache = builder.build().unwrap();
        let file = cache.memory_file("cut").unwrap();
        for index in 0..PAGES {
            file.write_all_at(&[7; PAGE_BYTES as usize], index * PAGE_BYTES).unwrap();
        }
        let inode = &file.handle.inode;
        let is_swapped_out = |index| !inode.mapping.table().load(index, Relaxed).is_folio();
        let swapped = (0..PAGES).find(|index| is_swapped_out(*index)).unwrap();
        // The swap is replaced below; until the end of the test it must not be written.
        while !file.handle.reclaim.is_idle() {
            std::thread::yield_now();
        }
        let bytes = fs::read(&swap).unwrap();
        fs::write(&swap, &bytes[..PAGE_BYTES as usize]).unwrap();
        let len_bytes = swapped * PAGE_BYTES + 100;
        let resizing = inode.lock_resizing();
        let error = file.cut(&resizing, len_bytes).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::SwapRead { .. }), "{error:?}");
        drop(resizing);
        assert_eq!(file.len(), PAGES * PAGE_BYTES);
        fs::write(&swap, &bytes).unwrap();
        let mut found = vec![0; (PAGES * PAGE_BYTES) as usize];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found.iter().all(|byte| *byte == 7), "bytes past the new end are lost");
        file.set_len(len_bytes).unwrap();
        assert_eq!(file.len(), len_bytes);
    }

    /// During the check for data at a page, the page is swapped out, and its frame is reused for a
    /// page that was allocated and never written.
    #[test]
    fn data_whose_frame_was_reused_is_not_a_hole() {
        let directory = tempfile::tempdir().unwrap();
        let builder = Cache::builder().memory(1 << 20).swap_directory(directory.path());
        let cache = builder.build().unwrap();
        let file = cache.memory_file("data").unwrap();
        let other = cache.memory_file("allocated").unwrap();
        other.set_len(4 << 20).unwrap();
        file.write_all_at(&[7; PAGE_BYTES as usize], 0).unwrap();
        let inode = Arc::clone(&file.handle.inode);
        let id = {
            let found = inode.mapping.get_folio(&inode.memory.folios, 0);
            let Lookup::Folio(folio) = found else { panic!("{found:?}") };
            let lock = folio.lock();
            // As during a write: the Entry does not tell that the page has data.
            std::mem::forget(inode.mapping.begin_write_section(&lock, 0..1));
            Locked { lock, folio: folio.try_clone().unwrap(), was_resident: true }.detach()
        };
        test_hook::set("before a folio is looked at", move || {
            let locked = Locked::adopt(&inode.memory.folios, id);
            inode.mapping.restore_ready(&locked.lock);
            drop(locked);
            let table = other.handle.inode.mapping.table();
            let takes_the_frame = |index: u64| {
                other.allocate(index * PAGE_BYTES..(index + 1) * PAGE_BYTES).unwrap();
                table.load(index, Relaxed).folio_id() == id
            };
            assert!((0..1024).any(takes_the_frame), "the frame was not used again");
        });
        assert_eq!(file.seek_hole(0).unwrap(), Some(PAGE_BYTES));
        assert!(test_hook::has_run());
    }

    /// Free slots exist, but none is adjacent to another.
    fn check_slots_in_pieces(swap_bytes_max: u64, can_grow: bool) {
        let directory = tempfile::tempdir().unwrap();
        let builder = Cache::builder().memory(4 << 20).swap_directory(directory.path());
        let cache = builder.swap_max(swap_bytes_max).build().unwrap();
        let file = cache.memory_file("pieces").unwrap();
        file.write_all_at(&[7; 20 * PAGE_BYTES as usize], 0).unwrap();
        file.collapse(0..16 * PAGE_BYTES).unwrap();
        let inode = &file.handle.inode;
        let swap = inode.store.slots().unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| swap.take(1, 1)).collect();
        taken.iter().step_by(2).for_each(|run| swap.give_back(run.first, run.pages));
        inode.memory.lru.drain_all(&inode.memory.folios);
        let folio_at = |index| match inode.mapping.get_folio(&inode.memory.folios, index) {
            Lookup::Folio(folio) => folio,
            other => panic!("{other:?}"),
        };
        let places = [0, 16, 17, 18, 19];
        drop(inode.write_out_folios(places.map(folio_at).into()));
        let is_clean = |index| folio_at(index).folio().flags.write_state() == WriteState::Clean;
        assert_eq!(places.map(is_clean), [can_grow, true, true, true, true]);
    }

    #[test]
    fn a_folio_without_adjacent_slots_blocks_no_other() {
        check_slots_in_pieces(2 << 20, false);
    }

    #[test]
    fn a_folio_without_adjacent_slots_makes_the_swap_grow() {
        check_slots_in_pieces(64 << 20, true);
    }
}

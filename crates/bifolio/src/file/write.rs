//! Writes.
//!
//! A write goes folio by folio, with the folio lock and a write section. It ends in memory; it is
//! durable after a sync. It never reads a page that it replaces whole. A write that makes the file
//! longer holds a [`Growth`] from there to its end.
//!
//! # Safety
//! Writes into frames whose lock it holds, through `sys::copy`.
#![allow(unsafe_code)]

use super::File;
use super::mapper::Growing;
use crate::dirt::ChangeLsn;
use crate::error::{Error, Result};
use crate::fill::{AccessMode, Locked};
use crate::inode::{NoRoom, Resizing, removal};
use crate::page::{PAGE_BYTES, PAGE_SHIFT, pages_of};
use crate::stats::Counter;
use crate::sync::CallScope;
use crate::sys::copy;

const PAGE_LINES: usize = PAGE_BYTES as usize / copy::LINE_BYTES;

/// Reason why a write of one folio has changed nothing.
#[derive(Debug)]
pub(super) enum Unwritten {
    /// The file was truncated: it must grow first.
    MustResize,
    /// The folio cannot become dirty yet.
    NoRoom(NoRoom),
    Failed(Error),
}

impl From<NoRoom> for Unwritten {
    fn from(no_room: NoRoom) -> Self {
        Self::NoRoom(no_room)
    }
}

impl From<Error> for Unwritten {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

pub(super) type Copied = std::result::Result<(), Unwritten>;

/// Part of a write that lies in one folio.
#[derive(Debug)]
pub(super) struct Piece<'b> {
    pub(super) bytes: &'b [u8],
    pub(super) position: u64,
    /// The write continues after these bytes.
    pub(super) follows: bool,
    pub(super) lsn: Option<u64>,
}

/// Growth in progress: no other thread changes the length.
#[derive(Debug)]
pub(super) struct Growth<'a> {
    pub(super) growing: Growing<'a>,
    pub(super) resizing: Resizing<'a>,
}

impl Growth<'_> {
    /// Sets the length to `len_bytes` if the file is shorter. Its last bytes must be in place.
    pub(super) fn reach(&mut self, len_bytes: u64) {
        self.resizing.extend(len_bytes);
        self.growing.end();
    }
}

impl File {
    /// Writes `buffer` at `position` and returns the number of bytes written. A write past the end
    /// of file grows the file; a gap reads as zeros. The number is smaller than the length of
    /// `buffer` only if an error occurred on the way: a write of the rest returns it.
    ///
    /// Blocks for I/O if it replaces part of a folio that is not resident, while the folio is being
    /// written back, and, for a page that is not dirty yet, while too much is dirty
    /// ([`dirty_max`](crate::CacheBuilder::dirty_max)).
    ///
    /// # Errors
    /// An I/O error of the storage, with file, position and length; a cache full of pinned pages; a
    /// handle that is not open for writing; a length beyond the maximum that the file was opened
    /// with; [`Unwritable`](crate::ErrorKind::Unwritable), with the error of the storage as its
    /// source, if the storage accepts no writes and the limit of dirty bytes is reached.
    pub fn write_at(&self, buffer: &[u8], position: u64) -> Result<usize> {
        self.write_with(buffer, position, None)
    }

    /// Writes like [`File::write_at`], with the LSN of the change, if the file has a write gate.
    pub(super) fn write_with(
        &self,
        buffer: &[u8],
        position: u64,
        lsn: Option<u64>,
    ) -> Result<usize> {
        let handle = &self.handle;
        self.check_changeable()?;
        let end = handle.range_end(position, buffer.len() as u64)?;
        if buffer.is_empty() {
            return Ok(0);
        }
        handle.check_len(end)?;
        // The right to change the length ends with the statement.
        let written = self.write_folios(buffer, position, lsn, &mut None);
        match written {
            (0, Some(error)) => Err(error),
            // The next call, which starts at the first byte not written, returns the error.
            (done, _) => {
                self.note_written(position..position + done as u64);
                Ok(done)
            }
        }
    }

    /// Writes `buffer` folio by folio. Returns the number of bytes written, and the error that
    /// ended the write early.
    fn write_folios<'a>(
        &'a self,
        buffer: &[u8],
        position: u64,
        lsn: Option<u64>,
        growth: &mut Option<Growth<'a>>,
    ) -> (usize, Option<Error>) {
        let end = position + buffer.len() as u64;
        let is_mapped = super::is_mapped(buffer);
        let call = CallScope::begin();
        let (mut done, mut failure) = (0, None);
        while done < buffer.len() && failure.is_none() {
            let at = position + done as u64;
            let in_folio = at & (self.folio_bytes() - 1);
            let length = (self.folio_bytes() - in_folio).min((buffer.len() - done) as u64);
            let bytes = &buffer[done..done + length as usize];
            let copied = is_mapped.then(|| bytes.to_vec());
            let bytes = copied.as_deref().unwrap_or(bytes);
            let follows = buffer.len() - done > bytes.len();
            let piece = Piece { bytes, position: at, follows, lsn };
            // Must follow the copy from the caller's buffer: a buffer in a map, past the end of its
            // file, is refused.
            match self.write_or_grow(&piece, end, growth) {
                Ok(()) => {
                    call.note_page();
                    done += bytes.len();
                }
                Err(error) => failure = Some(error),
            }
        }
        self.handle.inode.memory.counters.add(Counter::WriteBytes, done as u64);
        (done, failure)
    }

    /// Appends `buffer` to the file and returns the position of its first byte. Concurrent appends
    /// are serialized: each gets its own range, without gaps between them. Other writes that grow
    /// the file wait, too.
    ///
    /// Blocks like [`File::write_at`], and while another thread changes the length of the file.
    /// Durable after the next sync. The bytes become visible folio by folio.
    ///
    /// # Errors
    /// Fails like [`File::write_at`]. The file then has its old length, unless the storage refuses
    /// to truncate it: then part of `buffer` stays in the file.
    ///
    /// ```
    /// let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let log = cache.memory_file("log")?;
    /// assert_eq!(log.append(b"first")?, 0);
    /// assert_eq!(log.append(b"second")?, 5);
    /// # Ok::<(), bifolio::Error>(())
    /// ```
    pub fn append(&self, buffer: &[u8]) -> Result<u64> {
        self.append_with(buffer, None)
    }

    /// Appends like [`File::append`], with the LSN of the change, if the file has a write gate. On
    /// an error the file is cut back to its former length.
    pub(super) fn append_with(&self, buffer: &[u8], lsn: Option<u64>) -> Result<u64> {
        self.check_changeable()?;
        let resizing = self.handle.inode.lock_resizing();
        let position = self.len();
        let end = self.handle.range_end(position, buffer.len() as u64)?;
        self.handle.check_len(end)?;
        self.handle.check_growth(end)?;
        let mut growth = Some(Growth { growing: self.uncover(&resizing, end)?, resizing });
        let (_, failure) = self.write_folios(buffer, position, lsn, &mut growth);
        let Some(error) = failure else {
            drop(growth);
            self.note_written(position..end);
            return Ok(position);
        };
        if let Some(growth) = growth
            && self.len() > position
            && let Err(kept) = self.cut(&growth.resizing, position)
        {
            log::warn!("{kept}; part of a failed append stays in the file at position {position}");
        }
        Err(error)
    }

    /// Writes all of `buffer` at `position`.
    ///
    /// # Errors
    /// Fails like [`File::write_at`]; part of `buffer` may have been written then.
    pub fn write_all_at(&self, buffer: &[u8], position: u64) -> Result<()> {
        let _call = CallScope::begin();
        let mut done = 0;
        while done < buffer.len() {
            done += self.write_at(&buffer[done..], position + done as u64)?;
        }
        Ok(())
    }

    /// Writes a piece of a write that ends at `end`. If the file is shorter, it starts to grow.
    fn write_or_grow<'a>(
        &'a self,
        piece: &Piece<'_>,
        end: u64,
        growth: &mut Option<Growth<'a>>,
    ) -> Result<()> {
        loop {
            if growth.is_none() && end > self.len() {
                *growth = Some(self.begin_growth(end)?);
            }
            match self.write_folio(piece, growth.as_mut()) {
                Ok(()) => return Ok(()),
                Err(Unwritten::MustResize) => {}
                Err(Unwritten::NoRoom(no_room)) => {
                    self.handle.make_room(no_room, piece.position, piece.bytes.len() as u64)?;
                }
                Err(Unwritten::Failed(error)) => return Err(error),
            }
        }
    }

    /// Writes a piece, if the file is long enough or `growth` is held.
    fn write_folio(&self, piece: &Piece<'_>, growth: Option<&mut Growth<'_>>) -> Copied {
        let inode = &self.handle.inode;
        let end = piece.position + piece.bytes.len() as u64;
        let access = AccessMode::Write { start: piece.position, end };
        let locked = self.handle.fill().lock_folio(piece.position >> PAGE_SHIFT, access)?;
        // Checked under the folio lock: a truncation takes the lock of the folio, or removes the
        // folio from the table.
        if end > inode.mapping.len_bytes() && growth.is_none() {
            self.undo_write(locked);
            return Err(Unwritten::MustResize);
        }
        if let Err(unwritten) = self.copy_into(&locked, piece) {
            self.undo_write(locked);
            return Err(unwritten);
        }
        if let Some(growth) = growth {
            growth.reach(end);
        }
        Ok(())
    }

    /// Copies a piece into a locked folio, which is counted as dirty before its bytes change. A
    /// folio that is not uptodate has no reader yet: its rest is zeroed. A page in place is
    /// installed whole.
    pub(super) fn copy_into(&self, locked: &Locked<'_>, piece: &Piece<'_>) -> Copied {
        let inode = &self.handle.inode;
        let Piece { bytes, position, follows, lsn } = *piece;
        let Locked { folio, lock, .. } = locked;
        if !locked.is_uptodate()
            && let Some(mapped) = &inode.mapped
        {
            // A store to the page would fault, and the thread that serves the fault would wait for
            // the lock that this one holds. The old bytes, possibly in the swap, are the content of
            // the page until it is installed.
            let room = inode.make_room(lock)?;
            mapped.install_page(inode, lock, bytes, true)?;
            room.mark_dirty(folio, lock);
            return Ok(());
        }
        let end = position + bytes.len() as u64;
        let target = self.address_in(folio, position);
        inode.try_mark_dirty(folio, lock, lsn.map(ChangeLsn::Known))?;
        if locked.is_uptodate() {
            let pages = pages_of(&(position..end));
            let _section = inode.mapping.begin_write_section(&locked.lock, pages);
            // SAFETY: inside a frame whose lock and write section we hold; `bytes` is not in it.
            unsafe { copy::copy_in(target, bytes) };
            #[cfg(all(test, not(loom)))]
            crate::sync::test_hook::reach("after bytes were written");
        } else {
            if follows {
                // Adjacent pages have adjacent frames. Releasing the folio lock waits for the
                // stores to this page, which delays those to the next one without a prefetch.
                copy::prefetch_lines_to_write(target.wrapping_add(bytes.len()), PAGE_LINES);
            }
            // SAFETY: inside a frame whose lock we hold and which no reader can use yet.
            unsafe { copy::copy_in(target, bytes) };
            let end_in_folio = end - lock.index() * PAGE_BYTES;
            inode.zero_folio(&locked.folio, &locked.lock, end_in_folio..u64::MAX);
            inode.mapping.mark_uptodate(lock);
        }
        Ok(())
    }

    /// Cleans up a folio whose write failed. If it was made for this write, no reader may see the
    /// old bytes of its frame, and it must not stay past the end of file (MAPPING-4).
    pub(super) fn undo_write(&self, locked: Locked<'_>) {
        let inode = &self.handle.inode;
        let (is_uptodate, was_resident) = (locked.is_uptodate(), locked.was_resident);
        let Locked { folio, lock, .. } = locked;
        if was_resident {
            // Another thread has it, or a truncation in progress removes it.
        } else if !is_uptodate {
            drop(inode.remove_unfilled(&folio, &lock));
        } else if inode.mapping.was_cut(&lock) {
            removal::remove_unwanted(inode, folio, lock);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::io::{DiskFile, DiskOptions};
    use crate::page::{FolioId, Lookup, WriteState};
    use crate::sync::Ordering::Relaxed;
    use crate::sync::test_hook;
    use crate::sys::probe::Features;
    use crate::writeback::{Writeback, stays_listed_for};
    use crate::{Cache, Feature, OpenOptions};
    use bifolio_testing::skip;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    use std::fs;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    /// The copy of a page in the swap is its content until the replacing bytes are in place.
    #[cfg(feature = "maps")]
    #[test]
    fn a_page_that_cannot_be_installed_keeps_what_was_swapped() {
        const PAGES: u64 = 600;
        if !Features::probe(&[]).has(Feature::UserFaults) {
            return skip(Feature::UserFaults, "files cannot be mapped");
        }
        let directory = tempfile::tempdir().unwrap();
        let builder = Cache::builder().memory(1 << 20).swap_directory(directory.path());
        let cache = builder.build().unwrap();
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let file = cache.memory_file_with("swapped", &options).unwrap();
        let page = [7; PAGE_BYTES as usize];
        (0..PAGES).for_each(|index| file.write_all_at(&page, index * PAGE_BYTES).unwrap());
        let inode = &file.handle.inode;
        let entry = |index| inode.mapping.table().load(index, Relaxed);
        let index = (0..PAGES).find(|index| inode.store.is_absent(entry(*index))).unwrap();
        let address = inode.page_space.address(FolioId(0), index).cast();
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // An address that the kernel does not serve faults for refuses all pages.
        // SAFETY: a page of the region that is not present, and that no thread accesses below.
        unsafe { mmap_anonymous(address, page.len(), ProtFlags::empty(), flags) }.unwrap();
        let error = file.write_at(&[8; PAGE_BYTES as usize], index * PAGE_BYTES).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Memory, "{error:?}");
        assert!(inode.store.is_absent(entry(index)), "the page is a hole: {:?}", entry(index));
        assert_eq!(cache.stats().memory.dirty_bytes, 0);
    }

    #[test]
    fn a_dirty_file_is_listed_during_every_round_of_the_flusher() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [1; PAGE_BYTES as usize]).unwrap();
        let builder =
            Cache::builder().memory(1 << 20).dirty_age_max(Duration::from_millis(3_600_000));
        let cache = builder.build().unwrap();
        let file = cache.open(&path, &OpenOptions::new().read(true).write(true)).unwrap();
        file.write_all_at(&[2; 8], 0).unwrap();
        assert!(stays_listed_for(&file.handle.inode, 2_000));
    }

    /// A page that a sync waits to write is frozen. The sync waits until it is not, after the
    /// writes that it has started are complete.
    #[test]
    fn a_sync_that_waits_for_a_frozen_page_keeps_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [1; 4 * PAGE_BYTES as usize]).unwrap();
        let builder =
            Cache::builder().memory(1 << 20).dirty_age_max(Duration::from_millis(3_600_000));
        let cache = builder.build().unwrap();
        let file = cache.open(&path, &OpenOptions::new().read(true).write(true)).unwrap();
        for index in [0, 3] {
            file.write_all_at(b"dirty", index * PAGE_BYTES).unwrap();
        }
        let inode = &file.handle.inode;
        let (mapping, folios) = (&inode.mapping, &inode.memory.folios);
        inode.memory.lru.drain_all(folios);
        let [first, last] = [0, 3].map(|index| {
            let found = mapping.get_folio(folios, index);
            let Lookup::Folio(folio) = found else { panic!("{found:?}") };
            folio
        });
        let lock = last.lock();
        let frozen = mapping.begin_eviction(last, &lock).unwrap();
        std::thread::scope(|scope| {
            let syncing = scope.spawn(|| file.sync_data());
            let is_over = || {
                let lock = first.try_lock();
                lock.is_some_and(|lock| lock.flags.write_state() == WriteState::Clean)
            };
            let begun = Instant::now();
            while !is_over() && begun.elapsed() < Duration::from_secs(30) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let (was_over, is_waiting) = (is_over(), !syncing.is_finished());
            drop(mapping.cancel_eviction(frozen, &lock));
            drop(lock);
            syncing.join().unwrap().unwrap();
            assert!(was_over && is_waiting, "{was_over} {is_waiting}");
        });
    }

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
        let builder = Cache::builder().memory(1 << 20).memory_max(4 << 20);
        let cache = builder.swap_backing(Arc::new(storage)).build().unwrap();
        let file = cache.memory_file("cut").unwrap();
        for index in 0..PAGES {
            file.write_all_at(&[7; PAGE_BYTES as usize], index * PAGE_BYTES).unwrap();
        }
        let inode = &file.handle.inode;
        let is_swapped_out = |index| !inode.mapping.table().load(index, Relaxed).is_folio();
        let swapped = (0..PAGES).find(|index| is_swapped_out(*index)).unwrap();
        // The swap is replaced below; until the end of the test it must not be written. With
        // memory for all pages, there is no reason to.
        cache.set_memory(4 << 20).unwrap();
        while !file.handle.reclaim.is_idle() {
            std::thread::yield_now();
        }
        let bytes = fs::read(&swap).unwrap();
        fs::write(&swap, &bytes[..PAGE_BYTES as usize]).unwrap();
        let len_bytes = swapped * PAGE_BYTES + 100;
        let resizing = inode.lock_resizing();
        let error = file.cut(&resizing, len_bytes).unwrap_err();
        assert!(error.kind() == crate::ErrorKind::SwapRead, "{error:?}");
        drop(resizing);
        assert_eq!(file.len(), PAGES * PAGE_BYTES);
        fs::write(&swap, &bytes).unwrap();
        let mut found = vec![0; (PAGES * PAGE_BYTES) as usize];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found.iter().all(|byte| *byte == 7), "bytes past the new end are lost");
        file.set_len(len_bytes).unwrap();
        assert_eq!(file.len(), len_bytes);
    }

    #[test]
    fn a_page_that_is_being_written_is_closed_to_readers() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.memory_file("written").unwrap();
        file.write_all_at(&[7; 8], 0).unwrap();
        let reader = file.clone();
        test_hook::set("after bytes were written", move || {
            let error = reader.try_read_at(&mut [0; 8], 0).unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::WouldBlock, "{error:?}");
        });
        file.write_all_at(&[8; 8], 0).unwrap();
        assert!(test_hook::has_run());
    }

    /// When a write of all bytes of a page has decided to read nothing, another thread appends to
    /// the page, and it goes out of memory.
    #[test]
    fn bytes_that_are_appended_during_a_write_of_the_page_stay() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        fs::write(&path, [7; 100]).unwrap();
        let file = cache.open(&path, &OpenOptions::new().write(true)).unwrap();
        let other = file.clone();
        test_hook::set("before a page is claimed", move || {
            other.write_all_at(&[8; 100], 100).unwrap();
            other.sync_data().unwrap();
            other.invalidate(..).unwrap();
        });
        file.write_all_at(&[9; 100], 0).unwrap();
        assert!(test_hook::has_run());
        let mut found = [0; 200];
        file.read_exact_at(&mut found, 0).unwrap();
        assert_eq!((&found[..100], &found[100..]), (&[9; 100][..], &[8; 100][..]));
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
        other.set_len(64 << 20).unwrap();
        file.write_all_at(&[7; PAGE_BYTES as usize], 0).unwrap();
        let inode = Arc::clone(&file.handle.inode);
        let owner = file.clone();
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
            // It is the first to be evicted from now on.
            owner.evict(..).unwrap();
            let table = other.handle.inode.mapping.table();
            let takes_the_frame = |index: u64| {
                other.allocate(index * PAGE_BYTES..(index + 1) * PAGE_BYTES).unwrap();
                table.load(index, Relaxed).folio_id() == id
            };
            // A free frame may lie on the list of another processor for a while.
            assert!((0..16_384).any(takes_the_frame), "the frame was not used again");
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
        file.write_all_at(&[7; 4 * PAGE_BYTES as usize], 0).unwrap();
        let options = crate::OpenOptions::new().read(true).write(true).folio_bytes(16 * PAGE_BYTES);
        let large = cache.memory_file_with("large", &options).unwrap();
        large.write_all_at(&[7; 16 * PAGE_BYTES as usize], 0).unwrap();
        let inode = &file.handle.inode;
        let swap = inode.store.slots().unwrap();
        let taken: Vec<_> = std::iter::from_fn(|| swap.slots.take(1, 1)).collect();
        taken.iter().step_by(2).for_each(|run| swap.give_back(run.first, run.pages));
        inode.memory.lru.drain_all(&inode.memory.folios);
        let write_out = |file: &File, indexes: &[u64]| {
            let inode = &file.handle.inode;
            let folio_at = |index| match inode.mapping.get_folio(&inode.memory.folios, index) {
                Lookup::Folio(folio) => folio,
                other => panic!("{other:?}"),
            };
            let folios = indexes.iter().map(|index| folio_at(*index)).collect();
            drop(Writeback::of(inode).write_out_folios(folios));
            let state = |index| folio_at(index).folio().flags.write_state();
            indexes.iter().all(|index| state(*index) == WriteState::Clean)
        };
        assert_eq!(write_out(&large, &[0]), can_grow);
        assert!(write_out(&file, &[0, 1, 2, 3]));
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

//! Changes of the length of a file: truncation and growth.
//!
//! Changes of the length and of the backing happen while no write-back is in flight (WRITEBACK-4).
//! A truncation first sets the length and truncates the backing, then zeroes the rest of the folio
//! that contains the end (FILE-1), then removes the folios past the end, dirty or not. If the
//! backing or the swap fails, the old length is restored and nothing is lost.

use super::File;
use super::open::no_table;
use super::options::check_len_max;
use crate::error::Result;
use crate::fill::{AccessMode, Locked, own_pins};
use crate::inode::Resizing;
use crate::io::FallocateMode;
use crate::maps::mappable::Growing;
use crate::page::{FolioRef, LockedFolio, PAGE_BYTES, PAGE_SHIFT};
use std::ops::Range;

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

    pub(super) fn fallocate(&self, mode: FallocateMode, bytes: Range<u64>) -> Result<()> {
        self.resizing.fallocate(mode, bytes)
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
            return resizing.set_len(len_bytes);
        }
        own_pins::check(inode, &(inode.mapping.head_index(len_bytes >> PAGE_SHIFT)..u64::MAX))?;
        // A truncation must not fail later because it cannot read the bytes it has to zero.
        let _tail = self.hold_tail(len_bytes)?;
        self.cut(&resizing, len_bytes)
    }

    /// Returns the length in bytes that the file may grow to:
    /// [`OpenOptions::len_max`](crate::OpenOptions::len_max) of the first open, or as raised since.
    #[doc(hidden)]
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
    /// ([`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported)), whose address space is fixed;
    /// more than 4 PiB ([`ErrorKind::Config`](crate::ErrorKind::Config)); address space that the
    /// system refuses ([`ErrorKind::Memory`](crate::ErrorKind::Memory)). Nothing has changed then.
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
    /// assert_eq!(refused.kind(), ErrorKind::TooLong);
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

    /// Returns a reference to the folio of a memory file that contains `len_bytes`. The bytes past
    /// it must be zeroed in memory, because there is no backing to do it.
    fn hold_tail(&self, len_bytes: u64) -> Result<Option<FolioRef<'_>>> {
        let is_inside = len_bytes & (self.folio_bytes() - 1) != 0;
        if !is_inside || self.handle.inode.store.zeroes_what_is_cut() {
            return Ok(None);
        }
        let found = self.handle.fill().find_folio(len_bytes >> PAGE_SHIFT, AccessMode::Read)?;
        Ok(found.map(|locked| locked.folio))
    }

    /// Zeroes the bytes past the end in the folio that contains the end; in a file with a backing,
    /// only if the folio is resident.
    pub(crate) fn zero_tail(&self, len_bytes: u64) -> Result<()> {
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
        if let Some(Locked { folio, lock, .. }) = self.handle.fill().find_resident(head) {
            inode.zero_in_place(&folio, &lock, tail(&lock));
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Cache;
    use crate::fill::Locked;
    use crate::io::{DiskFile, DiskOptions};
    use crate::page::{Lookup, WriteState};
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
            drop(inode.write_out_folios(indexes.iter().map(|index| folio_at(*index)).collect()));
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

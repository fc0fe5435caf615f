//! Changes of the length of a file, and removal of pages: truncation, punched holes, the last
//! close.
//!
//! All changes of the length go through [`Resizing`], which proves that one thread makes them. They
//! truncate or grow the backing, too.
//!
//! | change | caller | the file's length | the backing's length |
//! |---|---|---|---|
//! | [`Resizing::extend`] | writes, `allocate` | after the bytes are in place | by write-outs |
//! | [`Resizing::fallocate`] | `allocate` | then | first: it may refuse |
//! | [`Resizing::set_len`], shorter | `set_len` | first: readers see no missing bytes | then |
//! | [`Resizing::set_len`], longer | `set_len` | then | first: it may refuse |
//! | [`Inode::extend_backing`] | syncs of a range | stays | as the file's, up to the range's end |
//! | [`Inode::extend_backing`] | loss of a discarded page | stays | as the file's, up to its end |
//! | [`Resizing::clear`] | `punch_hole`, `zero_range` | stays | as the file's, at its end |
//! | [`Resizing::undo_cut`] | a failed truncation | as before | as before |
//! | [`Resizing::cut_to_backing`] | `discard_dirty` | as the backing's, if longer | is queried |
//! | [`Resizing::query_backing`] | `refresh_len` | as the backing's, if longer | is queried |
//!
//! A backing is shorter than its file only while the last folio of the file is dirty. So each way
//! to drop that folio without a write-out changes the backing's length, too, or the file's.
//!
//! Lock order: `resizing`, then folio locks, one at a time and not during a change, then `cutting`.
//! `set_len` holds `cutting` exclusively, so that it meets no write-out: write-outs end at the
//! length (WRITEBACK-4), and the kernel's direct writes fail during a change of the length, with
//! bytes lost. So the store's record of the backing's length changes in two places: write-outs
//! raise it with `cutting` shared, and it is set here with `cutting` exclusive.
//!
//! Folios in place are gathered, frozen, until several can be unmapped together
//! ([`Removal`]). Other threads wait for a frozen folio. So this thread waits for nothing while it
//! has any: before it waits, it unmaps those that are gathered. (The owner of a `PageRefMut` on the
//! next folio may need one of them.)
use super::Inode;
use super::mapped::{PinnedPages, Removal};
use crate::error::Result;
use crate::page::{ALL_BYTES, Entry, Flag, FolioRef, LockedFolio, Lookup, PAGE_BYTES};
use crate::sync::{MutexGuard, Ordering, blocking};
use std::cell::Cell;
use std::ops::Range;

/// Exclusive right to change the length of a file.
#[derive(Debug)]
pub(crate) struct Resizing<'a> {
    pub(super) inode: &'a Inode,
    _alone: MutexGuard<'a, ()>,
}

impl Inode {
    /// Waits until no other thread changes the length. The caller has no folio locked.
    pub(crate) fn lock_resizing(&self) -> Resizing<'_> {
        blocking::check_user("`resizing`");
        Resizing { inode: self, _alone: self.resizing.lock() }
    }

    /// Acts as [`Self::lock_resizing`]; returns `None` if it would have to wait.
    pub(crate) fn try_lock_resizing(&self) -> Option<Resizing<'_>> {
        Some(Resizing { inode: self, _alone: self.resizing.try_lock()? })
    }

    /// Extends the backing with zeros to the end of the file, or to `end_bytes` if that comes
    /// first. A later write-out would extend it, too, but may come too late. Blocks for write-outs.
    pub(crate) fn extend_backing(&self, end_bytes: u64) -> Result<()> {
        if self.store.missing_end(end_bytes.min(self.mapping.len_bytes())).is_none() {
            return Ok(());
        }
        blocking::check("`cutting`, and the backing");
        let _no_write_out = self.cutting.write();
        self.extend_backing_alone(end_bytes)
    }

    /// Extends the backing like [`Self::extend_backing`]. The caller holds `cutting` exclusively.
    pub(super) fn extend_backing_alone(&self, end_bytes: u64) -> Result<()> {
        let missing_end = self.store.missing_end(end_bytes.min(self.mapping.len_bytes()));
        missing_end.map_or(Ok(()), |end_bytes| self.store.set_len(end_bytes))
    }
}

impl Resizing<'_> {
    /// Raises the maximum length to `len_max_bytes`, which is more than before. Changes nothing if
    /// the kernel refuses the address space.
    pub(crate) fn raise_len_max(&self, len_max_bytes: u64) -> std::io::Result<()> {
        self.inode.mapping.reserve(len_max_bytes)?;
        // Release: pairs with the Acquire in `len_max_bytes`: a thread that sees the new limit
        // finds the Entries below it.
        self.inode.len_max_bytes.store(len_max_bytes, Ordering::Release);
        Ok(())
    }

    /// Sets the length to `len_bytes` if the file is shorter. The new bytes are in memory, or
    /// zeros.
    pub(crate) fn extend(&self, len_bytes: u64) {
        let mapping = &self.inode.mapping;
        if len_bytes > mapping.len_bytes() {
            mapping.set_len_bytes(len_bytes);
        }
    }

    /// Truncates the file and its backing, or grows both with zeros. If the backing refuses, the
    /// old length is restored, and nothing was written out with the new one. Blocks for write-outs.
    pub(crate) fn set_len(&self, len_bytes: u64) -> Result<()> {
        let inode = self.inode;
        let before_bytes = inode.mapping.len_bytes();
        blocking::check("`cutting`, and the backing");
        let _no_write_out = inode.cutting.write();
        if len_bytes < before_bytes {
            inode.mapping.set_len_bytes(len_bytes);
        }
        let result = inode.store.set_len(len_bytes);
        match &result {
            Ok(()) => inode.mapping.set_len_bytes(len_bytes),
            Err(_) => self.undo_cut(before_bytes),
        }
        result
    }

    /// Restores the length from before a truncation of which only the length was visible.
    pub(crate) fn undo_cut(&self, before_bytes: u64) {
        self.inode.mapping.set_len_bytes(before_bytes);
        self.inode.page_space.end_growth();
    }

    /// Truncates the file to the length of its backing, if it is longer: to the recorded length, if
    /// the query of the length fails. Returns the file's length, and the result of the query.
    /// Blocks for write-outs.
    pub(crate) fn cut_to_backing(&self) -> (u64, Result<()>) {
        let inode = self.inode;
        blocking::check("`cutting`, and the backing");
        let _no_write_out = inode.cutting.write();
        let queried = inode.store.query_len();
        let len_bytes = inode.store.bytes_from(0, inode.mapping.len_bytes());
        inode.mapping.set_len_bytes(len_bytes);
        (len_bytes, queried)
    }

    /// Records the length of the backing, which another program may have changed, and returns it.
    /// Truncates the file to it, if it is longer. Blocks for write-outs.
    pub(crate) fn query_backing(&self) -> Result<u64> {
        let inode = self.inode;
        blocking::check("`cutting`, and the backing");
        let _no_write_out = inode.cutting.write();
        inode.store.query_len()?;
        let len_bytes = inode.store.bytes_from(0, u64::MAX);
        if len_bytes < inode.mapping.len_bytes() {
            inode.mapping.set_len_bytes(len_bytes);
        }
        Ok(len_bytes)
    }
}

/// Removal of pages.
impl Inode {
    /// Removes every clean folio of `pages`, whole units that hold the bytes of `range`. Waits for
    /// fills and write-outs in flight: nothing stays that was read from the storage before the
    /// call. Keeps all if the kernel cannot tell which pages of a map were stored to.
    pub(crate) fn remove_clean(&self, pages: Range<u64>, range: &Range<u64>) {
        let may_all_be_dirty = self.find_stores(range, true).is_err();
        let is_clean =
            |locked: &LockedFolio<'_>| !may_all_be_dirty && !locked.flags.write_state().is_dirty();
        self.remove_folios(Removal::new(self, PinnedPages::Kept), pages, is_clean);
    }

    /// Removes every folio from byte `position_bytes` (a multiple of the unit) on, dirty or not.
    ///
    /// The length has been set, so that a thread that still inserts a folio there removes it again;
    /// or there is no handle left.
    pub(crate) fn remove_folios_from(&self, position_bytes: u64) {
        self.mapping.begin_walk_behind_end();
        let removal = Removal::new(self, PinnedPages::Kept);
        self.remove_folios(removal, position_bytes / PAGE_BYTES..u64::MAX, |_| true);
    }

    /// Removes every unused folio after the last close. For a file that outlives its handles,
    /// removes only clean ones, even while writers are active: changed folios stay. All stay if the
    /// kernel cannot tell which pages of a map were stored to. No map is in use, so there are no
    /// later stores.
    pub(crate) fn remove_closed(&self) {
        let may_all_be_dirty = self.find_stores(&ALL_BYTES, true).is_err();
        let is_unwanted = |locked: &LockedFolio<'_>| {
            let is_dirty = may_all_be_dirty || locked.flags.write_state().is_dirty();
            !is_dirty || self.device.is_none()
        };
        self.remove_folios(Removal::new(self, PinnedPages::Kept), 0..u64::MAX, is_unwanted);
    }

    /// Removes every dirty folio, and returns the number of their bytes in the file. Concurrent
    /// writes are dropped or not. In a region, a referenced page stays visible to maps until it is
    /// filled again. Every folio counts as dirty if the kernel cannot tell which pages of a map
    /// were stored to. Waits for write-outs in flight.
    pub(crate) fn discard_dirty(&self) -> u64 {
        let len_bytes = self.mapping.len_bytes();
        let discarded_bytes = Cell::new(0);
        let may_all_be_dirty = self.find_stores(&ALL_BYTES, true).is_err();
        let is_unwanted = |locked: &LockedFolio<'_>| {
            let is_dirty = may_all_be_dirty || locked.flags.write_state().is_dirty();
            if is_dirty {
                let start = locked.index() * PAGE_BYTES;
                let bytes = len_bytes.saturating_sub(start).min(locked.pages() * PAGE_BYTES);
                discarded_bytes.update(|sum| sum + bytes);
            }
            is_dirty
        };
        self.remove_folios(Removal::new(self, PinnedPages::Kept), 0..u64::MAX, is_unwanted);
        self.store.forget_failed_flush();
        discarded_bytes.get()
    }

    /// Removes a folio from the table that was never filled: restores the Entry that it took over.
    /// Returns the table's reference.
    pub(crate) fn remove_unfilled<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
    ) -> FolioRef<'a> {
        let folios = &self.memory.folios;
        self.store.note_out_of_table(locked);
        let entry_after = |_| self.store.entry_after(locked, None);
        self.mapping.remove(folio, locked, folios, entry_after)
    }

    /// Removes a locked folio from the table, dirty or not. No write-out of it is in flight.
    pub(crate) fn remove_unwanted<'a>(&'a self, folio: FolioRef<'a>, locked: LockedFolio<'a>) {
        Removal::new(self, PinnedPages::Kept).remove(folio, locked);
    }

    /// Turns whole units of a memory file into holes.
    pub(crate) fn punch(&self, pages: Range<u64>) {
        self.remove_folios(Removal::new(self, PinnedPages::Zeroed), pages, |_| true);
    }

    /// Removes the folios of `pages`, whole units, that are unwanted.
    pub(super) fn remove_folios<'a>(
        &'a self,
        mut removal: Removal<'a>,
        pages: Range<u64>,
        is_unwanted: impl Fn(&LockedFolio<'_>) -> bool,
    ) {
        let (mut index, table) = (pages.start, self.mapping.table());
        while let Some(found) = table.next_needed(index).filter(|found| *found < pages.end) {
            index = found;
            let folios = &self.memory.folios;
            let found = self.mapping.try_get_folio(folios, index).unwrap_or_else(|| {
                removal.finish();
                self.mapping.get_folio(folios, index)
            });
            let folio = match found {
                Lookup::Folio(folio) => folio,
                Lookup::Absent(seen) => {
                    let head = self.mapping.head_index(index);
                    #[cfg(all(test, not(loom)))]
                    crate::sync::test_hook::reach("before a value is taken");
                    if seen.as_value().is_some() && self.mapping.take_value(head, seen) {
                        self.store.give_back(seen, 1 << self.mapping.order());
                    }
                    continue;
                }
                Lookup::Refused => continue,
            };
            #[cfg(all(test, not(loom)))]
            crate::sync::test_hook::reach("before a folio that goes is locked");
            let locked = folio.try_lock().unwrap_or_else(|| {
                removal.finish();
                self.lock_folio(&folio)
            });
            if locked.owner() != self.address {
                continue;
            }
            if locked.flags.write_state().is_writing() {
                removal.finish();
                locked.flags.wait_for_writeback();
            }
            index = locked.index() + locked.pages();
            if is_unwanted(&locked) {
                removal.remove(folio, locked);
            }
        }
    }

    /// Removes a folio from the table, dirty or not. No write-out of it is in flight.
    pub(crate) fn unlink(&self, folio: FolioRef<'_>, locked: LockedFolio<'_>) {
        self.forget_content(&locked, folio.id());
        let table_reference =
            self.mapping.remove(&folio, &locked, &self.memory.folios, |_| Entry::HOLE);
        drop(locked);
        drop(table_reference);
    }

    /// Zeroes bytes of the file in a locked folio, visible to readers at once. The folio is dirty,
    /// unless the storage zeroes them, too.
    pub(crate) fn zero_in_place(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
        bytes: Range<u64>,
    ) {
        if !locked.flags.get(Flag::Uptodate) {
            // Allocated and never written: zeros already.
            return;
        }
        let pages = bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES);
        let _section = self.mapping.begin_write_section(locked, pages);
        let start = locked.index() * PAGE_BYTES;
        self.zero_folio(folio, locked, bytes.start - start..bytes.end - start);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::cache::Cache;
    use crate::file::OpenOptions;
    use crate::page::PAGE_BYTES;
    use crate::sync::{Ordering, test_hook};
    use std::sync::mpsc;
    use std::thread;
    use std::time::{Duration, Instant};

    /// A page in the swap is read, which takes its slot, while its hole is being made.
    #[test]
    fn a_slot_that_a_reader_takes_first_is_freed_once() {
        const PAGES: u64 = 1024;
        let directory = tempfile::tempdir().unwrap();
        let builder = Cache::builder().memory(1 << 20).swap_max(16 << 20);
        let cache = builder.swap_directory(directory.path()).build().unwrap();
        let file = cache.memory_file("swapped").unwrap();
        for page in 0..PAGES {
            file.write_all_at(&[7; PAGE_BYTES as usize], page * PAGE_BYTES).unwrap();
        }
        let table = file.handle.inode.mapping.table();
        let is_swapped = |page: &u64| table.load(*page, Ordering::Relaxed).as_value().is_some();
        let page = (0..PAGES).find(is_swapped).expect("most of the pages do not fit");
        let reader = file.clone();
        test_hook::set("before a value is taken", move || {
            let mut byte = [0];
            reader.read_exact_at(&mut byte, page * PAGE_BYTES).unwrap();
            assert_eq!(byte, [7]);
        });
        let hole = page * PAGE_BYTES..(page + 1) * PAGE_BYTES;
        file.punch_hole(hole).unwrap();
        assert!(test_hook::has_run(), "the page was in the swap");
        let mut byte = [1];
        file.read_exact_at(&mut byte, page * PAGE_BYTES).unwrap();
        assert_eq!(byte, [0]);
        file.set_len(0).unwrap();
        assert_eq!(cache.stats().memory.swap_bytes, 0);
    }

    /// The owner of a `PageRefMut` of the second page reads the first, which the hole has removed
    /// before it waits for the second.
    fn punch_beside_a_pin(options: &OpenOptions) {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let Ok(file) = cache.memory_file_with("punched", options) else { return };
        file.write_all_at(&[7; 3 * PAGE_BYTES as usize], 0).unwrap();
        let (pinned, is_pinned) = mpsc::channel();
        let (waits, is_waiting) = mpsc::channel();
        let owner = file.clone();
        let owner = thread::spawn(move || {
            let pin = owner.pin_mut(PAGE_BYTES..2 * PAGE_BYTES).unwrap();
            pinned.send(()).unwrap();
            is_waiting.recv().unwrap();
            let begun = Instant::now();
            let mut byte = [1];
            while owner.try_read_at(&mut byte, 0).is_err() || byte == [7] {
                if begun.elapsed() > Duration::from_secs(20) {
                    return false;
                }
                thread::sleep(Duration::from_millis(1));
            }
            drop(pin);
            true
        });
        is_pinned.recv().unwrap();
        let place = "before a folio that goes is locked";
        test_hook::set(place, move || test_hook::set(place, move || waits.send(()).unwrap()));
        file.punch_hole(0..3 * PAGE_BYTES).unwrap();
        assert!(test_hook::has_run());
        assert!(owner.join().unwrap(), "the first page cannot be read while the hole waits");
    }

    #[test]
    fn a_hole_that_waits_keeps_no_folio_frozen() {
        let options = OpenOptions::new().read(true).write(true);
        punch_beside_a_pin(&options);
        // Its pages are gathered, frozen, to be unmapped together.
        #[cfg(feature = "maps")]
        punch_beside_a_pin(&options.mappable(true));
    }
}

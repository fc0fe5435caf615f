//! Changes of the length of a file.
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

use super::Inode;
use crate::error::Result;
use crate::page::{Entry, Flag, FolioRef, LockedFolio, PAGE_BYTES};
use crate::sync::{MutexGuard, Ordering, blocking};
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

impl Inode {
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

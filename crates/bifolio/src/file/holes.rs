//! Holes of memory files: making them and finding them.

use super::File;
use super::access::Access;
use crate::error::Result;
use crate::page::{PAGE_BYTES, PAGE_SHIFT};
use std::ops::Range;

impl File {
    /// Makes a hole of the bytes of `range` that a memory file has: they read as zeros, and whole
    /// folios among them give their memory, or their place in the swap, back. The length stays.
    ///
    /// Blocks for I/O where the first or the last folio is swapped out and only part of it goes.
    /// Bytes that were pinned stay readable through the pin, with any content.
    ///
    /// # Errors
    /// Not a memory file; a handle not opened for writing; a range beyond 2^63; the swap's, for
    /// the first and the last folio: then nothing is changed, unless the last one could be read at
    /// first and no longer after the first one was zeroed.
    pub fn punch_hole(&self, range: Range<u64>) -> Result<()> {
        let handle = &self.handle;
        handle.check_writable()?;
        handle.check_memory_file("punch a hole")?;
        handle.range_end(range.start, range.end.saturating_sub(range.start))?;
        // What is behind the end is zeros anyway, for as long as the file does not grow.
        let resizing = (range.end >= self.len()).then(|| handle.inode.lock_resizing());
        let (unit, len_bytes) = (self.folio_bytes(), self.len());
        let is_tail = resizing.is_some() && range.end >= len_bytes;
        let end = if is_tail { len_bytes.next_multiple_of(unit) } else { range.end };
        let range = range.start..end;
        if range.is_empty() {
            return Ok(());
        }
        let whole = range.start.next_multiple_of(unit)..range.end / unit * unit;
        if whole.start > whole.end {
            return self.zero_part(range);
        }
        // Whatever can fail comes first: the last one is read before anything is changed. It is not
        // held: there may be room for one folio only.
        if whole.end < range.end {
            drop(self.handle.find_folio(whole.end >> PAGE_SHIFT, Access::Read)?);
        }
        self.zero_part(range.start..whole.start)?;
        self.zero_part(whole.end..range.end)?;
        handle.inode.punch(whole.start >> PAGE_SHIFT..whole.end >> PAGE_SHIFT);
        Ok(())
    }

    /// Zeroes bytes that lie in one unit, in place.
    fn zero_part(&self, range: Range<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let Some(locked) = self.handle.find_folio(range.start >> PAGE_SHIFT, Access::Read)? else {
            return Ok(());
        };
        self.handle.inode.zero_in_place(&locked.folio, &locked.lock, range);
        Ok(())
    }

    /// The first byte from `position` on that a memory file has data at, as `SEEK_DATA`: folio by
    /// folio, what was written, in memory or swapped out; allocated and never written is a hole.
    /// `None` if there is none, or `position` lies behind the end.
    ///
    /// # Errors
    /// Not a memory file; the cache is closed.
    pub fn seek_data(&self, position: u64) -> Result<Option<u64>> {
        self.check_seek()?;
        let (inode, len_bytes) = (&self.handle.inode, self.len());
        if position >= len_bytes {
            return Ok(None);
        }
        let mut index = inode.mapping.head_index(position >> PAGE_SHIFT);
        while let Some(found) = inode.next_occupied(index) {
            let found = inode.mapping.head_index(found);
            if found * PAGE_BYTES >= len_bytes {
                break;
            }
            if self.has_data(found) {
                return Ok(Some(position.max(found * PAGE_BYTES)));
            }
            index = self.handle.end_of_folio(found);
        }
        Ok(None)
    }

    /// The first byte from `position` on that a memory file has no data at, as `SEEK_HOLE`: at the
    /// latest its end. `None` if `position` lies behind that.
    ///
    /// # Errors
    /// Not a memory file; the cache is closed.
    pub fn seek_hole(&self, position: u64) -> Result<Option<u64>> {
        self.check_seek()?;
        let len_bytes = self.len();
        if position >= len_bytes {
            return Ok(None);
        }
        let mut index = self.handle.inode.mapping.head_index(position >> PAGE_SHIFT);
        while index * PAGE_BYTES < len_bytes && self.has_data(index) {
            index = self.handle.end_of_folio(index);
        }
        Ok(Some(position.max(index * PAGE_BYTES).min(len_bytes)))
    }

    fn check_seek(&self) -> Result<()> {
        self.handle.check_usable()?;
        self.handle.check_memory_file("seek data or holes")
    }

    /// Whether the unit whose first page is `head` was written.
    fn has_data(&self, head: u64) -> bool {
        let inode = &self.handle.inode;
        let is_written = inode.mapping.is_written(&inode.memory.folios, head);
        is_written.unwrap_or_else(|seen| inode.is_absent(seen))
    }
}

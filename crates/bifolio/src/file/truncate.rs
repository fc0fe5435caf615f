//! Changing the length.
//!
//! The length and the backing change between two write-outs (WRITEBACK-4). Of a cut, that comes
//! first; then what is behind the end in the folio that holds it becomes zeros (FILE-1); then the
//! folios behind the new end go, dirty or not. If the backing refuses, or the swap, the old length
//! stands again and nothing is lost.

use super::File;
use super::access::Access;
use super::fill::Locked;
use crate::error::{ErrorKind, Result};
use crate::memory::PageSpace;
use crate::page::{FolioRef, PAGE_BYTES, PAGE_SHIFT};
use crate::writeback::Resizing;

/// A file grows, if its pages have places: nobody is refused what it is about to have (G1 to G3 of
/// `memory/region.rs`).
#[derive(Debug)]
struct Growing<'a> {
    page_space: Option<&'a PageSpace>,
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
    }
}

/// A growth that is under way: nobody else changes the length.
#[derive(Debug)]
pub(super) struct Growth<'a> {
    growing: Growing<'a>,
    resizing: Resizing<'a>,
}

impl Growth<'_> {
    /// The file is `len_bytes` long, if it was shorter: its last bytes are there. What lay between
    /// is the file's, and what follows in the same growth is put in its place.
    pub(super) fn reach(&mut self, len_bytes: u64) {
        self.resizing.extend(len_bytes);
        self.growing.end();
    }
}

impl File {
    /// Makes the file `len_bytes` long: cuts what is behind, or grows it by zeros. The file on the
    /// device has that length when the call returns; it is durable after a sync. Blocks for I/O:
    /// its own, and write-outs of the file that are under way.
    ///
    /// Bytes that were pinned and are cut off stay readable through the pin, with any content.
    ///
    /// # Errors
    /// The storage's, or the swap's (then the length is as before); a handle not opened for
    /// writing; a length beyond what the file was opened for.
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
        // A cut must not find out that it cannot get at the bytes it is to zero.
        let _tail = self.hold_tail(len_bytes)?;
        self.cut(&resizing, len_bytes)
    }

    fn cut(&self, resizing: &Resizing<'_>, len_bytes: u64) -> Result<()> {
        let before_bytes = self.len();
        resizing.set_len(len_bytes)?;
        // A memory file's tail that was a hole, but written and swapped out since, may be
        // unreadable.
        self.forget_behind(len_bytes).inspect_err(|_| resizing.undo_cut(before_bytes))
    }

    /// Drops what lies behind the new end of the file, which has been cut to `len_bytes` bytes; or
    /// nothing, if it fails, which only a memory file's can.
    pub(super) fn forget_behind(&self, len_bytes: u64) -> Result<()> {
        let inode = &self.handle.inode;
        inode.mapping.begin_walk_behind_end();
        self.zero_tail(len_bytes)?;
        inode.remove_folios_from(len_bytes.next_multiple_of(self.folio_bytes()));
        Ok(())
    }

    /// Waits until nobody else changes the length, and prepares the file to be `len_bytes` long.
    pub(super) fn begin_growth(&self, len_bytes: u64) -> Result<Growth<'_>> {
        let resizing = self.handle.inode.lock_resizing();
        Ok(Growth { growing: self.uncover(&resizing, len_bytes)?, resizing })
    }

    /// The file is about to grow to `len_bytes` bytes, if it is shorter: what it gets is zeros,
    /// whatever raw writers have stored behind its end, and whatever stood in the way of those who
    /// touched what was cut. The caller keeps the answer until the file has grown, or has not.
    fn uncover(&self, _alone: &Resizing<'_>, len_bytes: u64) -> Result<Growing<'_>> {
        let before_bytes = self.len();
        if len_bytes <= before_bytes {
            return Ok(Growing { page_space: None });
        }
        let page_space = &self.handle.inode.page_space;
        let growing = Growing { page_space: Some(page_space) };
        let purpose = "pages behind the end of a file";
        let begun = page_space.begin_growth(before_bytes, len_bytes);
        begun.map_err(|source| ErrorKind::Memory { purpose, source })?;
        let pages = before_bytes.div_ceil(PAGE_BYTES)..len_bytes.div_ceil(PAGE_BYTES);
        for index in page_space.orphaned_among(pages) {
            // Somebody holds what was cut off there, and maps see it: it stays, and becomes zeros,
            // as for a write of part of it.
            let end = (index + 1) * PAGE_BYTES;
            if let Err(error) = self.handle.lock_folio(index, Access::Write { start: end - 1, end })
            {
                self.handle.inode.remove_folios_from(before_bytes.next_multiple_of(PAGE_BYTES));
                return Err(error);
            }
        }
        if page_space.tracked().is_some() {
            self.zero_tail(before_bytes)?;
        }
        Ok(growing)
    }

    /// A reference to the folio of a memory file that `len_bytes` lies in: what is behind it must
    /// be zeroed in memory, as there is no backing that will.
    fn hold_tail(&self, len_bytes: u64) -> Result<Option<FolioRef<'_>>> {
        let is_inside = len_bytes & (self.folio_bytes() - 1) != 0;
        if !is_inside || self.handle.inode.store.zeroes_what_is_cut() {
            return Ok(None);
        }
        let found = self.handle.find_folio(len_bytes >> PAGE_SHIFT, Access::Read)?;
        Ok(found.map(|locked| locked.folio))
    }

    /// Zeroes what lies behind the end in the folio that holds it; in a file with a backing, if
    /// that is resident.
    fn zero_tail(&self, len_bytes: u64) -> Result<()> {
        let inode = &self.handle.inode;
        let head = inode.mapping.head_index(len_bytes >> PAGE_SHIFT);
        if len_bytes == head * PAGE_BYTES {
            return Ok(());
        }
        let found = if inode.store.zeroes_what_is_cut() {
            self.handle.find_resident(head)
        } else {
            // Resident, but for a page that was written and swapped out since we looked.
            self.handle.find_folio(head, Access::Read)?
        };
        if let Some(Locked { folio, lock, .. }) = found {
            let folio_end = (lock.index() + lock.pages()) * PAGE_BYTES;
            inode.zero_in_place(&folio, &lock, len_bytes..folio_end);
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Cache;
    use crate::sync::Ordering::Relaxed;
    use std::fs;

    /// The page that the end is to be in was a hole when the cut looked; it was written and swapped
    /// out before the length changed.
    #[test]
    fn a_cut_whose_last_page_cannot_be_read_leaves_the_length() {
        const PAGES: u64 = 600;
        let directory = tempfile::tempdir().unwrap();
        let swap = directory.path().join("swap");
        let cache = Cache::builder().memory(1 << 20).swap_file(&swap).build().unwrap();
        let file = cache.memory_file("cut").unwrap();
        for index in 0..PAGES {
            file.write_all_at(&[7; PAGE_BYTES as usize], index * PAGE_BYTES).unwrap();
        }
        let inode = &file.handle.inode;
        let is_swapped_out = |index| !inode.mapping.table().load(index, Relaxed).is_folio();
        let swapped = (0..PAGES).find(|index| is_swapped_out(*index)).unwrap();
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
        assert!(found.iter().all(|byte| *byte == 7), "bytes behind the new end are lost");
        file.set_len(len_bytes).unwrap();
        assert_eq!(file.len(), len_bytes);
    }
}

//! The growth of a file that maps see: its new part has only zeros, whatever raw writers have
//! stored past the old end, and faults that were refused there are judged again.

use crate::error::{Error, Result};
use crate::file::File;
use crate::fill::{AccessMode, Locked};
use crate::inode::Resizing;
use crate::memory::PageSpace;
use crate::page::{PAGE_BYTES, PAGE_SHIFT};

/// Guard held while a file in a region grows: faults past the old end wait instead of failing
/// (STRAY-G1 to STRAY-G3).
#[derive(Debug)]
pub(crate) struct Growing<'a> {
    page_space: Option<&'a PageSpace>,
    /// File with a backing and its length before, if raw writers may store past its end.
    uncovered: Option<(&'a File, u64)>,
}

impl Growing<'_> {
    pub(crate) fn end(&mut self) {
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
                file.handle.fill().find_resident(before_bytes >> PAGE_SHIFT)
        {
            file.handle.inode.mark_stored(&lock, folio.id());
        }
    }
}

impl File {
    /// Prepares the file to grow to `len_bytes` bytes, if it is shorter: zeroes everything that raw
    /// writers have stored past its end, and removes pages that were poisoned for faults on
    /// truncated pages. The caller keeps the returned guard until the growth has succeeded or
    /// failed.
    pub(crate) fn uncover(&self, _alone: &Resizing<'_>, len_bytes: u64) -> Result<Growing<'_>> {
        let before_bytes = self.len();
        if len_bytes <= before_bytes {
            return Ok(Growing { page_space: None, uncovered: None });
        }
        let page_space = &self.handle.inode.page_space;
        let mut growing = Growing { page_space: Some(page_space), uncovered: None };
        let purpose = "pages past the end of a file";
        let begun = page_space.begin_growth(before_bytes, len_bytes);
        begun.map_err(|source| Error::memory(purpose, source))?;
        let pages = before_bytes.div_ceil(PAGE_BYTES)..len_bytes.div_ceil(PAGE_BYTES);
        for index in page_space.orphaned_among(pages) {
            // A reference to the truncated page exists, and maps see the page: it stays and is
            // zeroed, as for a partial write.
            let end = (index + 1) * PAGE_BYTES;
            if let Err(error) =
                self.handle.fill().lock_folio(index, AccessMode::Write { start: end - 1, end })
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
}

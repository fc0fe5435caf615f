//! Changes that other programs make to the storage of a file: what the cache has of it is forgotten
//! on request.
//!
//! The cache does not watch its storage. A program that knows when another one has changed a file,
//! from a lock or a counter in it, says so here; after that, reads return what the storage has.
//! Folios that are being filled may have old bytes: their locks are waited for.
//!
//! Bytes that the other program appends after the last folio was filled read as zeros in it. So a
//! file that has grown records the length of its storage, removes that folio, and becomes longer
//! last: a fill in between reads the new bytes.

use super::File;
use crate::error::{Error, ErrorKind, Result};
use crate::fill::{AccessMode, own_pins};
use crate::page::{PAGE_BYTES, PAGE_SHIFT, pages_of};
use std::ops::{Range, RangeBounds};

impl File {
    /// Forgets the clean pages of `range`, so that later reads return what the storage has. For a
    /// file that another program has changed. Bytes that were not written out stay in the cache.
    ///
    /// Pages that lie partly in the range are forgotten, too. Waits for fills and write-outs of the
    /// range that are in flight, and for no other I/O. A read that runs meanwhile returns old or
    /// new bytes. Pinned bytes stay readable through the pin, with any content. Has no effect on a
    /// memory file.
    ///
    /// # Errors
    /// A closed cache; a handle that is not opened for reading; a range beyond 2^63; a page that
    /// the calling thread has pinned to change it ([`ErrorKind::PinnedByCaller`]).
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, [1; 5000])?;
    /// use std::os::unix::fs::FileExt;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// file.populate(..)?;
    /// std::fs::File::options().write(true).open(&path)?.write_all_at(&[2], 4999)?;
    /// file.invalidate(4999..)?;
    /// let mut byte = [0];
    /// file.read_exact_at(&mut byte, 4999)?;
    /// assert_eq!(byte, [2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn invalidate(&self, range: impl RangeBounds<u64>) -> Result<()> {
        let range = self.range_of(range);
        self.handle.check_readable()?;
        self.handle.check_range(&range)?;
        let inode = &self.handle.inode;
        if range.is_empty() || inode.is_memory_file() {
            return Ok(());
        }
        let pages = self.units_of(&range);
        own_pins::check(inode, &pages)?;
        inode.remove_clean(pages.clone(), &range);
        self.fill_orphans(pages);
        Ok(())
    }

    /// Sets the length of the file to that of its storage, which another program has changed, and
    /// returns it. What was cached past a new end is forgotten, and so is the last page of a file
    /// that has grown. Has no effect on a memory file.
    ///
    /// Blocks for the storage, and for write-outs of the file that are in flight.
    ///
    /// # Errors
    /// The error of the storage; a closed cache; a handle that is not opened for reading;
    /// [`ErrorKind::Unsupported`] for a file with bytes that were not written out: sync or discard
    /// them first; a length beyond the maximum of a file that can be mapped. The length is
    /// unchanged then.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// std::fs::write(&path, "as of another program")?;
    /// assert_eq!((file.len(), file.refresh_len()?, file.len()), (0, 21, 21));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn refresh_len(&self) -> Result<u64> {
        let handle = &self.handle;
        handle.check_readable()?;
        let inode = &handle.inode;
        if inode.is_memory_file() {
            return Ok(self.len());
        }
        own_pins::check(inode, &own_pins::ALL_PAGES)?;
        let resizing = inode.lock_resizing();
        if inode.unwritten_bytes() > 0 {
            let text = "cannot take the length of the storage: the file has dirty bytes";
            return Err(Error::new(ErrorKind::Unsupported, text).in_file(inode.name()));
        }
        let before_bytes = self.len();
        let len_bytes = resizing.query_backing()?;
        if len_bytes < before_bytes {
            // No memory file, so this does not fail.
            self.forget_behind(len_bytes)?;
        } else if len_bytes > before_bytes {
            self.raise_to(&resizing, len_bytes)?;
            let _growing = self.uncover(&resizing, len_bytes)?;
            let last = self.units_of(&(before_bytes.saturating_sub(1)..before_bytes + 1));
            inode.remove_clean(last, &(0..before_bytes + 1));
            resizing.extend(len_bytes);
        }
        Ok(len_bytes)
    }

    /// Returns the pages of whole folios that hold bytes of a range.
    fn units_of(&self, range: &Range<u64>) -> Range<u64> {
        let unit_pages = self.folio_bytes() >> PAGE_SHIFT;
        let pages = pages_of(range);
        pages.start / unit_pages * unit_pages..pages.end.next_multiple_of(unit_pages)
    }

    /// Fills pages that were removed and that maps can still see (REGION-4). If that fails, the
    /// next access to the page returns the error.
    pub(super) fn fill_orphans(&self, pages: Range<u64>) {
        let handle = &self.handle;
        let pages = pages.start..pages.end.min(self.len().div_ceil(PAGE_BYTES));
        let held = handle.inode.page_space.orphaned_among(pages);
        held.into_iter().for_each(|index| drop(handle.fill().lock_folio(index, AccessMode::Cache)));
    }
}

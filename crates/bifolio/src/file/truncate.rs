//! Changing the length.
//!
//! A cut, in this order: the length and the backing, between two write-outs (WRITEBACK-4); then
//! the folios behind the new end, dirty or not; then zeros behind the end in the folio that holds
//! it (FILE-1). If the backing refuses, the old length stands again and nothing is lost.

use super::File;
use super::access::Access;
use super::fill::Locked;
use crate::error::{ErrorKind, Result};
use crate::folio::FolioRef;
use crate::frames::Region;
use crate::mapping::{PAGE_BYTES, PAGE_SHIFT};

/// A file grows, if its pages have places: nobody is refused what it is about to have (G1 to G3 of
/// `frames/region.rs`).
#[derive(Debug)]
pub(super) struct Growing<'a> {
    region: Option<&'a Region>,
}

impl Drop for Growing<'_> {
    fn drop(&mut self) {
        if let Some(region) = self.region {
            region.end_growth();
        }
    }
}

impl File {
    /// Makes the file `len_bytes` long: cuts what is behind, or grows it by zeros. The file on the
    /// device has that length when the call returns; it is durable after a sync. Blocks for I/O.
    ///
    /// Bytes that were pinned and are cut off stay readable through the pin, with any content.
    ///
    /// # Errors
    /// The storage's, or the spill's (then the length is as before); a handle not opened for
    /// writing; a length beyond what the file was opened for.
    pub fn set_len(&self, len_bytes: u64) -> Result<()> {
        let handle = &self.handle;
        handle.check_writable()?;
        handle.range_end(len_bytes, 0)?;
        handle.check_len(len_bytes)?;
        let inode = &handle.inode;
        let _resizing = inode.lock_resizing();
        if len_bytes >= inode.mapping.len_bytes() {
            let _growing = self.uncover(len_bytes)?;
            return Ok(inode.grow(len_bytes)?);
        }
        // A cut must not find out that it cannot get at the bytes it is to zero.
        let _tail = self.hold_tail(len_bytes)?;
        inode.cut(len_bytes)?;
        inode.remove_folios_from(len_bytes.div_ceil(self.folio_bytes()) * self.folio_bytes());
        self.zero_tail(len_bytes)
    }

    /// The file is about to grow to `len_bytes` bytes, if it is shorter: what it gets is zeros,
    /// whatever raw writers have stored behind its end, and whatever stood in the way of those who
    /// touched what was cut. The caller holds the resizing lock, and the answer until the file has
    /// grown, or has not.
    pub(super) fn uncover(&self, len_bytes: u64) -> Result<Growing<'_>> {
        let before_bytes = self.len();
        let region = self.handle.inode.frames.region().filter(|_| len_bytes > before_bytes);
        let growing = Growing { region: region.map(|region| &**region) };
        let Some(region) = growing.region else { return Ok(growing) };
        let pages = before_bytes.div_ceil(PAGE_BYTES)..len_bytes.div_ceil(PAGE_BYTES);
        let purpose = "pages behind the end of a file";
        region.begin_growth(pages).map_err(|source| ErrorKind::Memory { purpose, source })?;
        if region.is_tracked() {
            self.zero_tail(before_bytes)?;
        }
        Ok(growing)
    }

    /// A reference to the folio of a memory file that `len_bytes` lies in: what is behind it must
    /// be zeroed in memory, as there is no backing that will.
    fn hold_tail(&self, len_bytes: u64) -> Result<Option<FolioRef<'_>>> {
        let is_inside = len_bytes & (self.folio_bytes() - 1) != 0;
        if !is_inside || !self.handle.inode.is_memory_file() {
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
        let found = if inode.is_memory_file() {
            // Resident, but for a page that was written and spilled since we looked.
            self.handle.find_folio(head, Access::Read)?
        } else {
            self.handle.find_resident(head)
        };
        if let Some(Locked { folio, lock, .. }) = found {
            let folio_end = (lock.index() + lock.pages()) * PAGE_BYTES;
            inode.zero_in_place(&folio, &lock, len_bytes..folio_end);
        }
        Ok(())
    }
}

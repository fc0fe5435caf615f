//! Changing the length.
//!
//! A cut, in this order: the length and the backing, between two write-outs (WRITEBACK-4); then
//! the folios behind the new end, dirty or not; then zeros behind the end in the folio that holds
//! it (FILE-1). If the backing refuses, the old length stands again and nothing is lost.

use super::File;
use super::access::Access;
use crate::error::Result;
use crate::folio::FolioRef;
use crate::mapping::{Lookup, PAGE_BYTES, PAGE_SHIFT};

impl File {
    /// Makes the file `len_bytes` long: cuts what is behind, or grows it by zeros. The file on the
    /// device has that length when the call returns; it is durable after a sync. Blocks for I/O.
    ///
    /// Bytes that were pinned and are cut off stay readable through the pin, with any content.
    ///
    /// # Errors
    /// The storage's (then the length is as before); a handle not opened for writing; a length
    /// beyond what the file was opened for.
    pub fn set_len(&self, len_bytes: u64) -> Result<()> {
        let handle = &self.handle;
        handle.check_writable()?;
        handle.range_end(len_bytes, 0)?;
        handle.check_len(len_bytes)?;
        let inode = &handle.inode;
        let _resizing = inode.lock_resizing();
        if len_bytes >= inode.mapping.len_bytes() {
            return Ok(inode.grow(len_bytes)?);
        }
        // A cut must not find out that it cannot get at the bytes it is to zero.
        let _tail = self.hold_tail(len_bytes)?;
        inode.cut(len_bytes)?;
        inode.remove_folios_from(len_bytes.div_ceil(self.folio_bytes()) * self.folio_bytes());
        self.zero_tail(len_bytes);
        Ok(())
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

    /// Zeroes what lies behind the end in the folio that holds it, if that is resident.
    fn zero_tail(&self, len_bytes: u64) {
        let unit_end = len_bytes.next_multiple_of(self.folio_bytes());
        let inode = &self.handle.inode;
        if len_bytes == unit_end {
            return;
        }
        let folios = &inode.memory.folios;
        let found = inode.mapping.get_folio(folios, len_bytes >> PAGE_SHIFT, &mut 0);
        let Lookup::Folio(folio) = found else { return };
        let lock = folio.lock();
        if lock.owner() == inode.address() {
            let folio_end = (lock.index() + lock.pages()) * PAGE_BYTES;
            inode.zero_in_place(&folio, &lock, len_bytes..folio_end);
        }
    }
}

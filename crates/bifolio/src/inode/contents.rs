//! The contents of locked folios: zeros, and the bytes that a transfer reads or writes.
//!
//! # Safety
//! Creates slices of frames whose folios the caller has locked.
#![allow(unsafe_code)]

use super::Inode;
use crate::error::Result;
use crate::page::{Flag, FolioRef, LockedFolio, PAGE_BYTES};
use crate::sys::copy;
use std::ops::Range;

impl Inode {
    /// Zeroes some of a locked folio's bytes, counted from its first, in memory.
    pub(crate) fn zero_folio(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
        bytes: Range<u64>,
    ) {
        let end = bytes.end.min(locked.pages() * PAGE_BYTES);
        let length = end.saturating_sub(bytes.start) as usize;
        let target = self.frame_of(folio).wrapping_add(bytes.start as usize);
        // SAFETY: part of a frame whose lock the caller holds, so it is its only writer.
        unsafe { copy::zero(target, length) };
    }

    /// Zeroes a locked folio and makes it uptodate.
    ///
    /// # Errors
    /// The kernel has no memory for a page of a region.
    pub(crate) fn fill_with_zeros(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
    ) -> Result<()> {
        if let Some(installed) = self.install_page(locked, &[], false) {
            return installed;
        }
        self.zero_folio(folio, locked, 0..u64::MAX);
        self.mapping.mark_uptodate(locked);
        Ok(())
    }
}

/// Returns the bytes of a folio at `start`, page by page. No thread may change them: the folio is
/// locked and not yet uptodate, or a write-out of it is in flight.
pub(crate) fn pages_of_still<'a>(
    folio: &'a FolioRef<'_>,
    start: *const u8,
) -> impl Iterator<Item = &'a [u8; PAGE_BYTES as usize]> {
    let descriptor = folio.folio();
    let is_writing = descriptor.flags.write_state().is_writing();
    debug_assert!(is_writing || !descriptor.flags.get(Flag::Uptodate));
    let pages = descriptor.pages() as usize;
    // SAFETY: the pages of a frame whose reference the caller holds, or of the buffer that the
    // folio is filled or written from. No thread changes them: a writer needs the lock and waits
    // for the write-out (WRITEBACK-3).
    let bytes = unsafe { std::slice::from_raw_parts(start.cast(), pages) };
    bytes.iter()
}

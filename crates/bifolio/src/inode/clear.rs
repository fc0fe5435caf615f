//! Allocation of the backing: storage allocated ahead of writes, and whole folios cleared together
//! with their storage (`punch_hole`, `zero_range`).
//!
//! The protocol of a clear is at the head of `clearing.rs`.

use super::mapped::PinnedPages;
use super::removal::Removal;
use super::resize::Resizing;
use crate::error::Result;
use crate::io::FallocateMode;
use crate::page::{Flag, LockedFolio, PAGE_SHIFT};
use crate::store::Store;
use crate::sync::blocking;
use std::ops::Range;

impl Resizing<'_> {
    /// Changes the allocation of the backing, and no byte. Returns `false` if there is no backing:
    /// a memory file has its folios allocated. Blocks for write-outs.
    pub(crate) fn fallocate(&self, mode: FallocateMode, bytes: Range<u64>) -> Result<bool> {
        let inode = self.inode;
        let Store::Disk(disk) = &inode.store else { return Ok(false) };
        blocking::check("`cutting`, and the backing");
        let _no_write_out = inode.cutting.write();
        disk.fallocate(mode, bytes).map(|()| true)
    }

    /// Clears `bytes` of the backing, whole units, and their folios. Blocks for write-outs, the
    /// backing, and the locks of the folios.
    pub(crate) fn clear(&self, mode: FallocateMode, bytes: Range<u64>) -> Result<()> {
        let inode = self.inode;
        let Store::Disk(disk) = &inode.store else { return Ok(()) };
        let pages = bytes.start >> PAGE_SHIFT..bytes.end >> PAGE_SHIFT;
        blocking::check("`cutting`, and the backing");
        let no_write_out = inode.cutting.write();
        if bytes.end >= inode.mapping.len_bytes() {
            // The last folio may be dirty; it will not be written out.
            inode.extend_backing_alone(bytes.end)?;
        }
        let clearing = inode.clearing.get_or_init(Box::default);
        clearing.begin(pages.clone());
        let cleared = disk.fallocate(mode, bytes);
        match cleared {
            Ok(()) => clearing.note_storage_cleared(),
            Err(_) => clearing.end(),
        }
        drop(no_write_out);
        if cleared.is_ok() {
            let is_old = |locked: &LockedFolio<'_>| !locked.flags.get(Flag::Punched);
            Removal::new(inode, PinnedPages::Zeroed).remove_all(pages.clone(), is_old);
            clearing.end();
        }
        let is_wrong = |locked: &LockedFolio<'_>| {
            let was_marked = locked.flags.clear(Flag::Punched);
            was_marked && cleared.is_err() && !locked.flags.write_state().is_dirty()
        };
        Removal::new(inode, PinnedPages::Zeroed).remove_all(pages, is_wrong);
        cleared
    }
}

//! Allocation of the backing: storage allocated ahead of writes, and whole folios cleared together
//! with their storage (`punch_hole`, `zero_range`); and the search for data and holes.
//!
//! The protocol of a clear is at the head of `clearing.rs`.

use super::Inode;
use super::mapped::{PinnedPages, Removal};
use super::resize::Resizing;
use crate::error::Result;
use crate::io::FallocateMode;
use crate::page::{Entry, Flag, Folio, LockedFolio, PAGE_BYTES, PAGE_SHIFT};
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
            let removal = Removal::new(inode, PinnedPages::Zeroed);
            inode.remove_folios(removal, pages.clone(), is_old);
            clearing.end();
        }
        let is_wrong = |locked: &LockedFolio<'_>| {
            let was_marked = locked.flags.clear(Flag::Punched);
            was_marked && cleared.is_err() && !locked.flags.write_state().is_dirty()
        };
        inode.remove_folios(Removal::new(inode, PinnedPages::Zeroed), pages, is_wrong);
        cleared
    }
}

/// Data and holes.
impl Inode {
    /// Returns the position of the first data from `position` on, before `len_bytes`.
    pub(crate) fn first_data(&self, position: u64, len_bytes: u64) -> Result<Option<u64>> {
        self.find_unwritten_stores(&(position..len_bytes))?;
        // In this order: a folio that is written out in between is found on the backing.
        let in_memory = self.next_data(position >> PAGE_SHIFT);
        let in_memory = in_memory.map(|index| position.max(index * PAGE_BYTES));
        let first = in_memory.into_iter().chain(self.store.first_data(position)?).min();
        Ok(first.filter(|first| *first < len_bytes))
    }

    /// Returns the position of the first hole from `position` on, at most `len_bytes`.
    pub(crate) fn first_hole(&self, position: u64, len_bytes: u64) -> Result<u64> {
        self.find_unwritten_stores(&(position..len_bytes))?;
        let mut at = position;
        while at < len_bytes {
            // In this order, as in `first_data`.
            if self.has_data(self.mapping.head_index(at >> PAGE_SHIFT)) {
                at = self.mapping.end_of_unit(at >> PAGE_SHIFT) * PAGE_BYTES;
                continue;
            }
            match self.store.first_hole(at)? {
                Some(hole) if hole > at => at = hole,
                _ => break,
            }
        }
        Ok(at.min(len_bytes))
    }

    /// Finds stores through maps, which make folios data of a file with a backing.
    fn find_unwritten_stores(&self, bytes: &Range<u64>) -> Result<bool> {
        if self.device.is_some() { self.find_stores(bytes, true) } else { Ok(false) }
    }

    /// Returns the first page of the first unit, from that of `index` on, whose bytes the backing
    /// does not have.
    fn next_data(&self, index: u64) -> Option<u64> {
        let mut index = self.mapping.head_index(index);
        loop {
            index = self.mapping.head_index(self.mapping.table().next_needed(index)?);
            if self.has_data(index) {
                return Some(index);
            }
            index = self.mapping.end_of_unit(index);
        }
    }

    /// Returns `true` if the unit whose first page is `head` has bytes that the backing does not
    /// have: in a folio, or in the swap.
    fn has_data(&self, head: u64) -> bool {
        let is_data = |seen, folio: &Folio| self.store.is_data(seen, folio);
        let found = self.mapping.look(&self.memory.folios, head, is_data);
        found.unwrap_or_else(|seen| self.store.slots().is_some() && seen != Entry::HOLE)
    }
}

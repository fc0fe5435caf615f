//! Allocation of the backing: storage allocated ahead of writes, and whole folios cleared together
//! with their storage (`punch_hole`, `zero_range`); and the search for data and holes.
//!
//! The protocol of a clear is at the head of `clearing.rs`.

use super::Inode;
use super::resize::Resizing;
use crate::error::Result;
use crate::io::{self, FallocateMode};
use crate::maps::pages::{PinnedPages, Removal};
use crate::page::{Flag, LockedFolio, PAGE_BYTES, PAGE_SHIFT};
use crate::sync::{Ordering, blocking};
use std::ops::Range;

impl Resizing<'_> {
    /// Changes the allocation of the backing, and no byte. Blocks for write-outs.
    pub(crate) fn fallocate(&self, mode: FallocateMode, bytes: Range<u64>) -> Result<()> {
        let inode = self.inode;
        blocking::check("`cutting`, and the backing");
        let _no_write_out = inode.cutting.write();
        inode.store.fallocate(mode, bytes)
    }

    /// Clears `bytes` of the backing, whole units, and their folios. Blocks for write-outs, the
    /// backing, and the locks of the folios.
    pub(crate) fn clear(&self, mode: FallocateMode, bytes: Range<u64>) -> Result<()> {
        let inode = self.inode;
        let pages = bytes.start >> PAGE_SHIFT..bytes.end >> PAGE_SHIFT;
        blocking::check("`cutting`, and the backing");
        let no_write_out = inode.cutting.write();
        if bytes.end >= inode.mapping.len_bytes() {
            // The last folio may be dirty; it will not be written out.
            inode.extend_backing_alone(bytes.end)?;
        }
        let clearing = inode.clearing.get_or_init(Box::default);
        clearing.begin(pages.clone());
        let cleared = inode.store.fallocate(mode, bytes);
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

/// Data and holes of a file with a backing.
impl Inode {
    /// Returns the position of the first data from `position` on, before `len_bytes`.
    pub(crate) fn first_data(&self, position: u64, len_bytes: u64) -> Result<Option<u64>> {
        self.find_stores(&(position..len_bytes), true)?;
        // In this order: a folio that is written out in between is found on the backing.
        let unwritten = self.next_unwritten(position >> PAGE_SHIFT);
        let unwritten = unwritten.map(|index| position.max(index * PAGE_BYTES));
        let stored = io::seek_data(&*self.store.reader(), position)?;
        let first = unwritten.into_iter().chain(stored).min();
        Ok(first.filter(|first| *first < len_bytes))
    }

    /// Returns the position of the first hole from `position` on, at most `len_bytes`.
    pub(crate) fn first_hole(&self, position: u64, len_bytes: u64) -> Result<u64> {
        self.find_stores(&(position..len_bytes), true)?;
        let mut at = position;
        while at < len_bytes {
            // In this order, as in `first_data`.
            if self.unwritten_at(at >> PAGE_SHIFT).is_some() {
                at = self.mapping.end_of_unit(at >> PAGE_SHIFT) * PAGE_BYTES;
                continue;
            }
            match io::seek_hole(&*self.store.reader(), at)? {
                Some(hole) if hole > at => at = hole,
                _ => break,
            }
        }
        Ok(at.min(len_bytes))
    }

    /// Returns the first page from `index` on whose folio has bytes that the backing does not have
    /// yet.
    fn next_unwritten(&self, index: u64) -> Option<u64> {
        let mut index = self.mapping.head_index(index);
        loop {
            index = self.mapping.head_index(self.mapping.table().next_folio(index)?);
            if let Some(found) = self.unwritten_at(index) {
                return Some(found);
            }
            index = self.mapping.end_of_unit(index);
        }
    }

    /// Returns the head of the unit that holds page `index`, if its folio is dirty or being
    /// written.
    fn unwritten_at(&self, index: u64) -> Option<u64> {
        let head = self.mapping.head_index(index);
        let table = self.mapping.table();
        loop {
            // Acquire: pairs with the Release in READ-I1: we see the flags of the folio that this
            // Entry names.
            let seen = table.load(head, Ordering::Acquire);
            if !seen.is_folio() {
                return None;
            }
            let state = self.memory.folio(seen.folio_id()).flags.write_state();
            // Relaxed: the Acquire of `write_state` orders it: the state belonged to that folio.
            let again = table.load(head, Ordering::Relaxed);
            if again.is_folio() && again.folio_id() == seen.folio_id() {
                return (state.is_dirty() || state.is_writing()).then_some(head);
            }
        }
    }
}

//! Gathering: references to resident folios in a row, and what reads as zeros between them.
//!
//! After the batched read proposed for Linux's tmpfs (the mode `SGP_GET`, 2026): up to 31 uptodate
//! folios are referenced at once, without a folio lock. The reference keeps the memory, the Entry
//! vouches for the content. For `copy_to_fd.rs`, which hands frames to the kernel and so must keep
//! them; a read copies by itself and needs none (`copy_stretch.rs`).

use super::File;
use super::access::{Access, OnAllocated};
use crate::page::{BATCH_SLOTS, Flag, FolioRef, PAGE_BYTES, PAGE_SHIFT};
use crate::sync::Ordering;
use crate::sys::copy;
use arrayvec::ArrayVec;
use std::ops::Range;

/// References to folios in a row. What lies between them, and behind the last one, reads as zeros.
#[derive(Debug, Default)]
pub(super) struct ReadBatch<'a> {
    pub(super) folios: ArrayVec<FolioRef<'a>, BATCH_SLOTS>,
    /// One page behind the last one it has.
    pub(super) end: u64,
}

impl File {
    /// References up to 31 READY folios in a row, from the one at `position` on.
    pub(super) fn gather(&self, position: u64, length: u64) -> ReadBatch<'_> {
        let mapping = &self.handle.inode.mapping;
        let inode = &self.handle.inode;
        let visible = mapping.len_bytes().saturating_sub(position).min(length);
        let first = position >> PAGE_SHIFT;
        let mut batch = ReadBatch { folios: ArrayVec::new(), end: first };
        if visible == 0 {
            return batch;
        }
        let end = (position + visible).div_ceil(PAGE_BYTES);
        if end - first > 1 {
            self.touch_descriptors(first..end.min(first + BATCH_SLOTS as u64));
        }
        while batch.end < end && !batch.folios.is_full() {
            // Acquire: pairs with the Release in `set_ready`: the folio is uptodate.
            let seen = mapping.table().load(batch.end, Ordering::Acquire);
            if seen.is_ready() {
                let folio = mapping.try_get_ready(&inode.memory.folios, batch.end, seen);
                let Ok(folio) = folio else { break };
                batch.folios.push(folio);
                batch.end = ((batch.end >> seen.order()) + 1) << seen.order();
            } else {
                let zeros_end = self.zeros_end(batch.end, end);
                if zeros_end == batch.end {
                    break;
                }
                batch.end = zeros_end;
            }
        }
        let references = batch.folios.len() as u64;
        inode.memory.counters.note_lookups(references, 2 * references);
        batch
    }

    /// Touches the descriptors of pages whose counts will be changed: an atomic add waits for its
    /// line, and the next add for it, but these do not wait for each other. Of large folios there
    /// are few.
    fn touch_descriptors(&self, pages: Range<u64>) {
        let (mapping, memory) = (&self.handle.inode.mapping, &self.handle.inode.memory);
        if mapping.order() > 0 {
            return;
        }
        for index in pages.start..pages.end.min(mapping.table().pages()) {
            let seen = mapping.table().load(index, Ordering::Relaxed);
            copy::prefetch_lines(std::ptr::from_ref(memory.folio(seen.folio_id())).cast(), 1);
        }
    }

    /// Fills what reads as zeros, from the first byte on: holes and allocated pages of a memory
    /// file. Returns how many bytes did; they are filled at once, however many pages they are.
    pub(super) fn fill_zeros(&self, buffer: &mut [u8], position: u64) -> usize {
        let inode = &self.handle.inode;
        if !inode.has_holes() {
            return 0;
        }
        let len_bytes = inode.mapping.len_bytes();
        let wanted = len_bytes.saturating_sub(position).min(buffer.len() as u64);
        if wanted == 0 {
            return 0;
        }
        let first = position >> PAGE_SHIFT;
        let zeros_end = self.zeros_end(first, (position + wanted).div_ceil(PAGE_BYTES));
        if zeros_end == first {
            return 0;
        }
        // The length again, with the holes in hand: a cut makes holes, after it has set it. Before
        // them, too: an append fills holes, before it sets it.
        let visible = inode.mapping.len_bytes().saturating_sub(position);
        let length = (zeros_end * PAGE_BYTES - position).min(wanted).min(visible);
        let target = &mut buffer[..length as usize];
        target.fill(0);
        target.len()
    }

    /// How far the file reads as zeros from page `first` on: one page behind the last one that
    /// does, `end` at the most; `first` if that one does not.
    fn zeros_end(&self, first: u64, end: u64) -> u64 {
        let inode = &self.handle.inode;
        if !inode.has_holes() {
            return first;
        }
        let (mut index, mut looked_at) = (first, 0);
        while index < end {
            let holes_end = inode.mapping.table().end_of_uncharged(index);
            if holes_end > index {
                index = holes_end;
                continue;
            }
            looked_at += 1;
            if !self.reads_as_zeros(index) {
                break;
            }
            index = self.handle.end_of_folio(index);
        }
        inode.memory.counters.note_lookups(0, looked_at);
        index.min(end)
    }

    /// Whether a read finds no folio at the page: a hole of a memory file, or a page that was
    /// allocated and never written.
    pub(super) fn reads_as_zeros(&self, index: u64) -> bool {
        let access = Access::Get;
        let inode = &self.handle.inode;
        let head = inode.mapping.head_index(index);
        // Acquire: pairs with the Release in I1: we see the flags of the life this Entry names.
        let seen = inode.mapping.table().load(head, Ordering::Acquire);
        if !seen.is_folio() || seen.is_ready() {
            return inode.store.is_hole(seen) && !access.fills_holes();
        }
        let is_allocated = inode.memory.folio(seen.folio_id()).flags.get(Flag::Allocated);
        // The Acquire of `get` orders this after it: the flag was of that life.
        let is_that_life = || inode.mapping.table().load(head, Ordering::Relaxed) == seen;
        is_allocated && access.on_allocated() == OnAllocated::None && is_that_life()
    }
}

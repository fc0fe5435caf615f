//! Copying what is resident: pages whose frames are neighbours at once, each page validated.
//!
//! Entries are gathered, not references: up to 64 in a row are loaded, their frames copied with one
//! copy, and all of them loaded again ([`Stretch`]). Who holds no reference shares no write: a
//! batch of references, as proposed for reads of tmpfs (`gather.rs`), costs a locked instruction
//! and a line of memory a page, and a page that is evicted or written meanwhile is found out anyway
//! (ablation: `read_modes.rs`). Pages of a region are referenced all the same: they do not stay
//! mapped. The length is read again for each copy, with the Entries in hand. The walk is by
//! position, and a page is left only when the position has moved past it: so a copy that an old
//! length cut short in the middle of a folio goes on in the same folio, not behind it.
//!
//! # Safety
//! Copies out of frames that stay mapped, whatever becomes of their pages, or that it has
//! references to.
#![allow(unsafe_code)]

use super::{File, faults};
use crate::page::{PAGE_BYTES, PAGE_SHIFT, Stretch, is_in_one_page};
use crate::stats::Counter;
use crate::sync::Ordering;
use crate::sys::copy;
use std::ops::Range;

/// So many pages of a region are held at a time: 32 KiB, next to which what a copy costs besides is
/// little. What a reader holds others cannot have, which counts in a cache of a hundred pages.
const HELD_PAGES_MAX: u64 = 8;

/// Attempts at the first page of a stretch, before its lock decides.
const ATTEMPTS_MAX: u32 = 4;

impl File {
    /// Copies what is resident, or reads as zeros, below page `end`, from the first byte on. Stops
    /// before a page that is not, or that somebody is writing, and at the end of the file as it is
    /// at that moment. `in_order`: the bytes follow others that were read; `goes_on`: and more will
    /// be.
    pub(super) fn copy_resident(
        &self,
        buffer: &mut [u8],
        position: u64,
        end: u64,
        in_order: bool,
        goes_on: bool,
    ) -> usize {
        let mut done = 0;
        while done < buffer.len() {
            let at = position + done as u64;
            let left = &mut buffer[done..];
            let in_order = in_order || done > 0;
            // If an old length cuts it short, what follows is not to be put behind it.
            let is_whole = is_in_one_page(at, left.len() as u64);
            let copied = match self.copy_stretch(at, left, end, in_order, goes_on) {
                0 => self.fill_zeros(left, at),
                copied => copied,
            };
            done += copied;
            if copied == 0 || is_whole {
                break;
            }
        }
        let pages = (done as u64).div_ceil(PAGE_BYTES);
        let inode = &self.handle.inode;
        let is_in_place = inode.page_space.is_in_place();
        let hit = if is_in_place { Counter::HitPinned } else { Counter::HitOptimistic };
        inode.memory.counters.add(hit, pages);
        done
    }

    /// Copies from the page at `position` on, as far as frames are neighbours, below page
    /// `end_max`. Returns 0 if that page is not READY, or its writer is faster than we are.
    fn copy_stretch(
        &self,
        position: u64,
        buffer: &mut [u8],
        end_max: u64,
        in_order: bool,
        goes_on: bool,
    ) -> usize {
        // The table has an Entry for every page below the length.
        let len_bytes = self.handle.inode.mapping.len_bytes();
        let visible = len_bytes.saturating_sub(position).min(buffer.len() as u64);
        let first = position >> PAGE_SHIFT;
        if visible == 0 {
            return 0;
        }
        let mut end = (position + visible).div_ceil(PAGE_BYTES).min(end_max);
        let inode = &self.handle.inode;
        let is_in_place = inode.page_space.is_in_place();
        if is_in_place {
            // To copy into a map may be a fault, which may need memory: as little as can be is
            // held.
            let is_fault = end - first > 1 && faults::is_mapped(buffer);
            end = end.min(first + if is_fault { 1 } else { HELD_PAGES_MAX });
        }
        for _ in 0..ATTEMPTS_MAX {
            let mut stretch = Stretch::find(inode.mapping.table(), first..end, is_in_place);
            let _held = is_in_place.then(|| stretch.hold(&inode.memory.folios));
            let Some(copied) = self.copy_once(&stretch, position, buffer, goes_on) else {
                return 0;
            };
            if copied > 0 {
                let pages = first..(position + copied as u64).div_ceil(PAGE_BYTES);
                let goes_on_in_page = in_order && position & (PAGE_BYTES - 1) > 0;
                self.note_uses(pages, in_order, goes_on_in_page);
                return copied;
            }
            self.handle.inode.memory.counters.add(Counter::OptimisticRetry, 1);
            end = first + 1;
        }
        0
    }

    /// Copies a stretch, and tells how many bytes of it are good: 0 if its first page changed;
    /// `None` if there is nothing to copy.
    fn copy_once(
        &self,
        stretch: &Stretch<'_>,
        position: u64,
        buffer: &mut [u8],
        goes_on: bool,
    ) -> Option<usize> {
        let inode = &self.handle.inode;
        let in_page = position & (PAGE_BYTES - 1);
        let start = inode.page_space.page_address(position >> PAGE_SHIFT, stretch.start()?);
        // The length is read again for each copy, with the pages in hand.
        let visible = inode.mapping.len_bytes().saturating_sub(position);
        let in_stretch = stretch.pages() * PAGE_BYTES - in_page;
        let length = in_stretch.min(visible).min(buffer.len() as u64);
        if length == 0 {
            return None;
        }
        let is_last = length == buffer.len() as u64;
        let target = &mut buffer[..length as usize];
        let source = start.wrapping_add(in_page as usize);
        let behind = source.wrapping_add(target.len());
        let next = if is_last && !goes_on { behind } else { self.frame_at(position + length) };
        // Inside a row of frames the processor foresees what comes next; behind its last page not.
        let ahead = if next == behind { 0 } else { target.len().min(PAGE_BYTES as usize) };
        let (most, last) = target.split_at_mut(target.len() - ahead);
        // SAFETY: READY Entries name frames of the arena, which stays mapped (FRAMES-2), or pages
        // of a region, which the references of the caller keep there (REGION-4); these stand in a
        // row, as far as `length` reaches; `target` is the caller's memory.
        unsafe { copy::copy_out(source, most) };
        // SAFETY: as above.
        unsafe { copy::copy_out_ahead(source.wrapping_add(most.len()), last, next) };
        let pages = (in_page + length).div_ceil(PAGE_BYTES);
        let good = stretch.unchanged(pages);
        let references = if inode.page_space.is_in_place() { stretch.pages() } else { 0 };
        inode.memory.counters.note_lookups(references, stretch.pages() + pages);
        let good_bytes = bytes_of(good, in_page, length);
        // The rest is of other pages, perhaps of other files: it is not left to the caller.
        buffer[good_bytes as usize..length as usize].fill(0);
        Some(good_bytes as usize)
    }

    /// Where the byte at `position`, the end of the file at the most, is, if it is resident: to be
    /// touched, not to be read.
    fn frame_at(&self, position: u64) -> *const u8 {
        let inode = &self.handle.inode;
        let index = position >> PAGE_SHIFT;
        let entry = inode.mapping.table().load(index, Ordering::Relaxed);
        inode
            .page_space
            .page_address(index, entry)
            .wrapping_add((position & (PAGE_BYTES - 1)) as usize)
    }

    /// Marks the pages of a copy as used; its first one is no new use if the copy goes on in it.
    fn note_uses(&self, pages: Range<u64>, in_order: bool, goes_on_in_page: bool) {
        let first = pages.start;
        for index in pages.skip(usize::from(goes_on_in_page)) {
            self.note_use(index, in_order || index > first);
        }
    }

    /// Marks a page as used, for the replacement policy (`page/optimistic.rs`).
    pub(super) fn note_use(&self, index: u64, in_order: bool) {
        let inode = &self.handle.inode;
        let is_reused = || self.handle.readahead.is_reused();
        inode.mapping.note_use(&inode.memory.folios, index, in_order, is_reused);
    }
}

/// How many of `length` bytes lie in `pages` pages, if they begin `in_page` bytes into the first.
fn bytes_of(pages: u64, in_page: u64, length: u64) -> u64 {
    (pages * PAGE_BYTES).saturating_sub(in_page).min(length)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_valid_part_of_a_copy_ends_with_a_page() {
        assert_eq!(bytes_of(0, 100, 9000), 0);
        assert_eq!(bytes_of(1, 0, 9000), PAGE_BYTES);
        assert_eq!(bytes_of(2, 100, 9000), 2 * PAGE_BYTES - 100);
        assert_eq!(bytes_of(3, 100, 9000), 9000);
    }
}

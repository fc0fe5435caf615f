//! Holes: pages of a memory file that read as zeros and have neither a folio nor a swap slot.
//!
//! Reads (`read.rs`) and `copy_to_fd` check for holes before they look up a folio. A page that was
//! allocated and never written reads as a hole. A file with a backing has no holes here: a page
//! that is not in memory is on the backing.

use super::File;
use crate::fill::{AccessMode, OnAllocated};
use crate::page::{Flag, PAGE_BYTES, PAGE_SHIFT};
use crate::sync::Ordering;

impl File {
    /// Fills `buffer` with zeros as far as the file reads as zeros from `position` on, in one step.
    /// Returns the number of bytes: 0 if the first page has data.
    pub(super) fn fill_zeros(&self, buffer: &mut [u8], position: u64) -> usize {
        let inode = &self.handle.inode;
        if !inode.store.has_holes() {
            return 0;
        }
        let mut length_max = buffer.len() as u64;
        loop {
            let cuts = inode.mapping.cuts();
            let len_bytes = inode.mapping.len_bytes();
            let wanted = len_bytes.saturating_sub(position).min(length_max);
            if wanted == 0 {
                return 0;
            }
            #[cfg(all(test, not(loom)))]
            crate::sync::test_hook::reach("before holes are looked for");
            let first = position >> PAGE_SHIFT;
            let zeros_end = self.zeros_end(first, (position + wanted).div_ceil(PAGE_BYTES));
            if zeros_end == first {
                return 0;
            }
            #[cfg(all(test, not(loom)))]
            crate::sync::test_hook::reach("after holes were seen");
            // An append fills holes before it sets the length, so the length from before counts. A
            // truncation sets the length before it makes holes: if there was one, again, for a page
            // only, which takes less time than the next truncation.
            if inode.mapping.cuts() == cuts {
                let length = (zeros_end * PAGE_BYTES - position).min(wanted);
                let target = &mut buffer[..length as usize];
                target.fill(0);
                return target.len();
            }
            length_max = length_max.min(PAGE_BYTES - (position & (PAGE_BYTES - 1)));
        }
    }

    /// Returns the end of the pages from `first` on that read as zeros, at most `end`; `first` if
    /// that page does not.
    pub(super) fn zeros_end(&self, first: u64, end: u64) -> u64 {
        let inode = &self.handle.inode;
        if !inode.store.has_holes() {
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
            index = self.handle.inode.mapping.end_of_unit(index);
        }
        inode.memory.counters.note_lookups(0, looked_at);
        index.min(end)
    }

    /// Returns `true` if a read finds no folio at the page: a hole of a memory file, or a page that
    /// was allocated and never written.
    fn reads_as_zeros(&self, index: u64) -> bool {
        let access = AccessMode::Get;
        let inode = &self.handle.inode;
        let head = inode.mapping.head_index(index);
        // Acquire: pairs with the Release in READ-I1: we see the flags of the folio that this Entry
        // names.
        let seen = inode.mapping.table().load(head, Ordering::Acquire);
        if !seen.is_folio() || seen.is_ready() {
            return inode.store.is_hole(seen) && !access.fills_holes();
        }
        let is_allocated = inode.memory.folio(seen.folio_id()).flags.get(Flag::Allocated);
        // The Acquire of `get` orders this after it: the flag belonged to that folio.
        let is_that_folio = || inode.mapping.table().load(head, Ordering::Relaxed) == seen;
        is_allocated && access.on_allocated() == OnAllocated::None && is_that_folio()
    }
}

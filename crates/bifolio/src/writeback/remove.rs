//! Taking pages of a file out of the table because their bytes are no longer wanted: cuts, punched
//! holes, the end of the file's life here.
//!
//! In a memory file that is the end of the bytes, wherever they are: a folio goes, dirty or not,
//! and a slot of the spill is given back. A folio of several units that reaches beyond the range
//! stays, and its part of the range is zeroed in place.

use super::inode::Inode;
use crate::folio::{Flag, FolioRef, LockedFolio};
use crate::mapping::{Lookup, PAGE_BYTES};
use std::ops::Range;

impl Inode {
    /// Drops every folio from byte `position_bytes` (a multiple of the unit) on, dirty or not.
    ///
    /// Nobody may be inserting there: the length has been set, or there is no handle left.
    pub(crate) fn remove_folios_from(&self, position_bytes: u64) {
        self.remove_folios(position_bytes / PAGE_BYTES..u64::MAX, |_| true);
    }

    /// Drops every folio that is clean. Writers may be at work: what they have changed stays.
    pub(crate) fn remove_clean_folios(&self) {
        self.remove_folios(0..u64::MAX, |locked| !locked.flags.get(Flag::Dirty));
    }

    /// Makes whole units of a memory file holes.
    pub(crate) fn punch(&self, pages: Range<u64>) {
        self.remove_folios(pages, |_| true);
    }

    fn remove_folios(&self, pages: Range<u64>, is_unwanted: impl Fn(&LockedFolio<'_>) -> bool) {
        let mut index = pages.start;
        while let Some(found) = self.next_occupied(index).filter(|found| *found < pages.end) {
            index = found;
            let folios = &self.memory.folios;
            let folio = match self.mapping.get_folio(folios, index, &mut 0) {
                Lookup::Folio(folio) => folio,
                Lookup::Absent(seen) => {
                    self.forget_absent(self.mapping.head_index(index), seen);
                    continue;
                }
                Lookup::Refused => continue,
            };
            let locked = folio.lock();
            if locked.owner() != self.address() {
                continue;
            }
            locked.flags.wait_for_writeback();
            let own = locked.index()..locked.index() + locked.pages();
            if !is_unwanted(&locked) {
                index = own.end;
            } else if own.start < pages.start || own.end > pages.end {
                let part = own.start.max(pages.start)..own.end.min(pages.end);
                self.zero_in_place(&folio, &locked, part.start * PAGE_BYTES..part.end * PAGE_BYTES);
                index = own.end;
            } else {
                let table_reference = self.remove_unwanted(&folio, &locked);
                drop(locked);
                drop(table_reference);
            }
        }
    }

    /// Zeroes some bytes of the file that lie in a locked, uptodate folio, for readers at once. In
    /// a memory file the folio is dirty then.
    pub(crate) fn zero_in_place(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
        bytes: Range<u64>,
    ) {
        if !locked.flags.get(Flag::Uptodate) {
            // Allocated and never written: zeros already.
            return;
        }
        if self.is_memory_file() {
            self.mark_dirty(folio, locked);
        }
        let pages = bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES);
        let _window = self.mapping.open_window(locked, pages);
        let start = locked.index() * PAGE_BYTES;
        self.zero_folio(folio, locked, bytes.start - start..bytes.end - start);
    }
}

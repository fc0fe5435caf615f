//! Write sections: changes of the bytes of a locked folio, which optimistic readers then do not
//! take (READ-W1..W4).

use super::{LockedFolio, Mapping};
use crate::sync::{Ordering, fence};
use std::ops::Range;

/// Some pages of a locked folio, closed to optimistic readers while their bytes change. The drop
/// publishes the pages with the next version.
///
/// The holder may change the bytes of the pages. It must drop the section before it unlocks the
/// folio.
#[derive(Debug)]
pub(crate) struct WriteSection<'a> {
    mapping: &'a Mapping,
    pages: Range<u64>,
}

impl Mapping {
    /// Closes pages `pages` (file page indices) of an uptodate `folio` to optimistic readers.
    pub(crate) fn begin_write_section<'a>(
        &'a self,
        folio: &LockedFolio<'_>,
        pages: Range<u64>,
    ) -> WriteSection<'a> {
        let all = self.pages_of(folio);
        debug_assert!(all.start <= pages.start && pages.end <= all.end, "{pages:?} of {all:?}");
        for index in pages.clone() {
            let entry = self.table.load(index, Ordering::Relaxed);
            self.table.store(index, entry.without_ready(), Ordering::Relaxed);
        }
        // Release: pairs with the Acquire fence in `read_validated` (READ-O3): a reader that sees a
        // byte written from here on sees READY cleared.
        fence(Ordering::Release);
        WriteSection { mapping: self, pages }
    }
}

impl Drop for WriteSection<'_> {
    fn drop(&mut self) {
        for index in self.pages.clone() {
            let entry = self.mapping.table.load(index, Ordering::Relaxed);
            if !entry.is_folio() {
                // A forked child, whose table is zeros.
                continue;
            }
            // A write counts as a use: mark the page.
            let next = entry.with_next_version().with_ready().with_referenced();
            // Release: pairs with the Acquire in `read_validated` (READ-O1).
            self.mapping.table.store(index, next, Ordering::Release);
        }
    }
}

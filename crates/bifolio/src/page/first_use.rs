//! The first use of a page that was read ahead, which is not a second one.
//!
//! Called for every page that is read; most are marked as used already.
//!
//! PROTOCOL. The mark of a first use is in the descriptor, and a folio may be moved to another one
//! (`reclaim/relocate.rs`) while somebody reads it, who holds nothing.
//!
//! ```text
//!  USE (here)                                 MOVE, both folios locked
//!  U1 load the Entry                          F1 new READAHEAD = old READAHEAD
//!  U2 READAHEAD of its folio? no: mark        F2 store the Entry (C5 of `collapse.rs`)
//!     the Entry by CAS; it changed: U1        F3 clear old READAHEAD; it was clear: clear
//!  U3 clear READAHEAD; it was clear: U1          new READAHEAD
//! ```
//!
//! - Of U3 and F3 on the old folio one comes first: U3, and F3 passes it on; or F3, and then U3
//!   sees that it came late, and U1 sees F2. The same for U2 that comes after F3: its CAS fails.
//! - F1 before F2: a use between them that finds the new folio without READAHEAD is a second one.
//! - F3 after F2: a use between them clears what nobody looks at any more.
//!
//! Without F3 a page that was used in the middle of a move counts as never used, and its next use
//! as the first.

use super::Mapping;
use crate::page::{Flag, Folios};
use crate::sync::Ordering;

impl Mapping {
    /// Marks page `index` as used, for the replacement policy. The first use of a folio that was
    /// read ahead is what it was read for, and counts as its fill does: it ends with the last page,
    /// or where the reader leaves the order. One that is not reused is not marked.
    #[inline]
    pub(crate) fn note_use(
        &self,
        folios: &Folios,
        index: u64,
        in_order: bool,
        is_reused: impl Fn() -> bool,
    ) {
        // Again only if the page was used, moved or evicted meanwhile.
        while !self.try_note_use(folios, index, in_order, &is_reused) {}
    }

    fn try_note_use(
        &self,
        folios: &Folios,
        index: u64,
        in_order: bool,
        is_reused: impl Fn() -> bool,
    ) -> bool {
        // Acquire: pairs with the Release in `store_marked` (F2): who sees F2 sees F1. What is seen
        // late is found out (U2, U3).
        let seen = self.table().load(index, Ordering::Acquire);
        // Marked already: most are, and their descriptors need not be looked at.
        if !seen.is_folio() || seen.is_referenced() {
            return true;
        }
        let flags = &folios.get(seen.folio_id()).flags;
        if !flags.get(Flag::Readahead) {
            return !is_reused() || self.table().mark_referenced(index, seen);
        }
        let is_over = !in_order || index + 1 == self.end_of_unit(index);
        !is_over || flags.clear(Flag::Readahead)
    }
}

//! The names of the LRU lists (`lru.rs`), and the pages that each may have.

use crate::page::{Flag, Folio};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListKind {
    /// Folios filled a short time ago.
    Fresh,
    /// Folios that were filled earlier. Those that are not used here are evicted.
    Old,
    /// Folios that were used on the old list, or evicted from there too early.
    Active,
}

impl ListKind {
    /// Returns the list that a folio is on, was isolated from, or will be added to.
    pub(crate) fn of(folio: &Folio) -> Self {
        if folio.flags.get(Flag::Active) {
            Self::Active
        } else if folio.flags.get(Flag::Fresh) {
            Self::Fresh
        } else {
            Self::Old
        }
    }
}

/// Part of all listed pages that FRESH and OLD keep, each.
const SHARE_DIVISOR: u64 = 10;
/// Part of all listed pages in FRESH above which pages that reach its tail keep their marks: memory
/// was filled without reclaim, so they were there long enough.
const CROWDED_DIVISOR: u64 = 5;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ListSizes {
    pub(crate) fresh_pages: u64,
    pub(crate) old_pages: u64,
    pub(crate) active_pages: u64,
}

impl ListSizes {
    pub(crate) fn listed_pages(&self) -> u64 {
        self.fresh_pages + self.old_pages + self.active_pages
    }

    /// Returns the number of pages on probation: on FRESH and OLD.
    pub(crate) fn inactive_pages(&self) -> u64 {
        self.fresh_pages + self.old_pages
    }

    fn share_pages(&self) -> u64 {
        self.listed_pages() / SHARE_DIVISOR
    }

    /// Returns the number of pages that FRESH has beyond its share.
    pub(crate) fn fresh_excess_pages(&self) -> u64 {
        self.fresh_pages.saturating_sub(self.share_pages())
    }

    /// Returns the number of pages that OLD has beyond its share, or half of it if folios are also
    /// evicted from within the list (`reclaim/evacuate.rs`): active ones must not make up for them.
    pub(crate) fn old_excess_pages(&self, evicts_early: bool) -> u64 {
        let share_pages = self.share_pages();
        self.old_pages.saturating_sub(if evicts_early { share_pages / 2 } else { share_pages })
    }

    /// Returns `true` if pages that are moved from FRESH to OLD keep their marks.
    pub(crate) fn is_crowded(&self) -> bool {
        self.fresh_pages > self.listed_pages() / CROWDED_DIVISOR
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn lists_have_an_excess_beyond_a_tenth() {
        let sizes = |fresh_pages, old_pages, active_pages| ListSizes {
            fresh_pages,
            old_pages,
            active_pages,
        };
        let excess = |sizes: ListSizes| (sizes.fresh_excess_pages(), sizes.old_excess_pages(false));
        assert_eq!(excess(sizes(10, 10, 80)), (0, 0));
        assert_eq!(excess(sizes(13, 12, 75)), (3, 2));
        assert_eq!(sizes(13, 12, 75).old_excess_pages(true), 7);
        // No list has a minimum: the last page of the smallest cache can be evicted.
        assert_eq!(excess(sizes(1, 0, 0)), (1, 0));
        assert!(sizes(21, 0, 79).is_crowded() && !sizes(20, 0, 80).is_crowded());
    }
}

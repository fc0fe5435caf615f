//! Types that the inode of a file in place and [`MappedPages`](super::MappedPages) hand to each
//! other.

use crate::error::Error;
use crate::page::{FolioRef, LockedFolio};
use std::fmt::Debug;

/// Treatment of a page in place that a pin still references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PinnedPages {
    /// The page stays until its references are dropped, or becomes part of the next folio there.
    Kept,
    /// The page is zeroed for maps and for the holders of references, and is no hole.
    Zeroed,
}

/// Memory that pages in place are written out from.
#[derive(Debug)]
pub(crate) enum WriteSource {
    /// The pages themselves.
    Pages,
    /// Copies: the program may store to the pages meanwhile.
    Copies,
    /// None: the program has discarded at least one of the pages. The error is that of the first.
    Discarded(Error),
}

/// Folios of a file in place that are being removed from its table.
pub(crate) trait MappedRemoval<'a>: Debug {
    /// Removes a folio from the table, dirty or not. No write-out of it is in flight.
    fn remove(&mut self, folio: FolioRef<'a>, locked: LockedFolio<'a>);

    /// Ends the removals that have begun: nothing is frozen any more. So does the drop.
    fn finish(&mut self);
}

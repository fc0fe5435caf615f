//! Files whose pages maps see: what their inodes hand to [`MappedPages`](super::MappedPages), and
//! the removal of pages, which such a file does in its own way.

use super::{Inode, MappedPages};
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
    /// Removes a folio as [`Removal::remove`] does.
    fn remove(&mut self, folio: FolioRef<'a>, locked: LockedFolio<'a>);

    /// Ends the removals that have begun: nothing is frozen any more. So does the drop.
    fn finish(&mut self);
}

/// Folios being removed from the table. Those in place are unmapped several at a time, with one TLB
/// flush.
#[derive(Debug)]
pub(crate) struct Removal<'a> {
    inode: &'a Inode,
    mapped: Option<Box<dyn MappedRemoval<'a> + 'a>>,
}

impl<'a> Removal<'a> {
    pub(crate) fn new(inode: &'a Inode, pinned: PinnedPages) -> Self {
        let begin = |mapped: &'a dyn MappedPages| mapped.begin_removal(inode, pinned);
        Self { inode, mapped: inode.mapped.as_deref().map(begin) }
    }

    /// Removes a folio from the table, dirty or not. No write-out of it is in flight.
    pub(crate) fn remove(&mut self, folio: FolioRef<'a>, locked: LockedFolio<'a>) {
        match &mut self.mapped {
            Some(mapped) => mapped.remove(folio, locked),
            None => self.inode.unlink(folio, locked),
        }
    }

    pub(crate) fn finish(&mut self) {
        if let Some(mapped) = &mut self.mapped {
            mapped.finish();
        }
    }
}

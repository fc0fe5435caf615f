//! Folios that the calling thread has pinned for changes (`PageRefMut`).
//!
//! A `PageRefMut` holds its folio's lock and stays on its thread. A call of that thread that needs
//! the folio would deadlock, so it checks this list before it waits, and returns an error.

use crate::error::{Error, ErrorKind, Result};
use crate::inode::Inode;
use crate::page::PAGE_BYTES;
use std::cell::RefCell;
use std::ops::Range;

pub(crate) const ALL_PAGES: Range<u64> = 0..u64::MAX;

#[derive(Debug)]
pub(crate) struct OwnPin {
    inode: u64,
    pages: Range<u64>,
}

thread_local! {
    /// Address of the inode, and pages.
    static PINNED: RefCell<Vec<(u64, Range<u64>)>> = const { RefCell::new(Vec::new()) };
}

impl OwnPin {
    /// Records that the calling thread holds the lock of the folio with these pages.
    pub(crate) fn new(inode: &Inode, pages: Range<u64>) -> Self {
        let own = Self { inode: inode.address, pages };
        PINNED.with_borrow_mut(|pinned| pinned.push((own.inode, own.pages.clone())));
        own
    }
}

impl Drop for OwnPin {
    fn drop(&mut self) {
        // A thread that exits may have dropped its list before; it makes no further calls then.
        let _ = PINNED.try_with(|pinned| {
            let mut pinned = pinned.borrow_mut();
            let is_own =
                |(inode, pages): &(u64, Range<u64>)| *inode == self.inode && *pages == self.pages;
            if let Some(place) = pinned.iter().position(is_own) {
                pinned.swap_remove(place);
            }
        });
    }
}

/// Fails if the calling thread has pinned a folio with some of `pages`, whose lock it would wait
/// for.
pub(crate) fn check(inode: &Inode, pages: &Range<u64>) -> Result<()> {
    let overlaps = |(other, theirs): &&(u64, Range<u64>)| {
        *other == inode.address && theirs.start < pages.end && pages.start < theirs.end
    };
    let found = PINNED.try_with(|pinned| {
        let pinned = pinned.borrow();
        pinned.iter().find(overlaps).map(|(_, pages)| pages.clone())
    });
    let Some(pages) = found.ok().flatten() else { return Ok(()) };
    let (start, end) = (pages.start * PAGE_BYTES, pages.end * PAGE_BYTES);
    let text = format!("{} bytes at {start} are a PageRefMut of the calling thread", end - start);
    Err(Error::new(ErrorKind::PinnedByCaller, text).in_file(inode.name()).at(start..end))
}

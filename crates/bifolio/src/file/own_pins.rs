//! The folios that the calling thread has pinned to change them ([`PinMut`](super::PinMut)).
//!
//! A `PinMut` holds its folio's lock and stays on its thread. A call of that thread which needs the
//! folio would wait for itself: it looks here, before it waits, and gets an error.

use crate::error::{ErrorKind, Result};
use crate::page::PAGE_BYTES;
use crate::writeback::Inode;
use std::cell::RefCell;
use std::ops::Range;

/// All pages of a file.
pub(super) const ALL_PAGES: Range<u64> = 0..u64::MAX;

/// The folio of a `PinMut`, for as long as that lives.
#[derive(Debug)]
pub(super) struct OwnPin {
    inode: usize,
    pages: Range<u64>,
}

thread_local! {
    /// The inode, by its address, and the pages of each folio.
    static PINNED: RefCell<Vec<(usize, Range<u64>)>> = const { RefCell::new(Vec::new()) };
}

impl OwnPin {
    /// Notes that the calling thread has locked the folio of these pages, to keep it.
    pub(super) fn new(inode: &Inode, pages: Range<u64>) -> Self {
        let own = Self { inode: address_of(inode), pages };
        PINNED.with_borrow_mut(|pinned| pinned.push((own.inode, own.pages.clone())));
        own
    }
}

impl Drop for OwnPin {
    fn drop(&mut self) {
        // A thread that ends may have dropped its list before; then nothing looks there again.
        let _ = PINNED.try_with(|pinned| {
            let mut pinned = pinned.borrow_mut();
            let is_own =
                |(inode, pages): &(usize, Range<u64>)| *inode == self.inode && *pages == self.pages;
            if let Some(place) = pinned.iter().position(is_own) {
                pinned.swap_remove(place);
            }
        });
    }
}

/// Refuses a call that would wait for a folio with some of `pages` that its own thread has pinned.
pub(super) fn check(inode: &Inode, pages: &Range<u64>) -> Result<()> {
    let address = address_of(inode);
    let overlaps = |(other, theirs): &&(usize, Range<u64>)| {
        *other == address && theirs.start < pages.end && pages.start < theirs.end
    };
    let found = PINNED.try_with(|pinned| {
        let pinned = pinned.borrow();
        pinned.iter().find(overlaps).map(|(_, pages)| pages.clone())
    });
    let Some(pages) = found.ok().flatten() else { return Ok(()) };
    let kind = ErrorKind::PinnedByCaller {
        file: inode.name(),
        position_bytes: pages.start * PAGE_BYTES,
        length_bytes: (pages.end - pages.start) * PAGE_BYTES,
    };
    Err(kind.into())
}

fn address_of(inode: &Inode) -> usize {
    std::ptr::from_ref(inode).addr()
}

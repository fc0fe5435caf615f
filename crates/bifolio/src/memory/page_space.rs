//! Location of the pages of a file in memory: the interface behind which mappable files differ from
//! others.
//!
//! In the arena, a page is in the frame that its Entry names. Evicting it only changes the Entry;
//! its frame stays readable and is reused by another folio (FRAMES-2). In a region, the page at
//! index i is at base + i * 4096, where maps see it: it is installed whole from staging memory and
//! evicted by unmapping, and every access holds a reference (REGION-4).
//!
//! # Safety
//! `install` passes on the promises of its caller.
#![allow(unsafe_code)]

use super::region::Staging;
use super::{Arena, FrameKind, Region};
use crate::page::{Entry, FolioId, PAGE_BYTES};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// The memory that holds the pages of one file.
#[derive(Clone, Debug)]
pub(crate) enum PageSpace {
    Arena(Arc<Arena>),
    Region(Arc<Region>),
}

/// Addresses.
impl PageSpace {
    /// Returns the address that others are relative to: by frame in the arena, by index in a
    /// region.
    pub(crate) fn base(&self) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.base(),
            Self::Region(region) => region.base(),
        }
    }

    /// Returns the address of the first byte of the folio `id`, whose first page is at `index`.
    #[inline(always)]
    pub(crate) fn address(&self, id: FolioId, index: u64) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.address(id),
            Self::Region(region) => region.address(index),
        }
    }

    /// Returns the address of the page `index`, whose Entry is `seen` and READY.
    #[inline(always)]
    pub(crate) fn page_address(&self, index: u64, seen: Entry) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.base().wrapping_add(seen.frame_offset_bytes()),
            Self::Region(region) => region.address(index),
        }
    }

    /// Returns the kind of frames to allocate for a folio of `order`, after that of `near` if
    /// possible.
    pub(crate) fn frame_kind(&self, order: u8, near: Option<FolioId>) -> FrameKind {
        match self {
            Self::Arena(_) => FrameKind::Arena { order, near },
            Self::Region(_) => FrameKind::Region,
        }
    }

    /// Returns `true` if the address of a page depends only on its index, and every access needs a
    /// reference.
    pub(crate) fn is_in_place(&self) -> bool {
        matches!(self, Self::Region(_))
    }

    /// Returns the region, for operations that only mapped files have.
    pub(crate) fn region(&self) -> Option<&Arc<Region>> {
        match self {
            Self::Arena(_) => None,
            Self::Region(region) => Some(region),
        }
    }
}

/// Fills.
impl PageSpace {
    /// Returns the staging memory into which pages are filled; `None` if they are filled in their
    /// frames.
    pub(crate) fn staging(&self) -> Option<&Arc<Staging>> {
        self.region().map(|region| &region.regions.staging)
    }

    /// Makes the bytes of locked folios that are not uptodate visible to readers, for a range of
    /// whole pages. Returns the number of pages installed, from the first one on: all of them,
    /// unless there is an error.
    ///
    /// # Errors
    /// The kernel has no memory for a page of a region.
    ///
    /// # Safety
    /// `source` is readable for as many pages, is in no region, and is not modified during the
    /// call.
    pub(crate) unsafe fn install(
        &self,
        pages: Range<u64>,
        source: *const u8,
        will_be_stored: bool,
    ) -> (u64, io::Result<()>) {
        match self {
            Self::Arena(_) => (pages.end - pages.start, Ok(())),
            // SAFETY: as the caller promises.
            Self::Region(region) => unsafe { region.install(pages, source, will_be_stored) },
        }
    }

    /// Clears the poison of `pages`, so that touching them tries to fill them again.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub(crate) fn clear_poison(&self, pages: Range<u64>) -> io::Result<()> {
        self.region().map_or(Ok(()), |region| region.clear_poison(pages))
    }
}

/// Pages in use by others.
impl PageSpace {
    /// Returns `true` if an orphan keeps the page in memory, whatever happens to its folio.
    pub(crate) fn is_held(&self, index: u64) -> bool {
        self.region().is_some_and(|region| region.is_held(index))
    }

    /// Returns the pages that belong to truncated folios with references: maps still see them.
    pub(crate) fn orphaned_among(&self, pages: Range<u64>) -> Vec<u64> {
        self.region().map_or_else(Vec::new, |region| region.orphaned_among(pages))
    }

    /// Returns the parts of `pages` that are mapped: sorted and disjoint.
    pub(crate) fn mapped_among(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
        self.region().map_or_else(Vec::new, |region| region.mapped.among(pages))
    }

    /// Returns the region if raw writers may store to it, so that it must be searched for stores.
    pub(crate) fn tracked(&self) -> Option<&Arc<Region>> {
        self.region().filter(|region| region.is_tracked())
    }
}

/// The length of the file.
impl PageSpace {
    /// Announces that the file is about to grow from `len_bytes` to `new_len_bytes`. Faults in the
    /// new part wait until [`Self::end_growth`].
    ///
    /// # Errors
    /// The kernel has no memory.
    pub(crate) fn begin_growth(&self, len_bytes: u64, new_len_bytes: u64) -> io::Result<()> {
        let pages = len_bytes.div_ceil(PAGE_BYTES)..new_len_bytes.div_ceil(PAGE_BYTES);
        self.region().map_or(Ok(()), |region| region.begin_growth(pages))
    }

    /// Ends the growth, whether or not the file grew: faults that were refused because of the old
    /// length are judged again (R3).
    pub(crate) fn end_growth(&self) {
        if let Self::Region(region) = self {
            region.end_growth();
        }
    }
}

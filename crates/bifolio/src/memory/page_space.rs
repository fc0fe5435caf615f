//! Where a file's pages are while they are in memory: the seam behind which files that can be
//! mapped differ from others.
//!
//! In the arena a page has the frame that its Entry names, wherever that is; it leaves by being
//! forgotten, and its bytes stay readable, as those of somebody else (FRAMES-2). In a region the
//! page at index i has its place at base + i * 4096, where maps see it: its bytes come there whole,
//! from staging memory, it leaves by being unmapped, and whoever touches it holds a reference
//! (REGION-4).
//!
//! # Safety
//! `install` passes on what its caller promises.
#![allow(unsafe_code)]

use super::region::Staging;
use super::{Arena, FrameKind, Region};
use crate::page::{Entry, FolioId, PAGE_BYTES};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// See the head of the file.
#[derive(Clone, Debug)]
pub(crate) enum PageSpace {
    Arena(Arc<Arena>),
    Region(Arc<Region>),
}

/// Places.
impl PageSpace {
    /// The address that others are counted from: by frame in the arena, by index in a region.
    pub(crate) fn base(&self) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.base(),
            Self::Region(region) => region.base(),
        }
    }

    /// Address of the first byte of the folio `id`, whose first page is at `index`.
    #[inline(always)]
    pub(crate) fn address(&self, id: FolioId, index: u64) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.address(id),
            Self::Region(region) => region.address(index),
        }
    }

    /// Address of the page `index`, whose Entry is `seen`: a READY one.
    #[inline(always)]
    pub(crate) fn page_address(&self, index: u64, seen: Entry) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.base().wrapping_add(seen.frame_offset_bytes()),
            Self::Region(region) => region.address(index),
        }
    }

    /// The frames to allocate for a folio of `order`, after that of `near` if possible.
    pub(crate) fn frame_kind(&self, order: u8, near: Option<FolioId>) -> FrameKind {
        match self {
            Self::Arena(_) => FrameKind::Arena { order, near },
            Self::Region(_) => FrameKind::Region,
        }
    }

    /// Whether a page has its place by its index, and is touched with a reference only.
    pub(crate) fn is_in_place(&self) -> bool {
        matches!(self, Self::Region(_))
    }

    /// The region, for what only maps have.
    pub(crate) fn region(&self) -> Option<&Arc<Region>> {
        match self {
            Self::Arena(_) => None,
            Self::Region(region) => Some(region),
        }
    }
}

/// Bytes on their way in.
impl PageSpace {
    /// Where pages wait until they are whole; `None` where they are filled in their frames.
    pub(crate) fn staging(&self) -> Option<&Arc<Staging>> {
        self.region().map(|region| &region.regions.staging)
    }

    /// Puts the bytes of locked folios that are not uptodate, whole pages in a row, where readers
    /// see them. Answers how many are there, from the first on: all, unless there is an error.
    ///
    /// # Errors
    /// The kernel has no memory for a page of a region.
    ///
    /// # Safety
    /// At `source` are as many pages, which nobody changes, in no region.
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

    /// Pages that could not be had may be tried again.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub(crate) fn clear_poison(&self, pages: Range<u64>) -> io::Result<()> {
        self.region().map_or(Ok(()), |region| region.clear_poison(pages))
    }
}

/// Pages that others have hold of.
impl PageSpace {
    /// Whether others may write to the page, or still have it, so that it stays where it is.
    pub(crate) fn is_held(&self, index: u64) -> bool {
        self.region().is_some_and(|region| region.is_held(index))
    }

    /// Pages that are cut off and that somebody has hold of: maps see them.
    pub(crate) fn orphaned_among(&self, pages: Range<u64>) -> Vec<u64> {
        self.region().map_or_else(Vec::new, |region| region.orphaned_among(pages))
    }

    /// Which of `pages` have maps now: in order, and apart from each other.
    pub(crate) fn mapped_among(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
        self.region().map_or_else(Vec::new, |region| region.mapped.among(pages))
    }

    /// The region, if raw writers may store to it: their stores are to be looked for.
    pub(crate) fn tracked(&self) -> Option<&Arc<Region>> {
        self.region().filter(|region| region.is_tracked())
    }
}

/// The length of the file.
impl PageSpace {
    /// The file is about to grow from `len_bytes` to `new_len_bytes`: until [`Self::end_growth`]
    /// whoever touches what it gets waits.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub(crate) fn begin_growth(&self, len_bytes: u64, new_len_bytes: u64) -> io::Result<()> {
        let pages = len_bytes.div_ceil(PAGE_BYTES)..new_len_bytes.div_ceil(PAGE_BYTES);
        self.region().map_or(Ok(()), |region| region.begin_growth(pages))
    }

    /// It has grown, or has not: faults that were refused by the length are judged again (R3).
    pub(crate) fn end_growth(&self) {
        if let Self::Region(region) = self {
            region.end_growth();
        }
    }
}

//! The memory that holds the pages of one file, and what a fill of them writes to: the interface
//! behind which files that can be mapped differ from others.
//!
//! # Safety
//! Shares an address between threads, and never dereferences it.
#![allow(unsafe_code)]

use super::arena::{Arena, FrameKind};
use super::in_place::{InPlace, StagedPages};
use super::region_pages::RecentReads;
use crate::error::{Error, Result};
use crate::page::{Entry, FolioId, PAGE_BYTES};
use crate::stats::{Counter, Counters};
use crate::sync::Share;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// The memory that holds the pages of one file.
///
/// In the arena, a page is in the frame that its Entry names, which stays readable (FRAMES-2), and
/// evicting a folio only makes its frame free again. In place, the page at index i is at base + i *
/// 4096, where maps see it: it is installed whole from staging memory, evicted by unmapping, and
/// accessed with a reference (REGION-4).
#[derive(Clone, Debug)]
pub(crate) enum PageSpace {
    Arena(Arc<Arena>),
    InPlace { base: Base, ops: Arc<dyn InPlace> },
}

/// Address of the page 0 of a file whose pages are in place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Base(*mut u8);

// SAFETY: an address; its users say why they may access the memory there.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

/// The memory that a fill writes to: staging memory for pages in place, which are then installed
/// from it; otherwise none but the frames of the folios.
#[derive(Debug, Default)]
pub(crate) struct FillTarget {
    staged: Option<Box<dyn StagedPages>>,
    /// Set if raw stores to the pages are expected soon.
    pub(crate) will_be_stored: bool,
}

/// Maximum number of folios in place that are checked, installed with one call, and unlocked
/// together: the reader of the first page of a transfer continues while the others follow. With
/// 256, the slowest read of a sequential scan takes up to 0.63 ms instead of 0.49 ms; with 16, the
/// scan needs a tenth more CPU.
const INSTALLED_TOGETHER: usize = 64;

impl FillTarget {
    pub(crate) fn pages_max(&self) -> u64 {
        self.staged.as_ref().map_or(u64::MAX, |staged| staged.pages() as u64)
    }

    /// Makes room for up to `pages` more pages, without waiting.
    pub(crate) fn extend(&mut self, pages: usize) {
        self.staged.iter_mut().for_each(|staged| staged.extend(pages));
    }

    pub(crate) fn shrink(&mut self, pages: usize) {
        self.staged.iter_mut().for_each(|staged| staged.shrink(pages));
    }

    /// Returns the address that the bytes of a folio are read to; `None` for that of its frame.
    pub(crate) fn address(&self, number: usize) -> Option<*mut u8> {
        self.staged.as_ref().map(|staged| staged.address(number))
    }

    pub(crate) fn published_together(&self) -> usize {
        // In an arena, the reader copies each frame while it is in the CPU's cache.
        if self.staged.is_some() { INSTALLED_TOGETHER } else { 1 }
    }

    /// Notes that `pages` adjacent pages are about to be read, if they are in place.
    pub(crate) fn note_read(&self, region_reads: &RecentReads, pages: u64) {
        if self.staged.is_some() {
            region_reads.note_read(pages);
        }
    }
}

/// Pages in place that are referenced at a time, at most (32 KiB): a larger batch gains nothing,
/// and other threads cannot evict the pages, which matters in a cache of 100 pages.
const HELD_TOGETHER: u64 = 8;

impl PageSpace {
    pub(crate) fn in_place(ops: Arc<dyn InPlace>) -> Self {
        Self::InPlace { base: Base(ops.base()), ops }
    }

    /// Returns the address that others are relative to: by frame in the arena, by index in place.
    pub(crate) fn base(&self) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.base(),
            Self::InPlace { base, .. } => base.0,
        }
    }

    /// Returns the address of the first byte of the folio `id`, whose first page is at `index`.
    #[inline(always)]
    pub(crate) fn address(&self, id: FolioId, index: u64) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.address(id),
            Self::InPlace { base, .. } => base.0.wrapping_add((index * PAGE_BYTES) as usize),
        }
    }

    /// Returns the address of the page `index`, whose Entry is `seen` and READY.
    #[inline(always)]
    pub(crate) fn page_address(&self, index: u64, seen: Entry) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.base().wrapping_add(seen.frame_offset_bytes()),
            Self::InPlace { base, .. } => base.0.wrapping_add((index * PAGE_BYTES) as usize),
        }
    }

    /// Returns the kind of frames to allocate for a folio of `order`, after that of `near` if
    /// possible.
    pub(crate) fn frame_kind(&self, order: u8, near: Option<FolioId>) -> FrameKind {
        match self {
            Self::Arena(_) => FrameKind::Arena { order, near },
            Self::InPlace { .. } => FrameKind::Region,
        }
    }

    /// Returns how many of the first `bytes` bytes are copied without references to their folios.
    pub(crate) fn bytes_without_references(&self, bytes: u64) -> u64 {
        if self.is_in_place() { 0 } else { bytes }
    }

    /// Returns the number of folios that one copy holds references to; `None` if it needs none.
    pub(crate) fn held_together(&self) -> Option<u64> {
        self.is_in_place().then_some(HELD_TOGETHER)
    }

    pub(crate) fn count_hits(&self, counters: &Counters, pages: u64) {
        let hit = if self.is_in_place() { Counter::HitPinned } else { Counter::HitOptimistic };
        counters.add(hit, pages);
    }

    /// Returns the memory of the file called `name`, if it can be mapped.
    pub(crate) fn mappable(&self, name: impl FnOnce() -> String) -> Result<&Arc<dyn InPlace>> {
        self.ops().ok_or_else(|| Error::not_mappable(name()))
    }

    /// Returns `true` if the address of a page depends only on its index, and every access needs a
    /// reference.
    pub(crate) fn is_in_place(&self) -> bool {
        self.ops().is_some()
    }

    pub(crate) fn ops(&self) -> Option<&Arc<dyn InPlace>> {
        match self {
            Self::Arena(_) => None,
            Self::InPlace { ops, .. } => Some(ops),
        }
    }

    /// Takes the memory for a fill of up to `pages` pages that is no frame: staging memory, of the
    /// `share` of a device. Waits for it if it `may_wait`; otherwise returns `None`
    /// if there is none.
    pub(crate) fn fill_target(
        &self,
        pages: u64,
        share: &Share,
        may_wait: bool,
    ) -> Option<FillTarget> {
        let Some(ops) = self.ops() else { return Some(FillTarget::default()) };
        let staged = Some(ops.stage(pages as usize, share, may_wait)?);
        Some(FillTarget { staged, will_be_stored: false })
    }

    /// Returns the length of a readahead window of at most `pages` pages: staging memory has room
    /// for several.
    pub(crate) fn window_pages(&self, pages: u64) -> u64 {
        self.ops().map_or(pages, |ops| pages.min(ops.window_pages()))
    }

    /// Returns the number of pages that one file reads ahead at a time: `of_frames` in the arena.
    pub(crate) fn pages_in_flight(&self, of_frames: u64) -> u64 {
        self.ops().map_or(of_frames, |ops| ops.pages_in_flight())
    }

    /// Makes the bytes that a fill has read to `target`, for the locked folios of `pages`, visible
    /// to readers of a map: they are those from the folio `number` of the fill on. Returns the
    /// number of pages that are visible, from the first on: all, unless the kernel has no memory.
    pub(crate) fn publish(
        &self,
        target: &FillTarget,
        number: usize,
        pages: Range<u64>,
        counters: &Counters,
    ) -> (u64, io::Result<()>) {
        let (Some(ops), Some(staged)) = (self.ops(), &target.staged) else {
            return (pages.end - pages.start, Ok(()));
        };
        let (there, installed) = ops.publish(&**staged, number, pages, target.will_be_stored);
        counters.add(Counter::MapIn, there);
        (there, installed)
    }

    /// Clears the poison of `pages`, so that touching them tries to fill them again. Fails if the
    /// kernel has no memory.
    pub(crate) fn clear_poison(&self, pages: Range<u64>) -> Result<()> {
        let cleared = self.ops().map_or(Ok(()), |ops| ops.clear_poison(pages));
        cleared.map_err(|source| Error::memory("a page of a map", source))
    }

    /// Returns the pages that belong to truncated folios with references: maps still see them.
    pub(crate) fn orphaned_among(&self, pages: Range<u64>) -> Vec<u64> {
        self.ops().map_or_else(Vec::new, |ops| ops.orphaned_among(pages))
    }

    /// Returns the parts of `pages` that are mapped: sorted and disjoint.
    pub(crate) fn mapped_among(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
        self.ops().map_or_else(Vec::new, |ops| ops.mapped_among(pages))
    }

    /// Ends the growth, whether or not the file grew: faults that were refused because of the old
    /// length are judged again (STRAY-R3).
    pub(crate) fn end_growth(&self) {
        if let Some(ops) = self.ops() {
            ops.end_growth();
        }
    }
}

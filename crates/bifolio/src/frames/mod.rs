//! Frames: the memory folios live in, and the budget that bounds it.
//!
//! Two kinds. The arena (`arena.rs`): huge-page frames whose number is that of their descriptor;
//! evicting is reusing, without any page-table work. A region (`region.rs`): address space of one
//! file that can be mapped, where the page at index i has its place; evicting is unmapping. Above,
//! `reclaim` decides who gets a frame and who must give one back; here is only what is free, where
//! it lies (`extents.rs`), and what everything costs. [`Frames`] says which kind a file has.
//!
//! Invariants:
//! - FRAMES-1: what is resident (chunks in use, descriptors ever used, charged tables) never
//!   exceeds the bound: each is charged before it is touched.
//! - FRAMES-2: a frame's address is readable for the life of the cache, whatever became of its
//!   folio: an optimistic reader may come late. A released chunk reads as zeros.
//! - FRAMES-3: a frame belongs to one folio from `allocate` to `free`, both under the arena's lock:
//!   that lock orders the last life of a frame before the next.

mod arena;
mod bits;
mod budget;
mod chunk;
mod chunk_allocation;
mod evacuation;
mod extents;
mod fault_clock;
mod fault_errors;
mod mapped;
mod orphans;
mod region;
mod region_pages;
mod region_reads;
mod regions;
mod soundness;
mod staging;
mod watcher;

pub(crate) use arena::Arena;
pub(crate) use chunk::{CHUNK_BYTES, CHUNK_PAGES};
pub(crate) use evacuation::{Evacuation, Purpose};
pub(crate) use extents::EXTENT_PAGES;
pub(crate) use fault_clock::FAULT_CLOCK;
pub(crate) use orphans::Orphans;
pub(crate) use region::{Refusal, Region};
pub(crate) use region_reads::RegionReads;
pub(crate) use regions::{BounceBuffer, Regions, RegionsSize};
pub(crate) use soundness::Soundness;
pub(crate) use staging::Staged;
pub(crate) use watcher::ChunkWatcher;

use crate::folio::FolioId;
use std::sync::Arc;

/// log2 of the pages in the largest folio: a whole chunk.
pub(crate) const ORDER_MAX: u8 = 9;

/// Where the pages of a file are.
#[derive(Clone, Debug)]
pub(crate) enum Frames {
    Arena(Arc<Arena>),
    Region(Arc<Region>),
}

impl Frames {
    /// Address of the first byte of the folio `id`, whose first page is at `index`.
    #[inline(always)]
    pub(crate) fn address(&self, id: FolioId, index: u64) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.address(id),
            Self::Region(region) => region.address(index),
        }
    }

    /// The region, if it is one.
    pub(crate) fn region(&self) -> Option<&Arc<Region>> {
        match self {
            Self::Arena(_) => None,
            Self::Region(region) => Some(region),
        }
    }
}

/// What an allocation is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FrameKind {
    /// Frames of the arena for a folio of `order`, after those of `near` if possible.
    Arena { order: u8, near: Option<FolioId> },
    /// A page of a region.
    Region,
}

impl FrameKind {
    /// How many pages.
    pub(crate) fn pages(self) -> u64 {
        match self {
            Self::Arena { order, .. } => 1 << order,
            Self::Region => 1,
        }
    }
}

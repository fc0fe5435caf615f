//! The arena: one reservation, cut into 2 MiB chunks; frame i belongs to descriptor i.
//!
//! Called by `reclaim` (allocate, free, evacuate) and by whoever charges metadata. A chunk is made
//! resident when the first folio needs it and the budget allows, and keeps its memory while frames
//! come and go in it: a hit, a miss and an eviction do no page-table work.
//!
//! Allocation prefers the slot after the neighbour's (`near`), then a free slot of the right order
//! (`extents.rs`), then an empty chunk of another order, then what the bound still allows
//! (`resident.rs`), then what is free around a few folios of another order. To find out whether
//! there is room is to allocate: there is no question beforehand. A caller that gets nothing must
//! evict. A chunk that is wanted for another order, or back by the kernel, is *evacuated*: nothing
//! is allocated in it any more, its folios are evicted one by one (by `reclaim`), and when it is
//! empty it changes its role. If some stay, what lies between them serves the other order
//! (`chunk.rs`), or its pages are *retired*: given back by themselves, at the price of a huge page,
//! and revived when the budget allows (`resident.rs`).
//!
//! # Safety
//! Hands out addresses inside the reservation; touches none.

use super::chunk::{CHUNK_BYTES, CHUNK_PAGES, Chunk};
use super::extents::Available;
use super::region::RegionPages;
use super::{FrameKind, ORDER_MAX};
use crate::config::HugePages;
use crate::page::{FolioId, Folios};
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, Ordering};
use crate::sys::memory::Reservation;
use crate::sys::probe::{Feature, Features};
use std::fmt::Debug;
use std::io;
use std::ops::Range;

pub(super) const PAGE_BYTES: u64 = 4096;
pub(super) const DESCRIPTOR_BYTES: u64 = 64;
pub(super) const FRAME_BYTES: u64 = PAGE_BYTES + DESCRIPTOR_BYTES;

/// How many chunks of another order are looked at for one of which much is free.
const LISTED_LOOKED_AT_MAX: usize = 16;

/// A snapshot of the use of the arena.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArenaUse {
    /// The bound, bytes.
    pub(crate) bound_bytes: u64,
    /// Charged: frames, descriptors, tables.
    pub(crate) used_bytes: u64,
    /// Resident frames, bytes.
    pub(crate) frame_bytes: u64,
    /// Free pages in resident chunks, whatever folios they are good for.
    pub(crate) free_pages: u64,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) budget: Budget,
    /// Those that have ever been in use, from the first one on.
    pub(super) chunks: Vec<Chunk>,
    /// How many there may be.
    pub(super) chunks_max: usize,
    /// For each order, chunks that have free slots of it.
    pub(super) available: [Available; ORDER_MAX as usize + 1],
    /// Pages of free slots.
    pub(super) free_pages: u64,
    /// Resident pages that are in no folio: those, and what lies between folios of other orders.
    pub(super) unused_pages: u64,
    pub(super) frame_pages: u64,
    /// Retired pages of chunks in service.
    pub(super) retired_pages: u64,
    /// How many of `chunks_max` are vacant.
    pub(super) vacant_chunks: u64,
    /// A chunk is being made resident ahead of need.
    pub(super) is_allocating_chunk: bool,
    /// The order that was last asked for.
    pub(super) last_order: u8,
    /// The kernel has refused memory that the bound allows: it is asked again only in need.
    pub(super) is_allocation_refused: bool,
    /// Nothing else was to be had: folios get the room for tables, until a chunk is given back.
    pub(super) spends_table_room: bool,
    pub(super) region_pages: RegionPages,
}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Arena {
    pub(super) memory: Reservation,
    pub(super) features: Features,
    huge_pages: HugePages,
    pub(super) state: Mutex<State>,
    /// Signalled when `State::is_allocating_chunk` ends.
    pub(super) grown: Condvar,
    /// Whether another chunk should be made resident before it is needed.
    wants_chunk: AtomicBool,
    /// Mirrors the budget's bound.
    bound_pages: AtomicU64,
    /// Mirrors `free_pages` plus what the budget still allows, for the watermarks.
    obtainable_pages: AtomicU64,
    /// Mirrors what the budget still allows.
    left_pages: AtomicU64,
    /// Mirrors the pages that folios can have, in use or not.
    folio_pages_max: AtomicU64,
    /// Mirrors the region pages in use.
    pub(super) region_page_count: AtomicU64,
}

impl Arena {
    /// Reserves address space for `bound_bytes_max` bytes of frames and allows `bound_bytes`.
    pub(crate) fn new(
        bound_bytes: u64,
        bound_bytes_max: u64,
        huge_pages: HugePages,
        features: Features,
    ) -> io::Result<Self> {
        let chunks = Self::chunks_max(bound_bytes_max);
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let bytes = chunks.checked_mul(CHUNK_BYTES).ok_or_else(too_large)?;
        let bytes = usize::try_from(bytes).map_err(|_| too_large())?;
        let memory = Reservation::new(bytes, CHUNK_BYTES as usize)?;
        memory.wipe_on_fork();
        if huge_pages == HugePages::Never {
            memory.refuse_huge_pages();
        }
        let state = State {
            budget: Budget::new(bound_bytes),
            chunks: Vec::new(),
            chunks_max: chunks as usize,
            available: Default::default(),
            free_pages: 0,
            unused_pages: 0,
            frame_pages: 0,
            retired_pages: 0,
            vacant_chunks: chunks,
            is_allocating_chunk: false,
            last_order: 0,
            is_allocation_refused: false,
            spends_table_room: false,
            region_pages: RegionPages::default(),
        };
        let obtainable_pages = AtomicU64::new(state.obtainable_pages());
        Ok(Self {
            memory,
            features,
            huge_pages,
            state: Mutex::new(state),
            grown: Condvar::new(),
            wants_chunk: AtomicBool::new(false),
            bound_pages: AtomicU64::new(bound_bytes / PAGE_BYTES),
            obtainable_pages,
            left_pages: AtomicU64::new(bound_bytes / FRAME_BYTES),
            folio_pages_max: AtomicU64::new(bound_bytes / PAGE_BYTES),
            region_page_count: AtomicU64::new(0),
        })
    }

    /// How many chunks there is address space for.
    pub(crate) fn chunks(&self) -> usize {
        self.memory.len() / CHUNK_BYTES as usize
    }

    /// Chunks that are needed: those of one order may all be whole but the last.
    pub(super) fn chunks_max(bound_bytes_max: u64) -> u64 {
        bound_bytes_max.div_ceil(CHUNK_BYTES) + u64::from(ORDER_MAX)
    }

    /// Descriptors that are needed: one for each frame there is address space for, and as many
    /// for region pages.
    pub(crate) fn descriptors_max(bound_bytes_max: u64) -> u64 {
        2 * Self::chunks_max(bound_bytes_max) * u64::from(CHUNK_PAGES)
    }

    /// Address of frame 0; frame i follows at i * 4096 bytes.
    #[inline(always)]
    pub(crate) fn base(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Address of a folio's first byte.
    #[inline(always)]
    pub(crate) fn address(&self, id: FolioId) -> *mut u8 {
        self.base().wrapping_add(id.0 as usize * PAGE_BYTES as usize)
    }

    /// Pages that are free, or that the budget still allows; a hint.
    pub(crate) fn obtainable_pages(&self) -> u64 {
        self.obtainable_pages.load(Ordering::Relaxed)
    }

    /// Whether so many pages are free, or would be made resident, for folios as `kind` says.
    pub(crate) fn has_room_for(&self, kind: FrameKind, pages: u64) -> bool {
        let state = self.state.lock();
        let room_pages = match kind {
            FrameKind::Arena { .. } if state.affordable_pages(0) > 0 => state.obtainable_pages(),
            FrameKind::Arena { .. } => state.free_pages,
            // Free frames of the arena can be given back for them.
            FrameKind::Region => state.free_pages.max(state.budget.left_bytes() / PAGE_BYTES),
        };
        room_pages >= pages
    }

    /// The bound, pages.
    pub(crate) fn bound_pages(&self) -> u64 {
        self.bound_pages.load(Ordering::Relaxed)
    }

    /// Finds a free frame run for a folio of `order`, after `near` if possible.
    ///
    /// `Ok(None)`: everything the bound allows is in use. An error is the kernel's refusal of
    /// memory the bound would allow.
    pub(crate) fn allocate(
        &self,
        order: u8,
        near: Option<FolioId>,
        folios: &Folios,
    ) -> io::Result<Option<FolioId>> {
        let mut state = self.state.lock();
        state.last_order = order;
        let (chunk, slot) = loop {
            if let Some(found) = state.slot_for(order, near) {
                break found;
            }
            let empty = state.empty_chunk(order);
            if state.convert(empty, order) {
                continue;
            }
            if state.is_allocating_chunk {
                // It comes next in the order of the chunks, which is that of the file's pages.
                self.grown.wait(&mut state);
                continue;
            }
            if self.grow(&mut state, order, folios)? {
                continue;
            }
            let sparse = state.sparse_chunk(order);
            if !state.convert(sparse, order) {
                return Ok(None);
            }
        };
        state.take(chunk, slot);
        let id = FolioId(chunk as u32 * CHUNK_PAGES + (slot << order));
        self.publish(&state);
        Ok(Some(id))
    }

    /// Finds a free frame run for the folio `from`, which is to make room in its extent, where
    /// neighbours have no room anyway.
    pub(crate) fn allocate_partial(&self, order: u8, from: FolioId) -> Option<FolioId> {
        let mut state = self.state.lock();
        let (chunk, slot) = state.partial_slot(order, Some(from))?;
        state.take(chunk, slot);
        self.publish(&state);
        Some(FolioId(chunk as u32 * CHUNK_PAGES + (slot << order)))
    }

    /// Finds a free frame run for a folio that is to leave a chunk that is being emptied: in
    /// another one, where neighbours have no room anyway, if possible.
    pub(crate) fn allocate_elsewhere(&self, order: u8) -> Option<FolioId> {
        let mut state = self.state.lock();
        if !state.has_free_slot(order) {
            let sparse = state.sparse_chunk(order);
            state.convert(sparse, order);
        }
        let (chunk, slot) = state.partial_slot(order, None).or_else(|| state.sparse_slot(order))?;
        state.take(chunk, slot);
        self.publish(&state);
        Some(FolioId(chunk as u32 * CHUNK_PAGES + (slot << order)))
    }

    /// Gives a folio's frames back. Its descriptor is frozen.
    pub(crate) fn free(&self, id: FolioId) {
        let mut state = self.state.lock();
        state.put(id);
        self.publish(&state);
    }

    /// Charges `bytes` of metadata about to be touched; `false` when the bound does not allow it.
    #[must_use]
    pub(crate) fn charge(&self, bytes: u64) -> bool {
        let mut state = self.state.lock();
        let charged = state.budget.try_take(bytes);
        self.publish(&state);
        charged
    }

    /// Gives back what [`Self::charge`] took.
    pub(crate) fn uncharge(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.budget.give_back(bytes);
        self.publish(&state);
    }

    /// Sets the bound; what is over it must be evacuated by the caller.
    pub(crate) fn set_bound(&self, bound_bytes: u64) {
        let mut state = self.state.lock();
        state.budget.bound_bytes = bound_bytes;
        self.bound_pages.store(bound_bytes / PAGE_BYTES, Ordering::Relaxed);
        self.publish(&state);
    }

    /// Pages the budget still allows.
    pub(crate) fn left_pages(&self) -> u64 {
        self.left_pages.load(Ordering::Relaxed)
    }

    /// Pages that folios can have, in use or not: what metadata leaves of the bound, as far as it
    /// is worth being made frames; a hint.
    pub(crate) fn folio_pages_max(&self) -> u64 {
        self.folio_pages_max.load(Ordering::Relaxed)
    }

    /// Bytes resident beyond the bound.
    pub(crate) fn excess_bytes(&self) -> u64 {
        self.state.lock().budget.excess_bytes()
    }

    /// A snapshot of what is used.
    pub(crate) fn usage(&self) -> ArenaUse {
        let state = self.state.lock();
        ArenaUse {
            bound_bytes: state.budget.bound_bytes,
            used_bytes: state.budget.used_bytes,
            frame_bytes: state.frame_bytes(),
            free_pages: state.unused_pages,
        }
    }

    /// The kernel must not make a huge page of a chunk that is there in part: it would bring what
    /// is not charged. Whether it will not.
    pub(super) fn keep_small(&self, number: usize) -> bool {
        let offset_bytes = number * CHUNK_BYTES as usize;
        !self.may_use_huge_pages()
            || self.memory.refuse_huge_pages_in(offset_bytes, CHUNK_BYTES as usize).is_ok()
    }

    pub(super) fn may_use_huge_pages(&self) -> bool {
        let allowed = self.huge_pages != HugePages::Never;
        allowed && self.features.has(Feature::TransparentHugePages)
    }

    /// Whether [`Self::preallocate`] has something to do; a hint.
    pub(crate) fn wants_chunk(&self) -> bool {
        self.wants_chunk.load(Ordering::Relaxed)
    }

    pub(super) fn publish(&self, state: &State) {
        self.wants_chunk.store(state.wants_chunk(), Ordering::Relaxed);
        self.obtainable_pages.store(state.obtainable_pages(), Ordering::Relaxed);
        self.region_page_count.store(state.region_pages.pages(), Ordering::Relaxed);
        self.left_pages.store(state.budget.left_bytes() / FRAME_BYTES, Ordering::Relaxed);
        self.folio_pages_max.store(state.folio_pages_max(), Ordering::Relaxed);
    }
}

/// Where pages of a chunk lie in the arena, and how long they are, bytes.
pub(super) fn place_of(chunk: usize, pages: &Range<u32>) -> (usize, usize) {
    let offset_bytes = chunk * CHUNK_BYTES as usize + pages.start as usize * PAGE_BYTES as usize;
    (offset_bytes, (pages.end - pages.start) as usize * PAGE_BYTES as usize)
}

impl State {
    fn frame_bytes(&self) -> u64 {
        (self.frame_pages + self.region_pages.pages()) * PAGE_BYTES
    }

    fn folio_pages_max(&self) -> u64 {
        let left_bytes = match self.affordable_pages(0) {
            0 => 0,
            _ => self.budget.left_bytes(),
        };
        (self.frame_bytes() + left_bytes) / PAGE_BYTES
    }

    fn obtainable_pages(&self) -> u64 {
        // Pages that the budget allows and no chunk has a place for do not count, nor do vacant
        // chunks when too little is left to begin one.
        let vacant_chunks = if self.affordable_pages(0) > 0 { self.vacant_chunks } else { 0 };
        let places = vacant_chunks * u64::from(CHUNK_PAGES) + self.retired_pages;
        self.free_pages + places.min(self.budget.left_bytes() / FRAME_BYTES)
    }

    fn has_free_slot(&self, order: u8) -> bool {
        self.available[order as usize].chunks().next().is_some()
    }

    /// A chunk for another order that holds nothing, and has a slot of this one.
    fn empty_chunk(&self, order: u8) -> Option<usize> {
        let fits = |chunk: &Chunk| chunk.is_empty() && chunk.has_slot_of(order);
        self.listed_for_others(order, usize::MAX).find(|number| fits(&self.chunks[*number]))
    }

    /// A chunk for another order of which a good part is free. What is in it may be pinned, or have
    /// nowhere to go: nobody need be evicted for what is free beside it.
    fn sparse_chunk(&self, order: u8) -> Option<usize> {
        if self.free_pages < self.frame_pages / 64 {
            // So much is free ahead of need: the lists are not worth a look.
            return None;
        }
        let fits = |chunk: &Chunk| {
            let is_sparse = chunk.used_pages() <= chunk.resident_pages() / 4 * 3;
            is_sparse && chunk.has_slot_of(order)
        };
        let mut listed = self.listed_for_others(order, LISTED_LOOKED_AT_MAX);
        listed.find(|number| fits(&self.chunks[*number]))
    }

    /// Chunks that have free slots of another order, so many of each.
    fn listed_for_others(&self, order: u8, each_max: usize) -> impl Iterator<Item = usize> + '_ {
        let others = (0..=ORDER_MAX).filter(move |other| *other != order);
        others.flat_map(move |other| self.available[other as usize].chunks().take(each_max))
    }

    /// Cuts a chunk anew for folios of `order`; whether there is one.
    fn convert(&mut self, chunk: Option<usize>, order: u8) -> bool {
        let Some(number) = chunk else { return false };
        self.unlist(number);
        self.cut(number, order);
        self.list(number);
        true
    }

    /// Cuts a chunk anew, which is on no list.
    pub(super) fn cut(&mut self, number: usize, order: u8) {
        let chunk = &mut self.chunks[number];
        let free_before = u64::from(chunk.free_pages());
        chunk.cut(order);
        self.free_pages = self.free_pages + u64::from(chunk.free_pages()) - free_before;
    }

    fn take(&mut self, number: usize, slot: u32) {
        let chunk = &mut self.chunks[number];
        chunk.take(slot);
        self.free_pages -= 1 << chunk.order();
        self.unused_pages -= 1 << chunk.order();
        self.list(number);
    }

    fn put(&mut self, id: FolioId) {
        let number = (id.0 / CHUNK_PAGES) as usize;
        let chunk = &mut self.chunks[number];
        let free_before = u64::from(chunk.free_pages());
        self.unused_pages += u64::from(chunk.put(id.0 % CHUNK_PAGES));
        self.free_pages += u64::from(chunk.free_pages()) - free_before;
        self.list(number);
    }
}

/// The bytes that may be resident, and those that are. Pure arithmetic under the arena's lock.
#[derive(Debug)]
pub(super) struct Budget {
    pub(super) bound_bytes: u64,
    pub(super) used_bytes: u64,
}

impl Budget {
    pub(super) fn new(bound_bytes: u64) -> Self {
        Self { bound_bytes, used_bytes: 0 }
    }

    /// Bytes that may still be taken.
    pub(super) fn left_bytes(&self) -> u64 {
        self.bound_bytes.saturating_sub(self.used_bytes)
    }

    /// Bytes that must be given back.
    pub(super) fn excess_bytes(&self) -> u64 {
        self.used_bytes.saturating_sub(self.bound_bytes)
    }

    /// Takes `bytes` if they fit.
    #[must_use]
    pub(super) fn try_take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.left_bytes();
        if fits {
            self.used_bytes += bytes;
        }
        fits
    }

    pub(super) fn give_back(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.used_bytes, "{bytes} of {}", self.used_bytes);
        self.used_bytes -= bytes;
    }
}

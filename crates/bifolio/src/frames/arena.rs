//! The arena: one reservation, cut into 2 MiB chunks; frame i belongs to descriptor i.
//!
//! Called by `reclaim` (allocate, free, evacuate) and by whoever charges metadata. A chunk is made
//! resident when the first folio needs it and the budget allows, and keeps its memory while frames
//! come and go in it: a hit, a miss and an eviction do no page-table work.
//!
//! Allocation prefers the slot after the neighbour's (`near`), then one in a row of free slots
//! (`rows.rs`), then an empty chunk of another order, then whatever slot of the right order there
//! is, then a new chunk. What else there is, eviction must free. A chunk that is wanted for another
//! order, or back by the kernel, is *evacuated*: nothing is allocated in it any more, its folios
//! are evicted one by one (by `reclaim`), and when it is empty it changes its role. Where pins keep
//! every chunk from being emptied, single slots can be *retired*: given back by themselves, at the
//! price of a huge page, and revived when the budget allows. Whoever holds on to memory of chunks
//! (the engine of `io`) watches them: see `watcher.rs`.
//!
//! # Safety
//! Hands out addresses inside the reservation; touches none.

use super::budget::Budget;
use super::chunk::{CHUNK_BYTES, CHUNK_PAGES, Chunk, Role};
use super::loose::Loose;
use super::rows::{Available, LATELY};
use super::watcher::ChunkWatcher;
use super::{FrameKind, ORDER_MAX};
use crate::config::HugePages;
use crate::folio::{FolioId, Folios};
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, Ordering};
use crate::sys::memory::Reservation;
use crate::sys::probe::{Feature, Features};
use std::io;
use std::sync::{Arc, OnceLock};

pub(super) const PAGE_BYTES: u64 = 4096;
pub(super) const DESCRIPTOR_BYTES: u64 = 64;
pub(super) const FRAME_BYTES: u64 = PAGE_BYTES + DESCRIPTOR_BYTES;

/// What the arena is used for, a snapshot.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArenaUse {
    /// The bound, bytes.
    pub(crate) bound_bytes: u64,
    /// Charged: frames, descriptors, tables.
    pub(crate) used_bytes: u64,
    /// Resident frames, bytes.
    pub(crate) frame_bytes: u64,
    /// Free pages in resident chunks.
    pub(crate) free_pages: u64,
}

/// A chunk that is being emptied; finish or cancel it.
#[derive(Debug)]
#[must_use]
pub(crate) struct Evacuation {
    chunk: usize,
    /// The folios in it when the evacuation began.
    pub(crate) folios: Vec<FolioId>,
}

impl Evacuation {
    /// The number of the chunk.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk
    }
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
    /// What misses got last, newest first.
    pub(super) lately: [FolioId; LATELY],
    pub(super) free_pages: u64,
    pub(super) frame_pages: u64,
    /// In all chunks.
    retired_slots: u64,
    /// A chunk is being made resident ahead of need.
    pub(super) is_growing: bool,
    /// The order that was last asked for.
    pub(super) last_order: u8,
    /// The kernel has refused memory that the bound allows: it is asked again only in need.
    pub(super) is_growth_refused: bool,
    pub(super) loose: Loose,
}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Arena {
    pub(super) memory: Reservation,
    pub(super) features: Features,
    huge_pages: HugePages,
    pub(super) state: Mutex<State>,
    /// Signalled when `State::is_growing` ends.
    pub(super) grown: Condvar,
    /// Whether another chunk should be made resident before it is needed.
    wants_chunk: AtomicBool,
    /// Mirrors the budget's bound.
    bound_pages: AtomicU64,
    /// Mirrors `free_pages` plus what the budget still allows, for the watermarks.
    obtainable_pages: AtomicU64,
    /// Mirrors what the budget still allows.
    left_pages: AtomicU64,
    /// Mirrors the loose pages in use.
    pub(super) loose_pages: AtomicU64,
    watcher: OnceLock<Arc<dyn ChunkWatcher>>,
}

impl Arena {
    /// Reserves address space for `bound_bytes_max` bytes of frames and allows `bound_bytes`.
    pub(crate) fn new(
        bound_bytes: u64,
        bound_bytes_max: u64,
        huge_pages: HugePages,
        features: Features,
    ) -> io::Result<Self> {
        let chunks = bound_bytes_max.div_ceil(CHUNK_BYTES);
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
            lately: [FolioId::default(); LATELY],
            free_pages: 0,
            frame_pages: 0,
            retired_slots: 0,
            is_growing: false,
            last_order: 0,
            is_growth_refused: false,
            loose: Loose::default(),
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
            loose_pages: AtomicU64::new(0),
            watcher: OnceLock::new(),
        })
    }

    /// Tells `watcher` of every chunk from now on. Called once, before the first allocation.
    pub(crate) fn watch(&self, watcher: Arc<dyn ChunkWatcher>) {
        let is_first = self.watcher.set(watcher).is_ok();
        debug_assert!(is_first, "one watcher for the life of the arena");
    }

    /// How many chunks there is address space for.
    pub(crate) fn chunks(&self) -> usize {
        self.memory.len() / CHUNK_BYTES as usize
    }

    /// Descriptors that are needed: one for each frame there is address space for, and as many
    /// for loose pages.
    pub(crate) fn descriptors_max(bound_bytes_max: u64) -> u64 {
        2 * bound_bytes_max.div_ceil(CHUNK_BYTES) * u64::from(CHUNK_PAGES)
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

    /// The bound, pages.
    pub(crate) fn bound_pages(&self) -> u64 {
        self.bound_pages.load(Ordering::Relaxed)
    }

    /// Whether [`Self::allocate`] would find something now.
    pub(crate) fn can_allocate(&self, kind: FrameKind) -> bool {
        let FrameKind::Arena { order, .. } = kind else { return self.left_pages() > 0 };
        let state = self.state.lock();
        let room = state.any_slot(order).is_some() || state.empty_chunk(order).is_some();
        room || state.affordable_pages(order) > 0 || state.revivable_slot(order).is_some()
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
            if state.convert_empty(order) {
                continue;
            }
            if let Some(found) = state.odd_slot(order, None) {
                break found;
            }
            if state.is_growing {
                // It comes next in the order of the chunks, which is that of the file's pages.
                self.grown.wait(&mut state);
                continue;
            }
            if self.add_chunk(&mut state, order, folios)?.is_some() {
                continue;
            }
            match self.revive_slot(&mut state, order)? {
                Some(found) => break found,
                None => return Ok(None),
            }
        };
        state.take(chunk, slot);
        let id = FolioId(chunk as u32 * CHUNK_PAGES + (slot << order));
        state.note_taken(id);
        self.publish(&state);
        Ok(Some(id))
    }

    /// Finds a free frame run for the folio `from`, which is to make room in its row, where
    /// neighbours have no room anyway.
    pub(crate) fn allocate_odd(&self, order: u8, from: FolioId) -> Option<FolioId> {
        let mut state = self.state.lock();
        let (chunk, slot) = state.odd_slot(order, Some(from))?;
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
            frame_bytes: (state.frame_pages + state.loose.pages()) * PAGE_BYTES,
            free_pages: state.free_pages,
        }
    }

    /// Starts to empty the chunk with the fewest folios among those that `wanted` accepts by
    /// order and resident pages and that are not in `tried`.
    pub(crate) fn begin_evacuation(
        &self,
        wanted: impl Fn(u8, u32) -> bool,
        tried: &[usize],
    ) -> Option<Evacuation> {
        let mut state = self.state.lock();
        let candidates = state.chunks.iter().enumerate().filter(|(number, chunk)| {
            let fits = chunk.is_in_service() && wanted(chunk.order(), chunk.pages);
            fits && !chunk.draining && !tried.contains(number)
        });
        let (number, _) = candidates.min_by_key(|(_, c)| c.used_slots() << c.order())?;
        let chunk = &mut state.chunks[number];
        chunk.draining = true;
        let order = chunk.order();
        let id_of = |slot: u32| FolioId(number as u32 * CHUNK_PAGES + (slot << order));
        let folios = chunk.used().map(id_of).collect();
        state.unlist(number);
        self.publish(&state);
        Some(Evacuation { chunk: number, folios })
    }

    /// Ends an evacuation. An empty chunk goes back to the kernel if `release`, else it is free
    /// for any order; one that could not be emptied serves on. Tells whether it was emptied.
    pub(crate) fn finish_evacuation(&self, evacuation: &Evacuation, release: bool) -> bool {
        let number = evacuation.chunk;
        let mut state = self.state.lock();
        state.chunks[number].draining = false;
        let empty = state.chunks[number].is_empty();
        if empty && (release || state.chunks[number].retired_slots() > 0) {
            self.release_chunk(&mut state, number);
        } else {
            state.list(number);
        }
        self.publish(&state);
        empty
    }

    /// Gives an empty chunk back to the kernel. Its descriptors stay, and stay charged.
    fn release_chunk(&self, state: &mut State, number: usize) {
        let chunk = &mut state.chunks[number];
        let whole_bytes = u64::from(chunk.pages) * PAGE_BYTES;
        let resident_pages = u64::from(chunk.resident_pages());
        let retired_slots = u64::from(chunk.retired_slots());
        let free_pages = u64::from(chunk.free_pages());
        let offset_bytes = number * CHUNK_BYTES as usize;
        self.tell_before_release(number);
        if self.memory.release(offset_bytes, whole_bytes as usize).is_err() {
            // The kernel keeps it, so it stays charged and in service.
            state.list(number);
            return;
        }
        chunk.cut(0);
        chunk.role = Role::Vacant;
        chunk.pages = 0;
        state.frame_pages -= resident_pages;
        state.retired_slots -= retired_slots;
        state.free_pages -= free_pages;
        state.budget.give_back(resident_pages * PAGE_BYTES);
    }

    /// Gives the frames of one free slot, of the smallest folio size there is, back to the kernel.
    /// Tells whether there was one.
    pub(crate) fn retire_slot(&self) -> bool {
        let mut state = self.state.lock();
        let Some((number, slot)) = (0..=ORDER_MAX).find_map(|order| state.any_slot(order)) else {
            return false;
        };
        let order = state.chunks[number].order();
        let bytes = PAGE_BYTES << order;
        let offset_bytes = slot_offset_bytes(number, slot, order);
        self.tell_before_release(number);
        if self.memory.release(offset_bytes, bytes as usize).is_err() {
            return false;
        }
        state.chunks[number].retire(slot);
        state.list(number);
        state.retired_slots += 1;
        state.free_pages -= 1 << order;
        state.frame_pages -= 1 << order;
        state.budget.give_back(bytes);
        self.publish(&state);
        true
    }

    /// Makes a retired slot of the right size resident again, if the budget allows it.
    fn revive_slot(&self, state: &mut State, order: u8) -> io::Result<Option<(usize, u32)>> {
        let Some((number, slot)) = state.revivable_slot(order) else { return Ok(None) };
        let bytes = PAGE_BYTES << order;
        let offset_bytes = slot_offset_bytes(number, slot, order);
        self.memory.populate(offset_bytes, bytes as usize, false, &self.features)?;
        let taken = state.budget.try_take(bytes);
        debug_assert!(taken, "looked at just now");
        state.chunks[number].revive(slot);
        self.tell_if_whole(&state.chunks[number], number);
        state.retired_slots -= 1;
        state.free_pages += 1 << order;
        state.frame_pages += 1 << order;
        state.list(number);
        Ok(Some((number, slot)))
    }

    pub(super) fn may_use_huge_pages(&self) -> bool {
        let allowed = self.huge_pages != HugePages::Never;
        allowed && self.features.has(Feature::TransparentHugePages)
    }

    pub(super) fn tell_if_whole(&self, chunk: &Chunk, number: usize) {
        if chunk.resident_pages() == CHUNK_PAGES
            && let Some(watcher) = self.watcher.get()
        {
            watcher.chunk_is_whole(number);
        }
    }

    fn tell_before_release(&self, number: usize) {
        if let Some(watcher) = self.watcher.get() {
            watcher.before_release(number);
        }
    }

    /// Whether [`Self::grow_ahead`] has something to do; a hint.
    pub(crate) fn wants_chunk(&self) -> bool {
        self.wants_chunk.load(Ordering::Relaxed)
    }

    pub(super) fn publish(&self, state: &State) {
        self.wants_chunk.store(state.wants_chunk(), Ordering::Relaxed);
        self.obtainable_pages.store(state.obtainable_pages(), Ordering::Relaxed);
        self.loose_pages.store(state.loose.pages(), Ordering::Relaxed);
        self.left_pages.store(state.budget.left_bytes() / FRAME_BYTES, Ordering::Relaxed);
    }
}

fn slot_offset_bytes(chunk: usize, slot: u32, order: u8) -> usize {
    chunk * CHUNK_BYTES as usize + ((slot as usize) << order) * PAGE_BYTES as usize
}

impl State {
    fn obtainable_pages(&self) -> u64 {
        self.free_pages + self.budget.left_bytes() / FRAME_BYTES
    }

    /// Pages a new chunk may have: all, or, where the bound ends, what is worth having. Some room
    /// is left for the tables then, so that a small cache need not evacuate for each of them.
    pub(super) fn affordable_pages(&self, order: u8) -> u32 {
        let left = self.budget.left_bytes() / FRAME_BYTES;
        if left >= u64::from(CHUNK_PAGES) {
            return CHUNK_PAGES;
        }
        let worthwhile = (self.budget.bound_bytes / PAGE_BYTES / 8).min(64);
        let pages = ((left - left / 16) >> order) << order;
        if pages >= worthwhile.max(1) { pages as u32 } else { 0 }
    }

    fn any_slot(&self, order: u8) -> Option<(usize, u32)> {
        let number = self.available[order as usize].chunks().next()?;
        let slot = self.chunks[number].first_free();
        slot.map(|slot| (number, slot))
    }

    /// A slot that could be made resident again.
    fn revivable_slot(&self, order: u8) -> Option<(usize, u32)> {
        if self.retired_slots == 0 || self.budget.left_bytes() < PAGE_BYTES << order {
            return None;
        }
        let usable = |chunk: &Chunk| chunk.role == Role::Slots { order } && !chunk.draining;
        let mut slots = self.chunks.iter().enumerate().filter(|(_, chunk)| usable(chunk));
        slots.find_map(|(number, chunk)| Some((number, chunk.first_retired()?)))
    }

    /// A chunk that holds nothing, of another order.
    fn empty_chunk(&self, order: u8) -> Option<usize> {
        let others = (0..=ORDER_MAX).filter(|other| *other != order);
        let mut listed = others.flat_map(|other| self.available[other as usize].chunks());
        let fits = |chunk: &Chunk| {
            chunk.is_empty() && chunk.retired_slots() == 0 && chunk.pages >= 1 << order
        };
        listed.find(|number| fits(&self.chunks[*number]))
    }

    /// Cuts a chunk that holds nothing anew; whether there is one.
    fn convert_empty(&mut self, order: u8) -> bool {
        let Some(number) = self.empty_chunk(order) else { return false };
        self.unlist(number);
        self.free_pages -= u64::from(self.chunks[number].free_pages());
        self.chunks[number].cut(order);
        self.free_pages += u64::from(self.chunks[number].free_pages());
        self.list(number);
        true
    }

    fn take(&mut self, number: usize, slot: u32) {
        let chunk = &mut self.chunks[number];
        chunk.take(slot);
        self.free_pages -= 1 << chunk.order();
        self.list(number);
    }

    fn put(&mut self, id: FolioId) {
        let number = (id.0 / CHUNK_PAGES) as usize;
        let chunk = &mut self.chunks[number];
        chunk.put((id.0 % CHUNK_PAGES) >> chunk.order());
        self.free_pages += 1 << chunk.order();
        self.list(number);
    }
}

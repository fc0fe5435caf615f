//! The arena: one reservation of address space, divided into chunks of one size. Frame i belongs to
//! descriptor i.
//!
//! A chunk stays resident while its frames are allocated and freed, so hits, misses and evictions
//! do no page-table work. Allocation tries, in this order: the slot after the neighbour's (`near`);
//! a free slot of the right order (`chunk.rs`); an empty chunk of another order; a new chunk, if
//! the bound allows it (`residency.rs`). The caller evicts if it gets nothing.
//!
//! Every CPU has a *stock*, as in Linux (`pcp` in `mm/page_alloc.c`): a run of free frames, at most
//! an extent, that its threads take one by one without the arena's lock ([`AtomicRun`]). The lock
//! is taken to fill a stock, about once in 16 pages, and for folios of several pages. When few
//! pages are obtainable, a stock gets only the page that is needed; before memory is called full,
//! or a chunk evacuated, all stocks are emptied.
//!
//! PROTOCOL STOCK, as two columns:
//!
//! ```text
//!      fill or empty, under the arena's lock     take, any thread
//! Q1   swap the word for the empty run
//! Q2   return the frames of the old word         load the word [start, end)
//! Q3   allocate a new run
//! Q4   swap the word for the new run             exchange it for [start + 1, end): owns `start`
//! ```
//!
//! The Release of Q4 and the Acquire of the exchange order the previous use of a frame, which ended
//! under the arena's lock, before the next (FRAMES-3). Covered by `loom_stock`.
//!
//! # Safety
//! Returns addresses inside the reservation and never dereferences them.

use super::budget::Budget;
use super::chunk::{ArenaState, ChunkSize, EXTENT_PAGES, FRAME_BYTES, ORDER_MAX, PAGE_BYTES};
use super::region_pages::RegionPages;
use crate::config::HugePages;
use crate::page::{FolioId, Folios, MemorySource};
use crate::sync::{AtomicBool, AtomicRun, AtomicU64, Condvar, Mutex, Ordering};
use crate::sys::memory::{HUGE_PAGE_BYTES, Reservation};
use crate::sys::probe::{Feature, Features};
use crate::sys::process;
use crate::sys::shared::SharedMemory;
use std::cell::Cell;
use std::fmt::Debug;
use std::io;

/// Fills of this many adjacent pages, one after the other, are a run.
const RUN_PAGES: u64 = 16;
/// A run is remembered until this part of the bound has been evicted, or at most
/// [`REMEMBERED_PAGES_MAX`].
const REMEMBERED_DIVISOR: u64 = 4;
const REMEMBERED_PAGES_MAX: u64 = 8192;

thread_local! {
    /// Number of pages that this thread has filled one after the other, or a multiple of
    /// [`RUN_PAGES`] more.
    static FILLED_PAGES: Cell<u64> = const { Cell::new(0) };
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum FrameKind {
    /// Frames of the arena for a folio of `order`, after those of `near` if possible.
    Arena {
        order: u8,
        near: Option<FolioId>,
    },
    Region,
}

impl FrameKind {
    pub(crate) fn pages(self) -> u64 {
        match self {
            Self::Arena { order, .. } => 1 << order,
            Self::Region => 1,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArenaUse {
    pub(crate) bound_bytes: u64,
    pub(crate) used_bytes: u64,
    pub(crate) frame_bytes: u64,
    pub(crate) free_pages: u64,
}

#[derive(Debug)]
pub(crate) struct Arena {
    pub(super) memory: Reservation,
    pub(super) chunk_size: ChunkSize,
    pub(super) features: Features,
    pub(crate) may_use_huge_pages: bool,
    pub(super) state: Mutex<ArenaState>,
    pub(super) grown: Condvar,
    /// Mirror of `ArenaState::wants_chunk`: another chunk should be made resident ahead of need.
    wants_chunk: AtomicBool,
    bound_bytes: AtomicU64,
    /// Mirror of `free_pages` plus the pages that the budget still allows, for the watermarks.
    obtainable_pages: AtomicU64,
    left_pages: AtomicU64,
    /// Mirror of the number of pages that folios can have, allocated or not.
    folio_pages_max: AtomicU64,
    region_page_count: AtomicU64,
    /// Pages to be evicted until the last run of fills is forgotten: a hint.
    run_pages_left: AtomicU64,
    /// The stock of each CPU; none if frames are only taken under the lock.
    pub(super) stocks: Box<[AtomicRun]>,
}

impl Arena {
    /// Reserves address space in `source` for `bound_bytes_max` bytes of frames and sets the bound
    /// to `bound_bytes`.
    pub(crate) fn new(
        source: &MemorySource,
        bound_bytes: u64,
        bound_bytes_max: u64,
        huge_pages: HugePages,
        features: Features,
    ) -> io::Result<Self> {
        let chunk_size = ChunkSize::of(bound_bytes);
        // For each order, all chunks but the last may be completely used.
        let chunks = bound_bytes_max.div_ceil(chunk_size.bytes()) + u64::from(ORDER_MAX);
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let bytes = chunks.checked_mul(chunk_size.bytes()).ok_or_else(too_large)?;
        let bytes = usize::try_from(bytes).map_err(|_| too_large())?;
        let memory = Reservation::new_in(source, bytes, chunk_size.bytes() as usize)?;
        memory.wipe_on_fork();
        let may_use_huge_pages =
            huge_pages != HugePages::Never && features.has(Feature::TransparentHugePages);
        let state = ArenaState {
            budget: Budget { bound_bytes, used_bytes: 0 },
            chunk_size,
            chunks: Vec::new(),
            chunks_max: chunks as usize,
            available: Default::default(),
            free_pages: 0,
            frame_pages: 0,
            lent_pages: 0,
            vacant_chunks: chunks,
            first_vacant: 0,
            is_allocating_chunk: false,
            last_order: 0,
            is_allocation_refused: false,
            region_pages: RegionPages::default(),
        };
        let obtainable_pages = AtomicU64::new(state.obtainable_pages());
        let arena = Self {
            memory,
            chunk_size,
            may_use_huge_pages,
            features,
            state: Mutex::new(state),
            grown: Condvar::new(),
            wants_chunk: AtomicBool::new(false),
            bound_bytes: AtomicU64::new(bound_bytes),
            obtainable_pages,
            left_pages: AtomicU64::new(bound_bytes / FRAME_BYTES),
            folio_pages_max: AtomicU64::new(bound_bytes / PAGE_BYTES),
            region_page_count: AtomicU64::new(0),
            run_pages_left: AtomicU64::new(0),
            stocks: Box::default(),
        };
        if !arena.has_huge_chunks() {
            // The kernel would make pages resident that are not charged.
            arena.memory.refuse_huge_pages();
        }
        Ok(arena)
    }

    pub(super) fn has_huge_chunks(&self) -> bool {
        self.may_use_huge_pages && self.chunk_size.bytes() == HUGE_PAGE_BYTES as u64
    }

    pub(crate) fn frames(&self) -> u32 {
        (self.memory.len() as u64 / PAGE_BYTES) as u32
    }

    /// Returns where the frames are, for the tables that name them.
    pub(crate) fn source(&self) -> MemorySource {
        self.memory.source()
    }

    /// Returns the shared memory, and the offset of the first frame in it; `None` for private
    /// memory.
    pub(crate) fn shared_place(&self) -> Option<(&SharedMemory, u64)> {
        self.memory.shared_place()
    }

    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.chunk_size.bytes()
    }

    #[inline(always)]
    pub(crate) fn base(&self) -> *mut u8 {
        self.memory.base
    }

    #[inline(always)]
    pub(crate) fn address(&self, id: FolioId) -> *mut u8 {
        self.base().wrapping_add(id.0 as usize * PAGE_BYTES as usize)
    }

    pub(crate) fn obtainable_pages(&self) -> u64 {
        self.obtainable_pages.load(Ordering::Relaxed)
    }

    /// Returns `true` if `pages` pages for folios of `kind` are free or can be made resident.
    pub(crate) fn has_room_for(&self, kind: FrameKind, pages: u64) -> bool {
        let state = self.state.lock();
        let room_pages = match kind {
            FrameKind::Arena { .. } => state.obtainable_pages(),
            // Free frames of the arena can be returned to the kernel to make room for region pages.
            FrameKind::Region => state.free_pages.max(state.budget.left_bytes() / PAGE_BYTES),
        };
        room_pages >= pages
    }

    pub(crate) fn bound_bytes(&self) -> u64 {
        self.bound_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn bound_pages(&self) -> u64 {
        self.bound_bytes() / PAGE_BYTES
    }

    pub(crate) fn has_region_pages(&self) -> bool {
        self.region_page_count.load(Ordering::Relaxed) > 0
    }

    /// Notes that this thread is about to fill a page, whose predecessor in the file is resident if
    /// `follows` is set.
    pub(crate) fn note_fill(&self, follows: bool) {
        let filled_pages = if follows { FILLED_PAGES.get() + 1 } else { 1 };
        FILLED_PAGES.set(filled_pages % RUN_PAGES);
        if filled_pages == RUN_PAGES {
            self.run_pages_left.store(self.remembered_pages(), Ordering::Relaxed);
        }
    }

    pub(crate) fn remembered_pages(&self) -> u64 {
        (self.bound_pages() / REMEMBERED_DIVISOR).min(REMEMBERED_PAGES_MAX)
    }

    /// Returns `true` if pages were filled in runs recently. A sequential reader benefits from
    /// adjacent frames, a random reader from a larger cache.
    pub(crate) fn is_filled_in_runs(&self) -> bool {
        self.run_pages_left.load(Ordering::Relaxed) > 0
    }

    /// Adds `pages` to the evicted pages. Callers serialize.
    pub(crate) fn note_evicted(&self, pages: u64) {
        // Relaxed, and not one atomic operation: a concurrent run may be forgotten.
        let left_pages = self.run_pages_left.load(Ordering::Relaxed).saturating_sub(pages);
        self.run_pages_left.store(left_pages, Ordering::Relaxed);
    }

    /// Takes a free frame from this CPU's stock, or allocates frames like [`Self::allocate`].
    pub(crate) fn take(
        &self,
        order: u8,
        near: Option<FolioId>,
        folios: &Folios,
    ) -> io::Result<Option<FolioId>> {
        if order == 0 && !self.stocks.is_empty() {
            let stock = &self.stocks[process::current_cpu() % self.stocks.len()];
            let taken = stock.take(near.map(|id| id.0)).map(FolioId);
            let found = taken.or_else(|| self.fill_stock(stock, near));
            if found.is_some() {
                return Ok(found);
            }
        }
        self.allocate(order, near, folios)
    }

    /// Fills a stock with free frames, after `near` if possible, and takes the first.
    #[inline(never)]
    fn fill_stock(&self, stock: &AtomicRun, near: Option<FolioId>) -> Option<FolioId> {
        let mut state = self.state.lock();
        state.put_run(stock.replace(0..0));
        let found = state.slot_for(0, near);
        if let Some((chunk, page)) = found {
            let pages_max = u64::from(EXTENT_PAGES);
            let is_plenty = state.obtainable_pages() >= pages_max * self.stocks.len() as u64;
            let run = state.take_run(chunk, page, if is_plenty { EXTENT_PAGES } else { 1 });
            state.last_order = 0;
            stock.replace(run.start + 1..run.end);
            self.publish(&state);
            return Some(FolioId(run.start));
        }
        self.publish(&state);
        None
    }

    /// Returns the frames of all stocks to `state`. Returns `true` if there were any.
    pub(super) fn empty_stocks(&self, state: &mut ArenaState) -> bool {
        let free_pages = state.free_pages;
        for stock in &self.stocks {
            state.put_run(stock.replace(0..0));
        }
        state.free_pages > free_pages
    }

    /// Allocates frames for a folio of `order`, after `near` if possible.
    ///
    /// Returns `Ok(None)` if everything that the bound allows is in use. Fails if the kernel
    /// refuses memory that the bound allows.
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
            if let Some(empty) = state.empty_chunk(order)
                && self.recut(&mut state, empty, order)
            {
                continue;
            }
            if state.is_allocating_chunk {
                // Waiting keeps the order of the chunks equal to that of the file's pages.
                self.grown.wait(&mut state);
                continue;
            }
            if !self.grow(&mut state, order, folios)? && !self.empty_stocks(&mut state) {
                return Ok(None);
            }
        };
        let id = state.take(chunk, slot);
        self.publish(&state);
        Ok(Some(id))
    }

    /// Allocates frames for a folio that is moved, in an extent that has no room for runs of
    /// neighbours: out of the extent of `from`, or out of a chunk under evacuation, which may also
    /// lead to another extent.
    pub(crate) fn allocate_elsewhere(&self, order: u8, from: Option<FolioId>) -> Option<FolioId> {
        let mut state = self.state.lock();
        let sparse = || if from.is_none() { state.sparse_slot(order) } else { None };
        let (chunk, slot) = state.partial_slot(order, from).or_else(sparse)?;
        let id = state.take(chunk, slot);
        self.publish(&state);
        Some(id)
    }

    /// Frees the frames of folios. The caller has frozen their descriptors.
    pub(crate) fn free(&self, ids: impl IntoIterator<Item = FolioId>) {
        let mut state = self.state.lock();
        ids.into_iter().for_each(|id| state.put(id));
        self.publish(&state);
    }

    /// Charges `bytes` of metadata before it is touched. Returns `false` if the bound does not
    /// allow it.
    #[must_use]
    pub(crate) fn charge(&self, bytes: u64) -> bool {
        let mut state = self.state.lock();
        let charged = state.budget.try_take(bytes);
        self.publish(&state);
        charged
    }

    pub(crate) fn uncharge(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.budget.give_back(bytes);
        self.publish(&state);
    }

    /// Sets the bound. The caller must evacuate the excess.
    pub(crate) fn set_bound(&self, bound_bytes: u64) {
        let mut state = self.state.lock();
        state.budget.bound_bytes = bound_bytes;
        self.bound_bytes.store(bound_bytes, Ordering::Relaxed);
        self.publish(&state);
    }

    pub(crate) fn left_pages(&self) -> u64 {
        self.left_pages.load(Ordering::Relaxed)
    }

    /// Returns the number of pages that folios can have, allocated or not: the part of the bound
    /// that is not metadata, less the most that whole chunks leave; a hint.
    pub(crate) fn folio_pages_max(&self) -> u64 {
        self.folio_pages_max.load(Ordering::Relaxed)
    }

    /// Returns the bytes of descriptors, which stay charged whatever the bound.
    pub(crate) fn descriptor_bytes(&self) -> u64 {
        let state = self.state.lock();
        let chunks = state.chunks.iter().filter(|chunk| chunk.has_descriptors).count() as u64;
        chunks * (self.chunk_size.cost_bytes() - self.chunk_size.bytes())
            + state.region_pages.descriptor_bytes()
    }

    pub(crate) fn excess_bytes(&self) -> u64 {
        let budget = &self.state.lock().budget;
        budget.used_bytes.saturating_sub(budget.bound_bytes)
    }

    pub(crate) fn usage(&self) -> ArenaUse {
        let state = self.state.lock();
        ArenaUse {
            bound_bytes: state.budget.bound_bytes,
            used_bytes: state.budget.used_bytes,
            frame_bytes: state.frame_bytes(),
            free_pages: state.free_pages + self.stocks.iter().map(AtomicRun::len).sum::<u64>(),
        }
    }

    /// Returns `true` if [`Self::preallocate`] has work to do; a hint.
    pub(crate) fn wants_chunk(&self) -> bool {
        self.wants_chunk.load(Ordering::Relaxed)
    }

    pub(crate) fn is_region_page(&self, id: FolioId) -> bool {
        id.0 >= self.frames()
    }

    /// Allocates a descriptor and charges a page; `None` if the budget does not allow it.
    pub(crate) fn allocate_region_page(&self, folios: &Folios) -> Option<FolioId> {
        let state = &mut *self.state.lock();
        let found = state.region_pages.take(&mut state.budget, self.frames(), folios);
        self.publish(state);
        found
    }

    /// Frees the descriptor, which the caller has frozen, and its page.
    pub(crate) fn free_region_page(&self, id: FolioId, folios: &Folios) {
        let state = &mut *self.state.lock();
        state.region_pages.give_back(&mut state.budget, id, folios);
        self.publish(state);
    }

    pub(super) fn publish(&self, state: &ArenaState) {
        self.wants_chunk.store(state.wants_chunk(), Ordering::Relaxed);
        self.obtainable_pages.store(state.obtainable_pages(), Ordering::Relaxed);
        self.region_page_count.store(state.region_pages.used, Ordering::Relaxed);
        self.left_pages.store(state.budget.left_bytes() / FRAME_BYTES, Ordering::Relaxed);
        self.folio_pages_max.store(state.folio_pages_max(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_filled_in_order_are_a_run() {
        let bound_bytes = 1 << 20;
        let features = Features::probe(&[]);
        let arena =
            Arena::new(&MemorySource::Private, bound_bytes, bound_bytes, HugePages::Auto, features)
                .unwrap();
        arena.note_fill(false);
        (2..RUN_PAGES).for_each(|_| arena.note_fill(true));
        assert!(!arena.is_filled_in_runs());
        (0..RUN_PAGES).for_each(|_| arena.note_fill(false));
        assert!(!arena.is_filled_in_runs());
        (1..RUN_PAGES).for_each(|_| arena.note_fill(true));
        assert!(arena.is_filled_in_runs());
        arena.note_evicted(arena.remembered_pages());
        assert!(!arena.is_filled_in_runs());
    }
}

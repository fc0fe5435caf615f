//! The memory of a cache: frames within one bound, the LRU lists that order their eviction, and
//! [`Memory`], which connects both to the folio descriptors.
//!
//! Any thread may put the last reference to a folio: the [`Reaper`] made here then takes the folio
//! off the lists and frees its frame.
//!
//! Invariants:
//! - FRAMES-1: resident memory (chunks in use but for their lent slots, descriptors ever used,
//!   charged tables) never exceeds the bound: each part is charged before it is touched.
//! - FRAMES-2: the address of a frame stays readable for the lifetime of the cache, whatever
//!   happened to its folio, because an optimistic reader may still copy from it. A released chunk
//!   reads as zeros.
//! - FRAMES-3: a frame belongs to one folio from `take` to `free`. The arena's lock, which `free`
//!   and the filling of a CPU's stock hold, orders the previous use of a frame before the next.

mod arena;
mod chunk;
mod lru;
mod residency;
mod workingset;

pub(crate) use arena::Arena;
pub(crate) use chunk::{Budget, EXTENT_PAGES};
pub(crate) use lru::{ListKind, ListSizes, Lru, Unlisted};
pub(crate) use residency::Purpose;
pub(crate) use workingset::Shadow;

use crate::error::{Error, ErrorKind, Result};
use crate::maps::region::{Orphans, RecentReads, Region, Staged};
use crate::page::{Entry, Folio, FolioId, Folios, Frozen, Reaper, Tables};
use crate::stats::{Counter, Counters};
use crate::sync::{AtomicRun, AtomicU64, Mutex, Ordering, Share};
use crate::sys::process::Origin;
use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub(crate) const ORDER_MAX: u8 = 9;

/// Shorter stalls are not counted: a miss takes about as long.
const STALL_MIN: Duration = Duration::from_micros(100);

/// Part of the bound that memory files with a swap cannot use, so that other files always find
/// frames; the limits are in pages. Reclaim keeps more than this free, and new pages stop earlier,
/// so other files wait for it only when the swap cannot keep up.
const OTHER_FILES_DIVISOR: u64 = 512;
const OTHER_FILES_PAGES_MIN: u64 = 8;
const OTHER_FILES_PAGES_MAX: u64 = 64;
/// Upper bound on that number as a part of the bound: in 256 KiB, 8 pages, tables among them. With
/// half as many, two tables left two pages, which a busy disk had both under write-out.
const OTHER_FILES_DIVISOR_MAX: u64 = 8;

#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) folios: Folios,
    pub(crate) arena: Arc<Arena>,
    pub(crate) lru: Arc<Lru>,
    pub(crate) orphans: Arc<Orphans>,
    pub(crate) counters: Counters,
    pub(crate) region_reads: RecentReads,
    pub(crate) soundness: Arc<Soundness>,
    /// The last error with which the kernel refused to unmap pages of maps, until an eviction
    /// succeeds.
    pub(crate) unmap_refusal: Mutex<Option<String>>,
    /// Dirty pages plus pages under write-back; a page that is both counts twice.
    pub(crate) dirty_pages: Arc<AtomicU64>,
    pub(crate) unswapped_pages: Arc<AtomicU64>,
    pub(crate) tables: Tables,
}

impl Memory {
    /// Creates descriptors for the frames of `arena` and as many region pages, and what each of
    /// `cpus` CPUs has.
    pub(crate) fn new(mut arena: Arena, cpus: usize) -> io::Result<Self> {
        arena.stocks = (0..cpus).map(|_| AtomicRun::default()).collect();
        let descriptors_max = 2 * arena.frames() as usize;
        let arena = Arc::new(arena);
        let lru = Arc::new(Lru::new(cpus));
        let orphans = Arc::<Orphans>::default();
        let reaper = FolioReaper {
            arena: Arc::clone(&arena),
            lru: Arc::clone(&lru),
            orphans: Arc::clone(&orphans),
        };
        Ok(Self {
            folios: Folios::new(descriptors_max, Box::new(reaper))?,
            region_reads: RecentReads::new(&arena),
            soundness: Arc::default(),
            unmap_refusal: Mutex::default(),
            arena,
            lru,
            orphans,
            counters: Counters::new(),
            dirty_pages: Arc::default(),
            unswapped_pages: Arc::default(),
            tables: Tables::default(),
        })
    }

    /// Counts a reclaim stall of a thread that has waited since `since`, unless the wait was short.
    pub(crate) fn note_stall(&self, since: Option<Instant>) {
        if since.is_some_and(|since| since.elapsed() >= STALL_MIN) {
            self.counters.add(Counter::ReclaimStall, 1);
        }
    }

    pub(crate) fn other_files_pages_min(&self) -> u64 {
        let bound_pages = self.arena.bound_pages();
        (bound_pages / OTHER_FILES_DIVISOR)
            .clamp(OTHER_FILES_PAGES_MIN, OTHER_FILES_PAGES_MAX)
            .min(bound_pages / OTHER_FILES_DIVISOR_MAX)
    }

    pub(crate) fn unswapped_pages_max(&self) -> u64 {
        self.arena.folio_pages_max().saturating_sub(self.other_files_pages_min())
    }

    pub(crate) fn folio(&self, id: FolioId) -> &Folio {
        self.folios.get(id)
    }
}

struct FolioReaper {
    arena: Arc<Arena>,
    lru: Arc<Lru>,
    orphans: Arc<Orphans>,
}

impl Reaper for FolioReaper {
    fn reap(&self, frozen: Frozen<'_>) {
        self.lru.forget(frozen.folios(), frozen.id());
        if self.arena.is_region_page(frozen.id()) {
            self.orphans.release(frozen.id());
            self.arena.free_region_page(frozen.id(), frozen.folios());
        } else {
            self.arena.free([frozen.id()]);
        }
    }

    fn reap_all(&self, frozen: &mut Vec<Frozen<'_>>) {
        let in_region = |frozen: &mut Frozen<'_>| self.arena.is_region_page(frozen.id());
        frozen.extract_if(.., in_region).for_each(|frozen| self.reap(frozen));
        frozen.iter().for_each(|frozen| self.lru.forget(frozen.folios(), frozen.id()));
        self.arena.free(frozen.drain(..).map(|frozen| frozen.id()));
    }
}

/// Number of regions in the process, of all caches.
pub(crate) static REGIONS_COUNT: AtomicUsize = AtomicUsize::new(0);

/// The memory that holds the pages of one file: the interface behind which mappable files differ
/// from others.
///
/// In the arena, a page is in the frame that its Entry names, which stays readable (FRAMES-2), and
/// evicting a folio only makes its frame free again. In a region, the page at index i is at base +
/// i * 4096, where maps see it: it is installed whole from staging memory, evicted by unmapping,
/// and accessed with a reference (REGION-4).
#[derive(Clone, Debug)]
pub(crate) enum PageSpace {
    Arena(Arc<Arena>),
    Region(Arc<Region>),
}

/// The memory that a fill writes to: staging memory for a file in a region, whose pages are then
/// installed from it; otherwise none but the frames of the folios.
#[derive(Debug, Default)]
pub(crate) struct FillTarget {
    staged: Option<Staged>,
    /// Set if raw stores to the pages are expected soon.
    pub(crate) will_be_stored: bool,
}

/// Maximum number of region folios that are checked, installed with one call, and unlocked
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

    pub(crate) fn note_read(&self, memory: &Memory, pages: u64) {
        if self.staged.is_some() {
            memory.region_reads.note_read(pages);
        }
    }
}

/// Pages of a region that are referenced at a time, at most (32 KiB): a larger batch gains nothing,
/// and other threads cannot evict the pages, which matters in a cache of 100 pages.
const HELD_TOGETHER: u64 = 8;

impl PageSpace {
    /// Returns the address that others are relative to: by frame in the arena, by index in a
    /// region.
    pub(crate) fn base(&self) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.base(),
            Self::Region(region) => region.addresses.base(),
        }
    }

    /// Returns the address of the first byte of the folio `id`, whose first page is at `index`.
    #[inline(always)]
    pub(crate) fn address(&self, id: FolioId, index: u64) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.address(id),
            Self::Region(region) => region.addresses.address(index),
        }
    }

    /// Returns the address of the page `index`, whose Entry is `seen` and READY.
    #[inline(always)]
    pub(crate) fn page_address(&self, index: u64, seen: Entry) -> *mut u8 {
        match self {
            Self::Arena(arena) => arena.base().wrapping_add(seen.frame_offset_bytes()),
            Self::Region(region) => region.addresses.address(index),
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

    /// Returns the region of the file called `name`, if it can be mapped.
    pub(crate) fn mappable(&self, name: impl FnOnce() -> String) -> Result<&Arc<Region>> {
        self.region().ok_or_else(|| Error::not_mappable(name()))
    }

    /// Returns `true` if the address of a page depends only on its index, and every access needs a
    /// reference.
    pub(crate) fn is_in_place(&self) -> bool {
        matches!(self, Self::Region(_))
    }

    pub(crate) fn region(&self) -> Option<&Arc<Region>> {
        match self {
            Self::Arena(_) => None,
            Self::Region(region) => Some(region),
        }
    }

    /// Takes the memory for a fill of up to `pages` pages that is no frame: staging memory of a
    /// region, of the `share` of a device. Waits for it if it `may_wait`; otherwise returns `None`
    /// if there is none.
    pub(crate) fn fill_target(
        &self,
        pages: u64,
        share: &Share,
        may_wait: bool,
    ) -> Option<FillTarget> {
        let Self::Region(region) = self else { return Some(FillTarget::default()) };
        let staged = Some(region.stage(pages as usize, share, may_wait)?);
        Some(FillTarget { staged, will_be_stored: false })
    }

    /// Returns the length of a readahead window of at most `pages` pages: staging memory has room
    /// for several.
    pub(crate) fn window_pages(&self, pages: u64) -> u64 {
        self.region().map_or(pages, |region| pages.min(region.window_pages()))
    }

    /// Returns the number of pages that one file reads ahead at a time: `of_frames` in the arena.
    pub(crate) fn pages_in_flight(&self, of_frames: u64) -> u64 {
        self.region().map_or(of_frames, |_| Region::PAGES_IN_FLIGHT)
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
        let (Self::Region(region), Some(staged)) = (self, &target.staged) else {
            return (pages.end - pages.start, Ok(()));
        };
        let (there, installed) = region.publish(staged, number, pages, target.will_be_stored);
        counters.add(Counter::MapIn, there);
        (there, installed)
    }

    /// Clears the poison of `pages`, so that touching them tries to fill them again. Fails if the
    /// kernel has no memory.
    pub(crate) fn clear_poison(&self, pages: Range<u64>) -> Result<()> {
        let Self::Region(region) = self else { return Ok(()) };
        let cleared = region.stray_pages.clear_poison(&region.addresses, pages);
        cleared.map_err(|source| Error::memory("a page of a map", source))
    }

    /// Returns the pages that belong to truncated folios with references: maps still see them.
    pub(crate) fn orphaned_among(&self, pages: Range<u64>) -> Vec<u64> {
        self.region().map_or_else(Vec::new, |region| region.stray_pages.orphaned_among(pages))
    }

    /// Returns the parts of `pages` that are mapped: sorted and disjoint.
    pub(crate) fn mapped_among(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
        self.region().map_or_else(Vec::new, |region| region.mapped.among(pages))
    }

    /// Ends the growth, whether or not the file grew: faults that were refused because of the old
    /// length are judged again (STRAY-R3).
    pub(crate) fn end_growth(&self) {
        if let Self::Region(region) = self {
            region.stray_pages.end_growth();
        }
    }
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

/// State of the cache: open or closed, and the number of maps in use.
#[derive(Debug)]
pub(crate) struct CacheState {
    /// Number of maps in use, and `CLOSED`. One word, so that a new map and a concurrent close see
    /// each other in either order.
    state: AtomicU64,
    origin: Origin,
}

const CLOSED: u64 = 1 << 63;

impl CacheState {
    pub(crate) fn new(origin: Origin) -> Self {
        Self { state: AtomicU64::new(0), origin }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.origin.is_forked() {
            return Err(Error::forked());
        }
        // Acquire: pairs with the Release in `close`: what it flushed is flushed.
        let is_closed = self.state.load(Ordering::Acquire) & CLOSED != 0;
        if is_closed {
            return Err(Error::new(ErrorKind::Closed, "the cache is closed"));
        }
        Ok(())
    }

    /// Fails if the cache is closed, belongs to a parent process, or is poisoned.
    pub(crate) fn check_sound(&self, soundness: &Soundness) -> Result<()> {
        self.check()?;
        soundness.check()
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.origin.is_forked()
    }

    /// Counts a map; the caller then checks the state.
    pub(crate) fn begin_map(&self) {
        // Relaxed: a close changes the same word, so one of the two sees the other.
        self.state.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end_map(&self) {
        // Release: pairs with the Acquire in `close`: what was stored through the map is found.
        self.state.fetch_sub(1, Ordering::Release);
    }

    /// Closes the state, or returns the number of maps in use.
    pub(crate) fn close(&self) -> std::result::Result<(), u64> {
        // AcqRel/Acquire: pairs with the Release in `end_map`, and with the Acquire in `check`.
        let closed = self.state.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire);
        closed.map(drop).map_err(|state| state & !CLOSED)
    }

    pub(crate) fn reopen(&self) {
        // Release: pairs with the Acquire in `check`.
        self.state.fetch_and(!CLOSED, Ordering::Release);
    }

    pub(crate) fn check_maps(&self) -> Result<()> {
        // Acquire: pairs with the Release in `end_map`, as in `close`.
        match self.state.load(Ordering::Acquire) & !CLOSED {
            0 => Ok(()),
            maps => Err(Error::maps_alive(maps)),
        }
    }
}

/// Records that the kernel refused an operation that can be neither undone nor skipped: the cache
/// is *poisoned*, and stays so.
///
/// Resident pages can still be read; every other operation returns [`ErrorKind::Poisoned`] with the
/// first cause. Checked before a page is claimed or changed and before a transfer starts.
#[derive(Debug, Default)]
pub(crate) struct Soundness {
    /// [`ErrorKind::Poisoned`] with the first cause.
    error: OnceLock<Error>,
}

impl Soundness {
    /// Poisons the cache. Only the first cause is kept.
    pub(crate) fn lose(&self, what: &'static str, source: &io::Error) {
        log::error!("the cache is poisoned: {what}: {source}");
        let copy = || io::Error::new(source.kind(), source.to_string());
        let source = source.raw_os_error().map_or_else(copy, io::Error::from_raw_os_error);
        let text = format!("the cache is poisoned: {what}: {source}");
        let error = Error::new(ErrorKind::Poisoned, text).because(Arc::new(source));
        let _ = self.error.set(error);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.error.get().is_some()
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.error.get().map_or(Ok(()), |error| Err(error.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poisoned_cache_keeps_its_first_cause() {
        let soundness = Soundness::default();
        assert!(!soundness.is_lost() && soundness.check().is_ok());
        soundness.lose("first", &io::Error::from_raw_os_error(libc::ENOMEM));
        soundness.lose("second", &io::Error::from_raw_os_error(libc::EIO));
        for _ in 0..2 {
            let error = soundness.check().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Poisoned);
            assert!(error.to_string().contains(": first: "), "{error}");
            assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
        }
    }
}

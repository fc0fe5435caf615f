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
mod budget;
mod chunk;
mod classes;
mod in_place;
mod lists;
mod lru;
mod page_space;
mod region_pages;
mod residency;
mod workingset;

use arena::ArenaUse;
pub(crate) use arena::{Arena, FrameKind};
pub(crate) use chunk::EXTENT_PAGES;
pub(crate) use classes::{Counted, Limits};
pub(crate) use in_place::{
    InPlace, Orphans, StagedPages, forget_addresses, is_mapped, note_addresses,
};
pub(crate) use lists::{ListKind, ListSizes};
pub(crate) use lru::{Giver, Lru, Unlisted};
pub(crate) use page_space::{FillTarget, PageSpace};
pub(crate) use residency::Purpose;
pub(crate) use workingset::Shadow;

use crate::error::{Error, ErrorKind, Result};
use crate::page::{Folio, FolioId, Folios, Frozen, Reaper, Tables};
use crate::stats::{Counter, Counters};
use crate::sync::{AtomicRun, AtomicU64, Mutex, Ordering};
use crate::sys::process::Origin;
use region_pages::RecentReads;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

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
    /// Memory of the program that counts within the bound.
    pub(crate) reserved_bytes: AtomicU64,
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
            region_reads: RecentReads::new(arena.remembered_pages()),
            soundness: Arc::default(),
            unmap_refusal: Mutex::default(),
            arena,
            lru,
            orphans,
            counters: Counters::new(),
            dirty_pages: Arc::default(),
            unswapped_pages: Arc::default(),
            reserved_bytes: AtomicU64::new(0),
            tables: Tables::default(),
        })
    }

    /// Counts a reclaim stall of a thread that has waited since `since`, unless the wait was short.
    pub(crate) fn note_stall(&self, since: Option<Instant>) {
        if since.is_some_and(|since| since.elapsed() >= STALL_MIN) {
            self.counters.add(Counter::ReclaimStall, 1);
        }
    }

    /// Returns the bytes of descriptors and tables.
    pub(crate) fn metadata_bytes(&self, usage: &ArenaUse) -> u64 {
        // Relaxed: a count, which is raised before the bytes are charged.
        let reserved_bytes = self.reserved_bytes.load(Ordering::Relaxed);
        (usage.used_bytes - usage.frame_bytes).saturating_sub(reserved_bytes)
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

    /// Returns the process that the cache belongs to, for what outlives this.
    pub(crate) fn origin(&self) -> Origin {
        self.origin
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

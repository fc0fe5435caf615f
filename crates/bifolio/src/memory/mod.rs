//! The memory of a cache: frames under one bound, the lists that say which go first, and
//! [`Memory`], which wires them to the descriptors.
//!
//! Frames are of two kinds. The arena (`arena.rs`): huge-page frames whose number is that of their
//! descriptor; evicting is reusing, without any page-table work. A region (`region/`): address
//! space of one file that can be mapped, where the page at index i has its place; evicting is
//! unmapping. Above, `reclaim` decides who gets a frame and who must give one back; here is only
//! what is free, where it lies (`extents.rs`), what everything costs, and what was used how lately
//! (`lru.rs`). [`PageSpace`] says which kind a file has.
//!
//! Everything above (`writeback`, `reclaim`, `file`) shares one [`Memory`]. It also closes the one
//! loop of the layers: the last reference to a folio may be put anywhere, and what must happen
//! then (off the lists, frame back to the arena) is the [`Reaper`] made here.
//!
//! Invariants:
//! - FRAMES-1: what is resident (chunks in use, descriptors ever used, charged tables) never
//!   exceeds the bound: each is charged before it is touched.
//! - FRAMES-2: a frame's address is readable for the life of the cache, whatever became of its
//!   folio: an optimistic reader may come late. A released chunk reads as zeros.
//! - FRAMES-3: a frame belongs to one folio from `allocate` to `free`, both under the arena's lock:
//!   that lock orders the last life of a frame before the next.

mod arena;
mod chunk;
mod extents;
mod lru;
mod page_space;
mod region;
mod resident;
mod workingset;
pub(crate) use arena::Arena;
pub(crate) use chunk::{CHUNK_BYTES, CHUNK_PAGES};
pub(crate) use extents::EXTENT_PAGES;
pub(crate) use lru::{ListKind, Lru, Unlisted};
pub(crate) use page_space::PageSpace;
use region::Orphans;
pub(crate) use region::{
    BounceBuffer, Refusal, Region, RegionReads, Regions, RegionsSize, Staged, fault_time,
};
pub(crate) use resident::{Evacuation, Purpose};
pub(crate) use workingset::Shadow;

use crate::error::{ErrorKind, Result};
use crate::page::{Folio, FolioId, Folios, Frozen, Reaper, Tables};
use crate::stats::{Counter, Counters};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// log2 of the pages in the largest folio: a whole chunk.
pub(crate) const ORDER_MAX: u8 = 9;

/// Shorter stalls are not counted: a miss takes about as long.
const STALL_MIN: Duration = Duration::from_micros(100);

/// The part of the bound that memory files with a swap leave to others, and within which limits,
/// pages: enough that who reads and writes other files finds frames. (What reclaim keeps free, and
/// new pages leave, is more: so nobody waits for it while the swap keeps up.)
const PART_NOT_UNSWAPPED: u64 = 512;
const NOT_UNSWAPPED_PAGES_MIN: u64 = 8;
const NOT_UNSWAPPED_PAGES_MAX: u64 = 64;
/// In the smallest caches not more than this part.
const PART_NOT_UNSWAPPED_MAX: u64 = 16;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) folios: Folios,
    pub(crate) arena: Arc<Arena>,
    pub(crate) lru: Arc<Lru>,
    pub(crate) orphans: Arc<Orphans>,
    pub(crate) counters: Counters,
    pub(crate) region_reads: RegionReads,
    pub(crate) soundness: Arc<Soundness>,
    pub(crate) unmap_refusal: UnmapRefusal,
    /// Pages that are dirty, and pages being written out: one that is both counts twice.
    pub(crate) dirty_pages: Arc<AtomicU64>,
    /// Those of memory files, which have no backing: their bytes are nowhere else.
    pub(crate) unswapped_pages: Arc<AtomicU64>,
    /// The tables of all files.
    pub(crate) tables: Tables,
}

impl Memory {
    /// So many descriptors for the frames of `arena`, and lists for `cpus` CPUs.
    pub(crate) fn new(arena: Arena, descriptors_max: usize, cpus: usize) -> io::Result<Self> {
        let arena = Arc::new(arena);
        let lru = Arc::new(Lru::new(cpus));
        let orphans = Arc::new(Orphans::default());
        let grave = FolioReaper {
            arena: Arc::clone(&arena),
            lru: Arc::clone(&lru),
            orphans: Arc::clone(&orphans),
        };
        Ok(Self {
            folios: Folios::new(descriptors_max, Box::new(grave))?,
            region_reads: RegionReads::new(&arena),
            soundness: Arc::default(),
            unmap_refusal: UnmapRefusal::default(),
            arena,
            lru,
            orphans,
            counters: Counters::new(),
            dirty_pages: Arc::default(),
            unswapped_pages: Arc::default(),
            tables: Tables::default(),
        })
    }

    /// Counts the stall of a thread that has waited for reclaim `since` then, unless it is short.
    pub(crate) fn note_stall(&self, since: Option<Instant>) {
        if since.is_some_and(|since| since.elapsed() >= STALL_MIN) {
            self.counters.add(Counter::ReclaimStall, 1);
        }
    }

    /// Pages that those of memory files leave to others for which there is no place but memory.
    pub(crate) fn pages_left_to_others(&self) -> u64 {
        let bound_pages = self.arena.bound_pages();
        (bound_pages / PART_NOT_UNSWAPPED)
            .clamp(NOT_UNSWAPPED_PAGES_MIN, NOT_UNSWAPPED_PAGES_MAX)
            .min(bound_pages / PART_NOT_UNSWAPPED_MAX)
    }

    /// How many pages of memory files with a swap may be in memory and nowhere else.
    pub(crate) fn unswapped_pages_max(&self) -> u64 {
        self.arena.folio_pages_max().saturating_sub(self.pages_left_to_others())
    }

    /// The descriptor of a folio.
    pub(crate) fn folio(&self, id: FolioId) -> &Folio {
        self.folios.get(id)
    }
}

/// Where dead folios go.
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
            self.arena.free(frozen.id());
        }
    }
}

/// The use of an allocation.
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

/// The last refusal of the kernel to evict pages of maps, until some are evicted again.
#[derive(Debug, Default)]
pub(crate) struct UnmapRefusal {
    pub(crate) last: Mutex<Option<String>>,
    /// Whether there is one: a hint.
    is_any: AtomicBool,
}

impl UnmapRefusal {
    pub(crate) fn note(&self, what: &str, error: &io::Error) {
        *self.last.lock() = Some(format!("{what}: {error}"));
        self.is_any.store(true, Ordering::Relaxed);
    }

    /// Pages were evicted.
    pub(crate) fn clear(&self) {
        // Relaxed: a hint; what it does not show is cleared the next time.
        if self.is_any.swap(false, Ordering::Relaxed) {
            *self.last.lock() = None;
        }
    }
}

/// Whether the cache can be relied upon: until the kernel refuses something that can neither be
/// undone nor done without.
///
/// A page of a map that cannot be unmapped, or whose last bytes cannot be had back, is such a case:
/// what is in the pages or on the device is not certain any more. So are faults that cannot be
/// served: a page that can neither be had nor be marked as one that cannot. The cache is *poisoned*
/// then, for good: what is resident can still be read, nothing is read in, written or written out,
/// and everything else answers [`ErrorKind::Poisoned`] with the first cause. (`ErrorKind::Fault`, a
/// page that could not be had when it was touched, has the same cause then.)
///
/// Asked by whoever claims a page, changes one, or starts a transfer; told by regions, faults,
/// reclaim and write-outs.
#[derive(Debug, Default)]
pub(crate) struct Soundness {
    cause: OnceLock<Cause>,
}

#[derive(Debug)]
struct Cause {
    what: &'static str,
    source: Arc<io::Error>,
}

impl Soundness {
    /// The cache cannot be relied upon from now on. The first cause stays.
    pub(crate) fn lose(&self, what: &'static str, source: &io::Error) {
        log::error!("the cache is poisoned: {what}: {source}");
        let copy = || io::Error::new(source.kind(), source.to_string());
        let source = source.raw_os_error().map_or_else(copy, io::Error::from_raw_os_error);
        let _ = self.cause.set(Cause { what, source: Arc::new(source) });
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.cause.get().is_some()
    }

    /// Refuses what must not be done any more.
    ///
    /// # Errors
    /// The cache is poisoned.
    pub(crate) fn check(&self) -> Result<()> {
        let Some(cause) = self.cause.get() else { return Ok(()) };
        Err(ErrorKind::Poisoned { what: cause.what, source: Arc::clone(&cause.source) }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cause_is_told_for_good() {
        let soundness = Soundness::default();
        assert!(!soundness.is_lost() && soundness.check().is_ok());
        soundness.lose("first", &io::Error::from_raw_os_error(libc::ENOMEM));
        soundness.lose("second", &io::Error::from_raw_os_error(libc::EIO));
        for _ in 0..2 {
            let error = soundness.check().unwrap_err();
            let ErrorKind::Poisoned { what: "first", source } = error.kind() else {
                panic!("{error:?}")
            };
            assert_eq!(source.raw_os_error(), Some(libc::ENOMEM));
        }
    }
}

//! The memory of a cache as one thing: descriptors, frames, lists and counters, wired together.
//!
//! Everything above (`writeback`, `reclaim`, `file`) shares one [`Memory`]. It also closes the one
//! loop of the layers: the last reference to a folio may be put anywhere, and what must happen
//! then (off the lists, frame back to the arena) is the [`Reaper`] made here.

use super::Lru;
use crate::folio::{Folio, FolioId, Folios, Frozen, Reaper};
use crate::frames::{Arena, Orphans, RegionReads, Soundness};
use crate::mapping::Tables;
use crate::stats::{Counter, Counters};
use crate::sync::AtomicU64;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who waits less has not noticed: a miss takes about as long.
const STALL_MIN: Duration = Duration::from_micros(100);

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
    /// Pages that are dirty, and pages being written out: one that is both counts twice.
    pub(crate) dirty_pages: Arc<AtomicU64>,
    /// The same of memory files, which have no backing: pages that are nowhere else.
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
            arena,
            lru,
            orphans,
            counters: Counters::new(),
            dirty_pages: Arc::default(),
            unswapped_pages: Arc::default(),
            tables: Tables::default(),
        })
    }

    /// A thread has waited for reclaim since then; or for nothing.
    pub(crate) fn note_stall(&self, since: Option<Instant>) {
        if since.is_some_and(|since| since.elapsed() >= STALL_MIN) {
            self.counters.add(Counter::ReclaimStall, 1);
        }
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

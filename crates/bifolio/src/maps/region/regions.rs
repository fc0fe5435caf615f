//! Resources shared by all regions of a cache: the unmapper, and the memory that pages pass through
//! when they are filled and evicted.
use super::staging::Staging;
use crate::maps::kernel::page_pipe::PagePipe;
use crate::maps::kernel::pages::{PageRange, Unmapper, is_resident};
use crate::maps::kernel::userfault::Userfault;
use crate::memory::{Arena, Budget, Soundness};
use crate::page::{Folio, FolioId, Folios, NO_FOLIO, PAGE_BYTES};
use crate::sync::{Mutex, Ordering};
use crate::sys::memory::{HUGE_PAGE_BYTES, Reservation, allow_access, refuse_access};
use crate::sys::probe::{Feature, Features};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Part of the bound for staging memory, and for the bounce buffer. With half of it, a sequential
/// reader of a 32 MiB cache reads half as fast: its transfers are short and few are in flight.
const BOUND_DIVISOR: u64 = 16;
/// Upper bounds in pages; larger caches need no more. The bounce buffer may exceed its bound for
/// large batches, within that part.
const STAGING_PAGES_MAX: u64 = 2048;
const EXIT_PAGES_MAX: u64 = 512;
/// Lower bound on both, in pages.
const PAGES_MIN: u64 = 8;

#[derive(Debug)]
pub(crate) struct Regions {
    pub(crate) features: Features,
    pub(crate) soundness: Arc<Soundness>,
    pub(crate) unmapper: Unmapper,
    pub(crate) staging: Arc<Staging>,
    /// Bounce buffer of all threads but the swapper; its holder waits for no storage.
    pub(crate) bounce_buffer: Mutex<BounceBuffer>,
    /// Bounce buffer of the swapper, which keeps it while it writes; `None` if there is no swap.
    pub(crate) swap_bounce_buffer: Option<Mutex<BounceBuffer>>,
    /// Addresses of the pages that are inaccessible because the kernel cannot poison them.
    refused: Mutex<BTreeSet<usize>>,
}

/// Memory for pages that are evicted: it keeps their bytes while they are unmapped, and they are
/// written back from it.
#[derive(Debug)]
pub(crate) struct BounceBuffer {
    memory: Reservation,
    pub(crate) page_pipe: PagePipe,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionsSize {
    staging_pages: u64,
    pub(crate) bounce_buffer_pages: u64,
    /// Pages of the swapper's bounce buffer; 0 if there is no swap.
    swap_bounce_buffer_pages: u64,
    huge: bool,
}

impl RegionsSize {
    pub(crate) fn bytes(self) -> u64 {
        (self.staging_pages + self.bounce_buffer_pages + self.swap_bounce_buffer_pages) * PAGE_BYTES
    }
}

impl BounceBuffer {
    pub(crate) fn pages(&self) -> usize {
        self.memory.len() / PAGE_BYTES as usize
    }

    pub(crate) fn address(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages(), "page {page} of a bounce buffer of {}", self.pages());
        self.memory.base.wrapping_add(page * PAGE_BYTES as usize)
    }
}

impl Regions {
    /// Computes the sizes for a cache that evicts at most `batch` pages at once.
    pub(crate) fn size_for(arena: &Arena, batch: usize, has_swap: bool) -> RegionsSize {
        let part = (arena.bound_pages() / BOUND_DIVISOR).max(PAGES_MIN);
        // Two pages for each folio of a batch.
        let for_batch = 2 * batch as u64;
        let bounce_buffer_pages = (part / 2).min(EXIT_PAGES_MAX.max(for_batch));
        RegionsSize {
            staging_pages: part.min(STAGING_PAGES_MAX),
            bounce_buffer_pages,
            swap_bounce_buffer_pages: if has_swap { 2 * bounce_buffer_pages } else { 0 },
            huge: arena.may_use_huge_pages,
        }
    }

    /// Makes the memory resident. The caller has charged it.
    pub(crate) fn new(
        size: RegionsSize,
        features: &Features,
        soundness: &Arc<Soundness>,
    ) -> io::Result<Self> {
        let memory = |pages| memory_for_transfers(pages, size.huge, features);
        let large_pipes = features.has(Feature::LargePipes);
        let bounce_buffer = |pages| {
            let page_pipe = PagePipe::new(size.bounce_buffer_pages as usize, large_pipes)?;
            Ok::<_, io::Error>(Mutex::new(BounceBuffer { memory: memory(pages)?, page_pipe }))
        };
        let swap_pages = size.swap_bounce_buffer_pages;
        Ok(Self {
            features: features.clone(),
            soundness: Arc::clone(soundness),
            unmapper: Unmapper::new(features),
            staging: Arc::new(Staging::new(memory(size.staging_pages)?)),
            bounce_buffer: bounce_buffer(size.bounce_buffer_pages)?,
            swap_bounce_buffer: (swap_pages > 0).then(|| bounce_buffer(swap_pages)).transpose()?,
            refused: Mutex::default(),
        })
    }

    /// Makes a page that is not resident inaccessible.
    pub(crate) fn poison(&self, userfault: &Userfault, range: &PageRange) -> io::Result<()> {
        if self.features.has(Feature::FaultPoison) {
            return userfault.poison(range);
        }
        let mut refused = self.refused.lock();
        if is_resident(range.start) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        refuse_access(range.start, range.length_bytes)?;
        refused.insert(range.start.addr());
        userfault.wake(range)
    }

    /// Makes pages that were just installed, or one that is poisoned, accessible.
    pub(super) fn unpoison(&self, range: &PageRange) -> io::Result<()> {
        if self.features.has(Feature::FaultPoison) {
            return Ok(());
        }
        let pages = range.start.addr()..range.start.addr() + range.length_bytes;
        let mut refused = self.refused.lock();
        if refused.range(pages.clone()).next().is_some() {
            allow_access(range.start, range.length_bytes)?;
            refused.retain(|page| !pages.contains(page));
        }
        Ok(())
    }
}

/// Returns `pages` resident pages, in huge pages if allowed and available. A transfer from a huge
/// page is one segment for the device; scattered small pages are one segment each and take three
/// times as long.
fn memory_for_transfers(pages: u64, huge: bool, features: &Features) -> io::Result<Reservation> {
    let bytes = (pages * PAGE_BYTES) as usize;
    let memory = Reservation::new(bytes, HUGE_PAGE_BYTES)?;
    memory.wipe_on_fork();
    if !huge {
        memory.refuse_huge_pages();
    }
    features.populate(&memory, (0, bytes), huge)?;
    Ok(memory)
}

const DESCRIPTORS_PER_PAGE: u32 = (PAGE_BYTES / size_of::<Folio>() as u64) as u32;

/// The descriptors of region pages, under the arena's lock.
///
/// To the arena, such a page is a descriptor and a page of the budget; the region knows its
/// address. These descriptors follow those of the frames. They are charged by the page, when the
/// first one on the page is used, and never released. Free ones are linked through themselves.
#[derive(Debug)]
pub(crate) struct RegionPages {
    free: u32,
    /// Number of descriptors that have been charged.
    known: u32,
    /// Number of descriptors in use, and of pages.
    pub(crate) used: u64,
}

impl Default for RegionPages {
    fn default() -> Self {
        Self { free: NO_FOLIO, known: 0, used: 0 }
    }
}

impl RegionPages {
    /// Takes a free descriptor and charges its page; `None` if the budget does not allow it. The
    /// descriptors begin at `first`.
    pub(crate) fn take(
        &mut self,
        budget: &mut Budget,
        first: u32,
        folios: &Folios,
    ) -> Option<FolioId> {
        if !budget.try_take(PAGE_BYTES) {
            return None;
        }
        if self.free == NO_FOLIO && !self.charge_more(budget, first, folios) {
            budget.give_back(PAGE_BYTES);
            return None;
        }
        let id = FolioId(self.free);
        // Relaxed: as in `link`.
        self.free = folios.get(id).lru_next.load(Ordering::Relaxed);
        self.used += 1;
        Some(id)
    }

    /// Returns the bytes of the descriptors that have been charged.
    pub(crate) fn descriptor_bytes(&self) -> u64 {
        u64::from(self.known / DESCRIPTORS_PER_PAGE) * PAGE_BYTES
    }

    /// Frees the descriptor of a frozen folio, and its page.
    pub(crate) fn give_back(&mut self, budget: &mut Budget, id: FolioId, folios: &Folios) {
        self.link(id.0, folios);
        self.used -= 1;
        budget.give_back(PAGE_BYTES);
    }

    /// Charges a page of descriptors and adds them to the free ones.
    fn charge_more(&mut self, budget: &mut Budget, first: u32, folios: &Folios) -> bool {
        let next = first + self.known;
        let is_room = (next + DESCRIPTORS_PER_PAGE) as usize <= folios.len();
        if !is_room || !budget.try_take(PAGE_BYTES) {
            return false;
        }
        folios.init_free(FolioId(next), DESCRIPTORS_PER_PAGE as usize);
        self.known += DESCRIPTORS_PER_PAGE;
        (next..next + DESCRIPTORS_PER_PAGE).rev().for_each(|number| self.link(number, folios));
        true
    }

    fn link(&mut self, number: u32, folios: &Folios) {
        // Relaxed: a free descriptor is on no list of the LRU, and the arena's lock orders this.
        folios.get(FolioId(number)).lru_next.store(self.free, Ordering::Relaxed);
        self.free = number;
    }
}

/// A read of at least this many pages counts as sequential.
const RUN_PAGES_MIN: u64 = 16;

/// Recent reads of a cache into its regions: runs of adjacent pages, or single pages. A hint to
/// reclaim: a random reader waits for each page, and benefits from a larger cache.
#[derive(Debug)]
pub(crate) struct RecentReads {
    remembered_pages: u64,
    /// Pages to be evicted until the last read of a run is forgotten.
    run_pages_left: AtomicU64,
    /// Pages to be evicted until the last read of fewer pages is forgotten.
    single_pages_left: AtomicU64,
}

impl RecentReads {
    pub(crate) fn new(arena: &Arena) -> Self {
        let remembered_pages = arena.remembered_pages();
        let (run_pages_left, single_pages_left) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { remembered_pages, run_pages_left, single_pages_left }
    }

    /// Notes that `pages` adjacent pages are about to be read.
    pub(crate) fn note_read(&self, pages: u64) {
        let left =
            if pages >= RUN_PAGES_MIN { &self.run_pages_left } else { &self.single_pages_left };
        left.store(self.remembered_pages, Ordering::Relaxed);
    }

    /// Adds `pages` to the evicted pages. Callers serialize.
    pub(crate) fn note_evicted(&self, pages: u64) {
        for left in [&self.run_pages_left, &self.single_pages_left] {
            // Relaxed, and not one atomic operation: a concurrent read may be forgotten.
            let left_pages = left.load(Ordering::Relaxed).saturating_sub(pages);
            left.store(left_pages, Ordering::Relaxed);
        }
    }

    /// Returns `true` if recent reads were of single pages, each with a waiting thread.
    pub(crate) fn are_single(&self) -> bool {
        let remembers = |left: &AtomicU64| left.load(Ordering::Relaxed) > 0;
        remembers(&self.single_pages_left) && !remembers(&self.run_pages_left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio_testing::skip;

    /// Bytes of huge pages in the mapping that begins at `memory`.
    fn huge_bytes(memory: &Reservation) -> u64 {
        let start = format!("{:x}-", memory.base.addr());
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
        let huge = lines.find_map(|line| line.strip_prefix("AnonHugePages:")).unwrap();
        let kibibytes: u64 = huge.trim_end_matches("kB").trim().parse().unwrap();
        kibibytes << 10
    }

    #[test]
    fn transfer_memory_is_in_huge_pages_where_allowed() {
        let features = Features::probe(&[]);
        if !features.has(Feature::TransparentHugePages) {
            return skip(Feature::TransparentHugePages, format!("{:?}", features.reports()));
        }
        let huge_pages_bytes = 2 * HUGE_PAGE_BYTES as u64;
        let there_are = Reservation::new(2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES).unwrap();
        features.populate(&there_are, (0, there_are.len()), true).unwrap();
        if huge_bytes(&there_are) < huge_pages_bytes {
            return skip("huge-pages-now", "the system has no free huge pages");
        }
        // Two whole huge pages, and part of a third, which must use only the pages that it needs.
        let pages = huge_pages_bytes / PAGE_BYTES + 1;
        let huge = memory_for_transfers(pages, true, &features).unwrap();
        assert_eq!(huge_bytes(&huge), huge_pages_bytes);
        let small = memory_for_transfers(pages, false, &features).unwrap();
        assert_eq!(huge_bytes(&small), 0);
    }

    #[test]
    fn runs_and_single_pages_are_remembered_until_enough_is_evicted() {
        let (run_pages_left, single_pages_left) = (AtomicU64::new(0), AtomicU64::new(0));
        let reads = RecentReads { remembered_pages: 128, run_pages_left, single_pages_left };
        assert!(!reads.are_single());
        reads.note_read(RUN_PAGES_MIN - 1);
        assert!(reads.are_single());
        reads.note_read(RUN_PAGES_MIN);
        reads.note_evicted(127);
        assert!(!reads.are_single());
        reads.note_read(1);
        assert!(!reads.are_single());
        reads.note_evicted(2);
        assert!(reads.are_single());
        reads.note_evicted(128);
        assert!(!reads.are_single());
    }
}

//! Resources shared by all regions of a cache: the unmapper, and the memory that pages pass through
//! when they are filled and evicted.
use super::staging::Staging;
use crate::maps::kernel::page_pipe::PagePipe;
use crate::maps::kernel::pages::{PageRange, Unmapper, is_resident};
use crate::maps::kernel::userfault::Userfault;
use crate::memory::{Arena, Soundness};
use crate::page::PAGE_BYTES;
use crate::sync::Mutex;
use crate::sys::memory::{HUGE_PAGE_BYTES, Reservation, allow_access, refuse_access};
use crate::sys::probe::{Feature, Features};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

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
}

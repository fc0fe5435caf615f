//! What all regions of a cache share: how they are unmapped, and the memory their pages pass
//! through on their way in and out.
//!
//! Made with the first file that is opened to be mapped, and charged against the bound then.

use super::staging::Staging;
use crate::memory::CHUNK_BYTES;
use crate::memory::Soundness;
use crate::memory::arena::{Arena, PAGE_BYTES};
use crate::sync::{Mutex, MutexGuard};
use crate::sys::memory::{PageRange, Reservation, Unmapper};
use crate::sys::page_pipe::PagePipe;
use crate::sys::pagemap::Pagemap;
use crate::sys::probe::{Feature, Features};
use crate::sys::userfault::Userfault;
use std::io;
use std::sync::Arc;

/// The part of the bound that the staging memory has, and the bounce buffer. (With half of that a
/// reader in order of a cache of 32 MiB came to half as many pages a second: transfers were short,
/// and few in flight.)
const PART_OF_BOUND: u64 = 16;
/// As much as a larger cache needs, pages; of the bounce buffer more for large batches, within that
/// part.
const STAGING_PAGES_MAX: u64 = 2048;
const EXIT_PAGES_MAX: u64 = 512;
/// The fewest of either.
const PAGES_MIN: u64 = 8;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Regions {
    features: Features,
    pub(crate) soundness: Arc<Soundness>,
    pub(crate) unmapper: Unmapper,
    /// Where pages are on their way in.
    pub(crate) staging: Arc<Staging>,
    bounce_buffer: Mutex<BounceBuffer>,
    /// Of whoever writes out what leaves, for as long as the storage likes.
    swap_bounce_buffer: Option<Mutex<BounceBuffer>>,
}

/// Where pages are on their way out: kept while they are unmapped, and written from here.
#[derive(Debug)]
pub(crate) struct BounceBuffer {
    memory: Reservation,
    pub(crate) page_pipe: PagePipe,
}

/// How much memory all regions of a cache need beside their pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionsSize {
    staging_pages: u64,
    bounce_buffer_pages: u64,
    /// Of the second one, for whoever writes out what leaves: none where there is no swap.
    swap_bounce_buffer_pages: u64,
    /// Whether it may be in huge pages.
    huge: bool,
}

impl RegionsSize {
    /// Bytes to be charged.
    pub(crate) fn bytes(self) -> u64 {
        (self.staging_pages + self.bounce_buffer_pages + self.swap_bounce_buffer_pages) * PAGE_BYTES
    }

    /// How many folios can leave together: two pages for each.
    pub(crate) fn batch_folios(self) -> usize {
        self.bounce_buffer_pages as usize / 2
    }
}

impl BounceBuffer {
    /// How many pages there are.
    pub(crate) fn pages(&self) -> usize {
        self.memory.len() / PAGE_BYTES as usize
    }

    /// Address of one of them.
    pub(crate) fn address(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages(), "page {page} of {}", self.pages());
        self.memory.as_ptr().wrapping_add(page * PAGE_BYTES as usize)
    }
}

impl Regions {
    /// What fits a cache in which at the most `batch` pages leave together.
    pub(crate) fn size_for(arena: &Arena, batch: usize, has_swap: bool) -> RegionsSize {
        let part = (arena.bound_pages() / PART_OF_BOUND).max(PAGES_MIN);
        // Two pages for each folio of a batch.
        let for_batch = 2 * batch as u64;
        let bounce_buffer_pages = (part / 2).min(EXIT_PAGES_MAX.max(for_batch));
        RegionsSize {
            staging_pages: part.min(STAGING_PAGES_MAX),
            bounce_buffer_pages,
            swap_bounce_buffer_pages: if has_swap { 2 * bounce_buffer_pages } else { 0 },
            huge: arena.may_use_huge_pages(),
        }
    }

    /// Makes resident what is needed, and has been charged.
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
        })
    }

    /// Where pages are on their way out; one thread's at a time, which waits for no storage.
    pub(crate) fn bounce_buffer(&self) -> MutexGuard<'_, BounceBuffer> {
        self.bounce_buffer.lock()
    }

    /// The same for the one who writes out what leaves; there is one where there is a swap.
    pub(crate) fn swap_bounce_buffer(&self) -> MutexGuard<'_, BounceBuffer> {
        self.swap_bounce_buffer.as_ref().unwrap_or(&self.bounce_buffer).lock()
    }

    /// A way to know the stores to a region, if the kernel has one.
    pub(super) fn watch_stores(&self) -> io::Result<Option<Pagemap>> {
        self.features.has(Feature::WriteProtectAsync).then(Pagemap::open).transpose()
    }

    /// A page that is to be unmapped could not be kept. If the kernel refuses the call itself, no
    /// file can be mapped for writing any more: pages of those that are cannot be evicted.
    pub(crate) fn note_not_kept(&self, error: &io::Error) {
        if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::ENOSYS)) {
            self.features.withdraw(Feature::WriteProtectAsync, "vmsplice", error);
        }
    }

    /// Why there can be no raw writers, if so.
    pub(crate) fn why_no_stores(&self) -> Option<String> {
        self.features.why_not(Feature::WriteProtectAsync)
    }

    /// Makes pages that are not there inaccessible.
    pub(crate) fn poison(&self, userfault: &Userfault, range: &PageRange) -> io::Result<()> {
        if self.features.has(Feature::FaultPoison) {
            return userfault.poison(range);
        }
        if crate::sys::memory::is_resident(range.start) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        crate::sys::memory::refuse_access(range.start, range.length_bytes)?;
        userfault.wake(range)
    }

    /// Takes back what [`Self::poison`] did; the pages are not there.
    pub(super) fn unpoison(&self, range: &PageRange) -> io::Result<()> {
        if self.features.has(Feature::FaultPoison) {
            return Ok(());
        }
        crate::sys::memory::allow_access(range.start, range.length_bytes)
    }
}

/// So many pages, resident; huge ones as far as they may be, and there are any: a transfer is one
/// piece to the device then. In scattered pages it is one a page, and takes three times as long.
fn memory_for_transfers(pages: u64, huge: bool, features: &Features) -> io::Result<Reservation> {
    let bytes = (pages * PAGE_BYTES) as usize;
    let memory = Reservation::new(bytes, CHUNK_BYTES as usize)?;
    memory.wipe_on_fork();
    if !huge {
        memory.refuse_huge_pages();
    }
    memory.populate(0, bytes, huge, features)?;
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio_testing::skip;

    /// Bytes of huge pages in the mapping that begins at `memory`.
    fn huge_bytes(memory: &Reservation) -> u64 {
        let start = format!("{:x}-", memory.as_ptr().addr());
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
        let there_are = Reservation::new(2 * CHUNK_BYTES as usize, CHUNK_BYTES as usize).unwrap();
        there_are.populate(0, there_are.len(), true, &features).unwrap();
        if huge_bytes(&there_are) < 2 * CHUNK_BYTES {
            return skip("huge-pages-now", "the system has none to give");
        }
        // Two whole ones, and a part of a third that must not cost more than it has.
        let pages = 2 * CHUNK_BYTES / PAGE_BYTES + 1;
        let huge = memory_for_transfers(pages, true, &features).unwrap();
        assert_eq!(huge_bytes(&huge), 2 * CHUNK_BYTES);
        let small = memory_for_transfers(pages, false, &features).unwrap();
        assert_eq!(huge_bytes(&small), 0);
    }
}

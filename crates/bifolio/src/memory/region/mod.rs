//! A region: address space for one mappable file; the page at index i lies at base + i * 4096.
//!
//! The other kind of frames. What a caller maps is this memory itself: so a page comes to it whole,
//! with one call of the kernel (`UFFDIO_COPY`), and evicting it means unmapping it, for many pages
//! at once, with one flush of the other CPUs' translations. Who touches a page that is not there
//! raises a fault (`file/faults`). Nothing here knows folios, but for the mark that an orphan
//! bears; who may install or unmap which page is said by `page` and `reclaim`.
//!
//! ```text
//!   mod.rs        places, installing, dirty tracking        of one region
//!   leftovers.rs  what stands at a page and is no folio's: poison, orphans
//!   mapped.rs     which pages have maps
//!   staging.rs    where pages are before they are installed       of all of a cache
//!   regions.rs    where they are while they leave; what regions need
//!   pages.rs      their descriptors and their part of the bound
//!   reads.rs      whether they come in order of late
//! ```
//!
//! What raw writers store to is known from the page tables: once a file was mapped for writing its
//! pages are installed protected, and the first store to each takes the protection away
//! ([`Region::visit_written`] finds those, [`Region::protect`] starts anew).
//!
//! Invariants:
//! - REGION-1: a folio of the table that is uptodate has its page here, but for one that is frozen
//!   or whose lock is held by whoever evicts it.
//! - REGION-2: a page is unmapped before its Entry may be filled again: an unmapping that came
//!   later would wipe the new page. (The Entry names the frozen folio until then; a lookup that
//!   meets it waits.)
//! - REGION-3: while [`Region::section`] is held by somebody else, no page leaves that was stored
//!   to and is not on the dirty list or on its way: whoever looks for stores takes it.
//! - REGION-4: a page stays while anybody has a reference to a folio that had it, taken with READY
//!   seen after it (L3 of `page/mapping.rs`) or with the folio's lock; also when the file is cut,
//!   grows, and the page comes to another folio, whose bytes are put over the others then. So no
//!   read, pin or write of the cache ever touches a page that is not there.
//!
//! # Safety
//! Hands addresses inside its own reservation to the kernel.
#![allow(unsafe_code)]

mod leftovers;
mod mapped;
mod pages;
mod reads;
mod regions;
mod staging;
use leftovers::Leftovers;
pub(super) use leftovers::Orphans;
pub(crate) use leftovers::{Refusal, fault_time};
use mapped::MappedPages;
pub(super) use pages::RegionPages;
pub(crate) use reads::RegionReads;
pub(crate) use regions::{BounceBuffer, Regions, RegionsSize};
pub(crate) use staging::Staged;
pub(super) use staging::Staging;

use crate::page::PAGE_BYTES;
use crate::sync::{AtomicBool, AtomicU8, Mutex, MutexGuard, Ordering};
use crate::sys::memory::{self, PageRange, Reservation};
use crate::sys::pagemap::Pagemap;
use crate::sys::userfault::Userfault;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Stores are not looked for: there can be none.
const UNTRACKED: u8 = 0;
/// They are, but write-outs that began before may still be reading the pages themselves.
const TRACKED: u8 = 1;
/// All that is written out is copied.
const COPIED: u8 = 2;

/// How often the kernel is asked to unmap pages whose bytes nobody wants.
const UNMAP_TRIES_MAX: u32 = 3;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Region {
    memory: Reservation,
    /// The kernel's side of its faults.
    pub(crate) userfault: Arc<Userfault>,
    pub(crate) regions: Arc<Regions>,
    /// Where stores are seen, if the kernel can tell: then there may be raw writers.
    pagemap: Option<Pagemap>,
    /// Whether raw writers may be, or have been, at work: [`UNTRACKED`] and what follows.
    tracking: AtomicU8,
    section: Mutex<()>,
    /// Which pages have maps.
    pub(crate) mapped: MappedPages,
    /// Pages that the kernel or a device may write to, of which the page tables tell nothing: they
    /// count as stored to whenever somebody looks.
    pub(crate) written_unseen: MappedPages,
    leftovers: Mutex<Leftovers>,
    /// Goes on when the file is about to grow, and when it has grown.
    growths: AtomicU64,
    /// Whether there are any: a hint, exact for who put one there.
    has_leftovers: AtomicBool,
}

impl Region {
    /// Reserves a region of `pages` pages, none of which is there; `userfault` is told of faults.
    pub(crate) fn new(
        pages: u64,
        userfault: &Arc<Userfault>,
        regions: &Arc<Regions>,
    ) -> io::Result<Self> {
        let bytes = pages.checked_mul(PAGE_BYTES).and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Reservation::new(bytes, super::CHUNK_BYTES as usize)?;
        memory.refuse_huge_pages();
        memory.refuse_merging();
        memory.skip_on_fork()?;
        userfault.register(memory.as_ptr(), memory.len())?;
        Ok(Self {
            memory,
            userfault: Arc::clone(userfault),
            regions: Arc::clone(regions),
            pagemap: regions.watch_stores()?,
            tracking: AtomicU8::new(UNTRACKED),
            section: Mutex::new(()),
            mapped: MappedPages::default(),
            written_unseen: MappedPages::default(),
            leftovers: Mutex::default(),
            growths: AtomicU64::new(0),
            has_leftovers: AtomicBool::new(false),
        })
    }

    /// Address of page 0.
    #[inline(always)]
    pub(crate) fn base(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Length of the address space, bytes.
    pub(crate) fn len_bytes(&self) -> usize {
        self.memory.len()
    }

    /// Address of a page.
    #[inline(always)]
    pub(crate) fn address(&self, index: u64) -> *mut u8 {
        self.base().wrapping_add((index * PAGE_BYTES) as usize)
    }

    /// The pages as the kernel wants to hear of them.
    pub(crate) fn range_of(&self, pages: &Range<u64>) -> PageRange {
        let length_bytes = ((pages.end - pages.start) * PAGE_BYTES) as usize;
        assert!(pages.end * PAGE_BYTES <= self.memory.len() as u64, "{pages:?} of a region");
        PageRange { start: self.address(pages.start), length_bytes }
    }

    /// One page as the kernel wants to hear of it.
    pub(crate) fn range_at(&self, index: u64) -> PageRange {
        self.range_of(&(index..index + 1))
    }

    /// Puts pages there that are not: all bytes of each at once. Whoever waits for one goes on.
    /// With `will_be_stored`, they count as stored to from the beginning.
    ///
    /// # Safety
    /// `source` is readable for so many pages, and no part of a region.
    ///
    /// Answers how many are there, from the first on: all, unless there is an error.
    ///
    /// # Errors
    /// The kernel has no memory, or refuses something else.
    pub(crate) unsafe fn install(
        &self,
        pages: Range<u64>,
        source: *const u8,
        will_be_stored: bool,
    ) -> (u64, io::Result<()>) {
        let protect = self.is_tracked() && !will_be_stored;
        let source_of =
            |index: u64| source.wrapping_add(((index - pages.start) * PAGE_BYTES) as usize);
        let mut next = pages.start;
        let mut most_pages = pages.end - pages.start;
        let mut outcome = Ok(());
        while next < pages.end && outcome.is_ok() {
            let end = pages.end.min(next + most_pages);
            let range = self.range_of(&(next..end));
            let (target, length_bytes) = (range.start, range.length_bytes);
            // SAFETY: the caller's contract, for the rest of the pages.
            let (done_bytes, copied) =
                unsafe { self.userfault.copy(target, source_of(next), length_bytes, protect) };
            next += done_bytes as u64 / PAGE_BYTES;
            outcome = match copied {
                Ok(()) => {
                    most_pages *= 2;
                    Ok(())
                }
                // Over the border of two mappings of the kernel's, which the program has made of
                // the region (with `mlock`, or `madvise`).
                Err(error) if error.kind() == io::ErrorKind::NotFound && end - next > 1 => {
                    most_pages = (end - next) / 2;
                    Ok(())
                }
                // Whoever installs owns the page: what stands there is a leftover.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    // SAFETY: the caller's contract, for this page.
                    let taken = unsafe { self.take_place(next, source_of(next)) };
                    taken.map(|is_there| next += u64::from(is_there))
                }
                other => other,
            };
        }
        let there = pages.start..next;
        (next - pages.start, outcome.and(self.lift_poison(there)))
    }

    /// Whether stores are looked for.
    pub(crate) fn is_tracked(&self) -> bool {
        // Acquire: pairs with the Release in `track`: the pages that were there are protected.
        self.tracking.load(Ordering::Acquire) != UNTRACKED
    }

    /// Where stores are seen.
    fn pagemap(&self) -> io::Result<&Pagemap> {
        self.pagemap.as_ref().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// How many of `pages` are in memory, from the first one on. Looks at some of them only.
    pub(crate) fn resident_from(&self, pages: Range<u64>) -> u64 {
        memory::resident_from(self.address(pages.start), (pages.end - pages.start) as usize) as u64
    }

    /// The pages among `pages`, each of which a folio has that is uptodate, that are not there all
    /// the same: the program has thrown them away (`MADV_DONTNEED` on a map).
    pub(crate) fn discarded_among(&self, pages: Range<u64>) -> Vec<u64> {
        let (mut index, mut discarded) = (pages.start, Vec::new());
        while index < pages.end {
            index += self.resident_from(index..pages.end);
            if index < pages.end {
                discarded.extend(self.is_discarded(index).then_some(index));
                index += 1;
            }
        }
        discarded
    }

    /// The same for one page. Where the kernel cannot tell it from one that is swapped out, there
    /// are no raw writers.
    pub(crate) fn is_discarded(&self, index: u64) -> bool {
        let is_there = |pagemap: &Pagemap| pagemap.has_all(&self.range_at(index)).unwrap_or(true);
        self.resident_from(index..index + 1) == 0 && !self.pagemap.as_ref().is_some_and(is_there)
    }

    /// Looks for stores from now on. To be called before the first raw writer gets an address, who
    /// is to wait for the write-outs that are in flight, unless [`Self::is_copied`].
    pub(crate) fn track(&self) -> io::Result<()> {
        let _section = self.section();
        let pagemap = self.pagemap()?;
        if self.is_tracked() {
            return Ok(());
        }
        // Before the pages there are: those that come meanwhile are protected, or count as stored
        // to.
        // Release: pairs with the Acquire in `is_tracked`.
        self.tracking.store(TRACKED, Ordering::Release);
        let all = self.range_of(&(0..self.memory.len() as u64 / PAGE_BYTES));
        let protected = pagemap.protect(&all);
        if protected.is_err() {
            // Nobody gets an address; the next one who wants to tries again.
            // Release: as above.
            self.tracking.store(UNTRACKED, Ordering::Release);
        }
        protected
    }

    /// Whether no write-out reads the pages themselves any more.
    pub(crate) fn is_copied(&self) -> bool {
        // Acquire: pairs with the Release in `note_copied`: those that did have ended.
        self.tracking.load(Ordering::Acquire) == COPIED
    }

    /// The write-outs that were in flight when stores were first looked for have ended.
    pub(crate) fn note_copied(&self) {
        // Release: pairs with the Acquire in `is_copied`.
        self.tracking.store(COPIED, Ordering::Release);
    }

    /// REGION-3.
    pub(crate) fn section(&self) -> MutexGuard<'_, ()> {
        self.section.lock()
    }

    /// Whether somebody holds the page for the kernel or a device to write to.
    pub(crate) fn is_kept(&self, index: u64) -> bool {
        !self.written_unseen.among(&(index..index + 1)).is_empty()
    }

    /// Visits the pages among `pages` that are there and were stored to since they were installed
    /// or protected, and those of [`Self::written_unseen`].
    pub(crate) fn visit_written(
        &self,
        pages: Range<u64>,
        mut visit: impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        for unseen in self.written_unseen.among(&pages) {
            visit(unseen.start.max(pages.start)..unseen.end.min(pages.end));
        }
        self.pagemap()?.written(&self.range_of(&pages), |found| {
            let first = (found.start.addr() - self.base().addr()) as u64 / PAGE_BYTES;
            visit(first..first + found.length_bytes as u64 / PAGE_BYTES);
        })
    }

    /// Makes pages count as not stored to: who stores to one from now on is found again. When it
    /// returns, what was stored before can be read.
    pub(crate) fn protect(&self, pages: Range<u64>) -> io::Result<()> {
        self.pagemap()?.protect(&self.range_of(&pages))
    }

    /// Stores to pages that are there raise no fault from now on: they count as stored to.
    pub(crate) fn admit_stores(&self, pages: Range<u64>) -> io::Result<()> {
        self.userfault.unprotect(&self.range_of(&pages))
    }

    /// Unmaps pages; answers how many flushes were asked for. Tries a few times: a page that the
    /// table gives up and that stays would show old bytes, and take memory that nobody counts. If
    /// the kernel goes on refusing, the cache is poisoned.
    ///
    /// # Safety
    /// Pages of this region whose bytes nobody wants.
    pub(crate) unsafe fn unmap_unwanted(&self, ranges: &[PageRange]) -> io::Result<u64> {
        let (mut left, mut flushes, mut tries) = (ranges, 0, 0);
        loop {
            // SAFETY: some of the caller's.
            let unmapped = unsafe { self.regions.unmapper.unmap(left) };
            flushes += unmapped.flushes_asked;
            let Some(error) = unmapped.error else { return Ok(flushes) };
            left = &left[unmapped.ranges_done..];
            tries += 1;
            if tries == UNMAP_TRIES_MAX {
                self.regions.soundness.lose("pages of a map cannot be unmapped", &error);
                return Err(error);
            }
        }
    }
}

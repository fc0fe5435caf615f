//! A region: the address space of one mappable file; the page at index i is at base + i * 4096.
//!
//! Callers map this memory itself. So a page is installed whole, with one system call
//! (`UFFDIO_COPY`), and evicting it means unmapping it, for many pages at once, with one TLB flush.
//! Touching a page that is not resident raises a fault (`maps/faults`). This module does not use
//! folios, except for the ids of orphans; `page` and `reclaim` define which thread may install or
//! unmap a page.
//!
//! Stores of raw writers are found in the page tables: once a file has been mapped for writing, its
//! pages are installed write-protected, and the first store to each removes the protection.
//! [`Region::visit_written`] finds the pages that were stored to, and [`Region::protect`] protects
//! them again.
//!
//! Invariants:
//! - REGION-1: a folio in the table that is uptodate has its page here, unless it is frozen or its
//!   lock is held by the thread that evicts it.
//! - REGION-2: a page is unmapped before its Entry can be filled again: a later unmapping would
//!   discard the new page. (Until then the Entry names the frozen folio; a lookup that finds it
//!   waits.)
//! - REGION-3: while another thread holds [`Region::section`], a page that was stored to is evicted
//!   only if it is on the dirty list or under write-back: a thread that searches for stores takes
//!   the section.
//! - REGION-4: a page stays while any thread holds a reference to a folio that had it, taken with
//!   READY seen after it (READ-L3) or with the folio's lock; also when the file is
//!   truncated, grows again, and the page is used by another folio, whose bytes then overwrite the
//!   old ones. So no read, pin or write of the cache ever touches a page that is not resident.
//!
//! # Safety
//! Passes addresses inside its own reservation to the kernel.
#![allow(unsafe_code)]

mod mapped;
mod recent_reads;
mod regions;
mod staging;
mod stray_pages;
use mapped::MappedPages;
pub(crate) use recent_reads::RecentReads;
pub(crate) use regions::{BounceBuffer, RegionPages, Regions, RegionsSize};
pub(crate) use staging::Staged;
use stray_pages::StrayPages;
pub(crate) use stray_pages::{Orphans, Refusal, fault_time};

use crate::maps::kernel::pagemap::Pagemap;
use crate::maps::kernel::pages::{PageRange, resident_from};
use crate::maps::kernel::userfault::Userfault;
use crate::page::PAGE_BYTES;
use crate::sync::{AtomicBool, AtomicU8, Mutex, MutexGuard, Ordering};
use crate::sys::memory::{HUGE_PAGE_BYTES, Reservation};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Stores are not searched for: there can be none.
const UNTRACKED: u8 = 0;
/// Stores are searched for, but write-backs that began earlier may still read the pages themselves.
const TRACKED: u8 = 1;
/// Stores are searched for, and every write-back reads a copy.
const COPIED: u8 = 2;

/// Upper bound on attempts to unmap pages whose bytes are not needed.
const UNMAP_TRIES_MAX: u32 = 3;

/// The region of one file; see the [module documentation](self).
#[derive(Debug)]
pub(crate) struct Region {
    memory: Reservation,
    /// The userfaultfd that reports its faults.
    pub(crate) userfault: Arc<Userfault>,
    pub(crate) regions: Arc<Regions>,
    /// Used to find stores, if the kernel supports it. Without it there are no raw writers.
    pagemap: Option<Pagemap>,
    /// Whether raw writers exist or have existed: [`UNTRACKED`], [`TRACKED`] or [`COPIED`].
    tracking: AtomicU8,
    section: Mutex<()>,
    /// Pages that have maps.
    pub(crate) mapped: MappedPages,
    /// Pages that the kernel or a device may write to without marking the page tables. Every search
    /// for stores includes them.
    pub(crate) written_unseen: MappedPages,
    stray_pages: Mutex<StrayPages>,
    /// Incremented when the file is about to grow, and again when it has grown.
    growths: AtomicU64,
    /// `true` if there are stray pages: a hint, exact for the thread that added one.
    has_stray_pages: AtomicBool,
}

/// Windows that fit in the staging memory, for a file in a region. Two would be enough to read one
/// while the other is used if one device had all of it; but a device gets less, and the second
/// window would be split into two short reads.
const WINDOWS_STAGED: u64 = 4;

impl Region {
    /// Pages of a region in flight, unless a single run has more: 1 MiB. The CPU needs about as
    /// long to install them as the device needs to read them; half or twice as much made a
    /// sequential scan 10 % slower.
    pub(crate) const PAGES_IN_FLIGHT: u64 = 256;

    /// Returns the length of a readahead window, in pages.
    pub(crate) fn window_pages(&self) -> u64 {
        self.regions.staging.pages() / WINDOWS_STAGED
    }

    /// Reserves a region of `pages` pages, none of them resident, and registers it with
    /// `userfault`.
    pub(crate) fn new(
        pages: u64,
        userfault: &Arc<Userfault>,
        regions: &Arc<Regions>,
    ) -> io::Result<Self> {
        let bytes = pages.checked_mul(PAGE_BYTES).and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Reservation::new(bytes, HUGE_PAGE_BYTES)?;
        memory.refuse_huge_pages();
        memory.refuse_merging();
        memory.skip_on_fork()?;
        userfault.register(memory.base, memory.len())?;
        Ok(Self {
            memory,
            userfault: Arc::clone(userfault),
            regions: Arc::clone(regions),
            pagemap: regions.watch_stores()?,
            tracking: AtomicU8::new(UNTRACKED),
            section: Mutex::new(()),
            mapped: MappedPages::default(),
            written_unseen: MappedPages::default(),
            stray_pages: Mutex::default(),
            growths: AtomicU64::new(0),
            has_stray_pages: AtomicBool::new(false),
        })
    }

    /// Returns the address of page 0.
    #[inline(always)]
    pub(crate) fn base(&self) -> *mut u8 {
        self.memory.base
    }

    /// Returns the length of the address space in bytes.
    pub(crate) fn len_bytes(&self) -> usize {
        self.memory.len()
    }

    /// Returns the address of a page.
    #[inline(always)]
    pub(crate) fn address(&self, index: u64) -> *mut u8 {
        self.base().wrapping_add((index * PAGE_BYTES) as usize)
    }

    /// Returns the address range of pages, for system calls.
    pub(crate) fn range_of(&self, pages: &Range<u64>) -> PageRange {
        let length_bytes = ((pages.end - pages.start) * PAGE_BYTES) as usize;
        assert!(
            pages.end * PAGE_BYTES <= self.memory.len() as u64,
            "pages {pages:?} exceed a region of {} bytes",
            self.memory.len()
        );
        PageRange { start: self.address(pages.start), length_bytes }
    }

    /// Returns the address range of one page, for system calls.
    pub(crate) fn range_at(&self, index: u64) -> PageRange {
        self.range_of(&(index..index + 1))
    }

    /// Installs pages that are not resident, each of them atomically, and wakes the threads that
    /// wait for them. With `will_be_stored`, the pages count as stored to from the beginning.
    ///
    /// Returns the number of pages installed, from the first one on: all of them, unless there is
    /// an error.
    ///
    /// # Errors
    /// The kernel has no memory or refuses the call for another reason.
    ///
    /// # Safety
    /// `source` is readable for as many pages and not part of a region.
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
                // The range crosses the border of two kernel mappings: the program has split the
                // region with `mlock` or `madvise`.
                Err(error) if error.kind() == io::ErrorKind::NotFound && end - next > 1 => {
                    most_pages = (end - next) / 2;
                    Ok(())
                }
                // The caller owns the page, so a resident page is a stray page.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    // SAFETY: the caller's contract, for this page.
                    let taken = unsafe { self.copy_into_orphan(next, source_of(next)) };
                    taken.map(|is_there| next += u64::from(is_there))
                }
                other => other,
            };
        }
        let there = pages.start..next;
        (next - pages.start, outcome.and(self.lift_poison(there)))
    }

    /// Returns `true` if stores are searched for.
    pub(crate) fn is_tracked(&self) -> bool {
        // Acquire: pairs with the Release in `track`: pages that were resident then are protected.
        self.tracking.load(Ordering::Acquire) != UNTRACKED
    }

    /// Returns the pagemap in which stores are found.
    fn pagemap(&self) -> io::Result<&Pagemap> {
        self.pagemap.as_ref().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Returns the number of `pages` in memory, from the first one on. Stops at the first that is
    /// not.
    pub(crate) fn resident_from(&self, pages: Range<u64>) -> u64 {
        resident_from(self.address(pages.start), (pages.end - pages.start) as usize) as u64
    }

    /// Returns the pages among `pages` that are not resident although each has an uptodate folio:
    /// the program has discarded them (`MADV_DONTNEED` on a map).
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

    /// Returns `true` if a page with an uptodate folio is not resident. If the kernel cannot
    /// distinguish such a page from one that it has swapped out, there are no raw writers.
    pub(crate) fn is_discarded(&self, index: u64) -> bool {
        let is_there = |pagemap: &Pagemap| pagemap.has_all(&self.range_at(index)).unwrap_or(true);
        self.resident_from(index..index + 1) == 0 && !self.pagemap.as_ref().is_some_and(is_there)
    }

    /// Starts to track stores. To be called before the first raw writer gets an address; unless
    /// [`Self::is_copied`], the caller must then wait for the write-backs in flight.
    pub(crate) fn track(&self) -> io::Result<()> {
        let _section = self.section();
        let pagemap = self.pagemap()?;
        if self.is_tracked() {
            return Ok(());
        }
        // The state is stored before the resident pages are protected: a page installed meanwhile
        // is protected or counts as stored to.
        // Release: pairs with the Acquire in `is_tracked`.
        self.tracking.store(TRACKED, Ordering::Release);
        let all = self.range_of(&(0..self.memory.len() as u64 / PAGE_BYTES));
        let protected = pagemap.protect(&all);
        if protected.is_err() {
            // No raw writer gets an address; the next call tries again.
            // Release: pairs with the Acquire in `is_tracked`.
            self.tracking.store(UNTRACKED, Ordering::Release);
        }
        protected
    }

    /// Returns `true` if no write-back reads the pages themselves any more.
    pub(crate) fn is_copied(&self) -> bool {
        // Acquire: pairs with the Release in `note_copied`: the write-backs that read the pages
        // have ended.
        self.tracking.load(Ordering::Acquire) == COPIED
    }

    /// Records that the write-backs that were in flight when tracking began have ended.
    pub(crate) fn note_copied(&self) {
        // Release: pairs with the Acquire in `is_copied`.
        self.tracking.store(COPIED, Ordering::Release);
    }

    /// Locks the section (REGION-3).
    pub(crate) fn section(&self) -> MutexGuard<'_, ()> {
        self.section.lock()
    }

    /// Returns `true` if the kernel or a device may write to the page.
    pub(crate) fn is_kept(&self, index: u64) -> bool {
        !self.written_unseen.among(&(index..index + 1)).is_empty()
    }

    /// Visits the pages among `pages` that are resident and were stored to since they were
    /// installed or protected, and those of [`Self::written_unseen`].
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

    /// Write-protects pages, so that they count as not stored to until the next store. When it
    /// returns, earlier stores can be read.
    pub(crate) fn protect(&self, pages: Range<u64>) -> io::Result<()> {
        self.pagemap()?.protect(&self.range_of(&pages))
    }

    /// Unmaps pages and returns the number of TLB flushes requested. Retries a few times: a page
    /// that stays mapped after the table has dropped it would show old bytes and use memory that is
    /// not charged. If the kernel keeps refusing, the cache is poisoned.
    ///
    /// # Safety
    /// `ranges` are pages of this region whose bytes are not needed.
    pub(crate) unsafe fn unmap_unwanted(&self, ranges: &[PageRange]) -> io::Result<u64> {
        let (mut left, mut flushes, mut tries) = (ranges, 0, 0);
        loop {
            // SAFETY: a part of the caller's ranges.
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

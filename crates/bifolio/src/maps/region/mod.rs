//! A region: the address space of one mappable file; the page at index i is at base + i * 4096.
//!
//! Invariants:
//! - REGION-1: a folio in the table that is uptodate has its page here, unless it is frozen or its
//!   lock is held by the thread that evicts it.
//! - REGION-2: a page is unmapped before its Entry can be filled again: a later unmapping would
//!   discard the new page. (Until then the Entry names the frozen folio; a lookup that finds it
//!   waits.)
//! - REGION-3: while another thread holds the `section`, a page that was stored to is evicted
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

mod addresses;
mod regions;
mod staging;
mod stray_pages;
use addresses::Addresses;
pub(crate) use regions::{BounceBuffer, Regions, RegionsSize};
pub(crate) use stray_pages::{FaultRefusal, StrayPages, fault_time};

use crate::maps::kernel::pages::{Pagemap, resident_from};
use crate::maps::kernel::userfault::Userfault;
use crate::memory::{InPlace, PageSpace, StagedPages};
use crate::page::{FolioId, PAGE_BYTES};
use crate::sync::{AtomicU8, Mutex, Ordering, Share};
use crate::sys::probe::Feature;
use std::any::Any;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Stores are not searched for: there can be none.
const UNTRACKED: u8 = 0;
/// Stores are searched for, but write-backs that began earlier may still read the pages themselves.
const TRACKED: u8 = 1;
/// Stores are searched for, and every write-back reads a copy.
const COPIED: u8 = 2;

#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) addresses: Addresses,
    /// Page table for finding stores, if the kernel has it; without it there are no raw writers.
    pagemap: Option<Pagemap>,
    /// Whether raw writers exist or have existed: [`UNTRACKED`], [`TRACKED`] or [`COPIED`].
    tracking: AtomicU8,
    /// Held by unmapping, and while stores are searched for (REGION-3).
    pub(crate) section: Mutex<()>,
    pub(crate) mapped: MappedRanges,
    /// Pages that the kernel or a device may write to without marking the page tables. Every search
    /// for stores includes them.
    pub(crate) written_unseen: MappedRanges,
    pub(crate) stray_pages: StrayPages,
}

/// Windows that fit in the staging memory. Two would be enough to read one while the other is used
/// if one device had all of it; but a device gets less, and the second window would be split into
/// two short reads.
const WINDOWS_STAGED: u64 = 4;

/// Pages of a region in flight, unless a single run has more: 1 MiB. The CPU needs about as long to
/// install them as the device needs to read them; half or twice as much made a sequential scan 10 %
/// slower.
const PAGES_IN_FLIGHT: u64 = 256;

impl InPlace for Region {
    fn base(&self) -> *mut u8 {
        self.addresses.base()
    }

    fn window_pages(&self) -> u64 {
        self.addresses.regions.staging.pages() / WINDOWS_STAGED
    }

    fn pages_in_flight(&self) -> u64 {
        PAGES_IN_FLIGHT
    }

    fn stage(&self, pages: usize, share: &Share, may_wait: bool) -> Option<Box<dyn StagedPages>> {
        let staging = &self.addresses.regions.staging;
        let staged = match may_wait {
            true => staging.take(pages, share),
            false => staging.try_take(pages, share)?,
        };
        Some(Box::new(staged))
    }

    fn publish(
        &self,
        staged: &dyn StagedPages,
        number: usize,
        pages: Range<u64>,
        will_be_stored: bool,
    ) -> (u64, io::Result<()>) {
        if pages.is_empty() {
            return (0, Ok(()));
        }
        // SAFETY: adjacent pages in no region, which the fill has for these and only it writes (the
        // contract of `StagedPages`).
        unsafe { self.install(pages, staged.address(number), will_be_stored) }
    }

    fn clear_poison(&self, pages: Range<u64>) -> io::Result<()> {
        self.stray_pages.clear_poison(&self.addresses, pages)
    }

    fn note_orphan(&self, index: u64, id: FolioId) {
        self.stray_pages.note_orphan(index, id);
    }

    fn release_orphan(&self, index: u64, id: FolioId) {
        self.stray_pages.release_orphan(&self.addresses, index, id);
    }

    fn orphaned_among(&self, pages: Range<u64>) -> Vec<u64> {
        self.stray_pages.orphaned_among(pages)
    }

    fn mapped_among(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
        self.mapped.among(pages)
    }

    fn end_growth(&self) {
        self.stray_pages.end_growth();
    }
}

impl Region {
    /// Returns the region of a file, if it has one.
    pub(crate) fn of(page_space: &PageSpace) -> Option<&Self> {
        let ops: &dyn Any = &**page_space.ops()?;
        ops.downcast_ref()
    }

    /// Returns the region of a file, as one of its owners.
    pub(crate) fn shared_of(page_space: &PageSpace) -> Option<Arc<Self>> {
        let ops: Arc<dyn Any + Send + Sync> = Arc::clone(page_space.ops()?) as _;
        ops.downcast().ok()
    }

    pub(crate) fn new(
        pages: u64,
        userfault: &Arc<Userfault>,
        regions: &Arc<Regions>,
    ) -> io::Result<Self> {
        Ok(Self {
            addresses: Addresses::new(pages, userfault, regions)?,
            pagemap: {
                let is_used = regions.features.has(Feature::WriteProtectAsync);
                is_used.then(Pagemap::open).transpose()?
            },
            tracking: AtomicU8::new(UNTRACKED),
            section: Mutex::new(()),
            mapped: MappedRanges::default(),
            written_unseen: MappedRanges::default(),
            stray_pages: StrayPages::default(),
        })
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
            let range = self.addresses.range_of(&(next..end));
            let (target, length_bytes) = (range.start, range.length_bytes);
            // SAFETY: the caller's contract, for the rest of the pages.
            let (done_bytes, copied) = unsafe {
                self.addresses.userfault.copy(target, source_of(next), length_bytes, protect)
            };
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
                    let taken =
                        unsafe { self.stray_pages.copy_in(&self.addresses, next, source_of(next)) };
                    taken.map(|is_there| next += u64::from(is_there))
                }
                other => other,
            };
        }
        let there = pages.start..next;
        (next - pages.start, outcome.and(self.stray_pages.lift_poison(&self.addresses, there)))
    }

    pub(crate) fn is_tracked(&self) -> bool {
        // Acquire: pairs with the Release in `protect_all`: pages that were resident then are
        // protected.
        self.tracking.load(Ordering::Acquire) != UNTRACKED
    }

    fn pagemap(&self) -> io::Result<&Pagemap> {
        self.pagemap.as_ref().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Returns the number of `pages` in memory, from the first one on. Stops at the first that is
    /// not.
    pub(crate) fn resident_from(&self, pages: Range<u64>) -> u64 {
        resident_from(self.addresses.address(pages.start), (pages.end - pages.start) as usize)
            as u64
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
        let is_there =
            |pagemap: &Pagemap| pagemap.has_all(&self.addresses.range_at(index)).unwrap_or(true);
        self.resident_from(index..index + 1) == 0 && !self.pagemap.as_ref().is_some_and(is_there)
    }

    /// Starts to track stores, and returns `true` if this call did. To be called before the first
    /// raw writer gets an address. `wait_for_write_backs` waits for those in flight, which may read
    /// the pages themselves.
    pub(crate) fn track(&self, wait_for_write_backs: impl FnOnce()) -> io::Result<bool> {
        let is_first = self.protect_all()?;
        // Acquire: pairs with the Release below: the write-backs that read the pages have ended.
        if self.tracking.load(Ordering::Acquire) != COPIED {
            // A write-back that begins after this sees that stores are tracked; one that began
            // before has ended then.
            wait_for_write_backs();
            // Release: pairs with the Acquire above.
            self.tracking.store(COPIED, Ordering::Release);
        }
        Ok(is_first)
    }

    /// Returns `true` if they were not protected yet.
    fn protect_all(&self) -> io::Result<bool> {
        let _section = self.section.lock();
        let pagemap = self.pagemap()?;
        if self.is_tracked() {
            return Ok(false);
        }
        // The state is stored before the resident pages are protected: a page installed meanwhile
        // is protected or counts as stored to.
        // Release: pairs with the Acquire in `is_tracked`.
        self.tracking.store(TRACKED, Ordering::Release);
        let all = self.addresses.range_of(&(0..self.addresses.len_bytes() as u64 / PAGE_BYTES));
        let protected = pagemap.protect(&all);
        if protected.is_err() {
            // No raw writer gets an address; the next call tries again.
            // Release: pairs with the Acquire in `is_tracked`.
            self.tracking.store(UNTRACKED, Ordering::Release);
        }
        protected.map(|()| true)
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
        self.pagemap()?.written(&self.addresses.range_of(&pages), |found| {
            let first = (found.start.addr() - self.addresses.base().addr()) as u64 / PAGE_BYTES;
            visit(first..first + found.length_bytes as u64 / PAGE_BYTES);
        })
    }

    /// Write-protects pages, so that they count as not stored to until the next store. When it
    /// returns, earlier stores can be read.
    pub(crate) fn protect(&self, pages: Range<u64>) -> io::Result<()> {
        self.pagemap()?.protect(&self.addresses.range_of(&pages))
    }
}

/// The pages of each live map, or of each [`MapPinMut`](crate::MapPinMut); unordered.
#[derive(Debug, Default)]
pub(crate) struct MappedRanges(Mutex<Vec<Range<u64>>>);

impl MappedRanges {
    pub(crate) fn add(&self, pages: Range<u64>) {
        self.0.lock().push(pages);
    }

    pub(crate) fn remove(&self, pages: &Range<u64>) {
        let mut maps = self.0.lock();
        let found = maps.iter().position(|known| known == pages);
        maps.swap_remove(found.expect("the map was added before"));
    }

    /// Returns the parts of `pages` that are mapped: sorted and disjoint.
    pub(crate) fn among(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
        let maps = self.0.lock();
        let meets = |map: &&Range<u64>| map.start < pages.end && pages.start < map.end;
        let mut met: Vec<_> = maps.iter().filter(meets).cloned().collect();
        drop(maps);
        met.sort_unstable_by_key(|map| map.start);
        let mut merged: Vec<Range<u64>> = Vec::with_capacity(met.len());
        for map in met {
            match merged.last_mut().filter(|last| map.start <= last.end) {
                Some(last) => last.end = last.end.max(map.end),
                None => merged.push(map),
            }
        }
        merged
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn overlapping_maps_are_merged_and_removed_one_by_one() {
        let mapped = MappedRanges::default();
        for pages in [20..30, 0..5, 4..8, 8..9, 22..24, 0..5] {
            mapped.add(pages);
        }
        assert_eq!(mapped.among(&(0..100)), [0..9, 20..30]);
        assert_eq!(mapped.among(&(9..20)), []);
        assert_eq!(mapped.among(&(8..21)), [8..9, 20..30]);
        mapped.remove(&(0..5));
        mapped.remove(&(20..30));
        assert_eq!(mapped.among(&(0..100)), [0..9, 22..24]);
        mapped.remove(&(0..5));
        assert_eq!(mapped.among(&(0..100)), [4..9, 22..24]);
    }
}

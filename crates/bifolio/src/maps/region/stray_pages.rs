//! Stray pages: region pages that do not belong to the folio in the table. A page that could not be
//! filled when it was touched is suspected or poisoned. A page whose folio was removed from the
//! table while references to it remain is an orphan.
//!
//! A fault message can be late: another thread has already served the fault, no thread waits for
//! the page any more, and the file may have been truncated meanwhile. So a page past the end of
//! file is refused in two steps, and what was found before taking the lock is judged again under
//! it.
//!
//! PROTOCOL STRAY, as two columns:
//!
//! ```text
//!  REFUSE (a fault service)                   GROW (the thread with the resizing lock)
//!  R1 load the number of growths              G1 under the lock: set `growing_end` to the new end
//!  R2 try to fill the page: refused              of file; clear the suspicion and poison of the
//!  R3 under the lock: the number differs         pages before it; increment the number
//!     from R1, or the page is before          G2 store the new length
//!     `growing_end`, or it is resident:       G3 under the lock: reset `growing_end`; increment
//!     wake the threads that wait for it          the number
//!  R4 past the end, and no thread is known
//!     to wait: wake those that do; suspect
//!     the page
//!  R5 past the end, and the message was
//!     read after R4: its sender has touched
//!     the page since: poison it
//! ```
//!
//! # Safety
//! Copies to pages of the region.
#![allow(unsafe_code)]

use super::Region;
use crate::error::Error;
use crate::maps::kernel::pages::PageRange;
use crate::page::{FolioId, PAGE_BYTES};
use crate::sync::{AtomicBool, Mutex, Ordering};
use crate::sys::copy;
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// State of a region page that does not belong to the folio in the table.
#[derive(Debug)]
enum StrayPage {
    /// Past the end of file, and perhaps touched there. The threads that waited for it were woken
    /// at this time ([`fault_time`]).
    Suspected(u64),
    /// The page could not be filled: a thread that touches it gets SIGBUS. The threads that waited
    /// for it were woken before this time.
    Poison(u64),
    /// The page is resident and must stay (REGION-4): it belonged to truncated folios that still
    /// have references. With `is_taken`, a folio in the table uses the page now.
    Orphan { orphans: SmallVec<[FolioId; 1]>, is_taken: bool },
}

/// Orders the reading of fault messages against the waking of their senders, in all regions.
/// Incremented when threads are woken.
static FAULT_TIME: AtomicU64 = AtomicU64::new(0);

/// Returns the time. To be called before messages are read.
pub(crate) fn fault_time() -> u64 {
    // Acquire: pairs with the AcqRel in `note_waked`: the threads that waited were woken before.
    FAULT_TIME.load(Ordering::Acquire)
}

/// Advances the time after threads were woken: messages read from the returned time on were sent
/// later.
fn note_waked() -> u64 {
    // AcqRel: Release pairs with the Acquire in `fault_time`; Acquire only prevents reordering with
    // what follows.
    FAULT_TIME.fetch_add(1, Ordering::AcqRel) + 1
}

/// All stray pages of a region.
#[derive(Debug, Default)]
pub(super) struct StrayPages {
    at: BTreeMap<u64, StrayPage>,
    /// End of the pages that are about to belong to the file (G1); 0 if it is not growing.
    growing_end: u64,
    /// Number of pages that could not be filled when they were touched.
    errors: u64,
    /// Error of the last of them.
    last_error: Option<Error>,
}

/// A refused page, to be judged again under the lock; see the [module documentation](self).
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) index: u64,
    /// [`Region::growths`] before the fill was tried.
    pub(crate) growths: u64,
    /// [`fault_time`] when the message was read; `u64::MAX` if a thread is known to wait.
    pub(crate) read_at: u64,
    pub(crate) error: Error,
}

impl Region {
    /// Returns the error of the last page that could not be filled, if any failed since `seen`.
    /// Stores the current number of errors in `seen`.
    pub(crate) fn error_since(&self, seen: &mut u64) -> Option<Error> {
        let stray_pages = self.stray_pages.lock();
        let is_new = stray_pages.errors > *seen;
        *seen = stray_pages.errors;
        stray_pages.last_error.clone().filter(|_| is_new)
    }

    /// Makes freshly installed pages accessible where poison had only refused access.
    pub(super) fn lift_poison(&self, pages: Range<u64>) -> io::Result<()> {
        // Relaxed: a hint, as in `clear_stray_pages`.
        if !self.has_stray_pages.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut stray_pages = self.stray_pages.lock();
        for index in pages {
            if matches!(stray_pages.at.get(&index), Some(StrayPage::Poison(_))) {
                stray_pages.at.remove(&index);
                // On failure, the page is installed, perhaps between accessible ones, and cannot be
                // touched.
                self.regions.unpoison(&self.range_at(index)).inspect_err(|error| {
                    self.regions.soundness.lose("access to a page of a map is refused", error);
                })?;
            }
        }
        self.note_stray_pages(&stray_pages);
        Ok(())
    }

    /// Returns `true` if a page was poisoned after a message about it was read: the sender no
    /// longer waits.
    pub(crate) fn is_poisoned_since(&self, index: u64, read_at: u64) -> bool {
        // Relaxed: a hint; a thread that misses it tries once more to fill the page.
        self.has_stray_pages.load(Ordering::Relaxed) && {
            let stray_pages = self.stray_pages.lock();
            matches!(stray_pages.at.get(&index), Some(StrayPage::Poison(since)) if read_at < *since)
        }
    }

    /// Returns a number that changes when the file is about to grow, and again when it has grown.
    pub(crate) fn growths(&self) -> u64 {
        // Acquire: pairs with the Release in `begin_growth` and `end_growth`: the state of the page
        // that is loaded after this is newer.
        self.growths.load(Ordering::Acquire)
    }

    /// Judges a refusal again under the lock. If it is still right, records the error and poisons
    /// the page: a thread that touches it gets SIGBUS, until the page is installed or cleared.
    /// Returns `true` if the page is poisoned. Otherwise the threads that wait for the page have
    /// been woken or the caller must wake them, and they retry. `is_past_end` and `is_there` return
    /// the current state of the page.
    pub(crate) fn refuse(
        &self,
        refusal: &Refusal,
        is_past_end: impl FnOnce() -> bool,
        is_there: impl FnOnce() -> bool,
    ) -> io::Result<bool> {
        let Refusal { index, growths, read_at, error } = refusal.clone();
        let range = self.range_at(index);
        let mut stray_pages = self.stray_pages.lock();
        if growths != self.growths() || index < stray_pages.growing_end || is_there() {
            return Ok(false);
        }
        if matches!(stray_pages.at.get(&index), Some(StrayPage::Poison(since)) if read_at < *since)
        {
            // Another fault service poisoned it, and reported the error.
            return Ok(true);
        }
        if is_past_end() {
            let woken_at = match stray_pages.at.get(&index) {
                Some(StrayPage::Suspected(woken_at)) => *woken_at,
                Some(_) => 0,
                None => u64::MAX,
            };
            if read_at < woken_at {
                self.userfault.wake(&range)?;
                stray_pages.at.entry(index).or_insert(StrayPage::Suspected(note_waked()));
                self.note_stray_pages(&stray_pages);
                return Ok(false);
            }
        }
        self.poison(&mut stray_pages, index, &range, error)
    }

    /// Poisons the page and records the error. Returns `false` if the page is resident.
    fn poison(
        &self,
        stray_pages: &mut StrayPages,
        index: u64,
        range: &PageRange,
        error: Error,
    ) -> io::Result<bool> {
        // Before the page is poisoned: a thread that this wakes may be the one that clears it.
        self.has_stray_pages.store(true, Ordering::Relaxed);
        let poisoned = self.regions.poison(&self.userfault, range);
        if poisoned.is_ok() {
            stray_pages.at.insert(index, StrayPage::Poison(note_waked()));
            log::error!("cannot fill a page of a map, access to it raises SIGBUS: {error}");
            stray_pages.errors += 1;
            stray_pages.last_error = Some(error);
        }
        self.note_stray_pages(stray_pages);
        match poisoned {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Keeps the page of a folio that is about to be removed from its table and may have other
    /// references, until [`Self::release_orphan`].
    pub(crate) fn note_orphan(&self, index: u64, id: FolioId) {
        let mut stray_pages = self.stray_pages.lock();
        match stray_pages.at.get_mut(&index) {
            Some(StrayPage::Orphan { orphans, is_taken }) => {
                orphans.push(id);
                *is_taken = false;
            }
            _ => {
                let held = StrayPage::Orphan { orphans: smallvec![id], is_taken: false };
                stray_pages.at.insert(index, held);
            }
        }
        self.note_stray_pages(&stray_pages);
    }

    /// Unmaps the page of an orphan whose last reference was put, unless another folio uses the
    /// page.
    pub(crate) fn release_orphan(&self, index: u64, id: FolioId) {
        let mut stray_pages = self.stray_pages.lock();
        let found = stray_pages.at.get_mut(&index);
        let Some(StrayPage::Orphan { orphans, is_taken }) = found else { return };
        orphans.retain(|orphan| *orphan != id);
        if orphans.is_empty() {
            let is_taken = *is_taken;
            stray_pages.at.remove(&index);
            self.note_stray_pages(&stray_pages);
            if !is_taken {
                // A failure poisons the cache.
                let _ = self.unmap_locked(index);
            }
        }
    }

    /// Returns `true` if the page must stay in memory, whichever folio uses it now (REGION-4).
    /// While the caller holds the lock of the folio in the table, the answer can change from `true`
    /// to `false`, but not back.
    pub(crate) fn is_held(&self, index: u64) -> bool {
        // Relaxed: as in `clear_poison`.
        self.has_stray_pages.load(Ordering::Relaxed)
            && matches!(self.stray_pages.lock().at.get(&index), Some(StrayPage::Orphan { .. }))
    }

    /// Returns the pages among `pages` that belong to orphans and to no folio in the table.
    pub(crate) fn orphaned_among(&self, pages: Range<u64>) -> Vec<u64> {
        let stray_pages = self.stray_pages.lock();
        let is_orphaned = |stray_page: &StrayPage| {
            matches!(stray_page, StrayPage::Orphan { is_taken: false, .. })
        };
        let found = stray_pages.at.range(pages).filter(|(_, stray_page)| is_orphaned(stray_page));
        found.map(|(index, _)| *index).collect()
    }

    /// Removes the stray page at a page that the caller owns, so that the page can be installed,
    /// and returns `false`. If an orphan keeps the page, copies the bytes into it instead and
    /// returns `true`; they count as stored to then.
    ///
    /// # Safety
    /// As for [`Self::install`], for one page.
    pub(super) unsafe fn copy_into_orphan(
        &self,
        index: u64,
        source: *const u8,
    ) -> io::Result<bool> {
        let mut stray_pages = self.stray_pages.lock();
        let Some(StrayPage::Orphan { is_taken, .. }) = stray_pages.at.get_mut(&index) else {
            self.clear_locked(&mut stray_pages, index)?;
            self.note_stray_pages(&stray_pages);
            return Ok(false);
        };
        *is_taken = true;
        // SAFETY: `source` is readable for a page, by the caller's contract.
        let bytes = unsafe { std::slice::from_raw_parts(source, PAGE_BYTES as usize) };
        // SAFETY: the page stays resident while the orphan exists; the caller holds the lock of the
        // page's folio, and readers of the orphan accept any bytes.
        unsafe { copy::copy_in(self.address(index), bytes) };
        Ok(true)
    }

    fn clear_locked(&self, stray_pages: &mut StrayPages, index: u64) -> io::Result<()> {
        if matches!(stray_pages.at.remove(&index), Some(StrayPage::Poison(_))) {
            self.regions.unpoison(&self.range_at(index))?;
        }
        self.unmap_locked(index)
    }

    /// Clears the poison of `pages`, so that the next access tries to fill them again.
    pub(crate) fn clear_poison(&self, pages: Range<u64>) -> io::Result<()> {
        // Relaxed: a thread that stored the poison and then calls this sees it.
        if !self.has_stray_pages.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut stray_pages = self.stray_pages.lock();
        self.clear_stray_pages(&mut stray_pages, pages, |stray_page| {
            matches!(stray_page, StrayPage::Poison(_))
        })
    }

    /// G1: announces that `pages`, which are past the end of file, are about to belong to the file,
    /// and clears their suspicion and poison. The caller must fill the pages of
    /// [`Self::orphaned_among`], and call [`Self::end_growth`] even if it fails.
    pub(crate) fn begin_growth(&self, pages: Range<u64>) -> io::Result<()> {
        let mut stray_pages = self.stray_pages.lock();
        stray_pages.growing_end = pages.end;
        // Release: pairs with the Acquire in `growths`.
        self.growths.fetch_add(1, Ordering::Release);
        let is_unwanted = |stray_page: &StrayPage| !matches!(stray_page, StrayPage::Orphan { .. });
        self.clear_stray_pages(&mut stray_pages, pages, is_unwanted)
    }

    /// G3: ends the growth.
    pub(crate) fn end_growth(&self) {
        let mut stray_pages = self.stray_pages.lock();
        stray_pages.growing_end = 0;
        // Release: pairs with the Acquire in `growths`: a page that was refused by the old length
        // is judged by the new one.
        self.growths.fetch_add(1, Ordering::Release);
    }

    fn clear_stray_pages(
        &self,
        stray_pages: &mut StrayPages,
        pages: Range<u64>,
        is_unwanted: impl Fn(&StrayPage) -> bool,
    ) -> io::Result<()> {
        let unwanted =
            stray_pages.at.range(pages).filter(|(_, stray_page)| is_unwanted(stray_page));
        let unwanted: Vec<_> = unwanted.map(|(index, _)| *index).collect();
        for index in unwanted {
            self.clear_locked(stray_pages, index)?;
        }
        self.note_stray_pages(stray_pages);
        Ok(())
    }

    fn note_stray_pages(&self, stray_pages: &StrayPages) {
        // Relaxed: the lock orders it for all threads that depend on it.
        self.has_stray_pages.store(!stray_pages.at.is_empty(), Ordering::Relaxed);
    }

    fn unmap_locked(&self, index: u64) -> io::Result<()> {
        let range = self.range_at(index);
        // SAFETY: a page of this region whose bytes are not needed.
        unsafe { self.unmap_unwanted(std::slice::from_ref(&range)) }.map(drop)
    }
}

/// The orphans of all regions: folios that were removed from their tables while references to them
/// remain. The thread that puts the last reference finds here the page that must be unmapped.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    pages: Mutex<HashMap<FolioId, (Arc<Region>, u64)>>,
    /// `true` if there are any; most caches never have one.
    is_any: AtomicBool,
}

impl Orphans {
    /// Records that a folio was removed from its table and keeps its page. The caller holds a
    /// reference.
    pub(crate) fn note(&self, id: FolioId, region: &Arc<Region>, index: u64) {
        let mut pages = self.pages.lock();
        region.note_orphan(index, id);
        pages.insert(id, (Arc::clone(region), index));
        // Relaxed: the last reference is put after the caller's own.
        self.is_any.store(true, Ordering::Relaxed);
    }

    /// Releases the page of a folio whose last reference was put, if the folio is an orphan.
    pub(crate) fn release(&self, id: FolioId) {
        // Relaxed: see `note`.
        if !self.is_any.load(Ordering::Relaxed) {
            return;
        }
        let mut pages = self.pages.lock();
        let found = pages.remove(&id);
        self.is_any.store(!pages.is_empty(), Ordering::Relaxed);
        drop(pages);
        if let Some((region, index)) = found {
            region.release_orphan(index, id);
        }
    }
}

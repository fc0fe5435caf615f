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

use super::addresses::Addresses;
use crate::error::Error;
use crate::page::{FolioId, PAGE_BYTES};
use crate::sync::{AtomicBool, Mutex, Ordering};
use crate::sys::copy;
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicU64;

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

/// Advances the time: messages read from the returned time on were sent later.
fn note_waked() -> u64 {
    // AcqRel: Release pairs with the Acquire in `fault_time`; Acquire only prevents reordering with
    // what follows.
    FAULT_TIME.fetch_add(1, Ordering::AcqRel) + 1
}

#[derive(Debug, Default)]
pub(crate) struct StrayPages {
    state: Mutex<StrayState>,
    /// Incremented when the file is about to grow, and again when it has grown.
    growths: AtomicU64,
    /// `true` if there are any: a hint, exact for the thread that added one.
    is_any: AtomicBool,
}

#[derive(Debug, Default)]
struct StrayState {
    at: BTreeMap<u64, StrayPage>,
    /// End of the pages that are about to belong to the file (G1); 0 if it is not growing.
    growing_end: u64,
    /// Number of pages that could not be filled when they were touched.
    errors: u64,
    last_error: Option<Error>,
}

/// A refused page, to be judged again under the lock.
#[derive(Clone, Debug)]
pub(crate) struct FaultRefusal {
    pub(crate) index: u64,
    /// Value of [`StrayPages::growths`] before the fill was tried.
    pub(crate) growths: u64,
    /// Value of [`fault_time`] when the message was read; `u64::MAX` if a waiter is known.
    pub(crate) read_at: u64,
    pub(crate) error: Error,
}

impl StrayPages {
    /// Returns the error of the last page that could not be filled, if any failed since `seen`.
    /// Stores the current number of errors in `seen`.
    pub(crate) fn error_since(&self, seen: &mut u64) -> Option<Error> {
        let state = self.state.lock();
        let is_new = state.errors > *seen;
        *seen = state.errors;
        state.last_error.clone().filter(|_| is_new)
    }

    /// Makes freshly installed pages accessible where poison had only refused access.
    pub(super) fn lift_poison(&self, addresses: &Addresses, pages: Range<u64>) -> io::Result<()> {
        // On failure, pages are installed, perhaps between accessible ones, and cannot be touched.
        addresses.regions.unpoison(&addresses.range_of(&pages)).inspect_err(|error| {
            addresses.regions.soundness.lose("access to a page of a map is refused", error);
        })?;
        // Relaxed: a hint, as in `clear_poison`.
        if self.is_any.load(Ordering::Relaxed) {
            let mut state = self.state.lock();
            for index in pages {
                if matches!(state.at.get(&index), Some(StrayPage::Poison(_))) {
                    state.at.remove(&index);
                }
            }
            self.note_any(&state);
        }
        Ok(())
    }

    /// Returns `true` if a page was poisoned after a message about it was read: the sender no
    /// longer waits.
    pub(crate) fn is_poisoned_since(&self, index: u64, read_at: u64) -> bool {
        // Relaxed: a hint; a thread that misses it tries once more to fill the page.
        self.is_any.load(Ordering::Relaxed) && {
            let state = self.state.lock();
            matches!(state.at.get(&index), Some(StrayPage::Poison(since)) if read_at < *since)
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
        addresses: &Addresses,
        refusal: &FaultRefusal,
        is_past_end: impl FnOnce() -> bool,
        is_there: impl FnOnce() -> bool,
    ) -> io::Result<bool> {
        let FaultRefusal { index, growths, read_at, error } = refusal.clone();
        let mut state = self.state.lock();
        if growths != self.growths() || index < state.growing_end || is_there() {
            return Ok(false);
        }
        if matches!(state.at.get(&index), Some(StrayPage::Poison(since)) if read_at < *since) {
            // Another fault service poisoned it, and reported the error.
            return Ok(true);
        }
        if is_past_end() {
            let woken_at = match state.at.get(&index) {
                Some(StrayPage::Suspected(woken_at)) => *woken_at,
                Some(_) => 0,
                None => u64::MAX,
            };
            if read_at < woken_at {
                addresses.userfault.wake(&addresses.range_at(index))?;
                state.at.entry(index).or_insert(StrayPage::Suspected(note_waked()));
                self.note_any(&state);
                return Ok(false);
            }
        }
        self.poison(addresses, &mut state, index, error)
    }

    /// Poisons the page and records the error. Returns `false` if the page is resident.
    fn poison(
        &self,
        addresses: &Addresses,
        state: &mut StrayState,
        index: u64,
        error: Error,
    ) -> io::Result<bool> {
        // Before the page is poisoned: a thread that this wakes may be the one that clears it.
        self.is_any.store(true, Ordering::Relaxed);
        let range = addresses.range_at(index);
        let poisoned = addresses.regions.poison(&addresses.userfault, &range);
        if poisoned.is_ok() {
            state.at.insert(index, StrayPage::Poison(note_waked()));
            log::error!("cannot fill a page of a map, access to it raises SIGBUS: {error}");
            state.errors += 1;
            state.last_error = Some(error);
        }
        self.note_any(state);
        match poisoned {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Keeps the page of a folio that is about to be removed from its table and may have other
    /// references, until [`Self::release_orphan`].
    pub(crate) fn note_orphan(&self, index: u64, id: FolioId) {
        let mut state = self.state.lock();
        match state.at.get_mut(&index) {
            Some(StrayPage::Orphan { orphans, is_taken }) => {
                orphans.push(id);
                *is_taken = false;
            }
            _ => {
                let held = StrayPage::Orphan { orphans: smallvec![id], is_taken: false };
                state.at.insert(index, held);
            }
        }
        self.note_any(&state);
    }

    /// Unmaps the page of an orphan whose last reference was put, unless another folio uses the
    /// page.
    pub(crate) fn release_orphan(&self, addresses: &Addresses, index: u64, id: FolioId) {
        let mut state = self.state.lock();
        let found = state.at.get_mut(&index);
        let Some(StrayPage::Orphan { orphans, is_taken }) = found else { return };
        orphans.retain(|orphan| *orphan != id);
        if orphans.is_empty() {
            let is_taken = *is_taken;
            state.at.remove(&index);
            self.note_any(&state);
            if !is_taken {
                // A failure poisons the cache.
                let _ = unmap(addresses, index);
            }
        }
    }

    /// Returns `true` if the page must stay in memory, whichever folio uses it now (REGION-4).
    /// While the caller holds the lock of the folio in the table, the answer can change from `true`
    /// to `false`, but not back.
    pub(crate) fn is_held(&self, index: u64) -> bool {
        // Relaxed: as in `clear_poison`.
        self.is_any.load(Ordering::Relaxed)
            && matches!(self.state.lock().at.get(&index), Some(StrayPage::Orphan { .. }))
    }

    /// Returns the pages among `pages` that belong to orphans and to no folio in the table.
    pub(crate) fn orphaned_among(&self, pages: Range<u64>) -> Vec<u64> {
        let state = self.state.lock();
        let is_orphaned = |stray_page: &StrayPage| {
            matches!(stray_page, StrayPage::Orphan { is_taken: false, .. })
        };
        let found = state.at.range(pages).filter(|(_, stray_page)| is_orphaned(stray_page));
        found.map(|(index, _)| *index).collect()
    }

    /// Removes the stray page at a page that the caller owns, so that the page can be installed,
    /// and returns `false`. If an orphan keeps the page, copies the bytes into it instead and
    /// returns `true`; they count as stored to then.
    ///
    /// # Safety
    /// As for [`Region::install`](super::Region::install), for one page.
    pub(super) unsafe fn copy_in(
        &self,
        addresses: &Addresses,
        index: u64,
        source: *const u8,
    ) -> io::Result<bool> {
        let mut state = self.state.lock();
        let Some(StrayPage::Orphan { is_taken, .. }) = state.at.get_mut(&index) else {
            clear(addresses, &mut state, index)?;
            self.note_any(&state);
            return Ok(false);
        };
        *is_taken = true;
        // SAFETY: `source` is readable for a page, by the caller's contract.
        let bytes = unsafe { std::slice::from_raw_parts(source, PAGE_BYTES as usize) };
        // SAFETY: the page stays resident while the orphan exists; the caller holds the lock of the
        // page's folio, and readers of the orphan accept any bytes.
        unsafe { copy::copy_in(addresses.address(index), bytes) };
        Ok(true)
    }

    /// Clears the poison of `pages`, so that the next access tries to fill them again.
    pub(crate) fn clear_poison(&self, addresses: &Addresses, pages: Range<u64>) -> io::Result<()> {
        // Relaxed: a thread that stored the poison and then calls this sees it.
        if !self.is_any.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut state = self.state.lock();
        let is_unwanted = |stray_page: &StrayPage| matches!(stray_page, StrayPage::Poison(_));
        self.clear_unwanted(addresses, &mut state, pages, is_unwanted)
    }

    /// G1: announces that `pages`, which are past the end of file, are about to belong to the file,
    /// and clears their suspicion and poison. The caller must fill the pages of
    /// [`Self::orphaned_among`], and call [`Self::end_growth`] even if it fails.
    pub(crate) fn begin_growth(&self, addresses: &Addresses, pages: Range<u64>) -> io::Result<()> {
        let mut state = self.state.lock();
        state.growing_end = pages.end;
        // Release: pairs with the Acquire in `growths`.
        self.growths.fetch_add(1, Ordering::Release);
        let is_unwanted = |stray_page: &StrayPage| !matches!(stray_page, StrayPage::Orphan { .. });
        self.clear_unwanted(addresses, &mut state, pages, is_unwanted)
    }

    /// G3: ends the growth.
    pub(crate) fn end_growth(&self) {
        let mut state = self.state.lock();
        state.growing_end = 0;
        // Release: pairs with the Acquire in `growths`: a page that was refused by the old length
        // is judged by the new one.
        self.growths.fetch_add(1, Ordering::Release);
    }

    /// Unmaps the stray pages among `pages` that `is_unwanted` accepts, and forgets them. Stops at
    /// the first that the kernel does not unmap.
    fn clear_unwanted(
        &self,
        addresses: &Addresses,
        state: &mut StrayState,
        pages: Range<u64>,
        is_unwanted: impl Fn(&StrayPage) -> bool,
    ) -> io::Result<()> {
        let unwanted = state.at.range(pages).filter(|(_, stray_page)| is_unwanted(stray_page));
        let unwanted: Vec<_> = unwanted.map(|(index, _)| *index).collect();
        for index in unwanted {
            clear(addresses, state, index)?;
        }
        self.note_any(state);
        Ok(())
    }

    fn note_any(&self, state: &StrayState) {
        // Relaxed: the lock orders it for all threads that depend on it.
        self.is_any.store(!state.at.is_empty(), Ordering::Relaxed);
    }
}

/// Removes the stray page at `index` from the state, and from the addresses.
fn clear(addresses: &Addresses, state: &mut StrayState, index: u64) -> io::Result<()> {
    state.at.remove(&index);
    addresses.regions.unpoison(&addresses.range_at(index))?;
    unmap(addresses, index)
}

fn unmap(addresses: &Addresses, index: u64) -> io::Result<()> {
    // SAFETY: a page of the region whose bytes are not needed.
    unsafe { addresses.unmap_unwanted(&[addresses.range_at(index)]) }.map(drop)
}

//! Leftovers: what stands at a page of a region, and is not of the folio that the table has there.
//! Suspicion and poison, of pages that could not be had when they were touched; and pages that are
//! held although their folio has left its table: orphans.
//!
//! A late message: a fault that somebody else has served meanwhile is served some time later, when
//! nobody waits for the page any more and the file may have been cut. So a page behind the end
//! is refused in two steps, and what was found out before the lock is judged again under it:
//!
//! ```text
//!  REFUSE (a service of faults)               GROW (who holds the resizing lock)
//!  R1 note the number of growths              G1 under the lock: the pages up to the new end are
//!  R2 try to bring the page in: refused          about to be the file's (`growing_end`); suspicion
//!  R3 under the lock: another number than        and poison are taken from them; next number
//!     R1's, or the file is about to have the  G2 the new length stands
//!     page, or it is there: wake who waits    G3 under the lock: none is about to be the file's;
//!                                                next number
//!  R4 behind the end, and nobody is known
//!     to wait: wake who does, suspect it
//!  R5 behind the end, and the message was
//!     read after that: whoever sent it has
//!     touched the page since: poison it
//! ```
//!
//! # Safety
//! Copies to pages of the region.
#![allow(unsafe_code)]

use super::Region;
use crate::error::Error;
use crate::page::{FolioId, PAGE_BYTES};
use crate::sync::{AtomicBool, Mutex, Ordering};
use crate::sys::copy;
use crate::sys::memory::PageRange;
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Something that stands at a page, and is not of the folio that the table has there.
#[derive(Debug)]
enum Leftover {
    /// Behind the end of the file, and perhaps touched there: whoever waited for it was woken at
    /// this time ([`fault_time`]).
    Suspected(u64),
    /// It could not be read: whoever touches it gets SIGBUS. Who waited was woken before this time.
    Poison(u64),
    /// The page is there, and does not leave (REGION-4): folios that were cut off had it, and
    /// somebody holds on to them. With `is_taken` a folio of the table has it now.
    Held { orphans: SmallVec<[FolioId; 1]>, is_taken: bool },
}

/// Orders the reading of messages about faults against the waking of those who sent them, in all
/// regions. It goes on when somebody was woken.
static FAULT_TIME: AtomicU64 = AtomicU64::new(0);

/// The time, before messages are read.
pub(crate) fn fault_time() -> u64 {
    // Acquire: pairs with the AcqRel in `note_waked`: who waited was woken before.
    FAULT_TIME.load(Ordering::Acquire)
}

/// Somebody was woken: messages read from this time on were sent later.
fn note_waked() -> u64 {
    // AcqRel: Release pairs with the Acquire in `fault_time`; Acquire only keeps it in its place.
    FAULT_TIME.fetch_add(1, Ordering::AcqRel) + 1
}

/// All that there is in a region.
#[derive(Debug, Default)]
pub(super) struct Leftovers {
    at: BTreeMap<u64, Leftover>,
    /// Pages before this one are about to be the file's (G1).
    growing_end: u64,
    /// How many pages could not be had when they were touched, and why not the last of them.
    errors: u64,
    last_error: Option<Arc<Error>>,
}

/// A refusal of a page, to be judged again: see the head of the file.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) index: u64,
    /// [`Region::growths`] before the page was tried.
    pub(crate) growths: u64,
    /// When the message was read; the last moment there is if somebody is known to wait.
    pub(crate) read_at: u64,
    pub(crate) error: Arc<Error>,
}

impl Region {
    /// Why the last page that could not be had could not, if there were any since `seen`; how many
    /// there are now goes there.
    pub(crate) fn error_since(&self, seen: &mut u64) -> Option<Arc<Error>> {
        let leftovers = self.leftovers.lock();
        let is_new = leftovers.errors > *seen;
        *seen = leftovers.errors;
        leftovers.last_error.clone().filter(|_| is_new)
    }

    /// Lets pages that were just installed be touched, where nothing but access was refused.
    pub(super) fn lift_poison(&self, pages: Range<u64>) -> io::Result<()> {
        // Relaxed: a hint, as in `clear_leftovers`.
        if !self.has_leftovers.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut leftovers = self.leftovers.lock();
        for index in pages {
            if matches!(leftovers.at.get(&index), Some(Leftover::Poison(_))) {
                leftovers.at.remove(&index);
                // If not: it is there, perhaps among others that are seen, and cannot be touched.
                self.regions.unpoison(&self.range_at(index)).inspect_err(|error| {
                    self.regions.soundness.lose("access to a page of a map is refused", error);
                })?;
            }
        }
        self.note_leftovers(&leftovers);
        Ok(())
    }

    /// Whether a page was poisoned after a message about it was read: then nobody waits for it.
    pub(crate) fn is_poisoned_since(&self, index: u64, read_at: u64) -> bool {
        // Relaxed: a hint; who does not see it tries once more to bring the page in.
        self.has_leftovers.load(Ordering::Relaxed) && {
            let leftovers = self.leftovers.lock();
            matches!(leftovers.at.get(&index), Some(Leftover::Poison(since)) if read_at < *since)
        }
    }

    /// A number that changes when the file is about to grow, and when it has grown.
    pub(crate) fn growths(&self) -> u64 {
        // Acquire: pairs with the Release in `begin_growth` and `end_growth`: how the page is found
        // after this is newer.
        self.growths.load(Ordering::Acquire)
    }

    /// Judges a refusal again, and if it stands records it and poisons the page: whoever touches it
    /// gets SIGBUS, until it is installed or cleared. Whether it does; if not, whoever waits for
    /// the page was woken, or is to be, and tries again. `is_past_end` and `is_there` tell how the
    /// page is now.
    pub(crate) fn refuse(
        &self,
        refusal: &Refusal,
        is_past_end: impl FnOnce() -> bool,
        is_there: impl FnOnce() -> bool,
    ) -> io::Result<bool> {
        let Refusal { index, growths, read_at, error } = refusal.clone();
        let range = self.range_at(index);
        let mut leftovers = self.leftovers.lock();
        if growths != self.growths() || index < leftovers.growing_end || is_there() {
            return Ok(false);
        }
        if matches!(leftovers.at.get(&index), Some(Leftover::Poison(since)) if read_at < *since) {
            // By another service, which has told of it.
            return Ok(true);
        }
        if is_past_end() {
            let woken_at = match leftovers.at.get(&index) {
                Some(Leftover::Suspected(woken_at)) => *woken_at,
                Some(_) => 0,
                None => u64::MAX,
            };
            if read_at < woken_at {
                self.userfault.wake(&range)?;
                leftovers.at.entry(index).or_insert(Leftover::Suspected(note_waked()));
                self.note_leftovers(&leftovers);
                return Ok(false);
            }
        }
        self.poison(&mut leftovers, index, &range, error)
    }

    /// Whether nobody can touch the page now, and whoever does is told why; not if one is there.
    fn poison(
        &self,
        leftovers: &mut Leftovers,
        index: u64,
        range: &PageRange,
        error: Arc<Error>,
    ) -> io::Result<bool> {
        // First: whoever it wakes may be the one who clears it.
        self.has_leftovers.store(true, Ordering::Relaxed);
        let poisoned = self.regions.poison(&self.userfault, range);
        if poisoned.is_ok() {
            leftovers.at.insert(index, Leftover::Poison(note_waked()));
            log::error!("a page of a map cannot be had: {error}");
            leftovers.errors += 1;
            leftovers.last_error = Some(error);
        }
        self.note_leftovers(leftovers);
        match poisoned {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Keeps the page of a folio that is about to leave its table, and that somebody may hold on
    /// to, until [`Self::release_orphan`].
    pub(crate) fn note_orphan(&self, index: u64, id: FolioId) {
        let mut leftovers = self.leftovers.lock();
        match leftovers.at.get_mut(&index) {
            Some(Leftover::Held { orphans, is_taken }) => {
                orphans.push(id);
                *is_taken = false;
            }
            _ => {
                let held = Leftover::Held { orphans: smallvec![id], is_taken: false };
                leftovers.at.insert(index, held);
            }
        }
        self.note_leftovers(&leftovers);
    }

    /// The last reference to the folio is gone: unmaps its page, unless that is somebody else's.
    pub(crate) fn release_orphan(&self, index: u64, id: FolioId) {
        let mut leftovers = self.leftovers.lock();
        let found = leftovers.at.get_mut(&index);
        let Some(Leftover::Held { orphans, is_taken }) = found else { return };
        orphans.retain(|orphan| *orphan != id);
        if orphans.is_empty() {
            let is_taken = *is_taken;
            leftovers.at.remove(&index);
            self.note_leftovers(&leftovers);
            if !is_taken {
                // The cache is poisoned if it fails.
                let _ = self.unmap_locked(index);
            }
        }
    }

    /// Whether the page may not leave, whoever has it now (REGION-4). Who has the lock of the folio
    /// in the table there finds that it may go on to be so, but does not come to be.
    pub(crate) fn is_held(&self, index: u64) -> bool {
        // Relaxed: as in `clear_poison`.
        self.has_leftovers.load(Ordering::Relaxed)
            && matches!(self.leftovers.lock().at.get(&index), Some(Leftover::Held { .. }))
    }

    /// The pages among `pages` that orphans have, and no folio of the table.
    pub(crate) fn orphaned_among(&self, pages: Range<u64>) -> Vec<u64> {
        let leftovers = self.leftovers.lock();
        let is_orphaned =
            |leftover: &Leftover| matches!(leftover, Leftover::Held { is_taken: false, .. });
        let found = leftovers.at.range(pages).filter(|(_, leftover)| is_orphaned(leftover));
        found.map(|(index, _)| *index).collect()
    }

    /// Something stands at a page that is the caller's now: lets it be installed, or puts the bytes
    /// in its place and answers `true`. They count as stored to then.
    ///
    /// # Safety
    /// As for [`Self::install`], for one page.
    pub(super) unsafe fn take_place(&self, index: u64, source: *const u8) -> io::Result<bool> {
        let mut leftovers = self.leftovers.lock();
        let Some(Leftover::Held { is_taken, .. }) = leftovers.at.get_mut(&index) else {
            self.clear_locked(&mut leftovers, index)?;
            self.note_leftovers(&leftovers);
            return Ok(false);
        };
        *is_taken = true;
        // SAFETY: a page, by the caller's contract.
        let bytes = unsafe { std::slice::from_raw_parts(source, PAGE_BYTES as usize) };
        // SAFETY: a page that is there while the orphan is; the caller has the lock of its folio,
        // and whoever holds the orphan expects any bytes.
        unsafe { copy::copy_in(self.address(index), bytes) };
        Ok(true)
    }

    fn clear_locked(&self, leftovers: &mut Leftovers, index: u64) -> io::Result<()> {
        if matches!(leftovers.at.remove(&index), Some(Leftover::Poison(_))) {
            self.regions.unpoison(&self.range_at(index))?;
        }
        self.unmap_locked(index)
    }

    /// Lets pages that could not be read be tried again.
    pub(crate) fn clear_poison(&self, pages: Range<u64>) -> io::Result<()> {
        // Relaxed: who put one there and comes here sees it.
        if !self.has_leftovers.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut leftovers = self.leftovers.lock();
        self.clear_leftovers(&mut leftovers, pages, |leftover| {
            matches!(leftover, Leftover::Poison(_))
        })
    }

    /// G1: `pages`, which were behind the end, are about to belong to the file: whatever stands
    /// there is not a part of it. ([`Self::orphaned_among`] those are pages to be filled by the
    /// caller.) To be followed by [`Self::end_growth`], whatever comes of it.
    pub(crate) fn begin_growth(&self, pages: Range<u64>) -> io::Result<()> {
        let mut leftovers = self.leftovers.lock();
        leftovers.growing_end = pages.end;
        // Release: pairs with the Acquire in `growths`.
        self.growths.fetch_add(1, Ordering::Release);
        let is_unwanted = |leftover: &Leftover| !matches!(leftover, Leftover::Held { .. });
        self.clear_leftovers(&mut leftovers, pages, is_unwanted)
    }

    /// G3.
    pub(crate) fn end_growth(&self) {
        let mut leftovers = self.leftovers.lock();
        leftovers.growing_end = 0;
        // Release: as above: a page that was refused by the old length is judged by the new one.
        self.growths.fetch_add(1, Ordering::Release);
    }

    fn clear_leftovers(
        &self,
        leftovers: &mut Leftovers,
        pages: Range<u64>,
        is_unwanted: impl Fn(&Leftover) -> bool,
    ) -> io::Result<()> {
        let unwanted = leftovers.at.range(pages).filter(|(_, leftover)| is_unwanted(leftover));
        let unwanted: Vec<_> = unwanted.map(|(index, _)| *index).collect();
        for index in unwanted {
            self.clear_locked(leftovers, index)?;
        }
        self.note_leftovers(leftovers);
        Ok(())
    }

    fn note_leftovers(&self, leftovers: &Leftovers) {
        // Relaxed: the lock orders it for all who must know.
        self.has_leftovers.store(!leftovers.at.is_empty(), Ordering::Relaxed);
    }

    fn unmap_locked(&self, index: u64) -> io::Result<()> {
        let range = self.range_at(index);
        // SAFETY: a page of ours whose bytes nobody wants.
        unsafe { self.unmap_unwanted(std::slice::from_ref(&range)) }.map(drop)
    }
}

/// The orphans of all regions: folios that have left their tables while somebody holds on to their
/// bytes. The thread that puts the last reference finds here where the page is that must be
/// unmapped now.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    places: Mutex<HashMap<FolioId, (Arc<Region>, u64)>>,
    /// Whether there are any: most caches never have one.
    is_any: AtomicBool,
}

impl Orphans {
    /// The folio, which the caller has a reference to, has left its table; its page stays.
    pub(crate) fn note(&self, id: FolioId, region: &Arc<Region>, index: u64) {
        let mut places = self.places.lock();
        region.note_orphan(index, id);
        places.insert(id, (Arc::clone(region), index));
        // Relaxed: whoever puts the last reference comes after the caller's own put.
        self.is_any.store(true, Ordering::Relaxed);
    }

    /// The last reference to a folio is gone.
    pub(crate) fn release(&self, id: FolioId) {
        // Relaxed: see `note`.
        if !self.is_any.load(Ordering::Relaxed) {
            return;
        }
        let mut places = self.places.lock();
        let found = places.remove(&id);
        self.is_any.store(!places.is_empty(), Ordering::Relaxed);
        drop(places);
        if let Some((region, index)) = found {
            region.release_orphan(index, id);
        }
    }
}

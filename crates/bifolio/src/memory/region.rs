//! A region: address space for one mappable file; the page at index i lies at base + i * 4096.
//!
//! The other kind of frames. What a caller maps is this memory itself: so a page comes to it whole,
//! with one call of the kernel (`UFFDIO_COPY`), and evicting it means unmapping it, for many pages
//! at once, with one flush of the other CPUs' translations. Who touches a page that is not there
//! raises a fault (`file/faults`). Nothing here knows folios, but for the mark that an orphan
//! bears; who may install or unmap which page is said by `page` and `reclaim`.
//!
//! What raw writers store to is known from the page tables: once a file was mapped for writing its
//! pages are installed protected, and the first store to each takes the protection away
//! ([`Region::visit_written`] finds those, [`Region::protect`] starts anew).
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

use super::arena::PAGE_BYTES;
use super::mapped::MappedPages;
use super::regions::Regions;
use crate::error::Error;
use crate::page::FolioId;
use crate::sync::{AtomicBool, AtomicU8, Mutex, MutexGuard, Ordering};
use crate::sys::copy;
use crate::sys::memory::{PageRange, Reservation};
use crate::sys::pagemap::Pagemap;
use crate::sys::userfault::Userfault;
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
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

/// Stores are not looked for: there can be none.
const UNTRACKED: u8 = 0;
/// They are, but write-outs that began before may still be reading the pages themselves.
const TRACKED: u8 = 1;
/// All that is written out is copied.
const COPIED: u8 = 2;

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

/// How often the kernel is asked to unmap pages whose bytes nobody wants.
const UNMAP_TRIES_MAX: u32 = 3;

/// All of that.
#[derive(Debug, Default)]
struct Leftovers {
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
        let mut outcome = Ok(());
        while next < pages.end && outcome.is_ok() {
            let range = self.range_of(&(next..pages.end));
            let (target, length_bytes) = (range.start, range.length_bytes);
            // SAFETY: the caller's contract, for the rest of the pages.
            let (done_bytes, copied) =
                unsafe { self.userfault.copy(target, source_of(next), length_bytes, protect) };
            next += done_bytes as u64 / PAGE_BYTES;
            outcome = match copied {
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

    /// Lets pages that were just installed be touched, where nothing but access was refused.
    fn lift_poison(&self, pages: Range<u64>) -> io::Result<()> {
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

    /// Whether stores are looked for.
    pub(crate) fn is_tracked(&self) -> bool {
        // Acquire: pairs with the Release in `track`: the pages that were there are protected.
        self.tracking.load(Ordering::Acquire) != UNTRACKED
    }

    /// Where stores are seen.
    fn pagemap(&self) -> io::Result<&Pagemap> {
        self.pagemap.as_ref().ok_or_else(|| io::ErrorKind::Unsupported.into())
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

    /// Why the last page that could not be had could not, if there were any since `seen`; how many
    /// there are now goes there.
    pub(crate) fn error_since(&self, seen: &mut u64) -> Option<Arc<Error>> {
        let leftovers = self.leftovers.lock();
        let is_new = leftovers.errors > *seen;
        *seen = leftovers.errors;
        leftovers.last_error.clone().filter(|_| is_new)
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
    unsafe fn take_place(&self, index: u64, source: *const u8) -> io::Result<bool> {
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

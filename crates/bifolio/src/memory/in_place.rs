//! Pages at fixed addresses, where code outside of the cache sees them: what the floors below
//! `maps` ask of the memory that holds them. `maps` implements it (`maps/region`).
//!
//! No hit calls it: a page is at the base address plus its offset in the file
//! ([`PageSpace`](super::PageSpace)). A fill calls it once for up to 64 pages.
//!
//! # Safety
//! [`StagedPages`] says what its implementations promise.
#![allow(unsafe_code)]

use crate::page::FolioId;
use crate::sync::{AtomicBool, Mutex, Ordering, RwLock, Share};
use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// The memory of one file whose page at index i is at base + i * 4096. Pages are installed whole
/// from staging memory, evicted by unmapping, and accessed with a reference (REGION-4).
pub(crate) trait InPlace: Any + Debug + Send + Sync {
    /// Returns the address of the page 0, which never changes.
    fn base(&self) -> *mut u8;

    /// Returns the maximum length of a readahead window, in pages: staging memory has room for
    /// several.
    fn window_pages(&self) -> u64;

    /// Returns the number of pages that the file reads ahead at a time.
    fn pages_in_flight(&self) -> u64;

    /// Takes up to `pages` pages of staging memory, of the `share` of a device. Waits for the first
    /// if it `may_wait`; otherwise returns `None` if there is none.
    fn stage(&self, pages: usize, share: &Share, may_wait: bool) -> Option<Box<dyn StagedPages>>;

    /// Installs `pages`, whose bytes are in `staged` from its page `number` on, and wakes the
    /// threads that wait for them. The caller has their folios locked. With `will_be_stored`, they
    /// count as stored to from the beginning. Returns the number of pages that are visible, from
    /// the first on: all of them, unless there is an error.
    fn publish(
        &self,
        staged: &dyn StagedPages,
        number: usize,
        pages: Range<u64>,
        will_be_stored: bool,
    ) -> (u64, io::Result<()>);

    /// Clears the poison of `pages`, so that touching them tries to fill them again. Fails if the
    /// kernel has no memory.
    fn clear_poison(&self, pages: Range<u64>) -> io::Result<()>;

    /// Keeps the page of a folio that is about to be removed from its table and may have other
    /// references, until [`Self::release_orphan`].
    fn note_orphan(&self, index: u64, id: FolioId);

    /// Unmaps the page of an orphan whose last reference was put, unless another folio uses it.
    fn release_orphan(&self, index: u64, id: FolioId);

    /// Returns the pages among `pages` that belong to orphans and to no folio in the table.
    fn orphaned_among(&self, pages: Range<u64>) -> Vec<u64>;

    /// Returns the parts of `pages` that are mapped: sorted and disjoint.
    fn mapped_among(&self, pages: &Range<u64>) -> Vec<Range<u64>>;

    /// Ends the growth of the file, whether or not it grew (STRAY-G3).
    fn end_growth(&self);
}

/// A run of adjacent staging pages, freed on drop.
///
/// # Safety
/// The addresses are of resident memory in no region, adjacent in the order of the pages, that only
/// the owner of the run accesses.
pub(crate) unsafe trait StagedPages: Debug + Send {
    fn pages(&self) -> usize;

    /// Returns the address of a page. Panics if the run does not have it.
    fn address(&self, page: usize) -> *mut u8;

    /// Takes up to `pages` more, if they are free, without waiting.
    fn extend(&mut self, pages: usize);

    /// Keeps the first `pages` and frees the others.
    fn shrink(&mut self, pages: usize);
}

/// The addresses of all open files in place, each from its first to its end. Of all caches of the
/// process, because a buffer that a caller passes to one cache may be a map of another.
static RANGES: RwLock<BTreeMap<usize, usize>> = RwLock::new(BTreeMap::new());
/// Number of ranges: most processes have none.
static RANGE_COUNT: AtomicUsize = AtomicUsize::new(0);

pub(crate) fn note_addresses(range: Range<usize>) {
    let mut ranges = RANGES.write();
    ranges.insert(range.start, range.end);
    RANGE_COUNT.store(ranges.len(), Ordering::Relaxed);
}

pub(crate) fn forget_addresses(start: usize) {
    let mut ranges = RANGES.write();
    ranges.remove(&start);
    RANGE_COUNT.store(ranges.len(), Ordering::Relaxed);
}

/// Returns `true` if any of `bytes` lie in a map, of any cache. An access may then fault, which
/// takes folio locks and waits, so it must not happen with a folio lock held.
#[inline]
pub(crate) fn is_mapped(bytes: &[u8]) -> bool {
    // Relaxed: a caller with such an address got it after the range was counted.
    RANGE_COUNT.load(Ordering::Relaxed) > 0 && is_in_a_range(bytes)
}

fn is_in_a_range(bytes: &[u8]) -> bool {
    let (start, end) = (bytes.as_ptr().addr(), bytes.as_ptr().addr() + bytes.len());
    RANGES.read().range(..end).next_back().is_some_and(|(_, range_end)| start < *range_end)
}

/// The orphans of all files: folios that were removed from their tables while references to them
/// remain. The thread that puts the last reference finds here the page that must be unmapped.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    pages: Mutex<HashMap<FolioId, Orphan>>,
    /// `true` if there are any; most caches never have one.
    is_any: AtomicBool,
}

/// The page that an orphan keeps.
#[derive(Debug)]
struct Orphan {
    space: Arc<dyn InPlace>,
    index: u64,
}

impl Orphans {
    /// Records that a folio was removed from its table and keeps its page. The caller holds a
    /// reference.
    pub(crate) fn note(&self, id: FolioId, space: &Arc<dyn InPlace>, index: u64) {
        let mut pages = self.pages.lock();
        space.note_orphan(index, id);
        pages.insert(id, Orphan { space: Arc::clone(space), index });
        // Relaxed: the last reference is put after the caller's own.
        self.is_any.store(true, Ordering::Relaxed);
    }

    /// Releases the page of a folio whose last reference was put, if the folio is an orphan.
    pub(super) fn release(&self, id: FolioId) {
        // Relaxed: see `note`.
        if !self.is_any.load(Ordering::Relaxed) {
            return;
        }
        let mut pages = self.pages.lock();
        let found = pages.remove(&id);
        self.is_any.store(!pages.is_empty(), Ordering::Relaxed);
        drop(pages);
        if let Some(Orphan { space, index }) = found {
            space.release_orphan(index, id);
        }
    }
}

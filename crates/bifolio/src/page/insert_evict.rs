//! The three kinds of changes to a table, each made with the folio locked: insertion and marking a
//! folio READY (I1-I3 of `page/mapping.rs`), eviction and removal (E1-E5), and the write section
//! (W1-W4).

use super::{
    Entry, Flag, Folio, FolioId, FolioRef, Folios, Frozen, LockedFolio, Mapping, PAGE_BYTES,
    WriteState,
};
use crate::sync::{Ordering, barrier_of_store_and_load, fence};
use std::ops::Range;

/// Error of an insertion: another thread's folio is at the index. The caller uses that one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InsertError;

impl Mapping {
    /// Inserts `folio`, locked and not yet uptodate, at its index if the Entry is still `expected`.
    ///
    /// `table_reference` becomes the table's reference. On failure that reference is put and
    /// `folio` has no owner; nothing else has changed.
    ///
    /// Race (why a folio that was not inserted has no owner once it is unlocked):
    ///
    /// ```text
    ///   filler: loses, unlocks            |
    ///                                     |  evacuation of its chunk: gets a reference, locks
    ///                                     |  it, sees the owner, freezes the two existing
    ///                                     |  references, stores a shadow at the index
    ///   filler: puts a reference that     |
    ///     was counted by the freeze       |  [the winner's folio lost its Entry]
    /// ```
    pub(crate) fn insert(
        &self,
        folios: &Folios,
        folio: &LockedFolio<'_>,
        table_reference: FolioRef<'_>,
        expected: Entry,
    ) -> Result<(), InsertError> {
        debug_assert!(!expected.is_folio());
        debug_assert_eq!(folio.order(), self.order, "only whole units are inserted (MAPPING-2)");
        let first = table_reference.id();
        let entry_of = |page: u64| {
            let frame = first.0 + page as u32;
            let version = folios.get(FolioId(frame)).version().wrapping_add(1);
            Entry::folio(frame, version, folio.order())
        };
        let head = folio.index();
        // AcqRel: the Release pairs with the Acquire in `get_folio`: a thread that finds the folio
        // sees it set up. The Acquire pairs with the Release in `unlink`: these Entries follow
        // those of a folio that was inserted and evicted since the caller saw `expected`. On
        // failure, Relaxed: the caller looks up again.
        let exchange = (Ordering::AcqRel, Ordering::Relaxed);
        let word = self.table.word(head);
        if word.compare_exchange(expected.0, entry_of(0).0, exchange.0, exchange.1).is_err() {
            Folio::clear_owner(folio);
            return Err(InsertError);
        }
        for page in 1..folio.pages() {
            // Release: pairs with the Acquire in `try_get_named` and `recheck`, as for the head.
            self.table.store(head + page, entry_of(page), Ordering::Release);
        }
        let _kept_by_the_table = table_reference.into_id();
        let resident = self.resident.fetch_add(1, Ordering::Relaxed) + 1;
        let published = &self.hot.predicted_distance;
        self.prediction.note_insert(head, first.0, resident, published);
        self.begin_fill();
        Ok(())
    }

    /// Returns `true` if a folio that the caller has just inserted, based on an earlier length, is
    /// beyond the end of file: then the caller must remove it (MAPPING-4).
    ///
    /// Race (why the length is read again, and what the barriers are for):
    ///
    /// ```text
    ///   filler: page 7 is inside           |
    ///                                      |  truncate: sets the length; barrier; walks, and finds
    ///                                      |    nothing at page 7
    ///   filler: inserts page 7; barrier;   |
    ///     is it inside? no                 |
    /// ```
    ///
    /// Covered by `loom_lookup_vs_cut_no_page_stays_beyond_the_end`.
    pub(crate) fn was_cut(&self, folio: &LockedFolio<'_>) -> bool {
        barrier_of_store_and_load();
        folio.index() * PAGE_BYTES >= self.len_bytes()
    }

    /// Called after a truncation has set the length. A walk that begins afterwards finds all folios
    /// beyond the end except those for which [`Self::was_cut`] returns `true`.
    pub(crate) fn begin_walk_behind_end(&self) {
        barrier_of_store_and_load();
    }

    /// Called before bytes of folios that are inserted and not uptodate are written, by the thread
    /// that writes them: the inserter may have handed them to another thread. (`io/transfer.rs` has
    /// this fence for the writes of a backing; writes of the kernel are ordered by the system calls
    /// that start and complete them.)
    pub(crate) fn begin_fill(&self) {
        // Release: pairs with the Acquire fence in `read_validated` (O3): an optimistic reader of
        // the previous use of the frame that sees a byte of the fill sees its Entry changed.
        fence(Ordering::Release);
    }

    /// Marks a filled folio uptodate and READY: readers may use it (I3).
    pub(crate) fn mark_uptodate(&self, folio: &LockedFolio<'_>) {
        folio.flags.set(Flag::Uptodate);
        folio.flags.clear(Flag::Allocated);
        self.set_ready(folio);
    }

    /// Marks a folio of which a page is missing as not uptodate until it is filled again.
    pub(crate) fn mark_absent(&self, folio: &LockedFolio<'_>) {
        self.clear_ready(folio);
        folio.flags.clear(Flag::Uptodate);
    }

    /// Stores READY into every Entry of the folio, without a change of version.
    pub(super) fn set_ready(&self, folio: &LockedFolio<'_>) {
        for index in self.pages_of(folio) {
            let entry = self.table.load(index, Ordering::Relaxed);
            // Release: pairs with the Acquire in `read_validated` (O1).
            self.table.store(index, entry.with_ready(), Ordering::Release);
        }
    }
}

/// Reason why a folio could not be evicted. It is in the table as before.
#[derive(Debug)]
pub(crate) enum EvictError<'a> {
    /// Other references exist.
    Referenced(FolioRef<'a>),
    /// The folio must be written out first.
    Dirty(FolioRef<'a>),
}

impl Mapping {
    /// Evicts a folio if the only references are the caller's and the table's.
    ///
    /// Stores `entry_after(page)` in the Entry of each unit's first page, `page` counted from the
    /// first page of the folio. On success the caller owns the frozen folio; it must unlock and
    /// free it.
    ///
    /// Race (why the freeze comes before the dirty test):
    ///
    /// ```text
    ///   reclaim: is it dirty? no           |
    ///                                      |  writer: looks it up, locks (waits) ... or holds a
    ///                                      |  pin: marks it dirty, puts its reference
    ///   reclaim: freeze(2) succeeds        |
    ///   reclaim: frees the frame           |  [the bytes written through the pin are lost]
    /// ```
    ///
    /// With the freeze first, either the other reference makes it fail, or its put happened before
    /// (Release / Acquire on the pin word) and the dirty test sees the mark.
    pub(crate) fn evict<'a>(
        &self,
        folio: FolioRef<'a>,
        locked: &LockedFolio<'_>,
        entry_after: impl Fn(u64) -> Entry,
    ) -> Result<Frozen<'a>, EvictError<'a>> {
        let frozen = match self.begin_eviction(folio, locked) {
            Ok(frozen) => frozen,
            Err(folio) => return Err(EvictError::Referenced(folio)),
        };
        if locked.flags.write_state() != WriteState::Clean {
            return Err(EvictError::Dirty(self.cancel_eviction(frozen, locked)));
        }
        self.end_eviction(&frozen, locked, entry_after);
        Ok(frozen)
    }

    /// E1, E2: freezes the folio. Until [`Self::end_eviction`] or [`Self::cancel_eviction`] it
    /// remains in the table, and a lookup of it waits. The caller must test now whether it is
    /// dirty.
    pub(crate) fn begin_eviction<'a>(
        &self,
        folio: FolioRef<'a>,
        locked: &LockedFolio<'_>,
    ) -> Result<Frozen<'a>, FolioRef<'a>> {
        self.clear_ready(locked);
        let frozen = folio.try_freeze(1);
        if frozen.is_err() {
            self.restore_ready(locked);
        }
        frozen
    }

    /// Aborts an eviction: the folio stays in the table with its bytes.
    pub(crate) fn cancel_eviction<'a>(
        &self,
        frozen: Frozen<'a>,
        locked: &LockedFolio<'_>,
    ) -> FolioRef<'a> {
        let folio = frozen.unfreeze();
        self.restore_ready(locked);
        folio
    }

    /// E4: removes a frozen folio from the table and stores what [`Self::evict`] would.
    pub(crate) fn end_eviction(
        &self,
        frozen: &Frozen<'_>,
        locked: &LockedFolio<'_>,
        entry_after: impl Fn(u64) -> Entry,
    ) {
        self.unlink(frozen.folios(), locked, entry_after);
    }

    /// Removes a folio from the table even if it is dirty or referenced, and stores what
    /// [`Self::evict`] would.
    ///
    /// Threads that still hold a reference keep the memory, but the folio is no longer part of the
    /// file. Returns the table's reference.
    pub(crate) fn remove<'a>(
        &self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
        folios: &'a Folios,
        entry_after: impl Fn(u64) -> Entry,
    ) -> FolioRef<'a> {
        self.clear_ready(locked);
        self.unlink(folios, locked, entry_after);
        folios.adopt(folio.id())
    }

    /// Replaces the value `seen` in the Entry of a unit's first page by a hole.
    ///
    /// Returns `true` if the Entry still was `seen`. Then the caller alone owns what the value
    /// names: a thread that fills the unit (I1) or takes the value at the same time does not.
    pub(crate) fn take_value(&self, index: u64, seen: Entry) -> bool {
        debug_assert!(seen.as_value().is_some() && self.head_index(index) == index);
        // Acquire: pairs with the Release in `unlink`: this thread sees what the evictor did to
        // what the value names. A hole publishes nothing; an insertion over it still follows
        // `unlink`, because a read-modify-write continues the release sequence. On failure,
        // Relaxed: another thread owns the value.
        let exchange = (Ordering::Acquire, Ordering::Relaxed);
        let word = self.table.word(index);
        word.compare_exchange(seen.0, Entry::HOLE.0, exchange.0, exchange.1).is_ok()
    }

    /// E4: stores the head Entry of each unit after the others, that of the folio last (MAPPING-2).
    fn unlink(
        &self,
        folios: &Folios,
        locked: &LockedFolio<'_>,
        entry_after: impl Fn(u64) -> Entry,
    ) {
        let pages = self.pages_of(locked);
        self.save_versions(folios, pages.clone());
        let frame = self.table.load(pages.start, Ordering::Relaxed).frame();
        Folio::clear_owner(locked);
        for index in pages.clone().rev() {
            let is_head = self.head_index(index) == index;
            let entry = if is_head { entry_after(index - pages.start) } else { Entry::HOLE };
            // Release: pairs with the Acquire in `get_folio`: a thread that sees the folio removed
            // from a head sees it removed from the other pages of the unit.
            self.table.store(index, entry, Ordering::Release);
        }
        // Release: pairs with the Acquire in `resident_folios`: a caller that sees the folio
        // removed sees that it was marked dirty before, if it was.
        let resident = self.resident.fetch_sub(1, Ordering::Release) - 1;
        let published = &self.hot.predicted_distance;
        self.prediction.note_removal(pages.start, frame, resident, published);
    }

    /// E1. No fence: the next filler of the frame issues it (`insert`).
    fn clear_ready(&self, locked: &LockedFolio<'_>) {
        for index in self.pages_of(locked) {
            let entry = self.table.load(index, Ordering::Relaxed);
            self.table.store(index, entry.without_ready(), Ordering::Relaxed);
        }
    }

    /// Reopens the folio to optimistic readers if it is uptodate.
    pub(crate) fn restore_ready(&self, locked: &LockedFolio<'_>) {
        if locked.flags.get(Flag::Uptodate) {
            self.set_ready(locked);
        }
    }
}

/// Some pages of a locked folio, closed to optimistic readers while their bytes change. The drop
/// publishes the pages with the next version.
///
/// The holder may change the bytes of the pages. It must drop the section before it unlocks the
/// folio.
#[derive(Debug)]
pub(crate) struct WriteSection<'a> {
    mapping: &'a Mapping,
    pages: Range<u64>,
}

impl Mapping {
    /// Closes pages `pages` (file page indices) of an uptodate `folio` to optimistic readers.
    pub(crate) fn begin_write_section<'a>(
        &'a self,
        folio: &LockedFolio<'_>,
        pages: Range<u64>,
    ) -> WriteSection<'a> {
        let all = self.pages_of(folio);
        debug_assert!(all.start <= pages.start && pages.end <= all.end, "{pages:?} of {all:?}");
        for index in pages.clone() {
            let entry = self.table.load(index, Ordering::Relaxed);
            self.table.store(index, entry.without_ready(), Ordering::Relaxed);
        }
        // Release: pairs with the Acquire fence in `read_validated` (O3): a reader that sees a byte
        // written from here on sees READY cleared.
        fence(Ordering::Release);
        WriteSection { mapping: self, pages }
    }
}

impl Drop for WriteSection<'_> {
    fn drop(&mut self) {
        for index in self.pages.clone() {
            let entry = self.mapping.table.load(index, Ordering::Relaxed);
            if !entry.is_folio() {
                // A forked child, whose table is zeros.
                continue;
            }
            // A write counts as a use: mark the page.
            let next = entry.with_next_version().with_ready().with_referenced();
            // Release: pairs with the Acquire in `read_validated` (O1).
            self.mapping.table.store(index, next, Ordering::Release);
        }
    }
}

//! The three changers of a table, each with the folio locked: insertion and the declaration that a
//! folio is READY (I1-I3 of `page/mapping.rs`), eviction and removal (E1-E5), and the write section
//! (W1-W4).

use super::{
    Entry, Flag, Folio, FolioId, FolioRef, Folios, Frozen, LockedFolio, Mapping, PAGE_BYTES,
    WriteState,
};
use crate::sync::{Ordering, barrier_of_store_and_load, fence};
use std::ops::Range;

/// Somebody else's folio stands at the index already: use that one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InsertError;

impl Mapping {
    /// Puts `folio`, locked and not yet uptodate, at its index if `expected` still stands there.
    ///
    /// `table_reference` becomes the table's own reference. On failure that reference is put and
    /// the folio is nobody's; nothing else has changed.
    ///
    /// Race (why the loser has no owner once its lock is free):
    ///
    /// ```text
    ///   filler: loses, unlocks            |
    ///                                     |  evacuation of its chunk: gets a reference, locks
    ///                                     |  it, sees the owner, freezes the two references
    ///                                     |  there are, stores a shadow at the index
    ///   filler: puts a reference that     |
    ///     went into the freeze            |  [the winner's folio lost its place in the table]
    /// ```
    pub(crate) fn insert(
        &self,
        folios: &Folios,
        folio: &LockedFolio<'_>,
        table_reference: FolioRef<'_>,
        expected: Entry,
    ) -> Result<(), InsertError> {
        debug_assert!(!expected.is_folio());
        debug_assert_eq!(folio.order(), self.order, "insertion is of units (MAPPING-2)");
        let first = table_reference.id();
        let entry_of = |page: u64| {
            let frame = first.0 + page as u32;
            let version = folios.get(FolioId(frame)).version().wrapping_add(1);
            Entry::folio(frame, version, folio.order())
        };
        let head = folio.index();
        // AcqRel: the Release pairs with the Acquire in `get_folio`: a thread that finds the folio
        // sees it set up. The Acquire pairs with the Release in `unlink`: our Entries follow those
        // of a folio that came and went since the caller saw `expected`. On failure, Relaxed: the
        // caller looks up again.
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

    /// Whether a folio that the caller has just inserted, by the length as it was before, lies
    /// behind the end by now: then it must go again (MAPPING-4).
    ///
    /// Race (why the length is looked at again, and what the barriers are for):
    ///
    /// ```text
    ///   filler: page 7 is inside           |
    ///                                      |  cut: sets the length; barrier; walks, and finds
    ///                                      |    nothing at page 7
    ///   filler: inserts page 7; barrier;   |
    ///     is it inside? no                 |
    /// ```
    ///
    /// Covered by `loom_lookup_vs_cut_no_page_is_left_behind_the_end`.
    pub(crate) fn was_cut(&self, folio: &LockedFolio<'_>) -> bool {
        barrier_of_store_and_load();
        folio.index() * PAGE_BYTES >= self.len_bytes()
    }

    /// The length of a cut is set: a walk that begins after this finds all folios behind it but
    /// those of which [`Self::was_cut`] tells.
    pub(crate) fn begin_walk_behind_end(&self) {
        barrier_of_store_and_load();
    }

    /// The caller is about to write bytes of folios that are inserted and not uptodate. (To be
    /// called by whoever does: the inserter may have given them to another thread. What a backing
    /// writes has such a fence in `io/transfer.rs`, and what the kernel writes is ordered by the
    /// system calls that begin and end it.)
    pub(crate) fn begin_fill(&self) {
        // Release: pairs with the Acquire fence in `read_validated` (O3): an optimistic reader of
        // the frame's last life that sees a byte of the fill sees that its Entry is gone.
        fence(Ordering::Release);
    }

    /// The folio is filled: readers may use it (I3).
    pub(crate) fn mark_uptodate(&self, folio: &LockedFolio<'_>) {
        folio.flags.set(Flag::Uptodate);
        folio.flags.clear(Flag::Allocated);
        self.set_ready(folio);
    }

    /// The page of a folio is not there, and is to be filled anew: it is not uptodate until then.
    pub(crate) fn mark_absent(&self, folio: &LockedFolio<'_>) {
        self.clear_ready(folio);
        folio.flags.clear(Flag::Uptodate);
    }

    /// Stores READY into every Entry of the folio, at the version they have.
    pub(super) fn set_ready(&self, folio: &LockedFolio<'_>) {
        for index in self.pages_of(folio) {
            let entry = self.table.load(index, Ordering::Relaxed);
            // Release: pairs with the Acquire in `read_validated` (O1).
            self.table.store(index, entry.with_ready(), Ordering::Release);
        }
    }
}

/// Why a folio could not be evicted. It is in the table as before.
#[derive(Debug)]
pub(crate) enum EvictError<'a> {
    /// Somebody else holds references.
    Referenced(FolioRef<'a>),
    /// It must be written out first.
    Dirty(FolioRef<'a>),
}

impl Mapping {
    /// Evicts a folio: the caller's reference and the table's must be all there are.
    ///
    /// Leaves `leave(page)` in the Entry of each unit's first page, `page` counted from the folio's
    /// first. On success the folio belongs to the caller, frozen; it must be unlocked and freed.
    ///
    /// Race (why the freeze comes before the dirty test):
    ///
    /// ```text
    ///   reclaim: is it dirty? no           |
    ///                                      |  writer: looks it up, locks (waits) ... or holds a
    ///                                      |  pin: marks it dirty, puts its reference
    ///   reclaim: freeze(2) works           |
    ///   reclaim: frees the frame           |  [the pin's bytes are lost]
    /// ```
    ///
    /// With the freeze first, either the other's reference makes it fail, or its put happened
    /// before (Release / Acquire on the pin word) and the dirty test sees the mark.
    pub(crate) fn evict<'a>(
        &self,
        folio: FolioRef<'a>,
        locked: &LockedFolio<'_>,
        leave: impl Fn(u64) -> Entry,
    ) -> Result<Frozen<'a>, EvictError<'a>> {
        let frozen = match self.begin_eviction(folio, locked) {
            Ok(frozen) => frozen,
            Err(folio) => return Err(EvictError::Referenced(folio)),
        };
        if locked.flags.write_state() != WriteState::Clean {
            return Err(EvictError::Dirty(self.cancel_eviction(frozen, locked)));
        }
        self.end_eviction(&frozen, locked, leave);
        Ok(frozen)
    }

    /// E1, E2: until [`Self::end_eviction`] or [`Self::cancel_eviction`] the folio stands in the
    /// table, frozen: whoever looks it up waits. Whether it is dirty is the caller's to ask, now.
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

    /// The folio stays after all, with its bytes where they were.
    pub(crate) fn cancel_eviction<'a>(
        &self,
        frozen: Frozen<'a>,
        locked: &LockedFolio<'_>,
    ) -> FolioRef<'a> {
        let folio = frozen.unfreeze();
        self.restore_ready(locked);
        folio
    }

    /// E4: takes a frozen folio out of the table, and leaves what [`Self::evict`] would.
    pub(crate) fn end_eviction(
        &self,
        frozen: &Frozen<'_>,
        locked: &LockedFolio<'_>,
        leave: impl Fn(u64) -> Entry,
    ) {
        self.unlink(frozen.folios(), locked, leave);
    }

    /// Takes a folio out of the table whatever it holds, and leaves what [`Self::evict`] would.
    ///
    /// A thread that still holds a reference keeps the memory, not the place. Returns the table's
    /// reference.
    pub(crate) fn remove<'a>(
        &self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
        folios: &'a Folios,
        leave: impl Fn(u64) -> Entry,
    ) -> FolioRef<'a> {
        self.clear_ready(locked);
        self.unlink(folios, locked, leave);
        folios.adopt(folio.id())
    }

    /// Takes the value `seen` from the Entry of a unit's first page, and leaves a hole.
    ///
    /// `true`: it still stood there, and what it names belongs to the caller now, nobody else: not
    /// to whoever fills the unit (I1) or takes it at the same time.
    pub(crate) fn take_value(&self, index: u64, seen: Entry) -> bool {
        debug_assert!(seen.as_value().is_some() && self.head_index(index) == index);
        // Acquire: pairs with the Release in `unlink`: we see what the evictor did to what the
        // value names. A hole publishes nothing; an insertion over it still follows `unlink`,
        // because a read-modify-write continues the release sequence. On failure, Relaxed: the
        // value is somebody else's.
        let exchange = (Ordering::Acquire, Ordering::Relaxed);
        let word = self.table.word(index);
        word.compare_exchange(seen.0, Entry::HOLE.0, exchange.0, exchange.1).is_ok()
    }

    /// E4: the head Entry of each unit after the others, that of the folio last (MAPPING-2).
    fn unlink(&self, folios: &Folios, locked: &LockedFolio<'_>, leave: impl Fn(u64) -> Entry) {
        let pages = self.pages_of(locked);
        self.save_versions(folios, pages.clone());
        let frame = self.table.load(pages.start, Ordering::Relaxed).frame();
        Folio::clear_owner(locked);
        for index in pages.clone().rev() {
            let is_head = self.head_index(index) == index;
            let left = if is_head { leave(index - pages.start) } else { Entry::HOLE };
            // Release: pairs with the Acquire in `get_folio`: a thread that sees the folio gone
            // from a head sees it gone from the other pages of the unit.
            self.table.store(index, left, Ordering::Release);
        }
        // Release: pairs with the Acquire in `resident_folios`: a caller that sees the folio gone
        // sees that it was marked dirty before, if it was.
        let resident = self.resident.fetch_sub(1, Ordering::Release) - 1;
        let published = &self.hot.predicted_distance;
        self.prediction.note_removal(pages.start, frame, resident, published);
    }

    /// E1. No fence: the frame's next filler issues it (`insert`).
    fn clear_ready(&self, locked: &LockedFolio<'_>) {
        for index in self.pages_of(locked) {
            let entry = self.table.load(index, Ordering::Relaxed);
            self.table.store(index, entry.without_ready(), Ordering::Relaxed);
        }
    }

    /// Lets readers in again, if the folio is one for them.
    pub(crate) fn restore_ready(&self, locked: &LockedFolio<'_>) {
        if locked.flags.get(Flag::Uptodate) {
            self.set_ready(locked);
        }
    }
}

/// Some pages of a locked folio, closed to optimistic readers while their bytes change: dropping it
/// publishes them, one version on.
///
/// The holder may change the pages' bytes. It must be dropped before the folio's lock.
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
        // Release: pairs with the Acquire fence in `read_validated` (O3): a reader that sees one
        // of the bytes written from here on sees that READY is gone.
        fence(Ordering::Release);
        WriteSection { mapping: self, pages }
    }
}

impl Drop for WriteSection<'_> {
    fn drop(&mut self) {
        for index in self.pages.clone() {
            let entry = self.mapping.table.load(index, Ordering::Relaxed);
            if !entry.is_folio() {
                // In a forked child, where the table is zeros.
                continue;
            }
            // A write is a use: the page is marked as one.
            let next = entry.with_next_version().with_ready().with_referenced();
            // Release: pairs with the Acquire in `read_validated` (O1).
            self.mapping.table.store(index, next, Ordering::Release);
        }
    }
}

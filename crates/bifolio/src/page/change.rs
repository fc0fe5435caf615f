//! Changes of a locked folio that readers run against: write sections, in which its bytes change
//! (READ-W1..W4), and its eviction or removal from the table (READ-E1..E5).

use super::{Entry, Flag, Folio, FolioRef, Folios, Frozen, LockedFolio, Mapping, WriteState};
use crate::sync::{Ordering, fence};
use std::ops::Range;

/// Reason why a folio could not be evicted. It is in the table as before.
#[derive(Debug)]
pub(crate) enum EvictError<'a> {
    Referenced(FolioRef<'a>),
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
    /// With the freeze first, the other reference makes it fail, or its put happened before and the
    /// dirty test sees the mark.
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

    /// READ-E1, READ-E2: freezes the folio. Until [`Self::end_eviction`] or
    /// [`Self::cancel_eviction`] it remains in the table, and a lookup of it waits. The caller must
    /// test now whether it is dirty.
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

    pub(crate) fn cancel_eviction<'a>(
        &self,
        frozen: Frozen<'a>,
        locked: &LockedFolio<'_>,
    ) -> FolioRef<'a> {
        let folio = frozen.unfreeze();
        self.restore_ready(locked);
        folio
    }

    /// READ-E4: removes a frozen folio from the table and stores what [`Self::evict`] would.
    pub(crate) fn end_eviction(
        &self,
        frozen: &Frozen<'_>,
        locked: &LockedFolio<'_>,
        entry_after: impl Fn(u64) -> Entry,
    ) {
        self.unlink(frozen.folios(), locked, entry_after);
    }

    /// Removes a folio from the table even if it is dirty or referenced, and stores what
    /// [`Self::evict`] would. Returns the table's reference.
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
    /// names: a thread that fills the unit (READ-I1) or takes the value at the same time does not.
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

    /// READ-E4: stores the head Entry of each unit after the others, that of the folio last
    /// (MAPPING-2).
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
        let published = &self.hot().predicted_distance;
        self.prediction.note_removal(pages.start, frame, resident, published);
    }

    /// READ-E1. No fence: the next filler of the frame issues it (`insert`).
    pub(super) fn clear_ready(&self, locked: &LockedFolio<'_>) {
        for index in self.pages_of(locked) {
            let entry = self.table.load(index, Ordering::Relaxed);
            self.table.store(index, entry.without_ready(), Ordering::Relaxed);
        }
    }

    pub(crate) fn restore_ready(&self, locked: &LockedFolio<'_>) {
        if locked.flags.get(Flag::Uptodate) {
            self.set_ready(locked);
        }
    }
}

/// Some pages of a locked folio, closed to optimistic readers while the holder changes their bytes.
/// The drop, before the folio is unlocked, publishes the pages with the next version.
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
        // Release: pairs with the Acquire fence in `read_validated` (READ-O3): a reader that sees a
        // byte written from here on sees READY cleared.
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
            // Release: pairs with the Acquire in `read_validated` (READ-O1).
            self.mapping.table.store(index, next, Ordering::Release);
        }
    }
}

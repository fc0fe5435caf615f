//! Taking a folio out of the table: eviction of a clean one (E1-E5 of `page/mapping.rs`), and
//! removal of one whose bytes are no longer wanted (truncation).
//!
//! Race (why the freeze comes before the dirty test):
//!
//! ```text
//!   reclaim: is it dirty? no           |
//!                                      |  writer: looks it up, locks (waits) ... or holds a pin
//!                                      |  pin: marks it dirty, puts its reference
//!   reclaim: freeze(2) works           |
//!   reclaim: frees the frame           |  [the pin's bytes are lost]
//! ```
//!
//! With the freeze first, either the other's reference makes it fail, or its put happened before
//! (Release / Acquire on the pin word) and the dirty test sees the mark.

use super::{Entry, Mapping};
use crate::page::{Flag, Folio, FolioRef, Frozen, LockedFolio, WriteState};
use crate::sync::Ordering;

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
    /// Who still holds a reference keeps the memory, not the place. Returns the table's reference.
    pub(crate) fn remove<'a>(
        &self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
        folios: &'a crate::page::Folios,
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
    fn unlink(
        &self,
        folios: &crate::page::Folios,
        locked: &LockedFolio<'_>,
        leave: impl Fn(u64) -> Entry,
    ) {
        let pages = self.pages_of(locked);
        self.save_versions(folios, pages.clone());
        let frame = self.table.load(pages.start, Ordering::Relaxed).frame();
        Folio::clear_owner(locked);
        for index in pages.clone().rev() {
            let is_head = self.head_index(index) == index;
            let left = if is_head { leave(index - pages.start) } else { Entry::HOLE };
            // Release: pairs with the Acquire in `get_folio`: who sees the folio gone from a head
            // sees it gone from the other pages of the unit.
            self.table.store(index, left, Ordering::Release);
        }
        // Relaxed: the count is looked at by whoever emptied the table itself, under locks.
        let resident = self.resident.fetch_sub(1, Ordering::Relaxed) - 1;
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

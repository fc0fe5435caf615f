//! Taking a folio out of the table: eviction of a clean one (E1-E5 of `mapping/mod.rs`), and
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
use crate::folio::{Flag, Folio, FolioRef, Frozen, LockedFolio};
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
    /// Leaves `shadow` in the head Entry. On success the folio belongs to the caller, frozen; it
    /// must be unlocked and freed.
    pub(crate) fn evict<'a>(
        &self,
        folio: FolioRef<'a>,
        locked: &LockedFolio<'_>,
        shadow: Entry,
    ) -> Result<Frozen<'a>, EvictError<'a>> {
        let frozen = self.freeze(folio, locked).map_err(EvictError::Referenced)?;
        if locked.flags.get(Flag::Dirty) || locked.flags.get(Flag::Writeback) {
            return Err(EvictError::Dirty(self.unfreeze(frozen, locked)));
        }
        self.unlink(frozen.folios(), locked, shadow);
        Ok(frozen)
    }

    /// E1 and E2: on success the folio is frozen and no Entry of it READY; on failure nothing has
    /// changed.
    pub(super) fn freeze<'a>(
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

    /// Takes [`Self::freeze`] back.
    pub(super) fn unfreeze<'a>(
        &self,
        frozen: Frozen<'a>,
        locked: &LockedFolio<'_>,
    ) -> FolioRef<'a> {
        let folio = frozen.unfreeze();
        self.restore_ready(locked);
        folio
    }

    /// Takes a folio out of the table whatever it holds: its bytes are no longer wanted.
    ///
    /// Who still holds a reference keeps the memory, not the place. Returns the table's reference.
    pub(crate) fn remove<'a>(
        &self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
        folios: &'a crate::folio::Folios,
    ) -> FolioRef<'a> {
        self.clear_ready(locked);
        self.unlink(folios, locked, Entry::HOLE);
        folios.adopt(folio.id())
    }

    /// E4: the head Entry last (MAPPING-2).
    fn unlink(&self, folios: &crate::folio::Folios, locked: &LockedFolio<'_>, head: Entry) {
        let pages = self.pages_of(locked);
        self.save_versions(folios, pages.clone());
        for index in pages.start + 1..pages.end {
            self.table.store(index, Entry::HOLE, Ordering::Relaxed);
        }
        Folio::clear_owner(locked);
        let frame = self.table.load(pages.start, Ordering::Relaxed).frame();
        // Release: pairs with the Acquire in `get_folio`: who sees the folio gone from its head
        // sees it gone from its other pages.
        self.table.store(pages.start, head, Ordering::Release);
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

    fn restore_ready(&self, locked: &LockedFolio<'_>) {
        if locked.flags.get(Flag::Uptodate) {
            self.set_ready(locked);
        }
    }
}

//! Moving a clean folio to other frames: the same place in the table, the same bytes.
//!
//! Called by `reclaim`. An eviction and an insertion in one, without the hole between the two:
//!
//! ```text
//!  MOVE, both folios locked; the new one is nobody else's
//!  M1 store Entries without READY             as E1
//!  M2 freeze(expected); else M1 back          as E2: nobody else has a reference, or gets one
//!  M3 dirty? then unfreeze, M1 back           as E3
//!  M4 fence (Release); copy the bytes         as I3: late readers of the new frames' last life
//!  M5 store Entries: holes but for the head,  as E4
//!     then the head: new folio, READY         who finds it finds its bytes
//!     then the others: new folio, READY
//!  M6 unlock both, free the old frames        as E5
//! ```
//!
//! Whoever looks the folio up meanwhile finds it frozen and waits, for the copy of one small folio
//! at the most, then finds the new one. An optimistic reader that began before sees another Entry
//! at O4. One that began with M5 sees the bytes, which do not change while the old folio is frozen.

use super::evict::EvictError;
use super::{Entry, Mapping};
use crate::folio::{Flag, Folio, FolioId, FolioRef, Frozen, LockedFolio};
use crate::sync::{Ordering, fence};

/// The folio that is to take another's place: set up like that, locked, and in no table.
#[derive(Debug)]
pub(crate) struct Successor<'s, 'a> {
    /// Its lock.
    pub(crate) locked: &'s LockedFolio<'a>,
    /// What becomes the table's reference.
    pub(crate) for_table: FolioRef<'a>,
}

impl Mapping {
    /// Lets `successor` take the place of `folio`, which is uptodate and locked: the caller's
    /// reference and the table's must be all there are. `copy` copies the bytes.
    ///
    /// On success the old folio belongs to the caller, frozen; it must be unlocked and freed. The
    /// new one is in the table, uptodate. On failure nothing has changed.
    pub(crate) fn relocate<'a>(
        &self,
        folio: FolioRef<'a>,
        locked: &LockedFolio<'_>,
        successor: Successor<'_, '_>,
        copy: impl FnOnce(),
    ) -> Result<Frozen<'a>, EvictError<'a>> {
        let frozen = self.freeze_clean(folio, locked)?;
        let folios = frozen.folios();
        let pages = self.pages_of(locked);
        self.save_versions(folios, pages.clone());
        // Release: pairs with the Acquire fence in `read_validated` (O3), as that of `insert`.
        fence(Ordering::Release);
        copy();
        successor.locked.flags.set(Flag::Uptodate);
        for index in pages.start + 1..pages.end {
            self.table.store(index, Entry::HOLE, Ordering::Relaxed);
        }
        Folio::clear_owner(locked);
        let first = successor.for_table.into_id();
        for index in pages.clone() {
            let frame = first.0 + (index - pages.start) as u32;
            let version = folios.get(FolioId(frame)).version().wrapping_add(1);
            let entry = Entry::folio(frame, version, locked.order()).with_ready();
            // Release: pairs with the Acquire in `read_validated` (O1), in `get_folio` and in
            // `try_get_named`: who finds the new folio sees its bytes, and it set up.
            self.table.store(index, entry, Ordering::Release);
        }
        let resident = self.resident_folios();
        let published = &self.hot.predicted_distance;
        self.prediction.note_removal(pages.start, frozen.id().0, resident, published);
        self.prediction.note_insert(pages.start, first.0, resident, published);
        Ok(frozen)
    }
}

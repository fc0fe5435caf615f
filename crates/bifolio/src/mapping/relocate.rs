//! Moving a folio to other frames: the same place in the table, the same bytes.
//!
//! Called by `reclaim`. An eviction and an insertion in one, without the hole between the two:
//!
//! ```text
//!  MOVE, both folios locked; the new one is nobody else's
//!  M1 store Entries without READY             as E1
//!  M2 freeze(expected); else M1 back          as E2: nobody else has a reference, or gets one
//!  M3 fence (Release); copy the bytes         as I3: late readers of the new frames' last life
//!  M4 store Entries: holes but for the head,  as E4
//!     then the head: new folio, READY         who finds it finds its bytes
//!     then the others: new folio, READY
//!  M5 unlock both, free the old frames        as E5
//! ```
//!
//! Whoever looks the folio up meanwhile finds it frozen and waits, for the copy of one small folio
//! at the most, then finds the new one. An optimistic reader that began before sees another Entry
//! at O4; what it read is right or refused. Whether the folio is dirty makes no difference: its
//! bytes do not change while it is frozen, and the caller makes the new one dirty in its place. The
//! readers' mark is kept; one that is set during the move may be lost.

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
    ) -> Result<Frozen<'a>, FolioRef<'a>> {
        let pages = self.pages_of(locked);
        let mut entries = pages.clone().map(|index| self.table.load(index, Ordering::Relaxed));
        let referenced = entries.any(Entry::is_referenced);
        let frozen = self.freeze(folio, locked)?;
        let folios = frozen.folios();
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
            let mut entry = Entry::folio(frame, version, locked.order()).with_ready();
            if referenced && index == pages.start {
                // The mark of one page is that of the folio.
                entry = entry.with_referenced();
            }
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

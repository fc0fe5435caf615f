//! Putting a new folio into the table, and declaring it READY (I1-I3 of `page/mapping.rs`).

use super::{Entry, Mapping, PAGE_BYTES};
use crate::page::{Flag, Folio, FolioId, FolioRef, Folios, LockedFolio};
use crate::sync::{Ordering, barrier_of_store_and_load, fence};

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
        // AcqRel: the Release pairs with the Acquire in `get_folio`: who finds the folio sees it
        // set up. The Acquire pairs with the Release in `unlink`: our Entries follow those of a
        // folio that came and went since the caller saw `expected`. On failure, Relaxed: the
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
    /// called by whoever does: the inserter may have given them to another thread. What the kernel
    /// writes is ordered by the system calls that begin and end it.)
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

    /// Stores READY into every Entry of the folio, at the version they have.
    pub(super) fn set_ready(&self, folio: &LockedFolio<'_>) {
        for index in self.pages_of(folio) {
            let entry = self.table.load(index, Ordering::Relaxed);
            // Release: pairs with the Acquire in `read_validated` (O1).
            self.table.store(index, entry.with_ready(), Ordering::Release);
        }
    }
}

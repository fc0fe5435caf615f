//! Relocation: a folio moves to other frames. Dirty state, slots and lists are up to the caller
//! (see [`Mapping::relocate`]).
//!
//! PROTOCOL RELOCATE. The caller holds the locks of the old folio and of the new one from before C1
//! to C6. The table and the caller must have the only references to the old one, or C4 fails.
//!
//! ```text
//!  RELOCATE (here)                             OPTIMISTIC READ of a page of the folio
//!  C1 fence (Release)                          O1 the Entry names the old frame or the new one
//!  C2 copy the bytes to the new frames         O2 copy its bytes: the same ones until C6
//!  C3 save the versions of the old frames      O3, O4 unchanged
//!  C4 freeze the old folio (2), or give up
//!  C5 new folio: owner, UPTODATE; store        LOOK UP (also: pins)
//!     the Entries READY, the head first        L1, L2 the old folio, before C4: C4 fails
//!  C6 unlock the old one, then the new            the old folio, after C4: frozen; wait, L1
//!     one; free the old one                       the new folio, after C5: got it
//!
//!                                              WRITE, PUNCH, TRUNCATE, EVICT: look up, lock
//!                                              X1 wait for the lock of the old folio, with a
//!                                                 reference: C4 fails, then they get it unchanged
//!                                              X2 wait for the lock of the new one: they run
//!                                                 after C6, and change that
//! ```
//!
//! READY stays set: throughout, both frames of a page hold its bytes, and the Entry says which one
//! is current, so the page is always readable. Clearing READY (as READ-E1 does) would send readers
//! to the folio lock, where each waits with a reference, and C4 would fail as long as readers
//! arrive.
//!
//! Why each step is needed, and in this order (what happens otherwise):
//! - The lock of the old folio until C4: a writer changes an old frame after C2 copied it, and the
//!   write is lost. (With the lock the write state and the bytes are stable, and C4 needs no test
//!   after it.)
//! - C1 before C2: an optimistic reader of the previous use of a new frame sees a copied byte but
//!   finds its own Entry unchanged. The fence pairs with READ-O3, like that of `insert`.
//! - C3: the old frame is inserted at the same page again with the version it had: see `mod.rs`.
//! - C4: the frame of a pinned folio is freed under the pin.
//! - C2 before C4: every lookup spins for the duration of a copy. Once the folio is frozen, only
//!   words are stored; everything else is prepared before.
//! - C5 with an incremented version of the new frame: a reader that sleeps over an eviction of the
//!   new folio and the next relocation into the same frames copies half of each.
//! - C5 before C6: a punch of the new folio stores holes, and the relocation overwrites them with
//!   the folio. The frames of the old folio are reused while Entries name them.
//!
//! During C5, Entries of a unit's other pages may still name the old folio after the head names the
//! new one (MAPPING-2): a lookup through such an Entry finds the old folio frozen and restarts at
//! the head; an optimistic read copies bytes that are still valid.

use super::{Entry, Flag, Folio, FolioId, FolioRef, Folios, Frozen, LockedFolio, Mapping};
use crate::sync::{Ordering, fence};

/// References to an unused folio: the table's and the caller's.
const REFERENCES_UNUSED: u64 = 2;

/// The old folio of a relocation: its lock and a reference. The lock is dropped first.
#[derive(Debug)]
pub(crate) struct OldFolio<'a> {
    pub(crate) lock: LockedFolio<'a>,
    pub(crate) folio: FolioRef<'a>,
}

impl Mapping {
    /// Replaces `old` by `new`, a folio of the same pages in other frames.
    ///
    /// The caller has locked the old folio and checked under the lock that it belongs to this file,
    /// is uptodate and has no write-out in flight. `new` was just started, is locked and has no
    /// owner; no other thread knows it. `copy` copies the bytes to its frames; it is not called if
    /// the old folio is found to be in use. `table_reference`, to `new`, becomes the table's own.
    ///
    /// On success the caller owns the old folio, frozen and unlocked. Before it unlocks `new`, it
    /// must mark `new` dirty if the old folio was, or an eviction loses the bytes. Before it frees
    /// the old folio (soon: a thread that finds it on a dirty list spins for it), it must remove it
    /// from the dirty list and release what else it owns, in particular its slots. `new` may be
    /// added to the LRU at any time; freeing removes the old folio from it.
    ///
    /// # Errors
    /// Fails if another reference to the old folio exists: a pin, a read, an LRU batch, a waiter
    /// for its lock. Nothing has changed then: its lock and reference are returned, the table's
    /// reference to `new` is put, and `new` still has no owner.
    pub(crate) fn relocate<'a>(
        &self,
        folios: &'a Folios,
        old: OldFolio<'a>,
        new: &LockedFolio<'_>,
        table_reference: FolioRef<'_>,
        copy: impl FnOnce(),
    ) -> Result<Frozen<'a>, OldFolio<'a>> {
        debug_assert!(old.lock.owner() != 0 && old.lock.flags.get(Flag::Uptodate), "{old:?}");
        debug_assert_eq!((old.lock.index(), old.lock.order()), (new.index(), new.order()));
        // A hint that saves the copy: the freeze decides.
        if old.folio.folio().references() > REFERENCES_UNUSED {
            return Err(old);
        }
        // Release: pairs with the Acquire fence in `read_validated` (READ-O3): an optimistic reader
        // of the previous use of a new frame that sees a byte of the copy sees its Entry changed.
        fence(Ordering::Release);
        copy();
        self.save_versions(folios, self.pages_of(new));
        let first = table_reference.id();
        let entry_of = |frame| {
            let version = folios.get(FolioId(frame)).version().wrapping_add(1);
            Entry::folio(frame, version, new.order()).with_ready()
        };
        let entries: Vec<_> = (first.0..first.0 + new.pages() as u32).map(entry_of).collect();
        let OldFolio { lock, folio } = old;
        let frozen = match folio.try_freeze(REFERENCES_UNUSED - 1) {
            Ok(frozen) => frozen,
            Err(folio) => return Err(OldFolio { lock, folio }),
        };
        Folio::set_owner(new, lock.owner());
        Folio::clear_owner(&lock);
        new.flags.set(Flag::Uptodate);
        for (index, entry) in (new.index()..).zip(entries) {
            let is_used = self.table.load(index, Ordering::Relaxed).is_referenced();
            let entry = if is_used { entry.with_referenced() } else { entry };
            // Release: pairs with the Acquire in `read_validated` (READ-O1), in `get_folio`
            // (READ-L1) and in `note_use`: a reader sees the bytes, and the descriptor set up.
            self.table.store(index, entry, Ordering::Release);
        }
        let _kept_by_the_table = table_reference.into_id();
        // Relaxed: a hint for the prediction.
        let resident = self.resident.load(Ordering::Relaxed);
        let published = &self.hot().predicted_distance;
        self.prediction.note_removal(new.index(), frozen.id().0, resident, published);
        self.prediction.note_insert(new.index(), first.0, resident, published);
        drop(lock);
        Ok(frozen)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::{Lookup, MemorySource, Reaper, Values};
    use super::*;

    const OWNER: u64 = 64;

    #[derive(Debug)]
    struct NoReaper;

    impl Reaper for NoReaper {
        fn reap(&self, _: Frozen<'_>) {}
    }

    /// Returns a file of 64 pages in units of `1 << order` pages whose first unit is in frame 0,
    /// and descriptors for as many frames.
    fn mapping_with_unit(order: u8) -> (Mapping, Folios) {
        let folios = Folios::new(64, Box::new(NoReaper)).unwrap();
        folios.init_free(FolioId(0), 64);
        let mapping =
            Mapping::new(&MemorySource::Private, order, 64 << 12, 64 << 12, Values::Kept).unwrap();
        let folio = folios.start(FolioId(0), OWNER, 0, order);
        let locked = folio.lock();
        let for_table = folio.try_clone().unwrap();
        mapping.insert(&folios, &locked, for_table, Entry::HOLE).unwrap();
        mapping.mark_uptodate(&locked);
        drop(locked);
        drop(folio);
        (mapping, folios)
    }

    fn lock_first<'a>(mapping: &Mapping, folios: &'a Folios) -> OldFolio<'a> {
        let Lookup::Folio(folio) = mapping.get_folio(folios, 0) else { panic!("no folio") };
        OldFolio { lock: folio.lock(), folio }
    }

    /// Moves the first unit to `frame`, while `meanwhile` runs after the copy. Returns `true` on
    /// success.
    fn relocate(mapping: &Mapping, folios: &Folios, frame: u32, meanwhile: impl FnOnce()) -> bool {
        let old = lock_first(mapping, folios);
        let new = folios.start(FolioId(frame), 0, 0, mapping.order());
        let locked = new.lock();
        let for_table = new.try_clone().unwrap();
        match mapping.relocate(folios, old, &locked, for_table, meanwhile) {
            Ok(frozen) => {
                assert_eq!(frozen.folio().owner(), 0);
                frozen.free();
                true
            }
            Err(_) => {
                assert_eq!((new.folio().owner(), new.folio().references()), (0, 1));
                false
            }
        }
    }

    #[test]
    fn a_moved_folio_keeps_its_pages_and_their_marks() {
        for order in 0..=2 {
            let (mapping, folios) = mapping_with_unit(order);
            let last = (1 << order) - 1;
            let seen = mapping.table().load(last, Ordering::Relaxed);
            mapping.table().mark_referenced(last, seen);
            assert!(relocate(&mapping, &folios, 16, || ()));
            for index in 0..=last {
                let entry = mapping.table().load(index, Ordering::Relaxed);
                assert!(entry.is_ready());
                assert_eq!((entry.folio_id(), entry.order()), (FolioId(16), order));
                assert_eq!(entry.is_referenced(), index == last);
            }
            assert_eq!(mapping.resident_folios(), 1);
            let new = folios.get(FolioId(16));
            assert!(new.owner() == OWNER && new.flags.get(Flag::Uptodate));
        }
    }

    #[test]
    fn a_used_folio_is_not_moved_and_not_even_copied() {
        let (mapping, folios) = mapping_with_unit(0);
        let before = mapping.table().load(0, Ordering::Relaxed);
        let pin = folios.try_get(FolioId(0)).unwrap();
        assert!(!relocate(&mapping, &folios, 1, || unreachable!("a copy")));
        let after = mapping.table().load(0, Ordering::Relaxed);
        assert_eq!((pin.folio().references(), after), (2, before));
        drop(pin);
        assert!(relocate(&mapping, &folios, 2, || ()));
    }

    #[test]
    fn a_reference_taken_during_the_copy_fails_the_freeze() {
        let (mapping, folios) = mapping_with_unit(2);
        let before = mapping.table().load(0, Ordering::Relaxed);
        let mut pin = None;
        assert!(!relocate(&mapping, &folios, 4, || pin = folios.try_get(FolioId(0)).ok()));
        assert_eq!(folios.get(FolioId(0)).references(), 2);
        assert_eq!(mapping.table().load(0, Ordering::Relaxed), before);
        drop(pin);
        assert!(relocate(&mapping, &folios, 8, || ()), "a second attempt");
    }
}

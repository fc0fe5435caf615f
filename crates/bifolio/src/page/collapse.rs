//! Collapse: replaces a naturally aligned run of folios, of one or more units each, by one
//! (C1..C6).
//!
//! Called for memory files. Dirty state, slots and lists are up to the caller.
//!
//! PROTOCOL COLLAPSE. The collapse holds the locks of the old folios and of the new one from before
//! C1 to C6. The table and the collapse must hold the only references to each old one, or C4 fails.
//!
//! ```text
//!  COLLAPSE (here)                             OPTIMISTIC READ of a page of the run
//!  C1 fence (Release)                          O1 the Entry names the old frame or the new one
//!  C2 copy the bytes to the new frames         O2 copy its bytes: the same ones until C6
//!  C3 save the versions of the old frames      O3, O4 unchanged
//!  C4 freeze every old folio (2); if one
//!     cannot be: unfreeze them all, give up    LOOK UP (also: pins)
//!  C5 new folio: owner, UPTODATE; store        L1, L2 the old folio, before C4: C4 fails
//!     the Entries READY, the head of each         the old folio, after C4: frozen; wait, L1
//!     unit first                                  the new folio, after C5: got it
//!  C6 unlock the old ones, then the new
//!     one; free the old ones                   WRITE, PUNCH, TRUNCATE, EVICT: look up, lock
//!                                              X1 wait for the lock of an old folio, with a
//!                                                 reference: C4 fails, then they get it unchanged
//!                                              X2 wait for the lock of the new one: they run
//!                                                 after C6, and change that
//! ```
//!
//! READY stays set: both frames of a page hold its bytes, and the Entry says which one is current.
//! Clearing READY (as READ-E1 does) would send readers to the folio lock, where each waits with a
//! reference, and C4 would fail as long as readers arrive.
//!
//! What happens without a step, or in another order:
//! - The locks of the old folios until C4: a writer changes an old frame after C2 copied it, and
//!   the write is lost.
//! - C1 before C2: an optimistic reader of the previous use of a new frame sees a copied byte but
//!   finds its own Entry unchanged. The fence pairs with READ-O3, like that of `insert`.
//! - C3: the old frame is inserted at the same page again with the version it had (rule 6).
//! - C4: the frame of a pinned folio is freed, or is no longer part of the file.
//! - C2 before C4: every lookup spins for the duration of a copy of 2 MiB.
//! - C4 of all before C5 of any: once an old folio was replaced, the collapse cannot be aborted.
//! - C5 with an incremented version of the new frame: a reader that sleeps over an eviction of the
//!   new folio and the next collapse into the same frames copies half of each.
//! - C5 before C6: a punch of the new folio stores holes, and the collapse overwrites them with the
//!   folio. The frames of the old folios are reused while Entries name them.
//!
//! During C5, Entries of a unit's other pages may still name the old folio after the head names the
//! new one (MAPPING-2): a lookup through such an Entry finds the old folio frozen and restarts at
//! the head; an optimistic read copies bytes that are still valid.

use super::{Entry, Flag, Folio, FolioId, FolioRef, Folios, Frozen, LockedFolio, Mapping};
use crate::sync::{Ordering, fence};

/// References to an unused folio: the table's and the collapse's.
const REFERENCES_UNUSED: u64 = 2;

/// One of the old folios of a collapse: its lock and a reference. The lock is dropped first.
#[derive(Debug)]
pub(crate) struct OldFolio<'a> {
    pub(crate) lock: LockedFolio<'a>,
    pub(crate) folio: FolioRef<'a>,
}

impl Mapping {
    /// Replaces `old`, all folios of a naturally aligned run of pages in order, by `new`.
    ///
    /// The caller has locked the old folios (in order of index; with other locks held, only by
    /// trying) and checked under the locks that they belong to this file, are uptodate and have no
    /// write-out in flight. `new`, locked, without an owner and known to no other thread, was just
    /// started for the run. `copy` copies the bytes of all old frames to those of `new`; it is not
    /// called if one of the folios is found to be in use. `table_reference`, to `new`, becomes the
    /// table's own.
    ///
    /// On success the caller owns the old folios, frozen and unlocked. Before it unlocks `new`, it
    /// must mark `new` dirty if an old folio was. Before it frees the old folios (soon: a thread
    /// that finds one on a dirty list spins for it), it must take them off the dirty lists and
    /// release their slots.
    ///
    /// # Errors
    /// Another reference to an old folio exists: a pin, a read, an LRU batch, a waiter for its
    /// lock. Nothing has changed: all locks and references are returned in order, and `new`, whose
    /// reference of the table is put, can be used for another attempt.
    pub(crate) fn collapse<'a>(
        &self,
        folios: &'a Folios,
        old: Vec<OldFolio<'a>>,
        new: &LockedFolio<'_>,
        table_reference: FolioRef<'_>,
        copy: impl FnOnce(),
    ) -> Result<Vec<Frozen<'a>>, Vec<OldFolio<'a>>> {
        debug_assert!(self.is_run(&old, new), "{old:?} for {new:?}");
        // A hint that saves the copy: the freeze decides.
        let is_used =
            |old_folio: &OldFolio<'_>| old_folio.folio.folio().references() > REFERENCES_UNUSED;
        if old.iter().any(is_used) {
            return Err(old);
        }
        let owner = old[0].lock.owner();
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
        let (frozen, locks) = freeze_all(old)?;
        locks.iter().for_each(Folio::clear_owner);
        Folio::set_owner(new, owner);
        new.flags.set(Flag::Uptodate);
        self.store_marked(new.index(), &entries);
        let _kept_by_the_table = table_reference.into_id();
        let gone = frozen.len() as u64 - 1;
        // Relaxed: one folio remains, so `resident_folios` does not reach 0 by this.
        let resident = self.resident.fetch_sub(gone, Ordering::Relaxed) - gone;
        let published = &self.hot.predicted_distance;
        for old in &frozen {
            let index = old.folio().index();
            self.prediction.note_removal(index, old.id().0, resident, published);
        }
        self.prediction.note_insert(new.index(), first.0, resident, published);
        drop(locks);
        Ok(frozen)
    }

    fn is_run(&self, old: &[OldFolio<'_>], new: &Folio) -> bool {
        let mut at = new.index();
        let is_next = |old_folio: &OldFolio<'_>| {
            let flags = &old_folio.lock.flags;
            let found = old_folio.lock.index() == at && old_folio.lock.owner() != 0;
            at += old_folio.lock.pages();
            found && flags.get(Flag::Uptodate) && !flags.write_state().is_writing()
        };
        let follow = old.iter().all(is_next);
        let is_aligned = new.index().is_multiple_of(new.pages()) && new.order() >= self.order;
        follow && at == new.index() + new.pages() && is_aligned && new.owner() == 0
    }

    /// C5: stores the Entries from page `first` on; REFERENCED marks are kept.
    fn store_marked(&self, first: u64, entries: &[Entry]) {
        for (index, entry) in (first..).zip(entries) {
            let used = self.table.load(index, Ordering::Relaxed).is_referenced();
            let entry = if used { entry.with_referenced() } else { *entry };
            // Release: pairs with the Acquire in `read_validated` (READ-O1) and in `get_folio`
            // (READ-L1): a reader sees the bytes, and the descriptor set up.
            self.table.store(index, entry, Ordering::Release);
        }
    }
}

/// C4: freezes every folio, or returns all of them unchanged.
fn freeze_all<'a>(
    old: Vec<OldFolio<'a>>,
) -> Result<(Vec<Frozen<'a>>, Vec<LockedFolio<'a>>), Vec<OldFolio<'a>>> {
    let mut frozen = Vec::with_capacity(old.len());
    let mut locks = Vec::with_capacity(old.len());
    let mut remaining = old.into_iter();
    while let Some(OldFolio { lock, folio }) = remaining.next() {
        locks.push(lock);
        match folio.try_freeze(REFERENCES_UNUSED - 1) {
            Ok(folio) => frozen.push(folio),
            Err(used) => {
                let folios = frozen.into_iter().map(Frozen::unfreeze).chain([used]);
                let old_folios =
                    locks.into_iter().zip(folios).map(|(lock, folio)| OldFolio { lock, folio });
                return Err(old_folios.chain(remaining).collect());
            }
        }
    }
    Ok((frozen, locks))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::{Lookup, Reaper};
    use super::*;

    const OWNER: u64 = 64;

    #[derive(Debug)]
    struct NoReaper;

    impl Reaper for NoReaper {
        fn reap(&self, _: Frozen<'_>) {}
    }

    /// Returns a file of 64 pages in units of `1 << order` pages, and descriptors for as many
    /// frames.
    fn new_mapping(order: u8) -> (Mapping, Folios) {
        let folios = Folios::new(64, Box::new(NoReaper)).unwrap();
        folios.init_free(FolioId(0), 64);
        (Mapping::new(order, 64 << 12, 64 << 12, crate::page::Values::Kept).unwrap(), folios)
    }

    fn fill(mapping: &Mapping, folios: &Folios, frame: u32, index: u64) {
        let folio = folios.start(FolioId(frame), OWNER, index, mapping.order());
        let locked = folio.lock();
        let for_table = folio.try_clone().unwrap();
        mapping.insert(folios, &locked, for_table, Entry::HOLE).unwrap();
        mapping.mark_uptodate(&locked);
    }

    fn lock<'a>(mapping: &Mapping, folios: &'a Folios, heads: &[u64]) -> Vec<OldFolio<'a>> {
        let lock_one = |index: &u64| {
            let Lookup::Folio(folio) = mapping.get_folio(folios, *index) else {
                panic!("no folio at {index}");
            };
            OldFolio { lock: folio.lock(), folio }
        };
        heads.iter().map(lock_one).collect()
    }

    /// Collapses the folios at `heads` into one whose frames start at `frame`. The error is `true`
    /// if a copy was made.
    fn collapse(
        mapping: &Mapping,
        folios: &Folios,
        heads: &[u64],
        frame: u32,
        order: u8,
    ) -> Result<Vec<FolioId>, bool> {
        let old_folios = lock(mapping, folios, heads);
        let new = folios.start(FolioId(frame), 0, heads[0], order);
        let locked = new.lock();
        let mut copied = false;
        let for_table = new.try_clone().unwrap();
        let old = mapping.collapse(folios, old_folios, &locked, for_table, || copied = true);
        drop(locked);
        match old {
            Ok(old) => {
                let ids = old.iter().map(Frozen::id).collect();
                assert!(copied && old.iter().all(|frozen| frozen.folio().owner() == 0));
                old.into_iter().for_each(Frozen::free);
                Ok(ids)
            }
            Err(old_folios) => {
                let found = old_folios.iter().map(|old_folio| old_folio.lock.index());
                assert_eq!(found.collect::<Vec<_>>(), heads, "in order");
                assert_eq!((new.folio().owner(), new.folio().references()), (0, 1));
                Err(copied)
            }
        }
    }

    #[test]
    fn folios_of_several_orders_become_one() {
        for order in 0..=2 {
            let (mapping, folios) = new_mapping(order);
            let unit = 1 << order;
            for nth in 0..4 {
                fill(&mapping, &folios, 60 - 4 * nth, unit * u64::from(nth));
            }
            mapping
                .table()
                .mark_referenced(3 * unit, mapping.table().load(3 * unit, Ordering::Relaxed));
            // The last two, then the result and the first two.
            let heads = [2 * unit, 3 * unit];
            let old = collapse(&mapping, &folios, &heads, 16, order + 1);
            assert_eq!(old, Ok(vec![FolioId(52), FolioId(48)]));
            let old = collapse(&mapping, &folios, &[0, unit, 2 * unit], 32, order + 2);
            assert_eq!(old, Ok(vec![FolioId(60), FolioId(56), FolioId(16)]));
            for index in 0..4 * unit {
                let entry = mapping.table().load(index, Ordering::Relaxed);
                assert!(entry.is_ready());
                assert_eq!((entry.folio_id(), entry.order()), (FolioId(32), order + 2));
                assert_eq!(u64::from(entry.frame()), 32 + index);
                assert_eq!(entry.is_referenced(), index == 3 * unit, "marks are kept");
            }
            assert_eq!(mapping.resident_folios(), 1);
            assert_eq!(mapping.hot().predicted_distance(), (32 << 12) | 1);
            assert_eq!(folios.get(FolioId(32)).owner(), OWNER);
            assert!(folios.get(FolioId(32)).flags.get(Flag::Uptodate));
        }
    }

    #[test]
    fn a_used_folio_is_not_collapsed_and_not_even_copied() {
        let (mapping, folios) = new_mapping(0);
        fill(&mapping, &folios, 0, 0);
        fill(&mapping, &folios, 1, 1);
        let words = || [0, 1].map(|index| mapping.table().load(index, Ordering::Relaxed));
        let before = words();
        for used in [0, 1] {
            let pin = folios.try_get(FolioId(used)).unwrap();
            assert_eq!(collapse(&mapping, &folios, &[0, 1], 2, 1), Err(false));
            assert_eq!((pin.folio().references(), words()), (2, before));
        }
        assert!(collapse(&mapping, &folios, &[0, 1], 4, 1).is_ok());
    }

    #[test]
    fn a_reference_taken_during_the_copy_fails_the_freeze() {
        let (mapping, folios) = new_mapping(0);
        (0..4).for_each(|nth| fill(&mapping, &folios, nth, u64::from(nth)));
        let before = [0, 1, 2, 3].map(|index| mapping.table().load(index, Ordering::Relaxed));
        let old_folios = lock(&mapping, &folios, &[0, 1, 2, 3]);
        let new = folios.start(FolioId(4), 0, 0, 2);
        let mut pin = None;
        let locked = new.lock();
        let for_table = new.try_clone().unwrap();
        let copy = || pin = folios.try_get(FolioId(2)).ok();
        let old_folios =
            mapping.collapse(&folios, old_folios, &locked, for_table, copy).unwrap_err();
        let found = old_folios
            .iter()
            .map(|old_folio| (old_folio.folio.id().0, old_folio.folio.folio().references()));
        assert_eq!(found.collect::<Vec<_>>(), [(0, 2), (1, 2), (2, 3), (3, 2)]);
        let after = [0, 1, 2, 3].map(|index| mapping.table().load(index, Ordering::Relaxed));
        assert_eq!(after, before);
        drop(pin);
        let for_table = new.try_clone().unwrap();
        let old = mapping.collapse(&folios, old_folios, &locked, for_table, || ()).unwrap();
        assert_eq!(old.len(), 4, "a second attempt with the same folios");
        drop(locked);
        old.into_iter().for_each(Frozen::free);
    }

    #[test]
    fn an_eviction_stores_a_value_for_each_unit() {
        let (mapping, folios) = new_mapping(1);
        fill(&mapping, &folios, 0, 4);
        fill(&mapping, &folios, 2, 6);
        collapse(&mapping, &folios, &[4, 6], 8, 2).unwrap();
        let mut old_folios = lock(&mapping, &folios, &[7]);
        let OldFolio { lock, folio } = old_folios.pop().unwrap();
        let frozen = mapping.evict(folio, &lock, |page| Entry::value(10 + page)).unwrap();
        drop(lock);
        frozen.free();
        let left = [4, 5, 6, 7].map(|index| mapping.table().load(index, Ordering::Relaxed));
        let hole = Entry::HOLE;
        assert_eq!(left, [Entry::value(10), hole, Entry::value(12), hole]);
        assert!(mapping.take_value(6, left[2]) && !mapping.take_value(6, left[2]));
        assert_eq!(mapping.table().load(6, Ordering::Relaxed), hole);
        assert_eq!(mapping.resident_folios(), 0);
    }
}

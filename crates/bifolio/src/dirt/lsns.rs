//! LSNs of the dirty folios of a file with a write gate: the first and the highest LSN that each
//! folio got since it was clean.
//!
//! Guarded by the lock of the dirty list: a folio has an entry only while it is dirty or in flight.
//! An open-addressing table with linear probing and without tombstones, which
//! grows only when a caller has charged the larger table.

use crate::page::{FolioId, NO_FOLIO};
use crate::sync::{AtomicU64, Ordering};

/// LSN of changes that no log record covers yet: such a folio is not written out.
pub(crate) const UNCOMMITTED: u64 = u64::MAX;
/// LSN of changes that need no log record.
pub(crate) const NO_LSN: u64 = 0;

const SLOTS_MIN: usize = 64;

/// LSN of a change to a folio of a file with a write gate, as the folio becomes dirty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChangeLsn {
    /// The LSN of a write.
    Known(u64),
    /// A `PageRefMut`, whose LSN follows: [`Lsns::log_pin`] or [`Lsns::end_pin`] must be called
    /// before the folio lock is released.
    Pinned,
}

#[derive(Clone, Copy, Debug)]
struct LsnSlot {
    /// [`NO_FOLIO`] in a vacant slot.
    folio: u32,
    /// Set while some of its changes are not committed, beside those that have an LSN.
    is_uncommitted: bool,
    /// Set while a `PageRefMut` of the folio has no LSN.
    is_pinned: bool,
    /// Lowest LSN of the folio's changes; [`UNCOMMITTED`] if none has an LSN.
    first: u64,
    /// Highest LSN of the folio's changes; [`NO_LSN`] if none has an LSN.
    highest: u64,
}

const VACANT: LsnSlot = LsnSlot {
    folio: NO_FOLIO,
    is_uncommitted: false,
    is_pinned: false,
    first: UNCOMMITTED,
    highest: NO_LSN,
};

impl LsnSlot {
    /// Returns the LSN that must be durable before the folio is written.
    fn lsn(&self) -> u64 {
        if self.is_uncommitted || self.is_pinned { UNCOMMITTED } else { self.highest }
    }
}

/// Highest LSN of a log that is known to be durable.
#[derive(Debug, Default)]
pub(crate) struct KnownDurable(AtomicU64);

impl KnownDurable {
    /// Notes that the log is durable up to `lsn`. Returns `true` if that was not known.
    pub(crate) fn raise(&self, lsn: u64) -> bool {
        // Release: pairs with the Acquire in `get`: what made the log durable precedes this.
        self.0.fetch_max(lsn, Ordering::Release) < lsn
    }

    pub(crate) fn get(&self) -> u64 {
        // Acquire: pairs with the Release in `raise`: a folio that this LSN lets pass reaches the
        // storage after the log.
        self.0.load(Ordering::Acquire)
    }
}

/// Folios that must not be written before the log is durable up to their highest LSN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldBack {
    pub(crate) folios: u64,
    /// Those of them with a `PageRefMut` that has no LSN.
    pub(crate) pinned: u64,
    /// Lowest of the folios' highest LSNs: the first folio may pass once that is durable.
    pub(crate) lsn: u64,
    /// Highest of those LSNs except [`UNCOMMITTED`], to let all folios pass; [`NO_LSN`] if none.
    pub(crate) highest: u64,
}

impl HeldBack {
    pub(crate) fn one(lsn: u64) -> Self {
        let highest = if lsn == UNCOMMITTED { NO_LSN } else { lsn };
        Self { folios: 1, pinned: 0, lsn, highest }
    }

    pub(crate) fn one_pinned() -> Self {
        Self { pinned: 1, ..Self::one(UNCOMMITTED) }
    }

    pub(crate) fn sum(one: Option<Self>, two: Option<Self>) -> Option<Self> {
        let (Some(a), Some(b)) = (one, two) else { return one.or(two) };
        let (lsn, highest) = (a.lsn.min(b.lsn), a.highest.max(b.highest));
        let (folios, pinned) = (a.folios + b.folios, a.pinned + b.pinned);
        Some(Self { folios, pinned, lsn, highest })
    }
}

#[derive(Debug)]
pub(crate) struct Lsns {
    slots: Vec<LsnSlot>,
    used: usize,
    /// Upper bound of the LSNs of all folios, other than [`UNCOMMITTED`].
    highest: u64,
    /// Set if the folio that had this LSN was removed.
    is_highest_removed: bool,
    /// Lowest first LSN of the folios written out since the last flush began.
    unflushed: u64,
    /// Lowest first LSN of the folios that the flush in progress makes durable.
    flushing: u64,
}

impl Default for Lsns {
    fn default() -> Self {
        let (unflushed, flushing) = (UNCOMMITTED, UNCOMMITTED);
        let (slots, highest, is_highest_removed) = (Vec::new(), NO_LSN, false);
        Self { slots, used: 0, highest, is_highest_removed, unflushed, flushing }
    }
}

impl Lsns {
    pub(crate) fn bytes_of(slots: usize) -> u64 {
        (slots * size_of::<LsnSlot>()) as u64
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Returns the number of slots to grow to before another folio can be added; `None` if there is
    /// room for one.
    pub(crate) fn slots_wanted(&self) -> Option<usize> {
        let has_room = self.used < self.slots.len() / 4 * 3;
        (!has_room).then(|| (2 * self.slots.len()).max(SLOTS_MIN))
    }

    pub(crate) fn grow(&mut self, slots: usize) {
        debug_assert!(slots.is_power_of_two() && slots > self.slots.len());
        let old = std::mem::replace(&mut self.slots, vec![VACANT; slots]);
        for slot in old.into_iter().filter(|slot| slot.folio != NO_FOLIO) {
            let at = self.find(slot.folio);
            self.slots[at] = slot;
        }
    }

    /// Frees the table if no folio has an entry. Returns the number of slots that it had.
    pub(crate) fn shrink(&mut self) -> usize {
        if self.used > 0 { 0 } else { std::mem::take(&mut self.slots).len() }
    }

    /// Returns the slot of a folio, or the vacant one where it belongs. The table is not empty.
    fn find(&self, folio: u32) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = home(folio, mask);
        while self.slots[at].folio != folio && self.slots[at].folio != NO_FOLIO {
            at = (at + 1) & mask;
        }
        at
    }

    fn slot(&self, id: FolioId) -> Option<&LsnSlot> {
        if self.used == 0 {
            return None;
        }
        Some(&self.slots[self.find(id.0)]).filter(|slot| slot.folio != NO_FOLIO)
    }

    fn slot_mut(&mut self, id: FolioId) -> Option<&mut LsnSlot> {
        if self.used == 0 {
            return None;
        }
        let at = self.find(id.0);
        Some(&mut self.slots[at]).filter(|slot| slot.folio != NO_FOLIO)
    }

    /// Returns the highest LSN of a folio; [`NO_LSN`] if it has none.
    pub(crate) fn highest_of(&self, id: FolioId) -> u64 {
        self.slot(id).map_or(NO_LSN, LsnSlot::lsn)
    }

    /// Adds a change to a folio, which the caller has locked. Returns `false`, with nothing
    /// changed, if the table must grow first.
    pub(crate) fn add(&mut self, id: FolioId, change: ChangeLsn) -> bool {
        if self.slot(id).is_none() {
            if self.slots_wanted().is_some() {
                return false;
            }
            let at = self.find(id.0);
            self.slots[at] = LsnSlot { folio: id.0, ..VACANT };
            self.used += 1;
        }
        let at = self.find(id.0);
        let slot = &mut self.slots[at];
        match change {
            ChangeLsn::Pinned => slot.is_pinned = true,
            ChangeLsn::Known(NO_LSN) => {}
            ChangeLsn::Known(UNCOMMITTED) => slot.is_uncommitted = true,
            ChangeLsn::Known(lsn) => {
                slot.first = slot.first.min(lsn);
                slot.highest = slot.highest.max(lsn);
                self.highest = self.highest.max(lsn);
            }
        }
        true
    }

    /// Replaces [`UNCOMMITTED`] by `lsn`, if the folio has it. LSNs of other changes stay.
    pub(crate) fn commit(&mut self, id: FolioId, lsn: u64) {
        if let Some(slot) = self.slot_mut(id).filter(|slot| slot.is_uncommitted) {
            slot.is_uncommitted = false;
            self.add(id, ChangeLsn::Known(lsn));
        }
    }

    /// Gives the changes through the `PageRefMut` of a folio their LSN.
    pub(crate) fn log_pin(&mut self, id: FolioId, lsn: u64) {
        if let Some(slot) = self.slot_mut(id) {
            slot.is_pinned = false;
        }
        let has_room = self.add(id, ChangeLsn::Known(lsn));
        assert!(has_room, "a pin of a gated file keeps room for its LSN");
    }

    /// Ends a `PageRefMut` that got no LSN. If it `has_changed` the folio, that is not committed.
    pub(crate) fn end_pin(&mut self, id: FolioId, has_changed: bool) {
        if let Some(slot) = self.slot_mut(id) {
            slot.is_pinned = false;
            slot.is_uncommitted |= has_changed;
        }
    }

    /// Returns `true` while a `PageRefMut` of the folio has no LSN.
    pub(crate) fn is_pinned(&self, id: FolioId) -> bool {
        self.slot(id).is_some_and(|slot| slot.is_pinned)
    }

    /// Removes the entry of a folio whose write-out has succeeded.
    pub(crate) fn note_written(&mut self, id: FolioId) {
        if let Some(first) = self.remove(id) {
            self.unflushed = self.unflushed.min(first);
        }
    }

    /// Removes the entry of a folio, and returns its first LSN.
    pub(crate) fn remove(&mut self, id: FolioId) -> Option<u64> {
        let LsnSlot { first, highest, .. } = *self.slot(id)?;
        self.is_highest_removed |= highest == self.highest;
        let mask = self.slots.len() - 1;
        let mut hole = self.find(id.0);
        let mut at = (hole + 1) & mask;
        // Later entries of the run move up, unless that would be before their home.
        while self.slots[at].folio != NO_FOLIO {
            let home = home(self.slots[at].folio, mask);
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = (at + 1) & mask;
        }
        self.slots[hole] = VACANT;
        self.used -= 1;
        Some(first)
    }

    /// Returns the highest LSN of any folio, other than [`UNCOMMITTED`], if it is above `durable`;
    /// otherwise any LSN up to that. Visits all folios only if the one with the highest LSN was
    /// removed without a write-out.
    pub(crate) fn highest_above(&mut self, durable: u64) -> u64 {
        if self.highest > durable && std::mem::take(&mut self.is_highest_removed) {
            self.highest = self.slots.iter().map(|slot| slot.highest).max().unwrap_or(NO_LSN);
        }
        self.highest
    }

    /// Returns the lowest LSN of a change that is not durable in the file.
    pub(crate) fn oldest(&self) -> Option<u64> {
        let used = self.slots.iter().filter(|slot| slot.folio != NO_FOLIO);
        let unwritten = used.map(|slot| slot.first).min().unwrap_or(UNCOMMITTED);
        Some(unwritten.min(self.unflushed).min(self.flushing)).filter(|lsn| *lsn != UNCOMMITTED)
    }

    /// Returns the folios that must not be written while the log is durable up to `durable`.
    pub(crate) fn held_back(&self, durable: u64) -> Option<HeldBack> {
        let used = self.slots.iter().filter(|slot| slot.folio != NO_FOLIO);
        let held = used.filter(|slot| !may_pass(slot.lsn(), durable));
        let one = |slot: &LsnSlot| match slot.is_pinned {
            true => HeldBack::one_pinned(),
            false => HeldBack::one(slot.lsn()),
        };
        held.fold(None, |sum, slot| HeldBack::sum(sum, Some(one(slot))))
    }

    pub(crate) fn begin_flush(&mut self) {
        self.flushing = self.flushing.min(self.unflushed);
        self.unflushed = UNCOMMITTED;
    }

    pub(crate) fn end_flush(&mut self, is_durable: bool) {
        let flushing = std::mem::replace(&mut self.flushing, UNCOMMITTED);
        if !is_durable {
            self.unflushed = self.unflushed.min(flushing);
        }
    }
}

/// Returns `true` if a folio with this LSN may be written while the log is durable up to `durable`.
pub(crate) fn may_pass(lsn: u64, durable: u64) -> bool {
    lsn <= durable && lsn != UNCOMMITTED
}

/// Returns the slot where a folio's run begins: Fibonacci hashing, because ids are often adjacent.
fn home(folio: u32, mask: usize) -> usize {
    (folio.wrapping_mul(0x9E37_79B1) >> 4) as usize & mask
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn the_table_agrees_with_a_map() {
        let mut random = fastrand::Rng::with_seed(7);
        let (mut lsns, mut map) = (Lsns::default(), HashMap::<u32, (u64, u64)>::new());
        for _ in 0..50_000 {
            let id = FolioId(random.u32(0..300));
            match random.u32(0..3) {
                0 => assert_eq!(lsns.remove(id), map.remove(&id.0).map(|(first, _)| first)),
                _ => {
                    let lsn = random.u64(1..1000);
                    if let Some(slots) = lsns.slots_wanted() {
                        lsns.grow(slots);
                    }
                    assert!(lsns.add(id, ChangeLsn::Known(lsn)));
                    let (first, highest) = map.entry(id.0).or_insert((u64::MAX, 0));
                    (*first, *highest) = ((*first).min(lsn), (*highest).max(lsn));
                }
            }
            let id = FolioId(random.u32(0..300));
            assert_eq!(lsns.highest_of(id), map.get(&id.0).map_or(0, |(_, highest)| *highest));
            assert_eq!(lsns.used, map.len());
            let highest = map.values().map(|(_, highest)| *highest).max().unwrap_or(0);
            assert_eq!(lsns.highest_above(0), highest);
        }
        assert_eq!(lsns.oldest(), map.values().map(|(first, _)| *first).min());
        let held = map.values().filter(|(_, highest)| *highest > 500);
        let lowest = held.clone().map(|(_, highest)| *highest).min().unwrap();
        let folios = held.count() as u64;
        let highest = lsns.highest_above(0);
        assert_eq!(lsns.held_back(500), Some(HeldBack { folios, pinned: 0, lsn: lowest, highest }));
        map.keys().for_each(|id| assert!(lsns.remove(FolioId(*id)).is_some()));
        assert_eq!((lsns.highest_above(0), lsns.oldest(), lsns.held_back(0)), (0, None, None));
        assert!(lsns.shrink() >= 300 && lsns.slots() == 0);
    }

    #[test]
    fn a_full_table_refuses_only_new_folios() {
        let mut lsns = Lsns::default();
        assert!(!lsns.add(FolioId(1), ChangeLsn::Known(5)));
        lsns.grow(lsns.slots_wanted().unwrap());
        let count = (1..).take_while(|id| lsns.add(FolioId(*id), ChangeLsn::Known(5))).count();
        assert_eq!(count, 48);
        assert!(lsns.add(FolioId(1), ChangeLsn::Known(9)));
        assert_eq!((lsns.highest_of(FolioId(1)), lsns.highest_above(0)), (9, 9));
    }

    #[test]
    fn an_uncommitted_folio_passes_once_it_has_an_lsn() {
        let mut lsns = Lsns::default();
        lsns.grow(64);
        let id = FolioId(3);
        assert!(lsns.add(id, ChangeLsn::Known(UNCOMMITTED)) && lsns.add(id, ChangeLsn::Known(4)));
        let lsns_of = (lsns.highest_of(id), lsns.highest_above(0), lsns.oldest());
        assert_eq!(lsns_of, (UNCOMMITTED, 4, Some(4)));
        assert!(!may_pass(lsns.highest_of(id), u64::MAX));
        lsns.commit(id, 7);
        lsns.commit(id, 5);
        assert_eq!((lsns.highest_of(id), lsns.oldest()), (7, Some(4)));
        // A change with a higher LSN than the commit keeps it.
        assert!(lsns.add(id, ChangeLsn::Known(UNCOMMITTED)) && lsns.add(id, ChangeLsn::Known(9)));
        lsns.commit(id, 8);
        assert_eq!(lsns.highest_of(id), 9);
    }

    #[test]
    fn a_pin_without_an_lsn_is_not_committed_if_it_changed_the_folio() {
        let mut lsns = Lsns::default();
        lsns.grow(64);
        let id = FolioId(3);
        let pin = |lsns: &mut Lsns| assert!(lsns.add(id, ChangeLsn::Pinned));
        assert!(lsns.add(id, ChangeLsn::Known(4)));
        pin(&mut lsns);
        let held = HeldBack { folios: 1, pinned: 1, lsn: UNCOMMITTED, highest: NO_LSN };
        assert_eq!((lsns.is_pinned(id), lsns.held_back(9)), (true, Some(held)));
        lsns.log_pin(id, 7);
        assert_eq!((lsns.is_pinned(id), lsns.highest_of(id), lsns.oldest()), (false, 7, Some(4)));
        pin(&mut lsns);
        lsns.end_pin(id, false);
        assert_eq!(lsns.highest_of(id), 7);
        pin(&mut lsns);
        lsns.end_pin(id, true);
        assert_eq!((lsns.is_pinned(id), lsns.highest_of(id)), (false, UNCOMMITTED));
        // The LSN of a later pin is not that of this change.
        pin(&mut lsns);
        lsns.log_pin(id, 8);
        assert_eq!(lsns.highest_of(id), UNCOMMITTED);
        lsns.commit(id, 6);
        assert_eq!((lsns.highest_of(id), lsns.oldest()), (8, Some(4)));
    }

    #[test]
    fn a_written_folio_counts_as_oldest_until_a_flush_succeeds() {
        let mut lsns = Lsns::default();
        lsns.grow(64);
        assert!(
            lsns.add(FolioId(1), ChangeLsn::Known(10))
                && lsns.add(FolioId(2), ChangeLsn::Known(20))
        );
        lsns.note_written(FolioId(1));
        assert_eq!(lsns.oldest(), Some(10));
        lsns.begin_flush();
        lsns.note_written(FolioId(2));
        assert_eq!(lsns.oldest(), Some(10));
        lsns.end_flush(false);
        assert_eq!(lsns.oldest(), Some(10));
        lsns.begin_flush();
        lsns.end_flush(true);
        assert_eq!(lsns.oldest(), None);
    }
}

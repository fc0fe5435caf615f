//! The two lists, linked through the descriptors. Always under the lists' lock (rule 3 of `page`).

use crate::page::{Flag, Folio, FolioId, Folios, NO_FOLIO};
use crate::sync::Ordering;

/// Which list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListKind {
    /// Where reclaim takes from.
    Inactive,
    /// What was used more than once.
    Active,
}

impl ListKind {
    /// The list that a folio is on, or bound for.
    pub(crate) fn of(folio: &Folio) -> Self {
        if folio.flags.get(Flag::Active) { Self::Active } else { Self::Inactive }
    }
}

/// Pages on each list.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ListSizes {
    /// Pages on the inactive list.
    pub(crate) inactive_pages: u64,
    /// Pages on the active list.
    pub(crate) active_pages: u64,
}

impl ListSizes {
    /// Whether the inactive list is so short that the active one must give: more than the square
    /// root of ten times its GiB to one, as the kernel balances its own.
    pub(crate) fn is_inactive_low(&self) -> bool {
        const PAGES_PER_GIB: u64 = 1 << 18;
        let gib = (self.inactive_pages + self.active_pages) / PAGES_PER_GIB;
        let ratio = (10 * gib).isqrt().max(1);
        self.inactive_pages * ratio < self.active_pages
    }
}

/// Epochs that a folio is on the inactive list until its turn to leave comes, while as many come
/// as leave. The clock of eight bits wraps after several such lives.
const EPOCHS: u64 = 32;

#[derive(Debug)]
struct List {
    head: u32,
    tail: u32,
    pages: u64,
}

impl Default for List {
    fn default() -> Self {
        Self { head: NO_FOLIO, tail: NO_FOLIO, pages: 0 }
    }
}

/// See the head of the file.
#[derive(Debug, Default)]
pub(super) struct Lists {
    inactive: List,
    active: List,
    /// The clock of the inactive list: see [`EPOCHS`].
    epoch: u8,
    /// Pages that came to the inactive list in this epoch.
    epoch_pages: u64,
}

impl Lists {
    pub(super) fn sizes(&self) -> ListSizes {
        let (inactive_pages, active_pages) = (self.inactive.pages, self.active.pages);
        ListSizes { inactive_pages, active_pages }
    }

    /// The oldest folio of a list.
    pub(super) fn tail(&self, kind: ListKind) -> Option<FolioId> {
        let tail = match kind {
            ListKind::Inactive => self.inactive.tail,
            ListKind::Active => self.active.tail,
        };
        (tail != NO_FOLIO).then_some(FolioId(tail))
    }

    /// Links a folio at the head of a list.
    pub(super) fn add(&mut self, folios: &Folios, id: FolioId, kind: ListKind) {
        let folio = folios.get(id);
        debug_assert!(!folio.flags.get(Flag::OnLru), "{id:?} is on a list already");
        folio.flags.set(Flag::OnLru);
        match kind {
            ListKind::Active => folio.flags.set(Flag::Active),
            ListKind::Inactive => folio.flags.clear(Flag::Active),
        };
        self.link(folios, id, kind);
        if kind == ListKind::Inactive {
            self.tick(folio.pages());
            folio.lru_epoch.store(self.epoch, Ordering::Relaxed);
        }
    }

    /// Puts a folio where another is on its list, if that is on one, and takes that off.
    pub(super) fn replace(&mut self, folios: &Folios, old: FolioId, new: FolioId) {
        let (old, successor) = (folios.get(old), folios.get(new));
        if !old.flags.clear(Flag::OnLru) {
            return;
        }
        successor.flags.set(Flag::OnLru);
        let kind = ListKind::of(old);
        if kind == ListKind::Active {
            successor.flags.set(Flag::Active);
        }
        successor.lru_epoch.store(old.lru_epoch.load(Ordering::Relaxed), Ordering::Relaxed);
        let next = old.lru_next.load(Ordering::Relaxed);
        let previous = old.lru_previous.load(Ordering::Relaxed);
        self.join(folios, kind, previous, new.0);
        self.join(folios, kind, new.0, next);
    }

    /// Whether a folio is on the inactive list, and in the oldest quarter of it.
    pub(super) fn is_old(&self, folios: &Folios, id: FolioId) -> bool {
        let folio = folios.get(id);
        let on_inactive = folio.flags.get(Flag::OnLru) && !folio.flags.get(Flag::Active);
        let age = self.epoch.wrapping_sub(folio.lru_epoch.load(Ordering::Relaxed));
        on_inactive && u64::from(age) >= EPOCHS / 4 * 3
    }

    /// So many pages come to the inactive list: time goes on by that.
    fn tick(&mut self, pages: u64) {
        self.epoch_pages += pages;
        if self.epoch_pages * EPOCHS >= self.inactive.pages {
            self.epoch = self.epoch.wrapping_add(1);
            self.epoch_pages = 0;
        }
    }

    /// Moves a folio from wherever it is on its list to the head. ON_LRU stays set all the time:
    /// the folio may be dying, and nobody would take it off if the last put saw it clear (LRU-2).
    pub(super) fn rotate(&mut self, folios: &Folios, id: FolioId, kind: ListKind) {
        self.unlink(folios, id);
        self.link(folios, id, kind);
    }

    /// Moves a folio from wherever it is on its list to the tail of the inactive one. ON_LRU stays
    /// set, as in [`Self::rotate`].
    pub(super) fn demote(&mut self, folios: &Folios, id: FolioId) {
        self.unlink(folios, id);
        let folio = folios.get(id);
        folio.flags.clear(Flag::Active);
        // As old as can be.
        folio.lru_epoch.store(self.epoch.wrapping_sub(EPOCHS as u8), Ordering::Relaxed);
        self.inactive.pages += folio.pages();
        self.join(folios, ListKind::Inactive, self.inactive.tail, id.0);
        self.join(folios, ListKind::Inactive, id.0, NO_FOLIO);
    }

    /// Unlinks a folio from the list it is on.
    pub(super) fn remove(&mut self, folios: &Folios, id: FolioId) {
        let folio = folios.get(id);
        let was_linked = folio.flags.clear(Flag::OnLru);
        debug_assert!(was_linked, "{id:?} is on no list");
        self.unlink(folios, id);
    }

    fn link(&mut self, folios: &Folios, id: FolioId, kind: ListKind) {
        let list = self.list(kind);
        list.pages += folios.get(id).pages();
        let next = list.head;
        self.join(folios, kind, NO_FOLIO, id.0);
        self.join(folios, kind, id.0, next);
    }

    fn unlink(&mut self, folios: &Folios, id: FolioId) {
        let folio = folios.get(id);
        let kind = ListKind::of(folio);
        self.list(kind).pages -= folio.pages();
        let next = folio.lru_next.load(Ordering::Relaxed);
        let previous = folio.lru_previous.load(Ordering::Relaxed);
        self.join(folios, kind, previous, next);
    }

    /// Makes two folios neighbours on a list; [`NO_FOLIO`] on either side is that end of it.
    fn join(&mut self, folios: &Folios, kind: ListKind, previous: u32, next: u32) {
        match previous {
            NO_FOLIO => self.list(kind).head = next,
            id => folios.get(FolioId(id)).lru_next.store(next, Ordering::Relaxed),
        }
        match next {
            NO_FOLIO => self.list(kind).tail = previous,
            id => folios.get(FolioId(id)).lru_previous.store(previous, Ordering::Relaxed),
        }
    }

    fn list(&mut self, kind: ListKind) -> &mut List {
        match kind {
            ListKind::Inactive => &mut self.inactive,
            ListKind::Active => &mut self.active,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The folios of a list, oldest first, as the links of either direction have them.
    fn walk(lists: &Lists, folios: &Folios, kind: ListKind) -> Vec<u32> {
        let list = if kind == ListKind::Active { &lists.active } else { &lists.inactive };
        let follow = |from: u32, link: fn(&Folio) -> u32| {
            let next = |id: &u32| Some(link(folios.get(FolioId(*id)))).filter(|id| *id != NO_FOLIO);
            let first = Some(from).filter(|id| *id != NO_FOLIO);
            std::iter::successors(first, next).collect::<Vec<_>>()
        };
        let from_tail = follow(list.tail, |folio| folio.lru_previous.load(Ordering::Relaxed));
        let mut from_head = follow(list.head, |folio| folio.lru_next.load(Ordering::Relaxed));
        from_head.reverse();
        assert_eq!(from_tail, from_head);
        from_tail
    }

    #[test]
    fn a_folio_that_replaces_another_has_its_place_on_its_list() {
        for kind in [ListKind::Inactive, ListKind::Active] {
            for place in 0..3 {
                let folios = Folios::without_reaper(8);
                let mut lists = Lists::default();
                for id in 0..3 {
                    lists.add(&folios, FolioId(id), kind);
                }
                let before = lists.sizes();
                lists.replace(&folios, FolioId(place), FolioId(7));
                let expected = [0, 1, 2].map(|id| if id == place { 7 } else { id });
                assert_eq!(walk(&lists, &folios, kind), expected);
                assert_eq!(lists.sizes().inactive_pages, before.inactive_pages);
                assert!(!folios.get(FolioId(place)).flags.get(Flag::OnLru));
                lists.remove(&folios, FolioId(7));
                let rest: Vec<_> = (0..3).filter(|id| *id != place).collect();
                assert_eq!(walk(&lists, &folios, kind), rest);
            }
        }
    }

    #[test]
    fn a_demoted_folio_is_next_to_leave_and_old() {
        for kind in [ListKind::Inactive, ListKind::Active] {
            for place in 0..3 {
                let (folios, mut lists) = (Folios::without_reaper(4), Lists::default());
                lists.add(&folios, FolioId(3), ListKind::Inactive);
                for id in 0..3 {
                    lists.add(&folios, FolioId(id), kind);
                }
                lists.demote(&folios, FolioId(place));
                assert_eq!(walk(&lists, &folios, ListKind::Inactive)[0], place);
                let both = [ListKind::Inactive, ListKind::Active];
                let mut all = both.map(|kind| walk(&lists, &folios, kind)).concat();
                all.sort_unstable();
                assert_eq!(all, [0, 1, 2, 3]);
                let active_pages = if kind == ListKind::Active { 2 } else { 0 };
                let sizes = lists.sizes();
                assert_eq!(sizes.active_pages, active_pages);
                assert_eq!(sizes.inactive_pages, 4 - active_pages);
                assert!(lists.is_old(&folios, FolioId(place)));
            }
        }
    }

    #[test]
    fn a_folio_that_replaces_one_on_no_list_is_on_none() {
        let (folios, mut lists) = (Folios::without_reaper(2), Lists::default());
        lists.replace(&folios, FolioId(0), FolioId(1));
        assert!(walk(&lists, &folios, ListKind::Inactive).is_empty());
        assert!(!folios.get(FolioId(1)).flags.get(Flag::OnLru));
    }

    #[test]
    fn the_oldest_quarter_of_the_inactive_list_is_old() {
        let count = 1000;
        let (folios, mut lists) = (Folios::without_reaper(count + 2), Lists::default());
        for id in 0..count as u32 {
            lists.add(&folios, FolioId(id), ListKind::Inactive);
        }
        // As in a full cache: one leaves, one comes. Three times over.
        for step in 0..3 * count as u32 {
            let id = FolioId(step % count as u32);
            lists.remove(&folios, id);
            lists.add(&folios, id, ListKind::Inactive);
        }
        let old = (0..count as u32).filter(|id| lists.is_old(&folios, FolioId(*id)));
        let old: Vec<_> = old.collect();
        let quarter = count / 4;
        assert!(old.len().abs_diff(quarter) < quarter / 4, "{} are old", old.len());
        assert_eq!(old, (0..old.len() as u32).collect::<Vec<_>>());
        assert!(!lists.is_old(&folios, FolioId(count as u32 - 1)));
        // One that replaces another is as old as that; one on the active list is not.
        let (fresh, first_old) = (FolioId(count as u32 - 1), FolioId(0));
        for (old, new) in [(fresh, count as u32), (first_old, count as u32 + 1)] {
            let was_old = lists.is_old(&folios, old);
            let far_from_it = if was_old { lists.epoch } else { lists.epoch.wrapping_sub(31) };
            folios.get(FolioId(new)).lru_epoch.store(far_from_it, Ordering::Relaxed);
            lists.replace(&folios, old, FolioId(new));
            assert_eq!(lists.is_old(&folios, FolioId(new)), was_old);
        }
        lists.remove(&folios, FolioId(1));
        lists.add(&folios, FolioId(1), ListKind::Active);
        assert!(!lists.is_old(&folios, FolioId(1)));
    }
}

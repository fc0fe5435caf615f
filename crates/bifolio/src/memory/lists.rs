//! The linked lists of the LRU (`lru.rs`), which locks them.

use crate::page::{CLASSES_MAX, Flag, Folio, FolioId, Folios, NO_FOLIO};
use crate::sync::Ordering;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListKind {
    Fresh,
    Old,
    Active,
}

impl ListKind {
    /// Returns the list that a folio is on, was isolated from, or will be added to.
    pub(crate) fn of(folio: &Folio) -> Self {
        if folio.flags.get(Flag::Active) {
            Self::Active
        } else if folio.flags.get(Flag::Fresh) {
            Self::Fresh
        } else {
            Self::Old
        }
    }
}

/// Part of all listed pages that FRESH and OLD keep, each.
const SHARE_DIVISOR: u64 = 10;
/// Part of all listed pages in FRESH above which pages that reach its tail keep their marks: memory
/// was filled without reclaim, so they were there long enough.
const CROWDED_DIVISOR: u64 = 5;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ListSizes {
    pub(crate) fresh_pages: u64,
    pub(crate) old_pages: u64,
    pub(crate) active_pages: u64,
}

impl ListSizes {
    pub(crate) fn listed_pages(&self) -> u64 {
        self.fresh_pages + self.old_pages + self.active_pages
    }

    pub(crate) fn inactive_pages(&self) -> u64 {
        self.fresh_pages + self.old_pages
    }

    fn share_pages(&self) -> u64 {
        self.listed_pages() / SHARE_DIVISOR
    }

    pub(crate) fn fresh_excess_pages(&self) -> u64 {
        self.fresh_pages.saturating_sub(self.share_pages())
    }

    /// Returns the number of pages that OLD has beyond its share, or half of it if folios are also
    /// evicted from within the list (`reclaim/evacuate.rs`): active ones must not make up for them.
    pub(crate) fn old_excess_pages(&self, evicts_early: bool) -> u64 {
        let share_pages = self.share_pages();
        self.old_pages.saturating_sub(if evicts_early { share_pages / 2 } else { share_pages })
    }

    /// Returns `true` if pages that are moved from FRESH to OLD keep their marks.
    pub(crate) fn is_crowded(&self) -> bool {
        self.fresh_pages > self.listed_pages() / CROWDED_DIVISOR
    }
}

impl std::ops::AddAssign for ListSizes {
    fn add_assign(&mut self, other: Self) {
        self.fresh_pages += other.fresh_pages;
        self.old_pages += other.old_pages;
        self.active_pages += other.active_pages;
    }
}

/// Number of epochs that a folio spends on OLD before it is evicted, as long as folios are added
/// and evicted at the same rate; the 8-bit clock wraps after several times as many.
const EPOCHS: u64 = 32;

#[derive(Debug)]
pub(super) struct List {
    head: u32,
    tail: u32,
    pages: u64,
}

impl List {
    pub(super) fn last(&self) -> Option<FolioId> {
        (self.tail != NO_FOLIO).then_some(FolioId(self.tail))
    }
}

impl Default for List {
    fn default() -> Self {
        Self { head: NO_FOLIO, tail: NO_FOLIO, pages: 0 }
    }
}

/// The lists of each class. Accessed only under their lock (rule 3 of `page`).
#[derive(Debug, Default)]
pub(super) struct ClassLists {
    pub(super) all: [Lists; CLASSES_MAX],
    /// No class from this one on has ever had a folio.
    end: usize,
}

impl ClassLists {
    /// Returns the lists of the class of a folio.
    pub(super) fn of(&mut self, folio: &Folio) -> &mut Lists {
        let class = folio.flags.class().number();
        self.end = self.end.max(class + 1);
        &mut self.all[class]
    }

    pub(super) fn used(&self) -> &[Lists] {
        &self.all[..self.end]
    }
}

/// The lists of a class.
#[derive(Debug, Default)]
pub(super) struct Lists {
    fresh: List,
    old: List,
    active: List,
    /// Clock of OLD; see [`EPOCHS`].
    epoch: u8,
    epoch_pages: u64,
}

impl Lists {
    pub(super) fn sizes(&self) -> ListSizes {
        ListSizes {
            fresh_pages: self.fresh.pages,
            old_pages: self.old.pages,
            active_pages: self.active.pages,
        }
    }

    pub(super) fn add(&mut self, folios: &Folios, id: FolioId, kind: ListKind) {
        let folio = folios.get(id);
        debug_assert!(!folio.flags.get(Flag::OnLru), "{id:?} is already on a list");
        folio.flags.set(Flag::OnLru);
        folio.flags.assign(Flag::Fresh, kind == ListKind::Fresh);
        folio.flags.assign(Flag::Active, kind == ListKind::Active);
        self.link(folios, id, kind);
        if kind == ListKind::Old {
            self.begin_age(folio);
        }
    }

    /// Moves a folio from FRESH to the head of OLD. ON_LRU stays set, as in [`Self::rotate`].
    pub(super) fn age(&mut self, folios: &Folios, id: FolioId) {
        self.unlink(folios, id);
        let folio = folios.get(id);
        folio.flags.clear(Flag::Fresh);
        self.link(folios, id, ListKind::Old);
        self.begin_age(folio);
    }

    /// Notes the time at which a folio was added to OLD, and advances the clock.
    fn begin_age(&mut self, folio: &Folio) {
        self.epoch_pages += folio.pages();
        if self.epoch_pages * EPOCHS >= self.old.pages {
            self.epoch = self.epoch.wrapping_add(1);
            self.epoch_pages = 0;
        }
        folio.lru_epoch.store(self.epoch, Ordering::Relaxed);
    }

    /// Puts a folio in the place of another on its list, as a relocation does: position, list and
    /// age stay.
    pub(super) fn replace(&mut self, folios: &Folios, old: FolioId, new: FolioId) {
        let (old, successor) = (folios.get(old), folios.get(new));
        if !old.flags.clear(Flag::OnLru) {
            return;
        }
        successor.flags.set(Flag::OnLru);
        let kind = ListKind::of(old);
        successor.flags.assign(Flag::Fresh, kind == ListKind::Fresh);
        successor.flags.assign(Flag::Active, kind == ListKind::Active);
        successor.lru_epoch.store(old.lru_epoch.load(Ordering::Relaxed), Ordering::Relaxed);
        let next = old.lru_next.load(Ordering::Relaxed);
        let previous = old.lru_previous.load(Ordering::Relaxed);
        self.join(folios, kind, previous, new.0);
        self.join(folios, kind, new.0, next);
    }

    pub(super) fn is_old(&self, folios: &Folios, id: FolioId) -> bool {
        let folio = folios.get(id);
        let is_on_old = folio.flags.get(Flag::OnLru) && ListKind::of(folio) == ListKind::Old;
        let age = self.epoch.wrapping_sub(folio.lru_epoch.load(Ordering::Relaxed));
        is_on_old && u64::from(age) >= EPOCHS / 2
    }

    /// Moves a folio from its position in a list to the head. ON_LRU stays set throughout: the
    /// folio may be in the process of being freed, and if the last put read a clear flag, the folio
    /// would stay linked (LRU-2).
    pub(super) fn rotate(&mut self, folios: &Folios, id: FolioId, kind: ListKind) {
        self.unlink(folios, id);
        self.link(folios, id, kind);
    }

    /// Moves a folio to the tail of OLD. ON_LRU stays set, as in [`Self::rotate`].
    pub(super) fn demote(&mut self, folios: &Folios, id: FolioId) {
        self.unlink(folios, id);
        let folio = folios.get(id);
        folio.flags.assign(Flag::Fresh, false);
        folio.flags.assign(Flag::Active, false);
        // The greatest age that counts.
        folio.lru_epoch.store(self.epoch.wrapping_sub(EPOCHS as u8), Ordering::Relaxed);
        self.old.pages += folio.pages();
        self.join(folios, ListKind::Old, self.old.tail, id.0);
        self.join(folios, ListKind::Old, id.0, NO_FOLIO);
    }

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

    /// Makes two folios neighbours on a list, of which [`NO_FOLIO`] is an end.
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

    pub(super) fn list(&mut self, kind: ListKind) -> &mut List {
        match kind {
            ListKind::Fresh => &mut self.fresh,
            ListKind::Old => &mut self.old,
            ListKind::Active => &mut self.active,
        }
    }
}

#[cfg(all(test, not(loom)))]
pub(super) mod tests {
    use super::*;

    /// Returns the folios of a list, oldest first, and checks that both link directions agree.
    pub(in crate::memory) fn walk(lists: &Lists, folios: &Folios, kind: ListKind) -> Vec<u32> {
        let list = match kind {
            ListKind::Fresh => &lists.fresh,
            ListKind::Old => &lists.old,
            ListKind::Active => &lists.active,
        };
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

    const ALL: [ListKind; 3] = [ListKind::Fresh, ListKind::Old, ListKind::Active];

    #[test]
    fn a_replacement_has_the_position_of_the_old_folio() {
        for kind in ALL {
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
                assert_eq!(lists.sizes().listed_pages(), before.listed_pages());
                assert_eq!(ListKind::of(folios.get(FolioId(7))), kind);
                assert!(!folios.get(FolioId(place)).flags.get(Flag::OnLru));
                lists.remove(&folios, FolioId(7));
                let rest: Vec<_> = (0..3).filter(|id| *id != place).collect();
                assert_eq!(walk(&lists, &folios, kind), rest);
            }
        }
    }

    #[test]
    fn a_demoted_folio_is_old_and_first_to_be_evicted() {
        for kind in ALL {
            for place in 0..3 {
                let (folios, mut lists) = (Folios::without_reaper(4), Lists::default());
                lists.add(&folios, FolioId(3), ListKind::Old);
                for id in 0..3 {
                    lists.add(&folios, FolioId(id), kind);
                }
                lists.demote(&folios, FolioId(place));
                assert_eq!(walk(&lists, &folios, ListKind::Old)[0], place);
                let mut all = ALL.map(|kind| walk(&lists, &folios, kind)).concat();
                all.sort_unstable();
                assert_eq!(all, [0, 1, 2, 3]);
                let sizes = lists.sizes();
                assert_eq!(sizes.listed_pages(), 4);
                assert_eq!(sizes.old_pages, if kind == ListKind::Old { 4 } else { 2 });
                assert!(lists.is_old(&folios, FolioId(place)));
            }
        }
    }

    #[test]
    fn a_replacement_of_an_unlinked_folio_is_on_no_list() {
        let (folios, mut lists) = (Folios::without_reaper(2), Lists::default());
        lists.replace(&folios, FolioId(0), FolioId(1));
        assert!(ALL.iter().all(|kind| walk(&lists, &folios, *kind).is_empty()));
        assert!(!folios.get(FolioId(1)).flags.get(Flag::OnLru));
    }

    #[test]
    fn the_older_half_of_the_old_list_is_old() {
        let count = 1000;
        let (folios, mut lists) = (Folios::without_reaper(count + 2), Lists::default());
        for id in 0..count as u32 {
            lists.add(&folios, FolioId(id), ListKind::Old);
        }
        // As in a full cache: each folio that is evicted makes room for one that is added. Three
        // times over.
        for step in 0..3 * count as u32 {
            let id = FolioId(step % count as u32);
            lists.remove(&folios, id);
            lists.add(&folios, id, ListKind::Old);
        }
        let old = (0..count as u32).filter(|id| lists.is_old(&folios, FolioId(*id)));
        let old: Vec<_> = old.collect();
        let half = count / 2;
        assert!(old.len().abs_diff(half) < half / 8, "{} are old", old.len());
        assert_eq!(old, (0..old.len() as u32).collect::<Vec<_>>());
        assert!(!lists.is_old(&folios, FolioId(count as u32 - 1)));
        // A replacement is as old as the folio it replaces; a folio on another list is not old.
        let (fresh, first_old) = (FolioId(count as u32 - 1), FolioId(0));
        for (old, new) in [(fresh, count as u32), (first_old, count as u32 + 1)] {
            let was_old = lists.is_old(&folios, old);
            let far_from_it = if was_old { lists.epoch } else { lists.epoch.wrapping_sub(31) };
            folios.get(FolioId(new)).lru_epoch.store(far_from_it, Ordering::Relaxed);
            lists.replace(&folios, old, FolioId(new));
            assert_eq!(lists.is_old(&folios, FolioId(new)), was_old);
        }
        for kind in [ListKind::Active, ListKind::Fresh] {
            lists.remove(&folios, FolioId(1));
            lists.add(&folios, FolioId(1), kind);
            assert!(!lists.is_old(&folios, FolioId(1)));
        }
    }

    #[test]
    fn lists_have_an_excess_beyond_a_tenth() {
        let sizes = |fresh_pages, old_pages, active_pages| ListSizes {
            fresh_pages,
            old_pages,
            active_pages,
        };
        let excess = |sizes: ListSizes| (sizes.fresh_excess_pages(), sizes.old_excess_pages(false));
        assert_eq!(excess(sizes(10, 10, 80)), (0, 0));
        assert_eq!(excess(sizes(13, 12, 75)), (3, 2));
        assert_eq!(sizes(13, 12, 75).old_excess_pages(true), 7);
        // No list has a minimum: the last page of the smallest cache can be evicted.
        assert_eq!(excess(sizes(1, 0, 0)), (1, 0));
        assert!(sizes(21, 0, 79).is_crowded() && !sizes(20, 0, 80).is_crowded());
    }
}

//! The LRU lists: which folios were used recently, and in which order the others are evicted.
//!
//! The lists FRESH, OLD and ACTIVE are linked through the descriptors (rule 3 of `page`);
//! ARCHITECTURE.md says what moves between them, and why. In front of them, each CPU has a batch,
//! so that adding a folio takes the lock of the lists only once in 31 times.
//!
//! PROTOCOL DRAIN, of the batches, in three columns:
//!
//! ```text
//!  ADD (on CPU c)                  DRAIN (on any CPU)            DRAIN OF ALL
//!  A1 lock batch c                 D1 lock batch c               G1 load the generation
//!  A2 push: the slot owns the      D2 lock the lists, link       G2 lock the drains
//!     reference; store c in the       every folio, unlock        G3 has the generation changed?
//!     descriptor                   D3 put the reference of          then unlock: done
//!  A3 full, or large folio?           every slot; empty it       G4 begin the next generation
//!     D2, D3                       D4 unlock batch c             G5 D1 to D4 for each CPU
//!  A4 unlock batch c                                             G6 unlock the drains
//! ```
//!
//! The choice of the CPU affects only speed.
//!
//! - G3, as in the kernel's `__lru_add_drain_all`: a call that finds a new generation under the
//!   lock has waited for a drain that began, at G4, after G1: every folio added before G1 is on the
//!   lists. If G4 came after G5, a drain that began too early would count.
//! - A drain *for some folios* ([`Lru::drain_for`]) does D1 to D4 if one of the slots holds one of
//!   them. This is exact: a folio is in the batch that it was last added to (A2), or in none.
//!
//! Folios of files whose pages cannot be evicted (memory files without a swap) are on no list, and
//! counted ([`Lru::unlisted_pages`]), so that reclaim does not wait for them. It does wait for
//! other folios that are on no list, because a thread has isolated them.
//!
//! Invariants:
//! - LRU-1: a folio is in at most one of: a batch, a list, an isolation. A batch slot and an
//!   isolation hold a reference each; a list holds none (the last put takes the folio off it).
//! - LRU-2: ON_LRU is set exactly while the folio is linked in a list; both change under the lock
//!   of the lists. Only a thread that holds a reference, or that frees the folio, changes it, so
//!   the last put may read it without the lock. FRESH and ACTIVE, which name the list (neither:
//!   OLD), change under the same lock.
//! - LRU-3: when a drain returns, every folio that was in a drained batch before the call is on a
//!   list, and the batch's reference to it has been put: the whole drain happens under the batch's
//!   lock.
//!
//! Lock order: the lock of the drains of all, a batch's lock, then the lock of the lists.
//! References are put after the lock of the lists is released, because the last put takes it.
//!
//! Longer than 600 lines only with its tests, which use its private items.

use crate::page::{BATCH_SLOTS, Flag, Folio, FolioId, FolioRef, Folios, NO_FOLIO};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use arrayvec::ArrayVec;

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

#[derive(Debug)]
pub(crate) struct Lru {
    lists: Mutex<Lists>,
    pub(super) listed_pages: AtomicU64,
    unlisted_pages: AtomicU64,
    cpus: Box<[Mutex<CpuBatch>]>,
    /// Number of drains of all batches that have begun (G4).
    generation: AtomicU64,
    draining: Mutex<()>,
    /// Pages evicted so far: the clock of refault distances.
    pub(super) clock: AtomicU64,
    /// Pages of refaults so far that were not near.
    pub(super) distant_pages: AtomicU64,
    /// Pages that became active because of their use, since the last look at them.
    pub(super) useful_pages: AtomicU64,
    pub(super) keeps_distant: AtomicBool,
}

/// Pages counted as unlisted ([`Lru::try_count_unlisted`]) until this is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Unlisted<'l> {
    lru: &'l Lru,
    pages: u64,
}

impl Unlisted<'_> {
    /// Transfers the count to `folio`, which is new and locked: its pages count as unlisted until
    /// it is freed.
    pub(crate) fn keep_for(mut self, folio: &Folio) {
        debug_assert_eq!(self.pages, folio.pages());
        let is_first = folio.flags.set(Flag::Unlisted);
        debug_assert!(is_first, "a new folio has no flags");
        self.pages = 0;
    }
}

impl Drop for Unlisted<'_> {
    fn drop(&mut self) {
        self.lru.unlisted_pages.fetch_sub(self.pages, Ordering::Relaxed);
    }
}

impl Lru {
    pub(crate) fn new(cpus: usize) -> Self {
        Self {
            lists: Mutex::new(Lists::default()),
            listed_pages: AtomicU64::new(0),
            unlisted_pages: AtomicU64::new(0),
            cpus: (0..cpus.max(1)).map(|_| Mutex::default()).collect(),
            generation: AtomicU64::new(0),
            draining: Mutex::new(()),
            clock: AtomicU64::new(0),
            distant_pages: AtomicU64::new(0),
            // Many: nothing is known before the first look.
            useful_pages: AtomicU64::new(1 << 32),
            keeps_distant: AtomicBool::new(false),
        }
    }

    pub(crate) fn sizes(&self) -> ListSizes {
        self.lists.lock().sizes()
    }

    pub(crate) fn unlisted_pages(&self) -> u64 {
        self.unlisted_pages.load(Ordering::Relaxed)
    }

    /// Adds `pages` to the unlisted pages if the total stays at or below `pages_max`.
    pub(crate) fn try_count_unlisted(&self, pages: u64, pages_max: u64) -> Option<Unlisted<'_>> {
        let added = |before: u64| Some(before + pages).filter(|all| *all <= pages_max);
        // Relaxed, here and below: only a count.
        let relaxed = Ordering::Relaxed;
        self.unlisted_pages.fetch_update(relaxed, relaxed, added).ok()?;
        Some(Unlisted { lru: self, pages })
    }

    fn change<T>(&self, work: impl FnOnce(&mut Lists) -> T) -> T {
        let mut lists = self.lists.lock();
        let answer = work(&mut lists);
        self.listed_pages.store(lists.sizes().listed_pages(), Ordering::Relaxed);
        answer
    }

    /// Takes folios off the tail of a list, with a reference each, until the batch is full or they
    /// have `pages_max` pages together.
    ///
    /// A folio that is frozen or being freed is rotated to the head; the thread that froze it takes
    /// it off.
    pub(crate) fn isolate<'a>(
        &self,
        folios: &'a Folios,
        kind: ListKind,
        pages_max: u64,
        isolated: &mut Vec<FolioRef<'a>>,
    ) {
        self.change(|lists| {
            let mut pages = 0;
            for _ in 0..BATCH_SLOTS {
                let tail = lists.list(kind).last().filter(|_| pages < pages_max);
                let Some(id) = tail else { break };
                pages += folios.get(id).pages();
                match folios.try_get(id) {
                    Ok(folio) => {
                        lists.remove(folios, id);
                        isolated.push(folio);
                    }
                    Err(_) => lists.rotate(folios, id, kind),
                }
            }
        });
    }

    /// Puts isolated folios at the head of a list, by default the one that each was on, and puts
    /// the references of the isolation.
    pub(crate) fn put_back(
        &self,
        folios: &Folios,
        isolated: &mut Vec<FolioRef<'_>>,
        kind: Option<ListKind>,
    ) {
        if isolated.is_empty() {
            return;
        }
        self.change(|lists| {
            for folio in isolated.iter() {
                lists.add(folios, folio.id(), kind.unwrap_or(ListKind::of(folio.folio())));
            }
        });
        isolated.clear();
    }

    /// Moves up to a batch of folios from the tail of FRESH to the head of OLD, until they have
    /// `pages_max` pages together. Calls `aged` for each, under the lock of the lists. Returns the
    /// number of pages moved.
    pub(crate) fn age(&self, folios: &Folios, pages_max: u64, mut aged: impl FnMut(&Folio)) -> u64 {
        self.change(|lists| {
            let mut pages = 0;
            for _ in 0..BATCH_SLOTS {
                let tail = lists.list(ListKind::Fresh).last().filter(|_| pages < pages_max);
                let Some(id) = tail else { break };
                let folio = folios.get(id);
                pages += folio.pages();
                lists.age(folios, id);
                aged(folio);
            }
            pages
        })
    }

    /// Moves the folios that are on a list to the tail of OLD, so that they are evicted next. Puts
    /// the references.
    pub(crate) fn demote(&self, folios: &Folios, unwanted: &mut Vec<FolioRef<'_>>) {
        if unwanted.is_empty() {
            return;
        }
        self.change(|lists| {
            for folio in unwanted.iter() {
                if folio.folio().flags.get(Flag::OnLru) {
                    lists.demote(folios, folio.id());
                }
            }
        });
        unwanted.clear();
    }

    /// Takes one folio off its list, and returns `true` if it was on one. The caller holds a
    /// reference.
    pub(crate) fn isolate_one(&self, folios: &Folios, id: FolioId) -> bool {
        self.change(|lists| {
            let listed = folios.get(id).flags.get(Flag::OnLru);
            if listed {
                lists.remove(folios, id);
            }
            listed
        })
    }

    /// Returns the `ids` whose folios are in the older half of OLD; none while that list has less
    /// than half of its share.
    pub(crate) fn old_among(&self, folios: &Folios, ids: &[FolioId]) -> Vec<FolioId> {
        let lists = self.lists.lock();
        if lists.sizes().old_excess_pages(true) == 0 {
            return Vec::new();
        }
        ids.iter().copied().filter(|id| lists.is_old(folios, *id)).collect()
    }

    /// Replaces the folio `old` on its list, if it is on one, by `new`. The caller owns `old`,
    /// frozen, and holds a reference to `new`, which is on no list.
    pub(crate) fn replace(&self, folios: &Folios, old: FolioId, new: FolioId) {
        if folios.get(old).flags.clear(Flag::Unlisted) {
            // The pages stay counted. Twice, they would leave too little room to another file.
            folios.get(new).flags.set(Flag::Unlisted);
            return;
        }
        self.change(|lists| lists.replace(folios, old, new));
    }

    /// Takes a folio that is being freed off its list, if it is on one. The caller owns it, frozen.
    pub(crate) fn forget(&self, folios: &Folios, id: FolioId) {
        // LRU-2: linking a folio takes a reference, and none is left, so a clear flag stays clear.
        let folio = folios.get(id);
        if folio.flags.get(Flag::OnLru) {
            let _was_listed = self.isolate_one(folios, id);
        }
        if folio.flags.get(Flag::Unlisted) {
            self.unlisted_pages.fetch_sub(folio.pages(), Ordering::Relaxed);
        }
    }
}

/// Number of epochs that a folio spends on OLD before it is evicted, as long as folios are added
/// and evicted at the same rate; the 8-bit clock wraps after several times as many.
const EPOCHS: u64 = 32;

#[derive(Debug)]
struct List {
    head: u32,
    tail: u32,
    pages: u64,
}

impl List {
    fn last(&self) -> Option<FolioId> {
        (self.tail != NO_FOLIO).then_some(FolioId(self.tail))
    }
}

impl Default for List {
    fn default() -> Self {
        Self { head: NO_FOLIO, tail: NO_FOLIO, pages: 0 }
    }
}

/// The lists. Accessed only under their lock (rule 3 of `page`).
#[derive(Debug, Default)]
struct Lists {
    fresh: List,
    old: List,
    active: List,
    /// Clock of OLD; see [`EPOCHS`].
    epoch: u8,
    epoch_pages: u64,
}

impl Lists {
    fn sizes(&self) -> ListSizes {
        ListSizes {
            fresh_pages: self.fresh.pages,
            old_pages: self.old.pages,
            active_pages: self.active.pages,
        }
    }

    fn add(&mut self, folios: &Folios, id: FolioId, kind: ListKind) {
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
    fn age(&mut self, folios: &Folios, id: FolioId) {
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
    fn replace(&mut self, folios: &Folios, old: FolioId, new: FolioId) {
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

    fn is_old(&self, folios: &Folios, id: FolioId) -> bool {
        let folio = folios.get(id);
        let is_on_old = folio.flags.get(Flag::OnLru) && ListKind::of(folio) == ListKind::Old;
        let age = self.epoch.wrapping_sub(folio.lru_epoch.load(Ordering::Relaxed));
        is_on_old && u64::from(age) >= EPOCHS / 2
    }

    /// Moves a folio from its position in a list to the head. ON_LRU stays set throughout: the
    /// folio may be in the process of being freed, and if the last put read a clear flag, the folio
    /// would stay linked (LRU-2).
    fn rotate(&mut self, folios: &Folios, id: FolioId, kind: ListKind) {
        self.unlink(folios, id);
        self.link(folios, id, kind);
    }

    /// Moves a folio to the tail of OLD. ON_LRU stays set, as in [`Self::rotate`].
    fn demote(&mut self, folios: &Folios, id: FolioId) {
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

    fn remove(&mut self, folios: &Folios, id: FolioId) {
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

    fn list(&mut self, kind: ListKind) -> &mut List {
        match kind {
            ListKind::Fresh => &mut self.fresh,
            ListKind::Old => &mut self.old,
            ListKind::Active => &mut self.active,
        }
    }
}

/// Folios added by one CPU that are not on the lists yet, with a reference to each.
#[derive(Debug, Default)]
struct CpuBatch(ArrayVec<FolioId, BATCH_SLOTS>);

impl Lru {
    /// Adds a new folio to the batch of `cpu`, which takes over the reference. The folio goes to
    /// ACTIVE if that flag is set, otherwise to FRESH.
    pub(crate) fn add(&self, folios: &Folios, folio: FolioRef<'_>, cpu: usize) {
        let cpu = cpu % self.cpus.len();
        let mut batch = self.cpus[cpu].lock();
        folio.folio().set_batch_cpu(cpu);
        // A large folio does not wait in a batch: that would hide too many pages from reclaim.
        let large = folio.folio().order() > 0;
        batch.0.push(folio.into_id());
        if batch.0.is_full() || large {
            self.move_to_lists(folios, &mut batch);
        }
    }

    /// Moves the folios in the batch of `cpu` to the lists (LRU-3). Returns `true` if there were
    /// any.
    pub(crate) fn drain(&self, folios: &Folios, cpu: usize) -> bool {
        self.drain_for(folios, cpu, |_| true)
    }

    /// Drains the batch of `cpu` if it holds one of the `wanted` folios, so that none of them is in
    /// it afterwards. Returns `true` if it did.
    pub(crate) fn drain_for(
        &self,
        folios: &Folios,
        cpu: usize,
        wanted: impl Fn(FolioId) -> bool,
    ) -> bool {
        let mut batch = self.cpus[cpu % self.cpus.len()].lock();
        let found = batch.0.iter().any(|id| wanted(*id));
        if found {
            self.move_to_lists(folios, &mut batch);
        }
        found
    }

    /// Drains the batches of all CPUs. Returns the number of batches that were not empty.
    /// Concurrent calls share one drain.
    pub(crate) fn drain_all(&self, folios: &Folios) -> usize {
        // Relaxed: the locks of the batches order it. If a drain missed a folio that was added
        // before this load, it had stored its generation before that folio was added.
        let asked = self.generation.load(Ordering::Relaxed);
        let _draining = self.draining.lock();
        if self.generation.load(Ordering::Relaxed) != asked {
            return 0;
        }
        self.generation.store(asked + 1, Ordering::Relaxed);
        (0..self.cpus.len()).filter(|cpu| self.drain(folios, *cpu)).count()
    }

    /// Moves the folios of a CPU's batch to their lists, and puts the references that the batch
    /// held.
    fn move_to_lists(&self, folios: &Folios, batch: &mut CpuBatch) {
        let adds = std::mem::take(&mut batch.0);
        self.change(|lists| {
            for id in &adds {
                let is_active = folios.get(*id).flags.get(Flag::Active);
                let kind = if is_active { ListKind::Active } else { ListKind::Fresh };
                lists.add(folios, *id, kind);
            }
        });
        adds.into_iter().for_each(|id| drop(folios.adopt(id)));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Returns the folios of a list, oldest first, and checks that both link directions agree.
    fn walk(lists: &Lists, folios: &Folios, kind: ListKind) -> Vec<u32> {
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

    /// Nothing is refused for lack of room while a folio is moved.
    #[test]
    fn a_folio_on_no_list_is_counted_once_while_it_is_replaced() {
        let (folios, lru) = (Folios::without_reaper(2), Lru::new(1));
        folios.init_free(FolioId(0), 2);
        let [old, new] = [0, 1].map(|id| folios.start(FolioId(id), 0, 0, 0).into_id());
        lru.try_count_unlisted(1, 1).unwrap().keep_for(folios.get(old));
        lru.replace(&folios, old, new);
        assert_eq!(lru.unlisted_pages(), 1);
        lru.forget(&folios, old);
        assert_eq!(lru.unlisted_pages(), 1);
        lru.forget(&folios, new);
        assert_eq!(lru.unlisted_pages(), 0);
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
    fn folios_age_in_order_with_their_flags() {
        let (folios, lru) = (Folios::without_reaper(8), Lru::new(1));
        lru.change(|lists| (0..6).for_each(|id| lists.add(&folios, FolioId(id), ListKind::Fresh)));
        let mut aged = 0;
        let pages = lru.age(&folios, 4, |_| aged += 1);
        assert_eq!((pages, aged), (4, 4));
        let lists = lru.lists.lock();
        assert_eq!(walk(&lists, &folios, ListKind::Old), [0, 1, 2, 3]);
        assert_eq!(walk(&lists, &folios, ListKind::Fresh), [4, 5]);
        assert!((0..4).all(|id| ListKind::of(folios.get(FolioId(id))) == ListKind::Old));
        assert!(folios.get(FolioId(3)).flags.get(Flag::OnLru));
        assert_eq!(lists.sizes().listed_pages(), 6);
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

//! The LRU lists: which folios were used recently, and in which order the others are evicted.
//!
//! The lists FRESH, OLD and ACTIVE are linked through the descriptors (`lists.rs`; rule 3 of
//! `page`); ARCHITECTURE.md says what moves between them, and why. In front of them, each CPU has a
//! batch, so that adding a folio takes the lock of the lists only once in 31 times. Each class of
//! files has lists of its own (`classes.rs`); the batches are for all.
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

use super::classes::Classes;
use super::lists::{ClassLists, ListKind, ListSizes};
use crate::page::{BATCH_SLOTS, CLASSES_MAX, ClassId, Flag, Folio, FolioId, FolioRef, Folios};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use arrayvec::ArrayVec;

#[derive(Debug)]
pub(crate) struct Lru {
    lists: Mutex<ClassLists>,
    working_sets: [WorkingSet; CLASSES_MAX],
    unlisted_pages: AtomicU64,
    pub(crate) classes: Classes,
    cpus: Box<[Mutex<CpuBatch>]>,
    /// Number of drains of all batches that have begun (G4).
    generation: AtomicU64,
    draining: Mutex<()>,
}

/// Clock and counts by which refaults of a class are judged (`workingset.rs`).
#[derive(Debug)]
pub(crate) struct WorkingSet {
    pub(super) listed_pages: AtomicU64,
    /// Pages evicted so far: the clock of refault distances.
    pub(super) clock: AtomicU64,
    /// Pages of refaults so far that were not near.
    pub(super) distant_pages: AtomicU64,
    /// Pages that became active because of their use, since the last look at them.
    pub(super) useful_pages: AtomicU64,
    pub(super) keeps_distant: AtomicBool,
}

impl Default for WorkingSet {
    fn default() -> Self {
        Self {
            listed_pages: AtomicU64::new(0),
            clock: AtomicU64::new(0),
            distant_pages: AtomicU64::new(0),
            // Many: nothing is known before the first look.
            useful_pages: AtomicU64::new(1 << 32),
            keeps_distant: AtomicBool::new(false),
        }
    }
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
            lists: Mutex::new(ClassLists::default()),
            working_sets: std::array::from_fn(|_| WorkingSet::default()),
            unlisted_pages: AtomicU64::new(0),
            classes: Classes::default(),
            cpus: (0..cpus.max(1)).map(|_| Mutex::default()).collect(),
            generation: AtomicU64::new(0),
            draining: Mutex::new(()),
        }
    }

    pub(crate) fn working_set(&self, class: ClassId) -> &WorkingSet {
        &self.working_sets[class.number()]
    }

    /// Returns the pages on the lists of a class.
    pub(crate) fn sizes_of(&self, class: ClassId) -> ListSizes {
        self.lists.lock().all[class.number()].sizes()
    }

    /// Returns the pages on the lists of all classes.
    pub(crate) fn sizes(&self) -> ListSizes {
        let lists = self.lists.lock();
        let mut sum = ListSizes::default();
        lists.used().iter().for_each(|lists| sum += lists.sizes());
        sum
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

    fn change<T>(&self, work: impl FnOnce(&mut ClassLists) -> T) -> T {
        let mut lists = self.lists.lock();
        let answer = work(&mut lists);
        for (set, lists) in self.working_sets.iter().zip(lists.used()) {
            set.listed_pages.store(lists.sizes().listed_pages(), Ordering::Relaxed);
        }
        answer
    }

    /// Takes folios off the tail of a list of a class, with a reference each, until the batch is
    /// full or they have `pages_max` pages together.
    ///
    /// A folio that is frozen or being freed is rotated to the head; the thread that froze it takes
    /// it off.
    pub(crate) fn isolate<'a>(
        &self,
        folios: &'a Folios,
        (class, kind): (ClassId, ListKind),
        pages_max: u64,
        isolated: &mut Vec<FolioRef<'a>>,
    ) {
        self.change(|lists| {
            let lists = &mut lists.all[class.number()];
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
                let kind = kind.unwrap_or(ListKind::of(folio.folio()));
                lists.of(folio.folio()).add(folios, folio.id(), kind);
            }
        });
        isolated.clear();
    }

    /// Moves up to a batch of folios of a class from the tail of FRESH to the head of OLD, until
    /// they have `pages_max` pages together. Calls `aged` for each, under the lock of the lists.
    /// Returns the number of pages moved.
    pub(crate) fn age(
        &self,
        folios: &Folios,
        class: ClassId,
        pages_max: u64,
        mut aged: impl FnMut(&Folio),
    ) -> u64 {
        self.change(|lists| {
            let lists = &mut lists.all[class.number()];
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
                    lists.of(folio.folio()).demote(folios, folio.id());
                }
            }
        });
        unwanted.clear();
    }

    /// Takes one folio off its list, and returns `true` if it was on one. The caller holds a
    /// reference.
    pub(crate) fn isolate_one(&self, folios: &Folios, id: FolioId) -> bool {
        self.change(|lists| {
            let folio = folios.get(id);
            let listed = folio.flags.get(Flag::OnLru);
            if listed {
                lists.of(folio).remove(folios, id);
            }
            listed
        })
    }

    /// Returns the `ids` whose folios are in the older half of the OLD of their class; none of a
    /// class in which that list has less than half of its share, or that has no more than its
    /// floor.
    pub(crate) fn old_among(&self, folios: &Folios, ids: &[FolioId]) -> Vec<FolioId> {
        let mut lists = self.lists.lock();
        let is_old = |id: &FolioId| {
            let folio = folios.get(*id);
            let of_class = lists.of(folio);
            let sizes = of_class.sizes();
            sizes.old_excess_pages(true) > 0
                && of_class.is_old(folios, *id)
                && sizes.listed_pages() > self.classes.limits(folio.flags.class()).floor_pages
        };
        ids.iter().copied().filter(is_old).collect()
    }

    /// Returns the pages that each class has on its lists beyond its floor, with its order: those
    /// that give pages when memory is short.
    pub(crate) fn givers(&self) -> ArrayVec<Giver, CLASSES_MAX> {
        let lists = self.lists.lock();
        let giver = |class: ClassId| {
            let limits = self.classes.limits(class);
            let listed_pages = lists.all[class.number()].sizes().listed_pages();
            let pages = listed_pages.saturating_sub(limits.floor_pages);
            Giver { class, order: limits.order, pages }
        };
        self.classes.all().map(giver).collect()
    }

    /// Replaces the folio `old` on its list, if it is on one, by `new`. The caller owns `old`,
    /// frozen, and holds a reference to `new`, which is on no list.
    pub(crate) fn replace(&self, folios: &Folios, old: FolioId, new: FolioId) {
        // The pages stay counted. The new folio has its class before it is on a list.
        let class = folios.get(old).flags.class();
        folios.get(new).flags.set_class(class);
        self.move_place(folios, old, new);
        let _kept = folios.get(old).flags.take_class();
    }

    fn move_place(&self, folios: &Folios, old: FolioId, new: FolioId) {
        if folios.get(old).flags.clear(Flag::Unlisted) {
            // The pages stay counted. Twice, they would leave too little room to another file.
            folios.get(new).flags.set(Flag::Unlisted);
            return;
        }
        self.change(|lists| lists.of(folios.get(old)).replace(folios, old, new));
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
        self.classes.forget(folio);
    }
}

/// Pages of a class beyond its floor ([`Lru::givers`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Giver {
    pub(crate) class: ClassId,
    pub(crate) order: u8,
    pub(crate) pages: u64,
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
                let folio = folios.get(*id);
                let is_active = folio.flags.get(Flag::Active);
                let kind = if is_active { ListKind::Active } else { ListKind::Fresh };
                lists.of(folio).add(folios, *id, kind);
            }
        });
        adds.into_iter().for_each(|id| drop(folios.adopt(id)));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::lists::tests::walk;
    use super::*;

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
    fn folios_age_in_order_with_their_flags() {
        let (folios, lru) = (Folios::without_reaper(8), Lru::new(1));
        let add = |lists: &mut ClassLists, id| {
            lists.of(folios.get(FolioId(id))).add(&folios, FolioId(id), ListKind::Fresh);
        };
        lru.change(|lists| (0..6).for_each(|id| add(lists, id)));
        let mut aged = 0;
        let pages = lru.age(&folios, ClassId::DEFAULT, 4, |_| aged += 1);
        assert_eq!((pages, aged), (4, 4));
        let lists = &lru.lists.lock().all[0];
        assert_eq!(walk(lists, &folios, ListKind::Old), [0, 1, 2, 3]);
        assert_eq!(walk(lists, &folios, ListKind::Fresh), [4, 5]);
        assert!((0..4).all(|id| ListKind::of(folios.get(FolioId(id))) == ListKind::Old));
        assert!(folios.get(FolioId(3)).flags.get(Flag::OnLru));
        assert_eq!(lists.sizes().listed_pages(), 6);
    }

    #[test]
    fn each_class_has_lists_of_its_own_and_keeps_its_floor() {
        let (folios, lru) = (Folios::without_reaper(8), Lru::new(1));
        folios.init_free(FolioId(0), 8);
        let class = lru.classes.find_or_add("index").unwrap();
        for id in 0..6 {
            let folio = folios.start(FolioId(id), 0, 0, 0);
            folio.folio().flags.set_class(if id < 4 { class } else { ClassId::DEFAULT });
            let _for_ever = folio.try_clone().expect("few references").into_id();
            lru.add(&folios, folio, 0);
        }
        lru.drain_all(&folios);
        assert_eq!(lru.sizes().fresh_pages, 6);
        let pages = |class| lru.sizes_of(class).listed_pages();
        assert_eq!((pages(class), pages(ClassId::DEFAULT)), (4, 2));
        let change = |limits: &mut super::super::classes::Limits, _| {
            (limits.floor_pages, limits.order) = (3, 7);
            Ok::<(), ()>(())
        };
        lru.classes.change_limits(class, change).unwrap();
        let given: Vec<_> = lru.givers().iter().map(|it| (it.class, it.order, it.pages)).collect();
        assert_eq!(given, [(ClassId::DEFAULT, 128, 2), (class, 7, 1)]);
        let mut isolated = Vec::new();
        lru.isolate(&folios, (class, ListKind::Fresh), u64::MAX, &mut isolated);
        assert_eq!(isolated.iter().map(|it| it.id().0).collect::<Vec<_>>(), [0, 1, 2, 3]);
        lru.put_back(&folios, &mut isolated, Some(ListKind::Active));
        assert_eq!((lru.sizes_of(class).active_pages, pages(ClassId::DEFAULT)), (4, 2));
        // A folio that is moved stays in its class.
        lru.replace(&folios, FolioId(1), FolioId(7));
        assert_eq!(folios.get(FolioId(7)).flags.class(), class);
        assert_eq!((folios.get(FolioId(1)).flags.class(), pages(class)), (ClassId::DEFAULT, 4));
    }
}

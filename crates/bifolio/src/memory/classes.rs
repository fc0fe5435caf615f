//! Classes: parts of the memory of a cache, each for the files that were opened in it.
//!
//! A class has LRU lists and a clock of evictions of its own (`lru.rs`, `workingset.rs`), so what
//! is used in one class says nothing about pages of another. `reclaim/victims.rs` decides which
//! class gives pages:
//!
//! - FLOOR: a class with no more pages than its floor gives none while another one has more than
//!   its own, unless none of those can be evicted.
//! - CEILING: the pages of a class are counted before they have frames, and a fill that would pass
//!   the ceiling evicts pages of its own class first.
//! - ORDER: of the classes above their floors, those of the lowest order give first.
//!
//! As the kernel's control groups (`memory.low`, `memory.max`): classes of one order give in
//! proportion to what each has above its floor.
//!
//! Files without a class are in class 0, which has no floor and no ceiling, and whose pages are not
//! counted: a cache without classes pays nothing. Pages of memory files without a swap cannot be
//! evicted, and count for no class.
//!
//! PROTOCOL COUNT, of the pages of a class. CLASS-1: the count is that of the folios that have the
//! number of the class in their flags, plus those about to get it.
//!
//! ```text
//!  FILL                                        LAST PUT, of any thread
//!  N1 count += pages, unless that passes       P1 take the number out of the flags of the folio,
//!     the ceiling (one CAS)                       which is frozen
//!  N2 start a folio                            P2 count -= pages
//!  N3 put the number into its flags (it is
//!     locked, and in no table)
//! ```
//!
//! A fill that fails between N1 and N3 gives its pages back. A relocation moves the number from the
//! old folio to the new one (`Lru::replace`).

use crate::page::{CLASSES_MAX, ClassId, Folio};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// The pages that a class may have, and the order in which it gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) floor_pages: u64,
    pub(crate) ceiling_pages: u64,
    pub(crate) order: u8,
}

/// The order of a class that nothing was said about.
pub(crate) const ORDER_DEFAULT: u8 = 128;

impl Limits {
    const NONE: Self = Self { floor_pages: 0, ceiling_pages: u64::MAX, order: ORDER_DEFAULT };
}

/// A class. On cache lines of its own: each miss counts here.
#[derive(Debug)]
#[repr(align(128))]
struct Share {
    pages: AtomicU64,
    floor_pages: AtomicU64,
    ceiling_pages: AtomicU64,
    order: AtomicU64,
    misses: AtomicU64,
    refaults: AtomicU64,
    evicted_pages: AtomicU64,
}

impl Default for Share {
    fn default() -> Self {
        Self {
            pages: AtomicU64::new(0),
            floor_pages: AtomicU64::new(Limits::NONE.floor_pages),
            ceiling_pages: AtomicU64::new(Limits::NONE.ceiling_pages),
            order: AtomicU64::new(Limits::NONE.order.into()),
            misses: AtomicU64::new(0),
            refaults: AtomicU64::new(0),
            evicted_pages: AtomicU64::new(0),
        }
    }
}

/// Counts of the pages of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClassCounts {
    pub(crate) pages: u64,
    pub(crate) misses: u64,
    pub(crate) refaults: u64,
    pub(crate) evicted_pages: u64,
}

#[derive(Debug)]
pub(crate) struct Classes {
    /// Names of the classes from 1 on.
    names: Mutex<Vec<String>>,
    /// Number of classes, with class 0. Only grows.
    count: AtomicU64,
    shares: [Share; CLASSES_MAX],
}

impl Default for Classes {
    fn default() -> Self {
        let shares = std::array::from_fn(|_| Share::default());
        Self { names: Mutex::default(), count: AtomicU64::new(1), shares }
    }
}

/// Pages counted for a class ([`Classes::try_count`]) until this is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Counted<'c> {
    classes: &'c Classes,
    class: ClassId,
    pages: u64,
}

impl Counted<'_> {
    /// N3: gives the pages to `folio`, which is new and locked: they count until it is freed.
    pub(crate) fn keep_for(mut self, folio: &Folio) {
        debug_assert_eq!(self.pages, if self.class.is_default() { 0 } else { folio.pages() });
        folio.flags.set_class(self.class);
        self.pages = 0;
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if self.pages > 0 {
            self.classes.share(self.class).pages.fetch_sub(self.pages, Ordering::Relaxed);
        }
    }
}

impl Classes {
    fn share(&self, class: ClassId) -> &Share {
        &self.shares[class.number()]
    }

    /// Returns the number of classes, with class 0.
    pub(crate) fn count(&self) -> usize {
        // Acquire: pairs with the Release in `find_or_add`: the limits are those without a limit.
        self.count.load(Ordering::Acquire) as usize
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = ClassId> {
        (0..self.count()).map(ClassId::new)
    }

    pub(crate) fn find(&self, name: &str) -> Option<ClassId> {
        let names = self.names.lock();
        names.iter().position(|known| known == name).map(|place| ClassId::new(place + 1))
    }

    /// Returns the class of this name, a new one if there is none; `None` if there are as many as
    /// there can be.
    pub(crate) fn find_or_add(&self, name: &str) -> Option<ClassId> {
        let mut names = self.names.lock();
        if let Some(place) = names.iter().position(|known| known == name) {
            return Some(ClassId::new(place + 1));
        }
        if names.len() + 1 == CLASSES_MAX {
            return None;
        }
        names.push(name.to_owned());
        // Release: pairs with the Acquire in `count`.
        self.count.store(names.len() as u64 + 1, Ordering::Release);
        Some(ClassId::new(names.len()))
    }

    /// Returns the name of a class; that of class 0 is empty.
    pub(crate) fn name(&self, class: ClassId) -> String {
        let place = class.number().checked_sub(1);
        place.and_then(|place| self.names.lock().get(place).cloned()).unwrap_or_default()
    }

    pub(crate) fn limits(&self, class: ClassId) -> Limits {
        let share = self.share(class);
        // Relaxed, here and below: limits and counts order nothing.
        Limits {
            floor_pages: share.floor_pages.load(Ordering::Relaxed),
            ceiling_pages: share.ceiling_pages.load(Ordering::Relaxed),
            order: share.order.load(Ordering::Relaxed) as u8,
        }
    }

    /// Changes the limits of a class if `change` succeeds, which also gets the sum of the floors of
    /// all others. Calls serialize.
    pub(crate) fn change_limits<E>(
        &self,
        class: ClassId,
        change: impl FnOnce(&mut Limits, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let _alone = self.names.lock();
        let others = self.all().filter(|other| *other != class);
        let floors_pages = others.map(|other| self.limits(other).floor_pages).sum();
        let mut limits = self.limits(class);
        change(&mut limits, floors_pages)?;
        let share = self.share(class);
        share.floor_pages.store(limits.floor_pages, Ordering::Relaxed);
        share.ceiling_pages.store(limits.ceiling_pages, Ordering::Relaxed);
        share.order.store(limits.order.into(), Ordering::Relaxed);
        Ok(())
    }

    /// N1: counts `pages` for a class, if it stays at or below its ceiling.
    pub(crate) fn try_count(&self, class: ClassId, pages: u64) -> Option<Counted<'_>> {
        if class.is_default() {
            return Some(Counted { classes: self, class, pages: 0 });
        }
        let share = self.share(class);
        let ceiling_pages = share.ceiling_pages.load(Ordering::Relaxed);
        let added = |before: u64| Some(before + pages).filter(|all| *all <= ceiling_pages);
        let relaxed = Ordering::Relaxed;
        share.pages.fetch_update(relaxed, relaxed, added).ok()?;
        Some(Counted { classes: self, class, pages })
    }

    /// P1, P2: ends the count of a folio that is being freed. The caller owns it, frozen.
    pub(super) fn forget(&self, folio: &Folio) {
        let class = folio.flags.take_class();
        if !class.is_default() {
            self.share(class).pages.fetch_sub(folio.pages(), Ordering::Relaxed);
        }
    }

    /// Returns the number of pages that `pages` more would have beyond the ceiling of a class.
    pub(crate) fn excess_pages(&self, class: ClassId, pages: u64) -> u64 {
        let share = self.share(class);
        let all_pages = share.pages.load(Ordering::Relaxed) + pages;
        all_pages.saturating_sub(share.ceiling_pages.load(Ordering::Relaxed))
    }

    pub(crate) fn note_miss(&self, class: ClassId) {
        if !class.is_default() {
            self.share(class).misses.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn note_refault(&self, class: ClassId) {
        if !class.is_default() {
            self.share(class).refaults.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn note_eviction(&self, class: ClassId, pages: u64) {
        if !class.is_default() {
            self.share(class).evicted_pages.fetch_add(pages, Ordering::Relaxed);
        }
    }

    /// Returns the counts of a class but class 0, which has none.
    pub(crate) fn counts(&self, class: ClassId) -> ClassCounts {
        let share = self.share(class);
        ClassCounts {
            pages: share.pages.load(Ordering::Relaxed),
            misses: share.misses.load(Ordering::Relaxed),
            refaults: share.refaults.load(Ordering::Relaxed),
            evicted_pages: share.evicted_pages.load(Ordering::Relaxed),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_class_and_there_are_fifteen() {
        let classes = Classes::default();
        assert_eq!(classes.find("index"), None);
        let index = classes.find_or_add("index").unwrap();
        assert_eq!(classes.find_or_add("index"), Some(index));
        assert_eq!(classes.find("index"), Some(index));
        assert_eq!((classes.name(index).as_str(), classes.count()), ("index", 2));
        for number in 2..CLASSES_MAX {
            assert!(classes.find_or_add(&number.to_string()).is_some());
        }
        assert_eq!(classes.find_or_add("one more"), None);
        assert_eq!(classes.find_or_add("index"), Some(index));
        assert_eq!(classes.all().count(), CLASSES_MAX);
    }

    #[test]
    fn pages_are_counted_up_to_the_ceiling_and_until_the_folio_is_freed() {
        let (classes, folio) = (Classes::default(), Folio::default());
        let class = classes.find_or_add("index").unwrap();
        let set = |ceiling_pages| {
            let change = |limits: &mut Limits, _| {
                limits.ceiling_pages = ceiling_pages;
                Ok::<(), ()>(())
            };
            classes.change_limits(class, change).unwrap();
        };
        set(2);
        let first = classes.try_count(class, 1).unwrap();
        let second = classes.try_count(class, 1).unwrap();
        assert!(classes.try_count(class, 1).is_none());
        drop(second);
        first.keep_for(&folio);
        assert_eq!(classes.counts(class).pages, 1);
        set(0);
        assert_eq!((classes.excess_pages(class, 0), classes.excess_pages(class, 3)), (1, 4));
        classes.forget(&folio);
        classes.forget(&folio);
        assert_eq!(classes.counts(class).pages, 0);
    }

    #[test]
    fn floors_of_others_are_told_before_a_floor_changes() {
        let classes = Classes::default();
        let [index, log] = ["index", "log"].map(|name| classes.find_or_add(name).unwrap());
        let set = |class, floor_pages: u64| {
            classes.change_limits(class, |limits, others_pages| {
                limits.floor_pages = floor_pages;
                if floor_pages + others_pages > 10 { Err(others_pages) } else { Ok(()) }
            })
        };
        assert_eq!((set(index, 6), set(log, 4), set(index, 7)), (Ok(()), Ok(()), Err(4)));
        assert_eq!(classes.limits(index).floor_pages, 6);
    }
}

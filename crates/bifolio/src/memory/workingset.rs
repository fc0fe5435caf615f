//! Shadows: the value that an eviction stores in the Entry, and how a refault uses it.
//!
//! After the kernel's working-set detection (`mm/workingset.c`). A clock of each class counts the
//! pages that are evicted without having been active; the difference between two readings is the
//! number of additional pages that probation would have needed to keep the page (the refault
//! distance). If that is no more than half of all listed pages, the page becomes active at once. A
//! page that was evicted from the active list is used too rarely for that: its shadow is *far*.
//!
//! A loop over more pages than memory holds has hardly a near refault, and no page is used on
//! probation: each is evicted just before its next use. While that is so, one in [`KEPT_DIVISOR`]
//! distant refaults makes its page active, too, until the active list has its share; after that
//! fewer do. So a part of the loop stays in memory. The refaults are chosen in *spells*, so that a
//! reader in order finds runs of resident pages.
//!
//! ```text
//!   27        1     0
//!  +-----------+-----+
//!  |   clock   | FAR |
//!  +-----------+-----+
//! ```

use super::lru::WorkingSet;
use super::{ListSizes, Memory};
use crate::page::{Flag, LockedFolio, VALUE_MAX};
use crate::stats::Counter;
use crate::sync::Ordering;

const FAR: u64 = 1;
const CLOCK_SHIFT: u32 = 1;
/// Part of all listed pages within which a refault is near.
const NEAR_DIVISOR: u64 = 2;
/// Part of the spells of distant refaults that are kept.
const KEPT_DIVISOR: u64 = 8;
/// The part of those once the active list has its share: a page stays for many rounds of a loop.
const KEPT_WHEN_FULL_DIVISOR: u64 = 8;
/// Part of all listed pages that are refaults of one spell, rounded down to a power of two.
const SPELL_DIVISOR: u64 = 16;
/// Part of the distant refaults from which on pages that were used on probation, or came back soon
/// after it, show that the lists know what to keep: in a loop over four times the memory in random
/// order, they are less than half of that.
const USEFUL_DIVISOR: u64 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shadow(pub(crate) u64);

impl Shadow {
    fn new(clock: u64, is_far: bool) -> Self {
        Self(((clock << CLOCK_SHIFT) & VALUE_MAX) | if is_far { FAR } else { 0 })
    }

    fn is_far(self) -> bool {
        self.0 & FAR != 0
    }

    /// Returns the number of pages evicted between the creation of the shadow and `clock`. The
    /// clock in a shadow wraps at 27 bits, 512 GiB of evictions: after more evictions than that, a
    /// distant refault may appear near.
    fn distance(self, clock: u64) -> u64 {
        clock.wrapping_sub(self.0 >> CLOCK_SHIFT) & (VALUE_MAX >> CLOCK_SHIFT)
    }
}

impl WorkingSet {
    /// Returns the shadow of a folio of `pages` pages that is about to be evicted from probation,
    /// or on request, and advances the clock.
    pub(crate) fn make_shadow(&self, pages: u64) -> Shadow {
        Shadow::new(self.clock.fetch_add(pages, Ordering::Relaxed), false)
    }

    /// Returns the shadow of a folio that is about to be evicted from the active list.
    pub(crate) fn make_far_shadow(&self) -> Shadow {
        Shadow::new(self.clock.load(Ordering::Relaxed), true)
    }

    /// Returns `true` if a page that was evicted with `shadow` and is read again belongs on the
    /// active list.
    pub(crate) fn is_near_refault(&self, shadow: Shadow) -> bool {
        let distance = shadow.distance(self.clock.load(Ordering::Relaxed));
        let listed_pages = self.listed_pages.load(Ordering::Relaxed);
        !shadow.is_far() && distance <= listed_pages / NEAR_DIVISOR
    }

    /// Counts `pages` that became active because of their use.
    pub(crate) fn note_useful(&self, pages: u64) {
        self.useful_pages.fetch_add(pages, Ordering::Relaxed);
    }

    /// Counts a distant refault of `pages` pages. Returns `true` if they become active all the
    /// same. `sizes` are those of the class.
    fn is_kept_refault(&self, pages: u64, sizes: impl FnOnce() -> ListSizes) -> bool {
        let listed_pages = self.listed_pages.load(Ordering::Relaxed);
        let shift = (listed_pages / SPELL_DIVISOR).max(1).ilog2();
        // Relaxed, here and below: hints. Racing threads may judge one spell twice, or late.
        let before = self.distant_pages.fetch_add(pages, Ordering::Relaxed);
        let spell = before >> shift;
        if !spell.is_multiple_of(KEPT_DIVISOR) {
            return false;
        }
        if before.wrapping_sub(pages) >> shift != spell {
            let useful_pages = self.useful_pages.swap(0, Ordering::Relaxed);
            let is_useful = useful_pages >= (KEPT_DIVISOR << shift) / USEFUL_DIVISOR;
            let may_keep =
                !is_full(sizes()) || (spell / KEPT_DIVISOR).is_multiple_of(KEPT_WHEN_FULL_DIVISOR);
            self.keeps_distant.store(!is_useful && may_keep, Ordering::Relaxed);
        }
        self.keeps_distant.load(Ordering::Relaxed)
    }
}

/// Returns `true` if the active list has about its share.
fn is_full(sizes: ListSizes) -> bool {
    sizes.active_pages > sizes.listed_pages() / 4 * 3
}

impl Memory {
    /// Counts the refault of a page that was evicted with `shadow`, and sets the flags of its new
    /// folio, which is on no list yet, accordingly.
    pub(crate) fn note_refault(&self, locked: &LockedFolio<'_>, shadow: Shadow) {
        self.counters.add(Counter::Refault, 1);
        let class = locked.flags.class();
        self.lru.classes.note_refault(class);
        let set = self.lru.working_set(class);
        let sizes = || self.lru.sizes_of(class);
        if set.is_near_refault(shadow) {
            self.counters.add(Counter::RefaultActivate, 1);
            set.note_useful(locked.pages());
            locked.flags.set(Flag::Active);
        } else if !shadow.is_far() && set.is_kept_refault(locked.pages(), sizes) {
            locked.flags.set(Flag::Active);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_refault_is_near_within_half_of_the_listed_pages() {
        let set = WorkingSet::default();
        let (near, far) = (set.make_shadow(1), set.make_far_shadow());
        for _ in 0..9 {
            let _ = set.make_shadow(1);
        }
        for (listed_pages, is_near) in [(20, true), (19, false)] {
            set.listed_pages.store(listed_pages, Ordering::Relaxed);
            assert_eq!(set.is_near_refault(near), is_near);
            assert!(!set.is_near_refault(far));
        }
    }

    #[test]
    fn spells_of_distant_refaults_are_kept_while_nothing_is_used_on_probation() {
        let set = WorkingSet::default();
        // Spells of 4 pages: 100 / 16, rounded down to a power of two.
        set.listed_pages.store(100, Ordering::Relaxed);
        let is_kept = |_: &u64| set.is_kept_refault(1, ListSizes::default);
        let kept = || -> Vec<u64> { (0..32).filter(is_kept).collect() };
        assert_eq!(kept(), [], "nothing is known yet");
        assert_eq!(kept(), [0, 1, 2, 3]);
        set.note_useful(1);
        assert_eq!(kept(), [0, 1, 2, 3], "less than a sixteenth was used");
        set.note_useful(2);
        assert_eq!(kept(), []);
        assert_eq!(kept(), [0, 1, 2, 3]);
    }

    #[test]
    fn an_eviction_of_an_active_page_does_not_advance_the_clock() {
        let set = WorkingSet::default();
        let before = set.make_far_shadow();
        assert_eq!((set.make_far_shadow(), set.make_shadow(3).is_far()), (before, false));
        assert_eq!(before.distance(set.clock.load(Ordering::Relaxed)), 3);
    }

    #[test]
    fn the_distance_survives_the_wrap_of_the_clock() {
        let wrap = VALUE_MAX >> CLOCK_SHIFT;
        assert_eq!(Shadow::new(wrap, false).distance(wrap.wrapping_add(5)), 5);
        assert_eq!(Shadow::new(0, true).distance(7), 7);
    }
}

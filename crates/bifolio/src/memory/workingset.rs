//! Shadows: the value that an eviction stores in the Entry, and how a refault uses it.
//!
//! Modelled on the kernel's working-set detection (`mm/workingset.c`). A clock counts evicted
//! pages; the difference between two readings is the number of additional pages that the cache
//! would have needed to keep the page (the refault distance). If that is no more than the size of
//! the active list, the page competes with active ones and becomes active at once.
//!
//! ```text
//!   27        1     0
//!  +-----------+------------+
//!  |   clock   | WORKINGSET |
//!  +-----------+------------+
//! ```

use super::{Lru, Memory};
use crate::page::{Flag, LockedFolio, VALUE_MAX};
use crate::stats::Counter;
use crate::sync::Ordering;

const WORKINGSET: u64 = 1;
const CLOCK_SHIFT: u32 = 1;

/// The shadow of an evicted folio; see the [module documentation](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shadow(pub(crate) u64);

impl Shadow {
    fn new(clock: u64, workingset: bool) -> Self {
        Self(((clock << CLOCK_SHIFT) & VALUE_MAX) | if workingset { WORKINGSET } else { 0 })
    }

    /// Returns `true` if the page was active when it was evicted.
    pub(crate) fn is_workingset(self) -> bool {
        self.0 & WORKINGSET != 0
    }

    /// Returns the number of pages evicted between the creation of the shadow and `clock`. The
    /// clock in a shadow wraps at 27 bits, 512 GiB of evictions: after more evictions than that, a
    /// distant refault may appear near.
    fn distance(self, clock: u64) -> u64 {
        clock.wrapping_sub(self.0 >> CLOCK_SHIFT) & (VALUE_MAX >> CLOCK_SHIFT)
    }
}

impl Lru {
    /// Advances the clock for a folio of `pages` pages that is about to be evicted, and returns its
    /// shadow.
    pub(crate) fn make_shadow(&self, pages: u64, workingset: bool) -> Shadow {
        Shadow::new(self.clock.fetch_add(pages, Ordering::Relaxed), workingset)
    }

    /// Returns `true` if a page that was evicted with `shadow` and is read again belongs on the
    /// active list.
    pub(crate) fn is_near_refault(&self, shadow: Shadow) -> bool {
        let distance = shadow.distance(self.clock.load(Ordering::Relaxed));
        distance <= self.active_pages.load(Ordering::Relaxed)
    }
}

impl Memory {
    /// Counts the refault of a page that was evicted with `shadow`, and sets the flags of its new
    /// folio, which is on no list yet, accordingly.
    pub(crate) fn note_refault(&self, locked: &LockedFolio<'_>, shadow: Shadow) {
        self.counters.add(Counter::Refault, 1);
        if shadow.is_workingset() {
            locked.flags.set(Flag::Workingset);
        }
        if self.lru.is_near_refault(shadow) {
            self.counters.add(Counter::RefaultActivate, 1);
            locked.flags.set(Flag::Active);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_refault_is_near_within_the_length_of_the_active_list() {
        let lru = Lru::new(1);
        let shadow = lru.make_shadow(1, true);
        for _ in 0..9 {
            let _ = lru.make_shadow(1, false);
        }
        assert!(shadow.is_workingset());
        for (active_pages, is_near) in [(10, true), (9, false)] {
            lru.active_pages.store(active_pages, Ordering::Relaxed);
            assert_eq!(lru.is_near_refault(shadow), is_near);
        }
    }

    #[test]
    fn the_distance_survives_the_wrap_of_the_clock() {
        let wrap = VALUE_MAX >> CLOCK_SHIFT;
        assert_eq!(Shadow::new(wrap, false).distance(wrap.wrapping_add(5)), 5);
        assert_eq!(Shadow::new(0, true).distance(7), 7);
    }
}

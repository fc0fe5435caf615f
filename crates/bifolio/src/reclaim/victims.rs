//! Which classes give pages when memory is short, how many each, and the room of a class below its
//! ceiling (`memory/classes.rs`).

use super::memory_wait::MemoryWait;
use super::outcome::{ScanCounts, WriteOut};
use super::{ROUND_PAGES, Reclaim, ReclaimLock};
use crate::error::Result;
use crate::inode::Inode;
use crate::memory::{Counted, Giver};
use crate::page::{CLASSES_MAX, ClassId, PAGE_BYTES};
use crate::sync::wait_in_rounds;
use arrayvec::ArrayVec;
use std::ops::ControlFlow;
use std::time::Instant;

/// Returns the classes of one order after the other, the lowest first: those of the next order are
/// asked when these gave too little.
pub(super) fn groups(givers: &mut [Giver]) -> impl Iterator<Item = &mut [Giver]> {
    givers.sort_by_key(|giver| giver.order);
    givers.chunk_by_mut(|one, next| one.order == next.order)
}

/// Removes classes with less than a round's pages above their floors while others have more: scans
/// would find little there, each time.
fn leave_rests(givers: &mut ArrayVec<Giver, CLASSES_MAX>) {
    let has_round = |giver: &Giver| giver.pages >= ROUND_PAGES;
    let least_pages = if givers.iter().any(has_round) { ROUND_PAGES } else { 1 };
    givers.retain(|giver| giver.pages >= least_pages);
}

/// Returns the part of `wanted_pages` that a class gives of a group with `group_pages`: in
/// proportion to its pages, rounded up, and no more than those.
pub(super) fn part_of(giver: &Giver, group_pages: u64, wanted_pages: u64) -> u64 {
    let part = u128::from(wanted_pages) * u128::from(giver.pages);
    (part.div_ceil(u128::from(group_pages.max(1))) as u64).min(giver.pages)
}

impl Reclaim {
    /// Returns the classes that have pages above their floors.
    pub(super) fn givers(&self) -> ArrayVec<Giver, CLASSES_MAX> {
        let mut givers = self.memory.lru.givers();
        leave_rests(&mut givers);
        givers
    }

    /// Counts a new folio of `inode` for the class of the file, and evicts pages of that class if
    /// it would pass its ceiling.
    ///
    /// # Errors
    /// The pages of the class are pinned or cannot be written out.
    pub(crate) fn count_in_class(&self, inode: &Inode) -> Result<Counted<'_>> {
        let pages = 1 << inode.mapping.order();
        match self.memory.lru.classes.try_count(inode.class, pages) {
            Some(counted) => Ok(counted),
            None => self.wait_for_room_in(inode.class, pages),
        }
    }

    /// Counts like [`Self::count_in_class`] but waits for no other thread: evicts only clean
    /// folios, and only if no other thread is reclaiming.
    pub(crate) fn try_count_in_class(&self, inode: &Inode) -> Option<Counted<'_>> {
        let (classes, pages) = (&self.memory.lru.classes, 1 << inode.mapping.order());
        let counted = classes.try_count(inode.class, pages);
        if counted.is_some() {
            return counted;
        }
        let reclaim_lock = ReclaimLock { _guard: self.lock.try_lock()? };
        self.shrink_class(&reclaim_lock, inode.class, pages, WriteOut::Nothing);
        classes.try_count(inode.class, pages)
    }

    #[cold]
    fn wait_for_room_in(&self, class: ClassId, pages: u64) -> Result<Counted<'_>> {
        let since = Some(Instant::now());
        let mut wait = MemoryWait::new(self, pages * PAGE_BYTES);
        wait.may_swap = self.swap.is_some();
        let counted = wait_in_rounds(&mut wait, |wait| {
            self.memory.soundness.check()?;
            Ok(self.make_room_in(class, pages, wait))
        });
        let counted = counted.map_err(|error| {
            let classes = &self.memory.lru.classes;
            let ceiling_bytes = classes.limits(class).ceiling_pages.saturating_mul(PAGE_BYTES);
            error.of_class(&classes.name(class), ceiling_bytes)
        })?;
        self.memory.note_stall(since);
        Ok(counted)
    }

    /// Runs one round for a folio that would pass the ceiling of its class, and counts it if there
    /// is room, under the reclaim lock: the thread that made the room gets it first.
    fn make_room_in(
        &self,
        class: ClassId,
        pages: u64,
        wait: &mut MemoryWait<'_>,
    ) -> ControlFlow<Counted<'_>, ScanCounts> {
        let classes = &self.memory.lru.classes;
        let reclaim_lock = self.lock();
        // Another thread may have made room while this one waited for the reclaim lock.
        if let Some(counted) = classes.try_count(class, pages) {
            return ControlFlow::Break(counted);
        }
        let mut counts = self.shrink_class(&reclaim_lock, class, pages, WriteOut::MemoryFiles);
        if counts.reclaimed_pages == 0 && !self.awaits_swapper(wait) {
            counts = self.sweep_class(&reclaim_lock, class);
        }
        match classes.try_count(class, pages) {
            Some(counted) => ControlFlow::Break(counted),
            None => ControlFlow::Continue(wait.note_round(counts, pages)),
        }
    }

    /// Evicts pages of a class until `pages` more are below its ceiling, and a round's worth at
    /// least.
    pub(crate) fn shrink_class(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        class: ClassId,
        pages: u64,
        write_out: WriteOut,
    ) -> ScanCounts {
        let lru = &self.memory.lru;
        if lru.sizes_of(class).listed_pages() < ROUND_PAGES {
            // The batches may have all that the ceiling allows.
            lru.drain_all(&self.memory.folios);
        }
        // A small class does not lose what it has for one page.
        let round_pages = ROUND_PAGES.min(lru.sizes_of(class).listed_pages() / 4);
        let wanted_pages = lru.classes.excess_pages(class, pages).max(round_pages).max(1);
        self.shrink_one(reclaim_lock, class, wanted_pages, write_out)
    }

    /// Evicts what a lower ceiling of a class no longer allows, as far as no wait is needed.
    pub(crate) fn shrink_to_ceiling(&self, class: ClassId) {
        let excess_pages = || self.memory.lru.classes.excess_pages(class, 0);
        let mut before = u64::MAX;
        while excess_pages() > 0 && excess_pages() < before {
            before = excess_pages();
            self.shrink_class(&self.lock(), class, 0, WriteOut::Nothing);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn giver(number: usize, order: u8, pages: u64) -> Giver {
        Giver { class: ClassId::new(number), order, pages }
    }

    #[test]
    fn the_lowest_order_gives_first_and_small_rests_are_left() {
        let left = |givers: &[Giver]| {
            let mut givers = givers.iter().copied().collect();
            leave_rests(&mut givers);
            let numbers = |group: &mut [Giver]| group.iter().map(|it| it.class.number()).collect();
            groups(&mut givers).map(numbers).collect::<Vec<Vec<_>>>()
        };
        let givers = [giver(0, 128, 900), giver(1, 200, 70), giver(2, 128, 100), giver(3, 1, 31)];
        assert_eq!(left(&givers), [vec![0, 2], vec![1]]);
        let rests = [giver(0, 5, 0), giver(1, 4, 3)];
        assert_eq!(left(&rests), [[1]], "no class has a round's pages");
    }

    #[test]
    fn parts_are_in_proportion_and_no_more_than_a_class_has() {
        let group = [giver(0, 0, 900), giver(1, 0, 100)];
        let parts = |wanted| group.map(|giver| part_of(&giver, 1000, wanted));
        assert_eq!(parts(32), [29, 4]);
        assert_eq!(parts(1), [1, 1]);
        assert_eq!(parts(2000), [900, 100]);
    }
}

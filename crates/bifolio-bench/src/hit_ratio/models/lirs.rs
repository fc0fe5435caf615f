//! LIRS: a page stays if the time between its last two uses is short compared with the others.
//!
//! The recency list has the pages in the order of their last use, down to the oldest one with a
//! short distance. A page that is used again while it is in that list has a short distance. Pages
//! with a long one share a hundredth of memory.
//!
//! Jiang and Zhang, LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy
//! (SIGMETRICS 2002).

use super::Model;
use super::queues::Queues;

/// Pages with a long distance that are in memory.
const RESIDENT: usize = 0;
/// Pages with a long distance that are not, but are in the recency list.
const EVICTED: usize = 1;

/// The recency list and the pages with a long distance.
#[derive(Debug)]
pub(super) struct Lirs {
    recency: Queues<1>,
    long: Queues<2>,
    is_short: Vec<bool>,
    shorts: usize,
    shorts_max: usize,
    capacity: usize,
}

impl Lirs {
    pub(super) fn new(capacity: usize, pages: usize) -> Self {
        let longs = (capacity / 100).max(1);
        Self {
            recency: Queues::new(pages),
            long: Queues::new(pages),
            is_short: vec![false; pages],
            shorts: 0,
            shorts_max: capacity.saturating_sub(longs).max(1),
            capacity,
        }
    }

    /// Removes the pages with a long distance from the old end of the recency list.
    fn prune(&mut self) {
        while let Some(oldest) =
            self.recency.oldest(0).filter(|page| !self.is_short[*page as usize])
        {
            self.recency.remove(oldest);
            if self.long.is_in(EVICTED, oldest) {
                self.long.remove(oldest);
            }
        }
    }

    /// Gives a page a short distance; the oldest of the others loses it.
    fn promote(&mut self, page: u32) {
        self.long.remove(page);
        self.is_short[page as usize] = true;
        self.shorts += 1;
        self.recency.push(0, page);
        if self.shorts > self.shorts_max
            && let Some(oldest) = self.recency.pop(0)
        {
            self.is_short[oldest as usize] = false;
            self.shorts -= 1;
            self.long.push(RESIDENT, oldest);
        }
        self.prune();
    }

    fn evict(&mut self) {
        let Some(victim) = self.long.pop(RESIDENT) else { return };
        if self.recency.is_in(0, victim) {
            self.long.push(EVICTED, victim);
        }
        if self.long.len(EVICTED) > 2 * self.capacity
            && let Some(forgotten) = self.long.pop(EVICTED)
        {
            self.recency.remove(forgotten);
        }
    }
}

impl Model for Lirs {
    fn reference(&mut self, page: u32) -> bool {
        if self.is_short[page as usize] {
            self.recency.push(0, page);
            self.prune();
            return true;
        }
        let hit = self.long.is_in(RESIDENT, page);
        if !hit && self.shorts + self.long.len(RESIDENT) >= self.capacity {
            self.evict();
        }
        if self.recency.is_in(0, page) || self.shorts < self.shorts_max {
            self.promote(page);
        } else {
            self.recency.push(0, page);
            self.long.push(RESIDENT, page);
        }
        hit
    }
}

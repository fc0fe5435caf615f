//! Clock2Q+: a small queue, a main CLOCK, and a list of pages evicted from the small queue. Hits
//! in the first half of the small queue do not count: they are correlated with the miss.
//!
//! Yang and others, Clock2Q+: A Simple and Efficient Replacement Algorithm for Metadata Cache
//! (2025).

use super::Model;
use super::queues::Queues;

const SMALL: usize = 0;
const MAIN: usize = 1;
/// Not in memory: only the number of the page is known.
const GHOST: usize = 2;

/// Three queues, one bit for each page, and when it came.
#[derive(Debug)]
pub(super) struct Clock2QPlus {
    queues: Queues<3>,
    used: Vec<bool>,
    /// Number of pages added to the small queue before this one.
    added: Vec<usize>,
    adds: usize,
    capacity: usize,
    small: usize,
}

impl Clock2QPlus {
    pub(super) fn new(capacity: usize, pages: usize) -> Self {
        Self {
            queues: Queues::new(pages),
            used: vec![false; pages],
            added: vec![0; pages],
            adds: 0,
            capacity,
            small: (capacity / 10).max(1),
        }
    }

    /// Moves pages on until one leaves memory.
    fn evict(&mut self) {
        loop {
            let is_small = self.queues.len(SMALL) >= self.small || self.queues.len(MAIN) == 0;
            let list = if is_small { SMALL } else { MAIN };
            let Some(candidate) = self.queues.pop(list) else { return };
            if std::mem::take(&mut self.used[candidate as usize]) {
                self.queues.push(MAIN, candidate);
                continue;
            }
            if list == SMALL {
                self.queues.push(GHOST, candidate);
                if self.queues.len(GHOST) > self.capacity / 2 {
                    self.queues.pop(GHOST);
                }
            }
            return;
        }
    }
}

impl Model for Clock2QPlus {
    fn reference(&mut self, page: u32) -> bool {
        let (index, was_in) = (page as usize, self.queues.list_of(page));
        if matches!(was_in, Some(SMALL | MAIN)) {
            let is_correlated = self.adds - self.added[index] <= self.small / 2;
            self.used[index] |= was_in == Some(MAIN) || !is_correlated;
            return true;
        }
        self.used[index] = false;
        if self.queues.len(SMALL) + self.queues.len(MAIN) == self.capacity {
            self.evict();
        }
        if was_in == Some(GHOST) {
            self.queues.push(MAIN, page);
        } else {
            self.queues.push(SMALL, page);
            self.added[index] = self.adds;
            self.adds += 1;
        }
        false
    }
}

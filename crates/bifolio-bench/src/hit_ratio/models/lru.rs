//! Least recently used: one list, a hit moves the page to its head.

use super::Model;
use super::queues::Queues;

/// The policy that the others are compared with.
#[derive(Debug)]
pub(super) struct Lru {
    queue: Queues<1>,
    capacity: usize,
}

impl Lru {
    pub(super) fn new(capacity: usize, pages: usize) -> Self {
        Self { queue: Queues::new(pages), capacity }
    }
}

impl Model for Lru {
    fn reference(&mut self, page: u32) -> bool {
        let hit = self.queue.is_in(0, page);
        if !hit && self.queue.len(0) == self.capacity {
            self.queue.pop(0);
        }
        self.queue.push(0, page);
        hit
    }
}

//! SIEVE: CLOCK whose hand leaves the survivors in their places, so that new pages are sifted.
//!
//! Zhang and others, SIEVE is Simpler than LRU (NSDI 2024).

use super::Model;
use super::queues::Queues;

/// A queue, a bit for each page, and the hand: the page to examine next.
#[derive(Debug)]
pub(super) struct Sieve {
    queue: Queues<1>,
    used: Vec<bool>,
    hand: Option<u32>,
    capacity: usize,
}

impl Sieve {
    pub(super) fn new(capacity: usize, pages: usize) -> Self {
        Self { queue: Queues::new(pages), used: vec![false; pages], hand: None, capacity }
    }

    fn evict(&mut self) {
        loop {
            let Some(candidate) = self.hand.or_else(|| self.queue.oldest(0)) else { return };
            self.hand = self.queue.newer(candidate);
            if !std::mem::take(&mut self.used[candidate as usize]) {
                return self.queue.remove(candidate);
            }
        }
    }
}

impl Model for Sieve {
    fn reference(&mut self, page: u32) -> bool {
        if self.queue.is_in(0, page) {
            self.used[page as usize] = true;
            return true;
        }
        if self.queue.len(0) == self.capacity {
            self.evict();
        }
        self.queue.push(0, page);
        false
    }
}

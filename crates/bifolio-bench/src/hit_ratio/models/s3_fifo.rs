//! S3-FIFO: a small queue, whose pages move on to the main one if they were hit twice, and a list
//! of the pages that were evicted from the small queue.
//!
//! Yang and others, FIFO Queues Are All You Need for Cache Eviction (SOSP 2023).

use super::Model;
use super::queues::Queues;

const SMALL: usize = 0;
const MAIN: usize = 1;
/// Not in memory: only the number of the page is known.
const GHOST: usize = 2;
const HITS_MAX: u8 = 3;

/// Three queues, and two bits for each page.
#[derive(Debug)]
pub(super) struct S3Fifo {
    queues: Queues<3>,
    hits: Vec<u8>,
    capacity: usize,
    small: usize,
}

impl S3Fifo {
    pub(super) fn new(capacity: usize, pages: usize) -> Self {
        let small = (capacity / 10).max(1);
        Self { queues: Queues::new(pages), hits: vec![0; pages], capacity, small }
    }

    /// Moves pages on until one leaves memory.
    fn evict(&mut self) {
        loop {
            let is_small = self.queues.len(SMALL) >= self.small || self.queues.len(MAIN) == 0;
            let list = if is_small { SMALL } else { MAIN };
            let Some(candidate) = self.queues.pop(list) else { return };
            let hits = &mut self.hits[candidate as usize];
            match list {
                SMALL if *hits > 1 => {
                    *hits = 0;
                    self.queues.push(MAIN, candidate);
                }
                SMALL => {
                    self.queues.push(GHOST, candidate);
                    if self.queues.len(GHOST) > self.capacity - self.small {
                        self.queues.pop(GHOST);
                    }
                    return;
                }
                _ if *hits > 0 => {
                    *hits -= 1;
                    self.queues.push(MAIN, candidate);
                }
                _ => return,
            }
        }
    }
}

impl Model for S3Fifo {
    fn reference(&mut self, page: u32) -> bool {
        let was_in = self.queues.list_of(page);
        let hits = &mut self.hits[page as usize];
        if matches!(was_in, Some(SMALL | MAIN)) {
            *hits = (*hits + 1).min(HITS_MAX);
            return true;
        }
        *hits = 0;
        if self.queues.len(SMALL) + self.queues.len(MAIN) == self.capacity {
            self.evict();
        }
        self.queues.push(if was_in == Some(GHOST) { MAIN } else { SMALL }, page);
        false
    }
}

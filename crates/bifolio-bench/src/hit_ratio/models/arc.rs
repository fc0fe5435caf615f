//! ARC: pages used once and pages used again, each in an LRU list, with a list of evicted pages
//! behind each; a hit in one of those enlarges the part of memory that would have kept the page.
//!
//! Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache (FAST 2003).

use super::Model;
use super::queues::Queues;

const ONCE: usize = 0;
const AGAIN: usize = 1;
const ONCE_EVICTED: usize = 2;
const AGAIN_EVICTED: usize = 3;

/// Four lists and the target size of the first.
#[derive(Debug)]
pub(super) struct Arc {
    queues: Queues<4>,
    once_target: usize,
    capacity: usize,
}

impl Arc {
    pub(super) fn new(capacity: usize, pages: usize) -> Self {
        Self { queues: Queues::new(pages), once_target: 0, capacity }
    }

    /// Evicts a page if memory is full.
    fn replace(&mut self, is_again: bool) {
        let once = self.queues.len(ONCE);
        if once + self.queues.len(AGAIN) < self.capacity {
            return;
        }
        let is_over = once > self.once_target || is_again && once == self.once_target;
        let list = if once > 0 && is_over { ONCE } else { AGAIN };
        if let Some(victim) = self.queues.pop(list) {
            self.queues.push(if list == ONCE { ONCE_EVICTED } else { AGAIN_EVICTED }, victim);
        }
    }
}

impl Model for Arc {
    fn reference(&mut self, page: u32) -> bool {
        let queues = &mut self.queues;
        let (once_evicted, again_evicted) = (queues.len(ONCE_EVICTED), queues.len(AGAIN_EVICTED));
        match queues.list_of(page) {
            Some(ONCE | AGAIN) => {
                queues.push(AGAIN, page);
                return true;
            }
            Some(ONCE_EVICTED) => {
                let step = (again_evicted / once_evicted).max(1);
                self.once_target = (self.once_target + step).min(self.capacity);
                self.replace(false);
                self.queues.push(AGAIN, page);
            }
            Some(_) => {
                let step = (once_evicted / again_evicted).max(1);
                self.once_target = self.once_target.saturating_sub(step);
                self.replace(true);
                self.queues.push(AGAIN, page);
            }
            None => {
                let once = queues.len(ONCE);
                if once + once_evicted >= self.capacity {
                    if queues.pop(ONCE_EVICTED).is_none() {
                        queues.pop(ONCE);
                    }
                } else if once + queues.len(AGAIN) + once_evicted + again_evicted
                    >= 2 * self.capacity
                {
                    queues.pop(AGAIN_EVICTED);
                }
                self.replace(false);
                self.queues.push(ONCE, page);
            }
        }
        false
    }
}

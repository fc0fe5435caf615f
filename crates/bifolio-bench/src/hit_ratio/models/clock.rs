//! CLOCK: a queue of pages with one bit each. A hit sets the bit; the hand clears it and goes on.
//!
//! Corbato, A Paging Experiment with the Multics System (1969).

use super::Model;
use super::queues::Queues;

/// The queue turns under the hand: its oldest page is where the hand points.
#[derive(Debug)]
pub(super) struct Clock {
    queue: Queues<1>,
    used: Vec<bool>,
    capacity: usize,
}

impl Clock {
    pub(super) fn new(capacity: usize, pages: usize) -> Self {
        Self { queue: Queues::new(pages), used: vec![false; pages], capacity }
    }
}

impl Model for Clock {
    fn reference(&mut self, page: u32) -> bool {
        if self.queue.is_in(0, page) {
            self.used[page as usize] = true;
            return true;
        }
        while self.queue.len(0) == self.capacity {
            let Some(candidate) = self.queue.pop(0) else { break };
            if std::mem::take(&mut self.used[candidate as usize]) {
                self.queue.push(0, candidate);
            }
        }
        self.queue.push(0, page);
        false
    }
}

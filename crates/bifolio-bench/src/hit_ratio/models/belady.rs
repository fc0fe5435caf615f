//! Belady's policy: evicts the page whose next use is farthest in the future. No policy has fewer
//! misses; only a replay knows the future.
//!
//! Belady, A Study of Replacement Algorithms for a Virtual-Storage Computer (1966).

use std::collections::BinaryHeap;

use super::Model;

const NEVER: u32 = u32::MAX;

/// The next use of every reference, and the resident pages by theirs.
#[derive(Debug)]
pub(super) struct Belady {
    next_uses: Vec<u32>,
    now: usize,
    /// Next use of each resident page.
    next_of: Vec<Option<u32>>,
    /// Next uses and pages; an entry is stale if the page has another next use, or is not resident.
    by_next_use: BinaryHeap<(u32, u32)>,
    resident: usize,
    capacity: usize,
}

impl Belady {
    pub(super) fn new(capacity: usize, pages: usize, trace: &[u32]) -> Self {
        let mut next_uses = vec![NEVER; trace.len()];
        let mut next_of_page = vec![NEVER; pages];
        for (index, page) in trace.iter().enumerate().rev() {
            next_uses[index] = std::mem::replace(&mut next_of_page[*page as usize], index as u32);
        }
        Self {
            next_uses,
            now: 0,
            next_of: vec![None; pages],
            by_next_use: BinaryHeap::new(),
            resident: 0,
            capacity,
        }
    }

    fn evict(&mut self) {
        while let Some((next_use, page)) = self.by_next_use.pop() {
            let next = &mut self.next_of[page as usize];
            if *next == Some(next_use) {
                *next = None;
                self.resident -= 1;
                return;
            }
        }
    }
}

impl Model for Belady {
    fn reference(&mut self, page: u32) -> bool {
        let next_use = self.next_uses[self.now];
        self.now += 1;
        let hit = self.next_of[page as usize].is_some();
        if !hit {
            if self.resident == self.capacity {
                self.evict();
            }
            self.resident += 1;
        }
        self.next_of[page as usize] = Some(next_use);
        self.by_next_use.push((next_use, page));
        hit
    }
}

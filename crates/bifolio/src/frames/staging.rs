//! Staging: where the pages of regions are before they are installed, while they are read.
//!
//! A transfer into a region would show half a page to whoever maps it, so it goes here, and from
//! here the whole page goes to its place. A fixed number of pages, charged once; who finds none
//! waits until a fill ends, holding no frame and no folio's lock, or does without.

use super::arena::PAGE_BYTES;
use crate::sync::{Condvar, Mutex, blocking};
use crate::sys::memory::Reservation;
use std::sync::Arc;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Staging {
    memory: Reservation,
    /// Which pages are in use.
    used: Mutex<Vec<bool>>,
    freed: Condvar,
}

/// Some pages in a row, given back on drop.
#[derive(Debug)]
pub(crate) struct Staged {
    staging: Arc<Staging>,
    first: usize,
    pages: usize,
}

impl Staging {
    /// In `memory`, which is resident.
    pub(super) fn new(memory: Reservation) -> Self {
        let pages = memory.len() / PAGE_BYTES as usize;
        Self { memory, used: Mutex::new(vec![false; pages]), freed: Condvar::new() }
    }

    /// The longest row of free pages, at most `pages_max`; waits for one page at least.
    pub(crate) fn take(self: &Arc<Self>, pages_max: usize) -> Staged {
        blocking::check("staging memory");
        let mut used = self.used.lock();
        loop {
            if let Some(found) = self.try_take_locked(&mut used, pages_max) {
                return found;
            }
            self.freed.wait(&mut used);
        }
    }

    /// As [`Self::take`], if there is any.
    pub(crate) fn try_take(self: &Arc<Self>, pages_max: usize) -> Option<Staged> {
        self.try_take_locked(&mut self.used.lock(), pages_max)
    }

    fn try_take_locked(self: &Arc<Self>, used: &mut [bool], pages_max: usize) -> Option<Staged> {
        let (first, pages) = longest_row(used, pages_max)?;
        used[first..first + pages].fill(true);
        Some(Staged { staging: Arc::clone(self), first, pages })
    }
}

/// The first of the longest rows of free pages, cut to `pages_max`.
fn longest_row(used: &[bool], pages_max: usize) -> Option<(usize, usize)> {
    let mut best: Option<(usize, usize)> = None;
    let mut first = 0;
    while first < used.len() && best.is_none_or(|(_, pages)| pages < pages_max) {
        let pages = used[first..].iter().take(pages_max).take_while(|used| !**used).count();
        if pages > best.map_or(0, |(_, pages)| pages) {
            best = Some((first, pages));
        }
        first += pages.max(1);
    }
    best
}

impl Staged {
    /// How many pages.
    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// Address of one of them.
    pub(crate) fn address(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        let offset_bytes = (self.first + page) * PAGE_BYTES as usize;
        self.staging.memory.as_ptr().wrapping_add(offset_bytes)
    }

    /// Keeps the first `pages` and gives the others back.
    pub(crate) fn shrink(&mut self, pages: usize) {
        if pages < self.pages {
            self.give_back(self.first + pages..self.first + self.pages);
            self.pages = pages;
        }
    }

    fn give_back(&self, pages: std::ops::Range<usize>) {
        self.staging.used.lock()[pages].fill(false);
        self.staging.freed.notify_all();
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.give_back(self.first..self.first + self.pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_row_is_found_and_cut() {
        let used = |text: &str| text.chars().map(|c| c == 'x').collect::<Vec<_>>();
        assert_eq!(longest_row(&used("xx.x...x.."), 8), Some((4, 3)));
        assert_eq!(longest_row(&used("xx.x...x.."), 2), Some((4, 2)));
        assert_eq!(longest_row(&used("...."), 2), Some((0, 2)));
        assert_eq!(longest_row(&used("xx.xx"), 4), Some((2, 1)));
        assert_eq!(longest_row(&used("xxxx"), 4), None);
    }

    #[test]
    fn who_finds_no_page_waits_for_one_that_is_given_back() {
        let staging = Arc::new(Staging::new(Reservation::new(4 * 4096, 4096).unwrap()));
        let mut all = staging.take(9);
        assert_eq!(all.pages(), 4);
        assert!(staging.try_take(1).is_none());
        all.shrink(3);
        let last = staging.try_take(2).unwrap();
        assert_eq!((last.pages(), last.address(0)), (1, all.address(0).wrapping_add(3 * 4096)));
        let waiting = {
            let staging = Arc::clone(&staging);
            std::thread::spawn(move || staging.take(2).pages())
        };
        drop(all);
        assert!((1..=2).contains(&waiting.join().unwrap()));
        drop(last);
        assert_eq!(staging.take(9).pages(), 4);
    }
}

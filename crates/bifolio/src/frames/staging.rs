//! Staging: where the pages of regions are before they are installed, while they are read.
//!
//! A transfer into a region would show half a page to whoever maps it, so it goes here, and from
//! here the whole page goes to its place. A fixed number of pages, charged once; who finds none
//! waits until a fill ends, holding no frame and no folio's lock, or does without.

use super::arena::PAGE_BYTES;
use crate::sync::{Condvar, Mutex, Ordering};
use crate::sys::memory::Reservation;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// Who reads so many pages at once reads in order.
const ROW_PAGES_MIN: usize = 16;
/// What came is remembered while so many times the staging's pages leave.
const MEMORY_FACTOR: usize = 4;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Staging {
    memory: Reservation,
    /// Which pages are in use.
    used: Mutex<Vec<bool>>,
    freed: Condvar,
    /// So many pages of regions may still leave until the last row that was read is forgotten.
    row_memory_pages: AtomicUsize,
    /// The same for what is no row.
    single_memory_pages: AtomicUsize,
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
        Self {
            memory,
            used: Mutex::new(vec![false; pages]),
            freed: Condvar::new(),
            row_memory_pages: AtomicUsize::new(0),
            single_memory_pages: AtomicUsize::new(0),
        }
    }

    /// The longest row of free pages, at most `pages_max`; waits for one page at least.
    pub(crate) fn take(self: &Arc<Self>, pages_max: usize) -> Staged {
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

    /// Whether those who read of late read single pages, and wait for each. A hint.
    pub(crate) fn has_single_readers(&self) -> bool {
        let remembers = |pages: &AtomicUsize| pages.load(Ordering::Relaxed) > 0;
        remembers(&self.single_memory_pages) && !remembers(&self.row_memory_pages)
    }

    /// So many pages of regions have left. One caller at a time.
    pub(crate) fn note_left(&self, pages: usize) {
        for memory_pages in [&self.row_memory_pages, &self.single_memory_pages] {
            // Relaxed, and no one operation: a reader who comes meanwhile may be forgotten.
            let left_pages = memory_pages.load(Ordering::Relaxed).saturating_sub(pages);
            memory_pages.store(left_pages, Ordering::Relaxed);
        }
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

    /// The pages are about to be read.
    pub(crate) fn note_read(&self) {
        let staging = &*self.staging;
        let memory_pages = match self.pages >= ROW_PAGES_MIN {
            true => &staging.row_memory_pages,
            false => &staging.single_memory_pages,
        };
        let all_pages = staging.memory.len() / PAGE_BYTES as usize;
        memory_pages.store(all_pages * MEMORY_FACTOR, Ordering::Relaxed);
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
    fn readers_of_rows_and_of_single_pages_are_remembered_until_enough_has_left() {
        let staging = Arc::new(Staging::new(Reservation::new(32 * 4096, 4096).unwrap()));
        let memory_pages = 32 * MEMORY_FACTOR;
        assert!(!staging.has_single_readers());
        staging.take(ROW_PAGES_MIN - 1).note_read();
        assert!(staging.has_single_readers());
        staging.take(ROW_PAGES_MIN).note_read();
        staging.note_left(memory_pages - 1);
        assert!(!staging.has_single_readers());
        staging.take(1).note_read();
        assert!(!staging.has_single_readers());
        staging.note_left(2);
        assert!(staging.has_single_readers());
        staging.note_left(memory_pages);
        assert!(!staging.has_single_readers());
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

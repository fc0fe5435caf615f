//! Staging: where the pages of regions are before they are installed, while they are read.
//!
//! A transfer into a region would show half a page to whoever maps it, so it goes here, and from
//! here the whole page goes to its place. A fixed number of pages, charged once; a thread that
//! finds none waits until a fill ends, holding no frame and no folio's lock, or does without. One
//! device may have all but an eighth of what others leave, for it may keep them for long.
//!
//! Pages of regions that are written out while they may be stored to are copied to it, too: to a
//! half of it at most, for a device may keep them for long.

use crate::page::PAGE_BYTES;
use crate::sync::{Condvar, Mutex, Share, blocking};
use crate::sys::memory::Reservation;
use std::sync::Arc;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Staging {
    memory: Reservation,
    used: Mutex<Used>,
    freed: Condvar,
}

#[derive(Debug)]
struct Used {
    /// Which pages are in use.
    pages: Vec<bool>,
    /// How many of them are copies of what is written out.
    copies: usize,
}

/// Some pages in a row, given back on drop.
#[derive(Debug)]
pub(crate) struct Staged {
    staging: Arc<Staging>,
    first: usize,
    pages: usize,
    are_copies: bool,
    /// Of the device that has them; changes with the lock over what is used.
    share: Share,
}

/// Of what others leave, one part of so many stays when a device has all it may have.
const PARTS: u64 = 8;

impl Staging {
    /// In `memory`, which is resident.
    pub(super) fn new(memory: Reservation) -> Self {
        let pages = memory.len() / PAGE_BYTES as usize;
        Self {
            memory,
            used: Mutex::new(Used { pages: vec![false; pages], copies: 0 }),
            freed: Condvar::new(),
        }
    }

    /// How many pages there are, free or not.
    pub(crate) fn pages(&self) -> u64 {
        self.memory.len() as u64 / PAGE_BYTES
    }

    /// The longest row of free pages for a device, at most `pages_max`; waits for one page at
    /// least.
    pub(crate) fn take(self: &Arc<Self>, pages_max: usize, share: &Share) -> Staged {
        blocking::check("staging memory");
        let mut used = self.used.lock();
        loop {
            if let Some(found) = self.try_take_locked(&mut used.pages, pages_max, share) {
                return found;
            }
            self.freed.wait(&mut used);
        }
    }

    /// As [`Self::take`], if there is any.
    pub(crate) fn try_take(self: &Arc<Self>, pages_max: usize, share: &Share) -> Option<Staged> {
        self.try_take_locked(&mut self.used.lock().pages, pages_max, share)
    }

    /// As [`Self::try_take`], for copies of what is to be written out.
    pub(crate) fn try_take_for_copies(
        self: &Arc<Self>,
        pages_max: usize,
        share: &Share,
    ) -> Option<Staged> {
        let mut used = self.used.lock();
        let pages_max = pages_max.min((used.pages.len() / 2).saturating_sub(used.copies));
        let mut taken = self.try_take_locked(&mut used.pages, pages_max, share)?;
        used.copies += taken.pages;
        taken.are_copies = true;
        Some(taken)
    }

    fn try_take_locked(
        self: &Arc<Self>,
        used: &mut [bool],
        pages_max: usize,
        share: &Share,
    ) -> Option<Staged> {
        let room = share.room(used.len() as u64, PARTS) as usize;
        let (first, pages) = longest_row(used, pages_max.min(room))?;
        used[first..first + pages].fill(true);
        share.add(pages as u64);
        let (staging, share) = (Arc::clone(self), share.clone());
        Some(Staged { staging, first, pages, are_copies: false, share })
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
        if pages >= self.pages {
            return;
        }
        let given_back = self.first + pages..self.first + self.pages;
        self.pages = pages;
        let mut used = self.staging.used.lock();
        self.share.sub(given_back.len() as u64);
        if self.are_copies {
            used.copies -= given_back.len();
        }
        used.pages[given_back].fill(false);
        drop(used);
        self.staging.freed.notify_all();
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn staging_of(pages: usize) -> Arc<Staging> {
        Arc::new(Staging::new(Reservation::new(pages * 4096, 4096).unwrap()))
    }

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
    fn copies_take_a_half_at_most() {
        let staging = staging_of(8);
        let share = Share::new(&Arc::default());
        let mut copies = staging.try_take_for_copies(3, &share).unwrap();
        let last = staging.try_take_for_copies(3, &share).unwrap();
        assert_eq!((copies.pages(), last.pages()), (3, 1));
        assert!(staging.try_take_for_copies(1, &share).is_none());
        copies.shrink(1);
        assert_eq!(staging.try_take_for_copies(8, &share).unwrap().pages(), 2);
        drop((copies, last));
        let fill = staging.take(5, &share);
        assert_eq!(fill.pages(), 5);
        assert_eq!(staging.try_take_for_copies(8, &share).unwrap().pages(), 2);
    }

    #[test]
    fn a_device_leaves_staging_memory_to_others() {
        let (staging, all) = (staging_of(16), Arc::default());
        let (hung, healthy) = (Share::new(&all), Share::new(&all));
        let mut of_hung = staging.take(16, &hung);
        assert_eq!(of_hung.pages(), 14);
        assert!(staging.try_take(1, &hung).is_none());
        let of_healthy = staging.take(16, &healthy);
        assert_eq!(of_healthy.pages(), 1);
        let of_last = staging.take(16, &Share::new(&all));
        assert_eq!(of_last.pages(), 1);
        assert!(staging.try_take(1, &Share::new(&all)).is_none(), "nothing is left");
        drop(of_last);
        of_hung.shrink(10);
        assert_eq!(staging.try_take(16, &healthy).unwrap().pages(), 4);
        drop((of_hung, of_healthy));
        assert_eq!((hung.own(), healthy.own(), hung.all()), (0, 0, 0));
    }

    #[test]
    fn a_taker_that_finds_no_page_waits_for_one() {
        let staging = staging_of(5);
        let share = Share::new(&Arc::default());
        let mut all = staging.take(9, &share);
        assert_eq!(all.pages(), 4);
        assert!(staging.try_take(1, &share).is_none());
        all.shrink(3);
        let last = staging.try_take(2, &share).unwrap();
        assert_eq!((last.pages(), last.address(0)), (1, all.address(0).wrapping_add(3 * 4096)));
        let waiting = {
            let (staging, share) = (Arc::clone(&staging), share.clone());
            std::thread::spawn(move || staging.take(2, &share).pages())
        };
        drop(all);
        assert!((1..=2).contains(&waiting.join().unwrap()));
        drop(last);
        assert_eq!(staging.take(9, &share).pages(), 4);
    }
}

//! Staging: memory that pages of regions are read into before they are installed.
//!
//! Their size is fixed and charged once. One device may use all but an eighth of what the other
//! devices leave free, and copies for write-back at most half of the pages, because a slow device
//! may keep its pages for long.
//!
//! # Safety
//! Hands out each page of its memory once.
#![allow(unsafe_code)]

use crate::memory::StagedPages;
use crate::page::PAGE_BYTES;
use crate::sync::{Condvar, Mutex, Share, blocking};
use crate::sys::memory::Reservation;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Staging {
    memory: Reservation,
    used: Mutex<Used>,
    freed: Condvar,
}

#[derive(Debug)]
struct Used {
    /// `true` for each page in use.
    pages: Vec<bool>,
    /// Number of used pages that hold copies for write-back.
    copies: usize,
}

/// A run of adjacent staging pages, freed on drop.
#[derive(Debug)]
pub(crate) struct Staged {
    staging: Arc<Staging>,
    first: usize,
    pages: usize,
    are_copies: bool,
    /// Count of the device that uses the pages; changes under the lock of `used`.
    share: Share,
}

/// One part in this many of what the other devices leave free stays free when a device uses all it
/// may.
const SHARE_DIVISOR: u64 = 8;

impl Staging {
    /// Creates staging memory in `memory`, which is resident.
    pub(super) fn new(memory: Reservation) -> Self {
        let pages = memory.len() / PAGE_BYTES as usize;
        Self {
            memory,
            used: Mutex::new(Used { pages: vec![false; pages], copies: 0 }),
            freed: Condvar::new(),
        }
    }

    pub(crate) fn pages(&self) -> u64 {
        self.memory.len() as u64 / PAGE_BYTES
    }

    /// Takes the longest run of free pages, at most `pages_max`, for a device. Waits until there is
    /// at least one page.
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

    pub(crate) fn try_take(self: &Arc<Self>, pages_max: usize, share: &Share) -> Option<Staged> {
        self.try_take_locked(&mut self.used.lock().pages, pages_max, share)
    }

    /// Takes pages like [`Self::try_take`], for copies for write-back.
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
        let room = share.room(used.len() as u64, SHARE_DIVISOR) as usize;
        let (first, pages) = longest_run(used, pages_max.min(room))?;
        used[first..first + pages].fill(true);
        share.add(pages as u64);
        let (staging, share) = (Arc::clone(self), share.clone());
        Some(Staged { staging, first, pages, are_copies: false, share })
    }
}

/// Returns the first of the longest runs of free pages, cut to `pages_max`.
fn longest_run(used: &[bool], pages_max: usize) -> Option<(usize, usize)> {
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

// SAFETY: pages of the staging memory, which is resident, one reservation, and in no region; each
// is in one run, until that frees it.
unsafe impl StagedPages for Staged {
    fn pages(&self) -> usize {
        self.pages
    }

    fn address(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages, "page {page} of a staging run of {}", self.pages);
        let offset_bytes = (self.first + page) * PAGE_BYTES as usize;
        self.staging.memory.base.wrapping_add(offset_bytes)
    }

    fn extend(&mut self, pages: usize) {
        let mut used = self.staging.used.lock();
        let room = self.share.room(used.pages.len() as u64, SHARE_DIVISOR) as usize;
        let behind = &mut used.pages[self.first + self.pages..];
        let free_pages = behind.iter().take(pages.min(room)).take_while(|used| !**used).count();
        behind[..free_pages].fill(true);
        self.share.add(free_pages as u64);
        self.pages += free_pages;
    }

    fn shrink(&mut self, pages: usize) {
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
    fn the_longest_run_is_found_and_cut() {
        let used = |text: &str| text.chars().map(|c| c == 'x').collect::<Vec<_>>();
        assert_eq!(longest_run(&used("xx.x...x.."), 8), Some((4, 3)));
        assert_eq!(longest_run(&used("xx.x...x.."), 2), Some((4, 2)));
        assert_eq!(longest_run(&used("...."), 2), Some((0, 2)));
        assert_eq!(longest_run(&used("xx.xx"), 4), Some((2, 1)));
        assert_eq!(longest_run(&used("xxxx"), 4), None);
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
    fn a_run_is_extended_by_what_is_free_behind_it() {
        let (staging, all) = (staging_of(16), Arc::default());
        let share = Share::new(&all);
        let mut run = staging.take(2, &share);
        let behind = staging.take(2, &share);
        run.extend(3);
        assert_eq!(run.pages(), 2);
        drop(behind);
        run.extend(3);
        assert_eq!((run.pages(), share.own()), (5, 5));
        run.extend(100);
        assert_eq!((run.pages(), share.own()), (14, 14), "the rest is for other devices");
        assert_eq!(longest_run(&staging.used.lock().pages, 16), Some((14, 2)));
        drop(run);
        assert_eq!((longest_run(&staging.used.lock().pages, 16), share.own()), (Some((0, 16)), 0));
    }

    #[test]
    fn a_hung_device_cannot_use_all_staging_memory() {
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
    fn take_waits_until_a_page_is_free() {
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

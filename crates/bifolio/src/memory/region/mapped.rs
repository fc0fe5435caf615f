//! Which pages of a region have maps, which advice leaves alone; and which of them others write to
//! without the page tables being told.

use crate::sync::Mutex;
use std::ops::Range;

/// The pages of each map that lives, or of each pin of one; in no order.
#[derive(Debug, Default)]
pub(crate) struct MappedPages(Mutex<Vec<Range<u64>>>);

impl MappedPages {
    /// A map of `pages` begins to live.
    pub(crate) fn add(&self, pages: Range<u64>) {
        self.0.lock().push(pages);
    }

    /// A map that was added is gone.
    pub(crate) fn remove(&self, pages: &Range<u64>) {
        let mut maps = self.0.lock();
        let found = maps.iter().position(|known| known == pages);
        maps.swap_remove(found.expect("a map that was added"));
    }

    /// Which of `pages` are mapped now: in order, and apart from each other.
    pub(crate) fn among(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
        let maps = self.0.lock();
        let meets = |map: &&Range<u64>| map.start < pages.end && pages.start < map.end;
        let mut met: Vec<_> = maps.iter().filter(meets).cloned().collect();
        drop(maps);
        met.sort_unstable_by_key(|map| map.start);
        let mut merged: Vec<Range<u64>> = Vec::with_capacity(met.len());
        for map in met {
            match merged.last_mut().filter(|last| map.start <= last.end) {
                Some(last) => last.end = last.end.max(map.end),
                None => merged.push(map),
            }
        }
        merged
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn maps_are_merged_in_order_and_each_goes_by_itself() {
        let mapped = MappedPages::default();
        for pages in [20..30, 0..5, 4..8, 8..9, 22..24, 0..5] {
            mapped.add(pages);
        }
        assert_eq!(mapped.among(&(0..100)), [0..9, 20..30]);
        assert_eq!(mapped.among(&(9..20)), []);
        assert_eq!(mapped.among(&(8..21)), [8..9, 20..30]);
        mapped.remove(&(0..5));
        mapped.remove(&(20..30));
        assert_eq!(mapped.among(&(0..100)), [0..9, 22..24]);
        mapped.remove(&(0..5));
        assert_eq!(mapped.among(&(0..100)), [4..9, 22..24]);
    }
}

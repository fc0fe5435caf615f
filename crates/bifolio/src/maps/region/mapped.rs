//! Sets of pages of a region: those that have maps, which advice skips, and those that the kernel
//! or a device may write to without marking the page tables.

use crate::sync::Mutex;
use std::ops::Range;

/// The pages of each live map, or of each pin of a map; unordered.
#[derive(Debug, Default)]
pub(crate) struct MappedPages(Mutex<Vec<Range<u64>>>);

impl MappedPages {
    /// Adds the pages of a new map.
    pub(crate) fn add(&self, pages: Range<u64>) {
        self.0.lock().push(pages);
    }

    /// Removes the pages of a map that was added.
    pub(crate) fn remove(&self, pages: &Range<u64>) {
        let mut maps = self.0.lock();
        let found = maps.iter().position(|known| known == pages);
        maps.swap_remove(found.expect("the map was added before"));
    }

    /// Returns the parts of `pages` that are mapped: sorted and disjoint.
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
    fn overlapping_maps_are_merged_and_removed_one_by_one() {
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

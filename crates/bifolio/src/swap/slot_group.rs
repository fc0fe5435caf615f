//! One group: 512 adjacent slots, a bit for each. Pure bookkeeping.
//!
//! Metadata of slots is added by group, and a run that is allocated is at most as long as a group,
//! so it is in one group or in two neighbouring ones.

use std::iter;
use std::ops::Range;

pub(crate) const GROUP_SLOTS: u32 = 512;
const WORD_SLOTS: u32 = u64::BITS;
const WORDS: usize = (GROUP_SLOTS / WORD_SLOTS) as usize;

#[derive(Clone, Debug, Default)]
pub(super) struct SlotGroup {
    free: [u64; WORDS],
}

impl SlotGroup {
    /// Returns the number of free slots at the start.
    pub(super) fn head(&self) -> u32 {
        self.next(0, false)
    }

    pub(super) fn free_slots(&self) -> u32 {
        self.free.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns `true` if all of `slots` are free, or, with `free` unset, all are used.
    pub(super) fn is_all(&self, slots: Range<u32>, free: bool) -> bool {
        self.next(slots.start, !free) >= slots.end
    }

    pub(super) fn set(&mut self, slots: Range<u32>, free: bool) {
        for (number, word) in (0..).zip(&mut self.free) {
            let base = number * WORD_SLOTS;
            let start = slots.start.clamp(base, base + WORD_SLOTS) - base;
            let end = slots.end.clamp(base, base + WORD_SLOTS) - base;
            if start < end {
                let mask = (u64::MAX >> (WORD_SLOTS - (end - start))) << start;
                *word = if free { *word | mask } else { *word & !mask };
            }
        }
    }

    /// Returns the runs of free slots at and after `from`, cut at the end of the group.
    pub(super) fn runs(&self, from: u32) -> impl Iterator<Item = Range<u32>> {
        let mut end = from;
        iter::from_fn(move || {
            let start = self.next(end, true);
            end = self.next(start, false);
            (start < GROUP_SLOTS).then_some(start..end)
        })
    }

    /// Returns the first slot at or after `from` that is free (or used, with `free` unset), or
    /// [`GROUP_SLOTS`] if there is none.
    fn next(&self, from: u32, free: bool) -> u32 {
        let mut slot = from;
        while slot < GROUP_SLOTS {
            let word = self.free[(slot / WORD_SLOTS) as usize];
            let ahead = (if free { word } else { !word }) >> (slot % WORD_SLOTS);
            if ahead != 0 {
                return slot + ahead.trailing_zeros();
            }
            slot = (slot / WORD_SLOTS + 1) * WORD_SLOTS;
        }
        GROUP_SLOTS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_free(ranges: &[Range<u32>]) -> SlotGroup {
        let mut group = SlotGroup::default();
        for range in ranges {
            group.set(range.clone(), true);
        }
        group
    }

    fn all_free() -> SlotGroup {
        SlotGroup { free: [u64::MAX; WORDS] }
    }

    #[test]
    fn runs_are_found_across_words_and_at_both_ends() {
        let ranges = [0..3, 60..70, 127..129, 192..256, 511..512];
        let group = with_free(&ranges);
        assert_eq!(group.runs(0).collect::<Vec<_>>(), ranges);
        assert_eq!(group.runs(65).next(), Some(65..70));
        assert_eq!(group.runs(70).next(), Some(127..129));
        assert_eq!((group.runs(510).next(), group.runs(510).count()), (Some(511..512), 1));
        assert_eq!((group.head(), group.free_slots()), (3, 3 + 10 + 2 + 64 + 1));
        assert_eq!(with_free(&[]).runs(0).next(), None);
        assert_eq!(all_free().head(), GROUP_SLOTS);
    }

    #[test]
    fn set_changes_exactly_the_slots_of_its_range() {
        for range in [0..1, 63..64, 63..65, 0..64, 64..128, 5..200, 448..512, 0..512] {
            let set = with_free(std::slice::from_ref(&range));
            let mut cleared = all_free();
            cleared.set(range.clone(), false);
            for slot in 0..GROUP_SLOTS {
                assert_eq!(set.is_all(slot..slot + 1, true), range.contains(&slot), "{range:?}");
                assert_eq!(cleared.is_all(slot..slot + 1, false), range.contains(&slot));
            }
            assert!(set.is_all(range.clone(), true) && cleared.is_all(range.clone(), false));
            assert!(range.end == GROUP_SLOTS || !set.is_all(range.start..range.end + 1, true));
        }
    }
}

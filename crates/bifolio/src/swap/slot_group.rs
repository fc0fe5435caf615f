//! One group: 512 slots in a row, a bit for each. Pure bookkeeping.
//!
//! A group is the unit in which the metadata of slots comes to be, and the longest run that is ever
//! handed out: so a run lies in one group or in two neighbours.

use std::iter;
use std::ops::Range;

/// Slots of a group.
pub(crate) const GROUP_SLOTS: u32 = 512;
const WORD_SLOTS: u32 = u64::BITS;
const WORDS: usize = (GROUP_SLOTS / WORD_SLOTS) as usize;

/// See the head of the file.
#[derive(Clone, Debug, Default)]
pub(super) struct SlotGroup {
    /// Bit i: slot i is free.
    free: [u64; WORDS],
}

impl SlotGroup {
    /// Free slots at the start.
    pub(super) fn head(&self) -> u32 {
        self.next(0, false)
    }

    /// How many slots are free.
    pub(super) fn free_slots(&self) -> u32 {
        self.free.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether all slots of `slots` are free, or none is.
    pub(super) fn is_all(&self, slots: Range<u32>, free: bool) -> bool {
        self.next(slots.start, !free) >= slots.end
    }

    /// Sets or clears the bits of `slots`.
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

    /// The runs of free slots at and after `from`, cut off where the group ends.
    pub(super) fn runs(&self, from: u32) -> impl Iterator<Item = Range<u32>> {
        let mut end = from;
        iter::from_fn(move || {
            let start = self.next(end, true);
            end = self.next(start, false);
            (start < GROUP_SLOTS).then_some(start..end)
        })
    }

    /// The first slot at or after `from` that is free, or is not; [`GROUP_SLOTS`] if there is none.
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
    fn a_range_is_set_and_cleared_and_nothing_beside_it() {
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

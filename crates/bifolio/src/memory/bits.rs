//! A bit for each page of a chunk. Pure bookkeeping.

use super::CHUNK_PAGES;
use std::ops::Range;

const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = (CHUNK_PAGES / WORD_BITS) as usize;

/// See the head of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageBits([u64; WORDS]);

impl PageBits {
    /// All bits set.
    pub(super) const ALL: Self = Self([u64::MAX; WORDS]);

    /// The word with bit `at`.
    pub(super) fn word(&self, at: u32) -> u64 {
        self.0[(at / WORD_BITS) as usize]
    }

    /// Whether bit `at` is set; `false` behind the last one.
    pub(super) fn has(&self, at: u32) -> bool {
        at < CHUNK_PAGES && self.word(at) & (1 << (at % WORD_BITS)) != 0
    }

    /// How many bits are set.
    pub(super) fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// How many bits of `bits` are set.
    pub(super) fn count_in(&self, bits: Range<u32>) -> u32 {
        words_of(bits).map(|(number, mask)| (self.0[number] & mask).count_ones()).sum()
    }

    /// Sets or clears the bits of `bits`.
    pub(super) fn set(&mut self, bits: Range<u32>, value: bool) {
        for (number, mask) in words_of(bits) {
            let word = &mut self.0[number];
            *word = if value { *word | mask } else { *word & !mask };
        }
    }

    /// The first bit at or after `from` that is `value`; [`CHUNK_PAGES`] if there is none.
    pub(super) fn next(&self, from: u32, value: bool) -> u32 {
        let mut at = from;
        while at < CHUNK_PAGES {
            let word = if value { self.word(at) } else { !self.word(at) };
            let ahead = word >> (at % WORD_BITS);
            if ahead != 0 {
                return at + ahead.trailing_zeros();
            }
            at = (at / WORD_BITS + 1) * WORD_BITS;
        }
        CHUNK_PAGES
    }

    /// The bits that are set here or there.
    pub(super) fn or(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|number| self.0[number] | other.0[number]))
    }

    /// The bits that are set.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let next = |from| Some(self.next(from, true)).filter(|at| *at < CHUNK_PAGES);
        std::iter::successors(next(0), move |at| next(at + 1))
    }
}

/// The words that `bits` lie in, with a mask of those that do.
fn words_of(bits: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    (bits.start / WORD_BITS..bits.end.div_ceil(WORD_BITS)).map(move |number| {
        let base = number * WORD_BITS;
        let start = bits.start.max(base) - base;
        let end = bits.end.min(base + WORD_BITS) - base;
        let mask = if start < end { (u64::MAX >> (WORD_BITS - (end - start))) << start } else { 0 };
        (number as usize, mask)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_set_counted_and_found_across_words() {
        for range in [0..1, 63..65, 0..64, 5..200, 448..512, 0..512] {
            let mut bits = PageBits::default();
            bits.set(range.clone(), true);
            assert_eq!(bits.iter().collect::<Vec<_>>(), range.clone().collect::<Vec<_>>());
            assert_eq!((bits.count(), bits.next(0, true)), (range.end - range.start, range.start));
            assert_eq!(bits.next(range.start, false), range.end);
            assert_eq!(bits.count_in(0..range.start + 1), 1);
            let mut others = PageBits::ALL;
            others.set(range.clone(), false);
            assert_eq!((others.count(), others.or(&bits)), (512 - bits.count(), PageBits::ALL));
            assert!(bits.has(range.start) && !bits.has(range.end) && !others.has(range.start));
        }
    }
}

//! A bitmap that finds its next bit without looking at what was never set.
//!
//! Tells a table which of its pages are charged (`table.rs`). A table may describe 2^50 bytes of a
//! file of which a few pages were touched, so the bitmap is a tree of words: a bit of level 0 is
//! what the caller sets, a bit of a level above says that the word below it may not be zero, and is
//! never cleared. The first word of each level, all that a small file needs, stands by itself, so
//! that such a file has no page of words. The levels stand in one array, the highest first, so that
//! those above the lowest share few pages.
//!
//! BITMAP-1: a bit of level 0 is seen set only when its bits above are: [`Bitmap::set`] goes from
//! the top down. Otherwise a walk could pass a folio by that somebody put into a page that another
//! thread is just charging, and a truncation would leave it behind.

use super::table::Word;
use crate::sync::{AtomicU64, Ordering};
use crate::sys::array::ReservedArray;

const WORD_BITS: u64 = u64::BITS as u64;
/// Enough for a bit each of 2^64.
const LEVELS_MAX: usize = 11;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Bitmap {
    words: ReservedArray<Word>,
    /// The first word of each level.
    first: [AtomicU64; LEVELS_MAX],
    /// The words of each level, from level 0 on. The last level is one word.
    levels: Vec<std::ops::Range<u64>>,
}

impl Bitmap {
    /// Reserves a bitmap of `bits` bits.
    pub(crate) fn new(bits: u64) -> std::io::Result<Self> {
        let mut sizes = vec![bits.div_ceil(WORD_BITS).max(1)];
        while let Some(below) = sizes.last().copied().filter(|words| *words > 1) {
            sizes.push(below.div_ceil(WORD_BITS));
        }
        let total = sizes.iter().sum::<u64>();
        let mut end = total;
        let mut place = |words: u64| {
            end -= words;
            end..end + words
        };
        let levels = sizes.into_iter().map(&mut place).collect();
        let total = usize::try_from(total).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        let first = std::array::from_fn(|_| AtomicU64::new(0));
        Ok(Self { words: ReservedArray::new(total)?, first, levels })
    }

    /// Whether the bit is set.
    pub(crate) fn is_set(&self, bit: u64) -> bool {
        // Acquire: pairs with the Release in `set`: who sees the bit sees those above (BITMAP-1).
        self.word(0, bit / WORD_BITS).load(Ordering::Acquire) & mask(bit) != 0
    }

    /// Sets the bit; `false` if it was set before.
    pub(crate) fn set(&self, bit: u64) -> bool {
        for level in (1..self.levels.len()).rev() {
            let above = bit >> (level as u32 * WORD_BITS.trailing_zeros());
            // Relaxed: the Release below publishes it.
            self.word(level, above / WORD_BITS).fetch_or(mask(above), Ordering::Relaxed);
        }
        // Release: pairs with the Acquire in `is_set`: the bits above are seen first (BITMAP-1).
        self.word(0, bit / WORD_BITS).fetch_or(mask(bit), Ordering::Release) & mask(bit) == 0
    }

    /// Clears the bit; nobody sets it at the same time.
    pub(crate) fn clear(&self, bit: u64) {
        // Relaxed: who sets it again follows the caller by what keeps the two apart.
        self.word(0, bit / WORD_BITS).fetch_and(!mask(bit), Ordering::Relaxed);
    }

    /// The first bit from `bit` on that is set.
    pub(crate) fn next(&self, bit: u64) -> Option<u64> {
        let (mut level, mut at) = (0, bit);
        loop {
            let words = self.levels.get(level)?;
            let index = at / WORD_BITS;
            if index >= words.end - words.start {
                return None;
            }
            // Relaxed: a bit that was set before this call, in anybody's order, is seen set.
            let word = self.word(level, index).load(Ordering::Relaxed);
            let found = word & (u64::MAX << (at % WORD_BITS));
            if found == 0 {
                // Nothing more in this word: on with the next one, as the level above tells.
                (level, at) = (level + 1, index + 1);
                continue;
            }
            at = index * WORD_BITS + u64::from(found.trailing_zeros());
            if level == 0 {
                return Some(at);
            }
            (level, at) = (level - 1, at * WORD_BITS);
        }
    }

    fn word(&self, level: usize, index: u64) -> &AtomicU64 {
        if index == 0 {
            return &self.first[level];
        }
        let words = &self.levels[level];
        debug_assert!(index < words.end - words.start, "word {index} of {words:?}");
        &self.words.get((words.start + index) as usize).0
    }
}

fn mask(bit: u64) -> u64 {
    1 << (bit % WORD_BITS)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The bits from `from` on, by walking.
    fn walk(bitmap: &Bitmap, from: u64) -> Vec<u64> {
        std::iter::successors(bitmap.next(from), |bit| bitmap.next(bit + 1)).collect()
    }

    #[test]
    fn a_walk_finds_what_was_set_at_every_number_of_levels() {
        for bits in [1, 2, 63, 64, 65, 4096, 4097, (1 << 18) + 1, 1 << 29] {
            let bitmap = Bitmap::new(bits).unwrap();
            assert_eq!(bitmap.next(0), None);
            let mut wanted = vec![0, 1, 62, 63, 64, 65, 4095, 4096, bits / 2, bits - 1];
            wanted.retain(|bit| *bit < bits);
            for bit in &wanted {
                bitmap.set(*bit);
            }
            wanted.sort_unstable();
            wanted.dedup();
            assert_eq!(walk(&bitmap, 0), wanted, "{bits} bits");
            for (nth, bit) in wanted.iter().enumerate() {
                assert!(bitmap.is_set(*bit) && !bitmap.set(*bit), "{bit} of {bits}");
                assert_eq!(walk(&bitmap, *bit), wanted[nth..], "from {bit} of {bits}");
            }
            assert_eq!(bitmap.next(bits), None, "past the end");
            assert_eq!(bitmap.next(u64::MAX), None);
        }
    }
}

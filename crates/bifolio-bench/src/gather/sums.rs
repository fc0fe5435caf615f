//! The sum of all words of many rows, and what it must be: words of the file are a linear function
//! of their position (`harness::pattern`).

use crate::error::{Error, Result};
use crate::harness::pattern::word_at;

const WORD_BYTES: usize = size_of::<u64>();

/// Sum over the rows of one round.
#[derive(Debug, Default)]
pub(crate) struct RowSums {
    words: u64,
    positions: u64,
    rows: u64,
}

impl RowSums {
    /// Adds the bytes of the row at `pos_bytes`.
    #[inline]
    pub(crate) fn add(&mut self, row: &[u8], pos_bytes: u64) {
        let (words, _) = row.as_chunks::<WORD_BYTES>();
        let sum = words.iter().fold(0_u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
        self.words = self.words.wrapping_add(sum);
        self.positions = self.positions.wrapping_add(pos_bytes);
        self.rows += 1;
    }

    /// Returns the number of bytes that were summed, each row having `row_bytes`.
    ///
    /// # Errors
    /// The sum is not that of the file.
    pub(crate) fn finish(&self, series: &str, row_bytes: usize) -> Result<u64> {
        let words = (row_bytes / WORD_BYTES) as u64;
        let first = word_at(0, 0);
        let multiplier = word_at(1, 0).wrapping_sub(first);
        let offsets = (0..words).map(|word| word * WORD_BYTES as u64).sum::<u64>();
        let of_a_row = first.wrapping_mul(words).wrapping_add(multiplier.wrapping_mul(offsets));
        let of_positions = multiplier.wrapping_mul(words).wrapping_mul(self.positions);
        if self.words != of_a_row.wrapping_mul(self.rows).wrapping_add(of_positions) {
            return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes: 0 });
        }
        Ok(self.rows * row_bytes as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::pattern;

    #[test]
    fn one_wrong_byte_makes_the_sum_wrong() {
        let mut row = vec![0; 1024];
        let (mut good, mut bad) = (RowSums::default(), RowSums::default());
        for pos_bytes in [0, 5 << 10, 77 << 10] {
            pattern::fill(&mut row, pos_bytes);
            good.add(&row, pos_bytes);
            row[1000] ^= u8::from(pos_bytes > 0);
            bad.add(&row, pos_bytes);
        }
        assert_eq!(good.finish("x", 1024).unwrap(), 3 << 10);
        assert!(bad.finish("x", 1024).is_err());
    }
}

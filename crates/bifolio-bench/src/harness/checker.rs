//! Checks the bytes that a timed loop reads, cheaply: the first word of every page, and every 64th
//! block as a whole.

use super::access::PAGE_BYTES;
use super::pattern::{self, Sums};
use crate::error::{Error, Result};

/// Interval of blocks that are compared as a whole.
const WHOLE_INTERVAL: u64 = 64;

/// The bytes read so far by one thread.
#[derive(Debug)]
pub(crate) struct Checker {
    series: &'static str,
    sums: Sums,
    blocks: u64,
    verified_bytes: u64,
}

impl Checker {
    /// Creates a checker; `series` is named when bytes are wrong.
    pub(crate) fn new(series: &'static str) -> Self {
        Self { series, sums: Sums::default(), blocks: 0, verified_bytes: 0 }
    }

    /// Adds one block of whole pages.
    #[inline]
    pub(crate) fn add(&mut self, block: &[u8], pos_bytes: u64) -> Result<()> {
        let (pages, rest) = block.as_chunks::<PAGE_BYTES>();
        debug_assert!(rest.is_empty());
        for (page, pos_bytes) in pages.iter().zip((pos_bytes..).step_by(PAGE_BYTES)) {
            self.sums.add(page, pos_bytes);
        }
        if self.blocks.is_multiple_of(WHOLE_INTERVAL) {
            if !pattern::matches(block, pos_bytes) {
                return Err(self.wrong(pos_bytes));
            }
            self.verified_bytes += block.len() as u64;
        }
        self.blocks += 1;
        Ok(())
    }

    /// Returns the number of bytes compared.
    pub(crate) fn finish(self) -> Result<u64> {
        if !self.sums.agree() {
            return Err(self.wrong(0));
        }
        Ok(self.verified_bytes + self.sums.blocks() * size_of::<u64>() as u64)
    }

    /// Returns the error of this series for a read at `pos_bytes`.
    pub(crate) fn wrong(&self, pos_bytes: u64) -> Error {
        Error::WrongBytes { series: self.series.to_owned(), pos_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_first_word_or_byte_of_a_block_is_noticed() {
        let mut block = vec![0; 4 * PAGE_BYTES];
        let mut good = Checker::new("x");
        let mut first_word = Checker::new("x");
        for index in 0..100 {
            let pos_bytes = index * block.len() as u64;
            pattern::fill(&mut block, pos_bytes);
            good.add(&block, pos_bytes).unwrap();
            block[3 * PAGE_BYTES] ^= u8::from(index == 99);
            first_word.add(&block, pos_bytes).unwrap();
        }
        assert_eq!(good.finish().unwrap(), 2 * block.len() as u64 + 400 * 8);
        assert!(first_word.finish().is_err());
        block[17] ^= 1;
        assert!(Checker::new("x").add(&block, 99 * block.len() as u64).is_err());
    }
}

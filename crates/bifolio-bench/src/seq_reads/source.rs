//! A way to read a file from front to back, and two loops around it: one is timed, one compares
//! every byte.
//!
//! The loops are default methods, so that each is compiled for its own way of reading; a benchmark
//! is still a list of `dyn Source`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::harness::pattern::{self, Sums};
use crate::harness::timed::Window;

/// Minimum bytes between two clock readings; counts are per this number.
pub(super) const LOOK_BYTES: u64 = 1 << 20;

/// The content of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contents {
    pub(super) size_bytes: u64,
    /// Set for the pattern; otherwise zeros.
    pub(super) is_filled: bool,
}

impl Contents {
    fn matches(&self, bytes: &[u8], pos_bytes: u64) -> bool {
        if self.is_filled {
            pattern::matches(bytes, pos_bytes)
        } else {
            bytes.iter().all(|&byte| byte == 0)
        }
    }
}

/// One way to read one file.
pub(super) trait Source: Sync {
    /// The series.
    fn name(&self) -> &'static str;

    /// Reads a block. Returns the number of bytes.
    fn read(&self, block: &mut [u8], pos_bytes: u64) -> Result<usize>;

    /// Counters that only grow, always the same ones in the same order.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Returns the error for a wrong block.
    fn wrong(&self, pos_bytes: u64) -> Error {
        Error::WrongBytes { series: self.name().to_owned(), pos_bytes }
    }

    /// Reads on from `cursor_bytes`, block by block, for at least `duration`; restarts at the end
    /// of file. Checks the first word of every block. Operations are MiB.
    fn read_on(
        &self,
        block: &mut [u8],
        cursor_bytes: &mut u64,
        contents: Contents,
        duration: Duration,
    ) -> Result<Window> {
        let mut first_words = FirstWords::default();
        let mut looks = 0;
        let start = Instant::now();
        loop {
            for _ in 0..LOOK_BYTES / block.len() as u64 {
                let pos_bytes = *cursor_bytes;
                let read = self.read(block, pos_bytes)?;
                if read != block.len() {
                    return Err(self.wrong(pos_bytes));
                }
                black_box(&mut *block);
                first_words.add(block, pos_bytes);
                *cursor_bytes = pos_bytes + read as u64;
                if *cursor_bytes >= contents.size_bytes {
                    *cursor_bytes = 0;
                }
            }
            looks += 1;
            let elapsed = start.elapsed();
            if elapsed >= duration {
                if !first_words.agree(contents) {
                    return Err(self.wrong(0));
                }
                return Ok(Window { operations: looks, elapsed });
            }
        }
    }

    /// Compares every byte: equal shares of the file, each with blocks of another size. Returns the
    /// number of bytes.
    fn verify(&self, buffer: &mut [u8], blocks_bytes: &[usize], contents: Contents) -> Result<u64> {
        let share_bytes = contents.size_bytes.div_ceil(blocks_bytes.len() as u64);
        // Every block begins at a multiple of its size, as the timed ones do.
        let share_bytes = share_bytes.next_multiple_of(LOOK_BYTES);
        let mut pos_bytes = 0;
        while pos_bytes < contents.size_bytes {
            let block_bytes = blocks_bytes[(pos_bytes / share_bytes) as usize];
            let left_bytes = contents.size_bytes - pos_bytes;
            let block = &mut buffer[..left_bytes.min(block_bytes as u64) as usize];
            // Nothing of the last block may pass for this one.
            block.fill(0xa5);
            let read = self.read(block, pos_bytes)?;
            if read != block.len() || !contents.matches(block, pos_bytes) {
                return Err(self.wrong(pos_bytes));
            }
            pos_bytes += read as u64;
        }
        Ok(pos_bytes)
    }
}

/// The first words of blocks, all checked at once.
#[derive(Debug, Default)]
struct FirstWords {
    sums: Sums,
    any_bit: u64,
}

impl FirstWords {
    #[inline(always)]
    fn add(&mut self, block: &[u8], pos_bytes: u64) {
        let Some(word) = block.first_chunk() else { return };
        self.sums.add(word, pos_bytes);
        self.any_bit |= u64::from_ne_bytes(*word);
    }

    fn agree(&self, contents: Contents) -> bool {
        if contents.is_filled { self.sums.agree() } else { self.any_bit == 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE_BYTES: u64 = 3 << 20;

    /// Returns the pattern or zeros, with one byte changed.
    struct Faulty {
        is_filled: bool,
        wrong_at_bytes: u64,
    }

    impl Source for Faulty {
        fn name(&self) -> &'static str {
            "faulty"
        }

        fn read(&self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
            block.fill(0);
            if self.is_filled {
                pattern::fill(block, pos_bytes);
            }
            let end = SIZE_BYTES.min(pos_bytes + block.len() as u64);
            if (pos_bytes..end).contains(&self.wrong_at_bytes) {
                block[(self.wrong_at_bytes - pos_bytes) as usize] ^= 4;
            }
            Ok((end - pos_bytes) as usize)
        }
    }

    #[test]
    fn wrong_bytes_are_found_and_wrong_first_words_while_timed() {
        for is_filled in [true, false] {
            let contents = Contents { size_bytes: SIZE_BYTES, is_filled };
            let mut buffer = vec![0; 64 << 10];
            let mut verify = |wrong_at_bytes| {
                let source = Faulty { is_filled, wrong_at_bytes };
                source.verify(&mut buffer, &[4096, 64 << 10], contents)
            };
            assert_eq!(verify(u64::MAX).unwrap(), SIZE_BYTES);
            assert!(verify(4095).is_err() && verify(SIZE_BYTES - 1).is_err());

            let mut cursor = 2 << 20;
            let mut read_on = |wrong_at_bytes| {
                let source = Faulty { is_filled, wrong_at_bytes };
                source.read_on(&mut buffer, &mut cursor, contents, Duration::ZERO)
            };
            assert_eq!(read_on(u64::MAX).unwrap().operations, 1);
            assert!(read_on(64 << 10).is_err(), "it goes on at the start");
            assert_eq!(cursor, 1 << 20);
        }
    }
}

//! The timed loop of every benchmark that reads blocks.
//!
//! One loop, generic over the way a block is read and over the block's size, so that each series is
//! compiled to the same instructions around its own read: random position, read, check, count. The
//! clock is read once in [`OPERATIONS_PER_LOOK`] reads.
//!
//! The check is exact for the first word of every block: `pattern` makes words a linear function of
//! their index, so the sum of the words read must be the same function of the sum of the indices.
//! It takes two additions per read, no branch, and the copy cannot be optimised away.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::pattern;
use crate::error::{Error, Result};

/// Reads between two clock readings.
const OPERATIONS_PER_LOOK: u64 = 1024;

/// One way to get bytes of a file, shared by all threads.
pub(crate) trait ReadPath: Sync {
    /// The handle that one thread reads through.
    type Reader: Reader;

    /// System calls per read; `None` if [`counters`](Self::counters) count them.
    const SYSCALLS_PER_READ: Option<u64>;

    /// Creates a reader, in the thread that will use it.
    fn reader(&self) -> Result<Self::Reader>;

    /// Counters that only grow, always the same ones in the same order.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// One thread's way to get bytes of a file.
pub(crate) trait Reader {
    /// Reason why a read can fail.
    type Failure: Into<Error>;

    /// Reads `BLOCK` bytes at `pos_bytes`. Returns the number of bytes.
    fn read<const BLOCK: usize>(
        &mut self,
        block: &mut [u8; BLOCK],
        pos_bytes: u64,
    ) -> Result<usize, Self::Failure>;
}

/// A block on its own cache lines.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Block<const BLOCK: usize>(pub(crate) [u8; BLOCK]);

/// Random positions of whole blocks inside the first `size_bytes` of a file.
#[derive(Debug)]
pub(crate) struct Positions {
    random: fastrand::Rng,
    blocks: u64,
    block_bytes: u64,
}

impl Positions {
    /// Creates the sequence of a seed, the same on every run.
    pub(crate) fn new(size_bytes: u64, block_bytes: u64, seed: u64) -> Self {
        let blocks = size_bytes / block_bytes;
        assert!(blocks > 0 && blocks <= 1 << 32, "{blocks} blocks");
        Self { random: fastrand::Rng::with_seed(seed), blocks, block_bytes }
    }

    /// Returns the next position: the high half of a random word, scaled, without a division.
    #[inline(always)]
    pub(crate) fn next(&mut self) -> u64 {
        let high = self.random.u64(..) >> 32;
        ((high * self.blocks) >> 32) * self.block_bytes
    }
}

/// The work of one thread in one window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) operations: u64,
    pub(crate) elapsed: Duration,
}

impl Window {
    /// Operations in a second.
    pub(crate) fn rate(&self) -> f64 {
        self.operations as f64 / self.elapsed.as_secs_f64()
    }
}

/// Reads blocks at random for at least `duration`, and checks them; `series` names them in errors.
pub(crate) fn read_blocks<const BLOCK: usize, R: Reader>(
    reader: &mut R,
    mut positions: Positions,
    duration: Duration,
    series: &str,
) -> Result<Window> {
    let mut block = Block([0; BLOCK]);
    let mut sums = pattern::Sums::default();
    let start = Instant::now();
    loop {
        for _ in 0..OPERATIONS_PER_LOOK {
            let pos_bytes = positions.next();
            let read = reader.read(&mut block.0, pos_bytes).map_err(Into::into)?;
            if read != BLOCK {
                return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes });
            }
            black_box(&mut block);
            sums.add(&block.0, pos_bytes);
        }
        let elapsed = start.elapsed();
        if elapsed >= duration {
            if !sums.agree() {
                return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes: 0 });
            }
            return Ok(Window { operations: sums.blocks(), elapsed });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the pattern, with one bit flipped in one block.
    struct Faulty {
        wrong_at_bytes: Option<u64>,
    }

    impl Reader for Faulty {
        type Failure = Error;

        fn read<const BLOCK: usize>(
            &mut self,
            block: &mut [u8; BLOCK],
            pos_bytes: u64,
        ) -> Result<usize> {
            pattern::fill(block, pos_bytes);
            block[0] ^= u8::from(self.wrong_at_bytes == Some(pos_bytes));
            Ok(BLOCK)
        }
    }

    #[test]
    fn a_flipped_bit_in_one_block_is_noticed() {
        let run = |wrong_at_bytes| {
            let positions = Positions::new(4096, 64, 1);
            read_blocks::<64, _>(&mut Faulty { wrong_at_bytes }, positions, Duration::ZERO, "x")
        };
        assert_eq!(run(None).unwrap().operations, OPERATIONS_PER_LOOK);
        assert!(matches!(run(Some(1024)), Err(Error::WrongBytes { .. })));
    }

    #[test]
    fn positions_are_whole_blocks_and_reach_all_of_them() {
        let mut positions = Positions::new(1024 + 63, 64, 7);
        let mut seen = [false; 16];
        for _ in 0..1000 {
            let pos_bytes = positions.next();
            assert_eq!(pos_bytes % 64, 0);
            seen[usize::try_from(pos_bytes / 64).unwrap()] = true;
        }
        assert!(seen.iter().all(|&seen| seen));
    }
}

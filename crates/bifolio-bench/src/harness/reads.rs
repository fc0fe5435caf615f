//! Timed reads of resident bytes, and the comparison of every byte before it.
//!
//! One loop for random blocks, generic over the way a block is read and over the block's size, so
//! that each series is compiled to the same instructions around its own read: random position,
//! read, check, count. The clock is read once in [`OPERATIONS_PER_LOOK`] reads. The check is exact
//! for the first word of every block (`pattern::Sums`): two additions per read, no branch, and the
//! copy cannot be optimised away.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use super::access::PAGE_BYTES;
use super::counters::Counters;
use super::measured::{Measured, Per};
use super::pattern::{self, Sums};
use super::span::Span;
use super::threads::run_for;
use crate::error::{Error, Result};

/// Operations between two clock readings.
pub(crate) const OPERATIONS_PER_LOOK: u64 = 1024;

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

/// One thread's way to get bytes of a file: a call of what is measured, and nothing else. It is
/// always inlined, so that each loop is compiled around its own read.
pub(crate) trait Reader {
    /// Fills `block` from `pos_bytes`. Returns the number of bytes.
    fn read(&mut self, block: &mut [u8], pos_bytes: u64) -> Result<usize>;
}

impl Reader for Span {
    #[inline(always)]
    fn read(&mut self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
        self.copy(block, pos_bytes);
        Ok(block.len())
    }
}

/// The reads of one trial.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load<'a> {
    /// Block size: one of the sizes the loop is compiled for.
    pub(crate) block_bytes: usize,
    /// Upper bound of the positions.
    pub(crate) extent_bytes: u64,
    /// CPUs, with one thread each.
    pub(crate) cpus: &'a [usize],
}

type Run = dyn Fn(&Load<'_>, Duration) -> Result<Measured>;

/// A series: a named way to read a file.
pub(crate) struct Way {
    pub(crate) series: &'static str,
    /// Runs one trial.
    pub(crate) run: Box<Run>,
    /// Compares every byte of a file of this length, in blocks of several sizes. Returns the number
    /// of bytes.
    pub(crate) verify: Box<dyn Fn(u64) -> Result<u64>>,
}

impl Way {
    /// Creates a way to read random blocks, for which each thread opens its own reader. Counters
    /// are reported for each operation.
    pub(crate) fn random<R: Reader>(
        series: &'static str,
        counters: impl Fn() -> Counters + 'static,
        open: impl Fn() -> Result<R> + Sync + 'static,
    ) -> Self {
        let open = Arc::new(open);
        let opened = Arc::clone(&open);
        let run = move |load: &Load<'_>, duration| {
            let before = counters();
            let mut measured = match load.block_bytes {
                8 => read_blocks::<8, _>(load, duration, series, &*open),
                64 => read_blocks::<64, _>(load, duration, series, &*open),
                4096 => read_blocks::<4096, _>(load, duration, series, &*open),
                other => Err(Error::Refused(format!("no loop for blocks of {other} bytes"))),
            }?;
            measured.add_since(&before, &counters(), Per::Operation);
            Ok(measured)
        };
        let verify = move |size_bytes: u64| {
            let mut reader = opened()?;
            let pages = verify(series, size_bytes, PAGE_BYTES, |to, at| reader.read(to, at))?;
            let first_page = size_bytes.min(PAGE_BYTES as u64);
            Ok(pages + verify(series, first_page, 64, |to, at| reader.read(to, at))?)
        };
        Self { series, run: Box::new(run), verify: Box::new(verify) }
    }
}

/// Reads blocks at random for at least `duration` on each CPU, and checks them.
fn read_blocks<const BLOCK: usize, R: Reader>(
    load: &Load<'_>,
    duration: Duration,
    series: &str,
    open: &(impl Fn() -> Result<R> + Sync),
) -> Result<Measured> {
    let wrong = |pos_bytes| Error::WrongBytes { series: series.to_owned(), pos_bytes };
    let prepare = |thread: usize| {
        Ok((open()?, Positions::new(load.extent_bytes, BLOCK as u64, thread as u64)))
    };
    run_for(load.cpus, duration, prepare, |(mut reader, mut positions), window| {
        let mut block = Block([0; BLOCK]);
        let mut sums = Sums::default();
        loop {
            for _ in 0..OPERATIONS_PER_LOOK {
                let pos_bytes = positions.next();
                if reader.read(&mut block.0, pos_bytes)? != BLOCK {
                    return Err(wrong(pos_bytes));
                }
                black_box(&mut block);
                sums.add(&block.0, pos_bytes);
            }
            if window.is_over() {
                return if sums.agree() { Ok(sums.words()) } else { Err(wrong(0)) };
            }
        }
    })
}

/// Compares every byte of a file with the pattern, block by block. Returns the number of bytes.
pub(crate) fn verify(
    series: &str,
    size_bytes: u64,
    block_bytes: usize,
    mut read: impl FnMut(&mut [u8], u64) -> Result<usize>,
) -> Result<u64> {
    let mut block = vec![0; block_bytes];
    for pos_bytes in (0..size_bytes).step_by(block_bytes) {
        let block = &mut block[..(size_bytes - pos_bytes).min(block_bytes as u64) as usize];
        // Nothing of the last block may pass for this one.
        block.fill(0xa5);
        if read(block, pos_bytes)? != block.len() || !pattern::matches(block, pos_bytes, 0) {
            return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes });
        }
    }
    Ok(size_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::cpus;

    const SIZE_BYTES: u64 = 3 * PAGE_BYTES as u64;

    /// The pattern, except for one bit, up to an end.
    struct Faulty {
        wrong_at_bytes: u64,
        end_bytes: u64,
    }

    impl Reader for Faulty {
        fn read(&mut self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
            pattern::fill(block, pos_bytes, 0);
            let wrong_at = self.wrong_at_bytes.checked_sub(pos_bytes).map(|at| at as usize);
            if let Some(byte) = wrong_at.and_then(|at| block.get_mut(at)) {
                *byte ^= 0x10;
            }
            Ok(block.len().min((self.end_bytes - pos_bytes) as usize))
        }
    }

    #[test]
    fn the_one_wrong_byte_and_the_short_read_are_found() {
        let faulty = |wrong_at_bytes: u64, end_bytes: u64| {
            Way::random("x", Vec::new, move || Ok(Faulty { wrong_at_bytes, end_bytes }))
        };
        let verify = |wrong, end| (faulty(wrong, end).verify)(SIZE_BYTES);
        assert_eq!(verify(u64::MAX, SIZE_BYTES).unwrap(), SIZE_BYTES + 4096);
        for (wrong, end) in [(SIZE_BYTES - 7, SIZE_BYTES), (u64::MAX, SIZE_BYTES - 10)] {
            assert!(matches!(verify(wrong, end), Err(Error::WrongBytes { .. })));
        }
        let cpu = cpus::allowed()[0];
        let load = Load { block_bytes: 64, extent_bytes: 4096, cpus: &[cpu] };
        let run = |wrong| (faulty(wrong, SIZE_BYTES).run)(&load, Duration::ZERO);
        assert_eq!(run(u64::MAX).unwrap().calls.operations, OPERATIONS_PER_LOOK);
        assert!(matches!(run(1024), Err(Error::WrongBytes { .. })), "a first word");
    }
}

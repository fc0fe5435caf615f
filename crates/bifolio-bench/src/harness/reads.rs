//! Timed reads of resident bytes at random: the loop of `small-reads` and `map-reads`, and the
//! comparison of every byte before it.
//!
//! One loop, generic over the way a block is read and over the block's size, so that each series is
//! compiled to the same instructions around its own read: random position, read, check, count. The
//! clock is read once in [`OPERATIONS_PER_LOOK`] reads. The check is exact for the first word of
//! every block (`pattern::Sums`): two additions per read, no branch, and the copy cannot be
//! optimised away.

use std::fs::File;
use std::hint::black_box;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::counters::Counters;
use super::measured::{Measured, Per};
use super::pattern::{self, CHUNK_BYTES, Sums};
use super::permutation::Permutation;
use super::threads::{run_pinned, run_together};
use crate::error::{Error, Result};

/// Operations between two clock readings.
pub(crate) const OPERATIONS_PER_LOOK: u64 = 1024;

/// Threads that compare every byte.
pub(crate) const VERIFY_THREADS: usize = 2;

/// Bytes that a thread compares at a time.
const WORK_BYTES: usize = 4096;

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

/// The reads of one trial.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load<'a> {
    /// Block size: one of the sizes the loop is compiled for.
    pub(crate) block_bytes: u64,
    /// Upper bound of the positions.
    pub(crate) extent_bytes: u64,
    /// CPUs, with one thread each.
    pub(crate) cpus: &'a [usize],
}

type Trial = Box<dyn Fn(&Load<'_>, Duration) -> Result<Measured>>;
type Verify = Box<dyn Fn(&Path) -> Result<u64>>;

/// A series: a named way to read a file.
pub(crate) struct Way {
    pub(crate) series: &'static str,
    run: Trial,
    verify: Verify,
}

impl Way {
    /// Creates a way. Each thread opens its own reader, which reads a block at a position; one read
    /// makes `syscalls`, unless the counters count them.
    pub(crate) fn new<R: Reader>(
        series: &'static str,
        syscalls: Option<u64>,
        open: impl Fn() -> Result<R> + Sync + 'static,
        counters: impl Fn() -> Counters + 'static,
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
            for ((name, after), (_, before)) in counters().iter().zip(&before) {
                let count = after.saturating_sub(*before) as f64;
                measured.add(format!("{name}_per_op"), count, Per::Operation);
            }
            if let Some(syscalls) = syscalls {
                let count = (measured.calls.operations * syscalls) as f64;
                measured.add("syscalls_per_op", count, Per::Operation);
            }
            Ok(measured)
        };
        let verify = move |file: &Path| {
            let pages_bytes = verify::<4096, R>(&*opened, series, file, u64::MAX, VERIFY_THREADS)?;
            Ok(pages_bytes + verify::<64, R>(&*opened, series, file, 4096, 1)?)
        };
        Self { series, run: Box::new(run), verify: Box::new(verify) }
    }

    /// Runs one trial.
    pub(crate) fn run(&self, load: &Load<'_>, duration: Duration) -> Result<Measured> {
        (self.run)(load, duration)
    }

    /// Compares every byte of `file` with the bytes read by this series, page by page, and the
    /// first page also in 64-byte blocks. Returns the number of bytes compared.
    pub(crate) fn verify(&self, file: &Path) -> Result<u64> {
        (self.verify)(file)
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
    let body = |(mut reader, mut positions): (R, Positions)| {
        let mut block = Block([0; BLOCK]);
        let mut sums = Sums::default();
        let start = Instant::now();
        loop {
            for _ in 0..OPERATIONS_PER_LOOK {
                let pos_bytes = positions.next();
                if reader.read(&mut block.0, pos_bytes)? != BLOCK {
                    return Err(wrong(pos_bytes));
                }
                black_box(&mut block);
                sums.add(&block.0, pos_bytes);
            }
            let end = Instant::now();
            if end - start >= duration {
                return if sums.agree() { Ok((sums.blocks(), start..end)) } else { Err(wrong(0)) };
            }
        }
    };
    Ok(sum_of_threads(run_pinned(load.cpus, prepare, body)?))
}

/// Operations of one thread, and when they were made.
pub(crate) type Work = (u64, Range<Instant>);

/// Returns the result of threads; a word of each operation was verified. Threads that share a CPU
/// work one after the other, so the time is that from the first start to the last end.
pub(crate) fn sum_of_threads(threads: Vec<Work>) -> Measured {
    let operations = threads.iter().map(|(operations, _)| operations).sum();
    let start = threads.iter().map(|(_, time)| time.start).min();
    let end = threads.iter().map(|(_, time)| time.end).max();
    let seconds = start.zip(end).map_or(0.0, |(start, end)| (end - start).as_secs_f64());
    let measured = Measured::of_rate(operations, operations as f64 / seconds);
    Measured { verified_bytes: operations * size_of::<u64>() as u64, ..measured }
}

/// Compares the first `limit_bytes` of `file` with an independent read of it, block by block, by
/// threads that take one page after the other. Returns the number of bytes compared.
fn verify<const BLOCK: usize, R: Reader>(
    open: &(impl Fn() -> Result<R> + Sync),
    series: &str,
    file: &Path,
    limit_bytes: u64,
    threads: usize,
) -> Result<u64> {
    let failed = || Error::system(format!("read {}", file.display()));
    let file = File::open(file).map_err(failed())?;
    let size_bytes = file.metadata().map_err(failed())?.len();
    let end_bytes = size_bytes.min(limit_bytes) / BLOCK as u64 * BLOCK as u64;
    let next_work = AtomicU64::new(0);
    let work = |mut reader: R| -> Result<()> {
        let (mut expected, mut block) = (vec![0; WORK_BYTES], Block([0; BLOCK]));
        loop {
            // Relaxed: hands out numbers, publishes nothing.
            let start = next_work.fetch_add(WORK_BYTES as u64, Ordering::Relaxed);
            if start >= end_bytes {
                return Ok(());
            }
            let expected = &mut expected[..(end_bytes - start).min(WORK_BYTES as u64) as usize];
            file.read_exact_at(expected, start).map_err(failed())?;
            for (expected, pos_bytes) in expected.chunks_exact(BLOCK).zip((start..).step_by(BLOCK))
            {
                // Nothing of the last block may pass for this one.
                block.0.fill(!expected[0]);
                let read = reader.read(&mut block.0, pos_bytes)?;
                let same = block.0.iter().zip(expected).position(|(ours, theirs)| ours != theirs);
                if read != BLOCK || same.is_some() {
                    let pos_bytes = pos_bytes + same.unwrap_or(read) as u64;
                    return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes });
                }
            }
        }
    };
    run_together(threads, |_| open(), work)?;
    Ok(end_bytes)
}

/// Reads all of `file` through its cache, in order, like a scan, and compares it with the pattern.
/// Returns the number of bytes.
pub(crate) fn fill(file: &bifolio::File, series: &str) -> Result<u64> {
    let mut chunk = vec![0; CHUNK_BYTES];
    for pos_bytes in (0..file.len()).step_by(CHUNK_BYTES) {
        let read = file.read_at(&mut chunk, pos_bytes)?;
        let left_bytes = file.len() - pos_bytes;
        let is_whole = read as u64 == left_bytes.min(CHUNK_BYTES as u64);
        if !is_whole || !pattern::matches(&chunk[..read], pos_bytes) {
            return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes });
        }
    }
    Ok(file.len())
}

/// Fills the file like [`fill`], page by page in random order.
pub(crate) fn fill_shuffled(file: &bifolio::File, series: &str) -> Result<u64> {
    let pages = file.len() / WORK_BYTES as u64;
    let order = Permutation::new(pages, 1);
    let mut page = [0; WORK_BYTES];
    for index in 0..pages {
        let pos_bytes = order.apply(index) * WORK_BYTES as u64;
        file.read_exact_at(&mut page, pos_bytes)?;
        if !pattern::matches(&page, pos_bytes) {
            return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes });
        }
    }
    Ok(file.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::cpus;
    use crate::progress::Silent;

    const SIZE_BYTES: u64 = 3 * CHUNK_BYTES as u64 + 4096;

    /// The pattern, except for one bit, up to an end.
    struct Faulty {
        wrong_at_bytes: u64,
        end_bytes: u64,
    }

    impl Reader for Faulty {
        fn read(&mut self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
            pattern::fill(block, pos_bytes);
            let wrong_at = self.wrong_at_bytes.checked_sub(pos_bytes).map(|at| at as usize);
            if let Some(byte) = wrong_at.and_then(|at| block.get_mut(at)) {
                *byte ^= 0x10;
            }
            Ok(block.len().min((self.end_bytes - pos_bytes) as usize))
        }
    }

    fn faulty(wrong_at_bytes: u64, end_bytes: u64) -> Way {
        Way::new("x", Some(0), move || Ok(Faulty { wrong_at_bytes, end_bytes }), Vec::new)
    }

    #[test]
    fn the_one_wrong_byte_and_the_short_read_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        pattern::make_file(&file, SIZE_BYTES, &mut Silent).unwrap();
        let verify = |wrong, end| faulty(wrong, end).verify(&file);
        assert_eq!(verify(u64::MAX, SIZE_BYTES).unwrap(), SIZE_BYTES + 4096);
        for (wrong, end) in [(SIZE_BYTES - 7, SIZE_BYTES), (u64::MAX, SIZE_BYTES - 10)] {
            let error = verify(wrong, end).unwrap_err();
            let at = wrong.min(end);
            assert!(matches!(error, Error::WrongBytes { pos_bytes, .. } if pos_bytes == at));
        }
        let cpu = cpus::allowed()[0];
        let load = Load { block_bytes: 64, extent_bytes: 4096, cpus: &[cpu] };
        let run = |wrong| faulty(wrong, SIZE_BYTES).run(&load, Duration::ZERO);
        assert_eq!(run(u64::MAX).unwrap().calls.operations, OPERATIONS_PER_LOOK);
        assert!(matches!(run(1024), Err(Error::WrongBytes { .. })), "a first word");
    }

    #[test]
    fn threads_that_work_one_after_the_other_are_not_faster_than_one() {
        let start = Instant::now();
        let second = |number| start + Duration::from_secs(number);
        let work = |from| (100, second(from)..second(from + 1));
        let rate = |threads| Measured::rate(&sum_of_threads(threads));
        assert_eq!(rate(vec![work(0), work(0)]), 200.0);
        assert_eq!(rate(vec![work(1), work(0)]), 100.0);
    }

    #[test]
    fn filling_reads_all_of_a_file_with_the_pattern() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        pattern::make_file(&path, SIZE_BYTES, &mut Silent).unwrap();
        let filled = |fill: fn(&bifolio::File, &str) -> Result<u64>| {
            let cache = bifolio::Cache::builder().memory(8 << 20).build().unwrap();
            fill(&cache.open(&path, &bifolio::OpenOptions::new()).unwrap(), "s")
        };
        assert_eq!(filled(fill).unwrap(), SIZE_BYTES);
        assert_eq!(filled(fill_shuffled).unwrap(), SIZE_BYTES);
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[1; 8], SIZE_BYTES - 8).unwrap();
        assert!(filled(fill).is_err() && filled(fill_shuffled).is_err());
    }

    #[test]
    fn positions_are_whole_blocks_and_reach_all_of_them() {
        let mut positions = Positions::new(1024 + 63, 64, 7);
        let mut seen = [false; 16];
        for _ in 0..1000 {
            let pos_bytes = positions.next();
            assert_eq!(pos_bytes % 64, 0);
            seen[(pos_bytes / 64) as usize] = true;
        }
        assert!(seen.iter().all(|&seen| seen));
    }
}

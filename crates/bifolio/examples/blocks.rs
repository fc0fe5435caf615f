//! Blocks of any length as one slice, beside a copy: the time to get a block that is in memory, and
//! to add up its words.
//!
//! `cargo run --release --example blocks`

use bifolio::{Cache, ImmutableFile, OpenOptions};
use std::error::Error;
use std::time::{Duration, Instant};

const FILE_BYTES: u64 = 64 << 20;
const ROUND: Duration = Duration::from_millis(500);

/// Positions in no order, not at pages.
struct Positions(u64);

impl Positions {
    fn next(&mut self, block_bytes: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % (FILE_BYTES - block_bytes)
    }
}

fn sum(bytes: &[u8]) -> u64 {
    let words = bytes.chunks_exact(8);
    words.fold(0, |sum, word| sum.wrapping_add(u64::from_le_bytes(word.try_into().expect("8"))))
}

/// Calls `get` for a round. Returns the mean time of a call.
fn time(mut get: impl FnMut() -> bifolio::Result<u64>) -> bifolio::Result<Duration> {
    let (begun, mut calls, mut sums) = (Instant::now(), 0, 0_u64);
    while begun.elapsed() < ROUND {
        sums = sums.wrapping_add(get()?);
        calls += 1;
    }
    std::hint::black_box(sums);
    Ok(begun.elapsed() / calls)
}

fn compare(file: &ImmutableFile, block_bytes: u64) -> bifolio::Result<()> {
    let mut positions = Positions(1);
    let mut range = || {
        let start = positions.next(block_bytes);
        start..start + block_bytes
    };
    let slice = time(|| Ok(sum(&file.bytes(range())?)))?;
    let mut buffer = vec![0; block_bytes as usize];
    let copy = time(|| {
        file.read_exact_at(&mut buffer, range().start)?;
        Ok(sum(&buffer))
    })?;
    let alone = time(|| file.bytes(range()).map(|slice| slice.len() as u64))?;
    println!("{block_bytes} bytes: slice {slice:?} ({alone:?} without the sum), copy {copy:?}");
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir_in(std::env::current_dir()?)?;
    let path = directory.path().join("blocks");
    std::fs::write(&path, vec![7; FILE_BYTES as usize])?;
    let cache = Cache::builder().memory(2 * FILE_BYTES).build()?;
    let file = cache.open_immutable(&path, &OpenOptions::new().mappable(true))?;
    file.populate(..)?;
    for _ in 0..2 {
        for block_bytes in [4 << 10, 64 << 10, 1 << 20, 8 << 20] {
            compare(&file, block_bytes)?;
        }
    }
    Ok(())
}

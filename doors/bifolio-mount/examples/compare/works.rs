//! The works of the comparisons: each does something with the files of a directory, and returns
//! how many accesses or MiB it did per second.

use std::fs::{self, File, OpenOptions};
use std::hint::black_box;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

pub const PAGE: usize = 4096;
pub const MIB: usize = 1 << 20;
/// Bytes of the file that fits in memory.
pub const SMALL_BYTES: u64 = 64 << 20;
/// Bytes of the file that does not.
pub const LARGE_BYTES: u64 = 1 << 30;
/// Random writes before the final sync.
pub const RANDOM_WRITES: usize = 20_000;
/// Small files, and the bytes of each.
const FILES: usize = 2_000;
const FILE_BYTES: usize = 4_000;

/// Writes the files of a directory, and drops their pages from the kernel's cache.
pub fn fill(source: &Path, files: &[(&str, u64)]) -> Result<()> {
    fs::create_dir(source)?;
    for &(name, length) in files {
        let mut file = File::create(source.join(name))?;
        let mut block = vec![0; MIB];
        for _ in 0..length / MIB as u64 {
            fastrand::fill(&mut block);
            file.write_all(&block)?;
        }
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

fn open_to_write(target: &Path, name: &str) -> Result<File> {
    Ok(OpenOptions::new().read(true).write(true).open(target.join(name))?)
}

fn open_to_read(target: &Path, name: &str) -> Result<File> {
    Ok(File::open(target.join(name))?)
}

/// Repeats `access` for a time. Returns the number per second.
fn rate(length: Duration, mut access: impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    let mut count = 0;
    while start.elapsed() < length {
        access()?;
        count += 1;
    }
    Ok(f64::from(count) / start.elapsed().as_secs_f64())
}

/// Reads the whole small file, so that it is resident.
fn warm(file: &File) -> Result<()> {
    let mut block = vec![0; MIB];
    for index in 0..SMALL_BYTES / MIB as u64 {
        file.read_exact_at(&mut block, index * MIB as u64)?;
    }
    Ok(())
}

pub fn hits(target: &Path, length: Duration) -> Result<f64> {
    let file = open_to_read(target, "small")?;
    warm(&file)?;
    let mut random = fastrand::Rng::with_seed(1);
    let mut page = [0; PAGE];
    let rate = rate(length, || {
        let position = random.u64(..SMALL_BYTES / PAGE as u64) * PAGE as u64;
        file.read_exact_at(&mut page, position)?;
        black_box(&page);
        Ok(())
    })?;
    Ok(rate / 1e3)
}

/// Reads pages by a zipf distribution with exponent 0.99, scattered over the file. The first half
/// of the time warms the cache.
pub fn zipf_reads(target: &Path, length: Duration) -> Result<f64> {
    let file = open_to_read(target, "large")?;
    let pages = LARGE_BYTES / PAGE as u64;
    let mut sums = Vec::with_capacity(pages as usize);
    let mut sum = 0.0;
    for rank in 1..=pages {
        sum += (rank as f64).powf(-0.99);
        sums.push(sum);
    }
    let mut random = fastrand::Rng::with_seed(2);
    let mut page = [0; PAGE];
    let mut read = || {
        let drawn = random.f64() * sum;
        let rank = sums.partition_point(|sum| *sum < drawn) as u64;
        // An odd factor permutes the pages: their number is a power of 2.
        let position = rank.wrapping_mul(0x9e37_79b9_7f4a_7c15) % pages * PAGE as u64;
        file.read_exact_at(&mut page, position)?;
        black_box(&page);
        Ok(())
    };
    rate(length * 2, &mut read)?;
    Ok(rate(length * 2, &mut read)? / 1e3)
}

pub fn random_writes(target: &Path, _: Duration) -> Result<f64> {
    let file = open_to_write(target, "large")?;
    let mut random = fastrand::Rng::with_seed(3);
    let page = [7; PAGE];
    let start = Instant::now();
    for _ in 0..RANDOM_WRITES {
        // A quarter of the file.
        let position = random.u64(..LARGE_BYTES / 4 / PAGE as u64) * PAGE as u64;
        file.write_all_at(&page, position)?;
    }
    file.sync_data()?;
    Ok(RANDOM_WRITES as f64 / start.elapsed().as_secs_f64() / 1e3)
}

pub fn large_reads(target: &Path, length: Duration) -> Result<f64> {
    let file = open_to_read(target, "small")?;
    warm(&file)?;
    let mut block = vec![0; MIB];
    let mut index = 0;
    rate(length, || {
        file.read_exact_at(&mut block, index % (SMALL_BYTES / MIB as u64) * MIB as u64)?;
        index += 1;
        black_box(&block);
        Ok(())
    })
}

pub fn large_writes(target: &Path, length: Duration) -> Result<f64> {
    let file = open_to_write(target, "small")?;
    warm(&file)?;
    let block = vec![7; MIB];
    let mut index = 0;
    rate(length, || {
        file.write_all_at(&block, index % (SMALL_BYTES / MIB as u64) * MIB as u64)?;
        index += 1;
        Ok(())
    })
}

/// Reads the large file from its begin to its end.
pub fn scan(target: &Path, _: Duration) -> Result<f64> {
    let file = open_to_read(target, "large")?;
    let mut block = vec![0; MIB];
    let start = Instant::now();
    for index in 0..LARGE_BYTES / MIB as u64 {
        file.read_exact_at(&mut block, index * MIB as u64)?;
        black_box(&block);
    }
    Ok((LARGE_BYTES / MIB as u64) as f64 / start.elapsed().as_secs_f64())
}

/// Creates small files, and syncs none.
pub fn creations(target: &Path, _: Duration) -> Result<f64> {
    let directory = target.join("created");
    fs::create_dir(&directory)?;
    let bytes = [7; FILE_BYTES];
    let start = Instant::now();
    for index in 0..FILES {
        fs::write(directory.join(index.to_string()), bytes)?;
    }
    let rate = FILES as f64 / start.elapsed().as_secs_f64();
    fs::remove_dir_all(directory)?;
    Ok(rate / 1e3)
}

/// Looks at the attributes of small files, then reads each: as `git status` or a backup does.
pub fn walks(target: &Path, length: Duration) -> Result<f64> {
    let directory = target.join("walked");
    fs::create_dir(&directory)?;
    for index in 0..FILES {
        fs::write(directory.join(index.to_string()), [7; FILE_BYTES])?;
    }
    let mut entries = 0;
    let start = Instant::now();
    while start.elapsed() < length {
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            ensure!(entry.metadata()?.len() == FILE_BYTES as u64);
            black_box(fs::read(entry.path())?);
            entries += 1;
        }
    }
    let rate = f64::from(entries) / start.elapsed().as_secs_f64();
    fs::remove_dir_all(directory)?;
    Ok(rate / 1e3)
}

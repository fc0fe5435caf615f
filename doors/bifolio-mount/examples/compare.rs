//! Compares `bifolio-mount` with pass-through mounts (`examples/passthrough.rs`): the speed figures
//! of `docs/mount.md`.
//!
//! ```sh
//! cd doors && cargo build --release -p bifolio-mount --bins --examples
//! cargo run --release -p bifolio-mount --example compare -- DIRECTORY
//! ```
//!
//! Needs root, 3 GiB in DIRECTORY, and three minutes. Each mount has files of its own. The mounts
//! are interleaved, and started anew in each round. Prints for each work and mount the median,
//! the least and the greatest, and the ratio to the pass-through mount in the first column.

use std::fs::{self, File, OpenOptions};
use std::hint::black_box;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// Bytes of the file that fits in memory.
const SMALL_BYTES: u64 = 64 << 20;
/// Bytes of the file that does not.
const LARGE_BYTES: u64 = 1 << 30;
/// Bound of the cache for each work but that of the misses and random writes.
const MEMORY: &str = "256M";
/// Bound for those: an eighth of the large file.
const LITTLE_MEMORY: &str = "128M";
/// Random writes before the final sync.
const RANDOM_WRITES: usize = 20_000;

#[derive(Parser)]
struct Options {
    /// The directory for the files, on the device to be measured.
    directory: PathBuf,
    /// Rounds, in which each mount does each work once.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Length of a measurement, seconds.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
}

/// A kind of mount.
struct Mount {
    name: &'static str,
    /// The program, beside this one or in its parent directory.
    program: &'static str,
    arguments: &'static [&'static str],
}

/// Without the kernel's page cache, which the default uses for files that are open for writing, as
/// those of all works are.
const BIFOLIO: Mount =
    Mount { name: "bifolio", program: "../bifolio-mount", arguments: &["--direct"] };
const KERNEL_CACHE: Mount =
    Mount { name: "bifolio-kernel-cache", arguments: &["--kernel-cache"], ..BIFOLIO };
const CACHED: Mount = Mount { name: "cached", program: "passthrough", arguments: &[] };
const UNCACHED: Mount = Mount { name: "uncached", arguments: &["--uncached"], ..CACHED };
const DIRECT: Mount = Mount { name: "direct", arguments: &["--direct"], ..CACHED };

/// A measurement: a function that rerounds accesses or MiB per second.
struct Work {
    name: &'static str,
    unit: &'static str,
    memory: &'static str,
    mounts: &'static [&'static Mount],
    measure: fn(&Path, Duration) -> Result<f64>,
}

const WORKS: &[Work] = &[
    Work {
        name: "4 KiB hits",
        unit: "K/s",
        memory: MEMORY,
        mounts: &[&CACHED, &UNCACHED, &BIFOLIO, &KERNEL_CACHE],
        measure: hits,
    },
    Work {
        name: "4 KiB zipf reads, 1/8 fits",
        unit: "K/s",
        memory: LITTLE_MEMORY,
        mounts: &[&DIRECT, &BIFOLIO],
        measure: zipf_reads,
    },
    Work {
        name: "4 KiB random writes, one sync",
        unit: "K/s",
        memory: LITTLE_MEMORY,
        mounts: &[&DIRECT, &BIFOLIO],
        measure: random_writes,
    },
    Work {
        name: "1 MiB reads, resident",
        unit: "MiB/s",
        memory: MEMORY,
        mounts: &[&CACHED, &UNCACHED, &BIFOLIO, &KERNEL_CACHE],
        measure: large_reads,
    },
    Work {
        name: "1 MiB writes, resident",
        unit: "MiB/s",
        memory: MEMORY,
        mounts: &[&CACHED, &UNCACHED, &BIFOLIO, &KERNEL_CACHE],
        measure: large_writes,
    },
];

fn main() -> Result<()> {
    let options = Options::parse();
    let length = Duration::from_secs_f64(options.seconds);
    let mounts = [&CACHED, &UNCACHED, &DIRECT, &BIFOLIO, &KERNEL_CACHE];
    let directory = tempfile::tempdir_in(&options.directory)?;
    for mount in mounts {
        let has_large = [BIFOLIO.name, DIRECT.name].contains(&mount.name);
        let files = [("small", SMALL_BYTES), ("large", LARGE_BYTES)];
        let files = &files[..1 + usize::from(has_large)];
        fill(&directory.path().join(mount.name), files).context("cannot create the files")?;
    }
    let mut figures = vec![vec![Vec::new(); mounts.len()]; WORKS.len()];
    for round in 0..options.rounds {
        for (work, figures) in WORKS.iter().zip(&mut figures) {
            for index in 0..work.mounts.len() {
                // Another mount is the first in each round.
                let index = (index + round) % work.mounts.len();
                let mount = work.mounts[index];
                let source = directory.path().join(mount.name);
                let running = Running::start(mount, &source, work.memory)?;
                let figure = (work.measure)(running.target.path(), length);
                figures[index]
                    .push(figure.with_context(|| format!("{} of {}", work.name, mount.name))?);
                running.end()?;
            }
        }
    }
    for (work, figures) in WORKS.iter().zip(&mut figures) {
        println!("{}, {}", work.name, work.unit);
        let mut first = None;
        for (mount, figures) in work.mounts.iter().zip(figures) {
            figures.sort_by(f64::total_cmp);
            let (least, median, most) =
                (figures[0], figures[figures.len() / 2], figures[figures.len() - 1]);
            let ratio = median / *first.get_or_insert(median);
            let name = mount.name;
            println!("  {name:22} {median:9.1}  ({least:.1} to {most:.1})  {ratio:.2} x");
        }
    }
    Ok(())
}

/// Writes the files of a mount, and drops their pages from the kernel's cache.
fn fill(source: &Path, files: &[(&str, u64)]) -> Result<()> {
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

/// A mounted directory.
struct Running {
    child: Child,
    target: tempfile::TempDir,
}

impl Running {
    fn start(mount: &Mount, source: &Path, memory: &str) -> Result<Self> {
        let target = tempfile::tempdir()?;
        let before = fs::metadata(target.path())?.dev();
        let program = std::env::current_exe()?;
        let program = program.parent().context("a program is in a directory")?.join(mount.program);
        let mut command = Command::new(&program);
        command.arg(source).arg(target.path()).args(mount.arguments).stdout(Stdio::null());
        if mount.program == BIFOLIO.program {
            command.args(["--memory", memory]);
        }
        let child = command.spawn();
        let mut child = child.with_context(|| format!("cannot start {}", program.display()))?;
        while fs::metadata(target.path())?.dev() == before {
            ensure!(child.try_wait()?.is_none(), "{} has ended", program.display());
            thread::sleep(Duration::from_millis(1));
        }
        Ok(Self { child, target })
    }

    fn end(mut self) -> Result<()> {
        let status = Command::new("umount").arg(self.target.path()).status()?;
        ensure!(status.success(), "umount: {status}");
        let status = self.child.wait()?;
        ensure!(status.success(), "the mount ended with {status}");
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = Command::new("umount").arg("-l").arg(self.target.path()).status();
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn open(target: &Path, name: &str) -> Result<File> {
    Ok(OpenOptions::new().read(true).write(true).open(target.join(name))?)
}

/// Repeats `access` for a time. Rerounds the number per second.
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

fn hits(target: &Path, length: Duration) -> Result<f64> {
    let file = open(target, "small")?;
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
fn zipf_reads(target: &Path, length: Duration) -> Result<f64> {
    let file = open(target, "large")?;
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

fn random_writes(target: &Path, _: Duration) -> Result<f64> {
    let file = open(target, "large")?;
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

fn large_reads(target: &Path, length: Duration) -> Result<f64> {
    let file = open(target, "small")?;
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

fn large_writes(target: &Path, length: Duration) -> Result<f64> {
    let file = open(target, "small")?;
    warm(&file)?;
    let block = vec![7; MIB];
    let mut index = 0;
    rate(length, || {
        file.write_all_at(&block, index % (SMALL_BYTES / MIB as u64) * MIB as u64)?;
        index += 1;
        Ok(())
    })
}

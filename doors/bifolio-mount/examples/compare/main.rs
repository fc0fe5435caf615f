//! Compares `bifolio-mount` with pass-through mounts (`examples/passthrough.rs`), and with ext4:
//! the figures of `docs/mount.md`.
//!
//! ```sh
//! cd doors && cargo build --release -p bifolio-mount --bins --examples
//! cargo run --release -p bifolio-mount --example compare -- DIRECTORY
//! cargo run --release -p bifolio-mount --example compare -- --ext4 DIRECTORY
//! ```
//!
//! Needs root, 3 GiB in DIRECTORY, and three minutes. Each mount has files of its own. The mounts
//! are interleaved, and started anew in each round. Prints for each work and mount the median,
//! the least and the greatest, and the ratio to the pass-through mount in the first column.
//! `ext4.rs` says what `--ext4` does.

mod ext4;
mod works;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;

use works::{LARGE_BYTES, SMALL_BYTES};

/// Bound of the cache for each work but that of the misses and random writes.
const MEMORY: &str = "256M";
/// Bound for those: an eighth of the large file.
const LITTLE_MEMORY: &str = "128M";

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
    /// Compare with the file system of DIRECTORY, in control groups of the same memory.
    #[arg(long)]
    ext4: bool,
    /// Only do this work in DIRECTORY, as `--ext4` asks.
    #[arg(long, hide = true)]
    only: Option<usize>,
}

/// A kind of mount.
struct Mount {
    name: &'static str,
    /// The program, beside this one or in its parent directory.
    program: &'static str,
    arguments: &'static [&'static str],
}

/// Without the kernel's page cache.
const BIFOLIO: Mount =
    Mount { name: "bifolio", program: "../bifolio-mount", arguments: &["--direct"] };
const KERNEL_CACHE: Mount =
    Mount { name: "bifolio-kernel-cache", arguments: &["--kernel-cache"], ..BIFOLIO };
const CACHED: Mount = Mount { name: "cached", program: "passthrough", arguments: &[] };
const UNCACHED: Mount = Mount { name: "uncached", arguments: &["--uncached"], ..CACHED };
const DIRECT: Mount = Mount { name: "direct", arguments: &["--direct"], ..CACHED };

/// A measurement: a function that returns accesses or MiB per second.
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
        measure: works::hits,
    },
    Work {
        name: "4 KiB zipf reads, 1/8 fits",
        unit: "K/s",
        memory: LITTLE_MEMORY,
        mounts: &[&DIRECT, &BIFOLIO],
        measure: works::zipf_reads,
    },
    Work {
        name: "4 KiB random writes, one sync",
        unit: "K/s",
        memory: LITTLE_MEMORY,
        mounts: &[&DIRECT, &BIFOLIO],
        measure: works::random_writes,
    },
    Work {
        name: "1 MiB reads, resident",
        unit: "MiB/s",
        memory: MEMORY,
        mounts: &[&CACHED, &UNCACHED, &BIFOLIO, &KERNEL_CACHE],
        measure: works::large_reads,
    },
    Work {
        name: "1 MiB writes, resident",
        unit: "MiB/s",
        memory: MEMORY,
        mounts: &[&CACHED, &UNCACHED, &BIFOLIO, &KERNEL_CACHE],
        measure: works::large_writes,
    },
];

fn main() -> Result<()> {
    let options = Options::parse();
    let length = Duration::from_secs_f64(options.seconds);
    if let Some(index) = options.only {
        return ext4::work_once(index, &options.directory, length);
    }
    if options.ext4 {
        return ext4::compare(&options);
    }
    let mounts = [&CACHED, &UNCACHED, &DIRECT, &BIFOLIO, &KERNEL_CACHE];
    let directory = tempfile::tempdir_in(&options.directory)?;
    for mount in mounts {
        let has_large = [BIFOLIO.name, DIRECT.name].contains(&mount.name);
        let files = [("small", SMALL_BYTES), ("large", LARGE_BYTES)];
        let files = &files[..1 + usize::from(has_large)];
        works::fill(&directory.path().join(mount.name), files)
            .context("cannot create the files")?;
    }
    let mut figures = vec![vec![Vec::new(); mounts.len()]; WORKS.len()];
    for round in 0..options.rounds {
        for (work, figures) in WORKS.iter().zip(&mut figures) {
            for index in 0..work.mounts.len() {
                // Another mount is the first in each round.
                let index = (index + round) % work.mounts.len();
                let mount = work.mounts[index];
                let source = directory.path().join(mount.name);
                let running = Running::start(mount, &source, work.memory, None)?;
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
            let [least, median, most] = spread(figures);
            let ratio = median / *first.get_or_insert(median);
            let name = mount.name;
            println!("  {name:22} {median:9.1}  ({least:.1} to {most:.1})  {ratio:.2} x");
        }
    }
    Ok(())
}

/// Returns the least, the median and the greatest.
fn spread(figures: &mut [f64]) -> [f64; 3] {
    figures.sort_by(f64::total_cmp);
    [figures[0], figures[figures.len() / 2], figures[figures.len() - 1]]
}

/// A mounted directory.
struct Running {
    child: Child,
    target: tempfile::TempDir,
}

impl Running {
    /// Mounts, by a program in a control group.
    fn start(
        mount: &Mount,
        source: &Path,
        memory: &str,
        group: Option<&ext4::Group>,
    ) -> Result<Self> {
        let target = tempfile::tempdir()?;
        let before = fs::metadata(target.path())?.dev();
        let program = std::env::current_exe()?;
        let program = program.parent().context("a program is in a directory")?.join(mount.program);
        let mut command = match group {
            None => Command::new(&program),
            Some(group) => group.command(&program),
        };
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

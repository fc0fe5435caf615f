//! `--ext4`: the same works on the file system itself and on a mount of it, each in a control group
//! of the same memory.
//!
//! The group of the file system has a child of this program, which does the work, and the pages
//! that it reads and writes. That of the mount has the child, the pages that the kernel keeps, and
//! `bifolio-mount`, whose bound is 3/4 of the memory of the group. Prints rows for `docs/mount.md`:
//! those that the mount loses are bold.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::works::{self, LARGE_BYTES, SMALL_BYTES};
use crate::{Mount, Options, Running, spread};

/// Memory of a group.
const GROUP_BYTES: u64 = 128 << 20;
/// Bound of the cache of the mount.
const MEMORY: &str = "96M";
/// Difference of the medians below which neither side loses.
const TIE: f64 = 0.05;

/// A measurement, as [`crate::Work`].
struct Work {
    name: &'static str,
    unit: &'static str,
    measure: fn(&Path, Duration) -> Result<f64>,
}

const WORKS: &[Work] = &[
    Work { name: "4 KiB reads, all resident", unit: "K/s", measure: works::hits },
    Work {
        name: "4 KiB reads by a zipf distribution, a tenth fits",
        unit: "K/s",
        measure: works::zipf_reads,
    },
    Work {
        name: "20,000 random 4 KiB writes and a sync",
        unit: "K/s",
        measure: works::random_writes,
    },
    Work { name: "a file of 1 GiB, read once", unit: "MiB/s", measure: works::scan },
    Work { name: "1 MiB writes, resident", unit: "MiB/s", measure: works::large_writes },
    Work { name: "files of 4,000 bytes, created", unit: "K/s", measure: works::creations },
    Work { name: "the same, `stat` and read", unit: "K/s", measure: works::walks },
];

const BIFOLIO: Mount = Mount { name: "mount", program: "../bifolio-mount", arguments: &[] };

/// Does a work in a directory. Prints its figure.
pub fn work_once(index: usize, directory: &Path, length: Duration) -> Result<()> {
    let work = WORKS.get(index).context("there is no such work")?;
    println!("{}", (work.measure)(directory, length)?);
    Ok(())
}

/// A control group, which is removed on drop.
pub struct Group {
    path: PathBuf,
}

impl Group {
    fn new() -> Result<Self> {
        let name = format!("bifolio-compare-{}", std::process::id());
        // The first generation, then the second.
        for (controller, limit) in
            [("memory", "memory.limit_in_bytes"), ("", "memory.max"), ("unified", "memory.max")]
        {
            let path = Path::new("/sys/fs/cgroup").join(controller).join(&name);
            let created = fs::create_dir(&path);
            let group = Self { path };
            let limit = group.path.join(limit);
            if created.is_ok() && limit.exists() {
                fs::write(limit, GROUP_BYTES.to_string())?;
                return Ok(group);
            }
        }
        bail!("no control group with a bound on memory can be created: this needs root")
    }

    /// Returns the command that runs a program in the group.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("sh");
        command.args(["-euc", "echo $$ > \"$0/cgroup.procs\"; exec \"$@\""]);
        command.arg(&self.path).arg(program);
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

/// Compares, and prints the table.
pub fn compare(options: &Options) -> Result<()> {
    let directory = tempfile::tempdir_in(&options.directory)?;
    let source = directory.path().join("files");
    works::fill(&source, &[("small", SMALL_BYTES), ("large", LARGE_BYTES)])?;
    let mut figures = vec![[Vec::new(), Vec::new()]; WORKS.len()];
    for round in 0..options.rounds {
        for (index, figures) in figures.iter_mut().enumerate() {
            // The other is first in each round.
            for side in [round % 2, 1 - round % 2] {
                let figure = measure(options, &source, index, side == 1);
                figures[side].push(figure.with_context(|| WORKS[index].name.to_owned())?);
            }
        }
    }
    println!("| | ext4 | mount | ratio |\n|---|---|---|---|");
    for (work, [ext4, mount]) in WORKS.iter().zip(&mut figures) {
        let [of_ext4, of_mount] = [ext4, mount].map(|figures| spread(figures));
        let ratio = of_mount[1] / of_ext4[1];
        let [of_ext4, of_mount] = [of_ext4, of_mount]
            .map(|[least, median, most]| format!("{median:.1} ({least:.1} to {most:.1})"));
        let bold = if ratio < 1.0 - TIE { "**" } else { "" };
        println!(
            "| {}, {} | {of_ext4} | {of_mount} | {bold}{ratio:.2}{bold} |",
            work.name, work.unit
        );
    }
    Ok(())
}

/// Does a work on the file system, or on a mount of it.
fn measure(options: &Options, source: &Path, index: usize, is_mounted: bool) -> Result<f64> {
    drop_pages(source)?;
    let group = Group::new()?;
    let running = match is_mounted {
        true => Some(Running::start(&BIFOLIO, source, MEMORY, Some(&group))?),
        false => None,
    };
    let place = running.as_ref().map_or(source, |running| running.target.path());
    let mut child = group.command(std::env::current_exe()?);
    child.arg(place).args(["--only", &index.to_string()]);
    let output = child.args(["--seconds", &options.seconds.to_string()]).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {said}", output.status);
    running.map_or(Ok(()), Running::end)?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().parse()?)
}

/// Writes the files, and drops their pages from the kernel's cache.
fn drop_pages(source: &Path) -> Result<()> {
    for entry in fs::read_dir(source)? {
        let file = fs::File::open(entry?.path())?;
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

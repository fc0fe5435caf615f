//! Scenes of power cuts: a child works on real files, of ext4 or XFS, on a device that loses its
//! power at a random write or flush (`bifolio_testing::PowerDisk`). After each cut the file system
//! is mounted again, and everything that a sync acknowledged must be there.
//!
//! It adds to the kills (`kills.rs`) that the device was flushed before each acknowledgement, and
//! that a file and its length are fit for use after a loss of power; and to the simulated devices
//! (`device.rs`) that the kernel's file systems, their journals, and this library's way to use them
//! do together what it promises. The programs:
//!
//! - a victim of the kills (`victim.rs`), judged by its journal, which is on another device;
//! - the example of a B-tree with a write-ahead log, judged by the keys that it acknowledged.

use crate::history::Violation;
use crate::journal::Journal;
use crate::{kills, victim, watchdog};
use anyhow::{Context as _, ensure};
use bifolio_testing::{FileSystem, PowerDisk};
use fastrand::Rng;
use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Cuts of one file system.
const CUTS: u64 = 20;
/// Upper bound on the time from the start of a child to the cut.
const CUT_MAX: Duration = Duration::from_millis(500);

/// The work of scenes of power cuts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub cuts: u64,
    /// Cuts of the tree; the others are those of the plain writer.
    tree_cuts: u64,
    /// Syncs and commits that were acknowledged and judged.
    acknowledged: u64,
    /// Sectors that lost their last bytes, and those that kept them, without a flush.
    lost: u64,
    kept: u64,
}

impl Tally {
    /// Adds the work of another scene.
    pub fn add(&mut self, other: Self) {
        self.cuts += other.cuts;
        self.tree_cuts += other.tree_cuts;
        self.acknowledged += other.acknowledged;
        self.lost += other.lost;
        self.kept += other.kept;
    }

    /// Prints the work.
    pub fn tell(&self, elapsed: Duration) {
        let Self { cuts, tree_cuts, acknowledged, lost, kept } = *self;
        if cuts > 0 {
            println!(
                "torture: {cuts} power cuts, {tree_cuts} of them below the tree, {:.1} a second; \
                 {acknowledged} syncs judged; of the sectors without a flush {lost} were lost, \
                 {kept} kept",
                cuts as f64 / elapsed.as_secs_f64()
            );
        }
    }
}

/// The program of a scene.
enum Program {
    Plain { journal: Journal, known: Vec<Vec<u8>> },
    Tree,
}

struct Scene {
    seed: u64,
    disk: PowerDisk,
    /// On another device: what the child has noted.
    notes: TempDir,
    program: Program,
}

/// Cuts the power of one device, [`CUTS`] times or `cuts_max` times.
pub fn play(
    seed: u64,
    cuts_max: u64,
    hang: Duration,
    forgets_flushes: bool,
) -> Result<Tally, Violation> {
    let told = |error: anyhow::Error| Violation(format!("{error:#}"));
    let mut random = Rng::with_seed(seed);
    let mut scene = Scene::new(seed).map_err(told)?;
    if forgets_flushes {
        scene.disk.forget_flushes();
    }
    let mut tally = Tally::default();
    for session in 0..CUTS.min(cuts_max) {
        watchdog::enter("the power cuts");
        let hangs = || watchdog::progress();
        scene.cut_one(session, hang, &mut random, hangs).map_err(told)?;
        let in_session = |Violation(told)| Violation(format!("session {session}: {told}"));
        tally.acknowledged += scene.judge().map_err(in_session)?;
        tally.cuts += 1;
        tally.tree_cuts += u64::from(matches!(scene.program, Program::Tree));
    }
    (tally.lost, tally.kept) = scene.disk.lost_and_kept();
    Ok(tally)
}

impl Scene {
    fn new(seed: u64) -> anyhow::Result<Self> {
        let kind = if seed & 1 == 0 || !has_xfs() { FileSystem::Ext4 } else { FileSystem::Xfs };
        let disk = PowerDisk::new(kind, seed).with_context(|| {
            format!("{kind:?} on a device without power needs root, /dev/fuse and mkfs")
        })?;
        let notes = tempfile::tempdir()?;
        let folder = disk.path().join("files");
        std::fs::create_dir(&folder)?;
        let program = if seed & 2 == 0 {
            symlink(&folder, victim::files_in(notes.path()))?;
            kills::create_files(notes.path())?;
            let journal = Journal::open(&notes.path().join("journal"))?;
            let known = vec![vec![0; victim::len_bytes_max(seed) as usize]; victim::FILES];
            Program::Plain { journal, known }
        } else {
            let acknowledged = notes.path().join("acknowledged");
            std::fs::write(&acknowledged, [])?;
            symlink(&acknowledged, folder.join("acknowledged"))?;
            Program::Tree
        };
        let scene = Self { seed, disk, notes, program };
        // The names are durable now.
        scene.disk.restart()?;
        Ok(scene)
    }

    /// Starts a child, and waits until the device is without power.
    fn cut_one(
        &self,
        session: u64,
        hang: Duration,
        random: &mut Rng,
        progress: impl Fn(),
    ) -> anyhow::Result<()> {
        let most = random.choice([10, 100, 1000]).unwrap_or(100);
        self.disk.cut_after(random.u64(0..most));
        let errors = File::create(self.errors())?;
        let mut child = self.command(session)?.stderr(errors).spawn()?;
        let (begun, mut is_over) = (Instant::now(), false);
        while !self.disk.is_cut() && begun.elapsed() < CUT_MAX && !is_over {
            progress();
            is_over = child.try_wait()?.is_some();
            thread::sleep(Duration::from_micros(500));
        }
        // One that had not come so far, or has closed everything.
        let was_cut = self.disk.is_cut();
        self.disk.cut();
        let ended = wait_for_end(&mut child, hang, progress);
        ensure!(ended?, "session {session}: the child hangs after a power cut");
        if is_over && !was_cut {
            let told = std::fs::read_to_string(self.errors()).unwrap_or_default();
            ensure!(told.is_empty(), "session {session}: the child has failed: {told}");
        }
        self.disk.restart().with_context(|| format!("session {session}"))
    }

    fn errors(&self) -> PathBuf {
        self.notes.path().join("errors")
    }

    fn command(&self, session: u64) -> anyhow::Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--seed").arg(self.seed.to_string());
        command.arg("--session").arg(session.to_string()).stdin(Stdio::null());
        match &self.program {
            Program::Plain { .. } => {
                command.arg("--loses-power").arg("--victim").arg(self.notes.path())
            }
            Program::Tree => command.arg("--tree").arg(self.folder()),
        };
        Ok(command)
    }

    fn folder(&self) -> PathBuf {
        self.disk.path().join("files")
    }

    /// Compares the files with what was acknowledged. Returns the number of acknowledgements.
    fn judge(&mut self) -> Result<u64, Violation> {
        let folder = self.folder();
        match &mut self.program {
            Program::Plain { journal, known } => {
                let open = |file| File::open(&victim::names(self.notes.path(), file)[0]);
                let files: Vec<_> = (0..victim::FILES)
                    .map(open)
                    .collect::<Result<_, _>>()
                    .map_err(|error| Violation(format!("a file cannot be opened: {error}")))?;
                kills::judge_files(self.seed, journal, &files, known).map(|(_, syncs)| syncs)
            }
            Program::Tree => judge_tree(&folder),
        }
    }
}

/// Returns `false`, and says so once, if XFS is left out.
fn has_xfs() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let has = Command::new("mkfs.xfs").arg("-V").output().is_ok();
        if !has {
            println!("skipped: XFS: mkfs.xfs is missing (`apt-get install xfsprogs`)");
        }
        has
    })
}

fn judge_tree(folder: &Path) -> Result<u64, Violation> {
    let checked = crate::wal_btree::check_acknowledged(folder);
    checked.map(|(commits, _)| commits).map_err(|error| Violation(format!("the tree: {error}")))
}

/// Kills a child, whose last transfers fail. Returns `false` if it does not end.
fn wait_for_end(child: &mut Child, hang: Duration, progress: impl Fn()) -> anyhow::Result<bool> {
    child.kill()?;
    let begun = Instant::now();
    while child.try_wait()?.is_none() {
        progress();
        if begun.elapsed() > hang {
            return Ok(false);
        }
        thread::sleep(Duration::from_micros(500));
    }
    Ok(true)
}

//! Scenes of kills: a child works on real files through a cache, keeps a journal in shared memory,
//! and is killed with SIGKILL at a random moment; the bytes that its syncs acknowledged must be in
//! the files. Then the next child continues with the same files.
//!
//! It proves this: when a sync, or a close, has answered Ok, every byte written before it has left
//! the process, for the right places of the file, and no later part of that process's session, nor
//! its death in the midst of anything, takes it back; and a file and its length are fit for use
//! after a death at any moment. With direct transfers (most sessions) the bytes are at the block
//! device then; with buffered ones they are in the kernel's page cache, which survives the process.
//!
//! It does not show that the device was flushed, because a kill loses nothing that the kernel
//! holds. The simulated devices of the other scenes do (`device.rs`): they show what is durable at
//! the moment of each acknowledged sync.
//!
//! Transfers that were in flight when the process died may reach the file after its death: before
//! the file is judged, `fallocate` waits for them, as all calls do that change a file's blocks.
//!
//! # Safety
//! One system call on an open descriptor, without pointers.
#![allow(unsafe_code)]

use crate::history::{Clock, History, Kind, Violation};
use crate::journal::{Entry, Journal, What};
use crate::{victim, watchdog};
use anyhow::Context as _;
use fastrand::Rng;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;

/// The work of a scene of kills.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub kills: u64,
    /// Children that ended by themselves before they were to be killed.
    pub ends: u64,
    pub changes: u64,
    /// Syncs that were acknowledged and judged.
    pub syncs: u64,
}

impl Tally {
    /// Adds the work of another scene.
    pub fn add(&mut self, other: Self) {
        self.kills += other.kills;
        self.ends += other.ends;
        self.changes += other.changes;
        self.syncs += other.syncs;
    }
}

/// The files of a scene, and their content when the last child had died.
struct Scene {
    directory: tempfile::TempDir,
    seed: u64,
    journal: Journal,
    files: Vec<File>,
    known: Vec<Vec<u8>>,
    tally: Tally,
}

/// Kills children until the time is over or `kills_max` are dead. A child that does nothing for
/// `hang` is a failure.
pub fn play(
    seed: u64,
    duration: Duration,
    kills_max: u64,
    hang: Duration,
) -> Result<Tally, Violation> {
    let told = |error: anyhow::Error| Violation(format!("{error:#}"));
    let mut scene = Scene::new(seed).map_err(told)?;
    let mut random = Rng::with_seed(seed);
    let begun = Instant::now();
    for session in 0.. {
        if begun.elapsed() >= duration || scene.tally.kills >= kills_max {
            break;
        }
        watchdog::enter("the kills");
        scene.kill_one(session, hang, &mut random).map_err(told)?;
        scene.judge().map_err(|Violation(told)| Violation(format!("session {session}: {told}")))?;
    }
    Ok(scene.tally)
}

impl Scene {
    fn new(seed: u64) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        std::fs::create_dir(victim::files_in(directory.path()))?;
        let journal = Journal::open(&directory.path().join("journal"))?;
        let files = create_files(directory.path())?;
        let known = vec![vec![0; victim::len_bytes_max(seed) as usize]; victim::FILES];
        Ok(Self { directory, seed, journal, files, known, tally: Tally::default() })
    }

    /// Starts a child and kills it after a while.
    fn kill_one(&mut self, session: u64, hang: Duration, random: &mut Rng) -> anyhow::Result<()> {
        let program = std::env::current_exe()?;
        let mut command = Command::new(program);
        command.arg("--victim").arg(self.directory.path());
        command.arg("--seed").arg(self.seed.to_string()).arg("--session").arg(session.to_string());
        let mut child = command.spawn().context("a child cannot be started")?;
        // Now and then it dies while it is born.
        if random.u32(0..10) > 0 {
            wait_for_work(&mut child, &self.journal, hang)?;
        }
        let most_us = random.choice([1_000, 10_000, 60_000]).unwrap_or(10_000);
        thread::sleep(Duration::from_micros(random.u64(0..most_us)));
        child.kill()?;
        let status = child.wait()?;
        match status.signal() {
            Some(libc::SIGKILL) => self.tally.kills += 1,
            None if status.success() => self.tally.ends += 1,
            _ => anyhow::bail!("session {session}: the child ended with {status}"),
        }
        let count = self.journal.count();
        for file in &self.files {
            wait_for_transfers(file).with_context(|| format!("{count} records"))?;
        }
        check_folder(&victim::files_in(self.directory.path()))
    }

    /// Compares the files with the journal; afterwards their content is known.
    fn judge(&mut self) -> Result<(), Violation> {
        let (changes, syncs) = judge_files(self.seed, &self.journal, &self.files, &mut self.known)?;
        self.tally.changes += changes;
        self.tally.syncs += syncs;
        Ok(())
    }
}

/// Creates the files of a scene, each with two names.
pub fn create_files(directory: &Path) -> anyhow::Result<Vec<File>> {
    let mut files = Vec::new();
    for file in 0..victim::FILES {
        let [name, link] = victim::names(directory, file);
        files.push(File::options().read(true).write(true).create_new(true).open(&name)?);
        std::fs::hard_link(&name, &link)?;
    }
    Ok(files)
}

/// Compares files with the journal; afterwards their content is `known`. Returns the number of
/// changes and of syncs.
pub fn judge_files(
    seed: u64,
    journal: &Journal,
    files: &[File],
    known: &mut [Vec<u8>],
) -> Result<(u64, u64), Violation> {
    let (entries, mut syncs) = (journal.take(), 0);
    for (number, (file, known)) in files.iter().zip(known).enumerate() {
        let mut found = vec![0; known.len()];
        let mut read = 0;
        while read < found.len() {
            match file.read_at(&mut found[read..], read as u64) {
                Ok(0) => break,
                Ok(count) => read += count,
                Err(error) => return Err(Violation(format!("the file cannot be read: {error}"))),
            }
        }
        let name = format!("seed-{seed}-file-{number}");
        let own = entries.iter().filter(|entry| entry.file == number);
        syncs += judge_file(name, known, &found, own)?;
        *known = found;
    }
    let is_change = |entry: &&Entry| entry.what != What::Sync;
    Ok((entries.iter().filter(is_change).count() as u64, syncs))
}

fn wait_for_work(child: &mut Child, journal: &Journal, hang: Duration) -> anyhow::Result<()> {
    let begun = Instant::now();
    while journal.count() == 0 && child.try_wait()?.is_none() {
        watchdog::progress();
        if begun.elapsed() > hang {
            child.kill()?;
            anyhow::bail!("hangs: the child did nothing for {hang:?}");
        }
        thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Waits for direct transfers that the dead child had in flight (see the module documentation).
fn wait_for_transfers(file: &File) -> anyhow::Result<()> {
    // SAFETY: a descriptor that is open; no memory is involved.
    let answer = unsafe {
        libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, PAGE as libc::off_t)
    };
    let error = std::io::Error::last_os_error();
    if answer != 0 && error.raw_os_error() == Some(libc::EOPNOTSUPP) {
        // Transfers of such file systems are over by then.
        thread::sleep(Duration::from_millis(20));
    } else if answer != 0 {
        return Err(error).context("fallocate");
    }
    Ok(())
}

/// Checks that nothing remains: a swap without a name ends with its process.
fn check_folder(folder: &Path) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let is_ours = name.starts_with("file-") || name.starts_with("link-");
        anyhow::ensure!(is_ours, "the child left {name} behind");
    }
    Ok(())
}

/// Judges a file that had the content `known` and now has `found`. Returns the number of syncs
/// checked.
fn judge_file<'e>(
    name: String,
    known: &[u8],
    found: &[u8],
    entries: impl Iterator<Item = &'e Entry>,
) -> Result<u64, Violation> {
    let clock = Arc::new(Clock::new(1));
    let history = History::of_bytes(name, Arc::clone(&clock), known);
    // The beginnings and ends in their order.
    let mut moments = BTreeMap::new();
    for entry in entries {
        moments.insert(entry.begun, (entry, true));
        if entry.ended > 0 {
            moments.insert(entry.ended, (entry, false));
        }
    }
    let mut begun = HashMap::new();
    let mut sync_begun = HashMap::new();
    let mut syncs = Vec::new();
    for (entry, is_beginning) in moments.into_values() {
        let range = entry.start..entry.end;
        match (entry.what, is_beginning) {
            (What::Sync, true) => drop(sync_begun.insert(entry.begun, clock.tick())),
            (What::Sync, false) => syncs.push((range, sync_begun[&entry.begun])),
            (what, true) => {
                let kind = if what == What::Zero { Kind::Zero } else { Kind::Write };
                let (id, call) = (entry.begun, entry.call);
                begun.insert(id, history.begin_as(id, call, entry.thread, kind, range));
            }
            (_, false) => history.end(&begun[&entry.begun], entry.certain_end - entry.start),
        }
    }
    // For each page the last sync of all of it; those of parts by themselves.
    let mut pages = vec![0; found.len() / PAGE as usize];
    for (range, moment) in &syncs {
        for page in range.start.div_ceil(PAGE)..range.end / PAGE {
            pages[page as usize] = pages[page as usize].max(*moment);
        }
        let (start, end) = (range.start as usize, range.end as usize);
        if !range.start.is_multiple_of(PAGE) || !range.end.is_multiple_of(PAGE) {
            history.check("what a sync acknowledged", &found[start..end], range.start, *moment)?;
        }
    }
    for (page, moment) in (0..).step_by(PAGE as usize).zip(pages) {
        let bytes = &found[page as usize..][..PAGE as usize];
        history.check("what syncs acknowledged", bytes, page, moment)?;
    }
    Ok(syncs.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::word_of;

    fn entry(what: What, begun: u64, ended: u64) -> Entry {
        let (start, end, certain_end) = (0, PAGE, PAGE);
        Entry { what, call: "call", file: 0, thread: 0, start, end, begun, ended, certain_end }
    }

    fn page(id: u64) -> Vec<u8> {
        (0..512).flat_map(|index| word_of(id, index).to_le_bytes()).collect()
    }

    fn judge(found: &[u8], entries: &[Entry]) -> Result<u64, Violation> {
        judge_file("file".into(), &page(1), found, entries.iter())
    }

    #[test]
    fn unacknowledged_bytes_may_be_there_or_not() {
        let write = entry(What::Write, 5, 6);
        for found in [page(1), page(5)] {
            assert!(judge(&found, &[write, entry(What::Sync, 7, 0)]).is_ok());
            // A sync that had begun before the write was over.
            assert!(judge(&found, &[entry(What::Write, 5, 8), entry(What::Sync, 7, 9)]).is_ok());
        }
        assert!(judge(&page(9), &[write]).is_err(), "a value that was not written");
        assert!(judge(&[0; 4096], &[write]).is_err(), "nothing");
    }

    #[test]
    fn acknowledged_bytes_must_be_there() {
        let entries = [entry(What::Write, 5, 6), entry(What::Sync, 7, 8)];
        assert_eq!(judge(&page(5), &entries).ok(), Some(1));
        assert!(judge(&page(1), &entries).is_err());
        let later = [entries[0], entries[1], entry(What::Write, 9, 0)];
        assert!(judge(&page(9), &later).is_ok(), "and what was written later may be");
        let cut = [entries[0], entry(What::Zero, 7, 8), entry(What::Sync, 9, 10)];
        assert!(judge(&[0; 4096], &cut).is_ok());
        assert!(judge(&page(5), &cut).is_err());
    }
}

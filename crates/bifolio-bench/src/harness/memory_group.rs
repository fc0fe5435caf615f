//! A control group that limits the memory of a child process, including its page cache.
//!
//! The kernel's page cache must be bounded like the cache. The group is created where this process
//! has the right to (usually root), below its own group or the nearest parent that delegates a
//! memory controller; in both generations of control groups. Pages of a file are charged to the
//! group that reads them first, and stay charged between children: a group stays as warm as a cache
//! that stays open.
//!
//! A process in a full group waits for the kernel's reclaim and is not killed, however slow the
//! disk is. In the second generation `memory.high` is the limit, and `memory.max` is
//! [`MAX_FACTOR`] times as wide. The first generation has no such pair: there `memory.oom_control`
//! makes processes wait that would be killed, and a thread of the run (the *relief*) widens the
//! limit for the few milliseconds in which the kernel can reclaim nothing. System calls do not
//! wait: a child makes them [`patiently`]. If a wider group is full as well for [`STALL_MAX`], the
//! kernel may kill.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::cleanup::{CleanupItem, Removal};
use super::counters::resident_bytes;
use super::memory;
use super::sizes::Sizes;
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;

/// In a smaller group with only dirty pages the kernel rarely finds anything to reclaim.
const BYTES_MIN: u64 = 12 << 20;

/// Ratio of the widest limit of a group that is full, and its limit.
const MAX_FACTOR: u64 = 2;

/// A full group is widened by this part of its limit at a time.
const STEPS: u64 = 16;

/// Interval at which the relief looks at a group.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Duration for which processes wait in a group that stays full.
const STALL_MAX: Duration = Duration::from_secs(30);

/// Duration for which a lower limit is asked for: the kernel refuses it while it cannot reclaim
/// enough.
const LIMIT_PATIENCE: Duration = Duration::from_secs(30);

/// File of the members: write a process to add it, read it for the list.
pub(super) const MEMBERS: &str = "cgroup.procs";

/// A control group created by the run. On drop it is removed, and the processes in it are killed.
#[derive(Debug)]
pub struct MemoryGroup {
    membership: Membership,
    /// Ends the relief when it is dropped.
    _relief: Option<mpsc::Sender<()>>,
    _removal: Removal,
}

/// The path by which a child adds itself to the group.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Membership {
    group: PathBuf,
    limit: Limit,
    sizes: Sizes,
}

/// Files that hold the limit of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Limit {
    /// `memory.high`, and a wider `memory.max`.
    Soft,
    /// `memory.max` of a kernel without `memory.high`.
    Hard,
    /// `memory.limit_in_bytes` of the first generation.
    First,
}

/// File of the limit in the first generation.
const FIRST_LIMIT: &str = "memory.limit_in_bytes";

impl MemoryGroup {
    /// Creates one in which a process may have `Sizes::kernel_bytes`, including what the kernel
    /// keeps for it.
    ///
    /// # Errors
    /// It is not possible; the message is the reason to skip a series.
    pub fn create(sizes: Sizes) -> Result<Self> {
        let mut refusal = Error::Refused("no control group with a memory controller".into());
        for parent in memory::groups_of_this_process() {
            match create_in(&parent.directory, parent.unified, sizes) {
                Ok(group) => return Ok(group),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    /// For a child that is to join; one child at a time.
    pub fn membership(&self) -> Membership {
        self.membership.clone()
    }
}

fn create_in(parent: &Path, unified: bool, sizes: Sizes) -> Result<MemoryGroup> {
    let removal = Removal::of(|| Ok(CleanupItem::Group(make_directory(parent)?)))?;
    let group = removal.path().to_owned();
    let limit = match unified {
        true if group.join("memory.high").exists() => Limit::Soft,
        true => Limit::Hard,
        false => Limit::First,
    };
    limit.set(&group, sizes.kernel_bytes())?;
    let relief = (limit == Limit::First).then(|| relieve(&group)).flatten();
    let membership = Membership { group, limit, sizes };
    Ok(MemoryGroup { membership, _relief: relief, _removal: removal })
}

impl Limit {
    /// Names of the files, each with its value for a limit of `bytes`, in the order of writing.
    fn values(self, bytes: u64) -> Vec<(&'static str, u64)> {
        match self {
            Self::Soft => vec![("memory.max", MAX_FACTOR * bytes), ("memory.high", bytes)],
            Self::Hard => vec![("memory.max", bytes)],
            Self::First => vec![(FIRST_LIMIT, bytes)],
        }
    }

    fn set(self, group: &Path, bytes: u64) -> Result<()> {
        for (name, value) in self.values(bytes) {
            let path = group.join(name);
            let started = Instant::now();
            let mut written = write_number(&path, value);
            while is_busy(&written) && started.elapsed() < LIMIT_PATIENCE {
                thread::sleep(LOOK_INTERVAL);
                written = write_number(&path, value);
            }
            let action = format!("limit a control group's memory, {}", path.display());
            written.map_err(Error::system(action))?;
        }
        Ok(())
    }
}

/// Returns `true` if the kernel could not reclaim enough for a lower limit.
fn is_busy(written: &io::Result<()>) -> bool {
    matches!(written, Err(error) if error.kind() == io::ErrorKind::ResourceBusy)
}

fn write_number(path: &Path, number: u64) -> io::Result<()> {
    // Opened, not created: a group without the controller has no such file.
    let mut file = fs::OpenOptions::new().write(true).open(path)?;
    file.write_all(number.to_string().as_bytes())
}

fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Repeats `call` while its group has no memory for it. In the first generation a full group makes
/// page faults wait; a system call fails instead, with `ENOMEM`, or with `EFAULT` at a buffer that
/// was swapped out.
///
/// # Errors
/// The call failed for another reason, or for [`STALL_MAX`].
pub(crate) fn patiently<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let started = Instant::now();
    loop {
        match call() {
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EFAULT))
                    && started.elapsed() < STALL_MAX =>
            {
                thread::sleep(Duration::from_millis(1));
            }
            result => return result,
        }
    }
}

/// Makes processes of `group`, of the first generation, wait for memory, and starts the thread that
/// widens it while they do; the thread ends with what is returned. `None` if one of the two is not
/// possible: the kernel kills, and the run goes on without that series.
fn relieve(group: &Path) -> Option<mpsc::Sender<()>> {
    let (stop, stopped) = mpsc::channel();
    let control = group.join(OOM_CONTROL);
    write_number(&control, 1).ok()?;
    let mut widened = Widened::new(group.to_owned());
    let look = move || {
        while stopped.recv_timeout(LOOK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            widened.look();
        }
    };
    let thread = thread::Builder::new().name("relief".into()).spawn(look);
    if thread.is_err() {
        // Nothing would ever wake a process that waits.
        let _ = write_number(&control, 0);
    }
    thread.ok().map(|_| stop)
}

const OOM_CONTROL: &str = "memory.oom_control";

/// A group whose limit is widened while its processes wait, and narrowed afterwards.
#[derive(Debug)]
struct Widened {
    group: PathBuf,
    /// The limit that the group has by right, and the one that was written last.
    limits: Option<(u64, u64)>,
    waiting_since: Option<Instant>,
}

impl Widened {
    fn new(group: PathBuf) -> Self {
        Self { group, limits: None, waiting_since: None }
    }

    /// Widens the group a step further if a process waits, narrows it otherwise.
    fn look(&mut self) {
        let control = fs::read_to_string(self.group.join(OOM_CONTROL)).unwrap_or_default();
        if !control.lines().any(|line| line == "under_oom 1") {
            self.waiting_since = None;
            self.narrow();
            return;
        }
        let waiting = self.waiting_since.get_or_insert_with(Instant::now).elapsed();
        if waiting > STALL_MAX {
            let _ = write_number(&self.group.join(OOM_CONTROL), 0);
        }
        self.widen();
    }

    fn widen(&mut self) {
        let path = self.group.join(FIRST_LIMIT);
        let Some(current) = read_number(&path) else { return };
        let by_right = match self.limits {
            Some((by_right, written)) if written == current => by_right,
            // A process has joined since and has set a limit of its own.
            _ => current,
        };
        let step = (by_right / STEPS).next_multiple_of(PAGE_BYTES as u64);
        let wider = (current + step).min(MAX_FACTOR * by_right);
        if write_number(&path, wider).is_ok() {
            self.limits = Some((by_right, wider));
        }
    }

    fn narrow(&mut self) {
        let Some((by_right, written)) = self.limits else { return };
        let path = self.group.join(FIRST_LIMIT);
        if read_number(&path) != Some(written) || write_number(&path, by_right).is_ok() {
            self.limits = None;
        }
    }
}

fn make_directory(parent: &Path) -> Result<PathBuf> {
    let made = tempfile::Builder::new().prefix("bifolio-bench-").tempdir_in(parent);
    let refused = Error::system(format!("make a control group in {}", parent.display()));
    Ok(made.map_err(refused)?.keep())
}

impl Membership {
    /// Adds this process to the group. Memory that the process already has is not charged to the
    /// group, but counts as its own: the group gets the rest, at least the bound.
    ///
    /// # Errors
    /// The system refuses.
    pub fn join(&self) -> Result<()> {
        self.limit.set(&self.group, limit_bytes(&self.sizes, resident_bytes("VmRSS")?))?;
        fs::write(self.group.join(MEMBERS), std::process::id().to_string())
            .map_err(Error::system(format!("join the control group {}", self.group.display())))
    }

    /// Returns the maximum memory that the group ever used.
    ///
    /// # Errors
    /// The group does not report it.
    pub fn peak_bytes(&self) -> Result<u64> {
        let names = ["memory.peak", "memory.max_usage_in_bytes"];
        let text = names.iter().find_map(|name| fs::read_to_string(self.group.join(name)).ok());
        text.and_then(|text| text.trim().parse().ok())
            .ok_or_else(|| Error::Refused(format!("{} reports no peak", self.group.display())))
    }
}

/// Returns the limit of the group for a process that has `resident_bytes` already.
fn limit_bytes(sizes: &Sizes, resident_bytes: u64) -> u64 {
    let rest_bytes = sizes.kernel_bytes().saturating_sub(resident_bytes);
    rest_bytes.max(sizes.memory_bytes).max(BYTES_MIN)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn memory_of_a_process_is_not_given_again() {
        let sizes = Sizes { size_bytes: 1 << 30, memory_bytes: 50 << 20 };
        assert_eq!(limit_bytes(&sizes, 5 << 20), (50 + 1 + 8 - 5) << 20);
        for resident_bytes in [9, 10, 100] {
            assert_eq!(limit_bytes(&sizes, resident_bytes << 20), 50 << 20);
        }
        let small = Sizes { size_bytes: 1 << 24, memory_bytes: 1 << 20 };
        assert_eq!(limit_bytes(&small, 1 << 20), BYTES_MIN);
    }

    #[test]
    fn the_second_generation_slows_down_long_before_it_kills() {
        let values = Limit::Soft.values(10 << 20);
        assert_eq!(values, [("memory.max", 20 << 20), ("memory.high", 10 << 20)]);
        let dir = tempfile::tempdir().unwrap();
        for (name, _) in values {
            fs::write(dir.path().join(name), "").unwrap();
        }
        Limit::Soft.set(dir.path(), 4096).unwrap();
        assert_eq!(read_number(&dir.path().join("memory.high")), Some(4096));
        assert!(Limit::First.set(dir.path(), 4096).is_err(), "no such file");
    }

    #[test]
    fn a_full_group_is_widened_while_processes_wait_and_narrowed_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let limit = || read_number(&dir.path().join(FIRST_LIMIT)).unwrap();
        let mut widened = Widened::new(dir.path().to_owned());
        write(FIRST_LIMIT, "16777216");
        write(OOM_CONTROL, "oom_kill_disable 1\nunder_oom 0\noom_kill 0\n");
        widened.look();
        assert_eq!(limit(), 16 << 20);
        write(OOM_CONTROL, "oom_kill_disable 1\nunder_oom 1\noom_kill 0\n");
        widened.look();
        widened.look();
        assert_eq!(limit(), 18 << 20);
        (0..100).for_each(|_| widened.look());
        assert_eq!(limit(), 32 << 20, "twice as wide, no more");
        write(OOM_CONTROL, "oom_kill_disable 1\nunder_oom 0\noom_kill 0\n");
        widened.look();
        assert_eq!(limit(), 16 << 20);
        // A process that joins sets its own limit, which stays.
        write(OOM_CONTROL, "oom_kill_disable 1\nunder_oom 1\noom_kill 0\n");
        widened.look();
        write(FIRST_LIMIT, "25165824");
        write(OOM_CONTROL, "oom_kill_disable 1\nunder_oom 0\noom_kill 0\n");
        widened.look();
        assert_eq!(limit(), 24 << 20);
    }

    /// Variable with the number of bytes that a child of the next test touches.
    const TOUCHED_BYTES: &str = "BIFOLIO_TEST_TOUCHED_BYTES";

    #[test]
    fn a_process_in_a_full_group_waits_and_is_not_killed() {
        if let Some(bytes) = std::env::var_os(TOUCHED_BYTES) {
            let bytes = bytes.to_str().unwrap().parse().unwrap();
            std::io::stdin().read_line(&mut String::new()).unwrap();
            assert_eq!(
                vec![1_u8; bytes].iter().map(|byte| u64::from(*byte)).sum::<u64>(),
                bytes as u64
            );
            return;
        }
        let sizes = Sizes { size_bytes: 1 << 30, memory_bytes: BYTES_MIN };
        let Ok(group) = MemoryGroup::create(sizes) else {
            return;
        };
        // More than the limit and less than the widest one. There may be no swap at all: the
        // kernel has nothing to reclaim.
        let bytes = sizes.kernel_bytes() + (2 << 20);
        let name =
            "harness::memory_group::tests::a_process_in_a_full_group_waits_and_is_not_killed";
        let mut member = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(TOUCHED_BYTES, bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let path = group.membership().group;
        fs::write(path.join(MEMBERS), member.id().to_string()).unwrap();
        drop(member.stdin.take());
        let status = member.wait().unwrap();
        assert!(status.success(), "{status}");
        let control = fs::read_to_string(path.join(OOM_CONTROL)).unwrap_or_default();
        assert!(!control.contains("oom_kill 1"), "{control}");
    }

    #[test]
    fn a_call_that_gets_no_memory_is_made_again() {
        let mut calls = 0;
        let written = patiently(|| {
            calls += 1;
            let code = [libc::ENOMEM, libc::EFAULT].get(calls - 1);
            code.map_or(Ok(calls), |code| Err(io::Error::from_raw_os_error(*code)))
        });
        assert_eq!(written.unwrap(), 3);
        let refused = patiently::<()>(|| Err(io::Error::from_raw_os_error(libc::EIO)));
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EIO));
    }
}

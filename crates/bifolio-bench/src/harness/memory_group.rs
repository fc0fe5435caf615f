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

use super::cleanup::Removal;
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
    /// Set for the second generation.
    unified: bool,
    sizes: Sizes,
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
            match Self::create_in(&parent, sizes) {
                Ok(group) => return Ok(group),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    fn create_in(parent: &memory::Group, sizes: Sizes) -> Result<Self> {
        let removal = Removal::of_new_group(&parent.directory)?;
        let (group, unified) = (removal.path().to_owned(), parent.unified);
        let relief = if unified { None } else { relieve(&group) };
        let membership = Membership { group, unified, sizes };
        membership.limit(sizes.kernel_bytes())?;
        Ok(Self { membership, _relief: relief, _removal: removal })
    }

    /// For a child that is to join; one child at a time.
    pub fn membership(&self) -> Membership {
        self.membership.clone()
    }
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
    let mut widened = Widened { group: group.to_owned(), limits: None, waiting_since: None };
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
    /// Widens the group by a step if a process waits, and gives it its own limit otherwise.
    fn look(&mut self) {
        let (path, control) = (self.group.join(FIRST_LIMIT), self.group.join(OOM_CONTROL));
        let Some(current) = read_number(&path) else { return };
        let by_right = match self.limits {
            Some((by_right, written)) if written == current => by_right,
            // A process has joined since and has set a limit of its own.
            _ => current,
        };
        let state = fs::read_to_string(&control).unwrap_or_default();
        let is_waiting = state.lines().any(|line| line == "under_oom 1");
        self.waiting_since = self.waiting_since.or(Some(Instant::now())).filter(|_| is_waiting);
        if self.waiting_since.is_some_and(|since| since.elapsed() > STALL_MAX) {
            let _ = write_number(&control, 0);
        }
        let step = (by_right / STEPS).next_multiple_of(PAGE_BYTES as u64);
        let wider = (current + step).min(MAX_FACTOR * by_right);
        let limit = if is_waiting { wider } else { by_right };
        let is_written = limit == current || write_number(&path, limit).is_ok();
        self.limits = Some((by_right, if is_written { limit } else { current }));
    }
}

impl Membership {
    /// Adds this process to the group. Memory that the process already has is not charged to the
    /// group, but counts as its own: the group gets the rest, at least the bound.
    ///
    /// # Errors
    /// The system refuses.
    pub fn join(&self) -> Result<()> {
        let rest_bytes = self.sizes.kernel_bytes().saturating_sub(resident_bytes("VmRSS")?);
        self.limit(rest_bytes.max(self.sizes.memory_bytes).max(BYTES_MIN))?;
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

    fn limit(&self, bytes: u64) -> Result<()> {
        // In the order of writing.
        let values: &[(&str, u64)] = match self.unified {
            true => &[("memory.max", MAX_FACTOR * bytes), ("memory.high", bytes)],
            false => &[(FIRST_LIMIT, bytes)],
        };
        for (name, value) in values {
            let path = self.group.join(name);
            let started = Instant::now();
            let mut written = write_number(&path, *value);
            while matches!(&written, Err(error) if error.kind() == io::ErrorKind::ResourceBusy)
                && started.elapsed() < LIMIT_PATIENCE
            {
                thread::sleep(LOOK_INTERVAL);
                written = write_number(&path, *value);
            }
            let action = format!("limit a control group's memory, {}", path.display());
            written.map_err(Error::system(action))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_full_group_is_widened_while_processes_wait_and_narrowed_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().to_owned();
        let write = |name: &str, text: &str| fs::write(group.join(name), text).unwrap();
        let limit = || read_number(&group.join(FIRST_LIMIT)).unwrap();
        let mut widened = Widened { group: group.clone(), limits: None, waiting_since: None };
        let mut look = |is_waiting: u8| {
            let state = format!("oom_kill_disable 1\nunder_oom {is_waiting}\noom_kill 0\n");
            write(OOM_CONTROL, &state);
            widened.look();
            limit()
        };
        write(FIRST_LIMIT, "16777216");
        assert_eq!([0, 1, 1].map(&mut look), [16 << 20, 17 << 20, 18 << 20]);
        (0..100).for_each(|_| assert!(look(1) <= 32 << 20, "twice as wide, no more"));
        assert_eq!([1, 0, 1].map(&mut look), [32 << 20, 16 << 20, 17 << 20]);
        // A process that joins sets its own limit, which stays.
        write(FIRST_LIMIT, "25165824");
        assert_eq!(look(0), 24 << 20);
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
}

//! The process and its machine: detection of a fork ([`Origin`]), CPUs, memory, and the memory that
//! control groups allow ([`MemoryLimit`], versions 1 and 2).
//!
//! A page of the process that the kernel wipes in children holds a number: checking it costs one
//! load. In a child it is 0 until the child creates something of its own, and then another number.
//! Where the kernel cannot wipe, the process id is compared instead, which is a system call.
//!
//! The limits of the process are queried through the C library: a filter may refuse the calls. The
//! limit of a control group also holds for the groups below it, so all ancestors are examined, as
//! far as they are visible in the file system.
//!
//! # Safety
//! Passes memory for the answers of such queries.
#![allow(unsafe_code)]

use super::array::ReservedArray;
use super::file::read_text;
use super::probe_features::can_wipe_on_fork;
use std::io;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The page; `None` where the kernel cannot wipe.
static MARK: OnceLock<Option<ReservedArray<AtomicU64>>> = OnceLock::new();
/// Last number assigned to a process, as far as this process knows. A child starts from its
/// parent's value, so no two processes in one line of descent have the same number.
static LAST_NUMBER: AtomicU64 = AtomicU64::new(0);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Marked(u64),
    Process(u32),
}

fn mark() -> Option<&'static AtomicU64> {
    let make = || can_wipe_on_fork().then(|| ReservedArray::new(1).ok()).flatten();
    MARK.get_or_init(make).as_ref().map(|mark| mark.get(0))
}

impl Origin {
    pub(crate) fn here() -> Self {
        let Some(mark) = mark() else { return Self::by_process() };
        // Relaxed: only the value counts; of two threads that find 0, one assigns the number.
        let seen = mark.load(Ordering::Relaxed);
        if seen != 0 {
            return Self::Marked(seen);
        }
        let number = LAST_NUMBER.fetch_add(1, Ordering::Relaxed) + 1;
        let given = mark.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
        Self::Marked(given.map_or_else(|other| other, |_| number))
    }

    /// Returns the origin of the calling process by its process id only.
    pub(crate) fn by_process() -> Self {
        Self::Process(std::process::id())
    }

    /// Returns `true` if the caller is in a child of that process.
    pub(crate) fn is_forked(self) -> bool {
        match self {
            Self::Marked(number) => {
                mark().is_none_or(|mark| mark.load(Ordering::Relaxed) != number)
            }
            Self::Process(process) => std::process::id() != process,
        }
    }
}

/// Returns the CPU that runs the calling thread: a hint, because the thread may have moved by the
/// time the caller uses it.
///
/// Uses `rseq` or the vDSO where the C library does (since glibc 2.35): a few nanoseconds, no
/// system call.
pub(crate) fn current_cpu() -> usize {
    rustix::thread::sched_getcpu()
}

pub(crate) fn current_thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()
}

/// Returns the number of CPUs that the machine may ever have; at least 1.
pub(crate) fn possible_cpus() -> usize {
    let configured = read_text("/sys/devices/system/cpu/possible").ok();
    let last = configured.as_deref().and_then(last_cpu);
    last.map(|last| last + 1)
        .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
        .unwrap_or(1)
}

/// Returns the memory of the machine in bytes; 0 if the kernel does not tell.
pub(crate) fn machine_memory_bytes() -> u64 {
    let mut info = MaybeUninit::<libc::sysinfo>::zeroed();
    // SAFETY: memory for the answer.
    let _ = unsafe { libc::sysinfo(info.as_mut_ptr()) };
    // SAFETY: zeros, which are valid numbers, or what the kernel wrote.
    let info = unsafe { info.assume_init() };
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

/// Returns the address space that the process may use in bytes (`RLIMIT_AS`); `u64::MAX` if
/// unlimited, or if the kernel does not tell.
pub(crate) fn address_space_bytes_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
    // SAFETY: memory for the answer.
    let _ = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    limit.rlim_cur
}

/// Returns the last number of a kernel CPU list such as `0-3,8-11`.
fn last_cpu(list: &str) -> Option<usize> {
    list.trim().rsplit([',', '-']).next()?.parse().ok()
}

/// The group of the process that allows the least memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    /// The file that holds the limit; it names the group.
    pub(crate) path: PathBuf,
    pub(crate) limit_bytes: u64,
    /// Bytes in use that are not pages of files, which the kernel could reclaim.
    pub(crate) used_bytes: u64,
}

impl MemoryLimit {
    /// Returns the limit of the calling process; `None` if no group limits its memory.
    pub(crate) fn of_process() -> Option<Self> {
        let groups = read_text("/proc/self/cgroup").ok()?;
        let mounts = read_text("/proc/self/mountinfo").ok()?;
        let found = places(&groups, &mounts);
        let limits = found.iter().flat_map(|place| place.limits());
        limits.min_by_key(Self::left_bytes)
    }

    pub(crate) fn left_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes)
    }

    pub(crate) fn check(&self, bytes: u64) -> io::Result<()> {
        if bytes <= self.left_bytes() {
            return Ok(());
        }
        let problem = format!(
            "{bytes} bytes are wanted, but {} is {}, of which {} are in use",
            self.path.display(),
            self.limit_bytes,
            self.used_bytes
        );
        Err(io::Error::new(io::ErrorKind::OutOfMemory, problem))
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Place {
    directory: PathBuf,
    top: PathBuf,
    names: &'static Names,
}

/// Names of the files of a group, and of the lines of `memory.stat` for pages of files.
#[derive(Debug, PartialEq, Eq)]
struct Names {
    limit: &'static str,
    used: &'static str,
    file_pages: [&'static str; 2],
}

const VERSION_1: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    file_pages: ["total_inactive_file ", "total_active_file "],
};
const VERSION_2: Names = Names {
    limit: "memory.max",
    used: "memory.current",
    file_pages: ["inactive_file ", "active_file "],
};

impl Place {
    fn limits(&self) -> impl Iterator<Item = MemoryLimit> + '_ {
        let ancestors = self.directory.ancestors();
        let visible = ancestors.take_while(|directory| directory.starts_with(&self.top));
        visible.filter_map(|directory| self.names.read(directory))
    }
}

impl Names {
    /// Reads the limit of one group; `None` if it has none.
    fn read(&self, directory: &Path) -> Option<MemoryLimit> {
        let number = |name| read_text(directory.join(name)).ok()?.trim().parse::<u64>().ok();
        // Version 2 writes `max`.
        let limit_bytes = number(self.limit)?;
        let used_bytes = number(self.used).unwrap_or(0);
        let details = read_text(directory.join("memory.stat")).unwrap_or_default();
        let is_of_file = |line: &&str| self.file_pages.iter().any(|name| line.starts_with(name));
        let file_bytes = details.lines().filter(is_of_file).filter_map(last_number).sum();
        let used_bytes = used_bytes.saturating_sub(file_bytes);
        Some(MemoryLimit { path: directory.join(self.limit), limit_bytes, used_bytes })
    }
}

fn last_number(line: &str) -> Option<u64> {
    line.rsplit(' ').next()?.parse().ok()
}

/// Returns the groups of the process that can limit memory, from the contents of
/// `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn places(groups: &str, mounts: &str) -> Vec<Place> {
    let place = |line: &str| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, group) = (parts.next()?, parts.next()?, parts.next()?);
        let is_version_2 = controllers.is_empty();
        if !is_version_2 && !controllers.split(',').any(|name| name == "memory") {
            return None;
        }
        let (root, top) = mounts.lines().find_map(|mount| hierarchy_at(mount, is_version_2))?;
        // The mount may show a part of the hierarchy only.
        let below = Path::new(group).strip_prefix(root).ok()?;
        let names = if is_version_2 { &VERSION_2 } else { &VERSION_1 };
        Some(Place { directory: top.join(below), top, names })
    };
    groups.lines().filter_map(place).collect()
}

/// Returns the root and the directory of a mount if it is the wanted hierarchy.
fn hierarchy_at(mount: &str, is_version_2: bool) -> Option<(&str, PathBuf)> {
    let (head, tail) = mount.split_once(" - ")?;
    let mut fields = head.split(' ').skip(3);
    let (root, top) = (fields.next()?, fields.next()?);
    let mut kind = tail.split(' ');
    let (file_system, options) = (kind.next()?, kind.nth(1)?);
    let is_wanted = match is_version_2 {
        true => file_system == "cgroup2",
        false => file_system == "cgroup" && options.split(',').any(|option| option == "memory"),
    };
    is_wanted.then(|| (root, PathBuf::from(top)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_process_has_one_number() {
        let origins = [Origin::here(), Origin::here(), Origin::by_process()];
        assert_eq!(origins[0], origins[1]);
        assert!(origins.iter().all(|origin| !origin.is_forked()));
        let others = [Origin::Marked(0), Origin::Marked(u64::MAX), Origin::Process(0)];
        assert!(others.iter().all(|origin| origin.is_forked()));
    }

    #[test]
    fn reads_kernel_cpu_lists() {
        assert_eq!(last_cpu("0\n"), Some(0));
        assert_eq!(last_cpu("0-3\n"), Some(3));
        assert_eq!(last_cpu("0-3,8-11\n"), Some(11));
        assert_eq!(last_cpu("\n"), None);
        assert!(current_cpu() < possible_cpus());
    }

    const MOUNTS: &str = "\
25 1 0:22 / /proc rw,nosuid shared:5 - proc proc rw
33 32 0:30 /docker/abc /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
34 32 0:31 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 32 0:32 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn groups_are_found_below_their_mounts() {
        let groups = "5:cpu,cpuacct:/x\n3:memory:/docker/abc/inner\n0::/user.slice/a\n";
        let found = places(groups, MOUNTS);
        let paths = found.iter().map(|place| (place.directory.to_str().unwrap(), place.names));
        let expected = [
            ("/sys/fs/cgroup/memory/inner", &VERSION_1),
            ("/sys/fs/cgroup/unified/user.slice/a", &VERSION_2),
        ];
        assert_eq!(paths.collect::<Vec<_>>(), expected);
        assert_eq!(places("3:memory:/elsewhere\n", MOUNTS), []);
        assert_eq!(places("nonsense\n", "nonsense\n"), []);
    }

    #[test]
    fn the_ancestor_with_the_least_room_counts() {
        let top = tempfile::tempdir().unwrap();
        let inner = top.path().join("outer/inner");
        fs::create_dir_all(&inner).unwrap();
        let write = |name: &str, text: &str| fs::write(top.path().join(name), text).unwrap();
        write("outer/memory.max", "1000000\n");
        write("outer/memory.current", "700000\n");
        write("outer/memory.stat", "anon 1\nfile 9\ninactive_file 200000\nactive_file 100000\n");
        write("outer/inner/memory.max", "900000\n");
        write("outer/inner/memory.current", "10\n");
        let place = Place { directory: inner, top: top.path().into(), names: &VERSION_2 };
        let least = place.limits().min_by_key(MemoryLimit::left_bytes).unwrap();
        let path = top.path().join("outer/memory.max");
        assert_eq!((&least.path, least.left_bytes()), (&path, 600_000));
        least.check(600_000).unwrap();
        let line = least.check(600_001).unwrap_err().to_string();
        assert!(line.contains("memory.max is 1000000, of which 400000"), "{line}");
        write("outer/memory.max", "max\n");
        let least = place.limits().min_by_key(MemoryLimit::left_bytes).unwrap();
        assert_eq!(least.limit_bytes, 900_000);
    }
}

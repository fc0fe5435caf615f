//! The memory that the control groups of the process allow (versions 1 and 2).
//!
//! Used before memory is populated: a process that touches more is not refused it, but killed. The
//! limit of a group also holds for the groups below it, so all ancestors are examined, as far as
//! they are visible in the file system.

use std::io;
use std::path::{Path, PathBuf};

use super::descriptor::read_text;

/// The group of the process that allows the least memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    /// The file that holds the limit; it names the group.
    pub(crate) path: PathBuf,
    /// The limit, in bytes.
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

    /// Returns the number of bytes that the group still allows.
    pub(crate) fn left_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes)
    }

    /// Fails if the group does not allow `bytes` more.
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

/// A group in one of the mounted hierarchies.
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
    /// Returns the limits of the group and its ancestors.
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

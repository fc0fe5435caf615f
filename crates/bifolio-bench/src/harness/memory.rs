//! Memory that a run may use: what the kernel calls available, within the control group's limit.
//!
//! Called before a benchmark starts; `memory_group` uses it to find where groups can be created.
//! Both generations of control groups are supported, for the group itself and each of its parents;
//! a limit that cannot be read counts as none.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::format_bytes;
use crate::host::kibibytes_field;

/// Fails if less than `bytes` are available.
pub(crate) fn require(bytes: u64) -> Result<()> {
    let available = available_bytes();
    if available >= bytes {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "needs {} of memory, {} is available: choose a smaller --size or --memory",
        format_bytes(bytes),
        format_bytes(available)
    )))
}

fn available_bytes() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let machine = kibibytes_field(&meminfo, "MemAvailable").unwrap_or(u64::MAX);
    let groups = groups_of_this_process();
    groups.iter().filter_map(Group::left_bytes).fold(machine, u64::min)
}

/// The groups with a memory controller that this process is in, each before its parent.
pub(super) fn groups_of_this_process() -> Vec<Group> {
    group_directories(&fs::read_to_string("/proc/self/cgroup").unwrap_or_default())
}

/// A control group with a memory controller.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) directory: PathBuf,
    /// Set for the second generation.
    pub(super) unified: bool,
}

/// The groups that `/proc/self/cgroup` names, with their parents.
fn group_directories(text: &str) -> Vec<Group> {
    let mut groups = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let unified = controllers.is_empty();
        if !unified && !controllers.split(',').any(|controller| controller == "memory") {
            continue;
        }
        let root = Path::new(if unified { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/memory" });
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            groups.push(Group { directory: root.join(group), unified });
        }
    }
    groups
}

impl Group {
    /// Returns the limit minus what is in use and cannot be dropped.
    fn left_bytes(&self) -> Option<u64> {
        let (limit, usage, cached) = if self.unified {
            ("memory.max", "memory.current", "inactive_file")
        } else {
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        };
        let number = |name| {
            let text = fs::read_to_string(self.directory.join(name)).ok()?;
            text.trim().parse::<u64>().ok()
        };
        let statistics = fs::read_to_string(self.directory.join("memory.stat")).unwrap_or_default();
        let used = number(usage)?.saturating_sub(statistic(&statistics, cached));
        Some(number(limit)?.saturating_sub(used))
    }
}

/// The value of a `name value` line; zero when there is none.
fn statistic(text: &str, name: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_memory_groups_of_both_generations() {
        let text = "5:memory,cpu:/a/b\n4:cpuset:/x\n0::/c\n";
        let directories: Vec<_> =
            group_directories(text).into_iter().map(|group| group.directory).collect();
        let expected = [
            "/sys/fs/cgroup/memory/a/b",
            "/sys/fs/cgroup/memory/a",
            "/sys/fs/cgroup/memory/",
            "/sys/fs/cgroup/c",
            "/sys/fs/cgroup/",
        ];
        assert_eq!(directories, expected.map(PathBuf::from));
    }

    #[test]
    fn a_group_with_a_limit_leaves_what_is_not_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        write("memory.stat", "anon 5\ninactive_file 200\n");
        let group = Group { directory: dir.path().into(), unified: true };
        assert_eq!(group.left_bytes(), Some(500));
        write("memory.max", "max\n");
        assert_eq!(group.left_bytes(), None);
    }
}

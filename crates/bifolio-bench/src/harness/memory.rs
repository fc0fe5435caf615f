//! Memory that a run may use: what the kernel calls available, within the control group's limit.
//!
//! Called before a benchmark starts; `memory_group` uses it to find where groups can be created.
//! Both generations of control groups are supported, for the group itself and each of its parents;
//! a limit that cannot be read counts as none.

use std::fs;
use std::path::{Path, PathBuf};

use super::counters::field;
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
        let used = number(usage)?.saturating_sub(field(&statistics, cached).unwrap_or(0));
        Some(number(limit)?.saturating_sub(used))
    }
}

//! A control group that limits the memory of a child process, including its page cache.
//!
//! The kernel's page cache must be bounded like the cache. The group is created where this process
//! has the right to (usually root), below its own group or the nearest parent that delegates a
//! memory controller; in both generations of control groups. Pages of a file are charged to the
//! group that reads them first, and stay charged between children: a group stays as warm as a cache
//! that stays open.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::cleanup::{CleanupItem, Removal};
use super::sizes::Sizes;
use super::{memory, resident};
use crate::error::{Error, Result};

/// In a smaller group with only dirty pages the kernel finds nothing to reclaim, and kills.
const BYTES_MIN: u64 = 12 << 20;

/// File of the members: write a process to add it, read it for the list.
pub(super) const MEMBERS: &str = "cgroup.procs";

/// A control group created by the run. On drop it is removed, and the processes in it are killed.
#[derive(Debug)]
pub struct MemoryGroup {
    membership: Membership,
    _removal: Removal,
}

/// The path by which a child adds itself to the group.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Membership {
    group: PathBuf,
    limit: PathBuf,
    sizes: Sizes,
}

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
    let limit = group.join(if unified { "memory.max" } else { "memory.limit_in_bytes" });
    set_limit(&limit, sizes.kernel_bytes())?;
    let membership = Membership { group, limit, sizes };
    Ok(MemoryGroup { membership, _removal: removal })
}

fn set_limit(limit: &Path, bytes: u64) -> Result<()> {
    // Opened, not created: a group without the controller has no such file.
    let file = fs::OpenOptions::new().write(true).open(limit);
    let write = |mut file: fs::File| file.write_all(bytes.to_string().as_bytes());
    let action = format!("limit a control group's memory, {}", limit.display());
    file.and_then(write).map_err(Error::system(action))
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
        set_limit(&self.limit, limit_bytes(&self.sizes, resident::bytes()?))?;
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
    fn processes_left_in_it_end_with_it() {
        let sizes = Sizes { size_bytes: 1 << 30, memory_bytes: 64 << 20 };
        let Ok(group) = MemoryGroup::create(sizes) else {
            return;
        };
        let path = group.membership().group;
        let mut member = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
        fs::write(path.join(MEMBERS), member.id().to_string()).unwrap();
        let limit = ["memory.max", "memory.limit_in_bytes"]
            .iter()
            .find_map(|name| fs::read_to_string(path.join(name)).ok());
        let pages_bytes = sizes.kernel_bytes() / 4096 * 4096;
        assert_eq!(limit.unwrap().trim(), pages_bytes.to_string());
        drop(group);
        assert!(!path.exists());
        assert!(!member.wait().unwrap().success());
    }
}

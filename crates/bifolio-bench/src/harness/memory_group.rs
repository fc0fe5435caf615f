//! A control group that holds a child process to so much memory, its page cache included.
//!
//! What the kernel's page cache is compared with is bounded, so it must be bounded too. The group
//! is made where this process has the right to (usually root), below its own group or the nearest
//! parent that hands a memory controller down; in both generations of control groups. Pages of a
//! file are charged to the group that reads them first, and stay charged between children: a group
//! is as warm as a cache that stays open.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::cleanup::{Leftover, Removal};
use super::{memory, resident};
use crate::error::{Error, Result};

/// Members: to write a process in, to read who is in it.
pub(super) const MEMBERS: &str = "cgroup.procs";

/// A group of the run's own; goes away with this value, and whoever is in it.
#[derive(Debug)]
pub(crate) struct MemoryGroup {
    removal: Removal,
    limit: PathBuf,
    process_bytes: u64,
}

/// What a child needs to put itself into the group.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Membership {
    group: PathBuf,
    limit: PathBuf,
    process_bytes: u64,
}

impl MemoryGroup {
    /// Makes one in which a process may have `process_bytes` of memory, all that is its own and
    /// what the kernel keeps for it.
    ///
    /// # Errors
    /// There is no way; the message is the reason for which to skip a series.
    pub(crate) fn create(process_bytes: u64) -> Result<Self> {
        let mut refusal = Error::Refused("no control group with a memory controller".into());
        for parent in memory::groups_of_this_process() {
            match create_in(&parent.directory, parent.unified, process_bytes) {
                Ok(group) => return Ok(group),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    /// For a child that is to join; children take turns.
    pub(crate) fn membership(&self) -> Membership {
        let (group, limit) = (self.removal.path().to_owned(), self.limit.clone());
        Membership { group, limit, process_bytes: self.process_bytes }
    }
}

fn create_in(parent: &Path, unified: bool, process_bytes: u64) -> Result<MemoryGroup> {
    let removal = Removal::of(|| Ok(Leftover::Group(make_directory(parent)?)))?;
    let limit = if unified { "memory.max" } else { "memory.limit_in_bytes" };
    let limit = removal.path().join(limit);
    set_limit(&limit, process_bytes)?;
    Ok(MemoryGroup { removal, limit, process_bytes })
}

fn set_limit(limit: &Path, bytes: u64) -> Result<()> {
    // Opened, not created: a group without the controller has no such file.
    let file = fs::OpenOptions::new().write(true).open(limit);
    let write = |mut file: fs::File| file.write_all(bytes.to_string().as_bytes());
    let action = || format!("limit a control group's memory, {}", limit.display());
    file.and_then(write).map_err(|source| Error::system(action())(source))
}

fn make_directory(parent: &Path) -> Result<PathBuf> {
    let made = tempfile::Builder::new().prefix("bifolio-bench-").tempdir_in(parent);
    let refused = Error::system(format!("make a control group in {}", parent.display()));
    Ok(made.map_err(refused)?.keep())
}

impl Membership {
    /// Puts this process into the group. What the process has already does not count there, and
    /// does count as its own: the group may have the rest.
    pub(crate) fn join(&self) -> Result<()> {
        set_limit(&self.limit, self.process_bytes.saturating_sub(resident::bytes()?))?;
        fs::write(self.group.join(MEMBERS), std::process::id().to_string())
            .map_err(Error::system(format!("join the control group {}", self.group.display())))
    }

    /// The most memory the group ever used.
    pub(crate) fn peak_bytes(&self) -> Result<u64> {
        let names = ["memory.peak", "memory.max_usage_in_bytes"];
        let text = names.iter().find_map(|name| fs::read_to_string(self.group.join(name)).ok());
        text.and_then(|text| text.trim().parse().ok())
            .ok_or_else(|| Error::Refused(format!("{} reports no peak", self.group.display())))
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn whoever_is_left_in_it_goes_with_it() {
        let Ok(group) = MemoryGroup::create(64 << 20) else {
            return;
        };
        let path = group.membership().group;
        let mut member = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
        fs::write(path.join(MEMBERS), member.id().to_string()).unwrap();
        let limit = ["memory.max", "memory.limit_in_bytes"]
            .iter()
            .find_map(|name| fs::read_to_string(path.join(name)).ok());
        assert_eq!(limit.unwrap().trim(), (64 << 20).to_string());
        drop(group);
        assert!(!path.exists());
        assert!(!member.wait().unwrap().success());
    }
}

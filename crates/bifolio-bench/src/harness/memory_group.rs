//! A control group that holds a child process to so much memory, its page cache included.
//!
//! What the kernel's page cache is compared with is bounded, so it must be bounded too. The group
//! is made where this process has the right to (usually root), below its own group or the nearest
//! parent that hands a memory controller down; in both generations of control groups. Pages of a
//! file are charged to the group that reads them first, and stay charged between children: a group
//! is as warm as a cache that stays open.

use std::fs;
use std::path::{Path, PathBuf};

use super::cleanup::{Leftover, Removal};
use super::memory;
use crate::error::{Error, Result};

/// Members: to write a process in, to read who is in it.
pub(super) const MEMBERS: &str = "cgroup.procs";

/// A group of the run's own; goes away with this value, and whoever is in it.
#[derive(Debug)]
pub(crate) struct MemoryGroup(Removal);

impl MemoryGroup {
    /// Makes one that may use `bytes`.
    ///
    /// # Errors
    /// There is no way; the message is the reason for which to skip a series.
    pub(crate) fn create(bytes: u64) -> Result<Self> {
        let mut refusal = Error::Refused("no control group with a memory controller".into());
        for parent in memory::groups_of_this_process() {
            match create_in(&parent.directory, parent.unified, bytes) {
                Ok(group) => return Ok(group),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

fn create_in(parent: &Path, unified: bool, bytes: u64) -> Result<MemoryGroup> {
    let removal = Removal::of(|| Ok(Leftover::Group(make_directory(parent)?)))?;
    let limit = if unified { "memory.max" } else { "memory.limit_in_bytes" };
    let limit = removal.path().join(limit);
    let action = format!("limit the memory of the control group {}", removal.path().display());
    // Opened, not created: a group without the controller has no such file.
    let written = fs::OpenOptions::new()
        .write(true)
        .open(limit)
        .and_then(|mut file| std::io::Write::write_all(&mut file, bytes.to_string().as_bytes()));
    written.map_err(Error::system(action))?;
    Ok(MemoryGroup(removal))
}

fn make_directory(parent: &Path) -> Result<PathBuf> {
    let made = tempfile::Builder::new().prefix("bifolio-bench-").tempdir_in(parent);
    let refused = Error::system(format!("make a control group in {}", parent.display()));
    Ok(made.map_err(refused)?.keep())
}

/// The most memory the group ever used.
pub(crate) fn peak_bytes(group: &Path) -> Result<u64> {
    let names = ["memory.peak", "memory.max_usage_in_bytes"];
    let text = names.iter().find_map(|name| fs::read_to_string(group.join(name)).ok());
    text.and_then(|text| text.trim().parse().ok())
        .ok_or_else(|| Error::Refused(format!("{} reports no peak", group.display())))
}

/// Puts this process into the group.
pub(crate) fn join(group: &Path) -> Result<()> {
    fs::write(group.join(MEMBERS), std::process::id().to_string())
        .map_err(Error::system(format!("join the control group {}", group.display())))
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
        let path = group.path().to_owned();
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

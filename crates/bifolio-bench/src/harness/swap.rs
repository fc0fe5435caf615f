//! A swap file of the run, for the kernel's series of memory files larger than memory.
//!
//! Created in the workspace and activated with the highest priority by the tools of util-linux,
//! where the system allows that (usually root). It is deactivated and removed with this value, or
//! by a signal. After a SIGKILL it stays active until `swapoff`.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{FallocateFlags, fallocate};

use super::cleanup::{Kind, Removal};
use super::workspace::Workspace;
use crate::error::{Error, Result};

/// The highest priority: this area is filled before any other.
const PRIORITY: &str = "32767";

/// An active swap area; deactivated with this value.
#[derive(Debug)]
pub(crate) struct SwapFile(#[expect(dead_code, reason = "is held")] Removal);

impl SwapFile {
    /// Creates and activates one of `bytes`.
    ///
    /// # Errors
    /// The system does not allow it, or the file system's files cannot be swapped to; the message
    /// is the reason to skip a series.
    pub(crate) fn activate(workspace: &Workspace, bytes: u64) -> Result<Self> {
        let path = workspace.path().join("swap");
        let removal = Removal::of(|| {
            let action = || Error::system(format!("make the swap file {}", path.display()));
            // One page more, for the header.
            let bytes = bytes + rustix::param::page_size() as u64;
            let options = File::options().write(true).create_new(true).mode(0o600).clone();
            let file = options.open(&path).map_err(action())?;
            fallocate(&file, FallocateFlags::empty(), 0, bytes)
                .map_err(|errno| action()(errno.into()))?;
            call("mkswap", &[], &path).map_err(action())?;
            call("swapon", &["--priority", PRIORITY], &path)
                .map_err(Error::system(format!("swap to {}", path.display())))?;
            Ok((Kind::Swap, path))
        })?;
        Ok(Self(removal))
    }
}

/// Deactivates the file.
pub(super) fn deactivate(path: &Path) -> io::Result<()> {
    call("swapoff", &[], path)
}

fn call(tool: &str, options: &[&str], path: &Path) -> io::Result<()> {
    let output = Command::new(tool).args(options).arg(path).stdin(Stdio::null()).output()?;
    let complaint = || String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(io::Error::other(complaint())) }
}

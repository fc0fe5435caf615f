//! A directory whose files are in memory, for reads of tmpfs by the kernel.
//!
//! A mount of the run inside the workspace where the system allows it; otherwise a directory in
//! /dev/shm; otherwise the series that needs one is skipped.

use std::ffi::CString;
use std::path::Path;

use super::cleanup::Removal;
use super::workspace::{FileSystem, Workspace};
use crate::error::{Error, Result};
use crate::format_bytes;

const SHARED_MEMORY: &str = "/dev/shm";

/// A directory on tmpfs that is removed with this value.
#[derive(Debug)]
pub(crate) struct Tmpfs(Removal);

impl Tmpfs {
    /// Creates one for `bytes` of files, with pages as the system has them.
    ///
    /// # Errors
    /// It is not possible; the message is the reason to skip a series.
    pub(crate) fn create(workspace: &Workspace, bytes: u64) -> Result<Self> {
        Self::mount(workspace, bytes, "").or_else(|refusal| shared(bytes, &refusal))
    }

    /// Mounts one with more options, such as `,huge=never`.
    ///
    /// # Errors
    /// The system does not allow it; [`create`](Self::create) may still succeed.
    pub(crate) fn mount(workspace: &Workspace, bytes: u64, more: &str) -> Result<Self> {
        let options = format!("size={},mode=700{more}", bytes + (1 << 20));
        let options = CString::new(options).map_err(|error| Error::Refused(error.to_string()))?;
        Ok(Self(Removal::of_new_tmpfs(workspace.path(), &options)?))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

fn shared(bytes: u64, refusal: &Error) -> Result<Tmpfs> {
    let parent = Path::new(SHARED_MEMORY);
    let file_system = FileSystem::of(parent)?;
    if !file_system.in_memory || file_system.free_bytes < bytes {
        let free = format_bytes(file_system.free_bytes);
        return Err(Error::Refused(format!(
            "cannot mount a tmpfs ({refusal}), and {SHARED_MEMORY} is {} with {free} free",
            file_system.name
        )));
    }
    Ok(Tmpfs(Removal::of_new_directory(parent)?))
}

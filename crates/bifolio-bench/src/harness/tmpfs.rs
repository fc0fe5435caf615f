//! A directory whose files are in memory, for reads of tmpfs by the kernel.
//!
//! A mount of the run inside the workspace where the system allows it; otherwise a directory in
//! /dev/shm; otherwise the series that needs one is skipped. Huge pages are an option of the mount;
//! without one the system's default applies.

use std::path::Path;

use rustix::mount::{MountFlags, mount};

use super::cleanup::{CleanupItem, Removal};
use super::filesystem::FileSystem;
use super::workspace::Workspace;
use crate::error::{Error, Result};
use crate::format_bytes;

const SHARED_MEMORY: &str = "/dev/shm";

/// A directory on tmpfs that is removed with this value.
#[derive(Debug)]
pub(crate) struct Tmpfs(Removal);

/// Set if files are made of huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HugePages {
    /// The system's default.
    Default,
    Never,
    Always,
}

impl HugePages {
    /// Text that is appended to the options of the mount.
    pub(crate) fn option(self) -> &'static str {
        match self {
            Self::Default => "",
            Self::Never => ",huge=never",
            Self::Always => ",huge=always",
        }
    }
}

impl Tmpfs {
    /// Creates one for `bytes` of files.
    ///
    /// # Errors
    /// It is not possible; the message is the reason to skip a series.
    pub(crate) fn create(workspace: &Workspace, bytes: u64) -> Result<Self> {
        mounted(workspace, bytes, HugePages::Default).or_else(|refusal| shared(bytes, &refusal))
    }

    /// Mounts one whose pages are as `huge_pages` states.
    ///
    /// # Errors
    /// The system does not allow it; [`create`](Self::create) may still succeed.
    pub(crate) fn mount(workspace: &Workspace, bytes: u64, huge_pages: HugePages) -> Result<Self> {
        mounted(workspace, bytes, huge_pages)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

fn mounted(workspace: &Workspace, bytes: u64, huge_pages: HugePages) -> Result<Tmpfs> {
    // The empty directory stays when the mount goes, until the workspace does.
    let made = tempfile::Builder::new().prefix("tmpfs-").tempdir_in(workspace.path());
    let path = made.map_err(Error::system("make a directory for a tmpfs"))?.keep();
    let size_bytes = bytes + (1 << 20);
    let options = format!("size={size_bytes},mode=700{}", huge_pages.option());
    let options =
        std::ffi::CString::new(options).map_err(|error| Error::Refused(error.to_string()))?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    let removal = Removal::of(|| {
        mount("bifolio-bench", &path, "tmpfs", flags, &*options)
            .map_err(Error::system("mount a tmpfs"))?;
        Ok(CleanupItem::Mount(path))
    })?;
    Ok(Tmpfs(removal))
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

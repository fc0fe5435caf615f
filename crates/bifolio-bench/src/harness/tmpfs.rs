//! A directory whose files are memory, for what the kernel does best: reading tmpfs.
//!
//! A mount of the run's own inside the workspace where the system allows it; otherwise a directory
//! in /dev/shm; otherwise the series that needs one is skipped.

use std::path::Path;

use rustix::mount::{MountFlags, mount};

use super::cleanup::{Leftover, Removal};
use super::filesystem::FileSystem;
use super::workspace::Workspace;
use crate::error::{Error, Result};
use crate::format_bytes;

const SHARED_MEMORY: &str = "/dev/shm";

/// A directory on tmpfs that goes away with this value.
#[derive(Debug)]
pub(crate) struct Tmpfs(Removal);

impl Tmpfs {
    /// Makes one that takes `bytes` of files.
    ///
    /// # Errors
    /// There is no way; the message is the reason for which to skip a series.
    pub(crate) fn create(workspace: &Workspace, bytes: u64) -> Result<Self> {
        mounted(workspace, bytes).or_else(|refusal| shared(bytes, &refusal))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

fn mounted(workspace: &Workspace, bytes: u64) -> Result<Tmpfs> {
    let path = workspace.path().join("tmpfs");
    std::fs::create_dir(&path).map_err(Error::system(format!("make {}", path.display())))?;
    let options = std::ffi::CString::new(format!("size={},mode=700", bytes + (1 << 20)))
        .map_err(|error| Error::Refused(error.to_string()))?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    let removal = Removal::of(|| {
        mount("bifolio-bench", &path, "tmpfs", flags, &*options)
            .map_err(Error::system("mount a tmpfs"))?;
        Ok(Leftover::Mount(path))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_way_the_files_are_memory_and_go_away() {
        let parent = tempfile::tempdir().unwrap();
        let workspace = Workspace::create(Some(parent.path()), 0).unwrap();
        let refusal = Error::Refused("not allowed here".into());
        for tmpfs in [Tmpfs::create(&workspace, 1 << 20), shared(1 << 20, &refusal)] {
            let Ok(tmpfs) = tmpfs else {
                continue;
            };
            assert!(FileSystem::of(tmpfs.path()).unwrap().in_memory);
            let file = tmpfs.path().join("file");
            std::fs::write(&file, "x").unwrap();
            drop(tmpfs);
            assert!(!file.exists());
        }
    }

    #[test]
    fn the_reason_names_both_refusals() {
        let refusal = Error::Refused("not allowed here".into());
        let message = shared(1 << 60, &refusal).unwrap_err().to_string();
        assert!(message.contains("not allowed here") || message.contains("file system of"));
    }
}

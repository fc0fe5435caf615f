//! The directory of a run's files.
//!
//! Created by `benchmark::run`, used by every benchmark, removed at the end (`cleanup`). By default
//! it is on a disk: the system's temporary directory unless that is memory, then others; a remark
//! tells the user.

use std::path::{Path, PathBuf};

use rustix::fs::{statfs, statvfs};

use super::cleanup::Removal;
use crate::error::{Error, Result};
use crate::format_bytes;

/// The directory of a run.
#[derive(Debug)]
pub struct Workspace {
    directory: Removal,
    pub(crate) file_system: FileSystem,
    /// Remarks for the user about the choice.
    pub(crate) remarks: Vec<String>,
}

impl Workspace {
    /// Creates one inside `dir`, or in a directory on a disk, with at least `needed_bytes` free.
    ///
    /// # Errors
    /// No directory fits; the message names what is needed and what is free.
    pub fn create(dir: Option<&Path>, needed_bytes: u64) -> Result<Self> {
        let (parent, file_system, remarks) = match dir {
            Some(dir) => chosen(dir)?,
            None => on_disk(default_directories())?,
        };
        if file_system.free_bytes < needed_bytes {
            return Err(Error::Refused(format!(
                "needs {} of disk, {} is free in {} ({}): choose another --dir or a smaller --size",
                format_bytes(needed_bytes),
                format_bytes(file_system.free_bytes),
                parent.display(),
                file_system.name,
            )));
        }
        Ok(Self { directory: Removal::of_new_directory(&parent)?, file_system, remarks })
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

type Choice = (PathBuf, FileSystem, Vec<String>);

/// Returns the directory that the user named, with a warning if its files are in memory.
fn chosen(dir: &Path) -> Result<Choice> {
    let file_system = FileSystem::of(dir)?;
    let (shown, name) = (dir.display(), &file_system.name);
    let warning = format!("note: {shown} is {name}: files there are memory, not disk");
    let remarks = if file_system.in_memory { vec![warning] } else { Vec::new() };
    Ok((dir.to_owned(), file_system, remarks))
}

fn default_directories() -> Vec<PathBuf> {
    let mut directories = vec![std::env::temp_dir(), PathBuf::from("/var/tmp")];
    directories.extend(std::env::current_dir());
    directories
}

/// Returns the first directory whose files are on a disk.
fn on_disk(directories: Vec<PathBuf>) -> Result<Choice> {
    let mut remarks = Vec::new();
    for directory in directories {
        let Ok(file_system) = FileSystem::of(&directory) else { continue };
        if !file_system.in_memory {
            return Ok((directory, file_system, remarks));
        }
        let (shown, name) = (directory.display(), file_system.name);
        remarks.push(format!(
            "note: {shown} is {name}, which is memory: looking for a disk elsewhere"
        ));
    }
    Err(Error::Refused("found no temporary directory on a disk: choose one with --dir".into()))
}

/// Names of file systems, by the number statfs gives; those before [`IN_MEMORY`] have no disk.
const NAMES: [(u64, &str); 10] = [
    (0x0102_1994, "tmpfs"),
    (0x8584_58f6, "ramfs"),
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x2fc1_2fc1, "zfs"),
    (0x794c_7630, "overlayfs"),
    (0x6969, "nfs"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
];
const IN_MEMORY: usize = 2;

/// The file system under a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileSystem {
    pub(crate) name: String,
    /// Set if its files are only in memory.
    pub(crate) in_memory: bool,
    /// Bytes that an ordinary user may still write.
    pub(crate) free_bytes: u64,
}

impl FileSystem {
    pub(crate) fn of(directory: &Path) -> Result<Self> {
        let ask = || Error::system(format!("ask for the file system of {}", directory.display()));
        // The field is signed or not, wide or not, as the architecture has it; the number is 32
        // bits.
        let number = statfs(directory).map_err(ask())?.f_type as u64 & 0xffff_ffff;
        let space = statvfs(directory).map_err(ask())?;
        let known = NAMES.iter().position(|(known, _)| *known == number);
        Ok(Self {
            name: known.map_or_else(|| format!("{number:#x}"), |index| NAMES[index].1.to_owned()),
            in_memory: known.is_some_and(|index| index < IN_MEMORY),
            free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
        })
    }
}

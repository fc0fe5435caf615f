//! The directory of a run's files.
//!
//! Created by `benchmark::run`, used by every benchmark, removed at the end (`cleanup`). By default
//! it is on a disk: the system's temporary directory unless that is memory, then others; a remark
//! tells the user.

use std::path::{Path, PathBuf};

use super::cleanup::Removal;
use super::filesystem::FileSystem;
use crate::error::{Error, Result};
use crate::format_bytes;

/// The directory of a run.
#[derive(Debug)]
pub struct Workspace {
    directory: Removal,
    file_system: FileSystem,
    remarks: Vec<String>,
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

    /// The name of the file system under it.
    pub fn file_system(&self) -> &str {
        &self.file_system.name
    }

    /// A remark for the user about the choice.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }
}

type Choice = (PathBuf, FileSystem, Vec<String>);

/// Returns the directory that the user named, with a warning if its files are in memory.
fn chosen(dir: &Path) -> Result<Choice> {
    let file_system = FileSystem::of(dir)?;
    let warning = format!(
        "note: {} is {}: files there are memory, not disk",
        dir.display(),
        file_system.name
    );
    let remarks = if file_system.in_memory { vec![warning] } else { Vec::new() };
    Ok((dir.to_owned(), file_system, remarks))
}

fn default_directories() -> Vec<PathBuf> {
    let mut directories = vec![std::env::temp_dir(), PathBuf::from("/var/tmp")];
    directories.extend(std::env::current_dir());
    directories
}

/// The first directory whose files are on a disk.
fn on_disk(directories: Vec<PathBuf>) -> Result<Choice> {
    let mut remarks = Vec::new();
    for directory in directories {
        match FileSystem::of(&directory) {
            Ok(file_system) if !file_system.in_memory => {
                return Ok((directory, file_system, remarks));
            }
            Ok(file_system) => remarks.push(format!(
                "note: {} is {}, which is memory: looking for a disk elsewhere",
                directory.display(),
                file_system.name
            )),
            Err(_) => {}
        }
    }
    Err(Error::Refused("found no temporary directory on a disk: choose one with --dir".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_over_memory_and_says_so() {
        let shm = PathBuf::from("/dev/shm");
        if !FileSystem::of(&shm).is_ok_and(|file_system| file_system.in_memory) {
            return;
        }
        let here = std::env::current_dir().unwrap();
        if let Ok((directory, _, remarks)) = on_disk(vec![shm.clone(), here.clone()]) {
            assert_eq!(directory, here);
            assert!(remarks[0].contains("/dev/shm is tmpfs"));
        }
        assert!(on_disk(vec![shm.clone()]).is_err());
        assert!(chosen(&shm).unwrap().2[0].contains("memory, not disk"));
    }
}

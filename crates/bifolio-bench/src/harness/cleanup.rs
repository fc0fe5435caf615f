//! The things that a run leaves on the machine, and the promise that it goes away.
//!
//! A thing that must not outlive the run is a [`CleanupItem`]: it is made and listed under one
//! lock, and removed when its owner drops it, or when a signal ends the program, whichever comes
//! first. Newest first, so that a mount goes before the directory it stands in. The kernel's own
//! SIGKILL cannot be answered: then files stay.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use parking_lot::Mutex;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};

use super::memory_group::MEMBERS;
use super::swap;
use crate::error::{Error, Result};

/// The beginning of the names of directories.
const PREFIX: &str = "bifolio-bench-";

/// The exit status of a program that a signal ended, as shells report SIGINT.
const EXIT_INTERRUPTED: i32 = 130;

/// How often a directory is tried again while other threads still make files in it, and a group
/// while its processes end.
const REMOVALS_MAX: u32 = 50;

static ITEMS: Mutex<Vec<CleanupItem>> = Mutex::new(Vec::new());

/// Something that must not outlive the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CleanupItem {
    /// A directory with all it contains.
    Directory(PathBuf),
    /// The kind of mount.
    Mount(PathBuf),
    /// A control group, with the processes in it: children of this one.
    Group(PathBuf),
    /// A file the kernel may swap to.
    Swap(PathBuf),
}

impl CleanupItem {
    fn path(&self) -> &Path {
        match self {
            Self::Directory(path) | Self::Mount(path) | Self::Group(path) | Self::Swap(path) => {
                path
            }
        }
    }

    fn remove(&self) {
        match self {
            Self::Directory(path) => remove_directory(path),
            // Detach: open files in it do not hold it back.
            Self::Mount(path) => drop(unmount(path, UnmountFlags::DETACH)),
            Self::Group(path) => remove_group(path),
            Self::Swap(path) => remove_swap(path),
        }
    }
}

/// Removes its item when dropped.
#[derive(Debug)]
pub(crate) struct Removal(CleanupItem);

impl Removal {
    /// Makes something, with the promise that it goes away: no signal comes between the two.
    pub(crate) fn of(make: impl FnOnce() -> Result<CleanupItem>) -> Result<Self> {
        let mut items = ITEMS.lock();
        let item = make()?;
        items.push(item.clone());
        Ok(Self(item))
    }

    /// Makes a directory of the run's own in `parent`.
    pub(crate) fn of_new_directory(parent: &Path) -> Result<Self> {
        Self::of(|| {
            let made = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent);
            let made =
                made.map_err(Error::system(format!("make a directory in {}", parent.display())))?;
            Ok(CleanupItem::Directory(made.keep()))
        })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        let mut items = ITEMS.lock();
        if let Some(index) = items.iter().rposition(|listed| *listed == self.0) {
            items.remove(index).remove();
        }
    }
}

/// From now on SIGINT, SIGTERM and SIGHUP remove all items, call `last_words` and end the
/// program.
///
/// # Errors
/// The handlers cannot be installed, or are already.
pub fn clean_on_signals(last_words: impl Fn() + Send + 'static) -> Result<()> {
    let handler = move || {
        // The lock is kept: nothing new may be listed between this and the exit.
        let items = ITEMS.lock();
        items.iter().rev().for_each(CleanupItem::remove);
        last_words();
        std::process::exit(EXIT_INTERRUPTED);
    };
    ctrlc::set_handler(handler)
        .map_err(|error| Error::Refused(format!("cannot watch for signals: {error}")))
}

fn remove_directory(path: &Path) {
    until_gone(path, || fs::remove_dir_all(path));
}

/// A group can go once its last process has ended; its files go with it.
fn remove_group(path: &Path) {
    until_gone(path, || {
        let members = fs::read_to_string(path.join(MEMBERS)).unwrap_or_default();
        let members = members.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?));
        members.for_each(|member| {
            let _ = kill_process(member, Signal::KILL);
        });
        fs::remove_dir(path)
    });
}

/// Pages that are still in it come back into memory first.
fn remove_swap(path: &Path) {
    until_gone(path, || {
        swap::deactivate(path)?;
        fs::remove_file(path)
    });
}

fn until_gone(path: &Path, remove: impl Fn() -> io::Result<()>) {
    for _ in 0..REMOVALS_MAX {
        if remove().is_ok() || !path.exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_removes_the_directory_and_its_listing() {
        let parent = tempfile::tempdir().unwrap();
        let removal = Removal::of_new_directory(parent.path()).unwrap();
        let path = removal.path().to_owned();
        assert_eq!(path.parent(), Some(parent.path()));
        fs::write(path.join("file"), "x").unwrap();
        let listed = CleanupItem::Directory(path.clone());
        assert!(ITEMS.lock().contains(&listed));
        drop(removal);
        assert!(!path.exists());
        assert!(!ITEMS.lock().contains(&listed));
    }
}

//! Removal of everything that a run creates on the machine.
//!
//! A thing that must not outlive the run is a [`CleanupItem`]: it is created and listed under one
//! lock, and removed when its owner drops it, or when a signal ends the program. The newest is
//! removed first, so that a mount is removed before its directory. SIGKILL cannot be handled: then
//! files stay.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use parking_lot::Mutex;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};

use super::memory_group::MEMBERS;
use super::swap;
use crate::error::{Error, Result};

/// Prefix of the names of directories.
const PREFIX: &str = "bifolio-bench-";

/// The exit status of a program that a signal ended, as shells report SIGINT.
const EXIT_INTERRUPTED: i32 = 130;

/// Maximum attempts to remove a directory while other threads still create files in it, and a group
/// while its processes end.
const REMOVALS_MAX: u32 = 50;

static ITEMS: Mutex<Vec<CleanupItem>> = Mutex::new(Vec::new());

/// Something that must not outlive the run, at its path.
pub(crate) type CleanupItem = (Kind, PathBuf);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A directory with all it contains.
    Directory,
    Mount,
    /// A control group, with the processes in it: children of this one.
    Group,
    /// A file that the kernel may swap to.
    Swap,
}

fn remove((kind, path): &CleanupItem) {
    match kind {
        Kind::Directory => until_gone(path, || fs::remove_dir_all(path)),
        // Detach: open files in it do not hold it back.
        Kind::Mount => drop(unmount(path, UnmountFlags::DETACH)),
        Kind::Group => remove_group(path),
        // Its pages are first read back into memory.
        Kind::Swap => until_gone(path, || {
            swap::deactivate(path)?;
            fs::remove_file(path)
        }),
    }
}

/// Removes its item when dropped.
#[derive(Debug)]
pub(crate) struct Removal(CleanupItem);

impl Removal {
    /// Creates something that will be removed: no signal comes between the two.
    pub(super) fn of(make: impl FnOnce() -> Result<CleanupItem>) -> Result<Self> {
        let mut items = ITEMS.lock();
        let item = make()?;
        items.push(item.clone());
        Ok(Self(item))
    }

    /// Creates a directory of the run in `parent`.
    pub(crate) fn of_new_directory(parent: &Path) -> Result<Self> {
        Self::of(|| Ok((Kind::Directory, new_directory(parent)?)))
    }

    /// Creates a control group of the run in `parent`.
    pub(crate) fn of_new_group(parent: &Path) -> Result<Self> {
        Self::of(|| Ok((Kind::Group, new_directory(parent)?)))
    }

    /// Mounts a tmpfs in a new directory in `parent`, where the empty directory stays when the
    /// mount goes.
    pub(crate) fn of_new_tmpfs(parent: &Path, options: &CStr) -> Result<Self> {
        let path = new_directory(parent)?;
        let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
        Self::of(|| {
            mount("bifolio-bench", &path, "tmpfs", flags, Some(options))
                .map_err(Error::system("mount a tmpfs"))?;
            Ok((Kind::Mount, path))
        })
    }

    /// Returns its path.
    pub(crate) fn path(&self) -> &Path {
        &self.0.1
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        let mut items = ITEMS.lock();
        if let Some(index) = items.iter().rposition(|listed| *listed == self.0) {
            remove(&items.remove(index));
        }
    }
}

fn new_directory(parent: &Path) -> Result<PathBuf> {
    let made = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent);
    let made = made.map_err(Error::system(format!("make a directory in {}", parent.display())))?;
    Ok(made.keep())
}

/// Installs handlers: SIGINT, SIGTERM and SIGHUP then remove all items, call `last_words` and end
/// the program.
///
/// # Errors
/// The handlers cannot be installed, or are installed already.
pub fn clean_on_signals(last_words: impl Fn() + Send + 'static) -> Result<()> {
    let handler = move || {
        // The lock is kept: nothing new may be listed between this and the exit.
        let items = ITEMS.lock();
        items.iter().rev().for_each(remove);
        last_words();
        std::process::exit(EXIT_INTERRUPTED);
    };
    ctrlc::set_handler(handler)
        .map_err(|error| Error::Refused(format!("cannot watch for signals: {error}")))
}

/// Removes a group once its last process has ended.
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

fn until_gone(path: &Path, remove: impl Fn() -> io::Result<()>) {
    for _ in 0..REMOVALS_MAX {
        if remove().is_ok() || !path.exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

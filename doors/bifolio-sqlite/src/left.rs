//! Descriptors of database files that nothing uses, such as those of an open that failed halfway.
//!
//! To close one drops all POSIX locks that this process has on the file, such as those of another
//! copy of SQLite. So they are closed while no lock of the file is held, and each close of a
//! database tries again.

use crate::file_lock::FileLock;
use crate::fork::{Mutex, PerProcess};
use bifolio::backing::DiskFile;
use bifolio::{Error, OpenOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

static LEFT: PerProcess<Mutex<Vec<Box<dyn AsFd + Send>>>> = PerProcess::new();

/// Closes a descriptor, now or later, and tries those that are left.
pub(crate) fn close(more: Option<Box<dyn AsFd + Send>>) {
    let mut left = LEFT.get().lock();
    left.extend(more);
    left.retain(|file| FileLock((**file).as_fd()).is_contended() != Ok(false));
}

/// Opens a file for the cache, and closes nothing of it if that fails.
pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<DiskFile, Error> {
    let mut unused: Vec<OwnedFd> = Vec::new();
    let opened = DiskFile::open_or_keep(path, options, &mut unused);
    unused.into_iter().for_each(|file| close(Some(Box::new(file))));
    opened
}

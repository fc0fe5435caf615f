//! A file that a path names, found without opening it: which file that is, and whether it may be
//! opened. To close the descriptor of a look (`O_PATH`) drops no locks.

use super::disk::check_regular;
use super::{FileIdentity, OpenDiskError};
use crate::sys::file;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A regular file that a path names: found, and not opened.
#[derive(Debug)]
pub(crate) struct Located {
    path: PathBuf,
    descriptor: OwnedFd,
    pub(crate) identity: FileIdentity,
}

impl Located {
    /// What `path` names; `None` if nothing.
    pub(crate) fn find(path: &Path) -> Result<Option<Self>, OpenDiskError> {
        let system = |source| OpenDiskError::System { path: path.to_owned(), source };
        let descriptor = match file::locate(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            descriptor => descriptor.map_err(system)?,
        };
        let status = file::status(descriptor.as_fd()).map_err(system)?;
        check_regular(path, status.kind)?;
        let (path, identity) = (path.to_owned(), FileIdentity::of(status));
        Ok(Some(Self { path, descriptor, identity }))
    }

    /// Refuses as opening would refuse; `false` if only that can tell.
    pub(crate) fn may_open(&self, write: bool) -> Result<bool, OpenDiskError> {
        match file::may_open(self.descriptor.as_fd(), write) {
            Ok(()) => Ok(true),
            // There is no `/proc`, or no such question.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(false),
            Err(source) => Err(OpenDiskError::System { path: self.path.clone(), source }),
        }
    }
}

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

    /// Refuses as opening would refuse. (Where the kernel can only ask that by name, Linux before
    /// 5.8 without `/proc`, of what has the name now.)
    pub(crate) fn check_rights(&self, write: bool) -> Result<(), OpenDiskError> {
        let allowed = file::may_open(self.descriptor.as_fd(), &self.path, write);
        allowed.map_err(|source| OpenDiskError::System { path: self.path.clone(), source })
    }
}

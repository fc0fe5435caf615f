//! The temporary file of a swap, which has no name and is deleted with its last descriptor.
//!
//! Called once by [`Swap::open`](super::Swap::open). Only the owner can read the file, because it
//! contains memory of the process. A child made by `fork` shares the descriptors, so the bytes last
//! until the child, too, has exited or executed another program.

use crate::error::{Error, ErrorKind, Result};
use crate::io::{DirectBacking, DirectIo, DiskFile, DiskOptions, FileIdentity, replaced};
use crate::sys::file;
use crate::sys::probe::Features;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

const OPTIONS: DiskOptions = DiskOptions {
    read: true,
    write: true,
    create: false,
    create_new: false,
    mode: None,
    truncate: false,
    direct: DirectIo::Auto,
};

pub(super) fn open(directory: &Path, features: &Features) -> Result<DiskFile> {
    // The fallback is for file systems without unnamed files and for systems without /proc.
    let file = match open_unnamed(directory, features) {
        Some(file) => file,
        None => open_unlinked(directory, features)?,
    };
    Ok(file.called(directory.join("(temporary swap file)")))
}

/// Opens a file that never has a name.
pub(super) fn open_unnamed(directory: &Path, features: &Features) -> Option<DiskFile> {
    let made = file::create_unnamed(directory).ok()?;
    DiskFile::open_with(file::path_of(made.as_fd()), &OPTIONS, features).ok()
}

/// Creates a named file, opens it, and removes its name.
pub(super) fn open_unlinked(directory: &Path, features: &Features) -> Result<DiskFile> {
    let fail = |source| {
        let directory = directory.display();
        let text = format!("cannot make a temporary swap file in {directory}: {source}");
        Error::new(ErrorKind::SwapFile, text).because(Arc::new(source))
    };
    // The standard library seeds its hash tables with random numbers from the system.
    let random = RandomState::new().build_hasher().finish();
    let path = directory.join(format!(".bifolio-swap-{random:016x}"));
    let made = file::create_private(&path).map_err(fail)?;
    let opened = DiskFile::open_with(&path, &OPTIONS, features);
    let status = file::status(made.as_fd()).map_err(fail)?;
    let is_same = |file: &DiskFile| file.identity() == Some(FileIdentity::of(status));
    if opened.as_ref().is_ok_and(|file| !is_same(file)) {
        // Another process has replaced the file: the one at `path` must not be deleted.
        return Err(replaced(&path));
    }
    file::unlink(&path).map_err(fail)?;
    opened
}

//! A swap file of the run, for the kernel's series of memory files larger than memory.
//!
//! Created in the workspace and activated with the highest priority, where the system allows that
//! (usually root). It is deactivated and removed with this value, or by a signal. After a SIGKILL
//! it stays active until `swapoff`.
//!
//! # Safety
//! Two system calls, each with a path that ends with a zero byte and lives during the call.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate};

use super::cleanup::{CleanupItem, Removal};
use super::workspace::Workspace;
use crate::error::{Error, Result};

/// The highest priority: this area is filled before any other.
const PRIORITY: libc::c_int = 32767;
const FLAG_PREFER: libc::c_int = 0x8000;

/// An active swap area; deactivated with this value.
#[derive(Debug)]
pub(crate) struct SwapFile(#[expect(dead_code, reason = "is held")] Removal);

impl SwapFile {
    /// Creates and activates one of `bytes`.
    ///
    /// # Errors
    /// The system does not allow it, or the file system's files cannot be swapped to; the message
    /// is the reason to skip a series.
    pub(crate) fn activate(workspace: &Workspace, bytes: u64) -> Result<Self> {
        let path = workspace.path().join("swap");
        let removal = Removal::of(|| {
            let action = || Error::system(format!("make the swap file {}", path.display()));
            make(&path, bytes).map_err(action())?;
            activate(&path).map_err(Error::system(format!("swap to {}", path.display())))?;
            Ok(CleanupItem::Swap(path))
        })?;
        Ok(Self(removal))
    }
}

/// Creates a file with all its blocks and the header of a swap area in the first page.
fn make(path: &Path, bytes: u64) -> io::Result<()> {
    let page_bytes = rustix::param::page_size();
    let pages = bytes.div_ceil(page_bytes as u64) + 1;
    let options = File::options().write(true).create_new(true).mode(0o600).clone();
    let file = options.open(path)?;
    fallocate(&file, FallocateFlags::empty(), 0, pages * page_bytes as u64)?;
    file.write_all_at(&header(page_bytes, pages), 0)?;
    file.sync_all()
}

/// Returns version 1 of the header: 1024 bytes for a boot loader, the version, the last page, the
/// number of bad pages; at the end of the page the name of the format.
fn header(page_bytes: usize, pages: u64) -> Vec<u8> {
    const MAGIC: &[u8] = b"SWAPSPACE2";
    let last_page = u32::try_from(pages - 1).unwrap_or(u32::MAX);
    let mut header = vec![0; page_bytes];
    header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    header[1028..1032].copy_from_slice(&last_page.to_ne_bytes());
    header[page_bytes - MAGIC.len()..].copy_from_slice(MAGIC);
    header
}

fn activate(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` ends with a zero byte and lives until the call returns.
    let result = unsafe { libc::swapon(path.as_ptr(), FLAG_PREFER | PRIORITY) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Deactivates the file; an inactive one is not an error.
pub(super) fn deactivate(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` ends with a zero byte and lives until the call returns.
    let result = unsafe { libc::swapoff(path.as_ptr()) };
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EINVAL) { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_active(path: &Path) -> bool {
        let active = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
        active.contains(path.to_str().unwrap())
    }

    #[test]
    fn is_active_while_it_lives_and_leaves_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let workspace = Workspace::create(Some(parent.path()), 0).unwrap();
        let path = std::fs::canonicalize(workspace.path()).unwrap().join("swap");
        let Ok(swap) = SwapFile::activate(&workspace, 1 << 20) else {
            return;
        };
        assert!(is_active(&path));
        drop(swap);
        assert!(!is_active(&path) && !path.exists());
    }

    #[test]
    fn a_file_that_is_not_active_is_taken_back_without_complaint() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("file");
        make(&path, 1 << 20).unwrap();
        let taken = deactivate(&path);
        assert!(taken.is_ok() || taken.unwrap_err().raw_os_error() == Some(libc::EPERM));
        let bytes = std::fs::read(&path).unwrap();
        let page_bytes = rustix::param::page_size();
        assert_eq!(bytes.len(), (1 << 20) + page_bytes);
        assert_eq!(&bytes[page_bytes - 10..page_bytes], b"SWAPSPACE2");
        assert_eq!(bytes[1028..1032], ((1u32 << 20) / page_bytes as u32).to_ne_bytes());
    }
}

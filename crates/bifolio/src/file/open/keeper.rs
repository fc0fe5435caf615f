//! The seam to `keep`, above: pages that stay in memory after the last close of their file, and are
//! found again at the next open.
//!
//! `closing.rs` makes the calls, on the thread that has taken the file's slot, so the file has
//! neither a handle nor a descriptor here, but those of the storage that is being opened.

use crate::inode::Inode;
use crate::io::FileIdentity;
use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Keeps closed files (`keep`).
pub(crate) trait Keeper: Debug + Send + Sync {
    /// Called at an open for reading, before any page of the file is read. Returns the inode that
    /// the last close has kept, if its pages are what the file has and `fits` accepts it; frees it
    /// otherwise. Watches the file from then on, if it can.
    fn open(
        &self,
        identity: FileIdentity,
        file: BorrowedFd<'_>,
        fits: &dyn Fn(&Inode) -> bool,
    ) -> Option<Arc<Inode>>;

    /// Returns `true` if the pages of an open file may be kept, as far as it is known.
    fn is_watched(&self, identity: FileIdentity) -> bool;

    /// Returns `true` if no change of the file was seen since it is watched.
    fn is_unchanged(&self, identity: FileIdentity, file: BorrowedFd<'_>) -> bool;

    /// Called at the last close, without descriptors. Keeps the inode, which is clean, or returns
    /// it. Ends the watch then.
    fn close(&self, identity: FileIdentity, inode: Arc<Inode>) -> Result<(), Arc<Inode>>;

    /// Ends the watch of a file, and frees it if it is kept.
    fn forget(&self, identity: FileIdentity);

    /// Returns the kept files. Until the references are dropped, none of these is freed.
    fn kept(&self) -> Vec<(FileIdentity, Arc<Inode>)>;

    /// Frees all kept files.
    fn free_all(&self);

    /// Reasons why files are not kept, one text each.
    fn fallbacks(&self) -> Vec<String>;
}

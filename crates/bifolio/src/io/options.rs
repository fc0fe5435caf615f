//! How a disk file is opened: rights, creation, and direct or buffered transfers.
//!
//! Used by `disk.rs`, which opens the file, and `direct.rs`, which decides how it is transferred.

/// Whether transfers of a file go directly to the device.
///
/// # What a buffered file does not promise
/// A write through the kernel's page cache has not reached the device: the kernel writes it there
/// later, and may fail (no space on a thin volume, a network that is gone, a bad block). Bifolio
/// takes such a page for clean, so it may evict it, and the kernel may drop its own copy of what it
/// could not write. Then a read finds what the device has, which may be the bytes from before the
/// write, and nobody knows until the next sync asks. That sync fails, and so does every later one
/// of any kind and through any handle, until the loss is accepted
/// ([`File::discard_dirty`](crate::File::discard_dirty),
/// [`Cache::discard_closed`](crate::Cache::discard_closed)), the last handle closed, and the file
/// opened again: what was written since the last good sync must be taken for lost.
///
/// With direct transfers a failure is an error of the write-out itself, and the page stays in
/// memory, dirty, and is tried again. A program that must not read old bytes in such a case opens
/// its files with [`DirectIo::Require`], or looks at
/// [`Stats::fallbacks`](crate::Stats::fallbacks). The last block of a file whose length is not a
/// multiple of one is always written through the page cache, by the same rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DirectIo {
    /// Directly where the file system offers it, otherwise through the kernel's page cache: see
    /// what such a file does not promise.
    #[default]
    Auto,
    /// Always through the kernel's page cache.
    Never,
    /// Directly, or opening fails.
    Require,
}

/// How a [`DiskFile`](super::DiskFile) is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskOptions {
    /// Allows reading.
    pub read: bool,
    /// Allows writing, cutting and growing.
    pub write: bool,
    /// Creates the file if it does not exist. Needs `write`.
    pub create: bool,
    /// Creates the file, and fails if the path exists (`EEXIST`). Needs `write`.
    pub create_new: bool,
    /// Permission bits of a file that is created, before the process's umask; 0o666 if `None`.
    pub mode: Option<u32>,
    /// Cuts the file to nothing. Needs `write`.
    pub truncate: bool,
    /// Which way transfers go.
    pub direct: DirectIo,
}

impl DiskOptions {
    /// Returns `true` if opening may create the file.
    pub(super) fn creates(&self) -> bool {
        self.create || self.create_new
    }

    /// Returns what is wrong with options that contradict each other.
    pub(super) fn contradiction(&self) -> Option<&'static str> {
        match *self {
            DiskOptions { read: false, write: false, .. } => {
                Some("a file must be opened for reading, for writing or for both")
            }
            DiskOptions { write: false, create: true, .. }
            | DiskOptions { write: false, create_new: true, .. } => {
                Some("creating a file needs write access")
            }
            DiskOptions { write: false, truncate: true, .. } => {
                Some("truncating a file needs write access")
            }
            _ => None,
        }
    }
}

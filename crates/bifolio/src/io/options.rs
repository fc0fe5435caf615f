//! How a disk file is opened: rights, creation, and direct or buffered transfers.
//!
//! Used by `open_disk.rs`, which opens the file and decides how it is transferred.

/// How transfers of a file reach the device: directly, or through the kernel's page cache.
///
/// # What a buffered file does not guarantee
/// A write through the kernel's page cache has not reached the device when it returns: the kernel
/// writes it later, and may fail (no space on a thin volume, a lost network connection, a bad
/// block). Bifolio considers such a page clean, so it may evict the page, and the kernel may drop
/// its own copy of what it could not write. Then a read returns what the device holds, which may be
/// the bytes from before the write, and the loss is only reported by the next sync. That sync
/// fails, and so does every later one of any kind and through any handle, until the loss is
/// accepted ([`File::discard_dirty`](crate::File::discard_dirty)), the last handle is closed, and
/// the file is opened again: everything written since the last successful sync must be considered
/// lost.
///
/// With direct transfers the write-out itself fails, and the page stays in memory, dirty, and is
/// written again later. A program that must not read old bytes in such a case opens its files with
/// [`DirectIo::Require`], or checks [`Stats::fallbacks`](crate::Stats::fallbacks). A partial last
/// block of a file is always written through the page cache, with the same consequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DirectIo {
    /// Direct where the file system supports it, otherwise through the kernel's page cache, with
    /// the consequences described above.
    #[default]
    Auto,
    /// Always through the kernel's page cache.
    Never,
    /// Direct, or opening fails.
    Require,
}

/// Options for opening a [`DiskFile`](super::DiskFile).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskOptions {
    /// Allows reading.
    pub read: bool,
    /// Allows writing, truncating and extending.
    pub write: bool,
    /// Creates the file if it does not exist. Needs `write`.
    pub create: bool,
    /// Creates the file, and fails if the path exists (`EEXIST`). Needs `write`.
    pub create_new: bool,
    /// Permission bits of a file that is created, before the process's umask; 0o666 if `None`.
    pub mode: Option<u32>,
    /// Truncates the file to length 0. Needs `write`.
    pub truncate: bool,
    /// Direct or buffered transfers.
    pub direct: DirectIo,
}

impl DiskOptions {
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

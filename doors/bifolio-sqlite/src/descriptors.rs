//! The descriptors of a database file, and their close.
//!
//! The kernel drops all POSIX locks of a process on a file when any descriptor of it is closed:
//! also those of another copy of SQLite in this process, whose transaction would then be seen
//! half-done. (Those of the same copy are safe from its own closes, but not from the cache's.) So
//! they are closed only while the exclusive lock of the file ([`FileLock`]) keeps all others from
//! having locks; that lock ends with the last of them. If others have locks, the descriptors are
//! parked: the next open of the file takes them, and each close of a database tries again.
//!
//! # Safety
//! Calls the kernel with memory for its answer; opens files of a VFS that is registered.
#![allow(unsafe_code)]

use crate::file_lock::FileLock;
use crate::fork::{self, Mutex, PerProcess};
use crate::left;
use crate::name::FileName;
use crate::sqlite::{self, Vfs};
use crate::storage::Storage;
use crate::system::{Answer, SystemFile};
use bifolio::backing::DiskFile;
use bifolio::{DirectIo, Error, OpenOptions};
use std::collections::HashMap;
use std::ffi::c_int;
use std::fs::Metadata;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Device and inode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    device: u64,
    pub(crate) inode: u64,
}

impl Key {
    pub(crate) fn of(path: &Path) -> Option<Self> {
        std::fs::metadata(path).ok().as_ref().map(Self::of_metadata)
    }

    pub(crate) fn of_metadata(found: &Metadata) -> Self {
        Self { device: found.dev(), inode: found.ino() }
    }

    pub(crate) fn of_file(file: BorrowedFd<'_>) -> io::Result<Self> {
        let found = status(file)?;
        Ok(Self { device: found.st_dev, inode: found.st_ino })
    }
}

pub(crate) fn status(file: BorrowedFd<'_>) -> io::Result<libc::stat> {
    let mut found = MaybeUninit::zeroed();
    // SAFETY: an open file, and memory for the answer.
    if unsafe { libc::fstat(file.as_raw_fd(), found.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeros, which are valid numbers, or what the kernel wrote.
    Ok(unsafe { found.assume_init() })
}

/// First byte of the header in a [`Stamp`]: from the format versions to the count of free pages.
const STAMP_OFFSET: u64 = 18;
/// Age of a file, from which on its next change has another time, whatever clock ticks the kernel
/// has.
const STAMP_AGE_MIN: Duration = Duration::from_millis(20);

/// State of a file that changes whenever another process commits: its header, in which SQLite
/// counts commits, its length, and its times.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    header: [u8; 22],
    len: i64,
    /// Seconds and nanoseconds of the last change of the bytes, and of the inode.
    times: [(i64, i64); 2],
}

impl Stamp {
    fn is_old(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.times.iter().all(|(seconds, nanoseconds)| {
            let seconds = u64::try_from(*seconds).unwrap_or(0);
            let changed = Duration::new(seconds, u32::try_from(*nanoseconds).unwrap_or(0));
            now.saturating_sub(changed) > STAMP_AGE_MIN
        })
    }
}

/// Descriptors of a file, by the way of its transfers.
type Parked = HashMap<(Key, DirectIo), Vec<Descriptors>>;

/// Descriptors that could not be closed. Few: the next open of the same kind takes them.
static PARKED: PerProcess<Mutex<Parked>> = PerProcess::new();

/// The system's file, and that of the cache, which has the lock.
pub(crate) struct Descriptors {
    pub(crate) key: Key,
    direct: DirectIo,
    pub(crate) is_writable: bool,
    /// Closed first: the lock of the storage protects its close.
    pub(crate) system: SystemFile,
    /// Set unless it could not be opened.
    storage: Option<Arc<Storage>>,
    /// Only stays open as long as the others.
    _reader: Option<Reader>,
}

/// A descriptor of the file that cannot write, by which the cache finds the pages that it has kept.
pub(crate) type Reader = Arc<DiskFile>;

/// Reason why a file was not opened.
pub(crate) enum NotOpened {
    /// The path names another file by now.
    Moved,
    /// Code of the system's VFS.
    Code(c_int),
    Error(Error),
}

impl Descriptors {
    /// Opens a file, or takes what is parked of it.
    ///
    /// It is opened for writing even if the connection only reads: a later one may write, and the
    /// lock that protects a log needs it. Takes `reader`, which [`Self::open_reader`] has opened.
    ///
    /// # Safety
    /// `vfs` is registered.
    pub(crate) unsafe fn open(
        vfs: *mut Vfs,
        name: FileName,
        flags: c_int,
        direct: DirectIo,
        reader: Option<Reader>,
    ) -> Result<Self, NotOpened> {
        // SAFETY: the contract.
        match unsafe { Self::open_without(vfs, name, flags, direct) } {
            // Of what was parked, there is no other reader.
            Ok(mut found) => {
                found._reader = found._reader.take().or(reader);
                Ok(found)
            }
            Err(problem) => {
                left::close(reader.map(|reader| Box::new(reader) as _));
                Err(problem)
            }
        }
    }

    /// Opens a descriptor that cannot write, of a file that has no other one in this process.
    pub(crate) fn open_reader(path: &Path, direct: DirectIo) -> Option<Reader> {
        let key = Key::of(path)?;
        if PARKED.get().lock().get(&(key, direct)).is_some_and(|parked| !parked.is_empty()) {
            return None;
        }
        left::open(path, &OpenOptions::new().direct(direct)).ok().map(Arc::new)
    }

    /// # Safety
    /// As for [`Self::open`].
    unsafe fn open_without(
        vfs: *mut Vfs,
        name: FileName,
        flags: c_int,
        direct: DirectIo,
    ) -> Result<Self, NotOpened> {
        let path = name.path().to_owned();
        let parked = Key::of(&path).and_then(|key| Self::unpark(key, direct));
        let mut found = match parked {
            Some(found) => found,
            None => {
                let flags = flags & !sqlite::OPEN_READONLY | sqlite::OPEN_READWRITE;
                // SAFETY: the contract.
                let opened = unsafe { SystemFile::open(vfs, name, flags) };
                let (mut system, flags_found) = opened.map_err(NotOpened::Code)?;
                let key = Key::of(&path).filter(|_| !system.has_moved());
                let key = key.ok_or(NotOpened::Moved)?;
                let is_writable = flags_found & sqlite::OPEN_READONLY == 0;
                Self { key, direct, is_writable, system, storage: None, _reader: None }
            }
        };
        match found.open_storage(&path) {
            Ok(true) => Ok(found),
            other => {
                found.close(sqlite::LOCK_NONE);
                Err(other.map_or_else(NotOpened::Error, |_| NotOpened::Moved))
            }
        }
    }

    /// Opens the cache's file, unless it is. Returns `false` if the path names another file.
    fn open_storage(&mut self, path: &Path) -> Result<bool, Error> {
        if self.storage.is_none() {
            let options = OpenOptions::new().write(self.is_writable).direct(self.direct);
            let opened = fork::open_alone(|| left::open(path, &options).map(Storage::new))?;
            self.storage = Some(Arc::new(opened));
        }
        let found = Key::of_file(self.storage().as_fd());
        Ok(found.is_ok_and(|found| found == self.key))
    }

    pub(crate) fn storage(&self) -> &Arc<Storage> {
        self.storage.as_ref().expect("set by `open`")
    }

    pub(crate) fn lock(&self) -> FileLock<'_> {
        FileLock(self.storage().as_fd())
    }

    /// Closes the descriptors, whose lock has a level, or parks them. The cache has closed the
    /// file.
    pub(crate) fn close(self, level: c_int) {
        let parked: Vec<_> = PARKED.get().lock().drain().flat_map(|(_, found)| found).collect();
        let mut rest: Vec<_> =
            parked.into_iter().filter_map(|parked| parked.try_close(sqlite::LOCK_NONE)).collect();
        rest.extend(self.try_close(level));
        rest.into_iter().for_each(Self::park);
        left::close(None);
    }

    /// Closes the descriptors if no other user of the file has a lock; otherwise returns them, with
    /// their own lock released.
    fn try_close(mut self, level: c_int) -> Option<Self> {
        let Some(storage) = self.storage.take() else { return Some(self) };
        let lock = FileLock(storage.as_fd());
        let is_alone = match self.is_writable {
            true => level == sqlite::LOCK_EXCLUSIVE || lock.exclude().is_ok(),
            // Nothing keeps a reader from coming in now, but no writer of this process can.
            false => lock.is_contended() == Ok(false),
        };
        let storage = if is_alone { Arc::try_unwrap(storage) } else { Err(storage) };
        match storage {
            Ok(storage) => {
                // With the reader.
                drop(self);
                fork::close_alone(storage);
                None
            }
            // The cache may have kept the file, or others have locks.
            Err(storage) => {
                FileLock(storage.as_fd()).lower(sqlite::LOCK_NONE);
                storage.forget_failed_sync();
                self.storage = Some(storage);
                Some(self)
            }
        }
    }

    fn park(self) {
        let place = (self.key, self.direct);
        PARKED.get().lock().entry(place).or_default().push(self);
    }

    fn unpark(key: Key, direct: DirectIo) -> Option<Self> {
        PARKED.get().lock().get_mut(&(key, direct))?.pop()
    }

    /// Returns the stamp of the file.
    pub(crate) fn stamp(&mut self) -> Answer<Stamp> {
        let mut header = [0; 22];
        match self.system.read(&mut header, STAMP_OFFSET) {
            Ok(()) | Err(sqlite::IOERR_SHORT_READ) => {}
            Err(code) => return Err(code),
        }
        let found = status(self.storage().as_fd()).map_err(|_| sqlite::IOERR_READ)?;
        let times = [(found.st_mtime, found.st_mtime_nsec), (found.st_ctime, found.st_ctime_nsec)];
        Ok(Stamp { header, len: found.st_size, times })
    }

    /// Returns the stamp, by which a change from now on is recognized; `None` if the file has
    /// changed so lately that the next change could look the same.
    pub(crate) fn lasting_stamp(&mut self) -> Option<Stamp> {
        self.stamp().ok().filter(Stamp::is_old)
    }
}

//! [`BifolioBackend`]: the calls of redb, each one call of a [`File`].
//!
//! Called by redb, from all threads that use the database. `close` comes once, last; read
//! transactions may keep the backend alive after it, so it drops the file itself.

use std::ops::Bound;
use std::path::Path;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::{fmt, io};

use bifolio::{Cache, File, OpenOptions};
use redb::{BackendError, StorageBackend};

use crate::error::{BackendIoError, closed, from_cache};
use crate::locks::DatabaseLock;

/// Storage of a redb database in a [`File`] of a cache.
///
/// Pass it to [`redb::Builder::create_with_backend`].
pub struct BifolioBackend {
    /// `None` after `close`.
    file: RwLock<Option<File>>,
    /// Held from redb's open to its close.
    lock: Mutex<Option<DatabaseLock>>,
}

impl fmt::Debug for BifolioBackend {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.read().unwrap_or_else(PoisonError::into_inner);
        formatter.debug_struct("BifolioBackend").field("file", &*file).finish_non_exhaustive()
    }
}

impl BifolioBackend {
    /// Opens the database file at `path` in `cache`, or creates it and makes its name durable.
    ///
    /// The file is locked against other processes and other caches until the database is closed
    /// ([`OpenOptions::exclusive`]). Blocks for the file system.
    ///
    /// # Errors
    /// As [`Cache::open`]; of kind [`ResourceBusy`](io::ErrorKind::ResourceBusy) if another process
    /// or cache has locked the file. If the file is a database of this process in the same cache,
    /// this call succeeds and redb's open fails with
    /// [`DatabaseAlreadyOpen`](redb::DatabaseError::DatabaseAlreadyOpen).
    pub fn open(path: impl AsRef<Path>, cache: &Cache) -> io::Result<Self> {
        let path = path.as_ref();
        let options = OpenOptions::new().write(true).create(true).exclusive(true);
        let file = cache.open(path, &options)?;
        if file.len() == 0 {
            cache.sync_directory(directory_of(path))?;
        }
        Ok(Self::new(file))
    }

    /// Makes a backend of a file that the caller has opened for reading and writing: with other
    /// options, by descriptor, over storage of its own, or in memory. The file must be empty or
    /// hold a database.
    ///
    /// Open it with [`OpenOptions::exclusive`] where other processes may open it. A second database
    /// of this process on the same file is refused by redb's open, unless the file has no
    /// [identity](File::identity).
    pub fn new(file: File) -> Self {
        Self { file: RwLock::new(Some(file)), lock: Mutex::new(None) }
    }

    fn with_file<T>(
        &self,
        call: impl FnOnce(&File) -> bifolio::Result<T>,
    ) -> Result<T, BackendIoError> {
        let file: RwLockReadGuard<'_, _> = self.file.read().unwrap_or_else(PoisonError::into_inner);
        call(file.as_ref().ok_or_else(closed)?).map_err(from_cache)
    }

    /// Takes the lock on the whole file. Returns `false` if another database has it.
    fn try_lock(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        let is_whole = matches!(start, Bound::Unbounded | Bound::Included(0));
        if !is_whole || end != Bound::Unbounded {
            return Err(BackendError::Unsupported);
        }
        let identity = self.with_file(|file| Ok(file.identity()))?;
        let Some(identity) = identity else {
            return Err(BackendError::Unsupported);
        };
        let Some(lock) = DatabaseLock::try_new(identity) else {
            return Ok(false);
        };
        *self.lock.lock().unwrap_or_else(PoisonError::into_inner) = Some(lock);
        Ok(true)
    }

    fn unlock(&self) {
        *self.lock.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl StorageBackend for BifolioBackend {
    fn len(&self) -> Result<u64, BackendIoError> {
        self.with_file(|file| Ok(file.len()))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), BackendIoError> {
        self.with_file(|file| file.read_exact_at(out, offset))
    }

    fn set_len(&self, len: u64) -> Result<(), BackendIoError> {
        self.with_file(|file| file.set_len(len))
    }

    fn sync_data(&self) -> Result<(), BackendIoError> {
        self.with_file(File::sync_data)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), BackendIoError> {
        self.with_file(|file| file.write_all_at(data, offset))
    }

    /// Makes the file durable and drops it, with its locks. If it cannot be made durable, the error
    /// says so, and the cache keeps what was written, as [`File::close`] describes.
    fn close(&self) -> Result<(), BackendIoError> {
        let file = self.file.write().unwrap_or_else(PoisonError::into_inner).take();
        let closed = file.map_or(Ok(()), File::close);
        self.unlock();
        closed.map_err(from_cache)
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.try_lock(start, end)
    }

    /// Read-only databases take this lock; it excludes all other databases too, because each
    /// backend is opened for writing.
    fn try_lock_shared_range(
        &self,
        start: Bound<u64>,
        end: Bound<u64>,
    ) -> Result<bool, BackendError> {
        self.try_lock(start, end)
    }

    fn unlock_range(&self, _start: Bound<u64>, _end: Bound<u64>) -> Result<(), BackendError> {
        self.unlock();
        Ok(())
    }
}

/// The directory that has the name of the file at `path`.
fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

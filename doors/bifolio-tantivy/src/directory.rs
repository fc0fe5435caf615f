//! [`BifolioDirectory`]: the calls of tantivy's [`Directory`].
//!
//! Segment files are written once, then only read: they go through the cache. The few small files
//! that are replaced as a whole (`meta.json`, `.managed.json`) and lock files do not.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, Mutex, PoisonError};

use bifolio::{Cache, OpenOptions};
use tantivy::Directory;
use tantivy::directory::error::{
    DeleteError, LockError, OpenDirectoryError, OpenReadError, OpenWriteError,
};
use tantivy::directory::{DirectoryLock, FileHandle, Lock, WatchCallback, WatchHandle, WritePtr};

use crate::slices::Slices;
use crate::watch::Watcher;
use crate::writer::SegmentWriter;

/// The file whose replacement is a commit.
const META_FILE: &str = "meta.json";

/// A folder with an index, read and written through a [`Cache`].
///
/// Clones are the same directory. The caches of several processes may have the same index open; at
/// most one of them has an `IndexWriter`.
#[derive(Clone, Debug)]
pub struct BifolioDirectory {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    cache: Cache,
    watcher: Watcher,
    /// Held while a file is replaced: its temporary name is the same each time.
    replacing: Mutex<()>,
}

impl BifolioDirectory {
    /// Opens the folder at `path`, which must exist. Does not read the index.
    ///
    /// # Errors
    /// `path` does not exist, is no folder, or cannot be resolved.
    pub fn open(path: impl AsRef<Path>, cache: &Cache) -> Result<Self, OpenDirectoryError> {
        let path = path.as_ref();
        let root = path.canonicalize().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => OpenDirectoryError::DoesNotExist(path.to_owned()),
            _ => OpenDirectoryError::wrap_io_error(error, path.to_owned()),
        })?;
        if !root.is_dir() {
            return Err(OpenDirectoryError::NotADirectory(path.to_owned()));
        }
        let watcher = Watcher::new(root.join(META_FILE));
        let inner = Inner { root, cache: cache.clone(), watcher, replacing: Mutex::new(()) };
        Ok(Self { inner: Arc::new(inner) })
    }

    fn full_path(&self, path: &Path) -> PathBuf {
        self.inner.root.join(path)
    }
}

impl Directory for BifolioDirectory {
    fn get_file_handle(&self, path: &Path) -> Result<Arc<dyn FileHandle>, OpenReadError> {
        let slices = Slices::open(&self.inner.cache, &self.full_path(path));
        match slices {
            Ok(slices) => Ok(Arc::new(slices)),
            Err(error) => Err(open_read_error(error, path)),
        }
    }

    fn delete(&self, path: &Path) -> Result<(), DeleteError> {
        fs::remove_file(self.full_path(path)).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => DeleteError::FileDoesNotExist(path.to_owned()),
            _ => DeleteError::IoError { io_error: Arc::new(error), filepath: path.to_owned() },
        })
    }

    fn exists(&self, path: &Path) -> Result<bool, OpenReadError> {
        let exists = self.full_path(path).try_exists();
        exists.map_err(|error| OpenReadError::wrap_io_error(error, path.to_owned()))
    }

    fn open_write(&self, path: &Path) -> Result<WritePtr, OpenWriteError> {
        let options = OpenOptions::new().write(true).create_new(true);
        let file = self.inner.cache.open(self.full_path(path), &options);
        let file = file.map_err(|error| {
            let error = io::Error::from(error);
            match error.kind() {
                io::ErrorKind::AlreadyExists => OpenWriteError::FileAlreadyExists(path.to_owned()),
                _ => OpenWriteError::wrap_io_error(error, path.to_owned()),
            }
        })?;
        Ok(WritePtr::new(Box::new(SegmentWriter::new(file))))
    }

    fn atomic_read(&self, path: &Path) -> Result<Vec<u8>, OpenReadError> {
        fs::read(self.full_path(path)).map_err(|error| open_read_error(error, path))
    }

    fn atomic_write(&self, path: &Path, data: &[u8]) -> io::Result<()> {
        let target = self.full_path(path);
        let mut name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        name.push(".new");
        let temporary = target.with_file_name(name);
        let _replacing = self.inner.replacing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut file = File::create(&temporary)?;
        file.write_all(data)?;
        file.sync_data()?;
        fs::rename(&temporary, &target)?;
        if path == Path::new(META_FILE) {
            self.inner.watcher.look();
        }
        Ok(())
    }

    fn sync_directory(&self) -> io::Result<()> {
        Ok(self.inner.cache.sync_directory(&self.inner.root)?)
    }

    /// Locks with `flock`, so a lock ends with its process.
    fn acquire_lock(&self, lock: &Lock) -> Result<DirectoryLock, LockError> {
        let path = self.full_path(&lock.filepath);
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(LockError::wrap_io_error)?;
        if lock.is_blocking {
            file.lock().map_err(LockError::wrap_io_error)?;
        } else {
            file.try_lock().map_err(|error| match error {
                fs::TryLockError::WouldBlock => LockError::LockBusy,
                fs::TryLockError::Error(error) => LockError::wrap_io_error(error),
            })?;
        }
        Ok(DirectoryLock::from(Box::new(LockFile { file, process: process::id() })))
    }

    /// Calls `callback` after each commit: at once if it is made through this directory, within
    /// half a second if another process makes it.
    fn watch(&self, callback: WatchCallback) -> tantivy::Result<WatchHandle> {
        Ok(self.inner.watcher.subscribe(callback)?)
    }
}

/// A file that this process has locked.
struct LockFile {
    file: File,
    process: u32,
}

impl Drop for LockFile {
    /// Unlocks the file. Closing it would leave it locked while another thread starts a program,
    /// which has copies of all descriptors for a moment. The lock of a parent process stays.
    fn drop(&mut self) {
        if self.process == process::id() {
            let _ = self.file.unlock();
        }
    }
}

fn open_read_error(error: io::Error, path: &Path) -> OpenReadError {
    match error.kind() {
        io::ErrorKind::NotFound => OpenReadError::FileDoesNotExist(path.to_owned()),
        _ => OpenReadError::wrap_io_error(error, path.to_owned()),
    }
}

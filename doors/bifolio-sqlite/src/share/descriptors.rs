//! The descriptors of a connection, and their close.
//!
//! The locks are those of SQLite's own VFS, on the same bytes of the database and of its index, but
//! of an open file description ([`FileLock`]) instead of the process. Other processes see no
//! difference. Another copy of SQLite in this process, which POSIX locks would let in, is kept out,
//! and drops only its own locks when it closes the files.
//!
//! To close a descriptor would drop the POSIX locks that another copy has. So none is closed while
//! the database is open in this process: connections that end leave theirs to those that begin. The
//! last one closes them under the exclusive lock of the file, which shows that nothing else has a
//! lock (of a log neither, since its users have `SHARED`). If it cannot be had, they are parked,
//! and each open and close tries again.
//!
//! # Safety
//! Opens files of a VFS that is registered.
#![allow(unsafe_code)]

use super::index::Index;
use super::reads::Reads;
use crate::descriptors::Key;
use crate::file_lock::FileLock;
use crate::fork::{self, Mutex, PerProcess};
use crate::left;
use crate::name::FileName;
use crate::settings;
use crate::sqlite::{self, Api, Vfs};
use crate::system::{Answer, SystemFile};
use bifolio::{DirectIo, OpenOptions};
use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

/// Descriptors that could not be closed. Few: the next open of the file takes them.
static PARKED: PerProcess<Mutex<Vec<Parked>>> = PerProcess::new();

/// Descriptors of a connection, which another one can use after it.
pub(super) struct Descriptors {
    name: FileName,
    flags: c_int,
    /// Flags that SQLite is to be told.
    pub(super) flags_found: c_int,
    pub(super) system: SystemFile,
    file: File,
}

/// Descriptor of the system's VFS whose connection could have no other one, for its locks.
struct Incomplete {
    name: FileName,
    flags: c_int,
    flags_found: c_int,
    system: SystemFile,
}

impl Incomplete {
    /// Opens the descriptor with the locks. On failure returns `self` with the reason.
    fn complete(self) -> Result<Descriptors, (Self, io::Error)> {
        let is_writable = self.flags_found & sqlite::OPEN_READONLY == 0;
        let file = match open_alone(self.name.path(), is_writable) {
            Ok(file) => file,
            Err(error) => return Err((self, error)),
        };
        let Self { name, flags, flags_found, system } = self;
        Ok(Descriptors { name, flags, flags_found, system, file })
    }
}

impl Descriptors {
    /// Returns the key of the file; `None` if its path names another one by now.
    pub(super) fn key(&mut self) -> Option<Key> {
        let key = Key::of_file(self.file.as_fd()).ok();
        key.filter(|key| Key::of(self.name.path()) == Some(*key) && !self.system.has_moved())
    }

    pub(super) fn lock(&self) -> FileLock<'_> {
        FileLock(self.file.as_fd())
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Returns `false` if the program asked for an index of the log that is not written.
    pub(super) fn may_write_index(&self) -> bool {
        let is_asked = |(key, value)| key == "readonly_shm" && settings::is_true(value);
        !self.name.parameters().any(is_asked)
    }

    /// Opens again what a child has not inherited: the descriptor with the lock. `None` if the file
    /// is not what it was: what is left of it stays open then, as all that is inherited.
    pub(super) fn adopt(mut self) -> Option<Self> {
        let opened = open_alone(self.name.path(), self.is_writable());
        let is_open = opened.is_ok();
        if let Ok(file) = opened {
            mem::forget(mem::replace(&mut self.file, file));
        }
        if is_open && self.key().is_some() {
            return Some(self);
        }
        // Descriptors that the fork has closed must not be closed again, and a close of the others
        // could drop the locks of another copy of SQLite.
        mem::forget(self);
        None
    }

    fn is_writable(&self) -> bool {
        self.flags_found & sqlite::OPEN_READONLY == 0
    }

    /// Closes the descriptors; the one with the lock of the database last.
    fn close(self) {
        drop(self.system);
        fork::close_alone(self.file);
    }
}

/// Opens a file whose locks no child of a fork keeps.
fn open_alone(path: &Path, is_writable: bool) -> io::Result<File> {
    fork::open_alone(|| File::options().read(true).write(is_writable).open(path))
}

/// The file of the cache, the index, and descriptors that no connection uses.
#[derive(Default)]
pub(super) struct Parked {
    /// That of all; `None` before the first was opened.
    key: Option<Key>,
    storage: Option<Arc<Reads>>,
    /// One for each path by which the file was opened.
    indexes: Vec<Arc<Index>>,
    spare: Vec<Descriptors>,
    /// Opened when the process could have no further descriptor: at most one for each name and
    /// flags, since an open takes it.
    incomplete: Vec<Incomplete>,
}

impl Parked {
    pub(super) fn of(key: Option<Key>) -> Self {
        Self { key, ..Self::default() }
    }

    /// Takes what is parked of a file.
    pub(super) fn take(key: Key) -> Option<Self> {
        let mut parked = PARKED.get().lock();
        let at = parked.iter().position(|parked| parked.key == Some(key))?;
        Some(parked.swap_remove(at))
    }

    pub(super) fn key(&self) -> Option<Key> {
        self.key
    }

    /// Opens a database for a connection, or takes what another one with the same name and flags
    /// left. Logs a failure that the system's VFS does not.
    ///
    /// # Safety
    /// `vfs` is registered.
    pub(super) unsafe fn open(
        &mut self,
        api: Api,
        vfs: *mut Vfs,
        name: &impl Fn() -> FileName,
        flags: c_int,
    ) -> Answer<Descriptors> {
        let given = name();
        let serves = |spare: &Descriptors| spare.flags == flags && spare.name == given;
        let lacks = |one: &Incomplete| one.flags == flags && one.name == given;
        let mut own = match self.spare.iter().position(serves) {
            Some(at) => self.spare.swap_remove(at),
            None => {
                let incomplete = match self.incomplete.iter().position(lacks) {
                    Some(at) => self.incomplete.swap_remove(at),
                    None => {
                        // SAFETY: the contract.
                        let (system, flags_found) =
                            unsafe { SystemFile::open(vfs, name(), flags) }?;
                        Incomplete { name: given, flags, flags_found, system }
                    }
                };
                // A file that was created is parked under its key, too.
                self.key = self.key.or_else(|| Key::of(incomplete.name.path()));
                incomplete.complete().map_err(|(incomplete, error)| {
                    let path = incomplete.name.path().display();
                    api.log(sqlite::CANTOPEN, &format!("{path} cannot be opened again: {error}"));
                    self.incomplete.push(incomplete);
                    sqlite::CANTOPEN
                })?
            }
        };
        let key = own.key();
        if key.is_none() || self.key.is_some_and(|known| key != Some(known)) {
            // The path was replaced.
            Self { spare: vec![own], ..Self::default() }.close();
            return Err(sqlite::CANTOPEN);
        }
        self.key = key;
        Ok(own)
    }

    /// Returns the file of the cache, which is opened unless it is. The error says why not.
    pub(super) fn open_storage(
        &mut self,
        path: &Path,
        direct: DirectIo,
    ) -> Result<Arc<Reads>, String> {
        let storage = match &self.storage {
            Some(storage) => storage,
            None => {
                // The kernel has pages that the system's VFS has written, of any process. It writes
                // those that are dirty to the device before a direct read of them. With reads
                // through its pages, a control group would hold the database twice.
                let options = OpenOptions::new().direct(direct);
                let opened = left::open(path, &options).map_err(|error| error.to_string())?;
                self.storage.insert(Arc::new(Reads::new(opened)))
            }
        };
        let is_it = storage.key().is_some() && storage.key() == self.key;
        is_it
            .then(|| Arc::clone(storage))
            .ok_or_else(|| format!("{} was replaced while it was opened", path.display()))
    }

    /// Returns the index of the log, which is opened by the first connection that maps it.
    pub(super) fn index(&mut self, path: &Path) -> Arc<Index> {
        if let Some(index) = self.indexes.iter().find(|index| index.is_of(path)) {
            return Arc::clone(index);
        }
        let index = Arc::new(Index::new(path));
        self.indexes.push(Arc::clone(&index));
        index
    }

    /// Keeps those of a connection that has ended, which has no lock.
    pub(super) fn keep(&mut self, own: Descriptors) {
        self.spare.push(own);
    }

    /// Closes all, or parks them. The cache has closed the file. Tries those that were parked, too.
    pub(super) fn close(self) {
        left::close(None);
        let mut parked = PARKED.get().lock();
        parked.push(self);
        let all = mem::take(&mut *parked);
        parked.extend(all.into_iter().filter_map(Self::try_close));
    }

    fn try_close(mut self) -> Option<Self> {
        // One that can lock others out is closed last.
        self.spare.sort_by_key(Descriptors::is_writable);
        let Some(last) = self.spare.pop() else {
            let is_free =
                |storage: &Arc<Reads>| FileLock(storage.as_fd()).is_contended() == Ok(false);
            let may_close = self.incomplete.is_empty() && self.storage.as_ref().is_none_or(is_free);
            return (!may_close).then_some(self);
        };
        let is_alone = match last.is_writable() {
            true => last.lock().own_alone(),
            false => last.lock().is_contended() == Ok(false),
        };
        if !is_alone {
            self.spare.push(last);
            return Some(self);
        }
        self.spare.into_iter().for_each(Descriptors::close);
        self.indexes.iter().for_each(|index| index.close());
        drop((self.storage, self.incomplete));
        last.close();
        None
    }
}

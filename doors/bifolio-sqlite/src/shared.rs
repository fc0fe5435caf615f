//! A database file that is open in this process: one for all connections to it.
//!
//! ```text
//!  open          descriptors only: SQLite reads the header before it locks
//!    | first lock of a connection                              ^
//!  locked        toward the outside, and the file in its cache:   | last lock released, and no
//!    |             exclusive if a connection may write, or the    | connection may write: pages
//!    |             database has a log;                            | stay if only readers had them
//!    |             shared if none may: it is raised for           |
//!    |             the first that may                          ---'
//!    | last connection closes
//!  closed        the file in the cache, made durable; the descriptors, with their lock; the cache,
//!                if it is only this database's
//! ```
//!
//! Found by device and inode ([`REGISTRY`]). A child after a fork finds none of its parent's.
//!
//! Pages that stay in the cache without a lock are used again if the file has the same [`Stamp`]
//! then, or if the cache has seen no change since the first of them was read (`State::kept`), also
//! those of a database that was closed. No connection has a handle of the file meanwhile, so that
//! closing those of this module drops them. In a transaction, the lock excludes what the cache may
//! miss: a write that is in progress.
//!
//! A writer that finds readers of other processes keeps new ones out and waits for the others, as
//! with SQLite's own VFS, but for a bounded time ([`PATIENCE`]): its caller may not come again.
//!
//! The lock of the registry is held for look-ups only. The lock of a database is held while it
//! opens or closes its cache, so further connections wait for that. The two are never held
//! together, and `syncing` is held without either.
//!
//! # Safety
//! The regions of the index are memory that SQLite's connections access as they agreed by the slot
//! locks. They are freed after the last connection has let go.
#![allow(unsafe_code)]

use crate::access::Target;
use crate::descriptors::{Descriptors, Key, NotOpened, Reader, Stamp};
use crate::file_lock::Denied;
use crate::fork::{Mutex, PerProcess};
use crate::index::Index;
use crate::locks::{HeldSlots, Locks, SlotLocks};
use crate::name::FileName;
use crate::refused::{OpenFailure, Refusal};
use crate::settings::Settings;
use crate::sqlite::{self, Api, Vfs};
use crate::storage::Storage;
use crate::system::{Answer, SystemFile};
use bifolio::{Cache, Error, ErrorKind};
use std::collections::HashMap;
use std::ffi::{OsString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Databases that are open in this process.
static REGISTRY: PerProcess<Mutex<HashMap<Key, Arc<Shared>>>> = PerProcess::new();

/// How often a file may be replaced while it is being opened before the open fails.
const OPEN_ATTEMPTS_MAX: u32 = 5;

/// Offset in the header of the format versions for writing and reading; 2 stands for a log.
const VERSIONS_OFFSET: u64 = 18;

/// Time for which a writer waits for readers of other processes.
const PATIENCE: Duration = Duration::from_millis(500);
/// Interval at which it tries.
const RETRY: Duration = Duration::from_millis(1);

/// A database file, and what its connections share.
pub(crate) struct Shared {
    /// That of the process, or its own.
    pub(crate) cache: Cache,
    api: Api,
    key: Key,
    /// Path by which it was opened first.
    path: PathBuf,
    settings: Settings,
    is_writable: bool,
    storage: Weak<Storage>,
    pub(crate) sector_size: c_int,
    pub(crate) device_characteristics: c_int,
    /// Set if something was written or cut since the last write-back began.
    is_unwritten: AtomicBool,
    /// Set if something was written or cut since the last sync began.
    is_unsynced: AtomicBool,
    /// Held by a write-back or a sync.
    syncing: Mutex<()>,
    state: Mutex<State>,
}

struct State {
    /// Connections that are open; none comes after the last has closed.
    connections: usize,
    /// Those that may write.
    writers: usize,
    /// Open until the last connection closes.
    descriptors: Option<Descriptors>,
    /// Level of the lock toward the outside: `NONE`, `SHARED` or `EXCLUSIVE`.
    level: c_int,
    /// Connections that wait for readers of other processes.
    waiting: usize,
    /// A handle that cannot write, if the file has one: while it is there and the file is
    /// unchanged ([`bifolio::File::is_unchanged`]), all pages are what the file has.
    kept: Option<bifolio::File>,
    /// Open while `level` is not `NONE`, and while `stamp` is set.
    cached: Option<bifolio::File>,
    /// Stamp of the file when the last lock was released, if its pages are still in the cache.
    stamp: Option<Stamp>,
    locks: Locks,
    index: Index,
}

/// A database, and the flags that SQLite is to be told of the connection.
pub(crate) type Joined = (Arc<Shared>, c_int);

/// Returns `true` if a database is open in this process, and kept from others.
pub(crate) fn is_open(key: Key) -> bool {
    REGISTRY.get().lock().contains_key(&key)
}

impl Shared {
    /// Opens a database for a connection, or joins those that have it open.
    ///
    /// # Safety
    /// `system` is registered.
    pub(crate) unsafe fn open(
        api: Api,
        system: *mut Vfs,
        name: impl Fn() -> FileName,
        flags: c_int,
        settings: &Settings,
    ) -> Result<Joined, OpenFailure> {
        for _ in 0..OPEN_ATTEMPTS_MAX {
            let joined = Key::of(name().path()).and_then(|key| Self::join(key, flags));
            let shared = match joined {
                Some(shared) => shared,
                // SAFETY: the contract.
                None => match unsafe { Self::create(api, system, name(), flags, settings) }? {
                    Some(shared) => shared,
                    None => continue,
                },
            };
            let checked = shared.settings.check_joined_with(settings).map_err(|problem| {
                let text = format!("{}: {problem}", shared.path.display());
                Refusal { code: sqlite::MISUSE, text }
            });
            if let Err(refusal) = checked.and_then(|()| shared.check_log()) {
                // What its close reports is in the log.
                let _ = shared.leave(may_write(flags, shared.is_writable));
                return Err(OpenFailure::Refused(refusal));
            }
            let mut flags = flags;
            if !may_write(flags, shared.is_writable) {
                flags &= !(sqlite::OPEN_READWRITE | sqlite::OPEN_CREATE);
                flags |= sqlite::OPEN_READONLY;
            }
            return Ok((shared, flags));
        }
        Err(OpenFailure::Code(sqlite::CANTOPEN))
    }

    /// Joins the connections that have the file open.
    fn join(key: Key, flags: c_int) -> Option<Arc<Self>> {
        let shared = Arc::clone(REGISTRY.get().lock().get(&key)?);
        let mut state = shared.state.lock();
        if state.connections == 0 {
            drop(state);
            shared.forget();
            return None;
        }
        state.connections += 1;
        state.writers += usize::from(may_write(flags, shared.is_writable));
        drop(state);
        Some(shared)
    }

    /// Opens the file; `None` if another thread was faster, or the path was changed.
    ///
    /// # Safety
    /// `system` is registered.
    unsafe fn create(
        api: Api,
        system: *mut Vfs,
        name: FileName,
        flags: c_int,
        settings: &Settings,
    ) -> Result<Option<Arc<Self>>, OpenFailure> {
        let path = name.path().to_owned();
        let cache = settings.cache();
        let cache =
            cache.map_err(|text| OpenFailure::Refused(Refusal { code: sqlite::CANTOPEN, text }))?;
        // Before any descriptor that can write: with one, the cache finds no pages again.
        let reader = match settings.has_own_cache() {
            true => None,
            false => Descriptors::open_reader(&path, settings.direct()),
        };
        let read = |reader: Reader| cache.open_backing(reader, &settings.options()).ok();
        let kept = reader.clone().and_then(read);
        // SAFETY: the contract.
        let opened = unsafe { Descriptors::open(system, name, flags, settings.direct(), reader) };
        let mut descriptors = match opened {
            Ok(descriptors) => descriptors,
            Err(NotOpened::Moved) => return Ok(None),
            Err(NotOpened::Code(code)) => return Err(OpenFailure::Code(code)),
            Err(NotOpened::Error(error)) => {
                api.log(sqlite::CANTOPEN, &error.to_string());
                return Err(OpenFailure::Code(sqlite::CANTOPEN));
            }
        };
        let key = descriptors.key;
        let mut registry = REGISTRY.get().lock();
        if registry.contains_key(&key) {
            drop((registry, kept));
            descriptors.close(sqlite::LOCK_NONE);
            return Ok(None);
        }
        let shared = Arc::new(Self {
            cache,
            api,
            key,
            path,
            settings: settings.clone(),
            is_writable: descriptors.is_writable,
            storage: Arc::downgrade(descriptors.storage()),
            sector_size: descriptors.system.sector_size(),
            device_characteristics: descriptors.system.device_characteristics(),
            is_unwritten: AtomicBool::new(false),
            is_unsynced: AtomicBool::new(false),
            syncing: Mutex::new(()),
            state: Mutex::new(State::new(descriptors, kept, flags)),
        });
        registry.insert(key, Arc::clone(&shared));
        Ok(Some(shared))
    }

    /// Removes the database from the registry.
    fn forget(&self) {
        let mut registry = REGISTRY.get().lock();
        if registry.get(&self.key).is_some_and(|found| ptr::eq(&**found, self)) {
            registry.remove(&self.key);
        }
    }

    /// Ends a connection, which holds no locks; `may_write` as when it joined. The last one closes
    /// the file.
    pub(crate) fn leave(&self, may_write: bool) -> Answer {
        let mut state = self.state.lock();
        state.connections -= 1;
        state.writers -= usize::from(may_write);
        let closed = if state.connections > 0 {
            state.release_if_unused()
        } else {
            state.kept = None;
            let closed = state.cached.take().map_or(Ok(()), close_cached);
            let level = std::mem::replace(&mut state.level, sqlite::LOCK_NONE);
            if let Some(descriptors) = state.descriptors.take() {
                descriptors.close(level);
            }
            drop(state);
            self.forget();
            closed
        };
        closed.map_err(|error| self.report(&error, sqlite::IOERR_CLOSE).0)
    }

    /// Reports an error of the cache to the log. Returns SQLite's code for it, and its `errno`.
    pub(crate) fn report(&self, error: &Error, code: c_int) -> (c_int, c_int) {
        let errno = error.raw_os_error().unwrap_or(0);
        let code = match error.kind() {
            _ if errno == libc::ENOSPC || errno == libc::EDQUOT => sqlite::FULL,
            ErrorKind::Memory => sqlite::NOMEM,
            _ => code,
        };
        self.api.log(code, &error.to_string());
        (code, errno)
    }

    /// Refuses a database with a log that cannot be locked against writers.
    fn check_log(&self) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        let has_log = !self.is_writable && state.has_log(&self.path).unwrap_or(false);
        if has_log { Err(self.log_refusal()) } else { Ok(()) }
    }

    fn log_refusal(&self) -> Refusal {
        let text = format!(
            "{}: the database is in WAL mode and its file cannot be written, so other processes \
             cannot be kept from changing it: allow writing (mode=ro is enough then), leave WAL \
             mode with PRAGMA journal_mode=DELETE, or open it with vfs=unix",
            self.path.display()
        );
        Refusal { code: sqlite::CANTOPEN, text }
    }

    /// Raises the lock `own` of a connection, and that toward the outside as far as that needs it.
    pub(crate) fn lock(&self, own: &mut c_int, wanted: c_int, may_write: bool) -> Answer {
        let mut since: Option<Instant> = None;
        loop {
            let mut state = self.state.lock();
            let denied = match self.acquire(&mut state, may_write) {
                Ok(()) => {
                    state.waiting -= usize::from(since.is_some());
                    return state.locks.lock(own, wanted).map_err(|_| sqlite::BUSY);
                }
                Err(denied) => denied,
            };
            let is_patient = since.is_none_or(|since| since.elapsed() < PATIENCE);
            // Connections to a log keep their lock until they close.
            let may_end = denied == Denied::Readers && state.has_log(&self.path) == Ok(false);
            if !may_end || !is_patient {
                state.waiting -= usize::from(since.is_some());
                if state.waiting == 0 {
                    let level = state.level;
                    state.descriptors().lock().lower(level);
                }
                return Err(denied.code());
            }
            state.waiting += usize::from(since.is_none());
            since.get_or_insert_with(Instant::now);
            drop(state);
            thread::sleep(RETRY);
        }
    }

    /// Raises the lock toward the outside, and opens the file in a cache. What was locked before a
    /// failure stays locked.
    fn acquire(&self, state: &mut State, may_write: bool) -> Result<(), Denied> {
        let is_shared = state.level == sqlite::LOCK_SHARED;
        if state.level == sqlite::LOCK_EXCLUSIVE || is_shared && !may_write {
            return Ok(());
        }
        let level = self.lock_file(state, may_write)?;
        if !is_shared {
            self.open_cached(state)?;
        }
        state.level = level;
        Ok(())
    }

    fn lock_file(&self, state: &mut State, may_write: bool) -> Result<c_int, Denied> {
        if !may_write {
            state.descriptors().lock().share()?;
            let has_log = state.has_log(&self.path)?;
            if has_log && !self.is_writable {
                let Refusal { code, text } = self.log_refusal();
                self.api.log(code, &text);
                return Err(code.into());
            }
            if !has_log {
                return Ok(sqlite::LOCK_SHARED);
            }
        }
        state.descriptors().lock().exclude()?;
        Ok(sqlite::LOCK_EXCLUSIVE)
    }

    /// Opens the file in a cache; with the pages that it has there if it has not changed since the
    /// last lock was released, or since the first of them was read.
    fn open_cached(&self, state: &mut State) -> Answer {
        let stamp = state.stamp.take();
        if stamp.is_some_and(|stamp| state.descriptors().stamp() == Ok(stamp)) {
            return Ok(());
        }
        state.cached = None;
        state.kept.take_if(|kept| !kept.is_unchanged());
        state.cached = Some(self.open_file(state)?);
        Ok(())
    }

    fn open_file(&self, state: &mut State) -> Answer<bifolio::File> {
        let storage = Arc::clone(state.descriptors().storage());
        let options = self.settings.options().write(self.is_writable);
        let opened = self.cache.open_backing(storage, &options);
        opened.map_err(|error| self.report(&error, sqlite::CANTOPEN).0)
    }

    /// Returns another handle of the file in the cache.
    pub(crate) fn open_handle(&self) -> Answer<bifolio::File> {
        self.open_file(&mut self.state.lock())
    }

    /// Lowers the lock `own` of a connection; that toward the outside if no connection needs it.
    pub(crate) fn unlock(&self, own: &mut c_int, wanted: c_int) {
        let mut state = self.state.lock();
        state.locks.unlock(own, wanted);
        if let Err(error) = state.release_if_unused() {
            self.report(&error, sqlite::IOERR_UNLOCK);
        }
    }

    /// Returns `true` if a connection of any process is about to write.
    pub(crate) fn is_reserved(&self) -> Answer<bool> {
        let mut state = self.state.lock();
        if state.locks.is_reserved() {
            return Ok(true);
        }
        // Beside a shared lock of this one, another process may hold RESERVED.
        let is_alone = state.level == sqlite::LOCK_EXCLUSIVE;
        if is_alone { Ok(false) } else { state.descriptors().lock().is_reserved() }
    }

    /// Reads bytes without a lock from pages that are what the file has. Returns `false` if that is
    /// not known.
    pub(crate) fn read_kept(&self, buffer: &mut [u8], position: u64) -> bool {
        let state = self.state.lock();
        let is_kept = |kept: &&bifolio::File| {
            state.level == sqlite::LOCK_NONE
                && position.saturating_add(buffer.len() as u64) <= kept.len()
                && kept.is_unchanged()
        };
        let kept = state.kept.as_ref().filter(is_kept);
        kept.is_some_and(|kept| kept.read_exact_at(buffer, position).is_ok())
    }

    /// Calls `call` with the file in the cache or, before the first lock of any connection, with
    /// the system's. No connection can open the cache, or release its lock, meanwhile.
    pub(crate) fn access<T>(&self, call: impl FnOnce(Target<'_>) -> T) -> T {
        let mut state = self.state.lock();
        if state.level == sqlite::LOCK_NONE {
            return call(Target::System(&mut state.descriptors().system));
        }
        call(Target::Cache(state.cached.as_ref().expect("open while it is locked")))
    }

    /// Calls `access` with the system's file.
    pub(crate) fn with_system<T>(&self, access: impl FnOnce(&mut SystemFile) -> T) -> T {
        access(&mut self.state.lock().descriptors().system)
    }

    /// Returns `true` if `path` names another file by now, or none.
    pub(crate) fn is_elsewhere_than(&self, path: &Path) -> bool {
        Key::of(path).is_none_or(|found| found.inode != self.key.inode)
    }

    /// Notes that the file will differ from the storage.
    pub(crate) fn note_write(&self) {
        // Relaxed: the locks of the database order a write and the call that covers it.
        for is_behind in [&self.is_unwritten, &self.is_unsynced] {
            if !is_behind.load(Ordering::Relaxed) {
                is_behind.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Writes everything to the storage that was written before the call: it survives the process.
    /// Without a sync that follows, it does not wait for the device.
    pub(crate) fn write_back(&self, file: &bifolio::File, is_followed: bool) -> Result<(), Error> {
        let write = || file.write_back(0..file.len());
        let storage = self.storage.upgrade().filter(|_| !is_followed);
        self.catch_up(&self.is_unwritten, || match &storage {
            Some(storage) => storage.without_wait(write),
            None => write(),
        })
    }

    /// Makes everything durable that was written before the call.
    pub(crate) fn make_durable(&self, file: &bifolio::File) -> Result<(), Error> {
        self.catch_up(&self.is_unsynced, || file.sync_data())
    }

    fn catch_up(
        &self,
        is_behind: &AtomicBool,
        call: impl Fn() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let _syncing = self.syncing.lock();
        // Relaxed: as in `note_write`.
        if !is_behind.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        // A call also fails for an earlier write-out, though its pages were written or cut since:
        // SQLite cuts what it rolls back on a full disk. The second one fails only for what is
        // still missing on the storage.
        let done = call().or_else(|_| call());
        if done.is_err() {
            // Relaxed: as in `note_write`.
            is_behind.store(true, Ordering::Relaxed);
        }
        done
    }

    /// Returns a region of the index; null if it does not exist and is not to be made. `is_mapped`
    /// tells if the connection has mapped one before.
    pub(crate) fn map_index(
        &self,
        is_mapped: bool,
        region: usize,
        bytes: usize,
        extend: bool,
    ) -> Answer<*mut c_void> {
        let mut state = self.lock_index()?;
        if !is_mapped {
            state.index.users += 1;
        }
        Ok(state.index.region(region, bytes, extend))
    }

    /// Fails without the exclusive lock: other processes could change the log unseen.
    fn lock_index(&self) -> Answer<MutexGuard<'_, State>> {
        let state = self.state.lock();
        if state.level == sqlite::LOCK_EXCLUSIVE {
            return Ok(state);
        }
        let text = format!("{}: a log appeared while it was read", self.path.display());
        self.api.log(sqlite::CANTOPEN, &text);
        Err(sqlite::CANTOPEN)
    }

    /// Changes the locks of the index.
    pub(crate) fn with_slots<T>(&self, change: impl FnOnce(&mut SlotLocks) -> T) -> T {
        change(&mut self.state.lock().index.slots)
    }

    /// Ends the use of the index by a connection. The last one frees it: the next connection that
    /// maps it finds zeros, and recovers the index from the log.
    pub(crate) fn unmap_index(&self, own: &mut HeldSlots) {
        let mut state = self.state.lock();
        state.index.slots.unlock_all(own);
        state.index.users -= 1;
        if state.index.users == 0 {
            state.index.clear();
        }
    }
}

/// Makes a file durable and closes it, with its descriptors. What cannot be written is discarded:
/// in the cache of the process it would be written later, over what others have changed once the
/// system's lock is released. Nothing that was promised is lost: see the table of the crate.
fn close_cached(file: bifolio::File) -> Result<(), Error> {
    let last = file.clone();
    let closed = file.close();
    if closed.is_err() {
        // Fails only if the storage does not tell its length: the changes are gone all the same.
        let _ = last.discard_dirty();
    }
    closed
}

/// Returns `true` if a connection with these flags may write to a file.
fn may_write(flags: c_int, is_writable: bool) -> bool {
    is_writable && flags & sqlite::OPEN_READONLY == 0
}

impl State {
    /// The state of a file that a connection with `flags` opens.
    fn new(descriptors: Descriptors, kept: Option<bifolio::File>, flags: c_int) -> Self {
        Self {
            connections: 1,
            writers: usize::from(may_write(flags, descriptors.is_writable)),
            descriptors: Some(descriptors),
            level: sqlite::LOCK_NONE,
            waiting: 0,
            kept,
            cached: None,
            stamp: None,
            locks: Locks::default(),
            index: Index::default(),
        }
    }

    fn descriptors(&mut self) -> &mut Descriptors {
        self.descriptors.as_mut().expect("open while there are connections")
    }

    /// Releases the lock toward the outside if no connection has a lock or may write. Pages that
    /// only readers had in the cache stay there, if a change of the file will show.
    fn release_if_unused(&mut self) -> Result<(), Error> {
        let is_used = self.writers > 0 || self.locks.is_held() || self.index.users > 0;
        if is_used || self.level == sqlite::LOCK_NONE {
            return Ok(());
        }
        if self.level == sqlite::LOCK_SHARED {
            self.stamp = self.descriptors().lasting_stamp();
        }
        let closed = match self.stamp {
            Some(_) => Ok(()),
            None => self.cached.take().map_or(Ok(()), close_cached),
        };
        self.level = sqlite::LOCK_NONE;
        self.descriptors().lock().lower(sqlite::LOCK_NONE);
        closed
    }

    /// Returns `true` if the database has a log, or will have one.
    fn has_log(&mut self, path: &Path) -> Answer<bool> {
        let mut versions = [0; 2];
        match self.descriptors().system.read(&mut versions, VERSIONS_OFFSET) {
            Ok(()) | Err(sqlite::IOERR_SHORT_READ) => {}
            Err(code) => return Err(code),
        }
        let mut log = OsString::from(path);
        log.push("-wal");
        Ok(versions.contains(&2) || Path::new(&log).exists())
    }
}

//! A database file that is open in this process: one for all connections to it.
//!
//! ```text
//!  open          the system's file only: SQLite reads the header before it locks
//!    | first lock of a connection
//!  locked        the system's lock, and the file in its cache, until the last connection closes:
//!    |             exclusive if a connection may write, or the database has a log;
//!    |             shared if none may: it is raised for the first that may
//!  closed        the file in the cache, made durable; the system's file, with its lock; the cache,
//!                if it is only this database's
//! ```
//!
//! Found by device and inode ([`REGISTRY`]). A child after a fork finds none of its parent's.
//!
//! The order of opening and closing matters: the kernel drops all POSIX locks of a process on a
//! file when any descriptor of it is closed, and the cache has descriptors that the system's VFS
//! does not know. They are opened after the lock was taken, and closed just before it is released,
//! when no connection needs it any more.
//!
//! The lock of the registry is held for look-ups only. The lock of a database is held while it
//! opens or closes its cache, so further connections wait for that. The two are never held
//! together, and `syncing` is held without either.
//!
//! # Safety
//! The regions of the index are memory that SQLite's connections access as they agreed by the slot
//! locks. They are freed after the last connection has let go.
#![allow(unsafe_code)]

use crate::fork::{Mutex, PerProcess};
use crate::locks::{HeldSlots, Locks, SlotLocks};
use crate::name::FileName;
use crate::refused::Refusal;
use crate::settings::Settings;
use crate::sqlite::{self, Api, Vfs};
use crate::system::{Answer, SystemFile};
use bifolio::{Cache, Error, ErrorKind, OpenOptions};
use std::collections::HashMap;
use std::ffi::{OsString, c_int, c_void};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};

/// Databases that are open in this process.
static REGISTRY: PerProcess<Mutex<HashMap<Key, Arc<Shared>>>> = PerProcess::new();

/// How often a file may be replaced while it is being opened before the open fails.
const OPEN_ATTEMPTS_MAX: u32 = 5;

/// Offset in the header of the format versions for writing and reading; 2 stands for a log.
const VERSIONS_OFFSET: i64 = 18;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    device: u64,
    inode: u64,
}

impl Key {
    fn of(path: &Path) -> Option<Self> {
        let found = std::fs::metadata(path).ok()?;
        Some(Self { device: found.dev(), inode: found.ino() })
    }
}

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
    /// Open until the last connection closes.
    system: Option<SystemFile>,
    /// Level of the system's lock: `NONE`, `SHARED` or `EXCLUSIVE`.
    level: c_int,
    /// Open while `level` is not `NONE`.
    cached: Option<bifolio::File>,
    locks: Locks,
    index: Index,
}

/// The index of the log, in memory of this process.
#[derive(Default)]
struct Index {
    /// Connections that have mapped it.
    users: usize,
    regions: Vec<NonNull<[u64]>>,
    slots: SlotLocks,
}

// SAFETY: the regions are plain memory, which belongs to this.
unsafe impl Send for Index {}

impl Index {
    fn clear(&mut self) {
        for region in self.regions.drain(..) {
            // SAFETY: made from a box in `region`; no connection has it mapped any more.
            drop(unsafe { Box::from_raw(region.as_ptr()) });
        }
    }

    /// Returns the region with a number, or null if it does not exist and is not to be made.
    fn region(&mut self, number: usize, bytes: usize, extend: bool) -> *mut c_void {
        while extend && self.regions.len() <= number {
            let region: Box<[u64]> = vec![0; bytes / size_of::<u64>()].into_boxed_slice();
            self.regions.push(NonNull::from(Box::leak(region)));
        }
        self.regions.get(number).map_or(ptr::null_mut(), |region| region.as_ptr().cast())
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Reason why a connection was not opened.
pub(crate) enum OpenFailure {
    /// Code of the system's VFS.
    Code(c_int),
    Refused(Refusal),
}

/// A database, and the flags that SQLite is to be told of the connection.
pub(crate) type Joined = (Arc<Shared>, c_int);

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
            let joined = Key::of(name().path()).and_then(Self::join);
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
                let _ = shared.leave();
                return Err(OpenFailure::Refused(refusal));
            }
            let mut flags = flags;
            if flags & sqlite::OPEN_READONLY != 0 || !shared.is_writable {
                flags &= !(sqlite::OPEN_READWRITE | sqlite::OPEN_CREATE);
                flags |= sqlite::OPEN_READONLY;
            }
            return Ok((shared, flags));
        }
        Err(OpenFailure::Code(sqlite::CANTOPEN))
    }

    /// Joins the connections that have the file open.
    fn join(key: Key) -> Option<Arc<Self>> {
        let shared = Arc::clone(REGISTRY.get().lock().get(&key)?);
        let mut state = shared.state.lock();
        if state.connections == 0 {
            drop(state);
            shared.forget();
            return None;
        }
        state.connections += 1;
        drop(state);
        Some(shared)
    }

    /// Opens the system's file; `None` if another thread was faster, or the path was changed.
    ///
    /// It is opened for writing even if this connection only reads: a later one may write, and the
    /// lock that protects a log needs it.
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
        let flags = flags & !sqlite::OPEN_READONLY | sqlite::OPEN_READWRITE;
        // SAFETY: the contract.
        let opened = unsafe { SystemFile::open(system, name, flags) };
        let (mut system, flags_found) = opened.map_err(OpenFailure::Code)?;
        let Some(key) = Key::of(&path).filter(|_| !system.has_moved()) else { return Ok(None) };
        let cache = settings
            .cache()
            .map_err(|text| OpenFailure::Refused(Refusal { code: sqlite::CANTOPEN, text }))?;
        let shared = Self {
            cache,
            api,
            key,
            path,
            settings: *settings,
            is_writable: flags_found & sqlite::OPEN_READONLY == 0,
            sector_size: system.sector_size(),
            device_characteristics: system.device_characteristics(),
            is_unwritten: AtomicBool::new(false),
            is_unsynced: AtomicBool::new(false),
            syncing: Mutex::new(()),
            state: Mutex::new(State {
                connections: 1,
                system: Some(system),
                level: sqlite::LOCK_NONE,
                cached: None,
                locks: Locks::default(),
                index: Index::default(),
            }),
        };
        let shared = Arc::new(shared);
        let mut registry = REGISTRY.get().lock();
        if registry.contains_key(&key) {
            return Ok(None);
        }
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

    /// Ends a connection, which holds no locks. The last one closes the file.
    pub(crate) fn leave(&self) -> Answer {
        let mut state = self.state.lock();
        state.connections -= 1;
        if state.connections > 0 {
            return Ok(());
        }
        let closed = state.cached.take().map_or(Ok(()), close_cached);
        state.system = None;
        state.level = sqlite::LOCK_NONE;
        drop(state);
        self.forget();
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

    /// Raises the lock `own` of a connection, and the system's lock as far as that needs it.
    pub(crate) fn lock(&self, own: &mut c_int, wanted: c_int, may_write: bool) -> Answer {
        let mut state = self.state.lock();
        if state.level == sqlite::LOCK_NONE || may_write && state.level == sqlite::LOCK_SHARED {
            self.acquire(&mut state, may_write)?;
        }
        state.locks.lock(own, wanted).map_err(|_| sqlite::BUSY)
    }

    /// Raises the system's lock, and opens the file in a cache.
    fn acquire(&self, state: &mut State, may_write: bool) -> Answer {
        let before = state.level;
        let locked = self.lock_system(state, may_write);
        let opened = locked.and_then(|level| {
            if state.cached.is_none() {
                state.cached = Some(self.open_cached(state)?);
            }
            state.level = level;
            Ok(())
        });
        if opened.is_err() {
            state.system().unlock(before);
        }
        opened
    }

    fn lock_system(&self, state: &mut State, may_write: bool) -> Answer<c_int> {
        state.system().lock(sqlite::LOCK_SHARED)?;
        let has_log = state.has_log(&self.path)?;
        if has_log && !self.is_writable {
            let Refusal { code, text } = self.log_refusal();
            self.api.log(code, &text);
            return Err(code);
        }
        if !may_write && !has_log {
            return Ok(sqlite::LOCK_SHARED);
        }
        state.system().lock(sqlite::LOCK_EXCLUSIVE)?;
        Ok(sqlite::LOCK_EXCLUSIVE)
    }

    fn open_cached(&self, state: &mut State) -> Answer<bifolio::File> {
        let options = OpenOptions::new().write(self.is_writable).direct(self.settings.direct());
        let opened = self.cache.open(&self.path, &options);
        let file = opened.map_err(|error| self.report(&error, sqlite::CANTOPEN).0)?;
        // The path may name another file by now than the one that is locked.
        if state.system().has_moved() {
            self.api.log(sqlite::CANTOPEN, &format!("{} was replaced", self.path.display()));
            return Err(sqlite::CANTOPEN);
        }
        Ok(file)
    }

    /// Lowers the lock `own` of a connection. The system's lock stays.
    pub(crate) fn unlock(&self, own: &mut c_int, wanted: c_int) {
        self.state.lock().locks.unlock(own, wanted);
    }

    /// Returns `true` if a connection of any process is about to write.
    pub(crate) fn is_reserved(&self) -> Answer<bool> {
        let mut state = self.state.lock();
        if state.locks.is_reserved() {
            return Ok(true);
        }
        // Beside a shared lock of the system, another process may hold RESERVED.
        if state.level == sqlite::LOCK_EXCLUSIVE { Ok(false) } else { state.system().is_reserved() }
    }

    /// Returns the file in the cache; `None` before the first lock.
    pub(crate) fn cached(&self) -> Option<bifolio::File> {
        self.state.lock().cached.clone()
    }

    /// Returns the file in the cache, or what `access` returns for the system's: before the first
    /// lock of any connection. No connection can open the cache meanwhile.
    pub(crate) fn cached_or<T>(
        &self,
        access: impl FnOnce(&mut SystemFile) -> T,
    ) -> Result<bifolio::File, T> {
        let mut state = self.state.lock();
        match &state.cached {
            Some(file) => Ok(file.clone()),
            None => Err(access(state.system())),
        }
    }

    /// Calls `access` with the system's file.
    pub(crate) fn with_system<T>(&self, access: impl FnOnce(&mut SystemFile) -> T) -> T {
        access(self.state.lock().system())
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
    pub(crate) fn write_back(&self, file: &bifolio::File) -> Result<(), Error> {
        self.catch_up(&self.is_unwritten, || file.write_back(0..file.len()))
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

impl State {
    fn system(&mut self) -> &mut SystemFile {
        self.system.as_mut().expect("open while there are connections")
    }

    /// Returns `true` if the database has a log, or will have one.
    fn has_log(&mut self, path: &Path) -> Answer<bool> {
        let mut versions = [0; 2];
        match self.system().read(&mut versions, VERSIONS_OFFSET) {
            Ok(()) | Err(sqlite::IOERR_SHORT_READ) => {}
            Err(code) => return Err(code),
        }
        let mut log = OsString::from(path);
        log.push("-wal");
        Ok(versions.contains(&2) || Path::new(&log).exists())
    }
}

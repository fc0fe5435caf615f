//! A main database: its bytes are in a cache, its lock is the system's.
//!
//! ```text
//!  opened        the system's file only: SQLite reads the header before it locks
//!    | first lock of SQLite
//!  locked        the system's lock, exclusive (shared, if the file can only be read), until the
//!    |             close; then a cache, and the file in it
//!  closed        the file in the cache, made durable; the cache; the system's file, with its lock
//! ```
//!
//! The order matters: the kernel drops all POSIX locks of a process on a file when any descriptor
//! of it is closed, and the cache has its own descriptors. They are opened after the lock was taken
//! and closed just before it is released.
//!
//! `SQLITE_FCNTL_SYNC` precedes each `xSync` of a commit, and comes alone where SQLite is
//! configured not to sync. The database is synced on it, and an `xSync` without new writes returns
//! at once.
//!
//! # Safety
//! SQLite calls the functions of [`METHODS`] with a file that `vfs::open` created, from one thread
//! at a time.
#![allow(unsafe_code)]

use crate::settings::Settings;
use crate::sqlite::{self, Api, File, IoMethods};
use crate::vfs::Opened;
use bifolio::{Cache, Error, ErrorKind, OpenOptions};
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{Ordering, fence};

/// The functions of a main database.
pub(crate) static METHODS: IoMethods = IoMethods {
    version: 2,
    close,
    read,
    write,
    truncate,
    sync,
    file_size,
    lock,
    unlock,
    check_reserved_lock,
    file_control,
    sector_size,
    device_characteristics,
    shm_map,
    shm_lock,
    shm_barrier,
    shm_unmap,
};

/// A main database.
pub(crate) struct Database {
    api: Api,
    /// The file of the system's VFS, which follows this struct in memory.
    system: *mut File,
    path: PathBuf,
    is_writable: bool,
    settings: Settings,
    /// Set from the first lock on.
    cached: Option<Cached>,
    /// Lock level that SQLite has requested.
    level: c_int,
    /// Set if something was written or truncated since the last sync.
    is_unsynced: bool,
    /// The file grows in multiples of this, bytes; 0 if it may have any length.
    chunk_bytes: u64,
    /// The `errno` of the last error.
    errno: c_int,
    /// Shared memory of connections in WAL mode: there is only one connection.
    shm: Vec<Box<[u64]>>,
}

/// The file in its cache.
struct Cached {
    // In the order in which they go.
    file: bifolio::File,
    cache: Cache,
}

type Answer = Result<(), c_int>;

impl Database {
    /// # Safety
    /// `system` is an open file, which only this closes.
    pub(crate) unsafe fn new(
        api: Api,
        system: *mut File,
        path: &CStr,
        is_writable: bool,
        settings: Settings,
    ) -> Self {
        let path = PathBuf::from(OsStr::from_bytes(path.to_bytes()));
        Self {
            api,
            system,
            path,
            is_writable,
            settings,
            cached: None,
            level: sqlite::LOCK_NONE,
            is_unsynced: false,
            chunk_bytes: 0,
            errno: 0,
            shm: Vec::new(),
        }
    }

    /// The functions of the system's file.
    fn system(&self) -> &IoMethods {
        // SAFETY: open until `close`.
        let methods = unsafe { (*self.system).methods };
        // SAFETY: the table of an open file.
        unsafe { &*methods }
    }

    /// Reports an error of the cache, and returns SQLite's code for it.
    fn failed(&mut self, error: &Error, code: c_int) -> c_int {
        self.errno = error.raw_os_error().unwrap_or(0);
        let code = match error.kind() {
            _ if self.errno == libc::ENOSPC || self.errno == libc::EDQUOT => sqlite::FULL,
            ErrorKind::Memory { .. } => sqlite::NOMEM,
            _ => code,
        };
        self.api.log(code, &error.to_string());
        code
    }

    /// Takes the system's lock permanently, and opens the file in a cache.
    fn acquire(&mut self) -> Answer {
        let lock = self.system().lock;
        // SAFETY: the system's file is open.
        check(unsafe { lock(self.system, sqlite::LOCK_SHARED) })?;
        let opened = self.make_exclusive().and_then(|()| self.open_cached());
        if opened.is_err() {
            let unlock = self.system().unlock;
            // SAFETY: as above. What it answers changes nothing.
            unsafe { unlock(self.system, sqlite::LOCK_NONE) };
        }
        opened
    }

    fn make_exclusive(&mut self) -> Answer {
        if !self.is_writable {
            return Ok(());
        }
        let lock = self.system().lock;
        // SAFETY: the system's file is open.
        let code = unsafe { lock(self.system, sqlite::LOCK_EXCLUSIVE) };
        if code & 0xff == sqlite::BUSY {
            let message = format!(
                "{} is in use by another connection, and the VFS needs it for itself",
                self.path.display()
            );
            self.api.log(code, &message);
        }
        check(code)
    }

    fn open_cached(&mut self) -> Answer {
        let options = OpenOptions::new().write(self.is_writable).direct(self.settings.direct);
        let opened = self.settings.builder().build().and_then(|cache| {
            let file = cache.open(&self.path, &options)?;
            Ok(Cached { file, cache })
        });
        let cached = opened.map_err(|error| self.failed(&error, sqlite::CANTOPEN))?;
        // The path may name another file by now than the one that is locked.
        let mut has_moved: c_int = 0;
        let control = self.system().file_control;
        let argument = (&raw mut has_moved).cast();
        // SAFETY: the system's file is open, and this control takes a variable.
        let code = unsafe { control(self.system, sqlite::FCNTL_HAS_MOVED, argument) };
        if code == sqlite::OK && has_moved != 0 {
            self.api.log(sqlite::CANTOPEN, &format!("{} was replaced", self.path.display()));
            return Err(sqlite::CANTOPEN);
        }
        self.cached = Some(cached);
        Ok(())
    }

    fn close(&mut self) -> Answer {
        let mut answer = Ok(());
        if let Some(Cached { file, cache }) = self.cached.take()
            && let Err(error) = file.close().and_then(|()| cache.close())
        {
            answer = Err(self.failed(&error, sqlite::IOERR_CLOSE));
        }
        let close = self.system().close;
        // SAFETY: the system's file is open, and not used any more.
        let code = unsafe { close(self.system) };
        answer.and(check(code))
    }

    /// # Safety
    /// `buffer` has `length` bytes that can be written.
    unsafe fn read(&mut self, buffer: *mut c_void, length: c_int, offset: i64) -> Answer {
        let Some(cached) = &self.cached else {
            let read = self.system().read;
            // SAFETY: the system's file is open; the rest is the contract.
            return check(unsafe { read(self.system, buffer, length, offset) });
        };
        let length = usize::try_from(length).map_err(|_| sqlite::IOERR_READ)?;
        let position = u64::try_from(offset).map_err(|_| sqlite::IOERR_READ)?;
        // SAFETY: the contract.
        let buffer = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length) };
        match cached.file.read_at(buffer, position) {
            Ok(count) if count == length => Ok(()),
            Ok(count) => {
                buffer[count..].fill(0);
                Err(sqlite::IOERR_SHORT_READ)
            }
            Err(error) => Err(self.failed(&error, sqlite::IOERR_READ)),
        }
    }

    /// # Safety
    /// `buffer` has `length` bytes.
    unsafe fn write(&mut self, buffer: *const c_void, length: c_int, offset: i64) -> Answer {
        let Some(cached) = &self.cached else {
            let write = self.system().write;
            // SAFETY: the system's file is open; the rest is the contract.
            return check(unsafe { write(self.system, buffer, length, offset) });
        };
        let length = usize::try_from(length).map_err(|_| sqlite::IOERR_WRITE)?;
        let position = u64::try_from(offset).map_err(|_| sqlite::IOERR_WRITE)?;
        // SAFETY: the contract.
        let buffer = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), length) };
        self.is_unsynced = true;
        let written = cached.file.write_all_at(buffer, position);
        written.map_err(|error| self.failed(&error, sqlite::IOERR_WRITE))
    }

    /// # Safety
    /// As for the other functions.
    unsafe fn truncate(&mut self, size: i64) -> Answer {
        let Some(cached) = &self.cached else {
            let truncate = self.system().truncate;
            // SAFETY: the system's file is open.
            return check(unsafe { truncate(self.system, size) });
        };
        let size = u64::try_from(size).map_err(|_| sqlite::IOERR_TRUNCATE)?;
        self.is_unsynced = true;
        let cut = cached.file.set_len(whole_chunks(size, self.chunk_bytes));
        cut.map_err(|error| self.failed(&error, sqlite::IOERR_TRUNCATE))
    }

    /// # Safety
    /// As for the other functions.
    unsafe fn sync(&mut self, flags: c_int) -> Answer {
        if self.cached.is_some() {
            return self.make_durable();
        }
        let sync = self.system().sync;
        // SAFETY: the system's file is open.
        check(unsafe { sync(self.system, flags) })
    }

    /// Makes everything written since the last sync durable.
    fn make_durable(&mut self) -> Answer {
        let Some(cached) = &self.cached else { return Ok(()) };
        if !self.is_unsynced {
            return Ok(());
        }
        // A sync also fails for an earlier write-out, though its pages were written or cut since:
        // SQLite cuts what it rolls back on a full disk. The second sync fails only for what is
        // still not durable.
        let synced = cached.file.sync_data().or_else(|_| cached.file.sync_data());
        synced.map_err(|error| self.failed(&error, sqlite::IOERR_FSYNC))?;
        self.is_unsynced = false;
        Ok(())
    }

    /// # Safety
    /// `size` is a variable.
    unsafe fn file_size(&mut self, size: *mut i64) -> Answer {
        let Some(cached) = &self.cached else {
            let file_size = self.system().file_size;
            // SAFETY: the system's file is open; the rest is the contract.
            return check(unsafe { file_size(self.system, size) });
        };
        // SAFETY: the contract.
        unsafe { size.write(i64::try_from(cached.file.len()).unwrap_or(i64::MAX)) };
        Ok(())
    }

    /// # Safety
    /// As for the other functions.
    unsafe fn lock(&mut self, level: c_int) -> Answer {
        if self.cached.is_none() {
            self.acquire()?;
        }
        if level > sqlite::LOCK_SHARED && !self.is_writable {
            return Err(sqlite::READONLY);
        }
        self.level = self.level.max(level);
        Ok(())
    }

    /// # Safety
    /// As for the other functions.
    unsafe fn unlock(&mut self, level: c_int) -> Answer {
        self.level = self.level.min(level);
        Ok(())
    }

    /// # Safety
    /// `answer` is a variable.
    unsafe fn check_reserved_lock(&mut self, answer: *mut c_int) -> Answer {
        if self.cached.is_none() {
            let check_reserved_lock = self.system().check_reserved_lock;
            // SAFETY: the system's file is open; the rest is the contract.
            return check(unsafe { check_reserved_lock(self.system, answer) });
        }
        // SAFETY: the contract.
        unsafe { answer.write(c_int::from(self.level >= sqlite::LOCK_RESERVED)) };
        Ok(())
    }

    /// # Safety
    /// `argument` is what SQLite passes with `operation`.
    unsafe fn file_control(&mut self, operation: c_int, argument: *mut c_void) -> Answer {
        match operation {
            sqlite::FCNTL_SYNC | sqlite::FCNTL_CKPT_DONE => self.make_durable(),
            sqlite::FCNTL_LOCKSTATE => {
                // SAFETY: SQLite's variable.
                unsafe { argument.cast::<c_int>().write(self.level) };
                Ok(())
            }
            sqlite::FCNTL_LAST_ERRNO if self.errno != 0 => {
                // SAFETY: SQLite's variable.
                unsafe { argument.cast::<c_int>().write(self.errno) };
                Ok(())
            }
            sqlite::FCNTL_CHUNK_SIZE => {
                // SAFETY: SQLite's variable.
                let bytes = unsafe { argument.cast::<c_int>().read() };
                self.chunk_bytes = u64::try_from(bytes).unwrap_or(0);
                Ok(())
            }
            sqlite::FCNTL_SIZE_HINT => {
                // SAFETY: SQLite's variable.
                let size = unsafe { argument.cast::<i64>().read() };
                self.grow(u64::try_from(size).unwrap_or(0))
            }
            sqlite::FCNTL_VFSNAME => {
                // SAFETY: SQLite's variable, whose text it frees.
                unsafe { argument.cast::<*mut c_char>().write(self.api.text("bifolio")) };
                Ok(())
            }
            // SAFETY: three texts and room for another.
            sqlite::FCNTL_PRAGMA => unsafe { self.pragma(argument.cast()) },
            _ if FORWARDED.contains(&operation) => {
                let control = self.system().file_control;
                // SAFETY: the system's file is open; the rest is the contract.
                check(unsafe { control(self.system, operation, argument) })
            }
            _ => Err(sqlite::NOTFOUND),
        }
    }

    /// Extends the file to hold `size` bytes, in whole chunks if a chunk size is set.
    fn grow(&mut self, size: u64) -> Answer {
        let (Some(cached), 1..) = (&self.cached, self.chunk_bytes) else { return Ok(()) };
        let size = whole_chunks(size, self.chunk_bytes);
        if size <= cached.file.len() {
            return Ok(());
        }
        self.is_unsynced = true;
        let grown = cached.file.set_len(size);
        grown.map_err(|error| self.failed(&error, sqlite::IOERR_WRITE))
    }

    /// # Safety
    /// The argument of `SQLITE_FCNTL_PRAGMA`: space for an answer, the name, and a value or null.
    unsafe fn pragma(&mut self, arguments: *mut *mut c_char) -> Answer {
        let name = arguments.wrapping_add(1);
        // SAFETY: the contract.
        let name = unsafe { name.read() };
        // SAFETY: a text.
        let name = unsafe { CStr::from_ptr(name) };
        if !name.to_bytes().eq_ignore_ascii_case(b"bifolio_stats") {
            return Err(sqlite::NOTFOUND);
        }
        let text = match &self.cached {
            Some(cached) => describe(&cached.cache),
            None => "the database was not read yet".to_owned(),
        };
        // SAFETY: the room for an answer, which SQLite frees.
        unsafe { arguments.write(self.api.text(&text)) };
        Ok(())
    }

    /// # Safety
    /// `address` points to a variable of SQLite.
    unsafe fn shm_map(
        &mut self,
        region: c_int,
        size: c_int,
        extend: c_int,
        address: *mut *mut c_void,
    ) -> Answer {
        // SAFETY: the contract.
        unsafe { address.write(std::ptr::null_mut()) };
        if !self.is_writable {
            let message = format!(
                "{} can only be read, and is in WAL mode: others could change it unseen",
                self.path.display()
            );
            self.api.log(sqlite::READONLY_CANTINIT, &message);
            return Err(sqlite::READONLY_CANTINIT);
        }
        let region = usize::try_from(region).map_err(|_| sqlite::ERROR)?;
        let words = usize::try_from(size).map_err(|_| sqlite::ERROR)? / size_of::<u64>();
        while extend != 0 && self.shm.len() <= region {
            self.shm.push(vec![0; words].into_boxed_slice());
        }
        if let Some(region) = self.shm.get_mut(region) {
            // SAFETY: the contract.
            unsafe { address.write(region.as_mut_ptr().cast()) };
        }
        Ok(())
    }

    /// # Safety
    /// As for the other functions.
    unsafe fn shm_unmap(&mut self, _delete: c_int) -> Answer {
        self.shm.clear();
        Ok(())
    }
}

/// File controls that are passed to the system's file.
const FORWARDED: [c_int; 5] = [
    sqlite::FCNTL_LAST_ERRNO,
    sqlite::FCNTL_PERSIST_WAL,
    sqlite::FCNTL_POWERSAFE_OVERWRITE,
    sqlite::FCNTL_TEMPFILENAME,
    sqlite::FCNTL_HAS_MOVED,
];

fn whole_chunks(size: u64, chunk_bytes: u64) -> u64 {
    if chunk_bytes == 0 { size } else { size.next_multiple_of(chunk_bytes) }
}

/// Returns the counters of a cache that are not zero.
fn describe(cache: &Cache) -> String {
    let stats = cache.stats();
    let levels = [
        ("bound_bytes", stats.bound_bytes),
        ("used_bytes", stats.used_bytes),
        ("dirty_bytes", stats.dirty_bytes),
    ];
    let mut text = String::new();
    for (name, value) in levels.into_iter().chain(stats.counts()) {
        if value > 0 {
            let _ = writeln!(text, "{name} {value}");
        }
    }
    for fallback in &stats.fallbacks {
        let _ = writeln!(text, "fallback: {fallback}");
    }
    text.truncate(text.trim_end().len());
    text
}

fn check(code: c_int) -> Answer {
    if code == sqlite::OK { Ok(()) } else { Err(code) }
}

/// Returns the database of a file.
///
/// # Safety
/// A file that `vfs::open` created, used by one thread.
unsafe fn database<'a>(file: *mut File) -> &'a mut Database {
    // SAFETY: the contract.
    let database = unsafe { (*file.cast::<Opened>()).database };
    // SAFETY: made with the file, and freed by `close` only.
    unsafe { &mut *database }
}

/// Defines the functions that SQLite calls: each calls the method of its name. A panic is an I/O
/// error.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*);)+) => {
        $(unsafe extern "C" fn $name(file: *mut File, $($argument: $type),*) -> c_int {
            // SAFETY: SQLite calls with a file of this VFS, and with one thread at a time.
            let database = unsafe { database(file) };
            // SAFETY: the arguments are SQLite's, and are what its documentation says.
            let body = AssertUnwindSafe(|| unsafe { database.$name($($argument),*) });
            match catch_unwind(body) {
                Ok(Ok(())) => sqlite::OK,
                Ok(Err(code)) => code,
                Err(_) => sqlite::IOERR,
            }
        })+
    };
}

functions! {
    read(buffer: *mut c_void, length: c_int, offset: i64);
    write(buffer: *const c_void, length: c_int, offset: i64);
    truncate(size: i64);
    sync(flags: c_int);
    file_size(size: *mut i64);
    lock(level: c_int);
    unlock(level: c_int);
    check_reserved_lock(answer: *mut c_int);
    file_control(operation: c_int, argument: *mut c_void);
    shm_map(region: c_int, size: c_int, extend: c_int, address: *mut *mut c_void);
    shm_unmap(delete: c_int);
}

unsafe extern "C" fn close(file: *mut File) -> c_int {
    let opened = file.cast::<Opened>();
    // SAFETY: SQLite calls with a file of this VFS, for the last time.
    let database = unsafe { (*opened).database };
    // SAFETY: made by `vfs::open`, and not used any more.
    let mut database = unsafe { Box::from_raw(database) };
    let answer = catch_unwind(AssertUnwindSafe(|| database.close()));
    // SAFETY: the memory of the file.
    unsafe { (*file).methods = std::ptr::null() };
    match answer {
        Ok(Ok(())) => sqlite::OK,
        Ok(Err(code)) => code,
        Err(_) => sqlite::IOERR_CLOSE,
    }
}

unsafe extern "C" fn sector_size(file: *mut File) -> c_int {
    // SAFETY: SQLite calls with a file of this VFS, and with one thread at a time.
    let database = unsafe { database(file) };
    let sector_size = database.system().sector_size;
    // SAFETY: the system's file is open.
    unsafe { sector_size(database.system) }
}

unsafe extern "C" fn device_characteristics(file: *mut File) -> c_int {
    // SAFETY: SQLite calls with a file of this VFS, and with one thread at a time.
    let database = unsafe { database(file) };
    let characteristics = database.system().device_characteristics;
    // SAFETY: the system's file is open.
    let found = unsafe { characteristics(database.system) };
    // A write-out of a page has the neighbours' bytes as they are. Nothing else that the system's
    // file may promise, such as atomic batches, is true of the cache.
    found & sqlite::IOCAP_POWERSAFE_OVERWRITE
}

/// Grants each lock, because there is only one connection.
unsafe extern "C" fn shm_lock(_: *mut File, _: c_int, _: c_int, _: c_int) -> c_int {
    sqlite::OK
}

unsafe extern "C" fn shm_barrier(_: *mut File) {
    // AcqRel: what comes before and after it are accesses of one thread.
    fence(Ordering::AcqRel);
}

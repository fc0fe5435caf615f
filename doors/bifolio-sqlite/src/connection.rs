//! A connection to a main database: what SQLite has open as one file.
//!
//! Its bytes are those of the [`Shared`] database, read and written through the cache from the
//! first lock on. Locks, level of the lock and settings of the file belong to the connection, and
//! so does its handle of the file, whose readahead follows the reads of this connection only.
//!
//! A connection that only reads has a handle while it has a lock: between two of its transactions
//! another process may change the file, and the close of the last handle drops its pages.
//!
//! `SQLITE_FCNTL_SYNC` precedes each `xSync` of a commit, and comes alone where SQLite is
//! configured not to sync. The database is written to the storage on it; without waiting for the
//! device if no `xSync` followed the last time.
//!
//! # Safety
//! Uses the pointers that SQLite passes to [`Methods`].
#![allow(unsafe_code)]

use crate::access::{Problem, Target};
use crate::fork;
use crate::locks::{HeldSlots, SlotLocks};
use crate::methods::Methods;
use crate::pragmas;
use crate::shared::Shared;
use crate::sqlite::{self, Api};
use crate::system::Answer;
use bifolio::Error;
use std::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// A connection to a main database.
pub(crate) struct Connection {
    api: Api,
    shared: Arc<Shared>,
    path: PathBuf,
    is_writable: bool,
    /// Forks up to the process that opened the connection.
    forks: u32,
    /// Set from the first lock on; of a connection that only reads, while it has a lock.
    file: Option<bifolio::File>,
    /// Level of its lock.
    level: c_int,
    /// Slots of the index that it holds; `None` if it has not mapped the index.
    slots: Option<HeldSlots>,
    /// The file grows in multiples of this, bytes; 0 if it may have any length.
    chunk_bytes: u64,
    keeps_log: bool,
    is_powersafe: bool,
    /// Last call that an `xSync` follows unless SQLite omits syncs; `None` after an `xSync`.
    unsynced: Option<Call>,
    /// Set if SQLite omits syncs.
    omits_sync: bool,
    /// The `errno` of the last error.
    errno: c_int,
}

/// A call by which SQLite has the database written to the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    WriteBack,
    Truncate,
}

impl Connection {
    pub(crate) fn new(
        api: Api,
        shared: Arc<Shared>,
        path: PathBuf,
        is_writable: bool,
        is_powersafe: Option<bool>,
    ) -> Self {
        let characteristics = shared.device_characteristics;
        let usually = characteristics & sqlite::IOCAP_POWERSAFE_OVERWRITE != 0;
        Self {
            api,
            shared,
            path,
            is_writable,
            forks: fork::count(),
            file: None,
            level: sqlite::LOCK_NONE,
            slots: None,
            chunk_bytes: 0,
            keeps_log: false,
            is_powersafe: is_powersafe.unwrap_or(usually),
            unsynced: None,
            omits_sync: false,
            errno: 0,
        }
    }

    /// Reports an error of the cache, and returns SQLite's code for it.
    fn failed(&mut self, error: &Error, code: c_int) -> c_int {
        let (code, errno) = self.shared.report(error, code);
        self.errno = errno;
        code
    }

    /// Calls `call` with the file in the cache or, before the first lock of any connection, with
    /// the system's. `code` is that of an error of the cache.
    fn access<T>(
        &mut self,
        code: c_int,
        call: impl FnOnce(&Shared, Target<'_>) -> Result<T, Problem>,
    ) -> Answer<T> {
        let answer = match &self.file {
            Some(file) => call(&self.shared, Target::Cache(file)),
            None => self.shared.access(|target| call(&self.shared, target)),
        };
        answer.map_err(|problem| match problem {
            Problem::Code(code) => code,
            Problem::Cache(error) => self.failed(&error, code),
        })
    }

    /// Changes the file; otherwise like [`Self::access`]. SQLite changes nothing without a lock,
    /// but a VFS that is stacked on this one may: `multiplex` locks one of its files only. Those
    /// bytes go to the system's file, as they would without this VFS.
    fn change(
        &mut self,
        code: c_int,
        call: impl FnOnce(&Shared, Target<'_>) -> Result<(), Problem>,
    ) -> Answer {
        if !self.is_writable {
            return Err(code);
        }
        self.access(code, |shared, target| {
            if matches!(target, Target::Cache(_)) {
                shared.note_write();
            }
            call(shared, target)
        })
    }

    /// Writes the database to the storage, before SQLite lets go of the journal.
    fn write_back(&mut self) -> Answer {
        let is_followed = self.expects_sync(Call::WriteBack);
        self.access(sqlite::IOERR_FSYNC, |shared, target| match target {
            Target::Cache(file) => Ok(shared.write_back(file, is_followed)?),
            // It has nothing that is only in a cache.
            Target::System(_) => Ok(()),
        })
    }

    /// Notes a call that an `xSync` follows, unless SQLite omits syncs: none has come between two
    /// such calls then. Returns `true` if one is to be expected.
    fn expects_sync(&mut self, call: Call) -> bool {
        self.omits_sync |= self.unsynced == Some(call);
        self.unsynced = Some(call);
        !self.omits_sync
    }

    /// Extends the file to hold `size` bytes, in whole chunks if a chunk size is set. The chunks
    /// have room on the storage, where it can reserve room.
    fn grow(&mut self, size: u64) -> Answer {
        if self.chunk_bytes == 0 {
            return Ok(());
        }
        let size = whole_chunks(size, self.chunk_bytes);
        self.change(sqlite::IOERR_WRITE, |_, target| {
            // A hint only: the system's file grows by its writes.
            let Target::Cache(file) = target else { return Ok(()) };
            let len = file.len();
            if size <= len {
                return Ok(());
            }
            match file.allocate(len..size) {
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    Ok(file.set_len(size)?)
                }
                allocated => Ok(allocated?),
            }
        })
    }

    /// # Safety
    /// The argument of `SQLITE_FCNTL_PRAGMA`: space for an answer, the name, and a value or null.
    unsafe fn pragma(&mut self, arguments: *mut *mut c_char) -> Answer {
        // SAFETY: the contract.
        let asked = unsafe { pragmas::asked(arguments) };
        if asked.name == "synchronous" {
            let value = asked.value.as_deref().unwrap_or_default();
            let is_off = |off| value.eq_ignore_ascii_case(off);
            self.omits_sync |= ["off", "0", "no", "false"].into_iter().any(is_off);
        }
        // SAFETY: the contract.
        unsafe { pragmas::answer(self.api, &self.shared.cache, &asked, arguments) }
    }
}

impl Methods for Connection {
    fn is_inherited(&self) -> bool {
        self.forks != fork::count()
    }

    fn close(&mut self) -> Answer {
        if self.slots.is_some() {
            self.shm_unmap(0)?;
        }
        self.unlock(sqlite::LOCK_NONE)?;
        self.file = None;
        self.shared.leave(self.is_writable)
    }

    fn read(&mut self, buffer: &mut [u8], position: u64) -> Answer {
        if self.file.is_none() && self.shared.read_kept(buffer, position) {
            return Ok(());
        }
        self.access(sqlite::IOERR_READ, |_, target| {
            let file = match target {
                Target::Cache(file) => file,
                Target::System(system) => return Ok(system.read(buffer, position)?),
            };
            let count = file.read_at(buffer, position)?;
            buffer[count..].fill(0);
            if count == buffer.len() { Ok(()) } else { Err(sqlite::IOERR_SHORT_READ.into()) }
        })
    }

    fn write(&mut self, buffer: &[u8], position: u64) -> Answer {
        self.change(sqlite::IOERR_WRITE, |_, target| match target {
            Target::Cache(file) => Ok(file.write_all_at(buffer, position)?),
            Target::System(system) => Ok(system.write(buffer, position)?),
        })
    }

    /// Cuts the file, and writes what was written before to the storage: with `synchronous=OFF`,
    /// this is the last call whose result counts before a checkpoint lets go of the log. It does
    /// not flush: a rollback begins with this call, and must not end here because of a flush that
    /// failed before.
    fn truncate(&mut self, size: i64) -> Answer {
        let bytes = u64::try_from(size).map_err(|_| sqlite::IOERR_TRUNCATE)?;
        let whole = whole_chunks(bytes, self.chunk_bytes);
        let is_followed = self.expects_sync(Call::Truncate);
        self.change(sqlite::IOERR_TRUNCATE, |shared, target| {
            let file = match target {
                Target::Cache(file) => file,
                Target::System(system) => return Ok(system.truncate(size)?),
            };
            // First to the byte, so that pages of the last chunk that cannot be written are gone.
            file.set_len(bytes)?;
            if whole > bytes {
                file.set_len(whole)?;
            }
            Ok(shared.write_back(file, is_followed)?)
        })
    }

    fn sync(&mut self, flags: c_int) -> Answer {
        (self.unsynced, self.omits_sync) = (None, false);
        self.access(sqlite::IOERR_FSYNC, |shared, target| match target {
            Target::Cache(file) => Ok(shared.make_durable(file)?),
            Target::System(system) => Ok(system.sync(flags)?),
        })
    }

    /// # Safety
    /// `size` is a variable.
    unsafe fn file_size(&mut self, size: *mut i64) -> Answer {
        let found = self.access(sqlite::IOERR, |_, target| match target {
            Target::Cache(file) => Ok(i64::try_from(file.len()).unwrap_or(i64::MAX)),
            Target::System(system) => Ok(system.size()?),
        })?;
        // SAFETY: the contract.
        unsafe { size.write(found) };
        Ok(())
    }

    fn lock(&mut self, level: c_int) -> Answer {
        if level > sqlite::LOCK_SHARED && !self.is_writable {
            return Err(sqlite::READONLY);
        }
        self.shared.lock(&mut self.level, level, self.is_writable)?;
        if self.file.is_none() {
            let opened = self.shared.open_handle();
            let opened =
                opened.inspect_err(|_| self.shared.unlock(&mut self.level, sqlite::LOCK_NONE));
            self.file = Some(opened?);
        }
        Ok(())
    }

    fn unlock(&mut self, level: c_int) -> Answer {
        if level == sqlite::LOCK_NONE && !self.is_writable {
            self.file = None;
        }
        self.shared.unlock(&mut self.level, level);
        Ok(())
    }

    /// # Safety
    /// `answer` is a variable.
    unsafe fn check_reserved_lock(&mut self, answer: *mut c_int) -> Answer {
        let is_reserved = self.shared.is_reserved()?;
        // SAFETY: the contract.
        unsafe { answer.write(c_int::from(is_reserved)) };
        Ok(())
    }

    /// # Safety
    /// `argument` is what SQLite passes with `operation`.
    unsafe fn file_control(&mut self, operation: c_int, argument: *mut c_void) -> Answer {
        let integer = argument.cast::<c_int>();
        match operation {
            sqlite::FCNTL_SYNC => self.write_back(),
            // SAFETY: SQLite's variable.
            sqlite::FCNTL_LOCKSTATE => unsafe { answer(integer, self.level) },
            // SAFETY: SQLite's variable.
            sqlite::FCNTL_LAST_ERRNO => unsafe { answer(integer, self.errno) },
            sqlite::FCNTL_HAS_MOVED => {
                let has_moved = self.shared.is_elsewhere_than(&self.path);
                // SAFETY: SQLite's variable.
                unsafe { answer(integer, c_int::from(has_moved)) }
            }
            // SAFETY: SQLite's variable.
            sqlite::FCNTL_PERSIST_WAL => unsafe { set_or_ask(integer, &mut self.keeps_log) },
            sqlite::FCNTL_POWERSAFE_OVERWRITE => {
                // SAFETY: SQLite's variable.
                unsafe { set_or_ask(integer, &mut self.is_powersafe) }
            }
            sqlite::FCNTL_CHUNK_SIZE => {
                // SAFETY: SQLite's variable.
                let bytes = unsafe { integer.read() };
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
            sqlite::FCNTL_MMAP_SIZE => {
                // No page is mapped, whatever limit is asked for.
                // SAFETY: SQLite's variable.
                unsafe { argument.cast::<i64>().write(0) };
                Ok(())
            }
            // The lock that a log needs keeps transactions of other processes out. Before the first
            // lock, the system's VFS answers 0 too.
            // SAFETY: SQLite's variable.
            sqlite::FCNTL_EXTERNAL_READER => unsafe { answer(integer, 0) },
            sqlite::FCNTL_TEMPFILENAME => {
                // SAFETY: the contract.
                self.shared.with_system(|system| unsafe { system.control(operation, argument) })
            }
            _ => Err(sqlite::NOTFOUND),
        }
    }

    fn sector_size(&mut self) -> c_int {
        self.shared.sector_size
    }

    fn device_characteristics(&mut self) -> c_int {
        // A write-out of a page has the neighbours' bytes as they are. Nothing else that the
        // system's file may promise, such as atomic batches, is true of the cache.
        if self.is_powersafe { sqlite::IOCAP_POWERSAFE_OVERWRITE } else { 0 }
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
        let region = usize::try_from(region).map_err(|_| sqlite::IOERR_SHMMAP)?;
        let bytes = usize::try_from(size).map_err(|_| sqlite::IOERR_SHMMAP)?;
        let is_mapped = self.slots.is_some();
        let found = self.shared.map_index(is_mapped, region, bytes, extend != 0)?;
        self.slots.get_or_insert_default();
        // SAFETY: the contract.
        unsafe { address.write(found) };
        Ok(())
    }

    fn shm_lock(&mut self, first: c_int, count: c_int, flags: c_int) -> Answer {
        let number = |number| usize::try_from(number).map_err(|_| sqlite::IOERR_SHMLOCK);
        let (first, count) = (number(first)?, number(count)?);
        let own = self.slots.as_mut().filter(|_| SlotLocks::has(first, count));
        let own = own.ok_or(sqlite::IOERR_SHMLOCK)?;
        let locked = self.shared.with_slots(|slots| match flags {
            _ if flags & sqlite::SHM_UNLOCK != 0 => {
                slots.unlock(own, first, count);
                Ok(())
            }
            _ if flags & sqlite::SHM_SHARED != 0 => slots.lock_shared(own, first),
            _ => slots.lock_exclusive(own, first, count),
        });
        locked.map_err(|_| sqlite::BUSY)
    }

    fn shm_barrier(&mut self) {
        // AcqRel: orders the two copies of the header in the index, which `wal.c` writes and reads
        // in opposite order. Everything else in the index is ordered by the slot locks.
        fence(Ordering::AcqRel);
    }

    fn shm_unmap(&mut self, _delete: c_int) -> Answer {
        if let Some(mut slots) = self.slots.take() {
            self.shared.unmap_index(&mut slots);
        }
        Ok(())
    }
}

/// Answers a file control.
///
/// # Safety
/// `variable` can be written.
unsafe fn answer(variable: *mut c_int, value: c_int) -> Answer {
    // SAFETY: the contract.
    unsafe { variable.write(value) };
    Ok(())
}

/// Changes a setting, or answers its value if the variable is negative.
///
/// # Safety
/// `variable` can be read and written.
unsafe fn set_or_ask(variable: *mut c_int, setting: &mut bool) -> Answer {
    // SAFETY: the contract.
    let wanted = unsafe { variable.read() };
    if wanted >= 0 {
        *setting = wanted != 0;
        return Ok(());
    }
    // SAFETY: the contract.
    unsafe { answer(variable, c_int::from(*setting)) }
}

fn whole_chunks(size: u64, chunk_bytes: u64) -> u64 {
    if chunk_bytes == 0 { size } else { size.next_multiple_of(chunk_bytes) }
}

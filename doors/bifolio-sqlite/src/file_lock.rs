//! The lock of a database toward everything that does not go through this VFS: other processes,
//! other VFSs, and other copies of SQLite in this process.
//!
//! It is a lock of the open file description (`F_OFD_SETLK`) on the bytes that SQLite's own VFS
//! locks with POSIX locks. The two kinds conflict like two processes, even in one process, where
//! POSIX locks never conflict with each other: programs often have two copies of SQLite, such as
//! Python's `sqlite3` and the package `apsw`. Closing another descriptor of the file does not drop
//! a lock of this kind.
//!
//! ```text
//!  byte of the file        read lock                        write lock
//!  PENDING                 for a moment, to take SHARED     no new reader
//!  RESERVED                never                            about to write
//!  SHARED, 510 bytes       reads                            alone: reads and writes
//! ```
//!
//! Connections of a shared database lock as SQLite's own VFS does. An exclusive database never
//! locks `RESERVED`: a reader that sees it locked takes a hot journal for one in use, and would
//! read what a killed writer left. Its exclusive lock needs no `RESERVED`, since another writer,
//! which has it, also has `SHARED`.
//!
//! # Safety
//! Calls the kernel with the struct that its documentation gives.
#![allow(unsafe_code)]

use crate::sqlite;
use crate::system::Answer;
use std::ffi::{c_int, c_short};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// First byte and number of bytes of a lock.
pub(crate) type Bytes = (i64, i64);
const PENDING: Bytes = (0x4000_0000, 1);
const RESERVED: Bytes = (0x4000_0001, 1);
const SHARED: Bytes = (0x4000_0002, 510);
/// `PENDING` and `RESERVED`.
const WRITERS: Bytes = (0x4000_0000, 2);
/// `PENDING`, `RESERVED` and `SHARED`, which follow each other.
const ALL: Bytes = (0x4000_0000, 512);

/// Kinds of locks, as the kernel's struct has them.
pub(crate) const READ: c_short = libc::F_RDLCK as c_short;
pub(crate) const WRITE: c_short = libc::F_WRLCK as c_short;
pub(crate) const NONE: c_short = libc::F_UNLCK as c_short;

/// Reason why the lock was not raised.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// Readers are left, or come and go. `PENDING` may be locked, so that no more of them come.
    Readers,
    /// Any other reason, with SQLite's code.
    Code(c_int),
}

impl From<c_int> for Denied {
    fn from(code: c_int) -> Self {
        Self::Code(code)
    }
}

impl Denied {
    pub(crate) fn code(&self) -> c_int {
        match self {
            Self::Readers => sqlite::BUSY,
            Self::Code(code) => *code,
        }
    }
}

/// The lock of a descriptor, which lives as long as its open file description.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileLock<'a>(pub(crate) BorrowedFd<'a>);

impl FileLock<'_> {
    /// Takes the shared lock.
    pub(crate) fn share(self) -> Result<(), Denied> {
        if !self.set(READ, PENDING)? {
            return Err(sqlite::BUSY.into());
        }
        let is_shared = self.set(READ, SHARED);
        self.set(NONE, PENDING)?;
        if is_shared? { Ok(()) } else { Err(sqlite::BUSY.into()) }
    }

    /// Takes the exclusive lock, or raises the shared one.
    pub(crate) fn exclude(self) -> Result<(), Denied> {
        // A writer that wants its commit through must not be kept waiting for this lock.
        if self.is_reserved()? {
            return Err(sqlite::BUSY.into());
        }
        if !self.set(WRITE, PENDING)? {
            let is_read = self.conflict(PENDING)?.is_none_or(|kind| kind == READ);
            return Err(if is_read { Denied::Readers } else { sqlite::BUSY.into() });
        }
        if self.set(WRITE, SHARED)? { Ok(()) } else { Err(Denied::Readers) }
    }

    /// Takes all bytes of the lock, if nothing else has any of them.
    pub(crate) fn own_alone(self) -> bool {
        self.set(WRITE, ALL) == Ok(true)
    }

    /// Lowers the lock to `level`: `SHARED` or `NONE`. What the kernel refuses to unlock stays.
    pub(crate) fn lower(self, level: c_int) {
        if level < sqlite::LOCK_SHARED {
            let _ = self.set(NONE, ALL);
            return;
        }
        let _ = self.set(READ, SHARED);
        let _ = self.set(NONE, WRITERS);
    }

    /// Locks `RESERVED`, as the one that is about to write.
    pub(crate) fn reserve(self) -> Answer {
        if self.set(WRITE, RESERVED)? { Ok(()) } else { Err(sqlite::BUSY) }
    }

    /// Returns `true` if another user of the file is about to write.
    pub(crate) fn is_reserved(self) -> Answer<bool> {
        Ok(self.conflict(RESERVED)?.is_some())
    }

    /// Returns `true` if another user of the file, in this process or not, holds a lock of SQLite.
    pub(crate) fn is_contended(self) -> Answer<bool> {
        Ok(self.conflict(ALL)?.is_some())
    }

    /// Locks or unlocks bytes, without waiting. Returns `false` if another lock conflicts.
    pub(crate) fn set(self, kind: c_short, bytes: Bytes) -> Answer<bool> {
        match self.call(libc::F_OFD_SETLK, kind, bytes) {
            Ok(_) => Ok(true),
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EACCES) => Ok(false),
                _ => Err(sqlite::IOERR_LOCK),
            },
        }
    }

    /// Returns the kind of a lock that conflicts with a write lock.
    pub(crate) fn conflict(self, bytes: Bytes) -> Answer<Option<c_short>> {
        let found = self.call(libc::F_OFD_GETLK, WRITE, bytes);
        let kind = found.map_err(|_| sqlite::IOERR_CHECKRESERVEDLOCK)?;
        Ok(Some(kind).filter(|kind| *kind != NONE))
    }

    fn call(self, operation: c_int, kind: c_short, (first, count): Bytes) -> io::Result<c_short> {
        // SAFETY: all zeros is a valid value.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind;
        lock.l_whence = libc::SEEK_SET as c_short;
        lock.l_start = first;
        lock.l_len = count;
        // SAFETY: an open descriptor, and the struct of this call.
        let answer = unsafe { libc::fcntl(self.0.as_raw_fd(), operation, &raw mut lock) };
        if answer == 0 { Ok(lock.l_type) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;

    /// Two open files of one process stand for a process each: the rules are those of SQLite.
    #[test]
    fn an_exclusive_lock_waits_for_readers_and_yields_to_a_writer() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(path.path()).unwrap();
        let (files, busy) = ([open(), open()], Err(Denied::Code(sqlite::BUSY)));
        let [ours, other] = [0, 1].map(|number: usize| FileLock(files[number].as_fd()));
        other.share().unwrap();
        ours.share().unwrap();
        assert_eq!(ours.exclude(), Err(Denied::Readers));
        assert_eq!(FileLock(open().as_fd()).share(), busy, "no new reader");
        other.lower(sqlite::LOCK_NONE);
        assert_eq!(ours.exclude(), Ok(()));
        assert_eq!((other.share(), other.exclude()), (busy, Err(Denied::Code(sqlite::BUSY))));
        ours.lower(sqlite::LOCK_SHARED);
        other.share().unwrap();
        assert!(other.set(WRITE, RESERVED).unwrap() && ours.is_reserved().unwrap());
        assert_eq!(ours.exclude(), Err(Denied::Code(sqlite::BUSY)));
        assert_eq!(FileLock(open().as_fd()).share(), Ok(()), "PENDING was not taken");
        other.lower(sqlite::LOCK_NONE);
        assert!(other.is_contended().unwrap());
    }
}

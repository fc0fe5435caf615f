//! The index of the log (`-shm`), mapped and locked as by SQLite's own VFS.
//!
//! Its locks are those of an open file description, on the bytes that SQLite's own VFS locks
//! ([`FileLock`]). POSIX locks would not tell another copy of SQLite in this process that the index
//! is in use: it would reset it, and reads of the mapped bytes would end with a signal.
//!
//! ```text
//!  byte                    read lock                        write lock
//!  120 + slot, 8 slots     of SQLite: `wal.c` says what each is for
//!  128                     a user of the index              resets it: there was no user
//! ```
//!
//! # Safety
//! Maps the index, which grows and never shrinks while it has users, and hands out addresses that
//! are mapped until [`Index::unmap`].
#![allow(unsafe_code)]

use crate::descriptors::Key;
use crate::file_lock::{self, FileLock};
use crate::fork;
use crate::sqlite;
use crate::system::Answer;
use std::ffi::{OsString, c_int, c_void};
use std::fs::{self, File, Permissions};
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};

/// Bytes of a region, as SQLite asks for them.
const REGION_BYTES: u64 = super::log::REGION_BYTES as u64;

const SLOTS_OFFSET: i64 = 120;
/// The slots of readers.
const READERS: file_lock::Bytes = (123, 5);
const USERS: file_lock::Bytes = (128, 1);
const ALL: file_lock::Bytes = (SLOTS_OFFSET, 9);

/// Bytes that an index without a user is cut to: as SQLite's own VFS does, not to 0, so that it can
/// be told from a new file.
const RESET_BYTES: u64 = 3;
/// Unit in which the file is extended: each gets a byte, so that a full disk is an error now, and
/// not a signal later.
const BLOCK_BYTES: u64 = 4096;

/// The index of a database, for one connection at a time.
#[derive(Debug)]
pub(super) struct Index {
    path: PathBuf,
    file: File,
    key: Key,
    is_writable: bool,
    /// Set while this has the lock of a user.
    is_user: bool,
    /// Mapped parts of the file, [`part_bytes`] each.
    parts: Vec<NonNull<c_void>>,
}

// SAFETY: the mapped bytes belong to no thread.
unsafe impl Send for Index {}

impl Index {
    /// Opens the index of a database, and creates it with the rights and the owner of the database.
    pub(super) fn open(database: &Path, may_write: bool) -> io::Result<Self> {
        let path = path_of(database);
        let rights = fs::metadata(database)?;
        let mode = rights.mode() & 0o777;
        let open = |options: &mut fs::OpenOptions| {
            options.custom_flags(libc::O_NOFOLLOW);
            fork::open_alone(|| options.read(true).open(&path))
        };
        let created = match may_write {
            true => open(File::options().write(true).create(true).truncate(false).mode(mode)),
            false => Err(io::Error::from(io::ErrorKind::PermissionDenied)),
        };
        let (file, is_writable) = match created {
            Ok(file) => (file, true),
            Err(_) => (open(&mut File::options())?, false),
        };
        let (found, key) = (file.metadata()?, Key::of_file(file.as_fd())?);
        if is_writable
            && found.len() == 0
            && (found.mode() & 0o777, found.uid()) != (mode, rights.uid())
        {
            // As SQLite does: without the right to it, the index is this user's.
            let _ = file.set_permissions(Permissions::from_mode(mode));
            let _ = fchown(&file, Some(rights.uid()), Some(rights.gid()));
        }
        Ok(Self { path, file, key, is_writable, is_user: false, parts: Vec::new() })
    }

    /// Returns `true` if the file is still the index of the database.
    pub(super) fn is_current(&self) -> bool {
        Key::of(&self.path) == Some(self.key)
    }

    /// Opens the file again in a child, which has not inherited its descriptor, but what is mapped.
    /// Returns `false` if the file may have been reset meanwhile.
    pub(super) fn adopt(&mut self) -> bool {
        let open = || File::options().read(true).write(self.is_writable).open(&self.path);
        let Ok(file) = fork::open_alone(open) else { return false };
        mem::forget(mem::replace(&mut self.file, file));
        if Key::of_file(self.file.as_fd()).ok() != Some(self.key) {
            return false;
        }
        if !mem::take(&mut self.is_user) {
            return self.parts.is_empty();
        }
        // Another user, such as the parent, has kept it from being reset.
        self.is_user = self.lock().conflict(USERS) == Ok(Some(file_lock::READ))
            && self.lock().set(file_lock::READ, USERS) == Ok(true);
        self.is_user
    }

    /// Returns `true` while a connection uses the index.
    pub(super) fn is_mapped(&self) -> bool {
        self.is_user || !self.parts.is_empty()
    }

    fn lock(&self) -> FileLock<'_> {
        FileLock(self.file.as_fd())
    }

    /// Takes the lock of a user; if there is no other, resets the index first.
    fn enter(&mut self) -> Answer {
        if self.is_user {
            return Ok(());
        }
        match self.lock().conflict(USERS)? {
            Some(file_lock::WRITE) => return Err(sqlite::BUSY),
            None if !self.is_writable => return Err(sqlite::READONLY_CANTINIT),
            None => {
                if !self.lock().set(file_lock::WRITE, USERS)? {
                    return Err(sqlite::BUSY);
                }
                if self.file.set_len(RESET_BYTES).is_err() {
                    let _ = self.lock().set(file_lock::NONE, USERS);
                    return Err(sqlite::IOERR_SHMOPEN);
                }
            }
            Some(_) => {}
        }
        // The lock of a reset is lowered without a moment in between.
        self.is_user = self.lock().set(file_lock::READ, USERS)?;
        if self.is_user { Ok(()) } else { Err(sqlite::BUSY) }
    }

    /// Maps a region, as `xShmMap`: `None` if the file does not have it, and is not to be extended.
    pub(super) fn map(&mut self, region: u64, extends: bool) -> Answer<Option<NonNull<c_void>>> {
        self.enter()?;
        let part_bytes = part_bytes();
        let start = region * REGION_BYTES;
        let (part, offset) = (start / part_bytes, start % part_bytes);
        let end = (part + 1) * part_bytes;
        let bytes = self.file.metadata().map_err(|_| sqlite::IOERR_SHMSIZE)?.len();
        if bytes < start + REGION_BYTES && !extends {
            return Ok(None);
        }
        let mut next = bytes / BLOCK_BYTES * BLOCK_BYTES;
        while extends && next < end {
            let last = next + BLOCK_BYTES - 1;
            if last >= bytes {
                self.file.write_all_at(&[0], last).map_err(|_| sqlite::IOERR_SHMSIZE)?;
            }
            next += BLOCK_BYTES;
        }
        while self.parts.len() as u64 <= part {
            let position = self.parts.len() as u64 * part_bytes;
            self.parts.push(self.map_part(position, part_bytes)?);
        }
        let base = self.parts[part as usize];
        // SAFETY: inside the part.
        Ok(Some(unsafe { base.byte_add(offset as usize) }))
    }

    fn map_part(&self, position: u64, bytes: u64) -> Answer<NonNull<c_void>> {
        let writes = if self.is_writable { libc::PROT_WRITE } else { 0 };
        let position = libc::off_t::try_from(position).map_err(|_| sqlite::IOERR_SHMMAP)?;
        // SAFETY: new memory, of a file that has these bytes.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes as usize,
                libc::PROT_READ | writes,
                libc::MAP_SHARED,
                self.file.as_raw_fd(),
                position,
            )
        };
        match NonNull::new(address) {
            Some(found) if address != libc::MAP_FAILED => Ok(found),
            _ => Err(sqlite::IOERR_SHMMAP),
        }
    }

    /// Returns `true` if the mapped bytes can be written.
    pub(super) fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Returns `true` if another connection, of any process, reads the log.
    pub(super) fn has_readers(&self) -> Answer<bool> {
        Ok(self.lock().conflict(READERS)?.is_some())
    }

    /// Locks or unlocks slots, as `xShmLock`.
    pub(super) fn lock_slots(&self, first: c_int, count: c_int, flags: c_int) -> Answer {
        let kind = match flags {
            _ if flags & sqlite::SHM_UNLOCK != 0 => file_lock::NONE,
            _ if flags & sqlite::SHM_SHARED != 0 => file_lock::READ,
            _ => file_lock::WRITE,
        };
        let is_set = self.lock().set(kind, (SLOTS_OFFSET + i64::from(first), i64::from(count)));
        if is_set? { Ok(()) } else { Err(sqlite::BUSY) }
    }

    /// Unmaps all regions, and releases all locks. Deletes the file if SQLite asks for it, which it
    /// does when the database has no other user.
    pub(super) fn unmap(&mut self, deletes: bool) {
        for part in self.parts.drain(..) {
            // SAFETY: mapped with this length by `map_part`; SQLite uses it no more.
            unsafe { libc::munmap(part.as_ptr(), part_bytes() as usize) };
        }
        if deletes {
            // As SQLite's own VFS: an index that stays is reset by its next user.
            let _ = fs::remove_file(&self.path);
        }
        let _ = self.lock().set(file_lock::NONE, ALL);
        self.is_user = false;
    }

    /// Closes the file. No other user of the database has it open.
    pub(super) fn close(self) {
        fork::close_alone(self.file);
    }
}

/// Bytes that are mapped at once: a region, or a page of the machine if that is larger.
fn part_bytes() -> u64 {
    // SAFETY: asks for a number.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    REGION_BYTES.max(u64::try_from(page_bytes).unwrap_or(0))
}

fn path_of(database: &Path) -> PathBuf {
    let mut path = OsString::from(database);
    path.push("-shm");
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two indexes of one process stand for a process each.
    #[test]
    fn an_index_is_reset_by_its_first_user_only() {
        let directory = tempfile::tempdir().unwrap();
        let database = directory.path().join("x.db");
        fs::write(&database, "").unwrap();
        fs::set_permissions(&database, Permissions::from_mode(0o640)).unwrap();
        let path = path_of(&database);
        fs::write(&path, [7; 40000]).unwrap();
        let open = || Index::open(&database, true).unwrap();
        let (mut first, mut second) = (open(), open());
        assert_eq!(first.map(0, false), Ok(None), "it was reset");
        let region = first.map(0, true).unwrap().unwrap();
        // SAFETY: mapped, and used by this thread only.
        unsafe { region.cast::<u8>().write(9) };
        let seen = second.map(0, false).unwrap().unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { seen.cast::<u8>().read() }, 9);
        assert_eq!(first.lock_slots(3, 1, sqlite::SHM_SHARED), Ok(()));
        assert_eq!(second.lock_slots(3, 5, 0), Err(sqlite::BUSY));
        assert_eq!((first.has_readers(), second.has_readers()), (Ok(false), Ok(true)));
        first.unmap(false);
        assert_eq!(second.lock_slots(3, 5, 0), Ok(()), "its locks are gone");
        let mut reads = Index::open(&database, false).unwrap();
        assert!(reads.map(0, false).unwrap().is_some() && !reads.is_writable());
        second.unmap(false);
        reads.unmap(false);
        assert_eq!(reads.map(0, false), Err(sqlite::READONLY_CANTINIT));
        assert_eq!(second.map(0, false), Ok(None), "the last user left");
        second.unmap(true);
        assert!(!path.exists() && !second.is_current());
        second = open();
        assert_eq!(
            fs::metadata(&path).unwrap().mode() & 0o777,
            0o640,
            "the rights of the database"
        );
        [first, second, reads].into_iter().for_each(Index::close);
    }
}

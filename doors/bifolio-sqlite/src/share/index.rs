//! The index of the log (`-shm`), mapped and locked as by SQLite's own VFS: one for all connections
//! of the process to a database.
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
//! The connections of the process have one descriptor, so the kernel does not keep them apart.
//! Their locks are counted in [`SlotLocks`]; only the first and the last holder call the kernel. In
//! a pool, transactions of several connections overlap, and most take no lock of the kernel.
//!
//! PROTOCOL SLOT, of one slot, under the mutex of [`Index`]. `n` is the number of connections that
//! have it shared, or -1 if one has it exclusively.
//!
//! ```text
//!  CONNECTIONS OF THIS PROCESS                  OTHERS: processes, other copies of SQLite
//!  A1 shared, n = 0: read lock of the kernel,   B1 a write lock of theirs refuses A1 and A3:
//!     then n = 1                                   BUSY, and n stays 0
//!  A2 shared, n > 0: n + 1                      B2 while n > 0, their write lock is refused
//!  A3 exclusive, n = 0: write lock of the       B3 while n = -1, their locks are refused
//!     kernel, then n = -1; otherwise BUSY
//!  A4 release: n - 1, or 0 after -1; at 0 the   B4 may lock again
//!     lock of the kernel is released before
//!     the mutex is
//! ```
//!
//! A child of a fork has an index of its own: its copy of the parent's is never locked, since
//! another thread may have held the mutex. What the parent had mapped stays mapped in the child,
//! where SQLite has its addresses.
//!
//! # Safety
//! Maps the index, which grows and never shrinks while it has users, and hands out addresses that
//! are mapped until [`Index::unmap`].
#![allow(unsafe_code)]

use crate::descriptors::{self, Key};
use crate::file_lock::{self, FileLock};
use crate::fork::{self, Mutex};
use crate::locks::{HeldSlots, SlotLocks};
use crate::sqlite;
use crate::system::Answer;
use std::ffi::{OsString, c_int, c_void};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};

/// Bytes of a region, as SQLite asks for them.
const REGION_BYTES: u64 = super::log::REGION_BYTES as u64;

const SLOTS_OFFSET: i64 = 120;
const SLOTS: usize = 8;
/// The slots of readers.
const READERS: file_lock::Bytes = (123, 5);
const USERS: file_lock::Bytes = (128, 1);
const ALL: file_lock::Bytes = (SLOTS_OFFSET, 9);

/// Bytes that an index without a user is cut to: as SQLite's own VFS does, not to 0, so that it can
/// be told from a new file.
const RESET_BYTES: u64 = 3;

/// The index of a database, for the connections of this process.
#[derive(Debug)]
pub(super) struct Index {
    /// Path of the database.
    database: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    file: Option<IndexFile>,
    /// Connections that use the file.
    users: usize,
    /// Set while the process has the lock of a user.
    is_user: bool,
    slots: SlotLocks,
}

/// The use of an index by a connection.
#[derive(Debug, Default)]
pub(super) struct Use {
    /// The file, and `true` if it can be written.
    file: Option<(Key, bool)>,
    /// Set if a region may be mapped: the process has the lock of a user.
    is_mapped: bool,
    held: HeldSlots,
}

impl Use {
    /// Returns `true` if the connection has no slot locked.
    pub(super) fn is_idle(&self) -> bool {
        self.held == HeldSlots::default()
    }
}

/// A mapped region, or `None` if the file does not have it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mapped {
    pub(super) region: Option<NonNull<c_void>>,
    pub(super) is_writable: bool,
}

impl Index {
    pub(super) fn new(database: &Path) -> Self {
        Self { database: database.to_owned(), state: Mutex::default() }
    }

    /// Returns `true` if this is the index of the database at `path`.
    pub(super) fn is_of(&self, path: &Path) -> bool {
        self.database == path
    }

    /// Maps a region for a connection, as `xShmMap`: the first of the process opens the file, and
    /// creates it if it may write it.
    pub(super) fn map(
        &self,
        own: &mut Use,
        may_write: bool,
        region: u64,
        extends: bool,
    ) -> Answer<Mapped> {
        let mut state = self.state.lock();
        if state.file.as_ref().is_some_and(|file| !state.is_used() && !file.is_current()) {
            state.file.take().into_iter().for_each(IndexFile::close);
        }
        if state.file.is_none() {
            let opened = IndexFile::open(&self.database, may_write);
            state.file = Some(opened.map_err(|_| sqlite::CANTOPEN)?);
        }
        let State { file: Some(file), users, is_user, .. } = &mut *state else {
            return Err(sqlite::IOERR_SHMMAP);
        };
        // Also without the lock of a user: SQLite locks slots of an index that it cannot map.
        *users += usize::from(own.file.is_none());
        own.file = Some((file.key, file.is_writable));
        if !*is_user {
            file.enter()?;
            *is_user = true;
        }
        own.is_mapped = true;
        Ok(Mapped { region: file.map(region, extends)?, is_writable: file.is_writable })
    }

    /// Maps a region that the file has, for a connection that uses the index.
    pub(super) fn map_existing(&self, region: u64) -> Option<NonNull<c_void>> {
        let mut state = self.state.lock();
        state.file.as_mut()?.map(region, false).ok().flatten()
    }

    /// Locks or unlocks slots, as `xShmLock` (SLOT-A1 to A4).
    pub(super) fn lock_slots(
        &self,
        own: &mut Use,
        first: c_int,
        count: c_int,
        flags: c_int,
    ) -> Answer {
        let number = |number| usize::try_from(number).map_err(|_| sqlite::IOERR_SHMLOCK);
        let (first, count) = (number(first)?, number(count)?);
        if own.file.is_none() || !SlotLocks::has(first, count) {
            return Err(sqlite::IOERR_SHMLOCK);
        }
        let mut state = self.state.lock();
        let held = &mut own.held;
        if flags & sqlite::SHM_UNLOCK != 0 {
            return state.release(held, first, count);
        }
        let (kind, is_held) = match flags & sqlite::SHM_SHARED {
            0 => (file_lock::WRITE, false),
            _ => (file_lock::READ, !state.slots.is_free(first)),
        };
        let before = *held;
        let locked = match kind {
            file_lock::READ => state.slots.lock_shared(held, first),
            _ => state.slots.lock_exclusive(held, first, count),
        };
        locked.map_err(|_| sqlite::BUSY)?;
        if is_held || before == *held {
            return Ok(());
        }
        let is_set = state.lock().and_then(|lock| lock.set(kind, bytes_of(first, count)));
        if is_set == Ok(true) {
            return Ok(());
        }
        state.slots.unlock(held, first, count);
        Err(is_set.err().unwrap_or(sqlite::BUSY))
    }

    /// Returns `true` if another process, or another copy of SQLite, reads the log.
    pub(super) fn has_readers(&self, own: &Use) -> Answer<bool> {
        if own.file.is_none() {
            return Ok(false);
        }
        Ok(self.state.lock().lock()?.conflict(READERS)?.is_some())
    }

    /// Ends the use of the index by a connection, and releases its locks. The last one of the
    /// process unmaps all regions, and deletes the file if SQLite asks for it, which it does when
    /// the database has no other user.
    pub(super) fn unmap(&self, own: &mut Use, deletes: bool) {
        if own.file.take().is_none() {
            return;
        }
        own.is_mapped = false;
        let mut state = self.state.lock();
        // What the kernel refuses to unlock stays.
        let _ = state.release(&mut own.held, 0, SLOTS);
        state.users -= 1;
        if state.users == 0 {
            state.is_user = false;
            state.file.iter_mut().for_each(|file| file.leave(deletes));
        }
    }

    /// Takes over, in a child, the use by a connection in the parent, which has no slot. Returns
    /// `false` if what it has mapped may have been reset meanwhile.
    pub(super) fn adopt(&self, own: &Use) -> bool {
        let Some((key, is_writable)) = own.file else { return true };
        let mut state = self.state.lock();
        if state.file.is_none() {
            state.file = IndexFile::open_existing(&self.database, is_writable).ok();
        }
        let State { file: Some(file), users, is_user, .. } = &mut *state else { return false };
        if file.key != key {
            return false;
        }
        *is_user = *is_user || own.is_mapped && file.join();
        let is_adopted = *is_user || !own.is_mapped;
        *users += usize::from(is_adopted);
        is_adopted
    }

    /// Closes the file. No connection uses it, and the database has no other user.
    pub(super) fn close(&self) {
        self.state.lock().file.take().into_iter().for_each(IndexFile::close);
    }
}

impl State {
    /// Returns `true` while the process has a lock of the file.
    fn is_used(&self) -> bool {
        self.is_user || !(0..SLOTS).all(|slot| self.slots.is_free(slot))
    }

    fn lock(&self) -> Answer<FileLock<'_>> {
        self.file.as_ref().map(IndexFile::lock).ok_or(sqlite::IOERR_SHMLOCK)
    }

    /// Releases what a connection has of some slots (SLOT-A4).
    fn release(&mut self, held: &mut HeldSlots, first: usize, count: usize) -> Answer {
        let before = *held;
        self.slots.unlock(held, first, count);
        if before == *held {
            return Ok(());
        }
        let (mut start, end) = (first, first + count);
        let mut released = Ok(());
        while start < end {
            let run = (start..end).take_while(|slot| self.slots.is_free(*slot)).count();
            if run > 0 {
                let bytes = bytes_of(start, run);
                released = released.and(self.lock()?.set(file_lock::NONE, bytes).map(|_| ()));
            }
            start += run + 1;
        }
        released
    }
}

/// Bytes of the file that stand for slots.
fn bytes_of(first: usize, count: usize) -> file_lock::Bytes {
    (SLOTS_OFFSET + first as i64, count as i64)
}

/// The file of an index.
#[derive(Debug)]
struct IndexFile {
    path: PathBuf,
    file: File,
    key: Key,
    is_writable: bool,
    /// Mapped parts of the file, [`part_bytes`] each.
    parts: Vec<NonNull<c_void>>,
}

// SAFETY: the mapped bytes belong to no thread.
unsafe impl Send for IndexFile {}

impl IndexFile {
    /// Opens the index of a database, and creates it with the rights and the owner of the database.
    fn open(database: &Path, may_write: bool) -> io::Result<Self> {
        let path = path_of(database);
        let rights = fs::metadata(database)?;
        let mode = rights.mode() & 0o777;
        let created = match may_write {
            true => {
                let mut options = File::options();
                options.write(true).create(true).truncate(false).mode(mode);
                open_alone(&path, &mut options)
            }
            false => Err(io::Error::from(io::ErrorKind::PermissionDenied)),
        };
        let (file, is_writable) = match created {
            Ok(file) => (file, true),
            Err(_) => (open_alone(&path, &mut File::options())?, false),
        };
        let found = file.metadata()?;
        let key = Key::of_metadata(&found);
        if is_writable
            && found.len() == 0
            && (found.mode() & 0o777, found.uid()) != (mode, rights.uid())
        {
            // As SQLite does: without the right to it, the index is this user's.
            let _ = file.set_permissions(Permissions::from_mode(mode));
            let _ = fchown(&file, Some(rights.uid()), Some(rights.gid()));
        }
        Ok(Self { path, file, key, is_writable, parts: Vec::new() })
    }

    /// Opens the index of a database if there is one.
    fn open_existing(database: &Path, is_writable: bool) -> io::Result<Self> {
        let path = path_of(database);
        let file = open_alone(&path, File::options().write(is_writable))?;
        let key = Key::of_file(file.as_fd())?;
        Ok(Self { path, file, key, is_writable, parts: Vec::new() })
    }

    /// Returns `true` if the file is still the index of the database.
    fn is_current(&self) -> bool {
        Key::of(&self.path) == Some(self.key)
    }

    fn lock(&self) -> FileLock<'_> {
        FileLock(self.file.as_fd())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(descriptors::status(self.file.as_fd())?.st_size as u64)
    }

    /// Takes the lock of a user if another one has kept the file from being reset, such as the
    /// parent of this process.
    fn join(&self) -> bool {
        self.lock().conflict(USERS) == Ok(Some(file_lock::READ))
            && self.lock().set(file_lock::READ, USERS) == Ok(true)
    }

    /// Takes the lock of a user; if there is no other, resets the index first.
    fn enter(&self) -> Answer {
        match self.lock().conflict(USERS)? {
            Some(file_lock::WRITE) => return Err(sqlite::BUSY),
            None if !self.is_writable => return Err(sqlite::READONLY_CANTINIT),
            None => {
                if !self.lock().set(file_lock::WRITE, USERS)? {
                    return Err(sqlite::BUSY);
                }
                // A new file is extended from its start: in larger folios of the kernel.
                let is_reset = match self.len_bytes() {
                    Ok(0) => true,
                    Ok(_) => self.file.set_len(RESET_BYTES).is_ok(),
                    Err(_) => false,
                };
                if !is_reset {
                    let _ = self.lock().set(file_lock::NONE, USERS);
                    return Err(sqlite::IOERR_SHMOPEN);
                }
            }
            Some(_) => {}
        }
        // The lock of a reset is lowered without a moment in between.
        if self.lock().set(file_lock::READ, USERS)? { Ok(()) } else { Err(sqlite::BUSY) }
    }

    /// Maps a region: `None` if the file does not have it, and is not to be extended.
    fn map(&mut self, region: u64, extends: bool) -> Answer<Option<NonNull<c_void>>> {
        let part_bytes = part_bytes();
        let start = region * REGION_BYTES;
        let (part, offset) = (start / part_bytes, start % part_bytes);
        let end = (part + 1) * part_bytes;
        let bytes = self.len_bytes().map_err(|_| sqlite::IOERR_SHMSIZE)?;
        if bytes < start + REGION_BYTES && !extends {
            return Ok(None);
        }
        if extends && bytes < end {
            // SQLite extends it only while it has a lock under which no other process does.
            let zeros = vec![0; (end - bytes) as usize];
            self.file.write_all_at(&zeros, bytes).map_err(|_| sqlite::IOERR_SHMSIZE)?;
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

    /// Unmaps all regions, and releases all locks.
    fn leave(&mut self, deletes: bool) {
        for part in self.parts.drain(..) {
            // SAFETY: mapped with this length by `map_part`; SQLite uses it no more.
            unsafe { libc::munmap(part.as_ptr(), part_bytes() as usize) };
        }
        if deletes {
            // As SQLite's own VFS: an index that stays is reset by its next user.
            let _ = fs::remove_file(&self.path);
        }
        let _ = self.lock().set(file_lock::NONE, ALL);
    }

    fn close(self) {
        fork::close_alone(self.file);
    }
}

/// Opens a file whose locks no child of a fork keeps.
fn open_alone(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    options.read(true).custom_flags(libc::O_NOFOLLOW);
    fork::open_alone(|| options.open(path))
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

    fn map(index: &Index, own: &mut Use, extends: bool) -> Answer<Option<NonNull<c_void>>> {
        index.map(own, true, 0, extends).map(|mapped| mapped.region)
    }

    /// Two indexes of one process stand for a process each.
    #[test]
    fn an_index_is_reset_by_its_first_user_only() {
        let directory = tempfile::tempdir().unwrap();
        let database = directory.path().join("x.db");
        fs::write(&database, "").unwrap();
        fs::set_permissions(&database, Permissions::from_mode(0o640)).unwrap();
        let path = path_of(&database);
        fs::write(&path, [7; 40000]).unwrap();
        let [first, second, reads] = [(); 3].map(|()| Index::new(&database));
        let (mut one, mut two, mut three) = (Use::default(), Use::default(), Use::default());
        assert_eq!(map(&first, &mut one, false), Ok(None), "it was reset");
        let region = map(&first, &mut one, true).unwrap().unwrap();
        // SAFETY: mapped, and used by this thread only.
        unsafe { region.cast::<u8>().write(9) };
        let seen = map(&second, &mut two, false).unwrap().unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { seen.cast::<u8>().read() }, 9);
        assert_eq!(first.lock_slots(&mut one, 3, 1, sqlite::SHM_SHARED), Ok(()));
        assert_eq!(second.lock_slots(&mut two, 3, 5, 0), Err(sqlite::BUSY));
        assert_eq!(first.has_readers(&one), Ok(false), "no other");
        assert_eq!(second.has_readers(&two), Ok(true));
        first.unmap(&mut one, false);
        assert_eq!(second.lock_slots(&mut two, 3, 5, 0), Ok(()), "its locks are gone");
        let mapped = reads.map(&mut three, false, 0, false).unwrap();
        assert!(mapped.region.is_some() && !mapped.is_writable);
        second.unmap(&mut two, false);
        reads.unmap(&mut three, false);
        let refused = reads.map(&mut three, false, 0, false);
        assert_eq!(refused, Err(sqlite::READONLY_CANTINIT));
        // SQLite reads the log without the index then, and keeps it from being restarted.
        assert_eq!(reads.lock_slots(&mut three, 3, 1, sqlite::SHM_SHARED), Ok(()));
        assert_eq!(map(&second, &mut two, false), Ok(None), "the last user left");
        assert_eq!(second.lock_slots(&mut two, 3, 1, 0), Err(sqlite::BUSY));
        reads.unmap(&mut three, false);
        assert_eq!(second.lock_slots(&mut two, 3, 1, 0), Ok(()));
        second.unmap(&mut two, true);
        assert!(!path.exists());
        assert_eq!(map(&second, &mut two, false), Ok(None), "another file");
        assert_eq!(
            fs::metadata(&path).unwrap().mode() & 0o777,
            0o640,
            "the rights of the database"
        );
        [first, second, reads].iter().for_each(Index::close);
    }

    /// Connections of one process, beside another process: the kernel has a lock exactly as long as
    /// a connection has.
    #[test]
    fn the_kernel_has_the_locks_of_all_connections_of_a_process() {
        let directory = tempfile::tempdir().unwrap();
        let database = directory.path().join("x.db");
        fs::write(&database, "").unwrap();
        let [index, other] = [(); 2].map(|()| Index::new(&database));
        let [mut a, mut b, mut foreign] = [(); 3].map(|()| Use::default());
        for (index, own) in [(&index, &mut a), (&index, &mut b), (&other, &mut foreign)] {
            map(index, own, true).unwrap().unwrap();
        }
        let shared = sqlite::SHM_SHARED;
        let unlock = |own: &mut Use, first, count, kind| {
            index.lock_slots(own, first, count, kind | sqlite::SHM_UNLOCK)
        };
        let mut is_free = |first, count| {
            let is_free = other.lock_slots(&mut foreign, first, count, 0) == Ok(());
            let _ = other.lock_slots(&mut foreign, first, count, sqlite::SHM_UNLOCK);
            is_free
        };
        for own in [&mut a, &mut b] {
            assert_eq!(index.lock_slots(own, 3, 1, shared), Ok(()));
            assert_eq!(index.lock_slots(own, 3, 1, shared), Ok(()), "once more");
        }
        assert!(!is_free(3, 1) && is_free(4, 4) && is_free(0, 3));
        assert_eq!(index.lock_slots(&mut b, 2, 3, 0), Err(sqlite::BUSY), "of its process");
        assert_eq!(unlock(&mut a, 3, 1, shared), Ok(()));
        assert_eq!(unlock(&mut a, 3, 1, shared), Ok(()), "not held any more");
        assert!(a.is_idle() && !b.is_idle() && !is_free(3, 1), "the other connection has it");
        assert_eq!(unlock(&mut b, 3, 1, shared), Ok(()));
        assert!(is_free(3, 1));
        assert_eq!(index.lock_slots(&mut a, 4, 4, 0), Ok(()));
        assert_eq!(index.lock_slots(&mut b, 4, 1, shared), Err(sqlite::BUSY));
        assert!(!is_free(4, 1) && !is_free(7, 1) && is_free(3, 1));
        assert_eq!(unlock(&mut b, 4, 4, 0), Ok(()), "not its own");
        assert!(!is_free(7, 1));
        // The end of a connection releases what it has, and nothing of the others.
        assert_eq!(index.lock_slots(&mut b, 3, 1, shared), Ok(()));
        index.unmap(&mut a, false);
        assert!(is_free(4, 4) && !is_free(3, 1));
        index.unmap(&mut b, false);
        assert!(is_free(0, 8));
        assert_eq!(index.lock_slots(&mut b, 3, 1, shared), Err(sqlite::IOERR_SHMLOCK));
        assert_eq!(map(&index, &mut b, false).map(|region| region.is_some()), Ok(true));
        assert_eq!(index.lock_slots(&mut b, 7, 2, 0), Err(sqlite::IOERR_SHMLOCK));
        // A lock of another process is refused once, and leaves nothing behind.
        assert_eq!(other.lock_slots(&mut foreign, 3, 1, 0), Ok(()));
        assert_eq!(index.lock_slots(&mut b, 3, 1, shared), Err(sqlite::BUSY));
        assert_eq!(index.lock_slots(&mut b, 2, 3, 0), Err(sqlite::BUSY));
        assert!(b.is_idle());
        assert_eq!(other.lock_slots(&mut foreign, 3, 1, sqlite::SHM_UNLOCK), Ok(()));
        assert_eq!(index.lock_slots(&mut b, 3, 1, shared), Ok(()));
    }

    /// An index of its own stands for that of a child.
    #[test]
    fn an_index_that_a_child_takes_over_is_not_reset_after_its_parent_left() {
        let directory = tempfile::tempdir().unwrap();
        let database = directory.path().join("x.db");
        fs::write(&database, "").unwrap();
        let [parent, child, late, other] = [(); 4].map(|()| Index::new(&database));
        let [mut own, mut others] = [(); 2].map(|()| Use::default());
        let region = map(&parent, &mut own, true).unwrap().unwrap();
        // SAFETY: mapped, and used by this thread only.
        unsafe { region.cast::<u8>().write(9) };
        let inherits = |is_mapped| Use { file: own.file, is_mapped, ..Use::default() };
        let (mut first, mut second) = (inherits(true), inherits(false));
        let mapped = inherits(true);
        assert!(child.adopt(&first));
        parent.unmap(&mut own, false);
        let seen = map(&other, &mut others, false).unwrap().expect("it was not reset");
        // SAFETY: as above.
        assert_eq!(unsafe { seen.cast::<u8>().read() }, 9);
        other.unmap(&mut others, false);
        child.unmap(&mut first, false);
        assert!(!late.adopt(&mapped), "it has no user, and may have been reset");
        assert!(late.adopt(&second), "nothing was mapped");
        late.unmap(&mut second, false);
        fs::remove_file(path_of(&database)).unwrap();
        assert!(map(&other, &mut others, true).unwrap().is_some());
        assert!(!Index::new(&database).adopt(&mapped), "another file");
    }
}

//! A connection to a database that other processes use, too.
//!
//! # Safety
//! Uses the pointers that SQLite passes to [`Methods`].
#![allow(unsafe_code)]

use super::database::{Checked, Database};
use super::descriptors::Descriptors;
use super::index::Use;
use super::log::{Look, REGION_BYTES, Regions};
use crate::descriptors::Key;
use crate::file_lock::Denied;
use crate::fork;
use crate::methods::Methods;
use crate::name::FileName;
use crate::pragmas;
use crate::refused::OpenFailure;
use crate::settings::Settings;
use crate::sqlite::{self, Api, Vfs};
use crate::system::{Answer, SystemFile};
use bifolio::Access;
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Slot of the index that a writer locks, and the recovery of the index.
const WRITER_SLOT: c_int = 0;
/// Slot of the index that a checkpoint locks.
const CHECKPOINT_SLOT: c_int = 1;
/// First slot of the readers of frames, all of which a restart locks.
const FRAME_READERS_SLOT: c_int = 4;

/// A connection to a main database.
pub(crate) struct Connection {
    api: Api,
    /// Closed before `own`: it has no locks.
    file: Option<bifolio::File>,
    /// The system's file, and the locks.
    own: Option<Descriptors>,
    database: Arc<Database>,
    /// Forks up to the process that opened the connection.
    forks: u32,
    /// Set by the first read behind the header, which is no begin of a sequential reader: a program
    /// that opens a database for each request reads three pages.
    reads_ahead: Cell<bool>,
    /// SQLite takes no lock: nothing changes the file.
    is_immutable: bool,
    index: Use,
    /// Set once SQLite has asked for the index.
    has_asked_index: bool,
    /// Level of its lock: that of the last call that succeeded.
    level: c_int,
    /// The kernel has no more than the lock of that level: nothing was attempted since it was
    /// lowered.
    is_lowered: bool,
    regions: Regions,
    /// Result of the last W1.
    checked: Option<Checked>,
    /// State of the log when a restart began, if all of it was seen.
    restarting: Option<Look>,
    /// Set during a checkpoint of this connection.
    is_checkpointing: bool,
    /// Set while the connection may write the header of the index.
    is_writer: bool,
}

impl Connection {
    /// Opens a connection, and returns it with the flags that SQLite is to be told. `found` is what
    /// the path names, if that exists. No other is opened or closed meanwhile.
    ///
    /// # Safety
    /// `system` is registered.
    pub(crate) unsafe fn open(
        api: Api,
        system: *mut Vfs,
        (name, found): (impl Fn() -> FileName, Option<Key>),
        flags: c_int,
        settings: &Settings,
    ) -> Result<(Self, c_int), OpenFailure> {
        // SAFETY: the contract.
        let opened = unsafe { Database::open(api, system, (&name, found), flags, settings) };
        let (database, own) = opened?;
        let file = database.handle().inspect_err(|problem| database.distrust(problem)).ok();
        let flags = own.flags_found;
        let connection = Self {
            api,
            file,
            own: Some(own),
            database,
            forks: fork::count(),
            reads_ahead: Cell::new(false),
            is_immutable: settings.is_immutable(),
            index: Use::default(),
            has_asked_index: false,
            level: sqlite::LOCK_NONE,
            is_lowered: true,
            regions: Regions::default(),
            checked: None,
            restarting: None,
            is_checkpointing: false,
            is_writer: false,
        };
        Ok((connection, flags))
    }

    fn own(&mut self) -> &mut Descriptors {
        self.own.as_mut().expect("open until the connection is closed")
    }

    fn lock_slots(&mut self, first: c_int, count: c_int, flags: c_int) -> Answer {
        self.database.index.lock_slots(&mut self.index, first, count, flags)
    }

    fn system(&mut self) -> &mut SystemFile {
        &mut self.own().system
    }

    /// Returns the handle in the cache if the page there at `position` is what the file has.
    fn trusted(&self, position: u64) -> Option<&bifolio::File> {
        let is_known = !self.regions.is_empty()
            || self.level == sqlite::LOCK_EXCLUSIVE
            || !self.database.has_log()
            || !self.has_asked_index && self.database.is_fresh();
        let file = self.file.as_ref().filter(|_| self.database.is_trusted())?;
        let may_read = match self.level {
            // The header, at the open, which SQLite reads again (K1).
            sqlite::LOCK_NONE => self.is_immutable || position == 0 && file.is_unchanged(),
            _ => self.is_immutable || is_known,
        };
        may_read.then_some(file)
    }

    /// Has pages go that other processes have written (W1). With EXCLUSIVE, they write nothing, and
    /// SQLite takes no slot that would tell a writer or a checkpoint.
    fn check_log(&mut self) {
        let Some(own) = &self.own else { return };
        if self.level < sqlite::LOCK_EXCLUSIVE && !self.regions.is_empty() {
            let (database, file) = (&self.database, own.file());
            let checked = database.check_log(&mut self.regions, file, self.is_writer);
            self.checked = checked.or(self.checked.take());
        }
    }

    /// Returns the size of the file that the last W1 has found, in a transaction that reads beside
    /// an empty log: its slot keeps others from a checkpoint, and from replacing the file.
    fn stamped_bytes(&self) -> Option<i64> {
        let reads_alone = !self.index.is_idle() && !self.is_writer && !self.is_checkpointing;
        let checked = self.checked.as_ref()?;
        checked.file_bytes().filter(|_| reads_alone && self.level == sqlite::LOCK_SHARED)
    }

    /// Returns `true` if [`Self::check_log`] would find nothing.
    fn is_checked(&self) -> bool {
        let (Some(own), Some(checked)) = (&self.own, &self.checked) else { return false };
        // Without a slot, SQLite reads no page before another barrier, which it passes with one.
        // While it has one, no program can replace the file.
        let stamped = (!self.index.is_idle()).then(|| own.file());
        self.level < sqlite::LOCK_EXCLUSIVE
            && !self.regions.is_empty()
            && self.database.is_checked(checked, &self.regions, stamped)
    }
}

impl Methods for Connection {
    fn is_inherited(&self) -> bool {
        self.forks != fork::count()
    }

    /// As connections of SQLite's own VFS can in practice, one without a transaction at the fork
    /// works on: servers open a database before they fork their workers.
    fn adopt(&mut self) -> bool {
        if self.level > sqlite::LOCK_SHARED || !self.index.is_idle() {
            return false;
        }
        let _alone = super::opening().lock();
        // The cache of the parent has no threads here.
        mem::forget(self.file.take());
        let Some(mut own) = self.own.take().and_then(Descriptors::adopt) else { return false };
        let Some(database) = Database::adopt(&self.database, &mut own) else {
            mem::forget(own);
            return false;
        };
        let mut is_adopted = database.index.adopt(&self.index);
        if is_adopted && self.level == sqlite::LOCK_SHARED {
            // With a log, it has this lock all the time.
            let locked = own.lock().share().map_err(|denied| denied.code());
            is_adopted = locked.and_then(|()| database.enter(&mut own.system)).is_ok();
        }
        if !is_adopted {
            // SQLite still has the addresses of the index, whose file stays in use.
            own.lock().lower(sqlite::LOCK_NONE);
            mem::forget(own);
            return false;
        }
        self.checked = None;
        self.reads_ahead.set(false);
        self.file = database.handle().inspect_err(|problem| database.distrust(problem)).ok();
        self.own = Some(own);
        mem::forget(mem::replace(&mut self.database, database));
        self.forks = fork::count();
        true
    }

    fn close(&mut self) -> Answer {
        let _alone = super::opening().lock();
        let unlocked = self.unlock(sqlite::LOCK_NONE);
        self.file = None;
        if let Some(own) = self.own.take() {
            self.database.index.unmap(&mut self.index, false);
            self.database.leave(own);
        }
        unlocked
    }

    fn read(&mut self, buffer: &mut [u8], position: u64) -> Answer {
        if let Some(file) = self.trusted(position) {
            let end = position.saturating_add(buffer.len() as u64);
            if end > file.len() {
                self.database.refresh(file);
            }
            if !self.reads_ahead.get() && position > 0 {
                self.reads_ahead.set(true);
                file.set_access(Access::Normal);
            }
            // A page that the cache cannot read may be one that SQLite can.
            if end <= file.len() && file.read_exact_at(buffer, position).is_ok() {
                return Ok(());
            }
        }
        self.system().read(buffer, position)
    }

    fn write(&mut self, buffer: &[u8], position: u64) -> Answer {
        let written = self.system().write(buffer, position);
        // Also after a failure: part of it may have been written.
        match &self.file {
            Some(file) => self.database.note_write(file, position, buffer, written.is_ok()),
            None => self.database.distrust("written without a handle of the cache"),
        }
        written
    }

    fn truncate(&mut self, size: i64) -> Answer {
        let cut = self.system().truncate(size);
        if let Some(file) = &self.file {
            self.database.refresh(file);
        }
        cut
    }

    fn sync(&mut self, flags: c_int) -> Answer {
        self.system().sync(flags)
    }

    /// # Safety
    /// `size` is a variable.
    unsafe fn file_size(&mut self, size: *mut i64) -> Answer {
        let found = match self.stamped_bytes() {
            Some(bytes) => bytes,
            None => self.system().size()?,
        };
        // SAFETY: the contract.
        unsafe { size.write(found) };
        Ok(())
    }

    fn lock(&mut self, level: c_int) -> Answer {
        if level <= self.level {
            return Ok(());
        }
        let Self { own: Some(own), database, .. } = self else { return Err(sqlite::IOERR_LOCK) };
        self.is_lowered = false;
        if self.level == sqlite::LOCK_NONE {
            own.lock().share().map_err(|denied| denied.code())?;
            database.enter(&mut own.system).inspect_err(|_| own.lock().lower(sqlite::LOCK_NONE))?;
        } else if level == sqlite::LOCK_RESERVED {
            own.lock().reserve()?;
        } else {
            if let Err(denied) = own.lock().exclude() {
                if denied == Denied::Readers {
                    self.level = sqlite::LOCK_PENDING;
                }
                return Err(denied.code());
            }
            database.note_exclusive();
        }
        self.level = level;
        Ok(())
    }

    fn unlock(&mut self, level: c_int) -> Answer {
        let Self { own: Some(own), database, .. } = self else { return Err(sqlite::IOERR_UNLOCK) };
        if level < self.level {
            if self.level > sqlite::LOCK_SHARED {
                database.note_own(&mut own.system);
            }
            if self.level == sqlite::LOCK_EXCLUSIVE {
                database.note_exclusive();
            }
            if level == sqlite::LOCK_NONE {
                database.exit();
            }
            self.level = level;
        } else if self.is_lowered {
            return Ok(());
        }
        // Also if the level is the same: an attempt at more may have left `PENDING`.
        own.lock().lower(self.level);
        self.is_lowered = true;
        Ok(())
    }

    /// # Safety
    /// `answer` is a variable.
    unsafe fn check_reserved_lock(&mut self, answer: *mut c_int) -> Answer {
        let is_reserved = self.level >= sqlite::LOCK_RESERVED || self.own().lock().is_reserved()?;
        // SAFETY: the contract.
        unsafe { answer.write(c_int::from(is_reserved)) };
        Ok(())
    }

    /// # Safety
    /// `argument` is what SQLite passes with `operation`.
    unsafe fn file_control(&mut self, operation: c_int, argument: *mut c_void) -> Answer {
        match operation {
            sqlite::FCNTL_VFSNAME => {
                // SAFETY: SQLite's variable, whose text it frees.
                unsafe { argument.cast::<*mut c_char>().write(self.api.text("bifolio")) };
                Ok(())
            }
            sqlite::FCNTL_PRAGMA => {
                let arguments = argument.cast::<*mut c_char>();
                // SAFETY: three texts and room for another.
                let asked = unsafe { pragmas::asked(arguments) };
                // SAFETY: as above.
                unsafe { pragmas::answer(self.api, &self.database.cache, &asked, arguments) }
            }
            sqlite::FCNTL_EXTERNAL_READER => {
                let has_readers = self.database.index.has_readers(&self.index)?;
                // SAFETY: SQLite's variable.
                unsafe { argument.cast::<c_int>().write(c_int::from(has_readers)) };
                Ok(())
            }
            sqlite::FCNTL_COMMIT_PHASETWO => {
                self.database.note_commit();
                Err(sqlite::NOTFOUND)
            }
            sqlite::FCNTL_LOCKSTATE => {
                // SAFETY: SQLite's variable.
                unsafe { argument.cast::<c_int>().write(self.level) };
                Ok(())
            }
            sqlite::FCNTL_MMAP_SIZE => {
                // No page is mapped, whatever limit is asked for.
                // SAFETY: SQLite's variable.
                unsafe { argument.cast::<i64>().write(0) };
                Ok(())
            }
            // SAFETY: the contract.
            _ => unsafe { self.system().control(operation, argument) },
        }
    }

    fn sector_size(&mut self) -> c_int {
        self.system().sector_size()
    }

    fn device_characteristics(&mut self) -> c_int {
        // Pages that are written in an atomic batch are seen at its end only, of which no write
        // tells.
        self.system().device_characteristics() & !sqlite::IOCAP_BATCH_ATOMIC
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
        self.has_asked_index = true;
        self.database.note_log();
        let number = usize::try_from(region).map_err(|_| sqlite::IOERR_SHMMAP)?;
        if size != REGION_BYTES {
            return Err(sqlite::IOERR_SHMMAP);
        }
        let may_write = self.own().may_write_index();
        let index = &self.database.index;
        let mapped = index.map(&mut self.index, may_write, number as u64, extend != 0)?;
        let found = mapped.region;
        // SAFETY: the contract.
        unsafe { address.write(found.map_or(ptr::null_mut(), NonNull::as_ptr)) };
        if !mapped.is_writable {
            // Without barriers, it counts as not mapped.
            return Err(sqlite::READONLY);
        }
        if let Some(found) = found {
            // SAFETY: of that size, and mapped until `xShmUnmap`.
            unsafe { self.regions.note(number, found.cast()) };
        }
        Ok(())
    }

    fn shm_lock(&mut self, first: c_int, count: c_int, flags: c_int) -> Answer {
        let is_alone = flags & sqlite::SHM_SHARED == 0;
        let is_unlock = flags & sqlite::SHM_UNLOCK != 0;
        let is_checkpoint = is_alone && first == CHECKPOINT_SLOT && count == 1;
        let is_restart = is_alone && first == FRAME_READERS_SLOT && count > 1;
        let is_write = is_alone && first == WRITER_SLOT;
        if is_unlock {
            self.is_writer &= !is_write;
            if is_checkpoint && std::mem::take(&mut self.is_checkpointing) {
                self.database.note_checkpoint(&self.regions);
            }
            if let Some(whole) = self.restarting.take_if(|_| is_restart) {
                self.database.note_restart(&whole, &self.regions);
            }
            return self.lock_slots(first, count, flags);
        }
        self.lock_slots(first, count, flags)?;
        self.is_writer |= is_write;
        if is_checkpoint || is_restart {
            self.check_log();
            self.is_checkpointing |= is_checkpoint;
        }
        if is_restart {
            self.restarting = self.database.seen_whole();
        }
        Ok(())
    }

    fn shm_barrier(&mut self) {
        // AcqRel: orders the two copies of the header in the index, and nBackfill before the
        // header, which others store in opposite order. A read mark is ordered before the header
        // by the slot locks between them, each of which locks a mutex. So the mutex of all files
        // that SQLite's own VFS locks here is not needed.
        fence(Ordering::AcqRel);
        if !self.is_checked() {
            self.check_log();
        }
    }

    fn shm_unmap(&mut self, delete: c_int) -> Answer {
        self.regions.clear();
        self.checked = None;
        self.database.index.unmap(&mut self.index, delete != 0);
        Ok(())
    }
}

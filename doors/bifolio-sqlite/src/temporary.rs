//! Temporary files of sorters and statements, in the cache of the process.
//!
//! The system's VFS leaves them to the kernel's page cache, which in a control group has only what
//! the bound of the cache does not take: the sorter of a `CREATE INDEX` then reads from the device
//! what it has just written. Here they are within the bound, beside the database, and what is still
//! dirty when they are closed is never written.
//!
//! Not those of temporary tables, which a connection keeps across a fork: the cache of the parent
//! has no threads in the child. Where the cache of the process is not in use (each database has one
//! of its own), or the directory has no unnamed files, a file stays with the system's VFS.
//!
//! # Safety
//! Calls functions of a file that the system's VFS has opened, and replaces it in SQLite's memory
//! once it is closed.
#![allow(unsafe_code)]

use crate::fork;
use crate::methods::{self, Methods};
use crate::process_cache;
use crate::runs::Runs;
use crate::sqlite::{self, Api, File, IoMethods};
use crate::system::Answer;
use bifolio::{Access, Cache, Error, ErrorKind, OpenOptions};
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr;

/// The kinds that are served: of sorters and other transient tables, and of statements.
const SERVED: c_int =
    sqlite::OPEN_TRANSIENT_DB | sqlite::OPEN_TEMP_JOURNAL | sqlite::OPEN_SUBJOURNAL;

/// A temporary file, which has no name.
struct Temporary {
    api: Api,
    file: bifolio::File,
    cache: Cache,
    /// Set by the first read: most files of statements are never read.
    runs: Option<Runs>,
    /// Forks up to the process that opened it.
    forks: u32,
}

/// Replaces an empty temporary file that the system's VFS has opened with one in the cache, if it
/// is of a kind that is served. Otherwise it stays as it is.
///
/// # Safety
/// `file` was opened with `flags` and without a name by the system's VFS.
pub(crate) unsafe fn take_over(api: Api, file: *mut File, flags: c_int) {
    if flags & SERVED == 0 {
        return;
    }
    let Some(cache) = process_cache::existing() else { return };
    // SAFETY: the contract.
    let Some(directory) = (unsafe { directory_of(api, file) }) else { return };
    let Ok(unnamed) = unnamed_in(&directory) else { return };
    let options = OpenOptions::new().read(true).write(true);
    let opened = match cache.open_fd(unnamed.into(), &options) {
        Ok(opened) => opened,
        Err(error) => return api.log(sqlite::OK, &format!("a temporary file: {error}")),
    };
    // SAFETY: an open file of the system's VFS.
    let close = unsafe { methods_of(file) }.close;
    // SAFETY: the same, which is not used any more.
    unsafe { close(file) };
    let temporary = Temporary { api, file: opened, cache, runs: None, forks: fork::count() };
    // SAFETY: the memory that SQLite has for a file.
    unsafe { methods::open(file, temporary) };
}

/// # Safety
/// An open file of the system's VFS.
unsafe fn methods_of<'a>(file: *mut File) -> &'a IoMethods {
    // SAFETY: the memory of a file begins with the pointer to its table.
    let methods = unsafe { (*file).methods };
    // SAFETY: the table of an open file, which lives as long as the VFS.
    unsafe { &*methods }
}

/// Returns the directory where the system's VFS makes temporary files: it follows
/// `SQLITE_TMPDIR`, `TMPDIR` and `PRAGMA temp_store_directory`.
///
/// # Safety
/// An open file of the system's VFS.
unsafe fn directory_of(api: Api, file: *mut File) -> Option<PathBuf> {
    let mut name = ptr::null_mut::<c_char>();
    // SAFETY: an open file.
    let control = unsafe { methods_of(file) }.file_control;
    // SAFETY: the operation takes a variable for a text.
    let code = unsafe { control(file, sqlite::FCNTL_TEMPFILENAME, (&raw mut name).cast()) };
    if code != sqlite::OK || name.is_null() {
        return None;
    }
    // SAFETY: a text of SQLite.
    let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes()));
    let directory = path.parent().map(Path::to_owned);
    // SAFETY: the text, which was allocated for the caller, and is not used any more.
    unsafe { api.free(name.cast()) };
    directory
}

fn unnamed_in(directory: &Path) -> std::io::Result<std::fs::File> {
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
    // A program whose directory is gone has an empty path: the current one.
    options.open(if directory.as_os_str().is_empty() { Path::new(".") } else { directory })
}

impl Temporary {
    /// Reports an error of the cache, and returns SQLite's code for it.
    fn failed(&self, error: &Error, code: c_int) -> c_int {
        let code = match (error.raw_os_error(), error.kind()) {
            (Some(libc::ENOSPC | libc::EDQUOT), _) => sqlite::FULL,
            (_, ErrorKind::Memory) => sqlite::NOMEM,
            _ => code,
        };
        self.api.log(code, &error.to_string());
        code
    }
}

impl Methods for Temporary {
    fn is_inherited(&self) -> bool {
        self.forks != fork::count()
    }

    fn close(&mut self) -> Answer {
        // What cannot be discarded is written by the close, to a file that then is gone.
        let _ = self.file.discard_dirty();
        Ok(())
    }

    fn read(&mut self, buffer: &mut [u8], position: u64) -> Answer {
        let end = position.saturating_add(buffer.len() as u64);
        let runs = self.runs.get_or_insert_with(|| {
            // What is read ahead is chosen here.
            self.file.set_access(Access::Random);
            Runs::new(self.cache.stats().memory.bound_bytes)
        });
        if let Some(ahead) = runs.note(position..end) {
            // Only a hint: the read itself tells what fails.
            let _ = self.file.prefetch(ahead);
        }
        let read = self.file.read_at(buffer, position);
        let count = read.map_err(|error| self.failed(&error, sqlite::IOERR_READ))?;
        buffer[count..].fill(0);
        if count == buffer.len() { Ok(()) } else { Err(sqlite::IOERR_SHORT_READ) }
    }

    fn write(&mut self, buffer: &[u8], position: u64) -> Answer {
        let written = self.file.write_all_at(buffer, position);
        written.map_err(|error| self.failed(&error, sqlite::IOERR_WRITE))
    }

    fn truncate(&mut self, size: i64) -> Answer {
        let bytes = u64::try_from(size).map_err(|_| sqlite::IOERR_TRUNCATE)?;
        let cut = self.file.set_len(bytes);
        cut.map_err(|error| self.failed(&error, sqlite::IOERR_TRUNCATE))
    }

    /// Does nothing: the file does not outlive the process.
    fn sync(&mut self, _: c_int) -> Answer {
        Ok(())
    }

    unsafe fn file_size(&mut self, size: *mut i64) -> Answer {
        let bytes = i64::try_from(self.file.len()).map_err(|_| sqlite::IOERR)?;
        // SAFETY: SQLite's variable.
        unsafe { size.write(bytes) };
        Ok(())
    }

    fn lock(&mut self, _: c_int) -> Answer {
        Ok(())
    }

    fn unlock(&mut self, _: c_int) -> Answer {
        Ok(())
    }

    unsafe fn check_reserved_lock(&mut self, answer: *mut c_int) -> Answer {
        // SAFETY: SQLite's variable.
        unsafe { answer.write(0) };
        Ok(())
    }

    unsafe fn file_control(&mut self, _: c_int, _: *mut c_void) -> Answer {
        Err(sqlite::NOTFOUND)
    }

    fn sector_size(&mut self) -> c_int {
        4096
    }

    fn device_characteristics(&mut self) -> c_int {
        sqlite::IOCAP_POWERSAFE_OVERWRITE
    }

    /// A temporary file has no log.
    unsafe fn shm_map(&mut self, _: c_int, _: c_int, _: c_int, _: *mut *mut c_void) -> Answer {
        Err(sqlite::IOERR_SHMMAP)
    }

    fn shm_lock(&mut self, _: c_int, _: c_int, _: c_int) -> Answer {
        Err(sqlite::IOERR_SHMLOCK)
    }

    fn shm_barrier(&mut self) {}

    fn shm_unmap(&mut self, _: c_int) -> Answer {
        Ok(())
    }
}

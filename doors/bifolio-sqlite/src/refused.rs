//! A main database that cannot be opened: it remembers the reason until a client can be told.
//!
//! An error of `xOpen` has no text of its own, and the log of SQLite is silent in most programs. So
//! `xOpen` succeeds with a file that cannot be locked or read, and an entry point that SQLite
//! calls with each new connection ([`report`]) ends the open with the reason:
//! `automatic extension loading failed: bifolio_memory=8x: ..`. After `ATTACH`, which calls no
//! entry points, the first use fails, and the reason is in the log only.
//!
//! # Safety
//! SQLite calls the functions of [`METHODS`] with a file that [`refuse`] created.
#![allow(unsafe_code)]

use crate::sqlite::{self, Api, File, IoMethods};
use crate::vfs::Opened;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;

/// Bytes that SQLite reads without a lock when it opens a database.
const HEADER_BYTES: c_int = 100;

/// The functions of a file that was refused: without shared memory.
static METHODS: IoMethods = IoMethods {
    version: 1,
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

/// Reason why a connection was not opened.
pub(crate) enum OpenFailure {
    /// Code of the system's VFS.
    Code(c_int),
    Refused(Refusal),
}

/// Reason why a database was not opened, and the code of its use.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) code: c_int,
    pub(crate) text: String,
}

/// Opens a file that only tells why it was refused.
///
/// # Safety
/// `file` is the memory that SQLite has for a file.
pub(crate) unsafe fn refuse(file: *mut File, refusal: Refusal) {
    let data = Box::into_raw(Box::new(refusal)).cast();
    let base = File { methods: &METHODS };
    // SAFETY: the contract.
    unsafe { file.cast::<Opened>().write(Opened { base, data }) };
}

/// Ends the open of a connection whose main database was refused, with the reason as its message.
///
/// # Safety
/// SQLite calls it, as an entry point, with a new connection.
pub(crate) unsafe extern "C" fn report(
    connection: *mut c_void,
    message: *mut *mut c_char,
    table: *const *const c_void,
) -> c_int {
    if table.is_null() || message.is_null() {
        return sqlite::OK;
    }
    // SAFETY: the table that SQLite gives to extensions.
    let api = unsafe { Api::new(table) };
    // SAFETY: an open connection.
    let file = unsafe { api.main_file(connection) };
    // SAFETY: null, or the file of a database.
    let is_refused = unsafe { file.as_ref() }.is_some_and(|file| ptr::eq(file.methods, &METHODS));
    if !is_refused {
        return sqlite::OK;
    }
    // SAFETY: a file of `refuse`.
    let refusal = unsafe { refusal(file) };
    // SAFETY: the caller's variable, whose text SQLite frees.
    unsafe { message.write(api.text(&refusal.text)) };
    sqlite::CANTOPEN
}

/// # Safety
/// A file that [`refuse`] created, and that is not closed.
unsafe fn refusal<'a>(file: *mut File) -> &'a Refusal {
    // SAFETY: the contract.
    let data = unsafe { (*file.cast::<Opened>()).data };
    // SAFETY: made by `refuse`, freed by `close`.
    unsafe { &*data.cast::<Refusal>() }
}

unsafe extern "C" fn close(file: *mut File) -> c_int {
    // SAFETY: SQLite calls with a file of `refuse`, for the last time.
    let data = unsafe { (*file.cast::<Opened>()).data };
    // SAFETY: made by `refuse`.
    drop(unsafe { Box::from_raw(data.cast::<Refusal>()) });
    // SAFETY: the memory of the file.
    unsafe { (*file).methods = ptr::null() };
    sqlite::OK
}

/// Reads a header of zeros, since an error of that would end the open before [`report`] is called,
/// and no page.
unsafe extern "C" fn read(
    file: *mut File,
    buffer: *mut c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    if offset != 0 || length > HEADER_BYTES {
        // SAFETY: SQLite calls with a file of `refuse`.
        return unsafe { refusal(file) }.code;
    }
    // SAFETY: SQLite's buffer.
    unsafe { buffer.cast::<u8>().write_bytes(0, usize::try_from(length).unwrap_or(0)) };
    sqlite::OK
}

/// Answers the size of a page: an empty file would be read as an empty database with
/// `immutable=1` and `nolock=1`, which omit the lock.
unsafe extern "C" fn file_size(_: *mut File, size: *mut i64) -> c_int {
    // SAFETY: SQLite's variable.
    unsafe { size.write(65536) };
    sqlite::OK
}

unsafe extern "C" fn check_reserved_lock(_: *mut File, answer: *mut c_int) -> c_int {
    // SAFETY: SQLite's variable.
    unsafe { answer.write(0) };
    sqlite::OK
}

unsafe extern "C" fn lock(file: *mut File, _: c_int) -> c_int {
    // SAFETY: SQLite calls with a file of `refuse`.
    unsafe { refusal(file) }.code
}

unsafe extern "C" fn unlock(_: *mut File, _: c_int) -> c_int {
    sqlite::OK
}

unsafe extern "C" fn write(_: *mut File, _: *const c_void, _: c_int, _: i64) -> c_int {
    sqlite::IOERR_WRITE
}

unsafe extern "C" fn truncate(_: *mut File, _: i64) -> c_int {
    sqlite::IOERR_TRUNCATE
}

unsafe extern "C" fn sync(_: *mut File, _: c_int) -> c_int {
    sqlite::IOERR_FSYNC
}

unsafe extern "C" fn file_control(_: *mut File, _: c_int, _: *mut c_void) -> c_int {
    sqlite::NOTFOUND
}

unsafe extern "C" fn sector_size(_: *mut File) -> c_int {
    4096
}

unsafe extern "C" fn device_characteristics(_: *mut File) -> c_int {
    0
}

unsafe extern "C" fn shm_map(
    _: *mut File,
    _: c_int,
    _: c_int,
    _: c_int,
    _: *mut *mut c_void,
) -> c_int {
    sqlite::IOERR_SHMMAP
}

unsafe extern "C" fn shm_lock(_: *mut File, _: c_int, _: c_int, _: c_int) -> c_int {
    sqlite::IOERR_SHMLOCK
}

unsafe extern "C" fn shm_barrier(_: *mut File) {}

unsafe extern "C" fn shm_unmap(_: *mut File, _: c_int) -> c_int {
    sqlite::OK
}

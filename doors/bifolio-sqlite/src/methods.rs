//! The functions that SQLite calls for a main database, over any kind of connection ([`Methods`]).
//!
//! A panic is an I/O error. So is any call in a child that inherited the connection and cannot make
//! it its own: the parent has its locks, and the threads of its cache. The close of such a
//! connection frees nothing.
//!
//! # Safety
//! SQLite calls the functions of a table with a file that [`open`] created with that kind of
//! connection, from one thread at a time, and with the arguments that its documentation says.
#![allow(unsafe_code)]

use crate::sqlite::{self, File, IoMethods};
use crate::system::Answer;
use crate::vfs::Opened;
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A connection to a main database: the functions of `sqlite3_io_methods`, of version 2.
pub(crate) trait Methods: Sized + 'static {
    /// Returns `true` in a child of the process that opened the connection.
    fn is_inherited(&self) -> bool;

    /// Makes a connection that a child has inherited its own. Returns `false` if that cannot be.
    fn adopt(&mut self) -> bool {
        false
    }

    fn close(&mut self) -> Answer;

    fn read(&mut self, buffer: &mut [u8], position: u64) -> Answer;

    fn write(&mut self, buffer: &[u8], position: u64) -> Answer;

    fn truncate(&mut self, size: i64) -> Answer;

    fn sync(&mut self, flags: c_int) -> Answer;

    /// # Safety
    /// `size` is a variable.
    unsafe fn file_size(&mut self, size: *mut i64) -> Answer;

    fn lock(&mut self, level: c_int) -> Answer;

    fn unlock(&mut self, level: c_int) -> Answer;

    /// # Safety
    /// `answer` is a variable.
    unsafe fn check_reserved_lock(&mut self, answer: *mut c_int) -> Answer;

    /// # Safety
    /// `argument` is what SQLite passes with `operation`.
    unsafe fn file_control(&mut self, operation: c_int, argument: *mut c_void) -> Answer;

    fn sector_size(&mut self) -> c_int;

    fn device_characteristics(&mut self) -> c_int;

    /// # Safety
    /// `address` points to a variable of SQLite.
    unsafe fn shm_map(
        &mut self,
        region: c_int,
        size: c_int,
        extend: c_int,
        address: *mut *mut c_void,
    ) -> Answer;

    fn shm_lock(&mut self, first: c_int, count: c_int, flags: c_int) -> Answer;

    fn shm_barrier(&mut self);

    fn shm_unmap(&mut self, delete: c_int) -> Answer;
}

fn adopt<C: Methods>(connection: &mut C) -> bool {
    catch_unwind(AssertUnwindSafe(|| connection.adopt())).unwrap_or(false)
}

/// Opens a connection as a file of SQLite.
///
/// # Safety
/// `file` is the memory that SQLite has for a file.
pub(crate) unsafe fn open<C: Methods>(file: *mut File, connection: C) {
    let data = Box::into_raw(Box::new(connection)).cast();
    let base = File { methods: &Table::<C>::METHODS };
    // SAFETY: the contract.
    unsafe { file.cast::<Opened>().write(Opened { base, data }) };
}

struct Table<C>(C);

impl<C: Methods> Table<C> {
    const METHODS: IoMethods = IoMethods {
        version: 2,
        close: close::<C>,
        read: read::<C>,
        write: write::<C>,
        truncate: truncate::<C>,
        sync: sync::<C>,
        file_size: file_size::<C>,
        lock: lock::<C>,
        unlock: unlock::<C>,
        check_reserved_lock: check_reserved_lock::<C>,
        file_control: file_control::<C>,
        sector_size: sector_size::<C>,
        device_characteristics: device_characteristics::<C>,
        shm_map: shm_map::<C>,
        shm_lock: shm_lock::<C>,
        shm_barrier: shm_barrier::<C>,
        shm_unmap: shm_unmap::<C>,
    };
}

/// Returns the connection of a file.
///
/// # Safety
/// A file that [`open`] created with a `C`, used by one thread.
unsafe fn connection<'a, C>(file: *mut File) -> &'a mut C {
    // SAFETY: the contract.
    let data = unsafe { (*file.cast::<Opened>()).data };
    // SAFETY: made with the file, and freed by `close` only.
    unsafe { &mut *data.cast::<C>() }
}

/// Calls a method of the connection of a file.
///
/// # Safety
/// A file that [`open`] created with a `C`, used by one thread.
unsafe fn call<C: Methods>(file: *mut File, method: impl FnOnce(&mut C) -> Answer) -> c_int {
    // SAFETY: the contract.
    let connection = unsafe { connection::<C>(file) };
    if connection.is_inherited() && !adopt(connection) {
        return sqlite::IOERR;
    }
    match catch_unwind(AssertUnwindSafe(|| method(connection))) {
        Ok(Ok(())) => sqlite::OK,
        Ok(Err(code)) => code,
        Err(_) => sqlite::IOERR,
    }
}

unsafe extern "C" fn read<C: Methods>(
    file: *mut File,
    buffer: *mut c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    let (Ok(length), Ok(position)) = (usize::try_from(length), u64::try_from(offset)) else {
        return sqlite::IOERR_READ;
    };
    // SAFETY: SQLite's buffer has that many bytes.
    let buffer = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length) };
    // SAFETY: SQLite calls with a file of this table, and with one thread at a time.
    unsafe { call::<C>(file, |connection| connection.read(buffer, position)) }
}

unsafe extern "C" fn write<C: Methods>(
    file: *mut File,
    buffer: *const c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    let (Ok(length), Ok(position)) = (usize::try_from(length), u64::try_from(offset)) else {
        return sqlite::IOERR_WRITE;
    };
    // SAFETY: SQLite's buffer has that many bytes.
    let buffer = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), length) };
    // SAFETY: SQLite calls with a file of this table, and with one thread at a time.
    unsafe { call::<C>(file, |connection| connection.write(buffer, position)) }
}

/// Defines the other functions that SQLite calls: each calls the method of its name.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*);)+) => {
        $(unsafe extern "C" fn $name<C: Methods>(file: *mut File, $($argument: $type),*) -> c_int {
            #[allow(unused_unsafe)]
            // SAFETY: the arguments are SQLite's, and are what its documentation says.
            let method = |connection: &mut C| unsafe { connection.$name($($argument),*) };
            // SAFETY: SQLite calls with a file of this table, and with one thread at a time.
            unsafe { call(file, method) }
        })+
    };
}

functions! {
    truncate(size: i64);
    sync(flags: c_int);
    file_size(size: *mut i64);
    lock(level: c_int);
    unlock(level: c_int);
    check_reserved_lock(answer: *mut c_int);
    file_control(operation: c_int, argument: *mut c_void);
    shm_map(region: c_int, size: c_int, extend: c_int, address: *mut *mut c_void);
    shm_lock(first: c_int, count: c_int, flags: c_int);
    shm_unmap(delete: c_int);
}

unsafe extern "C" fn close<C: Methods>(file: *mut File) -> c_int {
    // SAFETY: SQLite calls with a file of this table, for the last time.
    let data = unsafe { (*file.cast::<Opened>()).data };
    // SAFETY: made by `open`, and not used any more.
    let connection = unsafe { Box::from_raw(data.cast::<C>()) };
    // SAFETY: the memory of the file.
    unsafe { (*file).methods = std::ptr::null() };
    let mut connection = ManuallyDrop::new(connection);
    if connection.is_inherited() {
        return sqlite::OK;
    }
    let closed = catch_unwind(AssertUnwindSafe(|| {
        let closed = connection.close();
        drop(ManuallyDrop::into_inner(connection));
        closed
    }));
    match closed {
        Ok(Ok(())) => sqlite::OK,
        Ok(Err(code)) => code,
        Err(_) => sqlite::IOERR_CLOSE,
    }
}

unsafe extern "C" fn sector_size<C: Methods>(file: *mut File) -> c_int {
    // SAFETY: SQLite calls with a file of this table, and with one thread at a time.
    unsafe { connection::<C>(file) }.sector_size()
}

unsafe extern "C" fn device_characteristics<C: Methods>(file: *mut File) -> c_int {
    // SAFETY: SQLite calls with a file of this table, and with one thread at a time.
    unsafe { connection::<C>(file) }.device_characteristics()
}

unsafe extern "C" fn shm_barrier<C: Methods>(file: *mut File) {
    // SAFETY: SQLite calls with a file of this table, and with one thread at a time.
    let connection = unsafe { connection::<C>(file) };
    if !connection.is_inherited() || adopt(connection) {
        // It has no result: what panics leaves the cache unused (`share`).
        let _ = catch_unwind(AssertUnwindSafe(|| connection.shm_barrier()));
    }
}

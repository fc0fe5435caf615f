//! Registers the VFS `bifolio` in the SQLite that this program is linked with.
//!
//! # Safety
//! SQLite calls [`entry`] as it calls the entry point of a loaded extension. That of the VFS has
//! other types of pointers.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int};

use anyhow::ensure;
use rusqlite::{Connection, ffi};

/// Registers the VFS.
pub(super) fn register() -> anyhow::Result<()> {
    // SAFETY: the function has the signature that SQLite calls.
    let code = unsafe { ffi::sqlite3_auto_extension(Some(entry)) };
    ensure!(code == ffi::SQLITE_OK, "SQLite does not take the extension: error {code}");
    drop(Connection::open_in_memory()?);
    Ok(())
}

unsafe extern "C" fn entry(
    connection: *mut ffi::sqlite3,
    message: *mut *mut c_char,
    table: *const ffi::sqlite3_api_routines,
) -> c_int {
    // SAFETY: the arguments that SQLite gives to the entry point of an extension.
    unsafe { bifolio_sqlite::sqlite3_bifoliosqlite_init(connection.cast(), message, table.cast()) }
}

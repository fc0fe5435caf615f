//! A loadable extension of SQLite that registers the VFS `bifolio`: a main database is read and
//! written through its own Bifolio cache; all other files use the system's VFS.
//!
//! ```text
//!  SQLite
//!    |  xRead, xWrite, xSync, xLock ...
//!  database ----- main databases: a cache, made with the first lock    database
//!    |            settings from the URI                                settings
//!  vfs ---------- xOpen; what is no main database goes on unchanged    vfs
//!    |
//!  the system's VFS: locks, directories, journals, logs, temporary files
//! ```
//!
//! # What is promised
//! - **One connection.** The first lock of a database is exclusive and held until the connection is
//!   closed, so no other connection, of this process or another, can read what a cache has not
//!   written, or write what a cache would not see: it gets `SQLITE_BUSY`. A database that can only
//!   be read is held shared, and cannot be in WAL mode.
//! - **Durability** is SQLite's own. A commit is durable when the sync of the journal or of the log
//!   says so; where SQLite omits a sync of the database (`synchronous=OFF`), the extension makes it
//!   all the same, because what is in the cache would be lost with the process.
//!
//! # Safety
//! The tables of functions that this crate gives to SQLite are called with the pointers that SQLite
//! documents. A file is used by one thread at a time, which SQLite ensures.

mod database;
mod settings;
mod sqlite;
mod vfs;

pub use vfs::{sqlite3_bifoliodefault_init, sqlite3_bifoliosqlite_init, sqlite3_extension_init};

//! Databases through the extension: with the program `sqlite3`, with SQLite's library in this
//! process, and, among the ignored tests, with its speed test, the Python package `apsw`, and
//! servers of several processes.
//!
//! A machine without the program skips its tests and says so; `BIFOLIO_TEST_REQUIRE` forbids that.
//! `cargo x check-doors sqlite --whole` runs everything.

mod clients;
mod connections;
mod copies;
mod faults;
mod forks;
mod groups;
mod histories;
mod journals;
mod kept;
mod kills;
mod library;
mod locks;
mod methods;
mod others;
mod pools;
mod power;
mod process_cache;
mod servers;
mod shares;
mod shell;
mod storage;
mod streams;
mod supervisor;
mod temporary;

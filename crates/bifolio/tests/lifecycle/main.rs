//! How files and caches end: the last handle, a closed cache (`whole_cache.rs`), files opened again
//! meanwhile (`opens.rs`), pages that stay after a close (`kept.rs`) or are read
//! again by the next cache (`warm.rs`), storage that stays unwritable
//! (`giving_up.rs`), killed processes and power failures (`crash/`), and what is logged
//! (`logged.rs`).

mod crash;
mod giving_up;
mod kept;
mod last_handle;
mod logged;
mod opens;
#[path = "../support/mod.rs"]
mod support;
mod wal_btree;
mod warm;
mod whole_cache;

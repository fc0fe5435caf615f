//! redb over Bifolio: a [`StorageBackend`](redb::StorageBackend) that reads and writes a database
//! through a [`Cache`](bifolio::Cache).
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("data.redb");
//! use bifolio::Cache;
//! use bifolio_redb::BifolioBackend;
//! use redb::{Database, TableDefinition};
//!
//! let cache = Cache::builder().memory(448 << 20).build()?;
//! let backend = BifolioBackend::open(&path, &cache)?;
//! let database = Database::builder().set_cache_size(64 << 20).create_with_backend(backend)?;
//!
//! let table = TableDefinition::<&str, u64>::new("leaves");
//! let transaction = database.begin_write()?;
//! transaction.open_table(table)?.insert("folio", 2)?;
//! transaction.commit()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Memory
//! The total is the bound of the cache plus redb's own cache (`set_cache_size`; redb's default is
//! 1 GiB). redb keeps a page that it reads in its own cache too, so a page in both is held twice.
//! `docs/engines.md` in the repository has measurements of several splits. Any number of databases,
//! and other files, can share one cache.
//!
//! # Durability
//! A commit with redb's default durability returns after [`File::sync_data`](bifolio::File): its
//! pages are on the device. Without a sync, pages reach the device in any order, or not at all if
//! the process dies; redb's file format expects that.
//!
//! # Locks
//! redb's `ExclusiveWriter` mode works, and no other: the cache assumes that no other process
//! changes the file.

#![forbid(unsafe_code)]

mod backend;
mod error;
mod locks;

pub use backend::BifolioBackend;

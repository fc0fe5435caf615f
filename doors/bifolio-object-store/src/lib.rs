//! `object_store` over Bifolio: a cache of objects in memory and on disk, with hard bounds.
//!
//! [`CachedStore`] wraps any [`ObjectStore`](object_store::ObjectStore), and is one. It keeps parts
//! of objects, 1 MiB each by default, in the memory of a [`Cache`](bifolio::Cache), and on disk if
//! it is given a directory.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! # let folder = tempfile::tempdir()?;
//! use std::{sync::Arc, time::Duration};
//! use bifolio_object_store::CachedStore;
//! use object_store::{ObjectStoreExt, memory::InMemory, path::Path};
//!
//! let bucket = Arc::new(InMemory::new());
//! let location = Path::from("table/part-0.parquet");
//! bucket.put(&location, vec![7; 3_000_000].into()).await?;
//!
//! let cache = bifolio::Cache::builder().memory(64 << 20).build()?;
//! let store = CachedStore::builder(bucket, &cache)
//!     .disk(folder.path(), 1 << 30)
//!     .head_age(Duration::from_secs(60))
//!     .build()?;
//! for _ in 0..2 {
//!     assert_eq!(store.get_range(&location, 100..200).await?, vec![7; 100]);
//! }
//! assert_eq!(store.metrics().get_requests, 1);
//! # Ok(())
//! # })
//! # }
//! ```
//!
//! # Which bytes a read returns
//! Those of one version of the object; parts of different versions are never mixed. A version is
//! identified by its ETag; where the store has no strong ETags, by its version, or by size and time
//! of the last change, which miss a change within one tick of the store's clock.
//!
//! The version was current at some time during the read, with two exceptions. Concurrent reads of a
//! part share one request: a read that joins a request which is already on its way may return the
//! version that was current when that request was sent, before the read began. And
//! [`head_age`](CachedStoreBuilder::head_age) allows a read to use a version that was seen before,
//! without asking the store.
//!
//! Reads with other conditions than `if_match`, and of versions by name, are passed on to the store.
//!
//! # Memory
//! Cached bytes are inside the bound of the cache. Besides, the answers of requests are in memory
//! until they are in the cache, up to
//! [`flight_bytes_max`](CachedStoreBuilder::flight_bytes_max), and reads have the buffers that they
//! return. A read of verified parts in memory is ready when it is polled first, after one copy.
//! [`keep`](CachedStoreBuilder::keep) has footers and indexes stay, whatever else is read.
//!
//! # Disk
//! The disk tier is as large as its builder says, and never trusted: each block of a part has a
//! checksum, which is verified when it was read from the disk. A disk that is full, read-only, slow or damaged
//! costs requests, and returns no wrong bytes. One that hangs also costs each read up to
//! [`disk_timeout`](CachedStoreBuilder::disk_timeout), and is then left alone for a while;
//! [`build`](CachedStoreBuilder::build), [`flush`](CachedStore::flush) and dropping the last handle
//! wait for it.
//!
//! # Lines of `object_store`
//! The types of this crate are for `object_store` 0.13. The feature `object-store-14` adds the module
//! `v14`, which has the same types for 0.14.
//!
//! # Tasks
//! Reads are futures of tokio: a runtime with time enabled. Each may be dropped or leaked at any
//! moment, and holds nothing then that others wait for; a request is aborted when no read waits for
//! it, unless a read has its bytes already: then the rest is received for the cache, until the last
//! handle of the store is dropped. Nothing runs while there are no reads and no such requests.

mod builder;
mod disk;
mod error;
mod fetch;
mod keep;
mod line;
mod lists;
mod metrics;
mod names;
mod object;
mod opening;
mod read;
mod received;
mod record;
mod states;
mod store;
mod table;
mod task;
mod tier;
mod upkeep;
#[cfg(feature = "object-store-14")]
pub mod v14;

// The modules name the crate by their parent: those of `v14` have another.
use ::object_store;

pub use builder::CachedStoreBuilder;
pub use error::CacheError;
pub use metrics::Metrics;
pub use store::CachedStore;
pub use upkeep::Warmed;

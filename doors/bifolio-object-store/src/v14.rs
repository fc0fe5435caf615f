//! The cache for stores of `object_store` 0.14: the modules of the [crate], compiled for its types.
//!
//! A program may use both lines, for different stores.
#![allow(clippy::duplicate_mod)]

use ::object_store_14 as object_store;

#[path = "builder.rs"]
mod builder;
#[path = "disk.rs"]
mod disk;
#[path = "error.rs"]
mod error;
#[path = "fetch.rs"]
mod fetch;
#[path = "keep.rs"]
mod keep;
mod line;
#[path = "lists.rs"]
mod lists;
#[path = "metrics.rs"]
mod metrics;
#[path = "names.rs"]
mod names;
#[path = "object.rs"]
mod object;
#[path = "opening.rs"]
mod opening;
#[path = "read.rs"]
mod read;
#[path = "received.rs"]
mod received;
#[path = "record.rs"]
mod record;
#[path = "states.rs"]
mod states;
#[path = "store.rs"]
mod store;
#[path = "table.rs"]
mod table;
#[path = "task.rs"]
mod task;
#[path = "tier.rs"]
mod tier;
#[path = "upkeep.rs"]
mod upkeep;

pub use builder::CachedStoreBuilder;
pub use error::CacheError;
pub use metrics::Metrics;
pub use store::CachedStore;
pub use upkeep::Warmed;

//! The last handle, and the end of a cache: what was written is durable, or somebody is told.

#[path = "../support/mod.rs"]
mod support;

mod giving_up;
mod last_handle;
mod opens;
mod whole_cache;

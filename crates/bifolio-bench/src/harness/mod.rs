//! The parts of the benchmarks, one concern per file; `run.rs` is their runner.
//!
//! A run, in order: `memory` checks the memory, `workspace` the disk, where it creates a directory
//! (`tmpfs` mounts one in it), `cleanup` removes everything at the end, `pattern` fills files so
//! that every read can be checked, `threads` runs one trial on several threads (`cpus`). `child`
//! runs what needs a separate process.
//!
//! A trial: `measured` is its result and its cost (`counters`). `reads` is the loop of
//! reads of resident bytes; `span` is mapped memory, `cached` a file in a cache.
//!
//! Transfers of a device: `sizes` chooses the sizes of file and cache, `access` the next page;
//! `direct` and `raw_ring` bypass the page cache, `memory_group` limits the kernel's page cache,
//! and `swap` is the kernel's swap.

pub(crate) mod access;
pub(crate) mod cached;
pub(crate) mod child;
pub(crate) mod cleanup;
pub(crate) mod counters;
pub(crate) mod cpus;
pub(crate) mod direct;
pub(crate) mod measured;
pub(crate) mod memory;
pub(crate) mod memory_group;
pub(crate) mod pattern;
pub(crate) mod raw_ring;
pub(crate) mod reads;
pub(crate) mod sizes;
pub(crate) mod span;
pub(crate) mod swap;
pub(crate) mod threads;
pub(crate) mod tmpfs;
pub(crate) mod workspace;

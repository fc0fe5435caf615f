//! The parts of the benchmarks, one concern per file; `run.rs` is their runner.
//!
//! A run, in order: `memory` and `filesystem` check the resources, `workspace` creates a directory
//! (`tmpfs` mounts one in it), `cleanup` removes everything at the end, `pattern` fills files so
//! that every read can be checked, `threads` runs one trial on several threads (`cpus`). `child`
//! runs what needs a separate process.
//!
//! A trial: `measured` is its result and its cost (`counters`, `syscalls`).
//!
//! Reads of resident bytes: `reads` is the loop, and compares each way with the file first;
//! `plain_memory` is the upper limit of the speed.
//!
//! Transfers of a device: `sizes` chooses the sizes of file and cache, `access` the next page
//! (`permutation`, `zipf`), `checker` checks the bytes read; `direct` and `raw_ring` bypass the
//! page cache, `raw_stream` moves a whole file so, `cached` is a file in a cache, `memory_group`
//! limits the kernel's page cache, and `swap` is the kernel's swap.
//!
//! Mapped files: `mapping` is the kernel's, `mapped_file` a cache's, `span` the words of either.

pub(crate) mod access;
pub(crate) mod cached;
pub(crate) mod checker;
pub(crate) mod child;
pub(crate) mod cleanup;
pub(crate) mod counters;
pub(crate) mod cpus;
pub(crate) mod direct;
pub(crate) mod filesystem;
pub(crate) mod mapped_file;
pub(crate) mod mapping;
pub(crate) mod measured;
pub(crate) mod memory;
pub(crate) mod memory_group;
pub(crate) mod pattern;
pub(crate) mod permutation;
pub(crate) mod plain_memory;
pub(crate) mod raw_ring;
pub(crate) mod raw_stream;
pub(crate) mod reads;
pub(crate) mod sizes;
pub(crate) mod span;
pub(crate) mod swap;
pub(crate) mod syscalls;
pub(crate) mod threads;
pub(crate) mod tmpfs;
pub(crate) mod workspace;
pub(crate) mod zipf;

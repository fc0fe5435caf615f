//! The parts of the benchmarks, one concern per file.
//!
//! A run, in order: `memory` and `filesystem` check the resources, `workspace` creates a directory
//! (`tmpfs` mounts one in it), `cleanup` removes everything at the end, `pattern` fills files so
//! that every read can be checked, `interleave` alternates the series, `threads` runs one trial on
//! several threads (`cpus`). `child` runs what needs a separate process, `resident` reads its size.
//! `failures` decides what a series costs that fails.
//!
//! Reads of resident bytes: `series` has the ways to read, `verify` compares each with the file,
//! `timed` is the inner loop, `plain_memory` is the upper limit of the speed.
//!
//! Transfers of a device: `sizes` chooses the sizes of file and cache, `access` the next page
//! (`permutation`, `zipf`), `checker` checks the bytes read, `meter` measures the cost of a trial
//! (`seen`, `latency`, `intervals`, `cpu_time`, `syscalls`, `device_bytes`); `direct` and
//! `raw_ring` bypass the page cache, `raw_stream` moves a whole file so, `cached` is a file in a
//! cache, `memory_group` limits the kernel's page cache, and `swap` is the kernel's swap.
//!
//! Mapped files: `mapping` is the kernel's, `mapped_file` a cache's, `span` the words of either;
//! `interrupts`, `kernel_reclaim` and `waits` measure the cost of reclaim.

pub(crate) mod access;
pub(crate) mod cached;
pub(crate) mod checker;
pub(crate) mod child;
pub(crate) mod cleanup;
pub(crate) mod cpu_time;
pub(crate) mod cpus;
pub(crate) mod device_bytes;
pub(crate) mod direct;
pub(crate) mod failures;
pub(crate) mod filesystem;
pub(crate) mod interleave;
pub(crate) mod interrupts;
pub(crate) mod intervals;
pub(crate) mod kernel_reclaim;
pub(crate) mod latency;
pub(crate) mod mapped_file;
pub(crate) mod mapping;
pub(crate) mod memory;
pub(crate) mod memory_group;
pub(crate) mod meter;
pub(crate) mod pattern;
pub(crate) mod permutation;
pub(crate) mod plain_memory;
pub(crate) mod raw_ring;
pub(crate) mod raw_stream;
pub(crate) mod resident;
pub(crate) mod seen;
pub(crate) mod series;
pub(crate) mod sizes;
pub(crate) mod span;
pub(crate) mod swap;
pub(crate) mod syscalls;
pub(crate) mod threads;
pub(crate) mod timed;
pub(crate) mod tmpfs;
pub(crate) mod verify;
pub(crate) mod waits;
pub(crate) mod workspace;
pub(crate) mod zipf;

//! The parts that every benchmark is made of, one concern a file.
//!
//! A run, in order: `memory` and `filesystem` say whether there is room, `workspace` makes a
//! directory (`tmpfs` mounts one in it), `cleanup` promises that all of it goes away again,
//! `pattern` fills files so that every read can be checked, `interleave` alternates the series,
//! `threads` runs one trial on several threads (`cpus`). `child` runs what must have a process of
//! its own, `resident` reads its size.
//!
//! Reads of resident bytes: `series` names the ways to read, `verify` compares each with the file,
//! `timed` is the loop inside, `plain_memory` is what the cache is compared with when nothing else
//! can be faster.
//!
//! Transfers of a device: `sizes` says how large a file and how small a cache, `access` which page
//! comes next (`permutation`, `zipf`), `checker` looks at what was read, `meter` at what a trial
//! cost (`seen`, `latency`, `intervals`, `cpu_time`, `syscalls`, `device_bytes`); `direct` and
//! `raw_ring` go past the page cache, `raw_stream` moves a whole file so, `cached` is a file in a
//! cache, `memory_group` bounds the kernel's, `swap` is where that goes when it is full.
//!
//! Mapped files: `mapping` is the kernel's, `mapped_file` a cache's, `span` the words of either;
//! `interrupts`, `kernel_reclaim` and `waits` tell what keeping them within memory cost.

pub(crate) mod access;
pub(crate) mod cached;
pub(crate) mod checker;
pub(crate) mod child;
pub(crate) mod cleanup;
pub(crate) mod cpu_time;
pub(crate) mod cpus;
pub(crate) mod device_bytes;
pub(crate) mod direct;
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

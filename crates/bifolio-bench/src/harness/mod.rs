//! What every benchmark is made of, one concern a file.
//!
//! A run, in order: `memory` and `filesystem` say whether there is room, `workspace` makes a
//! directory (`tmpfs` mounts one in it), `cleanup` promises that all of it goes away again,
//! `pattern` fills files so that every read can be checked, `series` names the ways to read it,
//! `verify` compares each with the file, `interleave` lets them take turns, `threads` runs one turn
//! on pinned CPUs (`cpus`), `timed` is the loop inside. `child` runs what must have a process of
//! its own, `resident` reads its size. `plain_memory` is what the cache is compared with when
//! nothing else can be faster.

pub(crate) mod child;
pub(crate) mod cleanup;
pub(crate) mod cpus;
pub(crate) mod filesystem;
pub(crate) mod interleave;
pub(crate) mod memory;
pub(crate) mod pattern;
pub(crate) mod plain_memory;
pub(crate) mod resident;
pub(crate) mod series;
pub(crate) mod threads;
pub(crate) mod timed;
pub(crate) mod tmpfs;
pub(crate) mod verify;
pub(crate) mod workspace;

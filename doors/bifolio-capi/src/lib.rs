//! The C interface of the bifolio page cache: `include/bifolio.h` is generated from this crate.
//!
//! Above the `bifolio` crate, below C and C++ programs. Each exported function checks its pointers
//! and numbers, calls one function of the library inside `boundary::guard`, and converts the result
//! to a result code. The only state is the text of the calling thread's last error, the count of
//! pins of a file, and calls that are not complete.
//!
//! | file | exports |
//! |---|---|
//! | `boundary` | nothing: the checks that all others share |
//! | `result` | result codes, the last error, names |
//! | `names` | nothing: names of the C interface in texts of the library |
//! | `cache` | options, build, open, statistics, close |
//! | `file` | reads, writes, lengths, syncs, close |
//! | `advice` | access hints, reading ahead, eviction, write-outs, residency |
//! | `class` | classes of files, memory of the program within the bound |
//! | `calls` | reads, pins, writes, appends and syncs that complete later |
//! | `gated` | write gates: changes with an LSN, checkpoints |
//! | `outside` | what was changed past the cache |
//! | `pin` | pins for reading and for writing |
//! | `map` | maps and their pins |
//! | `warm` | lists of hot pages: saving, restoring |
//! | `text` | version, features, the log |
//!
//! # Safety
//! An exported function may be called with null pointers, numbers out of range and structs of other
//! versions. It relies on facts that C cannot show: a handle was created by this crate and not
//! freed, a buffer has the length that is passed with it, and text ends with a zero byte. The
//! header states this once, for all functions.
#![allow(non_camel_case_types, reason = "names in C")]
#![allow(clippy::missing_safety_doc, reason = "one contract for all: the head of the header")]

pub mod advice;
mod boundary;
pub mod cache;
pub mod calls;
pub mod class;
pub mod file;
pub mod gated;
pub mod map;
mod names;
pub mod outside;
pub mod pin;
pub mod result;
pub mod stats;
pub mod text;
pub mod warm;

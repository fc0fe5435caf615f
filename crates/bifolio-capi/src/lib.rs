//! The C interface of the bifolio page cache: `include/bifolio.h` is made of this crate.
//!
//! Where it stands: above the `bifolio` crate, below C and C++ programs. Each exported function
//! checks its pointers and numbers, calls one function of the library inside `boundary::guard`,
//! and turns the answer into a result code. It keeps no state of its own but the text of the
//! calling thread's last error and the count of pins of a file.
//!
//! | file | exports |
//! |---|---|
//! | `boundary` | nothing: the checks that all others share |
//! | `result` | result codes, the last error, names |
//! | `cache` | options, build, open, statistics, close |
//! | `file` | reads, writes, lengths, syncs, advice |
//! | `pin` | pins for reading and for writing |
//! | `map` | maps and their pins |
//! | `text` | version, features, the log |
//!
//! # Safety
//! An exported function may be called with null pointers, numbers out of range and structs of other
//! versions. It relies on what C cannot show: that a handle is one that this crate made and that
//! was not freed, that a buffer has the length that is given with it, and that text ends with a
//! zero byte. The header says so once, for all functions.
#![allow(non_camel_case_types, reason = "names in C")]
#![allow(clippy::missing_safety_doc, reason = "one contract for all: the head of the header")]

mod boundary;
pub mod cache;
pub mod file;
pub mod map;
pub mod pin;
pub mod result;
pub mod text;

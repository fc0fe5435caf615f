//! The compiled part of the Python package `bifolio`: caches, files, and batches of reads.
//!
//! Where it stands: `python/bifolio/` is the package that programs import. It knows dtypes, shapes
//! and indices; this module knows positions, lengths and buffers. Every call that may wait for a
//! device or another thread releases the GIL, and long calls look for signals on the way.
//!
//! # What the door promises
//! The host is Python with numpy, and the promises are those of `numpy.memmap` and `io.RawIOBase`:
//!
//! | the host's call | here |
//! |---|---|
//! | a read | all bytes, or an `OSError` with number and file; never a short array |
//! | an assignment, `write` | seen by all readers of this cache; on the device after 5 s at most |
//! | `flush` of an array | durable, or an `OSError`; what was not written stays in the cache |
//! | `flush` of a file | in the kernel, where other processes see it; `sync`: durable |
//! | `append` of an array | all rows or none; a header that counts them follows at `flush` |
//! | `close` | as `flush`; if it fails, the cache keeps the file and tries again when it closes |
//! | the last reference | as `close`; Python prints an error |
//! | the end of the interpreter | all is durable; files stay open, and writes are passed on |
//! | a signal handler that raises | before or after a call, or between parts of a long transfer |
//! | death by a signal | unlike `numpy.memmap`, assignments since `flush` may be lost, of 5 s |
//! | a forked child | a cache and descriptors of its own, at the first use; for reading only; an |
//! |  | `OSError` for a file whose writes could not be passed on |
//!
//! The package has the same for the user, with what has reached kernel, device and header, at the
//! head of `_process.py`. All state that a call changes is changed within one compiled call.

mod buffer;
mod cache;
mod error;
mod file;
mod inode;
mod lines;
mod rows;
mod shared;
mod transfer;

use pyo3::prelude::*;

/// Caches and files, for the package `bifolio` only.
#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::cache::Cache;
    #[pymodule_export]
    use crate::file::{Closed, File};
    #[pymodule_export]
    use crate::inode::write_through;
    #[pymodule_export]
    use crate::lines::Lines;
    #[pymodule_export]
    use crate::rows::Rows;
    #[pymodule_export]
    use crate::shared::before_fork;
}

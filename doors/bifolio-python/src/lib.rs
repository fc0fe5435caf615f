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
//! | the last reference, or the end of the interpreter | as `close`; Python prints an error |
//! | death by a signal | unlike `numpy.memmap`, assignments since `flush` may be lost, of 5 s |
//! | a forked child | a cache and descriptors of its own, at the first use; for reading only |

mod buffer;
mod cache;
mod error;
mod file;
mod transfer;

use pyo3::prelude::*;

/// Caches and files, for the package `bifolio` only.
#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::cache::Cache;
    #[pymodule_export]
    use crate::file::File;
}

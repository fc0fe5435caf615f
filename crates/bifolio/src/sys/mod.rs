//! The kernel and the processor: system calls, start-up probes, and the opaque copy.
//!
//! The lowest layer, and the only one with raw descriptors, kernel pointers or processor-specific
//! instructions. Everything here is thin: a call, its error, its contract. Policy is in the layers
//! above.

pub(crate) mod array;
#[cfg(not(all(test, loom)))]
pub(crate) mod bell;
pub(crate) mod copy;
#[cfg(not(all(test, loom)))]
pub(crate) mod file;
#[cfg(not(all(test, loom)))]
pub(crate) mod memory;
#[cfg(not(all(test, loom)))]
pub(crate) mod page_pipe;
#[cfg(not(all(test, loom)))]
pub(crate) mod pagemap;
#[cfg(not(all(test, loom)))]
pub(crate) mod probe;
#[cfg(not(all(test, loom)))]
mod probe_features;
#[cfg(not(all(test, loom)))]
pub(crate) mod process;
#[cfg(all(feature = "refusals", not(all(test, loom))))]
pub(crate) mod refusals;
#[cfg(not(all(test, loom)))]
pub(crate) mod ring;
#[cfg(not(all(test, loom)))]
pub(crate) mod signal;
#[cfg(not(all(test, loom)))]
pub(crate) mod userfault;

use std::io;

/// Converts the return value of a C library call: the amount or, if negative, the error of this
/// thread.
fn answer_of(answer: impl TryInto<usize>) -> io::Result<usize> {
    answer.try_into().map_err(|_| io::Error::last_os_error())
}

/// Returns `true` if a call that failed with `error` should be repeated.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR))
}

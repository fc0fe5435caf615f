//! The kernel and the processor: system calls, start-up probes, and the opaque copy.
//!
//! The lowest layer and the only one with raw descriptors, kernel pointers or instructions of one
//! processor family. Everything here is thin: a call, its error, its contract. Policy lives above.

pub(crate) mod array;
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
pub(crate) mod process;
#[cfg(all(feature = "refusals", not(all(test, loom))))]
pub(crate) mod refusals;
#[cfg(not(all(test, loom)))]
pub(crate) mod ring;
#[cfg(not(all(test, loom)))]
pub(crate) mod signal;
#[cfg(not(all(test, loom)))]
mod trials;
#[cfg(not(all(test, loom)))]
pub(crate) mod userfault;

use std::io;

/// The answer of a call of the C library: how much, or, if that is negative, the error of this
/// thread.
fn answer_of(answer: impl TryInto<usize>) -> io::Result<usize> {
    answer.try_into().map_err(|_| io::Error::last_os_error())
}

/// Whether a call that failed so is to be made again.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR))
}

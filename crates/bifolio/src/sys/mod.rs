//! The kernel and the processor: system calls, start-up probes, and the opaque copy.
//!
//! The lowest layer, and the only one with raw descriptors, kernel pointers or processor-specific
//! instructions. Everything here is thin: a call, its error, its contract. Policy is in the layers
//! above.

pub(crate) mod array;
#[cfg(not(all(test, loom)))]
pub(crate) mod bell;
#[cfg(not(all(test, loom)))]
pub(crate) mod control_group;
pub(crate) mod copy;
#[cfg(not(all(test, loom)))]
pub(crate) mod descriptor;
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
pub(crate) mod retries;
#[cfg(not(all(test, loom)))]
pub(crate) mod ring;
#[cfg(not(all(test, loom)))]
pub(crate) mod signal;
#[cfg(not(all(test, loom)))]
pub(crate) mod thread;
#[cfg(not(all(test, loom)))]
pub(crate) mod userfault;

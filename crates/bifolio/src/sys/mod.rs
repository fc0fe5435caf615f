//! The kernel and the processor: system calls, start-up probes, and the opaque copy.
//!
//! The lowest layer and the only one with raw descriptors, kernel pointers or instructions of one
//! processor family. Everything here is thin: a call, its error, its contract. Policy lives above.

pub(crate) mod array;
#[cfg(not(all(test, loom)))]
mod control;
pub(crate) mod copy;
#[cfg(not(all(test, loom)))]
pub(crate) mod cpu;
#[cfg(not(all(test, loom)))]
pub(crate) mod file;
#[cfg(not(all(test, loom)))]
pub(crate) mod fork;
#[cfg(not(all(test, loom)))]
pub(crate) mod memory;
#[cfg(not(all(test, loom)))]
pub(crate) mod page_pipe;
#[cfg(not(all(test, loom)))]
pub(crate) mod pagemap;
#[cfg(not(all(test, loom)))]
pub(crate) mod probe;
#[cfg(not(all(test, loom)))]
mod probe_faults;
#[cfg(not(all(test, loom)))]
mod probe_ring;
#[cfg(not(all(test, loom)))]
pub(crate) mod ring;
#[cfg(not(all(test, loom)))]
pub(crate) mod signal;
#[cfg(not(all(test, loom)))]
pub(crate) mod thread;
#[cfg(not(all(test, loom)))]
pub(crate) mod unmap;
#[cfg(not(all(test, loom)))]
pub(crate) mod userfault;

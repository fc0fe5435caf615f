//! The kernel and the processor: system calls, start-up probes, and the opaque copy.
//!
//! The lowest layer, and the only one with raw descriptors, kernel pointers or processor-specific
//! instructions. Everything here is thin: a call, its error, its contract. Policy is in the layers
//! above. A model run has only the modules that make no system calls (`lib.rs`).

pub(crate) mod array;
pub(crate) mod copy;
pub(crate) mod file;
pub(crate) mod memory;
pub(crate) mod probe;
pub(crate) mod probe_features;
pub(crate) mod process;
pub(crate) mod retries;
pub(crate) mod ring;
pub(crate) mod thread;

//! Maps of files against plain bytes: by one thread (`model.rs`), by several (`threads.rs`), over
//! storage that fails (`faults.rs`) or looks twice (`copies.rs`), killed in the middle
//! (`crash.rs`); how maps begin and end (`lifetimes.rs`), what reads and pins of their files meet
//! (`reads.rs`), what the kernel can do with them (`kernel.rs`) and refuses (`locked.rs`), what
//! memory they take (`memory.rs`) and leave (`leaks.rs`); what careless programs do: signal
//! handlers that touch them (`signals.rs`), pages thrown away (`discarded.rs`). `setup.rs` says in
//! what ways each is tried.
//!
//! # Safety
//! Each module that touches a map says why it may.
#![allow(unsafe_code)]

mod batches;
mod buffers;
mod copies;
mod crash;
mod cuts;
mod devices;
mod discarded;
mod drops;
mod faults;
mod kernel;
mod leaks;
mod lifetimes;
mod limits;
mod locked;
mod memory;
mod model;
mod poisoned;
mod reads;
mod setup;
mod signals;
#[path = "../support/mod.rs"]
mod support;
mod threads;

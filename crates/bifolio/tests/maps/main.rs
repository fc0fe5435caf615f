//! Maps of files compared with plain bytes: by one thread (`model.rs`), by several (`threads.rs`),
//! over storage that fails (`faults.rs`) or reads bytes twice (`copies.rs`), killed at any moment
//! (`crash.rs`); how maps begin and end (`lifetimes.rs`), reads and pins of their files
//! (`reads.rs`), system calls on them (`kernel.rs`) and locked pages (`locked.rs`), their memory
//! (`memory.rs`) and leaks (`leaks.rs`); mistakes of programs: signal handlers that touch them
//! (`signals.rs`), discarded pages (`discarded.rs`). `setup.rs` has the ways in which each is
//! tried.
//!
//! # Safety
//! Each module that touches a map states why it may.
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
mod slices;
#[path = "../support/mod.rs"]
mod support;
mod threads;

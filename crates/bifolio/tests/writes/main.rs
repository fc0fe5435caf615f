//! Writes, write-back and syncs, changes of the length, and several threads on one file.

mod allocation;
mod appends;
mod async_writes;
mod codec;
mod flusher;
mod gate;
mod hints;
mod len_max;
mod lengths;
mod model;
mod runtimes;
#[path = "../support/mod.rs"]
mod support;
mod syncs;
mod threads;

//! Tests of protocols: model runs under loom, and exhaustive searches.
//!
//! A model run (`cargo x loom [name]`) explores the interleavings of two or three threads and the
//! values that weak memory lets each load return. Each file covers one protocol. Each test states
//! its property and, after "Dies with", the weakenings of the source under which it was seen to
//! fail. The searches (`search_*`) run in the ordinary build: they do not model weak memory, but
//! they are exhaustive over words narrow enough to overflow.
//!
//! Loom does not model load buffering, reordered stores to different words of which neither is
//! read, or more preemptions than the bound; a pass proves nothing about these.

#[cfg(not(loom))]
mod eviction;
#[cfg(loom)]
mod loom_async_reads;
#[cfg(loom)]
mod loom_clear;
#[cfg(loom)]
mod loom_dirty;
#[cfg(loom)]
mod loom_first_use;
#[cfg(loom)]
mod loom_flush;
#[cfg(loom)]
mod loom_gate;
#[cfg(loom)]
mod loom_handover;
#[cfg(loom)]
mod loom_invalidate;
#[cfg(loom)]
mod loom_job_list;
#[cfg(loom)]
mod loom_lock;
#[cfg(loom)]
mod loom_lookup_vs_evict;
#[cfg(loom)]
mod loom_lru;
#[cfg(loom)]
mod loom_map_pin;
#[cfg(loom)]
mod loom_optimistic_read;
#[cfg(loom)]
mod loom_pin;
#[cfg(loom)]
mod loom_relocate;
#[cfg(loom)]
mod loom_request;
#[cfg(loom)]
mod loom_shared_read;
#[cfg(loom)]
mod loom_slots;
#[cfg(loom)]
mod loom_stock;
#[cfg(loom)]
mod loom_table;
#[cfg(loom)]
mod loom_throttle;
#[cfg(loom)]
mod loom_unmap;
#[cfg(loom)]
mod region;
#[cfg(not(loom))]
mod search_pin;
#[cfg(loom)]
mod world;

//! Tests of protocols: model runs under loom, and exhaustive searches.
//!
//! A model run (`cargo x loom [name]`) goes through the interleavings of two or three threads and
//! the values that weak memory lets each load see. Each file is a protocol; each test names its
//! property and what dies with it: the weakening of the source under which it was seen to fail.
//! The searches (`search_*`) run in the ordinary build: they know no weak memory, but they are
//! exhaustive over words narrow enough to overflow.
//!
//! What loom does not see, so what green does not prove: load buffering, reordered stores to
//! different words of which neither is read, and more preemptions than the bound.

#[cfg(loom)]
mod loom_collapse;
#[cfg(loom)]
mod loom_dirty;
#[cfg(loom)]
mod loom_first_use;
#[cfg(loom)]
mod loom_flush;
#[cfg(loom)]
mod loom_handover;
#[cfg(loom)]
mod loom_invalidate;
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
mod loom_slots;
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

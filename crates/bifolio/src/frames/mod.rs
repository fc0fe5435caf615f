//! Frames: the memory folios live in, and the budget that bounds it.
//!
//! One kind so far: the arena (`arena.rs`), huge-page frames whose number is that of their
//! descriptor; evicting is reusing, without any page-table work. Above, `reclaim` decides who gets
//! a frame and who must give one back; here is only what is free, where it lies (`rows.rs`), and
//! what everything costs.
//!
//! Invariants:
//! - FRAMES-1: what is resident (chunks in use, descriptors ever used, charged tables) never
//!   exceeds the bound: each is charged before it is touched.
//! - FRAMES-2: a frame's address is readable for the life of the cache, whatever became of its
//!   folio: an optimistic reader may come late. A released chunk reads as zeros.
//! - FRAMES-3: a frame belongs to one folio from `allocate` to `free`, both under the arena's lock:
//!   that lock orders the last life of a frame before the next.

mod arena;
mod budget;
mod chunk;
mod growth;
mod rows;
mod watcher;

pub(crate) use arena::Arena;
pub(crate) use chunk::CHUNK_BYTES;
pub(crate) use rows::ROW_PAGES;
pub(crate) use watcher::ChunkWatcher;

/// log2 of the pages in the largest folio: a whole chunk.
pub(crate) const ORDER_MAX: u8 = 9;

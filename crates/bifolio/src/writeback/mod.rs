//! Write-back: which folios of a file are dirty, how they get to the device, and who learns of it
//! when they do not.
//!
//! Stands between `mapping` and `io`: an [`Inode`] is one file of the cache (the kernel's noun for
//! what handles share): its mapping, its store, its dirty list and its write errors. A file with a
//! backing is written to that; a memory file has none, and its folios are spilled, if the cache has
//! a spill, when reclaim finds no other memory (`store/`, `absent.rs`, `spill_out.rs`).
//!
//! ```text
//!   file: syncs ----------------.      sync.rs
//!   flusher: age, share --------+--> WriteBatch --> io::Queue --> device     batch.rs
//!     ^    |                    |     one folio and its dirty neighbours are one transfer
//!     |    '--> held writers    |      flusher.rs, throttle.rs
//!   reclaim: dirty in the way --'
//!   reclaim: of a memory file ------> WriteBatch --> slots of the spill    spill_out.rs
//! ```
//!
//! The life of a dirty folio:
//!
//! ```text
//!   clean --mark_dirty--> DIRTY, on the dirty list (oldest first)
//!     ^                     | add: lock, clear DIRTY, off the list, set WRITEBACK, unlock; submit
//!     |                     v
//!     '----- ok ------- WRITEBACK ----- failed: DIRTY again, on the list, error recorded
//! ```
//!
//! Invariants:
//! - WRITEBACK-1: DIRTY is set exactly while the folio is on its inode's dirty list; both change
//!   under the list's lock. It is set by a holder of the folio lock, or by the end of a failed
//!   write-out before WRITEBACK is cleared.
//! - WRITEBACK-2: a folio under WRITEBACK has a reference of its own and is in its table: eviction
//!   fails on either, truncation waits. So the end of a write-out needs no lock to find its inode.
//! - WRITEBACK-3: DIRTY is cleared before the bytes are read for the device, and nobody changes
//!   them until the write-out has ended: a writer waits for that, with the folio locked
//!   (`Inode::mark_dirty`). So what the device gets of a folio is one state of it, never a mixture.
//! - WRITEBACK-4: what is written ends at the length of the file, which no `set_len` changes
//!   meanwhile (`resizing.rs`): that first waits for what is in flight, and nothing is written out
//!   before the backing has agreed, or the old length stands again. (Written out by a length that
//!   does not come true, a folio would be clean, and its last bytes lost. And a kernel's direct
//!   write beside a change of the length may be reported as lost.)
//!
//! - WRITEBACK-5: a sync misses nothing that was dirty at its call. What is on the list stays
//!   there, with its number, until its write-out begins; what has begun is in an epoch that the
//!   sync waits for.
//!
//! Lock order: folio lock, then `cutting`, then the dirty list's lock; with `cutting` shared, as
//! write-outs have it, folio locks are only tried.

mod absent;
mod batch;
mod dirty;
mod errors;
mod flusher;
mod inode;
mod leaving;
mod remove;
mod resizing;
mod spill_out;
mod store;
mod sync;
mod throttle;

pub(crate) use batch::{CopyAt, Leaving};
pub(crate) use dirty::InFlight;
pub(crate) use errors::ErrorCursor;
pub(crate) use flusher::{Flusher, FlusherSettings, FlusherThread};
pub(crate) use inode::{FileSize, Inode, Services};
pub(crate) use leaving::LeavingBatch;
pub(crate) use resizing::Resizing;

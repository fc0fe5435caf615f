//! Write-back: which folios of a file are dirty, how they get to the device, and who learns of it
//! when they do not.
//!
//! Stands between `page` and `io`: an [`Inode`] is one file of the cache (the kernel's noun for
//! what handles share): its mapping, its store, its dirty list and its write errors. A file with a
//! backing is written to that; a memory file has none, and its folios are swapped out, if the cache
//! has a swap, when reclaim finds no other memory (`store.rs`, `swap_out.rs`).
//!
//! ```text
//!   file: syncs ----------------.      sync.rs; the flush of the device: flush.rs
//!   flusher: age, share --------+--> WriteBatch --> io::Queue --> device     batch.rs
//!     ^    |                    |     one folio and its dirty neighbours are one transfer
//!     |    '--> held writers    |      flusher.rs, device.rs, throttle.rs
//!   reclaim: dirty in the way   |      tells the flusher, and writes nothing
//!   reclaim: of a memory file ------> WriteBatch --> slots of the swap    swap_out.rs
//! ```
//!
//! The life of a dirty folio:
//!
//! ```text
//!   clean --mark_dirty--> dirty, on the dirty list (oldest first)
//!     ^                     | add: lock; to writing, off the list, into an epoch; unlock; submit
//!     |                     v
//!     '----- ok -------- writing ----- failed: dirty again, on the list, error recorded
//! ```
//!
//! Invariants:
//! - WRITEBACK-1: the write state of a folio (`page/flags.rs`) is one of four, and changes in one
//!   step, under the lock of its inode's dirty list, together with what it says: the folio is on
//!   the list exactly while it is dirty, and counted in an epoch exactly while it is writing. It
//!   becomes dirty by a holder of the folio lock, or by the end of a failed write-out; the error is
//!   recorded under the same hold of the list's lock. A dirty folio stands in its table, and it is
//!   never moved: its bytes change their folio only in a collapse, of a memory file. (A collapse of
//!   one makes room where it stood.)
//! - WRITEBACK-2: a folio that is writing has a reference of its own and is in its table: eviction
//!   fails on either, truncation waits. So the end of a write-out needs no lock to find its inode.
//! - WRITEBACK-3: a folio is writing before its bytes are read for the device, and nobody changes
//!   them until the write-out has ended: a writer waits for that, with the folio locked
//!   (`Inode::mark_dirty`). So what the device gets of a folio is one state of it, never a mixture.
//!   (A store through a map does not wait: it makes the folio dirty again, and what the device gets
//!   is a copy: `copies.rs`.)
//! - WRITEBACK-4: what is written ends at the length of the file, which no `set_len` changes
//!   meanwhile (`inode/resize.rs`): that first waits for what is in flight, and nothing is written
//!   out before the backing has agreed, or the old length stands again. (Written out by a length
//!   that does not come true, a folio would be clean, and its last bytes lost. And a kernel's
//!   direct write beside a change of the length may be reported as lost.)
//!
//! - WRITEBACK-5: a sync, of a file or of a range, misses nothing that was dirty at its call: S1 to
//!   S5 at the head of `dirty.rs`, the one way to wait for the storage.
//!
//! Lock order: folio lock, then `cutting`, then the dirty list's lock; with `cutting` shared, as
//! write-outs have it, folio locks are only tried.

mod batch;
mod copies;
mod device;
mod dirty;
mod errors;
mod flush;
mod flusher;
mod inode;
mod store;
mod swap_out;
mod sync;
mod throttle;

pub(crate) use batch::{CopyAt, WriteBatch, WriteVictim};
pub(crate) use device::NoRoom;
pub(crate) use dirty::InFlight;
pub(crate) use errors::ErrorCursor;
pub(crate) use flusher::{Flusher, FlusherSettings, FlusherThreads};
pub(crate) use inode::{FileSize, Inode, Resizing, Services};
pub(crate) use store::Cleaner;

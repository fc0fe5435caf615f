//! Write-back: writes the dirty folios of files to their devices. `dirt` has the records of what is
//! dirty.
//!
//! States of a folio:
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
//!   step, under the lock of its inode's dirty list, together with what it implies: the folio is on
//!   the list exactly while it is dirty, and counted in an epoch exactly while it is writing. A
//!   holder of the folio lock makes it dirty, or the end of a failed write-out; then the error is
//!   recorded in the same critical section of the list's lock. A dirty folio is in its table. Its
//!   bytes move to another folio only in a relocation, of a memory file.
//! - WRITEBACK-2: a folio that is writing has a reference of its own and is in its table: eviction
//!   fails on either, truncation waits. So the end of a write-out needs no lock to find its inode.
//! - WRITEBACK-3: a folio is writing before its bytes are read for the device, and no thread
//!   changes them until the write-out has ended: a writer waits for that, with the folio locked
//!   (`Inode::mark_dirty`). So the device gets one state of a folio, never a mixture. (A store
//!   through a map does not wait: it makes the folio dirty again, and the device gets a copy:
//!   `maps/stores.rs`.)
//! - WRITEBACK-4: a write-out ends at the length of the file, which no `set_len` changes while it
//!   is in flight (`inode/resize.rs`). (A folio written up to a length that is then refused would
//!   be clean, its last bytes lost; and the kernel may report the direct write as lost.)
//! - WRITEBACK-5: a sync, of a file or of a range, misses nothing that was dirty at its call:
//!   SYNC-S1 to SYNC-S5 at the head of `dirt/dirty.rs`.
//! - WRITEBACK-6: of a file with a write gate, no write-out of a folio begins before the log is
//!   durable up to the highest LSN of its dirty bytes: `gate.rs`.

mod batch;
mod flusher;
mod gate;
mod room;
mod sealed;
mod sync;

pub(crate) use batch::{CopyAt, WriteBatch, WriteVictim};
pub(crate) use flusher::FlusherThreads;
#[cfg(all(test, not(loom)))]
pub(crate) use flusher::stays_listed_for;
pub(crate) use gate::{check_outside_gate, grow_lsns, is_shut_for, refresh_gate, set_gate};
pub(crate) use room::wait_for_room;
pub(crate) use sync::{CheckpointMark, Writeback};

const ALL_PAGES: std::ops::Range<u64> = 0..u64::MAX;

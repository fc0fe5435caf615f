//! Pages of a file in memory: the folio descriptor, which is 64 bytes and never unmapped, and the
//! Entry, one word per page in the table of a file, that leads to it.
//!
//! Descriptor i belongs to frame i (`memory`). A folio of several pages uses the descriptor of its
//! first frame; the others only store the Entry version of their frame. Only an unreferenced folio
//! can move to other frames (`relocate.rs`), and the result is a new folio.
//!
//! Field access rules of a descriptor (cited elsewhere as "rule N"):
//!
//! 1. `pin`: any thread, but only through [`FolioRef`] and [`Frozen`]. Descriptors are type-stable:
//!    an access to the word of a freed folio is harmless, because it fails or is followed by a
//!    recheck.
//! 2. `owner`, `index`, `order`: written by the thread that allocated the folio, before `init`
//!    publishes it. `owner` is cleared under the folio lock, when the folio is removed from its
//!    table, and not set again in that generation. Readers hold the folio lock, or hold a reference
//!    and tolerate that `owner` is cleared.
//! 3. `lru_next`, `lru_previous`, `lru_epoch`, and the flags ON_LRU, FRESH and ACTIVE: under the
//!    LRU lock.
//! 4. `dirty_next`, `dirty_previous`, `dirtied`: under the dirty lock of the owner. `dirtied` has
//!    no meaning while the folio is clean; in a memory file the word then holds the swap slot,
//!    which is accessed under the folio lock or while a write-out is in flight.
//! 5. UPTODATE is set under the folio lock and never cleared while another thread holds a
//!    reference. The write state changes under the dirty lock of the owner (WRITEBACK-1), one
//!    read-modify-write per transition. The folio lock is also held when the folio becomes dirty,
//!    becomes clean without a write-out, or begins a write-out. The thread that does the I/O ends
//!    the write-out. READAHEAD is set by the thread that fills the folio, before the folio is
//!    READY, and cleared by its first user; it is a hint. ALLOCATED is set and cleared under the
//!    folio lock, while the folio is not uptodate; a thread that sees it without the lock must load
//!    the Entry again.
//! 6. `version`: per frame, not per folio. Written by the thread that takes the Entry of the frame
//!    out of a table, read by the thread that inserts the next one. In between, the frame passes
//!    through the lock of the arena.
//! 7. `batch`: the CPU whose LRU batch the folio was added to; written under the lock of that
//!    batch.
//!
//! References: 1 for the table that names the folio, 1 per LRU batch slot, 1 per isolation, 1 per
//! pin, 1 per I/O in flight, 1 per thread that looked it up. A place on an LRU list or a dirty list
//! is not a reference: the last put removes the folio from both.

mod change;
mod descriptor;
mod entry;
mod flags;
mod hot;
mod mapping;
mod optimistic;
mod pin_word;
mod relocate;
mod table;
mod tables;

pub(crate) use change::{EvictError, WriteSection};
pub(crate) use descriptor::{
    BATCH_SLOTS, Folio, FolioRef, Folios, Frozen, LockedFolio, NO_FOLIO, Reaper,
};
pub(crate) use entry::{
    ALL_BYTES, Entry, FolioId, PAGE_BYTES, PAGE_SHIFT, VALUE_MAX, is_in_one_page, pages_of,
};
pub(crate) use flags::{CLASSES_MAX, ClassId, Flag, Listing, WriteState};
pub(crate) use hot::Hot;
pub(crate) use mapping::{FrozenWaits, Lookup, Mapping, recheck_ready};
pub(crate) use optimistic::{FrameRun, read_held, read_validated};
pub(crate) use pin_word::{COUNT_MAX, TryGet};
#[cfg(test)]
pub(crate) use pin_word::{PinState, PinWord, Put};
pub(crate) use relocate::OldFolio;
#[cfg(all(test, loom))]
pub(crate) use table::Bitmap;
#[cfg(all(test, loom))]
pub(crate) use table::ZeroValid;
pub(crate) use table::{Filling, MemorySource, ReservedArray, TABLE_PAGE_BYTES, Table, Values};
pub(crate) use tables::{HasTable, Tables};

//! A page of a file in memory: the folio that holds it, with a 64-byte descriptor that is never
//! unmapped, and the Entry that finds it, one word in the table of its file.
//!
//! Below everything that fills, lists or evicts folios. The two protocols are the pin word
//! (`pin.rs`) and the mapping from page index to Entry (`mapping.rs`). A descriptor belongs to a
//! frame (`memory`): descriptor i describes the folio whose first page is frame i; a folio of
//! several pages uses the descriptor of its first frame, the others only keep their frame's Entry
//! version. A folio that is moved to other frames (`reclaim/evacuate.rs`) is another folio
//! afterwards: only one that nobody has a reference to is moved.
//!
//! Who may touch which field of a descriptor, and when (cited elsewhere as "rule N"):
//!
//! 1. `pin`: anybody, through [`FolioRef`] and [`Frozen`] only. The descriptor is type-stable:
//!    touching the word of a folio that died is harmless, it fails or must be re-checked.
//! 2. `owner`, `index`, `order`: written by whoever allocated the folio, before `init` publishes
//!    it. `owner` is cleared under the folio lock, when the folio leaves its table, and never set
//!    again in that life. Readers hold the folio lock, or a reference and accept that `owner` goes.
//! 3. `lru_next`, `lru_previous`, `lru_epoch`, and the flags ON_LRU and ACTIVE: under the LRU lock.
//! 4. `dirty_next`, `dirty_previous`, `dirtied`: under the dirty lock of the owner. While a folio
//!    is not dirty nobody asks for `dirtied`; in a memory file the word is its swap slot then,
//!    under the folio lock, or while a write-out is in flight.
//! 5. UPTODATE is set under the folio lock and never cleared while anybody holds a reference. The
//!    write state changes under the dirty lock of the owner (WRITEBACK-1), one read-modify-write a
//!    transition; it becomes dirty, or clean without a write-out, and a write-out begins, only with
//!    the folio lock held as well; it is ended by whoever does the I/O. READAHEAD is set by whoever
//!    fills the folio, before it is READY, and cleared by its first user: a hint. ALLOCATED is set
//!    and cleared under the folio lock, while the folio is not uptodate; a thread that sees it
//!    without the lock must look at the Entry again.
//! 6. `version`: per frame, not per folio. Written by whoever takes the frame's Entry out of a
//!    table, read by whoever puts the next one in; between the two the frame changes hands through
//!    the arena's lock.
//! 7. `batch`: to which CPU's LRU batch the folio was given; written under that batch's lock.
//!
//! References: 1 the table that names the folio, 1 each LRU batch slot, 1 each isolation, 1 each
//! pin, 1 each I/O in flight, 1 each thread that looked it up. Being on an LRU list or a dirty list
//! is not a reference: the last put takes the folio off.

mod change;
mod collapse;
mod descriptor;
mod entry;
mod flags;
mod lookup;
mod mapping;
mod optimistic;
mod pin;
mod table;

pub(crate) use change::{EvictError, WriteSection};
pub(crate) use collapse::Part;
pub(crate) use descriptor::{
    BATCH_SLOTS, Folio, FolioBatch, FolioId, FolioRef, Folios, Frozen, LockedFolio, NO_FOLIO,
    Reaper,
};
pub(crate) use entry::{Entry, VALUE_MAX};
pub(crate) use flags::{Flag, Listing, WriteState};
pub(crate) use lookup::{FrozenWaits, Lookup, recheck_ready};
pub(crate) use mapping::{Hot, Mapping, PAGE_BYTES, PAGE_SHIFT, is_in_one_page, pages_of};
pub(crate) use optimistic::{Stretch, read_validated};
pub(crate) use pin::{COUNT_MAX, TryGet};
#[cfg(test)]
pub(crate) use pin::{PinState, PinWord, Put};
#[cfg(all(test, loom))]
pub(crate) use table::Bitmap;
pub(crate) use table::{Filling, HasTable, TABLE_PAGE_BYTES, Table, Tables};

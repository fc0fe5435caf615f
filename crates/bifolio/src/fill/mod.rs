//! Fills: how the bytes of a page get from its store into a frame.
//!
//! PROTOCOL FILL, of the thread that fills against a thread that finds the folio meanwhile:
//!
//! ```text
//!  CLAIM                                       LOOK UP
//!  C1 wait for a share of the device's reads   L1 load the Entry: it names a folio
//!     and for staging memory, holding nothing  L2 wait for its lock; with transfers of its own
//!  C2 take a frame; a new folio, locked           in flight, skip it instead (IO-5)
//!  C3 insert it: the Entry names it, and is    L3 does the folio belong to the file still?
//!     not READY; lost the race? free it           yes: it is READY
//!  C4 was the file cut meanwhile? remove it       no: P4 removed it; look up again, and claim
//!
//!  TRANSFER
//!  T1 note the clear that has ended (CLEAR-F2)
//!  T2 read the bytes of all folios of the run into their frames, or into staging memory
//!
//!  PUBLISH, folio by folio
//!  P1 are the bytes there, and right? zero what lies past the end of the storage
//!  P2 install the page of a map, from the staging memory
//!  P3 mark it READY, unlock it
//!  P4 after an error: remove it from the table, unlock it
//! ```
//!
//! From C3 on the fill owns the lock of the folio and one reference: they reserve the frame for the
//! device (IO-1), and end with P3 or P4, on whatever thread sees the transfer complete. So a folio
//! that is not READY is being filled, or was allocated and never written. A fill that fails leaves
//! nothing behind, and the next access tries again.
//!
//! ACCESS MODES: what a call needs of the folio at an index, and what happens if the page has none.
//!
//! For a hole the first mode returns no folio and no error: the caller reads zeros, or fails. Holes
//! and allocated pages exist only in memory files.
//!
//! | mode | hole | allocated, not written | past the end | the folio is | used by |
//! |---|---|---|---|---|---|
//! | `Read` | no folio | no folio | no folio | locked, uptodate | other reads, edges of cuts |
//! | `Cache` | a folio of zeros | zeroed, uptodate | refused | locked, uptodate | pins |
//! | `Write` | a folio | zeroed, or as it is | allowed | locked, any bytes | writes |
//! | `Falloc` | allocated | zeroed, uptodate | allowed | locked | `allocate` |
//!
//! A write that replaces the whole folio gets it "as it is", with "any bytes". This is decided with
//! the folio locked and holds until the lock is released; before that another thread may append.
//! `Falloc` makes an allocated page uptodate for a reason: an `allocate` that fails frees the pages
//! that it allocated itself, which are those that are not uptodate. A page that a concurrent call
//! has allocated too is uptodate, and stays.

mod claim;
mod locked;
mod lookup;
pub(crate) mod own_pins;
mod queue;
mod transfer;
mod try_lookup;

pub(crate) use claim::{ReadIoClaim, Wait};
pub(crate) use locked::Locked;
pub(crate) use queue::{Batch, Delivery, FillQueue};
pub(crate) use transfer::{ReadIo, copy_filled};
pub(crate) use try_lookup::TryFind;

use crate::inode::Inode;
use crate::memory::CacheState;
use crate::reclaim::Reclaim;
use std::sync::Arc;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Fill<'h> {
    pub(crate) inode: &'h Arc<Inode>,
    pub(crate) reclaim: &'h Reclaim,
    pub(crate) state: &'h CacheState,
}

/// Access mode of a lookup; see the table in the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessMode {
    Read,
    Cache,
    /// The caller replaces these bytes, which lie in one unit. If the file has, or will have, no
    /// other bytes in the folio, the folio may be returned not uptodate, with any bytes, and the
    /// caller must mark it.
    Write {
        start: u64,
        end: u64,
    },
    Falloc,
}

impl AccessMode {
    pub(crate) fn fills_holes(self) -> bool {
        matches!(self, Self::Cache | Self::Write { .. } | Self::Falloc)
    }

    pub(crate) fn may_pass_end(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Falloc)
    }
}

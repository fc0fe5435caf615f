//! State shared by all clones of a `File`: access rights, the inode, the error cursor; and whether
//! the cache is open.
//!
//! ACCESS MODES: what a call needs of the folio at an index, and what happens if the page has none.
//!
//! Modelled on the kernel's `enum sgp_type` (`mm/shmem.c`), with the mode `SGP_GET` that was
//! proposed in 2026 for batched reads of tmpfs. For a hole the first three modes return no folio
//! and no error: the caller reads zeros, or fails. Holes and allocated pages exist only in memory
//! files; a page of a file with a backing that is not in memory is on the backing.
//!
//! | mode | hole | allocated, not written | past the end | the folio is | used by |
//! |---|---|---|---|---|---|
//! | `Get` | no folio | no folio | no folio | referenced | batched reads, `copy_to_fd` |
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

use super::async_reads::ReadServer;
use super::open::{Membership, Registry};
use super::readahead::Readahead;
use crate::ablation::Ablation;
use crate::error::{Error, ErrorKind, Result};
use crate::inode::{Cleaner, Inode};
use crate::reclaim::Reclaim;
use crate::sync::{AtomicU64, Ordering};
use crate::sys::process::Origin;
use crate::writeback::{ErrorCursor, NoRoom};
use std::sync::{Arc, OnceLock};

/// State shared by all clones of a [`File`](super::File).
#[derive(Debug)]
pub(crate) struct Handle {
    pub(super) inode: Arc<Inode>,
    pub(super) reclaim: Arc<Reclaim>,
    pub(super) registry: Arc<Registry>,
    pub(super) error_cursor: ErrorCursor,
    pub(super) readahead: Readahead,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// Server of asynchronous reads, once one was used.
    pub(super) read_server: OnceLock<Arc<ReadServer>>,
    pub(super) ablation: Ablation,
    /// Last field: the handle has dropped everything else when the registry is told.
    pub(super) membership: Membership,
}

/// Upper bound of positions and lengths, in bytes.
const POSITION_BYTES_MAX: u64 = i64::MAX as u64;

impl Handle {
    /// Fails if the cache is closed or the process was forked.
    pub(super) fn check_usable(&self) -> Result<()> {
        self.registry.cache_state.check()
    }

    /// Fails if the cache is poisoned, closed, or belongs to a parent process.
    pub(super) fn check_sound(&self) -> Result<()> {
        self.check_usable()?;
        self.inode.memory.soundness.check()
    }

    pub(super) fn check_readable(&self) -> Result<()> {
        self.check_usable()?;
        if self.readable { Ok(()) } else { Err(self.not_opened_for("reading")) }
    }

    pub(super) fn check_writable(&self) -> Result<()> {
        self.check_sound()?;
        self.inode.check_outside_gate()?;
        if self.writable { Ok(()) } else { Err(self.not_opened_for("writing")) }
    }

    #[cold]
    fn not_opened_for(&self, operation: &'static str) -> Error {
        let text = format!("not opened for {operation}");
        Error::new(ErrorKind::NotOpenedFor, text).in_file(self.inode.name())
    }

    /// Returns the end of a range, or an error if it is beyond 2^63.
    pub(super) fn range_end(&self, position_bytes: u64, length_bytes: u64) -> Result<u64> {
        let end = position_bytes.checked_add(length_bytes);
        end.filter(|end| *end <= POSITION_BYTES_MAX).ok_or_else(|| {
            let text =
                format!("{length_bytes} bytes at position {position_bytes} lie beyond 2^63 - 1");
            let range = position_bytes..position_bytes.saturating_add(length_bytes);
            Error::new(ErrorKind::OutOfRange, text).in_file(self.inode.name()).at(range)
        })
    }

    /// Waits until a folio may become dirty that could not for the reason `no_room`. Called without
    /// a folio lock.
    ///
    /// # Errors
    /// The device, or the swap, or a write gate accepts no writes, and the limit of dirty bytes is
    /// reached; no memory for another LSN.
    pub(super) fn make_room(
        &self,
        no_room: NoRoom,
        position_bytes: u64,
        length_bytes: u64,
    ) -> Result<()> {
        match no_room {
            NoRoom::DirtyLimit => self.wait_to_be_dirty(position_bytes, length_bytes),
            NoRoom::Lsns => self.grow_lsns(),
        }
    }

    /// Charges a larger table of LSNs, and evicts folios if necessary.
    fn grow_lsns(&self) -> Result<()> {
        let Some(step) = self.inode.lsn_slots_wanted() else { return Ok(()) };
        let bytes = self.inode.lsn_bytes(step);
        self.reclaim.charge(bytes)?;
        if !self.inode.grow_lsns(step) {
            self.inode.memory.arena.uncharge(bytes);
        }
        Ok(())
    }

    /// Waits until another folio may become dirty. Called without a folio lock.
    ///
    /// # Errors
    /// The device, or the swap, accepts no writes, and the limit of dirty bytes is reached.
    fn wait_to_be_dirty(&self, position_bytes: u64, length_bytes: u64) -> Result<()> {
        let inode = &self.inode;
        if inode.store.cleaner() != Cleaner::Swapper {
            return inode.wait_for_room(position_bytes, length_bytes);
        }
        self.reclaim.wait_for_swap(inode, position_bytes..position_bytes + length_bytes)
    }

    /// Fails for a file that can be mapped, whose pages have fixed addresses.
    pub(super) fn check_unmappable(&self, operation: &'static str) -> Result<()> {
        if self.inode.page_space.is_in_place() {
            return Err(self.unsupported(operation, "it was opened to be mapped"));
        }
        Ok(())
    }

    #[cold]
    pub(super) fn past_end(&self, position_bytes: u64, length_bytes: u64) -> Error {
        let len_bytes = self.inode.mapping.len_bytes();
        let text = format!(
            "{length_bytes} bytes at position {position_bytes} end past the end of the file, which \
             has {len_bytes} bytes"
        );
        let range = position_bytes..position_bytes.saturating_add(length_bytes);
        Error::new(ErrorKind::PastEnd, text).in_file(self.inode.name()).at(range)
    }

    #[cold]
    fn unsupported(&self, operation: &str, reason: &str) -> Error {
        let text = format!("cannot {operation}: {reason}");
        Error::new(ErrorKind::Unsupported, text).in_file(self.inode.name())
    }

    /// Fails for a length above the maximum.
    pub(super) fn check_len(&self, wanted_bytes: u64) -> Result<()> {
        let len_max_bytes = self.inode.len_max_bytes();
        if wanted_bytes <= len_max_bytes {
            return Ok(());
        }
        let text = format!(
            "cannot grow to {wanted_bytes} bytes, only to {len_max_bytes} \
             (OpenOptions::len_max, File::raise_len_max)"
        );
        Err(Error::new(ErrorKind::TooLong, text).in_file(self.inode.name()))
    }
}

/// State of the cache: open or closed, and the number of maps in use.
#[derive(Debug)]
pub(crate) struct CacheState {
    /// Number of maps in use, and `CLOSED`. One word, so that a new map and a concurrent close see
    /// each other in either order.
    state: AtomicU64,
    origin: Origin,
}

/// Bit of a closed cache.
const CLOSED: u64 = 1 << 63;

impl CacheState {
    pub(crate) fn new(origin: Origin) -> Self {
        Self { state: AtomicU64::new(0), origin }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.origin.is_forked() {
            return Err(Error::forked());
        }
        // Acquire: pairs with the Release in `close`: what it flushed is flushed.
        let is_closed = self.state.load(Ordering::Acquire) & CLOSED != 0;
        if is_closed {
            return Err(Error::new(ErrorKind::Closed, "the cache is closed"));
        }
        Ok(())
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.origin.is_forked()
    }

    /// Counts a map; the caller then checks the state.
    pub(super) fn begin_map(&self) {
        // Relaxed: a close changes the same word, so one of the two sees the other.
        self.state.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end_map(&self) {
        // Release: pairs with the Acquire in `close`: what was stored through the map is found.
        self.state.fetch_sub(1, Ordering::Release);
    }

    /// Closes the state, or returns the number of maps in use.
    pub(super) fn close(&self) -> std::result::Result<(), u64> {
        // AcqRel/Acquire: pairs with the Release in `end_map`, and with the Acquire in `check`.
        let closed = self.state.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire);
        closed.map(drop).map_err(|state| state & !CLOSED)
    }

    /// Opens the state again after a failed close.
    pub(super) fn reopen(&self) {
        // Release: pairs with the Acquire in `check`.
        self.state.fetch_and(!CLOSED, Ordering::Release);
    }

    /// Fails while maps are in use.
    pub(super) fn check_maps(&self) -> Result<()> {
        // Acquire: pairs with the Release in `end_map`, as in `close`.
        match self.state.load(Ordering::Acquire) & !CLOSED {
            0 => Ok(()),
            maps => Err(Error::maps_alive(maps)),
        }
    }
}

/// Access mode of a lookup; see the table in the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessMode {
    Get,
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

/// Result of a lookup for an allocated page that was never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnAllocated {
    /// No folio: the page reads as zeros.
    None,
    /// Folio, zeroed and uptodate.
    Zeroed,
    /// Folio, zeroed and uptodate; if the access replaces all of it, the folio as it is.
    ZeroedForPart,
}

impl AccessMode {
    /// Returns `true` if a hole gets a folio.
    pub(super) fn fills_holes(self) -> bool {
        matches!(self, Self::Cache | Self::Write { .. } | Self::Falloc)
    }

    /// Returns `true` if the page may lie past the end of file.
    pub(super) fn may_pass_end(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Falloc)
    }

    /// Returns the result for an allocated page that was never written.
    pub(super) fn on_allocated(self) -> OnAllocated {
        match self {
            Self::Get | Self::Read => OnAllocated::None,
            Self::Write { .. } => OnAllocated::ZeroedForPart,
            Self::Cache | Self::Falloc => OnAllocated::Zeroed,
        }
    }
}

//! What all clones of a `File` share: rights, the inode, the error cursor.
//!
//! ACCESS MODES: what a call wants of the folio at an index, and what becomes of one that is not
//! there.
//!
//! After the kernel's `enum sgp_type` (`mm/shmem.c`), with the mode `SGP_GET` that was proposed in
//! 2026 for batched reads of tmpfs: on a hole the first three answer "no folio, and no error", and
//! the caller reads zeros, or refuses. Holes and allocated pages are those of memory files; a file
//! with a backing has none, because whatever is not in memory is on the backing.
//!
//! | mode | hole | allocated, not written | behind the end | the folio comes | who |
//! |---|---|---|---|---|---|
//! | `Get` | no folio | no folio | no folio | referenced | batched reads, `copy_to_fd` |
//! | `Read` | no folio | no folio | no folio | locked, uptodate | other reads, edges of cuts |
//! | `NoAlloc` | no folio | zeroed, uptodate | no folio | locked, uptodate | `collapse` |
//! | `Cache` | a folio of zeros | zeroed, uptodate | refused | locked, uptodate | pins |
//! | `Write` | a folio | zeroed, or as it is | allowed | locked, any bytes | writes |
//! | `Falloc` | allocated | zeroed, uptodate | allowed | locked | `allocate` |
//!
//! "As it is" and "any bytes" is what a write gets that replaces the whole folio. Whether it does
//! is judged with the folio locked, and good for as long: until then others may append. That
//! `Falloc` makes an allocated page uptodate keeps a promise: an `allocate` that fails takes back
//! the pages it allocated itself, and knows them by their not being uptodate; one that another call
//! was promised meanwhile stays.

use super::closing::Membership;
use super::readahead::Readahead;
use super::registry::Registry;
use crate::ablation::Ablation;
use crate::error::{Error, ErrorKind, Result};
use crate::reclaim::Reclaim;
use crate::writeback::{Cleaner, ErrorCursor, Inode};
use std::sync::Arc;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(super) inode: Arc<Inode>,
    pub(super) reclaim: Arc<Reclaim>,
    pub(super) registry: Arc<Registry>,
    pub(super) error_cursor: ErrorCursor,
    pub(super) readahead: Readahead,
    pub(super) readable: bool,
    pub(super) writable: bool,
    pub(super) immutable: bool,
    pub(super) ablation: Ablation,
    /// The last field, so that the handle has let go of everything else when the file is told.
    pub(super) membership: Membership,
}

/// The last position a file can have is below this.
const POSITION_BYTES_MAX: u64 = i64::MAX as u64;

impl Handle {
    /// Whether the cache can be used at all.
    pub(super) fn check_usable(&self) -> Result<()> {
        self.registry.cache_state.check()
    }

    /// Refuses what must not be done in a cache that is poisoned, or cannot be used at all.
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
        if self.writable { Ok(()) } else { Err(self.not_opened_for("writing")) }
    }

    #[cold]
    fn not_opened_for(&self, operation: &'static str) -> Error {
        ErrorKind::NotOpenedFor { file: self.inode.name(), operation }.into()
    }

    /// Where a range ends, if that is a position at all.
    pub(super) fn range_end(&self, position_bytes: u64, length_bytes: u64) -> Result<u64> {
        let end = position_bytes.checked_add(length_bytes);
        end.filter(|end| *end <= POSITION_BYTES_MAX).ok_or_else(|| {
            let file = self.inode.name();
            ErrorKind::OutOfRange { file, position_bytes, length_bytes }.into()
        })
    }

    /// Refuses what only memory files can do.
    pub(super) fn check_memory_file(&self, operation: &'static str) -> Result<()> {
        if self.inode.is_memory_file() {
            return Ok(());
        }
        Err(ErrorKind::NotAMemoryFile { file: self.inode.name(), operation }.into())
    }

    /// Holds the caller until a folio may become dirty. No folio lock is held.
    ///
    /// # Errors
    /// The device, or the swap, takes nothing, and as much is dirty there as may be.
    pub(super) fn wait_to_be_dirty(&self, position_bytes: u64, length_bytes: u64) -> Result<()> {
        let inode = &self.inode;
        if inode.store.cleaner() != Cleaner::Swapper {
            return inode.wait_for_room(position_bytes, length_bytes);
        }
        self.reclaim.wait_for_swap(inode, position_bytes..position_bytes + length_bytes)
    }

    /// Refuses what a file that can be mapped cannot do: its pages have their places.
    pub(super) fn check_unmappable(&self, operation: &'static str) -> Result<()> {
        if self.inode.page_space.is_in_place() {
            return Err(ErrorKind::IsMappable { file: self.inode.name(), operation }.into());
        }
        Ok(())
    }

    #[cold]
    pub(super) fn past_end(&self, position_bytes: u64, length_bytes: u64) -> Error {
        let (file, len_bytes) = (self.inode.name(), self.inode.mapping.len_bytes());
        ErrorKind::PastEnd { file, position_bytes, length_bytes, len_bytes }.into()
    }

    /// Refuses a length the table was not reserved for.
    pub(super) fn check_len(&self, wanted_bytes: u64) -> Result<()> {
        let len_max_bytes = self.inode.len_max_bytes;
        if wanted_bytes <= len_max_bytes {
            return Ok(());
        }
        let file = self.inode.name();
        Err(ErrorKind::TooLong { file, wanted_bytes, len_max_bytes }.into())
    }
}

/// See the head of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Get,
    Read,
    NoAlloc,
    Cache,
    /// The caller replaces these bytes, which lie in one unit. If they are all that the file has,
    /// or will have, in the folio, that may come not uptodate, with any bytes, and the caller must
    /// mark it.
    Write {
        start: u64,
        end: u64,
    },
    Falloc,
}

/// What a mode makes of an allocated page that was never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnAllocated {
    /// No folio: it reads as zeros.
    None,
    /// The folio, zeroed and uptodate.
    Zeroed,
    /// The same, unless all of it is replaced: then the folio as it is.
    ZeroedForPart,
}

impl Access {
    /// Whether a hole gets a folio.
    pub(super) fn fills_holes(self) -> bool {
        matches!(self, Self::Cache | Self::Write { .. } | Self::Falloc)
    }

    /// Whether the page may lie behind the end of the file.
    pub(super) fn may_pass_end(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Falloc)
    }

    /// What becomes of an allocated page that was never written.
    pub(super) fn on_allocated(self) -> OnAllocated {
        match self {
            Self::Get | Self::Read => OnAllocated::None,
            Self::Write { .. } => OnAllocated::ZeroedForPart,
            Self::NoAlloc | Self::Cache | Self::Falloc => OnAllocated::Zeroed,
        }
    }
}

//! State shared by all clones of a `File`: access rights, the inode, the error cursor.

use super::async_reads::ReadServer;
use super::open::{Membership, Registry};
use super::readahead::Readahead;
use crate::ablation::Ablation;
use crate::error::{Error, ErrorKind, Result};
use crate::fill::Fill;
use crate::inode::{Cleaner, Inode};
use crate::reclaim::Reclaim;
use crate::writeback::{ErrorCursor, NoRoom};
use std::sync::{Arc, OnceLock};

/// State shared by all clones of a [`File`](super::File).
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) inode: Arc<Inode>,
    pub(crate) reclaim: Arc<Reclaim>,
    pub(crate) registry: Arc<Registry>,
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

const POSITION_BYTES_MAX: u64 = i64::MAX as u64;

impl Handle {
    /// Fails if the cache is closed or the process was forked.
    pub(super) fn check_usable(&self) -> Result<()> {
        self.registry.cache_state.check()
    }

    /// Fails if the cache is poisoned, closed, or belongs to a parent process.
    pub(crate) fn check_sound(&self) -> Result<()> {
        self.registry.check()
    }

    pub(crate) fn fill(&self) -> Fill<'_> {
        let state = &self.registry.cache_state;
        Fill { inode: &self.inode, reclaim: &self.reclaim, state }
    }

    pub(crate) fn check_readable(&self) -> Result<()> {
        self.check_usable()?;
        if self.readable { Ok(()) } else { Err(self.not_opened_for("reading")) }
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
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
    pub(crate) fn range_end(&self, position_bytes: u64, length_bytes: u64) -> Result<u64> {
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
    fn unsupported(&self, operation: &str, reason: &str) -> Error {
        let text = format!("cannot {operation}: {reason}");
        Error::new(ErrorKind::Unsupported, text).in_file(self.inode.name())
    }

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

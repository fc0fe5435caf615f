//! What all clones of a `File` share: rights, the inode, the error cursor.

use super::closing::Membership;
use super::readahead::Readahead;
use super::registry::Registry;
use crate::ablation::Ablation;
use crate::error::{Error, ErrorKind, Result};
use crate::reclaim::Reclaim;
use crate::writeback::{ErrorCursor, Inode};
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

//! The store of a memory file: slots of the cache's swap, if that has one.
//!
//! The slot of a page wanders between its Entry and the folio's descriptor (SWAP-1):
//!
//! ```text
//!   value(slot) --take_over--> clean folio with the slot --evict--> value(slot)
//!                                 |            ^
//!                              mark_dirty      | its write-out ended (swap_out.rs)
//!                                 v            |
//!                              dirty folio, no slot
//! ```

use crate::error::{ErrorKind, Result};
use crate::io::{Backing, IoError, Operation};
use crate::memory::Shadow;
use crate::page::{Entry, Folio, FolioRef, LockedFolio, PAGE_BYTES};
use crate::swap::Swap;
use crate::writeback::inode::pages_of_still;
use std::sync::Arc;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct SwapStore {
    name: String,
    swap: Option<Arc<Swap>>,
}

impl SwapStore {
    /// Of a file that messages call `name`.
    pub(in crate::writeback) fn new(name: String, swap: Option<Arc<Swap>>) -> Self {
        Self { name, swap }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Where folios go when memory is short.
    pub(super) fn swap(&self) -> Option<&Arc<Swap>> {
        self.swap.as_ref()
    }

    pub(super) fn reader(&self) -> &Arc<dyn Backing> {
        let Some(swap) = &self.swap else { unreachable!("there is nothing to read from") };
        swap.backing()
    }

    /// The marks that a folio which is not dirty leaves at the head of a unit, and beside the slot.
    pub(super) fn left_by(
        &self,
        locked: &LockedFolio<'_>,
        page: u64,
        shadow: Option<Shadow>,
    ) -> Entry {
        let slot = locked.slot();
        if slot == 0 {
            return Entry::HOLE;
        }
        if let (Some(swap), Some(shadow)) = (&self.swap, shadow) {
            swap.set_shadow(slot + page as u32, shadow);
        }
        Entry::value(u64::from(slot) + page)
    }

    pub(super) fn check_filled(&self, folio: &FolioRef<'_>, start: *const u8) -> Result<bool> {
        let descriptor = folio.folio();
        let slots = descriptor.slot()..;
        let Some(swap) = self.swap.as_ref().filter(|_| slots.start != 0) else { return Ok(false) };
        let pages = pages_of_still(folio, start);
        for ((slot, page), index) in slots.zip(pages).zip(descriptor.index()..) {
            swap.check(slot, page).map_err(|mismatch| ErrorKind::SwapCorrupt {
                file: self.name.clone(),
                position_bytes: index * PAGE_BYTES,
                swap: swap.name().to_owned(),
                swap_position_bytes: Swap::position_bytes(slot),
                expected_checksum: mismatch.expected,
                found_checksum: mismatch.found,
            })?;
        }
        Ok(true)
    }
}

/// The swap ends before the slot of `folio` does.
#[cold]
pub(super) fn cut_short(
    swap: &Swap,
    folio: &Folio,
    expected_bytes: u64,
    got_bytes: u64,
) -> IoError {
    let kind = std::io::ErrorKind::UnexpectedEof;
    IoError {
        file: swap.name().to_owned(),
        operation: Operation::Read,
        position_bytes: Swap::position_bytes(folio.slot()) + got_bytes,
        length_bytes: expected_bytes - got_bytes,
        source: std::io::Error::new(kind, "it was cut by somebody else"),
    }
}

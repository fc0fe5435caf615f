//! The swap file: stores pages of memory files when memory is short.
//!
//! The file has a page for each slot, from slot 1 on. Which slots are used, their checksums and
//! their shadows are in memory.
//! States of a slot, with the owner in brackets:
//!
//! ```text
//!           take             seal, written              evicted
//!   free ----------> [a write-back] --------> [a clean folio] ---------> [a value Entry]
//!    ^                    |                    |           ^                    |
//!    |  failed, or dirty  |  dirtied, dropped  |           | read back, checked |  punched,
//!    |  again by now      |                    |           '--------------------|  truncated
//!    '-----give_back------'------give_back-----'---------------give_back--------'
//! ```
//!
//! Invariants:
//! - SWAP-1: a slot that is not free has exactly one owner: a write-back in flight, the descriptor
//!   of a clean folio, or a value Entry. Only the owner transfers it, uses its word, passes it on
//!   or frees it. It is passed on by the operation that publishes the new owner (the CAS of an
//!   Entry, the folio lock, the end of a transfer), which also orders the uses of its word.
//! - SWAP-2: an allocated slot is above 0 and below 2^28, and its page ends within the bytes that
//!   the file may have. So a value Entry can name it, and 0 can mean "none" in a descriptor.
//! - SWAP-3: the word of a slot is accessed only below the capacity, and a group of capacity is
//!   charged against the bound before it is added. Capacity never shrinks.
//! - SWAP-4: the checksum is computed before the page is evicted, from bytes that no thread changes
//!   until the transfer has ended (WRITEBACK-3). A page that is read back is compared before it
//!   becomes visible: a page that fails is an error, never data.
//!
//! The file is never synced, and only the cache that wrote it can use it. This module transfers no
//! pages and does not know folios. No system call is made under the lock of the slots.

mod slots;
mod storage;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

pub(crate) use slots::{GROUP_BYTES, GROUP_SLOTS, SlotRun, position_bytes};

use crate::error::{Error, Result};
use crate::io::{self, Backing, DirectBacking, Guarded};
use crate::sync::{AtomicU64, Mutex, Ordering};
use crate::sys::probe::Features;
use slots::{SlotMetadata, Slots};
use storage::Preallocation;

/// One slot in this many is spare.
const SPARE_DIVISOR: u64 = 16;

#[derive(Clone, Debug)]
pub(crate) enum SwapStorage {
    /// A temporary file in this directory.
    In(PathBuf),
    /// The caller's storage.
    Backing(Arc<dyn Backing>),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Answers {
    pub(crate) taken: u64,
    pub(crate) refused: u64,
    /// Error of the last one that failed.
    pub(crate) last_refusal: Option<Error>,
}

#[derive(Debug)]
pub(crate) struct Swap {
    pub(crate) backing: Arc<dyn DirectBacking>,
    pub(crate) name: String,
    pub(crate) slots: Slots,
    pub(crate) words: SlotMetadata,
    preallocation: Preallocation,
    /// Pages of memory files that exist, in memory or in the swap: each may need a slot. Who adds
    /// one has ensured the capacity for it.
    pub(crate) pages: AtomicU64,
    answers: Mutex<Answers>,
}

impl Swap {
    /// Opens the swap for pages in its first `bytes_max` bytes.
    ///
    /// # Errors
    /// `SwapFile`, `Open`: a temporary file cannot be created or opened. `Memory`: no address space
    /// for the words.
    pub(crate) fn open(storage: SwapStorage, bytes_max: u64, features: &Features) -> Result<Self> {
        let backing: Arc<dyn DirectBacking> = match storage {
            SwapStorage::In(directory) => Arc::new(storage::open(&directory, features)?),
            SwapStorage::Backing(backing) => Arc::new(Guarded::new(backing)?),
        };
        let slots = Slots::new(bytes_max);
        let purpose = "the checksums of swapped pages (CacheBuilder::swap_max)";
        let words =
            SlotMetadata::new(slots.end).map_err(|source| Error::memory(purpose, source))?;
        let name = backing.describe();
        let (preallocation, pages) = (Preallocation::default(), AtomicU64::new(0));
        let answers = Mutex::default();
        Ok(Self { backing, name, slots, words, preallocation, pages, answers })
    }

    /// Truncates the file to length 0, which frees its space. No slot may have an owner.
    pub(crate) fn cut(&self) -> Result<()> {
        self.preallocation.forget();
        io::set_len(&*self.backing, 0)
    }

    /// Allocates storage for the next writes. Called by the thread that is about to write, one at a
    /// time, with no transfer in flight. Blocks while the file system works.
    pub(crate) fn set_storage_aside(&self) {
        // One more attempt to write past what was ever written, in this round.
        self.slots.state.lock().may_try = true;
        // Slot 0 is not part of the capacity.
        let limit = self.slots.capacity() + 1;
        self.preallocation.reach(&*self.backing, || self.slots.state.lock().cursor, limit);
    }

    pub(crate) fn note_end(&self, error: Option<&Error>) {
        let mut answers = self.answers.lock();
        match error {
            None => answers.taken += 1,
            Some(error) => {
                answers.refused += 1;
                answers.last_refusal = Some(error.clone());
            }
        }
    }

    pub(crate) fn answers(&self) -> Answers {
        self.answers.lock().clone()
    }

    /// Frees slots that the caller owns; they may be parts of several runs.
    pub(crate) fn give_back(&self, first: u32, pages: u32) {
        if pages > 0 {
            self.slots.give_back(SlotRun { first, pages });
        }
    }

    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Returns `true` if capacity must be added before `pages` more pages exist: every page must
    /// find a slot, and folios of several pages must find adjacent ones.
    pub(crate) fn is_short_for(&self, pages: u64) -> bool {
        let wanted = self.pages() + pages;
        let wanted = wanted + wanted / SPARE_DIVISOR + u64::from(GROUP_SLOTS) / 2;
        let capacity = self.slots.capacity();
        u64::from(capacity) < wanted && capacity < self.slots.capacity_max()
    }

    /// Returns `true` if more capacity would provide adjacent slots for a folio of `pages` pages.
    /// For this, the capacity grows to at most twice the number of pages.
    pub(crate) fn wants_adjacent_slots(&self, pages: u32) -> bool {
        let capacity_max = 2 * (self.pages() + u64::from(GROUP_SLOTS));
        let is_in_pieces = pages > 1 && self.slots.state.lock().longest() < pages;
        is_in_pieces && u64::from(self.slots.capacity()) < capacity_max
    }

    pub(crate) fn has_free_slots(&self) -> bool {
        self.slots.used() < self.slots.capacity_max()
    }
}

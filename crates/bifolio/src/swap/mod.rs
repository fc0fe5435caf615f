//! The swap file: where pages of memory files go when memory is short.
//!
//! Stands between `io`, whose [`Backing`] it opens, and `writeback`, whose memory files write
//! folios to slots and read them back. One swap serves all memory files of a cache.
//!
//! ```text
//!   slot    0        1    2    3   ...                     slots.rs, slot_group.rs: in use;
//!                                                          stretch.rs: which have storage
//!         +--------+----+----+----+-----
//!   file  | unused |    page each, 4 KiB                   temporary.rs: how it is made
//!         +--------+----+----+----+-----
//!   memory           one word each: checksum, shadow       slot_metadata.rs
//! ```
//!
//! The life of a slot; what is in brackets owns it:
//!
//! ```text
//!           take             seal, written              evicted
//!   free ----------> [a write-out] ---------> [a clean folio] ---------> [a value Entry]
//!    ^                    |                    |           ^                    |
//!    |  failed, or dirty  |  dirtied, dropped  |           | read back, checked |  punched,
//!    |  again meanwhile   |                    |           '--------------------|  truncated
//!    '-----give_back------'------give_back-----'---------------give_back--------'
//! ```
//!
//! Invariants:
//! - SWAP-1: a slot that is not free has exactly one owner: a write-out in flight, the descriptor
//!   of a clean folio, or a value Entry. Only the owner transfers it, uses its word, hands it on or
//!   gives it back; it is handed on by what publishes the new owner (the CAS of an Entry, the folio
//!   lock, the end of a transfer), which also orders the uses of its word.
//! - SWAP-2: a slot that is handed out is above 0, below 2^28, and its page ends within the bytes
//!   the file may have. So a value Entry can name it, and 0 can stand for "none" in a descriptor.
//! - SWAP-3: the word of a slot is touched only below the capacity, and a group of capacity is
//!   charged against the bound before it is added. Capacity never shrinks.
//! - SWAP-4: the checksum is taken before the page leaves memory, of bytes that nobody changes
//!   until the transfer has ended (WRITEBACK-3). What is read back is compared before anybody sees
//!   it: a page that fails is an error, never data.
//!
//! The file is never synced, and of no use to anybody but the cache that wrote it. Nothing here
//! transfers pages, knows folios or waits for anything but the file system, and the lock over the
//! slots, which is held for no call and under which no other is taken.

mod slot_group;
mod slot_metadata;
mod slots;
mod stretch;
mod temporary;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

pub(crate) use slot_group::GROUP_SLOTS;
pub(crate) use slot_metadata::Mismatch;
pub(crate) use slots::{GROUP_BYTES, SlotRun};

use crate::error::{ErrorKind, Result};
use crate::io::{self, Backing, Guarded, IoError};
use crate::memory::Shadow;
use crate::sync::{AtomicU64, Mutex, Ordering};
use crate::sys::memory::PAGE_BYTES;
use crate::sys::probe::Features;
use slot_metadata::SlotMetadata;
use slots::Slots;
use stretch::Stretches;

/// Of so many slots one is spare.
const PART_SPARE: u64 = 16;

/// Where swapped pages are stored.
#[derive(Clone, Debug)]
pub(crate) enum SwapPlace {
    /// A temporary file in this directory.
    In(PathBuf),
    /// The caller's storage.
    Backing(Arc<dyn Backing>),
}

/// How write-outs have ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answers {
    pub(crate) taken: u64,
    pub(crate) refused: u64,
    pub(crate) last_refusal: Option<Arc<IoError>>,
}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Swap {
    backing: Arc<dyn Backing>,
    name: String,
    slots: Slots,
    words: SlotMetadata,
    stretches: Stretches,
    /// Pages of memory files that exist, wherever: each may need a slot.
    pages: AtomicU64,
    answers: Mutex<Answers>,
}

impl Swap {
    /// Opens the swap, for pages in its first `bytes_max` bytes.
    ///
    /// # Errors
    /// `SwapFile`, `Open`: no temporary file can be made, or opened. `Memory`: no address space for
    /// the words.
    pub(crate) fn open(place: SwapPlace, bytes_max: u64, features: &Features) -> Result<Self> {
        let backing: Arc<dyn Backing> = match place {
            SwapPlace::In(directory) => Arc::new(temporary::open(&directory, features)?),
            SwapPlace::Backing(backing) => Arc::new(Guarded::new(backing)?),
        };
        let slots = Slots::new(bytes_max);
        let purpose = "the checksums of swapped pages (CacheBuilder::swap_bytes_max)";
        let words = SlotMetadata::new(slots.end())
            .map_err(|source| ErrorKind::Memory { purpose, source })?;
        let name = backing.describe();
        let (stretches, pages) = (Stretches::default(), AtomicU64::new(0));
        let answers = Mutex::default();
        Ok(Self { backing, name, slots, words, stretches, pages, answers })
    }

    /// The storage of swapped pages.
    pub(crate) fn backing(&self) -> &Arc<dyn Backing> {
        &self.backing
    }

    /// The file, for messages.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Where the page of a slot begins in the file.
    pub(crate) fn position_bytes(slot: u32) -> u64 {
        u64::from(slot) * PAGE_BYTES as u64
    }

    /// Cuts the file to length 0, which frees its space. No slot may have an owner.
    pub(crate) fn cut(&self) -> std::result::Result<(), IoError> {
        self.stretches.forget();
        io::set_len(&*self.backing, 0)
    }

    /// Has storage set aside for what is written next. For who is about to write,
    /// one thread at a time, which has no transfer in flight. Blocks for the file system.
    pub(crate) fn set_storage_aside(&self) {
        self.slots.try_again();
        // Slot 0 is not part of the capacity.
        let limit = self.slots.capacity() + 1;
        self.stretches.reach(&*self.backing, || self.slots.next(), limit);
    }

    /// Takes free slots in a row: `wanted_pages`, at most [`GROUP_SLOTS`]; or, if nowhere there are
    /// so many, the longest run there is. `None` if that is shorter than `least_pages`.
    ///
    /// The run starts anywhere, and usually where the last one ended. What the caller does not use
    /// of it he gives back.
    pub(crate) fn take(&self, wanted_pages: u32, least_pages: u32) -> Option<SlotRun> {
        self.slots.take(wanted_pages, least_pages)
    }

    /// The storage has taken slots of which the caller is the owner, or refused to. While it
    /// refuses more than it has, those that were written once are handed out, and no others but
    /// one run a round.
    pub(crate) fn note_written(&self, slots: SlotRun, is_written: bool) {
        self.slots.note_written(slots, is_written);
    }

    /// A write-out of pages has ended.
    pub(crate) fn note_end(&self, error: Option<&Arc<IoError>>) {
        let mut answers = self.answers.lock();
        match error {
            None => answers.taken += 1,
            Some(error) => {
                answers.refused += 1;
                answers.last_refusal = Some(Arc::clone(error));
            }
        }
    }

    /// How write-outs have ended so far.
    pub(crate) fn answers(&self) -> Answers {
        self.answers.lock().clone()
    }

    /// Makes slots free again, of which the caller is the owner; they may be parts of several runs.
    pub(crate) fn give_back(&self, first: u32, pages: u32) {
        if pages > 0 {
            self.slots.give_back(SlotRun { first, pages });
        }
    }

    /// Adds [`GROUP_SLOTS`] slots to the capacity, or what is left up to the most there may be. The
    /// caller has charged [`GROUP_BYTES`] for it, and takes that back if the answer is `false`: all
    /// are there already.
    #[must_use]
    pub(crate) fn grow(&self) -> bool {
        self.slots.grow()
    }

    /// A memory file has so many pages more; whoever made them had capacity for them.
    pub(crate) fn note_born(&self, pages: u64) {
        self.pages.fetch_add(pages, Ordering::Relaxed);
    }

    /// So many pages have become holes.
    pub(crate) fn note_gone(&self, pages: u64) {
        self.pages.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Pages of memory files that exist.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Whether there should be more capacity before `pages` more pages exist: all of them must find
    /// a slot, and folios of several pages find theirs in a row.
    pub(crate) fn is_short_for(&self, pages: u64) -> bool {
        let wanted = self.pages() + pages;
        let wanted = wanted + wanted / PART_SPARE + u64::from(GROUP_SLOTS) / 2;
        let capacity = self.capacity_slots();
        u64::from(capacity) < wanted && capacity < self.capacity_slots_max()
    }

    /// Returns `true` if more capacity would hold a folio of `pages` that finds no slots in a row
    /// though enough are free. At most twice as many slots as pages are made for that.
    pub(crate) fn wants_row(&self, pages: u32) -> bool {
        let capacity_max = 2 * (self.pages() + u64::from(GROUP_SLOTS));
        let is_in_pieces = pages > 1 && self.slots.longest() < pages;
        is_in_pieces && u64::from(self.capacity_slots()) < capacity_max
    }

    /// Slots there are: free ones and used ones.
    pub(crate) fn capacity_slots(&self) -> u32 {
        self.slots.capacity()
    }

    /// Slots there can be, after so many calls of [`Self::grow`] as it takes.
    pub(crate) fn capacity_slots_max(&self) -> u32 {
        self.slots.capacity_max()
    }

    /// Whether there are slots that nobody has, or can be.
    pub(crate) fn has_free_slots(&self) -> bool {
        self.used_slots() < self.capacity_slots_max()
    }

    /// Slots that have an owner.
    pub(crate) fn used_slots(&self) -> u32 {
        self.slots.used()
    }

    /// Notes the checksum of a page that is about to be written to `slot` (SWAP-4). Its shadow is
    /// zero until [`Self::set_shadow`].
    pub(crate) fn seal(&self, slot: u32, page: &[u8; PAGE_BYTES]) {
        self.words.seal(slot, page);
    }

    /// Compares a page that was read from `slot` with what was sealed (SWAP-4).
    pub(crate) fn check(
        &self,
        slot: u32,
        page: &[u8; PAGE_BYTES],
    ) -> std::result::Result<(), Mismatch> {
        self.words.check(slot, page)
    }

    /// Keeps the shadow of an eviction beside the slot that stands in the Entry.
    pub(crate) fn set_shadow(&self, slot: u32, shadow: Shadow) {
        self.words.set_shadow(slot, shadow);
    }

    /// The shadow of the last eviction.
    pub(crate) fn shadow(&self, slot: u32) -> Shadow {
        self.words.shadow(slot)
    }
}

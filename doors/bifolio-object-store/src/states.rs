//! The state of each slot: a count of its changes, and which of its blocks are known to be right.
//!
//! A block is verified when it comes from the disk, and not for each read from memory. Its bit in
//! the slot's word says that the bytes in memory have the checksum of the record, or were written by
//! [`Tier::insert`](crate::tier::Tier::insert). The count in the word changes before other bytes can
//! be read from the slot: another part, zeros, or what was read from the disk after an eviction.
//!
//! ```text
//! reader: word before --> copy --> word after: the same count, and the bits were set: the bytes are
//!                                  right, and those of the part that was in the slot before
//! fill:   device --> count + 1, bits of its blocks cleared --> the pages become readable
//! check:  word before --> bytes in memory are right --> bits set, unless the count has changed
//! ```

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::record::Layout;

/// A word of a slot: its changes in the upper half, a bit for each verified block in the lower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotState(u64);

impl SlotState {
    fn changes(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Returns `true` if all of these blocks were verified.
    pub(crate) fn covers(self, blocks: &Range<usize>) -> bool {
        let mask = mask(blocks);
        self.0 & mask == mask
    }

    /// Returns `true` if nothing was put into the slot, nor read from the disk, between the two.
    pub(crate) fn is_unchanged(self, later: Self) -> bool {
        self.changes() == later.changes()
    }

    /// Returns the state after a change of some blocks.
    fn changed(self, blocks: &Range<usize>) -> Self {
        let changes = u64::from(self.changes().wrapping_add(1)) << 32;
        Self(changes | self.0 & u64::from(u32::MAX) & !mask(blocks))
    }
}

/// Slots whose words are allocated together, when the first of them is used.
const CHUNK_SLOTS: u32 = 1 << 14;

/// The states of all slots. A word that was never changed takes no memory.
#[derive(Debug)]
pub(crate) struct SlotStates {
    chunks: Box<[OnceLock<Box<[AtomicU64]>>]>,
    slots: u32,
    part_bytes: u64,
    block_bytes: u64,
}

impl SlotStates {
    pub(crate) fn new(layout: &Layout) -> Self {
        let Layout { part_bytes, block_bytes, slots } = *layout;
        let chunks = (0..slots.div_ceil(CHUNK_SLOTS)).map(|_| OnceLock::new()).collect();
        Self { chunks, slots, part_bytes, block_bytes }
    }

    pub(crate) fn get(&self, slot: u32) -> SlotState {
        // Acquire: pairs with the AcqRel in `update`. A reader that copied bytes of a change has
        // acquired them from the page cache, and finds the count of the change here.
        let chunk = self.chunks[(slot / CHUNK_SLOTS) as usize].get();
        let word = chunk.map(|words| &words[(slot % CHUNK_SLOTS) as usize]);
        SlotState(word.map_or(0, |word| word.load(Ordering::Acquire)))
    }

    /// Notes that other bytes are about to be written to a slot.
    pub(crate) fn change(&self, slot: u32) {
        self.update(slot, |state| Some(state.changed(&(0..32))));
    }

    /// Notes that bytes of the file were read from the disk. They are not readable yet.
    pub(crate) fn filled(&self, bytes: Range<u64>) {
        let mut start = bytes.start;
        while start < bytes.end {
            let slot = start / self.part_bytes;
            let (first, next) = (slot * self.part_bytes, (slot + 1) * self.part_bytes);
            if slot >= u64::from(self.slots) {
                return;
            }
            let end = bytes.end.min(next) - first;
            let start_block = (start - first) / self.block_bytes;
            let blocks = start_block as usize..end.div_ceil(self.block_bytes) as usize;
            self.update(slot as u32, |state| Some(state.changed(&blocks)));
            start = next;
        }
    }

    /// Notes that the blocks in memory are right, unless the slot has changed since `before`.
    pub(crate) fn verified(&self, slot: u32, before: SlotState, blocks: &Range<usize>) {
        self.update(slot, |state| {
            state.is_unchanged(before).then_some(SlotState(state.0 | mask(blocks)))
        });
    }

    fn update(&self, slot: u32, change: impl Fn(SlotState) -> Option<SlotState>) {
        let change = |word| change(SlotState(word)).map(|state| state.0);
        // AcqRel/Acquire: pairs with the load in `get`; a reader of the bytes that are made readable
        // after a change sees its count.
        let words = self.chunks[(slot / CHUNK_SLOTS) as usize]
            .get_or_init(|| (0..CHUNK_SLOTS.min(self.slots)).map(|_| AtomicU64::new(0)).collect());
        let word = &words[(slot % CHUNK_SLOTS) as usize];
        let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
    }
}

/// Returns the bits of blocks.
fn mask(blocks: &Range<usize>) -> u64 {
    debug_assert!(blocks.end <= 32, "{blocks:?}");
    ((1 << blocks.end) - 1) & !((1 << blocks.start) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn states() -> SlotStates {
        SlotStates::new(&Layout { part_bytes: 32 << 16, block_bytes: 1 << 16, slots: 3 })
    }

    #[test]
    fn a_fill_ends_what_was_verified_of_its_blocks_only() {
        let states = states();
        states.verified(1, states.get(1), &(0..32));
        assert!(states.get(1).covers(&(0..32)) && !states.get(0).covers(&(0..1)));
        // The last block of slot 0, and the first two of slot 1.
        states.verified(0, states.get(0), &(30..32));
        let start = 32_u64 << 16;
        states.filled(start - 1..start + (1 << 16) + 1);
        assert!(states.get(0).covers(&(30..31)) && !states.get(0).covers(&(31..32)));
        let state = states.get(1);
        assert!(state.covers(&(2..32)) && !state.covers(&(0..1)) && !state.covers(&(1..2)));
        // A position behind the last slot.
        states.filled(10 * start..11 * start);
    }

    #[test]
    fn what_was_verified_before_a_change_does_not_count() {
        let states = states();
        let before = states.get(2);
        states.change(2);
        states.verified(2, before, &(0..4));
        assert!(!states.get(2).covers(&(0..1)) && !states.get(2).is_unchanged(before));
        states.verified(2, states.get(2), &(0..4));
        assert!(states.get(2).covers(&(0..4)));
        states.change(2);
        assert!(!states.get(2).covers(&(0..1)));
    }
}

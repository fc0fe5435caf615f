//! A chunk: 2 MiB of frames, dedicated to one folio order at a time. Pure bookkeeping.
//!
//! A chunk is the unit in which memory is taken from and given back to the kernel (one huge page)
//! and in which folio sizes change: a slot is a folio of the chunk's order.

use super::ORDER_MAX;
use super::rows::Listed;

/// Bytes of a chunk.
pub(crate) const CHUNK_BYTES: u64 = 2 << 20;
/// Pages of a chunk.
pub(crate) const CHUNK_PAGES: u32 = 512;
const _: () = assert!(1 << ORDER_MAX == CHUNK_PAGES);
const WORDS: usize = (CHUNK_PAGES / u64::BITS) as usize;

/// What a chunk is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Not resident.
    Vacant,
    /// Charged, and being made resident by somebody who does not hold the arena's lock for that.
    Growing,
    /// Resident, cut into slots of this order.
    Slots { order: u8 },
}

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) role: Role,
    /// Pages from the front that are resident; fewer than all only where the bound ends.
    pub(super) pages: u32,
    /// Pages whose descriptors have ever been charged: those stay resident.
    pub(super) descriptor_pages: u32,
    /// Being emptied: nothing is allocated here.
    pub(super) draining: bool,
    /// On which lists of its order it is.
    pub(super) listed: Listed,
    free_slots: u32,
    /// Of those, in roomy rows.
    roomy_slots: u32,
    retired_slots: u32,
    /// Bit i: slot i is free.
    free: [u64; WORDS],
    /// Bit i: slot i is not resident, though the chunk is.
    retired: [u64; WORDS],
}

impl Chunk {
    pub(super) fn vacant() -> Self {
        Self {
            role: Role::Vacant,
            pages: 0,
            descriptor_pages: 0,
            draining: false,
            listed: Listed::default(),
            free_slots: 0,
            roomy_slots: 0,
            retired_slots: 0,
            free: [0; WORDS],
            retired: [0; WORDS],
        }
    }

    pub(super) fn order(&self) -> u8 {
        match self.role {
            Role::Vacant | Role::Growing => 0,
            Role::Slots { order } => order,
        }
    }

    pub(super) fn slots(&self) -> u32 {
        self.pages >> self.order()
    }

    pub(super) fn used_slots(&self) -> u32 {
        self.slots() - self.free_slots - self.retired_slots
    }

    pub(super) fn retired_slots(&self) -> u32 {
        self.retired_slots
    }

    /// Pages that are resident: all but those of retired slots.
    pub(super) fn resident_pages(&self) -> u32 {
        self.pages - (self.retired_slots << self.order())
    }

    pub(super) fn free_slots(&self) -> u32 {
        self.free_slots
    }

    pub(super) fn free_pages(&self) -> u32 {
        self.free_slots << self.order()
    }

    pub(super) fn is_in_service(&self) -> bool {
        matches!(self.role, Role::Slots { .. })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.is_in_service() && self.used_slots() == 0
    }

    /// Cuts the resident pages into free slots of `order`.
    pub(super) fn cut(&mut self, order: u8) {
        self.role = Role::Slots { order };
        self.free_slots = self.slots();
        self.retired_slots = 0;
        self.free = [0; WORDS];
        self.retired = [0; WORDS];
        for slot in 0..self.free_slots {
            self.free[slot as usize / 64] |= 1 << (slot % 64);
        }
        self.roomy_slots = self.count_roomy_slots();
    }

    /// Whether folios of `order` may come in.
    pub(super) fn is_for(&self, order: u8) -> bool {
        self.role == Role::Slots { order } && !self.draining
    }

    pub(super) fn roomy_slots(&self) -> u32 {
        self.roomy_slots
    }

    /// The bits of 64 slots, among them `slot`.
    pub(super) fn free_word(&self, slot: u32) -> u64 {
        self.free[slot as usize / 64]
    }

    pub(super) fn is_free(&self, slot: u32) -> bool {
        slot < self.slots() && self.free[slot as usize / 64] & (1 << (slot % 64)) != 0
    }

    /// Takes the given slot, which must be free.
    pub(super) fn take(&mut self, slot: u32) {
        debug_assert!(self.is_free(slot), "slot {slot} is in use");
        let roomy_before = self.roomy_slots_beside(slot);
        self.free[slot as usize / 64] &= !(1 << (slot % 64));
        self.free_slots -= 1;
        self.roomy_slots = self.roomy_slots + self.roomy_slots_beside(slot) - roomy_before;
    }

    /// The lowest free slot.
    pub(super) fn first_free(&self) -> Option<u32> {
        let word = self.free.iter().position(|word| *word != 0)?;
        Some(word as u32 * 64 + self.free[word].trailing_zeros())
    }

    pub(super) fn put(&mut self, slot: u32) {
        debug_assert!(slot < self.slots() && !self.is_free(slot), "slot {slot} freed twice");
        let roomy_before = self.roomy_slots_beside(slot);
        self.free[slot as usize / 64] |= 1 << (slot % 64);
        self.free_slots += 1;
        self.roomy_slots = self.roomy_slots + self.roomy_slots_beside(slot) - roomy_before;
    }

    /// Makes a free slot one that is not resident.
    pub(super) fn retire(&mut self, slot: u32) {
        self.take(slot);
        self.retired[slot as usize / 64] |= 1 << (slot % 64);
        self.retired_slots += 1;
    }

    /// Makes a retired slot a free one.
    pub(super) fn revive(&mut self, slot: u32) {
        debug_assert!(self.is_retired(slot), "slot {slot} is not retired");
        self.retired[slot as usize / 64] &= !(1 << (slot % 64));
        self.retired_slots -= 1;
        self.put(slot);
    }

    /// The lowest retired slot.
    pub(super) fn first_retired(&self) -> Option<u32> {
        let word = self.retired.iter().position(|word| *word != 0)?;
        Some(word as u32 * 64 + self.retired[word].trailing_zeros())
    }

    fn is_retired(&self, slot: u32) -> bool {
        self.retired[slot as usize / 64] & (1 << (slot % 64)) != 0
    }

    /// The slots in use.
    pub(super) fn used(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.slots()).filter(|slot| !self.is_free(*slot) && !self.is_retired(*slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_handed_out_once_at_every_order() {
        for order in 0..=ORDER_MAX {
            let mut chunk = Chunk::vacant();
            chunk.pages = CHUNK_PAGES - 5;
            chunk.cut(order);
            let mut taken = Vec::new();
            while let Some(slot) = chunk.first_free() {
                chunk.take(slot);
                taken.push(slot);
            }
            let expected = (CHUNK_PAGES - 5) >> order;
            assert_eq!(taken, (0..expected).collect::<Vec<_>>(), "order {order}");
            assert_eq!((chunk.free_pages(), chunk.used().count()), (0, expected as usize));
            for slot in taken {
                chunk.put(slot);
            }
            assert!(chunk.is_empty());
        }
    }

    #[test]
    fn a_retired_slot_is_neither_free_nor_used_nor_resident() {
        for order in 0..ORDER_MAX {
            let mut chunk = Chunk::vacant();
            chunk.pages = CHUNK_PAGES;
            chunk.cut(order);
            let slots = chunk.slots();
            chunk.take(0);
            chunk.retire(1);
            assert_eq!((chunk.free_slots(), chunk.used_slots()), (slots - 2, 1));
            assert_eq!(chunk.resident_pages(), CHUNK_PAGES - (1 << order));
            assert_eq!(chunk.used().collect::<Vec<_>>(), [0]);
            assert!(!chunk.is_free(1) && chunk.first_retired() == Some(1));
            chunk.revive(1);
            assert_eq!((chunk.free_slots(), chunk.resident_pages()), (slots - 1, CHUNK_PAGES));
            assert_eq!(chunk.first_retired(), None);
        }
    }
}

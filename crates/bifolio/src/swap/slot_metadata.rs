//! One word per slot: the checksum of the page that was written to it, and its shadow.
//!
//! ```text
//!   63       60 59             32 31             0
//!  +-----------+-----------------+----------------+
//!  |     0     |   shadow (28)   |  checksum (32) |
//!  +-----------+-----------------+----------------+
//! ```
//!
//! The word of a slot belongs to the slot's owner (SWAP-1): plain loads and stores, ordered by the
//! operation that passes the slot from one owner to the next (an Entry, the folio lock).
//!
//! The checksum is the CRC-32 of the page. The words are in memory and the pages in the file, so a
//! page read from a slot is compared with the last page that this cache wrote to this slot. A page
//! that decayed, was torn, was misplaced by a transfer, or is left from an earlier run passes only
//! with a probability of 2^-32, or if it has the same bytes. A seed would not improve this.
//!
//! `crc32fast` computes about 50 GiB/s for single pages, twice as fast as CRC-32C of `crc32c`; no
//! transfer waits for it.

use std::io;

use thiserror::Error;

use crate::memory::Shadow;
use crate::page::{ReservedArray, VALUE_MAX};
use crate::sync::{AtomicU64, Ordering};
use crate::sys::memory::PAGE_BYTES;

const CHECKSUM_MASK: u64 = u32::MAX as u64;
const SHADOW_SHIFT: u32 = 32;
const _: () = assert!(VALUE_MAX << SHADOW_SHIFT >> SHADOW_SHIFT == VALUE_MAX);

/// Error for a page read from a slot that does not have the checksum of the page written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("its checksum is {found:#010x}, but {expected:#010x} was written")]
pub(crate) struct Mismatch {
    pub(crate) expected: u32,
    pub(crate) found: u32,
}

/// The words of all slots; see the [module documentation](self).
#[derive(Debug)]
pub(crate) struct SlotMetadata {
    words: ReservedArray<AtomicU64>,
}

impl SlotMetadata {
    pub(super) fn new(end: u32) -> io::Result<Self> {
        Ok(Self { words: ReservedArray::new(end as usize)? })
    }

    /// Stores the checksum of the page that is about to be written to a slot, and clears its
    /// shadow.
    pub(crate) fn seal(&self, slot: u32, page: &[u8; PAGE_BYTES]) {
        self.store(slot, crc32fast::hash(page).into());
    }

    /// Compares a page read from a slot with the stored checksum.
    pub(crate) fn check(&self, slot: u32, page: &[u8; PAGE_BYTES]) -> Result<(), Mismatch> {
        let expected = (self.load(slot) & CHECKSUM_MASK) as u32;
        let found = crc32fast::hash(page);
        if found == expected { Ok(()) } else { Err(Mismatch { expected, found }) }
    }

    pub(crate) fn set_shadow(&self, slot: u32, shadow: Shadow) {
        debug_assert!(shadow.0 <= VALUE_MAX, "{shadow:?}");
        self.store(slot, (self.load(slot) & CHECKSUM_MASK) | (shadow.0 << SHADOW_SHIFT));
    }

    pub(crate) fn shadow(&self, slot: u32) -> Shadow {
        Shadow(self.load(slot) >> SHADOW_SHIFT)
    }

    fn load(&self, slot: u32) -> u64 {
        // Relaxed: the caller owns the slot, and got it from its last owner (SWAP-1).
        self.words.get(slot as usize).load(Ordering::Relaxed)
    }

    fn store(&self, slot: u32, word: u64) {
        // Relaxed: as in `load`.
        self.words.get(slot as usize).store(word, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = (VALUE_MAX + 1) as u32;

    fn page(byte: u8) -> [u8; PAGE_BYTES] {
        let mut page = [byte; PAGE_BYTES];
        page[17] = 17;
        page
    }

    #[test]
    fn a_page_passes_where_it_was_sealed_and_any_other_bit_fails() {
        let words = SlotMetadata::new(END).unwrap();
        for slot in [1, 2, 511, END - 1] {
            words.seal(slot, &page(1));
            assert_eq!(words.check(slot, &page(1)), Ok(()));
            for bit in [0, 1, 4095 * 8, 4096 * 8 - 1] {
                let mut changed = page(1);
                changed[bit / 8] ^= 1 << (bit % 8);
                let Mismatch { expected, found } = words.check(slot, &changed).unwrap_err();
                assert_ne!(expected, found);
                assert_eq!(expected, crc32fast::hash(&page(1)));
            }
        }
    }

    #[test]
    fn the_page_of_another_slot_fails() {
        let words = SlotMetadata::new(END).unwrap();
        words.seal(1, &page(1));
        words.seal(2, &page(2));
        assert!(words.check(1, &page(2)).is_err());
        assert!(words.check(2, &page(1)).is_err());
        assert_eq!(words.check(2, &page(2)), Ok(()));
    }

    #[test]
    fn no_page_passes_for_a_slot_that_was_never_sealed() {
        let words = SlotMetadata::new(16).unwrap();
        assert!(words.check(1, &[0; PAGE_BYTES]).is_err());
        assert!(words.check(2, &page(1)).is_err());
    }

    #[test]
    fn shadow_and_checksum_are_independent() {
        let words = SlotMetadata::new(16).unwrap();
        words.seal(3, &page(1));
        assert_eq!(words.shadow(3), Shadow(0));
        for shadow in [VALUE_MAX, 1, 0x0ABC_DEF0] {
            words.set_shadow(3, Shadow(shadow));
            assert_eq!(words.shadow(3), Shadow(shadow));
            assert_eq!(words.check(3, &page(1)), Ok(()));
        }
        assert_eq!((words.shadow(2), words.shadow(4)), (Shadow(0), Shadow(0)));
        words.seal(3, &page(2));
        assert_eq!(words.shadow(3), Shadow(0), "a new page has no shadow");
        assert_eq!(words.check(3, &page(2)), Ok(()));
    }
}

//! Entries without a folio: what they mean for each kind of file, and what a folio leaves behind.
//!
//! | Entry | a file with a backing | a memory file |
//! |---|---|---|
//! | hole | on the backing | zeros, nowhere |
//! | value | on the backing; the shadow of an eviction | in the spill; the slot |
//!
//! One place for these decisions: `file` asks here before it fills, `reclaim` when it evicts.

use super::inode::Inode;
use crate::folio::{FolioId, FolioRef, LockedFolio};
use crate::lru::Shadow;
use crate::mapping::Entry;

impl Inode {
    /// Whether the page has no bytes anywhere, and reads as zeros.
    pub(crate) fn is_hole(&self, seen: Entry) -> bool {
        self.is_memory_file() && seen == Entry::HOLE
    }

    /// Whether the page has bytes, and no folio.
    pub(crate) fn is_absent(&self, seen: Entry) -> bool {
        !seen.is_folio() && !self.is_hole(seen)
    }

    /// Whether reclaim can do anything with folios of this file.
    pub(crate) fn is_evictable(&self) -> bool {
        !self.is_memory_file()
    }

    /// The first page from `index` on that [`Self::remove_folios_from`] would find something at.
    pub(crate) fn next_occupied(&self, index: u64) -> Option<u64> {
        self.mapping.table().next_folio(index)
    }

    /// Gives back what `seen`, an Entry without a folio, names at the head `index`.
    pub(super) fn forget_absent(&self, index: u64, seen: Entry) {
        let _ = (index, seen);
    }

    /// What the last eviction of the page left for the replacement policy.
    pub(crate) fn shadow_of(&self, seen: Entry) -> Option<Shadow> {
        if self.is_memory_file() { None } else { seen.as_value().map(Shadow) }
    }

    /// A folio that was just put where `seen` stood takes over what that named.
    pub(crate) fn take_over(&self, locked: &LockedFolio<'_>, seen: Entry) {
        if self.is_memory_file() {
            debug_assert_eq!(seen, Entry::HOLE);
            locked.set_slot(0);
        }
    }

    /// Whether one transfer can read the folio `last` and, next to it, one that finds `seen`.
    pub(crate) fn continues(&self, last: FolioId, seen: Entry) -> bool {
        let _ = (last, seen);
        !self.is_memory_file()
    }

    /// What a clean folio leaves at its page `page` (from its first one) when it is evicted.
    pub(crate) fn left_by_eviction(
        &self,
        locked: &LockedFolio<'_>,
        shadow: Shadow,
        page: u64,
    ) -> Entry {
        let _ = locked;
        if page == 0 && !self.is_memory_file() { Entry::value(shadow.0) } else { Entry::HOLE }
    }

    /// Takes a folio out of the table that never got its bytes. The table's reference is returned.
    pub(crate) fn remove_unfilled<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
    ) -> FolioRef<'a> {
        self.mapping.remove(folio, locked, &self.memory.folios, |_| Entry::HOLE)
    }

    /// Takes a folio out of the table whose bytes are no longer wanted, dirty or not. The table's
    /// reference is returned.
    pub(crate) fn remove_unwanted<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
    ) -> FolioRef<'a> {
        self.dirty.forget(&self.memory, folio.id());
        self.mapping.remove(folio, locked, &self.memory.folios, |_| Entry::HOLE)
    }
}

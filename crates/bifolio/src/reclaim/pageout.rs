//! What becomes of isolated folios: kept, left to others to be written out, evicted. The steps, in
//! order. Nothing here waits for storage.

use super::{Reclaim, ReclaimLock};
use crate::memory::Shadow;
use crate::page::{EvictError, Flag, FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;
use crate::writeback::{Cleaner, Inode};

/// What a scan does with dirty folios of memory files. Those of files with a backing are always
/// left to the flusher, which is told: a device may take for ever, and nobody else is to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteOut {
    /// They stay: the caller cannot wait for what is swapped out.
    Nothing,
    /// They are left to the swapper.
    MemoryFiles,
}

/// Why a folio stays, or that it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EvictOutcome {
    /// Gone; its frame is free.
    Evicted,
    /// Locked, or under I/O: somebody is in the middle of something.
    Busy,
    /// Used since the last look.
    Activate,
    /// To be written out first, by the flusher, which has been told.
    Dirty,
    /// Of a memory file, and to be swapped out first.
    Unswapped,
    /// Of a memory file, and on its way to the swap.
    Swapping,
    /// Dirty, and its write-out failed.
    Unwritten,
    /// Others hold references.
    Pinned,
    /// It is in other frames now.
    Moved,
}

impl EvictOutcome {
    /// Of a dirty folio, which is left to whoever cleans the file: the flusher is told.
    pub(super) fn of_dirty(inode: &Inode) -> Self {
        match inode.store.cleaner() {
            Cleaner::Flusher if inode.clean_soon() => Self::Dirty,
            Cleaner::Swapper => Self::Unswapped,
            Cleaner::Flusher | Cleaner::Nobody => Self::Unwritten,
        }
    }
}

impl Reclaim {
    /// Evicts a folio the caller has isolated, or gives it back with the reason.
    ///
    /// With `second_chance`, one that was used lately stays. A dirty one stays, too.
    pub(super) fn evict_or_keep<'a>(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        folio: FolioRef<'a>,
        second_chance: bool,
    ) -> (EvictOutcome, Option<FolioRef<'a>>) {
        let Some(locked) = folio.try_lock() else { return (EvictOutcome::Busy, Some(folio)) };
        let Some(inode) = reclaim_lock.owner(&locked) else {
            // Truncated: whoever still holds it frees it with the last put.
            return (EvictOutcome::Pinned, Some(folio));
        };
        if locked.flags.write_state().is_writing() {
            let outcome = match inode.store.cleaner() {
                Cleaner::Flusher => EvictOutcome::Busy,
                Cleaner::Swapper | Cleaner::Nobody => EvictOutcome::Swapping,
            };
            return (outcome, Some(folio));
        }
        if second_chance && inode.mapping.test_and_clear_referenced(&locked) {
            return (EvictOutcome::Activate, Some(folio));
        }
        // Before the references: whoever is about to write it out holds one, too.
        if locked.flags.write_state().is_dirty() {
            return (EvictOutcome::of_dirty(inode), Some(folio));
        }
        if is_pinned(&folio) {
            self.memory.counters.add(Counter::PgPinned, 1);
            return (EvictOutcome::Pinned, Some(folio));
        }
        self.evict(inode, folio, locked)
    }

    /// As [`Self::evict_or_keep`], but asks the flusher for this one, if it is dirty.
    pub(super) fn pageout_one<'a>(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        folio: FolioRef<'a>,
    ) -> (EvictOutcome, Option<FolioRef<'a>>) {
        let (outcome, folio) = self.evict_or_keep(reclaim_lock, folio, false);
        if outcome == EvictOutcome::Dirty {
            folio.iter().for_each(|folio| self.write_soon_one(reclaim_lock, folio));
        }
        (outcome, folio)
    }

    fn write_soon_one(&self, reclaim_lock: &ReclaimLock<'_>, folio: &FolioRef<'_>) {
        let Some(locked) = folio.try_lock() else { return };
        let Some(inode) = reclaim_lock.owner(&locked) else { return };
        let start = locked.index() * PAGE_BYTES;
        self.flusher.write_soon(inode, start..start + locked.pages() * PAGE_BYTES);
    }

    /// What an eviction leaves for the replacement policy.
    pub(super) fn shadow_of(&self, locked: &LockedFolio<'_>) -> Shadow {
        let workingset = locked.flags.get(Flag::Workingset) || locked.flags.get(Flag::Active);
        self.memory.lru.make_shadow(locked.pages(), workingset)
    }

    /// Counts an eviction, as reclaim's or as another's.
    pub(super) fn note_eviction(&self, locked: &LockedFolio<'_>, counter: Counter) {
        let unused = locked.flags.get(Flag::Readahead);
        self.memory.counters.add(counter, 1);
        self.memory.counters.add(Counter::ReadaheadUnused, u64::from(unused));
    }

    fn evict<'a>(
        &self,
        inode: &Inode,
        folio: FolioRef<'a>,
        locked: LockedFolio<'_>,
    ) -> (EvictOutcome, Option<FolioRef<'a>>) {
        match inode.evict(folio, &locked, self.shadow_of(&locked)) {
            Ok(frozen) => {
                self.note_eviction(&locked, Counter::PgSteal);
                // E5: the next life of the frame must not find it locked.
                drop(locked);
                frozen.free();
                (EvictOutcome::Evicted, None)
            }
            Err(EvictError::Referenced(folio)) => {
                self.memory.counters.add(Counter::PgPinned, 1);
                (EvictOutcome::Pinned, Some(folio))
            }
            Err(EvictError::Dirty(folio)) => (EvictOutcome::Busy, Some(folio)),
        }
    }
}

/// More references than the table's and the isolation's: a hint, the freeze decides.
pub(super) fn is_pinned(folio: &FolioRef<'_>) -> bool {
    folio.folio().references() > 2
}

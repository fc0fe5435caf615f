//! Evicts one isolated folio, or finds the reason why it stays. Never waits.
//!
//! Called by `scan.rs`, by `evacuate.rs` and by the swapper, under the reclaim lock. The frames of
//! folios that are evicted together are freed together ([`EvictedBatch`]).

use super::scan::{EvictOutcome, ScanCounts};
use super::{Reclaim, ReclaimLock};
use crate::inode::Cleaner;
use crate::memory::{ListKind, Shadow};
use crate::page::{EvictError, Flag, FolioRef, Frozen, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;

/// Folios that were evicted together, unlocked, and whose frames are freed together.
#[derive(Debug, Default)]
pub(super) struct EvictedBatch<'a>(Vec<Frozen<'a>>);

impl EvictedBatch<'_> {
    /// Frees the frames.
    pub(super) fn free_here(mut self) {
        Frozen::free_all(&mut self.0);
    }

    /// Frees the frames, and if pages were read in runs recently, clears the extents around them.
    pub(super) fn free(
        mut self,
        reclaim: &Reclaim,
        reclaim_lock: &ReclaimLock<'_>,
        counts: &mut ScanCounts,
    ) {
        let memory = &reclaim.memory;
        let is_compacted = memory.arena_fills.have_runs();
        let place = |frozen: &Frozen<'_>| (frozen.id(), frozen.folio().pages());
        let places: Vec<_> = self.0.iter().filter(|_| is_compacted).map(place).collect();
        let pages = self.0.iter().map(|frozen| frozen.folio().pages()).sum();
        Frozen::free_all(&mut self.0);
        memory.arena_fills.note_evicted(pages);
        reclaim.compact(reclaim_lock, &places, counts);
    }
}

impl Reclaim {
    /// Evicts a folio that the caller has isolated, or returns it with the reason.
    ///
    /// With `second_chance`, a recently used folio stays. A dirty one always stays. One that is
    /// evicted is added to `evicted`.
    pub(super) fn evict<'a>(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        folio: FolioRef<'a>,
        second_chance: bool,
        evicted: &mut EvictedBatch<'a>,
    ) -> (EvictOutcome, Option<FolioRef<'a>>) {
        let Some(locked) = folio.try_lock() else { return (EvictOutcome::Busy, Some(folio)) };
        let Some(inode) = reclaim_lock.owner(&locked) else {
            // Truncated: the thread that puts the last reference frees it.
            return (EvictOutcome::Pinned, Some(folio));
        };
        if locked.flags.write_state().is_writing() {
            let outcome = match inode.store.cleaner() {
                Cleaner::Flusher => EvictOutcome::Busy,
                Cleaner::Swapper | Cleaner::None => EvictOutcome::Swapping,
            };
            return (outcome, Some(folio));
        }
        if second_chance && inode.mapping.test_and_clear_referenced(&locked) {
            return (EvictOutcome::Activate, Some(folio));
        }
        // Checked before the references, because a thread that is about to write it back holds one,
        // too.
        if locked.flags.write_state().is_dirty() {
            let mut outcome = EvictOutcome::of_dirty(inode);
            if outcome == EvictOutcome::Dirty && inode.is_shut_for(folio.id()) {
                outcome = EvictOutcome::Unwritten;
            }
            return (outcome, Some(folio));
        }
        if is_pinned(&folio) {
            self.memory.counters.add(Counter::PgPinned, 1);
            return (EvictOutcome::Pinned, Some(folio));
        }
        match inode.evict(folio, &locked, self.shadow_of(&locked)) {
            Ok(frozen) => {
                self.note_eviction(&locked, Counter::PgSteal);
                frozen.note_removed();
                evicted.0.push(frozen);
                (EvictOutcome::Evicted, None)
            }
            Err(EvictError::Referenced(folio)) => {
                self.memory.counters.add(Counter::PgPinned, 1);
                (EvictOutcome::Pinned, Some(folio))
            }
            Err(EvictError::Dirty(folio)) => (EvictOutcome::Busy, Some(folio)),
        }
    }

    /// Evicts like [`Self::evict`], but if the folio is dirty, asks the flusher to write
    /// this folio.
    pub(super) fn pageout_one<'a>(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        folio: FolioRef<'a>,
    ) -> (EvictOutcome, Option<FolioRef<'a>>) {
        let mut evicted = EvictedBatch::default();
        let (outcome, folio) = self.evict(reclaim_lock, folio, false, &mut evicted);
        evicted.free_here();
        if outcome == EvictOutcome::Dirty {
            folio.iter().for_each(|folio| self.write_soon_one(reclaim_lock, folio));
        }
        (outcome, folio)
    }

    fn write_soon_one(&self, reclaim_lock: &ReclaimLock<'_>, folio: &FolioRef<'_>) {
        let Some(locked) = folio.try_lock() else { return };
        let Some(inode) = reclaim_lock.owner(&locked) else { return };
        let start = locked.index() * PAGE_BYTES;
        inode.write_soon(start..start + locked.pages() * PAGE_BYTES);
    }

    /// Returns the shadow for the eviction of an isolated folio.
    pub(crate) fn shadow_of(&self, locked: &LockedFolio<'_>) -> Shadow {
        match ListKind::of(locked) {
            ListKind::Active => self.memory.lru.make_far_shadow(),
            ListKind::Fresh | ListKind::Old => self.memory.lru.make_shadow(locked.pages()),
        }
    }

    /// Counts an eviction in `counter`.
    pub(crate) fn note_eviction(&self, locked: &LockedFolio<'_>, counter: Counter) {
        let unused = locked.flags.get(Flag::Readahead);
        self.memory.counters.add(counter, 1);
        self.memory.counters.add(Counter::ReadaheadUnused, u64::from(unused));
    }
}

/// Returns `true` if there are more references than the table's and the isolation's: a hint, the
/// freeze decides.
pub(crate) fn is_pinned(folio: &FolioRef<'_>) -> bool {
    folio.folio().references() > 2
}

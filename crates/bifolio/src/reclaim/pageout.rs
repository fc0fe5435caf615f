//! What becomes of one isolated folio: kept, written out, evicted. The steps, in order.

use super::{Reclaim, Turn};
use crate::folio::{Flag, FolioRef, LockedFolio};
use crate::mapping::{Entry, EvictError};
use crate::stats::Counter;
use crate::writeback::Inode;

/// Why a folio stays, or that it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Gone; its frame is free.
    Evicted,
    /// Locked, or under I/O: somebody is in the middle of something.
    Busy,
    /// Used since the last look.
    Activate,
    /// Dirty, and its write-out failed.
    Unwritten,
    /// Others hold references.
    Pinned,
}

impl Reclaim {
    /// Evicts a folio the caller has isolated, or gives it back with the reason.
    ///
    /// With `second_chance`, one that was used lately stays. Writes it out first if it is dirty.
    pub(super) fn evict_or_keep<'a>(
        &self,
        turn: &Turn<'_>,
        folio: FolioRef<'a>,
        second_chance: bool,
    ) -> (Verdict, Option<FolioRef<'a>>) {
        let Some(locked) = folio.try_lock() else { return (Verdict::Busy, Some(folio)) };
        let Some(inode) = turn.owner(&locked) else {
            // Truncated: whoever still holds it frees it with the last put.
            return (Verdict::Pinned, Some(folio));
        };
        if locked.flags.get(Flag::Writeback) {
            return (Verdict::Busy, Some(folio));
        }
        if second_chance && inode.mapping.test_and_clear_referenced(&locked) {
            return (Verdict::Activate, Some(folio));
        }
        if is_pinned(&folio) {
            self.memory.counters.add(Counter::PgPinned, 1);
            return (Verdict::Pinned, Some(folio));
        }
        let locked = match self.pageout_if_dirty(inode, &folio, locked) {
            Ok(locked) => locked,
            Err(verdict) => return (verdict, Some(folio)),
        };
        // The lock was dropped for the write-out: everything is looked at again.
        match turn.owner(&locked) {
            Some(inode) => self.evict(inode, folio, locked),
            None => (Verdict::Pinned, Some(folio)),
        }
    }

    /// Writes the folio out if it is dirty, and locks it again.
    fn pageout_if_dirty<'a>(
        &self,
        inode: &Inode,
        folio: &FolioRef<'a>,
        locked: LockedFolio<'a>,
    ) -> Result<LockedFolio<'a>, Verdict> {
        if !locked.flags.get(Flag::Dirty) {
            return Ok(locked);
        }
        self.memory.counters.add(Counter::PageOut, 1);
        inode.write_out(folio, locked).map_err(|_| Verdict::Unwritten)?;
        folio.try_lock().ok_or(Verdict::Busy)
    }

    fn evict<'a>(
        &self,
        inode: &Inode,
        folio: FolioRef<'a>,
        locked: LockedFolio<'_>,
    ) -> (Verdict, Option<FolioRef<'a>>) {
        let workingset = locked.flags.get(Flag::Workingset) || locked.flags.get(Flag::Active);
        let shadow = self.memory.lru.make_shadow(locked.pages(), workingset);
        match inode.mapping.evict(folio, &locked, Entry::value(shadow.0)) {
            Ok(frozen) => {
                self.memory.counters.add(Counter::PgSteal, 1);
                // E5: the next life of the frame must not find it locked.
                drop(locked);
                frozen.free();
                (Verdict::Evicted, None)
            }
            Err(EvictError::Referenced(folio)) => {
                self.memory.counters.add(Counter::PgPinned, 1);
                (Verdict::Pinned, Some(folio))
            }
            Err(EvictError::Dirty(folio)) => (Verdict::Busy, Some(folio)),
        }
    }
}

/// More references than the table's and the isolation's: a hint, the freeze decides.
fn is_pinned(folio: &FolioRef<'_>) -> bool {
    folio.folio().references() > 2
}

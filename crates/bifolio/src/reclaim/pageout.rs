//! What becomes of isolated folios: kept, written out, evicted. The steps, in order.

use super::{Reclaim, Turn};
use crate::folio::{Flag, FolioRef, LockedFolio};
use crate::lru::Shadow;
use crate::mapping::{EvictError, PAGE_BYTES};
use crate::stats::Counter;
use crate::writeback::Inode;

/// What a scan does with dirty folios. Those of files with a backing are always left to the
/// flusher, which is told: a device may take for ever, and nobody else is to wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteOut {
    /// Leaves those of memory files to others.
    Nothing,
    /// Spills those of memory files, and waits.
    MemoryFiles,
}

/// Why a folio stays, or that it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Gone; its frame is free.
    Evicted,
    /// Locked, or under I/O: somebody is in the middle of something.
    Busy,
    /// Used since the last look.
    Activate,
    /// To be written out first, by the flusher, which has been told.
    Dirty,
    /// Of a memory file, and to be spilled first.
    Unspilled,
    /// Dirty, and its write-out failed.
    Unwritten,
    /// Others hold references.
    Pinned,
    /// It is in other frames now.
    Moved,
}

impl Verdict {
    /// Of a dirty folio of a file with a backing, which is left to the flusher: it is told.
    pub(super) fn of_left_to_flusher(inode: &Inode) -> Self {
        if inode.clean_soon() { Self::Dirty } else { Self::Unwritten }
    }
}

impl Reclaim {
    /// Evicts a folio the caller has isolated, or gives it back with the reason.
    ///
    /// With `second_chance`, one that was used lately stays. A dirty one stays, too.
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
        if locked.flags.write_state().is_writing() {
            return (Verdict::Busy, Some(folio));
        }
        if second_chance && inode.mapping.test_and_clear_referenced(&locked) {
            return (Verdict::Activate, Some(folio));
        }
        // Before the references: whoever is about to write it out holds one, too.
        if locked.flags.write_state().is_dirty() {
            let verdict = match (inode.is_memory_file(), inode.is_evictable()) {
                (false, _) => Verdict::of_left_to_flusher(inode),
                (true, true) => Verdict::Unspilled,
                (true, false) => Verdict::Unwritten,
            };
            return (verdict, Some(folio));
        }
        if is_pinned(&folio) {
            self.memory.counters.add(Counter::PgPinned, 1);
            return (Verdict::Pinned, Some(folio));
        }
        self.evict(inode, folio, locked)
    }

    /// As [`Self::evict_or_keep`], but spills the folio, or asks the flusher for this one, if it is
    /// dirty.
    pub(super) fn pageout_one<'a>(
        &self,
        turn: &Turn<'_>,
        folio: FolioRef<'a>,
    ) -> (Verdict, Option<FolioRef<'a>>) {
        match self.evict_or_keep(turn, folio, false) {
            (Verdict::Dirty, Some(folio)) => {
                self.write_soon_one(turn, &folio);
                (Verdict::Dirty, Some(folio))
            }
            (Verdict::Unspilled, Some(folio)) => {
                let mut judged = self.pageout_batch(turn, vec![folio]);
                let (verdict, _, kept) = judged.pop().expect("a verdict for each folio");
                (verdict, kept)
            }
            judged => judged,
        }
    }

    fn write_soon_one(&self, turn: &Turn<'_>, folio: &FolioRef<'_>) {
        let Some(locked) = folio.try_lock() else { return };
        let Some(inode) = turn.owner(&locked) else { return };
        let start = locked.index() * PAGE_BYTES;
        self.flusher.write_soon(inode, start..start + locked.pages() * PAGE_BYTES);
    }

    /// Spills dirty folios of memory files, file by file in one batch each, waits for it, and
    /// evicts those that are still clean then: everything is looked at again. Answers for each the
    /// verdict, its pages and, if it stays, the folio.
    pub(super) fn pageout_batch<'a>(
        &self,
        turn: &Turn<'_>,
        dirty: Vec<FolioRef<'a>>,
    ) -> Vec<(Verdict, u64, Option<FolioRef<'a>>)> {
        self.memory.counters.add(Counter::PageOut, dirty.len() as u64);
        let failed = self.spill_folios(turn, &dirty);
        let again = |folio: FolioRef<'a>| {
            let pages = folio.folio().pages();
            match self.evict_or_keep(turn, folio, false) {
                // Dirty still: the device does not take it. Dirty again: somebody was faster.
                (Verdict::Dirty | Verdict::Unspilled, folio) => {
                    (if failed { Verdict::Unwritten } else { Verdict::Busy }, pages, folio)
                }
                (verdict, folio) => (verdict, pages, folio),
            }
        };
        dirty.into_iter().map(again).collect()
    }

    /// Writes out dirty folios of memory files, file by file in one batch each, and waits for it;
    /// whether something failed.
    pub(super) fn spill_folios(&self, turn: &Turn<'_>, dirty: &[FolioRef<'_>]) -> bool {
        let mut files: Vec<(&Inode, Vec<FolioRef<'_>>)> = Vec::new();
        for folio in dirty {
            let Some(locked) = folio.try_lock() else { continue };
            let (Some(inode), Some(own)) = (turn.owner(&locked), folio.try_clone()) else {
                continue;
            };
            match files.iter_mut().find(|(other, _)| std::ptr::eq(*other, inode)) {
                Some((_, folios)) => folios.push(own),
                None => files.push((inode, vec![own])),
            }
        }
        let mut failed = false;
        for (inode, folios) in files {
            failed |= inode.write_out_folios(folios).0.error.is_some();
        }
        failed
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
    ) -> (Verdict, Option<FolioRef<'a>>) {
        match inode.evict(folio, &locked, self.shadow_of(&locked)) {
            Ok(frozen) => {
                self.note_eviction(&locked, Counter::PgSteal);
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
pub(super) fn is_pinned(folio: &FolioRef<'_>) -> bool {
    folio.folio().references() > 2
}

//! Evacuates a chunk, or clears an extent of frames around an evicted folio.
//!
//! EVACUATING a chunk evicts its folios, whatever their positions in the lists, or moves those of
//! memory files that cannot be evicted to other chunks (`page/relocate.rs`). If all chunks that are
//! tried stay in use, free slots are lent until another chunk can be made resident.
//!
//! CLEARING an extent that is or soon will be mostly free evicts or moves the neighbours of folios
//! that were evicted, while pages are read or written in runs (`Arena::note_fill`):
//!
//! ```text
//!   an extent after an eviction:   [free] [old] [young] [used] [old] [old] [old] [dirty] ...
//!     old: clean, and about to be evicted (`Lru::old_among`). Evicted now, unless in use.
//!     young, used, read ahead and not used yet, and dirty folios of memory files: moved to partial
//!       slots, and keep their positions on the lists.
//!     fixed: locked, pinned, or adjacent to their neighbours in the file. They stay. If there
//!       are too many of them, or too little is gained, nothing is done.
//!     dirty for a device: stay, too. The flusher is asked to write these pages.
//! ```
//!
//! The folios that then fill the extent become old together, so less and less must be moved. An
//! extent is examined at most once for each folio evicted from it.

use super::outcome::{EvictOutcome, ScanCounts};
use super::scan::EvictedBatch;
use super::{ROUND_PAGES, Reclaim, ReclaimLock};
use crate::inode::Inode;
use crate::memory::{EXTENT_PAGES, FrameKind, Purpose};
use crate::page::{Flag, FolioId, FolioRef, Frozen, LockedFolio, OldFolio, WriteState};
use crate::stats::Counter;
use crate::sync::Ordering;
use std::ops::Range;

const CHUNKS_TRIED_MAX: usize = 8;
/// Chunks that a bound that falls looks for at once.
const CHUNKS_KEPT_MAX: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OutOf {
    Extent,
    Chunk,
}

impl Reclaim {
    /// Empties a chunk for a folio, or returns one to the kernel for a region page; else lends free
    /// slots.
    pub(super) fn evacuate_for(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        kind: FrameKind,
    ) -> ScanCounts {
        let arena = &self.memory.arena;
        let purpose = match kind {
            FrameKind::Arena { order, .. } => Purpose::Order(order),
            FrameKind::Region => Purpose::Vacate,
        };
        let (mut counts, is_gained) = self.evacuate(reclaim_lock, purpose);
        if !is_gained {
            counts.reclaimed_pages += match kind {
                FrameKind::Arena { order, .. } => u64::from(arena.lend_for_chunk()) << order,
                FrameKind::Region => arena.lend(ROUND_PAGES),
            };
        }
        counts
    }

    /// Empties chunks for `purpose` until memory is gained. Returns `true` if it was.
    pub(super) fn evacuate(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        purpose: Purpose,
    ) -> (ScanCounts, bool) {
        let mut chunks = self.arena().emptiest_chunks(purpose, CHUNKS_TRIED_MAX);
        self.evacuate_first_of(reclaim_lock, purpose, &mut chunks)
    }

    /// Returns a chunk to the kernel. `chunks` has the emptiest chunks and is kept from call to
    /// call: a bound that falls by many chunks does not look at all of them for each.
    pub(super) fn vacate_next_of(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        chunks: &mut Vec<usize>,
    ) -> ScanCounts {
        if chunks.len() < CHUNKS_TRIED_MAX {
            *chunks = self.arena().emptiest_chunks(Purpose::Vacate, CHUNKS_KEPT_MAX);
        }
        self.evacuate_first_of(reclaim_lock, Purpose::Vacate, chunks).0
    }

    /// Empties the last of `chunks` for `purpose`, and removes them, until memory is gained.
    fn evacuate_first_of(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        purpose: Purpose,
        chunks: &mut Vec<usize>,
    ) -> (ScanCounts, bool) {
        let memory = &self.memory;
        let mut counts = ScanCounts::default();
        if !chunks.is_empty() {
            memory.lru.drain_all(&memory.folios);
        }
        for _ in 0..CHUNKS_TRIED_MAX {
            let Some(number) = chunks.pop() else { break };
            let next = memory.arena.begin_evacuation(number, purpose);
            let Some(evacuation) = next else { continue };
            for id in &evacuation.folios {
                let (outcome, pages) = self.evict_from_chunk(reclaim_lock, *id);
                counts.note(outcome, pages);
            }
            if memory.arena.finish_evacuation(&evacuation, purpose) {
                // Free room counts as progress even if it existed before.
                counts.reclaimed_pages = counts.reclaimed_pages.max(1);
                return (counts, true);
            }
            if counts.swapping_pages > 0 && !self.swapper.is_late() {
                // The swapper must finish with this chunk first.
                break;
            }
        }
        (counts, false)
    }

    /// Evicts a folio of a chunk that is being emptied, or has it written, queues it for the swap,
    /// or moves it to another chunk. Returns the outcome and the folio's pages.
    fn evict_from_chunk(&self, reclaim_lock: &ReclaimLock<'_>, id: FolioId) -> (EvictOutcome, u64) {
        let memory = &self.memory;
        let pages = memory.folio(id).pages();
        // Frozen or free: another thread is freeing it.
        let Ok(folio) = memory.folios.try_get(id) else { return (EvictOutcome::Busy, pages) };
        let was_listed = memory.lru.isolate_one(&memory.folios, id);
        let mut evicted = EvictedBatch::default();
        let (mut outcome, mut kept) = self.evict(reclaim_lock, folio, false, &mut evicted);
        Frozen::free_all(&mut evicted.0);
        if outcome == EvictOutcome::Dirty
            && let Some(locked) = kept.as_ref().and_then(FolioRef::try_lock)
            && let Some(inode) = reclaim_lock.owner(&locked)
        {
            inode.write_folio_soon(&locked);
        }
        let is_to_swap = outcome == EvictOutcome::Unswapped && was_listed;
        if is_to_swap && !self.swapper.is_late() {
            kept = self.queue_for_swap(kept.into_iter().collect()).pop();
            if kept.is_none() {
                outcome = EvictOutcome::Swapping;
            }
        }
        if outcome == EvictOutcome::Evicted {
            memory.counters.add(Counter::PgEvacuate, 1);
        }
        if let Some(folio) = kept
            && was_listed
        {
            memory.lru.put_back(&memory.folios, &mut vec![folio], None);
        }
        let cannot_evict = matches!(outcome, EvictOutcome::Unwritten | EvictOutcome::Unswapped);
        if cannot_evict && self.migrate(reclaim_lock, id, OutOf::Chunk) {
            return (EvictOutcome::Moved, pages);
        }
        (outcome, pages)
    }

    /// Moves a folio out of its extent to a partial slot of another one, or out of a chunk that is
    /// being emptied to a slot of another chunk; it keeps its position on its list. Returns `false`
    /// if the folio is in use, dirty for a device or under write-back, if there is no such slot, or
    /// if only its extent is cleared and it is adjacent to its neighbours in the file.
    fn migrate(&self, reclaim_lock: &ReclaimLock<'_>, id: FolioId, out_of: OutOf) -> bool {
        let memory = &self.memory;
        let Ok(folio) = memory.folios.try_get(id) else { return false };
        let Some(locked) = folio.try_lock() else { return false };
        let Some(inode) = reclaim_lock.owner(&locked) else { return false };
        let is_at_home = out_of == OutOf::Extent && stands_in_extent(inode, &locked, id);
        if is_at_home || !inode.may_move(&locked) {
            return false;
        }
        let left = (out_of == OutOf::Extent).then_some(id);
        let target = self.arena().allocate_elsewhere(locked.order(), left);
        let Some(target) = target else { return false };
        // As in a fill, the folio has no owner until it is in the table.
        let new = memory.folios.start(target, 0, locked.index(), locked.order());
        let new_locked = new.lock_new();
        new_locked.copy_usage_of(&locked);
        let gone = inode.relocate(OldFolio { lock: locked, folio }, &new, &new_locked);
        let Some(frozen) = gone else { return false };
        new_locked.take_first_use_of(&frozen);
        if frozen.folio().flags.write_state() == WriteState::Dirty {
            inode.pass_dirt(&frozen, target);
        } else {
            // In a memory file, the slot has a copy of its bytes (rule 4 of `page`).
            new_locked.set_slot(frozen.folio().slot());
        }
        memory.lru.replace(&memory.folios, frozen.id(), target);
        memory.counters.add(Counter::PgRelocate, 1);
        frozen.free();
        true
    }
}

/// Returns `true` if a neighbour in the file is also adjacent in memory.
fn stands_in_extent(inode: &Inode, locked: &LockedFolio<'_>, id: FolioId) -> bool {
    let table = inode.mapping.table();
    let stands_at = |index: u64, frame: Option<u32>| {
        let entry = table.load(index, Ordering::Relaxed);
        entry.is_folio() && frame == Some(entry.frame())
    };
    let (first, end) = (locked.index(), locked.index() + locked.pages());
    let follows = first > 0 && stands_at(first - 1, id.0.checked_sub(1));
    follows || (end < table.pages() && stands_at(end, id.0.checked_add(locked.pages() as u32)))
}

/// Pages of an extent that must be free or old, and those that may remain in a cleared extent.
const GAIN_PAGES_MIN: u64 = 3;
const REMAINING_PAGES_MAX: u64 = 3;

/// An extent, and the number of pages of each of its folios.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Extent {
    number: u32,
    pages: u64,
}

impl Extent {
    fn of(id: FolioId, pages: u64) -> Self {
        Self { number: id.0 / EXTENT_PAGES, pages }
    }

    fn frames(self) -> Range<u32> {
        self.number * EXTENT_PAGES..(self.number + 1) * EXTENT_PAGES
    }

    fn pages_of(self, folios: usize) -> u64 {
        folios as u64 * self.pages
    }
}

#[derive(Debug, Default)]
struct Survey {
    free: usize,
    old: Vec<FolioId>,
    movable: Vec<FolioId>,
    dirty: Vec<FolioId>,
    fixed: usize,
}

impl Survey {
    fn is_worth_it(&self, extent: Extent) -> bool {
        extent.pages_of(self.free + self.old.len()) >= GAIN_PAGES_MIN
    }

    fn is_blocked(&self, extent: Extent) -> bool {
        extent.pages_of(self.fixed + self.dirty.len()) > REMAINING_PAGES_MAX
    }
}

impl Reclaim {
    /// Clears the extents of evicted folios, given by frames and pages, if that is worth it.
    pub(super) fn compact(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        evicted: &[(FolioId, u64)],
        counts: &mut ScanCounts,
    ) {
        let small = evicted.iter().filter(|(_, pages)| *pages < u64::from(EXTENT_PAGES));
        let mut extents: Vec<_> = small.map(|(id, pages)| Extent::of(*id, *pages)).collect();
        extents.sort_unstable();
        extents.dedup();
        for extent in extents {
            let mut survey = self.survey(extent);
            let is_held = extent.pages_of(survey.fixed) > REMAINING_PAGES_MAX;
            if is_held || !survey.is_worth_it(extent) {
                continue;
            }
            self.sort_dirty(reclaim_lock, &mut survey);
            if !survey.is_blocked(extent) {
                self.compact_extent(reclaim_lock, extent, survey, counts);
            }
        }
    }

    /// Makes the dirty folios of memory files movable, and asks the flusher to write the others.
    fn sort_dirty(&self, reclaim_lock: &ReclaimLock<'_>, survey: &mut Survey) {
        let movable = &mut survey.movable;
        survey.dirty.retain(|id| {
            let Ok(folio) = self.memory.folios.try_get(*id) else { return true };
            let Some(locked) = folio.try_lock() else { return true };
            let Some(inode) = reclaim_lock.owner(&locked) else { return true };
            let is_for_device = inode.write_folio_soon(&locked);
            if !is_for_device {
                movable.push(*id);
            }
            is_for_device
        });
    }

    /// Empties an extent by moving the folios in use and evicting the old ones. Stops once too many
    /// remain for the extent to be of use.
    fn compact_extent(
        &self,
        reclaim_lock: &ReclaimLock<'_>,
        extent: Extent,
        survey: Survey,
        counts: &mut ScanCounts,
    ) {
        let mut left = survey.fixed;
        for id in survey.movable {
            left += usize::from(!self.migrate(reclaim_lock, id, OutOf::Extent));
            if extent.pages_of(left) > REMAINING_PAGES_MAX {
                return;
            }
        }
        for id in survey.old {
            self.evict_early(reclaim_lock, id, counts);
        }
    }

    /// Sorts an extent's folios into free, fixed, dirty, old and movable. The results are hints.
    fn survey(&self, extent: Extent) -> Survey {
        let memory = &self.memory;
        let mut survey = Survey::default();
        let mut on_list = Vec::with_capacity(EXTENT_PAGES as usize);
        for frame in extent.frames().step_by(extent.pages as usize) {
            let folio = memory.folio(FolioId(frame));
            let flags = &folio.flags;
            if folio.references() == 0 {
                survey.free += 1;
            } else if folio.pages() != extent.pages || !flags.get(Flag::OnLru) {
                survey.fixed += 1;
            } else if flags.write_state() == WriteState::Clean {
                on_list.push(FolioId(frame));
            } else {
                survey.dirty.push(FolioId(frame));
            }
        }
        survey.old = memory.lru.old_among(&memory.folios, &on_list);
        // A reader is about to use what was read ahead of it.
        survey.old.retain(|id| !memory.folio(*id).flags.get(Flag::Readahead));
        on_list.retain(|id| !survey.old.contains(id));
        survey.movable = on_list;
        survey
    }

    /// Evicts a folio before it is at the tail. A folio in use becomes active and is moved.
    fn evict_early(&self, reclaim_lock: &ReclaimLock<'_>, id: FolioId, counts: &mut ScanCounts) {
        let memory = &self.memory;
        let Ok(folio) = memory.folios.try_get(id) else { return };
        if !memory.lru.isolate_one(&memory.folios, id) {
            return;
        }
        let pages = folio.folio().pages();
        memory.counters.add(Counter::PgScan, 1);
        let mut evicted = EvictedBatch::default();
        let (outcome, kept) = self.evict(reclaim_lock, folio, true, &mut evicted);
        Frozen::free_all(&mut evicted.0);
        counts.note(outcome, pages);
        let Some(folio) = kept else { return };
        let id = folio.id();
        if outcome == EvictOutcome::Activate {
            self.activate(&mut vec![folio]);
            self.migrate(reclaim_lock, id, OutOf::Extent);
        } else {
            memory.lru.put_back(&memory.folios, &mut vec![folio], None);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn extent(number: u32) -> Extent {
        Extent { number, pages: 1 }
    }

    #[test]
    fn an_extent_of_larger_folios_is_judged_by_its_pages() {
        let extent = Extent { number: 3, pages: 4 };
        assert_eq!(extent.frames(), 48..64);
        let survey = |free| Survey { free, fixed: 1, ..Survey::default() };
        assert!(!survey(0).is_worth_it(extent) && survey(1).is_worth_it(extent));
        assert!(survey(2).is_blocked(extent));
        assert!(!survey(4).is_blocked(Extent { number: 3, pages: 2 }));
    }

    /// Four scans of a pool in a small cache lost a few pages just before their use.
    #[test]
    fn pages_read_ahead_are_not_evicted_for_their_extent() {
        // Eviction in the background, which other threads may delay, decides when pages are old.
        assert!((0..50).any(|_| pages_read_ahead_became_old()));
    }

    /// Scans beside pages that were read ahead and never used, and checks that none of these is to
    /// be evicted for its extent. Returns `true` if one became old, before it was evicted.
    fn pages_read_ahead_became_old() -> bool {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, vec![1; 4 << 20]).unwrap();
        let cache = crate::Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.open(&path, &crate::OpenOptions::new()).unwrap();
        file.prefetch(0..256 << 10).unwrap();
        while cache.stats().storage.read_bytes < 256 << 10 {
            std::thread::yield_now();
        }
        let (memory, reclaim) = (&file.handle.inode.memory, &file.handle.reclaim);
        let unused = |id: &FolioId| memory.folio(*id).flags.get(Flag::Readahead);
        let mut ahead: Vec<_> = (0..memory.arena.frames()).map(FolioId).filter(unused).collect();
        assert_eq!(ahead.len(), 64);
        let mut became_old = false;
        for position in (1 << 20..4 << 20).step_by(4096) {
            file.read_at(&mut [0], position).unwrap();
            ahead.retain(unused);
            became_old |= !memory.lru.old_among(&memory.folios, &ahead).is_empty();
            for id in &ahead {
                let old = reclaim.survey(Extent::of(*id, 1)).old;
                assert_eq!(old.into_iter().find(unused), None);
            }
        }
        became_old
    }

    #[test]
    fn dirty_pages_block_an_extent() {
        let ids = |count: u32| (0..count).map(FolioId).collect::<Vec<_>>();
        let survey = Survey { free: 3, old: ids(2), movable: ids(7), dirty: ids(3), fixed: 1 };
        assert!(survey.is_worth_it(extent(0)) && survey.is_blocked(extent(0)));
        assert!(!Survey { dirty: ids(2), ..survey }.is_blocked(extent(0)));
        let half = Survey { free: 1, old: ids(1), movable: ids(9), dirty: ids(3), fixed: 0 };
        assert!(!half.is_worth_it(extent(0)) && !half.is_blocked(extent(0)));
    }
}

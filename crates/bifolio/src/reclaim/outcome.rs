//! The terms of a scan: its control, the outcomes of victims and their counts, and the folios that
//! it collects for the swapper.

use super::swap_queue::SWAP_PAGES;
use crate::inode::{Cleaning, Inode};
use crate::page::FolioRef;
use crate::stats::Counter;

#[derive(Clone, Copy, Debug)]
pub(crate) struct ScanControl {
    pub(crate) second_chance: bool,
    pub(crate) write_out: WriteOut,
    pub(crate) counter: Counter,
}

impl ScanControl {
    pub(crate) fn reclaim(write_out: WriteOut) -> Self {
        Self { second_chance: true, write_out, counter: Counter::PgSteal }
    }
}

/// The results of a scan, in pages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ScanCounts {
    pub(super) reclaimed_pages: u64,
    /// Referenced by pins or by calls in progress.
    pub(super) pinned_pages: u64,
    /// Dirty, and the device refuses to write them, or a write gate to let them pass.
    pub(super) unwritten_pages: u64,
    /// Locked, under I/O, or queued for the flusher.
    pub(super) busy_pages: u64,
    /// Dirty, and queued for the flusher. Counted as busy, too.
    pub(super) dirty_pages: u64,
    /// Of memory files: to be swapped out, but not queued.
    pub(super) unswapped_pages: u64,
    /// Of memory files: queued for the swap.
    pub(super) swapping_pages: u64,
}

impl ScanCounts {
    pub(super) fn add(&mut self, other: &ScanCounts) {
        self.reclaimed_pages += other.reclaimed_pages;
        self.pinned_pages += other.pinned_pages;
        self.unwritten_pages += other.unwritten_pages;
        self.busy_pages += other.busy_pages;
        self.dirty_pages += other.dirty_pages;
        self.unswapped_pages += other.unswapped_pages;
        self.swapping_pages += other.swapping_pages;
    }

    /// Returns the number of pages that were examined and counted.
    pub(super) fn judged_pages(&self) -> u64 {
        self.reclaimed_pages
            + self.pinned_pages
            + self.unwritten_pages
            + self.busy_pages
            + self.unswapped_pages
            + self.swapping_pages
    }

    /// Counts a victim of `pages` pages by its outcome.
    pub(crate) fn note(&mut self, outcome: EvictOutcome, pages: u64) {
        match outcome {
            EvictOutcome::Evicted => self.reclaimed_pages += pages,
            EvictOutcome::Pinned => self.pinned_pages += pages,
            EvictOutcome::Unwritten => self.unwritten_pages += pages,
            EvictOutcome::Busy => self.busy_pages += pages,
            EvictOutcome::Dirty => {
                self.dirty_pages += pages;
                self.busy_pages += pages;
            }
            EvictOutcome::Unswapped => self.unswapped_pages += pages,
            EvictOutcome::Swapping => self.swapping_pages += pages,
            EvictOutcome::Activate | EvictOutcome::Moved => {}
        }
    }
}

/// Treatment of dirty folios of memory files. Those of files with a backing are always queued for
/// the flusher: a device may hang, and only the flusher may wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteOut {
    /// The folios stay: the caller cannot wait for the swap.
    Nothing,
    /// The folios are queued for the swapper.
    MemoryFiles,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvictOutcome {
    Evicted,
    /// Locked, or under I/O.
    Busy,
    /// Used since the last scan.
    Activate,
    /// Dirty; the flusher has been asked to write it.
    Dirty,
    /// Of a memory file, and must be swapped out first.
    Unswapped,
    /// Of a memory file, and queued for the swap.
    Swapping,
    /// Dirty, and its write-back failed, or its write gate does not let it pass.
    Unwritten,
    /// Other threads hold references.
    Pinned,
    Moved,
}

impl EvictOutcome {
    /// Returns the outcome for a dirty folio of `inode`, and asks the flusher to write it if that
    /// is its task.
    pub(crate) fn of_dirty(inode: &Inode) -> Self {
        match inode.clean_soon() {
            Cleaning::Asked => Self::Dirty,
            Cleaning::WhenEvicted => Self::Unswapped,
            Cleaning::Refused => Self::Unwritten,
        }
    }
}

/// Isolated folios of memory files that are to be swapped out.
#[derive(Debug, Default)]
pub(crate) struct Unswapped<'a> {
    pub(super) folios: Vec<FolioRef<'a>>,
    pub(super) pages: u64,
    /// Part of `pages` that the swapper evicts even if clean; at most as many as wanted are
    /// collected.
    pub(super) leaving_pages: u64,
}

impl<'a> Unswapped<'a> {
    pub(super) fn add(&mut self, folio: FolioRef<'a>) {
        self.pages += folio.folio().pages();
        self.folios.push(folio);
    }

    pub(crate) fn add_leaving(&mut self, folio: FolioRef<'a>) {
        self.leaving_pages += folio.folio().pages();
        self.add(folio);
    }

    pub(super) fn scan_pages(&self) -> u64 {
        if self.pages == self.leaving_pages { 0 } else { SWAP_PAGES }
    }
}

/// Returns `true` if there are more references than the table's and the isolation's: a hint, the
/// freeze decides.
pub(crate) fn is_pinned(folio: &FolioRef<'_>) -> bool {
    folio.folio().references() > 2
}

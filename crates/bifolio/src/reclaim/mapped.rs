//! Folios in place among the victims of a scan: they are unmapped several at a time, which the
//! floor `maps` implements.

use super::scan::{ScanControl, ScanCounts, Unswapped};
use super::{Reclaim, ReclaimLock};
use crate::inode::Inode;
use crate::page::FolioRef;
use std::fmt::Debug;
use std::sync::Arc;

/// Evicts folios whose pages are in place.
pub(crate) trait MappedVictims: Debug + Send + Sync {
    /// Begins to collect the victims of a scan.
    fn begin<'t>(
        &self,
        reclaim: &'t Reclaim,
        reclaim_lock: &'t ReclaimLock<'t>,
        control: ScanControl,
    ) -> Box<dyn MappedScan<'t> + 't>;

    /// Writes and evicts those of `folios` that are in place, each with its file, for the swapper.
    /// Leaves the folios of the arena.
    fn swap_out(&self, reclaim: &Reclaim, folios: &mut Vec<(Arc<Inode>, FolioRef<'_>)>);
}

/// Victims of one scan, isolated, that wait for a batch.
pub(crate) trait MappedScan<'t>: Debug {
    /// Returns the number of pages worth scanning to fill a batch.
    fn scan_pages(&self) -> u64;

    /// Takes the folios in place out of a `batch` of isolated folios: to be swapped out, or to be
    /// unmapped with others. Leaves the folios of the arena.
    fn collect(
        &mut self,
        batch: &mut Vec<FolioRef<'t>>,
        unswapped: &mut Unswapped<'t>,
        counts: &mut ScanCounts,
    );

    /// Takes the folios in place out of `folios`, to be unmapped.
    fn add_all(&mut self, folios: &mut Vec<FolioRef<'t>>, counts: &mut ScanCounts);

    /// Ends all unmapping and writing: every folio is then evicted or back on a list.
    fn finish(self: Box<Self>, counts: &mut ScanCounts);
}

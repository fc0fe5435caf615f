//! Folios in place among the victims of a scan: they are unmapped several at a time, which the
//! floor `maps` implements.

use super::outcome::{ScanCounts, Unswapped};
use crate::page::FolioRef;
use std::fmt::Debug;

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

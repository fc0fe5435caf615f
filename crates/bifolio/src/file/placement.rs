//! Where the folios of a file lie in memory: a diagnostic.
//!
//! Neighbours of a file on neighbouring frames are read several times as fast as scattered ones,
//! and travel in one piece. `memory::arena` and `reclaim::relocate` see to it; this is how one sees
//! whether they do.

use super::File;
use crate::sync::Ordering;

/// Where the resident pages of a file lie in memory: see [`File::placement`]. Pages are of 4 KiB,
/// whatever the folio size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Placement {
    /// Pages in memory, or on their way there.
    pub resident_pages: u64,
    /// Of those, pages whose predecessor in the file is resident, too.
    pub neighbours: u64,
    /// Of those, pages that follow their predecessor in memory as well as in the file.
    pub adjacent_neighbours: u64,
}

impl File {
    /// Counts how many neighbours of the file are neighbours in memory.
    ///
    /// A diagnostic: it looks at every page of the file that was ever resident, without a lock, so
    /// what moves meanwhile may be counted or not. Does not block.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # std::fs::write(&path, vec![7; 40_960])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// file.read_exact_at(&mut [0; 40_960], 0)?;
    /// let placement = file.placement();
    /// assert_eq!((placement.resident_pages, placement.neighbours), (10, 9));
    /// assert_eq!(placement.adjacent_neighbours, 9, "while frames are free");
    /// # Ok(())
    /// # }
    /// ```
    pub fn placement(&self) -> Placement {
        let table = self.handle.inode.mapping.table();
        let mut placement = Placement::default();
        let mut index = 0;
        // The frame behind that of the page before `index`, if that is resident.
        let mut frame_behind = None;
        while let Some(found) = table.next_folio(index) {
            let entry = table.load(found, Ordering::Relaxed);
            if found > index {
                frame_behind = None;
            }
            index = found + 1;
            if !entry.is_folio() {
                // It left between the two looks.
                continue;
            }
            placement.resident_pages += 1;
            if let Some(frame) = frame_behind {
                placement.neighbours += 1;
                placement.adjacent_neighbours += u64::from(frame == entry.frame());
            }
            frame_behind = Some(entry.frame() + 1);
        }
        placement
    }
}

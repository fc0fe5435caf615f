//! Removal of pages from a region: pages that are cut off, punched or discarded are unmapped,
//! several with one TLB flush, unless a reference keeps them (REGION-4).
//!
//! # Safety
//! Unmaps pages of folios that are frozen.
#![allow(unsafe_code)]

use crate::error::{Error, write_error};
use crate::inode::{ClearedBefore, Inode};
use crate::page::{BATCH_SLOTS, Entry, Flag, FolioRef, Frozen, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;

/// Folios of a region unmapped with one TLB flush.
const UNMAPPED_TOGETHER: usize = BATCH_SLOTS;

/// Treatment of a region's page that a pin still references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PinnedPages {
    /// The page stays until its references are dropped, or becomes part of the next folio there.
    Kept,
    /// The page is zeroed for maps and for the holders of references, and is no hole.
    Zeroed,
}

/// Folios being removed from the table. Those of a region are unmapped several at a time, with one
/// TLB flush.
#[derive(Debug)]
pub(crate) struct Removal<'a> {
    inode: &'a Inode,
    pinned: PinnedPages,
    frozen: Vec<(Frozen<'a>, LockedFolio<'a>)>,
    /// Set if the references of the LRU batches were drained.
    is_drained: bool,
}

impl<'a> Removal<'a> {
    pub(crate) fn new(inode: &'a Inode, pinned: PinnedPages) -> Self {
        Self { inode, pinned, frozen: Vec::new(), is_drained: false }
    }

    /// Removes a folio from the table, dirty or not. No write-out of it is in flight.
    pub(crate) fn remove(&mut self, folio: FolioRef<'a>, locked: LockedFolio<'a>) {
        let inode = self.inode;
        let Some(region) = inode.page_space.region() else { return inode.unlink(folio, locked) };
        // REGION-4: other threads may have referenced the page before, and still do.
        let frozen = match region.is_held(locked.index()) {
            true => Err(folio),
            false => self.freeze(folio, &locked),
        };
        match frozen {
            Ok(frozen) => self.frozen.push((frozen, locked)),
            // Allocated and never written: there is no page.
            Err(folio) if !locked.flags.get(Flag::Uptodate) => inode.unlink(folio, locked),
            // Another thread references the bytes.
            Err(folio) => match self.pinned {
                PinnedPages::Kept => {
                    inode.memory.orphans.note(folio.id(), region, locked.index());
                    inode.unlink(folio, locked);
                }
                PinnedPages::Zeroed => {
                    // The storage of a file with a backing may have other bytes, if clearing it
                    // failed.
                    inode.mark_dirty(&folio, &locked);
                    inode.clearing.mark(&locked, ClearedBefore::default());
                    let start = locked.index() * PAGE_BYTES;
                    inode.zero_in_place(&folio, &locked, start..start + PAGE_BYTES);
                }
            },
        }
        if self.frozen.len() == UNMAPPED_TOGETHER {
            self.finish();
        }
    }

    fn freeze(
        &mut self,
        folio: FolioRef<'a>,
        locked: &LockedFolio<'a>,
    ) -> std::result::Result<Frozen<'a>, FolioRef<'a>> {
        let frozen = self.inode.mapping.begin_eviction(folio, locked);
        if frozen.is_ok() || std::mem::replace(&mut self.is_drained, true) {
            return frozen;
        }
        self.finish();
        let memory = &self.inode.memory;
        memory.lru.drain_all(&memory.folios);
        frozen.or_else(|folio| self.inode.mapping.begin_eviction(folio, locked))
    }

    pub(crate) fn finish(&mut self) {
        let inode = self.inode;
        let Some(region) = inode.page_space.region().filter(|_| !self.frozen.is_empty()) else {
            return;
        };
        let indices = self.frozen.iter().map(|(frozen, _)| frozen.folio().index());
        let ranges: Vec<_> = indices.map(|index| region.range_at(index)).collect();
        // SAFETY: pages of folios that are frozen and whose bytes are no longer needed.
        let flushes = unsafe { region.unmap_unwanted(&ranges) };
        // No thread fills such a page again if that failed: the cache is poisoned.
        inode.memory.counters.add(Counter::UnmapFlush, flushes.unwrap_or(0));
        for (frozen, locked) in self.frozen.drain(..) {
            inode.forget_content(&locked, frozen.id());
            inode.mapping.end_eviction(&frozen, &locked, |_| Entry::HOLE);
            drop(locked);
            frozen.free();
        }
    }
}

impl Drop for Removal<'_> {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Inode {
    /// Removes a locked, dirty folio from the table whose page is missing: its bytes are lost.
    /// Every handle reports this at its next sync. The file keeps its length: if the backing cannot
    /// be extended for that, returns this error, and the folio stays.
    #[cold]
    pub(crate) fn lose_discarded<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
    ) -> Error {
        if let Err(error) = self.extend_backing((locked.index() + 1) * PAGE_BYTES) {
            return error;
        }
        self.errors.record(self.discarded(locked.index()));
        self.forget_content(locked, folio.id());
        drop(self.mapping.remove(folio, locked, &self.memory.folios, |_| Entry::HOLE));
        self.discarded(locked.index())
    }

    /// Returns the error for a discarded page at `index`, which cannot be written.
    #[cold]
    pub(crate) fn discarded(&self, index: u64) -> Error {
        let source = "the program has discarded the page (madvise or munmap on a map)";
        let range = index * PAGE_BYTES..(index + 1) * PAGE_BYTES;
        write_error(self.name(), range, std::io::Error::other(source))
    }
}

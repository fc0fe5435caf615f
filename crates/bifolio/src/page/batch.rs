//! A batch of folios: up to 31 ids in one small array, as the kernel's folio batch.
//!
//! Thirty-one words and a count fill whole cache lines; the number is the same in reads, LRU
//! insertion and reclaim, so that one batch is the unit of work everywhere. A batch owns one
//! reference for each folio in it, unless the place that uses it says otherwise.

use super::FolioId;

/// Folios in a batch. Tiny in a model run, so that a full batch is a common case there.
pub(crate) const BATCH_SLOTS: usize = if cfg!(all(test, loom)) { 2 } else { 31 };

/// See the head of the file.
#[derive(Debug, Default)]
pub(crate) struct FolioBatch {
    count: u32,
    ids: [FolioId; BATCH_SLOTS],
}

impl FolioBatch {
    /// Adds a folio; the batch must not be full. Tells whether it is full now.
    pub(crate) fn push(&mut self, id: FolioId) -> bool {
        self.ids[self.count as usize] = id;
        self.count += 1;
        self.is_full()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.count as usize == BATCH_SLOTS
    }

    /// The folios, oldest first.
    pub(crate) fn as_slice(&self) -> &[FolioId] {
        &self.ids[..self.count as usize]
    }
}

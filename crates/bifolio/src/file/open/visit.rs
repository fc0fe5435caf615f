//! Visits: a thread without a handle reads pages of an open file, as `warm` does.
//!
//! A handle of its own would be the last one when the program drops its handles: their drop would
//! return before the file is closed, and the locks of the process on it would go later. So a
//! visitor claims pages without one, which takes no time: the last close waits until it has left
//! (CLOSE-L3), and then for the transfers, as for those of readahead.

use crate::fill::Fill;
use crate::inode::Inode;
use crate::io::{DiskFile, FileIdentity};
use crate::memory::CacheState;
use crate::reclaim::Reclaim;
use crate::sync::{AtomicU64, Ordering};
use std::fmt::Debug;
use std::sync::Arc;

/// Learns which files are opened.
pub(crate) trait OpenObserver: Debug + Send + Sync {
    /// Called at the end of the first open of a file, on its thread. Never waits.
    fn note_open(&self, identity: FileIdentity);

    /// Called when no caller can open a file any more.
    fn note_end(&self);
}

/// A file that is open and stays so while this exists. Its owner does not wait for storage.
#[derive(Debug)]
pub(crate) struct Visit<'r> {
    pub(super) reclaim: &'r Reclaim,
    pub(super) state: &'r CacheState,
    pub(crate) inode: Arc<Inode>,
    pub(super) disk: Option<Arc<DiskFile>>,
    /// Dropped last.
    pub(super) _stay: Stay,
}

#[derive(Debug)]
pub(super) struct Stay(Arc<AtomicU64>);

impl Stay {
    /// Counts a visitor. The caller holds the lock of the slots.
    pub(super) fn begin(visitors: &Arc<AtomicU64>) -> Self {
        // Relaxed: that lock orders it before the last close takes the slot.
        visitors.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(visitors))
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `wait_for_visitors`: the last close finds the pages
        // that the visitor has claimed, and no reference to the storage.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Visit<'_> {
    pub(crate) fn fill(&self) -> Fill<'_> {
        Fill { inode: &self.inode, reclaim: self.reclaim, state: self.state }
    }

    /// Returns the time at which the file was created, nanoseconds; `None` if it is not known.
    pub(crate) fn born_ns(&self) -> Option<u64> {
        self.disk.as_ref()?.born_ns()
    }
}

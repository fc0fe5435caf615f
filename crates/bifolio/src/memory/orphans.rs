//! Orphans: folios of regions that have left their tables while somebody holds on to their bytes.
//!
//! The thread that puts the last reference finds here where the page is that must be unmapped now.

use super::region::Region;
use crate::page::FolioId;
use crate::sync::{AtomicBool, Mutex, Ordering};
use std::collections::HashMap;
use std::sync::Arc;

/// See the head of the file.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    places: Mutex<HashMap<FolioId, (Arc<Region>, u64)>>,
    /// Whether there are any: most caches never have one.
    is_any: AtomicBool,
}

impl Orphans {
    /// The folio, which the caller has a reference to, has left its table; its page stays.
    pub(crate) fn note(&self, id: FolioId, region: &Arc<Region>, index: u64) {
        let mut places = self.places.lock();
        region.note_orphan(index, id);
        places.insert(id, (Arc::clone(region), index));
        // Relaxed: whoever puts the last reference comes after the caller's own put.
        self.is_any.store(true, Ordering::Relaxed);
    }

    /// The last reference to a folio is gone.
    pub(crate) fn release(&self, id: FolioId) {
        // Relaxed: see `note`.
        if !self.is_any.load(Ordering::Relaxed) {
            return;
        }
        let mut places = self.places.lock();
        let found = places.remove(&id);
        self.is_any.store(!places.is_empty(), Ordering::Relaxed);
        drop(places);
        if let Some((region, index)) = found {
            region.release_orphan(index, id);
        }
    }
}

//! Calls of a file for the layer above, `map`.

use crate::error::{Error, Result};
use crate::file::{File, Registry};
use crate::fill::{Batch, Delivery};
use crate::maps::faults;
use crate::maps::region::Region;
use crate::page::{PAGE_BYTES, TABLE_PAGE_BYTES, pages_of};
use std::ops::Range;
use std::sync::Arc;

/// Table pages charged when a memory file is mapped: those of its first 128 MiB. The others are
/// charged when they are touched, because a map may be large and sparse.
const TABLES_MAX: usize = 64;

/// Counts a map, or a pin of one, as in use while it exists. The guard of a map must be dropped
/// before the map's file.
#[derive(Debug)]
pub(crate) struct MapGuard {
    registry: Arc<Registry>,
    mapped: Option<(Arc<Region>, Range<u64>)>,
}

impl MapGuard {
    /// Counts a pin of the map, which may outlive the map. The cache is open, because the map is in
    /// use.
    pub(crate) fn for_pin(&self) -> Self {
        self.registry.cache_state.begin_map();
        Self { registry: Arc::clone(&self.registry), mapped: None }
    }
}

impl Drop for MapGuard {
    fn drop(&mut self) {
        if self.registry.cache_state.is_forked() {
            // Locks may be held by threads that do not exist in this process.
            return;
        }
        if let Some((region, pages)) = &self.mapped {
            region.mapped.remove(pages);
            // So that the thread that drops the map closes the file, and not the one that served
            // the last fault.
            if let Some(services) = faults::services_in(region) {
                services.wait_for_begun();
            }
        }
        self.registry.cache_state.end_map();
    }
}

impl File {
    /// Returns the region of the file and a guard, if `range` can be mapped.
    pub(crate) fn begin_map(&self, range: &Range<u64>) -> Result<(Arc<Region>, MapGuard)> {
        let handle = &self.handle;
        let registry = Arc::clone(&handle.registry);
        // Before the check, so that a concurrent close sees the map.
        registry.cache_state.begin_map();
        let mut guard = MapGuard { registry, mapped: None };
        handle.check_sound()?;
        handle.check_readable()?;
        let length_bytes = range.end.saturating_sub(range.start);
        handle.range_end(range.start, length_bytes)?;
        let Some(region) = handle.inode.page_space.region() else {
            return Err(Error::not_mappable(handle.inode.name()));
        };
        if range.is_empty() {
            return Err(Error::config("range", "a map of no bytes"));
        }
        if range.end > self.len() {
            return Err(handle.inode.past_end(range.start, length_bytes));
        }
        let pages = pages_of(range);
        if handle.inode.is_memory_file() {
            // Here it is an error; at a store, the end of the process.
            let step = (TABLE_PAGE_BYTES / size_of::<u64>() as u64) as usize;
            for index in pages.clone().step_by(step).chain([pages.end - 1]).take(TABLES_MAX) {
                handle.reclaim.charge_table(&handle.inode, index)?;
            }
        }
        region.mapped.add(pages.clone());
        guard.mapped = Some((Arc::clone(region), pages));
        Ok((Arc::clone(region), guard))
    }

    /// Starts to track stores, before a raw writer gets an address.
    pub(crate) fn admit_raw_writers(&self, region: &Region) -> Result<()> {
        self.handle.check_writable()?;
        if let Some(reason) = region.regions.why_no_stores() {
            return Err(Error::cannot_map("for writing ", &reason));
        }
        let purpose = "watching the stores of a map";
        let tracked = self.handle.inode.track_stores(region);
        tracked.map_err(|source| Error::memory(purpose, source))
    }

    /// Reads all non-resident pages of `range`, with a full queue of transfers. Retries pages that
    /// could not be read before.
    pub(crate) fn fill_range(&self, range: Range<u64>) -> Result<()> {
        let handle = &self.handle;
        handle.check_readable()?;
        let pages = pages_of(&range);
        let cleared = handle.inode.page_space.clear_poison(pages.clone());
        let purpose = "a page of a map";
        cleared.map_err(|source| Error::memory(purpose, source))?;
        let mut batch = Batch::new(&handle.inode);
        // Failed pages are tried once more below, page by page, and reported.
        let mut deliver = |_, _: Delivery<'_>| {};
        // Pages past the end are refused below.
        let end = pages.end.min(self.len().div_ceil(PAGE_BYTES));
        let added = batch.add(handle.fill(), pages.start..end, 0, &mut deliver);
        batch.finish(&mut deliver);
        added?;
        handle.handle_fault(pages, false).map_err(|(_, error)| error)
    }
}

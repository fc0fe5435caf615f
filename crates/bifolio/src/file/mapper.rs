//! Files that can be mapped: what the file layer asks of the floor `maps` for them, memory for
//! their pages, faults and growth; and the count of the maps in use.

use super::open::Registry;
use super::{FaultMode, File, Handle, OpenOptions};
use crate::error::{Error, Result};
use crate::inode::{FileSize, Inode, MappedPages, Resizing};
use crate::reclaim::Reclaim;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// Serves the files of a cache that can be mapped. A build without the feature `maps` has none.
pub(crate) trait Mapper: Debug + Send + Sync {
    /// Creates the memory for the pages of a file of at most `len_max_bytes` bytes.
    ///
    /// # Errors
    /// The kernel has no userfaultfd, or address space, a thread, or memory cannot be allocated.
    fn new_pages(
        &self,
        reclaim: &Reclaim,
        len_max_bytes: u64,
        faults: Option<FaultMode>,
    ) -> Result<Arc<dyn MappedPages>>;

    /// Serves faults of a file that can be mapped through `handle`, too.
    fn enlist(&self, handle: &Arc<Handle>);

    /// Serves no more faults of a file, which has no handle.
    fn forget(&self, inode: &Inode);

    /// Restores the `pages` of a file that have folios, and were discarded by the program. Blocks
    /// for the device.
    fn restore(&self, handle: &Handle, pages: Range<u64>) -> Result<()>;

    /// Prepares a shorter file to grow to `len_bytes` bytes: zeroes everything that raw writers
    /// have stored past its end, and removes pages that were poisoned for faults on truncated
    /// pages. The caller keeps the guard until the growth has succeeded or failed.
    fn uncover<'a>(
        &self,
        file: &'a File,
        alone: &Resizing<'_>,
        len_bytes: u64,
    ) -> Result<Box<dyn MappedGrowth + 'a>>;
}

/// Guard held while a file that can be mapped grows: faults past the old end wait instead of
/// failing. Its drop ends the growth, too.
pub(crate) trait MappedGrowth: Debug {
    /// Ends the growth, whether or not the file grew.
    fn end(&mut self);
}

/// Guard held while a file grows.
#[derive(Debug)]
pub(super) struct Growing<'a>(Option<Box<dyn MappedGrowth + 'a>>);

impl Growing<'_> {
    pub(super) fn end(&mut self) {
        if let Some(growth) = &mut self.0 {
            growth.end();
        }
    }
}

impl File {
    /// Prepares the file to grow to `len_bytes` bytes, if it is shorter ([`Mapper::uncover`]). The
    /// caller keeps the returned guard until the growth has succeeded or failed.
    pub(super) fn uncover(&self, alone: &Resizing<'_>, len_bytes: u64) -> Result<Growing<'_>> {
        let mapper = self.handle.registry.mapper_of(&self.handle.inode);
        let mapper = mapper.filter(|_| len_bytes > self.len());
        let growth = mapper.map(|mapper| mapper.uncover(self, alone, len_bytes));
        growth.transpose().map(Growing)
    }
}

impl Registry {
    /// Returns what serves a file that can be mapped; `None` for other files.
    pub(super) fn mapper_of(&self, inode: &Inode) -> Option<&dyn Mapper> {
        self.mapper.as_deref().filter(|_| inode.mapped.is_some())
    }

    /// Creates the memory for the pages of a file that can be mapped; `None` for other files.
    pub(super) fn mapped_for(
        &self,
        options: &OpenOptions,
        size: FileSize,
    ) -> Result<Option<Arc<dyn MappedPages>>> {
        if !options.mappable {
            return Ok(None);
        }
        let absent = || Error::cannot_map("", "built without the feature `maps`");
        let mapper = self.mapper.as_ref().ok_or_else(absent)?;
        mapper.new_pages(&self.reclaim, size.len_max_bytes, options.faults).map(Some)
    }
}

/// Counts a map, or a pin of one, as in use while it exists: the cache cannot be closed.
#[derive(Debug)]
pub(crate) struct MapInUse {
    registry: Arc<Registry>,
}

impl MapInUse {
    /// Counts before the caller checks the state of the cache, so that a concurrent close sees it.
    pub(crate) fn begin(registry: &Arc<Registry>) -> Self {
        registry.cache_state.begin_map();
        Self { registry: Arc::clone(registry) }
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.registry.cache_state.is_forked()
    }
}

impl Clone for MapInUse {
    /// Counts another one. The cache is open, because this one is in use.
    fn clone(&self) -> Self {
        Self::begin(&self.registry)
    }
}

impl Drop for MapInUse {
    fn drop(&mut self) {
        if !self.is_forked() {
            self.registry.cache_state.end_map();
        }
    }
}

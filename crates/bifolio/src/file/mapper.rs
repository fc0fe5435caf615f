//! Files that can be mapped: their growth, and the count of the maps in use. The floor `maps`,
//! above, is called through [`Mapper`](super::Mapper).

use super::File;
use super::handle::{Host, MappedGrowth};
use crate::error::Result;
use crate::inode::Resizing;
use std::sync::Arc;

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
    /// Prepares the file to grow to `len_bytes` bytes, if it is shorter
    /// ([`Mapper::uncover`](super::Mapper::uncover)). The caller keeps the returned guard until the
    /// growth has succeeded or failed.
    pub(super) fn uncover(&self, alone: &Resizing<'_>, len_bytes: u64) -> Result<Growing<'_>> {
        let mapper = self.handle.mapper().filter(|_| len_bytes > self.len());
        let growth = mapper.map(|mapper| mapper.uncover(&self.handle, alone, len_bytes));
        growth.transpose().map(Growing)
    }
}

/// Counts a map, or a pin of one, as in use while it exists: the cache cannot be closed.
#[derive(Debug)]
pub(crate) struct MapInUse {
    host: Arc<Host>,
}

impl MapInUse {
    /// Counts before the caller checks the state of the cache, so that a concurrent close sees it.
    pub(crate) fn begin(host: &Arc<Host>) -> Self {
        host.cache_state.begin_map();
        Self { host: Arc::clone(host) }
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.host.cache_state.is_forked()
    }
}

impl Clone for MapInUse {
    /// Counts another one. The cache is open, because this one is in use.
    fn clone(&self) -> Self {
        Self::begin(&self.host)
    }
}

impl Drop for MapInUse {
    fn drop(&mut self) {
        if !self.is_forked() {
            self.host.cache_state.end_map();
        }
    }
}

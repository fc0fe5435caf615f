//! The store of a memory file: no backing; a share of the cache's swap, if that has one.

use crate::swap::Swap;
use std::sync::Arc;

/// See the head of the file.
#[derive(Debug)]
pub(in crate::writeback) struct MemoryStore {
    name: String,
    swap: Option<Arc<Swap>>,
}

impl MemoryStore {
    /// Of a file that messages call `name`.
    pub(in crate::writeback) fn new(name: String, swap: Option<Arc<Swap>>) -> Self {
        Self { name, swap }
    }

    pub(in crate::writeback) fn name(&self) -> &str {
        &self.name
    }

    /// Where folios go when memory is short.
    pub(in crate::writeback) fn swap(&self) -> Option<&Arc<Swap>> {
        self.swap.as_ref()
    }
}

//! The store of a memory file: no backing; a share of the cache's spill, if that has one.

use crate::spill::Spill;
use std::sync::Arc;

/// See the head of the file.
#[derive(Debug)]
pub(in crate::writeback) struct MemoryStore {
    name: String,
    spill: Option<Arc<Spill>>,
}

impl MemoryStore {
    /// Of a file that messages call `name`.
    pub(in crate::writeback) fn new(name: String, spill: Option<Arc<Spill>>) -> Self {
        Self { name, spill }
    }

    pub(in crate::writeback) fn name(&self) -> &str {
        &self.name
    }

    /// Where folios go when memory is short.
    pub(in crate::writeback) fn spill(&self) -> Option<&Arc<Spill>> {
        self.spill.as_ref()
    }
}

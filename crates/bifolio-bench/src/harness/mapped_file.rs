//! A file of a cache of its own, mapped: what the benchmarks of mapped files are about.
//!
//! The cache's counters are asked through the same value that keeps the map.

use std::path::Path;

use bifolio::CacheBuilder;
use serde::{Deserialize, Serialize};

use super::span::Span;
use crate::error::{Error, Result};

/// Who serves faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Faults {
    /// Threads of the cache.
    Threads,
    /// The thread that faults.
    InThread,
}

/// A mapped file and the cache that only it is in.
#[derive(Clone, Debug)]
pub(crate) struct MappedFile(Span);

impl MappedFile {
    /// A memory file of `size_bytes`, mapped to be written, in a new cache that unmaps
    /// `batch_folios` with one flush.
    pub(crate) fn in_memory(
        _builder: CacheBuilder,
        _batch_folios: usize,
        _faults: Faults,
        _size_bytes: u64,
    ) -> Result<Self> {
        Err(not_built_yet())
    }

    /// The file at `path`, mapped to be read, in a new cache.
    pub(crate) fn open(_builder: CacheBuilder, _path: &Path) -> Result<Self> {
        Err(not_built_yet())
    }

    pub(crate) fn span(&self) -> &Span {
        &self.0
    }

    /// All the cache has counted so far, always in the same order.
    pub(crate) fn counts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

fn not_built_yet() -> Error {
    Error::Refused("mapped files are not built yet".into())
}

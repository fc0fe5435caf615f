//! A mapped file in its own cache, for the benchmarks of mapped files.
//!
//! # Safety
//! The map is kept by its spans. The file is not truncated, and only one reader uses it.

#![allow(unsafe_code)]

use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use bifolio::{CacheBuilder, File, OpenOptions};

use super::cached::Cached;
use super::span::Span;
use crate::error::{Error, Result};

/// A mapped file and its cache, which has no other file.
pub(crate) struct MappedFile {
    span: Span,
    cached: Cached,
}

impl MappedFile {
    /// Creates a memory file of `size_bytes`, mapped for writing, in a new cache.
    pub(crate) fn in_memory(builder: CacheBuilder, size_bytes: u64) -> Result<Self> {
        let cached = Cached::in_memory(builder, OpenOptions::new().mappable(true))?;
        cached.file.set_len(size_bytes)?;
        let mut map = cached.file.map_mut(0..size_bytes)?;
        let (start, len_bytes) = (not_zero(map.as_mut_ptr())?, map.len() as usize);
        // SAFETY: the map begins with its file, on a page boundary, is as long as it says, to be
        // written, and its owner is the map itself.
        let span = unsafe { Span::new(start, len_bytes, true, Arc::new(map)) };
        Ok(Self { span, cached })
    }

    /// Maps the file at `path` for reading, in a new cache; all of it is resident.
    pub(crate) fn open(builder: CacheBuilder, path: &Path) -> Result<Self> {
        let cached = Cached::open_with(builder, path, &OpenOptions::new().mappable(true))?;
        let map = cached.file.map(0..cached.file.len())?;
        map.populate(0..map.len())?;
        let (start, len_bytes) = (not_zero(map.as_ptr().cast_mut())?, map.len() as usize);
        // SAFETY: the map begins with its file, on a page boundary, is as long as it says, and the
        // owner of the span is the map itself. Only this handle is open, so the file is not
        // written.
        let span = unsafe { Span::new(start, len_bytes, false, Arc::new(map)) };
        Ok(Self { span, cached })
    }

    pub(crate) fn span(&self) -> Span {
        self.span.clone()
    }

    /// Returns the file.
    pub(crate) fn file(&self) -> &File {
        &self.cached.file
    }

    /// Creates a memory file in the same cache.
    pub(crate) fn memory_file(&self) -> Result<File> {
        Ok(self.cached.cache.memory_file("beside")?)
    }

    /// Returns all counters of the cache that concern maps, always in the same order.
    pub(crate) fn counts(&self) -> Vec<(&'static str, u64)> {
        let stats = self.cached.cache.stats();
        vec![
            ("flushes", stats.unmap_flushes),
            ("pgscan", stats.pgscan),
            ("pgsteal", stats.pgsteal),
            ("pages_evicted", stats.unmapped_pages),
            ("pages_written", stats.swapped_out_pages),
            ("pages_read", stats.swapped_in_pages),
            ("pages_stored_late", stats.stored_late_pages),
            ("faults", stats.faults),
            ("reclaim_stalls", stats.reclaim_stalls),
        ]
    }
}

fn not_zero(start: *mut u8) -> Result<NonNull<u8>> {
    NonNull::new(start).ok_or_else(|| Error::Refused("the cache mapped a file at zero".into()))
}

//! A file in its own cache, on a disk or in memory, and the cache's counters during a trial.
//!
//! # Safety
//! A map is kept by its spans. The file is not truncated, and only one reader uses it.

#![allow(unsafe_code)]

use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use bifolio::{Cache, CacheBuilder, File, OpenOptions, Stats};

use super::measured::Measured;
use super::span::Span;
use crate::error::{Error, Result};

/// A file and its cache.
#[derive(Clone, Debug)]
pub(crate) struct Cached {
    pub(crate) file: File,
    pub(crate) cache: Cache,
}

impl Cached {
    /// Opens `path` with `options` in a new cache.
    pub(crate) fn open(builder: CacheBuilder, path: &Path, options: &OpenOptions) -> Result<Self> {
        let cache = builder.build()?;
        let file = cache.open(path, options)?;
        Ok(Self { file, cache })
    }

    /// Creates a memory file with `options` in a new cache.
    pub(crate) fn in_memory(builder: CacheBuilder, options: OpenOptions) -> Result<Self> {
        let cache = builder.build()?;
        let file = cache.memory_file_with("bench", &options.read(true).write(true))?;
        Ok(Self { file, cache })
    }

    /// Sets the length of a mappable memory file, and maps it for writing.
    pub(crate) fn map_mut(&self, size_bytes: u64) -> Result<Span> {
        self.file.set_len(size_bytes)?;
        let mut map = self.file.map_mut(0..size_bytes)?;
        let (start, len_bytes) = (not_zero(map.as_mut_ptr())?, map.len() as usize);
        // SAFETY: the map begins with its file, on a page boundary, is as long as it says, to be
        // written, and its owner is the map itself.
        Ok(unsafe { Span::new(start, len_bytes, true, Arc::new(map)) })
    }

    /// Maps a mappable file, which has no other handle, for reading; all of it is then resident.
    pub(crate) fn map(&self) -> Result<Span> {
        let map = self.file.map(0..self.file.len())?;
        map.populate(0..map.len())?;
        let (start, len_bytes) = (not_zero(map.as_ptr().cast_mut())?, map.len() as usize);
        // SAFETY: the map begins with its file, on a page boundary, is as long as it says, and the
        // owner of the span is the map itself. Only this handle is open, so the file is not
        // written.
        Ok(unsafe { Span::new(start, len_bytes, false, Arc::new(map)) })
    }

    /// Runs a trial, and corrects its misses and system calls with the counters of the cache:
    /// reads that needed the device, and calls for transfers and flushes.
    pub(crate) fn with_stats(&self, trial: impl FnOnce() -> Result<Measured>) -> Result<Measured> {
        let misses = |stats: &Stats| stats.reads.misses - stats.reads.misses_without_read;
        let calls = |stats: &Stats| {
            stats.storage.ring_enters + stats.storage.plain_transfers + stats.storage.flushes
        };
        let before = self.cache.stats();
        let mut measured = trial()?;
        let after = self.cache.stats();
        measured.misses = misses(&after) - misses(&before);
        measured.syscalls = Some(calls(&after) - calls(&before));
        Ok(measured)
    }

    /// Writes everything back and closes the cache.
    pub(crate) fn close(self) -> Result<()> {
        drop(self.file);
        Ok(self.cache.close()?)
    }
}

fn not_zero(start: *mut u8) -> Result<NonNull<u8>> {
    NonNull::new(start).ok_or_else(|| Error::Refused("the cache mapped a file at zero".into()))
}

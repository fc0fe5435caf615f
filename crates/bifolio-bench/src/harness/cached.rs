//! A file in its own cache, on a disk or in memory, and the cache's counters during a trial.

use std::path::Path;

use bifolio::{Cache, CacheBuilder, File, OpenOptions, Stats};

use super::measured::Measured;
use crate::error::Result;

/// A file and its cache.
#[derive(Clone, Debug)]
pub(crate) struct Cached {
    pub(crate) file: File,
    pub(crate) cache: Cache,
}

impl Cached {
    /// Opens `path` in a new cache, also for writing if `write` is set.
    pub(crate) fn open(builder: CacheBuilder, path: &Path, write: bool) -> Result<Self> {
        Self::open_with(builder, path, &OpenOptions::new().read(true).write(write))
    }

    /// Opens `path` with `options` in a new cache.
    pub(crate) fn open_with(
        builder: CacheBuilder,
        path: &Path,
        options: &OpenOptions,
    ) -> Result<Self> {
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

    /// Runs a trial, and corrects its misses and system calls with the counters of the cache:
    /// reads that needed the device, and the minimum number of calls that explains the transfers.
    pub(crate) fn with_stats(&self, trial: impl FnOnce() -> Result<Measured>) -> Result<Measured> {
        let misses = |stats: &Stats| stats.misses - stats.misses_without_read;
        let requests = |stats: &Stats| stats.read_requests + stats.writeback + stats.syncs;
        let before = self.cache.stats();
        let mut measured = trial()?;
        let after = self.cache.stats();
        measured.misses = misses(&after) - misses(&before);
        measured.syscalls_known = requests(&after) - requests(&before);
        Ok(measured)
    }

    /// Writes everything back and closes the cache.
    pub(crate) fn close(self) -> Result<Stats> {
        drop(self.file);
        let stats = self.cache.stats();
        self.cache.close()?;
        Ok(stats)
    }
}

/// The counter called `name`, if this cache has one.
pub(crate) fn count_of(stats: &Stats, name: &str) -> Option<u64> {
    stats.counts().into_iter().find_map(|(counted, count)| (counted == name).then_some(count))
}

//! A file in its own cache, on a disk or in memory, and the cache's counters during a trial.

use std::path::Path;

use bifolio::{Cache, CacheBuilder, File, OpenOptions, Stats};

use crate::error::Result;

/// A file and its cache.
#[derive(Clone, Debug)]
pub(crate) struct Cached {
    pub(crate) file: File,
    cache: Cache,
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

    /// Creates a memory file with folios of `folio_bytes` in a new cache.
    pub(crate) fn in_memory(builder: CacheBuilder, folio_bytes: u64) -> Result<Self> {
        let options = OpenOptions::new().read(true).write(true).folio_bytes(folio_bytes);
        Self::in_memory_with(builder, &options)
    }

    /// Creates a memory file with `options` in a new cache.
    pub(crate) fn in_memory_with(builder: CacheBuilder, options: &OpenOptions) -> Result<Self> {
        let cache = builder.build()?;
        let file = cache.memory_file_with("bench", options)?;
        Ok(Self { file, cache })
    }

    /// Creates a memory file in the same cache.
    pub(crate) fn memory_file(&self) -> Result<File> {
        Ok(self.cache.memory_file("beside")?)
    }

    /// Opens another file in the same cache.
    pub(crate) fn open_beside(&self, path: &Path) -> Result<File> {
        Ok(self.cache.open(path, &OpenOptions::new())?)
    }

    /// The counts of the cache so far.
    pub(crate) fn stats(&self) -> Stats {
        self.cache.stats()
    }

    /// Runs a trial, and corrects its misses and system calls with the counters of the cache.
    pub(crate) fn with_stats(
        &self,
        trial: impl FnOnce() -> Result<crate::harness::measured::Measured>,
    ) -> Result<crate::harness::measured::Measured> {
        let before = self.cache.stats();
        let mut measured = trial()?;
        let since = self.since(&before);
        measured.misses = since.misses();
        measured.syscalls_known = since.syscalls_known();
        Ok(measured)
    }

    /// The counts since `before`.
    pub(crate) fn since(&self, before: &Stats) -> Since {
        Since { before: before.clone(), after: self.cache.stats() }
    }

    /// Writes everything back and closes the cache.
    pub(crate) fn close(self) -> Result<Stats> {
        drop(self.file);
        let stats = self.cache.stats();
        self.cache.close()?;
        Ok(stats)
    }
}

/// Two snapshots of the counters.
#[derive(Debug)]
pub(crate) struct Since {
    before: Stats,
    after: Stats,
}

impl Since {
    /// Returns the number of reads that needed the device.
    pub(crate) fn misses(&self) -> u64 {
        let misses = self.after.misses - self.before.misses;
        misses - (self.after.misses_without_read - self.before.misses_without_read)
    }

    /// Returns the minimum number of system calls that explains the transfers.
    pub(crate) fn syscalls_known(&self) -> u64 {
        let requests = |stats: &Stats| stats.read_requests + stats.writeback + stats.syncs;
        requests(&self.after) - requests(&self.before)
    }
}

/// The counter called `name`, if this cache has one.
pub(crate) fn count_of(stats: &Stats, name: &str) -> Option<u64> {
    stats.counts().into_iter().find_map(|(counted, count)| (counted == name).then_some(count))
}

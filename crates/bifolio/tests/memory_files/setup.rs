//! Cache settings of the tests.

use std::ops::RangeInclusive;
use std::thread;
use std::time::{Duration, Instant};

use bifolio::{Cache, CacheBuilder, File, Stats};

use crate::support::writable;

/// Settings of a cache with memory files.
#[derive(Clone, Debug)]
pub struct Setup {
    pub memory_bytes: u64,
    pub folio_bytes: u64,
    pub swap: Swap,
}

/// Treatment of pages of memory files when the cache is full.
#[derive(Clone, Debug)]
pub enum Swap {
    /// Writes are refused.
    None,
    /// Pages are swapped to a temporary file.
    Temporary,
}

impl Setup {
    pub fn new(memory_bytes: u64, folio_bytes: u64) -> Self {
        Self { memory_bytes, folio_bytes, swap: Swap::None }
    }

    /// Creates the settings with a swap.
    pub fn swapping(memory_bytes: u64, folio_bytes: u64) -> Self {
        Self { memory_bytes, folio_bytes, swap: Swap::Temporary }
    }

    pub fn builder(&self) -> CacheBuilder {
        let builder = Cache::builder().memory(self.memory_bytes);
        match self.swap {
            Swap::None => builder,
            Swap::Temporary => builder.swap_directory(env!("CARGO_TARGET_TMPDIR")),
        }
    }

    pub fn cache(&self) -> Cache {
        self.builder().build().unwrap()
    }

    /// Creates a memory file in a cache with these settings.
    pub fn file(&self, cache: &Cache) -> File {
        cache.memory_file_with("scratch", &writable().folio_bytes(self.folio_bytes)).unwrap()
    }

    /// Returns `true` if all bytes of memory files are in memory.
    pub fn keeps_in_memory(&self) -> bool {
        matches!(self.swap, Swap::None)
    }
}

/// Returns the bytes of frames that contain folios.
pub fn resident_bytes(stats: &Stats) -> u64 {
    stats.memory.frame_bytes.saturating_sub(stats.memory.free_bytes)
}

/// Returns what is wrong with the memory of a cache whose files, all of them memory files without a
/// swap, have this much space. The cache may be reclaiming ahead of need at the moment.
pub fn check_memory(cache: &Cache, room_bytes: Option<RangeInclusive<u64>>) -> Result<(), String> {
    let stats = cache.stats();
    if stats.memory.used_bytes > stats.memory.bound_bytes {
        return Err(format!("more than the bound: {stats:?}"));
    }
    room_bytes.map_or(Ok(()), |room_bytes| check_resident_in(cache, room_bytes))
}

/// Checks that folios use this much memory, or will in a moment.
pub fn check_resident(cache: &Cache, expected_bytes: u64) -> Result<(), String> {
    check_resident_in(cache, expected_bytes..=expected_bytes)
}

/// Checks that a cache without files is empty, except for folios that an LRU batch still
/// references, which are of `folio_bytes` at most.
pub fn check_empty(cache: &Cache, setup: &Setup, folio_bytes: u64) -> Result<(), String> {
    let cpus = thread::available_parallelism().map_or(1, usize::from) as u64;
    let batches_bytes = if setup.keeps_in_memory() { 0 } else { cpus * 31 * folio_bytes };
    let stats = cache.stats();
    if stats.memory.swap_bytes > 0 || stats.memory.unswapped_bytes > 0 {
        return Err(format!("places in the swap, or folios for it, are left: {stats:?}"));
    }
    check_resident_in(cache, 0..=batches_bytes)
}

fn check_resident_in(cache: &Cache, expected_bytes: RangeInclusive<u64>) -> Result<(), String> {
    // What leaves in the background may take long on a busy machine.
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let found = resident_bytes(&cache.stats());
        if expected_bytes.contains(&found) {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(format!("{found} bytes are in memory and not {expected_bytes:?}"));
        }
        thread::sleep(Duration::from_micros(100));
    }
}

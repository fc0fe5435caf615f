//! In what cache a test runs.

use bifolio::{Cache, CacheBuilder, File, Stats};

use crate::support::{PAGE, writable};

/// See the head of the file.
#[derive(Clone, Debug)]
pub struct Setup {
    pub memory_bytes: u64,
    pub folio_bytes: u64,
    pub spill: Spill,
}

/// What a cache does with the pages of memory files when it is full.
#[derive(Clone, Debug)]
pub enum Spill {
    /// It refuses to take more.
    None,
}

impl Setup {
    pub fn new(memory_bytes: u64, folio_bytes: u64) -> Self {
        Self { memory_bytes, folio_bytes, spill: Spill::None }
    }

    pub fn builder(&self) -> CacheBuilder {
        let builder = Cache::builder().memory(self.memory_bytes).reclaim_wait_ms_max(2000);
        match self.spill {
            Spill::None => builder,
        }
    }

    pub fn cache(&self) -> Cache {
        self.builder().build().unwrap()
    }

    /// A new memory file of a cache made like this.
    pub fn file(&self, cache: &Cache) -> File {
        cache.memory_file_with("scratch", &writable().folio_bytes(self.folio_bytes)).unwrap()
    }

    /// Whether all bytes of memory files are in memory.
    pub fn keeps_in_memory(&self) -> bool {
        matches!(self.spill, Spill::None)
    }
}

/// Bytes of frames that folios are in.
pub fn resident_bytes(stats: &Stats) -> u64 {
    stats.frame_bytes - stats.free_bytes
}

/// What is wrong with the memory of a cache whose files, all of them memory files that stay in
/// memory, have this much room.
pub fn check_memory(cache: &Cache, room_bytes: Option<u64>) -> Result<(), String> {
    let stats = cache.stats();
    if stats.used_bytes > stats.bound_bytes {
        return Err(format!("more than the bound: {stats:?}"));
    }
    let pages = resident_bytes(&stats) / PAGE;
    match room_bytes {
        Some(room_bytes) if pages != room_bytes / PAGE => {
            Err(format!("{pages} pages are in memory and not {}", room_bytes / PAGE))
        }
        _ => Ok(()),
    }
}

//! The child process whose resident size is measured: a file eight times its cache, at random.
//!
//! Nothing else lives in that process: a bounded cache, a block for each thread, the program. What
//! it reads is checked against the pattern, so no second copy of the file is needed.

use std::path::PathBuf;
use std::thread;

use bifolio::{Cache, OpenOptions};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::harness::timed::{Block, Positions};
use crate::harness::{pattern, resident};

const PAGE_BYTES: usize = 4096;

/// Enough to keep a disk busy with single misses.
const THREADS: u64 = 8;

/// How often the cache is filled anew: often enough to touch all tables, and to evict for long.
const BOUNDS_READ: u64 = 4;

/// The task of the child.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) file: PathBuf,
    pub(crate) size_bytes: u64,
    pub(crate) bound_bytes: u64,
}

/// Its findings.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) peak_bytes: u64,
    pub(crate) verified_bytes: u64,
    /// Descriptors and tables, while every frame was in use.
    pub(crate) metadata_bytes: u64,
    /// Frames that held pages.
    pub(crate) resident_bytes: u64,
}

impl Answer {
    /// Metadata for each resident page, less a table word for each page of the file.
    pub(crate) fn metadata_bytes_per_resident_page(&self, file_bytes: u64) -> f64 {
        let page_bytes = PAGE_BYTES as u64;
        let table_bytes = file_bytes / page_bytes * size_of::<u64>() as u64;
        let resident_pages = (self.resident_bytes / page_bytes).max(1);
        self.metadata_bytes.saturating_sub(table_bytes) as f64 / resident_pages as f64
    }
}

/// Reads pages chosen at random, several times as many as the cache holds.
pub(crate) fn read_at_random(task: &Task) -> Result<Answer> {
    let cache = Cache::builder().memory(task.bound_bytes).build()?;
    let file = cache.open(&task.file, &OpenOptions::new())?;
    let reads_per_thread = BOUNDS_READ * task.bound_bytes / PAGE_BYTES as u64 / THREADS;
    let read = |seed| -> Result<()> {
        let mut positions = Positions::new(task.size_bytes, PAGE_BYTES as u64, seed);
        let mut block = Block([0; PAGE_BYTES]);
        for _ in 0..reads_per_thread {
            let pos_bytes = positions.next();
            let read = file.read_at(&mut block.0, pos_bytes)?;
            if read != PAGE_BYTES || !pattern::matches(&block.0, pos_bytes) {
                let series = "a cache smaller than its file".to_owned();
                return Err(Error::WrongBytes { series, pos_bytes });
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        let handles: Vec<_> = (0..THREADS).map(|seed| scope.spawn(move || read(seed))).collect();
        handles.into_iter().try_for_each(|handle| handle.join().expect("a reader panicked"))
    })?;
    let stats = cache.stats();
    let peak_bytes = resident::peak_bytes()?;
    drop(file);
    cache.close()?;
    Ok(Answer {
        peak_bytes,
        verified_bytes: THREADS * reads_per_thread * PAGE_BYTES as u64,
        metadata_bytes: stats.metadata_bytes,
        resident_bytes: stats.frame_bytes.saturating_sub(stats.free_bytes),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_the_file_is_not_charged_to_its_resident_pages() {
        let answer = Answer {
            peak_bytes: 0,
            verified_bytes: 0,
            metadata_bytes: 64 * 100 + 8 * 1000,
            resident_bytes: 100 * 4096,
        };
        assert_eq!(answer.metadata_bytes_per_resident_page(1000 * 4096), 64.0);
    }
}

//! Settings: every limit of a cache, checked in one place.
//!
//! A leaf open to all layers. The builder fills in a `Config`; [`Config::validate`] reports the
//! first invalid setting in one sentence, with the valid values.

use crate::ablation::Ablation;
use crate::error::{Error, Result};
use std::time::Duration;

/// Minimum memory of a cache, bytes.
pub(crate) const MEMORY_BYTES_MIN: u64 = 256 << 10;
/// Maximum memory of a cache, bytes: descriptors have 32-bit numbers.
pub(crate) const MEMORY_BYTES_MAX: u64 = 1 << 42;
/// Maximum number of folios of regions that are unmapped in one batch.
const UNMAP_BATCH_MAX: usize = 512;
/// Minimum size of a chunk, bytes.
pub(crate) const CHUNK_BYTES_MIN: u64 = 64 << 10;
/// Maximum size of a chunk, bytes: a huge page.
pub(crate) const CHUNK_BYTES_MAX: u64 = 2 << 20;
/// Minimum number of chunks in the bound that a cache is built with, where chunks are not smallest.
const CHUNKS_MIN: u64 = 32;
/// Minimum number of chunks in any bound that is set later.
const CHUNKS_MIN_LATER: u64 = 4;
/// Minimum folio size, bytes.
pub(crate) const FOLIO_BYTES_MIN: u64 = 4 << 10;
/// Maximum folio size, bytes.
pub(crate) const FOLIO_BYTES_MAX: u64 = 2 << 20;

/// Maximum of each time limit.
const HOUR: Duration = Duration::from_secs(3600);
/// Maximum number of transfers that one call keeps in flight.
pub(crate) const IO_DEPTH_MAX: usize = 1024;
/// Maximum readahead window, bytes.
pub(crate) const READAHEAD_BYTES_MAX: u64 = 1 << 30;

/// Minimum size of a swap, bytes: the unused slot 0 and one page.
pub(crate) const SWAP_BYTES_MIN: u64 = 8 << 10;
/// Maximum size of a swap, bytes: a value Entry has 28 bits for the slot.
pub(crate) const SWAP_BYTES_MAX: u64 = 1 << 40;

/// Selects whether frames are backed by 2 MiB pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HugePages {
    /// Use them where the system allows it (`madvise`) and the cache has a bound of 64 MiB or more:
    /// fewer TLB misses, faster filling.
    #[default]
    Auto,
    /// Use base pages only.
    Never,
    /// Use them, and fail to build the cache where the system does not allow it or the bound is too
    /// small.
    Require,
}

/// The settings of a cache.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) memory_bytes: u64,
    pub(crate) memory_bytes_max: Option<u64>,
    pub(crate) huge_pages: HugePages,
    pub(crate) populate: bool,
    pub(crate) reclaim_wait_max: Duration,
    pub(crate) unmap_batch_folios: usize,
    pub(crate) io_depth: usize,
    pub(crate) readahead_bytes_max: u64,
    pub(crate) dirty_bytes_background: Option<u64>,
    pub(crate) dirty_bytes_max: Option<u64>,
    pub(crate) dirty_age_max: Duration,
    pub(crate) swap_bytes_max: Option<u64>,
    pub(crate) ablation: Ablation,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            memory_bytes: 256 << 20,
            memory_bytes_max: None,
            huge_pages: HugePages::Auto,
            populate: false,
            reclaim_wait_max: Duration::from_secs(10),
            unmap_batch_folios: 31,
            io_depth: 64,
            readahead_bytes_max: 8 << 20,
            dirty_bytes_background: None,
            dirty_bytes_max: None,
            dirty_age_max: Duration::from_secs(5),
            swap_bytes_max: None,
            ablation: Ablation::default(),
        }
    }
}

impl Config {
    /// Checks all settings.
    pub(crate) fn validate(&self) -> Result<()> {
        validate_memory(self.memory_bytes)?;
        let chunk_bytes = chunk_bytes(self.memory_bytes);
        if self.huge_pages == HugePages::Require && chunk_bytes < CHUNK_BYTES_MAX {
            let problem = format!(
                "2 MiB pages are required, and a bound of {} bytes has chunks of {chunk_bytes}; it \
                 needs {} or more",
                self.memory_bytes,
                CHUNK_BYTES_MAX * CHUNKS_MIN
            );
            return Err(Error::config("huge_pages", problem));
        }
        let bounds = self.memory_bytes..=MEMORY_BYTES_MAX;
        if let Some(max) = self.memory_bytes_max.filter(|max| !bounds.contains(max)) {
            let problem = format!(
                "{max} bytes is not from the bound ({}) to {MEMORY_BYTES_MAX} (4 TiB)",
                self.memory_bytes
            );
            return Err(Error::config("memory_max", problem));
        }
        if !(1..=UNMAP_BATCH_MAX).contains(&self.unmap_batch_folios) {
            let problem = format!("{} is not from 1 to {UNMAP_BATCH_MAX}", self.unmap_batch_folios);
            return Err(Error::config("unmap_batch_folios", problem));
        }
        if self.reclaim_wait_max > HOUR {
            let problem = format!("{:?} is more than an hour", self.reclaim_wait_max);
            return Err(Error::config("reclaim_wait_max", problem));
        }
        if !(1..=IO_DEPTH_MAX).contains(&self.io_depth) {
            let problem = format!("{} is not from 1 to {IO_DEPTH_MAX}", self.io_depth);
            return Err(Error::config("io_depth", problem));
        }
        if self.readahead_bytes_max > READAHEAD_BYTES_MAX {
            let asked = self.readahead_bytes_max;
            let problem = format!("{asked} bytes is more than {READAHEAD_BYTES_MAX} (1 GiB)");
            return Err(Error::config("readahead_max", problem));
        }
        let swapped = SWAP_BYTES_MIN..=SWAP_BYTES_MAX;
        if let Some(asked) = self.swap_bytes_max.filter(|asked| !swapped.contains(asked)) {
            let problem = format!("{asked} bytes is not from {SWAP_BYTES_MIN} to 1 TiB");
            return Err(Error::config("swap_max", problem));
        }
        self.validate_dirty()
    }
}

impl Config {
    fn validate_dirty(&self) -> Result<()> {
        let dirty = [
            ("dirty_background", self.dirty_bytes_background),
            ("dirty_max", self.dirty_bytes_max),
        ];
        let most = dirty_bytes_max(self.memory_bytes);
        for (name, bytes) in dirty {
            let Some(bytes) = bytes.filter(|bytes| *bytes > most) else { continue };
            let problem = format!("{bytes} bytes is more than two thirds of the bound ({most})");
            return Err(Error::config(name, problem));
        }
        let (background, max) = (self.dirty_bytes_background, self.dirty_bytes_max);
        if let (Some(background), Some(max)) = (background, max)
            && background > max
        {
            let problem = format!("{background} bytes is more than dirty_max ({max})");
            return Err(Error::config("dirty_background", problem));
        }
        if !(Duration::from_millis(1)..=HOUR).contains(&self.dirty_age_max) {
            let problem = format!("{:?} is not from 1 ms to an hour", self.dirty_age_max);
            return Err(Error::config("dirty_age_max", problem));
        }
        Ok(())
    }
}

/// Returns the maximum that may be dirty, bytes.
pub(crate) fn dirty_bytes_max(bound_bytes: u64) -> u64 {
    bound_bytes / 3 * 2
}

/// Checks a bound on memory.
pub(crate) fn validate_memory(bytes: u64) -> Result<()> {
    if (MEMORY_BYTES_MIN..=MEMORY_BYTES_MAX).contains(&bytes) {
        return Ok(());
    }
    let problem = format!(
        "{bytes} bytes is outside {MEMORY_BYTES_MIN} (256 KiB) to {MEMORY_BYTES_MAX} (4 TiB)"
    );
    Err(Error::config("memory", problem))
}

/// Returns the size of the chunks in which a cache that is built with this bound takes memory.
pub(crate) fn chunk_bytes(bound_bytes: u64) -> u64 {
    let most_bytes = (bound_bytes / CHUNKS_MIN).clamp(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX);
    1 << most_bytes.ilog2()
}

/// Checks that a later bound has room for some chunks.
pub(crate) fn validate_bound(bytes: u64, chunk_bytes: u64) -> Result<()> {
    let least_bytes = CHUNKS_MIN_LATER * chunk_bytes;
    if bytes >= least_bytes {
        return Ok(());
    }
    let problem = format!(
        "{bytes} bytes is less than {least_bytes}, four chunks of this cache: their size follows \
         from the bound that it was built with"
    );
    Err(Error::config("memory", problem))
}

/// Checks that a folio fits in a chunk.
pub(crate) fn validate_folio_fits(folio_bytes: u64, chunk_bytes: u64) -> Result<()> {
    folio_order(folio_bytes)?;
    if folio_bytes <= chunk_bytes {
        return Ok(());
    }
    let problem = format!(
        "a folio of {folio_bytes} bytes does not fit in a chunk of this cache, {chunk_bytes} \
         bytes; it needs a cache that is built with a bound of {} or more (CacheBuilder::memory)",
        folio_bytes * CHUNKS_MIN
    );
    Err(Error::config("folio_bytes", problem))
}

/// Checks a folio size and returns log2 of its pages.
pub(crate) fn folio_order(folio_bytes: u64) -> Result<u8> {
    let allowed = FOLIO_BYTES_MIN..=FOLIO_BYTES_MAX;
    if folio_bytes.is_power_of_two() && allowed.contains(&folio_bytes) {
        return Ok((folio_bytes / FOLIO_BYTES_MIN).trailing_zeros() as u8);
    }
    let problem = format!("{folio_bytes} bytes is not a power of two from 4096 to 2097152");
    Err(Error::config("folio_bytes", problem))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn folio_sizes_are_powers_of_two_within_bounds() {
        assert_eq!(folio_order(4096).unwrap(), 0);
        assert_eq!(folio_order(16384).unwrap(), 2);
        assert_eq!(folio_order(2 << 20).unwrap(), 9);
        for wrong in [0, 1, 2048, 4095, 4097, 12288, 4 << 20, u64::MAX] {
            let message = folio_order(wrong).unwrap_err().to_string();
            assert!(message.contains("folio_bytes") && message.contains(&wrong.to_string()));
        }
    }
}

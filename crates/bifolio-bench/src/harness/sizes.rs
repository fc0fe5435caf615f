//! Sizes of files and caches.

use std::time::Duration;

use bifolio::Cache;
use bifolio_report::Rss;
use serde::{Deserialize, Serialize};

use super::access::PAGE_BYTES;
use crate::benchmark::Needs;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::format_bytes;

/// Ratio of file and bound in the benchmarks of misses.
const FILE_FACTOR: u64 = 8;
const FILE_BYTES_MAX: u64 = 1 << 43;
const PAGE: u64 = PAGE_BYTES as u64;

/// A file and the bound of the cache it is read and written through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Length of the file.
    pub size_bytes: u64,
    /// Bound of the cache.
    pub memory_bytes: u64,
}

/// The sizes of a benchmark, unless the user chose both; the arrays are for smoke, quick and full.
pub(crate) enum SizeRule {
    /// A file of `factor` times the bound.
    Larger { factor: u64, memory_bytes: [u64; 3] },
    /// A file that is resident, of a multiple of `unit_bytes`.
    Resident { size_bytes: [u64; 3], unit_bytes: u64, max_bytes: u64 },
}

impl SizeRule {
    /// A file of eight times the bound.
    pub(crate) const fn misses(memory_bytes: [u64; 3]) -> Self {
        Self::Larger { factor: FILE_FACTOR, memory_bytes }
    }

    /// Returns the user's choice; a missing size is derived from the other, or is the default.
    pub(crate) fn choose(&self, config: &Config) -> Result<Sizes> {
        let (sizes, unit_bytes, max_bytes) = match *self {
            Self::Larger { factor, memory_bytes } => {
                let of_size = config.size_bytes.map(|size| size / factor / PAGE * PAGE);
                let memory_bytes =
                    config.memory_bytes.or(of_size).unwrap_or(config.set.of(memory_bytes));
                let size_bytes = config.size_bytes.unwrap_or(memory_bytes.saturating_mul(factor));
                (Sizes { size_bytes, memory_bytes }, PAGE, FILE_BYTES_MAX)
            }
            Self::Resident { size_bytes, unit_bytes, max_bytes } => {
                let size_bytes = config.size_bytes.unwrap_or(config.set.of(size_bytes));
                let memory_bytes = resident_memory_bytes(size_bytes).next_multiple_of(PAGE);
                (Sizes { size_bytes, memory_bytes }, unit_bytes, max_bytes)
            }
        };
        let Sizes { size_bytes, memory_bytes } = sizes;
        let is_whole = size_bytes.is_multiple_of(unit_bytes);
        if !is_whole || !(unit_bytes..=max_bytes).contains(&size_bytes) {
            let [unit, max] = [unit_bytes, max_bytes].map(format_bytes);
            let range = format!("--size must be a multiple of {unit}, from that to {max}");
            return Err(Error::Refused(range));
        }
        if !memory_bytes.is_multiple_of(PAGE) {
            return Err(Error::Refused("--memory must be a multiple of 4 KiB".into()));
        }
        Cache::builder().memory(memory_bytes).validate()?;
        Ok(sizes)
    }
}

impl Sizes {
    /// Returns the needs: on disk the file; in memory the cache, and the file in the kernel's page
    /// cache.
    pub(crate) fn needs(&self) -> Needs {
        let memory_bytes = self.memory_bytes.saturating_add(self.size_bytes);
        Needs { disk_bytes: self.size_bytes, memory_bytes: memory_bytes.saturating_add(64 << 20) }
    }

    /// Returns the needs where the kernel is held to the memory of the cache as well: on disk the
    /// file; in memory both, and as much again for the processes.
    pub(crate) fn needs_of_groups(&self) -> Needs {
        let memory_bytes = self.memory_bytes.saturating_mul(2).saturating_add(64 << 20);
        Needs { disk_bytes: self.size_bytes, memory_bytes }
    }

    /// Returns the memory that a series of the kernel may use: as much as the whole process of a
    /// cache, its bound and the same allowance for everything else.
    pub(crate) fn kernel_bytes(&self) -> u64 {
        Rss { bound_bytes: self.memory_bytes, peak_bytes: 0 }.allowed_bytes()
    }

    pub(crate) fn pages(&self) -> u64 {
        self.size_bytes / PAGE
    }

    pub(crate) fn memory_pages(&self) -> u64 {
        self.memory_bytes / PAGE
    }

    /// Returns the duration of a pass at 2 GB/s, which determines the length of the intervals.
    pub(crate) fn expected_pass(&self) -> Duration {
        Duration::from_secs_f64(self.size_bytes as f64 / 2e9)
    }
}

/// Returns the bound of a cache in which all of a file is resident, above its watermarks, with
/// chunks of 2 MiB.
pub(crate) fn resident_memory_bytes(size_bytes: u64) -> u64 {
    size_bytes + size_bytes / 8 + (64 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_size_follows_from_the_other_and_wrong_ones_are_refused() {
        let choose = |size_bytes, memory_bytes| {
            let config = Config { size_bytes, memory_bytes, ..Config::default() };
            let sizes = SizeRule::misses([4 << 20, 64 << 20, 512 << 20]).choose(&config)?;
            Ok::<_, Error>((sizes.size_bytes, sizes.memory_bytes))
        };
        assert_eq!(choose(None, None).unwrap(), (512 << 20, 64 << 20));
        assert_eq!(choose(None, Some(1 << 20)).unwrap(), (8 << 20, 1 << 20));
        assert_eq!(choose(Some(16 << 20), None).unwrap(), (16 << 20, 2 << 20));
        assert_eq!(choose(Some(16 << 20), Some(16 << 20)).unwrap(), (16 << 20, 16 << 20));
        for (size, memory) in [
            (Some(0), None),
            (Some(4097), Some(1 << 20)),
            (Some(1 << 44), Some(1 << 20)),
            (None, Some(u64::MAX)),
        ] {
            assert!(choose(size, memory).is_err(), "{size:?} {memory:?}");
        }
    }
}

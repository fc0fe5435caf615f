//! Sizes of file and cache, for benchmarks whose file is larger than the cache.

use std::time::Duration;

use bifolio::Cache;
use serde::{Deserialize, Serialize};

use super::access::PAGE_BYTES;
use crate::benchmark::Needs;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::format_bytes;
use bifolio_report::Rss;

/// Ratio of file size and bound in the benchmarks of misses, unless the user chose both.
pub(crate) const FILE_FACTOR: u64 = 8;

const QUICK_BYTES_PER_SECOND: f64 = 2e9;

const SIZE_BYTES_MAX: u64 = 1 << 43;

/// A file and the bound of the cache it is read and written through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Length of the file.
    pub size_bytes: u64,
    /// Bound of the cache.
    pub memory_bytes: u64,
}

impl Sizes {
    /// Returns the user's choice; a missing size is derived from the other, as a file of `factor`
    /// times the bound, or from the default.
    pub(crate) fn choose(factor: u64, config: &Config, memory_bytes: u64) -> Result<Self> {
        let (size_bytes, memory_bytes) = match (config.size_bytes, config.memory_bytes) {
            (Some(size), Some(memory)) => (size, memory),
            (Some(size), None) => (size, size / factor / PAGE_BYTES as u64 * PAGE_BYTES as u64),
            (None, memory) => {
                let memory = memory.unwrap_or(memory_bytes);
                (memory.saturating_mul(factor), memory)
            }
        };
        let sizes = Self { size_bytes, memory_bytes };
        sizes.validate()?;
        Ok(sizes)
    }

    /// Returns the needs: on disk the file; in memory the cache, and the file in the kernel's page
    /// cache.
    pub(crate) fn needs(&self) -> Needs {
        let memory_bytes = self.memory_bytes.saturating_add(self.size_bytes);
        Needs { disk_bytes: self.size_bytes, memory_bytes: memory_bytes.saturating_add(64 << 20) }
    }

    /// Returns the memory that a series of the kernel may use: as much as the whole process of a
    /// cache, its bound and the same allowance for everything else.
    pub(crate) fn kernel_bytes(&self) -> u64 {
        Rss { bound_bytes: self.memory_bytes, peak_bytes: 0 }.allowed_bytes()
    }

    /// Returns the size of a swap file for a working set of this size, and as much as is in memory
    /// at the same time.
    pub(crate) fn swap_bytes(&self) -> u64 {
        self.size_bytes + self.memory_bytes
    }

    /// Returns the needs of series that swap: on disk a swap file and a swap, or a file, of the
    /// same size; in memory a cache and a control group.
    pub(crate) fn needs_of_swap(&self) -> Needs {
        Needs {
            disk_bytes: self.swap_bytes().saturating_mul(2),
            memory_bytes: self.kernel_bytes().saturating_mul(2).saturating_add(64 << 20),
        }
    }

    fn validate(&self) -> Result<()> {
        let page_bytes = PAGE_BYTES as u64;
        if self.size_bytes == 0 || !self.size_bytes.is_multiple_of(page_bytes) {
            return Err(Error::Refused("--size must be a multiple of 4096, at least that".into()));
        }
        if self.size_bytes > SIZE_BYTES_MAX {
            let size = format_bytes(self.size_bytes);
            return Err(Error::Refused(format!("--size: at most 8 TiB, not {size}")));
        }
        if !self.memory_bytes.is_multiple_of(page_bytes) {
            return Err(Error::Refused("--memory must be a multiple of 4096".into()));
        }
        Ok(Cache::builder().memory(self.memory_bytes).validate()?)
    }

    /// Returns the number of pages of the file.
    pub(crate) fn pages(&self) -> u64 {
        self.size_bytes / PAGE_BYTES as u64
    }

    /// Returns the expected duration of a pass on a fast disk, which determines the length of the
    /// intervals.
    pub(crate) fn expected_pass(&self) -> Duration {
        Duration::from_secs_f64(self.size_bytes as f64 / QUICK_BYTES_PER_SECOND)
    }

    /// Returns the number of pages in the bound.
    pub(crate) fn memory_pages(&self) -> u64 {
        self.memory_bytes / PAGE_BYTES as u64
    }
}

/// Refuses a size that is no pages, or more than `max_bytes`; `option` is its name.
pub(crate) fn check_pages(option: &str, bytes: u64, max_bytes: u64) -> Result<()> {
    let page_bytes = PAGE_BYTES as u64;
    if bytes < page_bytes || !bytes.is_multiple_of(page_bytes) {
        let problem = format!("{option} must be a multiple of 4096, at least that");
        return Err(Error::Refused(problem));
    }
    if bytes > max_bytes {
        let (bytes, max_bytes) = (format_bytes(bytes), format_bytes(max_bytes));
        return Err(Error::Refused(format!("{option}: at most {max_bytes}, not {bytes}")));
    }
    Ok(())
}

/// Returns the bound of a cache in which all of a file is resident, above its watermarks, with
/// chunks of 2 MiB.
pub(crate) fn resident_memory_bytes(size_bytes: u64) -> u64 {
    size_bytes + size_bytes / 8 + (64 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ParameterSet;

    fn choose(size: Option<u64>, memory: Option<u64>) -> Result<(u64, u64)> {
        let mut config = Config::new(ParameterSet::Quick, Vec::new());
        (config.size_bytes, config.memory_bytes) = (size, memory);
        let sizes = Sizes::choose(FILE_FACTOR, &config, 64 << 20)?;
        Ok((sizes.size_bytes, sizes.memory_bytes))
    }

    #[test]
    fn one_size_follows_from_the_other() {
        assert_eq!(choose(None, None).unwrap(), (512 << 20, 64 << 20));
        assert_eq!(choose(None, Some(1 << 20)).unwrap(), (8 << 20, 1 << 20));
        assert_eq!(choose(Some(16 << 20), None).unwrap(), (16 << 20, 2 << 20));
        assert_eq!(choose(Some(16 << 20), Some(16 << 20)).unwrap(), (16 << 20, 16 << 20));
    }

    #[test]
    fn refuses_what_is_no_page_and_what_is_beyond_all_measure() {
        for (size, memory) in [
            (Some(0), None),
            (Some(4097), Some(1 << 20)),
            (Some(1 << 20), Some(4097 << 10 | 1)),
            (Some(1 << 44), Some(1 << 20)),
            (Some(1 << 20), Some(4096)),
            (None, Some(u64::MAX)),
        ] {
            assert!(choose(size, memory).is_err(), "{size:?} {memory:?}");
        }
    }
}

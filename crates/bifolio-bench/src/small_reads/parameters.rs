//! The parameters of `small-reads`: three sets of defaults, and what the user overrides.

use std::time::Duration;

use bifolio::Cache;
use serde::Serialize;

use super::search::NEEDS_BYTES;
use crate::benchmark::Needs;
use crate::config::{Config, ParameterSet};
use crate::error::{Error, Result};
use crate::format_bytes;

const PAGE_BYTES: u64 = 4096;

/// How many times the bound is the file that the child process reads.
const LARGE_FILE_FACTOR: u64 = 8;

/// The reads: which blocks, of which part of the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern {
    pub(crate) name: &'static str,
    pub(crate) block_bytes: u64,
    /// `None`: all of the file.
    pub(crate) extent_bytes: Option<u64>,
}

/// Every pattern, in the order of the tables.
pub(crate) const PATTERNS: [Pattern; 3] = [
    Pattern { name: "hot", block_bytes: 64, extent_bytes: Some(PAGE_BYTES) },
    Pattern { name: "uniform", block_bytes: 64, extent_bytes: None },
    Pattern { name: "uniform", block_bytes: PAGE_BYTES, extent_bytes: None },
];

/// The reads, and the threads, of the row whose cache is filled out of order.
pub(crate) const SHUFFLED: (Pattern, usize) =
    (Pattern { name: "uniform", block_bytes: 64, extent_bytes: None }, 1);

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Parameters {
    /// The file that is resident.
    pub(crate) size_bytes: u64,
    /// The bound of the cache of the child process, which reads a file eight times as large.
    pub(crate) memory_bytes: u64,
    /// All trials together.
    pub(crate) timed_seconds: f64,
    pub(crate) repetitions: usize,
    pub(crate) threads: Vec<usize>,
    /// How many threads verify.
    pub(crate) verify_threads: usize,
}

impl Parameters {
    pub(crate) fn from_config(config: &Config) -> Result<Self> {
        let (size_bytes, memory_bytes, timed_seconds, repetitions) = match config.set {
            ParameterSet::Smoke => (8 << 20, 8 << 20, 0.4, 2),
            ParameterSet::Quick => (1 << 30, 64 << 20, 8.0, 7),
            ParameterSet::Full => (1 << 30, 256 << 20, 240.0, 11),
        };
        let parameters = Self {
            size_bytes: config.size_bytes.unwrap_or(size_bytes),
            memory_bytes: config.memory_bytes.unwrap_or(memory_bytes),
            timed_seconds: config.timed.map_or(timed_seconds, |timed| timed.as_secs_f64()),
            repetitions,
            threads: config.threads_or_default()?,
            verify_threads: 2,
        };
        parameters.validate()?;
        Ok(parameters)
    }

    fn validate(&self) -> Result<()> {
        if self.size_bytes == 0 || !self.size_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(Error::Refused("--size must be a multiple of 4096, at least that".into()));
        }
        if self.size_bytes > 64 << 30 {
            let size = format_bytes(self.size_bytes);
            return Err(Error::Refused(format!("--size: at most 64 GiB, not {size}")));
        }
        if !self.memory_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(Error::Refused("--memory must be a multiple of 4096".into()));
        }
        for bound_bytes in [self.memory_bytes, self.resident_memory_bytes()] {
            Cache::builder().memory(bound_bytes).validate()?;
        }
        Ok(())
    }

    pub(crate) fn timed(&self) -> Duration {
        Duration::from_secs_f64(self.timed_seconds)
    }

    /// The bound of a cache in which all of the file is resident, above its watermarks.
    pub(crate) fn resident_memory_bytes(&self) -> u64 {
        self.size_bytes + self.size_bytes / 8 + (32 << 20)
    }

    /// The file that is larger than its cache.
    pub(crate) fn large_file_bytes(&self) -> u64 {
        self.memory_bytes.saturating_mul(LARGE_FILE_FACTOR)
    }

    pub(crate) fn size_in_memory(&self) -> Result<usize> {
        usize::try_from(self.size_bytes)
            .map_err(|_| Error::Refused("--size is more than this machine can address".into()))
    }

    /// On disk the two files; in memory a tmpfs copy, the plain copy, the kernel's page cache, and
    /// three caches. The nodes that are searched come on top.
    pub(crate) fn needs(&self) -> Needs {
        let caches = 3 * self.resident_memory_bytes();
        Needs {
            disk_bytes: (self.size_bytes + NEEDS_BYTES).saturating_add(self.large_file_bytes()),
            memory_bytes: (3 * self.size_bytes + caches + NEEDS_BYTES)
                .saturating_add(self.memory_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_overrides_the_set_and_needs_follow() {
        let mut config = Config::new(ParameterSet::Quick, Vec::new());
        let quick = Parameters::from_config(&config).unwrap();
        assert_eq!(quick.needs().disk_bytes, (1 << 30) + (512 << 20) + NEEDS_BYTES);
        assert!(quick.needs().memory_bytes > 5 << 30);
        config.size_bytes = Some(1 << 20);
        config.memory_bytes = Some(1 << 20);
        config.timed = Some(Duration::from_secs(2));
        let small = Parameters::from_config(&config).unwrap();
        assert_eq!(small.needs().disk_bytes, (9 << 20) + NEEDS_BYTES);
        assert_eq!(small.timed_seconds, 2.0);
    }

    #[test]
    fn refuses_sizes_that_are_no_pages_and_sizes_beyond_all_measure() {
        for size_bytes in [0, 4095, 1 << 62] {
            let mut config = Config::new(ParameterSet::Quick, Vec::new());
            config.size_bytes = Some(size_bytes);
            assert!(Parameters::from_config(&config).is_err(), "{size_bytes}");
        }
        let mut config = Config::new(ParameterSet::Quick, Vec::new());
        config.threads = Some(vec![0]);
        assert!(Parameters::from_config(&config).is_err());
        config.threads = None;
        config.memory_bytes = Some(4096);
        assert!(Parameters::from_config(&config).is_err(), "less than a cache can have");
    }
}

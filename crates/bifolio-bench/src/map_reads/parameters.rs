//! The parameters of `map-reads`: three sets of defaults, and what the user overrides.

use std::time::Duration;

use serde::Serialize;

use crate::benchmark::Needs;
use crate::config::{Config, ParameterSet};
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;

/// Bytes that `hot` reads: more than the nearest caches of a CPU, less than all.
const HOT_BYTES: u64 = 1 << 20;

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Parameters {
    /// The file that is resident.
    pub(super) size_bytes: u64,
    pub(super) timed_seconds: f64,
    pub(super) repetitions: usize,
    pub(super) threads: Vec<usize>,
    /// How many threads verify.
    pub(super) verify_threads: usize,
}

impl Parameters {
    pub(super) fn from_config(config: &Config) -> Result<Self> {
        let (size_bytes, timed_seconds, repetitions) = match config.set {
            ParameterSet::Smoke => (8 << 20, 0.2, 2),
            ParameterSet::Quick => (64 << 20, 3.0, 7),
            ParameterSet::Full => (64 << 20, 60.0, 11),
        };
        let parameters = Self {
            size_bytes: config.size_bytes.unwrap_or(size_bytes),
            timed_seconds: config.timed.map_or(timed_seconds, |timed| timed.as_secs_f64()),
            repetitions,
            threads: config.threads_or_default()?,
            verify_threads: 2,
        };
        let size_bytes = parameters.size_bytes;
        if size_bytes == 0 || size_bytes > 16 << 30 || !size_bytes.is_multiple_of(PAGE_BYTES as u64)
        {
            let range = "--size must be a multiple of 4096, from that to 16 GiB";
            return Err(Error::Refused(range.into()));
        }
        Ok(parameters)
    }

    /// Returns the reads: a name, and the bytes of the file.
    pub(super) fn extents(&self) -> [(&'static str, u64); 2] {
        [("hot", self.size_bytes.min(HOT_BYTES)), ("uniform", self.size_bytes)]
    }

    /// Returns the duration of a trial, if a repetition has this many.
    pub(super) fn trial(&self, trials: usize) -> Duration {
        let count = (trials.max(1) * self.repetitions) as f64;
        Duration::from_secs_f64(self.timed_seconds).div_f64(count)
    }

    /// Returns the bound of a cache in which all of the file is resident, above its watermarks.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.size_bytes + self.size_bytes / 8 + (32 << 20)
    }

    /// Returns the needs: on disk two files; in memory a cache, and both in the kernel's page
    /// cache.
    pub(super) fn needs(&self) -> Needs {
        Needs {
            disk_bytes: 2 * self.size_bytes,
            memory_bytes: 2 * self.size_bytes + self.memory_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_is_never_more_than_the_file_and_needs_follow_the_size() {
        let mut config = Config::new(ParameterSet::Quick, Vec::new());
        config.size_bytes = Some(4096);
        let small = Parameters::from_config(&config).unwrap();
        assert_eq!(small.extents(), [("hot", 4096), ("uniform", 4096)]);
        assert_eq!(small.needs().disk_bytes, 8192);
        for size_bytes in [0, 4097, 1 << 60] {
            config.size_bytes = Some(size_bytes);
            assert!(Parameters::from_config(&config).is_err(), "{size_bytes}");
        }
    }
}

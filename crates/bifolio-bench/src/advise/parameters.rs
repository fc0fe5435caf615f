//! The parameters of `advise`: three sets of defaults, and what the user overrides.

use serde::Serialize;

use crate::benchmark::Needs;
use crate::config::{Config, ParameterSet};
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::interleave::Rounds;

/// Bytes of the stream per call.
pub(super) const CHUNK_BYTES: u64 = 2 << 20;

/// Bytes written on one CPU and given up on another.
pub(super) const FALLBACK_BYTES: u64 = 8 * PAGE_BYTES as u64;

/// Each quarter of a mixed range: fewer pages than a batch holds.
pub(super) const QUARTER_BYTES: u64 = 8 * PAGE_BYTES as u64;

/// The bound of the caches of files that are so small.
pub(super) const SMALL_MEMORY_BYTES: u64 = 8 << 20;

const SIZE_BYTES_MAX: u64 = 16 << 30;

/// Number of caches that the mapped stream needs at the same time.
const CACHES: u64 = 3;

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Parameters {
    /// The file that stays mapped.
    pub(super) size_bytes: u64,
    pub(super) chunk_bytes: u64,
    /// Passes over the file per round.
    pub(super) passes: u64,
    /// Rounds of the mapped stream.
    pub(super) rounds: usize,
    /// Rounds of the others.
    pub(super) short_rounds: usize,
    /// Time for further rounds of each workload.
    pub(super) timed_seconds: f64,
}

impl Parameters {
    pub(super) fn from_config(config: &Config) -> Result<Self> {
        let (size_bytes, rounds, short_rounds) = match config.set {
            ParameterSet::Smoke => (4 << 20, 2, 10),
            ParameterSet::Quick => (128 << 20, 5, 10),
            ParameterSet::Full => (128 << 20, 50, 100),
        };
        let parameters = Self {
            size_bytes: config.size_bytes.unwrap_or(size_bytes),
            chunk_bytes: CHUNK_BYTES,
            passes: 4,
            rounds,
            short_rounds,
            timed_seconds: config.timed.map_or(0.0, |timed| timed.as_secs_f64()),
        };
        let size_bytes = parameters.size_bytes;
        if size_bytes == 0 || size_bytes > SIZE_BYTES_MAX || !size_bytes.is_multiple_of(CHUNK_BYTES)
        {
            let range = "--size must be a multiple of 2 MiB, from that to 16 GiB";
            return Err(Error::Refused(range.into()));
        }
        Ok(parameters)
    }

    /// Returns the rounds of the mapped stream.
    pub(super) fn stream_rounds(&self) -> Rounds {
        Rounds::within(self.timed_seconds, self.rounds)
    }

    /// Returns the rounds of the other workloads.
    pub(super) fn short_rounds(&self) -> Rounds {
        Rounds::within(self.timed_seconds, self.short_rounds)
    }

    /// Returns the bound of a cache in which all of the file is resident, together with the pages
    /// of the other CPU, above its watermarks.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.size_bytes + self.size_bytes / 8 + (32 << 20)
    }

    /// Returns the resources: on disk the file; in memory three caches, and the file in the
    /// kernel's page cache.
    pub(super) fn needs(&self) -> Needs {
        Needs {
            disk_bytes: self.size_bytes + (1 << 20),
            memory_bytes: CACHES * self.memory_bytes() + self.size_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_whole_chunks_and_needs_follow_its_size() {
        let mut config = Config::new(ParameterSet::Quick, Vec::new());
        let quick = Parameters::from_config(&config).unwrap();
        assert_eq!(quick.size_bytes / quick.chunk_bytes * quick.passes, 256, "calls of a round");
        assert_eq!(quick.needs().memory_bytes, (3 * (128 + 16 + 32) + 128) << 20);
        for size_bytes in [0, 1 << 20, 3 << 20, 1 << 40] {
            config.size_bytes = Some(size_bytes);
            assert!(Parameters::from_config(&config).is_err(), "{size_bytes}");
        }
    }
}

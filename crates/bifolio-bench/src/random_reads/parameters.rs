//! The parameters of `random-reads`: three sets of defaults, and what the user overrides.

use std::time::Duration;

use serde::Serialize;

use crate::benchmark::Needs;
use crate::config::{Config, ParameterSet};
use crate::error::Result;
use crate::harness::sizes::Sizes;

/// Number of reads that the deep series keep in flight.
pub(crate) const DEPTH: u16 = 32;

/// Number of threads that fill the page cache before reads of one page at a time.
pub(crate) const WARMING_THREADS: usize = 16;

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Parameters {
    #[serde(flatten)]
    pub(crate) sizes: Sizes,
    /// Seconds of all trials together.
    pub(crate) timed_seconds: f64,
    pub(crate) repetitions: usize,
    /// Threads of the series that read one page at a time.
    pub(crate) threads: Vec<usize>,
    pub(crate) depth: u16,
}

impl Parameters {
    pub(crate) fn from_config(config: &Config) -> Result<Self> {
        let (memory_bytes, timed_seconds, repetitions) = match config.set {
            ParameterSet::Smoke => (4 << 20, 0.3, 1),
            ParameterSet::Quick => (64 << 20, 9.0, 3),
            ParameterSet::Full => (512 << 20, 320.0, 4),
        };
        Ok(Self {
            sizes: Sizes::choose(config, memory_bytes)?,
            timed_seconds: config.timed.map_or(timed_seconds, |timed| timed.as_secs_f64()),
            repetitions,
            threads: config.threads_or_default()?,
            depth: DEPTH,
        })
    }

    /// Returns the duration of a trial of weight one, if trials of `weight` in total are repeated
    /// as often as the parameters state.
    pub(crate) fn trial(&self, weight: u32) -> Duration {
        let count = f64::from(weight.max(1)) * self.repetitions as f64;
        Duration::from_secs_f64(self.timed_seconds).div_f64(count)
    }

    /// Returns the needs: on disk the file; in memory the cache and the kernel's page cache of the
    /// same size, and as much again for the processes.
    pub(crate) fn needs(&self) -> Needs {
        Needs {
            disk_bytes: self.sizes.size_bytes,
            memory_bytes: self.sizes.memory_bytes.saturating_mul(2).saturating_add(64 << 20),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_set_has_its_size_and_time_is_shared() {
        let config = Config::new(ParameterSet::Full, Vec::new());
        let mut full = Parameters::from_config(&config).unwrap();
        assert_eq!((full.sizes.size_bytes, full.sizes.memory_bytes), (4 << 30, 512 << 20));
        assert_eq!(full.needs().disk_bytes, 4 << 30);
        (full.timed_seconds, full.repetitions) = (12.0, 3);
        assert_eq!(full.trial(4), Duration::from_secs(1));
    }
}

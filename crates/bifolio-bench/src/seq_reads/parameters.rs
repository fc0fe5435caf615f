//! The parameters of `seq-reads`: three sets of defaults, and what the user overrides.

use std::time::Duration;

use serde::Serialize;

use crate::benchmark::Needs;
use crate::config::{Config, ParameterSet};
use crate::error::{Error, Result};
use crate::format_bytes;

/// The sizes of folios.
pub(super) const FOLIOS_BYTES: [u64; 2] = [4 << 10, 2 << 20];

/// How much is read with one call.
pub(super) const BLOCKS_BYTES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];

/// The largest folio: the file is whole folios.
const SIZE_UNIT_BYTES: u64 = 2 << 20;
const SIZE_BYTES_MAX: u64 = 64 << 30;

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Parameters {
    pub(super) size_bytes: u64,
    /// The bound of the cache that churns.
    pub(super) churn_memory_bytes: u64,
    /// How long it churns before a file is filled in it.
    pub(super) churn_seconds: f64,
    /// All trials together.
    pub(super) timed_seconds: f64,
    pub(super) repetitions: usize,
}

impl Parameters {
    pub(super) fn from_config(config: &Config) -> Result<Self> {
        let (size_bytes, churn_memory_bytes, churn_seconds, timed_seconds, repetitions) =
            match config.set {
                ParameterSet::Smoke => (8 << 20, 8 << 20, 0.05, 0.2, 2),
                ParameterSet::Quick => (128 << 20, 64 << 20, 1.5, 4.0, 5),
                ParameterSet::Full => (1 << 30, 256 << 20, 60.0, 240.0, 11),
            };
        let parameters = Self {
            size_bytes: config.size_bytes.unwrap_or(size_bytes),
            churn_memory_bytes: config.memory_bytes.unwrap_or(churn_memory_bytes),
            churn_seconds,
            timed_seconds: config.timed.map_or(timed_seconds, |timed| timed.as_secs_f64()),
            repetitions,
        };
        parameters.validate()?;
        Ok(parameters)
    }

    fn validate(&self) -> Result<()> {
        let size_bytes = self.size_bytes;
        if size_bytes == 0 || !size_bytes.is_multiple_of(SIZE_UNIT_BYTES) {
            return Err(Error::Refused("--size must be a multiple of 2 MiB, at least that".into()));
        }
        if size_bytes > SIZE_BYTES_MAX {
            let size = format_bytes(size_bytes);
            return Err(Error::Refused(format!("--size: at most 64 GiB, not {size}")));
        }
        let churn_bytes = self.churn_memory_bytes;
        if churn_bytes < 4 * SIZE_UNIT_BYTES || !churn_bytes.is_multiple_of(SIZE_UNIT_BYTES) {
            let problem = "--memory must be a multiple of 2 MiB, at least 8 MiB";
            return Err(Error::Refused(problem.into()));
        }
        Ok(())
    }

    /// Returns the duration of one of `trials` trials.
    pub(super) fn trial(&self, trials: usize) -> Duration {
        let count = trials.max(1) * self.repetitions;
        Duration::from_secs_f64(self.timed_seconds).div_f64(count as f64)
    }

    /// Returns the bound of a cache in which all of the file is resident, above its watermarks.
    pub(super) fn resident_memory_bytes(&self) -> u64 {
        self.size_bytes + self.size_bytes / 8 + (32 << 20)
    }

    /// Returns the needs: on disk what the churning cache swaps out; in memory a file on tmpfs,
    /// plain memory, and three caches.
    pub(super) fn needs(&self) -> Needs {
        Needs {
            disk_bytes: 4 * self.churn_memory_bytes,
            memory_bytes: 2 * self.size_bytes + 3 * self.resident_memory_bytes() + (64 << 20),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_is_no_whole_folio_of_every_size() {
        let with = |size, memory| {
            let mut config = Config::new(ParameterSet::Quick, Vec::new());
            (config.size_bytes, config.memory_bytes) = (size, memory);
            Parameters::from_config(&config)
        };
        assert_eq!(with(Some(2 << 20), None).unwrap().size_bytes, 2 << 20);
        for size in [0, 1 << 20, (2 << 20) + 4096, 1 << 40] {
            assert!(with(Some(size), None).is_err(), "{size}");
        }
        assert!(with(None, Some(1 << 20)).is_err());
    }

    #[test]
    fn time_is_shared_by_all_trials() {
        let mut config = Config::new(ParameterSet::Quick, Vec::new());
        config.timed = Some(Duration::from_secs(10));
        let mut parameters = Parameters::from_config(&config).unwrap();
        parameters.repetitions = 5;
        assert_eq!(parameters.trial(20), Duration::from_millis(100));
    }
}

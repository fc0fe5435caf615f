//! The parameters of `reclaim`: three sets of defaults, and what the user overrides.

use std::time::Duration;

use serde::Serialize;

use super::work::{Load, Order};
use crate::config::{Config, ParameterSet};
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::sizes::Sizes;

/// Ratio of the memory that is written and verified, and the bound.
const WORKING_SET_FACTOR: u64 = 4;

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Parameters {
    #[serde(flatten)]
    pub(super) sizes: Sizes,
    /// Numbers of workers.
    pub(super) workers: Vec<usize>,
    /// All windows together.
    pub(super) timed_seconds: f64,
    pub(super) repetitions: usize,
    /// Set if stress-ng is run too, where it is installed.
    pub(super) stress_ng: bool,
}

impl Parameters {
    pub(super) fn from_config(config: &Config) -> Result<Self> {
        let (memory_bytes, timed_seconds, repetitions) = match config.set {
            ParameterSet::Smoke => (4 << 20, 0.5, 1),
            ParameterSet::Quick => (32 << 20, 6.0, 1),
            ParameterSet::Full => (256 << 20, 320.0, 3),
        };
        let parameters = Self {
            sizes: Sizes::choose_times(WORKING_SET_FACTOR, config, memory_bytes)?,
            workers: config.threads_or_default()?,
            timed_seconds: config.timed.map_or(timed_seconds, |timed| timed.as_secs_f64()),
            repetitions,
            stress_ng: config.set == ParameterSet::Full,
        };
        let workers = parameters.workers.iter().copied().max().unwrap_or(0) as u64;
        if parameters.sizes.pages() < workers {
            return Err(Error::Refused("--size: at least a page for each of --threads".into()));
        }
        Ok(parameters)
    }

    /// Returns the work of a trial, if a repetition has this many.
    pub(super) fn load(&self, workers: usize, trials: usize) -> Load {
        let windows = trials.max(1) * Order::ALL.len() * self.repetitions;
        let window = Duration::from_secs_f64(self.timed_seconds).div_f64(windows as f64);
        Load { size_bytes: self.sizes.size_bytes, workers, window }
    }

    /// Returns the minimum work that shows whether a series can run.
    pub(super) fn trial(&self) -> Load {
        Load { size_bytes: PAGE_BYTES as u64, workers: 1, window: Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mapping_is_four_times_the_bound() {
        let mut config = Config::new(ParameterSet::Quick, Vec::new());
        let quick = Parameters::from_config(&config).unwrap();
        assert_eq!((quick.sizes.size_bytes, quick.sizes.memory_bytes), (128 << 20, 32 << 20));
        assert_eq!(quick.sizes.needs_of_swap().disk_bytes, 320 << 20);
        assert_eq!(quick.load(2, 8).window, Duration::from_millis(375));
        assert_eq!(Parameters::from_config(&config).unwrap().workers, [1, 2]);
        config.size_bytes = Some(4096);
        config.memory_bytes = Some(4 << 20);
        assert!(Parameters::from_config(&config).is_err(), "no page for the second worker");
    }
}

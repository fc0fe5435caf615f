//! The parameters of `reclaim`: three sets of defaults, and what the user overrides.

use std::time::Duration;

use serde::Serialize;

use super::work::{Load, Order};
use crate::benchmark::Needs;
use crate::config::{Config, ParameterSet};
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::sizes::Sizes;
use crate::report::Rss;

/// How many times the bound is the memory that is written and verified.
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
    /// Whether stress-ng is run too, where it is installed.
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

    /// What a turn does when there are so many of them in a repetition.
    pub(super) fn load(&self, workers: usize, turns: usize) -> Load {
        let windows = turns.max(1) * Order::ALL.len() * self.repetitions;
        let window = Duration::from_secs_f64(self.timed_seconds).div_f64(windows as f64);
        Load { size_bytes: self.sizes.size_bytes, workers, window }
    }

    /// The least that shows whether a series can run at all.
    pub(super) fn trial(&self) -> Load {
        Load { size_bytes: PAGE_BYTES as u64, workers: 1, window: Duration::ZERO }
    }

    /// What the kernel's series may use: as much as the whole process of a cache may have.
    pub(super) fn kernel_bytes(&self) -> u64 {
        Rss { bound_bytes: self.sizes.memory_bytes, peak_bytes: 0 }.allowed_bytes()
    }

    /// The swap file takes all of it, and as much as is in memory at the same time.
    pub(super) fn swap_bytes(&self) -> u64 {
        self.sizes.size_bytes + self.sizes.memory_bytes
    }

    /// On disk a swap file, and a spill or a file of the same size; in memory a cache or a control
    /// group, one after the other.
    pub(super) fn needs(&self) -> Needs {
        Needs {
            disk_bytes: self.swap_bytes().saturating_mul(2),
            memory_bytes: self.kernel_bytes().saturating_mul(2).saturating_add(64 << 20),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mapping_is_four_times_the_bound_and_time_is_shared_by_all_windows() {
        let mut config = Config::new(ParameterSet::Quick, Vec::new());
        let quick = Parameters::from_config(&config).unwrap();
        assert_eq!((quick.sizes.size_bytes, quick.sizes.memory_bytes), (128 << 20, 32 << 20));
        assert_eq!(quick.needs().disk_bytes, 320 << 20);
        assert_eq!(quick.load(2, 8).window, Duration::from_millis(375));
        assert_eq!(Parameters::from_config(&config).unwrap().workers, [1, 2]);
        config.size_bytes = Some(4096);
        config.memory_bytes = Some(4 << 20);
        assert!(Parameters::from_config(&config).is_err(), "no page for the second worker");
    }
}

//! The parameters of `writes`: three sets of defaults, and what the user overrides.

use serde::Serialize;

use super::records::{Layout, Records};
use crate::config::{Config, ParameterSet};
use crate::error::Result;
use crate::harness::interleave::Rounds;
use crate::harness::sizes::Sizes;

/// Divisor: the part of the pages that a trial of random writes writes.
const RANDOM_SHARE: u64 = 8;

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Parameters {
    #[serde(flatten)]
    pub(crate) sizes: Sizes,
    /// Pages written at random by one trial.
    pub(crate) random_writes: u64,
    /// Records that each thread writes and syncs in one trial.
    pub(crate) records_per_thread: u64,
    /// All trials together; at least `repetitions` of each are taken.
    pub(crate) timed_seconds: f64,
    pub(crate) repetitions: usize,
    /// Pages compared after each trial, chosen at random.
    pub(crate) verified_pages: u64,
}

impl Parameters {
    pub(crate) fn from_config(config: &Config) -> Result<Self> {
        let (memory_bytes, timed_seconds, repetitions, verified_pages) = match config.set {
            ParameterSet::Smoke => (2 << 20, 0.2, 1, u64::MAX),
            ParameterSet::Quick => (64 << 20, 9.0, 2, 256),
            ParameterSet::Full => (512 << 20, 240.0, 5, 8192),
        };
        let records_per_thread = match config.set {
            ParameterSet::Smoke => 4,
            ParameterSet::Quick => 100,
            ParameterSet::Full => 1000,
        };
        let sizes = Sizes::choose(config, memory_bytes)?;
        Ok(Self {
            sizes,
            random_writes: sizes.pages().div_ceil(RANDOM_SHARE),
            records_per_thread,
            timed_seconds: config.timed.map_or(timed_seconds, |timed| timed.as_secs_f64()),
            repetitions,
            verified_pages: verified_pages.min(sizes.pages()),
        })
    }

    pub(crate) fn records(&self, layout: Layout) -> Records {
        Records::new(layout, self.sizes.pages(), self.records_per_thread)
    }

    pub(crate) fn rounds(&self) -> Rounds {
        Rounds::within(self.timed_seconds, self.repetitions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_more_pages_than_the_file_has() {
        let mut config = Config::new(ParameterSet::Smoke, Vec::new());
        config.size_bytes = Some(3 * 4096);
        config.memory_bytes = Some(1 << 20);
        let parameters = Parameters::from_config(&config).unwrap();
        assert_eq!((parameters.random_writes, parameters.verified_pages), (1, 3));
    }
}

//! The parameters of `swap`: three sets of defaults, and what the user overrides.

use serde::Serialize;

use super::work::Load;
use crate::config::{Config, ParameterSet};
use crate::error::Result;
use crate::harness::interleave::Rounds;
use crate::harness::sizes::Sizes;

/// Ratio of the working set and the bound.
const WORKING_SET_FACTOR: u64 = 4;

/// Divisor: the part of the pages of the working set that are read at random.
const RANDOM_READS_SHARE: u64 = 32;

/// Divisor: the part of the pages that are overwritten, as many as fit into memory.
const OVERWRITES_SHARE: u64 = 4;

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Parameters {
    #[serde(flatten)]
    pub(super) sizes: Sizes,
    /// Pages read at random by one trial.
    pub(super) random_reads: u64,
    /// Pages overwritten at random by one trial.
    pub(super) overwrites: u64,
    /// All trials together; at least `repetitions` of each are taken.
    pub(super) timed_seconds: f64,
    pub(super) repetitions: usize,
}

impl Parameters {
    pub(super) fn from_config(config: &Config) -> Result<Self> {
        let (memory_bytes, timed_seconds, repetitions) = match config.set {
            ParameterSet::Smoke => (4 << 20, 0.1, 1),
            ParameterSet::Quick => (64 << 20, 7.0, 1),
            ParameterSet::Full => (512 << 20, 240.0, 5),
        };
        let sizes = Sizes::choose_times(WORKING_SET_FACTOR, config, memory_bytes)?;
        Ok(Self {
            sizes,
            random_reads: sizes.pages().div_ceil(RANDOM_READS_SHARE),
            overwrites: sizes.pages().div_ceil(OVERWRITES_SHARE),
            timed_seconds: config.timed.map_or(timed_seconds, |timed| timed.as_secs_f64()),
            repetitions,
        })
    }

    pub(super) fn load(&self) -> Load {
        let Self { sizes, random_reads, overwrites, .. } = *self;
        Load { sizes, random_reads, overwrites }
    }

    pub(super) fn rounds(&self) -> Rounds {
        Rounds::within(self.timed_seconds, self.repetitions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_working_set_is_four_times_the_bound() {
        let config = Config::new(ParameterSet::Quick, Vec::new());
        let quick = Parameters::from_config(&config).unwrap();
        assert_eq!((quick.sizes.size_bytes, quick.sizes.memory_bytes), (256 << 20, 64 << 20));
        assert_eq!((quick.random_reads, quick.overwrites), (2048, 16384));
        assert_eq!(quick.sizes.needs_of_swap().disk_bytes, 640 << 20);
    }
}

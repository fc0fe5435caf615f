//! The parameters of `scan`: three sets of defaults, and what the user overrides.

use serde::Serialize;

use crate::config::{Config, ParameterSet};
use crate::error::Result;
use crate::harness::interleave::Rounds;
use crate::harness::sizes::Sizes;

/// How much is read with one call.
pub(crate) const BLOCKS_BYTES: [usize; 2] = [64 << 10, 1 << 20];

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Parameters {
    #[serde(flatten)]
    pub(crate) sizes: Sizes,
    /// All passes together; at least `repetitions` of each are made.
    pub(crate) timed_seconds: f64,
    pub(crate) repetitions: usize,
}

impl Parameters {
    pub(crate) fn from_config(config: &Config) -> Result<Self> {
        let (memory_bytes, timed_seconds, repetitions) = match config.set {
            ParameterSet::Smoke => (4 << 20, 0.2, 1),
            ParameterSet::Quick => (64 << 20, 8.0, 2),
            ParameterSet::Full => (512 << 20, 240.0, 5),
        };
        Ok(Self {
            sizes: Sizes::choose(config, memory_bytes)?,
            timed_seconds: config.timed.map_or(timed_seconds, |timed| timed.as_secs_f64()),
            repetitions,
        })
    }

    pub(crate) fn rounds(&self) -> Rounds {
        Rounds::within(self.timed_seconds, self.repetitions)
    }
}

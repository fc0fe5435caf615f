//! The parameters of `gather`: three sets of defaults, and what the user overrides.

use std::time::Duration;

use serde::Serialize;

use super::GatherCase;
use super::rows::Pattern;
use super::task::State;
use crate::benchmark::Needs;
use crate::config::{Config, ParameterSet};
use crate::error::Result;
use crate::harness::sizes::Sizes;

const ROWS: usize = 4096;
const ROW_BYTES: [usize; 2] = [1024, 4096];

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Parameters {
    #[serde(flatten)]
    pub(crate) sizes: Sizes,
    /// Rows of a gather. Their pages take at most half of the memory.
    pub(crate) rows: usize,
    /// Time of a round; one that has gathered once may end later.
    pub(crate) round_seconds: f64,
    pub(crate) repetitions: usize,
    #[serde(skip)]
    states: Vec<State>,
    #[serde(skip)]
    summary_only: bool,
}

impl Parameters {
    pub(crate) fn from_config(config: &Config) -> Result<Self> {
        use State::{Cold, Steady, Warm};
        let (memory_bytes, round_seconds, repetitions, states) = match config.set {
            ParameterSet::Smoke => (4 << 20, 0.005, 1, vec![Cold, Warm, Steady]),
            ParameterSet::Quick => (32 << 20, 0.1, 3, vec![Cold, Warm]),
            ParameterSet::Full => (512 << 20, 0.5, 5, vec![Cold, Warm, Steady]),
        };
        let sizes = Sizes::choose(config, memory_bytes)?;
        let mut parameters = Self {
            sizes,
            rows: ROWS.min((sizes.memory_pages() / 2) as usize).max(1),
            round_seconds,
            repetitions,
            states,
            summary_only: config.summary_only,
        };
        if let Some(timed) = config.timed {
            // About 5 series; the slowest takes longer than a round.
            let rounds = (parameters.cases().len() * 5 * repetitions) as f64;
            parameters.round_seconds = timed.as_secs_f64() / rounds;
        }
        Ok(parameters)
    }

    pub(crate) fn round(&self) -> Duration {
        Duration::from_secs_f64(self.round_seconds)
    }

    /// The rows of the report.
    pub(crate) fn cases(&self) -> Vec<GatherCase> {
        let mut cases = Vec::new();
        for pattern in [Pattern::Uniform, Pattern::EightyTwenty] {
            for row_bytes in ROW_BYTES {
                for &state in &self.states {
                    cases.push(GatherCase { pattern, row_bytes, state });
                }
            }
        }
        if self.summary_only {
            let is_shown =
                |case: &GatherCase| case.pattern == Pattern::Uniform && case.row_bytes == 4096;
            cases.retain(is_shown);
        }
        cases
    }

    /// On disk the file; in memory the cache or the kernel's page cache, and the rows of a gather.
    pub(crate) fn needs(&self) -> Needs {
        let memory_bytes = self.sizes.memory_bytes.saturating_mul(2).saturating_add(64 << 20);
        Needs { disk_bytes: self.sizes.size_bytes, memory_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_has_two_of_the_eight_quick_cases() {
        let mut config = Config::new(ParameterSet::Quick, Vec::new());
        let quick = Parameters::from_config(&config).unwrap();
        assert_eq!((quick.cases().len(), quick.rows), (8, 4096));
        config.summary_only = true;
        let summary = Parameters::from_config(&config).unwrap();
        assert_eq!(summary.cases().len(), 2);
    }

    #[test]
    fn rows_of_a_gather_fit_into_half_the_memory() {
        let config = Config::new(ParameterSet::Smoke, Vec::new());
        let smoke = Parameters::from_config(&config).unwrap();
        assert_eq!(smoke.rows as u64 * 4096 * 2, smoke.sizes.memory_bytes);
    }
}

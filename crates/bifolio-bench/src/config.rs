//! The settings of a run that the user may choose.
//!
//! Filled in by the program, read by each benchmark, which derives its own parameters from it: a
//! set (smoke, quick, full) gives the defaults, and each option overrides one of them.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::harness::cpus;
use crate::run::Rounds;

/// How thorough a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ParameterSet {
    /// Seconds: only shows that the benchmark works; its figures are meaningless.
    Smoke,
    /// Two to three minutes for all benchmarks: figures good enough to compare.
    #[default]
    Quick,
    /// Minutes: for a record.
    Full,
}

/// The series that are measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// Every series.
    #[default]
    All,
    /// Only the kernel's, for a comparison of kernels.
    Kernel,
}

/// The settings that the user asked for.
#[derive(Clone, Debug)]
pub struct Config {
    /// Source of the defaults.
    pub set: ParameterSet,
    /// Time to spend in timed loops, over all series and repetitions.
    pub timed: Option<Duration>,
    /// Numbers of threads to measure with.
    pub threads: Option<Vec<usize>>,
    /// Memory bound of the cache where the file is larger than the cache; by default an eighth of
    /// the file in the benchmarks of misses, a quarter in those of swapping.
    pub memory_bytes: Option<u64>,
    /// Size of the file; by default eight times the memory in the benchmarks of misses, four times
    /// in those of swapping.
    pub size_bytes: Option<u64>,
    /// Measure only what the summary of all benchmarks shows, where a benchmark can tell.
    pub summary_only: bool,
    /// The series that are measured.
    pub target: Target,
    /// Recorded trace that `hit-ratio` replays instead of the generated ones.
    pub trace: Option<PathBuf>,
    /// Directory for files; a temporary directory on a disk when absent.
    pub dir: Option<PathBuf>,
    /// The program that calls [`run_child`](crate::run_child), and its arguments: measurements of a
    /// whole process run in a child.
    pub child_command: Vec<String>,
}

impl Config {
    /// The defaults of `set`, with `child_command` as given.
    pub fn new(set: ParameterSet, child_command: Vec<String>) -> Self {
        Self {
            set,
            timed: None,
            threads: None,
            memory_bytes: None,
            size_bytes: None,
            summary_only: false,
            target: Target::All,
            trace: None,
            dir: None,
            child_command,
        }
    }

    /// Returns the default of the set, of those for smoke, quick and full.
    pub(crate) fn of_set<T>(&self, [smoke, quick, full]: [T; 3]) -> T {
        match self.set {
            ParameterSet::Smoke => smoke,
            ParameterSet::Quick => quick,
            ParameterSet::Full => full,
        }
    }

    /// Returns the seconds to spend in timed loops, or the default of the set, and the repetitions
    /// of the set.
    pub(crate) fn times(&self, of_sets: [(f64, usize); 3]) -> Times {
        let (seconds, repetitions) = self.of_set(of_sets);
        let timed_seconds = self.timed.map_or(seconds, |timed| timed.as_secs_f64());
        Times { timed_seconds, repetitions }
    }

    /// Returns the numbers of threads to measure with: the user's, or 1, 2, 4 to all CPUs.
    /// The one place that decides for all benchmarks.
    ///
    /// # Errors
    /// None was given, or one of them is zero.
    pub fn threads_or_default(&self) -> Result<Vec<usize>> {
        let threads =
            self.threads.clone().unwrap_or_else(|| cpus::thread_counts(cpus::allowed().len()));
        if threads.is_empty() || threads.contains(&0) {
            return Err(Error::Refused("--threads: every number must be at least 1".into()));
        }
        Ok(threads)
    }
}

impl Target {
    /// Returns `true` if the series called `series` is measured: the kernel's are called after it.
    pub(crate) fn measures(self, series: &str) -> bool {
        self == Self::All || series.starts_with("kernel")
    }
}

/// Time and repetitions, as the envelope shows them.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Times {
    /// Time in all trials together.
    pub(crate) timed_seconds: f64,
    /// Repetitions of each trial, at least.
    pub(crate) repetitions: usize,
}

impl Times {
    /// Returns rounds that go on while the time lasts.
    pub(crate) fn rounds(&self) -> Rounds {
        Rounds::within(self.timed_seconds, self.repetitions)
    }

    /// Returns rounds whose trials share the time, by their weights.
    pub(crate) fn shared(&self, weight: u32) -> Rounds {
        let trials = f64::from(weight.max(1)) * self.repetitions as f64;
        let trial = Duration::from_secs_f64(self.timed_seconds).div_f64(trials);
        Rounds::exactly(self.repetitions, trial)
    }
}

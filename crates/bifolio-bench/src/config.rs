//! The settings of a run that the user may choose.
//!
//! Filled in by the program, read by each benchmark, which derives its own parameters from it: a
//! set (smoke, quick, full) gives the defaults, and each option overrides one of them.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::harness::cpus;

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

impl ParameterSet {
    /// Returns the value of this set, of those of smoke, quick and full.
    pub(crate) fn of<T>(self, [smoke, quick, full]: [T; 3]) -> T {
        match self {
            Self::Smoke => smoke,
            Self::Quick => quick,
            Self::Full => full,
        }
    }
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
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Source of the defaults.
    pub set: ParameterSet,
    /// Time to spend in timed loops, over all series and repetitions.
    pub timed: Option<Duration>,
    /// Numbers of threads to measure with.
    pub threads: Option<Vec<usize>>,
    /// Memory bound of the cache where the file is larger than the cache.
    pub memory_bytes: Option<u64>,
    /// Size of the file; a multiple of the memory where the file is larger than the cache.
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
        Self { set, child_command, ..Self::default() }
    }

    /// Returns the numbers of threads to measure with: the user's, or 1, 2, 4 to all CPUs.
    ///
    /// # Errors
    /// None was given, or one of them is zero.
    pub(crate) fn threads_or_default(&self) -> Result<Vec<usize>> {
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

//! The settings of a run that the user may choose.
//!
//! Filled in by the program, read by each benchmark, which derives its own parameters from it: a
//! set (smoke, quick, full) gives the defaults, and each option overrides one of them.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};

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

    /// Returns `true` if the series called `series` is to be measured.
    pub(crate) fn measures(&self, series: &str) -> bool {
        self.target == Target::All || is_of_kernel(series)
    }

    /// The numbers of threads, or 1 and 2.
    ///
    /// # Errors
    /// None was given, or one of them is zero.
    pub fn threads_or_default(&self) -> Result<Vec<usize>> {
        let threads = self.threads.clone().unwrap_or_else(|| vec![1, 2]);
        if threads.is_empty() || threads.contains(&0) {
            return Err(Error::Refused("--threads: every number must be at least 1".into()));
        }
        Ok(threads)
    }
}

/// Returns `true` if the series called `series` is one of the kernel: all of their names say so,
/// and `stress_ng` runs on the kernel alone.
fn is_of_kernel(series: &str) -> bool {
    series == "kernel" || series.starts_with("kernel_") || series == "stress_ng"
}

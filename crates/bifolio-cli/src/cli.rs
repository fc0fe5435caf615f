//! The commands of the program. Parses and validates; does nothing.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use bifolio_bench::{ParameterSet, parse_bytes};
use clap::{Args, Parser, Subcommand, ValueEnum};

/// A user-space page cache over real files: benchmarks, checks, features.
#[derive(Debug, Parser)]
#[command(name = "bifolio", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure the cache side by side with the kernel.
    Bench(BenchOptions),
    /// Read a file through the cache in every way and compare each byte.
    ///
    /// Exit status: 0 equal, 1 different, 2 could not run.
    Check(CheckOptions),
    /// Compare the JSON files of two runs of `bench`, or of two sets of runs.
    ///
    /// A file may hold several runs, one after the other. Exit status: 0 nothing is worse beyond
    /// noise, 1 something is, 2 could not compare.
    Compare(CompareOptions),
    /// Print which features of the kernel are available and in use, and why not.
    Features,
    /// Mount a directory through the cache: runs `bifolio-mount`, which is built separately.
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Mount {
        /// The arguments of `bifolio-mount`; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Show what a cache in another process does now: hits, misses, storage, memory, files.
    Top(TopOptions),
    /// Write manual pages and completions for shells, for `cargo x install`.
    #[command(hide = true)]
    Generate {
        /// An existing directory.
        directory: PathBuf,
    },
    #[command(hide = true)]
    BenchChild {
        /// The task, as JSON.
        request: String,
    },
}

/// Sizes accept 4096, 64M, 512MiB, 1GiB.
#[derive(Args, Debug)]
pub(crate) struct BenchOptions {
    /// The benchmark; all of them when absent.
    pub(crate) name: Option<String>,
    /// List the benchmarks.
    #[arg(long)]
    pub(crate) list: bool,
    /// Print all tables, instead of a summary of one page. So does a benchmark that is named.
    #[arg(long)]
    pub(crate) tables: bool,
    /// Judge the figures that are asked for; exit status 1 if one is missed.
    #[arg(long)]
    pub(crate) check: bool,
    /// How thorough to be.
    #[arg(long, value_enum, default_value = "quick")]
    pub(crate) set: Set,
    /// The series to measure: of the kernel alone, to compare two kernels with `compare`.
    #[arg(long, value_enum, default_value = "all")]
    pub(crate) target: Target,
    /// Write one page with tables and plots to FILE, also after an interrupt.
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Add the reports of a JSON file to the page, such as one of `cargo x engine-bench`; may be
    /// given several times.
    #[arg(long, value_name = "FILE", requires = "report")]
    pub(crate) with: Vec<PathBuf>,
    /// Write one JSON report per line to FILE; `-` is standard output, instead of all other output.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Time in timed loops, over all series and repetitions.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) seconds: Option<Duration>,
    /// Numbers of threads; more threads than CPUs share them.
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub(crate) threads: Option<Vec<usize>>,
    /// Memory bound of the cache where the file is larger than the cache; an eighth of the file
    /// unless given, for `reclaim` a quarter.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) memory: Option<u64>,
    /// Size of the file; for benchmarks of misses eight times the memory unless given, for
    /// `reclaim` four times.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) size: Option<u64>,
    /// Trace for `hit-ratio` to replay: on each line the number of a page of 4096 bytes, or of the
    /// first page and how many follow each other; lines that start with `#` are skipped.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Directory for files; a temporary directory on a disk when absent.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

/// The process must serve its statistics: `bifolio mount` does, others by `bifolio_stats::serve`.
#[derive(Args, Debug)]
pub(crate) struct TopOptions {
    /// The number of a process, a mount point, or the name that the process gave; the only cache
    /// that is served when absent.
    pub(crate) target: Option<String>,
    /// Time between two screens, seconds.
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    pub(crate) interval: Duration,
    /// Show one screen, and end.
    #[arg(long)]
    pub(crate) once: bool,
}

/// Sizes accept 4096, 64M, 512MiB, 1GiB.
#[derive(Args, Debug)]
pub(crate) struct CheckOptions {
    /// The file to check; it is only read.
    pub(crate) file: PathBuf,
    /// Memory bound of the cache.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "64M")]
    pub(crate) memory: u64,
    /// Folio size: a power of two from 4096 to 2M. Mapped, the file has folios of 4096.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "4096")]
    pub(crate) folio: u64,
    /// Seed of the random order; the same seed reads the same way.
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) seed: u64,
}

#[derive(Args, Debug)]
pub(crate) struct CompareOptions {
    /// JSON file of `bench` before the change.
    pub(crate) first: PathBuf,
    /// JSON file of `bench` after the change.
    pub(crate) second: PathBuf,
    /// Changes of less are none, percent.
    #[arg(long, value_name = "PERCENT", value_parser = percent, default_value = "5")]
    pub(crate) at_least: f64,
}

/// How thorough a benchmark is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Set {
    /// Seconds: only shows that it works.
    Smoke,
    /// Two to three minutes for all benchmarks.
    Quick,
    /// Minutes.
    Full,
}

impl From<Set> for ParameterSet {
    fn from(set: Set) -> Self {
        match set {
            Set::Smoke => Self::Smoke,
            Set::Quick => Self::Quick,
            Set::Full => Self::Full,
        }
    }
}

/// The series that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// Every series.
    All,
    /// Only the kernel's.
    Kernel,
}

impl From<Target> for bifolio_bench::Target {
    fn from(target: Target) -> Self {
        match target {
            Target::All => Self::All,
            Target::Kernel => Self::Kernel,
        }
    }
}

const SECONDS_MAX: f64 = 86_400.0;

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is no number of seconds"))?;
    if seconds > 0.0 && seconds <= SECONDS_MAX {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!("must be more than 0 and at most {SECONDS_MAX}"))
    }
}

fn percent(text: &str) -> Result<f64, String> {
    let percent: f64 = text.parse().map_err(|_| format!("`{text}` is no number"))?;
    if (0.0..=1000.0).contains(&percent) { Ok(percent) } else { Err("must be 0 to 1000".into()) }
}

/// Returns clap's message without usage and hints, on one line.
pub(crate) fn one_line(message: &str) -> String {
    let complaint = message.split("\n\nUsage:").next().unwrap_or(message);
    let complaint = complaint.split("\n\nFor more information").next().unwrap_or(complaint);
    let complaint = complaint.strip_prefix("error: ").unwrap_or(complaint);
    let words = complaint.split_whitespace().collect::<Vec<_>>().join(" ");
    format!("{words} (see bifolio --help)")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_missing_argument_is_one_line_that_names_it() {
        let error = Cli::try_parse_from(["bifolio", "check"]).unwrap_err().to_string();
        let line = one_line(&error);
        assert!(line.contains("<FILE>") && !line.contains('\n') && !line.contains("Usage"));
        let error = Cli::try_parse_from(["bifolio", "check", "x", "--memory", "9Q"]).unwrap_err();
        assert!(one_line(&error.to_string()).contains("`q` is no unit"));
    }

    #[test]
    fn a_check_without_a_bound_has_64_mebibytes() {
        let Command::Check(options) =
            Cli::try_parse_from(["bifolio", "check", "x"]).unwrap().command
        else {
            panic!("not check");
        };
        assert_eq!(options.memory, 64 << 20);
    }

    #[test]
    fn lists_and_units_are_understood() {
        let arguments = ["bifolio", "bench", "--threads", "1,2", "--size", "64M", "--seconds", "2"];
        let Command::Bench(options) = Cli::try_parse_from(arguments).unwrap().command else {
            panic!("not bench");
        };
        assert_eq!(options.threads, Some(vec![1, 2]));
        assert_eq!(options.size, Some(64 << 20));
        assert_eq!(options.seconds, Some(Duration::from_secs(2)));
        assert_eq!(options.set, Set::Quick);
        for bad in ["0", "-1", "NaN", "inf", "x"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}

//! tantivy over Bifolio (`bifolio`) and over its `MmapDirectory` (`default`).
//!
//! Both series have the same total memory and read the same files. Each is a child in a control
//! group of its own, which also counts the pages that the kernel caches for it. `bifolio`: most of
//! the memory is the bound of the cache, the rest is for tantivy; `default`: the kernel's page
//! cache has what tantivy leaves.
//!
//! The children keep the index open and alternate, so both are as warm as they get.

mod corpus;
mod data;
mod session;

use std::path::{Path, PathBuf};

use bifolio_bench::{
    Benchmark, Case, Config, Context, Error, Needs, Progress, Ratio, Report, Result, Sizes,
};
use serde_json::json;

use crate::children::serve;
use crate::rounds::{self, Series, failed, memory_bytes, seconds_of};
use session::{Madvise, Opening, Round, Session, Work};

const SERIES: [&str; 2] = ["bifolio", "default"];
const ROUNDS: usize = 5;
/// The index that fits has this part of the memory.
const FITS_PART: u64 = 2;
const LARGE_FACTOR: u64 = 8;
const WORKS: [(&str, Work); 3] =
    [("query", Work::Query), ("term", Work::Term), ("phrase", Work::Phrase)];

/// The text that is indexed, and the use of the memory.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Setup {
    /// Percent of the memory for the cache; tantivy has the rest.
    #[arg(long, default_value = "75")]
    cache_percent: u64,
    /// Advice of `MmapDirectory` to the kernel.
    #[arg(long, value_enum, default_value = "normal")]
    madvise: Madvise,
    /// Folder with text to index, repeatable; without it documentation and source code that
    /// machines with Rust have.
    #[arg(long)]
    text: Vec<PathBuf>,
    /// Keeps the indexes in this folder, and uses those that it has.
    #[arg(long)]
    keep: Option<PathBuf>,
}

/// The benchmark.
#[derive(Debug)]
pub(crate) struct TantivyBenchmark {
    setup: Setup,
}

/// A size of the index.
#[derive(Clone, Copy, Debug)]
struct Data {
    name: &'static str,
    size_bytes: u64,
}

impl TantivyBenchmark {
    pub(crate) fn new(setup: Setup) -> Self {
        Self { setup }
    }

    /// Measures all works on one index.
    fn measure(
        &self,
        context: &Context<'_>,
        data: &Data,
        report: &mut Report,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let folder = self.setup.keep.as_deref().unwrap_or(context.workspace.path());
        let folder = folder.join(data.name);
        progress.say(&format!("{}: make the index", data.name));
        let size_bytes = data::build(&folder, &self.texts(), data.size_bytes).map_err(failed)?;
        progress.say(&format!("{}: an index of {} MiB", data.name, size_bytes >> 20));
        report.notes.push(format!("{}: an index of {} MiB", data.name, size_bytes >> 20));
        let mut series = self.start(context, &folder, size_bytes, report)?;
        for (name, work) in WORKS {
            let case = Case::new().with("work", name).with("data", data.name);
            let task = |round| self.round(context, work, round);
            rounds::measure(&mut series, ROUNDS, case, task, report)?;
        }
        drop(series);
        if self.setup.keep.is_none() {
            std::fs::remove_dir_all(&folder).map_err(|error| failed(error.into()))?;
        }
        Ok(())
    }

    fn texts(&self) -> Vec<PathBuf> {
        if self.setup.text.is_empty() { corpus::default_folders() } else { self.setup.text.clone() }
    }

    fn round(&self, context: &Context<'_>, work: Work, round: usize) -> Round {
        let seconds = seconds_of(context.config, round);
        Round { work, seconds, seed: round as u64 * 16 + work as u64 }
    }

    /// Starts a child for each series.
    fn start(
        &self,
        context: &Context<'_>,
        folder: &Path,
        size_bytes: u64,
        report: &mut Report,
    ) -> Result<Vec<Series>> {
        let memory_bytes = memory_bytes(context.config);
        let cache_bytes = memory_bytes * self.setup.cache_percent / 100;
        let sizes = Sizes { size_bytes, memory_bytes };
        let command = &context.config.child_command;
        let mut series = Vec::new();
        for name in SERIES {
            let opening = |group| Opening {
                folder: folder.to_owned(),
                cache_bytes: (name == "bifolio").then_some(cache_bytes),
                madvise: self.setup.madvise,
                group,
            };
            series.extend(Series::start(name, command, sizes, report, opening)?);
        }
        Ok(series)
    }
}

impl Benchmark for TantivyBenchmark {
    fn name(&self) -> &'static str {
        "tantivy"
    }

    fn description(&self) -> &'static str {
        "tantivy over the cache and over its MmapDirectory, with the same total memory"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        if !(10..=90).contains(&self.setup.cache_percent) {
            return Err(Error::Refused("the cache can have 10 to 90 percent of the memory".into()));
        }
        let memory_bytes = memory_bytes(config);
        let disk_bytes = memory_bytes.saturating_mul(LARGE_FACTOR * 2);
        Ok(Needs { disk_bytes, memory_bytes: memory_bytes.saturating_mul(2) + (1 << 30) })
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let memory_bytes = memory_bytes(context.config);
        let config = json!({
            "memory_bytes": memory_bytes,
            "rounds": ROUNDS,
            "cache_percent": self.setup.cache_percent,
            "madvise": self.setup.madvise,
            "text": self.texts(),
        });
        let mut report = Report::new("tantivy", &context.host, config);
        report.ratios = vec![Ratio::new(SERIES[0], SERIES[1])];
        report.shown_counts = [
            "p50_ns",
            "p99_ns",
            "p999_ns",
            "max_ns",
            "read_bytes_per_op",
            "group_peak_mib",
            "resident_peak_mib",
        ]
        .map(Into::into)
        .to_vec();
        let fits = Data { name: "fits", size_bytes: memory_bytes / FITS_PART };
        let large = Data { name: "8x", size_bytes: memory_bytes * LARGE_FACTOR };
        for data in [fits, large] {
            self.measure(context, &data, &mut report, progress)?;
        }
        Ok(report)
    }
}

/// The child's side.
pub(crate) fn run_child(task: &str) -> anyhow::Result<()> {
    let mut session = Session::open(serde_json::from_str(task)?)?;
    serve(|round| session.run_round(round))
}

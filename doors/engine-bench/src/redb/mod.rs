//! redb over Bifolio (`bifolio`) and over its own file backend (`default`).
//!
//! Both series have the same total memory. Each is a child in a control group of its own, which
//! also counts the pages that the kernel caches for it. `bifolio`: redb's own cache, and the bound
//! of the cache below it; `default`: redb's own cache, and the kernel's page cache in the rest.
//! [`Split`] sets the part that redb gets; `docs/engines.md` compares splits.

mod data;
mod session;

use std::path::PathBuf;

use bifolio_bench::{
    Benchmark, Case, Config, Context, Error, Needs, ParameterSet, Progress, Ratio, Report, Result,
    Sizes,
};
use serde_json::json;

use crate::children::serve;
use crate::rounds::{self, Series, failed, memory_bytes, seconds_of};
use crate::values;
use session::{Opening, Round, Session, Work};

const SERIES: [&str; 2] = ["bifolio", "default"];
const ROUNDS: usize = 5;
/// The file that fits has this part of the memory, because it grows.
const FITS_PART: u64 = 4;
const LARGE_FACTOR: u64 = 8;
const COMMITS: u64 = 20;
const WORKS: [(&str, Work); 5] = [
    ("point", Work::Point),
    ("range", Work::Range),
    ("scan", Work::Scan),
    ("insert", Work::Insert),
    ("update", Work::Update),
];

/// How the memory is used: the part that redb's own cache gets, in percent, and readahead.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Split {
    /// Percent of the memory for redb's cache over Bifolio, if the data fits.
    #[arg(long, default_value = "50")]
    bifolio_fits: u64,
    /// Percent of the memory for redb's cache over Bifolio, for data of 8 x the memory.
    #[arg(long, default_value = "12")]
    bifolio_8x: u64,
    /// Percent of the memory for redb's cache over its file backend, if the data fits.
    #[arg(long, default_value = "50")]
    default_fits: u64,
    /// Percent of the memory for redb's cache over its file backend, for data of 8 x the memory.
    #[arg(long, default_value = "12")]
    default_8x: u64,
    /// Largest readahead of the cache, such as `128KiB`; its default without it.
    #[arg(long, value_parser = bifolio_bench::parse_bytes)]
    readahead: Option<u64>,
}

impl Split {
    fn percent(&self, data: &Data, series: &str) -> u64 {
        match (data.name, series) {
            ("fits", "bifolio") => self.bifolio_fits,
            ("fits", _) => self.default_fits,
            (_, "bifolio") => self.bifolio_8x,
            _ => self.default_8x,
        }
    }
}

/// The benchmark.
#[derive(Debug)]
pub(crate) struct RedbBenchmark {
    split: Split,
}

/// A size of the table.
#[derive(Clone, Copy, Debug)]
struct Data {
    name: &'static str,
    size_bytes: u64,
}

impl RedbBenchmark {
    pub(crate) fn new(split: Split) -> Self {
        Self { split }
    }

    /// Measures all works on one size of data.
    fn measure(
        &self,
        context: &Context<'_>,
        data: &Data,
        report: &mut Report,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let folder = context.workspace.path();
        let rows = data::rows(data.size_bytes);
        progress.say(&format!("{}: {rows} rows", data.name));
        let paths = SERIES.map(|series| folder.join(format!("{}-{series}.redb", data.name)));
        data::build(&paths[0], rows).map_err(failed)?;
        values::copy(&paths[0], &paths[1]).map_err(failed)?;
        let mut series = self.start(context, data, &paths, rows, report)?;
        for (name, work) in WORKS {
            let case = Case::new().with("work", name).with("data", data.name);
            let task = |round| self.round(context, work, round);
            rounds::measure(&mut series, ROUNDS, case, task, report)?;
        }
        drop(series);
        paths.iter().try_for_each(std::fs::remove_file).map_err(|error| failed(error.into()))
    }

    fn round(&self, context: &Context<'_>, work: Work, round: usize) -> Round {
        let is_smoke = context.config.set == ParameterSet::Smoke;
        let commits = if is_smoke { 2 } else { COMMITS };
        let seconds = seconds_of(context.config, round);
        Round { work, seconds, commits, seed: round as u64 * 16 + work as u64 }
    }

    /// Starts a child for each series. Without a control group there is only ours.
    fn start(
        &self,
        context: &Context<'_>,
        data: &Data,
        paths: &[PathBuf; 2],
        rows: u64,
        report: &mut Report,
    ) -> Result<Vec<Series>> {
        let memory_bytes = memory_bytes(context.config);
        let mut series = Vec::new();
        let sizes = Sizes { size_bytes: data.size_bytes, memory_bytes };
        for (name, path) in SERIES.into_iter().zip(paths) {
            let redb_bytes = memory_bytes * self.split.percent(data, name) / 100;
            let opening = |group| Opening {
                path: path.clone(),
                rows,
                redb_bytes: redb_bytes as usize,
                cache_bytes: (name == "bifolio").then_some(memory_bytes - redb_bytes),
                readahead_bytes: self.split.readahead,
                group,
            };
            series.extend(Series::start(
                name,
                &context.config.child_command,
                sizes,
                report,
                opening,
            )?);
        }
        Ok(series)
    }
}

impl Benchmark for RedbBenchmark {
    fn name(&self) -> &'static str {
        "redb"
    }

    fn description(&self) -> &'static str {
        "redb over the cache and over its own file backend, with the same total memory"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        let split = &self.split;
        let percents = [split.bifolio_fits, split.bifolio_8x, split.default_fits, split.default_8x];
        if percents.iter().any(|percent| *percent > 95) {
            return Err(Error::Refused("at most 95 percent of the memory can be redb's".into()));
        }
        let memory_bytes = memory_bytes(config);
        let disk_bytes = memory_bytes.saturating_mul(LARGE_FACTOR * 3);
        Ok(Needs { disk_bytes, memory_bytes: memory_bytes.saturating_mul(2) + (512 << 20) })
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let memory_bytes = memory_bytes(context.config);
        let split = &self.split;
        let config = json!({
            "memory_bytes": memory_bytes,
            "rounds": ROUNDS,
            "readahead_max": split.readahead,
            "redb_percent": {
                "bifolio_fits": split.bifolio_fits, "bifolio_8x": split.bifolio_8x,
                "default_fits": split.default_fits, "default_8x": split.default_8x,
            },
        });
        let mut report = Report::new("redb", &context.host, config);
        report.ratios = vec![Ratio::new(SERIES[0], SERIES[1])];
        report.shown_counts = ["read_bytes_per_op", "written_bytes_per_op", "group_peak_mib"]
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

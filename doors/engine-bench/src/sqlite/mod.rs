//! SQLite over Bifolio (`bifolio`), also with the database kept from other processes
//! (`bifolio_exclusive`), over its own VFS (`default`), and over that with mapped pages
//! (`default_mmap`).
//!
//! All series have the same total memory. Each is a child in a control group of its own, which
//! also counts the pages that the kernel caches for it. SQLite's own cache has its default size in
//! all of them; the first two have the rest of the memory as the bound of their cache, the others
//! have the kernel's page cache in it. All use WAL. The works of one table use
//! `locking_mode=exclusive`, so that no series pays for locks; pools and short connections do.

mod data;
mod own;
mod register;
mod session;

use std::path::PathBuf;

use bifolio_bench::{
    Benchmark, Case, Config, Context, Error, Needs, Progress, Ratio, Report, Result, Sizes,
};
use serde_json::json;

use crate::children::serve;
use crate::rounds::{
    self, MEMORY_BYTES, MEMORY_BYTES_SMOKE, Series, failed, memory_bytes, seconds_of,
};
use crate::values;
use session::{Opening, Round, Session, Storage, Work};

const SERIES: [(&str, Storage); 4] = [
    ("bifolio", Storage::Bifolio),
    ("bifolio_exclusive", Storage::BifolioExclusive),
    ("default", Storage::System),
    ("default_mmap", Storage::SystemMapped),
];
const ROUNDS: usize = 5;
/// The file that fits has this part of the memory: the log needs room too.
const FITS_PART: u64 = 2;
const LARGE_FACTOR: u64 = 8;
/// Default size of SQLite's own cache.
const SQLITE_BYTES: u64 = 2000 << 10;
/// The log between two checkpoints, which is in the kernel's page cache in all series.
const LOG_BYTES_MAX: u64 = 4 << 20;
/// Measured rounds of works without a limit of time.
const LONG_ROUNDS: usize = 3;
const WORKS: [(&str, Work); 9] = [
    ("point", Work::Point),
    ("point_skewed", Work::PointSkewed),
    ("range", Work::Range),
    ("scan", Work::Scan),
    ("update", Work::Update),
    ("import", Work::Import),
    ("index", Work::Index),
    ("pool", Work::Pool),
    ("open", Work::Open),
];

/// The part that is measured; everything by default.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Selection {
    /// Only these kinds of operations.
    #[arg(long, value_parser = WORKS.map(|(name, _)| name), value_delimiter = ',')]
    work: Vec<String>,
    /// Only these sizes of data.
    #[arg(long, value_parser = ["fits", "8x"], value_delimiter = ',')]
    data: Vec<String>,
    /// Largest readahead of the cache, such as `128KiB`; the default of the VFS without it.
    #[arg(long)]
    readahead: Option<String>,
    /// When SQLite syncs its log: with every commit, or with checkpoints only.
    #[arg(long, value_parser = ["full", "normal"], default_value = "full")]
    synchronous: String,
    /// Journal of imports and indexes.
    #[arg(long, value_parser = ["wal", "delete"], default_value = "wal")]
    journal: String,
}

fn is_selected(names: &[String], name: &str) -> bool {
    names.is_empty() || names.iter().any(|selected| selected == name)
}

/// The benchmark.
#[derive(Debug)]
pub(crate) struct SqliteBenchmark {
    selection: Selection,
}

/// A size of the table.
#[derive(Clone, Copy, Debug)]
struct Data {
    name: &'static str,
    size_bytes: u64,
}

impl Data {
    /// Number of small databases that together are about as large.
    fn small_databases(&self) -> u64 {
        (self.size_bytes / data::SMALL_BYTES).max(1)
    }
}

impl SqliteBenchmark {
    pub(crate) fn new(selection: Selection) -> Self {
        Self { selection }
    }

    /// Measures the selected works on one size of data.
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
        let paths = SERIES.map(|(series, _)| folder.join(format!("{}-{series}.db", data.name)));
        data::build(&paths[0], rows).map_err(failed)?;
        for path in &paths[1..] {
            values::copy(&paths[0], path).map_err(failed)?;
        }
        let works = WORKS.iter().filter(|(name, _)| is_selected(&self.selection.work, name));
        let (own, table): (Vec<_>, Vec<_>) = works.partition(|(_, work)| work.is_own());
        if !table.is_empty() {
            let mut series = self.start(context, data, &paths, 1, report)?;
            for (name, work) in table {
                measure_work(context, data, (name, work), &mut series, report)?;
            }
        }
        for (name, work) in own {
            progress.say(&format!("{}: {name}", data.name));
            let is_many = work == Work::Open;
            if is_many {
                data::build_small(&paths, data.small_databases()).map_err(failed)?;
            }
            let connections = if work == Work::Pool { own::READERS + 1 } else { 1 };
            let mut series = self.start(context, data, &paths, connections, report)?;
            measure_work(context, data, (name, work), &mut series, report)?;
            drop(series);
            if is_many {
                data::remove_small(&paths, data.small_databases())
                    .map_err(|error| failed(error.into()))?;
            }
        }
        paths.iter().try_for_each(std::fs::remove_file).map_err(|error| failed(error.into()))
    }

    /// Starts a child for each series, whose caches are as large as `connections` of SQLite leave.
    /// Without a control group there is only ours.
    fn start(
        &self,
        context: &Context<'_>,
        data: &Data,
        paths: &[PathBuf; SERIES.len()],
        connections: u64,
        report: &mut Report,
    ) -> Result<Vec<Series>> {
        let memory_bytes = memory_bytes(context.config);
        let sizes = Sizes { size_bytes: data.size_bytes, memory_bytes };
        let cache_bytes = |storage| {
            let of_kernel = match storage {
                // What a checkpoint writes is in the kernel's page cache, too, until it is synced.
                Storage::Bifolio => 2 * log_bytes(memory_bytes),
                _ => log_bytes(memory_bytes),
            };
            let others_bytes = SQLITE_BYTES * connections + of_kernel;
            let left_bytes = memory_bytes.saturating_sub(others_bytes).max(memory_bytes / 4);
            // The VFS refuses a bound that leaves its group less than 8 MiB.
            if memory_bytes < MEMORY_BYTES { left_bytes.min(memory_bytes / 2) } else { left_bytes }
        };
        let mut series = Vec::new();
        for ((name, storage), path) in SERIES.into_iter().zip(paths) {
            let cache_bytes = cache_bytes(storage);
            let opening = |group| Opening {
                path: path.clone(),
                rows: data::rows(data.size_bytes),
                databases: data.small_databases(),
                storage,
                sqlite_bytes: SQLITE_BYTES,
                cache_bytes,
                readahead: self.selection.readahead.clone(),
                synchronous: self.selection.synchronous.clone(),
                journal: self.selection.journal.clone(),
                group,
            };
            let mut command = vec!["env".to_owned(), format!("BIFOLIO_MEMORY={cache_bytes}")];
            command.extend_from_slice(&context.config.child_command);
            series.extend(Series::start(name, &command, sizes, report, opening)?);
        }
        Ok(series)
    }
}

/// Measures one work of all series.
fn measure_work(
    context: &Context<'_>,
    data: &Data,
    (name, work): (&str, Work),
    series: &mut [Series],
    report: &mut Report,
) -> Result<()> {
    let case = Case::new().with("work", name).with("data", data.name);
    let is_long = matches!(work, Work::Import | Work::Index);
    let rounds = if is_long { LONG_ROUNDS } else { ROUNDS };
    let task = |round| Round {
        work,
        seconds: seconds_of(context.config, round),
        warms_up: round == 0,
        rows: data::rows(data.size_bytes) / if round == 0 { 8 } else { 1 },
        seed: round as u64 * 16 + work as u64,
    };
    rounds::measure(series, rounds, case, task, report)
}

impl Benchmark for SqliteBenchmark {
    fn name(&self) -> &'static str {
        "sqlite"
    }

    fn description(&self) -> &'static str {
        "SQLite over the cache and over its own VFS, with the same total memory"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        let memory_bytes = memory_bytes(config);
        if memory_bytes < MEMORY_BYTES_SMOKE {
            return Err(Error::Refused("SQLite and a cache need at least 16 MiB".into()));
        }
        let disk_bytes = memory_bytes.saturating_mul(LARGE_FACTOR * (SERIES.len() as u64 + 1));
        Ok(Needs { disk_bytes, memory_bytes: memory_bytes.saturating_mul(3) + (512 << 20) })
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let memory_bytes = memory_bytes(context.config);
        let config = json!({
            "memory_bytes": memory_bytes,
            "rounds": ROUNDS,
            "sqlite_bytes": SQLITE_BYTES,
            "log_bytes": log_bytes(memory_bytes),
            "sqlite_version": rusqlite::version(),
            "readahead": self.selection.readahead,
            "synchronous": self.selection.synchronous,
            "journal": self.selection.journal,
        });
        let mut report = Report::new("sqlite", &context.host, config);
        let ours = [SERIES[0].0, SERIES[1].0];
        let others = [SERIES[2].0, SERIES[3].0];
        report.ratios =
            others.into_iter().flat_map(|other| ours.map(|ours| Ratio::new(ours, other))).collect();
        report.shown_counts = ["read_bytes_per_op", "written_bytes_per_op", "group_peak_mib"]
            .map(Into::into)
            .to_vec();
        let fits = Data { name: "fits", size_bytes: memory_bytes / FITS_PART };
        let large = Data { name: "8x", size_bytes: memory_bytes * LARGE_FACTOR };
        for data in [fits, large] {
            if is_selected(&self.selection.data, data.name) {
                self.measure(context, &data, &mut report, progress)?;
            }
        }
        Ok(report)
    }
}

/// Returns the part of the memory that is left for the log, bytes.
fn log_bytes(memory_bytes: u64) -> u64 {
    LOG_BYTES_MAX.min(memory_bytes / 16)
}

/// The child's side.
pub(crate) fn run_child(task: &str) -> anyhow::Result<()> {
    let mut session = Session::open(serde_json::from_str(task)?)?;
    serve(|round| session.run_round(round))
}

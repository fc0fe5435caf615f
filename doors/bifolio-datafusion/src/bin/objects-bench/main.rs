//! `cargo x engine-bench objects`: queries of DataFusion over a slow object store, by the engine
//! alone, through Bifolio, and through foyer, a hybrid cache of the registry.
//!
//! The store answers each request after 20 ms and sends 100 MiB/s. Each series is a process of its
//! own: an empty cache, the queries twice, random reads of 64 KiB and of 8 KiB, reads of a few parts
//! again and again, a restart of the cache over its tier with random reads, two seconds of idleness,
//! and the queries over the tier of another process, which was killed in the middle of them. The
//! series take turns. All caches have a quarter of the data as memory, and a disk tier with room for
//! all of it. By default foyer reads its tier through the kernel's page cache, which is memory
//! besides; the series `foyer-direct` does not.
//!
//! `--reads` leaves out the queries: the first reads then find an empty cache.
//!
//! The report is the envelope of `bifolio bench`.

mod foyer_store;
mod killed;
mod queries;
mod remote;
mod series;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use bifolio_bench::{
    Benchmark, Case, Config, Counts, Error, Lines, Needs, ParameterSet, Progress, Ratio, Report,
    Row, clean_on_signals, deliver,
};
use bifolio_report::statistics::median;
use clap::Parser;
use object_store::local::LocalFileSystem;
use serde_json::json;

use queries::create_tables;
use series::{
    Cost, Kind, MEMORY_PART, READERS, READS, RUNS, Series, Settings, TABLES, Turn, disk_bytes,
    measure,
};

/// More than a row of `lineitem` and a quarter of a row of `orders` take in a file.
const ROW_BYTES_MAX: u64 = 100;

const SERIES: [&str; 4] = ["alone", "bifolio", "foyer", "foyer-direct"];
/// Counts that tables show.
const SHOWN: [&str; 5] =
    ["requests", "received_mib", "memory_percent", "disk_percent", "idle_cpu_percent"];

#[derive(Debug, Parser)]
struct Arguments {
    /// Writes the envelope as JSON to this file, or to standard output (`-`).
    #[arg(long)]
    json: Option<PathBuf>,
    /// Files of the larger table.
    #[arg(long, default_value_t = 8)]
    files: u64,
    /// Rows of each of them.
    #[arg(long, default_value_t = 250_000)]
    rows: u64,
    /// Turns of each series.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    turns: u64,
    /// Directory for the tables and the disk tiers.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Small tables and two turns: only checks that everything runs.
    #[arg(long)]
    smoke: bool,
    /// Runs one series, over tables that exist; used by the benchmark itself.
    #[arg(long, hide = true, requires = "directory")]
    series: Option<Series>,
    #[arg(long, hide = true)]
    directory: Option<PathBuf>,
    /// Runs the queries over this tier until the process is killed.
    #[arg(long, hide = true, requires = "series")]
    tier: Option<PathBuf>,
    #[command(flatten)]
    settings: Settings,
}

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    if arguments.smoke {
        // Four times the least memory.
        (arguments.files, arguments.rows, arguments.turns) = (2, 160_000, 2);
    }
    if let (Some(series), Some(directory)) = (arguments.series, &arguments.directory) {
        let settings = arguments.settings;
        if let Some(tier) = &arguments.tier {
            return runtime()?.block_on(killed::work(series, settings, directory, tier));
        }
        let turn = runtime()?.block_on(measure(series, settings, directory))?;
        println!("{}", serde_json::to_string(&turn)?);
        return Ok(());
    }
    clean_on_signals(|| {})?;
    let set = if arguments.smoke { ParameterSet::Smoke } else { ParameterSet::Quick };
    let mut config = Config::new(set, Vec::new());
    config.dir.clone_from(&arguments.dir);
    let report = bifolio_bench::run(&ObjectsBenchmark(&arguments), &config, &mut Lines)?;
    Ok(deliver(&report, arguments.json.as_deref(), table)?)
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

#[derive(Debug)]
struct ObjectsBenchmark<'a>(&'a Arguments);

impl Benchmark for ObjectsBenchmark<'_> {
    fn name(&self) -> &'static str {
        "objects"
    }

    fn description(&self) -> &'static str {
        "queries of DataFusion over a slow object store: alone, through the cache, through foyer"
    }

    fn needs(&self, _config: &Config) -> bifolio_bench::Result<Needs> {
        let data_bytes = self.0.files.saturating_mul(self.0.rows).saturating_mul(ROW_BYTES_MAX);
        let disk_bytes = data_bytes.saturating_add(disk_bytes(data_bytes));
        // A file is put together in memory; the engine and a cache.
        Ok(Needs { disk_bytes, memory_bytes: data_bytes / MEMORY_PART + (1 << 30) })
    }

    fn run(
        &self,
        context: &bifolio_bench::Context<'_>,
        progress: &mut dyn Progress,
    ) -> bifolio_bench::Result<Report> {
        let arguments = self.0;
        let directory = context.workspace.path();
        let turns = turns(arguments, directory, progress);
        let turns = turns.map_err(|error| Error::Child(format!("{error:#}")))?;
        let first = &turns[0][0];
        let config = json!({
            "data_bytes": first.data_bytes,
            "memory_bytes": first.memory_bytes,
            "files": arguments.files,
            "rows": arguments.rows,
            "turns": arguments.turns,
            "store_latency_ms": remote::LATENCY.as_millis() as u64,
            "store_bytes_per_second": remote::BYTES_PER_SECOND,
            "queries": queries::COUNT,
            "reads": READS,
            "readers": READERS,
            "settings": arguments.settings.arguments(),
        });
        let mut report = Report::new("objects", &context.host, config);
        report.rows = rows(&turns);
        report.verified_bytes = turns.iter().flatten().map(|turn| turn.verified_bytes).sum();
        report.ratios =
            ["alone", "foyer", "foyer-direct"].map(|it| Ratio::new("bifolio", it)).into();
        report.shown_counts = SHOWN.map(Into::into).into();
        let note = "foyer reads its tier through the kernel's page cache, which is memory besides; \
                    foyer-direct does not.";
        report.notes.push(note.to_owned());
        Ok(report)
    }
}

/// Returns the rows of the report: the runs of all queries and the reads, with what each cost; the
/// processor time of each; and the size and the idleness of the process.
fn rows(turns: &[Vec<Turn>; SERIES.len()]) -> Vec<Row> {
    let factor = turns[0][0].data_bytes as f64 / turns[0][0].memory_bytes as f64;
    let data = if factor > 1.0 { format!("{factor:.0}x") } else { "fits".to_owned() };
    let row = |case: Case, unit, value: Of<'_>, counts: &[(&str, Of<'_>)]| {
        let mut row = Row::new(case.with("data", &*data), unit);
        for (series, turns) in SERIES.into_iter().zip(turns) {
            let all = |of: Of<'_>| turns.iter().map(of).collect::<Vec<f64>>();
            let count = |(name, of): &(&str, Of<'_>)| ((*name).to_owned(), median(&all(*of)));
            row.add(series, all(value), Counts::from_iter(counts.iter().map(count)));
        }
        row
    };
    let work = |name: &str| Case::new().with("work", name);
    let (mut rows, mut processor) = (Vec::new(), Vec::new());
    let mut costs = |case: Case, unit, value: Of<'_>, cost: &dyn Fn(&Turn) -> &Cost| {
        let requests = |turn: &Turn| cost(turn).requests as f64;
        let received = |turn: &Turn| mebibytes(cost(turn).received_bytes);
        let (memory, disk) =
            (|turn: &Turn| cost(turn).percent(0), |turn: &Turn| cost(turn).percent(1));
        let counts: [(&str, Of<'_>); 4] = [
            ("requests", &requests),
            ("received_mib", &received),
            ("memory_percent", &memory),
            ("disk_percent", &disk),
        ];
        processor.push(row(
            work(&case.text("work")),
            "CPU s",
            &|it: &Turn| cost(it).cpu_seconds,
            &[],
        ));
        row(case, unit, value, &counts)
    };
    let runs = turns[0][0].runs.len();
    for (number, name) in RUNS.into_iter().enumerate().take(runs) {
        let value = |turn: &Turn| queries::COUNT as f64 / turn.runs[number].seconds;
        rows.push(costs(work(name), "queries/s", &value, &|turn| &turn.runs[number].cost));
    }
    for (number, kind) in Kind::ALL.into_iter().enumerate() {
        let p50 = |turn: &Turn| turn.reads[number].p50_ns as f64;
        let p99 = |turn: &Turn| turn.reads[number].p99_ns as f64;
        let p999 = |turn: &Turn| turn.reads[number].p999_ns as f64;
        let at = |percentile: serde_json::Value| work(kind.name()).with("percentile", percentile);
        rows.push(costs(at(50.into()), "ns/read", &p50, &|turn| &turn.reads[number].cost));
        rows.push(row(at(99.into()), "ns/read", &p99, &[]));
        rows.push(row(at(99.9.into()), "ns/read", &p999, &[]));
    }
    rows.extend(processor);
    let resident = |turn: &Turn| mebibytes(turn.resident_bytes_max);
    let idle: [(&str, Of<'_>); 1] = [("idle_cpu_percent", &|turn| turn.idle_cpu_percent)];
    rows.push(row(work("resident"), "MiB", &resident, &idle));
    rows
}

/// A figure of a turn.
type Of<'a> = &'a dyn Fn(&Turn) -> f64;

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Creates the tables, and runs each turn of each series in a process of its own. Which series is
/// first alternates. Returns the turns of each series.
fn turns(
    arguments: &Arguments,
    directory: &Path,
    progress: &mut dyn Progress,
) -> Result<[Vec<Turn>; SERIES.len()]> {
    let tables = directory.join(TABLES);
    fs::create_dir(&tables)?;
    let store = LocalFileSystem::new_with_prefix(&tables)?;
    runtime()?.block_on(create_tables(&store, arguments.files, arguments.rows))?;
    let mut turns: [Vec<Turn>; SERIES.len()] = Default::default();
    let mut answers: Option<Vec<String>> = None;
    for turn in 0..arguments.turns {
        for place in 0..SERIES.len() {
            let place = if turn % 2 == 0 { place } else { SERIES.len() - 1 - place };
            let series = SERIES[place];
            progress.say(&format!("turn {} of {}: {series}", turn + 1, arguments.turns));
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["--series", series, "--directory"]).arg(directory);
            command.args(arguments.settings.arguments());
            let output = command.stderr(Stdio::inherit()).output()?;
            ensure!(output.status.success(), "the series {series} failed");
            let mut turn: Turn = serde_json::from_slice(&output.stdout)?;
            let found = std::mem::take(&mut turn.answers);
            let expected = answers.get_or_insert_with(|| found.clone());
            ensure!(found == *expected, "the answers of {series} differ from those before");
            turns[place].push(turn);
        }
    }
    Ok(turns)
}

/// Returns the report as a table, a line for each row, and one below it for what it cost.
fn table(report: &Report) -> String {
    let of = |name: &str| report.config[name].as_u64().unwrap_or(0) >> 20;
    let (data, memory) = (of("data_bytes"), of("memory_bytes"));
    let mut text = format!("{data} MiB of data, caches of {memory} MiB\n{:<26}", "");
    SERIES.iter().for_each(|series| text.push_str(&format!("{series:>14}")));
    text.push('\n');
    for row in &report.rows {
        let (unit, divisor) = match &*row.unit {
            "queries/s" => ("s", None),
            "ns/read" => ("us", Some(1000.0)),
            unit => (unit, Some(1.0)),
        };
        let at = row.case.number("percentile").map_or(String::new(), |at| format!(", p{at}"));
        text.push_str(&format!("{:<26}", format!("{}{at}, {unit}", row.case.text("work"))));
        for series in SERIES {
            let value = row.series[series];
            let value = divisor.map_or(queries::COUNT as f64 / value, |divisor| value / divisor);
            text.push_str(&format!("{value:>14.2}"));
        }
        text.push('\n');
        for name in SHOWN {
            if row.count(SERIES[0], name).is_none() {
                continue;
            }
            text.push_str(&format!("    {name:<22}"));
            for series in SERIES {
                text.push_str(&format!("{:>14.2}", row.count(series, name).unwrap_or(0.0)));
            }
            text.push('\n');
        }
    }
    text
}

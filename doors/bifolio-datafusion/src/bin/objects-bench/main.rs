//! `cargo x engine-bench objects`: queries of DataFusion over a slow object store, by the engine
//! alone, through Bifolio, and through foyer, a hybrid cache of the registry.
//!
//! The store answers each request after 20 ms and sends 100 MiB/s. Each series is a process of its
//! own: an empty cache, the queries twice, random reads of 64 KiB, and two seconds of idleness. The
//! series take turns. All caches have a quarter of the data as memory, and a disk tier with room
//! for all of it. By default foyer reads its tier through the kernel's page cache, which is memory
//! besides; the series `foyer-direct` does not.
//!
//! The report is the envelope of `bifolio bench`.

mod foyer_store;
mod remote;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bifolio::Cache;
use bifolio_bench::{
    Benchmark, Case, Config, Counts, Error, Lines, Needs, ParameterSet, Progress, Ratio, Report,
    Row, clean_on_signals, deliver,
};
use bifolio_datafusion::queries::{QUERIES, TABLES_URL, answer, register_tables};
use bifolio_datafusion::tables;
use bifolio_object_store::CachedStore;
use bifolio_report::statistics::median;
use clap::{Parser, ValueEnum};
use datafusion::prelude::SessionContext;
use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::{ObjectStore, ObjectStoreExt};
use serde::{Deserialize, Serialize};
use serde_json::json;
use url::Url;

use foyer_store::FoyerStore;
use remote::Remote;

/// Random reads, and their length.
const READS: usize = 1000;
const READ_BYTES: u64 = 64 << 10;
/// Reads under way at a time.
const READERS: usize = 8;
const IDLE: Duration = Duration::from_secs(2);
/// The part of the data that caches have as memory, which is at least [`MEMORY_BYTES_MIN`].
const MEMORY_PART: u64 = 4;
const MEMORY_BYTES_MIN: u64 = 4 << 20;
/// More than a row of `lineitem` and a quarter of a row of `orders` take in a file.
const ROW_BYTES_MAX: u64 = 100;

const SERIES: [&str; 4] = ["alone", "bifolio", "foyer", "foyer-direct"];

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Series {
    Alone,
    Bifolio,
    Foyer,
    FoyerDirect,
}

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
}

/// The cost of one run of all queries.
#[derive(Debug, Serialize, Deserialize)]
struct Run {
    seconds: f64,
    requests: u64,
    received_bytes: u64,
}

impl Run {
    fn queries_per_second(&self) -> f64 {
        QUERIES.len() as f64 / self.seconds
    }
}

/// The results of one turn of a series.
#[derive(Debug, Serialize, Deserialize)]
struct Turn {
    data_bytes: u64,
    memory_bytes: u64,
    runs: [Run; 2],
    range_p50_ns: u64,
    range_p99_ns: u64,
    verified_bytes: u64,
    /// Largest resident size of the process.
    resident_bytes_max: u64,
    idle_cpu_percent: f64,
    answers: Vec<String>,
}

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    if arguments.smoke {
        // Four times the least memory.
        (arguments.files, arguments.rows, arguments.turns) = (2, 160_000, 2);
    }
    if let (Some(series), Some(directory)) = (arguments.series, &arguments.directory) {
        let turn = runtime()?.block_on(measure(series, directory))?;
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
            "reads": READS,
            "read_bytes": READ_BYTES,
            "readers": READERS,
        });
        let mut report = Report::new("objects", &context.host, config);
        report.rows = rows(&turns);
        report.verified_bytes = turns.iter().flatten().map(|turn| turn.verified_bytes).sum();
        report.ratios =
            ["alone", "foyer", "foyer-direct"].map(|it| Ratio::new("bifolio", it)).into();
        let shown = ["requests", "received_mib", "resident_peak_mib", "idle_cpu_percent"];
        report.shown_counts = shown.map(Into::into).into();
        let note = "foyer reads its tier through the kernel's page cache, which is memory besides; \
                    foyer-direct does not.";
        report.notes.push(note.to_owned());
        Ok(report)
    }
}

/// Returns the rows of the report: the runs of all queries, with their requests, and the random
/// reads, with memory and idleness.
fn rows(turns: &[Vec<Turn>; SERIES.len()]) -> Vec<Row> {
    let factor = turns[0][0].data_bytes as f64 / turns[0][0].memory_bytes as f64;
    let data = if factor > 1.0 { format!("{factor:.0}x") } else { "fits".to_owned() };
    let row = |work: &str, unit, value: Of, counts: &[(&str, Of)]| {
        let mut row = Row::new(Case::new().with("work", work).with("data", &*data), unit);
        for (series, turns) in SERIES.into_iter().zip(turns) {
            let all = |of: Of| turns.iter().map(of).collect::<Vec<f64>>();
            let count = |(name, of): &(&str, Of)| ((*name).to_owned(), median(&all(*of)));
            row.add(series, all(value), Counts::from_iter(counts.iter().map(count)));
        }
        row
    };
    let first: &[(&str, Of)] = &[
        ("requests", |turn| turn.runs[0].requests as f64),
        ("received_mib", |turn| mebibytes(turn.runs[0].received_bytes)),
    ];
    let second: &[(&str, Of)] = &[
        ("requests", |turn| turn.runs[1].requests as f64),
        ("received_mib", |turn| mebibytes(turn.runs[1].received_bytes)),
    ];
    let process: &[(&str, Of)] = &[
        ("resident_peak_mib", |turn| mebibytes(turn.resident_bytes_max)),
        ("idle_cpu_percent", |turn| turn.idle_cpu_percent),
    ];
    vec![
        row("first run", "queries/s", |turn| turn.runs[0].queries_per_second(), first),
        row("second run", "queries/s", |turn| turn.runs[1].queries_per_second(), second),
        row("64 KiB, p50", "ns/read", |turn| turn.range_p50_ns as f64, process),
        row("64 KiB, p99", "ns/read", |turn| turn.range_p99_ns as f64, &[]),
    ]
}

/// A figure of a turn.
type Of = fn(&Turn) -> f64;

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
    let tables = directory.join("tables");
    fs::create_dir(&tables)?;
    let store = LocalFileSystem::new_with_prefix(&tables)?;
    runtime()?.block_on(tables::create(&store, arguments.files, arguments.rows))?;
    let mut turns: [Vec<Turn>; SERIES.len()] = Default::default();
    let mut answers: Option<Vec<String>> = None;
    for turn in 0..arguments.turns {
        for place in 0..SERIES.len() {
            let place = if turn % 2 == 0 { place } else { SERIES.len() - 1 - place };
            let series = SERIES[place];
            progress.say(&format!("turn {} of {}: {series}", turn + 1, arguments.turns));
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["--series", series, "--directory"]).arg(directory);
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

/// Returns the report as a table, a line for each series.
fn table(report: &Report) -> String {
    let of = |name: &str| report.config[name].as_u64().unwrap_or(0) >> 20;
    let mut text = format!(
        "{} MiB of data, caches of {} MiB\n\
         \x20            first run: s, requests, MiB   second run: s, requests, MiB   \
         64 KiB: p50, p99 us   resident MiB   idle CPU %\n",
        of("data_bytes"),
        of("memory_bytes")
    );
    for series in SERIES {
        let value = |row: usize| report.rows[row].series[series];
        let count = |row: usize, name| report.rows[row].count(series, name).unwrap_or(0.0);
        let run = |row: usize| {
            format!(
                "{:>10.2} {:>9.0} {:>6.0}",
                QUERIES.len() as f64 / value(row),
                count(row, "requests"),
                count(row, "received_mib").floor()
            )
        };
        text.push_str(&format!(
            "{series:<12} {}   {}   {:>11.0} {:>7.0}   {:>12.0}   {:>10.1}\n",
            run(0),
            run(1),
            value(2) / 1000.0,
            value(3) / 1000.0,
            count(2, "resident_peak_mib").floor(),
            count(2, "idle_cpu_percent"),
        ));
    }
    text
}

/// Returns the capacity of a disk tier that has room for all of the data.
fn disk_bytes(data_bytes: u64) -> u64 {
    data_bytes.saturating_mul(2).saturating_add(64 << 20)
}

/// Runs one series over the tables in `directory`.
async fn measure(series: Series, directory: &Path) -> Result<Turn> {
    let tables = directory.join("tables");
    let remote = Arc::new(Remote::open(&tables)?);
    let objects: Vec<_> = remote.list(None).try_collect().await?;
    let data_bytes: u64 = objects.iter().map(|object| object.size).sum();
    let memory_bytes = (data_bytes / MEMORY_PART).max(MEMORY_BYTES_MIN);
    let disk_bytes = disk_bytes(data_bytes);
    // Removed with its files at the end of the turn.
    let tier = tempfile::tempdir_in(directory)?;
    let inner: Arc<dyn ObjectStore> = Arc::<Remote>::clone(&remote);
    let mut cached = None;
    let store: Arc<dyn ObjectStore> = match series {
        Series::Alone => inner,
        Series::Bifolio => {
            let cache = Cache::builder().memory(memory_bytes).build()?;
            let builder = CachedStore::builder(inner, &cache).disk(tier.path(), disk_bytes);
            let store = builder.head_age(Duration::from_secs(3600)).build()?;
            cached = Some(store.clone());
            Arc::new(store)
        }
        Series::Foyer | Series::FoyerDirect => {
            let is_direct = series == Series::FoyerDirect;
            let memory_bytes = memory_bytes as usize;
            Arc::new(
                FoyerStore::open(inner, memory_bytes, tier.path(), disk_bytes, is_direct).await?,
            )
        }
    };
    let context = SessionContext::new();
    context.register_object_store(&Url::parse(TABLES_URL)?, Arc::clone(&store));
    let (mut runs, mut answers) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let (started, before) = (Instant::now(), remote.counts());
        if runs.is_empty() {
            register_tables(&context).await?;
        }
        answers.clear();
        for (_, query) in QUERIES {
            answers.push(answer(&context, query).await?);
        }
        let after = remote.counts();
        let seconds = started.elapsed().as_secs_f64();
        runs.push(Run {
            seconds,
            requests: after.0 - before.0,
            received_bytes: after.1 - before.1,
        });
    }
    let mut random = fastrand::Rng::with_seed(1);
    let mut reads = Vec::new();
    for _ in 0..READS {
        let object = &objects[random.usize(..objects.len())];
        let start = random.u64(..object.size.saturating_sub(READ_BYTES).max(1));
        reads.push((object.location.clone(), start..(start + READ_BYTES).min(object.size)));
    }
    let (mut times, mut verified_bytes) = (Vec::new(), 0);
    for batch in reads.chunks(READERS) {
        let timed = batch.iter().map(|(location, range)| async {
            let started = Instant::now();
            let bytes = store.get_range(location, range.clone()).await?;
            anyhow::Ok((started.elapsed().as_nanos() as u64, bytes))
        });
        let results = futures::future::try_join_all(timed).await?;
        for ((location, range), (time, bytes)) in batch.iter().zip(results) {
            let mut expected = vec![0; (range.end - range.start) as usize];
            let file = File::open(tables.join(location.as_ref()))?;
            file.read_exact_at(&mut expected, range.start)?;
            ensure!(bytes == expected, "wrong bytes of {location} at {}", range.start);
            times.push(time);
            verified_bytes += bytes.len() as u64;
        }
    }
    times.sort_unstable();
    if let Some(store) = &cached {
        store.flush().await?;
        eprintln!("{:?}", store.metrics());
    }
    let before = cpu_seconds()?;
    tokio::time::sleep(IDLE).await;
    let idle = cpu_seconds()? - before;
    let runs = runs.try_into().ok().context("two runs")?;
    Ok(Turn {
        data_bytes,
        memory_bytes,
        runs,
        range_p50_ns: times[times.len() / 2],
        range_p99_ns: times[times.len() * 99 / 100],
        verified_bytes,
        resident_bytes_max: resident_bytes_max()?,
        idle_cpu_percent: idle / IDLE.as_secs_f64() * 100.0,
        answers,
    })
}

/// Returns the processor time of this process.
fn cpu_seconds() -> Result<f64> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    let (_, fields) = stat.rsplit_once(") ").context("a process name in /proc/self/stat")?;
    let ticks = fields.split(' ').skip(11).take(2).map(str::parse::<u64>);
    let ticks = ticks.sum::<Result<u64, _>>()?;
    // The kernel counts in hundredths of a second.
    Ok(ticks as f64 / 100.0)
}

fn resident_bytes_max() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).context("VmHWM")?;
    let kib = line.split_whitespace().nth(1).context("the value of VmHWM")?;
    Ok(kib.parse::<u64>()? << 10)
}

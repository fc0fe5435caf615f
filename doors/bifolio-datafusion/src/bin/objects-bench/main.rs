//! `cargo x engine-bench objects`: queries of DataFusion over a slow object store, by the engine
//! alone, through Bifolio, and through foyer, a hybrid cache of the registry.
//!
//! The store answers each request after 20 ms and sends 100 MiB/s. Each series is a process of its
//! own: an empty cache, the queries twice, random reads of 64 KiB, and two seconds of idleness.
//! Both caches have a quarter of the data as memory, and a disk tier with room for all of it.

mod foyer_store;
mod remote;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bifolio::Cache;
use bifolio_datafusion::queries::{QUERIES, TABLES_URL, answer, register_tables};
use bifolio_datafusion::tables;
use bifolio_object_store::CachedStore;
use clap::{Parser, ValueEnum};
use datafusion::prelude::SessionContext;
use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::{ObjectStore, ObjectStoreExt};
use serde::{Deserialize, Serialize};
use url::Url;

use foyer_store::FoyerStore;
use remote::Remote;

/// Random reads, and their length.
const READS: usize = 1000;
const READ_BYTES: u64 = 64 << 10;
/// Reads under way at a time.
const READERS: usize = 8;
const IDLE: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Series {
    Alone,
    Bifolio,
    Foyer,
}

#[derive(Debug, Parser)]
struct Arguments {
    /// Writes the results as JSON to this file, or to the output (`-`).
    #[arg(long)]
    json: Option<PathBuf>,
    /// Files of the larger table.
    #[arg(long, default_value_t = 8)]
    files: u64,
    /// Rows of each of them.
    #[arg(long, default_value_t = 250_000)]
    rows: u64,
    /// Small tables: only checks that everything runs.
    #[arg(long)]
    smoke: bool,
    /// Runs one series, over tables that exist; used by the benchmark itself.
    #[arg(long, hide = true, requires = "directory")]
    series: Option<Series>,
    #[arg(long, hide = true)]
    directory: Option<PathBuf>,
}

/// What one run of all queries cost.
#[derive(Debug, Serialize, Deserialize)]
struct Run {
    seconds: f64,
    requests: u64,
    received_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Report {
    series: String,
    data_bytes: u64,
    memory_bytes: u64,
    runs: Vec<Run>,
    range_p50_us: u64,
    range_p99_us: u64,
    /// Largest resident size of the process.
    resident_bytes_max: u64,
    idle_cpu_percent: f64,
    answers: Vec<String>,
}

fn main() -> Result<()> {
    let mut arguments = Arguments::parse();
    if arguments.smoke {
        (arguments.files, arguments.rows) = (2, 20_000);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    match (arguments.series, &arguments.directory) {
        (Some(series), Some(directory)) => {
            let report = runtime.block_on(measure(series, directory))?;
            println!("{}", serde_json::to_string(&report)?);
            Ok(())
        }
        _ => compare(&arguments, &runtime),
    }
}

/// Creates the tables, runs each series in a process of its own, and prints the reports.
fn compare(arguments: &Arguments, runtime: &tokio::runtime::Runtime) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let tables = directory.path().join("tables");
    fs::create_dir(&tables)?;
    let store = LocalFileSystem::new_with_prefix(&tables)?;
    runtime.block_on(tables::create(&store, arguments.files, arguments.rows))?;
    let mut reports = Vec::new();
    for series in ["alone", "bifolio", "foyer"] {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--series", series, "--directory"]).arg(directory.path());
        let output = command.stderr(std::process::Stdio::inherit()).output()?;
        ensure!(output.status.success(), "the series {series} failed");
        let report: Report = serde_json::from_slice(&output.stdout)?;
        reports.push(report);
    }
    let is_same = reports.iter().all(|report| report.answers == reports[0].answers);
    ensure!(is_same, "the answers of the series differ");
    reports.iter_mut().for_each(|report| report.answers.clear());
    match &arguments.json {
        Some(path) if path.as_os_str() == "-" => {
            println!("{}", serde_json::to_string_pretty(&reports)?);
        }
        Some(path) => fs::write(path, serde_json::to_string_pretty(&reports)?)?,
        None => print(&reports),
    }
    Ok(())
}

fn print(reports: &[Report]) {
    let mib = |bytes: u64| bytes >> 20;
    println!(
        "{} MiB of data, caches of {} MiB",
        mib(reports[0].data_bytes),
        mib(reports[0].memory_bytes)
    );
    println!(
        "         first run: s, requests, MiB   second run: s, requests, MiB   \
              64 KiB: p50, p99 us   resident MiB   idle CPU %"
    );
    for report in reports {
        let run = |run: &Run| {
            format!("{:>10.2} {:>9} {:>6}", run.seconds, run.requests, mib(run.received_bytes))
        };
        let runs: Vec<_> = report.runs.iter().map(run).collect();
        println!(
            "{:<8} {}   {}   {:>11} {:>7}   {:>12}   {:>10.1}",
            report.series,
            runs[0],
            runs[1],
            report.range_p50_us,
            report.range_p99_us,
            mib(report.resident_bytes_max),
            report.idle_cpu_percent,
        );
    }
}

/// Runs one series over the tables in `directory`.
async fn measure(series: Series, directory: &Path) -> Result<Report> {
    let remote = Arc::new(Remote::open(&directory.join("tables"))?);
    let objects: Vec<_> = remote.list(None).try_collect().await?;
    let data_bytes: u64 = objects.iter().map(|object| object.size).sum();
    let memory_bytes = (data_bytes / 4).max(4 << 20);
    let disk_bytes = 2 * data_bytes + (64 << 20);
    let tier = directory.join(format!("{series:?}"));
    let inner: Arc<dyn ObjectStore> = Arc::<Remote>::clone(&remote);
    let mut cached = None;
    let store: Arc<dyn ObjectStore> = match series {
        Series::Alone => inner,
        Series::Bifolio => {
            let cache = Cache::builder().memory(memory_bytes).build()?;
            let builder = CachedStore::builder(inner, &cache).disk(&tier, disk_bytes);
            let store = builder.head_age(Duration::from_secs(3600)).build()?;
            cached = Some(store.clone());
            Arc::new(store)
        }
        Series::Foyer => {
            Arc::new(FoyerStore::open(inner, memory_bytes as usize, &tier, disk_bytes).await?)
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
    let mut times = Vec::new();
    for batch in reads.chunks(READERS) {
        let timed = batch.iter().map(|(location, range)| async {
            let started = Instant::now();
            store.get_range(location, range.clone()).await?;
            anyhow::Ok(started.elapsed().as_micros() as u64)
        });
        times.extend(futures::future::try_join_all(timed).await?);
    }
    times.sort_unstable();
    if let Some(store) = &cached {
        store.flush().await?;
        eprintln!("{:?}", store.metrics());
    }
    let before = cpu_seconds()?;
    tokio::time::sleep(IDLE).await;
    let idle = cpu_seconds()? - before;
    Ok(Report {
        series: format!("{series:?}").to_lowercase(),
        data_bytes,
        memory_bytes,
        runs,
        range_p50_us: times[times.len() / 2],
        range_p99_us: times[times.len() * 99 / 100],
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

//! One turn of one series: the queries twice, reads of four kinds, a restart, idleness, and the
//! queries over the tier of a process that was killed.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bifolio::Cache;
use bifolio_object_store::{CachedStore, Metrics};
use clap::{Args, ValueEnum};
use futures::TryStreamExt;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};
use serde::{Deserialize, Serialize};

use crate::foyer_store::FoyerStore;
use crate::killed;
use crate::queries::Queries;
use crate::remote::Remote;

/// Runs of all queries: with an empty cache, again, and by a process that takes the place of one
/// that was killed in the middle of them.
pub(crate) const RUNS: [&str; 3] = ["first run", "second run", "killed, restarted"];
/// Random reads of each length.
pub(crate) const READS: usize = 1000;
const LONG_BYTES: u64 = 64 << 10;
const SHORT_BYTES: u64 = 8 << 10;
/// Reads of what is in memory, of this part of it.
const HOT_READS: usize = 2000;
const HOT_PART: u64 = 4;
/// Reads under way at a time.
pub(crate) const READERS: usize = 8;
const IDLE: Duration = Duration::from_secs(2);
/// The part of the data that caches have as memory, which is at least [`MEMORY_BYTES_MIN`].
pub(crate) const MEMORY_PART: u64 = 4;
pub(crate) const MEMORY_BYTES_MIN: u64 = 4 << 20;
/// Folder of the tables.
pub(crate) const TABLES: &str = "tables";

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub(crate) enum Series {
    Alone,
    Bifolio,
    Foyer,
    FoyerDirect,
}

/// Kinds of reads, in the order in which they are made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Long,
    Short,
    Hot,
    Restarted,
}

impl Kind {
    pub(crate) const ALL: [Self; 4] = [Self::Long, Self::Short, Self::Hot, Self::Restarted];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Long => "64 KiB",
            Self::Short => "8 KiB",
            Self::Hot => "64 KiB, hot",
            Self::Restarted => "64 KiB, restarted",
        }
    }
}

/// Settings other than those of the caches themselves.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// Memory of each cache, bytes; by default a quarter of the data.
    #[arg(long)]
    memory_bytes: Option<u64>,
    /// Length of a part, bytes.
    #[arg(long)]
    part_bytes: Option<u64>,
    /// The longest request, bytes.
    #[arg(long)]
    request_bytes: Option<u64>,
    /// Requests for one run of parts.
    #[arg(long)]
    parallel_requests: Option<u32>,
    /// The longest gap that is requested with two parts, bytes.
    #[arg(long)]
    gap_bytes: Option<u64>,
    /// Bytes of answers in memory on their way into the cache.
    #[arg(long)]
    flight_bytes: Option<u64>,
    /// No queries: the first reads find an empty cache.
    #[arg(long)]
    reads: bool,
    /// Prints the counts of the cache of objects after each phase.
    #[arg(long)]
    metrics: bool,
}

impl Settings {
    /// Returns the arguments that mean these settings.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let values = [
            ("--memory-bytes", self.memory_bytes),
            ("--part-bytes", self.part_bytes),
            ("--request-bytes", self.request_bytes),
            ("--parallel-requests", self.parallel_requests.map(u64::from)),
            ("--gap-bytes", self.gap_bytes),
            ("--flight-bytes", self.flight_bytes),
        ];
        let given = values.into_iter().filter_map(|(name, value)| Some((name, value?)));
        let mut arguments: Vec<_> = given.map(|(name, value)| format!("{name}={value}")).collect();
        let flags = [("--reads", self.reads), ("--metrics", self.metrics)];
        arguments.extend(flags.iter().filter(|(_, is_set)| *is_set).map(|it| it.0.to_owned()));
        arguments
    }
}

/// What a phase cost.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Cost {
    pub(crate) requests: u64,
    pub(crate) received_bytes: u64,
    pub(crate) cpu_seconds: f64,
    /// Parts found in memory, on disk, and in neither.
    pub(crate) lookups: [u64; 3],
}

impl Cost {
    /// Returns how many of a hundred parts were found in memory, or on disk.
    pub(crate) fn percent(&self, tier: usize) -> f64 {
        let all: u64 = self.lookups.iter().sum();
        100.0 * self.lookups[tier] as f64 / all.max(1) as f64
    }
}

/// One run of all queries.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) seconds: f64,
    pub(crate) cost: Cost,
}

/// Times of the reads of one kind, nanoseconds.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Reads {
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: u64,
    pub(crate) p999_ns: u64,
    pub(crate) cost: Cost,
}

/// The results of one turn of a series.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Turn {
    pub(crate) data_bytes: u64,
    pub(crate) memory_bytes: u64,
    /// Runs of the queries, as [`RUNS`] has them; none without queries.
    pub(crate) runs: Vec<Run>,
    /// Reads, as [`Kind::ALL`] has them.
    pub(crate) reads: Vec<Reads>,
    pub(crate) verified_bytes: u64,
    /// Largest resident size of the process.
    pub(crate) resident_bytes_max: u64,
    pub(crate) idle_cpu_percent: f64,
    pub(crate) answers: Vec<String>,
}

/// Returns the capacity of a disk tier that has room for all of the data.
pub(crate) fn disk_bytes(data_bytes: u64) -> u64 {
    data_bytes.saturating_mul(2).saturating_add(64 << 20)
}

/// A cache over the slow store, with its tier.
enum Cached {
    Alone(Arc<dyn ObjectStore>),
    Bifolio(CachedStore),
    Foyer(Arc<FoyerStore>),
}

/// The slow store, and how large the caches of its objects are.
pub(crate) struct Bucket {
    remote: Arc<Remote>,
    objects: Vec<ObjectMeta>,
    data_bytes: u64,
    memory_bytes: u64,
}

impl Bucket {
    /// Opens the store over the tables in `directory`.
    pub(crate) async fn open(directory: &Path, settings: Settings) -> Result<Self> {
        let remote = Arc::new(Remote::open(&directory.join(TABLES))?);
        let objects: Vec<_> = remote.list(None).try_collect().await?;
        let data_bytes: u64 = objects.iter().map(|object| object.size).sum();
        let default_bytes = (data_bytes / MEMORY_PART).max(MEMORY_BYTES_MIN);
        let memory_bytes = settings.memory_bytes.unwrap_or(default_bytes);
        Ok(Self { remote, objects, data_bytes, memory_bytes })
    }
}

/// A cache, and what is counted of it.
pub(crate) struct Measured {
    remote: Arc<Remote>,
    cached: Cached,
    settings: Settings,
}

/// Counts at the beginning of a phase.
struct Before {
    remote: (u64, u64),
    cpu_seconds: f64,
    lookups: [u64; 3],
    metrics: Metrics,
}

impl Measured {
    /// Opens the cache of a series, over a tier that may have parts.
    pub(crate) async fn open(
        series: Series,
        settings: Settings,
        bucket: &Bucket,
        tier: &Path,
    ) -> Result<Self> {
        let Bucket { remote, data_bytes, memory_bytes, .. } = bucket;
        let (disk_bytes, memory_bytes) = (disk_bytes(*data_bytes), *memory_bytes);
        let inner: Arc<dyn ObjectStore> = Arc::<Remote>::clone(remote);
        let cached = match series {
            Series::Alone => Cached::Alone(inner),
            Series::Bifolio => {
                let cache = Cache::builder().memory(memory_bytes).build()?;
                let builder = CachedStore::builder(inner, &cache).disk(tier, disk_bytes);
                let mut builder = builder.head_age(Duration::from_secs(3600));
                if let Some(bytes) = settings.part_bytes {
                    builder = builder.part_bytes(bytes);
                }
                if let Some(bytes) = settings.request_bytes {
                    builder = builder.request_bytes_max(bytes);
                }
                if let Some(requests) = settings.parallel_requests {
                    builder = builder.parallel_requests(requests);
                }
                if let Some(bytes) = settings.gap_bytes {
                    builder = builder.gap_bytes_max(bytes);
                }
                if let Some(bytes) = settings.flight_bytes {
                    builder = builder.flight_bytes_max(bytes);
                }
                Cached::Bifolio(builder.build()?)
            }
            Series::Foyer | Series::FoyerDirect => {
                let is_direct = series == Series::FoyerDirect;
                let memory_bytes = memory_bytes as usize;
                let store = FoyerStore::open(inner, memory_bytes, tier, disk_bytes, is_direct);
                Cached::Foyer(Arc::new(store.await?))
            }
        };
        Ok(Self { remote: Arc::clone(remote), cached, settings })
    }

    pub(crate) fn store(&self) -> Arc<dyn ObjectStore> {
        match &self.cached {
            Cached::Alone(store) => Arc::clone(store),
            Cached::Bifolio(store) => Arc::new(store.clone()),
            Cached::Foyer(store) => Arc::<FoyerStore>::clone(store),
        }
    }

    /// Waits until the tier has what was read.
    pub(crate) async fn close(self) -> Result<()> {
        match self.cached {
            Cached::Alone(_) => Ok(()),
            Cached::Bifolio(store) => Ok(store.flush().await?),
            Cached::Foyer(store) => store.close().await,
        }
    }

    fn metrics(&self) -> Metrics {
        match &self.cached {
            Cached::Bifolio(store) => store.metrics(),
            _ => Metrics::default(),
        }
    }

    fn lookups(&self) -> [u64; 3] {
        match &self.cached {
            Cached::Alone(_) => [0; 3],
            Cached::Bifolio(store) => {
                let metrics = store.metrics();
                [metrics.memory_hits, metrics.disk_hits, metrics.misses + metrics.shared]
            }
            Cached::Foyer(store) => store.lookups(),
        }
    }

    fn before(&self) -> Result<Before> {
        let (remote, lookups) = (self.remote.counts(), self.lookups());
        Ok(Before { remote, cpu_seconds: cpu_seconds()?, lookups, metrics: self.metrics() })
    }

    /// Returns what was counted since.
    fn cost(&self, phase: &str, before: &Before) -> Result<Cost> {
        if self.settings.metrics && matches!(self.cached, Cached::Bifolio(_)) {
            eprintln!("{phase}: {:?}", self.metrics().since(&before.metrics));
        }
        let (remote, mut lookups) = (self.remote.counts(), self.lookups());
        for (count, before) in lookups.iter_mut().zip(before.lookups) {
            *count -= before;
        }
        Ok(Cost {
            requests: remote.0 - before.remote.0,
            received_bytes: remote.1 - before.remote.1,
            cpu_seconds: cpu_seconds()? - before.cpu_seconds,
            lookups,
        })
    }
}

/// Runs one series over the tables in `directory`.
pub(crate) async fn measure(series: Series, settings: Settings, directory: &Path) -> Result<Turn> {
    let tables = directory.join(TABLES);
    let bucket = Bucket::open(directory, settings).await?;
    let Bucket { ref objects, data_bytes, memory_bytes, .. } = bucket;
    // Removed with its files at the end of the turn.
    let tier = tempfile::tempdir_in(directory)?;
    let open = || Measured::open(series, settings, &bucket, tier.path());
    let mut measured = open().await?;
    let (mut runs, answers) = run_queries(&measured, &RUNS[..2]).await?;
    let mut verified_bytes = 0;
    let mut reads = Vec::new();
    for (kind, seed) in Kind::ALL.into_iter().zip(0..) {
        if kind == Kind::Restarted {
            measured.close().await?;
            measured = open().await?;
        }
        let mut random = fastrand::Rng::with_seed(seed);
        let targets = targets(kind, objects, memory_bytes, &mut random);
        if kind == Kind::Hot {
            // Brings them into memory.
            read_all(&measured, &tables, &targets).await?;
        }
        let before = measured.before()?;
        let (mut times, bytes) = read_all(&measured, &tables, &targets).await?;
        let cost = measured.cost(kind.name(), &before)?;
        verified_bytes += bytes;
        times.sort_unstable();
        let at = |part: usize| times[(times.len() * part / 1000).min(times.len() - 1)];
        reads.push(Reads { p50_ns: at(500), p99_ns: at(990), p999_ns: at(999), cost });
    }
    let before = cpu_seconds()?;
    tokio::time::sleep(IDLE).await;
    let idle = cpu_seconds()? - before;
    measured.close().await?;
    let resident_bytes_max = resident_bytes_max()?;
    if !settings.reads {
        let tier = tempfile::tempdir_in(directory)?;
        killed::work_and_die(series, settings, directory, tier.path())?;
        let measured = Measured::open(series, settings, &bucket, tier.path()).await?;
        let (run, found) = run_queries(&measured, &RUNS[2..]).await?;
        ensure!(found == answers, "other answers over the tier of a process that was killed");
        runs.extend(run);
        measured.close().await?;
    }
    Ok(Turn {
        data_bytes,
        memory_bytes,
        runs,
        reads,
        verified_bytes,
        resident_bytes_max,
        idle_cpu_percent: idle / IDLE.as_secs_f64() * 100.0,
        answers,
    })
}

/// Runs the queries once for each phase. Returns what each run cost, and the answers.
async fn run_queries(measured: &Measured, phases: &[&str]) -> Result<(Vec<Run>, Vec<String>)> {
    let (mut runs, mut answers) = (Vec::new(), Vec::new());
    if measured.settings.reads {
        return Ok((runs, answers));
    }
    let mut queries = Queries::new(measured.store())?;
    for phase in phases {
        let (started, before) = (Instant::now(), measured.before()?);
        answers = queries.run(|| {}).await?;
        let seconds = started.elapsed().as_secs_f64();
        runs.push(Run { seconds, cost: measured.cost(phase, &before)? });
    }
    Ok((runs, answers))
}

/// A range of an object.
type Target = (object_store::path::Path, Range<u64>);

/// Returns the reads of a kind, at random.
fn targets(
    kind: Kind,
    objects: &[ObjectMeta],
    memory_bytes: u64,
    random: &mut fastrand::Rng,
) -> Vec<Target> {
    let range = |object: &ObjectMeta, start: u64, length: u64| {
        let start = start.min(object.size.saturating_sub(length));
        (object.location.clone(), start..(start + length).min(object.size))
    };
    if kind == Kind::Hot {
        let Some(large) = objects.iter().max_by_key(|object| object.size) else {
            return Vec::new();
        };
        let last = large.size.min(memory_bytes / HOT_PART).saturating_sub(LONG_BYTES).max(1);
        return (0..HOT_READS).map(|_| range(large, random.u64(..last), LONG_BYTES)).collect();
    }
    let length = if kind == Kind::Short { SHORT_BYTES } else { LONG_BYTES };
    let mut target = || {
        let object = &objects[random.usize(..objects.len())];
        range(object, random.u64(..object.size), length)
    };
    (0..READS).map(|_| target()).collect()
}

/// Makes reads, some at the same time, and checks their bytes. Returns their times in nanoseconds,
/// and the number of bytes.
async fn read_all(
    measured: &Measured,
    tables: &Path,
    targets: &[Target],
) -> Result<(Vec<u64>, u64)> {
    let (store, mut times, mut verified_bytes) = (measured.store(), Vec::new(), 0);
    for batch in targets.chunks(READERS) {
        let timed = batch.iter().map(|(location, range)| {
            let store = &store;
            async move {
                let started = Instant::now();
                let bytes = store.get_range(location, range.clone()).await?;
                anyhow::Ok((started.elapsed().as_nanos() as u64, bytes))
            }
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
    Ok((times, verified_bytes))
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

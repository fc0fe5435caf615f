//! Lookups in a B-tree whose pages are in Bifolio, in a map, in caches of others that a program
//! would make a buffer pool of, or in redb: rates, times, and resident sizes.
//!
//! Each series is a child in a control group of `memory` bytes, which counts everything: pages of
//! the kernel, metadata, allocators. A cache gets [`CACHE_PERCENT`] of it, as a careful user would
//! set it; a map gets all.

mod series;
mod tree;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use anyhow::ensure;
use bifolio_bench::{
    Benchmark, Case, Config, Context, Error, Membership, Needs, Progress, Ratio, Report, Result,
    Sizes,
};
use fastrand::Rng;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::children::serve;
use crate::rounds::{self, RoundCost, Series, cost_of, failed, memory_bytes, seconds_of};
use crate::skewed::{SKEW, SkewedPages};
use series::Lookup;
use tree::Tree;

const SERIES: [&str; 6] = ["bifolio", "mmap", "quick_cache", "foyer", "moka", "redb"];
const ROUNDS: usize = 5;
/// Least memory: below it, what caches do not count is more than their share leaves.
const MEMORY_BYTES_MIN: u64 = 32 << 20;
/// Percent of the memory that a cache gets: the rest is for what it does not count.
const CACHE_PERCENT: u64 = 75;
/// The tree that fits is this part of the memory: redb's table of the same rows is larger.
const FITS_PART: u64 = 4;
const LARGE_FACTOR: u64 = 8;
/// Lookups between two looks at the clock, of which one is timed by itself.
const BATCH: u64 = 16;

/// The benchmark.
#[derive(Debug)]
pub(crate) struct PoolsBenchmark;

/// A tree to open, and the memory to do it with.
#[derive(Debug, Serialize, Deserialize)]
struct Opening {
    name: String,
    path: PathBuf,
    tree: Tree,
    cache_bytes: u64,
    group: Option<Membership>,
}

/// One round.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Round {
    is_skewed: bool,
    threads: u64,
    seconds: f64,
    seed: u64,
}

/// Lookups of a thread.
#[derive(Default)]
struct Done {
    lookups: u64,
    latencies: Vec<u64>,
}

/// Measures all patterns on a tree of `size_bytes`.
fn measure(
    context: &Context<'_>,
    (name, size_bytes): (&str, u64),
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let path = context.workspace.path().join(name);
    let rows = tree::rows(size_bytes);
    progress.say(&format!("{name}: {rows} rows"));
    let tree = tree::build(&path, rows).map_err(failed)?;
    series::build_redb(&path, rows).map_err(failed)?;
    let mut all = start(context, &path, tree, size_bytes, report)?;
    let processors = thread::available_parallelism().map_or(1, |count| count.get() as u64);
    for (is_skewed, pattern) in [(false, "uniform"), (true, "skewed")] {
        let threads = [1, processors];
        for threads in if processors > 1 { &threads[..] } else { &threads[..1] } {
            let threads = *threads;
            let case =
                Case::new().with("data", name).with("keys", pattern).with("threads", threads);
            let task = |round| {
                let seconds = seconds_of(context.config, round);
                Round { is_skewed, threads, seconds, seed: round as u64 * 1024 }
            };
            rounds::measure(&mut all, ROUNDS, case, task, report)?;
        }
    }
    drop(all);
    let paths = [path.with_extension("redb"), path];
    paths.iter().try_for_each(std::fs::remove_file).map_err(|error| failed(error.into()))
}

/// Starts a child for each series.
fn start(
    context: &Context<'_>,
    path: &Path,
    tree: Tree,
    size_bytes: u64,
    report: &mut Report,
) -> Result<Vec<Series>> {
    let memory_bytes = memory_of(context.config);
    let sizes = Sizes { size_bytes, memory_bytes };
    let mut all = Vec::new();
    for name in SERIES {
        let opening = |group| Opening {
            name: name.to_owned(),
            path: path.to_owned(),
            tree,
            cache_bytes: memory_bytes * CACHE_PERCENT / 100,
            group,
        };
        all.extend(Series::start(name, &context.config.child_command, sizes, report, opening)?);
    }
    Ok(all)
}

impl Benchmark for PoolsBenchmark {
    fn name(&self) -> &'static str {
        "pools"
    }

    fn description(&self) -> &'static str {
        "lookups in a B-tree over the cache, a map, caches of others and redb, with the same memory"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        let memory_bytes = memory_of(config);
        if memory_bytes < MEMORY_BYTES_MIN {
            return Err(Error::Refused("the series need at least 32 MiB".into()));
        }
        // The table of redb is up to twice as large as the tree.
        let disk_bytes = memory_bytes.saturating_mul(LARGE_FACTOR * 3);
        let others_bytes = memory_bytes.saturating_mul(SERIES.len() as u64);
        Ok(Needs { disk_bytes, memory_bytes: others_bytes + (512 << 20) })
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let memory_bytes = memory_of(context.config);
        let config = json!({
            "memory_bytes": memory_bytes,
            "rounds": ROUNDS,
            "cache_percent": CACHE_PERCENT,
            "skew": SKEW,
        });
        let mut report = Report::new("pools", &context.host, config);
        report.ratios = SERIES[1..].iter().map(|other| Ratio::new(SERIES[0], other)).collect();
        report.shown_counts =
            ["p50_ns", "p99_ns", "resident_peak_mib", "group_peak_mib"].map(Into::into).to_vec();
        for data in [("fits", memory_bytes / FITS_PART), ("8x", memory_bytes * LARGE_FACTOR)] {
            measure(context, data, &mut report, progress)?;
        }
        Ok(report)
    }
}

/// Returns the memory of a series.
fn memory_of(config: &Config) -> u64 {
    config.memory_bytes.unwrap_or_else(|| memory_bytes(config).max(MEMORY_BYTES_MIN))
}

/// The child's side.
pub(crate) fn run_child(task: &str) -> anyhow::Result<()> {
    let opening: Opening = serde_json::from_str(task)?;
    if let Some(group) = &opening.group {
        group.join()?;
    }
    let Opening { name, path, tree, cache_bytes, group } = opening;
    let lookup = series::open(&name, &path, tree, cache_bytes)?;
    serve(|round: Round| {
        let mut latencies = Vec::new();
        let mut cost: RoundCost = cost_of(round.seconds, group.as_ref(), |until| {
            let done = run_round(&*lookup, &tree, round, until)?;
            latencies = done.latencies;
            Ok((done.lookups, done.lookups * 8))
        })?;
        cost.latencies = latencies;
        Ok(cost)
    })
}

fn run_round(
    lookup: &dyn Lookup,
    tree: &Tree,
    round: Round,
    until: Instant,
) -> anyhow::Result<Done> {
    thread::scope(|scope| {
        let start = |number| {
            let random = Rng::with_seed(round.seed + number);
            scope.spawn(move || look_up_until(lookup, tree, round.is_skewed, random, until))
        };
        let threads: Vec<_> = (0..round.threads).map(start).collect();
        let mut all = Done::default();
        for thread in threads {
            let done = thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
            all.lookups += done.lookups;
            all.latencies.extend(done.latencies);
        }
        Ok(all)
    })
}

/// Looks rows up until a time, and checks each value.
fn look_up_until(
    lookup: &dyn Lookup,
    tree: &Tree,
    is_skewed: bool,
    mut random: Rng,
    until: Instant,
) -> anyhow::Result<Done> {
    let leaves = tree.rows.div_ceil(tree::ENTRIES_MAX);
    let skewed = SkewedPages::new(leaves);
    let mut done = Done::default();
    loop {
        let begun = Instant::now();
        if begun >= until {
            return Ok(done);
        }
        for number in 0..BATCH {
            let row = if is_skewed {
                let leaf = skewed.draw(&mut random);
                (leaf * tree::ENTRIES_MAX + random.u64(..tree::ENTRIES_MAX)).min(tree.rows - 1)
            } else {
                random.u64(..tree.rows)
            };
            let key = tree::key(row);
            ensure!(lookup.look_up(key)? == tree::value(key), "a wrong value of key {key}");
            if number == 0 {
                done.latencies.push(begun.elapsed().as_nanos() as u64);
            }
        }
        done.lookups += BATCH;
    }
}

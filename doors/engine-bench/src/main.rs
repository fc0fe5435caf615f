//! `engine-bench ENGINE`: a storage engine over Bifolio beside the same engine over its own
//! storage, with the same total memory. `cargo x engine-bench` runs it.
//!
//! The report is the envelope of `bifolio bench`; [`bifolio_bench`] makes the directory, checks
//! space, and draws tables. Each engine is a module that is a [`bifolio_bench::Benchmark`].

mod children;
#[cfg(feature = "rivals")]
mod pools;
mod redb;
#[cfg(feature = "rivals")]
mod rivals;
mod rounds;
mod skewed;
mod sqlite;
#[cfg(feature = "tantivy")]
mod tantivy;
mod values;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use bifolio_bench::{
    Benchmark, Config, Lines, ParameterSet, clean_on_signals, deliver, parse_bytes, render, run,
};
use clap::{Parser, Subcommand};

/// Measures storage engines over Bifolio.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    engine: Engine,
}

#[derive(Debug, Subcommand)]
enum Engine {
    /// Points, ranges, scans, inserts and updates of a redb table.
    Redb {
        #[command(flatten)]
        options: Options,
        #[command(flatten)]
        split: redb::Split,
    },
    /// Points, skewed points, ranges, scans and updates of an SQLite table; imports, indexes, pools
    /// of connections, and opens.
    Sqlite {
        #[command(flatten)]
        options: Options,
        #[command(flatten)]
        selection: sqlite::Selection,
    },
    /// Term, phrase and boolean queries of a tantivy index of documentation and source code.
    #[cfg(feature = "tantivy")]
    Tantivy {
        #[command(flatten)]
        options: Options,
        #[command(flatten)]
        setup: tantivy::Setup,
    },
    /// Misses of generated traces, as `bifolio bench hit-ratio`, also of foyer and quick_cache.
    #[cfg(feature = "rivals")]
    HitRatio {
        #[command(flatten)]
        options: Options,
    },
    /// Lookups in a B-tree over the cache, a map, quick_cache, foyer, moka and redb.
    #[cfg(feature = "rivals")]
    Pools {
        #[command(flatten)]
        options: Options,
    },
    /// Runs in a measuring child.
    #[cfg(feature = "rivals")]
    #[command(hide = true)]
    PoolsChild { task: String },
    /// Runs in a measuring child.
    #[command(hide = true)]
    RedbChild { task: String },
    /// Runs in a measuring child.
    #[command(hide = true)]
    SqliteChild { task: String },
    /// Runs in a measuring child.
    #[cfg(feature = "tantivy")]
    #[command(hide = true)]
    TantivyChild { task: String },
}

#[derive(Debug, clap::Args)]
struct Options {
    /// Where the envelope goes; `-` is standard output. Without it, a table is printed.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Total memory of each series, such as `64MiB`.
    #[arg(long, value_parser = parse_bytes)]
    memory: Option<u64>,
    /// Directory for the databases.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Seconds of each round; redb's rounds of writes take as long as 20 commits.
    #[arg(long, default_value = "0.4")]
    seconds: f64,
    /// Seconds instead of minutes: shows that everything works; the figures mean nothing.
    #[arg(long)]
    smoke: bool,
}

/// Maximum of `--seconds`: a day.
const SECONDS_MAX: f64 = 86_400.0;

fn main() -> ExitCode {
    let result = match Arguments::parse().engine {
        Engine::Redb { options, split } => measure(&redb::RedbBenchmark::new(split), &options),
        Engine::Sqlite { options, selection } => {
            measure(&sqlite::SqliteBenchmark::new(selection), &options)
        }
        #[cfg(feature = "tantivy")]
        Engine::Tantivy { options, setup } => {
            measure(&tantivy::TantivyBenchmark::new(setup), &options)
        }
        #[cfg(feature = "rivals")]
        Engine::HitRatio { options } => measure(&rivals::HIT_RATIO, &options),
        #[cfg(feature = "rivals")]
        Engine::Pools { options } => measure(&pools::PoolsBenchmark, &options),
        #[cfg(feature = "rivals")]
        Engine::PoolsChild { task } => pools::run_child(&task),
        Engine::RedbChild { task } => redb::run_child(&task),
        Engine::SqliteChild { task } => sqlite::run_child(&task),
        #[cfg(feature = "tantivy")]
        Engine::TantivyChild { task } => tantivy::run_child(&task),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("engine-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure(benchmark: &dyn Benchmark, options: &Options) -> anyhow::Result<()> {
    clean_on_signals(|| {})?;
    let program = std::env::current_exe()?.to_str().context("the path is not UTF-8")?.to_owned();
    let set = if options.smoke { ParameterSet::Smoke } else { ParameterSet::Quick };
    let child_command = vec![program, format!("{}-child", benchmark.name())];
    let mut config = Config::new(set, child_command);
    config.memory_bytes = options.memory;
    config.dir.clone_from(&options.dir);
    let is_possible = options.seconds > 0.0 && options.seconds <= SECONDS_MAX;
    ensure!(is_possible, "--seconds: must be more than 0 and at most {SECONDS_MAX}");
    config.timed = Some(Duration::from_secs_f64(options.seconds));
    let report = run(benchmark, &config, &mut Lines)?;
    deliver(&report, options.json.as_deref(), render)?;
    let failures: Vec<String> = report.footnotes().collect();
    ensure!(!report.has_failed(), "{}", failures.join("; "));
    Ok(())
}

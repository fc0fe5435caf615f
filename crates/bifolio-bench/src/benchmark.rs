//! The definition of a benchmark, the list of them, and the one way to run one.
//!
//! Called by the program; calls the benchmark's own module. The checks before every run (space,
//! memory) are here, so that no benchmark can omit them.

use std::time::SystemTime;

use bifolio_report::{Host, Report};
use serde_json::Value;

use crate::config::{Config, Target};
use crate::error::{Error, Result};
use crate::harness::memory;
use crate::harness::workspace::Workspace;
use crate::host;
use crate::progress::Progress;
use crate::{
    advise, format_bytes, gather, hit_ratio, map_reads, random_reads, reclaim, scan, seq_reads,
    small_reads, warm_start, writes,
};

/// Every benchmark, in the order in which `bifolio bench` runs them.
static ALL: [&dyn Benchmark; 11] = [
    &small_reads::SMALL_READS,
    &random_reads::RANDOM_READS,
    &gather::GATHER,
    &scan::SCAN,
    &writes::WRITES,
    &seq_reads::SEQ_READS,
    &reclaim::RECLAIM,
    &map_reads::MAP_READS,
    &advise::ADVISE,
    &warm_start::WARM_START,
    &hit_ratio::HitRatio { rivals: &[] },
];

/// Returns every benchmark, in the order in which `bifolio bench` runs them.
pub fn all() -> &'static [&'static dyn Benchmark] {
    &ALL
}

/// The benchmark called `name`.
pub fn find(name: &str) -> Option<&'static dyn Benchmark> {
    all().iter().copied().find(|benchmark| benchmark.name() == name)
}

/// Disk and memory that must be free before a benchmark starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Space in the workspace.
    pub disk_bytes: u64,
    /// Memory, with the kernel's page cache where a series depends on it.
    pub memory_bytes: u64,
}

/// The tools that a running benchmark may use.
#[derive(Debug)]
pub struct Context<'a> {
    /// The settings that the user asked for.
    pub config: &'a Config,
    /// Directory for files; emptied at the end in any case.
    pub workspace: &'a Workspace,
    /// The machine, as the report names it.
    pub host: Host,
}

/// One benchmark.
pub trait Benchmark: Sync {
    /// The name on the command line and in the envelope.
    fn name(&self) -> &'static str;

    /// One line for `bifolio bench --list`.
    fn description(&self) -> &'static str;

    /// Disk and memory that must be free, for these parameters.
    ///
    /// # Errors
    /// The parameters contradict each other.
    fn needs(&self, config: &Config) -> Result<Needs>;

    /// Creates the files, verifies, measures, and returns the report.
    ///
    /// # Errors
    /// Anything that invalidates the figures: a failed call, wrong bytes. A series that this
    /// machine cannot run is not an error: the report lists it under `skipped`.
    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report>;

    /// Runs a task in a separate process: `run` calls this through a child, and gets the result.
    ///
    /// # Errors
    /// The task failed, or this benchmark has no such task.
    fn run_in_child(&self, task: Value) -> Result<Value> {
        Err(Error::Child(format!("{} has no task like {task}", self.name())))
    }
}

/// Checks the needs of `benchmark`, creates its workspace, runs it, and cleans up.
///
/// # Errors
/// There is not enough space or memory (then nothing was created), or the benchmark failed.
pub fn run(
    benchmark: &dyn Benchmark,
    config: &Config,
    progress: &mut dyn Progress,
) -> Result<Report> {
    let needs = benchmark.needs(config)?;
    memory::require(needs.memory_bytes)?;
    let workspace = Workspace::create(config.dir.as_deref(), needs.disk_bytes)?;
    progress.say(&format!(
        "{}: needs {} of disk in {} ({}) and {} of memory",
        benchmark.name(),
        format_bytes(needs.disk_bytes),
        workspace.path().display(),
        workspace.file_system.name,
        format_bytes(needs.memory_bytes),
    ));
    for remark in &workspace.remarks {
        progress.say(remark);
    }
    let host = host::read(&workspace.file_system.name);
    let started = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let mut report = benchmark.run(&Context { config, workspace: &workspace, host }, progress)?;
    report.rows.retain(|row| row.names().next().is_some());
    if config.target == Target::Kernel {
        report.config["target"] = "kernel".into();
    }
    report.started = started;
    report.command = host::command_line();
    report.features = host::features();
    Ok(report)
}

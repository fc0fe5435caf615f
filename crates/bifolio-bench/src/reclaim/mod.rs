//! `reclaim`: mapped memory four times as large as memory, written and verified by workers.
//!
//! The benchmark measures the cost of reclaim. Series: a mapped memory file of a cache, which
//! unmaps N folios with one TLB flush (`flush_per_folio`, `flush_per_batch_N`); anonymous memory
//! that the kernel swaps out to the same disk, and a file that it maps, both limited to the memory
//! of a process with such a cache (`kernel_swap`, `kernel_mmap`); and the same work without a cache
//! (`raw_direct`), whose slowest accesses show the speed of the disk at that time. A trial is a
//! child process: resident sizes and control groups belong to processes. It fills the memory, which
//! is not timed, runs a timed window of each order, and compares every page.
//!
//! ```text
//!   work.rs       the workers: the method of `stress-ng --vm`, and where it differs
//!   pages.rs      how they get at a page
//!   memory_kind.rs     the child: who keeps the memory, and what is counted meanwhile
//!   stress_ng.rs  stress-ng itself, where it is installed
//!   figures.rs    the figures asked for
//! ```

mod figures;
mod memory_kind;
mod pages;
mod parameters;
mod stress_ng;
mod work;

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::memory_kind::{Answer, CACHES, Done, KERNEL_MMAP, KERNEL_SWAP, MemoryKind, UNCACHED};
use self::parameters::Parameters;
use self::stress_ng::STRESS_NG;
use self::work::{Load, Order};
use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::Config;
use crate::error::Result;
use crate::format_bytes;
use crate::harness::child;
use crate::harness::failures::skip_on_error;
use crate::harness::interleave::{Rounds, Trial, run_trials};
use crate::harness::memory_group::{Membership, MemoryGroup};
use crate::harness::meter::{self, Measured};
use crate::harness::swap::SwapFile;
use crate::progress::Progress;
use bifolio_report::{Case, Report, Row, Rss};

const NAME: &str = "reclaim";
const UNIT: &str = "bogo ops/s";

const SHOWN_COUNTS: [&str; 11] = [
    "tlb_shootdowns",
    "function_call_ipis",
    "flushes",
    "pgscan",
    "pgsteal",
    "pages_evicted",
    "pages_written",
    "p50_fault_ns",
    "p99_fault_ns",
    "p999_fault_ns",
    "reclaim_stalls",
];

/// The benchmark, described at the head of this module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reclaim;

impl Benchmark for Reclaim {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "mapped memory 4 times the bound, written and verified, against the kernel's swap and mmap"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        Ok(Parameters::from_config(config)?.sizes.needs_of_swap())
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = Parameters::from_config(context.config)?;
        let mut report = Report::new(NAME, &context.host, serde_json::to_value(&parameters)?);
        report.ratios = figures::RATIOS.to_vec();
        report.shown_counts = SHOWN_COUNTS.map(Into::into).to_vec();
        let kernel = Kernel::create(context, &parameters);
        let series = [KERNEL_SWAP, KERNEL_MMAP, STRESS_NG];
        let kernel = skip_on_error(&mut report, &series, kernel)?;
        let group = kernel.as_ref().map(|kernel| kernel.group.membership());
        measure(context, &parameters, group.as_ref(), &mut report, progress)?;
        if let Some(group) = group.filter(|_| parameters.stress_ng) {
            stress_ng::measure(context, &parameters, &group, &mut report, progress)?;
        }
        report.notes.push(
            "interrupts, and what the kernel's series scanned and wrote, are those of the whole \
             machine; the kernel does not tell how many flushes it asked for"
                .to_owned(),
        );
        if kernel.is_some() {
            let bytes = format_bytes(parameters.sizes.kernel_bytes());
            report.notes.push(format!(
                "a process of the kernel's series is held to {bytes}, as the process of a cache is"
            ));
        }
        report.figures = figures::figures(&report);
        Ok(report)
    }

    fn run_in_child(&self, task: Value) -> Result<Value> {
        Ok(match serde_json::from_value(task)? {
            ChildTask::Keep(task) => serde_json::to_value(memory_kind::run(&task)?)?,
            ChildTask::StressNg(task) => serde_json::to_value(stress_ng::run(&task)?)?,
        })
    }
}

/// The tasks of children.
#[derive(Debug, Serialize, Deserialize)]
enum ChildTask {
    Keep(memory_kind::Task),
    StressNg(stress_ng::Task),
}

/// Resources of the kernel's series, dropped from top to bottom: the group, then the swap.
#[derive(Debug)]
struct Kernel {
    group: MemoryGroup,
    _swap: SwapFile,
}

impl Kernel {
    /// # Errors
    /// It is not possible; the message is the reason to skip the series.
    fn create(context: &Context<'_>, parameters: &Parameters) -> Result<Self> {
        let swap = SwapFile::activate(context.workspace, parameters.sizes.swap_bytes())?;
        Ok(Self { group: MemoryGroup::create(parameters.sizes)?, _swap: swap })
    }
}

/// A series, and the kind of its memory.
type Series = (&'static str, MemoryKind);

/// Returns every series, in the order of the tables; those of the kernel only if a group exists.
fn all_series(group: Option<&Membership>, directory: &Path) -> Vec<Series> {
    let directory = || directory.to_owned();
    let mut all = Vec::new();
    if let Some(group) = group {
        let group = || group.clone();
        all.push((KERNEL_SWAP, MemoryKind::Swap { group: group() }));
        all.push((KERNEL_MMAP, MemoryKind::Mmap { group: group(), directory: directory() }));
    }
    for (name, batch_folios) in CACHES {
        let series = name.to_owned();
        let directory = directory();
        all.push((name, MemoryKind::Cache { series, batch_folios, directory }));
    }
    all.push((UNCACHED, MemoryKind::Uncached { directory: directory() }));
    all
}

fn measure(
    context: &Context<'_>,
    parameters: &Parameters,
    group: Option<&Membership>,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let ask = |memory_kind: &MemoryKind, load: Load| -> Result<Answer> {
        let task =
            memory_kind::Task { memory_kind: memory_kind.clone(), sizes: parameters.sizes, load };
        child::ask(&context.config.child_command, NAME, &ChildTask::Keep(task))
    };
    let mut series = all_series(group, context.workspace.path());
    series.retain(|(series, _)| context.config.measures(series));
    progress.start("try every series", series.len() as u64);
    let mut can_run = Vec::new();
    for (name, memory_kind) in series {
        progress.advance(1);
        let tried = skip_on_error(report, &[name], ask(&memory_kind, parameters.trial()))?;
        can_run.extend(tried.map(|_| (name, memory_kind)));
    }
    let (ask, series) = (&ask, can_run);
    let mut trials = Vec::new();
    for &workers in &parameters.workers {
        let load = parameters.load(workers, parameters.workers.len() * series.len());
        let row_index = report.rows.len();
        report.rows.extend(Order::ALL.map(|order| Row::new(case(workers, order.name()), UNIT)));
        trials.extend(series.iter().map(|(series, memory_kind)| Trial {
            row_index,
            series,
            run: Box::new(move || ask(memory_kind, load)),
        }));
    }
    progress.start("measure", (trials.len() * parameters.repetitions) as u64);
    let values = |_: &Trial<'_, _>, answer: &Answer| {
        answer.done.iter().map(|done| done.measured.operations_rate()).collect()
    };
    let rounds = Rounds::exactly(parameters.repetitions);
    let given = run_trials(&trials, rounds, values, progress)?;
    let mut peak_bytes = 0;
    for (trial, given) in trials.iter().zip(&given) {
        let rows = trial.row_index..trial.row_index + Order::ALL.len();
        let Some(answers) = given.or_fail(&mut report.rows, rows, trial.series) else { continue };
        for index in 0..Order::ALL.len() {
            let done: Vec<&Done> = answers.iter().map(|answer| &answer.done[index]).collect();
            fill(&mut report.rows[trial.row_index + index], trial.series, &done);
            report.verified_bytes +=
                done.iter().map(|done| done.measured.verified_bytes).sum::<u64>();
        }
        let peak = answers.iter().map(|answer| answer.peak_bytes).max().unwrap_or(0);
        for row in &mut report.rows[trial.row_index..][..Order::ALL.len()] {
            row.counts
                .entry(trial.series.into())
                .or_default()
                .insert("peak_bytes".into(), peak as f64);
        }
        if CACHES.iter().any(|(cache, _)| *cache == trial.series) {
            peak_bytes = peak.max(peak_bytes);
        }
        report.verified_bytes += answers.iter().map(|answer| answer.verified_bytes).sum::<u64>();
    }
    let rss = Rss { bound_bytes: parameters.sizes.memory_bytes, peak_bytes };
    report.rss = (peak_bytes > 0).then_some(rss);
    Ok(())
}

fn case(workers: usize, pattern: &str) -> Case {
    Case::new().with("workers", workers).with("pattern", pattern)
}

/// Writes all windows of `series` into `row`; counts are those of all windows together.
fn fill(row: &mut Row, series: &'static str, done: &[&Done]) {
    let windows: Vec<Measured> = done.iter().map(|done| done.measured.clone()).collect();
    meter::fill(row, series, &windows, Measured::operations_rate);
    let counts = row.counts.entry(series.into()).or_default();
    // First touches of pages are timed here, not calls.
    for name in ["p50", "p99", "p999", "max"] {
        if let Some(value) = counts.shift_remove(&format!("{name}_ns")) {
            counts.insert(format!("{name}_fault_ns"), value);
        }
    }
    for (name, count) in done.iter().flat_map(|done| &done.counts) {
        *counts.entry(name.clone()).or_default() += *count as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_windows_add_up_and_latencies_are_of_faults() {
        let done = |count: u64| {
            let measured = serde_json::json!({
                "operations": 10, "bytes": 40960, "misses": 0, "syscalls_known": 0,
                "cost": {"elapsed": {"secs": 1, "nanos": 0}, "cpu": {"secs": 0, "nanos": 0},
                         "syscalls": null},
                "latencies": [[1000, 3]],
                "intervals": {"length": {"secs": 1, "nanos": 0}, "operations": [10],
                              "longest_ns": []},
                "verified_bytes": 0,
            });
            let counts = [("pgscan".to_owned(), count)].into_iter().collect();
            Done { measured: serde_json::from_value(measured).unwrap(), counts }
        };
        let mut row = Row::new(case(1, "random"), UNIT);
        fill(&mut row, KERNEL_SWAP, &[&done(3), &done(4)]);
        assert_eq!(row.series[KERNEL_SWAP], 10.0);
        assert_eq!(row.count(KERNEL_SWAP, "pgscan"), Some(7.0));
        assert_eq!(row.count(KERNEL_SWAP, "p99_fault_ns"), Some(1000.0));
        assert_eq!(row.count(KERNEL_SWAP, "p99_ns"), None);
    }
}

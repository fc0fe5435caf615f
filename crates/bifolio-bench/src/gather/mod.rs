//! `gather`: many small rows of a file at random positions.
//!
//! A gather reads the same number of rows (4,096 by default) and sums all their words, so every
//! series also brings the bytes to the processor. `read_many` copies the rows, 1,024 with a call;
//! `pin_many` reads them in place. Beside them: a mapping advised `MADV_RANDOM` (`kernel_mmap`),
//! the same with one `MADV_WILLNEED` for each row before the first is touched (`kernel_willneed`),
//! and io_uring alone (`raw_direct`). The file is 8 times the bound.
//!
//! Each round is a child process: it prepares the state of its row, then gathers for a while.
//!
//! ```text
//!   rows.rs     which rows a gather reads        sums.rs    the sum of rows, and what it must be
//!   task.rs     the child: one round             figures.rs the figures that are asked for
//!   cached.rs   read_many, pin_many              kernel.rs  mappings
//!   raw.rs      io_uring
//! ```

mod cached;
mod figures;
mod kernel;
mod parameters;
mod raw;
mod rows;
mod sums;
mod task;

use std::path::Path;

use serde_json::Value;

use self::parameters::Parameters;
use self::task::{Answer, Task, Way};
use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::Config;
use crate::error::Result;
use crate::format_bytes;
use crate::harness::failures::skip_on_error;
use crate::harness::interleave::{Rounds, Trial, run_trials};
use crate::harness::latency::Latencies;
use crate::harness::memory_group::MemoryGroup;
use crate::harness::{child, pattern};
use crate::progress::Progress;
use bifolio_report::{Case, Counts, Report, Row};

const NAME: &str = "gather";

/// The benchmark; see the head of this module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gather;

impl Benchmark for Gather {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "4096 small rows at random, against mappings with advice and io_uring"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        Ok(Parameters::from_config(config)?.needs())
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = Parameters::from_config(context.config)?;
        let mut report = Report::new(NAME, &context.host, serde_json::to_value(&parameters)?);
        report.ratios = figures::RATIOS.to_vec();
        report.shown_counts = figures::SHOWN_COUNTS.map(Into::into).to_vec();
        report.notes = notes(&parameters);
        let file = pattern::make_in(context.workspace, parameters.sizes.size_bytes, progress)?;
        measure(context, &parameters, &file, &mut report, progress)?;
        report.figures = figures::figures(&report);
        Ok(report)
    }

    fn run_in_child(&self, task: Value) -> Result<Value> {
        Ok(serde_json::to_value(task::run(&serde_json::from_value(task)?)?)?)
    }
}

fn notes(parameters: &Parameters) -> Vec<String> {
    vec![
        format!("{} rows a gather; the sum of all words is part of it", parameters.rows),
        "cold: nothing of the file is in memory; warm: all rows of the gather are; steady: new \
         rows, and a cache that is full"
            .to_owned(),
        format!(
            "a process of kernel_mmap or kernel_willneed is held to {}",
            format_bytes(parameters.sizes.kernel_bytes())
        ),
    ]
}

fn measure(
    context: &Context<'_>,
    parameters: &Parameters,
    file: &Path,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let kernel = [Way::KernelMmap.series(), Way::KernelWillNeed.series()];
    let group = skip_on_error(report, &kernel, MemoryGroup::create(parameters.sizes))?;
    let base = Task::new(file, parameters, group.as_ref().map(MemoryGroup::membership));
    let mut ways = vec![Way::RawDirect, Way::ReadMany, Way::PinMany];
    if group.is_some() {
        ways.extend([Way::KernelWillNeed, Way::KernelMmap]);
    }
    ways.retain(|way| context.config.measures(way.series()));
    // One gather of each: whether it can run is known before anything is timed.
    let mut can_run = Vec::new();
    for way in ways {
        let tried = run(context, base.of(way, parameters.cases()[0]).once());
        can_run.extend(skip_on_error(report, &[way.series()], tried)?.map(|_| way));
    }
    let (mut rows, mut trials) = (Vec::new(), Vec::new());
    for (row_index, case) in parameters.cases().into_iter().enumerate() {
        rows.push(Row::new(case.keys(), "rows/s"));
        for way in can_run.iter().filter(|way| way.is_measured_in(case.state)) {
            let task = base.of(*way, case);
            let run = Box::new(move || run(context, task.clone()));
            trials.push(Trial { row_index, series: way.series(), run });
        }
    }
    progress.start("measure", (trials.len() * parameters.repetitions) as u64);
    let value = |_: &Trial<'_, _>, answer: &Answer| vec![answer.rows_rate()];
    let given = run_trials(&trials, Rounds::exactly(parameters.repetitions), value, progress)?;
    for (trial, given) in trials.iter().zip(&given) {
        let Some(answers) = given.or_fail(&mut rows, trial.row(), trial.series) else { continue };
        report.verified_bytes += answers.iter().map(|answer| answer.verified_bytes).sum::<u64>();
        fill(&mut rows[trial.row_index], trial.series, answers);
    }
    report.rows.extend(rows);
    Ok(())
}

fn run(context: &Context<'_>, task: Task) -> Result<Answer> {
    child::ask(&context.config.child_command, NAME, &task)
}

/// Writes the rounds of `series` into `row`.
fn fill(row: &mut Row, series: &'static str, answers: &[Answer]) {
    let rates: Vec<f64> = answers.iter().map(Answer::rows_rate).collect();
    let mut latencies = Latencies::default();
    answers.iter().for_each(|answer| latencies.merge(&answer.latencies));
    let rows: u64 = answers.iter().map(|answer| answer.rows).sum();
    let cpu_seconds: f64 = answers.iter().map(|answer| answer.cpu.as_secs_f64()).sum();
    let resident_bytes = answers.iter().map(|answer| answer.resident_peak_bytes).max();
    let counts = [
        ("p50_ns", latencies.quantile_ns(0.5)),
        ("p99_ns", latencies.quantile_ns(0.99)),
        ("max_ns", latencies.max_ns()),
        ("gathers", latencies.calls() as f64),
        ("cpu_ns_per_row", cpu_seconds * 1e9 / rows.max(1) as f64),
        ("resident_peak_mib", resident_bytes.unwrap_or(0) as f64 / f64::from(1 << 20)),
    ];
    let counts = counts.map(|(name, value)| (name.to_owned(), value));
    row.add(series, rates, Counts::from_iter(counts));
}

/// A row of the report.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatherCase {
    pub(crate) pattern: rows::Pattern,
    pub(crate) row_bytes: usize,
    pub(crate) state: task::State,
}

impl GatherCase {
    fn keys(&self) -> Case {
        Case::new()
            .with("pattern", self.pattern.name())
            .with("row_bytes", self.row_bytes)
            .with("state", self.state.name())
    }
}

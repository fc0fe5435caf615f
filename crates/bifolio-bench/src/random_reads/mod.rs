//! `random-reads`: reads of single pages from a file much larger than the memory for it.
//!
//! One file, eight times the bound, read in two patterns: `uniform`, in which every read is a miss,
//! and `zipf`. Depth 1: `read_at` against `pread` past the page cache (`raw_direct`), and against
//! the kernel's page cache held to the same memory (`kernel_pread`, `kernel_mmap`). Depth 32:
//! `read_many` from one thread against io_uring alone. The cache and the kernel's page cache are
//! warm: what is timed also evicts.
//!
//! ```text
//!   plan.rs         the rows and their series
//!   stage.rs        one pattern: the cache, the group, the draws; one method a series
//!   one_by_one.rs   the loop of depth 1        mapped.rs   one of its readers
//!   batched.rs      the loops of depth 32      kernel.rs   the child that is held to memory
//!   resident.rs     the child whose resident size is measured
//! ```
//!
//! Trials are short and interleaved, and ratios are taken between neighbours: a shared disk drifts
//! more than the series differ.

mod batched;
mod figures;
mod kernel;
mod mapped;
mod one_by_one;
mod parameters;
mod plan;
mod resident;
mod stage;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::parameters::Parameters;
use self::plan::{Possible, plan};
use self::stage::{Setting, Stage};
use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::Config;
use crate::error::Result;
use crate::format_bytes;
use crate::harness::access::Pattern;
use crate::harness::failures::skip_on_error;
use crate::harness::interleave::{Rounds, Trial, run_trials};
use crate::harness::meter::{self, Measured};
use crate::harness::sizes::Sizes;
use crate::harness::{child, direct, pattern, syscalls};
use crate::progress::Progress;
use bifolio_report::{Report, Rss};

const NAME: &str = "random-reads";

/// Name of the measurement of the resident size, if it is skipped.
const RESIDENT_SIZE: &str = "resident_size";

const PATTERNS: [Pattern; 2] = [Pattern::Uniform, Pattern::Zipf];

/// The benchmark, described at the head of this module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RandomReads;

/// The task of a child.
#[derive(Debug, Serialize, Deserialize)]
enum Task {
    Kernel(kernel::Task),
    Resident(resident::Task),
}

impl Benchmark for RandomReads {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "4096-byte reads of a file 8 times the memory, against the device and the kernel's cache"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        Ok(Parameters::from_config(config)?.needs())
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = Parameters::from_config(context.config)?;
        let mut report = Report::new(NAME, &context.host, serde_json::to_value(&parameters)?);
        report.ratios = figures::RATIOS.to_vec();
        report.shown_counts = figures::SHOWN_COUNTS.map(Into::into).to_vec();
        let setting = set_up(context, parameters, &mut report, progress)?;
        for pattern in PATTERNS {
            measure(context.config, &setting, pattern, &mut report, progress)?;
        }
        if context.config.measures("read_at") {
            measure_resident_size(&setting, &mut report, progress)?;
        }
        report.notes.extend(notes(&setting.parameters));
        report.figures = figures::figures(&report);
        Ok(report)
    }

    fn run_in_child(&self, task: Value) -> Result<Value> {
        Ok(match serde_json::from_value(task)? {
            Task::Kernel(task) => serde_json::to_value(kernel::read(&task)?)?,
            Task::Resident(task) => serde_json::to_value(resident::read_at_random(&task)?)?,
        })
    }
}

fn set_up(
    context: &Context<'_>,
    parameters: Parameters,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<Setting> {
    let file = pattern::make_in(context.workspace, parameters.sizes.size_bytes, progress)?;
    let tracepoint = syscalls::tracepoint_for(report, context.workspace);
    let child_command = context.config.child_command.clone();
    Ok(Setting { file, parameters, tracepoint, child_command })
}

fn notes(parameters: &Parameters) -> [String; 3] {
    [
        "uniform: every page once before any again, so that every read is a miss".to_owned(),
        format!(
            "a process of kernel_pread or kernel_mmap is held to {}, as the process of a cache is",
            format_bytes(parameters.sizes.kernel_bytes())
        ),
        "raw_direct with 32 requests a call waits for all 32 before it goes on, as a call must; \
         with 1024 it goes on as soon as half are complete, and its latencies are of single reads"
            .to_owned(),
    ]
}

/// Measures all rows of one pattern.
fn measure(
    config: &Config,
    setting: &Setting,
    pattern: Pattern,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let mut stage = Stage::new(setting, pattern)?;
    progress.start(&format!("{}: warm the caches", pattern.name()), 2);
    report.verified_bytes += stage.warm()?;
    progress.advance(1);
    let kernel = skip_on_error(report, &["kernel_pread", "kernel_mmap"], stage.add_kernel())?;
    progress.advance(1);
    report.verified_bytes += kernel.unwrap_or(0);
    let raw = skip_on_error(report, &["raw_direct"], direct::probe(&setting.file))?;
    let possible = Possible { raw: raw.is_some(), kernel: kernel.is_some() };

    let mut plan = plan(&setting.parameters, pattern, possible);
    for (_, steps) in &mut plan {
        steps.retain(|step| config.measures(step.series()));
    }
    let steps = plan.iter().flat_map(|(_, steps)| steps);
    let weight: u32 = steps.clone().map(|step| step.weight()).sum();
    let trial_count = steps.count();
    let duration = setting.parameters.trial(PATTERNS.len() as u32 * weight);
    let (mut rows, mut trials) = (Vec::new(), Vec::new());
    for (row_index, (row, steps)) in plan.into_iter().enumerate() {
        rows.push(row);
        let stage = &stage;
        trials.extend(steps.into_iter().map(|step| Trial {
            row_index,
            series: step.series(),
            run: Box::new(move || stage.run(step, duration * step.weight())),
        }));
    }
    let repetitions = setting.parameters.repetitions;
    progress.start(&format!("{}: measure", pattern.name()), (trial_count * repetitions) as u64);
    let value = |_: &Trial<'_, _>, given: &Measured| vec![given.operations_rate()];
    let given = run_trials(&trials, Rounds::exactly(repetitions), value, progress)?;
    for (trial, given) in trials.iter().zip(&given) {
        let Some(given) = given.or_fail(&mut rows, trial.row(), trial.series) else { continue };
        report.verified_bytes += given.iter().map(|trial| trial.verified_bytes).sum::<u64>();
        meter::fill(&mut rows[trial.row_index], trial.series, given, Measured::operations_rate);
    }
    report.rows.extend(rows);
    Ok(())
}

fn measure_resident_size(
    setting: &Setting,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let Sizes { size_bytes, memory_bytes } = setting.parameters.sizes;
    progress.start("read the file in a child process", 1);
    let task = resident::Task { file: setting.file.clone(), size_bytes, memory_bytes };
    let answer = child::ask(&setting.child_command, NAME, &Task::Resident(task));
    progress.advance(1);
    let answer: Option<resident::Answer> = skip_on_error(report, &[RESIDENT_SIZE], answer)?;
    let Some(answer) = answer else { return Ok(()) };
    report.verified_bytes += answer.verified_bytes;
    report.rss = Some(Rss { bound_bytes: memory_bytes, peak_bytes: answer.peak_bytes });
    Ok(())
}

//! `swap`: a memory file four times as large as the memory for it.
//!
//! It is written in order, read in order, read at random, overwritten at random, and then every
//! byte is compared: a memory file of a cache that swaps out to the workspace's disk
//! (`bifolio_swap`), against a file on tmpfs that the kernel swaps out to the same disk, limited to
//! the memory of a process with such a cache (`kernel_swap`). A trial is all of this, in a child
//! process: resident sizes and control groups belong to processes.
//!
//! ```text
//!   work.rs    the phases, and the last look at every byte
//!   medium.rs  the child: who keeps the file
//! ```

mod medium;
mod parameters;
mod work;

use serde_json::Value;

use self::medium::{Answer, BIFOLIO, KERNEL, MemoryKind, Task};
use self::parameters::Parameters;
use self::work::{Load, Phase};
use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::Config;
use crate::error::Result;
use crate::format_bytes;
use crate::harness::access::PAGE_BYTES;
use crate::harness::child;
use crate::harness::failures::skip_on_error;
use crate::harness::interleave::{Trial, run_trials};
use crate::harness::memory_group::MemoryGroup;
use crate::harness::meter::{self, Measured};
use crate::harness::sizes::Sizes;
use crate::harness::swap::SwapFile;
use crate::harness::tmpfs::Tmpfs;
use crate::progress::Progress;
use bifolio_report::{Case, Ratio, Report, Row, Rss};

const NAME: &str = "swap";

const OF_KERNEL: Ratio = Ratio::new(BIFOLIO, KERNEL);

const SHOWN_COUNTS: [&str; 6] =
    ["p50_ns", "p99_ns", "cpu_s_per_gib", "pages_written", "pages_read", "peak_bytes"];

/// The benchmark, described at the head of this module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Swap;

impl Benchmark for Swap {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "a memory file 4 times the memory, against tmpfs and the kernel's swap on the same disk"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        Ok(Parameters::from_config(config)?.sizes.needs_of_swap())
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = Parameters::from_config(context.config)?;
        let mut report = Report::new(NAME, &context.host, serde_json::to_value(&parameters)?);
        report.ratios = vec![OF_KERNEL];
        report.shown_counts = SHOWN_COUNTS.map(Into::into).to_vec();
        let kernel = Kernel::create(context, &parameters);
        let kernel = skip_on_error(&mut report, &[KERNEL], kernel)?;
        measure(context, &parameters, kernel.as_ref(), &mut report, progress)?;
        if kernel.is_some() {
            report.notes.push(format!(
                "a process of {KERNEL} is held to {}, as the process of a cache is; its pages are \
                 those of the whole machine's swap, and CPU time of kernel threads is not in it",
                format_bytes(parameters.sizes.kernel_bytes())
            ));
        }
        report.figures = report.rss.as_ref().map(Rss::figure).into_iter().collect();
        Ok(report)
    }

    fn run_in_child(&self, task: Value) -> Result<Value> {
        Ok(serde_json::to_value(medium::run(&serde_json::from_value(task)?)?)?)
    }
}

/// Resources of the kernel's series, dropped from top to bottom: the group, the file, the swap.
#[derive(Debug)]
struct Kernel {
    group: MemoryGroup,
    tmpfs: Tmpfs,
    _swap: SwapFile,
}

impl Kernel {
    /// # Errors
    /// It is not possible; the message is the reason to skip the series.
    fn create(context: &Context<'_>, parameters: &Parameters) -> Result<Self> {
        let swap = SwapFile::activate(context.workspace, parameters.sizes.swap_bytes())?;
        let tmpfs = Tmpfs::create(context.workspace, parameters.sizes.size_bytes)?;
        let group = MemoryGroup::create(parameters.sizes)?;
        let kernel = Self { group, tmpfs, _swap: swap };
        // One page: whether a child can join is known before anything is timed.
        let page = PAGE_BYTES as u64;
        let sizes = Sizes { size_bytes: page, memory_bytes: page };
        kernel
            .ask(&context.config.child_command, Load { sizes, random_reads: 1, overwrites: 1 })?;
        Ok(kernel)
    }

    fn ask(&self, child_command: &[String], load: Load) -> Result<Answer> {
        let group = self.group.membership();
        let file = self.tmpfs.path().join("file");
        child::ask(
            child_command,
            NAME,
            &Task { memory_kind: MemoryKind::Kernel { group, file }, load },
        )
    }
}

fn measure(
    context: &Context<'_>,
    parameters: &Parameters,
    kernel: Option<&Kernel>,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let load = parameters.load();
    let child_command = &context.config.child_command;
    let bifolio = || {
        let memory_kind = MemoryKind::Bifolio { directory: context.workspace.path().to_owned() };
        child::ask(child_command, NAME, &Task { memory_kind, load })
    };
    let mut trials: Vec<Trial<'_, Answer>> =
        vec![Trial { row_index: 0, series: BIFOLIO, run: Box::new(bifolio) }];
    if let Some(kernel) = kernel {
        let run = Box::new(move || kernel.ask(child_command, load));
        trials.push(Trial { row_index: 0, series: KERNEL, run });
    }
    trials.retain(|trial| context.config.measures(trial.series));
    progress.start("measure", (trials.len() * parameters.repetitions) as u64);
    let values = |_: &Trial<'_, _>, answer: &Answer| {
        answer.done.iter().map(|done| done.measured.bytes_rate()).collect()
    };
    let given = run_trials(&trials, parameters.rounds(), values, progress)?;
    report.rows.extend(Phase::ALL.map(|phase| {
        let case = Case::new().with("phase", phase.name()).with("block_bytes", phase.block_bytes());
        Row::new(case, "bytes/s")
    }));
    let bound_bytes = parameters.sizes.memory_bytes;
    for (trial, given) in trials.iter().zip(&given) {
        let rows = 0..Phase::ALL.len();
        let Some(answers) = given.or_fail(&mut report.rows, rows, trial.series) else { continue };
        for (index, row) in report.rows.iter_mut().enumerate() {
            fill(row, trial.series, index, answers);
        }
        for answer in answers {
            let phases = answer.done.iter().map(|done| done.measured.verified_bytes);
            report.verified_bytes += answer.verified_bytes + phases.sum::<u64>();
        }
        if trial.series == BIFOLIO {
            let peak_bytes = answers.iter().map(|answer| answer.peak_bytes).max();
            report.rss = peak_bytes.map(|peak_bytes| Rss { bound_bytes, peak_bytes });
        }
    }
    Ok(())
}

/// Writes phase number `index` of all trials of `series` into `row`.
fn fill(row: &mut Row, series: &'static str, index: usize, answers: &[Answer]) {
    let trials: Vec<Measured> =
        answers.iter().map(|answer| answer.done[index].measured.clone()).collect();
    meter::fill(row, series, &trials, Measured::bytes_rate);
    let pages = |bytes: u64| bytes as f64 / PAGE_BYTES as f64 / answers.len().max(1) as f64;
    let moved = || answers.iter().map(|answer| answer.done[index].moved);
    let peak_bytes = answers.iter().map(|answer| answer.peak_bytes).max().unwrap_or(0);
    let counts = row.counts.entry(series.into()).or_default();
    counts.insert("pages_written".to_owned(), pages(moved().map(|moved| moved.written).sum()));
    counts.insert("pages_read".to_owned(), pages(moved().map(|moved| moved.read).sum()));
    counts.insert("peak_bytes".to_owned(), peak_bytes as f64);
}

//! `seq-reads`: a memory file from front to back, against tmpfs and against a plain copy.
//!
//! Rows: how the file came to be (`layout`), the size of its folios, the size of the blocks it is
//! read in. Series: `pread` of the same file on tmpfs, written in the same order, with huge pages
//! where the folios are large (`kernel_tmpfs`); a read that locks each folio (`locked_one_by_one`);
//! one that takes one reference at a time (`one_by_one`); `read_at`, which gathers a batch of
//! Entries and takes no reference (`batched`); and a plain copy in the same pattern, or zeroing the
//! buffer where nothing was written (`memcpy_limit`).
//!
//! ```text
//!   layout.rs       in which order a file is written     source.rs   the loops around a read
//!   sources.rs      the ways to read                     stage.rs    one file in all ways
//!   contiguity.rs   whether frames follow pages          figures.rs  what is asked
//! ```
//!
//! One thread on its own CPU, one buffer. A trial continues where the last one of its series ended,
//! and restarts at the end of file, so that all trials together read all of the file. Before that,
//! all bytes of every series are compared, in blocks of every size.

mod contiguity;
mod figures;
mod layout;
mod parameters;
mod source;
mod sources;
mod stage;

use self::layout::{Layout, Plan};
use self::parameters::{BLOCKS_BYTES, FOLIOS_BYTES, Parameters};
use self::stage::{SERIES_COUNT, Stage};
use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::Config;
use crate::error::Result;
use crate::format_bytes;
use crate::progress::Progress;
use bifolio_report::Report;

const NAME: &str = "seq-reads";

/// The benchmark, described at the head of this module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SequentialReads;

impl Benchmark for SequentialReads {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "a memory file in order: in batches and one by one, against tmpfs and a plain copy"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        Ok(Parameters::from_config(config)?.needs())
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = Parameters::from_config(context.config)?;
        let mut report = Report::new(NAME, &context.host, serde_json::to_value(&parameters)?);
        report.ratios = figures::RATIOS.to_vec();
        report.shown_counts = figures::SHOWN_COUNTS.map(Into::into).to_vec();
        for layout in Layout::ALL {
            for folio_bytes in FOLIOS_BYTES {
                let plan = Plan { layout, size_bytes: parameters.size_bytes, folio_bytes };
                measure(context, &parameters, plan, &mut report, progress)?;
            }
        }
        progress.start("look where pages lie, before and after churn", 1);
        if context.config.measures(contiguity::SERIES) {
            contiguity::measure(context, &parameters, &mut report)?;
        }
        progress.advance(1);
        report.figures = figures::figures(&report.rows);
        Ok(report)
    }
}

fn measure(
    context: &Context<'_>,
    parameters: &Parameters,
    plan: Plan,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let what = format!("{}, folios of {}", plan.layout.name(), format_bytes(plan.folio_bytes));
    progress.start(&format!("make and compare: {what}"), 1);
    let stage = Stage::new(context, parameters, plan, report)?;
    report.verified_bytes += stage.verify()?;
    progress.advance(1);
    let trials = BLOCKS_BYTES.len() * SERIES_COUNT;
    progress.start(&format!("measure: {what}"), (trials * parameters.repetitions) as u64);
    let all_trials = trials * Layout::ALL.len() * FOLIOS_BYTES.len();
    stage.measure(
        context.config,
        parameters.repetitions,
        parameters.trial(all_trials),
        report,
        progress,
    )
}

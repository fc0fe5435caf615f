//! `advise`: calls that give up a range (`DontNeed`), and when they make other CPUs drain their
//! LRU batches.
//!
//! A folio may stay for several reasons, only one of which a drain removes. Three caches have one
//! policy each: drain all CPUs if any folio stays (`drain_on_any_failure`, the kernel), if a batch
//! may hold one (`drain_when_it_can_help`, proposed for the kernel in 2026), or only those whose
//! batches hold a folio of the range (`targeted`, the default); and `posix_fadvise` (`kernel`).
//! Each call is prepared, timed by itself, and checked.
//!
//! ```text
//!   stream.rs     a file that stays mapped: nothing can go        MAPPED_STREAM
//!   fallback.rs   what another CPU wrote: all can go              FALLBACK
//!   mixed.rs      a quarter each of four kinds: half can go       MIXED, MIXED_HERE
//!   advised.rs    the policies, and what the file is to each of them
//!   filler.rs     what the other CPU does meanwhile
//!   round.rs      what calls came to, and how that becomes a series
//!   figures.rs    the figures asked for
//! ```

mod advised;
mod fallback;
mod figures;
mod filler;
mod mixed;
mod parameters;
mod round;
mod stream;

use std::path::Path;

use self::advised::KERNEL;
use self::mixed::Batched;
use self::parameters::Parameters;
use self::round::Round;
use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::Config;
use crate::error::Result;
use crate::harness::interleave::{Rounds, Trial, run_trials};
use crate::harness::{cpus, pattern};
use crate::progress::Progress;
use bifolio_report::{Case, Report, Row, Skipped};

const NAME: &str = "advise";
const UNIT: &str = "ns/call";

const MAPPED_STREAM: &str = "mapped_stream";
const FALLBACK: &str = "fallback";
const MIXED: &str = "mixed";
/// The mixed range without a folio in the batch of another CPU.
const MIXED_HERE: &str = "mixed_batched_here";

const SHOWN_COUNTS: [&str; 11] = [
    "p50_ns",
    "p99_ns",
    "rounds",
    "rounds_evicted",
    "rounds_exact",
    "drains_per_round",
    "cpus_drained_per_round",
    "waits_per_round",
    "remaining",
    "remaining_dirty",
    "remaining_mapped",
];

/// The benchmark, described at the head of this module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Advise;

impl Benchmark for Advise {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "advice to evict what cannot go, and what it drains, against posix_fadvise"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        Ok(Parameters::from_config(config)?.needs())
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = Parameters::from_config(context.config)?;
        let mut report = Report::new(NAME, &context.host, serde_json::to_value(&parameters)?);
        report.ratios = figures::RATIOS.to_vec();
        report.shown_counts = SHOWN_COUNTS.map(Into::into).to_vec();
        let &[here, there, ..] = cpus::allowed().as_slice() else {
            let reason = "all of it is about batches of another CPU: needs 2 CPUs, there is 1";
            report.skipped.push(Skipped { series: "*".into(), reason: reason.into() });
            return Ok(report);
        };
        let directory = context.workspace.path();
        let stage = Stage { parameters: &parameters, directory, cpus: [here, there] };
        measure(context, &stage, &mut report, progress)?;
        report.notes = notes(&report);
        report.figures = figures::figures(&report);
        Ok(report)
    }
}

/// The tools that every workload is given.
#[derive(Clone, Copy, Debug)]
struct Stage<'a> {
    parameters: &'a Parameters,
    /// Directory for files.
    directory: &'a Path,
    cpus: [usize; 2],
}

/// A series of a workload: its name, and a function that runs one round of it.
type Series<'a> = (&'static str, Box<dyn Fn() -> Result<Round> + 'a>);

fn measure(
    context: &Context<'_>,
    stage: &Stage<'_>,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let parameters = stage.parameters;
    let file = pattern::make_in(context.workspace, parameters.size_bytes, progress)?;
    progress.start("read it, by every way", 1);
    let series = stream::series(stage, &file, report)?;
    progress.advance(1);
    let chunks = parameters.size_bytes / parameters.chunk_bytes;
    add_row(
        context.config,
        MAPPED_STREAM,
        series,
        parameters.stream_rounds(),
        chunks,
        report,
        progress,
    )?;
    let series = fallback::series(stage, report)?;
    add_row(context.config, FALLBACK, series, parameters.short_rounds(), 1, report, progress)?;
    for (workload, batched) in [(MIXED, Batched::Elsewhere), (MIXED_HERE, Batched::Here)] {
        let series = mixed::series(stage, batched, report)?;
        add_row(context.config, workload, series, parameters.short_rounds(), 1, report, progress)?;
    }
    Ok(())
}

/// Runs rounds of all `series`, interleaved, and adds a row with the results; each call is about
/// one of `chunks` parts of the file.
fn add_row(
    config: &Config,
    workload: &str,
    mut series: Vec<Series<'_>>,
    rounds: Rounds,
    chunks: u64,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    series.retain(|(series, _)| config.measures(series));
    if series.is_empty() {
        return Ok(());
    }
    let trial = |(series, run)| Trial { row_index: 0, series, run };
    let trials: Vec<Trial<'_, Round>> = series.into_iter().map(trial).collect();
    progress.start(&format!("measure {workload}"), (trials.len() * rounds.at_least) as u64);
    let mut row = row(workload);
    let value = |_: &Trial<'_, _>, round: &Round| vec![round.median_ns()];
    let given = run_trials(&trials, rounds, value, progress)?;
    for (trial, given) in trials.iter().zip(&given) {
        let rows = std::slice::from_mut(&mut row);
        let Some(rounds) = given.or_fail(rows, trial.row(), trial.series) else { continue };
        round::fill(&mut row, trial.series, rounds, chunks);
        report.verified_bytes += rounds.iter().map(|round| round.verified_bytes).sum::<u64>();
    }
    report.rows.push(row);
    Ok(())
}

fn row(workload: &str) -> Row {
    Row::new(Case::new().with("workload", workload), UNIT)
}

fn notes(report: &Report) -> Vec<String> {
    let mut notes = vec![
        "remaining: pages in memory after a call, of its range; with a reason: folios that the \
         call said stay, for it"
            .to_owned(),
    ];
    let stream = report.rows.first().filter(|row| row.case.text("workload") == MAPPED_STREAM);
    notes.extend(stream.and_then(|row| row.count(KERNEL, "waits_per_round")).map(|waits| {
        format!(
            "the kernel does not tell how often it drains; a call that waits for another CPU to do \
             it sleeps (waits per round): {waits:.0} in a round of the mapped stream"
        )
    }));
    notes
}

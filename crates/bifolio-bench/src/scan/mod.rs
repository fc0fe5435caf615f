//! `scan`: a whole file from its first byte to its last, in order, initially not in memory.
//!
//! `read_at` through a new cache of an eighth of the file, with blocks of 64 KiB and of 1 MiB;
//! against the device at its best (`raw_direct`: io_uring, large blocks, several in flight), the
//! same loop with a copy into the caller's buffer (`raw_copied`), and the kernel's page cache with
//! its readahead (`kernel_pread`). Before each pass the file is dropped from the page cache.
//! Opening and building are not timed; everything from the first call on is. The cache's memory is
//! made resident when it is built, like that of the device's loop; the kernel allocates its own
//! while it reads.

mod parameters;
mod passes;

use self::parameters::{BLOCKS_BYTES, Parameters};
use self::passes::Scan;
use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::Config;
use crate::error::Result;
use crate::harness::failures::skip_on_error;
use crate::harness::interleave::{Trial, run_trials};
use crate::harness::meter::{self, Measured};
use crate::harness::raw_stream::{Shape, fastest_shape};
use crate::harness::{direct, pattern, syscalls};
use crate::progress::Progress;
use bifolio_report::{Case, Figure, Ratio, Report, Row};

const NAME: &str = "scan";

const OF_RAW: Ratio = Ratio::new("read_at", "raw_direct");
const OF_COPIED: Ratio = Ratio::new("read_at", "raw_copied");
const OF_KERNEL: Ratio = Ratio::new("read_at", "kernel_pread");
const OF_COPIED_AT_LEAST: f64 = 0.95;

const SHOWN_COUNTS: [&str; 7] = [
    "p50_ns",
    "p99_ns",
    "max_ns",
    "cpu_s_per_gib",
    "syscalls_per_op",
    "min_second_over_mean",
    "min_100ms_over_mean",
];

/// The benchmark, described at the head of this module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scans;

impl Benchmark for Scans {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "a whole file in order, from cold, against the device and the kernel's readahead"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        Ok(Parameters::from_config(config)?.sizes.needs())
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = Parameters::from_config(context.config)?;
        let mut report = Report::new(NAME, &context.host, serde_json::to_value(&parameters)?);
        report.ratios = vec![OF_RAW, OF_COPIED, OF_KERNEL];
        report.shown_counts = SHOWN_COUNTS.map(Into::into).to_vec();
        let file = pattern::make_in(context.workspace, parameters.sizes.size_bytes, progress)?;
        let tracepoint = syscalls::tracepoint_for(&mut report, context.workspace);
        let scan = Scan { file: &file, sizes: parameters.sizes, tracepoint };
        let shape = choose_shape(&scan, progress);
        let shape = skip_on_error(&mut report, &["raw_direct", "raw_copied"], shape)?;
        measure(context.config, &scan, shape, &parameters, &mut report, progress)?;
        report.figures = figures(&report.rows);
        Ok(report)
    }
}

fn choose_shape(scan: &Scan<'_>, progress: &mut dyn Progress) -> Result<Shape> {
    direct::probe(scan.file)?;
    progress.start("find the shape the device likes best", 1);
    fastest_shape(|shape| scan.raw("raw_direct", shape, 0))
}

fn measure(
    config: &Config,
    scan: &Scan<'_>,
    shape: Option<Shape>,
    parameters: &Parameters,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let mut trials: Vec<Trial<'_, Measured>> = Vec::new();
    for (row_index, block_bytes) in BLOCKS_BYTES.into_iter().enumerate() {
        let case = Case::new().with("pattern", "sequential").with("block_bytes", block_bytes);
        report.rows.push(Row::new(case, "GiB/s"));
        let mut add = |series, run| trials.push(Trial { row_index, series, run });
        if let Some(shape) = shape {
            add("raw_direct", Box::new(move || scan.raw("raw_direct", shape, 0)));
            add("raw_copied", Box::new(move || scan.raw("raw_copied", shape, block_bytes)));
        }
        add("read_at", Box::new(move || scan.read_at(block_bytes)));
        add("kernel_pread", Box::new(move || scan.kernel_pread(block_bytes)));
    }
    trials.retain(|trial| config.measures(trial.series));
    progress.start("measure", (trials.len() * parameters.repetitions) as u64);
    let value = |_: &Trial<'_, _>, given: &Measured| vec![given.gibibytes_rate()];
    let given = run_trials(&trials, parameters.rounds(), value, progress)?;
    for (trial, given) in trials.iter().zip(&given) {
        let rows = &mut report.rows;
        let Some(given) = given.or_fail(rows, trial.row(), trial.series) else { continue };
        report.verified_bytes += given.iter().map(|trial| trial.verified_bytes).sum::<u64>();
        let row = &mut report.rows[trial.row_index];
        meter::fill(row, trial.series, given, Measured::gibibytes_rate);
    }
    if let Some(shape) = shape {
        report.notes.push(format!("raw_direct and raw_copied read {}", shape.describe()));
    }
    Ok(())
}

/// Returns every figure whose series the rows have.
fn figures(rows: &[Row]) -> Vec<Figure> {
    let figure = |row: &Row| {
        let name = format!("read_at / raw_copied, {} bytes a call", row.case.text("block_bytes"));
        let value = row.ratio(&OF_COPIED)?;
        Some(Figure { name, value, target: OF_COPIED_AT_LEAST, at_most: false })
    };
    rows.iter().filter_map(figure).collect()
}

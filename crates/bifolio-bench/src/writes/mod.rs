//! `writes`: pages at random, and the whole file in order, each trial with a sync at its end; and
//! records of eight threads, each followed by a sync.
//!
//! `write_at` and `sync_data` through a new cache of an eighth of the file; against the device at
//! its best (`raw_direct`: io_uring, then `fdatasync`) and against the kernel's page cache
//! (`kernel_write`: `pwrite`, then `fdatasync`), whose memory is not limited. The cache's memory is
//! made resident when it is built, like that of the device's loop. A file that is written in order
//! may have larger folios, which cost less bookkeeping: the series `write_at_64k_folios`. Every
//! trial writes its own version, and pages are read back past all caches after each.
//!
//! Eight threads write and sync records repeatedly (in syncs per second): records of 256 bytes to
//! one `log`, whichever thread is next, or `records` of a page, each thread in its own region of
//! the file. The kernel's series are `pwrite` and `fdatasync` of the same threads on one
//! descriptor, through the page cache and, for whole pages, past it (`kernel_direct`). The number
//! of flushes per sync of the cache is counted.
//!
//! The time includes the sync. Latencies are those of the single writes: the longest is the longest
//! stall of a writer.

mod ledger;
mod order;
mod parameters;
mod passes;
mod records;

use std::cell::RefCell;

use self::ledger::Ledger;
use self::order::{Order, SEQUENTIAL_BLOCK_BYTES};
use self::parameters::Parameters;
use self::passes::Passes;
use self::records::Layout;
use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::Config;
use crate::error::Result;
use crate::harness::access::PAGE_BYTES;
use crate::harness::failures::skip_on_error;
use crate::harness::interleave::{Trial, run_trials};
use crate::harness::meter::{self, Measured};
use crate::harness::raw_stream::{Shape, fastest_shape};
use crate::harness::{direct, pattern, syscalls};
use crate::progress::Progress;
use bifolio_report::{Case, Figure, Ratio, Report, Row};

const NAME: &str = "writes";

const OF_KERNEL: Ratio = Ratio::new("write_at", "kernel_write");
const OF_RAW: Ratio = Ratio::new("write_at", "raw_direct");
const LARGE: &str = "write_at_64k_folios";
const LARGE_OF_RAW: Ratio = Ratio::new(LARGE, "raw_direct");
const RANDOM_OF_KERNEL_AT_LEAST: f64 = 1.0;
const SEQUENTIAL_OF_RAW_AT_LEAST: f64 = 0.95;

/// Folio size of the series named after it.
const LARGE_FOLIO_BYTES: u64 = 64 << 10;

const OF_KERNEL_DIRECT: Ratio = Ratio::new("write_at", "kernel_direct");
const RECORDS_OF_KERNEL_AT_LEAST: f64 = 2.0;

const RANDOM: &str = "random";
const SEQUENTIAL: &str = "sequential";
const LOG: &str = "log";
const RECORDS: &str = "records";

const FLUSHES_PER_SYNC: &str = "flushes_per_sync";

const SHOWN_COUNTS: [&str; 8] = [
    "p50_ns",
    "p99_ns",
    "p999_ns",
    "max_ns",
    "cpu_s_per_gib",
    "syscalls_per_op",
    "operations",
    FLUSHES_PER_SYNC,
];

/// The benchmark, described at the head of this module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteAndSync;

impl Benchmark for WriteAndSync {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "random pages, a whole file, records of 8 threads, each synced, against device and kernel"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        Ok(Parameters::from_config(config)?.sizes.needs())
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = Parameters::from_config(context.config)?;
        let mut report = Report::new(NAME, &context.host, serde_json::to_value(&parameters)?);
        report.ratios = vec![OF_RAW, LARGE_OF_RAW, OF_KERNEL, OF_KERNEL_DIRECT];
        report.shown_counts = SHOWN_COUNTS.map(Into::into).to_vec();
        let file = pattern::make_in(context.workspace, parameters.sizes.size_bytes, progress)?;
        let passes = Passes {
            file: &file,
            parameters: &parameters,
            tracepoint: syscalls::tracepoint_for(&mut report, context.workspace),
            ledger: RefCell::new(Ledger::new(parameters.sizes.pages())?),
            throttle_ns_max: RefCell::new(None),
            flushes: RefCell::default(),
        };
        let shape = choose_shape(&passes, progress);
        let shape = skip_on_error(&mut report, &["raw_direct"], shape)?;
        measure(context.config, &passes, shape, &mut report, progress)?;
        add_notes(&passes, shape, &mut report);
        report.figures = figures(&report.rows);
        Ok(report)
    }
}

fn choose_shape(passes: &Passes<'_>, progress: &mut dyn Progress) -> Result<Shape> {
    direct::probe(passes.file)?;
    progress.start("find the shape the device likes best", 1);
    fastest_shape(|shape| passes.raw_sequential(shape))
}

fn measure(
    config: &Config,
    passes: &Passes<'_>,
    shape: Option<Shape>,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let random = Order::Random { writes: passes.parameters.random_writes };
    let orders =
        [(RANDOM, random, PAGE_BYTES), (SEQUENTIAL, Order::Sequential, SEQUENTIAL_BLOCK_BYTES)];
    let syncs = Measured::operations_rate;
    let values = [Measured::operations_rate, Measured::gibibytes_rate, syncs, syncs];
    let mut trials: Vec<Trial<'_, Measured>> = Vec::new();
    for (row_index, (pattern, order, block_bytes)) in orders.into_iter().enumerate() {
        let case = Case::new().with("pattern", pattern).with("block_bytes", block_bytes);
        report.rows.push(Row::new(case, if pattern == RANDOM { "writes/s" } else { "GiB/s" }));
        let mut add = |series, run| trials.push(Trial { row_index, series, run });
        if let Some(shape) = shape {
            add(
                "raw_direct",
                match order {
                    Order::Random { .. } => Box::new(move || passes.raw_random(order)),
                    Order::Sequential => Box::new(move || passes.raw_sequential(shape)),
                },
            );
        }
        add("write_at", Box::new(move || passes.write_at(order, "write_at", PAGE_BYTES as u64)));
        if pattern == SEQUENTIAL {
            add(LARGE, Box::new(move || passes.write_at(order, LARGE, LARGE_FOLIO_BYTES)));
        }
        add("kernel_write", Box::new(move || passes.kernel_write(order)));
    }
    add_records(passes, shape.is_some(), report, &mut trials);
    trials.retain(|trial| config.measures(trial.series));
    progress.start("measure", (trials.len() * passes.parameters.repetitions) as u64);
    let value = |trial: &Trial<'_, _>, given: &Measured| vec![values[trial.row_index](given)];
    let given = run_trials(&trials, passes.parameters.rounds(), value, progress)?;
    for (trial, given) in trials.iter().zip(&given) {
        let rows = &mut report.rows;
        let Some(given) = given.or_fail(rows, trial.row(), trial.series) else { continue };
        report.verified_bytes += given.iter().map(|trial| trial.verified_bytes).sum::<u64>();
        let row = &mut report.rows[trial.row_index];
        meter::fill(row, trial.series, given, values[trial.row_index]);
    }
    Ok(())
}

/// Adds the trials of the last rows.
fn add_records<'a>(
    passes: &'a Passes<'_>,
    is_direct: bool,
    report: &mut Report,
    trials: &mut Vec<Trial<'a, Measured>>,
) {
    for (pattern, layout) in [(LOG, Layout::Log), (RECORDS, Layout::Regions)] {
        let row_index = report.rows.len();
        let block_bytes = passes.parameters.records(layout).record_bytes();
        let case = Case::new().with("pattern", pattern).with("block_bytes", block_bytes);
        report.rows.push(Row::new(case, "syncs/s"));
        let mut add = |series, run| trials.push(Trial { row_index, series, run });
        add("write_at", Box::new(move || passes.cached_records(layout, "write_at")));
        add("kernel_write", Box::new(move || passes.kernel_records(layout, "kernel_write", false)));
        if is_direct && layout == Layout::Regions {
            let series = "kernel_direct";
            add(series, Box::new(move || passes.kernel_records(layout, series, true)));
        }
    }
}

fn add_notes(passes: &Passes<'_>, shape: Option<Shape>, report: &mut Report) {
    if let Some(shape) = shape {
        report.notes.push(format!("raw_direct writes {} in order", shape.describe()));
    }
    report.notes.push("kernel_write may use all memory of the machine".to_owned());
    let flushes = *passes.flushes.borrow();
    for (pattern, layout) in [(LOG, Layout::Log), (RECORDS, Layout::Regions)] {
        let (flushes, syncs) = flushes[layout as usize];
        let per_sync = flushes as f64 / syncs.max(1) as f64;
        let threads = records::THREADS;
        let note = format!("{pattern}: {threads} threads, {per_sync:.3} flushes for each sync");
        report.notes.push(note);
        let row = report.rows.iter_mut().find(|row| row.case.text("pattern") == pattern);
        if let Some(counts) = row.and_then(|row| row.counts.get_mut("write_at")) {
            counts.insert(FLUSHES_PER_SYNC.to_owned(), per_sync);
        }
    }
    for row in &report.rows {
        let longest = |series| row.count(series, "max_ns").unwrap_or(0.0) / 1e6;
        report.notes.push(format!(
            "longest single write, {}: write_at {:.1} ms, kernel_write {:.1} ms",
            row.case.text("pattern"),
            longest("write_at"),
            longest("kernel_write"),
        ));
    }
    if let Some(longest) = *passes.throttle_ns_max.borrow() {
        let milliseconds = longest as f64 / 1e6;
        report.notes.push(format!("longest wait of the throttle: {milliseconds:.1} ms"));
        if let Some(config) = report.config.as_object_mut() {
            config.insert("throttle_ns_max".to_owned(), longest.into());
        }
    }
}

/// Returns every figure whose series the rows have.
fn figures(rows: &[Row]) -> Vec<Figure> {
    let asked = [
        (RANDOM, OF_KERNEL, RANDOM_OF_KERNEL_AT_LEAST),
        (SEQUENTIAL, OF_RAW, SEQUENTIAL_OF_RAW_AT_LEAST),
        (SEQUENTIAL, LARGE_OF_RAW, SEQUENTIAL_OF_RAW_AT_LEAST),
        (LOG, OF_KERNEL, RECORDS_OF_KERNEL_AT_LEAST),
        (RECORDS, OF_KERNEL, RECORDS_OF_KERNEL_AT_LEAST),
        (RECORDS, OF_KERNEL_DIRECT, RECORDS_OF_KERNEL_AT_LEAST),
    ];
    let figure = |(pattern, ratio, target): (&str, Ratio, f64)| {
        let row = rows.iter().find(|row| row.case.text("pattern") == pattern)?;
        let name = format!("{} / {}, {pattern}", ratio.over, ratio.under);
        Some(Figure { name, value: row.ratio(&ratio)?, target, at_most: false })
    };
    asked.into_iter().filter_map(figure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pattern_is_measured_against_its_own_rival() {
        let mut rows: Vec<Row> = [RANDOM, SEQUENTIAL]
            .into_iter()
            .map(|pattern| Row::new(Case::new().with("pattern", pattern), "x"))
            .collect();
        for row in &mut rows {
            row.series.insert("write_at".into(), 2.0);
            row.series.insert("kernel_write".into(), 1.0);
            row.series.insert("raw_direct".into(), 4.0);
        }
        let values: Vec<f64> = figures(&rows).iter().map(|figure| figure.value).collect();
        assert_eq!(values, [2.0, 0.5]);
        rows[1].series.shift_remove("raw_direct");
        assert_eq!(figures(&rows).len(), 1);
    }
}

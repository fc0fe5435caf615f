//! `small-reads`: reads of resident bytes, against the kernel and against plain memory.
//!
//! One file on a disk, filled with the pattern, served in seven ways: `pread` of a tmpfs copy and
//! of the file itself (page cache hot), pins with the compare-exchange loop and the frozen bit, the
//! optimistic `read_at`, `read_at` of the file opened to be mapped (`mappable`: a reference to the
//! page, where the optimistic one takes none), and a plain copy from memory (`memcpy_limit`). `hot`
//! reads 64 bytes of one page, `uniform` reads blocks of the whole file at random. All ways run the
//! same loop (`timed`), interleaved (`interleave`); before that the caches are filled, and each way
//! serves every byte of the file, compared with an independent `pread` (`verify`). The caches are
//! filled from the first page to the last (`fill`: `in_order`), but for one row (`shuffled`): there
//! a page's place tells nothing about the place of the next one. Then nodes of a B-tree are
//! searched in four ways (`search`), and a child process reads a file eight times its cache
//! (`resident`).
//!
//! Everything timed is resident: what reading costs when it is not is another benchmark's question.

mod figures;
mod parameters;
mod paths;
mod resident;
mod search;

use std::path::Path;
use std::time::Duration;

use bifolio::{Cache, DirectIo, OpenOptions, PinMode};
use serde_json::Value;

use self::figures::MAPPABLE;
use self::parameters::{PATTERNS, Parameters, Pattern, SHUFFLED};
use self::paths::{Cached, Kernel, Optimistic, Pinned, Plain};
use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::Config;
use crate::error::Result;
use crate::harness::failures::skip_on_error;
use crate::harness::interleave::{Trial, interleave};
use crate::harness::plain_memory::PlainMemory;
use crate::harness::series::{Load, Series};
use crate::harness::tmpfs::Tmpfs;
use crate::harness::verify::{fill, fill_shuffled};
use crate::harness::{child, cpus, pattern};
use crate::progress::Progress;
use bifolio_report::{Case, Counts, Report, Row, Rss, Skipped};

const NAME: &str = "small-reads";

/// The benchmark; see the head of this module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SmallReads;

impl Benchmark for SmallReads {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "64-byte and 4096-byte reads of resident bytes, against pread and a plain copy"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        Ok(Parameters::from_config(config)?.needs())
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = Parameters::from_config(context.config)?;
        let mut report = Report::new(NAME, &context.host, serde_json::to_value(&parameters)?);
        report.ratios = figures::RATIOS.to_vec();
        measure_reads(context, &parameters, &mut report, progress)?;
        if context.config.measures(figures::METADATA) {
            measure_resident_size(context, &parameters, &mut report, progress)?;
        }
        report.figures = figures::figures(&report);
        Ok(report)
    }

    fn run_in_child(&self, task: Value) -> Result<Value> {
        let answer = resident::read_at_random(&serde_json::from_value(task)?)?;
        Ok(serde_json::to_value(answer)?)
    }
}

fn measure_reads(
    context: &Context<'_>,
    parameters: &Parameters,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let file = pattern::make_in(context.workspace, parameters.size_bytes, progress)?;
    let tmpfs = make_tmpfs(context, parameters, report, progress)?;
    progress.start("fill the caches", 3);
    let compare_exchange = open_cached(&file, parameters, PinMode::CompareExchange)?;
    report.verified_bytes += fill(&compare_exchange.file, "pin_cas")?;
    progress.advance(1);
    let frozen_bit = open_cached(&file, parameters, PinMode::FrozenBit)?;
    report.verified_bytes += fill(&frozen_bit.file, "optimistic")?;
    progress.advance(1);
    let mappable = skip_on_error(report, &[MAPPABLE], open_mappable(&file, parameters))?;
    if let Some(mappable) = &mappable {
        report.verified_bytes += fill(&mappable.file, MAPPABLE)?;
    }
    let caches = [compare_exchange, frozen_bit];
    let mut series = make_series(&file, tmpfs.as_ref(), caches, mappable, parameters)?;
    series.retain(|series| context.config.measures(series.name));

    progress.start("compare every byte by every way", series.len() as u64);
    for series in &series {
        report.verified_bytes += series.verify(&file, parameters.verify_threads)?;
        progress.advance(1);
    }
    let cases = runnable_cases(parameters, cpus::allowed().len(), &mut report.skipped);
    let thread_counts = cases.len() / PATTERNS.len();
    let searches = search::trials(context.config, thread_counts);
    let trials = cases.len() * series.len() + SHUFFLED_SERIES + searches;
    let trial = parameters.timed().div_f64((trials * parameters.repetitions) as f64);
    time_series(&series, &cases, (IN_ORDER, trial), parameters, report, progress)?;
    // Their memory is wanted for the cache that is filled out of order.
    drop(series);
    measure_shuffled(context, &file, trial, report, progress)?;
    let directory = context.workspace.path();
    search::measure(context.config, directory, trial, parameters, report, progress)
}

/// The values of the key `fill`.
const IN_ORDER: &str = "in_order";
const FILL_SHUFFLED: &str = "shuffled";
const SHUFFLED_SERIES: usize = 3;

/// One row of a cache whose pages were read in random order.
fn measure_shuffled(
    context: &Context<'_>,
    file: &Path,
    trial: Duration,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let parameters = &Parameters::from_config(context.config)?;
    progress.start("fill a cache out of order", 1);
    let cache = Cache::builder().memory(parameters.resident_memory_bytes()).build()?;
    // Through the kernel's page cache, which has the file: a device would take a minute.
    let options = OpenOptions::new().direct(DirectIo::Never);
    let cached = Cached { file: cache.open(file, &options)?, cache };
    report.verified_bytes += fill_shuffled(&cached.file, parameters.size_bytes, FILL_SHUFFLED)?;
    progress.advance(1);
    let plain = PlainMemory::new(parameters.size_in_memory()?)?;
    let series: [Series; SHUFFLED_SERIES] = [
        Series::new("kernel_pread_file", Kernel::new(file)),
        Series::new("optimistic", Optimistic(cached)),
        Series::new("memcpy_limit", Plain::new(plain)),
    ];
    let mut series = Vec::from(series);
    series.retain(|series| context.config.measures(series.name));
    for series in &series {
        report.verified_bytes += series.verify(file, parameters.verify_threads)?;
    }
    time_series(&series, &[SHUFFLED], (FILL_SHUFFLED, trial), parameters, report, progress)
}

/// A copy of the file in memory; without one a series is skipped.
fn make_tmpfs(
    context: &Context<'_>,
    parameters: &Parameters,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<Option<Tmpfs>> {
    match Tmpfs::create(context.workspace, parameters.size_bytes) {
        Ok(tmpfs) => {
            progress.start("make its copy in memory", parameters.size_bytes);
            pattern::make_file(&tmpfs.path().join("file"), parameters.size_bytes, progress)?;
            Ok(Some(tmpfs))
        }
        Err(error) => skip_on_error(report, &["kernel_pread_tmpfs"], Err(error)),
    }
}

/// All ways to the bytes, in the order of the tables.
fn make_series(
    file: &Path,
    tmpfs: Option<&Tmpfs>,
    [compare_exchange, frozen_bit]: [Cached; 2],
    mappable: Option<Cached>,
    parameters: &Parameters,
) -> Result<Vec<Series>> {
    let plain = PlainMemory::new(parameters.size_in_memory()?)?;
    let mut series = Vec::new();
    if let Some(tmpfs) = tmpfs {
        series.push(Series::new("kernel_pread_tmpfs", Kernel::new(&tmpfs.path().join("file"))));
    }
    series.push(Series::new("kernel_pread_file", Kernel::new(file)));
    series.push(Series::new("pin_cas", Pinned(compare_exchange)));
    series.push(Series::new("pin_frozen_bit", Pinned(frozen_bit.clone())));
    series.push(Series::new("optimistic", Optimistic(frozen_bit)));
    series.extend(mappable.map(|mappable| Series::new(MAPPABLE, Optimistic(mappable))));
    series.push(Series::new("memcpy_limit", Plain::new(plain)));
    Ok(series)
}

fn open_cached(file: &Path, parameters: &Parameters, pin_mode: PinMode) -> Result<Cached> {
    let memory_bytes = parameters.resident_memory_bytes();
    let cache = Cache::builder().memory(memory_bytes).pin_mode(pin_mode).build()?;
    let file = cache.open(file, &OpenOptions::new())?;
    Ok(Cached { cache, file })
}

fn open_mappable(file: &Path, parameters: &Parameters) -> Result<Cached> {
    let cache = Cache::builder().memory(parameters.resident_memory_bytes()).build()?;
    let file = cache.open(file, &OpenOptions::new().mappable(true))?;
    Ok(Cached { cache, file })
}

fn time_series(
    series: &[Series],
    cases: &[(Pattern, usize)],
    (fill, duration): (&str, Duration),
    parameters: &Parameters,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let cpus = cpus::allowed();
    let mut trials = Vec::new();
    for (pattern, threads) in cases {
        let case = Case::new()
            .with("pattern", pattern.name)
            .with("block_bytes", pattern.block_bytes)
            .with("threads", *threads)
            .with("fill", fill);
        let row_index = report.rows.len();
        report.rows.push(Row::new(case, "ops/s"));
        let load = Load {
            block_bytes: pattern.block_bytes,
            extent_bytes: pattern.extent_bytes.unwrap_or(parameters.size_bytes),
            cpus: &cpus[..*threads],
            duration,
        };
        trials.extend(series.iter().map(|series| Trial {
            row_index,
            series: series.name,
            run: Box::new(move || series.run(&load)),
        }));
    }
    progress.start("measure", (trials.len() * parameters.repetitions) as u64);
    let operations = interleave(&trials, parameters.repetitions, &mut report.rows, progress)?;
    // The loop checks the first word of every block it reads.
    report.verified_bytes += operations * size_of::<u64>() as u64;
    Ok(())
}

/// Patterns by numbers of threads; a number that this machine cannot pin is skipped.
fn runnable_cases(
    parameters: &Parameters,
    cpu_count: usize,
    skipped: &mut Vec<Skipped>,
) -> Vec<(Pattern, usize)> {
    let mut cases = Vec::new();
    for &threads in &parameters.threads {
        if threads > cpu_count {
            let reason = format!("{threads} threads need as many CPUs, there are {cpu_count}");
            skipped.push(Skipped { series: "*".to_owned(), reason });
        }
    }
    for pattern in PATTERNS {
        let possible = parameters.threads.iter().filter(|&&threads| threads <= cpu_count);
        cases.extend(possible.map(|&threads| (pattern, threads)));
    }
    cases
}

fn measure_resident_size(
    context: &Context<'_>,
    parameters: &Parameters,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let file = context.workspace.path().join("file-larger-than-its-cache");
    let size_bytes = parameters.large_file_bytes();
    progress.start("make a file of eight times the bound", size_bytes);
    pattern::make_file(&file, size_bytes, progress)?;
    progress.start("read it at random in a child process", 1);
    let task = resident::Task { file, size_bytes, bound_bytes: parameters.memory_bytes };
    let answer = child::ask::<resident::Answer>(&context.config.child_command, NAME, &task);
    progress.advance(1);
    let Some(answer) = skip_on_error(report, &[figures::METADATA], answer)? else { return Ok(()) };
    report.verified_bytes += answer.verified_bytes;
    let case = Case::new().with("pattern", "larger_than_cache").with("folio_bytes", 4096);
    let mut row = Row::new(case, "bytes");
    let per_page = answer.metadata_bytes_per_resident_page(size_bytes);
    row.add(figures::METADATA, vec![per_page], Counts::new());
    report.rows.push(row);
    report.rss = Some(Rss { bound_bytes: parameters.memory_bytes, peak_bytes: answer.peak_bytes });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ParameterSet;

    #[test]
    fn more_threads_than_cpus_are_skipped_with_a_reason() {
        let mut config = Config::new(ParameterSet::Smoke, Vec::new());
        config.threads = Some(vec![1, 64]);
        let parameters = Parameters::from_config(&config).unwrap();
        let mut skipped = Vec::new();
        let cases = runnable_cases(&parameters, 2, &mut skipped);
        assert_eq!(cases.len(), PATTERNS.len());
        assert!(cases.iter().all(|(_, threads)| *threads == 1));
        assert_eq!(skipped.len(), 1);
        assert!(skipped[0].reason.contains("64 threads"));
    }
}

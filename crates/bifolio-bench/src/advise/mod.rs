//! `advise`: calls that give up a range (`DontNeed`), and when they make other CPUs drain their
//! LRU batches.
//!
//! A folio may stay for several reasons, only one of which a drain removes. Three caches have one
//! policy each: drain all CPUs if any folio stays (`drain_on_any_failure`, the kernel), if a batch
//! may hold one (`drain_when_it_can_help`, proposed for the kernel in 2026), or only those whose
//! batches hold a folio of the range (`targeted`, the default); and `posix_fadvise` (`kernel`).
//! Each call is prepared, timed by itself, and checked.
//!
//! - `mapped_stream`: a file that stays mapped, touched and given up chunk by chunk, while the
//!   other CPU keeps its LRU batch filled. Nothing can be evicted, and no drain changes that: the
//!   series differ in the time spent to find that out.
//! - `fallback`: one CPU writes pages one by one, another one syncs and gives them up. All folios
//!   are in the batch of the first CPU, and are evicted only if that batch is drained.

mod files;

use std::cell::Cell;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use bifolio::{Cache, DrainPolicy, Evicted};
use bifolio_report::{Case, Figure, Row, Skipped};
use parking_lot::Mutex;
use rustix::fs::{Advice, fadvise};
use serde::Serialize;

use self::files::{Advised, Filler};
use crate::benchmark::Needs;
use crate::config::Config;
use crate::definition::{Asked, Definition, Target, at_most};
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::cached::Cached;
use crate::harness::counters::waits;
use crate::harness::mapped_file::MappedFile;
use crate::harness::measured::{Measured, Per, Unit};
use crate::harness::sizes::resident_memory_bytes;
use crate::harness::span::Span;
use crate::harness::threads::{run_beside, run_on};
use crate::harness::{cpus, direct, pattern};
use crate::progress::Silent;
use crate::run::{Rounds, Run};

const ON_ANY_FAILURE: &str = "drain_on_any_failure";
const WHEN_IT_CAN_HELP: &str = "drain_when_it_can_help";
const TARGETED: &str = "targeted";
const KERNEL: &str = "kernel";

/// The series of caches, in the order of the tables.
const POLICIES: [(&str, DrainPolicy); 3] = [
    (ON_ANY_FAILURE, DrainPolicy::OnAnyFailure),
    (WHEN_IT_CAN_HELP, DrainPolicy::WhenItCanHelp),
    (TARGETED, DrainPolicy::Targeted),
];

const MAPPED_STREAM: &str = "mapped_stream";
const FALLBACK: &str = "fallback";

const PAGE: u64 = PAGE_BYTES as u64;
/// Bytes of the stream per call, and its passes over the file per round.
const CHUNK_BYTES: u64 = 2 << 20;
const PASSES: u64 = 4;
/// Bytes written on one CPU and given up on another.
const FALLBACK_BYTES: u64 = 8 * PAGE;
/// Bound of the caches of the fallback.
const SMALL_MEMORY_BYTES: u64 = 8 << 20;

/// Creates a target for the time of a call of the mapped stream.
const fn stream(over: &'static str, under: &'static str, target: f64) -> Target {
    let name = "mapped_stream, ns per call: {over} / {under}";
    at_most(name, "workload=mapped_stream", Asked::Ratio(over, under), target)
}

pub(crate) static ADVISE: Definition<Parameters> = Definition {
    name: "advise",
    description: "advice to evict what cannot go, and what it drains, against posix_fadvise",
    parameters,
    // On disk the file; in memory three caches, and the file in the kernel's page cache.
    needs: |Parameters { size_bytes, .. }| Needs {
        disk_bytes: size_bytes + (1 << 20),
        memory_bytes: 3 * resident_memory_bytes(*size_bytes) + size_bytes,
    },
    ratios: &[
        (WHEN_IT_CAN_HELP, ON_ANY_FAILURE),
        (TARGETED, ON_ANY_FAILURE),
        (WHEN_IT_CAN_HELP, KERNEL),
        (TARGETED, KERNEL),
    ],
    shown_counts: &[
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
    ],
    standard: &[
        ("p50_ns", "p50_ns"),
        ("p99_ns", "p99_ns"),
        ("max_ns", "max_ns"),
        ("calls", "calls"),
    ],
    targets: &[
        // The workload itself: a drain finds folios.
        Target {
            name: "mapped_stream, drain_on_any_failure: CPUs drained with each drain",
            case: "workload=mapped_stream",
            value: Asked::Of(|row| {
                let count = |name| row.count(ON_ANY_FAILURE, name);
                Some(count("cpus_drained_per_round")? / count("drains_per_round")?)
            }),
            target: 0.5,
            at_most: false,
        },
        at_most(
            "mapped_stream, {over}: drains per round",
            "workload=mapped_stream",
            Asked::Count(WHEN_IT_CAN_HELP, "drains_per_round"),
            0.0,
        ),
        at_most(
            "mapped_stream, {over}: drains per round",
            "workload=mapped_stream",
            Asked::Count(TARGETED, "drains_per_round"),
            0.0,
        ),
        stream(WHEN_IT_CAN_HELP, ON_ANY_FAILURE, 0.75),
        stream(TARGETED, ON_ANY_FAILURE, 0.75),
        stream(WHEN_IT_CAN_HELP, KERNEL, 0.2),
        stream(TARGETED, KERNEL, 0.2),
    ],
    run,
    child: None,
};

/// The parameters of one run, as the envelope shows them.
#[derive(Debug, Serialize)]
pub(crate) struct Parameters {
    /// Length of the file that stays mapped.
    size_bytes: u64,
    chunk_bytes: u64,
    passes: u64,
    /// Rounds of the mapped stream.
    rounds: usize,
    /// Rounds of the others.
    short_rounds: usize,
    /// Time for further rounds of each workload.
    timed_seconds: f64,
}

fn parameters(config: &Config) -> Result<Parameters> {
    let (size_bytes, rounds, short_rounds) =
        config.of_set([(4 << 20, 2, 10), (128 << 20, 5, 10), (128 << 20, 50, 100)]);
    let size_bytes = config.size_bytes.unwrap_or(size_bytes);
    if size_bytes == 0 || size_bytes > 16 << 30 || !size_bytes.is_multiple_of(CHUNK_BYTES) {
        let range = "--size must be a multiple of 2 MiB, from that to 16 GiB";
        return Err(Error::Refused(range.into()));
    }
    let timed_seconds = config.timed.map_or(0.0, |timed| timed.as_secs_f64());
    let (chunk_bytes, passes) = (CHUNK_BYTES, PASSES);
    Ok(Parameters { size_bytes, chunk_bytes, passes, rounds, short_rounds, timed_seconds })
}

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let &[here, there, ..] = cpus::allowed().as_slice() else {
        let reason = "all of it is about batches of another CPU: needs 2 CPUs, there is 1";
        run.report.skipped.push(Skipped { series: "*".into(), reason: reason.into() });
        return Ok(());
    };
    let (cpus, directory) = ([here, there], run.workspace.path());
    let size_bytes = parameters.size_bytes;
    let file = run.make_file("file", size_bytes)?;
    run.start("read it, by every way", 1);
    let series = each(
        run,
        |name, policy| Stream::of_cache(name, policy, &file, directory),
        || Stream::of_kernel(&file),
    )?;
    run.step();
    let rounds = Rounds::within(parameters.timed_seconds, parameters.rounds);
    let round = |stream: &Stream| {
        run_beside(cpus, || stream.calls(size_bytes), || stream.filler.lock().step())
    };
    measure(run, MAPPED_STREAM, series, round, size_bytes / CHUNK_BYTES, rounds)?;

    let rounds = Rounds::within(parameters.timed_seconds, parameters.short_rounds);
    let path = |name| directory.join(format!("fallback-{name}"));
    let series = each(
        run,
        |name, policy| Fallback::of_cache(name, policy, &path(name)),
        || Fallback::of_kernel(&path(KERNEL)),
    )?;
    measure(run, FALLBACK, series, |fallback: &Fallback| fallback.round(cpus), 1, rounds)?;

    run.note(
        "remaining: pages in memory after a call, of its range; with a reason: folios that the \
         call said stay, for it",
    );
    let stream = run.report.rows.iter().find(|row| row.case.text("workload") == MAPPED_STREAM);
    if let Some(waits) = stream.and_then(|row| row.count(KERNEL, "waits_per_round")) {
        run.note(format!(
            "the kernel does not tell how often it drains; a call that waits for another CPU to do \
             it sleeps (waits per round): {waits:.0} in a round of the mapped stream"
        ));
    }
    run.report.figures = run.report.rows.iter().flat_map(figures_of_rounds).collect();
    Ok(())
}

/// Creates every series that can run: of each policy, and of the kernel.
fn each<T>(
    run: &mut Run<'_>,
    of_cache: impl Fn(&'static str, DrainPolicy) -> Result<T>,
    of_kernel: impl FnOnce() -> Result<T>,
) -> Result<Vec<(&'static str, T)>> {
    let mut series = Vec::new();
    for (name, policy) in POLICIES {
        series.extend(run.attempt(&[name], of_cache(name, policy))?.map(|it| (name, it)));
    }
    series.extend(run.attempt(&[KERNEL], of_kernel())?.map(|it| (KERNEL, it)));
    Ok(series)
}

/// Runs rounds of all `series`, interleaved, and adds a row with the results; each call is about
/// one of `chunks` parts of the file.
fn measure<T>(
    run: &mut Run<'_>,
    workload: &'static str,
    series: Vec<(&'static str, T)>,
    round: impl Fn(&T) -> Result<Round>,
    chunks: u64,
    rounds: Rounds,
) -> Result<()> {
    const NS_PER_CALL: Unit = ("ns/call", Measured::median_ns);
    let mut rows = run.rows();
    rows.row(Case::new().with("workload", workload), NS_PER_CALL);
    for (name, subject) in &series {
        let round = &round;
        rows.series(name, move |_| Ok(round(subject)?.measured(chunks)));
    }
    run.measure(&format!("measure {workload}"), rows, rounds)
}

/// Returns the figures that are asked of all rounds of the fallback.
fn figures_of_rounds(row: &Row) -> Vec<Figure> {
    let rounds = |series: &str, count: &str, what: &str| {
        let name = format!("{FALLBACK}, {series}: {what}");
        let (value, target) = (row.count(series, count)?, row.count(series, "rounds")?);
        Some(Figure { name, value, target, at_most: false })
    };
    if row.case.text("workload") != FALLBACK {
        return Vec::new();
    }
    let series = [ON_ANY_FAILURE, WHEN_IT_CAN_HELP, TARGETED, KERNEL].into_iter();
    let evicted = series
        .filter_map(|series| rounds(series, "rounds_evicted", "rounds that evict everything"));
    let exact = rounds(TARGETED, "rounds_exact", "rounds that drain one CPU, as they should");
    evicted.chain(exact).collect()
}

/// One round of one series.
#[derive(Debug, Default)]
struct Round {
    calls: Measured,
    /// Sum over all calls; `None` for the kernel, which reports nothing.
    outcome: Option<Evicted>,
    /// Pages of the file in memory at the end.
    resident_pages: u64,
    /// Number of times a call slept; counted where calls are many.
    waits: Option<u64>,
    /// Set if exactly the CPUs that hold folios of the range were drained.
    is_exact: bool,
}

impl Round {
    /// Gives up `range` of `file`, and measures the time.
    fn advise(&mut self, file: &Advised, range: Range<u64>) -> Result<()> {
        let begin = Instant::now();
        let outcome = file.dont_need(range)?;
        self.calls.calls.latencies.add(begin.elapsed());
        if let Some(outcome) = outcome {
            *self.outcome.get_or_insert_default() += outcome;
        }
        Ok(())
    }

    /// Returns `true` if so many drains were requested, each of one CPU.
    fn drained(&self, drains: u64) -> bool {
        self.outcome.is_some_and(|it| (it.drains_requested, it.cpus_drained) == (drains, drains))
    }

    fn measured(self, chunks: u64) -> Measured {
        let mut measured = self.calls;
        let flag = |flag| f64::from(u8::from(flag));
        measured.add("rounds", 1.0, Per::Run);
        measured.add("rounds_evicted", flag(self.resident_pages == 0), Per::Run);
        measured.add("remaining", self.resident_pages as f64 / chunks as f64, Per::Trial);
        if let Some(waits) = self.waits {
            measured.add("waits_per_round", waits as f64, Per::Trial);
        }
        if let Some(outcome) = self.outcome {
            measured.add("drains_per_round", outcome.drains_requested as f64, Per::Trial);
            measured.add("cpus_drained_per_round", outcome.cpus_drained as f64, Per::Trial);
            measured.add("rounds_exact", flag(self.is_exact), Per::Run);
            for (reason, folios) in outcome.kept.by_reason() {
                measured.add(format!("remaining_{reason}"), folios as f64, Per::Call);
            }
        }
        measured
    }
}

/// A series of the mapped stream.
struct Stream {
    name: &'static str,
    words: Span,
    file: Advised,
    filler: Mutex<Filler>,
    _cache: Option<MappedFile>,
}

impl Stream {
    fn of_cache(
        name: &'static str,
        policy: DrainPolicy,
        path: &Path,
        directory: &Path,
    ) -> Result<Self> {
        let size_bytes = fs::metadata(path).map_err(Error::system("ask for a size"))?.len();
        let builder = Cache::builder().memory(resident_memory_bytes(size_bytes));
        // Without a swap pages of memory files cannot be evicted, and come into no batch.
        let builder = builder.drain_policy(policy).swap_directory(directory);
        let mapped = MappedFile::open(builder, path)?;
        let filler = Mutex::new(Filler::in_cache(mapped.memory_file()?)?);
        let (words, file) = (mapped.span(), Advised::Cache(mapped.file().clone()));
        Ok(Self { name, words, file, filler, _cache: Some(mapped) })
    }

    /// Opens the file with the smallest folios, as in the cache, read without readahead: with
    /// folios as large as a chunk the kernel would examine nothing. They are mapped by the touches
    /// that follow.
    fn of_kernel(path: &Path) -> Result<Self> {
        direct::drop_page_cache(path)?;
        let file = Advised::in_kernel(path)?;
        let Advised::Kernel { file: opened, mapping } = &file else {
            return Err(Error::Refused("the file is not the kernel's".into()));
        };
        fadvise(opened, 0, None, Advice::Random).map_err(Error::system("advise the kernel"))?;
        for hint in [memmap2::Advice::Random, memmap2::Advice::NoHugePage] {
            // Advice only: a kernel without huge pages has no way to refuse them.
            let _ = mapping.advise(hint);
        }
        let words = mapping.span();
        let filler = Mutex::new(Filler::in_kernel()?);
        let stream = Self { name: KERNEL, words, file, filler, _cache: None };
        stream.touch(0..stream.words.len_bytes())?;
        Ok(stream)
    }

    fn calls(&self, size_bytes: u64) -> Result<Round> {
        let mut round = Round::default();
        let waits_before = waits()?;
        for _ in 0..PASSES {
            for start in (0..size_bytes).step_by(CHUNK_BYTES as usize) {
                let chunk = start..start + CHUNK_BYTES;
                round.calls.verified_bytes += self.touch(chunk.clone())?;
                round.advise(&self.file, chunk)?;
            }
        }
        round.waits = Some(waits()? - waits_before);
        round.resident_pages = self.file.resident_pages()?;
        round.is_exact = round.drained(0);
        Ok(round)
    }

    /// Loads the first word of every page. Returns the number of bytes.
    fn touch(&self, range: Range<u64>) -> Result<u64> {
        let mut verified_bytes = 0;
        for pos_bytes in range.step_by(PAGE_BYTES) {
            if self.words.load(pos_bytes) != pattern::word_at(pos_bytes, 0) {
                return Err(Error::WrongBytes { series: self.name.to_owned(), pos_bytes });
            }
            verified_bytes += size_of::<u64>() as u64;
        }
        Ok(verified_bytes)
    }
}

/// A series of the fallback.
struct Fallback {
    name: &'static str,
    path: PathBuf,
    file: Advised,
    version: Cell<u32>,
    _cache: Option<Cached>,
}

impl Fallback {
    fn of_cache(name: &'static str, policy: DrainPolicy, path: &Path) -> Result<Self> {
        make_cold_file(path)?;
        let builder = Cache::builder().memory(SMALL_MEMORY_BYTES).drain_policy(policy);
        let cached = Cached::open(builder.readahead_max(0), path, true)?;
        let file = Advised::Cache(cached.file.clone());
        let (path, version) = (path.to_owned(), Cell::new(0));
        Ok(Self { name, path, file, version, _cache: Some(cached) })
    }

    fn of_kernel(path: &Path) -> Result<Self> {
        make_cold_file(path)?;
        let file = Advised::in_kernel(path)?;
        let (path, version) = (path.to_owned(), Cell::new(0));
        Ok(Self { name: KERNEL, path, file, version, _cache: None })
    }

    fn round(&self, [writer, adviser]: [usize; 2]) -> Result<Round> {
        let version = self.version.get() + 1;
        self.version.set(version);
        let file = &self.file;
        run_on(writer, || file.write(0..FALLBACK_BYTES, version))?;
        let mut round = run_on(adviser, || {
            let mut round = Round::default();
            file.sync()?;
            round.advise(file, 0..FALLBACK_BYTES)?;
            Ok(round)
        })?;
        round.resident_pages = file.resident_pages()?;
        round.is_exact = round.drained(1);
        // The bytes of the disk, through the kernel, which then drops them from its cache.
        let read = fs::read(&self.path);
        let bytes = read.map_err(Error::system(format!("read {}", self.path.display())))?;
        direct::drop_page_cache(&self.path)?;
        if bytes.len() as u64 != FALLBACK_BYTES || !pattern::matches_version(&bytes, 0, version) {
            return Err(Error::WrongBytes { series: self.name.to_owned(), pos_bytes: 0 });
        }
        round.calls.verified_bytes = FALLBACK_BYTES;
        Ok(round)
    }
}

fn make_cold_file(path: &Path) -> Result<()> {
    pattern::make_file(path, FALLBACK_BYTES, &mut Silent)?;
    direct::drop_page_cache(path)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::harness::measured::fill;

    #[test]
    fn rounds_become_counts_of_rounds_and_of_calls() {
        let round = |resident_pages, knows: bool| {
            let mut round = Round { resident_pages, is_exact: true, ..Round::default() };
            (0..3).for_each(|us| round.calls.calls.latencies.add(Duration::from_micros(10 + us)));
            let mut outcome = Evicted::default();
            (outcome.drains_requested, outcome.cpus_drained) = (1, 2);
            outcome.kept.mapped = 6;
            round.outcome = knows.then_some(outcome);
            round.waits = (!knows).then_some(7);
            round.measured(4)
        };
        let mut row = Row::new(Case::new().with("workload", FALLBACK), "ns/call");
        let rounds = [round(8, true), round(0, true)];
        let unit: Unit = ("ns/call", Measured::median_ns);
        fill(&mut row, TARGETED, &[&rounds[0], &rounds[1]], unit, ADVISE.standard);
        let count = |name| row.count(TARGETED, name);
        let names = ["calls", "rounds", "rounds_evicted", "remaining", "rounds_exact"];
        assert_eq!(names.map(count), [6.0, 2.0, 1.0, 1.0, 2.0].map(Some));
        let names = ["drains_per_round", "cpus_drained_per_round", "remaining_mapped"];
        assert_eq!(names.map(count), [1.0, 2.0, 2.0].map(Some));
        assert_eq!(count("waits_per_round"), None);
        let figures = figures_of_rounds(&row);
        assert_eq!(figures.iter().map(Figure::met).collect::<Vec<_>>(), [false, true]);
        fill(&mut row, KERNEL, &[&round(1, false)], unit, ADVISE.standard);
        assert_eq!(row.count(KERNEL, "drains_per_round"), None);
        assert_eq!(row.count(KERNEL, "waits_per_round"), Some(7.0));
    }
}

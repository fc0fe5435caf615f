//! `random-reads`: reads of single pages from a file much larger than the memory for it.
//!
//! One file, eight times the bound, read in two patterns: `uniform`, in which every read is a miss,
//! and `zipf`. Depth 1: `read_at` against `pread` past the page cache (`raw_direct`), and against
//! the kernel's page cache held to the same memory (`kernel_pread`, `kernel_mmap`), in a child
//! process whose pages in the page cache stay for the next one. Depth 32: `read_many` from one
//! thread against io_uring alone. The cache and the kernel's page cache are warm: what is timed
//! also evicts.
//!
//! Trials are short and interleaved, and ratios are taken between neighbours: a shared disk drifts
//! more than the series differ.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bifolio::{Cache, OpenOptions, ReadRequest};
use bifolio_report::{Case, Counts, Row};
use rustix::fs::{Advice, fadvise};
use rustix::io::pread;
use serde::{Deserialize, Serialize};

use crate::definition::{Asked, Definition, Parameters, at_least, at_most};
use crate::error::{Error, Result};
use crate::format_bytes;
use crate::harness::access::{Access, PAGE_BYTES, Pattern};
use crate::harness::cached::Cached;
use crate::harness::child;
use crate::harness::counters::bytes_read;
use crate::harness::direct::{self, Page};
use crate::harness::measured::{Calls, Measured, Meter, Unit};
use crate::harness::memory_group::{Membership, MemoryGroup, patiently};
use crate::harness::pattern::Checker;
use crate::harness::raw_ring::{RawRing, Transfer};
use crate::harness::sizes::{SizeRule, Sizes};
use crate::harness::span::Mapping;
use crate::harness::threads::run_together;
use crate::run::Run;

const RAW: &str = "raw_direct";
const READ_AT: &str = "read_at";
const READ_MANY: &str = "read_many";
const PREAD: &str = "kernel_pread";
const MMAP: &str = "kernel_mmap";
/// The series of what the cache keeps for itself.
const METADATA: &str = "metadata_per_resident_page";

/// Number of reads that the deep series keep in flight.
const DEPTH: u16 = 32;
/// Requests of a call of `read_many`.
const REQUESTS: usize = 1024;
/// Number of threads that fill the page cache before reads of one page at a time.
const WARMING_THREADS: usize = 16;
const SEED: u64 = 3;

pub(crate) static RANDOM_READS: Definition = Definition {
    name: "random-reads",
    description: "4096-byte reads of a file 8 times the memory, against the device and the \
                  kernel's cache",
    sizes: SizeRule::misses([4 << 20, 64 << 20, 512 << 20]),
    times: [(0.3, 1), (9.0, 3), (320.0, 4)],
    needs: |parameters| parameters.sizes.needs_of_groups(),
    ratios: &[(READ_MANY, RAW), (READ_AT, RAW), (READ_AT, PREAD), (READ_AT, MMAP)],
    shown_counts: &[
        "p50_ns",
        "p99_ns",
        "p999_ns",
        "cpu_ns_per_miss",
        "cpu_s_per_gib",
        "syscalls_per_miss",
        "misses_per_op",
        "min_second_over_mean",
        "min_100ms_over_mean",
    ],
    targets: &[
        at_least("pattern=uniform", Asked::Ratio(READ_MANY, RAW), 0.95),
        // One for 16 misses.
        at_most(
            "pattern=uniform",
            Asked::Of("system calls a miss", |row| row.count(READ_MANY, "syscalls_per_miss")),
            1.0 / 16.0,
        ),
        at_least("pattern=uniform", Asked::Ratio(READ_AT, RAW), 0.95),
        // At depth 1 the device dominates: level with the kernel, within noise.
        at_least("", Asked::Ratio(READ_AT, PREAD), 0.95),
        at_least("", Asked::Ratio(READ_AT, MMAP), 0.95),
        at_most("", Asked::Of("metadata of a page", |row| row.series.get(METADATA).copied()), 72.0),
    ],
    run,
    child: Some(|task| child::serve(task, run_task)),
};

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let file = run.make_file("file", parameters.sizes.size_bytes)?;
    for pattern in [Pattern::Uniform, Pattern::Zipf] {
        measure(run, parameters, &file, pattern)?;
    }
    run.note("uniform: every page once before any again, so that every read is a miss");
    let bytes = format_bytes(parameters.sizes.kernel_bytes());
    run.note(format!(
        "a process of kernel_pread or kernel_mmap is held to {bytes}, as the process of a cache is"
    ));
    run.note(
        "raw_direct at depth 32 starts a read for each that completes, and times single reads",
    );
    Ok(())
}

/// The reads of one trial, which ends with its time or with a draw.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Load {
    pattern: Pattern,
    size_bytes: u64,
    threads: usize,
    duration: Duration,
    draw_end: u64,
}

/// Takes the number of the next draw. All readers of one cache share one counter, in whatever
/// thread or process, so that pages that were kept are not read again.
fn next(draws: &AtomicU64) -> u64 {
    // Relaxed: a draw is a number and publishes nothing.
    draws.fetch_add(1, Ordering::Relaxed)
}

/// Measures all rows of a pattern, with a cache of its own, so that pages kept by one pattern are
/// not hits of the other.
fn measure(
    run: &mut Run<'_>,
    parameters: &Parameters,
    file: &Path,
    pattern: Pattern,
) -> Result<()> {
    const READS: Unit = ("reads/s", Measured::rate);
    let sizes = parameters.sizes;
    direct::drop_page_cache(file)?;
    let builder = Cache::builder().memory(sizes.memory_bytes).io_depth(usize::from(DEPTH));
    let cached = &Cached::open(builder, file, &OpenOptions::new())?;
    let [raw_draws, cached_draws, kernel_draws] = &<[AtomicU64; 3]>::default();
    let (draw_end, size_bytes) = (u64::MAX, sizes.size_bytes);
    let load = move |threads, duration| Load { pattern, size_bytes, threads, duration, draw_end };
    let children = run.children;
    let ask = &|group: &MemoryGroup, is_mapped, load: Load| -> Result<Measured> {
        let (group, file) = (group.membership(), file.to_owned());
        let draw_start = kernel_draws.load(Ordering::Relaxed);
        let task = Task { is_mapped, group, file, load, draw_start };
        let measured: Measured = children.ask(&task)?;
        kernel_draws.fetch_add(measured.calls.operations, Ordering::Relaxed);
        Ok(measured)
    };

    let warming = load(WARMING_THREADS, Duration::MAX);
    let kernel = warm(run, sizes, warming, (cached, cached_draws), ask)?;
    let raw = run.attempt(&[RAW], direct::probe(file))?;

    let case = |depth: u16, threads: usize| {
        let case = Case::new().with("pattern", pattern.name()).with("block_bytes", PAGE_BYTES);
        case.with("depth", depth).with("threads", threads)
    };
    let mut rows = run.rows();
    for &threads in &parameters.threads {
        rows.row(case(1, threads), READS);
        if raw.is_some() {
            rows.series(RAW, move |trial| {
                read_pages(RAW, &load(threads, trial), raw_draws, || past_page_cache(file))
            });
        }
        rows.series(READ_AT, move |trial| {
            cached.with_stats(|| {
                let open = || Ok(through_cache(cached));
                read_pages(READ_AT, &load(threads, trial), cached_draws, open)
            })
        });
        if let Some(group) = &kernel {
            rows.series(PREAD, move |trial| ask(group, false, load(threads, trial)));
            rows.series(MMAP, move |trial| ask(group, true, load(threads, trial)));
        }
    }
    rows.row(case(DEPTH, 1).with("requests_per_call", REQUESTS), READS);
    if raw.is_some() {
        rows.series(RAW, move |trial| read_raw(&load(1, trial), raw_draws, file));
    }
    rows.series(READ_MANY, move |trial| {
        cached.with_stats(|| read_many(&load(1, trial), cached_draws, &cached.file))
    });
    // The other pattern has as many trials.
    let rounds = parameters.shared(2 * rows.trials());
    run.measure(&format!("{}: measure", pattern.name()), rows, rounds)?;
    if pattern == Pattern::Zipf && run.config.target.measures(METADATA) {
        run.report.rows.push(metadata(cached, sizes.pages()));
    }
    Ok(())
}

/// Fills the cache and the page cache of a control group, and beyond: the timed reads then also
/// evict. Returns the group.
fn warm(
    run: &mut Run<'_>,
    sizes: Sizes,
    load: Load,
    cached: (&Cached, &AtomicU64),
    ask: &dyn Fn(&MemoryGroup, bool, Load) -> Result<Measured>,
) -> Result<Option<MemoryGroup>> {
    run.start(&format!("{}: warm the caches", load.pattern.name()), 2);
    let bounds = if load.pattern == Pattern::Zipf { 4 } else { 2 };
    let load = Load { draw_end: bounds * sizes.memory_pages(), ..load };
    let warm = read_pages(READ_AT, &load, cached.1, || Ok(through_cache(cached.0)))?;
    run.report.verified_bytes += warm.verified_bytes;
    run.step();
    let group = MemoryGroup::create(sizes)
        .and_then(|group| ask(&group, false, load).map(|warm| (group, warm.verified_bytes)));
    let kernel = run.attempt(&[PREAD, MMAP], group)?;
    run.report.verified_bytes += kernel.as_ref().map_or(0, |(_, bytes)| *bytes);
    run.step();
    Ok(kernel.map(|(group, _)| group))
}

/// Returns the row of what the cache keeps for each resident page, less a word in its table for
/// each page of the file.
fn metadata(cached: &Cached, file_pages: u64) -> Row {
    let stats = cached.cache.stats();
    let metadata_bytes = stats.memory.metadata_bytes.saturating_sub(8 * file_pages);
    let resident_bytes = stats.memory.frame_bytes.saturating_sub(stats.memory.free_bytes).max(1);
    let per_page = metadata_bytes as f64 * PAGE_BYTES as f64 / resident_bytes as f64;
    let case = Case::new().with("pattern", "larger_than_cache").with("folio_bytes", PAGE_BYTES);
    let mut row = Row::new(case, "bytes");
    row.add(METADATA, vec![per_page], Counts::new());
    row
}

/// Reads pages one at a time in several threads, each with its own reader. The result counts every
/// read as a miss and as one system call, which the caller may correct.
fn read_pages<R: FnMut(&mut Page, u64) -> Result<usize>>(
    series: &'static str,
    load: &Load,
    draws: &AtomicU64,
    open: impl Fn() -> Result<R> + Sync,
) -> Result<Measured> {
    let access = Access::new(load.pattern, load.size_bytes, SEED);
    let meter = Meter::start();
    let body = |(mut read, mut page): (R, Box<Page>)| {
        let (mut calls, mut checker) = (Calls::during(load.duration), Checker::new(series));
        let mut last = Instant::now();
        loop {
            let (draw, since_start) = (next(draws), last.duration_since(meter.started));
            // A thread that started late still reads once: a trial without a read has no rate.
            let is_over = since_start >= load.duration && calls.operations > 0;
            if is_over || draw >= load.draw_end {
                return Ok((calls, checker.finish()?));
            }
            let pos_bytes = access.pos_bytes(draw);
            let begin = Instant::now();
            let read = read(&mut page, pos_bytes)?;
            last = Instant::now();
            if read != PAGE_BYTES {
                return Err(checker.wrong(pos_bytes));
            }
            calls.add(last.duration_since(meter.started), last - begin);
            checker.add(&page.0, pos_bytes)?;
        }
    };
    let threads = run_together(load.threads, |_| Ok((open()?, Page::zeroed())), body)?;
    let cost = meter.stop();
    let mut calls = Calls::during(load.duration);
    threads.iter().for_each(|(thread, _)| calls.merge(thread));
    let verified_bytes = threads.iter().map(|(_, bytes)| bytes).sum();
    let (misses, bytes) = (calls.operations, calls.operations * PAGE_BYTES as u64);
    Ok(Measured { misses, verified_bytes, ..Measured::new(calls, bytes, cost) })
}

fn through_cache(cached: &Cached) -> impl FnMut(&mut Page, u64) -> Result<usize> + use<> {
    let file = cached.file.clone();
    move |page, pos_bytes| Ok(file.read_at(&mut page.0, pos_bytes)?)
}

fn past_page_cache(path: &Path) -> Result<impl FnMut(&mut Page, u64) -> Result<usize> + use<>> {
    let file = direct::open(path, false)?;
    Ok(move |page: &mut Page, pos_bytes| {
        pread(&file, &mut page.0, pos_bytes).map_err(Error::system("read past the page cache"))
    })
}

/// Reads through the kernel's page cache, which is advised that the order is random.
fn through_page_cache(path: &Path) -> Result<impl FnMut(&mut Page, u64) -> Result<usize> + use<>> {
    let failed = || Error::system(format!("open {} for random reads", path.display()));
    let file = File::open(path).map_err(failed())?;
    fadvise(&file, 0, None, Advice::Random).map_err(|errno| failed()(errno.into()))?;
    Ok(move |page: &mut Page, pos_bytes| {
        let read = patiently(|| Ok(pread(&file, &mut page.0, pos_bytes)?));
        read.map_err(Error::system("read the file with pread"))
    })
}

/// Reads a mapping of the kernel, without system calls, advised that the order is random.
fn through_mapping(path: &Path) -> Result<impl FnMut(&mut Page, u64) -> Result<usize> + use<>> {
    let file = File::open(path).map_err(Error::system(format!("open {}", path.display())))?;
    let mapping = Mapping::of_file(&file, false)?;
    mapping.advise(memmap2::Advice::Random)?;
    Ok(move |page: &mut Page, pos_bytes| {
        mapping.span.copy(&mut page.0, pos_bytes);
        Ok(PAGE_BYTES)
    })
}

/// Reads pages past the page cache with io_uring, as many at once as the ring is deep: the limit of
/// calls with many requests. The thread sleeps until half of its reads are complete: waking for
/// each costs a quarter more CPU without a gain.
fn read_raw(load: &Load, draws: &AtomicU64, path: &Path) -> Result<Measured> {
    let access = Access::new(load.pattern, load.size_bytes, SEED);
    let file = direct::open(path, false)?;
    let mut ring = RawRing::new(&file, Transfer::Read, PAGE_BYTES, DEPTH)?;
    let (mut calls, mut checker) = (Calls::during(load.duration), Checker::new(RAW));
    let meter = Meter::start();
    let positions = std::iter::from_fn(|| {
        let is_over = meter.started.elapsed() >= load.duration;
        (!is_over).then(|| access.pos_bytes(next(draws)))
    });
    ring.transfer(
        positions,
        usize::from(DEPTH / 2),
        |_, _| (),
        |read| {
            calls.add(meter.started.elapsed(), read.latency);
            checker.add(read.bytes, read.pos_bytes)
        },
    )?;
    finish(calls, checker, meter, ring.enters)
}

fn read_many(load: &Load, draws: &AtomicU64, file: &bifolio::File) -> Result<Measured> {
    let access = Access::new(load.pattern, load.size_bytes, SEED);
    let mut buffer = vec![0; REQUESTS * PAGE_BYTES];
    let pages = buffer.chunks_exact_mut(PAGE_BYTES);
    let mut requests: Vec<ReadRequest<'_>> = pages.map(|page| ReadRequest::new(page, 0)).collect();
    let (mut calls, mut checker) = (Calls::during(load.duration), Checker::new(READ_MANY));
    let meter = Meter::start();
    while meter.started.elapsed() < load.duration {
        for request in &mut requests {
            request.position = access.pos_bytes(next(draws));
            request.result = Ok(0);
        }
        let begin = Instant::now();
        file.read_many(&mut requests)?;
        calls.time(meter.started.elapsed(), begin.elapsed());
        for request in &mut requests {
            if std::mem::replace(&mut request.result, Ok(0))? != PAGE_BYTES {
                return Err(checker.wrong(request.position));
            }
            checker.add(request.buffer, request.position)?;
        }
        calls.count(meter.started.elapsed(), REQUESTS as u64);
    }
    finish(calls, checker, meter, 0)
}

fn finish(calls: Calls, checker: Checker, meter: Meter, enters: u64) -> Result<Measured> {
    let cost = meter.stop();
    let (misses, verified_bytes) = (calls.operations, checker.finish()?);
    let measured = Measured::new(calls, misses * PAGE_BYTES as u64, cost);
    Ok(Measured { misses, verified_bytes, syscalls: Some(enters), ..measured })
}

/// A trial of the kernel's page cache, in a process of a control group.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    is_mapped: bool,
    group: Membership,
    file: PathBuf,
    load: Load,
    draw_start: u64,
}

fn run_task(Task { is_mapped, group, file, load, draw_start }: &Task) -> Result<Measured> {
    group.join()?;
    let draws = AtomicU64::new(*draw_start);
    let before = bytes_read()?;
    let mut measured = if *is_mapped {
        read_pages(MMAP, load, &draws, || through_mapping(file))?
    } else {
        read_pages(PREAD, load, &draws, || through_page_cache(file))?
    };
    if *is_mapped {
        measured.syscalls = Some(0);
    }
    Ok(Measured { misses: (bytes_read()? - before) / PAGE_BYTES as u64, ..measured })
}

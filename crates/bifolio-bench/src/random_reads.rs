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

use bifolio::{Cache, ReadRequest};
use bifolio_report::Case;
use rustix::fs::{Advice, fadvise};
use rustix::io::pread;
use serde::{Deserialize, Serialize};

use crate::benchmark::Needs;
use crate::config::{Config, Times};
use crate::definition::{Asked, Definition, Target, at_most, ratio_at_least};
use crate::error::{Error, Result};
use crate::format_bytes;
use crate::harness::access::{Access, PAGE_BYTES, Pattern};
use crate::harness::cached::Cached;
use crate::harness::checker::Checker;
use crate::harness::child;
use crate::harness::counters::bytes_read;
use crate::harness::direct::{self, Page};
use crate::harness::mapping::Mapping;
use crate::harness::measured::{ALL, Calls, Cost, Measured, Meter, Unit};
use crate::harness::memory_group::{Membership, MemoryGroup, patiently};
use crate::harness::raw_ring::{Completed, RawRing, Transfer};
use crate::harness::sizes::{FILE_FACTOR, Sizes};
use crate::harness::threads::run_together;
use crate::run::{Children, Run};

const RAW: &str = "raw_direct";
const READ_AT: &str = "read_at";
const READ_MANY: &str = "read_many";
const PREAD: &str = "kernel_pread";
const MMAP: &str = "kernel_mmap";

/// Number of reads that the deep series keep in flight.
const DEPTH: u16 = 32;
/// Deep series make many more reads a second: longer trials cost little, and show stalls.
const DEEP_WEIGHT: u32 = 3;
/// Requests per call of `read_many`; the raw ring of the first waits for all of them.
const CALLS: [u16; 2] = [DEPTH, 1024];
/// Number of threads that fill the page cache before reads of one page at a time.
const WARMING_THREADS: usize = 16;
const SEED: u64 = 3;

pub(crate) static RANDOM_READS: Definition<Parameters> = Definition {
    name: "random-reads",
    description: "4096-byte reads of a file 8 times the memory, against the device and the \
                  kernel's cache",
    parameters,
    // On disk the file; in memory the cache and the kernel's page cache of the same size, and as
    // much again for the processes.
    needs: |Parameters { sizes, .. }| Needs {
        disk_bytes: sizes.size_bytes,
        memory_bytes: sizes.memory_bytes.saturating_mul(2).saturating_add(64 << 20),
    },
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
    standard: ALL,
    targets: &[
        ratio_at_least(
            "misses/s, {over} / {under}, {requests_per_call} requests a call",
            "pattern=uniform",
            [READ_MANY, RAW],
            0.95,
        ),
        at_most(
            "CPU a miss, {over} / {under}, {requests_per_call} requests a call",
            "pattern=uniform",
            Asked::CountRatio(READ_MANY, RAW, "cpu_ns_per_miss"),
            7.0 / 5.0,
        ),
        // One for 16 misses.
        at_most(
            "system calls a miss, {over}, {requests_per_call} requests a call",
            "pattern=uniform",
            Asked::Count(READ_MANY, "syscalls_per_miss"),
            1.0 / 16.0,
        ),
        Target {
            name: "slowest interval / mean, read_many, {requests_per_call} requests a call",
            case: "pattern=uniform",
            value: Asked::Of(|row| {
                let count = |name| row.count(READ_MANY, name);
                count("min_second_over_mean").or_else(|| count("min_100ms_over_mean"))
            }),
            target: 0.5,
            at_most: false,
        },
        ratio_at_least(
            "reads/s, {over} / {under}, {pattern}, threads {threads}",
            "pattern=uniform",
            [READ_AT, RAW],
            0.95,
        ),
        at_most(
            "p99.9, {over} / {under}, {pattern}, threads {threads}",
            "pattern=uniform",
            Asked::CountRatio(READ_AT, RAW, "p999_ns"),
            1.2,
        ),
        // At depth 1 the device dominates: level with the kernel, within noise.
        ratio_at_least(
            "reads/s, {over} / {under}, {pattern}, threads {threads}",
            "",
            [READ_AT, PREAD],
            0.95,
        ),
        ratio_at_least(
            "reads/s, {over} / {under}, {pattern}, threads {threads}",
            "",
            [READ_AT, MMAP],
            0.95,
        ),
    ],
    run,
    child: Some(|task| child::serve(task, run_task)),
};

/// The parameters of one run, as the envelope shows them.
#[derive(Debug, Serialize)]
pub(crate) struct Parameters {
    #[serde(flatten)]
    sizes: Sizes,
    #[serde(flatten)]
    times: Times,
    /// Threads of the series that read one page at a time.
    threads: Vec<usize>,
    depth: u16,
}

fn parameters(config: &Config) -> Result<Parameters> {
    let sizes = Sizes::choose(FILE_FACTOR, config, config.of_set([4 << 20, 64 << 20, 512 << 20]))?;
    let times = config.times([(0.3, 1), (9.0, 3), (320.0, 4)]);
    Ok(Parameters { sizes, times, threads: config.threads_or_default()?, depth: DEPTH })
}

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let file = run.make_file("file", parameters.sizes.size_bytes)?;
    let tracepoint = run.tracepoint();
    let patterns = [Pattern::Uniform, Pattern::Zipf];
    for pattern in patterns {
        measure(run, parameters, &file, pattern, tracepoint, patterns.len() as u32)?;
    }
    run.note("uniform: every page once before any again, so that every read is a miss");
    let bytes = format_bytes(parameters.sizes.kernel_bytes());
    run.note(format!(
        "a process of kernel_pread or kernel_mmap is held to {bytes}, as the process of a cache is"
    ));
    run.note(
        "raw_direct with 32 requests a call waits for all 32 before it goes on, as a call must; \
         with 1024 it goes on as soon as half are complete, and its latencies are of single reads",
    );
    Ok(())
}

/// The pages of one trial, and its end: the time or the draws, whichever is reached first. All
/// readers of one cache share one counter of draws, in whatever thread or process, so that pages
/// kept are not read again; it is Relaxed, because a draw is a number and publishes nothing.
#[derive(Clone, Copy, Debug)]
struct Load<'a> {
    series: &'static str,
    access: &'a Access,
    draws: &'a AtomicU64,
    duration: Duration,
    draw_end: u64,
    tracepoint: Option<u64>,
}

impl Load<'_> {
    /// Takes the number of the next draw.
    fn draw(&self) -> u64 {
        self.draws.fetch_add(1, Ordering::Relaxed)
    }
}

/// One pattern over the file, with a cache and draws of its own, so that pages kept by one pattern
/// are not hits of the other.
#[derive(Debug)]
struct Stage<'a> {
    file: &'a Path,
    sizes: Sizes,
    pattern: Pattern,
    access: Access,
    tracepoint: Option<u64>,
    children: Children<'a>,
    cached: Cached,
    raw_draws: AtomicU64,
    cached_draws: AtomicU64,
    kernel_draws: AtomicU64,
}

impl Stage<'_> {
    fn load<'b>(
        &'b self,
        series: &'static str,
        draws: &'b AtomicU64,
        duration: Duration,
    ) -> Load<'b> {
        let Self { access, tracepoint, .. } = self;
        let tracepoint = *tracepoint;
        Load { series, access, draws, duration, draw_end: u64::MAX, tracepoint }
    }

    /// Returns the reads that fill a cache, and beyond: the timed reads then also evict.
    fn warming_reads(&self) -> u64 {
        let bounds = if self.pattern == Pattern::Zipf { 4 } else { 2 };
        bounds * self.sizes.memory_pages()
    }

    /// Fills the cache.
    fn warm(&self) -> Result<Measured> {
        let load = self.load(READ_AT, &self.cached_draws, Duration::MAX);
        let load = Load { draw_end: self.warming_reads(), ..load };
        read_pages(&load, WARMING_THREADS, || Ok(through_cache(&self.cached)))
    }

    /// Creates the control group, and fills its page cache.
    fn warm_kernel(&self) -> Result<(MemoryGroup, u64)> {
        let group = MemoryGroup::create(self.sizes)?;
        let reads = self.warming_reads();
        let warm = self.ask(&group, false, WARMING_THREADS, (Duration::MAX, reads))?;
        Ok((group, warm.verified_bytes))
    }

    /// Runs a trial of the kernel in a child.
    fn ask(
        &self,
        group: &MemoryGroup,
        is_mapped: bool,
        threads: usize,
        (duration, draw_end): (Duration, u64),
    ) -> Result<Measured> {
        let measured: Measured = self.children.ask(&Task {
            is_mapped,
            group: group.membership(),
            file: self.file.to_owned(),
            size_bytes: self.sizes.size_bytes,
            pattern: self.pattern,
            threads,
            draw_start: self.kernel_draws.load(Ordering::Relaxed),
            draw_end,
            duration,
            tracepoint: self.tracepoint,
        })?;
        self.kernel_draws.fetch_add(measured.calls.operations, Ordering::Relaxed);
        Ok(measured)
    }
}

/// Measures all rows of one of `parts` patterns.
fn measure(
    run: &mut Run<'_>,
    parameters: &Parameters,
    file: &Path,
    pattern: Pattern,
    tracepoint: Option<u64>,
    parts: u32,
) -> Result<()> {
    const READS: Unit = ("reads/s", Measured::rate);
    let sizes = parameters.sizes;
    direct::drop_page_cache(file)?;
    let builder = Cache::builder().memory(sizes.memory_bytes).io_depth(usize::from(DEPTH));
    let stage = &Stage {
        file,
        sizes,
        pattern,
        access: Access::new(pattern, sizes.size_bytes, SEED),
        tracepoint,
        children: run.children,
        cached: Cached::open(builder, file, false)?,
        raw_draws: AtomicU64::default(),
        cached_draws: AtomicU64::default(),
        kernel_draws: AtomicU64::default(),
    };
    run.start(&format!("{}: warm the caches", pattern.name()), 2);
    run.report.verified_bytes += stage.warm()?.verified_bytes;
    run.step();
    let kernel = run.attempt(&[PREAD, MMAP], stage.warm_kernel())?;
    run.report.verified_bytes += kernel.as_ref().map_or(0, |(_, bytes)| *bytes);
    run.step();
    let raw = run.attempt(&[RAW], direct::probe(file))?;

    let case = |depth: u16, threads: usize| {
        let case = Case::new().with("pattern", pattern.name()).with("block_bytes", PAGE_BYTES);
        case.with("depth", depth).with("threads", threads)
    };
    let (cached, mut rows) = (&stage.cached, run.rows());
    for &threads in &parameters.threads {
        rows.row(case(1, threads), READS);
        if raw.is_some() {
            rows.series(RAW, move |trial| {
                let load = stage.load(RAW, &stage.raw_draws, trial);
                read_pages(&load, threads, || past_page_cache(file))
            });
        }
        rows.series(READ_AT, move |trial| {
            let load = stage.load(READ_AT, &stage.cached_draws, trial);
            cached.with_stats(|| read_pages(&load, threads, || Ok(through_cache(cached))))
        });
        if let Some((group, _)) = &kernel {
            rows.series(PREAD, move |trial| stage.ask(group, false, threads, (trial, u64::MAX)));
            rows.series(MMAP, move |trial| stage.ask(group, true, threads, (trial, u64::MAX)));
        }
    }
    for requests in CALLS {
        rows.row(case(DEPTH, 1).with("requests_per_call", requests), READS);
        if raw.is_some() {
            rows.weighted(RAW, DEEP_WEIGHT, move |trial| {
                let load = stage.load(RAW, &stage.raw_draws, trial);
                read_raw(&load, file, requests == DEPTH)
            });
        }
        rows.weighted(READ_MANY, DEEP_WEIGHT, move |trial| {
            let load = stage.load(READ_MANY, &stage.cached_draws, trial);
            cached.with_stats(|| read_many(&load, &cached.file, usize::from(requests)))
        });
    }
    let rounds = parameters.times.shared(parts * rows.weight());
    run.measure(&format!("{}: measure", pattern.name()), rows, rounds)
}

/// Reads pages one at a time in several threads, each with its own reader. The result counts every
/// read as a miss and as one system call, which the caller may correct.
fn read_pages<R: FnMut(&mut Page, u64) -> Result<usize>>(
    load: &Load<'_>,
    threads: usize,
    open: impl Fn() -> Result<R> + Sync,
) -> Result<Measured> {
    let meter = Meter::start(load.tracepoint)?;
    let started = meter.started();
    let body = |(mut read, mut page): (R, Box<Page>)| {
        let (mut calls, mut checker) = (Calls::during(load.duration), Checker::new(load.series));
        let mut last = Instant::now();
        loop {
            let draw = load.draw();
            let since_start = last.duration_since(started);
            // A thread that started late still reads once: a trial without a read has no rate.
            let is_over = since_start >= load.duration && calls.operations > 0;
            if is_over || draw >= load.draw_end {
                return Ok((calls, checker.finish()?));
            }
            let pos_bytes = load.access.pos_bytes(draw);
            let begin = Instant::now();
            let read = read(&mut page, pos_bytes)?;
            last = Instant::now();
            if read != PAGE_BYTES {
                return Err(checker.wrong(pos_bytes));
            }
            calls.add(last.duration_since(started), last - begin);
            checker.add(&page.0, pos_bytes)?;
        }
    };
    let threads = run_together(threads, |_| Ok((open()?, Page::zeroed())), body)?;
    let cost = meter.stop()?;
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
    let span = mapping.span();
    Ok(move |page: &mut Page, pos_bytes| {
        span.copy(&mut page.0, pos_bytes);
        Ok(PAGE_BYTES)
    })
}

/// Calls of the one thread of a deep trial.
struct Deep<'a> {
    load: &'a Load<'a>,
    started: Instant,
    calls: Calls,
    checker: Checker,
}

impl<'a> Deep<'a> {
    fn new(load: &'a Load<'a>, started: Instant) -> Self {
        let (calls, checker) = (Calls::during(load.duration), Checker::new(load.series));
        Self { load, started, calls, checker }
    }

    fn is_over(&self) -> bool {
        let Load { duration, draw_end, draws, .. } = self.load;
        self.started.elapsed() >= *duration || draws.load(Ordering::Relaxed) >= *draw_end
    }

    fn time(&mut self, latency: Duration) {
        self.calls.time(self.started.elapsed(), latency);
    }

    fn count(&mut self, operations: usize) {
        self.calls.count(self.started.elapsed(), operations as u64);
    }

    fn finish(self, cost: Cost, syscalls_known: u64) -> Result<Measured> {
        let (misses, verified_bytes) = (self.calls.operations, self.checker.finish()?);
        let measured = Measured::new(self.calls, misses * PAGE_BYTES as u64, cost);
        Ok(Measured { misses, verified_bytes, syscalls_known, ..measured })
    }
}

/// Reads pages past the page cache with io_uring. With a barrier it waits for all reads in flight
/// before it starts others: the limit of a call with as many requests as the depth. Without, it
/// starts a read for each that completes, the limit of a call with many more, and sleeps until half
/// of its reads are complete: waking for each costs a quarter more CPU without a gain.
fn read_raw(load: &Load<'_>, path: &Path, has_barrier: bool) -> Result<Measured> {
    let file = direct::open(path, false)?;
    let mut ring = RawRing::new(&file, PAGE_BYTES, DEPTH)?;
    let meter = Meter::start(load.tracepoint)?;
    let mut deep = Deep::new(load, meter.started());
    while !deep.is_over() {
        let begin = Instant::now();
        while let Some(block) = ring.take_idle() {
            ring.start(block, Transfer::Read, load.access.pos_bytes(load.draw()))?;
        }
        let before = ring.in_flight();
        ring.complete(if has_barrier { before } else { before / 2 }, |done: Completed<'_>| {
            if !has_barrier {
                deep.time(done.latency);
            }
            deep.checker.add(done.bytes, done.pos_bytes)
        })?;
        if has_barrier {
            deep.time(begin.elapsed());
        }
        deep.count(before - ring.in_flight());
    }
    let cost = meter.stop()?;
    let enters = ring.enters();
    // Reads that were still in flight do not count, but must be right.
    ring.drain(|done| deep.checker.add(done.bytes, done.pos_bytes))?;
    deep.finish(cost, enters)
}

/// Reads pages of a file in a cache, `requests_per_call` with each call of `read_many`.
fn read_many(load: &Load<'_>, file: &bifolio::File, requests_per_call: usize) -> Result<Measured> {
    let mut buffer = vec![0; requests_per_call * PAGE_BYTES];
    let pages = buffer.chunks_exact_mut(PAGE_BYTES);
    let mut requests: Vec<ReadRequest<'_>> = pages.map(|page| ReadRequest::new(0, page)).collect();
    let meter = Meter::start(load.tracepoint)?;
    let mut deep = Deep::new(load, meter.started());
    while !deep.is_over() {
        for request in &mut requests {
            request.position = load.access.pos_bytes(load.draw());
            request.result = Ok(0);
        }
        let begin = Instant::now();
        file.read_many(&mut requests)?;
        deep.time(begin.elapsed());
        for request in &mut requests {
            if std::mem::replace(&mut request.result, Ok(0))? != PAGE_BYTES {
                return Err(deep.checker.wrong(request.position));
            }
            deep.checker.add(request.buffer, request.position)?;
        }
        deep.count(requests_per_call);
    }
    deep.finish(meter.stop()?, 0)
}

/// A trial of the kernel's page cache, in a process of a control group.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    is_mapped: bool,
    group: Membership,
    file: PathBuf,
    size_bytes: u64,
    pattern: Pattern,
    threads: usize,
    draw_start: u64,
    draw_end: u64,
    duration: Duration,
    tracepoint: Option<u64>,
}

/// Runs the child's side.
fn run_task(task: &Task) -> Result<Measured> {
    let Task { is_mapped, group, file, .. } = task;
    group.join()?;
    let load = Load {
        series: if *is_mapped { MMAP } else { PREAD },
        access: &Access::new(task.pattern, task.size_bytes, SEED),
        draws: &AtomicU64::new(task.draw_start),
        duration: task.duration,
        draw_end: task.draw_end.max(task.draw_start),
        tracepoint: task.tracepoint,
    };
    let before = bytes_read()?;
    let measured = if *is_mapped {
        let measured = read_pages(&load, task.threads, || through_mapping(file))?;
        Measured { syscalls_known: 0, ..measured }
    } else {
        read_pages(&load, task.threads, || through_page_cache(file))?
    };
    Ok(Measured { misses: (bytes_read()? - before) / PAGE_BYTES as u64, ..measured })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::pattern;

    #[test]
    fn all_threads_together_make_every_draw_once() {
        let access = Access::new(Pattern::Uniform, 1000 * PAGE_BYTES as u64, 1);
        let run = |short_at_bytes| {
            let load = Load {
                series: "x",
                access: &access,
                draws: &AtomicU64::new(5),
                duration: Duration::MAX,
                draw_end: 905,
                tracepoint: None,
            };
            let read = move |page: &mut Page, pos_bytes| {
                pattern::fill(&mut page.0, pos_bytes);
                Ok(if pos_bytes == short_at_bytes { 512 } else { PAGE_BYTES })
            };
            read_pages(&load, 3, || Ok(read))
        };
        let measured = run(u64::MAX).unwrap();
        assert_eq!((measured.calls.operations, measured.calls.latencies.calls()), (900, 900));
        assert!(measured.verified_bytes >= 900 * 8 + 3 * PAGE_BYTES as u64);
        assert!(run(access.pos_bytes(700)).is_err());
    }
}

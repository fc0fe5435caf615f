//! `small-reads`: reads of resident bytes, against the kernel and against plain memory.
//!
//! One file on a disk, filled with the pattern, served in seven ways: `pread` of a tmpfs copy and
//! of the file itself (page cache hot), pins with the compare-exchange loop and the frozen bit, the
//! optimistic `read_at`, `read_at` of the file opened to be mapped (`mappable`: a reference to the
//! page, where the optimistic one takes none), and a plain copy from memory (`memcpy_limit`). `hot`
//! reads 64 bytes of one page, `uniform` reads blocks of the whole file at random. All ways run the
//! same loop (`harness::reads`), interleaved; before that the caches are filled, and each way
//! serves every byte of the file, compared with an independent `pread`. The caches are filled from
//! the first page to the last (`fill`: `in_order`), but for one row (`shuffled`): there a page's
//! place tells nothing about the place of the next one. Then nodes of a B-tree are searched in four
//! ways (`search.rs`), and a child process reads a file eight times its cache.

mod search;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bifolio::{Cache, DirectIo, OpenOptions, PinMode};
use bifolio_report::{Case, Counts, Figure, Report, Row, Rss};
use rustix::io::pread;
use serde::{Deserialize, Serialize};

use crate::benchmark::Needs;
use crate::config::{Config, Times};
use crate::definition::{Asked, Definition, at_most, ratio_at_least};
use crate::error::{Error, Result};
use crate::harness::cached::Cached;
use crate::harness::counters::{Counters, resident_bytes};
use crate::harness::measured::Measured;
use crate::harness::plain_memory::PlainMemory;
use crate::harness::reads::{
    Block, Load, Positions, Reader, VERIFY_THREADS, Way, fill, fill_shuffled,
};
use crate::harness::sizes::{check_pages, resident_memory_bytes};
use crate::harness::threads::run_together;
use crate::harness::tmpfs::Tmpfs;
use crate::harness::{child, cpus, pattern};
use crate::run::{Rounds, Run};

const PAGE_BYTES: u64 = 4096;

const KERNEL_TMPFS: &str = "kernel_pread_tmpfs";
const KERNEL_FILE: &str = "kernel_pread_file";
const PIN_CAS: &str = "pin_cas";
const PIN: &str = "pin_frozen_bit";
const OPTIMISTIC: &str = "optimistic";
/// The series of a file that can be mapped: the cost of a reference for each read.
const MAPPABLE: &str = "mappable";
/// The series of searches in place.
const READ_WITH: &str = "read_with";
const LIMIT: &str = "memcpy_limit";
/// The series of what the cache keeps for itself.
const METADATA: &str = "metadata_per_resident_page";

const RATIO: &str = "{over} / {under}, {pattern}, {block_bytes} bytes, threads {threads}";

pub(crate) static SMALL_READS: Definition<Parameters> = Definition {
    name: "small-reads",
    description: "64-byte and 4096-byte reads of resident bytes, against pread and a plain copy",
    parameters,
    needs,
    ratios: &[
        (OPTIMISTIC, KERNEL_TMPFS),
        (PIN, PIN_CAS),
        (OPTIMISTIC, LIMIT),
        (MAPPABLE, OPTIMISTIC),
        (READ_WITH, PIN),
        (READ_WITH, LIMIT),
    ],
    shown_counts: &[],
    standard: &[],
    targets: &[
        ratio_at_least(
            RATIO,
            "pattern=hot,block_bytes=64,threads=2",
            [OPTIMISTIC, KERNEL_TMPFS],
            60.0,
        ),
        ratio_at_least(RATIO, "pattern=hot,block_bytes=64,threads=2", [PIN, PIN_CAS], 1.10),
        ratio_at_least(RATIO, "pattern=hot,block_bytes=64,threads=1", [PIN, PIN_CAS], 0.98),
        ratio_at_least(RATIO, "pattern=hot,block_bytes=64,threads=2", [OPTIMISTIC, LIMIT], 0.35),
        ratio_at_least(
            RATIO,
            "pattern=uniform,block_bytes=64,threads=2",
            [OPTIMISTIC, LIMIT],
            0.40,
        ),
        ratio_at_least(
            RATIO,
            "pattern=uniform,block_bytes=4096,threads=2",
            [OPTIMISTIC, LIMIT],
            0.85,
        ),
        ratio_at_least(RATIO, "pattern=hot,block_bytes=64,threads=1", [MAPPABLE, OPTIMISTIC], 0.4),
        ratio_at_least(
            RATIO,
            "pattern=uniform,block_bytes=4096,threads=1",
            [MAPPABLE, OPTIMISTIC],
            0.4,
        ),
        ratio_at_least(
            RATIO,
            "pattern=search_hot,block_bytes=4096,threads=1",
            [READ_WITH, LIMIT],
            0.6,
        ),
        ratio_at_least(
            RATIO,
            "pattern=search_hot,block_bytes=4096,threads=2",
            [READ_WITH, PIN],
            10.0,
        ),
        at_most(
            "metadata for a resident 4 KiB page, bytes beyond 8 for each page of the file",
            "",
            Asked::Of(|row| row.series.get(METADATA).copied()),
            72.0,
        ),
    ],
    run,
    child: Some(|task| child::serve(task, read_larger_file)),
};

/// The parameters of one run, as the envelope shows them.
#[derive(Debug, Serialize)]
pub(crate) struct Parameters {
    /// Length of the file that is resident.
    size_bytes: u64,
    /// Bound of the cache of the child process, which reads a file eight times as large.
    memory_bytes: u64,
    #[serde(flatten)]
    times: Times,
    threads: Vec<usize>,
    verify_threads: usize,
}

fn parameters(config: &Config) -> Result<Parameters> {
    let (size_bytes, memory_bytes) =
        config.of_set([(8 << 20, 8 << 20), (1 << 30, 64 << 20), (1 << 30, 256 << 20)]);
    let parameters = Parameters {
        size_bytes: config.size_bytes.unwrap_or(size_bytes),
        memory_bytes: config.memory_bytes.unwrap_or(memory_bytes),
        times: config.times([(0.4, 2), (8.0, 7), (240.0, 11)]),
        threads: config.threads_or_default()?,
        verify_threads: VERIFY_THREADS,
    };
    check_pages("--size", parameters.size_bytes, 64 << 30)?;
    check_pages("--memory", parameters.memory_bytes, u64::MAX)?;
    for bound_bytes in [parameters.memory_bytes, resident_memory_bytes(parameters.size_bytes)] {
        Cache::builder().memory(bound_bytes).validate()?;
    }
    Ok(parameters)
}

/// On disk two files and the nodes; in memory a copy on tmpfs, the plain copy, the kernel's page
/// cache, three caches, and the nodes.
fn needs(parameters: &Parameters) -> Needs {
    let Parameters { size_bytes, memory_bytes, .. } = *parameters;
    let caches = 3 * resident_memory_bytes(size_bytes);
    let disk_bytes = size_bytes + search::NEEDS_BYTES;
    Needs {
        disk_bytes: disk_bytes.saturating_add(larger_file_bytes(memory_bytes)),
        memory_bytes: (3 * size_bytes + caches + search::NEEDS_BYTES).saturating_add(memory_bytes),
    }
}

/// The reads of a row: a name, the size of the blocks, and the end of the part of the file.
type Pattern = (&'static str, u64, u64);

const PATTERNS: [Pattern; 3] =
    [("hot", 64, PAGE_BYTES), ("uniform", 64, u64::MAX), ("uniform", PAGE_BYTES, u64::MAX)];
const SHUFFLED_PATTERN: Pattern = PATTERNS[1];

/// The values of the key `fill`.
const IN_ORDER: &str = "in_order";
const SHUFFLED: &str = "shuffled";
const SHUFFLED_SERIES: usize = 3;

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let size_bytes = parameters.size_bytes;
    let file = run.make_file("file", size_bytes)?;
    let mut ways = ways(run, &file, size_bytes)?;
    run.verify(&mut ways, &file)?;
    let threads = &parameters.threads;
    let trials = PATTERNS.len() * threads.len() * ways.len()
        + SHUFFLED_SERIES
        + search::trials(run.config, threads.len());
    let rounds = parameters.times.shared(trials as u32);
    measure(run, &ways, &PATTERNS, threads, (IN_ORDER, size_bytes), rounds)?;
    // Their memory is wanted for the cache that is filled out of order.
    drop(ways);
    let mut ways = shuffled(run, &file, size_bytes)?;
    run.verify(&mut ways, &file)?;
    measure(run, &ways, &[SHUFFLED_PATTERN], &[1], (SHUFFLED, size_bytes), rounds)?;
    drop(ways);
    search::measure(run, threads, rounds)?;
    if run.config.target.measures(METADATA) {
        measure_resident_size(run, parameters.memory_bytes)?;
    }
    let rows = &run.report.rows;
    let scaling = [(OPTIMISTIC, "hot", "64"), (READ_WITH, "search_hot", "4096")];
    run.report.figures = scaling.into_iter().filter_map(|it| scaling_of(rows, it)).collect();
    Ok(())
}

/// Creates all ways to the bytes, in the order of the tables.
fn ways(run: &mut Run<'_>, file: &Path, size_bytes: u64) -> Result<Vec<Way>> {
    let mut ways = Vec::new();
    let tmpfs = Tmpfs::create(run.workspace, size_bytes);
    if let Some(tmpfs) = run.attempt(&[KERNEL_TMPFS], tmpfs)? {
        let copy = tmpfs.path().join("file");
        run.make_file_at(&copy, size_bytes)?;
        ways.push(kernel(KERNEL_TMPFS, &copy, Some(tmpfs)));
    }
    ways.push(kernel(KERNEL_FILE, file, None));
    run.start("fill the caches", 3);
    let builder = || Cache::builder().memory(resident_memory_bytes(size_bytes));
    let mut open = |series, mode, options: OpenOptions| -> Result<Cached> {
        let cached = Cached::open_with(builder().pin_mode(mode), file, &options)?;
        run.report.verified_bytes += fill(&cached.file, series)?;
        run.step();
        Ok(cached)
    };
    ways.push(pinned(PIN_CAS, open(PIN_CAS, PinMode::CompareExchange, OpenOptions::new())?));
    let frozen_bit = open(OPTIMISTIC, PinMode::FrozenBit, OpenOptions::new())?;
    ways.push(pinned(PIN, frozen_bit.clone()));
    ways.push(optimistic(OPTIMISTIC, frozen_bit));
    let mappable = open(MAPPABLE, PinMode::default(), OpenOptions::new().mappable(true));
    ways.extend(run.attempt(&[MAPPABLE], mappable)?.map(|it| optimistic(MAPPABLE, it)));
    ways.push(plain(size_bytes)?);
    Ok(ways)
}

/// Creates the ways of the row with a cache whose pages were read in random order.
fn shuffled(run: &mut Run<'_>, file: &Path, size_bytes: u64) -> Result<Vec<Way>> {
    run.start("fill a cache out of order", 1);
    let builder = Cache::builder().memory(resident_memory_bytes(size_bytes));
    // Through the kernel's page cache, which has the file: a device would take a minute.
    let options = OpenOptions::new().direct(DirectIo::Never);
    let cached = Cached::open_with(builder, file, &options)?;
    run.report.verified_bytes += fill_shuffled(&cached.file, SHUFFLED)?;
    run.step();
    Ok(vec![kernel(KERNEL_FILE, file, None), optimistic(OPTIMISTIC, cached), plain(size_bytes)?])
}

/// Creates the series of `pread`. Each thread has its own descriptor: a shared one would cost the
/// kernel a contended count that is not the page cache's.
fn kernel(series: &'static str, path: &Path, tmpfs: Option<Tmpfs>) -> Way {
    let path = path.to_owned();
    let open = move || {
        let _ = &tmpfs;
        File::open(&path).map_err(Error::system(format!("open {}", path.display())))
    };
    Way::new(series, Some(1), open, Vec::new)
}

impl Reader for File {
    #[inline(always)]
    fn read(&mut self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
        // The text of the error is made only if there is one.
        pread(&*self, block, pos_bytes)
            .map_err(|errno| Error::system("read the file with pread")(errno))
    }
}

/// Creates the series of `read_at`.
fn optimistic(series: &'static str, cached: Cached) -> Way {
    let file = cached.file.clone();
    Way::new(series, None, move || Ok(ReadAt(file.clone())), move || hits(&cached))
}

struct ReadAt(bifolio::File);

impl Reader for ReadAt {
    #[inline(always)]
    fn read(&mut self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
        Ok(self.0.read_at(block, pos_bytes)?)
    }
}

/// Creates a series that pins, copies and unpins.
fn pinned(series: &'static str, cached: Cached) -> Way {
    let file = cached.file.clone();
    Way::new(series, None, move || Ok(Pinned(file.clone())), move || hits(&cached))
}

struct Pinned(bifolio::File);

impl Reader for Pinned {
    #[inline(always)]
    fn read(&mut self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
        let pin = self.0.pin(pos_bytes..pos_bytes + block.len() as u64)?;
        pin.copy_to(0, block).unwrap();
        Ok(block.len())
    }
}

/// Creates the limit: a copy from plain memory.
fn plain(size_bytes: u64) -> Result<Way> {
    let memory = Arc::new(PlainMemory::filled(size_bytes, |bytes| pattern::fill(bytes, 0))?);
    Ok(Way::new(LIMIT, Some(0), move || Ok(Arc::clone(&memory)), Vec::new))
}

impl Reader for Arc<PlainMemory> {
    #[inline(always)]
    fn read(&mut self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
        // A position of a file in memory fits.
        self.copy(block, pos_bytes as usize);
        Ok(block.len())
    }
}

fn hits(cached: &Cached) -> Counters {
    let stats = cached.cache.stats();
    vec![
        ("hits_optimistic", stats.hits_optimistic),
        ("hits_pinned", stats.hits_pinned),
        ("hits_slow", stats.hits_slow),
        ("pins", stats.pins),
        ("optimistic_retries", stats.optimistic_retries),
        ("misses", stats.misses),
        // Each request of a device is one; a hit makes none.
        ("syscalls", stats.read_requests + stats.writeback + stats.syncs),
    ]
}

fn measure(
    run: &mut Run<'_>,
    ways: &[Way],
    patterns: &[Pattern],
    threads: &[usize],
    (fill, size_bytes): (&'static str, u64),
    rounds: Rounds,
) -> Result<()> {
    let cpus = cpus::of_threads(threads)?;
    let mut rows = run.rows();
    for &(pattern, block_bytes, extent_bytes) in patterns {
        for &threads in threads {
            rows.row(case(pattern, block_bytes, threads, fill), ("ops/s", Measured::rate));
            let extent_bytes = extent_bytes.min(size_bytes);
            let load = Load { block_bytes, extent_bytes, cpus: &cpus[..threads] };
            for way in ways {
                rows.series(way.series, move |duration| way.run(&load, duration));
            }
        }
    }
    run.measure("measure", rows, rounds)
}

fn case(pattern: &'static str, block_bytes: u64, threads: usize, fill: &'static str) -> Case {
    let case = Case::new().with("pattern", pattern).with("block_bytes", block_bytes);
    case.with("threads", threads).with("fill", fill)
}

/// Returns the figure of two threads against one, on one hot page.
fn scaling_of(rows: &[Row], (series, pattern, block): (&str, &str, &str)) -> Option<Figure> {
    let rate = |threads| {
        let row = rows.iter().find(|row| {
            let has = |key, value| row.case.text(key) == value;
            has("pattern", pattern) && has("block_bytes", block) && has("threads", threads)
        });
        row?.series.get(series).copied()
    };
    let name = format!("{series}, {pattern}, threads 2 / threads 1");
    Some(Figure { name, value: rate("2")? / rate("1")?, target: 1.9, at_most: false })
}

/// The task of the child: a file larger than its cache.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    file: PathBuf,
    bound_bytes: u64,
}

/// The result of the child.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    peak_bytes: u64,
    verified_bytes: u64,
    /// Metadata for each resident page, less a table word for each page of the file.
    metadata_per_page: f64,
}

/// Ratio of the file that the child reads, and the bound.
fn larger_file_bytes(bound_bytes: u64) -> u64 {
    bound_bytes.saturating_mul(8)
}

/// Threads of the child: enough to keep a disk busy with single misses.
const THREADS: u64 = 8;
/// How often the child fills its cache anew: often enough to touch all tables, and to evict for
/// long.
const BOUNDS_READ: u64 = 4;

fn measure_resident_size(run: &mut Run<'_>, bound_bytes: u64) -> Result<()> {
    let file = run.make_file("file-larger-than-its-cache", larger_file_bytes(bound_bytes))?;
    run.start("read it at random in a child process", 1);
    let answer = run.children.ask::<Answer>(&Task { file, bound_bytes });
    run.step();
    let Some(answer) = run.attempt(&[METADATA], answer)? else { return Ok(()) };
    let Report { verified_bytes, rows, rss, .. } = &mut run.report;
    *verified_bytes += answer.verified_bytes;
    let case = Case::new().with("pattern", "larger_than_cache").with("folio_bytes", PAGE_BYTES);
    let mut row = Row::new(case, "bytes");
    row.add(METADATA, vec![answer.metadata_per_page], Counts::new());
    rows.push(row);
    *rss = Some(Rss { bound_bytes, peak_bytes: answer.peak_bytes });
    Ok(())
}

/// Reads pages chosen at random, several times as many as the cache holds. Nothing else lives in
/// this process: a bounded cache, a block for each thread, the program.
fn read_larger_file(task: &Task) -> Result<Answer> {
    let cached = Cached::open(Cache::builder().memory(task.bound_bytes), &task.file, false)?;
    let file_bytes = larger_file_bytes(task.bound_bytes);
    let reads_per_thread = BOUNDS_READ * task.bound_bytes / PAGE_BYTES / THREADS;
    let read = |mut positions: Positions| -> Result<()> {
        let mut block = Block([0; PAGE_BYTES as usize]);
        for _ in 0..reads_per_thread {
            let pos_bytes = positions.next();
            let read = cached.file.read_at(&mut block.0, pos_bytes)?;
            if read as u64 != PAGE_BYTES || !pattern::matches(&block.0, pos_bytes) {
                let series = "a cache smaller than its file".to_owned();
                return Err(Error::WrongBytes { series, pos_bytes });
            }
        }
        Ok(())
    };
    let positions = |seed: usize| Ok(Positions::new(file_bytes, PAGE_BYTES, seed as u64));
    run_together(THREADS as usize, positions, read)?;
    let stats = cached.cache.stats();
    let table_bytes = file_bytes / PAGE_BYTES * size_of::<u64>() as u64;
    let resident_pages = stats.frame_bytes.saturating_sub(stats.free_bytes) / PAGE_BYTES;
    let metadata_bytes = stats.metadata_bytes.saturating_sub(table_bytes);
    let peak_bytes = resident_bytes("VmHWM")?;
    cached.close()?;
    Ok(Answer {
        peak_bytes,
        verified_bytes: THREADS * reads_per_thread * PAGE_BYTES,
        metadata_per_page: metadata_bytes as f64 / resident_pages.max(1) as f64,
    })
}

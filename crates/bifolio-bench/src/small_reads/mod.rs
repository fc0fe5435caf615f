//! `small-reads`: reads of resident bytes, against the kernel and against plain memory.
//!
//! One file on a disk, filled with the pattern, served in seven ways: `pread` of a tmpfs copy and
//! of the file itself (page cache hot), pins with the compare-exchange loop and the frozen bit, the
//! optimistic `read_at`, `read_at` of the file opened to be mapped (`mappable`: a reference to the
//! page, where the optimistic one takes none), and a plain copy from memory (`memcpy_limit`). `hot`
//! reads 64 bytes of one page, `uniform` reads blocks of the whole file at random. All ways run the
//! same loop (`harness::reads`), interleaved; before that the caches are filled from the first page
//! to the last (`fill`: `in_order`), and each way serves every byte of the file. Then nodes of a
//! B-tree are searched in four ways (`search.rs`).

mod search;

use std::fs::File;
use std::path::Path;

use bifolio::{Cache, OpenOptions, PinMode};
use bifolio_report::{Case, Figure, Row};
use rustix::io::pread;

use crate::benchmark::Needs;
use crate::definition::{Asked, Definition, Parameters, at_least};
use crate::error::{Error, Result};
use crate::harness::cached::Cached;
use crate::harness::counters::Counters;
use crate::harness::measured::Measured;
use crate::harness::reads::{Load, Reader, Way, verify};
use crate::harness::sizes::{SizeRule, Sizes, resident_memory_bytes};
use crate::harness::span::Span;
use crate::harness::tmpfs::Tmpfs;
use crate::harness::{cpus, pattern};
use crate::progress::Silent;
use crate::run::Run;

const PAGE_BYTES: u64 = 4096;

const KERNEL_TMPFS: &str = "kernel_pread_tmpfs";
const KERNEL_FILE: &str = "kernel_pread_file";
const PIN_CAS: &str = "pin_cas";
const PIN: &str = "pin_frozen_bit";
const OPTIMISTIC: &str = "optimistic";
const MAPPABLE: &str = "mappable";
/// The series of searches in place.
const READ_WITH: &str = "read_with";
const LIMIT: &str = "memcpy_limit";

pub(crate) static SMALL_READS: Definition = Definition {
    name: "small-reads",
    description: "64-byte and 4096-byte reads of resident bytes, against pread and a plain copy",
    sizes: SizeRule::Resident {
        size_bytes: [8 << 20, 1 << 30, 1 << 30],
        unit_bytes: PAGE_BYTES,
        max_bytes: 64 << 30,
    },
    times: [(0.4, 2), (8.0, 7), (240.0, 11)],
    // On disk the file and the nodes; in memory a copy on tmpfs, the plain copy, the kernel's page
    // cache, three caches, and the nodes.
    needs: |Parameters { sizes: Sizes { size_bytes, .. }, .. }| Needs {
        disk_bytes: size_bytes + search::NEEDS_BYTES,
        memory_bytes: 3 * (size_bytes + resident_memory_bytes(*size_bytes)) + search::NEEDS_BYTES,
    },
    ratios: &[
        (OPTIMISTIC, KERNEL_TMPFS),
        (PIN, PIN_CAS),
        (OPTIMISTIC, LIMIT),
        (MAPPABLE, OPTIMISTIC),
        (READ_WITH, PIN),
        (READ_WITH, LIMIT),
    ],
    shown_counts: &[],
    targets: &[
        at_least("pattern=hot,threads=2", Asked::Ratio(OPTIMISTIC, KERNEL_TMPFS), 60.0),
        at_least("pattern=hot,threads=2", Asked::Ratio(PIN, PIN_CAS), 1.10),
        at_least("pattern=hot,threads=1", Asked::Ratio(PIN, PIN_CAS), 0.98),
        at_least("pattern=hot,threads=2", Asked::Ratio(OPTIMISTIC, LIMIT), 0.35),
        at_least("pattern=uniform,block_bytes=64", Asked::Ratio(OPTIMISTIC, LIMIT), 0.40),
        at_least("pattern=uniform,block_bytes=4096", Asked::Ratio(OPTIMISTIC, LIMIT), 0.85),
        at_least("pattern=hot,threads=1", Asked::Ratio(MAPPABLE, OPTIMISTIC), 0.4),
        at_least("block_bytes=4096,threads=1", Asked::Ratio(MAPPABLE, OPTIMISTIC), 0.4),
        at_least("pattern=search_hot,threads=1", Asked::Ratio(READ_WITH, LIMIT), 0.6),
        at_least("pattern=search_hot,threads=2", Asked::Ratio(READ_WITH, PIN), 10.0),
    ],
    run,
    child: None,
};

/// The reads of a row: a name, the size of the blocks, and the end of the part of the file.
const PATTERNS: [(&str, usize, u64); 3] =
    [("hot", 64, PAGE_BYTES), ("uniform", 64, u64::MAX), ("uniform", 4096, u64::MAX)];

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let size_bytes = parameters.sizes.size_bytes;
    let file = run.make_file("file", size_bytes)?;
    let mut ways = ways(run, &file, size_bytes)?;
    run.verify(&mut ways, size_bytes)?;
    let threads = &parameters.threads;
    let trials_of_threads = PATTERNS.len() * ways.len() + search::TRIALS;
    let rounds = parameters.shared(trials_of_threads * threads.len());
    let cpus = cpus::of_threads(parameters.threads_max())?;
    let mut rows = run.rows();
    for (pattern, block_bytes, extent_bytes) in PATTERNS {
        for &threads in threads {
            rows.row(case(pattern, block_bytes, threads), ("ops/s", Measured::rate));
            let extent_bytes = extent_bytes.min(size_bytes);
            let load = Load { block_bytes, extent_bytes, cpus: &cpus[..threads] };
            for way in &ways {
                rows.series(way.series, move |duration| (way.run)(&load, duration));
            }
        }
    }
    run.measure("measure", rows, rounds)?;
    drop(ways);
    if run.config.target.measures(READ_WITH) {
        search::measure(run, threads, &cpus, rounds)?;
    }
    let scaling = [(OPTIMISTIC, "hot"), (READ_WITH, "search_hot")];
    let figures = scaling.into_iter().filter_map(|line| scaling_of(&run.report.rows, line));
    run.report.figures = figures.collect();
    Ok(())
}

/// Returns the figure of two threads against one, on one hot page.
fn scaling_of(rows: &[Row], (series, pattern): (&str, &str)) -> Option<Figure> {
    let rate = |threads| {
        let is_meant =
            |row: &&Row| row.case.text("pattern") == pattern && row.case.text("threads") == threads;
        rows.iter().find(is_meant)?.series.get(series).copied()
    };
    let name = format!("{series}, {pattern}, threads 2 / threads 1");
    Some(Figure { name, value: rate("2")? / rate("1")?, target: 1.9, at_most: false })
}

fn case(pattern: &'static str, block_bytes: usize, threads: usize) -> Case {
    let case = Case::new().with("pattern", pattern).with("block_bytes", block_bytes);
    case.with("threads", threads).with("fill", "in_order")
}

/// Creates all ways to the bytes, in the order of the tables.
fn ways(run: &mut Run<'_>, file: &Path, size_bytes: u64) -> Result<Vec<Way>> {
    let mut ways = Vec::new();
    let tmpfs = Tmpfs::create(run.workspace, size_bytes);
    if let Some(tmpfs) = run.attempt(&[KERNEL_TMPFS], tmpfs)? {
        let copy = tmpfs.path().join("file");
        run.start("make a copy in memory", 1);
        pattern::make_file(&copy, size_bytes, &mut Silent)?;
        run.step();
        ways.push(kernel(KERNEL_TMPFS, &copy, Some(tmpfs)));
    }
    ways.push(kernel(KERNEL_FILE, file, None));
    run.start("fill the caches", 3);
    let mut open = |series, mode, options: OpenOptions| -> Result<Cached> {
        let builder = Cache::builder().memory(resident_memory_bytes(size_bytes)).pin_mode(mode);
        let cached = Cached::open(builder, file, &options)?;
        let read = |block: &mut [u8], pos_bytes| Ok(cached.file.read_at(block, pos_bytes)?);
        run.report.verified_bytes += verify(series, size_bytes, pattern::CHUNK_BYTES, read)?;
        run.step();
        Ok(cached)
    };
    ways.push(pinned(PIN_CAS, open(PIN_CAS, PinMode::CompareExchange, OpenOptions::new())?));
    let frozen_bit = open(OPTIMISTIC, PinMode::FrozenBit, OpenOptions::new())?;
    ways.push(pinned(PIN, frozen_bit.clone()));
    ways.push(optimistic(OPTIMISTIC, frozen_bit));
    let mappable = open(MAPPABLE, PinMode::default(), OpenOptions::new().mappable(true));
    ways.extend(run.attempt(&[MAPPABLE], mappable)?.map(|it| optimistic(MAPPABLE, it)));
    let memory = Span::plain(size_bytes, |bytes| pattern::fill(bytes, 0, 0))?;
    ways.push(Way::random(LIMIT, Vec::new, move || Ok(memory.clone())));
    Ok(ways)
}

/// Creates the series of `pread`. Each thread has its own descriptor: a shared one would cost the
/// kernel a contended count that is not the page cache's.
fn kernel(series: &'static str, path: &Path, tmpfs: Option<Tmpfs>) -> Way {
    let path = path.to_owned();
    Way::random(series, Vec::new, move || {
        let _ = &tmpfs;
        File::open(&path).map_err(Error::system(format!("open {}", path.display())))
    })
}

impl Reader for File {
    #[inline(always)]
    fn read(&mut self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
        // The text of the error is made only if there is one.
        pread(&*self, block, pos_bytes)
            .map_err(|errno| Error::system("read the file with pread")(errno))
    }
}

fn optimistic(series: &'static str, cached: Cached) -> Way {
    let file = cached.file.clone();
    Way::random(series, move || hits(&cached), move || Ok(ReadAt(file.clone())))
}

struct ReadAt(bifolio::File);

impl Reader for ReadAt {
    #[inline(always)]
    fn read(&mut self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
        Ok(self.0.read_at(block, pos_bytes)?)
    }
}

fn pinned(series: &'static str, cached: Cached) -> Way {
    let file = cached.file.clone();
    Way::random(series, move || hits(&cached), move || Ok(Pinned(file.clone())))
}

/// Pins, copies and unpins.
struct Pinned(bifolio::File);

impl Reader for Pinned {
    #[inline(always)]
    fn read(&mut self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
        let pin = self.0.pin(pos_bytes..pos_bytes + block.len() as u64)?;
        pin.copy_to(0, block).unwrap();
        Ok(block.len())
    }
}

fn hits(cached: &Cached) -> Counters {
    let stats = cached.cache.stats();
    vec![
        ("hits_optimistic_per_op", stats.reads.hits_optimistic),
        ("hits_pinned_per_op", stats.reads.hits_pinned),
        ("hits_slow_per_op", stats.reads.hits_slow),
        ("pins_per_op", stats.reads.pins),
        ("optimistic_retries_per_op", stats.reads.optimistic_retries),
        ("misses_per_op", stats.reads.misses),
    ]
}

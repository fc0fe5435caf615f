//! `gather`: many small rows of a file at random positions.
//!
//! A gather reads the same number of rows (4,096 by default) and sums all their words, so every
//! series also brings the bytes to the processor. `read_many` copies the rows, 1,024 with a call;
//! `pin_many` reads them in place. Beside them: a mapping advised `MADV_RANDOM` (`kernel_mmap`),
//! the same with one `MADV_WILLNEED` for each row before the first is touched (`kernel_willneed`),
//! and io_uring alone (`raw_direct`). The file is 8 times the bound.
//!
//! Each round is a child process with nothing else in it: it prepares the state of its row, then
//! gathers for a while.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bifolio::{Access, Cache, ImmutableFile, OpenOptions, ReadRequest};
use bifolio_report::Case;
use memmap2::Advice;
use serde::{Deserialize, Serialize};

use crate::benchmark::Needs;
use crate::config::Config;
use crate::definition::{Definition, Target, ratio_at_least};
use crate::error::{Error, Result};
use crate::format_bytes;
use crate::harness::counters::resident_bytes;
use crate::harness::mapping::Mapping;
use crate::harness::measured::{Measured, Meter, Per};
use crate::harness::memory_group::{Membership, MemoryGroup};
use crate::harness::pattern::word_at;
use crate::harness::raw_ring::{RawRing, Transfer};
use crate::harness::sizes::{FILE_FACTOR, Sizes};
use crate::harness::{child, direct};
use crate::run::{Rounds, Run};

const READ_MANY: &str = "read_many";
const PIN_MANY: &str = "pin_many";
const MMAP: &str = "kernel_mmap";
const WILLNEED: &str = "kernel_willneed";
const RAW: &str = "raw_direct";

const ROWS: usize = 4096;
/// Rows of a call of `read_many`: many times the device's depth, and few enough that the copies
/// are in the processor's cache when they are summed.
const CALL_ROWS: usize = 1024;
/// Reads in flight of io_uring: the default of `CacheBuilder::io_depth`. The thread sleeps until
/// half of them are complete.
const DEPTH: u16 = 64;
/// Creates a target for the rows of a state; the name ends with all keys of the row.
const fn target(case: &'static str, series: [&'static str; 2], at_least: f64) -> Target {
    let name = "rows/s, {over} / {under}, {pattern}, {row_bytes}, {state}";
    ratio_at_least(name, case, series, at_least)
}

pub(crate) static GATHER: Definition<Parameters> = Definition {
    name: "gather",
    description: "4096 small rows at random, against mappings with advice and io_uring",
    parameters,
    // On disk the file; in memory the cache or the kernel's page cache, and the rows of a gather.
    needs: |Parameters { sizes, .. }| Needs {
        disk_bytes: sizes.size_bytes,
        memory_bytes: sizes.memory_bytes.saturating_mul(2).saturating_add(64 << 20),
    },
    ratios: &[
        (READ_MANY, MMAP),
        (PIN_MANY, MMAP),
        (READ_MANY, WILLNEED),
        (PIN_MANY, WILLNEED),
        (READ_MANY, RAW),
        (PIN_MANY, RAW),
    ],
    shown_counts: &["p50_ns", "p99_ns", "gathers", "cpu_ns_per_row", "resident_peak_mib"],
    standard: &[
        ("p50_ns", "p50_ns"),
        ("p99_ns", "p99_ns"),
        ("max_ns", "max_ns"),
        ("calls", "gathers"),
        ("cpu_ns_per_op", "cpu_ns_per_row"),
    ],
    targets: &[
        target("state=cold", [READ_MANY, MMAP], 5.0),
        target("state=cold", [READ_MANY, WILLNEED], 1.0),
        // At most 1.1 times as long as the device, 1.2 times as a warm mapping.
        target("state=cold", [READ_MANY, RAW], 1.0 / 1.1),
        target("state=warm", [READ_MANY, MMAP], 1.0 / 1.2),
        target("state=cold", [PIN_MANY, MMAP], 5.0),
        target("state=cold", [PIN_MANY, WILLNEED], 1.0),
        target("state=cold", [PIN_MANY, RAW], 1.0 / 1.1),
        target("state=warm", [PIN_MANY, MMAP], 1.0 / 1.2),
    ],
    run,
    child: Some(|task| child::serve(task, gather)),
};

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Parameters {
    #[serde(flatten)]
    sizes: Sizes,
    /// Rows of a gather. Their pages take at most half of the memory.
    rows: usize,
    /// Time of a round; one that has gathered once may end later.
    round_seconds: f64,
    repetitions: usize,
    #[serde(skip)]
    cases: Vec<RowsOf>,
}

fn parameters(config: &Config) -> Result<Parameters> {
    let (memory_bytes, seconds, repetitions) =
        config.of_set([(4 << 20, 0.005, 1), (32 << 20, 0.1, 3), (512 << 20, 0.5, 5)]);
    let sizes = Sizes::choose(FILE_FACTOR, config, memory_bytes)?;
    let all =
        [1024, 4096].map(|row_bytes| [false, true].map(|is_warm| RowsOf { row_bytes, is_warm }));
    let mut cases = all.concat();
    if config.summary_only {
        cases.retain(|case| case.row_bytes == 4096);
    }
    // About 5 series; the slowest takes longer than a round.
    let rounds = (cases.len() * 5 * repetitions) as f64;
    Ok(Parameters {
        sizes,
        rows: ROWS.min((sizes.memory_pages() / 2) as usize).max(1),
        round_seconds: config.timed.map_or(seconds, |timed| timed.as_secs_f64() / rounds),
        repetitions,
        cases,
    })
}

/// A case: the rows, and the state of memory when a gather begins.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct RowsOf {
    row_bytes: usize,
    /// Set if all rows of the gather are in memory; nothing of the file is otherwise.
    is_warm: bool,
}

/// The way of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Way {
    ReadMany,
    PinMany,
    KernelMmap,
    KernelWillNeed,
    RawDirect,
}

impl Way {
    /// In the order of the tables.
    const ALL: [Self; 5] =
        [Self::RawDirect, Self::ReadMany, Self::PinMany, Self::KernelWillNeed, Self::KernelMmap];

    fn series(self) -> &'static str {
        match self {
            Self::ReadMany => READ_MANY,
            Self::PinMany => PIN_MANY,
            Self::KernelMmap => MMAP,
            Self::KernelWillNeed => WILLNEED,
            Self::RawDirect => RAW,
        }
    }
}

/// A round of one series, for a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    way: Way,
    case: RowsOf,
    file: PathBuf,
    sizes: Sizes,
    rows: usize,
    duration: Duration,
    group: Option<Membership>,
}

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    run.note(format!("{} rows a gather; the sum of all words is part of it", parameters.rows));
    run.note("cold: nothing of the file is in memory; warm: all rows of the gather are");
    let bytes = format_bytes(parameters.sizes.kernel_bytes());
    run.note(format!("a process of kernel_mmap or kernel_willneed is held to {bytes}"));
    let file = run.make_file("file", parameters.sizes.size_bytes)?;
    let group = run.attempt(&[MMAP, WILLNEED], MemoryGroup::create(parameters.sizes))?;
    let task = |way: Way, case, duration| Task {
        way,
        case,
        file: file.clone(),
        sizes: parameters.sizes,
        rows: parameters.rows,
        duration,
        group: group.as_ref().filter(|_| way.is_of_kernel()).map(MemoryGroup::membership),
    };
    let children = run.children;
    let mut ways = Vec::new();
    let is_meant = |way: &Way| {
        run.config.target.measures(way.series()) && (group.is_some() || !way.is_of_kernel())
    };
    for way in Way::ALL.into_iter().filter(is_meant).collect::<Vec<_>>() {
        // One gather: whether it can run is known before anything is timed.
        let tried = children.ask::<Measured>(&task(way, parameters.cases[0], Duration::ZERO));
        ways.extend(run.attempt(&[way.series()], tried)?.map(|_| way));
    }
    let mut rows = run.rows();
    for &rows_of in &parameters.cases {
        let state = if rows_of.is_warm { "warm" } else { "cold" };
        let case = Case::new().with("pattern", "uniform").with("row_bytes", rows_of.row_bytes);
        rows.row(case.with("state", state), ("rows/s", Measured::rate));
        // The device alone has no memory that could be warm.
        for &way in ways.iter().filter(|way| **way != Way::RawDirect || !rows_of.is_warm) {
            let task = &task;
            rows.series(way.series(), move |round| children.ask(&task(way, rows_of, round)));
        }
    }
    let round = Duration::from_secs_f64(parameters.round_seconds);
    run.measure("measure", rows, Rounds::exactly(parameters.repetitions, round))
}

impl Way {
    fn is_of_kernel(self) -> bool {
        matches!(self, Self::KernelMmap | Self::KernelWillNeed)
    }
}

/// One way to read rows.
trait Gatherer {
    /// Evicts all pages of the file.
    fn forget(&mut self) -> Result<()>;

    /// Makes rows resident by the quickest way. Not timed.
    fn warm(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()> {
        self.gather(positions, sums)
    }

    /// Reads the rows at `positions` and sums them.
    fn gather(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()>;
}

/// Runs a round in the child.
fn gather(task: &Task) -> Result<Measured> {
    let (file, row_bytes) = (&task.file, task.case.row_bytes);
    match task.way {
        Way::ReadMany | Way::PinMany => {
            let memory_bytes = task.sizes.memory_bytes;
            let cache = Cache::builder().memory(memory_bytes).populate(true).build()?;
            let file = cache.open_immutable(file, &OpenOptions::new())?;
            file.set_access(Access::Random);
            let buffer = vec![0; task.rows.min(CALL_ROWS) * row_bytes];
            gather_by(task, Cached { file, buffer, row_bytes, is_pinned: task.way == Way::PinMany })
        }
        Way::KernelMmap | Way::KernelWillNeed => {
            task.group.as_ref().map_or(Ok(()), Membership::join)?;
            let is_announced = task.way == Way::KernelWillNeed;
            let mapping = Some(map(file)?);
            gather_by(task, Mapped { path: file.clone(), mapping, row_bytes, is_announced })
        }
        Way::RawDirect => {
            gather_by(task, RawRing::new(&direct::open(file, false)?, row_bytes, DEPTH)?)
        }
    }
}

fn gather_by(task: &Task, mut gatherer: impl Gatherer) -> Result<Measured> {
    let RowsOf { row_bytes, is_warm } = task.case;
    let (mut random, file_rows) =
        (fastrand::Rng::with_seed(1), task.sizes.size_bytes / row_bytes as u64);
    let mut draw = || random.u64(..file_rows) * row_bytes as u64;
    let mut positions: Vec<u64> = (0..task.rows).map(|_| draw()).collect();
    let mut sums = RowSums::default();
    gatherer.forget()?;
    if is_warm {
        gatherer.warm(&positions, &mut sums)?;
    }
    let mut measured = Measured::default();
    loop {
        let meter = Meter::start(None)?;
        gatherer.gather(&positions, &mut sums)?;
        let cost = meter.stop()?;
        measured.calls.latencies.add(cost.elapsed);
        measured.calls.operations += task.rows as u64;
        measured.cost.elapsed += cost.elapsed;
        measured.cost.cpu += cost.cpu;
        if measured.cost.elapsed >= task.duration {
            break;
        }
        if !is_warm {
            gatherer.forget()?;
            positions.fill_with(&mut draw);
        }
    }
    let peak_mib = resident_bytes("VmHWM")? as f64 / f64::from(1 << 20);
    measured.add("resident_peak_mib", peak_mib, Per::Peak);
    measured.verified_bytes = sums.finish(task.way.series(), row_bytes)?;
    Ok(measured)
}

/// `read_many`, or `pin_many`.
struct Cached {
    file: ImmutableFile,
    buffer: Vec<u8>,
    row_bytes: usize,
    is_pinned: bool,
}

impl Gatherer for Cached {
    fn forget(&mut self) -> Result<()> {
        self.file.evict(0..self.file.len())?;
        Ok(())
    }

    fn gather(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()> {
        if self.is_pinned {
            let range = |&start: &u64| start..start + self.row_bytes as u64;
            let ranges: Vec<_> = positions.iter().map(range).collect();
            for (pin, position) in self.file.pin_many(&ranges).into_iter().zip(positions) {
                sums.add(&pin?, *position);
            }
            return Ok(());
        }
        for positions in positions.chunks(CALL_ROWS) {
            let rows = self.buffer.chunks_exact_mut(self.row_bytes);
            let request = |(row, position): (_, &u64)| ReadRequest::new(*position, row);
            let mut requests: Vec<ReadRequest<'_>> = rows.zip(positions).map(request).collect();
            self.file.read_many(&mut requests)?;
            for request in requests {
                if request.result? != self.row_bytes {
                    let (series, pos_bytes) = (READ_MANY.to_owned(), request.position);
                    return Err(Error::WrongBytes { series, pos_bytes });
                }
                sums.add(request.buffer, request.position);
            }
        }
        Ok(())
    }
}

/// A mapping by the kernel, advised that the order is random.
struct Mapped {
    path: PathBuf,
    /// `None` only while `forget` runs: mapped pages stay in the page cache.
    mapping: Option<Mapping>,
    row_bytes: usize,
    is_announced: bool,
}

fn map(path: &Path) -> Result<Mapping> {
    let file = File::open(path).map_err(Error::system(format!("open {}", path.display())))?;
    let mapping = Mapping::of_file(&file, false)?;
    mapping.advise(Advice::Random)?;
    Ok(mapping)
}

impl Mapped {
    fn read(&self, positions: &[u64], is_announced: bool, sums: &mut RowSums) -> Result<()> {
        let Some(mapping) = &self.mapping else {
            return Err(Error::Refused("the file is not mapped".into()));
        };
        if is_announced {
            let announce = |start: &u64| mapping.will_need(*start, self.row_bytes as u64);
            positions.iter().try_for_each(announce)?;
        }
        let span = mapping.span();
        for position in positions {
            sums.add(span.bytes(*position, self.row_bytes), *position);
        }
        Ok(())
    }
}

impl Gatherer for Mapped {
    fn forget(&mut self) -> Result<()> {
        self.mapping = None;
        direct::drop_page_cache(&self.path)?;
        self.mapping = Some(map(&self.path)?);
        Ok(())
    }

    fn warm(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()> {
        self.read(positions, true, sums)
    }

    fn gather(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()> {
        self.read(positions, self.is_announced, sums)
    }
}

/// Past every cache: io_uring with as many reads in flight as a cache has.
impl Gatherer for RawRing {
    fn forget(&mut self) -> Result<()> {
        Ok(())
    }

    fn gather(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()> {
        let mut left = positions.iter();
        loop {
            while let Some(position) = left.as_slice().first() {
                let Some(block) = self.take_idle() else { break };
                self.start(block, Transfer::Read, *position)?;
                left.next();
            }
            if self.in_flight() == 0 {
                return Ok(());
            }
            self.complete(self.in_flight().div_ceil(2), |row| {
                sums.add(row.bytes, row.pos_bytes);
                Ok(())
            })?;
        }
    }
}

/// Sum of all words of many rows. What it must be follows from the positions: words of the file are
/// a linear function of theirs (`harness::pattern`).
#[derive(Debug, Default)]
struct RowSums {
    words: u64,
    positions: u64,
    rows: u64,
}

impl RowSums {
    /// Adds the bytes of the row at `pos_bytes`.
    #[inline]
    fn add(&mut self, row: &[u8], pos_bytes: u64) {
        let (words, _) = row.as_chunks::<8>();
        let sum = words.iter().fold(0_u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
        self.words = self.words.wrapping_add(sum);
        self.positions = self.positions.wrapping_add(pos_bytes);
        self.rows += 1;
    }

    /// Returns the number of bytes that were summed, each row having `row_bytes`.
    ///
    /// # Errors
    /// The sum is not that of the file.
    fn finish(&self, series: &str, row_bytes: usize) -> Result<u64> {
        let words = (row_bytes / 8) as u64;
        let first = word_at(0, 0);
        let multiplier = word_at(1, 0).wrapping_sub(first);
        let offsets = (0..words).map(|word| word * 8).sum::<u64>();
        let of_a_row = first.wrapping_mul(words).wrapping_add(multiplier.wrapping_mul(offsets));
        let of_positions = multiplier.wrapping_mul(words).wrapping_mul(self.positions);
        if self.words != of_a_row.wrapping_mul(self.rows).wrapping_add(of_positions) {
            return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes: 0 });
        }
        Ok(self.rows * row_bytes as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ParameterSet;
    use crate::harness::pattern;

    #[test]
    fn the_summary_has_two_of_the_four_quick_cases() {
        let mut config = Config::new(ParameterSet::Quick, Vec::new());
        let quick = parameters(&config).unwrap();
        assert_eq!((quick.cases.len(), quick.rows), (4, 4096));
        config.summary_only = true;
        assert_eq!(parameters(&config).unwrap().cases.len(), 2);
        let smoke = parameters(&Config::new(ParameterSet::Smoke, Vec::new())).unwrap();
        assert_eq!(smoke.rows as u64 * 4096 * 2, smoke.sizes.memory_bytes, "half the memory");
    }

    #[test]
    fn one_wrong_byte_makes_the_sum_wrong() {
        let mut row = vec![0; 1024];
        let (mut good, mut bad) = (RowSums::default(), RowSums::default());
        for pos_bytes in [0, 5 << 10, 77 << 10] {
            pattern::fill(&mut row, pos_bytes);
            good.add(&row, pos_bytes);
            row[1000] ^= u8::from(pos_bytes > 0);
            bad.add(&row, pos_bytes);
        }
        assert_eq!(good.finish("x", 1024).unwrap(), 3 << 10);
        assert!(bad.finish("x", 1024).is_err());
    }
}

//! `gather`: many small rows of a file at random positions.
//!
//! A gather reads the same number of rows (4,096 by default) and sums all their words, so every
//! series also brings the bytes to the processor. `read_many` copies the rows: cold 1,024 with a
//! call, many times the device's depth, and warm as many as 48 KiB hold, so that the copies are in
//! the first cache of the processor when they are summed. `pin_many_into` reads them in place
//! (`pin_many`), with a list of pins that all gathers use.
//! Beside them: a mapping advised `MADV_RANDOM` (`kernel_mmap`), the same with one `MADV_WILLNEED`
//! for each row before the first is touched (`kernel_willneed`), and io_uring alone (`raw_direct`).
//! The file is 8 times the bound.
//!
//! Each round is a child process with nothing else in it: it prepares the state of its row, then
//! gathers for a while.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bifolio::{Access, Cache, ImmutableFile, OpenOptions, PageRef, ReadRequest};
use bifolio_report::Case;
use memmap2::Advice;
use serde::{Deserialize, Serialize};

use crate::definition::{Asked, Definition, Parameters, Target, at_least};
use crate::error::{Error, Result};
use crate::format_bytes;
use crate::harness::measured::{Measured, Meter};
use crate::harness::memory_group::{Membership, MemoryGroup};
use crate::harness::pattern::Sums;
use crate::harness::raw_ring::{RawRing, Transfer};
use crate::harness::sizes::{SizeRule, Sizes};
use crate::harness::span::Mapping;
use crate::harness::{child, direct};
use crate::run::Run;

const READ_MANY: &str = "read_many";
const PIN_MANY: &str = "pin_many";
const MMAP: &str = "kernel_mmap";
const WILLNEED: &str = "kernel_willneed";
const RAW: &str = "raw_direct";

/// Rows of a gather, unless their pages take more than half of the memory.
const ROWS: u64 = 4096;
/// Rows of a call of `read_many`: many times the device's depth.
const CALL_ROWS: usize = 1024;
/// Bytes of a call that finds everything in memory: about what the first cache of a processor has
/// room for, so that the sums find the copies there.
const WARM_CALL_BYTES: usize = 48 << 10;
/// Reads in flight of io_uring: the default of `CacheBuilder::io_depth`. The thread sleeps until
/// half of them are complete.
const DEPTH: u16 = 64;

const SECTOR_BYTES: usize = 512;

const fn cold(over: &'static str, under: &'static str, target: f64) -> Target {
    at_least("state=cold", Asked::Ratio(over, under), target)
}

/// Of rows of 64 bytes nothing is asked: two counts of a pin take longer than the row.
const fn warm(case: &'static str, over: &'static str, target: f64) -> Target {
    at_least(case, Asked::Ratio(over, MMAP), target)
}

pub(crate) static GATHER: Definition = Definition {
    name: "gather",
    description: "4096 small rows at random, against mappings with advice and io_uring",
    sizes: SizeRule::misses([4 << 20, 32 << 20, 512 << 20]),
    times: [(0.1, 1), (4.0, 3), (50.0, 5)],
    needs: |parameters| parameters.sizes.needs_of_groups(),
    ratios: &[
        (READ_MANY, MMAP),
        (PIN_MANY, MMAP),
        (READ_MANY, WILLNEED),
        (PIN_MANY, WILLNEED),
        (READ_MANY, RAW),
        (PIN_MANY, RAW),
    ],
    shown_counts: &["p50_ns", "p99_ns", "calls", "cpu_ns_per_op"],
    targets: &[
        cold(READ_MANY, MMAP, 5.0),
        cold(READ_MANY, WILLNEED, 1.0),
        // At most 1.1 times as long as the device, 1.2 times as a warm mapping.
        cold(READ_MANY, RAW, 1.0 / 1.1),
        warm("row_bytes=1024,state=warm", READ_MANY, 1.0 / 1.2),
        warm("row_bytes=4096,state=warm", READ_MANY, 1.0 / 1.2),
        cold(PIN_MANY, MMAP, 5.0),
        cold(PIN_MANY, WILLNEED, 1.0),
        cold(PIN_MANY, RAW, 1.0 / 1.1),
        warm("row_bytes=1024,state=warm", PIN_MANY, 0.95),
        warm("row_bytes=4096,state=warm", PIN_MANY, 1.3),
    ],
    run,
    child: Some(|task| child::serve(task, gather)),
};

/// The series, in the order of the tables.
const SERIES: [&str; 5] = [RAW, READ_MANY, PIN_MANY, WILLNEED, MMAP];

/// A round of one series, for a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    series: String,
    row_bytes: usize,
    /// Set if all rows of the gather are in memory; nothing of the file is otherwise.
    is_warm: bool,
    file: PathBuf,
    sizes: Sizes,
    rows: u64,
    duration: Duration,
    /// The control group of a process of the kernel's series.
    group: Option<Membership>,
}

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let sizes = parameters.sizes;
    let rows_of_gather = ROWS.min(sizes.memory_pages() / 2).max(1);
    run.note(format!("{rows_of_gather} rows a gather; the sum of all words is part of it"));
    run.note("cold: nothing of the file is in memory; warm: all rows of the gather are");
    let bytes = format_bytes(sizes.kernel_bytes());
    run.note(format!("a process of kernel_mmap or kernel_willneed is held to {bytes}"));
    let file = run.make_file("file", sizes.size_bytes)?;
    let group = run.attempt(&[MMAP, WILLNEED], MemoryGroup::create(sizes))?;
    let children = run.children;
    let ask = &|series: &str, row_bytes, is_warm, duration| -> Result<Measured> {
        let is_of_kernel = [MMAP, WILLNEED].contains(&series);
        let group = group.as_ref().filter(|_| is_of_kernel).map(MemoryGroup::membership);
        let (series, file, rows) = (series.to_owned(), file.clone(), rows_of_gather);
        children.ask(&Task { series, row_bytes, is_warm, file, sizes, rows, duration, group })
    };
    let has_group = |series: &&str| group.is_some() || ![MMAP, WILLNEED].contains(series);
    let can_run = run.try_every(SERIES.into_iter().filter(has_group), |series| {
        ask(series, 4096, false, Duration::ZERO)
    })?;
    let mut rows = run.rows();
    let all = [64, 1024, 4096].into_iter().flat_map(|row| [(row, false), (row, true)]);
    for (row_bytes, is_warm) in all.skip(if run.config.summary_only { 4 } else { 0 }) {
        let state = if is_warm { "warm" } else { "cold" };
        let case = Case::new().with("pattern", "uniform").with("row_bytes", row_bytes);
        rows.row(case.with("state", state), ("rows/s", Measured::rate));
        // The device alone has no memory that could be warm, and reads whole sectors.
        let is_for_device = !is_warm && row_bytes >= SECTOR_BYTES;
        for &series in can_run.iter().filter(|series| **series != RAW || is_for_device) {
            rows.series(series, move |round| ask(series, row_bytes, is_warm, round));
        }
    }
    let rounds = parameters.shared(rows.trials());
    run.measure("measure", rows, rounds)
}

/// One way to read rows.
trait Gatherer {
    /// Evicts all pages of the file.
    fn forget(&mut self) -> Result<()>;

    /// Makes rows resident by the quickest way. Not timed.
    fn warm(&mut self, positions: &[u64], sums: &mut Sums) -> Result<()> {
        self.gather(positions, sums)
    }

    /// Reads the rows at `positions` and sums them.
    fn gather(&mut self, positions: &[u64], sums: &mut Sums) -> Result<()>;
}

fn gather(task: &Task) -> Result<Measured> {
    let (file, row_bytes) = (&task.file, task.row_bytes);
    match task.series.as_str() {
        READ_MANY | PIN_MANY => {
            let memory_bytes = task.sizes.memory_bytes;
            let cache = Cache::builder().memory(memory_bytes).prefault(true).build()?;
            let file = cache.open_immutable(file, &OpenOptions::new())?;
            file.set_access(Access::Random);
            if task.series == PIN_MANY {
                return gather_by(task, Pinned { file: &file, pins: Vec::new(), row_bytes });
            }
            let most = if task.is_warm { WARM_CALL_BYTES / row_bytes } else { CALL_ROWS };
            let buffer = vec![0; most.min(CALL_ROWS) * row_bytes];
            gather_by(task, Copied { file: &file, buffer, row_bytes })
        }
        MMAP | WILLNEED => {
            task.group.as_ref().map_or(Ok(()), Membership::join)?;
            let is_announced = task.series == WILLNEED;
            let (path, mapping) = (file.clone(), Some(map(file)?));
            gather_by(task, Mapped { path, mapping, row_bytes, is_announced })
        }
        _ => {
            let file = direct::open(file, false)?;
            gather_by(task, RawRing::new(&file, Transfer::Read, row_bytes, DEPTH)?)
        }
    }
}

fn gather_by(task: &Task, mut gatherer: impl Gatherer) -> Result<Measured> {
    let Task { row_bytes, is_warm, .. } = *task;
    let (mut random, file_rows) =
        (fastrand::Rng::with_seed(1), task.sizes.size_bytes / row_bytes as u64);
    let mut draw = || random.u64(..file_rows) * row_bytes as u64;
    let mut positions: Vec<u64> = (0..task.rows).map(|_| draw()).collect();
    let mut sums = Sums::default();
    gatherer.forget()?;
    if is_warm {
        gatherer.warm(&positions, &mut sums)?;
    }
    let mut measured = Measured::default();
    loop {
        let meter = Meter::start();
        gatherer.gather(&positions, &mut sums)?;
        let cost = meter.stop();
        measured.calls.latencies.add(cost.elapsed);
        measured.calls.operations += task.rows;
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
    let gathers = measured.calls.latencies.calls() + u64::from(is_warm);
    let is_whole = sums.words() * 8 == gathers * task.rows * row_bytes as u64;
    if !is_whole || !sums.agree() {
        return Err(Error::WrongBytes { series: task.series.clone(), pos_bytes: 0 });
    }
    measured.verified_bytes = sums.words() * 8;
    Ok(measured)
}

/// `read_many`.
struct Copied<'f> {
    file: &'f ImmutableFile,
    buffer: Vec<u8>,
    row_bytes: usize,
}

impl Gatherer for Copied<'_> {
    fn forget(&mut self) -> Result<()> {
        self.file.evict(0..self.file.len())?;
        Ok(())
    }

    fn gather(&mut self, positions: &[u64], sums: &mut Sums) -> Result<()> {
        for positions in positions.chunks(self.buffer.len() / self.row_bytes) {
            let rows = self.buffer.chunks_exact_mut(self.row_bytes);
            let request = |(row, position): (_, &u64)| ReadRequest::new(row, *position);
            let mut requests: Vec<ReadRequest<'_>> = rows.zip(positions).map(request).collect();
            self.file.read_many(&mut requests)?;
            for request in requests {
                if request.result? != self.row_bytes {
                    let (series, pos_bytes) = (READ_MANY.to_owned(), request.position);
                    return Err(Error::WrongBytes { series, pos_bytes });
                }
                sums.add_all(request.buffer, request.position);
            }
        }
        Ok(())
    }
}

/// `pin_many_into`, with a list that all gathers use.
struct Pinned<'f> {
    file: &'f ImmutableFile,
    pins: Vec<bifolio::Result<PageRef<'f, ImmutableFile>>>,
    row_bytes: usize,
}

impl Gatherer for Pinned<'_> {
    fn forget(&mut self) -> Result<()> {
        self.pins.clear();
        self.file.evict(0..self.file.len())?;
        Ok(())
    }

    fn gather(&mut self, positions: &[u64], sums: &mut Sums) -> Result<()> {
        let row_bytes = self.row_bytes as u64;
        let ranges = positions.iter().map(|start| *start..start + row_bytes);
        self.file.pin_many_into(ranges, &mut self.pins);
        for (pin, position) in self.pins.iter().zip(positions) {
            sums.add_all(pin.as_ref().map_err(Clone::clone)?, *position);
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
    fn read(&self, positions: &[u64], is_announced: bool, sums: &mut Sums) -> Result<()> {
        let Some(mapping) = &self.mapping else {
            return Err(Error::Refused("the file is not mapped".into()));
        };
        if is_announced {
            let announce = |start: &u64| mapping.will_need(*start, self.row_bytes);
            positions.iter().try_for_each(announce)?;
        }
        for position in positions {
            sums.add_all(mapping.span.bytes(*position, self.row_bytes), *position);
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

    fn warm(&mut self, positions: &[u64], sums: &mut Sums) -> Result<()> {
        self.read(positions, true, sums)
    }

    fn gather(&mut self, positions: &[u64], sums: &mut Sums) -> Result<()> {
        self.read(positions, self.is_announced, sums)
    }
}

/// Past every cache: io_uring with as many reads in flight as a cache has.
impl Gatherer for RawRing {
    fn forget(&mut self) -> Result<()> {
        Ok(())
    }

    fn gather(&mut self, positions: &[u64], sums: &mut Sums) -> Result<()> {
        self.transfer(
            positions.iter().copied(),
            usize::from(DEPTH / 2),
            |_, _| (),
            |row| {
                sums.add_all(row.bytes, row.pos_bytes);
                Ok(())
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::pattern;

    /// Gathers rows of this length instead of the length of the task.
    struct Rows(usize);

    impl Gatherer for Rows {
        fn forget(&mut self) -> Result<()> {
            Ok(())
        }

        fn gather(&mut self, positions: &[u64], sums: &mut Sums) -> Result<()> {
            let mut row = vec![0; self.0];
            for &position in positions {
                pattern::fill(&mut row, position, 0);
                sums.add_all(&row, position);
            }
            Ok(())
        }
    }

    #[test]
    fn rows_that_are_short_are_wrong_bytes() {
        let sizes = Sizes { size_bytes: 1 << 20, memory_bytes: 1 << 20 };
        for is_warm in [false, true] {
            let task = Task {
                series: "x".into(),
                row_bytes: 1024,
                is_warm,
                file: PathBuf::new(),
                sizes,
                rows: 3,
                duration: Duration::ZERO,
                group: None,
            };
            let bytes = (1 + u64::from(is_warm)) * 3 * 1024;
            assert_eq!(gather_by(&task, Rows(1024)).unwrap().verified_bytes, bytes);
            let short = gather_by(&task, Rows(1016));
            assert!(matches!(short, Err(Error::WrongBytes { .. })));
        }
    }
}

//! `writes`: pages at random, and the whole file in order, each trial with a sync at its end; and
//! records of eight threads, each followed by a sync.
//!
//! `write_at` and `sync_data` through a new cache of an eighth of the file; against the device at
//! its best (`raw_direct`: io_uring, then `fdatasync`) and against the kernel's page cache
//! (`kernel_write`: `pwrite`, then `fdatasync`), whose memory is not limited. The cache's memory is
//! made resident when it is built, like that of the device's loop. A file that is written in order
//! may have larger folios, which cost less bookkeeping: the series `write_at_64k_folios`. Every
//! trial writes its own version, and pages are read back past all caches after each: pages that
//! were written, and pages that must not have changed.
//!
//! Eight threads write and sync records repeatedly (in syncs per second), like the threads of a
//! database that commit: records of 256 bytes to one `log`, whichever thread is next, or `records`
//! of a page, each thread in its own region of the file. The kernel's series are `pwrite` and
//! `fdatasync` of the same threads on one descriptor, through the page cache and, for whole pages,
//! past it (`kernel_direct`). Concurrent syncs of the cache share the write-out and the flush of
//! the device, which are counted per sync; the kernel writes and flushes for each.
//!
//! The time includes the sync. Latencies are those of the single writes: the longest is the longest
//! stall of a writer.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bifolio::{Cache, OpenOptions};
use bifolio_report::Case;
use rustix::io::pread;
use serde::Serialize;

use crate::config::{Config, Times};
use crate::definition::{Definition, ratio_at_least};
use crate::error::{Error, Result};
use crate::harness::access::{Access, PAGE_BYTES, Pattern};
use crate::harness::cached::{Cached, count_of};
use crate::harness::direct::{self, Page, drop_page_cache};
use crate::harness::measured::{ALL, Calls, Measured, Meter, Per, Unit};
use crate::harness::pattern;
use crate::harness::raw_ring::{Completed, RawRing, Transfer};
use crate::harness::raw_stream::{Shape, Stream, fastest_shape, pass};
use crate::harness::sizes::{FILE_FACTOR, Sizes};
use crate::harness::threads::run_together;
use crate::run::Run;

const RAW: &str = "raw_direct";
const WRITE_AT: &str = "write_at";
const LARGE: &str = "write_at_64k_folios";
const KERNEL: &str = "kernel_write";
const KERNEL_DIRECT: &str = "kernel_direct";
const FLUSHES_PER_SYNC: &str = "flushes_per_sync";

/// Folio size of the series named after it.
const LARGE_FOLIO_BYTES: u64 = 64 << 10;
/// Bytes that a sequential trial writes per call.
const BLOCK_BYTES: usize = 1 << 20;
/// Number of random writes that the raw ring keeps in flight.
const RAW_DEPTH: u16 = 128;
/// Divisor: the part of the pages that a trial of random writes writes.
const RANDOM_SHARE: u64 = 8;
/// Threads that commit at the same time.
const THREADS: u64 = 8;
/// Bytes of a record of the log.
const LOG_RECORD_BYTES: usize = 256;

const RATIO: &str = "{over} / {under}, {pattern}";

pub(crate) static WRITES: Definition<Parameters> = Definition {
    name: "writes",
    description: "random pages, a whole file, records of 8 threads, each synced, against device \
                  and kernel",
    parameters,
    needs: |parameters| parameters.sizes.needs(),
    ratios: &[(WRITE_AT, RAW), (LARGE, RAW), (WRITE_AT, KERNEL), (WRITE_AT, KERNEL_DIRECT)],
    shown_counts: &[
        "p50_ns",
        "p99_ns",
        "p999_ns",
        "max_ns",
        "cpu_s_per_gib",
        "syscalls_per_op",
        "operations",
        FLUSHES_PER_SYNC,
    ],
    standard: ALL,
    targets: &[
        ratio_at_least(RATIO, "pattern=random", [WRITE_AT, KERNEL], 1.0),
        ratio_at_least(RATIO, "pattern=sequential", [WRITE_AT, RAW], 0.95),
        ratio_at_least(RATIO, "pattern=sequential", [LARGE, RAW], 0.95),
        ratio_at_least(RATIO, "pattern=log", [WRITE_AT, KERNEL], 2.0),
        ratio_at_least(RATIO, "pattern=records", [WRITE_AT, KERNEL], 2.0),
        ratio_at_least(RATIO, "pattern=records", [WRITE_AT, KERNEL_DIRECT], 2.0),
    ],
    run,
    child: None,
};

/// The parameters of one run, as the envelope shows them.
#[derive(Debug, Serialize)]
pub(crate) struct Parameters {
    #[serde(flatten)]
    sizes: Sizes,
    /// Pages written at random by one trial.
    random_writes: u64,
    /// Records that each thread writes and syncs in one trial.
    records_per_thread: u64,
    #[serde(flatten)]
    times: Times,
    /// Pages compared after each trial, chosen at random.
    verified_pages: u64,
}

fn parameters(config: &Config) -> Result<Parameters> {
    let (memory_bytes, records_per_thread, verified_pages) =
        config.of_set([(2 << 20, 4, u64::MAX), (64 << 20, 100, 256), (512 << 20, 1000, 8192)]);
    let sizes = Sizes::choose(FILE_FACTOR, config, memory_bytes)?;
    Ok(Parameters {
        sizes,
        random_writes: sizes.pages().div_ceil(RANDOM_SHARE),
        records_per_thread,
        times: config.times([(0.2, 1), (9.0, 2), (240.0, 5)]),
        verified_pages: verified_pages.min(sizes.pages()),
    })
}

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    const SYNCS: Unit = ("syncs/s", Measured::rate);
    let file = run.make_file("file", parameters.sizes.size_bytes)?;
    let passes = &Passes {
        file: &file,
        parameters,
        tracepoint: run.tracepoint(),
        ledger: RefCell::new(Ledger::new(parameters.sizes.pages())),
        throttle_ns_max: Cell::new(None),
    };
    run.start("find the shape the device likes best", 1);
    let shape = fastest_shape(&file, |shape| passes.raw_sequential(shape));
    let shape = run.attempt(&[RAW], shape)?;
    let mut rows = run.rows();
    let case = |pattern: &'static str, block_bytes: usize| {
        Case::new().with("pattern", pattern).with("block_bytes", block_bytes)
    };
    rows.row(case("random", PAGE_BYTES), ("writes/s", Measured::rate));
    if shape.is_some() {
        rows.series(RAW, move |_| passes.raw_random());
    }
    rows.series(WRITE_AT, move |_| passes.write_at(Order::Random, WRITE_AT, PAGE_BYTES as u64));
    rows.series(KERNEL, move |_| passes.kernel_write(Order::Random));
    rows.row(case("sequential", BLOCK_BYTES), ("GiB/s", Measured::gibibytes_rate));
    if let Some(shape) = shape {
        rows.series(RAW, move |_| passes.raw_sequential(shape));
    }
    rows.series(WRITE_AT, move |_| passes.write_at(Order::InOrder, WRITE_AT, PAGE_BYTES as u64));
    rows.series(LARGE, move |_| passes.write_at(Order::InOrder, LARGE, LARGE_FOLIO_BYTES));
    rows.series(KERNEL, move |_| passes.kernel_write(Order::InOrder));
    for (pattern, layout) in [("log", Layout::Log), ("records", Layout::Regions)] {
        rows.row(case(pattern, layout.record_bytes()), SYNCS);
        rows.series(WRITE_AT, move |_| passes.cached_records(layout));
        rows.series(KERNEL, move |_| passes.kernel_records(layout, KERNEL));
        if shape.is_some() && layout == Layout::Regions {
            rows.series(KERNEL_DIRECT, move |_| passes.kernel_records(layout, KERNEL_DIRECT));
        }
    }
    run.measure("measure", rows, parameters.times.rounds())?;
    add_notes(run, passes, shape);
    Ok(())
}

fn add_notes(run: &mut Run<'_>, passes: &Passes<'_>, shape: Option<Shape>) {
    let mut notes = Vec::new();
    notes.extend(shape.map(|shape| format!("raw_direct writes {shape} in order")));
    notes.push("kernel_write may use all memory of the machine".to_owned());
    if let Some(longest) = passes.throttle_ns_max.get() {
        notes.push(format!("longest wait of the throttle: {:.1} ms", longest as f64 / 1e6));
        run.report.config["throttle_ns_max"] = longest.into();
    }
    run.report.notes.append(&mut notes);
}

/// State that all trials of a run share.
#[derive(Debug)]
struct Passes<'a> {
    file: &'a Path,
    parameters: &'a Parameters,
    tracepoint: Option<u64>,
    ledger: RefCell<Ledger>,
    /// Longest throttling of a caller by the cache so far.
    throttle_ns_max: Cell<Option<u64>>,
}

/// Order of the blocks of one trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Pages at random, each at most once.
    Random,
    /// All of the file in large blocks; the last may be shorter.
    InOrder,
}

impl Passes<'_> {
    /// Returns position and length of the blocks of a version, each of which has its own order.
    fn blocks(&self, order: Order, version: u32) -> impl Iterator<Item = (u64, usize)> + use<> {
        let size_bytes = self.parameters.sizes.size_bytes;
        let access = Access::new(Pattern::Uniform, size_bytes, u64::from(version));
        let (count, step_bytes) = match order {
            Order::Random => (self.parameters.random_writes, PAGE_BYTES as u64),
            Order::InOrder => (size_bytes.div_ceil(BLOCK_BYTES as u64), BLOCK_BYTES as u64),
        };
        (0..count).map(move |index| {
            let in_order = index * step_bytes;
            let pos_bytes = if order == Order::Random { access.pos_bytes(index) } else { in_order };
            (pos_bytes, (size_bytes - pos_bytes).min(step_bytes) as usize)
        })
    }

    /// Records the trial's blocks, and reads pages back. Returns the trial with the number of bytes
    /// compared.
    fn verified(
        &self,
        (order, version): (Order, u32),
        series: &str,
        measured: Measured,
    ) -> Result<Measured> {
        let mut ledger = self.ledger.borrow_mut();
        for (pos_bytes, block_bytes) in self.blocks(order, version) {
            // A partial block at the end may not have been written.
            if order == Order::Random || pos_bytes + block_bytes as u64 <= measured.bytes {
                ledger.enter(pos_bytes, block_bytes, version);
            }
        }
        drop(ledger);
        self.read_back(series, measured)
    }

    fn read_back(&self, series: &str, measured: Measured) -> Result<Measured> {
        let pages = self.parameters.verified_pages;
        let verified_bytes = self.ledger.borrow().verify(self.file, series, pages)?;
        Ok(Measured { verified_bytes, ..measured })
    }

    fn next_version(&self) -> u32 {
        let mut ledger = self.ledger.borrow_mut();
        ledger.last_version += 1;
        ledger.last_version
    }

    /// `raw_direct` of random pages: io_uring, then `fdatasync`.
    fn raw_random(&self) -> Result<Measured> {
        drop_page_cache(self.file)?;
        let version = self.next_version();
        let file = direct::open(self.file, true)?;
        let mut ring = RawRing::new(&file, PAGE_BYTES, RAW_DEPTH)?;
        let mut calls = Calls::during(self.parameters.sizes.expected_pass());
        let meter = Meter::start(self.tracepoint)?;
        let started = meter.started();
        let mut show = |done: Completed<'_>| {
            calls.add(started.elapsed(), done.latency);
            Ok(())
        };
        for (pos_bytes, _) in self.blocks(Order::Random, version) {
            let mut block = loop {
                match ring.take_idle() {
                    Some(block) => break block,
                    None => ring.complete(1, &mut show)?,
                }
            };
            pattern::fill_version(ring.bytes_mut(&mut block), pos_bytes, version);
            ring.start(block, Transfer::Write, pos_bytes)?;
        }
        ring.drain(&mut show)?;
        file.sync_data().map_err(Error::system("sync the file"))?;
        let cost = meter.stop()?;
        let bytes = calls.operations * PAGE_BYTES as u64;
        let measured = Measured::new(calls, bytes, cost);
        let measured = Measured { syscalls_known: ring.enters() + 1, ..measured };
        self.verified((Order::Random, version), RAW, measured)
    }

    /// `raw_direct` of the whole file.
    fn raw_sequential(&self, shape: Shape) -> Result<Measured> {
        drop_page_cache(self.file)?;
        let version = self.next_version();
        let sizes = self.parameters.sizes;
        let (size_bytes, expected) = (sizes.size_bytes, sizes.expected_pass());
        let stream = Stream { file: self.file, size_bytes, expected, tracepoint: self.tracepoint };
        let measured = pass(&stream, Transfer::Write, shape, |block, pos_bytes| {
            pattern::fill_version(block, pos_bytes, version);
            Ok(())
        })?;
        self.ledger.borrow_mut().enter(0, measured.bytes as usize, version);
        self.read_back(RAW, measured)
    }

    /// `write_at` and `sync_data`, through a new cache.
    fn write_at(&self, order: Order, series: &str, folio_bytes: u64) -> Result<Measured> {
        drop_page_cache(self.file)?;
        let version = self.next_version();
        let options = OpenOptions::new().read(true).write(true).folio_bytes(folio_bytes);
        let cached = Cached::open_with(self.cache(), self.file, &options)?;
        let write = |block: &[u8], pos_bytes| Ok(cached.file.write_at(block, pos_bytes)?);
        let measured = cached.with_stats(|| {
            self.calls((order, version), write, || Ok(cached.file.sync_data()?))
        })?;
        let throttle_ns_max = count_of(&cached.close()?, "throttle_ns_max");
        self.throttle_ns_max.set(throttle_ns_max.max(self.throttle_ns_max.get()));
        self.verified((order, version), series, Measured { misses: 0, ..measured })
    }

    fn cache(&self) -> bifolio::CacheBuilder {
        Cache::builder().memory(self.parameters.sizes.memory_bytes).populate(true)
    }

    /// `kernel_write`: `pwrite` into the page cache, then `fdatasync`.
    fn kernel_write(&self, order: Order) -> Result<Measured> {
        drop_page_cache(self.file)?;
        let version = self.next_version();
        let failed = || Error::system(format!("write {}", self.file.display()));
        let file = File::options().write(true).open(self.file).map_err(failed())?;
        let write = |block: &[u8], pos_bytes| file.write_at(block, pos_bytes).map_err(failed());
        let sync = || file.sync_data().map_err(failed());
        let measured = self.calls((order, version), write, sync)?;
        self.verified((order, version), KERNEL, measured)
    }

    /// Makes one call for each block, one after the other, then the sync.
    fn calls(
        &self,
        (order, version): (Order, u32),
        write: impl Fn(&[u8], u64) -> Result<usize>,
        sync: impl Fn() -> Result<()>,
    ) -> Result<Measured> {
        let mut buffer = vec![0; if order == Order::Random { PAGE_BYTES } else { BLOCK_BYTES }];
        let mut calls = Calls::during(self.parameters.sizes.expected_pass());
        let mut bytes = 0;
        let meter = Meter::start(self.tracepoint)?;
        for (pos_bytes, block_bytes) in self.blocks(order, version) {
            let block = &mut buffer[..block_bytes];
            pattern::fill_version(block, pos_bytes, version);
            let begin = Instant::now();
            let written = write(block, pos_bytes)?;
            calls.add(meter.started().elapsed(), begin.elapsed());
            if written != block_bytes {
                return Err(Error::Refused(format!("a write of {block_bytes} bytes was short")));
            }
            bytes += written as u64;
        }
        sync()?;
        let mut measured = Measured::new(calls, bytes, meter.stop()?);
        measured.syscalls_known += 1;
        Ok(measured)
    }

    /// `write_at` and `sync_data` of records through one handle of a new cache.
    fn cached_records(&self, layout: Layout) -> Result<Measured> {
        drop_page_cache(self.file)?;
        let cached = Cached::open(self.cache(), self.file, true)?;
        let file = &cached.file;
        let mut measured = self.records(layout, |page: &[u8], pos_bytes| {
            let written = file.write_at(page, pos_bytes)?;
            file.sync_data()?;
            Ok(written)
        })?;
        let stats = cached.cache.stats();
        measured.syscalls_known = stats.writeback + stats.device_flushes;
        measured.add(FLUSHES_PER_SYNC, stats.device_flushes as f64, Per::Operation);
        cached.close()?;
        self.read_back(WRITE_AT, measured)
    }

    /// `pwrite` and `fdatasync` of records on one descriptor, past the page cache or through it.
    fn kernel_records(&self, layout: Layout, series: &str) -> Result<Measured> {
        drop_page_cache(self.file)?;
        let failed = || Error::system(format!("write {}", self.file.display()));
        let file = if series == KERNEL_DIRECT {
            direct::open(self.file, true)?
        } else {
            File::options().write(true).open(self.file).map_err(failed())?
        };
        let measured = self.records(layout, |page: &[u8], pos_bytes| {
            let written = file.write_at(page, pos_bytes).map_err(failed())?;
            file.sync_data().map_err(failed())?;
            Ok(written)
        })?;
        self.read_back(series, measured)
    }

    /// Writes the records of the trial with the next version, each by one call of `commit`.
    fn records(
        &self,
        layout: Layout,
        commit: impl Fn(&[u8], u64) -> Result<usize> + Sync,
    ) -> Result<Measured> {
        let version = self.next_version();
        let expected = Duration::from_secs(1);
        let records = Records {
            layout,
            file_pages: self.parameters.sizes.pages(),
            per_thread: self.parameters.records_per_thread,
        };
        let taken = AtomicU64::new(0);
        let body = |thread: u64| {
            let mut page = Page::zeroed();
            let record = &mut page.0[..layout.record_bytes()];
            let (mut calls, started) = (Calls::during(expected), Instant::now());
            for pos_bytes in records.positions(thread, &taken) {
                pattern::fill_version(record, pos_bytes, version);
                let begin = Instant::now();
                if commit(record, pos_bytes)? != record.len() {
                    return Err(Error::Refused("the write of a record was short".into()));
                }
                calls.add(started.elapsed(), begin.elapsed());
            }
            Ok(calls)
        };
        let meter = Meter::start(None)?;
        let threads = run_together(THREADS as usize, |thread| Ok(thread as u64), body)?;
        let cost = meter.stop()?;
        let mut calls = Calls::during(expected);
        threads.iter().for_each(|thread| calls.merge(thread));
        let mut ledger = self.ledger.borrow_mut();
        let taken = AtomicU64::new(0);
        let positions = (0..THREADS).flat_map(|thread| records.positions(thread, &taken));
        positions.for_each(|pos_bytes| ledger.enter(pos_bytes, PAGE_BYTES, version));
        let bytes = calls.operations * layout.record_bytes() as u64;
        let mut measured = Measured::new(calls, bytes, cost);
        measured.syscalls_known *= 2;
        Ok(measured)
    }
}

/// Placement of the records of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// One after the other, whichever thread writes them.
    Log,
    /// A page each, page by page of the thread's own region.
    Regions,
}

impl Layout {
    fn record_bytes(self) -> usize {
        if self == Self::Log { LOG_RECORD_BYTES } else { PAGE_BYTES }
    }
}

/// The records of a trial. At the end of file, or of a region, they restart.
#[derive(Clone, Copy, Debug)]
struct Records {
    layout: Layout,
    file_pages: u64,
    per_thread: u64,
}

impl Records {
    /// Returns the positions of one thread's records, in order; in a log, which consists of whole
    /// pages and may have a few more records, those after the `taken` ones.
    fn positions(self, thread: u64, taken: &AtomicU64) -> impl Iterator<Item = u64> {
        let is_log = self.layout == Layout::Log;
        let begin = |thread: u64| thread * self.file_pages / THREADS;
        let pages = if is_log { 0..self.file_pages } else { begin(thread)..begin(thread + 1) };
        let of_page = (PAGE_BYTES / LOG_RECORD_BYTES) as u64;
        let count = match self.layout {
            Layout::Log => (self.per_thread * THREADS).next_multiple_of(of_page),
            // In a file of fewer pages than threads some have none.
            Layout::Regions if pages.is_empty() => 0,
            Layout::Regions => self.per_thread,
        };
        let mut own = 0..count;
        let record_bytes = self.layout.record_bytes() as u64;
        let region_bytes = (pages.end - pages.start) * PAGE_BYTES as u64;
        std::iter::from_fn(move || {
            // Relaxed: each number is given once, whatever else is seen.
            let next = || Some(taken.fetch_add(1, Ordering::Relaxed)).filter(|n| *n < count);
            let record = if is_log { next() } else { own.next() }?;
            Some(pages.start * PAGE_BYTES as u64 + record * record_bytes % region_bytes)
        })
    }
}

/// The version that every page of the file must hold.
#[derive(Debug)]
struct Ledger {
    versions: Vec<u32>,
    last_version: u32,
}

impl Ledger {
    /// Creates the ledger of a new file: everything is version 0.
    fn new(pages: u64) -> Self {
        Self { versions: vec![0; pages as usize], last_version: 0 }
    }

    /// Records that the pages of `len_bytes` at `pos_bytes` now hold `version`.
    fn enter(&mut self, pos_bytes: u64, len_bytes: usize, version: u32) {
        let first = pos_bytes as usize / PAGE_BYTES;
        self.versions[first..first + len_bytes / PAGE_BYTES].fill(version);
    }

    /// Compares `count` pages of `file`, chosen at random, each once. Returns the number of bytes.
    /// The version of the last trial seeds the choice.
    fn verify(&self, file: &Path, series: &str, count: u64) -> Result<u64> {
        let failed = || Error::system(format!("read {} back", file.display()));
        let opened = direct::probe(file).and_then(|()| direct::open(file, false));
        // Where nothing goes past the page cache, through it is what is left.
        let opened = opened.or_else(|_| File::open(file).map_err(failed()))?;
        let size_bytes = (self.versions.len() * PAGE_BYTES) as u64;
        let access = Access::new(Pattern::Uniform, size_bytes, u64::from(self.last_version));
        let mut page = Page::zeroed();
        for pos_bytes in (0..count).map(|draw| access.pos_bytes(draw)) {
            let read = pread(&opened, &mut page.0, pos_bytes);
            let read = read.map_err(|errno| failed()(errno.into()))?;
            let version = self.versions[pos_bytes as usize / PAGE_BYTES];
            if read != PAGE_BYTES || !pattern::matches_version(&page.0, pos_bytes, version) {
                return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes });
            }
        }
        Ok(count * PAGE_BYTES as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn pages_written_too_seldom_or_too_often_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        pattern::make_file(&path, 8 * PAGE_BYTES as u64, &mut Silent).unwrap();
        let mut ledger = Ledger::new(8);
        assert_eq!(ledger.verify(&path, "x", 8).unwrap(), 8 * PAGE_BYTES as u64);
        ledger.enter(8192, PAGE_BYTES, 1);
        assert!(ledger.verify(&path, "x", 8).is_err());
        let mut page = [0; PAGE_BYTES];
        pattern::fill_version(&mut page, 8192, 1);
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&page, 8192).unwrap();
        ledger.verify(&path, "x", 8).unwrap();
        ledger.enter(0, PAGE_BYTES, 1);
        assert!(ledger.verify(&path, "x", 8).is_err());
    }

    #[test]
    fn every_thread_has_a_region_and_a_log_begins_again() {
        let positions = |layout, file_pages, per_thread, threads: std::ops::Range<u64>| {
            let (records, taken) = (Records { layout, file_pages, per_thread }, AtomicU64::new(0));
            threads.flat_map(|thread| records.positions(thread, &taken)).collect::<Vec<u64>>()
        };
        let mut regions = positions(Layout::Regions, 20, 7, 0..THREADS);
        assert_eq!(regions.len(), 7 * 8);
        regions.sort_unstable();
        regions.dedup();
        assert_eq!(regions.len(), 20, "all pages are written");
        assert_eq!(positions(Layout::Regions, 1, 7, 0..7).len(), 0);
        let log = positions(Layout::Log, 100, 1, 3..5);
        assert_eq!(log, (0..16).map(|record| record * 256).collect::<Vec<_>>());
        let again = positions(Layout::Log, 1, 4, 0..1);
        assert!(again.len() == 32 && again.iter().all(|position| *position < 4096));
    }
}

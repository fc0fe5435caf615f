//! `writes`: pages at random, and the whole file in order, each trial with a sync at its end; and
//! records of eight threads, each followed by a sync.
//!
//! `write_at` and `sync_data` through a new cache of an eighth of the file, whose memory is
//! resident when it is built; against the kernel's page cache (`kernel_write`: `pwrite`, then
//! `fdatasync`), whose memory is not limited, and in order against the device at its best
//! (`raw_direct`: io_uring, then `fdatasync`). Every trial writes its own version, and pages are
//! read back past all caches after each: pages that were written, and pages that must not have
//! changed.
//!
//! Eight threads write and sync records repeatedly (in syncs per second), like the threads of a
//! database that commit: records of 256 bytes to one `log`, whichever thread is next, or `records`
//! of a page, each thread in its own region of the file. The kernel's series are `pwrite` and
//! `fdatasync` of the same threads on one descriptor, through the page cache and, for whole pages,
//! past it (`kernel_direct`). Concurrent syncs of the cache share the write-out and the flush of
//! the device, which are counted per sync; the kernel writes and flushes for each.
//!
//! The time includes the sync. Latencies are those of the single writes.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bifolio::{Cache, OpenOptions};
use bifolio_report::Case;
use rustix::io::pread;

use crate::definition::{Asked, Definition, Parameters, at_least};
use crate::error::{Error, Result};
use crate::harness::access::{Access, PAGE_BYTES, Pattern};
use crate::harness::cached::Cached;
use crate::harness::direct::{self, Page, drop_page_cache};
use crate::harness::measured::{Calls, Measured, Meter, Per};
use crate::harness::pattern;
use crate::harness::raw_ring::{Shape, Stream, Transfer};
use crate::harness::sizes::{SizeRule, Sizes};
use crate::harness::threads::run_together;
use crate::run::Run;

const RAW: &str = "raw_direct";
const WRITE_AT: &str = "write_at";
const KERNEL: &str = "kernel_write";
const KERNEL_DIRECT: &str = "kernel_direct";

/// Bytes that a sequential trial writes per call.
const BLOCK_BYTES: usize = 1 << 20;
/// Divisor: the part of the pages that a trial of random writes writes.
const RANDOM_SHARE: u64 = 8;
/// Threads that commit at the same time.
const THREADS: u64 = 8;
/// Bytes of a record of the log.
const LOG_RECORD_BYTES: usize = 256;

pub(crate) static WRITES: Definition = Definition {
    name: "writes",
    description: "random pages, a whole file, records of 8 threads, each synced, against device \
                  and kernel",
    sizes: SizeRule::misses([2 << 20, 64 << 20, 512 << 20]),
    times: [(0.2, 1), (9.0, 2), (240.0, 5)],
    needs: |parameters| parameters.sizes.needs(),
    ratios: &[(WRITE_AT, RAW), (WRITE_AT, KERNEL), (WRITE_AT, KERNEL_DIRECT)],
    shown_counts: &[
        "p50_ns",
        "p99_ns",
        "p999_ns",
        "max_ns",
        "cpu_s_per_gib",
        "syscalls_per_op",
        "operations",
        "flushes_per_sync",
    ],
    targets: &[
        at_least("pattern=random", Asked::Ratio(WRITE_AT, KERNEL), 1.0),
        at_least("pattern=sequential", Asked::Ratio(WRITE_AT, RAW), 0.95),
        at_least("pattern=log", Asked::Ratio(WRITE_AT, KERNEL), 2.0),
        at_least("pattern=records", Asked::Ratio(WRITE_AT, KERNEL), 2.0),
        at_least("pattern=records", Asked::Ratio(WRITE_AT, KERNEL_DIRECT), 2.0),
    ],
    run,
    child: None,
};

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let sizes = parameters.sizes;
    let file = run.make_file("file", sizes.size_bytes)?;
    let (records_per_thread, verified_pages) =
        parameters.set.of([(4, u64::MAX), (100, 256), (1000, 8192)]);
    let passes = &Passes {
        file: &file,
        sizes,
        records_per_thread,
        verified_pages: verified_pages.min(sizes.pages()),
        ledger: RefCell::new(Ledger { versions: vec![0; sizes.pages() as usize], last_version: 0 }),
    };
    run.start("find the shape the device likes best", 1);
    let shape = passes.stream().fastest_shape(|shape| passes.raw_sequential(shape));
    let shape = run.attempt(&[RAW], shape)?;
    let mut rows = run.rows();
    let case = |pattern: &'static str, block_bytes: usize| {
        Case::new().with("pattern", pattern).with("block_bytes", block_bytes)
    };
    rows.row(case("random", PAGE_BYTES), ("writes/s", Measured::rate));
    rows.series(WRITE_AT, move |_| passes.write_at(Order::Random));
    rows.series(KERNEL, move |_| passes.kernel_write(Order::Random));
    rows.row(case("sequential", BLOCK_BYTES), ("GiB/s", Measured::gibibytes_rate));
    if let Some(shape) = shape {
        rows.series(RAW, move |_| passes.raw_sequential(shape));
    }
    rows.series(WRITE_AT, move |_| passes.write_at(Order::InOrder));
    rows.series(KERNEL, move |_| passes.kernel_write(Order::InOrder));
    for (pattern, layout) in [("log", Layout::Log), ("records", Layout::Regions)] {
        rows.row(case(pattern, layout.record_bytes()), ("syncs/s", Measured::rate));
        rows.series(WRITE_AT, move |_| passes.cached_records(layout));
        rows.series(KERNEL, move |_| passes.kernel_records(layout, KERNEL));
        if shape.is_some() && layout == Layout::Regions {
            rows.series(KERNEL_DIRECT, move |_| passes.kernel_records(layout, KERNEL_DIRECT));
        }
    }
    run.measure("measure", rows, parameters.rounds())?;
    if let Some(shape) = shape {
        run.note(format!("raw_direct writes {shape} in order"));
    }
    run.note("kernel_write may use all memory of the machine");
    Ok(())
}

/// State that all trials of a run share.
struct Passes<'a> {
    file: &'a Path,
    sizes: Sizes,
    /// Records that each thread writes and syncs in one trial; those of a log fill whole pages.
    records_per_thread: u64,
    /// Pages compared after each trial, chosen at random.
    verified_pages: u64,
    ledger: RefCell<Ledger>,
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
    fn stream(&self) -> Stream<'_> {
        let (size_bytes, expected) = (self.sizes.size_bytes, self.sizes.expected_pass());
        Stream { file: self.file, size_bytes, expected }
    }

    /// Returns position and length of the blocks of a version, each of which has its own order.
    fn blocks(&self, order: Order, version: u32) -> impl Iterator<Item = (u64, usize)> + use<> {
        let size_bytes = self.sizes.size_bytes;
        let access = Access::new(Pattern::Uniform, size_bytes, u64::from(version));
        let (count, step_bytes) = match order {
            Order::Random => (self.sizes.pages().div_ceil(RANDOM_SHARE), PAGE_BYTES as u64),
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
        for (pos_bytes, block_bytes) in self.blocks(order, version) {
            self.ledger.borrow_mut().enter(pos_bytes, block_bytes, version);
        }
        self.read_back(series, measured)
    }

    fn read_back(&self, series: &str, measured: Measured) -> Result<Measured> {
        let verified_bytes = self.ledger.borrow().verify(self.file, series, self.verified_pages)?;
        Ok(Measured { verified_bytes, ..measured })
    }

    /// Begins a trial: drops the file from the page cache, and returns the trial's version.
    fn begin(&self) -> Result<u32> {
        drop_page_cache(self.file)?;
        let mut ledger = self.ledger.borrow_mut();
        ledger.last_version += 1;
        Ok(ledger.last_version)
    }

    /// `raw_direct` of the whole file.
    fn raw_sequential(&self, shape: Shape) -> Result<Measured> {
        let version = self.begin()?;
        let fill = |block: &mut [u8], pos_bytes| pattern::fill(block, pos_bytes, version);
        let measured = self.stream().pass(Transfer::Write, shape, fill, |_, _| Ok(()))?;
        self.ledger.borrow_mut().enter(0, measured.bytes as usize, version);
        self.read_back(RAW, measured)
    }

    /// `write_at` and `sync_data`, through a new cache.
    fn write_at(&self, order: Order) -> Result<Measured> {
        let version = self.begin()?;
        let cached = self.cached()?;
        let write = |block: &[u8], pos_bytes| Ok(cached.file.write_at(block, pos_bytes)?);
        let measured = cached.with_stats(|| {
            self.calls((order, version), write, || Ok(cached.file.sync_data()?))
        })?;
        cached.close()?;
        self.verified((order, version), WRITE_AT, Measured { misses: 0, ..measured })
    }

    fn cached(&self) -> Result<Cached> {
        let builder = Cache::builder().memory(self.sizes.memory_bytes).prefault(true);
        Cached::open(builder, self.file, &OpenOptions::new().read(true).write(true))
    }

    /// `kernel_write`: `pwrite` into the page cache, then `fdatasync`.
    fn kernel_write(&self, order: Order) -> Result<Measured> {
        let version = self.begin()?;
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
        let mut calls = Calls::during(self.sizes.expected_pass());
        let mut bytes = 0;
        let meter = Meter::start();
        for (pos_bytes, block_bytes) in self.blocks(order, version) {
            let block = &mut buffer[..block_bytes];
            pattern::fill(block, pos_bytes, version);
            let begin = Instant::now();
            let written = write(block, pos_bytes)?;
            calls.add(meter.started.elapsed(), begin.elapsed());
            if written != block_bytes {
                return Err(Error::Refused(format!("a write of {block_bytes} bytes was short")));
            }
            bytes += written as u64;
        }
        sync()?;
        let syscalls = Some(calls.operations + 1);
        Ok(Measured { syscalls, ..Measured::new(calls, bytes, meter.stop()) })
    }

    /// `write_at` and `sync_data` of records through one handle of a new cache.
    fn cached_records(&self, layout: Layout) -> Result<Measured> {
        let version = self.begin()?;
        let cached = self.cached()?;
        let file = &cached.file;
        let commit = |page: &[u8], pos_bytes| {
            let written = file.write_at(page, pos_bytes)?;
            file.sync_data()?;
            Ok(written)
        };
        let mut measured = cached.with_stats(|| self.records((layout, version), commit))?;
        let flushes = cached.cache.stats().storage.flushes;
        measured.add("flushes_per_sync", flushes as f64, Per::Operation);
        cached.close()?;
        self.read_back(WRITE_AT, Measured { misses: 0, ..measured })
    }

    /// `pwrite` and `fdatasync` of records on one descriptor, past the page cache or through it.
    fn kernel_records(&self, layout: Layout, series: &str) -> Result<Measured> {
        let version = self.begin()?;
        let failed = || Error::system(format!("write {}", self.file.display()));
        let file = if series == KERNEL_DIRECT {
            direct::open(self.file, true)?
        } else {
            File::options().write(true).open(self.file).map_err(failed())?
        };
        let measured = self.records((layout, version), |page: &[u8], pos_bytes| {
            let written = file.write_at(page, pos_bytes).map_err(failed())?;
            file.sync_data().map_err(failed())?;
            Ok(written)
        })?;
        self.read_back(series, measured)
    }

    /// Writes the records of the trial with its version, each by one call of `commit`.
    fn records(
        &self,
        (layout, version): (Layout, u32),
        commit: impl Fn(&[u8], u64) -> Result<usize> + Sync,
    ) -> Result<Measured> {
        let expected = Duration::from_secs(1);
        let taken = AtomicU64::new(0);
        let (Sizes { size_bytes, .. }, per_thread) = (self.sizes, self.records_per_thread);
        let pages = self.sizes.pages();
        let body = |thread: u64| {
            let mut page = Page::zeroed();
            let record = &mut page.0[..layout.record_bytes()];
            let (mut calls, mut written) = (Calls::during(expected), Vec::new());
            let region = thread * pages / THREADS;
            let region_pages = ((thread + 1) * pages / THREADS - region).max(1);
            let started = Instant::now();
            for index in 0..per_thread {
                let pos_bytes = match layout {
                    // Relaxed: each number is given once, whatever else is seen.
                    Layout::Log => {
                        let number = taken.fetch_add(1, Ordering::Relaxed);
                        number * LOG_RECORD_BYTES as u64 % size_bytes
                    }
                    Layout::Regions => (region + index % region_pages) * PAGE_BYTES as u64,
                };
                pattern::fill(record, pos_bytes, version);
                let begin = Instant::now();
                if commit(record, pos_bytes)? != record.len() {
                    return Err(Error::Refused("the write of a record was short".into()));
                }
                calls.add(started.elapsed(), begin.elapsed());
                written.push(pos_bytes);
            }
            Ok((calls, written))
        };
        let meter = Meter::start();
        let threads = run_together(THREADS as usize, |thread| Ok(thread as u64), body)?;
        let cost = meter.stop();
        let mut calls = Calls::during(expected);
        let mut ledger = self.ledger.borrow_mut();
        for (of_thread, written) in threads {
            calls.merge(&of_thread);
            written.iter().for_each(|pos_bytes| ledger.enter(*pos_bytes, PAGE_BYTES, version));
        }
        let bytes = calls.operations * layout.record_bytes() as u64;
        let syscalls = Some(2 * calls.operations);
        Ok(Measured { syscalls, ..Measured::new(calls, bytes, cost) })
    }
}

/// Placement of the records of a trial. At the end of file, or of a region, they restart.
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

/// The version that every page of the file must hold.
#[derive(Debug)]
struct Ledger {
    versions: Vec<u32>,
    last_version: u32,
}

impl Ledger {
    /// Records that the pages of `len_bytes` from that of `pos_bytes` on now hold `version`.
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
            if read != PAGE_BYTES || !pattern::matches(&page.0, pos_bytes, version) {
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
        let mut ledger = Ledger { versions: vec![0; 8], last_version: 0 };
        assert_eq!(ledger.verify(&path, "x", 8).unwrap(), 8 * PAGE_BYTES as u64);
        ledger.enter(8192, PAGE_BYTES, 1);
        assert!(ledger.verify(&path, "x", 8).is_err());
        let mut page = [0; PAGE_BYTES];
        pattern::fill(&mut page, 8192, 1);
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&page, 8192).unwrap();
        ledger.verify(&path, "x", 8).unwrap();
        ledger.enter(0, PAGE_BYTES, 1);
        assert!(ledger.verify(&path, "x", 8).is_err());
    }
}

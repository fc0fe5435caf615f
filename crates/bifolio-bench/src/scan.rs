//! `scan`: a whole file from its first byte to its last, in order, initially not in memory.
//!
//! `read_at` through a new cache of an eighth of the file, with blocks of 64 KiB and of 1 MiB;
//! against the device at its best (`raw_direct`: io_uring, large blocks, several in flight, nothing
//! copied), and the kernel's page cache with its readahead (`kernel_pread`). Before each pass the
//! file is dropped from the page cache. Opening and building are not timed; everything from the
//! first call on is. The cache's memory is made resident when it is built, like that of the
//! device's loop; the kernel allocates its own while it reads.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use bifolio::{Cache, OpenOptions};
use bifolio_report::Case;

use crate::definition::{Asked, Definition, Parameters, at_least};
use crate::error::{Error, Result};
use crate::harness::cached::Cached;
use crate::harness::direct::drop_page_cache;
use crate::harness::measured::{Calls, Measured, Meter};
use crate::harness::pattern::Checker;
use crate::harness::raw_ring::{Shape, Stream, Transfer};
use crate::harness::sizes::SizeRule;
use crate::run::Run;

const RAW_DIRECT: &str = "raw_direct";
const READ_AT: &str = "read_at";
const KERNEL: &str = "kernel_pread";

pub(crate) static SCAN: Definition = Definition {
    name: "scan",
    description: "a whole file in order, from cold, against the device and the kernel's readahead",
    sizes: SizeRule::misses([4 << 20, 64 << 20, 512 << 20]),
    times: [(0.2, 1), (8.0, 2), (240.0, 5)],
    needs: |parameters| parameters.sizes.needs(),
    ratios: &[(READ_AT, RAW_DIRECT), (READ_AT, KERNEL)],
    shown_counts: &[
        "p50_ns",
        "p99_ns",
        "max_ns",
        "cpu_s_per_gib",
        "syscalls_per_op",
        "min_second_over_mean",
        "min_100ms_over_mean",
    ],
    targets: &[at_least("", Asked::Ratio(READ_AT, RAW_DIRECT), 0.85)],
    run,
    child: None,
};

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let sizes = parameters.sizes;
    let file = run.make_file("file", sizes.size_bytes)?;
    let (size_bytes, expected) = (sizes.size_bytes, sizes.expected_pass());
    let stream = &Stream { file: &file, size_bytes, expected };
    run.start("find the shape the device likes best", 1);
    let shape = stream.fastest_shape(|shape| raw(stream, shape));
    let shape = run.attempt(&[RAW_DIRECT], shape)?;
    let mut rows = run.rows();
    for block_bytes in [64 << 10, 1 << 20] {
        let case = Case::new().with("pattern", "sequential").with("block_bytes", block_bytes);
        rows.row(case, ("GiB/s", Measured::gibibytes_rate));
        if let Some(shape) = shape {
            rows.series(RAW_DIRECT, move |_| raw(stream, shape));
        }
        rows.series(READ_AT, move |_| read_at(stream, sizes.memory_bytes, block_bytes));
        rows.series(KERNEL, move |_| kernel_pread(stream, block_bytes));
    }
    run.measure("measure", rows, parameters.rounds())?;
    if let Some(shape) = shape {
        run.note(format!("raw_direct reads {shape}"));
    }
    Ok(())
}

/// `raw_direct`, whose blocks stay where the device has put them.
fn raw(stream: &Stream<'_>, shape: Shape) -> Result<Measured> {
    drop_page_cache(stream.file)?;
    let mut checker = Checker::new(RAW_DIRECT);
    let mut measured = stream.pass(
        Transfer::Read,
        shape,
        |_, _| (),
        |block, pos_bytes| checker.add(block, pos_bytes),
    )?;
    measured.verified_bytes = checker.finish()?;
    Ok(measured)
}

/// `read_at`, through a new cache.
fn read_at(stream: &Stream<'_>, memory_bytes: u64, block_bytes: usize) -> Result<Measured> {
    drop_page_cache(stream.file)?;
    let builder = Cache::builder().memory(memory_bytes).prefault(true);
    let cached = Cached::open(builder, stream.file, &OpenOptions::new())?;
    let measured = cached.with_stats(|| {
        calls(stream, READ_AT, block_bytes, |block, pos_bytes| {
            Ok(cached.file.read_at(block, pos_bytes)?)
        })
    })?;
    cached.close()?;
    Ok(Measured { misses: 0, ..measured })
}

/// `kernel_pread`, with the kernel's own readahead, and without a limit of memory.
fn kernel_pread(stream: &Stream<'_>, block_bytes: usize) -> Result<Measured> {
    drop_page_cache(stream.file)?;
    let failed = || Error::system(format!("read {}", stream.file.display()));
    let file = File::open(stream.file).map_err(failed())?;
    calls(stream, KERNEL, block_bytes, |block, pos_bytes| {
        file.read_at(block, pos_bytes).map_err(failed())
    })
}

/// Makes one call after the other up to the end of the file.
fn calls(
    stream: &Stream<'_>,
    series: &'static str,
    block_bytes: usize,
    mut read: impl FnMut(&mut [u8], u64) -> Result<usize>,
) -> Result<Measured> {
    let mut block = vec![0; block_bytes];
    let (mut calls, mut checker) = (Calls::during(stream.expected), Checker::new(series));
    let meter = Meter::start();
    for pos_bytes in (0..stream.size_bytes).step_by(block_bytes) {
        let begin = Instant::now();
        let read_bytes = read(&mut block, pos_bytes)?;
        calls.add(meter.started.elapsed(), begin.elapsed());
        let left_bytes = stream.size_bytes - pos_bytes;
        if read_bytes as u64 != left_bytes.min(block_bytes as u64) {
            return Err(checker.wrong(pos_bytes));
        }
        checker.add(&block[..read_bytes], pos_bytes)?;
    }
    let mut measured = Measured::new(calls, stream.size_bytes, meter.stop());
    measured.verified_bytes = checker.finish()?;
    Ok(measured)
}

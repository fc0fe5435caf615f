//! The whole file from its first byte to its last by io_uring, past the page cache: the upper limit
//! of sequential access.
//!
//! The fastest shape, many small blocks or a few large ones, depends on the device; the candidates
//! are tried once before anything is timed.

use std::path::Path;
use std::time::Duration;

use super::direct;
use super::intervals::OperationsByInterval;
use super::latency::Latencies;
use super::meter::{Measured, Meter};
use super::raw_ring::{RawRing, Transfer};
use crate::error::{Error, Result};

/// Block size and number of blocks in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) block_bytes: usize,
    pub(crate) depth: u16,
}

/// All have 8 MiB in flight, the maximum of the fastest disks.
pub(crate) const SHAPES: [Shape; 4] = [
    Shape { block_bytes: 256 << 10, depth: 32 },
    Shape { block_bytes: 512 << 10, depth: 16 },
    Shape { block_bytes: 1 << 20, depth: 8 },
    Shape { block_bytes: 2 << 20, depth: 4 },
];

/// Attempts per shape.
const TRIES: usize = 2;

impl Shape {
    /// Returns the name used in notes.
    pub(crate) fn describe(self) -> String {
        format!("{} KiB x {}", self.block_bytes >> 10, self.depth)
    }
}

/// The direction of a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream<'a> {
    pub(crate) file: &'a Path,
    pub(crate) size_bytes: u64,
    pub(crate) transfer: Transfer,
    /// Expected duration of a pass, which determines the length of the intervals.
    pub(crate) expected: Duration,
    pub(crate) tracepoint: Option<u64>,
}

/// The owner's work on a block: it fills it before a write, and checks it after a read.
pub(crate) trait Blocks {
    fn fill(&mut self, block: &mut [u8], pos_bytes: u64);
    fn look(&mut self, block: &[u8], pos_bytes: u64) -> Result<()>;
}

/// Returns the fastest of the shapes, by the best of a few passes each.
pub(crate) fn fastest_shape(run: impl Fn(Shape) -> Result<Measured>) -> Result<Shape> {
    let mut best = (0.0, SHAPES[0]);
    for shape in SHAPES.repeat(TRIES) {
        let rate = run(shape)?.gibibytes_rate();
        if rate > best.0 {
            best = (rate, shape);
        }
    }
    Ok(best.1)
}

/// Moves the whole file; a write ends with a sync. A partial block at the end is not moved: the
/// figure is then for slightly less than the file.
pub(crate) fn pass(
    stream: &Stream<'_>,
    shape: Shape,
    blocks: &mut impl Blocks,
) -> Result<Measured> {
    let writes = stream.transfer == Transfer::Write;
    let file = direct::open(stream.file, writes)?;
    let mut ring = RawRing::new(&file, shape.block_bytes, shape.depth)?;
    let mut latencies = Latencies::default();
    let mut intervals = OperationsByInterval::new(stream.expected);
    let step_bytes = shape.block_bytes as u64;
    let end_bytes = stream.size_bytes / step_bytes * step_bytes;
    let meter = Meter::start(stream.tracepoint)?;
    let started = meter.started();
    let mut pos_bytes = 0;
    while pos_bytes < end_bytes || ring.in_flight() > 0 {
        while pos_bytes < end_bytes {
            let Some(mut block) = ring.take_idle() else { break };
            if writes {
                blocks.fill(ring.bytes_mut(&mut block), pos_bytes);
            }
            ring.start(block, stream.transfer, pos_bytes)?;
            pos_bytes += step_bytes;
        }
        ring.complete(1, |done| {
            latencies.add(done.latency);
            intervals.add_timed(started.elapsed(), done.latency);
            if writes { Ok(()) } else { blocks.look(done.bytes, done.pos_bytes) }
        })?;
    }
    if writes {
        file.sync_data().map_err(Error::system("sync the file"))?;
    }
    let cost = meter.stop()?;
    let operations = latencies.calls();
    Ok(Measured {
        operations,
        bytes: end_bytes,
        misses: 0,
        syscalls_known: ring.enters() + u64::from(writes),
        cost,
        latencies,
        intervals,
        verified_bytes: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::intervals::OperationsByInterval;
    use crate::harness::pattern;
    use crate::progress::Silent;

    struct Versions {
        seen_bytes: u64,
        version: u32,
    }

    impl Blocks for Versions {
        fn fill(&mut self, block: &mut [u8], pos_bytes: u64) {
            pattern::fill_version(block, pos_bytes, self.version);
        }

        fn look(&mut self, block: &[u8], pos_bytes: u64) -> Result<()> {
            assert!(pattern::matches_version(block, pos_bytes, self.version));
            self.seen_bytes += block.len() as u64;
            Ok(())
        }
    }

    #[test]
    fn what_one_pass_writes_the_next_one_reads() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let path = dir.path().join("file");
        let size_bytes = 5 << 20;
        pattern::make_file(&path, size_bytes, &mut Silent).unwrap();
        if direct::probe(&path).is_err() {
            return;
        }
        let run = |transfer, shape, version| {
            let expected = Duration::from_secs(1);
            let stream = Stream { file: &path, size_bytes, transfer, expected, tracepoint: None };
            let mut versions = Versions { seen_bytes: 0, version };
            let measured = pass(&stream, shape, &mut versions).unwrap();
            (measured.bytes, versions.seen_bytes)
        };
        let [small, .., large] = SHAPES;
        assert_eq!(run(Transfer::Read, small, 0), (size_bytes, size_bytes));
        assert_eq!(run(Transfer::Write, small, 7), (size_bytes, 0));
        assert_eq!(run(Transfer::Read, large, 7), (4 << 20, 4 << 20));
    }

    #[test]
    fn the_fastest_shape_is_the_one_of_the_best_pass() {
        let passes = std::cell::Cell::new(0);
        let run = |shape: Shape| {
            passes.set(passes.get() + 1);
            let quick = shape == SHAPES[2] && passes.get() > SHAPES.len();
            let elapsed = Duration::from_secs(if quick { 1 } else { 2 });
            let cost = crate::harness::meter::Cost { elapsed, ..Default::default() };
            Ok(Measured {
                operations: 1,
                bytes: 1 << 30,
                misses: 0,
                syscalls_known: 0,
                cost,
                latencies: Latencies::default(),
                intervals: OperationsByInterval::new(elapsed),
                verified_bytes: 0,
            })
        };
        assert_eq!(fastest_shape(run).unwrap(), SHAPES[2]);
    }
}

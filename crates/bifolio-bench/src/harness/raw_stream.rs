//! The whole file from its first byte to its last by io_uring, past the page cache: the upper limit
//! of sequential access.
//!
//! The fastest shape, many small blocks or a few large ones, depends on the device; the candidates
//! are tried once before anything is timed.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use super::direct;
use super::measured::{Calls, Measured, Meter};
use super::raw_ring::{RawRing, Transfer};
use crate::error::{Error, Result};

/// Block size and number of blocks in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) block_bytes: usize,
    pub(crate) depth: u16,
}

/// All have 8 MiB in flight, the maximum of the fastest disks.
const SHAPES: [Shape; 4] = [
    Shape { block_bytes: 256 << 10, depth: 32 },
    Shape { block_bytes: 512 << 10, depth: 16 },
    Shape { block_bytes: 1 << 20, depth: 8 },
    Shape { block_bytes: 2 << 20, depth: 4 },
];

/// Attempts per shape.
const TRIES: usize = 2;

impl fmt::Display for Shape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} KiB x {}", self.block_bytes >> 10, self.depth)
    }
}

/// The file of a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream<'a> {
    pub(crate) file: &'a Path,
    pub(crate) size_bytes: u64,
    /// Expected duration of a pass, which determines the length of the intervals.
    pub(crate) expected: Duration,
    pub(crate) tracepoint: Option<u64>,
}

/// Returns the fastest of the shapes for `file`, by the best of a few passes each.
pub(crate) fn fastest_shape(file: &Path, run: impl Fn(Shape) -> Result<Measured>) -> Result<Shape> {
    direct::probe(file)?;
    let mut best = (0.0, SHAPES[0]);
    for shape in SHAPES.repeat(TRIES) {
        let rate = run(shape)?.gibibytes_rate();
        if rate > best.0 {
            best = (rate, shape);
        }
    }
    Ok(best.1)
}

/// Moves the whole file; `block` fills a block before a write, and checks it after a read. A write
/// ends with a sync. A partial block at the end is not moved: the figure is then for slightly less
/// than the file.
pub(crate) fn pass(
    stream: &Stream<'_>,
    transfer: Transfer,
    shape: Shape,
    mut block: impl FnMut(&mut [u8], u64) -> Result<()>,
) -> Result<Measured> {
    let writes = transfer == Transfer::Write;
    let file = direct::open(stream.file, writes)?;
    let mut ring = RawRing::new(&file, shape.block_bytes, shape.depth)?;
    let mut calls = Calls::during(stream.expected);
    let step_bytes = shape.block_bytes as u64;
    let end_bytes = stream.size_bytes / step_bytes * step_bytes;
    let meter = Meter::start(stream.tracepoint)?;
    let started = meter.started();
    let mut pos_bytes = 0;
    while pos_bytes < end_bytes || ring.in_flight() > 0 {
        while pos_bytes < end_bytes {
            let Some(mut idle) = ring.take_idle() else { break };
            if writes {
                block(ring.bytes_mut(&mut idle), pos_bytes)?;
            }
            ring.start(idle, transfer, pos_bytes)?;
            pos_bytes += step_bytes;
        }
        ring.complete(1, |done| {
            calls.add(started.elapsed(), done.latency);
            if writes { Ok(()) } else { block(done.bytes, done.pos_bytes) }
        })?;
    }
    if writes {
        file.sync_data().map_err(Error::system("sync the file"))?;
    }
    let measured = Measured::new(calls, end_bytes, meter.stop()?);
    Ok(Measured { syscalls_known: ring.enters() + u64::from(writes), ..measured })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::pattern;
    use crate::progress::Silent;

    #[test]
    fn what_one_pass_writes_the_next_one_reads() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let path = dir.path().join("file");
        let size_bytes = 5 << 20;
        pattern::make_file(&path, size_bytes, &mut Silent).unwrap();
        if direct::probe(&path).is_err() {
            return;
        }
        let expected = Duration::from_secs(1);
        let stream = Stream { file: &path, size_bytes, expected, tracepoint: None };
        let read = |shape, version| {
            let look = |block: &mut [u8], pos_bytes| {
                assert!(pattern::matches_version(block, pos_bytes, version));
                Ok(())
            };
            pass(&stream, Transfer::Read, shape, look).unwrap().bytes
        };
        let [small, .., large] = SHAPES;
        assert_eq!(read(small, 0), size_bytes);
        let fill = |block: &mut [u8], pos_bytes| {
            pattern::fill_version(block, pos_bytes, 7);
            Ok(())
        };
        let written = pass(&stream, Transfer::Write, small, fill).unwrap();
        assert_eq!((written.bytes, written.calls.operations), (size_bytes, 20));
        assert_eq!(read(large, 7), 4 << 20);
    }
}

//! The rate of the device through io_uring alone: the upper limit of a series.
//!
//! A ring with a registered file and registered blocks, opened with the best flags that the kernel
//! accepts. A transfer that fails or is short ends the series: continuing would not give an upper
//! limit.
//!
//! # Safety
//! The kernel writes into blocks with a transfer in flight. A block is accessed while its index is
//! in `idle` or just taken from it; an index in flight comes back when its transfer is complete.
//! The memory outlives the transfers: `Drop` waits for all of them, and leaks the memory if it
//! cannot.

#![allow(unsafe_code)]

use std::fmt;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, slice};

use io_uring::types::Fixed;
use io_uring::{IoUring, opcode};

use super::direct;
use super::measured::{Calls, Measured, Meter};
use super::span::HugeMemory;
use crate::error::{Error, Result};

const THE_FILE: Fixed = Fixed(0);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    Read,
    Write,
}

/// A transfer that moved all of its block.
#[derive(Debug)]
pub(crate) struct Completed<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) pos_bytes: u64,
    /// Time from the start of the transfer to its completion.
    pub(crate) latency: Duration,
}

/// A ring over one file, for the thread that created it.
pub(crate) struct RawRing {
    ring: IoUring,
    transfer: Transfer,
    /// Blocks, in large pages: they need fewer, longer requests to the device, like a cache's
    /// frames.
    memory: Arc<HugeMemory>,
    start: *mut u8,
    block_bytes: usize,
    idle: Vec<u16>,
    /// Position and start of the transfer of each block that is in flight.
    in_flight: Vec<Option<(u64, Instant)>>,
    /// How many system calls were made.
    pub(crate) enters: u64,
}

impl RawRing {
    /// Creates a ring for `depth` transfers of `block_bytes` at once.
    ///
    /// # Errors
    /// The kernel refuses; the message is the reason to skip a series.
    pub(crate) fn new(
        file: &File,
        transfer: Transfer,
        block_bytes: usize,
        depth: u16,
    ) -> Result<Self> {
        let best = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_coop_taskrun()
            .build(u32::from(depth));
        let ring = best.or_else(|_| IoUring::new(u32::from(depth)));
        let ring = ring.map_err(Error::system("make an io_uring"))?;
        let mut memory = HugeMemory::new(block_bytes * usize::from(depth))?;
        let start = memory.bytes_mut().as_mut_ptr();
        let all = libc::iovec { iov_base: start.cast(), iov_len: block_bytes * usize::from(depth) };
        let ring = Self {
            ring,
            transfer,
            memory: Arc::new(memory),
            start,
            block_bytes,
            idle: (0..depth).collect(),
            in_flight: vec![None; usize::from(depth)],
            enters: 0,
        };
        let submitter = ring.ring.submitter();
        let registered = submitter.register_files(&[file.as_raw_fd()]).and_then(|()| {
            // SAFETY: the memory is this value's and stays until the ring has no transfers any
            // more.
            unsafe { submitter.register_buffers(&[all]) }
        });
        registered.map_err(Error::system("register a file and blocks with io_uring"))?;
        Ok(ring)
    }

    /// Transfers a block at each of `positions`, as many at once as there are blocks. `fill` makes
    /// the content of a block before its transfer, `done` gets it afterwards. The thread sleeps
    /// until `wake_at` transfers are complete, or all that are in flight.
    pub(crate) fn transfer(
        &mut self,
        positions: impl IntoIterator<Item = u64>,
        wake_at: usize,
        mut fill: impl FnMut(&mut [u8], u64),
        mut done: impl FnMut(Completed<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut positions = positions.into_iter().fuse();
        loop {
            while let Some(&index) = self.idle.last()
                && let Some(pos_bytes) = positions.next()
            {
                self.idle.pop();
                fill(self.block(index), pos_bytes);
                self.start(index, pos_bytes)?;
            }
            let in_flight = self.in_flight.len() - self.idle.len();
            if in_flight == 0 {
                return Ok(());
            }
            self.enter(wake_at.min(in_flight))?;
            self.complete(&mut done)?;
        }
    }

    /// Returns the memory of a block that has no transfer in flight.
    fn block(&mut self, index: u16) -> &mut [u8] {
        assert!(self.in_flight[usize::from(index)].is_none());
        // SAFETY: inside the memory, because there is an entry for each block.
        let start = unsafe { self.start.add(usize::from(index) * self.block_bytes) };
        // SAFETY: initialised by the kernel, and accessed by nothing else: no transfer is in
        // flight, by the check, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(start, self.block_bytes) }
    }

    fn start(&mut self, index: u16, pos_bytes: u64) -> Result<()> {
        let start = self.block(index).as_mut_ptr();
        // Blocks are of a few MiB at most.
        let length = self.block_bytes as u32;
        let entry = match self.transfer {
            Transfer::Read => {
                opcode::ReadFixed::new(THE_FILE, start, length, 0).offset(pos_bytes).build()
            }
            Transfer::Write => {
                opcode::WriteFixed::new(THE_FILE, start, length, 0).offset(pos_bytes).build()
            }
        };
        let entry = entry.user_data(u64::from(index));
        // SAFETY: the file is registered; the memory is registered, lives until the transfer is
        // complete, and is not accessed before that: the block is in flight.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| Error::Refused("the submission queue is full".into()))?;
        self.in_flight[usize::from(index)] = Some((pos_bytes, Instant::now()));
        Ok(())
    }

    /// Submits the transfers that were started, and waits for at least `wanted`.
    fn enter(&mut self, wanted: usize) -> Result<()> {
        loop {
            self.enters += 1;
            match self.ring.submit_and_wait(wanted) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other.map(drop).map_err(Error::system("enter io_uring")),
            }
        }
    }

    /// Passes on all transfers that are complete.
    fn complete(&mut self, mut done: impl FnMut(Completed<'_>) -> Result<()>) -> Result<()> {
        loop {
            let next = self.ring.completion().next();
            let Some(entry) = next else { return Ok(()) };
            let index = entry.user_data() as u16;
            let (pos_bytes, started) = self.in_flight[usize::from(index)]
                .take()
                .ok_or_else(|| Error::Refused("io_uring completed an unknown transfer".into()))?;
            self.idle.push(index);
            let moved = entry.result();
            if moved < 0 {
                let action = format!("{:?} at {pos_bytes} by io_uring", self.transfer);
                return Err(Error::system(action)(io::Error::from_raw_os_error(-moved)));
            }
            if moved as usize != self.block_bytes {
                return Err(Error::WrongBytes { series: "raw_direct".into(), pos_bytes });
            }
            let latency = started.elapsed();
            done(Completed { bytes: self.block(index), pos_bytes, latency })?;
        }
    }
}

impl Drop for RawRing {
    fn drop(&mut self) {
        while self.in_flight.iter().any(Option::is_some) {
            if self.enter(1).is_err() {
                // The kernel may still write: the memory must stay.
                std::mem::forget(Arc::clone(&self.memory));
                return;
            }
            for entry in self.ring.completion() {
                self.in_flight[entry.user_data() as usize] = None;
            }
        }
    }
}

/// Block size and number of blocks in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    block_bytes: usize,
    depth: u16,
}

/// Which is the fastest depends on the device. All have 8 MiB in flight, the maximum of the fastest
/// disks.
const SHAPES: [Shape; 4] = [
    Shape { block_bytes: 256 << 10, depth: 32 },
    Shape { block_bytes: 512 << 10, depth: 16 },
    Shape { block_bytes: 1 << 20, depth: 8 },
    Shape { block_bytes: 2 << 20, depth: 4 },
];

impl fmt::Display for Shape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} KiB x {}", self.block_bytes >> 10, self.depth)
    }
}

/// A file that is moved from its first byte to its last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream<'a> {
    pub(crate) file: &'a Path,
    pub(crate) size_bytes: u64,
    /// Expected duration of a pass, which determines the length of the intervals.
    pub(crate) expected: Duration,
}

impl Stream<'_> {
    /// Returns the fastest of the shapes, by the best of two passes each.
    pub(crate) fn fastest_shape(&self, run: impl Fn(Shape) -> Result<Measured>) -> Result<Shape> {
        direct::probe(self.file)?;
        let mut best = (0.0, SHAPES[0]);
        for shape in SHAPES.repeat(2) {
            let rate = run(shape)?.gibibytes_rate();
            if rate > best.0 {
                best = (rate, shape);
            }
        }
        Ok(best.1)
    }

    /// Moves the whole file, past the page cache; a write ends with a sync. A partial block at the
    /// end is not moved: the figure is then for slightly less than the file.
    pub(crate) fn pass(
        &self,
        transfer: Transfer,
        shape: Shape,
        fill: impl FnMut(&mut [u8], u64),
        mut done: impl FnMut(&[u8], u64) -> Result<()>,
    ) -> Result<Measured> {
        let writes = transfer == Transfer::Write;
        let file = direct::open(self.file, writes)?;
        let mut ring = RawRing::new(&file, transfer, shape.block_bytes, shape.depth)?;
        let mut calls = Calls::during(self.expected);
        let step_bytes = shape.block_bytes as u64;
        let end_bytes = self.size_bytes / step_bytes * step_bytes;
        let meter = Meter::start();
        ring.transfer((0..end_bytes).step_by(shape.block_bytes), 1, fill, |moved| {
            calls.add(meter.started.elapsed(), moved.latency);
            done(moved.bytes, moved.pos_bytes)
        })?;
        if writes {
            file.sync_data().map_err(Error::system("sync the file"))?;
        }
        let measured = Measured::new(calls, end_bytes, meter.stop());
        Ok(Measured { syscalls: Some(ring.enters + u64::from(writes)), ..measured })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::pattern;
    use crate::progress::Silent;

    #[test]
    fn what_one_pass_writes_the_next_one_reads_and_a_short_read_is_an_error() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let path = dir.path().join("file");
        let size_bytes = 5 << 20;
        pattern::make_file(&path, size_bytes, &mut Silent).unwrap();
        if direct::probe(&path).is_err() {
            return;
        }
        let expected = Duration::from_secs(1);
        let stream = Stream { file: &path, size_bytes, expected };
        let read = |shape, version| {
            let check = |block: &[u8], pos_bytes| {
                assert!(pattern::matches(block, pos_bytes, version));
                Ok(())
            };
            stream.pass(Transfer::Read, shape, |_, _| (), check).unwrap().bytes
        };
        let [small, .., large] = SHAPES;
        assert_eq!(read(small, 0), size_bytes);
        let fill = |block: &mut [u8], pos_bytes| pattern::fill(block, pos_bytes, 7);
        let written = stream.pass(Transfer::Write, small, fill, |_, _| Ok(())).unwrap();
        assert_eq!((written.bytes, written.calls.operations), (size_bytes, 20));
        assert_eq!(read(large, 7), 4 << 20);
        let file = direct::open(&path, false).unwrap();
        let mut ring = RawRing::new(&file, Transfer::Read, 1 << 20, 2).unwrap();
        let positions = [4 << 20, size_bytes - 4096, 0];
        assert!(ring.transfer(positions, 1, |_, _| (), |_| Ok(())).is_err());
    }
}

//! The rate of the device through io_uring alone: the upper limit of a series.
//!
//! A ring with a registered file and registered blocks, opened with the best flags that the kernel
//! accepts. A caller takes an idle block, starts a transfer with it, and gets it back when the
//! transfer is complete. A transfer that fails or is short ends the series: continuing would not
//! give an upper limit.
//!
//! # Safety
//! The kernel writes into blocks with a transfer in flight. A [`Block`] is the right to access the
//! memory of its index: one exists for each index, it is passed to `start` and returned by
//! `complete`, so this code never accesses memory that the kernel may access. The memory outlives
//! the transfers: `Drop` waits for all of them, and leaks the memory if it cannot.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};
use std::{io, slice};

use io_uring::types::Fixed;
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::mm::{Advice, madvise};

use crate::error::{Error, Result};

/// Blocks in large pages need fewer, longer requests to the device, like a cache's frames.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Index of the file among the registered ones.
const THE_FILE: Fixed = Fixed(0);

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    Read,
    Write,
}

/// The right to touch one block of a ring.
#[derive(Debug)]
pub(crate) struct Block(u16);

/// A transfer in flight.
#[derive(Debug)]
struct UnderWay {
    block: Block,
    transfer: Transfer,
    pos_bytes: u64,
    started: Instant,
}

/// A transfer that moved all of its block.
#[derive(Debug)]
pub(crate) struct Completed<'a> {
    pub(crate) bytes: &'a mut [u8],
    pub(crate) pos_bytes: u64,
    /// Time from `start` to completion.
    pub(crate) latency: Duration,
}

/// A ring over one file, for the thread that created it.
pub(crate) struct RawRing {
    ring: IoUring,
    memory: NonNull<u8>,
    layout: Layout,
    block_bytes: usize,
    idle: Vec<Block>,
    under_way: Vec<Option<UnderWay>>,
    enters: u64,
}

impl RawRing {
    /// Creates a ring for `depth` transfers of `block_bytes` at once.
    ///
    /// # Errors
    /// The kernel refuses; the message is the reason to skip a series.
    pub(crate) fn new(file: &File, block_bytes: usize, depth: u16) -> Result<Self> {
        assert!(block_bytes > 0 && depth > 0);
        let ring = build(u32::from(depth)).map_err(Error::system("make an io_uring"))?;
        let layout = Layout::from_size_align(block_bytes * usize::from(depth), HUGE_PAGE_BYTES)
            .map_err(|error| Error::Refused(error.to_string()))?;
        let memory = allocate(layout);
        let raw = Self {
            ring,
            memory,
            layout,
            block_bytes,
            idle: (0..depth).map(Block).collect(),
            under_way: (0..depth).map(|_| None).collect(),
            enters: 0,
        };
        raw.register(file).map_err(Error::system("register a file and blocks with io_uring"))?;
        Ok(raw)
    }

    fn register(&self, file: &File) -> io::Result<()> {
        let submitter = self.ring.submitter();
        submitter.register_files(&[file.as_raw_fd()])?;
        let all =
            libc::iovec { iov_base: self.memory.as_ptr().cast(), iov_len: self.layout.size() };
        // SAFETY: the memory is this value's and stays until the ring has no transfers any more.
        unsafe { submitter.register_buffers(&[all]) }
    }

    /// A block that no transfer is using.
    pub(crate) fn take_idle(&mut self) -> Option<Block> {
        self.idle.pop()
    }

    /// Returns the memory of a block, to be filled before it is written.
    pub(crate) fn bytes_mut<'a>(&'a mut self, block: &'a mut Block) -> &'a mut [u8] {
        let start = self.start_of(block);
        // SAFETY: initialised, inside the memory, and the block, borrowed exclusively, is the only
        // right to it.
        unsafe { slice::from_raw_parts_mut(start, self.block_bytes) }
    }

    fn start_of(&self, block: &Block) -> *mut u8 {
        let offset_bytes = usize::from(block.0) * self.block_bytes;
        assert!(offset_bytes < self.layout.size());
        // SAFETY: inside the allocation, by the check.
        unsafe { self.memory.as_ptr().add(offset_bytes) }
    }

    /// Queues a transfer of the whole block.
    pub(crate) fn start(&mut self, block: Block, transfer: Transfer, pos_bytes: u64) -> Result<()> {
        let entry = self.entry(&block, transfer, pos_bytes);
        let index = usize::from(block.0);
        // SAFETY: the file is registered; the memory is registered, lives until the transfer is
        // complete, and is not accessed before that: the block is kept in `under_way`.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| Error::Refused("the submission queue is full".into()))?;
        self.under_way[index] =
            Some(UnderWay { block, transfer, pos_bytes, started: Instant::now() });
        Ok(())
    }

    fn entry(&self, block: &Block, transfer: Transfer, pos_bytes: u64) -> squeue::Entry {
        let start = self.start_of(block);
        // Blocks are of a few MiB at most.
        let length = self.block_bytes as u32;
        let entry = match transfer {
            Transfer::Read => {
                opcode::ReadFixed::new(THE_FILE, start, length, 0).offset(pos_bytes).build()
            }
            Transfer::Write => {
                opcode::WriteFixed::new(THE_FILE, start, length, 0).offset(pos_bytes).build()
            }
        };
        entry.user_data(u64::from(block.0))
    }

    /// Submits the started transfers, waits for at least `wanted`, and passes on all that are
    /// complete.
    pub(crate) fn complete(
        &mut self,
        wanted: usize,
        mut show: impl FnMut(Completed<'_>) -> Result<()>,
    ) -> Result<()> {
        self.enter(wanted)?;
        loop {
            let next = self.ring.completion().next();
            let Some(entry) = next else { return Ok(()) };
            let done = self.take_under_way(&entry)?;
            let moved = entry.result();
            if moved < 0 {
                let cause = io::Error::from_raw_os_error(-moved);
                let action = format!("{:?} at {} by io_uring", done.transfer, done.pos_bytes);
                return Err(Error::system(action)(cause));
            }
            if moved as usize != self.block_bytes {
                let series = "raw_direct".to_owned();
                return Err(Error::WrongBytes { series, pos_bytes: done.pos_bytes });
            }
            let start = self.start_of(&done.block);
            // SAFETY: initialised, inside the memory, and the transfer that touched it is complete:
            // its block is the only right to it.
            let bytes = unsafe { slice::from_raw_parts_mut(start, self.block_bytes) };
            let latency = done.started.elapsed();
            let shown = show(Completed { bytes, pos_bytes: done.pos_bytes, latency });
            self.idle.push(done.block);
            shown?;
        }
    }

    fn enter(&mut self, wanted: usize) -> Result<()> {
        loop {
            self.enters += 1;
            match self.ring.submit_and_wait(wanted) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other.map(drop).map_err(Error::system("enter io_uring")),
            }
        }
    }

    fn take_under_way(&mut self, entry: &cqueue::Entry) -> Result<UnderWay> {
        let index = entry.user_data() as usize;
        let done = self.under_way.get_mut(index).and_then(Option::take);
        done.ok_or_else(|| Error::Refused("io_uring completed an unknown transfer".into()))
    }

    /// Waits for all transfers in flight, and passes each on.
    pub(crate) fn drain(
        &mut self,
        mut show: impl FnMut(Completed<'_>) -> Result<()>,
    ) -> Result<()> {
        while self.in_flight() > 0 {
            self.complete(self.in_flight(), &mut show)?;
        }
        Ok(())
    }

    /// How many transfers are under way.
    pub(crate) fn in_flight(&self) -> usize {
        self.under_way.len() - self.idle.len()
    }

    /// How many system calls were made.
    pub(crate) fn enters(&self) -> u64 {
        self.enters
    }
}

/// Allocates zeroed memory, in large pages if possible.
fn allocate(layout: Layout) -> NonNull<u8> {
    // SAFETY: the layout is not empty.
    let memory = unsafe { alloc(layout) };
    let Some(memory) = NonNull::new(memory) else { handle_alloc_error(layout) };
    let whole_bytes = layout.size() / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    // SAFETY: the range is inside the allocation, and the advice changes no content.
    let _ = unsafe { madvise(memory.as_ptr().cast(), whole_bytes, Advice::LinuxHugepage) };
    // SAFETY: all of the allocation, which is not shared yet.
    unsafe { memory.write_bytes(0, layout.size()) };
    memory
}

/// Builds a ring with the flags that save work, or without them on older kernels.
fn build(entries: u32) -> io::Result<IoUring> {
    let best = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_coop_taskrun()
        .build(entries);
    best.or_else(|_| IoUring::new(entries))
}

impl Drop for RawRing {
    fn drop(&mut self) {
        while self.under_way.iter().any(Option::is_some) {
            if self.enter(1).is_err() {
                // The kernel may still write: the memory must stay.
                return;
            }
            let done: Vec<u64> = self.ring.completion().map(|entry| entry.user_data()).collect();
            for index in done {
                self.under_way[index as usize] = None;
            }
        }
        // SAFETY: allocated in `new` with this layout; no transfer is under way, no block is lent.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{direct, pattern};
    use crate::progress::Silent;

    fn file(size_bytes: u64) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir_in(".").unwrap();
        let path = dir.path().join("file");
        pattern::make_file(&path, size_bytes, &mut Silent).unwrap();
        (dir, path)
    }

    #[test]
    fn a_read_that_stops_short_is_an_error_and_dropping_waits() {
        let (_dir, path) = file(8192);
        let Ok(direct) = direct::open(&path, true) else {
            return;
        };
        let mut ring = RawRing::new(&direct, 8192, 2).unwrap();
        let mut block = ring.take_idle().unwrap();
        ring.bytes_mut(&mut block).fill(7);
        ring.start(block, Transfer::Write, 8192).unwrap();
        ring.drain(|_| Ok(())).unwrap();
        assert_eq!(std::fs::read(&path).unwrap()[8192..], [7; 8192]);
        let block = ring.take_idle().unwrap();
        ring.start(block, Transfer::Read, 12288).unwrap();
        assert!(ring.drain(|_| Ok(())).is_err());
        let block = ring.take_idle().unwrap();
        ring.start(block, Transfer::Read, 0).unwrap();
        drop(ring);
    }
}

//! The ways to read a file from end to end, each one pass.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use bifolio::Cache;

use crate::error::{Error, Result};
use crate::harness::cached::Cached;
use crate::harness::checker::Checker;
use crate::harness::direct;
use crate::harness::meter::{Measured, Meter};
use crate::harness::raw_ring::Transfer;
use crate::harness::raw_stream::{self, Blocks, Shape, Stream};
use crate::harness::seen::Seen;
use crate::harness::sizes::Sizes;

/// Parts that every pass of a run shares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scan<'a> {
    pub(crate) file: &'a Path,
    pub(crate) sizes: Sizes,
    pub(crate) tracepoint: Option<u64>,
}

impl Scan<'_> {
    /// `raw_direct`, whose blocks stay where the device has put them, and `raw_copied`, which also
    /// copies each block into a buffer of `copied_to_bytes`, like that of a caller of `read_at`.
    pub(crate) fn raw(
        &self,
        series: &'static str,
        shape: Shape,
        copied_to_bytes: usize,
    ) -> Result<Measured> {
        direct::drop_page_cache(self.file)?;
        let stream = Stream {
            file: self.file,
            size_bytes: self.sizes.size_bytes,
            transfer: Transfer::Read,
            expected: self.sizes.expected_pass(),
            tracepoint: self.tracepoint,
        };
        let mut looked = Looked { checker: Checker::new(series), buffer: vec![0; copied_to_bytes] };
        let mut measured = raw_stream::pass(&stream, shape, &mut looked)?;
        measured.verified_bytes = looked.checker.finish()?;
        Ok(measured)
    }

    /// `read_at`, through a new cache.
    pub(crate) fn read_at(&self, block_bytes: usize) -> Result<Measured> {
        direct::drop_page_cache(self.file)?;
        let builder = Cache::builder().memory(self.sizes.memory_bytes).populate(true);
        let cached = Cached::open(builder, self.file, false)?;
        let before = cached.stats();
        let mut measured = self.calls("read_at", block_bytes, |block, pos_bytes| {
            Ok(cached.file.read_at(block, pos_bytes)?)
        })?;
        measured.syscalls_known = cached.since(&before).syscalls_known();
        cached.close()?;
        Ok(measured)
    }

    /// `kernel_pread`, with the kernel's own readahead, and without a limit of memory.
    pub(crate) fn kernel_pread(&self, block_bytes: usize) -> Result<Measured> {
        direct::drop_page_cache(self.file)?;
        let failed = || Error::system(format!("read {}", self.file.display()));
        let file = File::open(self.file).map_err(failed())?;
        self.calls("kernel_pread", block_bytes, |block, pos_bytes| {
            file.read_at(block, pos_bytes).map_err(failed())
        })
    }

    /// Makes one call after the other up to the end of the file.
    fn calls(
        &self,
        series: &'static str,
        block_bytes: usize,
        mut read: impl FnMut(&mut [u8], u64) -> Result<usize>,
    ) -> Result<Measured> {
        let mut block = vec![0; block_bytes];
        let mut checker = Checker::new(series);
        let mut seen = Seen::new(self.sizes.expected_pass());
        let mut pos_bytes = 0;
        let meter = Meter::start(self.tracepoint)?;
        while pos_bytes < self.sizes.size_bytes {
            let begin = Instant::now();
            let read_bytes = read(&mut block, pos_bytes)?;
            seen.add(meter.started().elapsed(), begin.elapsed());
            let left_bytes = self.sizes.size_bytes - pos_bytes;
            if read_bytes as u64 != left_bytes.min(block_bytes as u64) {
                return Err(checker.wrong(pos_bytes));
            }
            checker.add(&block[..read_bytes], pos_bytes)?;
            pos_bytes += read_bytes as u64;
        }
        let cost = meter.stop()?;
        let calls = seen.calls();
        let mut measured = seen.measured(pos_bytes, cost, calls);
        measured.verified_bytes = checker.finish()?;
        Ok(measured)
    }
}

/// Blocks that are checked where they are, or in `buffer`, if it has a length, after a copy.
struct Looked {
    checker: Checker,
    buffer: Vec<u8>,
}

impl Blocks for Looked {
    fn fill(&mut self, _block: &mut [u8], _pos_bytes: u64) {}

    fn look(&mut self, block: &[u8], pos_bytes: u64) -> Result<()> {
        if self.buffer.is_empty() {
            return self.checker.add(block, pos_bytes);
        }
        for (part, pos_bytes) in
            block.chunks(self.buffer.len()).zip((pos_bytes..).step_by(self.buffer.len()))
        {
            let start = pos_bytes as usize % self.buffer.len();
            let copy = &mut self.buffer[start..start + part.len()];
            copy.copy_from_slice(part);
            self.checker.add(copy, pos_bytes)?;
        }
        Ok(())
    }
}

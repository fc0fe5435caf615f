//! The ways to write, each one trial: all blocks, then a sync, timed together.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use bifolio::{Cache, OpenOptions};

use super::ledger::Ledger;
use super::order::{Order, Writes};
use super::parameters::Parameters;
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::cached::{Cached, count_of};
use crate::harness::meter::{Measured, Meter};
use crate::harness::raw_ring::{Completed, RawRing, Transfer};
use crate::harness::raw_stream::{self, Blocks, Shape, Stream};
use crate::harness::seen::Seen;
use crate::harness::{direct, pattern};

/// Number of random writes that the raw ring keeps in flight.
const RAW_DEPTH: u16 = 128;

/// State that all trials of a run share.
#[derive(Debug)]
pub(crate) struct Passes<'a> {
    pub(crate) file: &'a Path,
    pub(crate) parameters: &'a Parameters,
    pub(crate) tracepoint: Option<u64>,
    pub(crate) ledger: RefCell<Ledger>,
    /// Longest throttling of a caller by the cache so far.
    pub(crate) throttle_ns_max: RefCell<Option<u64>>,
    /// Flushes and syncs of the cache, in all trials of each layout of records so far.
    pub(crate) flushes: RefCell<[(u64, u64); 2]>,
}

impl Passes<'_> {
    fn writes(&self, order: Order) -> Writes {
        Writes::new(order, self.parameters.sizes, self.ledger.borrow_mut().next_version())
    }

    /// Records the trial's blocks, and reads pages back. Returns the trial with the number of bytes
    /// compared.
    fn verified(&self, writes: &Writes, series: &str, mut measured: Measured) -> Result<Measured> {
        let mut ledger = self.ledger.borrow_mut();
        writes.enter(&mut ledger, measured.bytes);
        measured.verified_bytes =
            ledger.verify(self.file, series, self.parameters.verified_pages)?;
        Ok(measured)
    }

    /// `raw_direct` of random pages: io_uring, then `fdatasync`.
    pub(crate) fn raw_random(&self, order: Order) -> Result<Measured> {
        direct::drop_page_cache(self.file)?;
        let writes = self.writes(order);
        let file = direct::open(self.file, true)?;
        let mut ring = RawRing::new(&file, PAGE_BYTES, RAW_DEPTH)?;
        let mut seen = Seen::new(self.expected());
        let meter = Meter::start(self.tracepoint)?;
        let started = meter.started();
        let mut show = |done: Completed<'_>| {
            seen.add(started.elapsed(), done.latency);
            Ok(())
        };
        for (pos_bytes, _) in writes.blocks() {
            let mut idle = ring.take_idle();
            while idle.is_none() {
                ring.complete(1, &mut show)?;
                idle = ring.take_idle();
            }
            let Some(mut block) = idle else { continue };
            pattern::fill_version(ring.bytes_mut(&mut block), pos_bytes, writes.version);
            ring.start(block, Transfer::Write, pos_bytes)?;
        }
        ring.drain(&mut show)?;
        file.sync_data().map_err(Error::system("sync the file"))?;
        let cost = meter.stop()?;
        let bytes = seen.calls() * PAGE_BYTES as u64;
        self.verified(&writes, "raw_direct", seen.measured(bytes, cost, ring.enters() + 1))
    }

    /// `raw_direct` of the whole file.
    pub(crate) fn raw_sequential(&self, shape: Shape) -> Result<Measured> {
        direct::drop_page_cache(self.file)?;
        let writes = self.writes(Order::Sequential);
        let stream = Stream {
            file: self.file,
            size_bytes: self.parameters.sizes.size_bytes,
            transfer: Transfer::Write,
            expected: self.expected(),
            tracepoint: self.tracepoint,
        };
        let measured = raw_stream::pass(&stream, shape, &mut Filled(writes.version))?;
        self.verified(&writes, "raw_direct", measured)
    }

    /// `write_at` and `sync_data`, through a new cache.
    pub(crate) fn write_at(
        &self,
        order: Order,
        series: &str,
        folio_bytes: u64,
    ) -> Result<Measured> {
        direct::drop_page_cache(self.file)?;
        let writes = self.writes(order);
        let builder = Cache::builder().memory(self.parameters.sizes.memory_bytes).populate(true);
        let options = OpenOptions::new().read(true).write(true).folio_bytes(folio_bytes);
        let cached = Cached::open_with(builder, self.file, &options)?;
        let before = cached.stats();
        let write = |block: &[u8], pos_bytes| Ok(cached.file.write_at(block, pos_bytes)?);
        let mut measured = self.calls(&writes, write, || Ok(cached.file.sync_data()?))?;
        measured.syscalls_known = cached.since(&before).syscalls_known();
        let throttle_ns_max = count_of(&cached.close()?, "throttle_ns_max");
        self.throttle_ns_max.replace_with(|longest| throttle_ns_max.max(*longest));
        self.verified(&writes, series, measured)
    }

    /// `kernel_write`: `pwrite` into the page cache, then `fdatasync`.
    pub(crate) fn kernel_write(&self, order: Order) -> Result<Measured> {
        direct::drop_page_cache(self.file)?;
        let writes = self.writes(order);
        let failed = || Error::system(format!("write {}", self.file.display()));
        let file = File::options().write(true).open(self.file).map_err(failed())?;
        let write = |block: &[u8], pos_bytes| file.write_at(block, pos_bytes).map_err(failed());
        let measured = self.calls(&writes, write, || file.sync_data().map_err(failed()))?;
        self.verified(&writes, "kernel_write", measured)
    }

    /// Makes one call for each block, one after the other, then the sync.
    fn calls(
        &self,
        writes: &Writes,
        write: impl Fn(&[u8], u64) -> Result<usize>,
        sync: impl Fn() -> Result<()>,
    ) -> Result<Measured> {
        let mut buffer = vec![0; writes.block_bytes()];
        let mut seen = Seen::new(self.expected());
        let mut bytes = 0;
        let meter = Meter::start(self.tracepoint)?;
        for (pos_bytes, block_bytes) in writes.blocks() {
            let block = &mut buffer[..block_bytes];
            pattern::fill_version(block, pos_bytes, writes.version);
            let begin = Instant::now();
            let written = write(block, pos_bytes)?;
            seen.add(meter.started().elapsed(), begin.elapsed());
            if written != block_bytes {
                return Err(Error::Refused(format!("a write of {block_bytes} bytes was short")));
            }
            bytes += written as u64;
        }
        sync()?;
        let cost = meter.stop()?;
        let syscalls_known = seen.calls() + 1;
        Ok(seen.measured(bytes, cost, syscalls_known))
    }

    fn expected(&self) -> Duration {
        self.parameters.sizes.expected_pass()
    }
}

struct Filled(u32);

impl Blocks for Filled {
    fn fill(&mut self, block: &mut [u8], pos_bytes: u64) {
        pattern::fill_version(block, pos_bytes, self.0);
    }

    fn look(&mut self, _block: &[u8], _pos_bytes: u64) -> Result<()> {
        Ok(())
    }
}

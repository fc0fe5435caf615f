//! Records: threads that each write a page of their own and sync it, again and again, as the
//! threads of a database commit.
//!
//! One file, one handle or descriptor, a region of it for each thread. The cache lets threads that
//! sync at the same time share a flush of the device; the kernel flushes for each.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use bifolio::Cache;

use super::passes::Passes;
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::cached::Cached;
use crate::harness::direct::{self, Page};
use crate::harness::meter::{Cost, Measured, Meter};
use crate::harness::pattern;
use crate::harness::seen::Seen;
use crate::harness::threads::run_together;

/// Threads that commit at the same time.
pub(crate) const THREADS: u64 = 8;

/// Where the records of a turn go: as many for each thread, page by page of its own region, from
/// the beginning again when that is full.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Records {
    file_pages: u64,
    per_thread: u64,
}

impl Records {
    /// Of a file of so many pages.
    pub(crate) fn new(file_pages: u64, per_thread: u64) -> Self {
        Self { file_pages, per_thread }
    }

    /// The positions of one thread's records, in order. In a file of fewer pages than threads some
    /// have none.
    fn positions(self, thread: u64) -> impl Iterator<Item = u64> {
        let begin = |thread: u64| thread * self.file_pages / THREADS;
        let region = begin(thread)..begin(thread + 1);
        let pages = region.end - region.start;
        let records = if pages == 0 { 0 } else { self.per_thread };
        (0..records).map(move |record| (region.start + record % pages) * PAGE_BYTES as u64)
    }
}

impl Passes<'_> {
    /// `write_at` and `sync_data` through one handle of a new cache.
    pub(crate) fn cached_records(&self, series: &str) -> Result<Measured> {
        direct::drop_page_cache(self.file)?;
        let builder = Cache::builder().memory(self.parameters.sizes.memory_bytes).populate(true);
        let cached = Cached::open(builder, self.file, true)?;
        let file = &cached.file;
        let commit = |page: &[u8], pos_bytes| {
            let written = file.write_at(page, pos_bytes)?;
            file.sync_data()?;
            Ok(written)
        };
        let mut measured = self.records(commit)?;
        let stats = cached.stats();
        measured.syscalls_known = stats.writeback + stats.device_flushes;
        self.flushes.replace_with(|(flushes, syncs)| {
            (*flushes + stats.device_flushes, *syncs + stats.syncs)
        });
        cached.close()?;
        self.verified_records(series, measured)
    }

    /// `pwrite` and `fdatasync` on one descriptor, past the page cache or through it.
    pub(crate) fn kernel_records(&self, series: &str, is_direct: bool) -> Result<Measured> {
        direct::drop_page_cache(self.file)?;
        let failed = || Error::system(format!("write {}", self.file.display()));
        let file = if is_direct {
            direct::open(self.file, true)?
        } else {
            File::options().write(true).open(self.file).map_err(failed())?
        };
        let commit = |page: &[u8], pos_bytes| {
            let written = file.write_at(page, pos_bytes).map_err(failed())?;
            file.sync_data().map_err(failed())?;
            Ok(written)
        };
        let measured = self.records(commit)?;
        self.verified_records(series, measured)
    }

    /// The records of the turn with the next version, each by one call of `commit`.
    fn records(&self, commit: impl Fn(&[u8], u64) -> Result<usize> + Sync) -> Result<Measured> {
        let version = self.ledger.borrow_mut().next_version();
        let (records, expected) = (self.parameters.records(), Duration::from_secs(1));
        let run = |thread: u64| {
            let mut page = Page::zeroed();
            let mut seen = Seen::new(expected);
            let meter = Meter::start(None)?;
            for pos_bytes in records.positions(thread) {
                pattern::fill_version(&mut page.0, pos_bytes, version);
                let begin = Instant::now();
                if commit(&page.0, pos_bytes)? != PAGE_BYTES {
                    return Err(Error::Refused("a write of a page was short".into()));
                }
                seen.add(meter.started().elapsed(), begin.elapsed());
            }
            Ok(seen.measured(0, Cost::default(), 0))
        };
        let meter = Meter::start(None)?;
        let threads = run_together(THREADS as usize, |thread| Ok(thread as u64), run)?;
        let cost = meter.stop()?;
        let mut all = Seen::new(expected).measured(0, cost, 0);
        for thread in &threads {
            all.operations += thread.operations;
            all.latencies.merge(&thread.latencies);
            all.stretches.merge(&thread.stretches);
        }
        all.bytes = all.operations * PAGE_BYTES as u64;
        all.syscalls_known = 2 * all.operations;
        let mut ledger = self.ledger.borrow_mut();
        let positions = (0..THREADS).flat_map(|thread| records.positions(thread));
        positions.for_each(|pos_bytes| ledger.enter(pos_bytes, version));
        Ok(all)
    }

    fn verified_records(&self, series: &str, mut measured: Measured) -> Result<Measured> {
        let pages = self.parameters.verified_pages;
        measured.verified_bytes = self.ledger.borrow().verify(self.file, series, pages)?;
        Ok(measured)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_has_a_region_of_its_own() {
        let records = Records::new(20, 7);
        let mut seen: Vec<(u64, u64)> = Vec::new();
        for thread in 0..THREADS {
            let positions: Vec<u64> = records.positions(thread).collect();
            assert_eq!(positions.len(), 7);
            seen.extend(positions.into_iter().map(|at| (at, thread)));
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 20, "each page is one thread's");
        assert_eq!(Records::new(1, 7).positions(0).count(), 0);
        assert_eq!(Records::new(1, 7).positions(7).count(), 7);
    }
}

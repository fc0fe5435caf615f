//! Records: threads that repeatedly write a record and sync it, like the threads of a database that
//! commit.
//!
//! One file, one handle or descriptor. Either all append to one log, or each writes pages to its
//! own region. Concurrent syncs of the cache share the write-out and the flush of the device; the
//! kernel writes and flushes for each.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
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

/// Bytes of a record of the log.
pub(crate) const LOG_RECORD_BYTES: usize = 256;

/// Placement of the records of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// One after the other, whichever thread writes them.
    Log,
    /// A page each, page by page of the thread's own region.
    Regions,
}

/// The records of a trial. At the end of file they restart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Records {
    layout: Layout,
    file_pages: u64,
    per_thread: u64,
}

impl Records {
    /// Creates records, `per_thread` for each thread, in a file of `file_pages` pages. A log
    /// consists of whole pages and may have a few more.
    pub(crate) fn new(layout: Layout, file_pages: u64, per_thread: u64) -> Self {
        Self { layout, file_pages, per_thread }
    }

    pub(crate) fn record_bytes(self) -> usize {
        match self.layout {
            Layout::Log => LOG_RECORD_BYTES,
            Layout::Regions => PAGE_BYTES,
        }
    }

    /// Returns the pages that a thread writes: its region, or the whole log.
    fn pages(self, thread: u64) -> Range<u64> {
        match self.layout {
            Layout::Log => 0..self.file_pages,
            Layout::Regions => {
                let begin = |thread: u64| thread * self.file_pages / THREADS;
                begin(thread)..begin(thread + 1)
            }
        }
    }

    /// Returns the number of records in the log, or of each region.
    fn count(self, pages: &Range<u64>) -> u64 {
        match self.layout {
            Layout::Log => {
                let of_page = (PAGE_BYTES / LOG_RECORD_BYTES) as u64;
                (self.per_thread * THREADS).next_multiple_of(of_page)
            }
            // In a file of fewer pages than threads some have none.
            Layout::Regions if pages.is_empty() => 0,
            Layout::Regions => self.per_thread,
        }
    }

    /// Returns the positions of one thread's records, in order; in a log, those after the `taken`
    /// ones.
    fn positions(self, thread: u64, taken: &AtomicU64) -> impl Iterator<Item = u64> {
        let pages = self.pages(thread);
        let count = self.count(&pages);
        let mut own = 0..count;
        let record_bytes = self.record_bytes() as u64;
        let region_bytes = (pages.end - pages.start) * PAGE_BYTES as u64;
        std::iter::from_fn(move || {
            let record = match self.layout {
                // Relaxed: each number is given once, whatever else is seen.
                Layout::Log => Some(taken.fetch_add(1, Ordering::Relaxed)).filter(|n| *n < count),
                Layout::Regions => own.next(),
            }?;
            Some(pages.start * PAGE_BYTES as u64 + record * record_bytes % region_bytes)
        })
    }
}

impl Passes<'_> {
    /// `write_at` and `sync_data` through one handle of a new cache.
    pub(crate) fn cached_records(&self, layout: Layout, series: &str) -> Result<Measured> {
        direct::drop_page_cache(self.file)?;
        let builder = Cache::builder().memory(self.parameters.sizes.memory_bytes).populate(true);
        let cached = Cached::open(builder, self.file, true)?;
        let file = &cached.file;
        let commit = |page: &[u8], pos_bytes| {
            let written = file.write_at(page, pos_bytes)?;
            file.sync_data()?;
            Ok(written)
        };
        let mut measured = self.records(layout, commit)?;
        let stats = cached.stats();
        measured.syscalls_known = stats.writeback + stats.device_flushes;
        let mut flushes = self.flushes.borrow_mut();
        let (flushes, syncs) = &mut flushes[layout as usize];
        (*flushes, *syncs) = (*flushes + stats.device_flushes, *syncs + stats.syncs);
        cached.close()?;
        self.verified_records(series, measured)
    }

    /// `pwrite` and `fdatasync` on one descriptor, past the page cache or through it.
    pub(crate) fn kernel_records(
        &self,
        layout: Layout,
        series: &str,
        is_direct: bool,
    ) -> Result<Measured> {
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
        let measured = self.records(layout, commit)?;
        self.verified_records(series, measured)
    }

    /// Writes the records of the trial with the next version, each by one call of `commit`.
    fn records(
        &self,
        layout: Layout,
        commit: impl Fn(&[u8], u64) -> Result<usize> + Sync,
    ) -> Result<Measured> {
        let version = self.ledger.borrow_mut().next_version();
        let (records, expected) = (self.parameters.records(layout), Duration::from_secs(1));
        let taken = AtomicU64::new(0);
        let run = |thread: u64| {
            let mut page = Page::zeroed();
            let record = &mut page.0[..records.record_bytes()];
            let mut seen = Seen::new(expected);
            let meter = Meter::start(None)?;
            for pos_bytes in records.positions(thread, &taken) {
                pattern::fill_version(record, pos_bytes, version);
                let begin = Instant::now();
                if commit(record, pos_bytes)? != record.len() {
                    return Err(Error::Refused("the write of a record was short".into()));
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
            all.intervals.merge(&thread.intervals);
        }
        all.bytes = all.operations * records.record_bytes() as u64;
        all.syscalls_known = 2 * all.operations;
        let mut ledger = self.ledger.borrow_mut();
        let taken = AtomicU64::new(0);
        let positions = (0..THREADS).flat_map(|thread| records.positions(thread, &taken));
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
        let records = Records::new(Layout::Regions, 20, 7);
        let taken = AtomicU64::new(0);
        let mut seen: Vec<(u64, u64)> = Vec::new();
        for thread in 0..THREADS {
            let positions: Vec<u64> = records.positions(thread, &taken).collect();
            assert_eq!(positions.len(), 7);
            seen.extend(positions.into_iter().map(|at| (at, thread)));
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 20, "each page is one thread's");
        let single = Records::new(Layout::Regions, 1, 7);
        assert_eq!(single.positions(0, &taken).count(), 0);
        assert_eq!(single.positions(7, &taken).count(), 7);
    }

    #[test]
    fn a_log_is_of_whole_pages_and_begins_again() {
        let positions = |pages, of_thread| {
            let records = Records::new(Layout::Log, pages, of_thread);
            records.positions(3, &AtomicU64::new(0)).collect::<Vec<_>>()
        };
        let ten = positions(100, 1);
        assert_eq!(ten, (0..16).map(|record| record * 256).collect::<Vec<_>>());
        assert_eq!(positions(1, 4).len(), 32);
        assert!(positions(1, 4).iter().all(|position| *position < 4096));
        assert_eq!(Records::new(Layout::Log, 100, 1).positions(0, &AtomicU64::new(16)).count(), 0);
    }
}

//! Reads of one page at a time, by one or several threads: four ways, one loop.
//!
//! The loop is generic over the way, as in `harness::timed`, and the clock is read after every
//! page: the cost is negligible next to the device, and it gives the latency of each read.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};
use rustix::io::pread;

use crate::error::{Error, Result};
use crate::harness::access::{Access, Draws, PAGE_BYTES};
use crate::harness::checker::Checker;
use crate::harness::direct::{self, Page};
use crate::harness::intervals::OperationsByInterval;
use crate::harness::latency::Latencies;
use crate::harness::memory_group::patiently;
use crate::harness::meter::{Measured, Meter};
use crate::harness::threads::run_together;

/// Reader of pages of one thread.
pub(crate) trait PageReader {
    /// Reads the page at `pos_bytes`. Returns the number of bytes.
    fn read(&mut self, page: &mut Page, pos_bytes: u64) -> Result<usize>;
}

/// The reads of one trial.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load<'a> {
    pub(crate) series: &'static str,
    pub(crate) access: &'a Access,
    pub(crate) draws: &'a Draws,
    pub(crate) threads: usize,
    /// Limit of the time and of the draws, whichever is reached first.
    pub(crate) duration: Duration,
    pub(crate) draw_end: u64,
    /// Tracepoint at which system calls are counted.
    pub(crate) tracepoint: Option<u64>,
}

/// Reads pages in several threads, each with its own reader. The result counts every read as a miss
/// and as one system call, which the caller may correct.
pub(crate) fn read_pages<R: PageReader>(
    load: &Load<'_>,
    open: impl Fn() -> Result<R> + Sync,
) -> Result<Measured> {
    let meter = Meter::start(load.tracepoint)?;
    let started = meter.started();
    let threads = run_together(
        load.threads,
        |_| Ok((open()?, Page::zeroed())),
        |(mut reader, mut page)| read_until(load, started, &mut reader, &mut page),
    )?;
    let cost = meter.stop()?;
    let mut latencies = Latencies::default();
    let mut intervals = OperationsByInterval::new(load.duration);
    let mut verified_bytes = 0;
    for thread in threads {
        latencies.merge(&thread.latencies);
        intervals.merge(&thread.intervals);
        verified_bytes += thread.checker.finish()?;
    }
    let operations = latencies.calls();
    Ok(Measured {
        operations,
        bytes: operations * PAGE_BYTES as u64,
        misses: operations,
        syscalls_known: operations,
        cost,
        latencies,
        intervals,
        verified_bytes,
    })
}

struct Seen {
    latencies: Latencies,
    intervals: OperationsByInterval,
    checker: Checker,
}

fn read_until(
    load: &Load<'_>,
    started: Instant,
    reader: &mut impl PageReader,
    page: &mut Page,
) -> Result<Seen> {
    let mut seen = Seen {
        latencies: Latencies::default(),
        intervals: OperationsByInterval::new(load.duration),
        checker: Checker::new(load.series),
    };
    let mut last = Instant::now();
    loop {
        let draw = load.draws.take();
        let since_start = last.duration_since(started);
        // A thread that started late still reads once: a trial without a read has no rate.
        let is_over = since_start >= load.duration && seen.latencies.calls() > 0;
        if is_over || draw >= load.draw_end {
            return Ok(seen);
        }
        let pos_bytes = load.access.pos_bytes(draw);
        let begin = Instant::now();
        let read = reader.read(page, pos_bytes)?;
        last = Instant::now();
        if read != PAGE_BYTES {
            return Err(seen.checker.wrong(pos_bytes));
        }
        seen.latencies.add(last - begin);
        seen.intervals.add_timed(last.duration_since(started), last - begin);
        seen.checker.add(&page.0, pos_bytes)?;
    }
}

/// Reads with `pread` past the page cache.
#[derive(Debug)]
pub(crate) struct Direct(File);

impl Direct {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        direct::open(path, false).map(Self)
    }
}

impl PageReader for Direct {
    fn read(&mut self, page: &mut Page, pos_bytes: u64) -> Result<usize> {
        pread(&self.0, &mut page.0, pos_bytes).map_err(Error::system("read past the page cache"))
    }
}

/// Reads with `pread` through the page cache, which is advised that the order is random.
#[derive(Debug)]
pub(crate) struct Buffered(File);

impl Buffered {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = || Error::system(format!("open {} for random reads", path.display()));
        let file = File::open(path).map_err(failed())?;
        fadvise(&file, 0, None, Advice::Random).map_err(|errno| failed()(errno.into()))?;
        Ok(Self(file))
    }
}

impl PageReader for Buffered {
    fn read(&mut self, page: &mut Page, pos_bytes: u64) -> Result<usize> {
        let read = patiently(|| Ok(pread(&self.0, &mut page.0, pos_bytes)?));
        read.map_err(Error::system("read the file with pread"))
    }
}

/// Reads with `read_at` through a cache.
#[derive(Debug)]
pub(crate) struct ReadAt(pub(crate) bifolio::File);

impl PageReader for ReadAt {
    fn read(&mut self, page: &mut Page, pos_bytes: u64) -> Result<usize> {
        Ok(self.0.read_at(&mut page.0, pos_bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::access::Pattern;
    use crate::harness::pattern;

    /// Returns the pattern, and at one position less than a page.
    struct Source {
        short_at_bytes: u64,
    }

    impl PageReader for Source {
        fn read(&mut self, page: &mut Page, pos_bytes: u64) -> Result<usize> {
            pattern::fill(&mut page.0, pos_bytes);
            Ok(if pos_bytes == self.short_at_bytes { 512 } else { PAGE_BYTES })
        }
    }

    #[test]
    fn all_threads_together_make_every_draw_once() {
        let access = Access::new(Pattern::Uniform, 1000 * PAGE_BYTES as u64, 1);
        let run = |short_at_bytes| {
            let load = Load {
                series: "x",
                access: &access,
                draws: &Draws::starting_at(5),
                threads: 3,
                duration: Duration::MAX,
                draw_end: 905,
                tracepoint: None,
            };
            read_pages(&load, || Ok(Source { short_at_bytes }))
        };
        let measured = run(u64::MAX).unwrap();
        assert_eq!((measured.operations, measured.latencies.calls()), (900, 900));
        assert!(measured.verified_bytes >= 900 * 8 + 3 * PAGE_BYTES as u64);
        assert!(run(access.pos_bytes(700)).is_err());
    }
}

//! The work of the workers: they write and verify patterns, page by page, in memory larger than
//! memory.
//!
//! The method is that of `stress-ng --vm`, with a few differences for short windows. Each worker is
//! a thread with its own part of the memory. It passes over its part repeatedly, in order or at
//! random. What a pass writes, the next one verifies: [`WORDS_PER_PAGE`] words of each page, from
//! the first to the last. Half of the runs of [`RUN_PAGES`] are written while the other half is
//! verified, so that every window contains both equally. A page written or verified is one
//! operation ("bogo op"). A word that differs from the one written last is an error of the run.
//!
//! A worker remembers which pass wrote each page, so a window may end in the middle of a pass, and
//! at the end every page is compared. The first access to a page is timed, whether it faults or
//! not: in order only for one page in [`SAMPLE_PAGES`], because reading the clock takes as long as
//! some accesses.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::direct::Page;
use crate::harness::measured::{Calls, Measured, Meter};
use crate::harness::pattern;
use crate::harness::permutation::Permutation;
use crate::harness::span::Span;
use crate::harness::threads::run_together;

/// The first word of a page, the last, and six between them.
const WORDS_PER_PAGE: u64 = 8;
const WORD_STEP_BYTES: u64 = (PAGE_BYTES as u64 - size_of::<u64>() as u64) / (WORDS_PER_PAGE - 1);

/// Number of adjacent pages written or verified together: 2 MiB.
const RUN_PAGES: u64 = 512;

/// Not a power of two, because readahead windows are, and each of their pages must be sampled.
const SAMPLE_PAGES: u64 = 17;

/// Returns the interval of pages whose access is timed.
fn sample_pages(order: Order) -> u64 {
    match order {
        Order::Sequential => SAMPLE_PAGES,
        Order::Random => 1,
    }
}

/// Pages between two clock readings.
const PAGES_PER_LOOK: u64 = 64;

/// Order in which a pass visits the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Sequential,
    Random,
}

/// Orders in which they are measured, with their names.
pub(super) const ORDERS: [(Order, &str); 2] =
    [(Order::Sequential, "sequential"), (Order::Random, "random")];

/// Amount of work.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Load {
    pub(super) size_bytes: u64,
    pub(super) workers: usize,
    /// Duration of the window of each order.
    pub(super) window: Duration,
}

/// All workers, with their state.
pub(super) struct Team<P>(Vec<Mutex<Worker<P>>>);

struct Worker<P> {
    series: &'static str,
    pages: P,
    first_page: u64,
    /// The pass that wrote each of the worker's pages.
    written_in: Vec<u32>,
    pass: u32,
}

impl<P: Pages> Team<P> {
    /// Divides the memory between the workers. Writes nothing: `fill` does that, or the memory
    /// already holds version 0 of the pattern.
    pub(super) fn new(
        series: &'static str,
        load: &Load,
        open: impl Fn() -> Result<P>,
    ) -> Result<Self> {
        let (pages, workers) = (load.size_bytes / PAGE_BYTES as u64, load.workers as u64);
        let worker = |index| {
            let (first_page, end) = (pages * index / workers, pages * (index + 1) / workers);
            let written_in = vec![0; (end - first_page) as usize];
            Ok(Mutex::new(Worker { series, pages: open()?, first_page, written_in, pass: 0 }))
        };
        Ok(Self((0..workers).map(worker).collect::<Result<_>>()?))
    }

    /// Writes every page once, in order.
    pub(super) fn fill(&self) -> Result<()> {
        self.each(|worker| (0..worker.count()).try_for_each(|page| worker.write(page, &mut None)))
            .map(drop)
    }

    /// Passes over the pages for `window`.
    pub(super) fn measure(&self, order: Order, window: Duration) -> Result<Measured> {
        let meter = Meter::start(None)?;
        let started = meter.started();
        let workers = self.each(|worker| worker.pass_until(order, started, window))?;
        let cost = meter.stop()?;
        let mut calls = Calls::during(window);
        workers.iter().for_each(|(worker, _)| calls.merge(worker));
        let verified_bytes = words_bytes(workers.iter().map(|(_, verified)| verified).sum());
        let bytes = calls.operations * PAGE_BYTES as u64;
        let measured = Measured::new(calls, bytes, cost);
        Ok(Measured { syscalls_known: 0, verified_bytes, ..measured })
    }

    /// Compares every page, in order. Returns the number of bytes.
    pub(super) fn verify(&self) -> Result<u64> {
        let counts = self.each(|worker| {
            (0..worker.count()).try_for_each(|page| worker.verify(page, &mut None))?;
            Ok(worker.count())
        })?;
        Ok(words_bytes(counts.into_iter().sum()))
    }

    /// Runs `work` of every worker, all at the same time.
    fn each<T: Send>(&self, work: impl Fn(&mut Worker<P>) -> Result<T> + Sync) -> Result<Vec<T>> {
        let prepare = |index: usize| Ok(self.0[index].lock());
        run_together(self.0.len(), prepare, |mut worker| work(&mut *worker))
    }
}

fn words_bytes(pages: u64) -> u64 {
    pages * WORDS_PER_PAGE * size_of::<u64>() as u64
}

impl<P: Pages> Worker<P> {
    fn count(&self) -> u64 {
        self.written_in.len() as u64
    }

    /// Passes over the pages until the window ends. Returns the calls, with the first accesses that
    /// are timed, and the number of pages verified.
    fn pass_until(
        &mut self,
        order: Order,
        started: Instant,
        window: Duration,
    ) -> Result<(Calls, u64)> {
        let (mut calls, mut operations, mut verified) = (Calls::during(window), 0_u64, 0);
        loop {
            self.pass += 1;
            let shuffled = Permutation::new(self.count(), u64::from(self.pass));
            for step in 0..self.count() {
                let page = if order == Order::Random { shuffled.apply(step) } else { step };
                let is_sampled = step.is_multiple_of(sample_pages(order));
                let mut touch = is_sampled.then_some(Duration::ZERO);
                if (page / RUN_PAGES + u64::from(self.pass)).is_multiple_of(2) {
                    self.write(page, &mut touch.as_mut())?;
                } else {
                    self.verify(page, &mut touch.as_mut())?;
                    verified += 1;
                }
                operations += 1;
                if let Some(latency) = touch {
                    calls.time(started.elapsed(), latency);
                }
                if operations.is_multiple_of(PAGES_PER_LOOK) {
                    let since_start = started.elapsed();
                    calls.count(since_start, PAGES_PER_LOOK);
                    if since_start >= window {
                        return Ok((calls, verified));
                    }
                }
            }
        }
    }

    fn write(&mut self, page: u64, sampled: &mut Option<&mut Duration>) -> Result<()> {
        let version = self.pass;
        self.written_in[page as usize] = version;
        for pos_bytes in self.words_of(page) {
            let word = pattern::word_at(pos_bytes, version);
            timed(sampled, || self.pages.store(pos_bytes, word))?;
        }
        self.pages.leave_page()
    }

    fn verify(&mut self, page: u64, sampled: &mut Option<&mut Duration>) -> Result<()> {
        let version = self.written_in[page as usize];
        for pos_bytes in self.words_of(page) {
            let word = timed(sampled, || self.pages.load(pos_bytes))?;
            if word != pattern::word_at(pos_bytes, version) {
                return Err(Error::WrongBytes { series: self.series.to_owned(), pos_bytes });
            }
        }
        self.pages.leave_page()
    }

    fn words_of(&self, page: u64) -> impl Iterator<Item = u64> + use<P> {
        let start = (self.first_page + page) * PAGE_BYTES as u64;
        (0..WORDS_PER_PAGE).map(move |index| start + index * WORD_STEP_BYTES)
    }
}

/// Runs `access`; the first access of a sampled page is timed.
#[inline(always)]
fn timed<T>(sampled: &mut Option<&mut Duration>, access: impl FnOnce() -> T) -> T {
    let Some(duration) = sampled.take() else {
        return access();
    };
    let begin = Instant::now();
    let given = access();
    *duration = begin.elapsed();
    given
}

/// Access of one worker to its pages; all accesses between two calls of `leave_page` are in one
/// page.
pub(super) trait Pages: Send {
    fn load(&mut self, pos_bytes: u64) -> Result<u64>;
    fn store(&mut self, pos_bytes: u64, word: u64) -> Result<()>;
    /// Ends the accesses to the current page.
    fn leave_page(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Mapped memory: plain loads and stores.
impl Pages for Span {
    #[inline(always)]
    fn load(&mut self, pos_bytes: u64) -> Result<u64> {
        Ok(Self::load(self, pos_bytes))
    }

    #[inline(always)]
    fn store(&mut self, pos_bytes: u64, word: u64) -> Result<()> {
        Self::store(self, pos_bytes, word);
        Ok(())
    }
}

/// A file without a cache: a page is read at its first access and, if it was changed, written at
/// its last.
#[derive(Debug)]
pub(super) struct Uncached<'a> {
    file: &'a File,
    page: Box<Page>,
    start_bytes: Option<u64>,
    changed: bool,
}

impl<'a> Uncached<'a> {
    /// Creates it for a file that is open past the page cache.
    pub(super) fn new(file: &'a File) -> Self {
        Self { file, page: Page::zeroed(), start_bytes: None, changed: false }
    }

    /// Returns the word at `pos_bytes`, after reading its page.
    fn word(&mut self, pos_bytes: u64) -> Result<&mut [u8]> {
        let at_bytes = (pos_bytes % PAGE_BYTES as u64) as usize;
        if self.start_bytes.is_none() {
            let start_bytes = pos_bytes - at_bytes as u64;
            let failed = Error::system("read past the page cache");
            self.file.read_exact_at(&mut self.page.0, start_bytes).map_err(failed)?;
            self.start_bytes = Some(start_bytes);
        }
        debug_assert_eq!(self.start_bytes, Some(pos_bytes - at_bytes as u64));
        Ok(&mut self.page.0[at_bytes..at_bytes + size_of::<u64>()])
    }
}

impl Pages for Uncached<'_> {
    fn load(&mut self, pos_bytes: u64) -> Result<u64> {
        let word = self.word(pos_bytes)?.first_chunk().copied();
        Ok(u64::from_ne_bytes(word.unwrap_or_default()))
    }

    fn store(&mut self, pos_bytes: u64, word: u64) -> Result<()> {
        self.word(pos_bytes)?.copy_from_slice(&word.to_ne_bytes());
        self.changed = true;
        Ok(())
    }

    fn leave_page(&mut self) -> Result<()> {
        let changed = std::mem::take(&mut self.changed);
        match self.start_bytes.take() {
            Some(start_bytes) if changed => self
                .file
                .write_all_at(&self.page.0, start_bytes)
                .map_err(Error::system("write past the page cache")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::mapping::Mapping;

    const PAGES: u64 = 3 * RUN_PAGES + 5;
    const SIZE_BYTES: u64 = PAGES * PAGE_BYTES as u64;
    const SHORT: Duration = Duration::from_millis(20);

    fn load(workers: usize) -> Load {
        Load { size_bytes: SIZE_BYTES, workers, window: SHORT }
    }

    fn words() -> Span {
        Mapping::anonymous(SIZE_BYTES).unwrap().span()
    }

    #[test]
    fn a_page_is_written_when_it_is_left_and_forgotten() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * PAGE_BYTES as u64).unwrap();
        let mut pages = Uncached::new(&file);
        pages.store(4096, 7).unwrap();
        pages.store(8184, 8).unwrap();
        pages.leave_page().unwrap();
        file.write_all_at(&9u64.to_ne_bytes(), 4096).unwrap();
        assert_eq!((pages.load(4096).unwrap(), pages.load(8184).unwrap()), (9, 8));
        pages.leave_page().unwrap();
        assert_eq!(pages.load(0).unwrap(), 0);
        file.write_all_at(&1u64.to_ne_bytes(), 8).unwrap();
        pages.leave_page().unwrap();
        assert_eq!(pages.load(8).unwrap(), 1, "a page that was only read is not written");
    }

    #[test]
    fn every_page_is_written_and_verified_by_exactly_one_worker() {
        let memory = words();
        let team = Team::new("x", &load(2), || Ok(memory.clone())).unwrap();
        team.fill().unwrap();
        for (order, _) in ORDERS {
            let measured = team.measure(order, SHORT).unwrap();
            assert!(measured.calls.operations >= 2 * PAGES_PER_LOOK);
            let verified = measured.verified_bytes / words_bytes(1);
            let half = measured.calls.operations / 2;
            assert!(verified.abs_diff(half) <= 2 * RUN_PAGES, "{verified} of {half}");
            let sampled = measured.calls.operations.div_ceil(sample_pages(order));
            assert!(measured.calls.latencies.calls().abs_diff(sampled) < sampled / 4 + 4);
        }
        assert_eq!(team.verify().unwrap(), PAGES * 64);
    }

    #[test]
    fn a_word_that_is_lost_is_an_error_with_its_position() {
        for word in 0..WORDS_PER_PAGE {
            let memory = words();
            let team = Team::new("x", &load(2), || Ok(memory.clone())).unwrap();
            team.fill().unwrap();
            let wrong_bytes = (PAGES - 1) * PAGE_BYTES as u64 + word * WORD_STEP_BYTES;
            memory.store(wrong_bytes, memory.load(wrong_bytes) + 1);
            let error = team.verify().unwrap_err();
            assert!(
                matches!(error, Error::WrongBytes { pos_bytes, .. } if pos_bytes == wrong_bytes)
            );
        }
    }

    #[test]
    fn a_page_that_comes_back_with_an_older_version_is_noticed() {
        let memory = words();
        let team = Team::new("x", &load(1), || Ok(memory.clone())).unwrap();
        team.fill().unwrap();
        let old: Vec<u64> = team.0[0].lock().words_of(0).map(|at| memory.load(at)).collect();
        team.0[0].lock().pass = 2;
        team.0[0].lock().write(0, &mut None).unwrap();
        team.verify().unwrap();
        let positions: Vec<u64> = team.0[0].lock().words_of(0).collect();
        positions.iter().zip(old).for_each(|(&at, word)| memory.store(at, word));
        assert!(matches!(team.verify(), Err(Error::WrongBytes { pos_bytes: 0, .. })));
    }
}

//! `reclaim`: mapped memory four times as large as memory, written and verified by workers.
//!
//! The benchmark measures the cost of reclaim. Series: a mapped memory file of a cache, which
//! unmaps N folios with one TLB flush (`flush_per_folio`, `flush_per_batch_N`); anonymous memory
//! that the kernel swaps out to the same disk, and a file that it maps, both limited to the memory
//! of a process with such a cache (`kernel_swap`, `kernel_mmap`). A trial is a child process:
//! resident sizes and control groups belong to processes. It fills the memory, which is not timed,
//! runs a timed window of each order, and compares every page.
//!
//! The method is that of `stress-ng --vm`. Each worker is a thread with its own part of the memory,
//! over which it passes repeatedly, in order or at random. What a pass writes, the next one
//! verifies: [`WORDS_PER_PAGE`] words of each page. Half of the runs of [`RUN_PAGES`] are written
//! while the other half is verified. A page written or verified is one operation ("bogo op"). A
//! worker remembers which pass wrote each page, so a window may end in the middle of a pass. The
//! first access to a page is timed, whether it faults or not: in order only for one page in
//! [`SAMPLE_PAGES`], because reading the clock takes as long as some accesses.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bifolio::{Access, Cache, FaultMode, OpenOptions};
use bifolio_report::{Case, Row, Rss};
use memmap2::Advice;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::benchmark::Needs;
use crate::definition::{Asked, Definition, Parameters, at_least, at_most};
use crate::error::{Error, Result};
use crate::format_bytes;
use crate::harness::access::PAGE_BYTES;
use crate::harness::access::Permutation;
use crate::harness::cached::Cached;
use crate::harness::counters::{self, Counters};
use crate::harness::measured::{Calls, Measured, Meter, Per, Unit};
use crate::harness::memory_group::{Membership, MemoryGroup};
use crate::harness::sizes::SizeRule;
use crate::harness::span::{Mapping, Span};
use crate::harness::swap::SwapFile;
use crate::harness::threads::run_together;
use crate::harness::{child, pattern};
use crate::progress::Silent;
use crate::run::Run;

const SWAP: &str = "kernel_swap";
const MMAP: &str = "kernel_mmap";
const PER_FOLIO: &str = "flush_per_folio";
const PER_31: &str = "flush_per_batch_31";
/// The batch of [`PER_31`], with faults served by the thread that raises them.
const IN_THREAD: &str = "in_thread_per_batch_31";

/// Series of caches, each with the number of folios that it unmaps with one flush.
const CACHES: [(&str, usize); 6] = [
    (PER_FOLIO, 1),
    ("flush_per_batch_8", 8),
    (PER_31, 31),
    (IN_THREAD, 31),
    ("flush_per_batch_128", 128),
    ("flush_per_batch_512", 512),
];

/// The first word of a page, the last, and six between them.
const WORDS_PER_PAGE: u64 = 8;
const WORD_STEP_BYTES: u64 = (PAGE_BYTES as u64 - size_of::<u64>() as u64) / (WORDS_PER_PAGE - 1);
/// Number of adjacent pages written or verified together: 2 MiB.
const RUN_PAGES: u64 = 512;
/// Not a power of two, because readahead windows are, and each of their pages must be sampled.
const SAMPLE_PAGES: u64 = 17;
const PAGES_PER_LOOK: u64 = 64;

pub(crate) static RECLAIM: Definition = Definition {
    name: "reclaim",
    description: "mapped memory 4 times the bound, written and verified, against the kernel's swap \
                  and mmap",
    sizes: SizeRule::Larger { factor: 4, memory_bytes: [4 << 20, 32 << 20, 256 << 20] },
    times: [(0.5, 1), (6.0, 1), (320.0, 3)],
    // On disk a swap file and a swap, or a file, of the same size; in memory a cache and a group.
    needs: |Parameters { sizes, .. }| Needs {
        disk_bytes: (sizes.size_bytes + sizes.memory_bytes).saturating_mul(2),
        memory_bytes: sizes.kernel_bytes().saturating_mul(2).saturating_add(64 << 20),
    },
    ratios: &[
        (PER_31, SWAP),
        (PER_31, MMAP),
        (PER_31, PER_FOLIO),
        (IN_THREAD, SWAP),
        (IN_THREAD, MMAP),
    ],
    shown_counts: &[
        "tlb_shootdowns",
        "function_call_ipis",
        "flushes",
        "pgscan",
        "pgsteal",
        "pages_evicted",
        "pages_written",
        "p50_ns",
        "p99_ns",
        "p999_ns",
        "reclaim_stalls",
    ],
    targets: &[
        at_least("", Asked::Ratio(PER_31, PER_FOLIO), 1.5),
        at_least("pattern=sequential", Asked::Ratio(PER_31, SWAP), 1.5),
        at_least("pattern=random", Asked::Ratio(PER_31, SWAP), 1.0),
        at_least("", Asked::Ratio(PER_31, MMAP), 1.0),
        at_most(
            "",
            Asked::Of("shootdowns per page, flush_per_batch_31 / flush_per_folio", |row| {
                Some(shootdowns(row, PER_31)? / shootdowns(row, PER_FOLIO)?)
            }),
            1.0 / 15.0,
        ),
        // Waits of 100 us or longer that do not depend on the device.
        at_most(
            "",
            Asked::Of("touches of a thousand that waited 100 us for reclaim", |row| {
                let count = |name| row.count(PER_31, name);
                Some(count("reclaim_stalls")? / (count("operations")? / 1000.0))
            }),
            1.0,
        ),
    ],
    run,
    child: Some(|task| child::serve(task, run_task)),
};

/// Returns the shootdowns per evicted page, where several workers run: a single thread interrupts
/// no other CPU.
fn shootdowns(row: &Row, series: &str) -> Option<f64> {
    let count = |name| row.count(series, name).filter(|count| *count > 0.0);
    let is_several = row.case.text("workers") != "1";
    is_several.then_some(count("tlb_shootdowns")? / count("pages_evicted")?)
}

/// Orders in which a pass visits the pages; set if that is at random.
const ORDERS: [(&str, bool); 2] = [("sequential", false), ("random", true)];

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Load {
    size_bytes: u64,
    workers: usize,
    /// Duration of the window of each order.
    window: Duration,
}

/// A trial of a series, for a child.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    series: String,
    /// The control group of a process of the kernel's series.
    group: Option<Membership>,
    /// Directory for files.
    directory: PathBuf,
    memory_bytes: u64,
    load: Load,
}

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    const UNIT: Unit = ("bogo ops/s", Measured::rate);
    let (sizes, children, workspace) = (parameters.sizes, run.children, run.workspace);
    if sizes.pages() < parameters.threads_max() as u64 {
        return Err(Error::Refused("--size: at least a page for each of --threads".into()));
    }
    // Dropped from the last to the first: the group, then the swap.
    let create = || {
        let swap = SwapFile::activate(workspace, sizes.size_bytes + sizes.memory_bytes)?;
        Ok((MemoryGroup::create(sizes)?, swap))
    };
    let kernel = run.attempt(&[SWAP, MMAP], create())?;
    let group = kernel.as_ref().map(|(group, _)| group.membership());
    let ask = &|series: &str, load: Load| -> Result<Vec<Measured>> {
        children.ask(&Task {
            series: series.to_owned(),
            group: group.clone().filter(|_| [SWAP, MMAP].contains(&series)),
            directory: workspace.path().to_owned(),
            memory_bytes: sizes.memory_bytes,
            load,
        })
    };
    let of_kernel = [SWAP, MMAP].into_iter().filter(|_| group.is_some());
    let can_run = run.try_every(of_kernel.chain(CACHES.map(|(series, _)| series)), |series| {
        ask(series, Load { size_bytes: PAGE_BYTES as u64, workers: 1, window: Duration::ZERO })
    })?;
    let mut rows = run.rows();
    for &workers in &parameters.threads {
        for (pattern, _) in ORDERS {
            rows.row(Case::new().with("workers", workers).with("pattern", pattern), UNIT);
        }
        for &series in &can_run {
            rows.series_of_rows(series, ORDERS.len(), move |window| {
                ask(series, Load { size_bytes: sizes.size_bytes, workers, window })
            });
        }
    }
    let rounds = parameters.shared(rows.trials() * ORDERS.len());
    run.measure("measure", rows, rounds)?;
    let peaks =
        run.report.rows.iter().flat_map(|row| {
            CACHES.iter().filter_map(|(series, _)| row.count(series, "peak_bytes"))
        });
    let (bound_bytes, peak) = (sizes.memory_bytes, peaks.fold(0.0, f64::max));
    run.report.rss = (peak > 0.0).then_some(Rss { bound_bytes, peak_bytes: peak as u64 });
    run.note(
        "interrupts, and what the kernel's series scanned and wrote, are those of the whole \
         machine; the kernel does not tell how many flushes it asked for",
    );
    if kernel.is_some() {
        let bytes = format_bytes(sizes.kernel_bytes());
        run.note(format!(
            "a process of the kernel's series is held to {bytes}, as the process of a cache is"
        ));
    }
    Ok(())
}

/// Runs the child's side. Returns the window of each order.
fn run_task(task: &Task) -> Result<Vec<Measured>> {
    task.group.as_ref().map_or(Ok(()), Membership::join)?;
    let load = &task.load;
    match task.series.as_str() {
        SWAP => {
            let mapping = Mapping::anonymous(load.size_bytes)?;
            mapping.advise(Advice::NoHugePage)?;
            let team = Team::new(SWAP, load, &mapping.span);
            team.fill()?;
            let announce = |is_random| mapping.advise(hint(is_random));
            measure(&team, load, announce, || counters::reclaim("pswpout"))
        }
        MMAP => {
            let path = task.directory.join("mapped");
            pattern::make_file(&path, load.size_bytes, &mut Silent)?;
            let file = File::options().read(true).write(true).open(&path);
            // Unlinked, so that its blocks are freed with this process in any case.
            std::fs::remove_file(&path).map_err(Error::system("remove a file that is open"))?;
            let file = file.map_err(Error::system(format!("open {}", path.display())))?;
            let mapping = Mapping::of_file(&file, true)?;
            let team = Team::new(MMAP, load, &mapping.span);
            let announce = |is_random| mapping.advise(hint(is_random));
            measure(&team, load, announce, || counters::reclaim("nr_written"))
        }
        _ => cache(task),
    }
}

/// Returns the advice to the kernel before a window: it detects a sequential order by itself, and
/// reads too far ahead in a random one.
fn hint(is_random: bool) -> Advice {
    if is_random { Advice::Random } else { Advice::Normal }
}

fn cache(task: &Task) -> Result<Vec<Measured>> {
    let known = CACHES.into_iter().find(|(series, _)| *series == task.series);
    let (series, batch_folios) =
        known.ok_or_else(|| Error::Child(format!("no series is called {}", task.series)))?;
    let builder = Cache::builder().memory(task.memory_bytes).swap_directory(&task.directory);
    let builder = builder.unmap_batch_folios(batch_folios);
    let faults = if series == IN_THREAD { FaultMode::InThread } else { FaultMode::Threads };
    let cached = Cached::in_memory(builder, OpenOptions::new().mappable(true).faults(faults))?;
    let team = Team::new(series, &task.load, &cached.map_mut(task.load.size_bytes)?);
    team.fill()?;
    let announce = |is_random| {
        cached.file.set_access(if is_random { Access::Random } else { Access::Normal });
        Ok(())
    };
    measure(&team, &task.load, announce, || {
        let stats = cached.cache.stats();
        Ok(vec![
            ("flushes", stats.maps.unmap_flushes),
            ("pgscan", stats.evictions.scanned_folios),
            ("pgsteal", stats.evictions.folios),
            ("pages_evicted", stats.maps.unmapped_pages),
            ("pages_written", stats.storage.swapped_out_pages),
            ("faults", stats.maps.faults),
            ("reclaim_stalls", stats.memory.reclaim_stalls),
        ])
    })
}

/// Measures every order, then compares every page in order; `announce` is called before each.
fn measure(
    team: &Team,
    load: &Load,
    announce: impl Fn(bool) -> Result<()>,
    counters: impl Fn() -> Result<Counters>,
) -> Result<Vec<Measured>> {
    let all = || -> Result<Counters> { Ok([counters::interrupts()?, counters()?].concat()) };
    let mut windows = Vec::new();
    for (_, is_random) in ORDERS {
        announce(is_random)?;
        let before = all()?;
        let mut measured = team.measure(is_random, load.window)?;
        measured.add_since(&before, &all()?, Per::Run);
        windows.push(measured);
    }
    announce(false)?;
    windows[ORDERS.len() - 1].verified_bytes += team.verify()?;
    let peak_bytes = counters::resident_bytes("VmHWM")? as f64;
    windows.iter_mut().for_each(|window| window.add("peak_bytes", peak_bytes, Per::Peak));
    Ok(windows)
}

/// All workers, with their state.
struct Team(Vec<Mutex<Worker>>);

struct Worker {
    series: &'static str,
    words: Span,
    first_page: u64,
    /// The pass that wrote each of the worker's pages.
    written_in: Vec<u32>,
    pass: u32,
}

impl Team {
    /// Divides the memory between the workers. Writes nothing: `fill` does that, or the memory
    /// already holds version 0 of the pattern.
    fn new(series: &'static str, load: &Load, words: &Span) -> Self {
        let (pages, workers) = (load.size_bytes / PAGE_BYTES as u64, load.workers as u64);
        let worker = |index| {
            let (first_page, end) = (pages * index / workers, pages * (index + 1) / workers);
            let written_in = vec![0; (end - first_page) as usize];
            Mutex::new(Worker { series, words: words.clone(), first_page, written_in, pass: 0 })
        };
        Self((0..workers).map(worker).collect())
    }

    /// Writes every page once, in order.
    fn fill(&self) -> Result<()> {
        self.each(|worker| {
            (0..worker.count()).for_each(|page| worker.write(page, &mut None));
            Ok(())
        })?;
        Ok(())
    }

    fn measure(&self, is_random: bool, window: Duration) -> Result<Measured> {
        let meter = Meter::start();
        let workers = self.each(|worker| worker.pass_until(is_random, meter.started, window))?;
        let cost = meter.stop();
        let mut calls = Calls::during(window);
        workers.iter().for_each(|(worker, _)| calls.merge(worker));
        let verified_bytes = words_bytes(workers.iter().map(|(_, verified)| verified).sum());
        let bytes = calls.operations * PAGE_BYTES as u64;
        let measured = Measured::new(calls, bytes, cost);
        Ok(Measured { syscalls: None, verified_bytes, ..measured })
    }

    /// Compares every page, in order. Returns the number of bytes.
    fn verify(&self) -> Result<u64> {
        let counts = self.each(|worker| {
            (0..worker.count()).try_for_each(|page| worker.verify(page, &mut None))?;
            Ok(worker.count())
        })?;
        Ok(words_bytes(counts.into_iter().sum()))
    }

    /// Runs `work` of every worker, all at the same time.
    fn each<T: Send>(&self, work: impl Fn(&mut Worker) -> Result<T> + Sync) -> Result<Vec<T>> {
        let prepare = |index: usize| Ok(self.0[index].lock());
        run_together(self.0.len(), prepare, |mut worker| work(&mut worker))
    }
}

fn words_bytes(pages: u64) -> u64 {
    pages * WORDS_PER_PAGE * size_of::<u64>() as u64
}

impl Worker {
    fn count(&self) -> u64 {
        self.written_in.len() as u64
    }

    /// Passes over the pages until the window ends. Returns the calls, with the first accesses that
    /// are timed, and the number of pages verified.
    fn pass_until(
        &mut self,
        is_random: bool,
        started: Instant,
        window: Duration,
    ) -> Result<(Calls, u64)> {
        let (mut calls, mut operations, mut verified) = (Calls::during(window), 0_u64, 0);
        let sample_pages = if is_random { 1 } else { SAMPLE_PAGES };
        loop {
            self.pass += 1;
            let shuffled = Permutation::new(self.count(), u64::from(self.pass));
            for step in 0..self.count() {
                let page = if is_random { shuffled.apply(step) } else { step };
                let mut touch = step.is_multiple_of(sample_pages).then_some(Duration::ZERO);
                if (page / RUN_PAGES + u64::from(self.pass)).is_multiple_of(2) {
                    self.write(page, &mut touch.as_mut());
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

    fn write(&mut self, page: u64, sampled: &mut Option<&mut Duration>) {
        let version = self.pass;
        self.written_in[page as usize] = version;
        for pos_bytes in self.words_of(page) {
            let word = pattern::word_at(pos_bytes, version);
            timed(sampled, || self.words.store(pos_bytes, word));
        }
    }

    fn verify(&self, page: u64, sampled: &mut Option<&mut Duration>) -> Result<()> {
        let version = self.written_in[page as usize];
        for pos_bytes in self.words_of(page) {
            let word = timed(sampled, || self.words.load(pos_bytes));
            if word != pattern::word_at(pos_bytes, version) {
                return Err(Error::WrongBytes { series: self.series.to_owned(), pos_bytes });
            }
        }
        Ok(())
    }

    fn words_of(&self, page: u64) -> impl Iterator<Item = u64> + use<> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_verified_and_a_word_that_is_lost_is_an_error() {
        let pages = 3 * RUN_PAGES + 5;
        let window = Duration::from_millis(20);
        let load = Load { size_bytes: pages * PAGE_BYTES as u64, workers: 2, window };
        let memory = Mapping::anonymous(load.size_bytes).unwrap().span;
        let team = Team::new("x", &load, &memory);
        team.fill().unwrap();
        for (_, is_random) in ORDERS {
            let measured = team.measure(is_random, window).unwrap();
            let verified = measured.verified_bytes / words_bytes(1);
            let half = measured.calls.operations / 2;
            assert!(verified.abs_diff(half) <= 2 * RUN_PAGES, "{verified} of {half}");
        }
        assert_eq!(team.verify().unwrap(), pages * 64);
        for word in 0..WORDS_PER_PAGE {
            let wrong_bytes = (pages - 1) * PAGE_BYTES as u64 + word * WORD_STEP_BYTES;
            let right = memory.load(wrong_bytes);
            memory.store(wrong_bytes, right + 1);
            let error = team.verify().unwrap_err();
            memory.store(wrong_bytes, right);
            assert!(
                matches!(error, Error::WrongBytes { pos_bytes, .. } if pos_bytes == wrong_bytes)
            );
        }
    }
}

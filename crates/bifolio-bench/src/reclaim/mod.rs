//! `reclaim`: mapped memory four times as large as memory, written and verified by workers.
//!
//! The benchmark measures the cost of reclaim. Series: a mapped memory file of a cache, which
//! unmaps N folios with one TLB flush (`flush_per_folio`, `flush_per_batch_N`); anonymous memory
//! that the kernel swaps out to the same disk, and a file that it maps, both limited to the memory
//! of a process with such a cache (`kernel_swap`, `kernel_mmap`); and the same work without a cache
//! (`raw_direct`), whose slowest accesses show the speed of the disk at that time. A trial is a
//! child process: resident sizes and control groups belong to processes. It fills the memory, which
//! is not timed, runs a timed window of each order, and compares every page.
//!
//! `work.rs` has the workers: the method of `stress-ng --vm`, and where it differs.

mod work;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bifolio::{Access, Cache};
use bifolio_report::{Case, Row, Rss};
use memmap2::Advice;
use serde::{Deserialize, Serialize};

use self::work::{Load, ORDERS, Order, Pages, Team, Uncached};
use crate::config::{Config, Times};
use crate::definition::{Asked, Definition, Target, at_most, ratio_at_least};
use crate::error::{Error, Result};
use crate::format_bytes;
use crate::harness::access::PAGE_BYTES;
use crate::harness::counters::{self, Counters};
use crate::harness::mapped_file::MappedFile;
use crate::harness::mapping::Mapping;
use crate::harness::measured::{Measured, Per, Standard, Unit};
use crate::harness::memory_group::{Membership, MemoryGroup};
use crate::harness::sizes::Sizes;
use crate::harness::swap::SwapFile;
use crate::harness::{child, direct, pattern};
use crate::progress::Silent;
use crate::run::Run;

const SWAP: &str = "kernel_swap";
const MMAP: &str = "kernel_mmap";
const UNCACHED: &str = "raw_direct";
const PER_FOLIO: &str = "flush_per_folio";
const PER_31: &str = "flush_per_batch_31";
const PER_128: &str = "flush_per_batch_128";

/// Series of caches, each with the number of folios that it unmaps with one flush.
const CACHES: [(&str, usize); 5] = [
    (PER_FOLIO, 1),
    ("flush_per_batch_8", 8),
    (PER_31, 31),
    (PER_128, 128),
    ("flush_per_batch_512", 512),
];

const UNIT: Unit = ("bogo ops/s", Measured::rate);

/// First touches of pages are timed here, not calls.
const STANDARD: &[Standard] = &[
    ("p50_ns", "p50_fault_ns"),
    ("p99_ns", "p99_fault_ns"),
    ("p999_ns", "p999_fault_ns"),
    ("max_ns", "max_fault_ns"),
    ("calls", "calls"),
    ("operations", "operations"),
    ("cpu_s_per_gib", "cpu_s_per_gib"),
    ("cpu_ns_per_op", "cpu_ns_per_op"),
    ("syscalls_per_op", "syscalls_per_op"),
    ("min_second_over_mean", "min_second_over_mean"),
    ("min_100ms_over_mean", "min_100ms_over_mean"),
];

/// Creates a target for the ratio of rates.
const fn rates(case: &'static str, under: &'static str, at_least: f64) -> Target {
    let name = "{over} / {under}, {pattern}, workers {workers}";
    ratio_at_least(name, case, [PER_31, under], at_least)
}

pub(crate) static RECLAIM: Definition<Parameters> = Definition {
    name: "reclaim",
    description: "mapped memory 4 times the bound, written and verified, against the kernel's swap \
                  and mmap",
    parameters,
    needs: |parameters| parameters.sizes.needs_of_swap(),
    ratios: &[(PER_31, SWAP), (PER_31, MMAP), (PER_31, PER_FOLIO)],
    shown_counts: &[
        "tlb_shootdowns",
        "function_call_ipis",
        "flushes",
        "pgscan",
        "pgsteal",
        "pages_evicted",
        "pages_written",
        "p50_fault_ns",
        "p99_fault_ns",
        "p999_fault_ns",
        "reclaim_stalls",
    ],
    standard: STANDARD,
    targets: &[
        rates("", PER_FOLIO, 1.5),
        rates("pattern=sequential", SWAP, 1.5),
        rates("pattern=random", SWAP, 1.0),
        rates("", MMAP, 1.0),
        shootdowns_at_most([PER_31, PER_FOLIO], 1.0 / 15.0),
        shootdowns_at_most([PER_31, SWAP], 1.0),
        shootdowns_at_most([PER_31, MMAP], 1.0),
        shootdowns_at_most([PER_128, SWAP], 1.0 / 3.0),
        shootdowns_at_most([PER_128, MMAP], 1.0 / 3.0),
        at_most(
            "p99.9 of a touch beyond that without a cache, ns, {pattern}, workers {workers}",
            "",
            Asked::Of(|row| {
                let slow_ns = |series| row.count(series, "p999_fault_ns");
                Some(slow_ns(PER_31)? - slow_ns(UNCACHED)?)
            }),
            100_000.0,
        ),
        // Waits of 100 us or longer that do not depend on the device.
        at_most(
            "touches of a thousand that waited 100 us for reclaim, {pattern}, workers {workers}",
            "",
            Asked::Of(|row| {
                let count = |name| row.count(PER_31, name);
                Some(count("reclaim_stalls")? / (count("operations")? / 1000.0))
            }),
            1.0,
        ),
    ],
    run,
    child: Some(|task| child::serve(task, run_task)),
};

/// Creates a target for the ratio of shootdowns per evicted page.
const fn shootdowns_at_most([over, under]: [&'static str; 2], target: f64) -> Target {
    let name = "shootdowns per evicted page, {over} / {under}, {pattern}, workers {workers}";
    at_most(name, "", Asked::Pair(over, under, shootdowns), target)
}

/// Returns the ratio of shootdowns per evicted page, where several workers run: a single thread
/// interrupts no other CPU.
fn shootdowns(row: &Row, over: &str, under: &str) -> Option<f64> {
    let per_page = |series| {
        let count = |name| row.count(series, name);
        let pages = count("pages_evicted").filter(|pages| *pages > 0.0)?;
        Some(count("tlb_shootdowns")? / pages)
    };
    let under = per_page(under).filter(|under| *under > 0.0)?;
    let is_several = row.case.text("workers") != "1";
    is_several.then_some(per_page(over)? / under)
}

/// The parameters of one run, as the envelope shows them.
#[derive(Debug, Serialize)]
pub(crate) struct Parameters {
    #[serde(flatten)]
    sizes: Sizes,
    /// Numbers of workers.
    workers: Vec<usize>,
    #[serde(flatten)]
    times: Times,
}

fn parameters(config: &Config) -> Result<Parameters> {
    let memory_bytes = config.of_set([4 << 20, 32 << 20, 256 << 20]);
    let parameters = Parameters {
        sizes: Sizes::choose(4, config, memory_bytes)?,
        workers: config.threads_or_default()?,
        times: config.times([(0.5, 1), (6.0, 1), (320.0, 3)]),
    };
    let workers = parameters.workers.iter().copied().max().unwrap_or(0) as u64;
    if parameters.sizes.pages() < workers {
        return Err(Error::Refused("--size: at least a page for each of --threads".into()));
    }
    Ok(parameters)
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
    let (sizes, children, workspace) = (parameters.sizes, run.children, run.workspace);
    // Dropped from the last to the first: the group, then the swap.
    let create = || {
        let swap = SwapFile::activate(workspace, sizes.swap_bytes())?;
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
    let all = of_kernel.chain(CACHES.map(|(series, _)| series)).chain([UNCACHED]);
    let all: Vec<&str> = all.filter(|series| run.config.target.measures(series)).collect();
    run.start("try every series", all.len() as u64);
    let mut can_run = Vec::new();
    for series in all {
        run.step();
        let one_page = Load { size_bytes: PAGE_BYTES as u64, workers: 1, window: Duration::ZERO };
        can_run.extend(run.attempt(&[series], ask(series, one_page))?.map(|_| series));
    }
    let mut rows = run.rows();
    for &workers in &parameters.workers {
        ORDERS.into_iter().for_each(|(_, pattern)| rows.row(case(workers, pattern), UNIT));
        for &series in &can_run {
            rows.series_of_rows(series, ORDERS.len(), move |window| {
                ask(series, Load { size_bytes: sizes.size_bytes, workers, window })
            });
        }
    }
    let rounds = parameters.times.shared(rows.weight() * ORDERS.len() as u32);
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

fn case(workers: usize, pattern: &'static str) -> Case {
    Case::new().with("workers", workers).with("pattern", pattern)
}

/// Runs the child's side. Returns the window of each order.
fn run_task(task: &Task) -> Result<Vec<Measured>> {
    task.group.as_ref().map_or(Ok(()), Membership::join)?;
    match task.series.as_str() {
        SWAP => swap(&task.load),
        MMAP => map_file(task),
        UNCACHED => uncached(task),
        _ => cache(task),
    }
}

fn swap(load: &Load) -> Result<Vec<Measured>> {
    let mapping = Mapping::anonymous(load.size_bytes)?;
    mapping.advise(Advice::NoHugePage)?;
    let team = Team::new(SWAP, load, || Ok(mapping.span()))?;
    team.fill()?;
    measure(&team, load, |order| mapping.advise(hint(order)), || counters::reclaim("pswpout"))
}

fn map_file(task: &Task) -> Result<Vec<Measured>> {
    let file = make_file(task, |path| {
        let file = File::options().read(true).write(true).open(path);
        file.map_err(Error::system(format!("open {}", path.display())))
    })?;
    let mapping = Mapping::of_file(&file, true)?;
    let team = Team::new(MMAP, &task.load, || Ok(mapping.span()))?;
    let counters = || counters::reclaim("nr_written");
    measure(&team, &task.load, |order| mapping.advise(hint(order)), counters)
}

/// Returns the advice to the kernel before a window: it detects a sequential order by itself, and
/// reads too far ahead in a random one.
fn hint(order: Order) -> Advice {
    if order == Order::Random { Advice::Random } else { Advice::Normal }
}

fn cache(task: &Task) -> Result<Vec<Measured>> {
    let known = CACHES.into_iter().find(|(series, _)| *series == task.series);
    let (series, batch_folios) =
        known.ok_or_else(|| Error::Child(format!("no series is called {}", task.series)))?;
    let builder = Cache::builder().memory(task.memory_bytes).swap_directory(&task.directory);
    let builder = builder.unmap_batch_folios(batch_folios);
    let file = MappedFile::in_memory(builder, task.load.size_bytes)?;
    let team = Team::new(series, &task.load, || Ok(file.span()))?;
    team.fill()?;
    let announce = |order| {
        let is_random = order == Order::Random;
        file.file().set_access(if is_random { Access::Random } else { Access::Normal });
        Ok(())
    };
    measure(&team, &task.load, announce, || Ok(file.counts()))
}

fn uncached(task: &Task) -> Result<Vec<Measured>> {
    let file = make_file(task, |path| {
        direct::drop_page_cache(path)?;
        direct::open(path, true)
    })?;
    let team = Team::new(UNCACHED, &task.load, || Ok(Uncached::new(&file)))?;
    measure(&team, &task.load, |_| Ok(()), || Ok(Vec::new()))
}

/// Creates a file that holds version 0 of the pattern. It is unlinked once it is open, so that its
/// blocks are freed with this process in any case.
fn make_file(task: &Task, open: impl FnOnce(&Path) -> Result<File>) -> Result<File> {
    let path = task.directory.join("mapped");
    pattern::make_file(&path, task.load.size_bytes, &mut Silent)?;
    let file = open(&path);
    std::fs::remove_file(&path).map_err(Error::system("remove a file that is open"))?;
    file
}

/// Measures every order, then compares every page in order; `announce` is called before each.
fn measure<P: Pages>(
    team: &Team<P>,
    load: &Load,
    announce: impl Fn(Order) -> Result<()>,
    counters: impl Fn() -> Result<Counters>,
) -> Result<Vec<Measured>> {
    let all = || -> Result<Counters> { Ok([counters::interrupts()?, counters()?].concat()) };
    let mut windows = Vec::new();
    for (order, _) in ORDERS {
        announce(order)?;
        let before = all()?;
        let mut measured = team.measure(order, load.window)?;
        measured.add_since(&before, &all()?, Per::Run);
        windows.push(measured);
    }
    announce(Order::Sequential)?;
    windows[ORDERS.len() - 1].verified_bytes += team.verify()?;
    let peak_bytes = counters::resident_bytes("VmHWM")? as f64;
    windows.iter_mut().for_each(|window| window.add("peak_bytes", peak_bytes, Per::Peak));
    Ok(windows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shootdowns_are_compared_a_page_between_several_workers() {
        let row = |workers| {
            let mut row = Row::new(case(workers, "random"), "bogo ops/s");
            for (series, shootdowns) in [(PER_FOLIO, 900.0), (PER_31, 30.0)] {
                let counts = row.counts.entry(series.into()).or_default();
                counts.insert("tlb_shootdowns".into(), shootdowns);
                counts.insert("pages_evicted".into(), 1000.0);
            }
            row
        };
        let value = shootdowns(&row(2), PER_31, PER_FOLIO).unwrap();
        assert!((value - 30.0 / 900.0).abs() < 1e-9);
        assert_eq!(shootdowns(&row(1), PER_31, PER_FOLIO), None);
        assert_eq!(shootdowns(&row(2), PER_31, SWAP), None, "not counted");
    }
}

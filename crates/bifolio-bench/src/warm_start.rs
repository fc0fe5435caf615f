//! `warm-start`: lookups in a B-tree after a restart, with and without a list of hot pages.
//!
//! A lookup reads the root, an inner page and a leaf; the leaves, Zipf's law, are four times the
//! bound. `before` has a cache that has served lookups for long; it saves the list. `restored` is a
//! new process that starts to restore it (`Cache::restore_hot`) and serves at once; `cold`, one
//! that restores nothing. Each trial is cut into windows of equal length, one row each.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bifolio::{Cache, File, OpenOptions};
use bifolio_report::{Case, Skipped};
use serde::{Deserialize, Serialize};

use crate::definition::{Asked, Definition, Parameters, at_least};
use crate::error::{Error, Result};
use crate::format_bytes;
use crate::harness::access::{Access, PAGE_BYTES, Pattern};
use crate::harness::child;
use crate::harness::direct::{self, Page};
use crate::harness::measured::{Measured, Per};
use crate::harness::pattern::Checker;
use crate::harness::sizes::{SizeRule, Sizes};
use crate::harness::threads::run_together;
use crate::run::Run;

const BEFORE: &str = "before";
const RESTORED: &str = "restored";
const COLD: &str = "cold";

/// Ratio of the file and the bound.
const FILE_FACTOR: u64 = 4;
/// Windows of a trial.
const WINDOWS: usize = 5;
/// Leaves below an inner page.
const FANOUT: u64 = 256;
/// Lookups before the list is saved, for each page of the bound.
const WARMING_FACTOR: u64 = 8;
const WARMING_THREADS: usize = 16;
const SEED: u64 = 11;

pub(crate) static WARM_START: Definition = Definition {
    name: "warm-start",
    description: "lookups in a B-tree of 4 times the memory after a restart, with and without a \
                  list of hot pages",
    sizes: SizeRule::Larger { factor: FILE_FACTOR, memory_bytes: [4 << 20, 64 << 20, 512 << 20] },
    times: [(0.6, 1), (15.0, 1), (180.0, 3)],
    needs: |parameters| parameters.sizes.needs_of_groups(),
    ratios: &[(RESTORED, BEFORE), (COLD, BEFORE), (RESTORED, COLD)],
    shown_counts: &["hits_percent", "restored_mib"],
    targets: &[at_least("window=1", Asked::Ratio(RESTORED, BEFORE), 0.8)],
    run,
    child: Some(|task| child::serve(task, serve)),
};

/// A process with a new cache, for a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    series: String,
    file: PathBuf,
    list: PathBuf,
    sizes: Sizes,
    threads: usize,
    window: Duration,
}

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    if !run.config.target.measures(BEFORE) {
        let reason = "the kernel saves no list of hot pages".to_owned();
        run.report.skipped.push(Skipped { series: "*".into(), reason });
        return Ok(());
    }
    let sizes = parameters.sizes;
    let file = run.make_file("file", sizes.size_bytes)?;
    let list = file.with_file_name("hot");
    let (children, threads) = (run.children, parameters.threads_max());
    let (file, list) = (&file, &list);
    let ask = &|series: &str, window: Duration| -> Result<Vec<Measured>> {
        direct::drop_page_cache(file)?;
        let (series, file, list) = (series.to_owned(), file.clone(), list.clone());
        children.ask(&Task { series, file, list, sizes, threads, window })
    };
    // The list of the first trial, whichever series that is of.
    run.start("warm a cache", 1);
    ask(BEFORE, Duration::ZERO)?;
    run.step();
    let mut rows = run.rows();
    for window in 1..=WINDOWS {
        let case = Case::new().with("window", window).with("threads", threads);
        rows.row(case, ("lookups/s", Measured::rate));
    }
    for series in [BEFORE, RESTORED, COLD] {
        rows.series_of_rows(series, WINDOWS, move |trial| ask(series, trial / WINDOWS as u32));
    }
    let rounds = parameters.shared(rows.trials());
    let window = rounds.trial.as_secs_f64() / WINDOWS as f64;
    let length = format_bytes(std::fs::metadata(list).map_or(0, |found| found.len()));
    run.note(format!("a window has {window:.2} s; the list of hot pages has {length}"));
    run.note("before: warm; restored and cold: from the first lookup of a new process on");
    run.measure("measure", rows, rounds)
}

/// Runs a process from its start to the end of the last window.
fn serve(task: &Task) -> Result<Vec<Measured>> {
    let cache = Cache::builder().memory(task.sizes.memory_bytes).build()?;
    let file = cache.open(&task.file, &OpenOptions::new())?;
    file.set_access(bifolio::Access::Random);
    // Numbers of draws that no other process uses.
    let draws = AtomicU64::new(fastrand::u64(..1 << 62));
    if task.series == BEFORE {
        let lookups = WARMING_FACTOR * task.sizes.memory_pages() / WARMING_THREADS as u64;
        run_together(
            WARMING_THREADS,
            |_| Ok(()),
            |()| {
                let mut tree = Tree::new(&file, task);
                (0..lookups).try_for_each(|_| tree.look_up(draws.fetch_add(1, Ordering::Relaxed)))
            },
        )?;
        cache.save_hot(&task.list)?;
    }
    let begun = Instant::now();
    let restore = (task.series == RESTORED).then(|| cache.restore_hot(&task.list)).transpose()?;
    let mut windows = Vec::new();
    for number in 1..=WINDOWS as u32 {
        let (end, before) = (task.window * number, cache.stats());
        let start = begun.elapsed();
        let done = run_together(
            task.threads,
            |_| Ok(()),
            |()| {
                let (mut tree, mut lookups) = (Tree::new(&file, task), 0);
                while lookups == 0 || begun.elapsed() < end {
                    // Relaxed: a number of a draw.
                    tree.look_up(draws.fetch_add(1, Ordering::Relaxed))?;
                    lookups += 1;
                }
                Ok((lookups, tree.checker.finish()?))
            },
        )?;
        let lookups: u64 = done.iter().map(|(lookups, _)| lookups).sum();
        let seconds = (begun.elapsed() - start).as_secs_f64();
        let mut measured = Measured::of_rate(lookups, lookups as f64 / seconds);
        measured.verified_bytes = done.iter().map(|(_, bytes)| bytes).sum();
        let ratio = cache.stats().since(&before).hit_ratio().unwrap_or(0.0);
        measured.add("hits_percent", 100.0 * ratio, Per::Trial);
        if let Some(restore) = &restore {
            let progress = restore.progress();
            measured.add("restored_mib", progress.read_bytes as f64 / (1 << 20) as f64, Per::Trial);
        }
        windows.push(measured);
    }
    Ok(windows)
}

/// A tree whose pages are those of a file.
struct Tree<'t> {
    file: &'t File,
    access: Access,
    page: Box<Page>,
    checker: Checker,
}

impl<'t> Tree<'t> {
    fn new(file: &'t File, task: &Task) -> Self {
        let access = Access::new(Pattern::Zipf, task.sizes.size_bytes, SEED);
        let series = [BEFORE, RESTORED, COLD].into_iter().find(|it| *it == task.series);
        let checker = Checker::new(series.unwrap_or(COLD));
        Self { file, access, page: Page::zeroed(), checker }
    }

    /// Reads the pages on the way to the leaf of a draw.
    fn look_up(&mut self, draw: u64) -> Result<()> {
        let leaf = self.access.pos_bytes(draw);
        let inner = leaf / PAGE_BYTES as u64 / FANOUT * PAGE_BYTES as u64;
        for position in [0, inner, leaf] {
            self.file.read_exact_at(&mut self.page.0, position).map_err(Error::from)?;
        }
        self.checker.add(&self.page.0, leaf)
    }
}

//! The kinds of memory within a bound: the kernel's, a cache's, or none. Each is measured in a
//! child process.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bifolio::{Access, Cache};
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::pages::{Pages, Uncached};
use super::work::{Load, Order, Team};
use crate::error::{Error, Result};
use crate::harness::kernel_reclaim::{self, Written};
use crate::harness::mapped_file::MappedFile;
use crate::harness::mapping::{Hint, Mapping};
use crate::harness::memory_group::Membership;
use crate::harness::meter::Measured;
use crate::harness::sizes::Sizes;
use crate::harness::{direct, interrupts, pattern, resident};
use crate::progress::Silent;

/// The series of the kernel and of no cache; those of caches are in [`CACHES`].
pub(super) const KERNEL_SWAP: &str = "kernel_swap";
pub(super) const KERNEL_MMAP: &str = "kernel_mmap";
pub(super) const UNCACHED: &str = "raw_direct";

/// Series of caches with targets.
pub(super) const PER_FOLIO: &str = "flush_per_folio";
pub(super) const PER_31: &str = "flush_per_batch_31";
pub(super) const PER_128: &str = "flush_per_batch_128";

/// A series of a cache, and the number of folios that it unmaps with one flush.
pub(super) type CacheSeries = (&'static str, usize);

/// In the order of the tables.
pub(super) const CACHES: [CacheSeries; 5] = [
    (PER_FOLIO, 1),
    ("flush_per_batch_8", 8),
    (PER_31, 31),
    (PER_128, 128),
    ("flush_per_batch_512", 512),
];

/// The task of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) memory_kind: MemoryKind,
    pub(super) sizes: Sizes,
    pub(super) load: Load,
}

/// The kind of memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum MemoryKind {
    /// Anonymous memory of a process in this control group.
    Swap { group: Membership },
    /// A file to be created in this directory, mapped by a process in this control group.
    Mmap { group: Membership, directory: PathBuf },
    /// A memory file of a cache that swaps out into this directory.
    Cache { series: String, batch_folios: usize, directory: PathBuf },
    /// No cache: a file to be created in this directory, read and written page by page.
    Uncached { directory: PathBuf },
}

/// The result of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    /// By order.
    pub(super) done: Vec<Done>,
    /// Bytes verified at the end; those of the windows are counted with them.
    pub(super) verified_bytes: u64,
    pub(super) peak_bytes: u64,
}

/// The result of a window.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Done {
    pub(super) measured: Measured,
    pub(super) counts: IndexMap<String, u64>,
}

/// Counters that only grow, always the same ones in the same order.
type Counters = Vec<(&'static str, u64)>;

/// Runs the child's side.
pub(super) fn run(task: &Task) -> Result<Answer> {
    match &task.memory_kind {
        MemoryKind::Swap { group } => swap(task, group),
        MemoryKind::Mmap { group, directory } => map_file(task, group, directory),
        MemoryKind::Cache { series, batch_folios, directory } => {
            cache(task, series, *batch_folios, directory)
        }
        MemoryKind::Uncached { directory } => uncached(task, directory),
    }
}

fn swap(task: &Task, group: &Membership) -> Result<Answer> {
    group.join()?;
    let mapping = Arc::new(Mapping::anonymous(len_bytes(task)?)?);
    mapping.advise(Hint::SmallPages)?;
    let team = Team::new(KERNEL_SWAP, &task.load, || Ok(mapping.span()))?;
    team.fill()?;
    let counters = || kernel_reclaim::counts(Written::ToSwap);
    measure(&team, &task.load, |order| mapping.advise(hint(order)), counters)
}

fn map_file(task: &Task, group: &Membership, directory: &Path) -> Result<Answer> {
    group.join()?;
    let open = |path: &Path| {
        let file = File::options().read(true).write(true).open(path);
        file.map_err(Error::system(format!("open {}", path.display())))
    };
    let file = make_file(task, directory, open)?;
    let mapping = Arc::new(Mapping::of_file(&file, true)?);
    let team = Team::new(KERNEL_MMAP, &task.load, || Ok(mapping.span()))?;
    let counters = || kernel_reclaim::counts(Written::ToFiles);
    measure(&team, &task.load, |order| mapping.advise(hint(order)), counters)
}

/// Returns the advice to the kernel before a window: it detects a sequential order by itself, and
/// reads too far ahead in a random one.
fn hint(order: Order) -> Hint {
    match order {
        Order::Sequential => Hint::AnyOrder,
        Order::Random => Hint::Random,
    }
}

fn cache(task: &Task, series: &str, batch_folios: usize, directory: &Path) -> Result<Answer> {
    let builder = Cache::builder().memory(task.sizes.memory_bytes).swap_directory(directory);
    let builder = builder.unmap_batch_folios(batch_folios);
    let file = MappedFile::in_memory(builder, task.load.size_bytes)?;
    let known = CACHES.iter().map(|(known, _)| *known).find(|known| *known == series);
    let team = Team::new(known.unwrap_or("cache"), &task.load, || Ok(file.span()))?;
    team.fill()?;
    let access = |order| match order {
        Order::Sequential => Access::Normal,
        Order::Random => Access::Random,
    };
    let prepare = |order| {
        file.set_access(access(order));
        Ok(())
    };
    measure(&team, &task.load, prepare, || Ok(file.counts()))
}

fn uncached(task: &Task, directory: &Path) -> Result<Answer> {
    let file = make_file(task, directory, |path| {
        direct::drop_page_cache(path)?;
        direct::open(path, true)
    })?;
    let team = Team::new(UNCACHED, &task.load, || Ok(Uncached::new(&file)))?;
    measure(&team, &task.load, |_| Ok(()), || Ok(Vec::new()))
}

/// Creates a file that holds version 0 of the pattern. It is unlinked once it is open, so that its
/// blocks are freed with this process in any case.
fn make_file(
    task: &Task,
    directory: &Path,
    open: impl FnOnce(&Path) -> Result<File>,
) -> Result<File> {
    let path = directory.join("mapped");
    pattern::make_file(&path, task.load.size_bytes, &mut Silent)?;
    let file = open(&path);
    std::fs::remove_file(&path).map_err(Error::system("remove a file that is open"))?;
    file
}

fn len_bytes(task: &Task) -> Result<usize> {
    usize::try_from(task.load.size_bytes)
        .map_err(|_| Error::Refused("--size is more than this machine can address".into()))
}

/// Measures every order, then compares every page in order; `announce` is called before each.
fn measure<P: Pages>(
    team: &Team<P>,
    load: &Load,
    announce: impl Fn(Order) -> Result<()>,
    counters: impl Fn() -> Result<Counters>,
) -> Result<Answer> {
    let mut done = Vec::new();
    for order in Order::ALL {
        announce(order)?;
        let before = [interrupts::counts()?, counters()?].concat();
        let measured = team.measure(order, load.window)?;
        let after = [interrupts::counts()?, counters()?].concat();
        let since = |((name, after), (_, before)): (&(&str, u64), &(&str, u64))| {
            ((*name).to_owned(), after.saturating_sub(*before))
        };
        done.push(Done { measured, counts: after.iter().zip(&before).map(since).collect() });
    }
    announce(Order::Sequential)?;
    let verified_bytes = team.verify()?;
    Ok(Answer { done, verified_bytes, peak_bytes: resident::peak_bytes()? })
}

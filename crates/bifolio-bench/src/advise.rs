//! `advise`: calls that give up a range (`DontNeed`), and when they make other CPUs drain their
//! LRU batches.
//!
//! A folio may stay for several reasons, only one of which a drain removes. Three caches have one
//! policy each: drain all CPUs if any folio stays (`drain_on_any_failure`, the kernel), if a batch
//! may hold one (`drain_when_it_can_help`, proposed for the kernel in 2026), or only those whose
//! batches hold a folio of the range (`targeted`, the default); and `posix_fadvise` (`kernel`).
//! Each call is prepared, timed by itself, and checked.
//!
//! - `mapped_stream`: a file that stays mapped, touched and given up chunk by chunk, while the
//!   other CPU keeps its LRU batch filled. Nothing can be evicted, and no drain changes that: the
//!   series differ in the time spent to find that out.
//! - `fallback`: one CPU writes pages one by one, another one syncs and gives them up. All folios
//!   are in the batch of the first CPU, and are evicted only if that batch is drained.

use std::cell::Cell;
use std::fs;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use bifolio::{Cache, DrainPolicy, Evicted, Kept, OpenOptions};
use bifolio_report::{Case, Skipped};
use parking_lot::Mutex;
use rustix::fs::{Advice, FallocateFlags, MemfdFlags, fadvise, fallocate, memfd_create};

use crate::benchmark::Needs;
use crate::definition::{Asked, Definition, Parameters, Target, at_least, at_most};
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::cached::Cached;
use crate::harness::measured::{Measured, Per, Unit};
use crate::harness::sizes::{SizeRule, resident_memory_bytes};
use crate::harness::span::{Mapping, Span};
use crate::harness::threads::{run_beside, run_on};
use crate::harness::{cpus, direct, pattern};
use crate::progress::Silent;
use crate::run::{Rounds, Run};

const ON_ANY_FAILURE: &str = "drain_on_any_failure";
const WHEN_IT_CAN_HELP: &str = "drain_when_it_can_help";
const TARGETED: &str = "targeted";
const KERNEL: &str = "kernel";

/// The series of caches, in the order of the tables.
const POLICIES: [(&str, DrainPolicy); 3] = [
    (ON_ANY_FAILURE, DrainPolicy::OnAnyFailure),
    (WHEN_IT_CAN_HELP, DrainPolicy::WhenItCanHelp),
    (TARGETED, DrainPolicy::Targeted),
];

const PAGE: u64 = PAGE_BYTES as u64;
/// Bytes of the stream per call, and its passes over the file per round.
const CHUNK_BYTES: u64 = 2 << 20;
const PASSES: u64 = 4;
/// Bytes written on one CPU and given up on another.
const FALLBACK_BYTES: u64 = 8 * PAGE;

/// Creates a target for the time of a call of the mapped stream.
const fn stream(over: &'static str, under: &'static str, target: f64) -> Target {
    at_most("workload=mapped_stream", Asked::Ratio(over, under), target)
}

pub(crate) static ADVISE: Definition = Definition {
    name: "advise",
    description: "advice to evict what cannot go, and what it drains, against posix_fadvise",
    // The file that stays mapped.
    sizes: SizeRule::Resident {
        size_bytes: [4 << 20, 128 << 20, 128 << 20],
        unit_bytes: CHUNK_BYTES,
        max_bytes: 16 << 30,
    },
    // Rounds of the mapped stream; more if there is time.
    times: [(0.0, 2), (0.0, 5), (0.0, 50)],
    // On disk the file; in memory three caches, and the file in the kernel's page cache.
    needs: |Parameters { sizes, .. }| Needs {
        disk_bytes: sizes.size_bytes + (1 << 20),
        memory_bytes: 3 * resident_memory_bytes(sizes.size_bytes) + sizes.size_bytes,
    },
    ratios: &[
        (WHEN_IT_CAN_HELP, ON_ANY_FAILURE),
        (TARGETED, ON_ANY_FAILURE),
        (WHEN_IT_CAN_HELP, KERNEL),
        (TARGETED, KERNEL),
    ],
    shown_counts: &[
        "p50_ns",
        "p99_ns",
        "rounds",
        "rounds_evicted",
        "rounds_exact",
        "drains_per_round",
        "cpus_drained_per_round",
        "remaining",
        "remaining_mapped",
    ],
    targets: &[
        // The workload itself: a drain finds folios.
        at_least(
            "workload=mapped_stream",
            Asked::Of("CPUs drained with each drain, drain_on_any_failure", |row| {
                let count = |name| row.count(ON_ANY_FAILURE, name);
                Some(count("cpus_drained_per_round")? / count("drains_per_round")?)
            }),
            0.5,
        ),
        at_most(
            "workload=mapped_stream",
            Asked::Of("drains per round, targeted", |row| row.count(TARGETED, "drains_per_round")),
            0.0,
        ),
        stream(TARGETED, ON_ANY_FAILURE, 0.75),
        stream(TARGETED, KERNEL, 0.2),
        at_least(
            "workload=fallback",
            Asked::Of("share of rounds that drain one CPU and evict everything", |row| {
                let count = |name| row.count(TARGETED, name);
                Some(count("rounds_exact")?.min(count("rounds_evicted")?) / count("rounds")?)
            }),
            1.0,
        ),
    ],
    run,
    child: None,
};

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let &[here, there, ..] = cpus::allowed().as_slice() else {
        let reason = "all of it is about batches of another CPU: needs 2 CPUs, there is 1";
        run.report.skipped.push(Skipped { series: "*".into(), reason: reason.into() });
        return Ok(());
    };
    let (cpus, directory) = ([here, there], run.workspace.path());
    let file = run.make_file("file", parameters.sizes.size_bytes)?;
    measure(
        run,
        ("mapped_stream", parameters.rounds()),
        |name, policy| Stream::of_cache(name, policy, &file, directory),
        || Stream::of_kernel(&file),
        |stream| run_beside(cpus, || stream.calls(), || stream.filler.lock().step()),
    )?;
    let path = |name| directory.join(format!("fallback-{name}"));
    let rounds = Rounds::within(parameters.timed_seconds, parameters.set.of([10, 10, 100]));
    measure(
        run,
        ("fallback", rounds),
        |name, policy| Fallback::of_cache(name, policy, path(name)),
        || Fallback::of_kernel(path(KERNEL)),
        |fallback| fallback.round(cpus),
    )?;
    run.note(
        "remaining: pages in memory after a call; with a reason: folios that the call said stay, \
         for it",
    );
    Ok(())
}

/// Creates every series of a workload that can run, of each policy and of the kernel, and measures
/// rounds of all of them.
fn measure<T>(
    run: &mut Run<'_>,
    (workload, rounds): (&'static str, Rounds),
    of_cache: impl Fn(&'static str, DrainPolicy) -> Result<T>,
    of_kernel: impl FnOnce() -> Result<T>,
    round: impl Fn(&T) -> Result<Round>,
) -> Result<()> {
    const NS_PER_CALL: Unit = ("ns/call", Measured::median_ns);
    run.start(&format!("prepare {workload}"), 1);
    let mut series = Vec::new();
    for (name, policy) in POLICIES {
        series.extend(run.attempt(&[name], of_cache(name, policy))?.map(|it| (name, it)));
    }
    series.extend(run.attempt(&[KERNEL], of_kernel())?.map(|it| (KERNEL, it)));
    run.step();
    let mut rows = run.rows();
    rows.row(Case::new().with("workload", workload), NS_PER_CALL);
    for (name, subject) in &series {
        let round = &round;
        rows.series(name, move |_| Ok(round(subject)?.measured()));
    }
    run.measure(&format!("measure {workload}"), rows, rounds)
}

/// A file of a cache, or of the kernel.
enum AnyFile {
    Cache(bifolio::File),
    Kernel(fs::File),
}

impl AnyFile {
    fn evict(&self, range: Range<u64>) -> Result<Option<Evicted>> {
        match self {
            Self::Cache(file) => Ok(Some(file.evict(range)?)),
            Self::Kernel(file) => {
                let len_bytes = NonZeroU64::new(range.end - range.start);
                fadvise(file, range.start, len_bytes, Advice::DontNeed)
                    .map_err(Error::system("advise the kernel that a range is not needed"))?;
                Ok(None)
            }
        }
    }

    fn write(&self, page: &[u8; PAGE_BYTES], pos_bytes: u64) -> Result<()> {
        match self {
            Self::Cache(file) => Ok(file.write_all_at(page, pos_bytes)?),
            Self::Kernel(file) => {
                file.write_all_at(page, pos_bytes).map_err(Error::system("write a page"))
            }
        }
    }

    fn sync(&self) -> Result<()> {
        match self {
            Self::Cache(file) => Ok(file.sync_data()?),
            Self::Kernel(file) => file.sync_data().map_err(Error::system("sync a file")),
        }
    }

    fn punch_hole(&self, range: Range<u64>) -> Result<()> {
        match self {
            Self::Cache(file) => Ok(file.punch_hole(range)?),
            Self::Kernel(file) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(file, flags, range.start, range.end - range.start)
                    .map_err(Error::system("punch a hole into memory"))
            }
        }
    }

    /// Returns the number of pages of the file in memory.
    fn resident_pages(&self) -> Result<u64> {
        match self {
            Self::Cache(file) => Ok(file.residency(0..file.len())?.resident),
            Self::Kernel(file) => Mapping::of_file(file, false)?.resident_pages(),
        }
    }
}

/// Opens `path` in the kernel for reading and writing, without touching it.
fn open_in_kernel(path: &Path) -> Result<fs::File> {
    direct::drop_page_cache(path)?;
    let file = fs::File::options().read(true).write(true).open(path);
    file.map_err(Error::system(format!("open {}", path.display())))
}

/// The load of the other CPU: it keeps its LRU batch filled. It allocates new pages of a memory
/// file one after the other, each of which is added to the batch, without disk I/O. The pages are
/// punched again, a few at a time. For a cache it is a file of the same cache, for the kernel a
/// file in memory as well.
struct Filler {
    file: AnyFile,
    page: u64,
}

impl Filler {
    /// Length of the file, and the number of pages that is punched together: the fewer, the sooner
    /// a new page is in the batch.
    const RING_PAGES: u64 = 256;
    const RUN_PAGES: u64 = 16;

    /// Allocates a page in a hole.
    fn step(&mut self) -> Result<()> {
        let pos_bytes = self.page * PAGE;
        if self.page.is_multiple_of(Self::RUN_PAGES) {
            self.file.punch_hole(pos_bytes..pos_bytes + Self::RUN_PAGES * PAGE)?;
        }
        self.file.write(&[1; PAGE_BYTES], pos_bytes)?;
        self.page = (self.page + 1) % Self::RING_PAGES;
        Ok(())
    }
}

/// One round of one series.
#[derive(Debug, Default)]
struct Round {
    measured: Measured,
    /// Sum over all calls; `None` for the kernel, which reports nothing.
    outcome: Option<Evicted>,
    /// Pages of the range of a call that are in memory at the end.
    remaining: f64,
    /// Drains that are right, each of one CPU.
    drains_expected: u64,
}

impl Round {
    /// Gives up `range` of `file`, and measures the time.
    fn evict(&mut self, file: &AnyFile, range: Range<u64>) -> Result<()> {
        let begin = Instant::now();
        let outcome = file.evict(range)?;
        self.measured.calls.latencies.add(begin.elapsed());
        if let Some(outcome) = outcome {
            *self.outcome.get_or_insert_default() += outcome;
        }
        Ok(())
    }

    fn measured(self) -> Measured {
        let mut measured = self.measured;
        let calls = measured.calls.latencies.calls() as f64;
        let flag = |flag| f64::from(u8::from(flag));
        measured.add("rounds", 1.0, Per::Run);
        measured.add("rounds_evicted", flag(self.remaining == 0.0), Per::Run);
        measured.add("remaining", self.remaining, Per::Trial);
        if let Some(outcome) = self.outcome {
            let (drains, cpus) = (outcome.drains_requested, outcome.cpus_drained);
            let is_exact = (drains, cpus) == (self.drains_expected, self.drains_expected);
            measured.add("drains_per_round", drains as f64, Per::Trial);
            measured.add("cpus_drained_per_round", cpus as f64, Per::Trial);
            measured.add("rounds_exact", flag(is_exact), Per::Run);
            for (reason, folios) in by_reason(&outcome.kept) {
                measured.add(format!("remaining_{reason}"), folios as f64 / calls, Per::Trial);
            }
        }
        measured
    }
}

/// Returns the folios that were kept, by reason.
fn by_reason(kept: &Kept) -> [(&'static str, u64); 8] {
    [
        ("straddling", kept.straddling),
        ("gone", kept.gone),
        ("locked", kept.locked),
        ("writeback", kept.writeback),
        ("private", kept.private),
        ("dirty", kept.dirty),
        ("mapped", kept.mapped),
        ("referenced", kept.referenced),
    ]
}

/// A series of the mapped stream.
struct Stream {
    name: &'static str,
    words: Span,
    file: AnyFile,
    filler: Mutex<Filler>,
}

impl Stream {
    fn of_cache(
        name: &'static str,
        policy: DrainPolicy,
        path: &Path,
        directory: &Path,
    ) -> Result<Self> {
        let size_bytes = fs::metadata(path).map_err(Error::system("ask for a size"))?.len();
        let builder = Cache::builder().memory(resident_memory_bytes(size_bytes));
        // Without a swap pages of memory files cannot be evicted, and come into no batch.
        let builder = builder.drain_policy(policy).swap_directory(directory);
        let cached = Cached::open(builder, path, &OpenOptions::new().mappable(true))?;
        let words = cached.map()?;
        let beside = cached.cache.memory_file("beside")?;
        beside.set_len(Filler::RING_PAGES * PAGE)?;
        let filler = Mutex::new(Filler { file: AnyFile::Cache(beside), page: 0 });
        Ok(Self { name, words, file: AnyFile::Cache(cached.file), filler })
    }

    /// Opens the file with the smallest folios, as in the cache, read without readahead: with
    /// folios as large as a chunk the kernel would examine nothing. They are mapped by the touches
    /// that follow.
    fn of_kernel(path: &Path) -> Result<Self> {
        let file = open_in_kernel(path)?;
        fadvise(&file, 0, None, Advice::Random).map_err(Error::system("advise the kernel"))?;
        let mapping = Mapping::of_file(&file, false)?;
        for hint in [memmap2::Advice::Random, memmap2::Advice::NoHugePage] {
            // Advice only: a kernel without huge pages has no way to refuse them.
            let _ = mapping.advise(hint);
        }
        let failed = || Error::system("make a file in memory");
        let beside = memfd_create("bifolio-bench", MemfdFlags::CLOEXEC);
        let beside = fs::File::from(beside.map_err(|errno| failed()(errno.into()))?);
        beside.set_len(Filler::RING_PAGES * PAGE).map_err(failed())?;
        let filler = Mutex::new(Filler { file: AnyFile::Kernel(beside), page: 0 });
        let file = AnyFile::Kernel(file);
        let stream = Self { name: KERNEL, words: mapping.span, file, filler };
        stream.touch(0..stream.words.len_bytes())?;
        Ok(stream)
    }

    fn calls(&self) -> Result<Round> {
        let mut round = Round::default();
        for _ in 0..PASSES {
            for start in (0..self.words.len_bytes()).step_by(CHUNK_BYTES as usize) {
                let chunk = start..start + CHUNK_BYTES;
                round.measured.verified_bytes += self.touch(chunk.clone())?;
                round.evict(&self.file, chunk)?;
            }
        }
        let chunks = self.words.len_bytes() / CHUNK_BYTES;
        round.remaining = self.file.resident_pages()? as f64 / chunks as f64;
        Ok(round)
    }

    /// Loads the first word of every page. Returns the number of bytes.
    fn touch(&self, range: Range<u64>) -> Result<u64> {
        let mut verified_bytes = 0;
        for pos_bytes in range.step_by(PAGE_BYTES) {
            if self.words.load(pos_bytes) != pattern::word_at(pos_bytes, 0) {
                return Err(Error::WrongBytes { series: self.name.to_owned(), pos_bytes });
            }
            verified_bytes += size_of::<u64>() as u64;
        }
        Ok(verified_bytes)
    }
}

/// A series of the fallback.
struct Fallback {
    name: &'static str,
    path: PathBuf,
    file: AnyFile,
    version: Cell<u32>,
}

impl Fallback {
    fn of_cache(name: &'static str, policy: DrainPolicy, path: PathBuf) -> Result<Self> {
        pattern::make_file(&path, FALLBACK_BYTES, &mut Silent)?;
        direct::drop_page_cache(&path)?;
        let builder = Cache::builder().memory(8 << 20).drain_policy(policy).readahead_max(0);
        let cached = Cached::open(builder, &path, &OpenOptions::new().read(true).write(true))?;
        Ok(Self { name, path, file: AnyFile::Cache(cached.file), version: Cell::new(0) })
    }

    fn of_kernel(path: PathBuf) -> Result<Self> {
        pattern::make_file(&path, FALLBACK_BYTES, &mut Silent)?;
        let file = AnyFile::Kernel(open_in_kernel(&path)?);
        Ok(Self { name: KERNEL, path, file, version: Cell::new(0) })
    }

    fn round(&self, [writer, adviser]: [usize; 2]) -> Result<Round> {
        let version = self.version.get() + 1;
        self.version.set(version);
        let file = &self.file;
        // Page by page: for larger writes the kernel would create large folios, which never wait
        // in a batch.
        run_on(writer, || {
            let mut page = [0; PAGE_BYTES];
            (0..FALLBACK_BYTES).step_by(PAGE_BYTES).try_for_each(|pos_bytes| {
                pattern::fill(&mut page, pos_bytes, version);
                file.write(&page, pos_bytes)
            })
        })?;
        let mut round = run_on(adviser, || {
            let mut round = Round { drains_expected: 1, ..Round::default() };
            file.sync()?;
            round.evict(file, 0..FALLBACK_BYTES)?;
            Ok(round)
        })?;
        round.remaining = file.resident_pages()? as f64;
        // The bytes of the disk, through the kernel, which then drops them from its cache.
        let read = fs::read(&self.path);
        let bytes = read.map_err(Error::system(format!("read {}", self.path.display())))?;
        direct::drop_page_cache(&self.path)?;
        if bytes.len() as u64 != FALLBACK_BYTES || !pattern::matches(&bytes, 0, version) {
            return Err(Error::WrongBytes { series: self.name.to_owned(), pos_bytes: 0 });
        }
        round.measured.verified_bytes = FALLBACK_BYTES;
        Ok(round)
    }
}

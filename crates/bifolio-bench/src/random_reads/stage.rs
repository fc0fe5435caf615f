//! One pattern over one file, with everything its series need: a warm cache, a control group with a
//! warm page cache, and the device itself.
//!
//! Created once for each pattern, so that pages kept by one pattern are not hits of the other.

use std::path::PathBuf;
use std::time::Duration;

use bifolio::Cache;

use super::NAME;
use super::batched::{Shape, read_many, read_raw};
use super::kernel::{Task, Way};
use super::one_by_one::{Direct, Load, ReadAt, read_pages};
use super::parameters::{DEPTH, Parameters, WARMING_THREADS};
use super::plan::Step;
use crate::error::{Error, Result};
use crate::harness::access::{Access, Draws, Pattern};
use crate::harness::cached::Cached;
use crate::harness::memory_group::MemoryGroup;
use crate::harness::meter::Measured;
use crate::harness::{child, direct};

const SEED: u64 = 3;

/// State that all stages of a run share.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) file: PathBuf,
    pub(crate) parameters: Parameters,
    pub(crate) tracepoint: Option<u64>,
    pub(crate) child_command: Vec<String>,
}

/// The kernel's side.
#[derive(Debug)]
struct Kernel {
    group: MemoryGroup,
    draws: Draws,
}

/// One pattern and its series.
#[derive(Debug)]
pub(crate) struct Stage<'a> {
    setting: &'a Setting,
    pattern: Pattern,
    access: Access,
    raw_draws: Draws,
    cached: Cached,
    cached_draws: Draws,
    kernel: Option<Kernel>,
}

impl<'a> Stage<'a> {
    /// Creates a stage; nothing is warm yet.
    pub(crate) fn new(setting: &'a Setting, pattern: Pattern) -> Result<Self> {
        direct::drop_page_cache(&setting.file)?;
        let sizes = setting.parameters.sizes;
        let builder = Cache::builder().memory(sizes.memory_bytes).io_depth(usize::from(DEPTH));
        Ok(Self {
            setting,
            pattern,
            access: Access::new(pattern, sizes.size_bytes, SEED),
            raw_draws: Draws::default(),
            cached: Cached::open(builder, &setting.file, false)?,
            cached_draws: Draws::default(),
            kernel: None,
        })
    }

    /// Creates the control group for the kernel's series, and fills its page cache as [`warm`] does
    /// the cache. Returns the number of bytes verified.
    ///
    /// # Errors
    /// It is not possible; the message is the reason to skip them.
    ///
    /// [`warm`]: Self::warm
    pub(crate) fn add_kernel(&mut self) -> Result<u64> {
        let group = MemoryGroup::create(self.setting.parameters.sizes)?;
        self.kernel = Some(Kernel { group, draws: Draws::default() });
        let reads = self.warming_reads();
        let measured = self.kernel(Way::Pread, WARMING_THREADS, Duration::MAX, reads)?;
        Ok(measured.verified_bytes)
    }

    /// Fills the cache with the pattern, and beyond: the timed reads then also evict.
    pub(crate) fn warm(&self) -> Result<u64> {
        let reads = self.warming_reads();
        let load = self.load("read_at", &self.cached_draws, WARMING_THREADS, Duration::MAX, reads);
        Ok(read_pages(&load, || self.read_at_reader())?.verified_bytes)
    }

    fn warming_reads(&self) -> u64 {
        let bounds = if self.pattern == Pattern::Zipf { 4 } else { 2 };
        bounds * self.setting.parameters.sizes.memory_pages()
    }

    fn load<'b>(
        &'b self,
        series: &'static str,
        draws: &'b Draws,
        threads: usize,
        duration: Duration,
        reads: u64,
    ) -> Load<'b> {
        Load {
            series,
            access: &self.access,
            draws,
            threads,
            duration,
            draw_end: draws.taken().saturating_add(reads),
            tracepoint: self.setting.tracepoint,
        }
    }

    fn read_at_reader(&self) -> Result<ReadAt> {
        Ok(ReadAt(self.cached.file.clone()))
    }

    /// Runs one trial of one series.
    pub(crate) fn run(&self, step: Step, duration: Duration) -> Result<Measured> {
        match step {
            Step::RawPread { threads } => self.raw_pread(threads, duration),
            Step::ReadAt { threads } => self.read_at(threads, duration),
            Step::Kernel { way, threads } => self.kernel(way, threads, duration, u64::MAX),
            Step::RawRing { shape } => self.raw_ring(shape, duration),
            Step::ReadMany { requests_per_call } => self.read_many(requests_per_call, duration),
        }
    }

    /// `raw_direct` at depth 1: `pread` past the page cache.
    fn raw_pread(&self, threads: usize, duration: Duration) -> Result<Measured> {
        let load = self.load("raw_direct", &self.raw_draws, threads, duration, u64::MAX);
        read_pages(&load, || Direct::open(&self.setting.file))
    }

    /// `raw_direct` at the full depth: io_uring.
    fn raw_ring(&self, shape: Shape, duration: Duration) -> Result<Measured> {
        let load = self.load("raw_direct", &self.raw_draws, 1, duration, u64::MAX);
        let file = direct::open(&self.setting.file, false)?;
        read_raw(&load, &file, shape, DEPTH)
    }

    /// `read_at`.
    fn read_at(&self, threads: usize, duration: Duration) -> Result<Measured> {
        let load = self.load("read_at", &self.cached_draws, threads, duration, u64::MAX);
        self.with_stats(|| read_pages(&load, || self.read_at_reader()))
    }

    /// `read_many`.
    fn read_many(&self, requests: usize, duration: Duration) -> Result<Measured> {
        let load = self.load("read_many", &self.cached_draws, 1, duration, u64::MAX);
        self.with_stats(|| read_many(&load, &self.cached.file, requests))
    }

    /// Corrects the assumptions of a trial with the cache's counters.
    fn with_stats(&self, trial: impl FnOnce() -> Result<Measured>) -> Result<Measured> {
        let before = self.cached.stats();
        let mut measured = trial()?;
        let since = self.cached.since(&before);
        measured.misses = since.misses();
        measured.syscalls_known = since.syscalls_known();
        Ok(measured)
    }

    /// `kernel_pread` and `kernel_mmap`, in a child.
    fn kernel(&self, way: Way, threads: usize, duration: Duration, reads: u64) -> Result<Measured> {
        let Some(kernel) = &self.kernel else {
            return Err(Error::Refused("there is no control group".into()));
        };
        let draw_start = kernel.draws.taken();
        let task = Task {
            way,
            group: kernel.group.membership(),
            file: self.setting.file.clone(),
            size_bytes: self.setting.parameters.sizes.size_bytes,
            pattern: self.pattern,
            seed: SEED,
            threads,
            draw_start,
            draw_end: draw_start.saturating_add(reads),
            duration,
            tracepoint: self.setting.tracepoint,
        };
        let child_command = &self.setting.child_command;
        let measured: Measured = child::ask(child_command, NAME, &super::Task::Kernel(task))?;
        kernel.draws.skip(measured.operations);
        Ok(measured)
    }
}

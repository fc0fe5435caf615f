//! The fallback: one CPU writes pages one by one, another one syncs and gives them up. All folios
//! are in the batch of the first CPU, and are evicted only if that batch is drained.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

use bifolio::{Cache, DrainPolicy, File};

use super::advised::{Advised, KERNEL, KernelFile, POLICIES};
use super::parameters::{FALLBACK_BYTES, SMALL_MEMORY_BYTES};
use super::round::{Drains, Round};
use super::{Series, Stage};
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::cached::Cached;
use crate::harness::failures::skip_on_error;
use crate::harness::threads::run_on;
use crate::harness::{direct, pattern};
use crate::progress::Silent;
use bifolio_report::Report;

/// Returns every series that can run, each with its own file.
pub(super) fn series<'a>(stage: &Stage<'a>, report: &mut Report) -> Result<Vec<Series<'a>>> {
    let path = |name| stage.directory.join(format!("fallback-{name}"));
    let mut all: Vec<Series<'a>> = Vec::new();
    for (name, policy) in POLICIES {
        let fallback = Fallback::of_cache(name, policy, path(name));
        all.extend(skip_on_error(report, &[name], fallback)?.map(|it| it.series(stage)));
    }
    let fallback = Fallback::of_kernel(path(KERNEL));
    all.extend(skip_on_error(report, &[KERNEL], fallback)?.map(|it| it.series(stage)));
    Ok(all)
}

struct Fallback<A> {
    name: &'static str,
    path: PathBuf,
    file: A,
    version: Cell<u32>,
    _cache: Option<Cached>,
}

impl Fallback<File> {
    fn of_cache(name: &'static str, policy: DrainPolicy, path: PathBuf) -> Result<Self> {
        make_file(&path)?;
        let builder = Cache::builder().memory(SMALL_MEMORY_BYTES).drain_policy(policy);
        let cached = Cached::open(builder.readahead_max(0), &path, true)?;
        let file = cached.file.clone();
        Ok(Self { name, path, file, version: Cell::new(0), _cache: Some(cached) })
    }
}

impl Fallback<KernelFile> {
    fn of_kernel(path: PathBuf) -> Result<Self> {
        make_file(&path)?;
        let file = KernelFile::open(&path)?;
        Ok(Self { name: KERNEL, path, file, version: Cell::new(0), _cache: None })
    }
}

fn make_file(path: &Path) -> Result<()> {
    pattern::make_file(path, FALLBACK_BYTES, &mut Silent)?;
    direct::drop_page_cache(path)
}

impl<A: Advised> Fallback<A> {
    fn series<'a>(self, stage: &Stage<'a>) -> Series<'a>
    where
        Self: 'a,
    {
        let (name, cpus) = (self.name, stage.cpus);
        (name, Box::new(move || self.round(cpus)))
    }

    fn round(&self, [writer, adviser]: [usize; 2]) -> Result<Round> {
        let version = self.version.get() + 1;
        self.version.set(version);
        let file = &self.file;
        run_on(writer, || write(file, version))?;
        let mut round = run_on(adviser, || {
            let mut round = Round::default();
            file.sync()?;
            round.advise(file, 0..FALLBACK_BYTES)?;
            Ok(round)
        })?;
        round.resident_pages = file.resident_pages()?;
        round.exact = round.drained(Drains::ONE_OF_ONE_CPU);
        round.verified_bytes = self.verify(version)?;
        Ok(round)
    }

    /// Reads the bytes of the disk through the kernel, and drops them from its cache.
    fn verify(&self, version: u32) -> Result<u64> {
        let read = fs::read(&self.path);
        let bytes = read.map_err(Error::system(format!("read {}", self.path.display())))?;
        direct::drop_page_cache(&self.path)?;
        if bytes.len() as u64 != FALLBACK_BYTES || !pattern::matches_version(&bytes, 0, version) {
            return Err(Error::WrongBytes { series: self.name.to_owned(), pos_bytes: 0 });
        }
        Ok(FALLBACK_BYTES)
    }
}

/// Writes one page per call: for larger writes the kernel would create large folios, which never
/// wait in a batch.
fn write(file: &impl Advised, version: u32) -> Result<()> {
    let mut page = [0; PAGE_BYTES];
    for pos_bytes in (0..FALLBACK_BYTES).step_by(PAGE_BYTES) {
        pattern::fill_version(&mut page, pos_bytes, version);
        file.write_page(&page, pos_bytes)?;
    }
    Ok(())
}

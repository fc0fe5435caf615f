//! The mapped stream: a file that stays mapped, touched and given up chunk by chunk, while the
//! other CPU keeps its LRU batch filled.
//!
//! Nothing can be evicted, and no drain changes that: the series differ in the time spent to find
//! that out.

use std::path::Path;

use bifolio::{Cache, DrainPolicy, File};
use parking_lot::Mutex;
use rustix::fs::{Advice, fadvise};

use super::advised::{Advised, KERNEL, KernelFile, POLICIES};
use super::filler::{Filler, InMemory, kernel_file};
use super::parameters::Parameters;
use super::round::{Drains, Round};
use super::{Series, Stage};
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::failures::skip_on_error;
use crate::harness::mapped_file::MappedFile;
use crate::harness::mapping::Hint;
use crate::harness::span::Span;
use crate::harness::threads::run_beside;
use crate::harness::{direct, pattern, waits};
use bifolio_report::Report;

/// Returns every series that can run, over the file at `path`.
pub(super) fn series<'a>(
    stage: &Stage<'a>,
    path: &Path,
    report: &mut Report,
) -> Result<Vec<Series<'a>>> {
    let mut all: Vec<Series<'a>> = Vec::new();
    for (name, policy) in POLICIES {
        let stream = Stream::of_cache(name, policy, path, stage);
        all.extend(skip_on_error(report, &[name], stream)?.map(|stream| stream.series(stage)));
    }
    let stream = Stream::of_kernel(path);
    all.extend(skip_on_error(report, &[KERNEL], stream)?.map(|stream| stream.series(stage)));
    Ok(all)
}

struct Stream<A, F> {
    name: &'static str,
    words: Span,
    file: A,
    filler: Mutex<Filler<F>>,
    _cache: Option<MappedFile>,
}

impl Stream<File, File> {
    fn of_cache(
        name: &'static str,
        policy: DrainPolicy,
        path: &Path,
        stage: &Stage<'_>,
    ) -> Result<Self> {
        let builder = Cache::builder().memory(stage.parameters.memory_bytes());
        // Without a swap pages of memory files cannot be evicted, and come into no batch.
        let builder = builder.drain_policy(policy).swap_directory(stage.directory);
        let mapped = MappedFile::open(builder, path)?;
        let filler = Mutex::new(Filler::new(mapped.memory_file()?)?);
        let (words, file) = (mapped.span(), mapped.file().clone());
        Ok(Self { name, words, file, filler, _cache: Some(mapped) })
    }
}

impl Stream<KernelFile, std::fs::File> {
    /// Opens the file with the smallest folios, as in the cache, read without readahead: with
    /// folios as large as a chunk the kernel would examine nothing. They are mapped by the touches
    /// that follow.
    fn of_kernel(path: &Path) -> Result<Self> {
        direct::drop_page_cache(path)?;
        let file = KernelFile::open(path)?;
        fadvise(&file.file, 0, None, Advice::Random).map_err(Error::system("advise the kernel"))?;
        for hint in [Hint::Random, Hint::SmallPages] {
            // Advice only: a kernel without huge pages has no way to refuse them.
            let _ = file.mapping.advise(hint);
        }
        let words = file.mapping.span();
        let filler = Mutex::new(Filler::new(kernel_file()?)?);
        let stream = Self { name: KERNEL, words, file, filler, _cache: None };
        stream.touch(0, stream.words.len_bytes())?;
        Ok(stream)
    }
}

impl<A: Advised + Send, F: InMemory> Stream<A, F> {
    fn series<'a>(self, stage: &Stage<'a>) -> Series<'a>
    where
        Self: 'a,
    {
        let (name, cpus, parameters) = (self.name, stage.cpus, stage.parameters);
        let round =
            move || run_beside(cpus, || self.calls(parameters), || self.filler.lock().step());
        (name, Box::new(round))
    }

    fn calls(&self, parameters: &Parameters) -> Result<Round> {
        let mut round = Round::default();
        let waits_before = waits::count()?;
        for _ in 0..parameters.passes {
            for start in (0..parameters.size_bytes).step_by(parameters.chunk_bytes as usize) {
                let end = start + parameters.chunk_bytes;
                round.verified_bytes += self.touch(start, end)?;
                round.advise(&self.file, start..end)?;
            }
        }
        round.waits = Some(waits::count()? - waits_before);
        round.resident_pages = self.file.resident_pages()?;
        round.exact = round.drained(Drains::default());
        Ok(round)
    }

    /// Loads the first word of every page. Returns the number of bytes.
    fn touch(&self, start: u64, end: u64) -> Result<u64> {
        let mut verified_bytes = 0;
        for pos_bytes in (start..end).step_by(PAGE_BYTES) {
            if self.words.load(pos_bytes) != pattern::word_at(pos_bytes, 0) {
                return Err(Error::WrongBytes { series: self.name.to_owned(), pos_bytes });
            }
            verified_bytes += size_of::<u64>() as u64;
        }
        Ok(verified_bytes)
    }
}

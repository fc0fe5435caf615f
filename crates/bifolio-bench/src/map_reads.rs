//! `map-reads`: random 8-byte loads of resident bytes through a map, against mappings of the
//! kernel.
//!
//! The same file three times: in a cache of this library, mapped (`map`); mapped by the kernel, its
//! page cache read page by page, so that it has small folios like the cache (`kernel_small`); and a
//! copy of it mapped with whatever folios the kernel chose (`kernel_mapping`). All bytes are
//! resident and every page was touched before anything is timed. The loop is that of `small-reads`,
//! compiled once: only the address differs. `hot` loads from the first MiB, `uniform` from all of
//! the file.

use std::fs::File;
use std::path::Path;

use bifolio::Cache;
use bifolio_report::Case;
use memmap2::Advice;
use serde::Serialize;

use crate::benchmark::Needs;
use crate::config::{Config, Times};
use crate::definition::{Definition, ratio_at_least};
use crate::error::{Error, Result};
use crate::harness::mapped_file::MappedFile;
use crate::harness::mapping::Mapping;
use crate::harness::measured::Measured;
use crate::harness::reads::{Load, Reader, VERIFY_THREADS, Way};
use crate::harness::sizes::{check_pages, resident_memory_bytes};
use crate::harness::span::Span;
use crate::harness::{cpus, direct};
use crate::run::Run;

const MAP: &str = "map";
const KERNEL_SMALL: &str = "kernel_small";
const KERNEL_MAPPING: &str = "kernel_mapping";

/// Bytes that `hot` reads: more than the nearest caches of a CPU, less than all.
const HOT_BYTES: u64 = 1 << 20;
const LOAD_BYTES: u64 = 8;

pub(crate) static MAP_READS: Definition<Parameters> = Definition {
    name: "map-reads",
    description: "random 8-byte loads through a resident map, against mappings of the kernel",
    parameters,
    // On disk two files; in memory a cache, and both files in the kernel's page cache.
    needs: |Parameters { size_bytes, .. }| Needs {
        disk_bytes: 2 * size_bytes,
        memory_bytes: 2 * size_bytes + resident_memory_bytes(*size_bytes),
    },
    ratios: &[(MAP, KERNEL_SMALL), (MAP, KERNEL_MAPPING)],
    shown_counts: &[],
    standard: &[],
    targets: &[ratio_at_least(
        "{over} / {under}, {pattern}, threads {threads}",
        "",
        [MAP, KERNEL_SMALL],
        0.95,
    )],
    run,
    child: None,
};

/// The parameters of one run, as the envelope shows them.
#[derive(Debug, Serialize)]
pub(crate) struct Parameters {
    /// Length of the file that is resident.
    size_bytes: u64,
    #[serde(flatten)]
    times: Times,
    threads: Vec<usize>,
    verify_threads: usize,
}

fn parameters(config: &Config) -> Result<Parameters> {
    let size_bytes = config.size_bytes.unwrap_or(config.of_set([8 << 20, 64 << 20, 64 << 20]));
    check_pages("--size", size_bytes, 16 << 30)?;
    let times = config.times([(0.2, 2), (3.0, 7), (60.0, 11)]);
    let threads = config.threads_or_default()?;
    Ok(Parameters { size_bytes, times, threads, verify_threads: VERIFY_THREADS })
}

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let size_bytes = parameters.size_bytes;
    let file = run.make_file("file", size_bytes)?;
    let copy = run.make_file("copy", size_bytes)?;
    let builder = Cache::builder().memory(resident_memory_bytes(size_bytes));
    let map = run.attempt(&[MAP], MappedFile::open(builder, &file))?;
    let mut ways: Vec<Way> = map.into_iter().map(through_map).collect();
    direct::drop_page_cache(&file)?;
    ways.push(kernel_mapping(KERNEL_SMALL, &file, &[Advice::Random, Advice::NoHugePage])?);
    ways.push(kernel_mapping(KERNEL_MAPPING, &copy, &[])?);
    run.verify(&mut ways, &file)?;
    let cpus = cpus::of_threads(&parameters.threads)?;
    let mut rows = run.rows();
    for (pattern, extent_bytes) in [("hot", size_bytes.min(HOT_BYTES)), ("uniform", size_bytes)] {
        for &threads in &parameters.threads {
            let case = Case::new().with("pattern", pattern).with("threads", threads);
            rows.row(case, ("ops/s", Measured::rate));
            let load = Load { block_bytes: LOAD_BYTES, extent_bytes, cpus: &cpus[..threads] };
            for way in &ways {
                rows.series(way.series, move |duration| way.run(&load, duration));
            }
        }
    }
    let rounds = parameters.times.shared(rows.weight());
    run.measure("measure", rows, rounds)
}

fn through_map(map: MappedFile) -> Way {
    let span = map.span();
    Way::new(MAP, None, move || Ok(span.clone()), move || map.counts())
}

fn kernel_mapping(series: &'static str, path: &Path, hints: &[Advice]) -> Result<Way> {
    let file = File::open(path).map_err(Error::system(format!("open {}", path.display())))?;
    let mapping = Mapping::of_file(&file, false)?;
    for &hint in hints {
        // Advice only: a kernel without huge pages has no way to refuse them.
        let _ = mapping.advise(hint);
    }
    let span = mapping.span();
    Ok(Way::new(series, None, move || Ok(span.clone()), Vec::new))
}

impl Reader for Span {
    #[inline(always)]
    fn read(&mut self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
        self.copy(block, pos_bytes);
        Ok(block.len())
    }
}

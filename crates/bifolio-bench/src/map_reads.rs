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

use bifolio::{Cache, OpenOptions};
use bifolio_report::Case;
use memmap2::Advice;

use crate::benchmark::Needs;
use crate::definition::{Asked, Definition, Parameters, at_least};
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::cached::Cached;
use crate::harness::measured::Measured;
use crate::harness::reads::{Load, Way};
use crate::harness::sizes::{SizeRule, resident_memory_bytes};
use crate::harness::span::Mapping;
use crate::harness::{cpus, direct};
use crate::run::Run;

const MAP: &str = "map";
const KERNEL_SMALL: &str = "kernel_small";
const KERNEL_MAPPING: &str = "kernel_mapping";

/// Bytes that `hot` reads: more than the nearest caches of a CPU, less than all.
const HOT_BYTES: u64 = 1 << 20;

pub(crate) static MAP_READS: Definition = Definition {
    name: "map-reads",
    description: "random 8-byte loads through a resident map, against mappings of the kernel",
    sizes: SizeRule::Resident {
        size_bytes: [8 << 20, 64 << 20, 64 << 20],
        unit_bytes: PAGE_BYTES as u64,
        max_bytes: 16 << 30,
    },
    times: [(0.2, 2), (3.0, 7), (60.0, 11)],
    // On disk two files; in memory a cache, and both files in the kernel's page cache.
    needs: |Parameters { sizes, .. }| Needs {
        disk_bytes: 2 * sizes.size_bytes,
        memory_bytes: 2 * sizes.size_bytes + resident_memory_bytes(sizes.size_bytes),
    },
    ratios: &[(MAP, KERNEL_SMALL), (MAP, KERNEL_MAPPING)],
    shown_counts: &[],
    targets: &[at_least("", Asked::Ratio(MAP, KERNEL_SMALL), 0.95)],
    run,
    child: None,
};

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let size_bytes = parameters.sizes.size_bytes;
    let file = run.make_file("file", size_bytes)?;
    let copy = run.make_file("copy", size_bytes)?;
    let mut ways = Vec::new();
    ways.extend(run.attempt(&[MAP], through_map(&file, size_bytes))?);
    direct::drop_page_cache(&file)?;
    ways.push(kernel_mapping(KERNEL_SMALL, &file, &[Advice::Random, Advice::NoHugePage])?);
    ways.push(kernel_mapping(KERNEL_MAPPING, &copy, &[])?);
    run.verify(&mut ways, size_bytes)?;
    let cpus = cpus::of_threads(parameters.threads_max())?;
    let mut rows = run.rows();
    for (pattern, extent_bytes) in [("hot", size_bytes.min(HOT_BYTES)), ("uniform", size_bytes)] {
        for &threads in &parameters.threads {
            let case = Case::new().with("pattern", pattern).with("threads", threads);
            rows.row(case, ("ops/s", Measured::rate));
            let load = Load { block_bytes: 8, extent_bytes, cpus: &cpus[..threads] };
            for way in &ways {
                rows.series(way.series, move |duration| (way.run)(&load, duration));
            }
        }
    }
    let rounds = parameters.shared(rows.trials());
    run.measure("measure", rows, rounds)
}

fn through_map(file: &Path, size_bytes: u64) -> Result<Way> {
    let builder = Cache::builder().memory(resident_memory_bytes(size_bytes));
    let cached = Cached::open(builder, file, &OpenOptions::new().mappable(true))?;
    let span = cached.map()?;
    let counters = move || vec![("faults_per_op", cached.cache.stats().maps.faults)];
    Ok(Way::random(MAP, counters, move || Ok(span.clone())))
}

fn kernel_mapping(series: &'static str, path: &Path, hints: &[Advice]) -> Result<Way> {
    let file = File::open(path).map_err(Error::system(format!("open {}", path.display())))?;
    let mapping = Mapping::of_file(&file, false)?;
    for &hint in hints {
        // Advice only: a kernel without huge pages has no way to refuse them.
        let _ = mapping.advise(hint);
    }
    Ok(Way::random(series, Vec::new, move || Ok(mapping.span.clone())))
}

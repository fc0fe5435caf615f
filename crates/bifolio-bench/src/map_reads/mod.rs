//! `map-reads`: random 8-byte loads of resident bytes through a map, against mappings of the
//! kernel.
//!
//! The same file three times: in a cache of this library, mapped (`map`); mapped by the kernel, its
//! page cache read page by page, so that it has small folios like the cache (`kernel_small`); and a
//! copy of it mapped with whatever folios the kernel chose (`kernel_mapping`). All bytes are
//! resident and every page was touched before anything is timed. The loop is that of `small-reads`,
//! compiled once: only the address differs. `hot` loads from the first MiB, `uniform` from all of
//! the file.

mod parameters;

use std::convert::Infallible;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use bifolio::Cache;

use self::parameters::Parameters;
use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::harness::failures::skip_on_error;
use crate::harness::interleave::{Trial, interleave};
use crate::harness::mapped_file::MappedFile;
use crate::harness::mapping::{Hint, Mapping};
use crate::harness::series::{Load, Series};
use crate::harness::span::Span;
use crate::harness::timed::{ReadPath, Reader};
use crate::harness::{cpus, direct, pattern};
use crate::progress::Progress;
use bifolio_report::{Case, Figure, Ratio, Report, Row, Skipped};

const NAME: &str = "map-reads";

const MAP: &str = "map";
const KERNEL_SMALL: &str = "kernel_small";
const KERNEL_MAPPING: &str = "kernel_mapping";

const OF_SMALL: Ratio = Ratio::new(MAP, KERNEL_SMALL);
const OF_MAPPING: Ratio = Ratio::new(MAP, KERNEL_MAPPING);

/// Minimum of `map` relative to a mapping of the kernel with folios of the same size.
const SHARE_AT_LEAST: f64 = 0.95;

const LOAD_BYTES: u64 = 8;

/// The benchmark, described at the head of this module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MapReads;

impl Benchmark for MapReads {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "random 8-byte loads through a resident map, against mappings of the kernel"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        Ok(Parameters::from_config(config)?.needs())
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = Parameters::from_config(context.config)?;
        let mut report = Report::new(NAME, &context.host, serde_json::to_value(&parameters)?);
        report.ratios = vec![OF_SMALL, OF_MAPPING];
        let file = pattern::make_in(context.workspace, parameters.size_bytes, progress)?;
        let copy = context.workspace.path().join("copy");
        progress.start("make its copy", parameters.size_bytes);
        pattern::make_file(&copy, parameters.size_bytes, progress)?;
        let mut series = make_series(&file, &copy, &parameters, &mut report)?;
        series.retain(|series| context.config.measures(series.name));
        progress.start("compare every byte by every way", series.len() as u64);
        for series in &series {
            report.verified_bytes += series.verify(&file, parameters.verify_threads)?;
            progress.advance(1);
        }
        measure(&series, &parameters, &mut report, progress)?;
        report.figures = report.rows.iter().filter_map(figure).collect();
        Ok(report)
    }
}

/// All ways to the bytes, in the order of the tables.
fn make_series(
    file: &Path,
    copy: &Path,
    parameters: &Parameters,
    report: &mut Report,
) -> Result<Vec<Series>> {
    let builder = Cache::builder().memory(parameters.memory_bytes());
    let map = skip_on_error(report, &[MAP], MappedFile::open(builder, file))?;
    let mut series: Vec<Series> =
        map.map(|map| Series::new(MAP, Loads::of_cache(map))).into_iter().collect();
    direct::drop_page_cache(file)?;
    let small = kernel_mapping(file, &[Hint::Random, Hint::SmallPages])?;
    series.push(Series::new(KERNEL_SMALL, small));
    series.push(Series::new(KERNEL_MAPPING, kernel_mapping(copy, &[])?));
    Ok(series)
}

/// The bytes of one mapping.
#[derive(Debug)]
struct Loads {
    words: Span,
    cache: Option<MappedFile>,
}

impl Loads {
    fn of_cache(map: MappedFile) -> Self {
        Self { words: map.span(), cache: Some(map) }
    }
}

fn kernel_mapping(path: &Path, hints: &[Hint]) -> Result<Loads> {
    let file = File::open(path).map_err(Error::system(format!("open {}", path.display())))?;
    let mapping = Arc::new(Mapping::of_file(&file, false)?);
    for &hint in hints {
        // Advice only: a kernel without huge pages has no way to refuse them.
        let _ = mapping.advise(hint);
    }
    Ok(Loads { words: mapping.span(), cache: None })
}

impl ReadPath for Loads {
    type Reader = Span;
    const SYSCALLS_PER_READ: Option<u64> = None;

    fn reader(&self) -> Result<Span> {
        Ok(self.words.clone())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.cache.as_ref().map(MappedFile::counts).unwrap_or_default()
    }
}

impl Reader for Span {
    type Failure = Infallible;

    #[inline(always)]
    fn read<const BLOCK: usize>(
        &mut self,
        block: &mut [u8; BLOCK],
        pos_bytes: u64,
    ) -> Result<usize, Infallible> {
        self.copy(block, pos_bytes);
        Ok(BLOCK)
    }
}

fn measure(
    series: &[Series],
    parameters: &Parameters,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    let cpus = cpus::allowed();
    let (possible, too_many): (Vec<usize>, Vec<usize>) =
        parameters.threads.iter().partition(|&&threads| threads <= cpus.len());
    report.skipped.extend(too_many.iter().map(|threads| Skipped {
        series: "*".to_owned(),
        reason: format!("{threads} threads need as many CPUs, there are {}", cpus.len()),
    }));
    let extents = parameters.extents();
    let duration = parameters.trial(series.len() * possible.len() * extents.len());
    let mut trials = Vec::new();
    for (pattern, extent_bytes) in extents {
        for &threads in &possible {
            let row_index = report.rows.len();
            let case = Case::new().with("pattern", pattern).with("threads", threads);
            report.rows.push(Row::new(case, "ops/s"));
            let cpus = &cpus[..threads];
            let load = Load { block_bytes: LOAD_BYTES, extent_bytes, cpus, duration };
            trials.extend(series.iter().map(|series| {
                let run = Box::new(move || series.run(&load));
                Trial { row_index, series: series.name, run }
            }));
        }
    }
    progress.start("measure", (trials.len() * parameters.repetitions) as u64);
    let operations = interleave(&trials, parameters.repetitions, &mut report.rows, progress)?;
    report.verified_bytes += operations * LOAD_BYTES;
    Ok(())
}

fn figure(row: &Row) -> Option<Figure> {
    let (pattern, threads) = (row.case.text("pattern"), row.case.text("threads"));
    Some(Figure {
        name: format!("{MAP} / {KERNEL_SMALL}, {pattern}, threads {threads}"),
        value: row.ratio(&OF_SMALL)?,
        target: SHARE_AT_LEAST,
        at_most: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::verify::verify;
    use crate::progress::Silent;

    #[test]
    fn a_mapping_answers_the_bytes_of_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        pattern::make_file(&path, 1 << 20, &mut Silent).unwrap();
        let loads = kernel_mapping(&path, &[Hint::Random, Hint::SmallPages]).unwrap();
        let verified = verify::<64, _>(&loads, "x", &path, u64::MAX, 2).unwrap();
        assert_eq!(verified, 1 << 20);
        let other = dir.path().join("other");
        std::fs::write(&other, vec![0; 1 << 20]).unwrap();
        assert!(verify::<64, _>(&loads, "x", &other, u64::MAX, 2).is_err());
    }
}

//! One layout with one size of folio: the same file in every way it can be read, and the trials
//! that read it.
//!
//! Created, verified, measured and dropped before the next one, so that memory holds one file at a
//! time, in five copies.

use std::cell::Cell;
use std::fs::File;
use std::time::Duration;

use bifolio::Cache;
use parking_lot::Mutex;

use super::layout::Plan;
use super::parameters::{BLOCKS_BYTES, Parameters};
use super::source::{Contents, LOOK_BYTES, Source};
use super::sources::{Copied, Kernel, MemoryFile, Way, Zeroed};
use crate::benchmark::Context;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::harness::cached::Cached;
use crate::harness::cpus;
use crate::harness::failures::skip_on_error;
use crate::harness::interleave::{self, Rounds, Sample, Trial, run_trials};
use crate::harness::threads::run_pinned;
use crate::harness::tmpfs::{HugePages, Tmpfs};
use crate::progress::Progress;
use bifolio_report::{Case, Report, Row};

const WAYS: [(&str, Way); 3] = [
    ("locked_one_by_one", Way::OneByOne { locked: true }),
    ("one_by_one", Way::OneByOne { locked: false }),
    ("batched", Way::Batched),
];

/// Including those of the kernel and of the limit.
pub(super) const SERIES_COUNT: usize = WAYS.len() + 2;

/// Sources of one layout with one folio size, and the state that their trials share.
pub(super) struct Stage {
    plan: Plan,
    sources: Vec<Box<dyn Source>>,
    buffer: Mutex<PageAligned>,
}

impl Stage {
    /// Makes every file.
    pub(super) fn new(
        context: &Context<'_>,
        parameters: &Parameters,
        plan: Plan,
        report: &mut Report,
    ) -> Result<Self> {
        let mut sources: Vec<Box<dyn Source>> = Vec::new();
        let kernel = kernel(context, &plan, &mut report.notes);
        if let Some(kernel) = skip_on_error(report, &["kernel_tmpfs"], kernel)? {
            sources.push(Box::new(kernel));
        }
        for (name, way) in WAYS {
            sources.push(Box::new(memory_file(name, way, parameters, &plan)?));
        }
        sources.push(limit(&plan)?);
        Ok(Self { plan, sources, buffer: Mutex::new(PageAligned::new()) })
    }

    fn contents(&self) -> Contents {
        Contents { size_bytes: self.plan.size_bytes, is_filled: self.plan.layout.is_filled() }
    }

    /// Compares every byte of every source. Returns the number of bytes.
    pub(super) fn verify(&self) -> Result<u64> {
        let mut buffer = self.buffer.lock();
        let contents = self.contents();
        let sources = self.sources.iter();
        sources.map(|source| source.verify(buffer.bytes(), &BLOCKS_BYTES, contents)).sum()
    }

    /// Measures all rows of this stage; each trial takes `trial`.
    pub(super) fn measure(
        &self,
        config: &Config,
        repetitions: usize,
        trial: Duration,
        report: &mut Report,
        progress: &mut dyn Progress,
    ) -> Result<()> {
        let cpu = cpus::allowed().into_iter().next();
        let cpu = cpu.ok_or_else(|| Error::Refused("there is no CPU to stay on".into()))?;
        let mut trials = Vec::new();
        for block_bytes in BLOCKS_BYTES {
            let row_index = report.rows.len();
            report.rows.push(Row::new(self.case(block_bytes), "GiB/s"));
            let sources = self.sources.iter().filter(|source| config.measures(source.name()));
            trials.extend(sources.map(|source| {
                let cursor = Cell::new(0);
                let run = move || self.trial(source.as_ref(), block_bytes, &cursor, trial, cpu);
                Trial { row_index, series: source.name(), run: Box::new(run) }
            }));
        }
        let value = |_: &Trial<'_, _>, sample: &Sample| vec![sample.value];
        let given = run_trials(&trials, Rounds::exactly(repetitions), value, progress)?;
        for (trial, given) in trials.iter().zip(&given) {
            let rows = &mut report.rows;
            let Some(samples) = given.or_fail(rows, trial.row(), trial.series) else { continue };
            let row = &mut rows[trial.row_index];
            let block_bytes = BLOCKS_BYTES[trial.row_index % BLOCKS_BYTES.len()] as u64;
            // The loop checks the first word of every block it reads.
            let read_mib: u64 = samples.iter().map(|sample| sample.operations).sum();
            report.verified_bytes += read_mib * (LOOK_BYTES / block_bytes) * 8;
            interleave::fill(row, trial.series, samples, "mib");
        }
        Ok(())
    }

    fn case(&self, block_bytes: usize) -> Case {
        Case::new()
            .with("layout", self.plan.layout.name())
            .with("folio_bytes", self.plan.folio_bytes)
            .with("block_bytes", block_bytes)
    }

    /// Reads on from where the last trial of this series and row ended.
    fn trial(
        &self,
        source: &dyn Source,
        block_bytes: usize,
        cursor: &Cell<u64>,
        duration: Duration,
        cpu: usize,
    ) -> Result<Sample> {
        let before = source.counters();
        let start_bytes = cursor.get();
        let windows = run_pinned(
            &[cpu],
            |_| Ok((self.buffer.lock(), start_bytes)),
            |(mut buffer, mut cursor_bytes)| {
                let block = &mut buffer.bytes()[..block_bytes];
                let window = source.read_on(block, &mut cursor_bytes, self.contents(), duration)?;
                Ok((window, cursor_bytes))
            },
        )?;
        let (window, cursor_bytes) = windows[0];
        cursor.set(cursor_bytes);
        let counted = source.counters();
        let counts = counted
            .iter()
            .zip(&before)
            .map(|((name, after), (_, before))| (*name, after.saturating_sub(*before)));
        let gibibyte_looks = (1u64 << 30) as f64 / LOOK_BYTES as f64;
        Ok(Sample {
            value: window.rate() / gibibyte_looks,
            operations: window.operations,
            counts: counts.collect(),
        })
    }
}

/// The file on tmpfs, with pages as the folios are, if the system allows that.
fn kernel(context: &Context<'_>, plan: &Plan, notes: &mut Vec<String>) -> Result<Kernel> {
    let pages = if plan.folio_bytes > 4096 { HugePages::Always } else { HugePages::Never };
    let mounted = Tmpfs::mount(context.workspace, plan.size_bytes, pages);
    let tmpfs = mounted.or_else(|refusal| {
        let note = format!(
            "kernel_tmpfs has the system's default pages, not {}: {}",
            pages.option().trim_start_matches(','),
            bifolio_report::with_causes(&refusal)
        );
        if !notes.contains(&note) {
            notes.push(note);
        }
        Tmpfs::create(context.workspace, plan.size_bytes)
    })?;
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(tmpfs.path().join("file"))
        .map_err(Error::system("make a file on tmpfs"))?;
    plan.make(&file)?;
    Ok(Kernel { file, _tmpfs: tmpfs })
}

fn memory_file(
    name: &'static str,
    way: Way,
    parameters: &Parameters,
    plan: &Plan,
) -> Result<MemoryFile> {
    let builder = Cache::builder().memory(parameters.resident_memory_bytes());
    let cached = Cached::in_memory(builder, plan.folio_bytes)?;
    plan.make(&cached.file)?;
    Ok(MemoryFile { name, way, cached })
}

/// The limit that no way of reading can beat.
fn limit(plan: &Plan) -> Result<Box<dyn Source>> {
    if plan.layout.is_filled() { Ok(Box::new(Copied::new(plan)?)) } else { Ok(Box::new(Zeroed)) }
}

/// The buffer that everything is read into: the largest block, at the start of a page.
struct PageAligned {
    bytes: Vec<u8>,
    start: usize,
}

impl PageAligned {
    const LENGTH: usize = 1 << 20;
    const PAGE_BYTES: usize = 4096;

    fn new() -> Self {
        // Every page is touched now, not while timed.
        let bytes = vec![1; Self::LENGTH + Self::PAGE_BYTES];
        let start = bytes.as_ptr().align_offset(Self::PAGE_BYTES);
        Self { bytes, start }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + Self::LENGTH]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffer_fits_the_largest_block_and_begins_a_page() {
        let mut buffer = PageAligned::new();
        assert_eq!(buffer.bytes().as_ptr() as usize % 4096, 0);
        assert_eq!(Some(&buffer.bytes().len()), BLOCKS_BYTES.iter().max());
    }
}

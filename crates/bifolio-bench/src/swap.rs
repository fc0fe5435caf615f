//! `swap`: a memory file four times as large as the memory for it.
//!
//! It is written in order, read in order, read at random, overwritten at random, and then every
//! byte is compared: a memory file of a cache that swaps out to the workspace's disk
//! (`bifolio_swap`), against a file on tmpfs that the kernel swaps out to the same disk, limited to
//! the memory of a process with such a cache (`kernel_swap`). A trial is all of this, in a child
//! process: resident sizes and control groups belong to processes. Bytes read in the phases are
//! only checked cheaply (`checker`), because a full comparison would be timed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

use bifolio::{Cache, OpenOptions};
use bifolio_report::{Case, Rss};
use serde::{Deserialize, Serialize};

use crate::config::{Config, Times};
use crate::definition::Definition;
use crate::error::{Error, Result};
use crate::format_bytes;
use crate::harness::access::{Access, PAGE_BYTES, Pattern};
use crate::harness::cached::Cached;
use crate::harness::checker::Checker;
use crate::harness::counters::{resident_bytes, swapped_pages};
use crate::harness::measured::{ALL, Calls, Measured, Meter, Per};
use crate::harness::memory_group::{Membership, MemoryGroup, patiently};
use crate::harness::sizes::Sizes;
use crate::harness::swap::SwapFile;
use crate::harness::tmpfs::Tmpfs;
use crate::harness::{child, pattern};
use crate::run::Run;

const BIFOLIO: &str = "bifolio_swap";
const KERNEL: &str = "kernel_swap";

/// Ratio of the working set and the bound.
const WORKING_SET_FACTOR: u64 = 4;
/// Divisors: the parts of the pages that are read at random, and overwritten: as many as fit into
/// memory.
const RANDOM_READS_SHARE: u64 = 32;
const OVERWRITES_SHARE: u64 = 4;

/// Bytes written and read in order per call.
const BLOCK_BYTES: usize = 64 << 10;
const READ_SEED: u64 = 11;
const OVERWRITE_SEED: u64 = 12;

pub(crate) static SWAP: Definition<Parameters> = Definition {
    name: "swap",
    description: "a memory file 4 times the memory, against tmpfs and the kernel's swap on the \
                  same disk",
    parameters,
    needs: |parameters| parameters.load.sizes.needs_of_swap(),
    ratios: &[(BIFOLIO, KERNEL)],
    shown_counts: &[
        "p50_ns",
        "p99_ns",
        "cpu_s_per_gib",
        "pages_written",
        "pages_read",
        "peak_bytes",
    ],
    standard: ALL,
    targets: &[],
    run,
    child: Some(|task| child::serve(task, run_task)),
};

/// The parameters of one run, as the envelope shows them.
#[derive(Debug, Serialize)]
pub(crate) struct Parameters {
    #[serde(flatten)]
    load: Load,
    #[serde(flatten)]
    times: Times,
}

/// Amount of work.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Load {
    #[serde(flatten)]
    sizes: Sizes,
    /// Pages read at random, at most all.
    random_reads: u64,
    /// Pages overwritten at random, at most all.
    overwrites: u64,
}

fn parameters(config: &Config) -> Result<Parameters> {
    let memory_bytes = config.of_set([4 << 20, 64 << 20, 512 << 20]);
    let sizes = Sizes::choose(WORKING_SET_FACTOR, config, memory_bytes)?;
    let random_reads = sizes.pages().div_ceil(RANDOM_READS_SHARE);
    let load = Load { sizes, random_reads, overwrites: sizes.pages().div_ceil(OVERWRITES_SHARE) };
    Ok(Parameters { load, times: config.times([(0.1, 1), (7.0, 1), (240.0, 5)]) })
}

/// A trial, for a child.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    load: Load,
    /// The directory that a cache swaps out into, or the file to be made on a tmpfs.
    path: PathBuf,
    /// The control group of a process of the kernel's series.
    group: Option<Membership>,
}

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let Parameters { load, times } = *parameters;
    let (children, workspace) = (run.children, run.workspace);
    // Dropped from the last to the first: the group, the file, the swap.
    let create = || {
        let swap = SwapFile::activate(workspace, load.sizes.swap_bytes())?;
        let tmpfs = Tmpfs::create(workspace, load.sizes.size_bytes)?;
        let group = MemoryGroup::create(load.sizes)?;
        // One page: whether a child can join is known before anything is timed.
        let page = PAGE_BYTES as u64;
        let sizes = Sizes { size_bytes: page, memory_bytes: page };
        let load = Load { sizes, random_reads: 1, overwrites: 1 };
        let (path, group_of_child) = (tmpfs.path().join("file"), Some(group.membership()));
        children.ask::<Vec<Measured>>(&Task { load, path, group: group_of_child })?;
        Ok((group, tmpfs, swap))
    };
    let kernel = run.attempt(&[KERNEL], create())?;
    let mut rows = run.rows();
    for (phase, block_bytes) in PHASES {
        let case = Case::new().with("phase", phase).with("block_bytes", block_bytes);
        rows.row(case, ("bytes/s", Measured::bytes_rate));
    }
    rows.series_of_rows(BIFOLIO, PHASES.len(), move |_| {
        children.ask(&Task { load, path: workspace.path().to_owned(), group: None })
    });
    if let Some((group, tmpfs, _)) = &kernel {
        rows.series_of_rows(KERNEL, PHASES.len(), move |_| {
            let (path, group) = (tmpfs.path().join("file"), Some(group.membership()));
            children.ask(&Task { load, path, group })
        });
    }
    run.measure("measure", rows, times.rounds())?;
    let peak_bytes = run.report.rows.first().and_then(|row| row.count(BIFOLIO, "peak_bytes"));
    let bound_bytes = load.sizes.memory_bytes;
    run.report.rss = peak_bytes.map(|peak| Rss { bound_bytes, peak_bytes: peak as u64 });
    if kernel.is_some() {
        run.note(format!(
            "a process of {KERNEL} is held to {}, as the process of a cache is; its pages are \
             those of the whole machine's swap, and CPU time of kernel threads is not in it",
            format_bytes(load.sizes.kernel_bytes())
        ));
    }
    Ok(())
}

/// A file that the phases read and write.
struct Medium<'a> {
    series: &'static str,
    write: &'a dyn Fn(&[u8], u64) -> Result<()>,
    read: &'a dyn Fn(&mut [u8], u64) -> Result<()>,
    /// Pages that have come from the disk, and gone to it, so far.
    moved: &'a dyn Fn() -> Result<[u64; 2]>,
}

/// Runs the child's side. Returns the phases.
fn run_task(Task { load, path, group }: &Task) -> Result<Vec<Measured>> {
    let Some(group) = group else {
        let builder = Cache::builder().memory(load.sizes.memory_bytes).swap_directory(path);
        let cached = Cached::in_memory(builder, OpenOptions::new().folio_bytes(PAGE_BYTES as u64))?;
        let file = &cached.file;
        let phases = load.run(&Medium {
            series: BIFOLIO,
            write: &|bytes, pos_bytes| Ok(file.write_all_at(bytes, pos_bytes)?),
            read: &|bytes, pos_bytes| Ok(file.read_exact_at(bytes, pos_bytes)?),
            moved: &|| {
                let stats = cached.cache.stats();
                Ok([stats.swapped_in_pages, stats.swapped_out_pages])
            },
        })?;
        let peak_bytes = resident_bytes("VmHWM")?;
        cached.close()?;
        return Ok(with_peak(phases, peak_bytes));
    };
    group.join()?;
    let options = File::options().read(true).write(true).create_new(true).clone();
    let file = options.open(path).map_err(Error::system("make a file on tmpfs"))?;
    // Its name goes now: its memory and its swap go with this process, whatever happens.
    std::fs::remove_file(path).map_err(Error::system("remove a file from tmpfs"))?;
    let phases = load.run(&Medium {
        series: KERNEL,
        write: &|bytes, pos_bytes| {
            let written = patiently(|| file.write_all_at(bytes, pos_bytes));
            written.map_err(Error::system("write a file on tmpfs"))
        },
        read: &|bytes, pos_bytes| {
            let read = patiently(|| file.read_exact_at(bytes, pos_bytes));
            read.map_err(Error::system("read a file on tmpfs"))
        },
        moved: &swapped_pages,
    })?;
    Ok(with_peak(phases, group.peak_bytes()?))
}

fn with_peak(mut phases: Vec<Measured>, peak_bytes: u64) -> Vec<Measured> {
    phases.iter_mut().for_each(|phase| phase.add("peak_bytes", peak_bytes as f64, Per::Peak));
    phases
}

/// Phases in order: the name, and the size of a block. What is overwritten is version 1.
const PHASES: [(&str, usize); 4] = [
    (WRITE_IN_ORDER, BLOCK_BYTES),
    ("read in order", BLOCK_BYTES),
    ("read at random", PAGE_BYTES),
    (OVERWRITE, PAGE_BYTES),
];
const WRITE_IN_ORDER: &str = "write in order";
const OVERWRITE: &str = "overwrite at random";

impl Load {
    /// Returns position and length of every block of `phase`. Not a list, which would count as
    /// resident.
    fn blocks(&self, (phase, block_bytes): (&str, usize)) -> impl Iterator<Item = (u64, usize)> {
        let size_bytes = self.sizes.size_bytes;
        let step_bytes = block_bytes as u64;
        let (count, seed) = match phase {
            _ if block_bytes == BLOCK_BYTES => (size_bytes.div_ceil(step_bytes), None),
            OVERWRITE => (self.overwrites, Some(OVERWRITE_SEED)),
            _ => (self.random_reads, Some(READ_SEED)),
        };
        let access = seed.map(|seed| Access::new(Pattern::Uniform, size_bytes, seed));
        (0..count).map(move |index| {
            let in_order = index * step_bytes;
            let pos_bytes = access.as_ref().map_or(in_order, |access| access.pos_bytes(index));
            (pos_bytes, (size_bytes - pos_bytes).min(step_bytes) as usize)
        })
    }

    /// Runs all phases, then compares every byte, which counts as verified by the last phase.
    fn run(&self, medium: &Medium<'_>) -> Result<Vec<Measured>> {
        let phases = PHASES.into_iter().map(|phase| self.run_phase(phase, medium));
        let mut phases = phases.collect::<Result<Vec<_>>>()?;
        if let Some(last) = phases.last_mut() {
            last.verified_bytes += self.verify(medium)?;
        }
        Ok(phases)
    }

    fn run_phase(&self, phase: (&str, usize), medium: &Medium<'_>) -> Result<Measured> {
        let version = match phase.0 {
            WRITE_IN_ORDER => Some(0),
            OVERWRITE => Some(1),
            _ => None,
        };
        let mut buffer = vec![0; phase.1];
        let mut checker = Checker::new(medium.series);
        let mut calls = Calls::during(self.sizes.expected_pass());
        let mut bytes = 0;
        let [read, written] = (medium.moved)()?;
        let meter = Meter::start(None)?;
        for (pos_bytes, block_bytes) in self.blocks(phase) {
            let block = &mut buffer[..block_bytes];
            if let Some(version) = version {
                pattern::fill_version(block, pos_bytes, version);
            }
            let begin = Instant::now();
            match version {
                Some(_) => (medium.write)(block, pos_bytes)?,
                None => (medium.read)(block, pos_bytes)?,
            }
            calls.add(meter.started().elapsed(), begin.elapsed());
            if version.is_none() {
                checker.add(block, pos_bytes)?;
            }
            bytes += block_bytes as u64;
        }
        let mut measured = Measured::new(calls, bytes, meter.stop()?);
        let [read_after, written_after] = (medium.moved)()?;
        measured.add("pages_written", (written_after - written) as f64, Per::Trial);
        measured.add("pages_read", (read_after - read) as f64, Per::Trial);
        measured.verified_bytes = checker.finish()?;
        Ok(measured)
    }

    /// Compares every byte with the one written last. Returns their number.
    fn verify(&self, medium: &Medium<'_>) -> Result<u64> {
        let [in_order, .., overwrite] = PHASES;
        let mut versions = vec![0; self.sizes.pages() as usize];
        for (pos_bytes, _) in self.blocks(overwrite) {
            versions[pos_bytes as usize / PAGE_BYTES] = 1;
        }
        let mut buffer = vec![0; BLOCK_BYTES];
        for (start_bytes, block_bytes) in self.blocks(in_order) {
            let block = &mut buffer[..block_bytes];
            (medium.read)(block, start_bytes)?;
            let positions = (start_bytes..).step_by(PAGE_BYTES);
            for (page, pos_bytes) in block.chunks_exact(PAGE_BYTES).zip(positions) {
                let version = versions[pos_bytes as usize / PAGE_BYTES];
                if !pattern::matches_version(page, pos_bytes, version) {
                    let series = medium.series.to_owned();
                    return Err(Error::WrongBytes { series, pos_bytes });
                }
            }
        }
        Ok(self.sizes.size_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn all_phases_are_done_and_a_lost_overwrite_is_noticed() {
        let size_bytes = (1 << 20) + 8192;
        let sizes = Sizes { size_bytes, memory_bytes: 1 << 20 };
        let load = Load { sizes, random_reads: 10, overwrites: 20 };
        let run = |loses_overwrites: bool| {
            let file = RefCell::new(vec![0; size_bytes as usize]);
            load.run(&Medium {
                series: "vector",
                write: &|bytes, pos_bytes| {
                    let start = pos_bytes as usize;
                    if bytes.len() > PAGE_BYTES || !loses_overwrites {
                        file.borrow_mut()[start..start + bytes.len()].copy_from_slice(bytes);
                    }
                    Ok(())
                },
                read: &|bytes, pos_bytes| {
                    let start = pos_bytes as usize;
                    bytes.copy_from_slice(&file.borrow()[start..start + bytes.len()]);
                    Ok(())
                },
                moved: &|| Ok([0, 0]),
            })
        };
        let phases = run(false).unwrap();
        let bytes: Vec<u64> = phases.iter().map(|phase| phase.bytes).collect();
        assert_eq!(bytes, [size_bytes, size_bytes, 40960, 81920]);
        assert_eq!(phases[3].verified_bytes, size_bytes);
        assert!(matches!(run(true), Err(Error::WrongBytes { .. })));
    }
}

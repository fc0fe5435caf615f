//! `seq-reads`: a memory file from front to back, against tmpfs and against a plain copy.
//!
//! Rows: how the file came to be (`layout`), the size of its folios, the size of the blocks it is
//! read in, the number of threads, which is one but for small folios in order. Series: `pread` of
//! the same file on tmpfs, written in the same order, with huge pages where the folios are large
//! (`kernel_tmpfs`); a pin and a copy for each page (`one_by_one`, not of a hole, which pins would
//! fill); `read_at`, which gathers a batch of Entries and takes no reference (`batched`); and a
//! plain copy in the same pattern, or zeroing the buffer where nothing was written
//! (`memcpy_limit`).
//!
//! Each thread has a CPU and a buffer, and begins in its own part of the file. In a trial it
//! continues where it ended in the last one of its series, and restarts at the end of file, so that
//! all trials together read all of the file. Before that, all bytes of every series are compared,
//! in blocks of every size. A layout with one size of folios is made, compared, measured and
//! dropped before the next one, so that memory holds one file at a time, in four copies.

use std::cell::RefCell;
use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bifolio::{Cache, OpenOptions};
use bifolio_report::{Case, Figure, Row, with_causes};
use rustix::io::pread;
use serde::Serialize;

use crate::benchmark::Needs;
use crate::config::{Config, Times};
use crate::definition::{Definition, Target, ratio_at_least};
use crate::error::{Error, Result};
use crate::format_bytes;
use crate::harness::access::PAGE_BYTES;
use crate::harness::cached::Cached;
use crate::harness::cpus;
use crate::harness::measured::Measured;
use crate::harness::pattern::{self, CHUNK_BYTES, Sums};
use crate::harness::permutation::Permutation;
use crate::harness::plain_memory::PlainMemory;
use crate::harness::reads::{Work, sum_of_threads};
use crate::harness::sizes::resident_memory_bytes;
use crate::harness::threads::run_pinned;
use crate::harness::tmpfs::{HugePages, Tmpfs};
use crate::run::{Rounds, Run};

const KERNEL: &str = "kernel_tmpfs";
const ONE_BY_ONE: &str = "one_by_one";
const BATCHED: &str = "batched";
const LIMIT: &str = "memcpy_limit";

const FOLIOS_BYTES: [u64; 2] = [4 << 10, 2 << 20];
/// How much is read with one call.
const BLOCKS_BYTES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];
const SERIES: usize = 4;
/// Minimum bytes between two clock readings; counts are per this number.
const LOOK_BYTES: u64 = 1 << 20;
const SEED: u64 = 5;

const fn target(case: &'static str, under: &'static str, at_least: f64) -> Target {
    let name = "{over} / {under}, {layout}, folios of {folio_bytes}, {block_bytes} bytes a call";
    ratio_at_least(name, case, [BATCHED, under], at_least)
}

pub(crate) static SEQ_READS: Definition<Parameters> = Definition {
    name: "seq-reads",
    description: "a memory file in order: in batches and one by one, against tmpfs and a plain \
                  copy",
    parameters,
    // In memory a file on tmpfs, plain memory, two caches, and the buffers.
    needs: |Parameters { size_bytes, threads, .. }| Needs {
        disk_bytes: 0,
        memory_bytes: 2 * size_bytes
            + 2 * resident_memory_bytes(*size_bytes)
            + (64 << 20)
            + 2 * LOOK_BYTES * threads.iter().max().map_or(0, |&threads| threads as u64),
    },
    ratios: &[(BATCHED, KERNEL), (BATCHED, ONE_BY_ONE), (BATCHED, LIMIT)],
    shown_counts: &[],
    standard: &[],
    targets: &[
        target("layout=written,threads=1", ONE_BY_ONE, 0.97),
        target("layout=written,threads=1,block_bytes=4096", KERNEL, 3.0),
        target("layout=written,threads=1,block_bytes=65536", KERNEL, 1.5),
        target("layout=written,threads=1,block_bytes=1048576", KERNEL, 1.5),
        target("layout=written,threads=1", LIMIT, 0.90),
        // A large folio is in order within itself: there is no next frame to foresee.
        target("layout=scattered,folio_bytes=4096,block_bytes=4096", ONE_BY_ONE, 1.15),
        target("layout=scattered,folio_bytes=4096,block_bytes=65536", ONE_BY_ONE, 1.1),
        target("layout=scattered,folio_bytes=4096,block_bytes=1048576", ONE_BY_ONE, 1.1),
        target("layout=scattered,folio_bytes=2097152", ONE_BY_ONE, 0.99),
        target("layout=scattered,block_bytes=4096", KERNEL, 1.5),
        target("layout=scattered,block_bytes=65536", KERNEL, 1.0),
        target("layout=scattered,block_bytes=1048576", KERNEL, 1.0),
    ],
    run,
    child: None,
};

/// The parameters of one run, as the envelope shows them.
#[derive(Debug, Serialize)]
pub(crate) struct Parameters {
    size_bytes: u64,
    #[serde(flatten)]
    times: Times,
    /// Numbers of threads that read small folios in order.
    threads: Vec<usize>,
}

fn parameters(config: &Config) -> Result<Parameters> {
    let size_bytes = config.size_bytes.unwrap_or(config.of_set([8 << 20, 128 << 20, 1 << 30]));
    // The file is whole folios.
    if size_bytes == 0 || !size_bytes.is_multiple_of(FOLIOS_BYTES[1]) || size_bytes > 64 << 30 {
        let range = "--size must be a multiple of 2 MiB, from that to 64 GiB";
        return Err(Error::Refused(range.into()));
    }
    let times = config.times([(0.2, 2), (4.0, 5), (240.0, 11)]);
    let threads = config.threads_or_default()?;
    Ok(Parameters { size_bytes, times, threads })
}

/// Creation of a file: in which order it is written, or that it is not written. The same order is
/// used for the file of the kernel, the files of the caches, and the plain memory of the limit: the
/// i-th piece written is the i-th piece of the memory, because free frames are allocated in order.
#[derive(Clone, Copy, Debug)]
struct Plan {
    layout: Layout,
    size_bytes: u64,
    folio_bytes: u64,
}

/// How the file is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Written from its first byte to its last.
    Written,
    /// Written folio by folio in random order, like in an aged cache.
    Scattered,
    /// Nothing but a length.
    Hole,
}

impl Layout {
    const ALL: [(Self, &str); 3] =
        [(Self::Written, "written"), (Self::Scattered, "scattered"), (Self::Hole, "hole")];
}

impl Plan {
    /// Returns `true` if the file holds the pattern, otherwise zeros.
    fn is_filled(&self) -> bool {
        self.layout != Layout::Hole
    }

    fn matches(&self, bytes: &[u8], pos_bytes: u64) -> bool {
        let is_zero = || bytes.iter().all(|&byte| byte == 0);
        if self.is_filled() { pattern::matches(bytes, pos_bytes) } else { is_zero() }
    }

    /// Returns how much is written at once.
    fn piece_bytes(&self) -> usize {
        match self.layout {
            Layout::Scattered => self.folio_bytes as usize,
            _ => CHUNK_BYTES.min(self.size_bytes as usize),
        }
    }

    /// Returns the positions of all pieces, in the order in which they are written.
    fn positions(&self) -> impl Iterator<Item = u64> + use<> {
        let piece_bytes = self.piece_bytes() as u64;
        let pieces = self.size_bytes.div_ceil(piece_bytes);
        let scattered = self.layout == Layout::Scattered;
        let order = scattered.then(|| Permutation::new(pieces, SEED));
        (0..pieces).map(move |index| order.map_or(index, |order| order.apply(index)) * piece_bytes)
    }

    /// Creates such a file, whose length is set.
    fn make(&self, write: impl Fn(&[u8], u64) -> Result<()>) -> Result<()> {
        let mut piece = vec![0; self.piece_bytes()];
        for pos_bytes in self.positions().filter(|_| self.is_filled()) {
            let left_bytes = self.size_bytes - pos_bytes;
            let piece_bytes = left_bytes.min(piece.len() as u64) as usize;
            pattern::fill(&mut piece[..piece_bytes], pos_bytes);
            write(&piece[..piece_bytes], pos_bytes)?;
        }
        Ok(())
    }

    fn make_on_tmpfs(&self, file: &File) -> Result<()> {
        let failed = || Error::system("make a file on tmpfs");
        file.set_len(self.size_bytes).map_err(failed())?;
        self.make(|bytes, pos_bytes| file.write_all_at(bytes, pos_bytes).map_err(failed()))
    }

    fn make_in_cache(&self, file: &bifolio::File) -> Result<()> {
        file.set_len(self.size_bytes)?;
        self.make(|bytes, pos_bytes| Ok(file.write_all_at(bytes, pos_bytes)?))
    }

    /// Returns the index of each folio of the file in memory that was filled in the order of
    /// writing.
    fn places(&self) -> Vec<usize> {
        let mut places = vec![0; (self.size_bytes / self.folio_bytes) as usize];
        for (place, pos_bytes) in self.positions().enumerate() {
            places[(pos_bytes / self.folio_bytes) as usize] = place * self.folio_bytes as usize;
        }
        places
    }

    /// Returns where each of `threads` begins to read.
    fn parts(&self, threads: usize) -> Vec<u64> {
        let part_bytes = self.size_bytes / threads as u64;
        let starts = (0..threads as u64).map(|thread| thread * part_bytes);
        starts.map(|start| start / LOOK_BYTES * LOOK_BYTES).collect()
    }

    /// Fills such memory.
    fn fill_in_order(&self, memory: &mut [u8]) {
        let pieces = memory.chunks_mut(self.piece_bytes());
        pieces.zip(self.positions()).for_each(|(piece, at)| pattern::fill(piece, at));
    }
}

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let files = Layout::ALL.len() * FOLIOS_BYTES.len();
    let by_block = files - 1 + parameters.threads.len();
    let rounds = parameters.times.shared((by_block * BLOCKS_BYTES.len() * SERIES) as u32);
    for (layout, name) in Layout::ALL {
        for folio_bytes in FOLIOS_BYTES {
            let plan = Plan { layout, size_bytes: parameters.size_bytes, folio_bytes };
            let in_order = layout == Layout::Written && folio_bytes == FOLIOS_BYTES[0];
            let threads = if in_order { &parameters.threads[..] } else { &[1] };
            measure(run, plan, name, threads, rounds)?;
        }
    }
    let rows = &run.report.rows;
    run.report.figures = rows.iter().filter_map(|row| unwritten(row, rows)).collect();
    Ok(())
}

fn measure(
    run: &mut Run<'_>,
    plan: Plan,
    layout: &'static str,
    threads: &[usize],
    rounds: Rounds,
) -> Result<()> {
    let cpus = &cpus::of_threads(threads)?;
    let what = format!("{layout}, folios of {}", format_bytes(plan.folio_bytes));
    run.start(&format!("make and compare: {what}"), 1);
    let sources = sources(run, plan)?;
    let mut buffer = vec![0; BLOCKS_BYTES[2]];
    for source in &sources {
        run.report.verified_bytes += (source.verify)(&mut buffer)?;
    }
    run.step();
    let mut rows = run.rows();
    let each = |block_bytes| threads.iter().map(move |&threads| (block_bytes, threads));
    for (block_bytes, threads) in BLOCKS_BYTES.into_iter().flat_map(each) {
        let case = Case::new().with("layout", layout).with("folio_bytes", plan.folio_bytes);
        let case = case.with("block_bytes", block_bytes).with("threads", threads);
        rows.row(case, ("GiB/s", Measured::gibibytes_rate));
        for source in &sources {
            let cursors = RefCell::new(plan.parts(threads));
            rows.series(source.series, move |duration| {
                let starts = cursors.borrow().clone();
                let read = source.read_on(&cpus[..threads], &starts, block_bytes, duration)?;
                let (looks, ends) = read.into_iter().unzip();
                cursors.replace(ends);
                let mut measured = sum_of_threads(looks);
                let mib = measured.calls.operations;
                measured.bytes = mib * LOOK_BYTES;
                // The loop checks the first word of every block it reads.
                measured.verified_bytes = mib * (LOOK_BYTES / block_bytes as u64) * 8;
                Ok(measured)
            });
        }
    }
    run.measure(&format!("measure: {what}"), rows, rounds)
}

type ReadOn = Box<dyn Fn(&mut [u8], &mut u64, Duration) -> Result<Work> + Sync>;
type Verify = Box<dyn Fn(&mut [u8]) -> Result<u64>>;

/// One way to read one file: a series, with two loops that are compiled for it.
struct Source {
    series: &'static str,
    read_on: ReadOn,
    verify: Verify,
}

impl Source {
    fn new(
        series: &'static str,
        plan: Plan,
        read: impl Fn(&mut [u8], u64) -> Result<usize> + Clone + Sync + 'static,
    ) -> Self {
        let verified = read.clone();
        Self {
            series,
            read_on: Box::new(move |block, cursor_bytes, duration| {
                read_on(series, plan, &read, block, cursor_bytes, duration)
            }),
            verify: Box::new(move |buffer| verify(series, plan, &verified, buffer)),
        }
    }

    /// Reads on from each of `starts` in a thread on one of `cpus`. Returns what [`read_on`] does
    /// for each, and where it ended.
    fn read_on(
        &self,
        cpus: &[usize],
        starts: &[u64],
        block_bytes: usize,
        duration: Duration,
    ) -> Result<Vec<(Work, u64)>> {
        let read_on = &self.read_on;
        // Every page is touched now, not while timed, by the thread that uses it.
        let prepare = |thread: usize| Ok((vec![1; BLOCKS_BYTES[2] + PAGE_BYTES], starts[thread]));
        run_pinned(cpus, prepare, |(mut bytes, mut cursor_bytes)| {
            // The block starts a page.
            let start = bytes.as_ptr().align_offset(PAGE_BYTES);
            let block = &mut bytes[start..][..block_bytes];
            let looks = read_on(block, &mut cursor_bytes, duration)?;
            Ok((looks, cursor_bytes))
        })
    }
}

/// Reads on from `cursor_bytes`, block by block, for at least `duration`; restarts at the end of
/// file. Checks the first word of every block. Returns the MiB and when they were read.
#[inline(always)]
fn read_on(
    series: &str,
    plan: Plan,
    read: &impl Fn(&mut [u8], u64) -> Result<usize>,
    block: &mut [u8],
    cursor_bytes: &mut u64,
    duration: Duration,
) -> Result<Work> {
    let wrong = |pos_bytes| Error::WrongBytes { series: series.to_owned(), pos_bytes };
    let (mut sums, mut any_bit) = (Sums::default(), 0);
    let (mut looks, start) = (0, Instant::now());
    loop {
        for _ in 0..LOOK_BYTES / block.len() as u64 {
            let pos_bytes = *cursor_bytes;
            if read(block, pos_bytes)? != block.len() {
                return Err(wrong(pos_bytes));
            }
            black_box(&mut *block);
            if let Some(word) = block.first_chunk::<8>() {
                sums.add(word, pos_bytes);
                any_bit |= u64::from_ne_bytes(*word);
            }
            *cursor_bytes = pos_bytes + block.len() as u64;
            if *cursor_bytes >= plan.size_bytes {
                *cursor_bytes = 0;
            }
        }
        looks += 1;
        let end = Instant::now();
        if end - start >= duration {
            let agrees = if plan.is_filled() { sums.agree() } else { any_bit == 0 };
            return if agrees { Ok((looks, start..end)) } else { Err(wrong(0)) };
        }
    }
}

/// Compares every byte: equal shares of the file, each with blocks of another size. Returns the
/// number of bytes.
fn verify(
    series: &str,
    plan: Plan,
    read: &impl Fn(&mut [u8], u64) -> Result<usize>,
    buffer: &mut [u8],
) -> Result<u64> {
    let share_bytes = plan.size_bytes.div_ceil(BLOCKS_BYTES.len() as u64);
    // Every block begins at a multiple of its size, as the timed ones do.
    let share_bytes = share_bytes.next_multiple_of(LOOK_BYTES);
    let mut pos_bytes = 0;
    while pos_bytes < plan.size_bytes {
        let block_bytes = BLOCKS_BYTES[(pos_bytes / share_bytes) as usize];
        let left_bytes = plan.size_bytes - pos_bytes;
        let block = &mut buffer[..left_bytes.min(block_bytes as u64) as usize];
        // Nothing of the last block may pass for this one.
        block.fill(0xa5);
        if read(block, pos_bytes)? != block.len() || !plan.matches(block, pos_bytes) {
            return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes });
        }
        pos_bytes += block.len() as u64;
    }
    Ok(pos_bytes)
}

/// Makes the file in every way it can be read, in the order of the tables.
fn sources(run: &mut Run<'_>, plan: Plan) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    let kernel = on_tmpfs(run, &plan);
    if let Some((file, tmpfs)) = run.attempt(&[KERNEL], kernel)? {
        let file = Arc::new((file, tmpfs));
        let read = move |block: &mut [u8], pos_bytes| {
            pread(&file.0, block, pos_bytes).map_err(Error::system("read a file on tmpfs"))
        };
        sources.push(Source::new(KERNEL, plan, read));
    }
    for series in [ONE_BY_ONE, BATCHED] {
        if series == ONE_BY_ONE && !plan.is_filled() {
            continue;
        }
        let builder = Cache::builder().memory(resident_memory_bytes(plan.size_bytes));
        let cached = Cached::in_memory(builder, OpenOptions::new().folio_bytes(plan.folio_bytes))?;
        plan.make_in_cache(&cached.file)?;
        sources.push(if series == BATCHED {
            let read = move |block: &mut [u8], at| Ok(cached.file.read_at(block, at)?);
            Source::new(series, plan, read)
        } else {
            let read = move |block: &mut [u8], at| read_pinned(&cached.file, block, at);
            Source::new(series, plan, read)
        });
    }
    sources.push(limit(plan)?);
    Ok(sources)
}

/// Reads page by page, with a reference for each.
fn read_pinned(file: &bifolio::File, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
    let positions = (pos_bytes..).step_by(PAGE_BYTES);
    for (page, pos_bytes) in block.chunks_mut(PAGE_BYTES).zip(positions) {
        file.pin(pos_bytes..pos_bytes + page.len() as u64)?.copy_to(0, page);
    }
    Ok(block.len())
}

/// Makes the file on tmpfs, with pages as the folios are, if the system allows that.
fn on_tmpfs(run: &mut Run<'_>, plan: &Plan) -> Result<(File, Tmpfs)> {
    let pages = if plan.folio_bytes > 4096 { HugePages::Always } else { HugePages::Never };
    let tmpfs = Tmpfs::mount(run.workspace, plan.size_bytes, pages).or_else(|refusal| {
        let note = format!(
            "kernel_tmpfs has the system's default pages, not {}: {}",
            pages.option().trim_start_matches(','),
            with_causes(&refusal)
        );
        if !run.report.notes.contains(&note) {
            run.note(note);
        }
        Tmpfs::create(run.workspace, plan.size_bytes)
    })?;
    let options = File::options().read(true).write(true).create_new(true).clone();
    let file = options.open(tmpfs.path().join("file"));
    let file = file.map_err(Error::system("make a file on tmpfs"))?;
    plan.make_on_tmpfs(&file)?;
    Ok((file, tmpfs))
}

/// Creates the limit: a copy from memory laid out in the same way, or zeros into the buffer.
fn limit(plan: Plan) -> Result<Source> {
    if !plan.is_filled() {
        let zero = |block: &mut [u8], _| {
            block.fill(0);
            Ok(block.len())
        };
        return Ok(Source::new(LIMIT, plan, zero));
    }
    let memory = PlainMemory::filled(plan.size_bytes, |bytes| plan.fill_in_order(bytes))?;
    let memory = Arc::new(memory);
    if plan.layout == Layout::Written {
        let copy = move |block: &mut [u8], pos_bytes: u64| {
            block.copy_from_slice(&memory.bytes()[pos_bytes as usize..][..block.len()]);
            Ok(block.len())
        };
        return Ok(Source::new(LIMIT, plan, copy));
    }
    let (places, folio_bytes) = (plan.places(), plan.folio_bytes as usize);
    let copy = move |block: &mut [u8], pos_bytes: u64| {
        // Blocks and folios divide each other, so no piece crosses the end of a folio.
        let piece_bytes = block.len().min(folio_bytes);
        let positions = (pos_bytes as usize..).step_by(piece_bytes);
        for (piece, pos_bytes) in block.chunks_mut(piece_bytes).zip(positions) {
            let source = places[pos_bytes / folio_bytes] + pos_bytes % folio_bytes;
            piece.copy_from_slice(&memory.bytes()[source..source + piece.len()]);
        }
        Ok(block.len())
    };
    Ok(Source::new(LIMIT, plan, copy))
}

/// Returns the figure that compares unwritten bytes with written ones, in the same blocks of the
/// same folios.
fn unwritten(row: &Row, rows: &[Row]) -> Option<Figure> {
    let text = |key| row.case.text(key);
    let (layout, folio, block) = (text("layout"), text("folio_bytes"), text("block_bytes"));
    if layout != "hole" {
        return None;
    }
    let written = rows.iter().find(|other| {
        let has = |key, value: &str| other.case.text(key) == value;
        has("layout", "written") && has("folio_bytes", &folio) && has("block_bytes", &block)
    });
    let value = row.series.get(BATCHED)? / written?.series.get(BATCHED)?;
    let name =
        format!("batched, against written, {layout}, folios of {folio}, {block} bytes a call");
    Some(Figure { name, value, target: 1.0, at_most: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOLIO_BYTES: u64 = 8192;
    const SIZE_BYTES: u64 = 3 << 20;

    fn plan(layout: Layout) -> Plan {
        Plan { layout, size_bytes: SIZE_BYTES, folio_bytes: FOLIO_BYTES }
    }

    #[test]
    fn threads_begin_at_blocks_of_their_own_parts() {
        assert_eq!(plan(Layout::Written).parts(1), [0]);
        assert_eq!(plan(Layout::Written).parts(3), [0, 1 << 20, 2 << 20]);
        assert_eq!(plan(Layout::Written).parts(4), [0, 0, 1 << 20, 2 << 20]);
    }

    #[test]
    fn each_folio_is_found_where_it_was_put() {
        let plan = plan(Layout::Scattered);
        let mut memory = vec![0; 3 << 20];
        plan.fill_in_order(&mut memory);
        let places = plan.places();
        for (folio, place) in places.iter().enumerate() {
            let bytes = &memory[*place..place + FOLIO_BYTES as usize];
            assert!(pattern::matches(bytes, folio as u64 * FOLIO_BYTES));
        }
        let follows = |pair: &&[usize]| pair[1] == pair[0] + FOLIO_BYTES as usize;
        let neighbours = places.windows(2).filter(follows).count();
        assert!(neighbours < 10, "{neighbours} of {}", places.len());
    }

    #[test]
    fn wrong_bytes_are_found_and_wrong_first_words_while_timed() {
        for layout in [Layout::Written, Layout::Hole] {
            let plan = plan(layout);
            let faulty = |wrong_at_bytes: u64| {
                let read = move |block: &mut [u8], pos_bytes: u64| {
                    block.fill(0);
                    if plan.is_filled() {
                        pattern::fill(block, pos_bytes);
                    }
                    let wrong_at = wrong_at_bytes.checked_sub(pos_bytes).map(|at| at as usize);
                    if let Some(byte) = wrong_at.and_then(|at| block.get_mut(at)) {
                        *byte ^= 4;
                    }
                    Ok(block.len())
                };
                Source::new("faulty", plan, read)
            };
            let mut buffer = vec![0; 1 << 20];
            let mut verify = |wrong| (faulty(wrong).verify)(&mut buffer);
            assert_eq!(verify(u64::MAX).unwrap(), SIZE_BYTES);
            assert!(verify(4095).is_err() && verify(SIZE_BYTES - 1).is_err());
            let (mut block, mut cursor) = (vec![0; 64 << 10], 2 << 20);
            let mut read_on =
                |wrong| (faulty(wrong).read_on)(&mut block, &mut cursor, Duration::ZERO);
            assert_eq!(read_on(u64::MAX).unwrap().0, 1);
            assert!(read_on(64 << 10).is_err(), "it goes on at the start");
            assert_eq!(cursor, 1 << 20);
        }
    }
}

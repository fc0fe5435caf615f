//! `seq-reads`: a memory file from front to back, against tmpfs and against a plain copy.
//!
//! Rows: the order in which the file was written (`layout`), the size of its folios, the size of
//! the blocks it is read in, the number of threads, which is one but for small folios in order.
//! Series: `pread` of the same file on tmpfs, written in the same order, with huge pages where the
//! folios are large (`kernel_tmpfs`); a pin and a copy for each page (`one_by_one`); `read_at`,
//! which gathers a batch of Entries and takes no reference (`batched`); and a plain copy in the
//! same pattern (`memcpy_limit`).
//!
//! Each thread has a CPU and a buffer, and begins a part of the file after the one before it. The
//! first continues where it ended in the last trial of its series, and each restarts at the end of
//! file, so that all trials together read all of the file. Before that, all bytes of every series
//! are compared, and the first ones in blocks of every size. A layout with one size of folios is
//! made, compared, measured and dropped before the next one, so that memory holds one file at a
//! time, in four copies.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bifolio::{Cache, OpenOptions};
use bifolio_report::{Case, with_causes};
use rustix::io::pread;

use crate::benchmark::Needs;
use crate::definition::{Asked, Definition, Parameters, at_least};
use crate::error::{Error, Result};
use crate::format_bytes;
use crate::harness::access::PAGE_BYTES;
use crate::harness::access::Permutation;
use crate::harness::cached::Cached;
use crate::harness::cpus;
use crate::harness::measured::Measured;
use crate::harness::pattern::{self, Sums};
use crate::harness::reads::{Load, Way, verify};
use crate::harness::sizes::{SizeRule, resident_memory_bytes};
use crate::harness::span::Span;
use crate::harness::threads::{Window, run_for};
use crate::harness::tmpfs::Tmpfs;
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
/// The row of the smallest folios, in the smallest blocks, out of order.
const SCATTERED_PAGES: &str = "layout=scattered,folio_bytes=4096,block_bytes=4096";

pub(crate) static SEQ_READS: Definition = Definition {
    name: "seq-reads",
    description: "a memory file in order: in batches and one by one, against tmpfs and a plain \
                  copy",
    // The file is whole folios.
    sizes: SizeRule::Resident {
        size_bytes: [8 << 20, 128 << 20, 1 << 30],
        unit_bytes: FOLIOS_BYTES[1],
        max_bytes: 64 << 30,
    },
    times: [(0.2, 2), (4.0, 5), (240.0, 11)],
    // In memory a file on tmpfs, plain memory, two caches, and the buffers.
    needs: |parameters| {
        let size_bytes = parameters.sizes.size_bytes;
        let files_bytes = 2 * size_bytes + 2 * resident_memory_bytes(size_bytes);
        let buffers_bytes = 2 * LOOK_BYTES * parameters.threads_max() as u64;
        Needs { disk_bytes: 0, memory_bytes: files_bytes + buffers_bytes + (64 << 20) }
    },
    ratios: &[(BATCHED, KERNEL), (BATCHED, ONE_BY_ONE), (BATCHED, LIMIT)],
    shown_counts: &[],
    targets: &[
        at_least("layout=written,threads=1", Asked::Ratio(BATCHED, ONE_BY_ONE), 0.97),
        at_least("layout=written,block_bytes=4096", Asked::Ratio(BATCHED, KERNEL), 3.0),
        at_least("layout=written,threads=1", Asked::Ratio(BATCHED, KERNEL), 1.5),
        at_least("layout=written,threads=1", Asked::Ratio(BATCHED, LIMIT), 0.90),
        // A large folio is in order within itself: there is no next frame to foresee.
        at_least("layout=scattered,folio_bytes=4096", Asked::Ratio(BATCHED, ONE_BY_ONE), 1.1),
        at_least(SCATTERED_PAGES, Asked::Ratio(BATCHED, ONE_BY_ONE), 1.15),
        at_least("layout=scattered,folio_bytes=2097152", Asked::Ratio(BATCHED, ONE_BY_ONE), 0.99),
        at_least("layout=scattered,block_bytes=4096", Asked::Ratio(BATCHED, KERNEL), 1.5),
        at_least("layout=scattered", Asked::Ratio(BATCHED, KERNEL), 1.0),
    ],
    run,
    child: None,
};

/// Creation of a file: in which order it is written. The same order is used for the file of the
/// kernel, the files of the caches, and the plain memory of the limit: the i-th folio written is
/// the i-th of the memory, because free frames are allocated in order.
#[derive(Clone, Copy, Debug)]
struct Plan {
    /// Set if it is written folio by folio in random order, like in an aged cache, instead of from
    /// its first byte to its last.
    is_scattered: bool,
    size_bytes: u64,
    folio_bytes: u64,
}

const LAYOUTS: [(&str, bool); 2] = [("written", false), ("scattered", true)];

impl Plan {
    /// Returns the positions of all folios, in the order in which they are written.
    fn positions(&self) -> impl Iterator<Item = u64> + use<> {
        let folio_bytes = self.folio_bytes;
        let folios = self.size_bytes / folio_bytes;
        let order = self.is_scattered.then(|| Permutation::new(folios, SEED));
        (0..folios).map(move |index| order.map_or(index, |order| order.apply(index)) * folio_bytes)
    }

    /// Writes such a file, whose length is set.
    fn write(&self, write: impl Fn(&[u8], u64) -> Result<()>) -> Result<()> {
        let mut folio = vec![0; self.folio_bytes as usize];
        self.positions().try_for_each(|pos_bytes| {
            pattern::fill(&mut folio, pos_bytes, 0);
            write(&folio, pos_bytes)
        })
    }
}

fn run(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let files = LAYOUTS.len() * FOLIOS_BYTES.len();
    let by_block = files - 1 + parameters.threads.len();
    let rounds = parameters.shared(by_block * BLOCKS_BYTES.len() * SERIES);
    for (layout, is_scattered) in LAYOUTS {
        for folio_bytes in FOLIOS_BYTES {
            let plan = Plan { is_scattered, size_bytes: parameters.sizes.size_bytes, folio_bytes };
            let in_order = !is_scattered && folio_bytes == FOLIOS_BYTES[0];
            let threads = if in_order { &parameters.threads[..] } else { &[1] };
            measure(run, plan, layout, threads, rounds)?;
        }
    }
    Ok(())
}

fn measure(
    run: &mut Run<'_>,
    plan: Plan,
    layout: &'static str,
    threads: &[usize],
    rounds: Rounds,
) -> Result<()> {
    let cpus = &cpus::of_threads(threads.iter().copied().max().unwrap_or(1))?;
    let what = format!("{layout}, folios of {}", format_bytes(plan.folio_bytes));
    run.start(&format!("make: {what}"), 1);
    let mut ways = ways(run, plan)?;
    run.step();
    run.verify(&mut ways, plan.size_bytes)?;
    let mut rows = run.rows();
    for block_bytes in BLOCKS_BYTES {
        for &threads in threads {
            let case = Case::new().with("layout", layout).with("folio_bytes", plan.folio_bytes);
            let case = case.with("block_bytes", block_bytes).with("threads", threads);
            rows.row(case, ("GiB/s", Measured::gibibytes_rate));
            let extent_bytes = plan.size_bytes;
            let load = Load { block_bytes, extent_bytes, cpus: &cpus[..threads] };
            for way in &ways {
                rows.series(way.series, move |duration| (way.run)(&load, duration));
            }
        }
    }
    run.measure(&format!("measure: {what}"), rows, rounds)
}

/// Makes the file in every way it can be read, in the order of the tables.
fn ways(run: &mut Run<'_>, plan: Plan) -> Result<Vec<Way>> {
    let mut ways = Vec::new();
    let kernel = on_tmpfs(run, &plan);
    if let Some(file) = run.attempt(&[KERNEL], kernel)?.map(Arc::new) {
        let read = move |block: &mut [u8], pos_bytes| {
            pread(&file.0, block, pos_bytes).map_err(Error::system("read a file on tmpfs"))
        };
        ways.push(in_order(KERNEL, plan, read));
    }
    for series in [ONE_BY_ONE, BATCHED] {
        let builder = Cache::builder().memory(resident_memory_bytes(plan.size_bytes));
        let cached = Cached::in_memory(builder, OpenOptions::new().folio_bytes(plan.folio_bytes))?;
        let file = cached.file;
        file.set_len(plan.size_bytes)?;
        plan.write(|bytes, pos_bytes| Ok(file.write_all_at(bytes, pos_bytes)?))?;
        ways.push(if series == BATCHED {
            let read = move |block: &mut [u8], at| Ok(file.read_at(block, at)?);
            in_order(series, plan, read)
        } else {
            let read = move |block: &mut [u8], at| read_pinned(&file, block, at);
            in_order(series, plan, read)
        });
    }
    ways.push(limit(plan)?);
    Ok(ways)
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
    let pages = if plan.folio_bytes > 4096 { ",huge=always" } else { ",huge=never" };
    let tmpfs = Tmpfs::mount(run.workspace, plan.size_bytes, pages).or_else(|refusal| {
        let reason = with_causes(&refusal);
        let note = format!("kernel_tmpfs has the system's default pages, not {pages}: {reason}");
        if !run.report.notes.contains(&note) {
            run.note(note);
        }
        Tmpfs::create(run.workspace, plan.size_bytes)
    })?;
    let failed = || Error::system("make a file on tmpfs");
    let options = File::options().read(true).write(true).create_new(true).clone();
    let file = options.open(tmpfs.path().join("file")).map_err(failed())?;
    file.set_len(plan.size_bytes).map_err(failed())?;
    plan.write(|bytes, pos_bytes| file.write_all_at(bytes, pos_bytes).map_err(failed()))?;
    Ok((file, tmpfs))
}

/// Creates the limit: a copy from memory laid out in the same way.
fn limit(plan: Plan) -> Result<Way> {
    let folio_bytes = plan.folio_bytes as usize;
    let memory = Span::plain(plan.size_bytes, |bytes| {
        let folios = bytes.chunks_mut(folio_bytes).zip(plan.positions());
        folios.for_each(|(folio, pos_bytes)| pattern::fill(folio, pos_bytes, 0));
    })?;
    if !plan.is_scattered {
        let copy = move |block: &mut [u8], pos_bytes: u64| {
            memory.copy(block, pos_bytes);
            Ok(block.len())
        };
        return Ok(in_order(LIMIT, plan, copy));
    }
    let mut places = vec![0; plan.size_bytes as usize / folio_bytes];
    for (place, pos_bytes) in plan.positions().enumerate() {
        places[pos_bytes as usize / folio_bytes] = place * folio_bytes;
    }
    let copy = move |block: &mut [u8], pos_bytes: u64| {
        // Blocks and folios divide each other, so no piece crosses the end of a folio.
        let piece_bytes = block.len().min(folio_bytes);
        let positions = (pos_bytes as usize..).step_by(piece_bytes);
        for (piece, pos_bytes) in block.chunks_mut(piece_bytes).zip(positions) {
            let source = places[pos_bytes / folio_bytes] + pos_bytes % folio_bytes;
            memory.copy(piece, source as u64);
        }
        Ok(block.len())
    };
    Ok(in_order(LIMIT, plan, copy))
}

/// Creates a way to read the file in order, with a loop that is compiled for it.
fn in_order(
    series: &'static str,
    plan: Plan,
    read: impl Fn(&mut [u8], u64) -> Result<usize> + Clone + Sync + 'static,
) -> Way {
    let (of_trial, cursor) = (read.clone(), AtomicU64::new(0));
    let run =
        move |load: &Load<'_>, duration| read_on(series, plan, &of_trial, &cursor, load, duration);
    let verify = move |size_bytes: u64| {
        let ([small, medium, large], start_bytes) = (BLOCKS_BYTES, size_bytes.min(8 << 20));
        Ok(verify(series, start_bytes, small, &read)?
            + verify(series, start_bytes, medium, &read)?
            + verify(series, size_bytes, large, &read)?)
    };
    Way { series, run: Box::new(run), verify: Box::new(verify) }
}

/// Reads on from `cursor`, and a part of the file further for each thread, block by block, for at
/// least `duration`; restarts at the end of file. Checks the first word of every block. Each MiB is
/// an operation.
#[inline(always)]
fn read_on(
    series: &str,
    plan: Plan,
    read: &(impl Fn(&mut [u8], u64) -> Result<usize> + Sync),
    cursor: &AtomicU64,
    load: &Load<'_>,
    duration: Duration,
) -> Result<Measured> {
    let wrong = |pos_bytes| Error::WrongBytes { series: series.to_owned(), pos_bytes };
    let part_bytes = plan.size_bytes / load.cpus.len() as u64 / LOOK_BYTES * LOOK_BYTES;
    // Relaxed, here and below: only the first thread of a trial stores it, at its end.
    let start_bytes = cursor.load(Ordering::Relaxed);
    let prepare = |thread: usize| {
        let start_bytes = (start_bytes + thread as u64 * part_bytes) % plan.size_bytes;
        // Every page is touched now, not while timed, by the thread that uses it.
        Ok((vec![1; BLOCKS_BYTES[2] + PAGE_BYTES], start_bytes, thread == 0))
    };
    let body = |(mut bytes, mut cursor_bytes, is_first): (Vec<u8>, u64, bool),
                window: &Window<'_>| {
        // The block starts a page.
        let start = bytes.as_ptr().align_offset(PAGE_BYTES);
        let block = &mut bytes[start..][..load.block_bytes];
        let (mut sums, mut looks) = (Sums::default(), 0);
        while looks == 0 || !window.is_over() {
            for _ in 0..LOOK_BYTES / block.len() as u64 {
                if read(block, cursor_bytes)? != block.len() {
                    return Err(wrong(cursor_bytes));
                }
                black_box(&mut *block);
                if let Some(word) = block.first_chunk::<8>() {
                    sums.add(word, cursor_bytes);
                }
                cursor_bytes += block.len() as u64;
                if cursor_bytes >= plan.size_bytes {
                    cursor_bytes = 0;
                }
            }
            looks += 1;
        }
        if is_first {
            // Relaxed: see above.
            cursor.store(cursor_bytes, Ordering::Relaxed);
        }
        if sums.agree() { Ok(looks) } else { Err(wrong(0)) }
    };
    let mut measured = run_for(load.cpus, duration, prepare, body)?;
    measured.bytes = measured.calls.operations * LOOK_BYTES;
    measured.verified_bytes = measured.bytes / load.block_bytes as u64 * 8;
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn threads_begin_in_their_own_parts_wherever_earlier_trials_ended() {
        let size_bytes = 8 << 20;
        let plan = Plan { is_scattered: false, size_bytes, folio_bytes: 4096 };
        let seen = Arc::new(Mutex::new(Vec::new()));
        let starts = Arc::clone(&seen);
        let read = move |block: &mut [u8], pos_bytes| {
            pattern::fill(block, pos_bytes, 0);
            seen.lock().push(pos_bytes);
            Ok(block.len())
        };
        let (way, cpu) = (in_order("x", plan, read), cpus::allowed()[0]);
        let trial = |cpus: &[usize]| -> Vec<u64> {
            let load = Load { block_bytes: BLOCKS_BYTES[2], extent_bytes: size_bytes, cpus };
            (way.run)(&load, Duration::ZERO).unwrap();
            let mut starts = std::mem::take(&mut *starts.lock());
            starts.sort_unstable();
            starts.into_iter().map(|start| start >> 20).collect()
        };
        assert_eq!(trial(&[cpu]), [0]);
        assert_eq!(trial(&[cpu; 2]), [1, 5]);
        assert_eq!(trial(&[cpu]), [2]);
        assert_eq!(trial(&[cpu; 4]), [1, 3, 5, 7]);
    }
}

//! Asynchronous calls on real files whose futures are dropped at every moment: before the first
//! poll, after it, after several, when they are ready, on the thread that polls them or on another,
//! at once or during a transfer. Some are leaked, in every fourth scene.
//!
//! Each worker has slots of the file and a log of its own, so it knows all their bytes. A call uses
//! a slot, which no other call uses meanwhile. What a dropped write has left is its first bytes or
//! none; they are read after its drop, and must be the same until the next write of the slot. A
//! record of a dropped append is in the log as a whole or not at all.
//!
//! Afterwards the bytes are right in the cache and on storage, and nothing is left: no folio is
//! kept by an eviction, no memory, no thread and no descriptor. Leaked futures keep their handles,
//! and no more folios than there are of them.

mod worker;

use crate::codec::{self, WordKeys};
use crate::history::Violation;
use crate::{memory, watchdog};
use bifolio::{Cache, File, OpenOptions};
use bifolio_testing::fill_bytes;
use fastrand::Rng;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, thread};
use worker::Worker;

const WORKERS: usize = 2;
/// Bytes of a slot: three pages, so that calls span pages and folios.
const SLOT: usize = 3 * 4096;
/// Slots of each worker.
const SLOTS: usize = 208;
/// Futures that each worker leaks at most, in a scene that leaks any.
const LEAKS_MAX: u64 = 8;
/// Bytes that the allocator may have more after a scene without leaks.
const ALLOCATED_SLACK: u64 = 512 << 10;
/// Maximum time until threads and descriptors of a cache that was dropped are gone.
const PATIENCE: Duration = Duration::from_secs(10);

/// The work of a scene.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub calls: u64,
    /// Futures that were dropped before their first poll.
    pub unpolled: u64,
    /// Futures that were dropped after a poll, before their task was woken.
    pub pending: u64,
    /// Futures that were dropped after their task was woken.
    pub ready: u64,
    pub leaked: u64,
}

impl Tally {
    /// Adds what another worker, or scene, has done.
    pub fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.unpolled += other.unpolled;
        self.pending += other.pending;
        self.ready += other.ready;
        self.leaked += other.leaked;
    }

    /// Returns the number of futures that were dropped before they had an output.
    pub fn dropped(&self) -> u64 {
        self.unpolled + self.pending + self.ready
    }

    /// Prints what was done.
    pub fn tell(&self, elapsed: Duration) {
        let Self { calls, unpolled, pending, ready, leaked } = self;
        let (dropped, rate) = (self.dropped(), self.dropped() as f64 / elapsed.as_secs_f64());
        println!(
            "torture: {dropped} futures dropped of {calls}, {rate:.0} a second: {unpolled} before \
             their first poll, {pending} after one, {ready} when ready; {leaked} leaked"
        );
    }
}

/// Plays a scene, until the time is over or `dropped_max` futures were dropped.
pub fn play(seed: u64, duration: Duration, dropped_max: u64) -> Result<Tally, Violation> {
    // Those of caches whose futures were leaked stay.
    let before = (descriptors(), cache_threads(), memory::allocated_bytes());
    let tally = play_one(seed, Instant::now() + duration, dropped_max)?;
    if tally.leaked == 0 {
        watchdog::enter("the end of threads and descriptors");
        await_end("descriptors", || descriptors() <= before.0)?;
        await_end("threads of a cache", || cache_threads() <= before.1)?;
        let (then, now) = (before.2, memory::allocated_bytes());
        if now > then + ALLOCATED_SLACK {
            return Err(Violation(format!("{now} bytes are allocated, {then} before the scene")));
        }
    }
    Ok(tally)
}

fn play_one(seed: u64, end: Instant, dropped_max: u64) -> Result<Tally, Violation> {
    let mut random = Rng::with_seed(seed);
    let directory = tempfile::tempdir().map_err(setup)?;
    let memory_bytes: u64 = random.choice([1 << 20, 2 << 20, 16 << 20]).unwrap_or(1 << 20);
    let builder = Cache::builder().memory(memory_bytes).dirty_max(memory_bytes / 4);
    let builder = builder.io_depth(random.choice([1, 8, 64]).unwrap_or(64));
    let cache = builder.build().map_err(setup)?;
    let folio_bytes: u64 = if random.bool() { 4096 } else { 16 << 10 };
    let is_sealed = random.u32(0..4) == 0;
    let options = OpenOptions::new().write(true).create(true).folio_bytes(folio_bytes);
    let path = directory.path().join("file");
    let mut bytes = fill_bytes(seed, WORKERS * SLOTS * SLOT);
    fs::write(&path, &bytes).map_err(setup)?;
    let file = if is_sealed {
        fs::write(&path, vec![0; bytes.len()]).map_err(setup)?;
        let file = cache.open(&path, &options.clone().codec(Arc::new(WordKeys))).map_err(setup)?;
        file.write_all_at(&bytes, 0).map_err(setup)?;
        file
    } else {
        cache.open(&path, &options).map_err(setup)?
    };
    let leaks_max = if seed.is_multiple_of(4) { LEAKS_MAX } else { 0 };
    let mut workers = Vec::new();
    for number in 0..WORKERS {
        let log = directory.path().join(format!("log-{number}"));
        let log = cache.open(log, &options).map_err(setup)?;
        let random = Rng::with_seed(seed.wrapping_mul(31) + number as u64);
        workers.push(Worker::new(number, random, file.clone(), log, &bytes, leaks_max));
    }
    let share = dropped_max.div_ceil(WORKERS as u64);
    watchdog::enter("the work");
    let run = |worker: &mut Worker| {
        while Instant::now() < end && worker.tally.dropped() < share {
            worker.round()?;
            watchdog::progress();
        }
        Ok(())
    };
    thread::scope(|scope| {
        let start = |worker| scope.spawn(|| run(worker));
        let threads: Vec<_> = workers.iter_mut().map(start).collect();
        let panicked = |_| Err(Violation("a thread panicked".into()));
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(panicked))
    })?;
    let mut tally = Tally::default();
    workers.iter().for_each(|worker| tally.add(worker.tally));
    rest(&file, &path, is_sealed, &workers, &mut bytes)?;
    watchdog::enter("the close of the files");
    let leaked = tally.leaked;
    await_end("folios that an eviction keeps", || {
        file.evict(..).is_ok_and(|evicted| evicted.kept.total() <= leaked)
    })?;
    drop((workers, file));
    if leaked == 0 {
        memory::check_empty(&cache, folio_bytes)?;
    } else {
        // A future keeps its log open, which no close has synced then.
        watchdog::enter("a sync beside leaked futures");
        cache.sync_all().map_err(|error| Violation(format!("sync_all failed: {error}")))?;
    }
    let stats = cache.stats().memory;
    if stats.used_bytes > stats.bound_bytes || stats.dirty_bytes > 0 {
        return Err(Violation(format!("at the end: {stats:?}")));
    }
    watchdog::enter("the close of the cache");
    cache.close().map_err(|error| Violation(format!("close failed: {error}")))?;
    Ok(tally)
}

/// Compares the file with what the workers know, in the cache and on storage.
fn rest(
    file: &File,
    path: &Path,
    is_sealed: bool,
    workers: &[Worker],
    expected: &mut [u8],
) -> Result<(), Violation> {
    watchdog::enter("the writes of leaked futures");
    for worker in workers {
        for slot in 0..SLOTS {
            expected[worker.range_of(slot)].copy_from_slice(&worker.model[slot * SLOT..][..SLOT]);
        }
        for write in &worker.leaked_writes {
            let place = worker.range_of(write.slot).start + write.start;
            let is_made = || {
                let mut found = vec![0; write.bytes.len()];
                file.read_exact_at(&mut found, place as u64).is_ok() && found == write.bytes
            };
            await_end("bytes of a leaked write that are not written", is_made)?;
            expected[place..][..write.bytes.len()].copy_from_slice(&write.bytes);
        }
    }
    watchdog::enter("the last sync");
    file.sync_data().map_err(|error| Violation(format!("the last sync failed: {error}")))?;
    let mut found = vec![0; expected.len()];
    file.read_exact_at(&mut found, 0).map_err(|error| failed("the last read", &error))?;
    check_same("the last read", &found, expected, 0)?;
    let stored = fs::read(path).map_err(setup)?;
    let stored = if is_sealed { codec::opened(0, stored) } else { stored };
    check_same("the storage after a sync", &stored, expected, 0)
}

fn setup(error: impl std::fmt::Display) -> Violation {
    Violation(format!("the scene cannot be set up: {error}"))
}

fn failed(call: &str, error: &bifolio::Error) -> Violation {
    Violation(format!("{call} failed: {error}"))
}

fn check_same(what: &str, found: &[u8], expected: &[u8], start: usize) -> Result<(), Violation> {
    if found == expected {
        return Ok(());
    }
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    let lengths = (found.len(), expected.len());
    let at = differs.map(|at| start + at);
    Err(Violation(format!("{what}: lengths {lengths:?}, first difference at {at:?}")))
}

fn await_end(what: &str, is_over: impl Fn() -> bool) -> Result<(), Violation> {
    let begun = Instant::now();
    while !is_over() {
        if begun.elapsed() > PATIENCE {
            return Err(Violation(format!("{what} are left after {PATIENCE:?}")));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Returns the number of open descriptors, with that of the folder that lists them.
fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Returns the number of threads that caches have.
fn cache_threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
    // Threads of this program that have no name have that of the program.
    let is_of_cache = |name: &String| name.starts_with("bifolio-") && name != "bifolio-torture\n";
    tasks.filter_map(name).filter(is_of_cache).count()
}

//! The machine stops during writes and syncs: synced bytes remain.
//!
//! The storage is a `CrashingBacking`, which shows at any moment a possible state after a crash:
//! each sector written since the last sync may remain or not. Over it is a `FaultyBacking`: writes
//! are late, so that they overtake each other, short, or fail; syncs fail. Threads write records
//! and a log through a cache that is too small for them, so that reclaim, the flusher and the syncs
//! write at the same time; the test stops the machine repeatedly.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use bifolio::{Cache, File};
use bifolio_testing::{Call, CrashingBacking, Fault, FaultyBacking, with_seeds};
use fastrand::Rng;

use super::contents::{Expected, RECORD_BYTES, log_bytes, place, record};
use crate::support::{assert_same, read_all, writable};

/// Records in the file: 1 MiB.
const SLOTS: u64 = 1 << 10;
/// Records of each of two writers.
const SLOTS_PER_WRITER: u64 = SLOTS / 2;
const CRASHES: usize = 25;
/// Length at which the log is truncated.
const LOG_BYTES_MAX: u64 = 100_000;

/// Storage that crashes, with injected faults.
struct Storage {
    crashing: Arc<CrashingBacking>,
    faulty: Arc<FaultyBacking>,
}

impl Storage {
    fn new(bytes: Vec<u8>) -> Self {
        let crashing = Arc::new(CrashingBacking::new(bytes));
        Self { faulty: Arc::new(FaultyBacking::over(crashing.clone())), crashing }
    }

    fn open(&self, cache: &Cache, folio_bytes: u64) -> File {
        let options = writable().folio_bytes(folio_bytes);
        cache.open_backing(self.faulty.clone(), &options).unwrap()
    }

    /// Injects a random fault.
    fn annoy(&self, random: &mut Rng) {
        let on = |call, random: &mut Rng| Fault::on(call).nth(random.u64(1..20));
        let write = on(Call::Write, random);
        self.faulty.inject(match random.u32(0..6) {
            0 => write.fails(libc::EIO),
            1 => write.fails(libc::ENOSPC),
            // By whole words: no device leaves half of one, and the checks know none.
            2 => write.short_by(8 * random.usize(1..1100)),
            3 => on(Call::SyncData, random).fails(libc::EIO),
            _ => write.times(5).delayed(Duration::from_micros(random.u64(0..3000))),
        });
    }
}

/// State that the threads share.
struct Run {
    data: Storage,
    log: Storage,
    expected: Mutex<Expected>,
    /// Counted under the lock of `expected`.
    cuts: AtomicU32,
    is_over: AtomicBool,
}

impl Run {
    fn expected(&self) -> MutexGuard<'_, Expected> {
        self.expected.lock().unwrap()
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn write_records(&self, file: &File, slots: Range<u64>, mut random: Rng) {
        let mut sequence = 0;
        while !self.is_over() {
            let mut written = Vec::new();
            for _ in 0..random.usize(1..20) {
                // Neighbours, so that write-outs get long.
                let first = random.u64(slots.clone());
                let end = (first + random.u64(1..40)).min(slots.end);
                sequence += 1;
                let bytes: Vec<u8> = (first..end).flat_map(|slot| record(slot, sequence)).collect();
                // One that fails may have been written, or a part of it.
                if file.write_all_at(&bytes, place(first)).is_ok() {
                    written.push((first..end, sequence));
                }
            }
            let synced = match random.bool() {
                true => file.sync_data(),
                false => file.sync_range(place(slots.start)..place(slots.end)),
            };
            if synced.is_ok() {
                let mut expected = self.expected();
                for (slots, sequence) in written {
                    slots.for_each(|slot| expected.note_record(slot, sequence));
                }
            }
        }
    }

    fn append(&self, log: &File, mut random: Rng) {
        let mut end = 0;
        while !self.is_over() {
            for _ in 0..random.u32(1..20) {
                let start = end;
                end += random.u64(1..3000);
                self.expected().log_bytes_max = end;
                while log.write_all_at(&log_bytes(start..end), start).is_err() {}
            }
            if log.sync_data().is_ok() {
                self.expected().log_bytes = end;
            }
            if end > LOG_BYTES_MAX {
                self.cut(log);
                end = 0;
            }
        }
    }

    /// Truncates the log; nothing is expected of it meanwhile.
    fn cut(&self, log: &File) {
        let mut expected = self.expected();
        self.cuts.fetch_add(1, Ordering::Relaxed);
        while log.set_len(0).and_then(|()| log.sync_data()).is_err() {}
        (expected.log_bytes, expected.log_bytes_max) = (0, 0);
    }

    /// Returns the state that must be found, and the number of truncations of the log.
    fn promised(&self) -> (Expected, u32) {
        let expected = self.expected();
        (expected.clone(), self.cuts.load(Ordering::Relaxed))
    }

    /// Checks a possible state after a crash now.
    fn check_crash(&self, seed: u64) {
        let (mut promised, cuts) = self.promised();
        let (data, log) = (self.data.crashing.crash(seed), self.log.crashing.crash(seed));
        let (after, cuts_after) = self.promised();
        promised.check_records(&data.live(), "after a crash");
        // A cut in between leaves no promise of a length, only that of the bytes.
        let is_cut = cuts != cuts_after;
        promised.log_bytes = if is_cut { 0 } else { promised.log_bytes };
        promised.log_bytes_max = if is_cut { u64::MAX } else { after.log_bytes_max };
        promised.check_log(&log.live(), "after a crash");
    }
}

/// Ends the threads, also when a check has failed.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_machine_that_stops_loses_nothing_that_was_synced() {
    for (memory_bytes, folio_bytes) in [(256 << 10, 4 << 10), (512 << 10, 16 << 10)] {
        with_seeds(2, |seed| crash_often(seed, memory_bytes, folio_bytes));
    }
}

fn crash_often(seed: u64, memory_bytes: u64, folio_bytes: u64) {
    let mut random = Rng::with_seed(seed);
    let cache = Cache::builder()
        .memory(memory_bytes)
        .dirty_background(memory_bytes / 8)
        .dirty_age_max(Duration::from_millis(3))
        .build()
        .unwrap();
    let run = Run {
        data: Storage::new(vec![0; (SLOTS * RECORD_BYTES) as usize]),
        log: Storage::new(Vec::new()),
        expected: Mutex::new(Expected::new(SLOTS)),
        cuts: AtomicU32::new(0),
        is_over: AtomicBool::new(false),
    };
    let (data, log) = (run.data.open(&cache, folio_bytes), run.log.open(&cache, folio_bytes));
    thread::scope(|scope| {
        let halves = [0..SLOTS_PER_WRITER, SLOTS_PER_WRITER..SLOTS];
        for slots in halves {
            let random = random.fork();
            scope.spawn(|| run.write_records(&data, slots, random));
        }
        let log_random = random.fork();
        scope.spawn(|| run.append(&log, log_random));
        let _end = EndOnDrop(&run.is_over);
        for _ in 0..CRASHES {
            thread::sleep(Duration::from_micros(random.u64(0..10_000)));
            run.data.annoy(&mut random);
            run.log.annoy(&mut random);
            run.check_crash(random.u64(..));
        }
    });
    for (storage, file) in [(&run.data, &data), (&run.log, &log)] {
        storage.faulty.heal();
        while file.sync_data().is_err() {}
        assert_same(&storage.crashing.durable(), &read_all(file));
    }
    let synced = run.expected().sequences.iter().filter(|sequence| **sequence > 0).count();
    assert!(synced > 100, "only {synced} records were ever synced");
}

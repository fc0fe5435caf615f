//! Write gates: what reaches the storage and when, what waits, and what a gate that fails, stalls
//! or misbehaves does to its file and to others.
//!
//! Longer than 600 lines because most tests share `Log`, the gate that they control.

use crate::support::{PAGE, error_of, files_can_be_mapped, mappable, writable};
use bifolio::{Cache, CacheBuilder, Error, ErrorKind, File, GatedFile, PageRefMut, WriteGate};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// A log of which only the durable LSN matters.
#[derive(Debug, Default)]
struct Log {
    durable: AtomicU64,
    /// LSNs that the cache has asked for.
    asked: Mutex<Vec<u64>>,
    fails: AtomicBool,
    /// Calls for a higher LSN fail, unless it is 0.
    end: AtomicU64,
    /// Number of calls that have failed.
    failures: AtomicU64,
    stalls: Option<Gate>,
}

impl Log {
    fn new() -> Arc<Self> {
        Arc::default()
    }

    fn asked(&self) -> Vec<u64> {
        self.asked.lock().unwrap().clone()
    }

    fn set_durable(&self, lsn: u64) {
        self.durable.fetch_max(lsn, Ordering::Release);
    }
}

impl WriteGate for Log {
    fn durable_lsn(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    fn make_durable(&self, lsn: u64) -> io::Result<()> {
        self.asked.lock().unwrap().push(lsn);
        self.stalls.iter().for_each(Gate::pass);
        let end = self.end.load(Ordering::Relaxed);
        if self.fails.load(Ordering::Relaxed) || end > 0 && lsn > end {
            self.failures.fetch_add(1, Ordering::Relaxed);
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        self.set_durable(lsn);
        Ok(())
    }
}

/// A cache that writes nothing because of its age.
fn quiet(memory_bytes: u64) -> CacheBuilder {
    Cache::builder().memory(memory_bytes).dirty_age_max(Duration::from_millis(3_600_000))
}

/// A file in memory that can be looked at, with a gate.
fn gated(builder: CacheBuilder, log: &Arc<Log>) -> (Cache, GatedFile, Arc<MemoryBacking>) {
    let cache = builder.build().unwrap();
    let storage = Arc::new(MemoryBacking::new(vec![0; 4 * PAGE as usize]));
    let file = cache.open_backing(storage.clone(), &writable()).unwrap();
    (cache, GatedFile::new(file, log.clone()).unwrap(), storage)
}

#[track_caller]
fn wait_until(condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(60), "stuck");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_sync_makes_the_log_durable_first() {
    let log = Log::new();
    let (_cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, 7).unwrap();
    file.write_at(&[2; 8], PAGE, 5).unwrap();
    assert_eq!(file.oldest_dirty_lsn(), Some(5));
    file.sync_data().unwrap();
    assert_eq!((log.asked(), file.oldest_dirty_lsn()), (vec![7], None));
    assert_eq!(storage.bytes()[..8], [1; 8]);
    // The log is ahead: no call.
    file.write_at(&[3; 8], 0, 6).unwrap();
    file.sync_data().unwrap();
    assert_eq!(log.asked(), [7]);
}

#[test]
fn the_flusher_asks_for_the_log_and_then_writes() {
    let log = Log::new();
    let builder = Cache::builder().memory(1 << 20).dirty_age_max(Duration::from_millis(10));
    let (cache, file, storage) = gated(builder, &log);
    file.write_at(&[1; 8], 0, 9).unwrap();
    file.write_at(&[1; 8], PAGE, 4).unwrap();
    wait_until(|| cache.stats().memory.dirty_bytes == 0);
    assert_eq!(storage.bytes()[..8], [1; 8]);
    let asked = log.asked();
    assert!(asked.windows(2).all(|pair| pair[0] < pair[1]), "{asked:?}");
    assert!(asked.len() <= 2 && asked.ends_with(&[9]), "{asked:?}");
    assert_eq!(cache.stats().writes.gate_asks, asked.len() as u64);
}

#[test]
fn write_out_of_a_range_follows_once_the_gate_opens() {
    let log = Log::new();
    let (cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, 3).unwrap();
    file.unlogged().write_all_at(&[2; 8], 2 * PAGE).unwrap();
    file.write_out(0..PAGE).unwrap();
    wait_until(|| storage.bytes()[0] == 1);
    assert_eq!((log.asked(), cache.stats().storage.flushes), (vec![3], 0));
    assert_eq!(file.unlogged().residency(0..3 * PAGE).unwrap().dirty, 1, "outside of the range");
}

#[test]
fn one_flush_of_the_log_lets_all_pages_of_a_round_pass() {
    let log = Log::new();
    let (cache, file, _storage) = gated(quiet(1 << 20), &log);
    (0..40).for_each(|page| file.write_at(&[1; 8], page * PAGE, page + 1).unwrap());
    file.write_out(0..40 * PAGE).unwrap();
    wait_until(|| cache.stats().memory.dirty_bytes == 0);
    assert_eq!(log.asked(), [40]);
}

#[test]
fn a_log_that_ends_below_a_page_lets_older_pages_pass() {
    let log = Log::new();
    log.end.store(20, Ordering::Relaxed);
    let (cache, file, _storage) = gated(quiet(1 << 20), &log);
    (0..40).for_each(|page| file.write_at(&[1; 8], page * PAGE, page + 1).unwrap());
    wait_until(|| {
        file.write_out(0..40 * PAGE).unwrap();
        cache.stats().memory.dirty_bytes == 20 * PAGE
    });
    log.end.store(0, Ordering::Relaxed);
    file.sync_data().unwrap();
}

#[test]
fn write_out_behind_a_failed_gate_follows_once_it_opens() {
    let log = Log::new();
    log.fails.store(true, Ordering::Relaxed);
    let (_cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, 3).unwrap();
    file.write_out(0..PAGE).unwrap();
    wait_until(|| log.failures.load(Ordering::Relaxed) > 0);
    // Another one while the gate pauses.
    file.write_at(&[2; 8], 2 * PAGE, 4).unwrap();
    file.write_out(2 * PAGE..3 * PAGE).unwrap();
    log.fails.store(false, Ordering::Relaxed);
    wait_until(|| storage.bytes()[0] == 1 && storage.bytes()[2 * PAGE as usize] == 2);
}

#[test]
fn a_file_behind_a_failed_gate_can_be_given_up() {
    let log = Log::new();
    log.fails.store(true, Ordering::Relaxed);
    let (cache, file, _storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, 3).unwrap();
    file.write_out(0..PAGE).unwrap();
    wait_until(|| log.failures.load(Ordering::Relaxed) > 0);
    file.discard_dirty().unwrap();
    drop(file);
    cache.close().unwrap();
    drop(cache);
    // The thread of the gate ends, too.
    wait_until(|| Arc::strong_count(&log) == 1);
}

#[test]
fn a_failure_is_forgotten_once_the_log_is_durable() {
    let log = Log::new();
    log.fails.store(true, Ordering::Relaxed);
    let (_cache, file, _storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, 5).unwrap();
    assert_eq!(file.sync_data().unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    // The engine does it itself.
    log.set_durable(5);
    let (_, error) = fill(&file, u64::MAX);
    assert!(error.to_string().contains("not committed"), "{error}");
    assert!(!error.to_string().contains("No space left"), "{error}");
}

#[test]
fn a_pin_gets_its_lsn_after_the_change() {
    let log = Log::new();
    let (_cache, file, _storage) = gated(quiet(1 << 20), &log);
    let mut pin = file.pin_mut(0..8).unwrap();
    pin.copy_from(0, b"changed!").unwrap();
    pin.assign_lsn(11);
    drop(pin);
    // A pin that changed nothing needs none.
    drop(file.pin_mut(0..8).unwrap());
    assert_eq!(file.oldest_dirty_lsn(), Some(11));
    file.sync_data().unwrap();
    assert_eq!(log.asked(), [11]);
}

/// Changes the first bytes of a page through a pin.
fn change(pin: &mut PageRefMut<'_, GatedFile>) {
    pin.copy_from(0, b"changed!").unwrap();
}

#[test]
fn a_pin_dropped_without_an_lsn_is_held_back_until_it_gets_one() {
    let log = Log::new();
    let (cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, 5).unwrap();
    change(&mut file.pin_mut(0..8).unwrap());
    let error = error_of(file.sync_data(), &["4096 bytes", "not committed", "PageRefMut"]);
    assert_eq!(error.kind(), ErrorKind::Gated);
    assert_eq!((storage.bytes()[0], file.oldest_dirty_lsn()), (0, Some(5)));
    // The LSN of a later change does not cover it.
    let mut pin = file.pin_mut(8..16).unwrap();
    change(&mut pin);
    pin.assign_lsn(8);
    drop(pin);
    assert_eq!(file.sync_data().unwrap_err().kind(), ErrorKind::Gated);
    assert_eq!(cache.close().unwrap_err().kind(), ErrorKind::Close);
    file.assign_lsn(0..8, 7).unwrap();
    file.sync_data().unwrap();
    assert_eq!((log.asked().last(), storage.bytes()[0]), (Some(&8), b'c'));
}

#[test]
fn a_panic_under_a_pin_leaves_its_page_behind_the_gate() {
    let log = Log::new();
    let (_cache, file, storage) = gated(quiet(1 << 20), &log);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut pin = file.pin_mut(0..8).unwrap();
        change(&mut pin);
        panic!("before the record is appended");
    }));
    assert!(panicked.is_err());
    assert_eq!(file.sync_data().unwrap_err().kind(), ErrorKind::Gated);
    assert_eq!(file.unlogged().sync_range(0..8).unwrap_err().kind(), ErrorKind::Gated);
    assert_eq!(storage.bytes()[0], 0);
    file.discard_dirty().unwrap();
    file.sync_data().unwrap();
    assert_eq!(storage.bytes()[0], 0);
}

#[test]
fn a_pin_without_an_lsn_in_another_thread_ends_a_sync_with_an_error() {
    let log = Log::new();
    let (_cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[2; 8], PAGE, 5).unwrap();
    let mut pin = file.pin_mut(0..8).unwrap();
    change(&mut pin);
    let sync = || file.sync_data().unwrap_err();
    assert_eq!(sync().kind(), ErrorKind::PinnedByCaller);
    let error = thread::scope(|scope| scope.spawn(sync).join().unwrap());
    assert_eq!(error.kind(), ErrorKind::Gated);
    let told = "4096 of them are in a PageRefMut that has no LSN yet";
    assert!(error.to_string().contains(told), "{error}");
    assert_eq!((storage.bytes()[0], storage.bytes()[PAGE as usize]), (0, 2), "others are written");
    pin.assign_lsn(9);
    drop(pin);
    file.sync_data().unwrap();
    assert_eq!(storage.bytes()[0], b'c');
}

#[test]
fn a_leaked_pin_without_an_lsn_ends_a_sync_with_an_error() {
    let log = Log::new();
    let (_cache, file, storage) = gated(quiet(1 << 20), &log);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut pin = file.pin_mut(0..8).unwrap();
            change(&mut pin);
            std::mem::forget(pin);
        });
    });
    assert_eq!(file.sync_data().unwrap_err().kind(), ErrorKind::Gated);
    assert_eq!(storage.bytes()[0], 0);
    // The lock is held for ever, which a drop of the file would wait for.
    std::mem::forget(file);
    std::mem::forget(_cache);
}

#[test]
fn writers_behind_pins_without_lsns_are_told_of_them() {
    let log = Log::new();
    let (_cache, file, _storage) = gated(quiet(1 << 20), &log);
    file.unlogged().set_len(2 << 20).unwrap();
    let pin =
        |page: u64| file.pin_mut(page * PAGE..(page + 1) * PAGE).map(|mut it| change(&mut it));
    let error = (0..512).find_map(|page| pin(page).err()).unwrap();
    assert_eq!(error.kind(), ErrorKind::Unwritable, "{error:?}");
    assert!(error.to_string().contains("PageRefMut that got no LSN"), "{error}");
    file.assign_lsn(0..2 << 20, 3).unwrap();
    file.sync_data().unwrap();
}

#[test]
fn pages_without_an_lsn_can_be_cut_off() {
    let log = Log::new();
    let (cache, file, storage) = gated(quiet(1 << 20), &log);
    change(&mut file.pin_mut(0..8).unwrap());
    file.unlogged().set_len(0).unwrap();
    file.sync_data().unwrap();
    assert!(storage.bytes().is_empty() && cache.stats().memory.dirty_bytes == 0);
}

#[test]
fn changes_without_a_number_need_to_be_unlogged() {
    let log = Log::new();
    log.fails.store(true, Ordering::Relaxed);
    let cache = quiet(1 << 20).build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tree");
    let options = writable().create(true);
    let earlier = cache.open(&path, &options).unwrap();
    earlier.write_all_at(&[1; PAGE as usize], 0).unwrap();
    earlier.sync_data().unwrap();
    let gated = cache.open_gated(&path, &options, log).unwrap();
    let later = cache.open(&path, &options).unwrap();
    for file in [earlier, later] {
        let refused = [
            file.write_all_at(b"x", 0),
            file.append(b"x").map(drop),
            file.pin_mut(0..8).map(drop),
            file.set_len(1),
            file.punch_hole(0..8),
            file.zero_range(0..8),
            file.allocate(0..2 * PAGE),
            cache.open(&path, &options.clone().truncate(true)).map(drop),
        ];
        for answer in refused {
            let error = error_of(answer, &["GatedFile"]);
            assert_eq!(error.kind(), ErrorKind::GateMisuse, "{error:?}");
        }
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!((bytes, file.len()), ([1; 8], PAGE));
    }
    gated.unlogged().write_all_at(b"x", 0).unwrap();
    gated.sync_data().unwrap();
    assert_eq!(std::fs::read(&path).unwrap()[..2], [b'x', 1]);
}

#[test]
fn an_uncommitted_page_is_not_written_and_the_sync_says_so() {
    let log = Log::new();
    log.set_durable(u64::MAX - 1);
    let (_cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, u64::MAX).unwrap();
    file.write_at(&[2; 8], PAGE, 5).unwrap();
    let error = error_of(file.sync_data(), &["4096 bytes", "not committed"]);
    assert_eq!((error.kind(), error.errno()), (ErrorKind::Gated, libc::EBUSY));
    assert_eq!((storage.bytes()[0], storage.bytes()[PAGE as usize]), (0, 2));
    // A page with several changes keeps the highest until it is committed.
    file.write_at(&[3; 8], 8, 6).unwrap();
    assert!(file.unlogged().sync_range(0..8).is_err());
    file.assign_lsn(0..8, 7).unwrap();
    file.sync_data().unwrap();
    assert_eq!(storage.bytes()[..16], [1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3]);
    assert!(log.asked().is_empty());
}

#[test]
fn a_failing_gate_keeps_pages_dirty_and_its_error_is_returned() {
    let log = Log::new();
    log.fails.store(true, Ordering::Relaxed);
    let (cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, 5).unwrap();
    file.unlogged().write_all_at(&[2; 8], PAGE).unwrap();
    let error = error_of(file.sync_data(), &["LSN 5", "No space left"]);
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    assert_eq!((storage.bytes()[0], storage.bytes()[PAGE as usize]), (0, 2), "others are written");
    assert_eq!((cache.stats().memory.dirty_bytes, log.asked()), (PAGE, vec![5]));
    let error = cache.close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Close, "{error:?}");
    log.fails.store(false, Ordering::Relaxed);
    cache.close().unwrap();
    assert_eq!(storage.bytes()[0], 1);
}

#[test]
fn a_file_closed_behind_its_gate_is_kept_until_it_opens() {
    let log = Log::new();
    log.fails.store(true, Ordering::Relaxed);
    let (cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, 5).unwrap();
    let error = error_of(file.close(), &["LSN 5 "]);
    assert_eq!(error.kind(), ErrorKind::Gated);
    assert_eq!((storage.bytes()[0], cache.stats().memory.dirty_bytes), (0, PAGE));
    log.fails.store(false, Ordering::Relaxed);
    cache.close().unwrap();
    assert_eq!(storage.bytes()[0], 1);
    drop(cache);
    assert_eq!(Arc::strong_count(&log), 1, "the gate is dropped with the file");
}

/// Fills the dirty limit with pages behind a gate that does not open.
fn fill(file: &GatedFile, lsn: u64) -> (u64, Error) {
    for page in 0.. {
        if let Err(error) = file.write_at(&[1; 8], page * PAGE, lsn) {
            return (page, error);
        }
    }
    unreachable!()
}

#[test]
fn writers_behind_a_failing_gate_get_its_error() {
    let log = Log::new();
    log.fails.store(true, Ordering::Relaxed);
    let (cache, file, _storage) = gated(quiet(1 << 20), &log);
    let (pages, error) = fill(&file, 5);
    assert_eq!(error.kind(), ErrorKind::Unwritable, "{error:?}");
    assert!(error.to_string().contains("write gate"), "{error}");
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    // Other files of the device have the rest of the limit.
    let other = cache.open_backing(Arc::new(MemoryBacking::new(Vec::new())), &writable()).unwrap();
    (0..pages / 4).for_each(|page| other.write_all_at(&[1; 8], page * PAGE).unwrap());
    other.sync_data().unwrap();
    log.fails.store(false, Ordering::Relaxed);
    file.write_at(&[1; 8], pages * PAGE, 6).unwrap();
    file.sync_data().unwrap();
}

#[test]
fn writers_of_uncommitted_pages_get_an_error_at_the_limit() {
    let log = Log::new();
    let (_cache, file, _storage) = gated(quiet(1 << 20), &log);
    let (pages, error) = fill(&file, u64::MAX);
    assert!(error.to_string().contains("not committed"), "{error}");
    file.assign_lsn(0..pages * PAGE, 3).unwrap();
    file.write_at(&[1; 8], pages * PAGE, 4).unwrap();
    file.sync_data().unwrap();
}

#[test]
fn an_allocation_names_the_gate_when_only_gated_pages_are_left() {
    let log = Log::new();
    let builder = quiet(1 << 20).reclaim_wait_max(Duration::from_millis(60_000));
    let (cache, file, _storage) = gated(builder, &log);
    let (pages, _) = fill(&file, u64::MAX);
    let memory = cache.memory_file("rest").unwrap();
    let error = (0..).find_map(|page| memory.write_all_at(&[1; 8], page * PAGE).err()).unwrap();
    assert_eq!(error.kind(), ErrorKind::Full, "{error:?}");
    // The rest goes to pins.
    let bytes = vec![1; 4 << 20];
    let clean = cache.open_backing(Arc::new(MemoryBacking::new(bytes)), &writable()).unwrap();
    let mut pins = Vec::new();
    let error = loop {
        let start = pins.len() as u64 * PAGE;
        match clean.pin(start..start + 1) {
            Ok(pin) => pins.push(pin),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Full, "{error:?}");
    let gated = format!(" {} are held back by write gates", pages * PAGE);
    assert!(error.to_string().contains(&gated), "{error}");
    assert!(error.to_string().contains("not committed"), "{error}");
    drop(pins);
    file.discard_dirty().unwrap();
}

#[test]
fn a_slow_gate_holds_up_no_other_file_and_no_reader() {
    let mut log = Log::default();
    let stalled = Gate::new();
    log.stalls = Some(stalled.clone());
    let log = Arc::new(log);
    let builder = Cache::builder().memory(1 << 20).dirty_age_max(Duration::from_millis(10));
    let (cache, file, storage) = gated(builder, &log);
    (0..32).for_each(|page| file.write_at(&[1; 8], page * PAGE, 5).unwrap());
    stalled.wait_for_arrivals(1);
    let other = Arc::new(MemoryBacking::new(vec![3; 4 << 20]));
    let other = cache.open_backing(other, &writable()).unwrap();
    for page in 0..1024 {
        other.write_all_at(&[2; 8], page * PAGE).unwrap();
    }
    other.sync_data().unwrap();
    assert_eq!(storage.bytes()[0], 0);
    let mut byte = [0];
    file.read_exact_at(&mut byte, 31 * PAGE).unwrap();
    assert_eq!(byte, [1]);
    stalled.open();
    wait_until(|| cache.stats().memory.dirty_bytes == 0);
}

/// A gate that uses the file it is for.
#[derive(Debug, Default)]
struct Meddling {
    file: Mutex<Option<File>>,
    errors: Mutex<Vec<String>>,
    read: AtomicU64,
}

impl WriteGate for Meddling {
    fn durable_lsn(&self) -> u64 {
        0
    }

    fn make_durable(&self, _lsn: u64) -> io::Result<()> {
        let file = self.file.lock().unwrap();
        let file = file.as_ref().unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0)?;
        self.read.store(byte[0].into(), Ordering::Relaxed);
        let calls = [file.sync_data(), file.write_all_at(b"x", 0), file.set_len(1)];
        let told = calls.into_iter().map(|call| call.unwrap_err().to_string());
        self.errors.lock().unwrap().extend(told);
        Ok(())
    }
}

#[test]
fn a_gate_that_uses_its_own_file_gets_an_error() {
    let cache = quiet(1 << 20).build().unwrap();
    let storage = Arc::new(MemoryBacking::new(vec![0; PAGE as usize]));
    let file = cache.open_backing(storage, &writable()).unwrap();
    let gate = Arc::new(Meddling::default());
    *gate.file.lock().unwrap() = Some(file.clone());
    let file = GatedFile::new(file, gate.clone()).unwrap();
    file.write_at(&[9; 8], 0, 5).unwrap();
    file.sync_data().unwrap();
    assert_eq!(gate.read.load(Ordering::Relaxed), 9, "resident pages can be read");
    let errors = gate.errors.lock().unwrap().clone();
    assert_eq!(errors.len(), 3);
    assert!(errors.iter().all(|error| error.contains("its own write gate")), "{errors:?}");
    drop(gate.file.lock().unwrap().take());
}

#[derive(Debug)]
struct Panicking;

impl WriteGate for Panicking {
    fn durable_lsn(&self) -> u64 {
        panic!("as a careless user does")
    }

    fn make_durable(&self, _lsn: u64) -> io::Result<()> {
        panic!("as a careless user does")
    }
}

#[test]
fn a_gate_that_panics_is_a_gate_that_fails() {
    let cache =
        Cache::builder().memory(1 << 20).dirty_age_max(Duration::from_millis(5)).build().unwrap();
    let storage = Arc::new(MemoryBacking::new(vec![0; PAGE as usize]));
    let file = cache.open_backing(storage.clone(), &writable()).unwrap();
    let file = GatedFile::new(file, Arc::new(Panicking)).unwrap();
    file.write_at(&[1; 8], 0, 5).unwrap();
    error_of(file.sync_data(), &["panicked"]);
    wait_until(|| cache.stats().writes.gate_asks > 1);
    assert_eq!(storage.bytes()[0], 0);
    // Another gate for the same log takes over.
    let file = GatedFile::new(file.unlogged().clone(), Log::new()).unwrap();
    file.sync_data().unwrap();
}

/// The page gets a new LSN all the time, and the log is never ahead.
#[test]
fn a_sync_of_a_page_that_is_always_written_ends() {
    let log = Log::new();
    let (_cache, file, _storage) = gated(quiet(1 << 20), &log);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for lsn in 1.. {
                file.write_at(&[1; 8], 0, lsn).unwrap();
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        (0..200).for_each(|_| file.sync_data().unwrap());
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_truncation_forgets_the_lsns_of_what_it_removes() {
    let log = Log::new();
    log.fails.store(true, Ordering::Relaxed);
    let (cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, 3).unwrap();
    file.write_at(&[1; 8], 2 * PAGE, 2).unwrap();
    file.unlogged().set_len(PAGE).unwrap();
    assert_eq!((file.oldest_dirty_lsn(), cache.stats().memory.dirty_bytes), (Some(3), PAGE));
    file.unlogged().set_len(0).unwrap();
    file.sync_data().unwrap();
    assert!(storage.bytes().is_empty() && log.asked().is_empty());
}

#[test]
fn a_sync_does_not_wait_for_the_lsn_of_a_page_that_was_cut_off() {
    let log = Log::new();
    let (_cache, file, _storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, 3).unwrap();
    file.write_at(&[1; 8], 2 * PAGE, 9).unwrap();
    file.unlogged().set_len(PAGE).unwrap();
    file.sync_data().unwrap();
    assert_eq!(log.asked(), [3]);
}

#[test]
fn discarded_pages_need_no_gate() {
    let log = Log::new();
    let (_cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, u64::MAX).unwrap();
    assert_eq!(file.discard_dirty().unwrap(), PAGE);
    file.sync_data().unwrap();
    assert_eq!((storage.bytes()[0], file.oldest_dirty_lsn()), (0, None));
}

#[test]
fn an_appended_page_does_not_lengthen_the_storage_before_its_log() {
    let log = Log::new();
    let (_cache, file, storage) = gated(quiet(1 << 20), &log);
    let before = storage.bytes().len() as u64;
    assert_eq!(file.append(&[1; 100], 8).unwrap(), before);
    file.write_out(0..u64::MAX >> 1).unwrap();
    wait_until(|| storage.bytes().len() as u64 == before + 100);
    assert_eq!(log.asked(), [8]);
}

#[test]
fn files_that_cannot_have_a_gate_say_why() {
    let cache = quiet(1 << 20).build().unwrap();
    let log = Log::new();
    let memory = cache.memory_file("memory").unwrap();
    error_of(GatedFile::new(memory, log.clone()), &["memory", "never durable"]);
    if files_can_be_mapped() {
        let storage = Arc::new(MemoryBacking::new(vec![0; PAGE as usize]));
        let mapped = cache.open_backing(storage, &mappable(writable())).unwrap();
        error_of(GatedFile::new(mapped, log), &["mapped"]);
    }
}

#[test]
fn lsns_are_charged_to_the_bound_and_given_back() {
    const PAGES: u64 = 2000;
    let log = Log::new();
    // Nothing is written before the sync, so that each page keeps its LSN. All frames have their
    // descriptors before, so that only the table of LSNs is charged below.
    let builder = quiet(32 << 20).dirty_background(16 << 20).dirty_max(16 << 20);
    let (cache, file, _storage) = gated(builder.prefault(true), &log);
    // The tables of the file are charged first.
    (0..PAGES).for_each(|page| file.unlogged().write_all_at(&[1; 8], page * PAGE).unwrap());
    let before = cache.stats().memory.metadata_bytes;
    (0..PAGES).for_each(|page| file.write_at(&[1; 8], page * PAGE, 5).unwrap());
    let charged = cache.stats().memory.metadata_bytes - before;
    // A table of 4,096 slots, because it grows when it is three quarters full.
    assert!((PAGES * 24..=PAGES * 96).contains(&charged), "{charged} bytes");
    file.sync_data().unwrap();
    file.write_out(0..PAGE).unwrap();
    wait_until(|| cache.stats().memory.metadata_bytes == before);
}

#[test]
fn a_checkpoint_writes_what_was_dirty_when_it_was_taken() {
    let log = Log::new();
    let (_cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, 5).unwrap();
    let checkpoint = file.checkpoint().unwrap();
    file.write_at(&[2; 8], 3 * PAGE, 6).unwrap();
    checkpoint.sync().unwrap();
    assert_eq!((storage.bytes()[0], storage.bytes()[3 * PAGE as usize]), (1, 0));
    assert_eq!(file.oldest_dirty_lsn(), Some(6));
}

#[test]
fn an_abort_keeps_the_lsn_of_the_change_before_it() {
    let log = Log::new();
    log.fails.store(true, Ordering::Relaxed);
    let (_cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, 5).unwrap();
    file.write_at(&[2; 8], 0, u64::MAX).unwrap();
    file.unlogged().write_all_at(&[1; 8], 0).unwrap();
    file.assign_lsn(0..8, 0).unwrap();
    assert_eq!(error_of(file.sync_data(), &["LSN 5 "]).kind(), ErrorKind::Gated);
    assert_eq!(storage.bytes()[0], 0);
    log.fails.store(false, Ordering::Relaxed);
    file.sync_data().unwrap();
    assert_eq!(storage.bytes()[0], 1);
}

#[test]
fn a_commit_keeps_a_higher_lsn_of_another_change() {
    let log = Log::new();
    log.set_durable(55);
    log.fails.store(true, Ordering::Relaxed);
    let (_cache, file, storage) = gated(quiet(1 << 20), &log);
    file.write_at(&[1; 8], 0, u64::MAX).unwrap();
    file.write_at(&[2; 8], 8, 60).unwrap();
    file.assign_lsn(0..8, 55).unwrap();
    assert!(file.sync_data().is_err());
    assert_eq!(storage.bytes()[8], 0);
    log.fails.store(false, Ordering::Relaxed);
    file.sync_data().unwrap();
    assert_eq!(storage.bytes()[8], 2);
}

#[test]
fn a_write_out_begun_before_the_gate_respects_it() {
    const PAGES: u64 = 128;
    let storage = Arc::new(MemoryBacking::new(vec![0; (PAGES * PAGE) as usize]));
    let faulty = Arc::new(FaultyBacking::over(storage.clone()));
    let held = Gate::new();
    faulty.inject(Fault::on(Call::Write).forever().held(&held));
    let cache = quiet(4 << 20).io_depth(2).build().unwrap();
    let file = cache.open_backing(faulty, &writable()).unwrap();
    for page in (0..PAGES).step_by(2) {
        file.write_all_at(&[1; 8], page * PAGE).unwrap();
    }
    file.write_out(0..PAGES * PAGE).unwrap();
    held.wait_for_arrivals(1);
    let log = Log::new();
    log.fails.store(true, Ordering::Relaxed);
    let file = GatedFile::new(file, log).unwrap();
    file.write_at(&[2; 8], (PAGES - 2) * PAGE, 5).unwrap();
    held.open();
    wait_until(|| cache.stats().memory.dirty_bytes <= PAGE);
    assert_ne!(storage.bytes()[((PAGES - 2) * PAGE) as usize], 2);
    file.discard_dirty().unwrap();
}

#[test]
fn a_sync_of_a_range_that_is_held_back_keeps_the_length() {
    let log = Log::new();
    let (_cache, file, storage) = gated(quiet(1 << 20), &log);
    let before = storage.bytes().len();
    let position = file.append(&[1; 8], u64::MAX).unwrap();
    assert!(file.unlogged().sync_range(position..position + 8).is_err());
    assert_eq!(storage.bytes().len(), before);
    file.assign_lsn(position..position + 8, 0).unwrap();
    file.unlogged().sync_range(position..position + 8).unwrap();
    assert_eq!(storage.bytes().len() as u64, position + 8);
}

/// A gate that owns the file of its log, in the same cache.
#[derive(Debug)]
struct LogFile {
    file: File,
    fails: AtomicBool,
    durable: AtomicU64,
}

impl WriteGate for LogFile {
    fn durable_lsn(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    fn make_durable(&self, lsn: u64) -> io::Result<()> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        self.file.sync_data().map_err(io::Error::from)?;
        self.durable.fetch_max(lsn, Ordering::Release);
        Ok(())
    }
}

/// Drops a gated file whose page has `lsn`, and its cache. Returns the first byte of the storage
/// afterwards, when nothing of the cache is left.
fn byte_after_drops(lsn: u64, is_cache_first: bool, is_healed: bool) -> u8 {
    let storages = [(); 2].map(|()| Arc::new(MemoryBacking::new(vec![0; PAGE as usize])));
    let [data, of_log] = storages;
    let cache = quiet(1 << 20).build().unwrap();
    let file = cache.open_backing(of_log.clone(), &writable()).unwrap();
    let (fails, durable) = (AtomicBool::new(true), AtomicU64::new(0));
    let log = Arc::new(LogFile { file, fails, durable });
    let tree = cache.open_backing(data.clone(), &writable()).unwrap();
    let tree = GatedFile::new(tree, log.clone()).unwrap();
    tree.write_at(&[7], 0, lsn).unwrap();
    if is_cache_first {
        drop(cache);
        drop(tree);
    } else {
        drop(tree);
        log.fails.store(!is_healed, Ordering::Relaxed);
        drop(cache);
    }
    let gate = Arc::downgrade(&log);
    drop(log);
    wait_until(|| gate.strong_count() == 0);
    // The background thread of a gate may have the last reference for a moment.
    wait_until(|| Arc::strong_count(&data) == 1 && Arc::strong_count(&of_log) == 1);
    data.bytes()[0]
}

#[test]
fn a_dropped_cache_keeps_no_gate_that_owns_its_log() {
    for is_cache_first in [true, false] {
        for lsn in [5, u64::MAX] {
            let byte = byte_after_drops(lsn, is_cache_first, false);
            assert_eq!(byte, 0, "LSN {lsn} was never durable");
        }
    }
    assert_eq!(byte_after_drops(u64::MAX, false, true), 0, "never committed");
    assert_eq!(byte_after_drops(5, false, true), 7, "the log is durable in the end");
}

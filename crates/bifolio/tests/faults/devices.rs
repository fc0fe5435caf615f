//! One device beside another: a full, broken or hung device delays its own files and no others.
//!
//! Progress is asserted with a wide margin: far below the wait for a device that does not answer,
//! and far above the delays of a loaded machine.
//!
//! Longer than 600 lines because most tests share `Healthy`, the file that must go on working.
//!
//! # Safety
//! Loads bytes inside maps that live, by address, without references to them.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{
    PAGE, assert_same, directory, error_of, files_can_be_mapped, has, open, random_file, read,
    read_all, sync_after_trouble, wait_until, writable,
};
use bifolio::backing::{
    Backing, DirectBacking, FileIdentity, IoBuf, IoBufMut, IoRequest, Submission,
};
use bifolio::{Cache, CacheBuilder, Error, Feature, File, Map, ReadRequest};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking, SmallDisk, fill_bytes};
use fastrand::Rng;

/// Maximum duration of a call on a healthy file.
const CALL_MAX: Duration = Duration::from_secs(8);
/// Maximum duration of everything that is expected to end.
const TEST_MAX: Duration = Duration::from_secs(45);
/// The bound of most caches here; half of it may be dirty.
const MEMORY: u64 = 4 << 20;

fn faulty_memory(length: usize) -> (Arc<MemoryBacking>, Arc<FaultyBacking>) {
    let memory = Arc::new(MemoryBacking::new(vec![0; length]));
    (memory.clone(), Arc::new(FaultyBacking::over(memory)))
}

fn full_disk() -> Fault {
    Fault::on(Call::Write).forever().fails(libc::ENOSPC)
}

fn small_cache() -> CacheBuilder {
    Cache::builder().memory(MEMORY).dirty_age_max(Duration::from_millis(20))
}

/// Writes page after page until one is refused. Returns the number of accepted bytes, and the
/// error.
fn write_until_refused(file: &File, bytes: &[u8]) -> (usize, Error) {
    for (start, page) in (0..).step_by(PAGE as usize).zip(bytes.chunks(PAGE as usize)) {
        if let Err(error) = file.write_all_at(page, start) {
            return (start as usize, error);
        }
    }
    panic!("{} bytes were accepted, and nothing written", bytes.len());
}

/// Runs `work` on a thread; `None` if it does not end in time. (The thread then continues.)
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, answer) = mpsc::channel();
    thread::spawn(move || done.send(work()));
    answer.recv_timeout(TEST_MAX).ok()
}

/// A file on the disk of the build, and its content; read and written until it is dropped.
struct Healthy {
    file: File,
    bytes: Vec<u8>,
    rng: Rng,
    slowest: Duration,
    /// Bytes that are read are also compared in the map.
    map: Option<Map>,
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Healthy {
    fn new(cache: &Cache, length: usize) -> Self {
        let directory = directory();
        let (path, bytes) = random_file(&directory, "healthy", length);
        let file = open(cache, &path);
        let (rng, slowest) = (Rng::with_seed(7), Duration::ZERO);
        Self { file, bytes, rng, slowest, map: None, path, _directory: directory }
    }

    /// Creates it in a map.
    fn mapped(cache: &Cache, length: usize) -> Self {
        let healthy = Self::new(cache, length);
        let (path, bytes) = (healthy.path.with_extension("mapped"), healthy.bytes.clone());
        fs::write(&path, &bytes).unwrap();
        let file = cache.open(&path, &writable().mappable(true)).unwrap();
        let map = Some(file.map(0..length as u64).unwrap());
        Self { file, map, path, ..healthy }
    }

    fn timed<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let begun = Instant::now();
        let result = work(self);
        self.slowest = self.slowest.max(begun.elapsed());
        result
    }

    /// Makes `rounds` rounds of random reads, writes and syncs.
    fn work(&mut self, rounds: usize) {
        let pages = self.bytes.len() as u64 / PAGE;
        for round in 0..rounds {
            let start = self.rng.u64(0..pages) * PAGE;
            let range = start as usize..(start + PAGE) as usize;
            if round % 3 == 0 {
                let fresh = fill_bytes(self.rng.u64(..), PAGE as usize);
                self.bytes[range].copy_from_slice(&fresh);
                self.timed(|it| it.file.write_all_at(&fresh, start)).unwrap();
            } else {
                let found = self.timed(|it| read(&it.file, start, PAGE as usize));
                assert_same(&found, &self.bytes[range]);
                let start = self.rng.u64(..self.bytes.len() as u64);
                let stored = self.timed(|it| it.map.as_ref().map(|map| byte_of(map, start)));
                assert!(stored.is_none_or(|byte| byte == self.bytes[start as usize]), "{start}");
            }
            if round % 100 == 99 {
                self.timed(|it| it.file.sync_data()).unwrap();
            }
        }
        self.timed(|it| it.file.sync_data()).unwrap();
        assert!(self.slowest < CALL_MAX, "a call took {:?}", self.slowest);
        assert_same(&fs::read(&self.path).unwrap(), &self.bytes);
    }
}

/// Returns a byte of a map.
fn byte_of(map: &Map, position: u64) -> u8 {
    assert!(position < map.len());
    let byte = map.as_ptr().wrapping_add(position as usize);
    // SAFETY: a byte of a map that lives; it is not stored to meanwhile.
    unsafe { byte.read_volatile() }
}

fn cause_of(error: &Error) -> Option<i32> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return io.raw_os_error();
        }
        next = error.source();
    }
    None
}

#[test]
fn a_full_device_refuses_writes_at_its_limit_and_says_why() {
    let (memory, backing) = faulty_memory(8 << 20);
    backing.inject(full_disk());
    let cache = small_cache().build().unwrap();
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    let bytes = fill_bytes(5, 8 << 20);
    let (accepted, error) = write_until_refused(&file, &bytes);
    assert!(cache.stats().memory.dirty_bytes <= MEMORY / 2, "{:?}", cache.stats());
    assert!(accepted as u64 >= MEMORY / 4, "held at {accepted} bytes");
    error_of(Err::<(), _>(error), &["faulty", "position", "os error 28", &accepted.to_string()]);
    // Bytes that are already dirty may change; accepted bytes are present.
    file.write_all_at(&bytes[..100], 50).unwrap();
    file.write_all_at(&bytes[..150], 0).unwrap();
    assert_same(&read_all(&file)[..accepted], &bytes[..accepted]);
    error_of(file.sync_data(), &["os error 28"]);
    backing.heal();
    file.write_all_at(&bytes[accepted..], accepted as u64).unwrap();
    sync_after_trouble(&file);
    assert_same(&memory.bytes(), &bytes);
    assert_eq!(cache.stats().memory.allocation_failures, 0);
}

#[test]
fn the_cause_of_a_refused_write_can_be_asked_for() {
    let (_, backing) = faulty_memory(8 << 20);
    backing.inject(full_disk());
    let cache = small_cache().build().unwrap();
    let file = cache.open_backing(backing, &writable()).unwrap();
    let (_, error) = write_until_refused(&file, &fill_bytes(5, 8 << 20));
    assert_eq!(cause_of(&error), Some(libc::ENOSPC), "{error:?}");
}

#[test]
fn a_pin_for_writing_is_refused_as_a_write_is() {
    let (memory, backing) = faulty_memory(8 << 20);
    backing.inject(full_disk());
    let cache = small_cache().build().unwrap();
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    let mut refused = None;
    for page in 0..2048 {
        match file.pin_mut(page * PAGE..(page + 1) * PAGE) {
            Ok(mut pin) => pin.copy_from(0, &[page as u8 | 1]).unwrap(),
            Err(error) => {
                refused = Some((page, error));
                break;
            }
        }
    }
    let (page, error) = refused.expect("a limit");
    error_of(Err::<(), _>(error), &["faulty", "os error 28"]);
    assert!(cache.stats().memory.dirty_bytes <= MEMORY / 2);
    error_of(file.sync_data(), &["os error 28"]);
    backing.heal();
    file.pin_mut(page * PAGE..page * PAGE + 1).unwrap().copy_from(0, &[7]).unwrap();
    sync_after_trouble(&file);
    assert_eq!(memory.bytes()[(page * PAGE) as usize], 7);
    assert!((0..page).all(|page| memory.bytes()[(page * PAGE) as usize] == page as u8 | 1));
}

#[test]
fn one_bad_page_does_not_stop_writes_of_others() {
    let (memory, backing) = faulty_memory(8 << 20);
    backing.inject(Fault::on(Call::Write).at(0..PAGE).forever().fails(libc::EIO));
    let cache = small_cache().dirty_max(256 << 10).build().unwrap();
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    for round in 0..3 {
        file.write_all_at(&[round], 0).unwrap();
        // There is nothing else that the device could take.
        wait_until("the device is in trouble", || cache.stats().devices[0].is_stuck);
        // Not the page's neighbour, which would be part of its transfer.
        for page in 2..1024 {
            file.write_all_at(&[round + 1], page * PAGE).unwrap();
        }
        wait_until("the rest is written", || cache.stats().memory.dirty_bytes <= PAGE);
        assert!((2..1024).all(|page| memory.bytes()[(page * PAGE) as usize] == round + 1));
    }
}

#[test]
fn a_sync_that_the_device_takes_ends_its_trouble() {
    let (_, backing) = faulty_memory(8 << 20);
    backing.inject(full_disk());
    let cache = Cache::builder()
        .memory(MEMORY)
        .dirty_age_max(Duration::from_millis(60_000))
        .build()
        .unwrap();
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    write_until_refused(&file, &fill_bytes(5, 8 << 20));
    let is_stuck = || cache.stats().devices[0].is_stuck;
    assert!(is_stuck());
    // The rounds that were asked for have been made.
    thread::sleep(Duration::from_millis(300));
    backing.heal();
    sync_after_trouble(&file);
    assert!(!is_stuck(), "{:?}", cache.stats().devices);
}

#[test]
fn a_healthy_file_works_beside_a_full_and_a_hung_device() {
    let cache = small_cache().build().unwrap();
    let mut healthy = Healthy::new(&cache, 16 << 20);
    let bytes = fill_bytes(5, 8 << 20);
    let (full_memory, full) = faulty_memory(8 << 20);
    full.inject(full_disk());
    let full_file = cache.open_backing(full.clone(), &writable()).unwrap();
    let (hung_memory, hung) = faulty_memory(8 << 20);
    let gate = Gate::new();
    hung.inject(Fault::on(Call::Write).forever().held(&gate));
    let hung_file = cache.open_backing(hung, &writable()).unwrap();
    let (full_accepted, _) = write_until_refused(&full_file, &bytes);
    let accepted = thread::scope(|scope| {
        let writer = scope.spawn(|| write_until_refused(&hung_file, &bytes));
        gate.wait_for_arrivals(1);
        healthy.work(1000);
        // Held, and at last told that nothing comes of it; the other goes on all the time.
        while !writer.is_finished() {
            healthy.work(200);
        }
        writer.join().unwrap().0
    });
    healthy.work(1000);
    let stats = cache.stats();
    assert_eq!(stats.memory.allocation_failures, 0, "{stats:?}");
    assert!(stats.memory.dirty_bytes <= MEMORY / 3 * 2, "{stats:?}");
    gate.open();
    full.heal();
    let _told_of_the_past = full_file.sync_data();
    full_file.sync_data().unwrap();
    hung_file.sync_data().unwrap();
    assert_same(&full_memory.bytes()[..full_accepted], &bytes[..full_accepted]);
    assert_same(&hung_memory.bytes()[..accepted], &bytes[..accepted]);
}

/// The neighbour has too few dirty pages for a round, but blocks even the first folio of the
/// writer, because the hung device has exhausted its share.
#[test]
fn a_neighbour_with_little_dirt_makes_room_for_a_writer() {
    const DIRTY_BYTES_MAX: u64 = 256 << 10;
    let builder =
        small_cache().dirty_age_max(Duration::from_millis(30_000)).dirty_max(DIRTY_BYTES_MAX);
    let cache = builder.dirty_background(DIRTY_BYTES_MAX / 2).build().unwrap();
    let bytes = fill_bytes(5, 192 << 10);
    let (_, hung) = faulty_memory(1 << 20);
    let gate = Gate::new();
    hung.inject(Fault::on(Call::Write).forever().held(&gate));
    let hung_file = cache.open_backing(hung, &writable()).unwrap();
    hung_file.write_all_at(&bytes, 0).unwrap();
    gate.wait_for_arrivals(1);
    let (_, neighbour) = faulty_memory(1 << 20);
    let neighbour_file = cache.open_backing(neighbour, &writable()).unwrap();
    neighbour_file.write_all_at(&bytes[..32 << 10], 0).unwrap();
    let (_, healthy) = faulty_memory(1 << 20);
    let file = cache.open_backing(healthy, &writable().folio_bytes(64 << 10)).unwrap();
    let begun = Instant::now();
    file.write_all_at(&bytes[..100], 0).unwrap();
    assert!(begun.elapsed() < CALL_MAX, "{:?}", begun.elapsed());
    let dirty_bytes = cache.stats().memory.dirty_bytes;
    assert!(dirty_bytes <= DIRTY_BYTES_MAX, "{dirty_bytes}");
    gate.open();
    hung_file.sync_data().unwrap();
}

#[test]
fn a_healthy_file_works_beside_a_hung_swap() {
    for mappable in [false, true] {
        if mappable && !files_can_be_mapped() {
            continue;
        }
        let (_, swap) = faulty_memory(0);
        let builder = small_cache().swap_backing(swap.clone());
        let cache = builder.build().unwrap();
        let options = writable().mappable(mappable);
        let scratch = cache.memory_file_with("scratch", &options).unwrap();
        let healthy = Healthy::new(&cache, 16 << 20);
        let gate = Gate::new();
        swap.inject(Fault::on(Call::Write).forever().held(&gate));
        let bytes = fill_bytes(5, 8 << 20);
        let writer = {
            let (scratch, bytes) = (scratch.clone(), bytes.clone());
            thread::spawn(move || scratch.write_all_at(&bytes, 0))
        };
        gate.wait_for_arrivals(1);
        let worked = in_time(move || {
            let mut healthy = healthy;
            healthy.work(3000);
            healthy
        });
        let mut healthy = worked.expect("only the swap hangs");
        gate.open();
        if writer.join().unwrap().is_err() {
            // It had not the part that is written to the swap, and was told in time.
            scratch.write_all_at(&bytes, 0).unwrap();
        }
        healthy.work(200);
        assert_same(&read_all(&scratch), &bytes);
    }
}

/// Runs a test with a cache that is full of pages waiting for a hung swap, and a file outside of
/// it.
fn with_full_memory(wait_ms_max: u64, test: impl FnOnce(&Cache, &File)) {
    let (_, swap) = faulty_memory(0);
    let builder = Cache::builder().memory(1 << 20).swap_backing(swap.clone());
    let builder = builder.readahead_max(0).reclaim_wait_max(Duration::from_millis(wait_ms_max));
    let cache = builder.build().unwrap();
    let scratch = cache.memory_file("scratch").unwrap();
    let (_, disk) = faulty_memory(1 << 20);
    let disk = cache.open_backing(disk, &bifolio::OpenOptions::new()).unwrap();
    let gate = Gate::new();
    swap.inject(Fault::on(Call::Write).forever().held(&gate));
    let writer = {
        let scratch = scratch.clone();
        thread::spawn(move || scratch.write_all_at(&[7; 2 << 20], 0))
    };
    gate.wait_for_arrivals(1);
    // What is left to others is in use.
    let pins = (0..256).map_while(|index| disk.pin(index * PAGE..index * PAGE + 1).ok());
    let pins: Vec<_> = pins.collect();
    assert!(pins.len() < 200, "{} pages can be pinned", pins.len());
    test(&cache, &disk);
    drop(pins);
    gate.open();
    let _ = writer.join();
}

#[test]
fn a_call_waits_for_memory_once_whatever_it_asks_for() {
    const WAIT_MS_MAX: u64 = 500;
    const REQUESTS: usize = 20;
    with_full_memory(WAIT_MS_MAX, |_, disk| {
        let mut buffers = vec![[0; 64]; REQUESTS];
        let absent = (256 - REQUESTS as u64..).map(|index| index * PAGE);
        let requests = absent.zip(&mut buffers).map(|(at, buffer)| ReadRequest::new(buffer, at));
        let mut requests: Vec<_> = requests.collect();
        let begun = Instant::now();
        disk.read_many(&mut requests).unwrap();
        let elapsed = begun.elapsed();
        for request in requests {
            let error = request.result.unwrap_err();
            assert_eq!(error.kind(), bifolio::ErrorKind::Full, "{error}");
        }
        let most = Duration::from_millis(WAIT_MS_MAX) * REQUESTS as u32 / 2;
        assert!(elapsed < most, "{elapsed:?} for {REQUESTS} requests");
    });
}

/// Stops the other threads of a test, also if it fails.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Writes to random pages of the second half of a memory file until it is told to stop, ignoring
/// errors. Returns the first word of each page that it wrote, and 0 for the others.
fn overwrite_until(stop: &AtomicBool, file: &File, refused: &AtomicU64) -> Vec<u64> {
    let pages = file.len() / PAGE;
    let mut rng = Rng::with_seed(pages);
    let mut words = vec![0; pages as usize];
    while !stop.load(Ordering::Relaxed) {
        let (page, word) = (rng.u64(pages / 2..pages), rng.u64(1..));
        let range = page * PAGE..(page + 1) * PAGE;
        let written = if rng.bool() {
            file.write_all_at(&word.to_ne_bytes(), range.start)
        } else {
            file.pin_mut(range).map(|mut pin| pin.copy_from(0, &word.to_ne_bytes()).unwrap())
        };
        match written {
            Ok(()) => words[page as usize] = word,
            Err(error) => {
                let position = (page * PAGE).to_string();
                error_of(Err::<(), _>(error), &["scratch", &position, "os error 5"]);
                refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    words
}

#[test]
fn a_healthy_file_works_beside_a_swap_that_refuses() {
    let cases = [256 << 10, 1 << 20, 8 << 20].map(|memory| [(memory, false), (memory, true)]);
    for (memory, mappable) in cases.into_iter().flatten() {
        if mappable && !files_can_be_mapped() {
            continue;
        }
        let (_, swap) = faulty_memory(0);
        let builder = Cache::builder().memory(memory).swap_backing(swap.clone());
        // All that the swap leaves to the healthy file, 16 KiB of the smallest cache, may be on the
        // way to its disk: a call waits for that as long as it may take.
        let wait_ms_max = CALL_MAX.as_millis() as u64;
        let builder = builder
            .dirty_age_max(Duration::from_millis(20))
            .reclaim_wait_max(Duration::from_millis(wait_ms_max));
        let cache = builder.build().unwrap();
        let scratch = cache.memory_file_with("scratch", &writable().mappable(mappable)).unwrap();
        let mut healthy = Healthy::new(&cache, 4 << 20);
        // Most of it is in the swap, and comes back to be changed.
        let mut bytes = fill_bytes(5, 4 * memory as usize);
        scratch.write_all_at(&bytes, 0).unwrap();
        swap.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
        let (stop, refused) = (AtomicBool::new(false), AtomicU64::new(0));
        let words = thread::scope(|scope| {
            let stop_at_end = StopAtEnd(&stop);
            let writer = scope.spawn(|| overwrite_until(&stop, &scratch, &refused));
            // There is a limit.
            while refused.load(Ordering::Relaxed) < 2 && !writer.is_finished() {
                healthy.work(100);
            }
            healthy.work(500);
            drop(stop_at_end);
            writer.join().unwrap()
        });
        assert_eq!(cache.stats().memory.allocation_failures, 0, "{memory}: {:?}", cache.stats());
        for (page, word) in bytes.chunks_mut(PAGE as usize).zip(words).filter(|it| it.1 > 0) {
            page[..8].copy_from_slice(&word.to_ne_bytes());
        }
        let new_page = scratch.write_all_at(&[7; 64 * PAGE as usize], bytes.len() as u64);
        error_of(new_page, &["scratch", "os error 5"]);
        // Room is made by what is given up, and by a swap that takes pages again. (All that waits
        // for the swap is in the second half.)
        let half = bytes.len() / 2;
        scratch.set_len(half as u64).unwrap();
        scratch.write_all_at(&bytes[half..half + 2 * PAGE as usize], half as u64).unwrap();
        swap.heal();
        assert_same(&read_all(&scratch), &bytes[..half + 2 * PAGE as usize]);
        bytes = fill_bytes(6, bytes.len());
        scratch.write_all_at(&bytes, 0).unwrap();
        assert_same(&read_all(&scratch), &bytes);
    }
}

/// Threads that wait for a device, until the gate is opened.
struct Waiting {
    gate: Gate,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Waiting {
    fn new(backing: &FaultyBacking) -> Self {
        let gate = Gate::new();
        backing.inject(Fault::on(Call::Read).forever().held(&gate));
        Self { gate, threads: Vec::new() }
    }

    fn add(&mut self, work: impl FnOnce() + Send + 'static) {
        self.threads.push(thread::spawn(work));
    }

    /// Lets the device answer, which ends every thread.
    fn end(self) {
        self.gate.open();
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

/// Uses a healthy file while `waiting` threads wait for a device that does not answer.
fn check_beside(waiting: Waiting, healthy: Healthy, rounds: usize) {
    waiting.gate.wait_for_arrivals(1);
    // So many that whatever may be theirs is.
    thread::sleep(Duration::from_millis(300));
    let worked = in_time(move || {
        let mut healthy = healthy;
        healthy.work(rounds);
        healthy
    });
    let mut healthy = worked.expect("only the other device hangs");
    waiting.end();
    healthy.work(100);
}

#[test]
fn a_healthy_file_works_beside_reads_that_hang() {
    let (_, hung) = faulty_memory(16 << 20);
    let cache = small_cache().build().unwrap();
    let healthy = Healthy::new(&cache, 16 << 20);
    let mut waiting = Waiting::new(&hung);
    let hung_file = cache.open_backing(hung, &writable()).unwrap();
    for number in 0..32 {
        let file = hung_file.clone();
        waiting.add(move || {
            let (start, length) = (number * (512 << 10), 512 << 10);
            if number % 4 > 0 {
                assert_eq!(read(&file, start, length), vec![0; length]);
                return;
            }
            let mut bytes = vec![1; length];
            let pages = bytes.chunks_mut(PAGE as usize).zip((start..).step_by(PAGE as usize));
            let mut requests: Vec<_> = pages.map(|(page, at)| ReadRequest::new(page, at)).collect();
            requests.reverse();
            file.read_many(&mut requests).unwrap();
            assert_eq!(bytes, vec![0; length]);
        });
    }
    check_beside(waiting, healthy, 2000);
    assert_eq!(cache.stats().memory.allocation_failures, 0);
}

#[test]
fn a_healthy_map_works_beside_faults_that_hang() {
    if !files_can_be_mapped() {
        return;
    }
    let (_, hung) = faulty_memory(16 << 20);
    let cache = small_cache().build().unwrap();
    let healthy = Healthy::mapped(&cache, 16 << 20);
    let mut waiting = Waiting::new(&hung);
    let hung_file = cache.open_backing(hung, &writable().mappable(true)).unwrap();
    let map = Arc::new(hung_file.map(0..16 << 20).unwrap());
    for number in 0..8 {
        let (file, map) = (hung_file.clone(), Arc::clone(&map));
        waiting.add(move || assert_eq!(byte_of(&map, number * (2 << 20)), 0));
        waiting.add(move || {
            // In transfers as large as can be, for what they pass is little.
            let start = number * (2 << 20) + (1 << 20);
            assert_eq!(read(&file, start, 1 << 20), vec![0; 1 << 20]);
        });
    }
    check_beside(waiting, healthy, 2000);
    assert_eq!(cache.stats().memory.allocation_failures, 0);
}

#[test]
fn a_healthy_map_works_beside_two_devices_that_hang() {
    if !files_can_be_mapped() {
        return;
    }
    // So small that what two devices leave of some things is less than a page.
    let builder = Cache::builder().memory(1 << 20);
    let cache = builder.build().unwrap();
    let healthy = Healthy::mapped(&cache, 4 << 20);
    let others: Vec<_> = (0..2).map(|_| faulty_memory(16 << 20).1).collect();
    let mut waiting = Waiting::new(&others[0]);
    others[1].inject(Fault::on(Call::Read).forever().held(&waiting.gate));
    for hung in others {
        let hung_file = cache.open_backing(hung, &writable().mappable(true)).unwrap();
        for number in 0..4 {
            let file = hung_file.clone();
            waiting.add(move || {
                let start = number * (4 << 20);
                assert_eq!(read(&file, start, 1 << 20), vec![0; 1 << 20]);
            });
        }
        // The first has all it may have before the next one comes.
        thread::sleep(Duration::from_millis(200));
    }
    check_beside(waiting, healthy, 1000);
    assert_eq!(cache.stats().memory.allocation_failures, 0);
}

/// Creates devices that do not complete: none of their reads, or none of their writes.
fn hung_devices(count: usize, call: Call, gate: &Gate) -> Vec<Arc<FaultyBacking>> {
    let devices: Vec<_> = (0..count).map(|_| faulty_memory(1 << 20).1).collect();
    devices.iter().for_each(|device| device.inject(Fault::on(call).forever().held(gate)));
    devices
}

/// Each device has its maximum of pages in read before the next one starts.
#[test]
fn a_healthy_file_works_beside_many_hung_readers() {
    for count in [5, 17] {
        let cache = small_cache().build().unwrap();
        let healthy = Healthy::new(&cache, 16 << 20);
        let mut waiting = Waiting { gate: Gate::new(), threads: Vec::new() };
        for hung in hung_devices(count, Call::Read, &waiting.gate) {
            let file = cache.open_backing(hung, &writable()).unwrap();
            for number in 0..4 {
                let file = file.clone();
                let length = 256 << 10;
                waiting.add(move || {
                    let found = read(&file, number * length as u64, length);
                    assert_eq!(found, vec![0; length]);
                });
            }
            thread::sleep(Duration::from_millis(30));
        }
        check_beside(waiting, healthy, 1000);
        assert_eq!(cache.stats().memory.allocation_failures, 0, "{count} devices");
    }
}

#[test]
fn a_healthy_map_works_beside_many_hung_maps() {
    if !files_can_be_mapped() {
        return;
    }
    for count in [5, 17] {
        let cache = Cache::builder().memory(64 << 20).readahead_max(0).build().unwrap();
        let healthy = Healthy::mapped(&cache, 16 << 20);
        let mut waiting = Waiting { gate: Gate::new(), threads: Vec::new() };
        for hung in hung_devices(count, Call::Read, &waiting.gate) {
            let file = cache.open_backing(hung, &writable().mappable(true)).unwrap();
            let map = Arc::new(file.map(0..1 << 20).unwrap());
            for number in 0..6 {
                let map = Arc::clone(&map);
                waiting.add(move || assert_eq!(byte_of(&map, number * (128 << 10)), 0));
            }
        }
        check_beside(waiting, healthy, 1000);
        assert_eq!(cache.stats().memory.allocation_failures, 0, "{count} devices");
    }
}

/// Each writer is throttled with its device's maximum of dirty pages, and finally refused.
#[test]
fn a_healthy_file_works_beside_many_hung_writers() {
    for count in [5, 17] {
        let cache = Cache::builder()
            .memory(64 << 20)
            .dirty_age_max(Duration::from_millis(20))
            .build()
            .unwrap();
        let mut healthy = Healthy::new(&cache, 16 << 20);
        let gate = Gate::new();
        let bytes = fill_bytes(5, 1 << 20);
        let mut files = Vec::new();
        for hung in hung_devices(count, Call::Write, &gate) {
            let file = cache.open_backing(hung, &writable()).unwrap();
            file.write_all_at(&bytes, 0).unwrap();
            files.push(file);
        }
        gate.wait_for_arrivals(count as u64);
        healthy.work(1000);
        gate.open();
        files.iter().for_each(|file| file.sync_data().unwrap());
    }
}

#[test]
fn a_device_of_ones_own_is_no_file_system() {
    let cache = small_cache().build().unwrap();
    let mut healthy = Healthy::new(&cache, 1 << 20);
    let own = FileIdentity::custom(fs::metadata(&healthy.path).unwrap().dev(), 1);
    let full = FaultyBacking::new(MemoryBacking::new(vec![0; 8 << 20]).identified(own));
    full.inject(full_disk());
    let full = Arc::new(full);
    let file = cache.open_backing(full.clone(), &writable()).unwrap();
    write_until_refused(&file, &fill_bytes(5, 8 << 20));
    assert_eq!(cache.stats().devices.len(), 2, "{:?}", cache.stats().devices);
    healthy.work(200);
    full.heal();
}

#[test]
fn a_full_file_system_refuses_writes_until_there_is_space() {
    let Some(disk) = SmallDisk::mount(16 << 20) else { return };
    let (path, filler) = (disk.path().join("full"), disk.path().join("filler"));
    fs::write(&filler, vec![1; 15 << 20]).unwrap();
    let cache = small_cache().build().unwrap();
    let mut healthy = Healthy::new(&cache, 8 << 20);
    let file = cache.open(&path, &writable().create(true)).unwrap();
    let bytes = fill_bytes(9, 8 << 20);
    let (accepted, error) = write_until_refused(&file, &bytes);
    let position = accepted.to_string();
    error_of(Err::<(), _>(error), &["full", "position", "os error 28", &position]);
    healthy.work(500);
    assert_same(&read_all(&file)[..accepted], &bytes[..accepted]);
    fs::remove_file(&filler).unwrap();
    file.write_all_at(&bytes[accepted..], accepted as u64).unwrap();
    let _told_of_the_past = file.sync_data();
    file.sync_data().unwrap();
    healthy.work(100);
    assert_same(&fs::read(&path).unwrap(), &bytes);
    drop((file, healthy));
    cache.close().unwrap();
}

/// Storage whose reads wait forever in the kernel, until `hung` is dropped: reads of an empty pipe.
#[derive(Debug)]
struct Pipe {
    reader: io::PipeReader,
    memory: MemoryBacking,
    is_open: AtomicBool,
}

impl Pipe {
    fn new(length: usize) -> (Arc<Self>, io::PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        let memory = MemoryBacking::new(vec![0; length]);
        (Arc::new(Self { reader, memory, is_open: AtomicBool::new(false) }), writer)
    }
}

impl Backing for Pipe {
    fn read_at(&self, target: &mut IoBufMut<'_>, position: u64) -> io::Result<usize> {
        self.memory.read_at(target, position)
    }

    fn write_at(&self, source: &IoBuf<'_>, position: u64) -> io::Result<usize> {
        self.memory.write_at(source, position)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.memory.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.memory.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        "a pipe".to_owned()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for Pipe {
    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        let is_hung = !self.is_open.load(Ordering::Relaxed);
        is_hung
            .then(|| Submission { file: self.reader.as_fd(), length_bytes: request.length_bytes })
    }

    fn completed(&self, _: &IoRequest, _: io::Result<usize>) -> io::Result<usize> {
        Err(io::ErrorKind::Interrupted.into())
    }
}

#[test]
fn hung_reads_in_the_kernel_leave_other_devices_a_way() {
    if !has(Feature::IoUring) {
        return;
    }
    let cache = Cache::builder().memory(64 << 20).readahead_max(0).build().unwrap();
    let directory = directory();
    let (path, bytes) = random_file(&directory, "healthy", 1 << 20);
    let file = open(&cache, &path);
    let (pipe, writer) = Pipe::new(1 << 20);
    let hung = cache.open_backing(pipe.clone(), &writable()).unwrap();
    let two_pages = |file: &File, start: u64| {
        let mut pages = [[0; PAGE as usize]; 2];
        let [first, second] = &mut pages;
        let mut requests =
            [ReadRequest::new(first, start), ReadRequest::new(second, start + 16 * PAGE)];
        file.read_many(&mut requests).unwrap();
        requests.iter().for_each(|request| assert!(request.result.is_ok()));
        pages
    };
    let mut readers = Vec::new();
    // More than there are rings.
    for reader in 0..40 {
        let hung = hung.clone();
        readers.push(thread::spawn(move || two_pages(&hung, reader % 16 * PAGE)));
    }
    thread::sleep(Duration::from_millis(200));
    let found = in_time(move || [0, 3, 5].map(|page| two_pages(&file, page * PAGE)));
    pipe.is_open.store(true, Ordering::Relaxed);
    drop(writer);
    for reader in readers {
        reader.join().unwrap();
    }
    let found = found.expect("the device that answers is read");
    assert_same(&found[1][1], &bytes[19 * PAGE as usize..20 * PAGE as usize]);
}

#[test]
fn hung_readahead_leaves_other_devices_their_workers() {
    let cache = Cache::builder().memory(64 << 20).build().unwrap();
    let gate = Gate::new();
    let hang = || {
        let (_, hung) = faulty_memory(1 << 20);
        hung.inject(Fault::on(Call::Read).forever().held(&gate));
        let file = cache.open_backing(hung, &writable()).unwrap();
        thread::spawn(move || read(&file, 0, 200 << 10))
    };
    let readers: Vec<_> = (0..24).map(|_| hang()).collect();
    gate.wait_for_arrivals(16);
    let bytes = fill_bytes(3, 8 << 20);
    let memory = Arc::new(MemoryBacking::new(bytes.clone()));
    let file = cache.open_backing(memory, &writable()).unwrap();
    let found = in_time(move || {
        let parts = (0..128).map(|part| read(&file, part * (64 << 10), 64 << 10));
        parts.collect::<Vec<_>>().concat()
    });
    gate.open();
    readers.into_iter().for_each(|reader| drop(reader.join().unwrap()));
    assert_same(&found.expect("the device that answers is read"), &bytes);
}

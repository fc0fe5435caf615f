//! The bound on memory, as the kernel counts it: resident size, metadata, memory returned to the
//! kernel.
//!
//! The kernel reports the memory of a whole process, so each test of the resident size runs in a
//! separate process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{
    FOLIO_SIZES, MEMORY_FOR_ALL, PAGE, assert_same, cache_of, directory, random_file, read,
    read_all, run_alone, writable,
};
use bifolio::{Access, Cache, ErrorKind, File, OpenOptions, ReadRequest};
use bifolio_testing::fill_bytes;
use fastrand::Rng;

const VARIABLE: &str = "BIFOLIO_TEST_BOUND";
const MIB: u64 = 1 << 20;

/// Returns a number of bytes from `/proc/self/status`.
fn process_bytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    let kibibytes: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kibibytes << 10
}

/// Returns the resident bytes of private and shared memory. The program's own text is not among
/// them: that is no memory of the cache, and grows with the tests.
fn data_bytes() -> u64 {
    process_bytes("RssAnon:") + process_bytes("RssShmem:")
}

fn resident_bytes_max(bound_bytes: u64) -> u64 {
    bound_bytes + bound_bytes / 50 + 8 * MIB
}

/// Creates a file with holes only, which reads as zeros and uses no space on the disk.
fn sparse_file(directory: &tempfile::TempDir, length: u64) -> std::path::PathBuf {
    let path = directory.path().join("sparse");
    std::fs::File::create(&path).unwrap().set_len(length).unwrap();
    path
}

/// Writes the position into the file at this position.
fn write_mark(file: &File, position: u64) {
    file.write_all_at(&position.to_le_bytes(), position).unwrap();
}

fn check_mark(file: &File, position: u64, written: bool) {
    let mut mark = [0xEE; 8];
    file.read_exact_at(&mut mark, position).unwrap();
    let expected = if written { position } else { 0 };
    assert_eq!(u64::from_le_bytes(mark), expected, "at {position}");
}

/// Reads and writes a file of eight times the bound at random positions.
fn roam(folio_bytes: u64) {
    let bound = MEMORY_FOR_ALL;
    let directory = directory();
    let path = sparse_file(&directory, 8 * bound);
    let cache = cache_of(bound);
    let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
    let mut random = Rng::with_seed(folio_bytes);
    let pages = 8 * bound / PAGE;
    let mut written = vec![false; pages as usize];
    // The larger the folio, the fewer steps turn the cache over.
    let steps = (60_000 * PAGE / folio_bytes).max(600);
    for step in 0..steps {
        let page = random.u64(..pages);
        check_mark(&file, page * PAGE, written[page as usize]);
        if step % 10 == 0 {
            write_mark(&file, page * PAGE);
            written[page as usize] = true;
        }
        if step % 100 == 0 {
            let stats = cache.stats();
            assert!(stats.memory.used_bytes <= bound, "{stats:?}");
        }
    }
    let stats = cache.stats();
    assert!(
        stats.evictions.folios > bound / folio_bytes,
        "the cache was not turned over: {stats:?}"
    );
    assert!(stats.memory.frame_bytes > bound / 10 * 9, "the bound is not used: {stats:?}");
    let peak = process_bytes("VmHWM:");
    println!("folios of {folio_bytes}: peak {peak} bytes, bound {bound}");
    assert!(peak <= resident_bytes_max(bound), "{peak} bytes were resident at a bound of {bound}");
}

#[test]
fn random_reads_of_a_large_file_stay_within_the_bound() {
    let name = "resident_size::random_reads_of_a_large_file_stay_within_the_bound";
    if let Ok(folio_bytes) = std::env::var(VARIABLE) {
        return roam(folio_bytes.parse().unwrap());
    }
    for folio_bytes in FOLIO_SIZES {
        run_alone(name, VARIABLE, &folio_bytes.to_string());
    }
}

fn give_back() {
    let (large, small) = (96 * MIB, 8 * MIB);
    let directory = directory();
    let path = sparse_file(&directory, large);
    let cache = cache_of(large);
    let file = cache.open(&path, &writable()).unwrap();
    let before = data_bytes();
    for position in (0..90 * MIB).step_by(PAGE as usize) {
        check_mark(&file, position, false);
    }
    for position in (0..4 * MIB).step_by(PAGE as usize) {
        write_mark(&file, position);
    }
    let full = data_bytes();
    assert!(full - before > 85 * MIB, "{before} then {full} bytes resident");
    cache.set_memory(small).unwrap();
    let shrunk = data_bytes();
    assert!(shrunk <= resident_bytes_max(small), "{shrunk} bytes resident at {small}");
    let stats = cache.stats();
    assert!(stats.memory.used_bytes <= small && stats.memory.bound_bytes == small, "{stats:?}");
    // It holds on, and grows back when it may.
    for position in (0..90 * MIB).step_by(PAGE as usize) {
        check_mark(&file, position, position < 4 * MIB);
    }
    assert!(data_bytes() <= resident_bytes_max(small));
    cache.set_memory(large).unwrap();
    for position in (0..90 * MIB).step_by(PAGE as usize) {
        check_mark(&file, position, position < 4 * MIB);
    }
    assert!(data_bytes() > 80 * MIB, "the larger bound is not used");
}

#[test]
fn a_smaller_bound_gives_memory_back_to_the_system() {
    match std::env::var(VARIABLE) {
        Ok(_) => give_back(),
        Err(_) => {
            run_alone(
                "resident_size::a_smaller_bound_gives_memory_back_to_the_system",
                VARIABLE,
                "1",
            );
        }
    }
}

#[test]
fn metadata_is_at_most_72_bytes_a_resident_page() {
    // One table page, of 512 Entries, is the least a part of a file costs.
    const TABLE_PAGE_BYTES: u64 = 4096;
    let directory = directory();
    let path = sparse_file(&directory, 64 * MIB);
    let cache = cache_of(8 * MIB);
    let file = cache.open(&path, &writable()).unwrap();
    let check = |touched_pages: u64| {
        let stats = cache.stats();
        let resident_pages = stats.memory.frame_bytes / PAGE;
        let allowed = 72 * resident_pages + 8 * touched_pages + TABLE_PAGE_BYTES;
        assert!(
            stats.memory.metadata_bytes <= allowed,
            "{} > {allowed}",
            stats.memory.metadata_bytes
        );
        assert!(stats.memory.metadata_bytes > 0);
        assert_eq!(stats.memory.used_bytes, stats.memory.frame_bytes + stats.memory.metadata_bytes);
    };
    for page in 0..64 * MIB / PAGE {
        read(&file, page * PAGE, 8);
        if page % 97 == 0 {
            check(page + 1);
        }
    }
    check(64 * MIB / PAGE);
    let with_table = cache.stats().memory.metadata_bytes;
    drop(file);
    let without = cache.stats().memory.metadata_bytes;
    assert_eq!(with_table - without, 64 * MIB / PAGE * 8, "a closed file costs nothing");
}

#[test]
fn tables_take_their_memory_from_within_the_bound() {
    let bound = 4 * MIB;
    let directory = directory();
    let path = sparse_file(&directory, 1 << 30);
    let cache = cache_of(bound);
    let file = cache.open(&path, &writable()).unwrap();
    // A page of each 2 MiB, which is what a page of the table describes.
    for position in (0..1 << 30).step_by(2 << 20) {
        check_mark(&file, position, false);
        write_mark(&file, position);
        let stats = cache.stats();
        assert!(stats.memory.used_bytes <= bound, "{stats:?}");
    }
    assert!(cache.stats().memory.metadata_bytes > bound / 8, "much of it is the table by now");
    for position in (0..1 << 30).step_by(2 << 20) {
        check_mark(&file, position, true);
    }
}

/// Memory that is resident from the beginning serves folios of every size, tables, and maps.
fn populated() {
    let bound = 64 * MIB;
    let directory = directory();
    let path = sparse_file(&directory, 2 * bound);
    let before = data_bytes();
    let cache = Cache::builder().memory(bound).prefault(true).build().unwrap();
    let built = data_bytes();
    assert!(built - before >= bound / 32 * 31 - 2 * MIB, "{before} then {built} bytes resident");
    for folio_bytes in FOLIO_SIZES {
        let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
        for position in (0..2 * bound).step_by(folio_bytes.max(16 << 10) as usize) {
            check_mark(&file, position, false);
        }
    }
    let options = OpenOptions::new().read(true).mappable(true);
    let file = cache.open(&path, &options).unwrap();
    let map = file.map(0..2 * bound).unwrap();
    for start in (0..2 * bound).step_by(MIB as usize) {
        map.populate(start..start + MIB).unwrap();
    }
    let stats = cache.stats();
    assert!(stats.memory.used_bytes <= bound, "{stats:?}");
    let peak = process_bytes("VmHWM:");
    assert!(peak <= resident_bytes_max(bound), "{peak} bytes were resident at a bound of {bound}");
}

#[test]
fn populated_memory_is_there_at_once_and_serves_everything() {
    let name = "resident_size::populated_memory_is_there_at_once_and_serves_everything";
    if std::env::var(VARIABLE).is_ok() {
        return populated();
    }
    run_alone(name, VARIABLE, "64 MiB");
}

/// Returns how many pages of `range` are still in the cache.
fn resident_pages(cache: &Cache, file: &File, range: std::ops::Range<u64>) -> u64 {
    let before = cache.stats().reads.misses;
    let pages = range.start / PAGE..range.end / PAGE;
    let count = pages.end - pages.start;
    // From the end, so that the look itself evicts nothing it has yet to look at.
    for page in pages.rev() {
        read(file, page * PAGE, 8);
    }
    count - (cache.stats().reads.misses - before)
}

#[test]
fn memory_goes_from_one_folio_size_to_another_and_back() {
    let bound = 8 * MIB;
    let length = 12 * MIB as usize;
    let directory = directory();
    let cache = cache_of(bound);
    let files = [4 << 10, 16 << 10, 64 << 10, 256 << 10].map(|folio_bytes: u64| {
        let (path, bytes) = random_file(&directory, &folio_bytes.to_string(), length);
        (cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap(), bytes)
    });
    // Up and down the sizes, so that each follows each neighbour.
    for number in [0, 1, 2, 3, 2, 1, 0, 3, 0, 2, 0] {
        let (file, bytes) = &files[number];
        assert_same(&read_all(file), bytes);
        let stats = cache.stats();
        assert!(stats.memory.used_bytes <= bound, "{stats:?}");
    }
    // What it read last, the smallest folios, have most of the memory now.
    let last = &files[0].0;
    let tail = length as u64 - 4 * MIB..length as u64;
    let found = resident_pages(&cache, last, tail.clone());
    let pages = (tail.end - tail.start) / PAGE;
    assert!(found > pages / 2, "of {pages} pages read last, {found} are left");
}

#[test]
fn a_chunk_of_scattered_pages_is_emptied_for_a_folio_of_its_size() {
    let bound = 8 * MIB;
    let directory = directory();
    let cache = cache_of(bound);
    let (path, bytes) = random_file(&directory, "small", 4 * bound as usize);
    let small = cache.open(&path, &writable()).unwrap();
    small.set_access(Access::Random);
    // No chunk holds only old pages.
    let mut random = Rng::with_seed(7);
    for _ in 0..3 * bound / PAGE {
        let page = random.u64(0..4 * bound / PAGE) * PAGE;
        assert_eq!(read(&small, page, 8), bytes[page as usize..][..8]);
    }
    assert_eq!(cache.stats().evictions.evacuated_folios, 0);
    let chunk_bytes = bound / 32;
    let (path, bytes) = random_file(&directory, "large", 2 * chunk_bytes as usize);
    let large = cache.open(&path, &writable().folio_bytes(chunk_bytes)).unwrap();
    assert_same(&read_all(&large), &bytes);
    assert!(cache.stats().evictions.evacuated_folios > 0, "{:?}", cache.stats());
}

#[test]
fn dirty_pages_of_several_sizes_survive_the_change_of_sizes() {
    let directory = directory();
    let cache = cache_of(6 * MIB);
    let mut files = [4 << 10, 16 << 10, 64 << 10, 128 << 10].map(|folio_bytes: u64| {
        let (path, bytes) = random_file(&directory, &folio_bytes.to_string(), 7_000_001);
        let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
        (path, file, bytes)
    });
    let mut random = Rng::with_seed(1);
    for round in 0..200 {
        let (_, file, bytes) = &mut files[random.usize(..4)];
        let start = random.usize(..bytes.len() - 50_000);
        let new = fill_bytes(round, random.usize(1..50_000));
        file.write_all_at(&new, start as u64).unwrap();
        bytes[start..start + new.len()].copy_from_slice(&new);
    }
    for (path, file, bytes) in &files {
        assert_same(&read_all(file), bytes);
        file.sync_data().unwrap();
        assert_same(&std::fs::read(path).unwrap(), bytes);
    }
}

/// Reads 4096 pages of a file in random order through a full cache, `pages_in_call` per call.
fn read_scattered(pages_in_call: usize) {
    let bound = 16 * MIB;
    let directory = directory();
    let path = sparse_file(&directory, 4 * bound);
    let cache = cache_of(bound);
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    file.set_access(Access::Random);
    let mut pages: Vec<u64> = (0..4 * bound / PAGE).collect();
    Rng::with_seed(5).shuffle(&mut pages);
    let mut read_pages = |count| {
        let pages: Vec<u64> = pages.drain(..count).collect();
        for call in pages.chunks(pages_in_call) {
            let mut bytes = vec![[0; 8]; call.len()];
            let places = call.iter().zip(&mut bytes);
            let mut requests: Vec<_> =
                places.map(|(page, bytes)| ReadRequest::new(bytes, page * PAGE)).collect();
            file.read_many(&mut requests).unwrap();
            assert!(requests.iter().all(|request| *request.result.as_ref().unwrap() == 8));
        }
        cache.stats()
    };
    // Until the cache is full, the thread makes memory resident.
    let full = read_pages(8192);
    let after = read_pages(4096);
    assert_eq!(after.reads.misses - full.reads.misses, 4096);
    assert!(
        after.evictions.folios - full.evictions.folios >= 3700,
        "{}",
        after.evictions.folios - full.evictions.folios
    );
    // Who waits for a processor may find it still at work, or woken; were it called for each round,
    // it would be 12 times or more.
    let woken = after.evictions.background_reclaims - full.evictions.background_reclaims;
    assert!(woken <= 3, "{pages_in_call} pages a call: woken {woken} times");
}

#[test]
fn one_reader_of_clean_pages_evicts_inline_and_wakes_no_thread() {
    [1, 32, 1024].into_iter().for_each(read_scattered);
}

/// The bound is lower during the attempt, and restored when that fails.
#[test]
fn a_bound_that_cannot_be_had_fails_no_read() {
    let (bound, tries) = (8 * MIB, 20);
    let directory = directory();
    let path = sparse_file(&directory, 2 * bound);
    let cache = cache_of(bound);
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    let pin = |start| file.pin(start..start + PAGE).unwrap().into_owned();
    let holds: Vec<_> = (0..bound / 2).step_by(PAGE as usize).map(pin).collect();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut random, mut reads) = (Rng::with_seed(1), 0);
            while !is_over.load(Ordering::Relaxed) {
                let position = random.u64(bound..2 * bound - 1);
                file.read_exact_at(&mut [0], position).unwrap();
                reads += 1;
            }
            reads
        });
        for _ in 0..tries {
            cache.set_memory(bound / 4).unwrap_err();
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(reader.join().unwrap() > 0);
    });
    assert_eq!(cache.stats().memory.bound_bytes, bound);
    drop(holds);
    cache.set_memory(bound / 4).unwrap();
}

/// An allocation that finds no memory retries once if the bound has changed meanwhile, but not for
/// as long as another thread keeps changing it.
#[test]
fn a_bound_that_changes_all_the_time_delays_no_call() {
    let bound = MIB;
    for swap in [false, true] {
        let directory = directory();
        // A write in several parts may wait for each.
        let builder = Cache::builder().memory(bound).reclaim_wait_max(Duration::from_millis(500));
        let cache = match swap {
            true => builder.swap_directory(directory.path()).swap_max(MIB / 4),
            false => builder,
        };
        let cache = cache.build().unwrap();
        let file = cache.memory_file("full").unwrap();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    drop(cache.set_memory(bound / 2));
                    drop(cache.set_memory(bound));
                }
            });
            let writer = scope.spawn(|| file.write_all_at(&vec![7; 2 * bound as usize], 0));
            let begun = Instant::now();
            while !writer.is_finished() && begun.elapsed() < Duration::from_secs(20) {
                thread::sleep(Duration::from_millis(1));
            }
            let was_over = writer.is_finished();
            is_over.store(true, Ordering::Relaxed);
            let error = writer.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Full, "{error}");
            assert!(was_over, "not in 20 seconds; swap: {swap}");
        });
    }
}

//! Random operations compared with plain vectors, and at the end with the files on the disk.
//!
//! The bounds are small, so that every run evicts all the time. A failed run prints its seed;
//! `SEED=` replays it.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::support::{PAGE, assert_same, cache_of, directory, file_of, open, read_all, writable};
use bifolio::{Cache, File, OpenOptions};
use bifolio_testing::{Limits, Model, OpKind, Runner, Workload, fill_bytes, with_seeds};
use fastrand::Rng;

/// One file of a run.
struct Subject {
    path: PathBuf,
    file: File,
    start: Vec<u8>,
    length_bytes_max: u64,
}

fn subject(
    cache: &Cache,
    path: PathBuf,
    folio_bytes: u64,
    length_bytes_max: u64,
    random: &mut Rng,
) -> Subject {
    let start = fill_bytes(random.u64(..), random.usize(..length_bytes_max as usize));
    std::fs::write(&path, &start).unwrap();
    let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
    Subject { path, file, start, length_bytes_max }
}

fn limits(subject: &Subject, memory_bytes: std::ops::RangeInclusive<u64>) -> Limits {
    Limits {
        length_bytes_max: subject.length_bytes_max,
        transfer_bytes_max: (subject.length_bytes_max / 4) as usize,
        folio_bytes: subject.file.folio_bytes(),
        memory_bytes,
        kinds: [&OpKind::ANY_FILE[..], &OpKind::ALLOCATION].concat(),
    }
}

/// Runs `steps` operations, each on one of the files, and compares them with the disk from time to
/// time. Returns how many folios were evicted: none if the files happen to be small.
fn run(
    seed: u64,
    memory_bytes: std::ops::RangeInclusive<u64>,
    files: &[(u64, u64)],
    steps: u32,
) -> u64 {
    let mut random = Rng::with_seed(seed);
    let directory = directory();
    let cache = cache_of(*memory_bytes.end());
    let subjects: Vec<_> = files
        .iter()
        .enumerate()
        .map(|(number, (folio_bytes, length_bytes_max))| {
            let path = directory.path().join(format!("file-{number}"));
            subject(&cache, path, *folio_bytes, *length_bytes_max, &mut random)
        })
        .collect();
    let mut runs: Vec<_> = subjects
        .iter()
        .map(|subject| {
            let workload = Workload::new(random.u64(..), limits(subject, memory_bytes.clone()));
            (Runner::new(&cache, &subject.file, Model::new(subject.start.clone())), workload)
        })
        .collect();
    for step in 0..steps {
        let number = random.usize(..runs.len());
        let (runner, workload) = &mut runs[number];
        let op = workload.next().unwrap();
        runner.apply(&op).unwrap_or_else(|failure| panic!("file {number}: {failure}"));
        let stats = cache.stats();
        assert!(stats.memory.used_bytes <= stats.memory.bound_bytes, "step {step}: {stats:?}");
        if random.u32(..100) == 0 {
            subjects[number].file.sync_data().unwrap();
            compare_with_disk(runner.model(), &subjects[number].path);
        }
    }
    for ((runner, _), subject) in runs.iter().zip(&subjects) {
        runner.check_all().unwrap_or_else(|failure| panic!("{failure}"));
        subject.file.sync_all().unwrap();
        compare_with_disk(runner.model(), &subject.path);
    }
    let evicted = cache.stats().evictions.folios + cache.stats().evictions.evacuated_folios;
    cache.close().unwrap();
    // Another cache, with other folios, finds the same.
    let cache = cache_of(8 << 20);
    for ((runner, _), subject) in runs.iter().zip(&subjects) {
        let other = if subject.file.folio_bytes() == PAGE { 64 << 10 } else { PAGE };
        let options = OpenOptions::new().folio_bytes(other);
        assert_same(
            &read_all(&cache.open(&subject.path, &options).unwrap()),
            runner.model().bytes(),
        );
    }
    evicted
}

fn compare_with_disk(model: &Model, path: &Path) {
    let found = std::fs::read(path).unwrap();
    model.compare(&found).unwrap_or_else(|problem| panic!("on the disk: {problem}"));
}

#[test]
fn small_folios_in_a_tiny_cache_agree_with_the_model() {
    let files = [(4 << 10, 700_000), (16 << 10, 900_000), (4 << 10, 100_000)];
    let evicted = Cell::new(0);
    with_seeds(8, |seed| {
        evicted.set(evicted.get() + run(seed, 256 << 10..=512 << 10, &files, 400));
    });
    assert!(evicted.get() > 0, "nothing was evicted");
}

#[test]
fn folios_of_all_sizes_in_one_cache_agree_with_the_model() {
    let lengths = [2_000_000, 2_000_000, 4_000_000, 9_000_000];
    let files: Vec<_> = [4 << 10, 16 << 10, 64 << 10, 128 << 10].into_iter().zip(lengths).collect();
    let evicted = Cell::new(0);
    with_seeds(4, |seed| {
        evicted.set(evicted.get() + run(seed, 5 << 20..=8 << 20, &files, 150));
    });
    assert!(evicted.get() > 0, "nothing was evicted");
}

#[test]
fn threads_on_parts_of_shared_files_agree_with_the_model() {
    // Not a multiple of anything: regions meet inside a page.
    const REGION_BYTES: usize = 700_001;
    with_seeds(3, |seed| {
        let directory = directory();
        let cache = cache_of(2 << 20);
        let zeros = vec![0; 2 * REGION_BYTES];
        let paths = [file_of(&directory, "a", &zeros), file_of(&directory, "b", &zeros)];
        let files = [
            open(&cache, &paths[0]),
            cache.open(&paths[1], &writable().folio_bytes(16 << 10)).unwrap(),
        ];
        let models: Vec<_> = thread::scope(|scope| {
            let run = |number: usize| {
                let file = files[number / 2].clone();
                let start = (number % 2 * REGION_BYTES) as u64;
                let model = Model::region(start, vec![0; REGION_BYTES]);
                let mut runner = Runner::new(&cache, &file, model);
                let limits = Limits {
                    length_bytes_max: REGION_BYTES as u64,
                    transfer_bytes_max: 60_000,
                    folio_bytes: file.folio_bytes(),
                    memory_bytes: 3 << 19..=2 << 20,
                    kinds: [&OpKind::ANY_FILE[..], &OpKind::ALLOCATION].concat(),
                };
                let ops = Workload::new(seed ^ number as u64, limits).take(400);
                let result = runner.run(ops).and_then(|()| runner.check_all());
                result.unwrap_or_else(|failure| panic!("thread {number}: {failure}"));
                runner.into_model()
            };
            let threads: Vec<_> = (0..4).map(|number| scope.spawn(move || run(number))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(cache.stats().evictions.folios > 0, "nothing was evicted");
        for (number, path) in paths.iter().enumerate() {
            files[number].sync_data().unwrap();
            let expected = [models[2 * number].bytes(), models[2 * number + 1].bytes()].concat();
            assert_same(&std::fs::read(path).unwrap(), &expected);
        }
    });
}

const BLOCK: usize = PAGE as usize;

/// Returns a page that encodes its index, its write, and whether it is whole.
fn block(index: u64, sequence: u64) -> Vec<u8> {
    let mut block = fill_bytes(index ^ sequence.rotate_left(32), BLOCK);
    block[..8].copy_from_slice(&index.to_le_bytes());
    block[8..16].copy_from_slice(&sequence.to_le_bytes());
    block
}

/// Returns the sequence number of a page, if it is one write's, whole.
fn sequence_of(index: u64, found: &[u8]) -> Option<u64> {
    let sequence = u64::from_le_bytes(found[8..16].try_into().unwrap());
    (found == block(index, sequence)).then_some(sequence)
}

/// Pages of the file that writers and readers share: four times the capacity of the cache.
const BLOCKS: u64 = 512;

fn write_blocks(file: &File, random: &mut Rng, writer: u64) {
    for number in 1..4000 {
        let index = random.u64(..BLOCKS);
        // One page, or a run of them in one call.
        let end = (index + random.choice([1, 1, 1, 5]).unwrap()).min(BLOCKS);
        let sequence = number * 2 + writer;
        let bytes: Vec<_> = (index..end).flat_map(|index| block(index, sequence)).collect();
        if random.bool() {
            file.write_all_at(&bytes, index * PAGE).unwrap();
        } else {
            for (bytes, index) in bytes.chunks(BLOCK).zip(index..) {
                let range = index * PAGE..(index + 1) * PAGE;
                file.pin_mut(range).unwrap().copy_from(0, bytes).unwrap();
            }
        }
        if number % 1000 == 0 {
            file.sync_data().unwrap();
        }
    }
}

fn read_blocks(file: &File, random: &mut Rng, stop: &AtomicBool) -> u64 {
    let mut checked = 0;
    while !stop.load(Ordering::Relaxed) {
        let index = random.u64(..BLOCKS);
        let end = (index + random.choice([1, 1, 1, 40]).unwrap()).min(BLOCKS);
        let mut bytes = vec![0; (end - index) as usize * BLOCK];
        file.read_exact_at(&mut bytes, index * PAGE).unwrap();
        for (found, index) in bytes.chunks(BLOCK).zip(index..) {
            assert!(sequence_of(index, found).is_some(), "page {index} is of two writes");
            checked += 1;
        }
    }
    checked
}

fn pages_are_whole(seed: u64, folio_bytes: u64) {
    let directory = directory();
    let start: Vec<_> = (0..BLOCKS).flat_map(|index| block(index, 0)).collect();
    let path = file_of(&directory, "blocks", &start);
    let cache = cache_of(1 << 20);
    let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let (file, stop) = (&file, &stop);
        let readers = [10, 11].map(|number| {
            scope.spawn(move || read_blocks(file, &mut Rng::with_seed(seed ^ number), stop))
        });
        let writers = [0, 1].map(|number| {
            scope.spawn(move || write_blocks(file, &mut Rng::with_seed(seed ^ number), number))
        });
        let written = writers.map(|writer| writer.join());
        stop.store(true, Ordering::Relaxed);
        let checked: u64 = readers.map(|reader| reader.join().unwrap()).iter().sum();
        written.into_iter().for_each(|written| written.unwrap());
        assert!(checked > 1000, "only {checked} pages were read");
    });
    assert!(cache.stats().evictions.folios > 0, "nothing was evicted");
    file.sync_all().unwrap();
    let cached = read_all(&file);
    assert_same(&std::fs::read(&path).unwrap(), &cached);
    let mut newest = 0;
    for (found, index) in cached.chunks(BLOCK).zip(0..) {
        newest = newest.max(sequence_of(index, found).expect("a whole page"));
    }
    assert!(newest > 0);
}

#[test]
fn a_page_read_is_one_writes_whole_with_folios_of_one_page() {
    with_seeds(1, |seed| pages_are_whole(seed, PAGE));
}

#[test]
fn a_page_read_is_one_writes_whole_with_folios_of_four_pages() {
    with_seeds(1, |seed| pages_are_whole(seed, 4 * PAGE));
}

//! Threads that each have a region of a memory file: regions meet inside a page.

use std::thread;

use bifolio::{Cache, File};
use bifolio_testing::{Limits, Model, Runner, Workload, fill_bytes, with_seeds};

use crate::model::kinds;
use crate::setup::{Setup, check_empty, resident_bytes};
use crate::support::{assert_same, read_all};

/// Not a multiple of anything.
const REGION_BYTES: usize = 300_001;
const THREADS: usize = 3;

/// Returns the final state of each thread, and the number of refused operations. Regions are full
/// at first, or one hole.
fn run_regions(
    seed: u64,
    cache: &Cache,
    file: &File,
    steps: usize,
    is_full: bool,
) -> Vec<(Model, u64)> {
    let bound = cache.stats().memory.bound_bytes;
    let run = |number: usize| {
        let start = (number * REGION_BYTES) as u64;
        let mut model = Model::region(start, vec![0; REGION_BYTES]).in_memory(file.folio_bytes());
        if is_full {
            let bytes = fill_bytes(seed ^ number as u64, REGION_BYTES);
            file.write_all_at(&bytes, start).unwrap();
            model.write(start, &bytes);
        }
        let mut runner = Runner::new(cache, file, model).may_be_full().may_be_in_use();
        let limits = Limits {
            length_bytes_max: REGION_BYTES as u64,
            transfer_bytes_max: 60_000,
            folio_bytes: file.folio_bytes(),
            memory_bytes: bound / 8 * 7..=bound,
            kinds: kinds(),
        };
        let ops = Workload::new(seed ^ number as u64, limits).take(steps);
        let result = runner.run(ops).and_then(|()| runner.check_all());
        result.unwrap_or_else(|failure| panic!("thread {number}: {failure}"));
        let refused = runner.refused();
        (runner.into_model(), refused)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|number| scope.spawn(move || run(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn regions_agree(setup: &Setup, seed: u64, steps: usize) -> u64 {
    let cache = setup.cache();
    let file = setup.file(&cache);
    file.set_len((THREADS * REGION_BYTES) as u64).unwrap();
    let models = run_regions(seed, &cache, &file, steps, !setup.keeps_in_memory());
    let expected: Vec<_> =
        models.iter().flat_map(|(model, _)| model.bytes().iter().copied()).collect();
    assert_same(&read_all(&file), &expected);
    let stats = cache.stats();
    assert!(stats.memory.used_bytes <= stats.memory.bound_bytes, "{stats:?}");
    if setup.keeps_in_memory() {
        // A refused operation has no effect. Units at the edges count for both neighbours, or may
        // be holes.
        let rooms = models.iter().map(|(model, _)| model.room_bytes());
        let least: u64 = rooms.clone().map(|room| *room.start()).sum();
        let most: u64 = rooms.map(|room| *room.end()).sum();
        let shared = 2 * THREADS as u64 * setup.folio_bytes;
        let resident = resident_bytes(&stats);
        assert!(
            resident <= most && least <= resident + shared,
            "{least}, {resident}, {most} bytes"
        );
    }
    let swapped = stats.storage.swapped_out_pages;
    assert_eq!(swapped > 0, !setup.keeps_in_memory(), "{swapped} pages were swapped");
    file.punch_hole(0..file.len() + setup.folio_bytes).unwrap();
    check_empty(&cache, setup, 2 << 20).unwrap();
    drop(file);
    check_empty(&cache, setup, 2 << 20).unwrap();
    models.iter().map(|(_, refused)| refused).sum()
}

#[test]
fn threads_on_regions_of_a_file_agree_with_their_models() {
    for folio_bytes in [4 << 10, 16 << 10, 64 << 10] {
        let setup = Setup::new(4 << 20, folio_bytes);
        with_seeds(2, |seed| {
            assert_eq!(regions_agree(&setup, seed, 200), 0, "there was room");
        });
    }
}

#[test]
fn threads_that_are_refused_room_agree_with_their_models() {
    for folio_bytes in [4 << 10, 16 << 10] {
        let setup = Setup::new(512 << 10, folio_bytes);
        with_seeds(2, |seed| {
            regions_agree(&setup, seed, 200);
        });
    }
}

#[test]
fn threads_whose_pages_are_swapped_agree_with_their_models() {
    for folio_bytes in [4 << 10, 16 << 10, 64 << 10] {
        // A third of what the regions have; more where folios are large and some are in use.
        let setup = Setup::swapping((300 << 10) + 8 * folio_bytes, folio_bytes);
        with_seeds(2, |seed| {
            regions_agree(&setup, seed, 150);
        });
    }
}

#[test]
fn a_memory_file_and_one_on_the_disk_share_a_cache() {
    with_seeds(1, |seed| {
        shares_with_disk(&Setup::new(2 << 20, 4096), seed);
        shares_with_disk(&Setup::swapping(700 << 10, 4096), seed);
        shares_with_disk(&Setup::swapping(1 << 20, 16 << 10), seed);
    });
}

fn shares_with_disk(setup: &Setup, seed: u64) {
    let cache = setup.cache();
    let file = setup.file(&cache);
    file.set_len((THREADS * REGION_BYTES) as u64).unwrap();
    let directory = crate::support::directory();
    let (path, bytes) = crate::support::random_file(&directory, "file", 3_000_000);
    let disk = crate::support::open(&cache, &path);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            for _ in 0..3 {
                assert_same(&read_all(&disk), &bytes);
            }
        });
        let models = run_regions(seed, &cache, &file, 150, !setup.keeps_in_memory());
        reader.join().unwrap();
        let expected: Vec<_> =
            models.iter().flat_map(|(model, _)| model.bytes().iter().copied()).collect();
        assert_same(&read_all(&file), &expected);
    });
    assert!(cache.stats().evictions.folios > 0, "nothing was evicted");
    let swapped = cache.stats().storage.swapped_out_pages;
    assert_eq!(swapped > 0, !setup.keeps_in_memory(), "{swapped} pages were swapped");
}

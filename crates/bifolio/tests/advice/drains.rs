//! Which LRU batches are drained: those that hold a folio of the range, and no others.

use bifolio::{Cache, Evicted};
use bifolio_testing::skip;

use crate::support::{
    PAGE, assert_same, cache_of, directory, files_can_be_mapped, open, random_file, read, writable,
};
use crate::{assert_counted, cpus, evict, on, quiet_cache, read_pages, resident_pages};
use std::time::Duration;

/// Returns two CPUs that this process may use, if there are two.
fn two_cpus() -> Option<[usize; 2]> {
    let found = cpus().first_chunk().copied();
    if found.is_none() {
        skip("cpus", "the test needs two CPUs");
    }
    found
}

/// Returns the numbers of drain requests, of drained CPUs, and of folios evicted after a drain.
fn drains(outcome: &Evicted) -> (u64, u64, u64) {
    (outcome.drains_requested, outcome.cpus_drained, outcome.second_pass_folios)
}

#[test]
fn pages_of_another_cpu_go_with_one_drain_of_that_cpu() {
    let Some([here, there]) = two_cpus() else { return };
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 8 * PAGE as usize);
    let cache = quiet_cache(8 << 20);
    let file = open(&cache, &path);
    let mut sum = Evicted::default();
    for _ in 0..10 {
        on(there, || file.write_all_at(&bytes, 0).unwrap());
        let outcome = on(here, || {
            file.sync_data().unwrap();
            evict(&file)
        });
        assert_eq!((outcome.folios, outcome.kept.total()), (8, 0), "{outcome:?}");
        assert_eq!(drains(&outcome), (1, 1, 8));
        assert_eq!(resident_pages(&file), 0);
        sum += outcome;
    }
    assert_counted(&cache, &sum);
}

#[test]
fn only_batches_with_folios_of_the_range_are_drained() {
    let Some([here, there]) = two_cpus() else { return };
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 64 * PAGE as usize);
    let (other_path, _) = random_file(&directory, "other", 64 * PAGE as usize);
    let cache = quiet_cache(8 << 20);
    let (file, other) = (open(&cache, &path), open(&cache, &other_path));
    on(here, || read_pages(&file, 0..8));
    on(there, || read_pages(&other, 0..8));
    let outcome = on(here, || evict(&file));
    assert_eq!((outcome.folios, drains(&outcome)), (8, (0, 0, 0)), "the other's are not wanted");
    // Nor are those of the same file, outside the range.
    on(there, || read_pages(&file, 16..20));
    on(here, || read_pages(&file, 0..8));
    let range = |pages: std::ops::Range<u64>| pages.start * PAGE..pages.end * PAGE;
    let outcome = on(here, || file.evict(range(0..8)).unwrap());
    assert_eq!((outcome.folios, drains(&outcome)), (8, (0, 0, 0)));
    let outcome = on(here, || file.evict(range(18..64)).unwrap());
    assert_eq!((outcome.folios, drains(&outcome)), (2, (1, 1, 2)));
    // What was drained along with them is on the lists.
    let outcome = on(here, || evict(&file));
    assert_eq!((outcome.folios, drains(&outcome)), (2, (0, 0, 0)));
}

#[test]
fn a_pin_asks_for_no_drain_and_one_in_a_batch_for_one() {
    let Some([here, there]) = two_cpus() else { return };
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 8 * PAGE as usize);
    let cache = quiet_cache(8 << 20);
    let file = open(&cache, &path);
    on(there, || read_pages(&file, 0..8));
    let hold = file.pin(3 * PAGE..4 * PAGE).unwrap().into_owned();
    let outcome = on(here, || evict(&file));
    assert_eq!((outcome.folios, drains(&outcome)), (7, (1, 1, 7)));
    assert_eq!((outcome.kept.referenced, outcome.kept.total()), (1, 1));
    // It was given to that batch once, and is not in it any more.
    on(there, || read_pages(&file, 4..8));
    let outcome = on(here, || file.evict(0..4 * PAGE).unwrap());
    assert_eq!((outcome.folios, drains(&outcome)), (0, (0, 0, 0)));
    assert_eq!(outcome.kept.referenced, 1);
    drop(hold);
    assert_eq!(evict(&file).folios, 5);
    assert_same(&read(&file, 0, bytes.len()), &bytes);
}

#[test]
fn many_doubtful_folios_are_decided_in_rounds() {
    let Some([here, there]) = two_cpus() else { return };
    let directory = directory();
    let pages = 3000;
    let (path, _) = random_file(&directory, "file", (pages * PAGE) as usize);
    let cache = quiet_cache(32 << 20);
    let file = open(&cache, &path);
    on(there, || read_pages(&file, 0..pages));
    let holds: Vec<_> = (0..pages - 10)
        .map(|page| file.pin(page * PAGE..(page + 1) * PAGE).unwrap().into_owned())
        .collect();
    let outcome = on(here, || evict(&file));
    assert_eq!((outcome.folios, outcome.kept.referenced), (10, pages - 10));
    assert_eq!(outcome.kept.total(), pages - 10);
    drop(holds);
    assert_eq!(evict(&file).folios, pages - 10);
}

/// A file that stays mapped is advised away chunk by chunk, while the other CPU keeps its batch
/// filled.
#[test]
fn a_mapped_stream_drains_no_cpu() {
    let Some([here, there]) = two_cpus().filter(|_| files_can_be_mapped()) else { return };
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 512 * PAGE as usize);
    let (other_path, _) = random_file(&directory, "other", 64 * PAGE as usize);
    let cache = cache_of(8 << 20);
    let file = cache.open(&path, &writable().mappable(true)).unwrap();
    let other = open(&cache, &other_path);
    let map = file.map(0..file.len()).unwrap();
    map.populate(0..map.len()).unwrap();
    for chunk in 0..8 {
        on(there, || read_pages(&other, chunk * 8..chunk * 8 + 8));
        let range = chunk * 64 * PAGE..(chunk + 1) * 64 * PAGE;
        let outcome = on(here, || file.evict(range).unwrap());
        assert_eq!((outcome.kept.mapped, outcome.kept.total()), (64, 64));
        assert_eq!(drains(&outcome), (0, 0, 0));
    }
    assert_eq!(resident_pages(&file), 512);
}

/// A quarter of the range each is clean, dirty, mapped, and in the batch of another CPU.
#[test]
fn of_a_mixed_range_the_batched_quarter_is_drained_for() {
    let Some([here, there]) = two_cpus().filter(|_| files_can_be_mapped()) else { return };
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 32 * PAGE as usize);
    let cache = Cache::builder()
        .memory(8 << 20)
        .readahead_max(0)
        .dirty_age_max(Duration::from_millis(3_600_000))
        .build()
        .unwrap();
    let file = cache.open(&path, &writable().mappable(true)).unwrap();
    let map = file.map(16 * PAGE..24 * PAGE).unwrap();
    on(here, || {
        read_pages(&file, 0..8);
        map.populate(0..map.len()).unwrap();
        (8..16).for_each(|page| file.write_all_at(b"dirty", page * PAGE).unwrap());
    });
    on(there, || read_pages(&file, 24..32));
    let outcome = on(here, || evict(&file));
    assert_eq!((outcome.folios, drains(&outcome)), (16, (1, 1, 8)), "{outcome:?}");
    assert_eq!((outcome.kept.dirty, outcome.kept.mapped), (8, 8));
    assert_eq!(outcome.kept.total(), 16);
}

//! Residency as reported by a cache.

use std::ops::Range;
use std::thread;

use bifolio::{Cache, ErrorKind, File, Residency};
use bifolio_testing::{Call, Fault, Gate};

use crate::on_one;
use crate::support::{
    FOLIO_SIZES, Faulty, MEMORY_FOR_ALL, PAGE, Way, cache_of, directory, error_of, open,
    random_file, read, wait_for_stats, writable,
};

/// Returns the residency of a range, after a check that its pages add up to it.
#[track_caller]
fn residency(file: &File, range: Range<u64>) -> Residency {
    let sum = file.residency(range.clone()).unwrap();
    let end = range.end.min(file.len());
    let pages =
        if range.start < end { range.start / PAGE..end.div_ceil(PAGE) } else { Range::default() };
    let mut parts = Residency::default();
    for one in pages.map(|page| of_page(file, page)) {
        parts.pages += one.pages;
        parts.resident += one.resident;
        parts.dirty += one.dirty;
        parts.writeback += one.writeback;
        parts.evicted += one.evicted;
    }
    assert_eq!(sum, parts);
    sum
}

fn of_page(file: &File, page: u64) -> Residency {
    file.residency(page * PAGE..(page + 1) * PAGE).unwrap()
}

#[test]
fn pages_are_counted_where_folios_of_any_size_hold_them() {
    let directory = directory();
    for folio_bytes in FOLIO_SIZES {
        let length = 3 * folio_bytes + 5;
        let (path, _) = random_file(&directory, "file", length as usize);
        let cache = Cache::builder().memory(MEMORY_FOR_ALL).readahead_max(0).build().unwrap();
        let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
        let pages_a_folio = folio_bytes / PAGE;
        assert_eq!(read(&file, folio_bytes, 1).len(), 1);
        file.write_all_at(b"new", 3 * folio_bytes).unwrap();
        let sum = residency(&file, 0..u64::MAX >> 1);
        assert_eq!((sum.pages, sum.resident), (3 * pages_a_folio + 1, pages_a_folio + 1));
        assert_eq!((sum.dirty, sum.writeback, sum.evicted), (1, 0, 0));
        let is_resident = |page: u64| of_page(&file, page).resident == 1;
        assert!(!is_resident(pages_a_folio - 1) && is_resident(pages_a_folio));
        assert!(is_resident(2 * pages_a_folio - 1) && is_resident(3 * pages_a_folio));
        // The last page of one folio and the first of the next.
        let middle = 2 * folio_bytes - 1..2 * folio_bytes + 1;
        let sum = residency(&file, middle);
        assert_eq!((sum.pages, sum.resident), (2, 1));
        // What was there is remembered, whatever page of it is asked for.
        let outcome = file.evict(folio_bytes..2 * folio_bytes).unwrap();
        assert_eq!(outcome.folios, 1);
        let sum = residency(&file, 2 * folio_bytes - 1..2 * folio_bytes);
        assert_eq!((sum.resident, sum.evicted), (0, 1));
        for nothing in [5..5, length..length + PAGE] {
            assert_eq!(residency(&file, nothing), Residency::default());
        }
    }
}

#[test]
fn evictions_are_told_from_pages_never_seen() {
    // What is in the batch of another CPU is not evicted.
    on_one(|| {
        let directory = directory();
        let (path, _) = random_file(&directory, "file", 8 << 20);
        let cache = Cache::builder().memory(2 << 20).readahead_max(0).build().unwrap();
        let file = open(&cache, &path);
        for page in 0..1024 {
            assert_eq!(read(&file, page * PAGE, 1).len(), 1);
        }
        let sum = residency(&file, 0..file.len());
        assert_eq!(sum.resident + sum.evicted, 1024);
        let states = [0, 1023, 1024].map(|page| of_page(&file, page));
        assert_eq!(states.map(|page| (page.resident, page.evicted)), [(0, 1), (1, 0), (0, 0)]);
    });
}

#[test]
fn pages_on_their_way_out_are_told() {
    let faulty = Faulty::new(Way::Memory, 16 * PAGE as usize, 1);
    let cache = faulty.builder(4 << 20).build().unwrap();
    let file = faulty.open(&cache);
    file.write_all_at(&[7; 3 * PAGE as usize], PAGE).unwrap();
    let sum = residency(&file, 0..file.len());
    assert_eq!((sum.dirty, sum.writeback), (3, 0));
    let gate = Gate::new();
    faulty.backing.inject(Fault::on(Call::Write).held(&gate));
    let outcome = file.evict(0..file.len()).unwrap();
    assert_eq!(outcome.kept.dirty, 3);
    gate.wait_for_arrivals(1);
    let sum = residency(&file, 0..file.len());
    assert_eq!((sum.dirty, sum.writeback, sum.resident), (0, 3, 3));
    gate.open();
    wait_for_stats(&cache, "clean", |stats| stats.memory.dirty_bytes == 0);
}

#[test]
fn pages_on_their_way_in_are_not_there_yet() {
    let faulty = Faulty::new(Way::Memory, 16 * PAGE as usize, 1);
    let cache = faulty.builder(4 << 20).build().unwrap();
    let file = faulty.open(&cache);
    let gate = Gate::new();
    faulty.backing.inject(Fault::on(Call::Read).held(&gate));
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(&file, 0, PAGE as usize));
        gate.wait_for_arrivals(1);
        let sum = residency(&file, 0..file.len());
        assert_eq!((sum.resident, sum.evicted), (0, 0));
        gate.open();
        assert_eq!(reader.join().unwrap().len(), PAGE as usize);
    });
    assert_eq!(residency(&file, 0..file.len()).resident, 1);
}

#[test]
fn a_huge_hole_costs_nothing() {
    let cache = cache_of(4 << 20);
    let file = cache.memory_file("scratch").unwrap();
    file.write_all_at(b"end", 1 << 39).unwrap();
    let sum = file.residency(0..u64::MAX >> 1).unwrap();
    assert_eq!((sum.pages, sum.resident, sum.dirty), ((1 << 27) + 1, 1, 1));
    let sum = residency(&file, (1 << 39) - PAGE..u64::MAX >> 1);
    assert_eq!((sum.resident, sum.pages), (1, 2));
    cache.close().unwrap();
    let closed = error_of(file.residency(0..PAGE), &[]);
    assert_eq!(closed.kind(), ErrorKind::Closed);
}

#[test]
fn files_count_their_own_misses_and_evictions() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 4 << 20);
    let (other, _) = random_file(&directory, "other", 8192);
    let cache = cache_of(1 << 20);
    let files = [&path, &other].map(|path| open(&cache, path));
    files[0].set_access(bifolio::Access::Random);
    for round in 0..2 {
        for page in 0..1024 {
            files[0].read_exact_at(&mut [0], page * PAGE).unwrap();
        }
        files[1].read_exact_at(&mut [round], 0).unwrap();
    }
    let found = cache.files();
    let of = |path: &std::path::Path| {
        found.iter().find(|found| found.file == path.to_string_lossy()).unwrap()
    };
    let (large, small) = (of(&path), of(&other));
    assert!(large.misses > 1500 && large.refaults > 500, "{large:?}");
    let resident_folios = large.resident_bytes / PAGE;
    assert_eq!(large.evicted_folios, large.misses - resident_folios, "{large:?}");
    assert!((1..=3).contains(&small.misses), "{small:?}");
    assert!(!large.is_kept && !small.is_kept);
    let stats = cache.stats();
    assert_eq!(stats.reads.misses, large.misses + small.misses);
    let age = stats.eviction_age(std::time::Duration::from_secs(100)).unwrap();
    assert!(age.as_secs_f64() < 100.0, "{age:?}");
}

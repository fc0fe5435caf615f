//! Access hints, prefetch, population, and eviction of all files.

use bifolio::{Access, ErrorKind, Evicted, File, OpenOptions};
use std::ops::Range;

use crate::support::{
    PAGE, assert_same, cache_of, directory, error_of, open, random_file, read, read_all,
    wait_for_stats,
};
use crate::{evict, on_one, quiet_cache, read_pages, resident_pages};

fn bytes_of(pages: Range<u64>) -> Range<u64> {
    pages.start * PAGE..pages.end * PAGE
}

fn resident_of(file: &File, pages: Range<u64>) -> u64 {
    file.residency(bytes_of(pages)).unwrap().resident
}

/// Reads pages after `first` until one of the first 64 pages is evicted.
fn press(file: &File, first: u64) {
    let mut next = first;
    while resident_of(file, 0..64) == 64 {
        read_pages(file, next..next + 1);
        next += 1;
        assert!(next < 2048, "nothing is ever evicted");
    }
}

#[test]
fn pages_of_no_reuse_go_before_others() {
    on_one(|| {
        let directory = directory();
        let (path, _) = random_file(&directory, "file", 8 << 20);
        let cache = quiet_cache(2 << 20);
        let (file, once) = (open(&cache, &path), open(&cache, &path));
        once.set_access(Access::NoReuse);
        (0..3).for_each(|_| read_pages(&file, 0..32));
        // Later, and as often.
        (0..3).for_each(|_| read_pages(&once, 32..64));
        press(&file, 64);
        assert_eq!(resident_of(&file, 0..32), 32, "in use");
        assert!(resident_of(&file, 32..64) < 32);
        // Until it is taken back.
        once.set_access(Access::Normal);
        evict(&file);
        (0..3).for_each(|_| read_pages(&file, 0..32));
        (0..3).for_each(|_| read_pages(&once, 32..64));
        read_pages(&file, 1024..2048);
        assert_eq!(resident_of(&file, 0..64), 64, "all of it in use");
    });
}

#[test]
fn a_populated_range_is_resident_when_the_call_returns() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", (100 * PAGE + 5) as usize);
    let cache = quiet_cache(4 << 20);
    let file = open(&cache, &path);
    file.populate(10 * PAGE + 1..u64::MAX >> 1).unwrap();
    assert_eq!(resident_of(&file, 10..101), 91);
    let misses = cache.stats().reads.misses;
    assert_same(&read(&file, 10 * PAGE, bytes.len()), &bytes[10 * PAGE as usize..]);
    assert_eq!(cache.stats().reads.misses, misses);
    // An empty range and bytes past the end count as resident.
    file.populate(5..5).unwrap();
    file.populate(200 * PAGE..300 * PAGE).unwrap();
    assert_eq!(cache.stats().reads.misses, misses);
}

#[test]
fn a_prefetch_is_on_its_way_when_the_call_returns() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", (100 * PAGE) as usize);
    let cache = quiet_cache(4 << 20);
    let file = open(&cache, &path);
    file.prefetch(bytes_of(20..30)).unwrap();
    wait_for_stats(&cache, "ten pages", |_| resident_pages(&file) == 10);
}

#[test]
fn a_prefetch_of_many_ranges_takes_any_order_and_a_quarter_of_the_cache() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", (1000 * PAGE + 5) as usize);
    let cache = quiet_cache(4 << 20);
    let file = open(&cache, &path);
    file.prefetch_many([]).unwrap();
    // Parts of pages, a range twice, an empty one, one past the end, and adjacent ones.
    let ranges = (0..40_u64).map(|number| {
        let page = 900 - 17 * number;
        page * PAGE + 7..page * PAGE + 100
    });
    let others = [5..5, 2000 * PAGE..2001 * PAGE, 0..1, 0..1, PAGE..3 * PAGE, 3 * PAGE..4 * PAGE];
    file.prefetch_many(ranges.clone().chain(others)).unwrap();
    wait_for_stats(&cache, "44 pages", |_| resident_pages(&file) == 44);
    let misses = cache.stats().reads.misses;
    for range in ranges {
        assert_same(
            &read(&file, range.start, 93),
            &bytes[range.start as usize..range.end as usize],
        );
    }
    assert_eq!(cache.stats().reads.misses, misses);
    file.evict(..).unwrap();
    // Pages count, not bytes, and a page of adjacent records once.
    let records =
        (0..600_u64).flat_map(|page| [0, 500].map(|at| page * PAGE + at..page * PAGE + at + 9));
    file.prefetch_many(records).unwrap();
    wait_for_stats(&cache, "a quarter", |_| resident_pages(&file) == 256);
    assert_eq!(resident_of(&file, 0..256), 256);
    file.evict(..).unwrap();
    // The last range that begins within a quarter is cut there.
    let wide = |number: u64| number * 40 * PAGE..(number * 40 + 30) * PAGE;
    file.prefetch_many((0..20).map(wide)).unwrap();
    wait_for_stats(&cache, "a quarter", |_| resident_pages(&file) == 256);
    assert_eq!(resident_of(&file, 320..360), 16);
    let refused = file.prefetch_many([0..PAGE, 5..u64::MAX]);
    assert!(refused.is_err());
}

#[test]
fn a_populated_memory_file_has_no_holes_and_grows_no_file() {
    let cache = quiet_cache(4 << 20);
    let file = cache.memory_file("scratch").unwrap();
    file.set_len(20 * PAGE).unwrap();
    file.populate(bytes_of(5..40)).unwrap();
    assert_eq!(file.len(), 20 * PAGE);
    assert_eq!(resident_of(&file, 0..20), 15);
    assert_same(&read_all(&file), &[0; 20 * PAGE as usize]);
}

#[test]
fn an_eviction_of_all_files_reaches_each() {
    let directory = directory();
    let cache = cache_of(4 << 20);
    let files = [0, 1, 2].map(|number| {
        let (path, _) = random_file(&directory, &format!("file-{number}"), 8 * PAGE as usize);
        let file = open(&cache, &path);
        assert_eq!(read_all(&file).len(), 8 * PAGE as usize);
        file
    });
    files[1].write_all_at(b"dirty", 0).unwrap();
    let pin = files[2].pin(0..PAGE).unwrap();
    let outcome = cache.evict_all().unwrap();
    assert_eq!((outcome.folios, outcome.kept.total()), (22, 2), "{outcome:?}");
    assert_eq!((outcome.kept.dirty, outcome.kept.referenced), (1, 1));
    drop(pin);
    wait_for_stats(&cache, "clean", |stats| stats.memory.dirty_bytes == 0);
    // Refused while the write-out that has cleaned one of them still holds its reference.
    let mut evicted = 0;
    while evicted < 2 {
        evicted += cache.evict_all().unwrap().folios;
    }
    assert_eq!(cache.evict_all().unwrap(), Evicted::default());
}

#[test]
fn calls_that_cannot_be_served_are_refused() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 8 * PAGE as usize);
    let cache = cache_of(4 << 20);
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    type Call = fn(&File, Range<u64>) -> bifolio::Result<()>;
    let calls: [Call; 3] =
        [File::prefetch, File::populate, |file, range| file.evict(range).map(drop)];
    let blind = cache.open(&path, &OpenOptions::new().read(false).write(true)).unwrap();
    for call in calls {
        let refused = call(&blind, 0..PAGE);
        assert!(error_of(refused, &["reading"]).kind() == ErrorKind::NotOpenedFor);
        let too_far = call(&file, 5..u64::MAX);
        assert!(error_of(too_far, &["file"]).kind() == ErrorKind::OutOfRange);
    }
    cache.close().unwrap();
    for call in calls {
        assert!(error_of(call(&file, 0..PAGE), &[]).kind() == ErrorKind::Closed);
    }
    assert!(error_of(cache.evict_all(), &[]).kind() == ErrorKind::Closed);
}

//! Many reads and many pins at once: the bytes, the single results, and the number of calls; with
//! io_uring and without it.

use std::ops::Range;

use crate::support::{
    PAGE, SMALL_FOLIO_SIZES, assert_same, cache_of, directory, error_of, has, random_file,
};
use bifolio::{Access, Cache, ErrorKind, Feature, OpenOptions, ReadRequest};
use fastrand::Rng;

/// Returns a cache that uses io_uring if the machine has it, and one that does not.
fn caches(memory_bytes: u64) -> [Cache; 2] {
    let builder = || Cache::builder().memory(memory_bytes);
    [builder().build().unwrap(), builder().disable(Feature::IoUring).build().unwrap()]
}

fn random_ranges(random: &mut Rng, count: usize, length_bytes: u64) -> Vec<Range<u64>> {
    let range = |_| {
        let start = random.u64(..length_bytes + 2 * PAGE);
        let length = match random.u32(..10) {
            0 => 0,
            1..5 => PAGE,
            5..9 => random.u64(..3 * PAGE),
            _ => random.u64(..40 * PAGE),
        };
        start..start + length
    };
    (0..count).map(range).collect()
}

/// Returns the expected result of a read of `range`.
fn expected<'b>(bytes: &'b [u8], range: &Range<u64>) -> &'b [u8] {
    let clip = |position: u64| position.min(bytes.len() as u64) as usize;
    &bytes[clip(range.start)..clip(range.end)]
}

fn requests_of<'b>(ranges: &[Range<u64>], buffers: &'b mut [Vec<u8>]) -> Vec<ReadRequest<'b>> {
    let pairs = ranges.iter().zip(buffers);
    pairs.map(|(range, buffer)| ReadRequest::new(buffer, range.start)).collect()
}

fn buffers_for(ranges: &[Range<u64>]) -> Vec<Vec<u8>> {
    ranges.iter().map(|range| vec![0xEE; (range.end - range.start) as usize]).collect()
}

#[test]
fn requests_of_all_kinds_are_answered_in_tiny_caches() {
    let mut random = Rng::with_seed(7);
    for folio_bytes in SMALL_FOLIO_SIZES {
        let directory = directory();
        let length = 5 * folio_bytes.max(1 << 20) as usize + 777;
        let (path, bytes) = random_file(&directory, "file", length);
        for cache in caches((3 * folio_bytes).max(300 << 10)) {
            let file = cache.open(&path, &OpenOptions::new().folio_bytes(folio_bytes)).unwrap();
            for count in [0, 1, 2, 40, 300] {
                let ranges = random_ranges(&mut random, count, length as u64);
                let mut buffers = buffers_for(&ranges);
                let mut requests = requests_of(&ranges, &mut buffers);
                file.read_many(&mut requests).unwrap();
                for (request, range) in requests.iter().zip(&ranges) {
                    let expected = expected(&bytes, range);
                    assert_eq!(*request.result.as_ref().unwrap(), expected.len(), "{range:?}");
                    assert_same(&request.buffer[..expected.len()], expected);
                    let rest = &request.buffer[expected.len()..];
                    assert!(rest.iter().all(|byte| *byte == 0xEE), "{range:?}: beyond the end");
                }
                let stats = cache.stats();
                assert!(stats.memory.used_bytes <= stats.memory.bound_bytes);
            }
        }
    }
}

#[test]
fn a_call_that_cannot_begin_says_why_and_touches_nothing() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 10_000);
    let cache = cache_of(1 << 20);
    let write_only = OpenOptions::new().read(false).write(true);
    let blind = cache.open(&path, &write_only).unwrap();
    let mut buffer = [0xEE; 100];
    let error = error_of(blind.read_many(&mut [ReadRequest::new(&mut buffer, 0)]), &["reading"]);
    assert_eq!(error.kind(), ErrorKind::NotOpenedFor);
    assert_eq!(buffer, [0xEE; 100]);
    assert_eq!(cache.stats().reads.misses, 0);
}

#[test]
fn a_range_beyond_all_files_fails_alone() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 10_000);
    let cache = cache_of(1 << 20);
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    let (mut good, mut bad) = ([0; 100], [0; 100]);
    let mut requests = [ReadRequest::new(&mut bad, u64::MAX - 5), ReadRequest::new(&mut good, 50)];
    file.read_many(&mut requests).unwrap();
    let [bad, good] = requests;
    let error = error_of(bad.result, &["beyond"]);
    assert_eq!(error.kind(), ErrorKind::OutOfRange);
    assert_eq!(good.result.unwrap(), 100);
    assert_eq!(good.buffer, &bytes[50..150]);
}

#[test]
fn pins_of_many_ranges_stand_in_their_order_with_their_bytes() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 900_000);
    for cache in caches(2 << 20) {
        for folio_bytes in [PAGE, 64 << 10] {
            let options = OpenOptions::new().folio_bytes(folio_bytes);
            let file = cache.open_immutable(&path, &options).unwrap();
            let mut random = Rng::with_seed(folio_bytes);
            let mut ranges: Vec<Range<u64>> = (0..100)
                .map(|_| {
                    let start = random.u64(..899_000) / PAGE * PAGE;
                    start + random.u64(..100)..start + 100 + random.u64(..800)
                })
                .collect();
            // Twice the same, one that spans folios, none at all, one beyond the end.
            ranges.push(ranges[0].clone());
            ranges.push(folio_bytes - 1..folio_bytes + 1);
            ranges.push(5..5);
            ranges.push(899_999..900_001);
            let pins = file.pin_many(&ranges);
            for (pin, range) in pins.iter().zip(&ranges).take(101) {
                assert_same(pin.as_ref().unwrap(), expected(&bytes, range));
            }
            let kinds: Vec<_> =
                pins[101..].iter().map(|pin| pin.as_ref().unwrap_err().kind()).collect();
            let expected = [ErrorKind::PinSpansFolios, ErrorKind::Config, ErrorKind::PastEnd];
            assert_eq!(kinds, expected);
            drop(pins);
            drop(file);
        }
    }
}

#[test]
fn more_pins_than_fit_are_refused_one_by_one() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 4 << 20);
    for cache in caches(512 << 10) {
        let file = cache.open_immutable(&path, &OpenOptions::new()).unwrap();
        let ranges: Vec<_> = (0..1024).map(|page| page * PAGE..page * PAGE + 10).collect();
        let pins = file.pin_many(&ranges[..200]);
        let (good, bad): (Vec<_>, Vec<_>) = pins.into_iter().partition(Result::is_ok);
        assert!(good.len() > 50 && !bad.is_empty(), "{} and {}", good.len(), bad.len());
        for error in bad {
            let error = error.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Full, "{error:?}");
        }
        for pin in good.iter().flatten() {
            assert_eq!(pin.len(), 10);
        }
        drop(good);
        assert_same(&file.pin(40_960..40_970).unwrap(), &bytes[40_960..40_970]);
    }
}

#[test]
fn misses_leave_together_and_hits_not_at_all() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 4 << 20);
    let cache = Cache::builder().memory(16 << 20).io_depth(32).build().unwrap();
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    file.set_access(Access::Random);
    let ranges: Vec<_> = (0..256).map(|page| 4 * page * PAGE..4 * page * PAGE + PAGE).collect();
    let mut buffers = buffers_for(&ranges);
    file.read_many(&mut requests_of(&ranges, &mut buffers)).unwrap();
    let first = cache.stats();
    assert_eq!((first.reads.misses, first.storage.read_requests), (256, 256));
    if cache.features().iter().any(|report| report.feature == Feature::IoUring && report.in_use) {
        assert!(
            first.storage.ring_enters <= 256 / 16 + 4,
            "{} system calls",
            first.storage.ring_enters
        );
        assert!(first.storage.ring_enters > 0);
    }
    file.read_many(&mut requests_of(&ranges, &mut buffers)).unwrap();
    let second = cache.stats();
    assert_eq!((second.reads.misses, second.storage.ring_enters), (256, first.storage.ring_enters));
}

#[test]
fn the_device_gets_a_first_part_of_a_long_queue_at_once() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 4 << 20);
    let cache = Cache::builder().memory(16 << 20).io_depth(32).build().unwrap();
    if !has(Feature::IoUring) {
        return;
    }
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    file.set_access(Access::Random);
    let mut pages = 0..1024;
    for (count, calls) in [(2, 1), (16, 1), (17, 2), (32, 2)] {
        let page = |page: u64| 4 * page * PAGE..4 * page * PAGE + PAGE;
        let ranges: Vec<_> = pages.by_ref().take(count).map(page).collect();
        let mut buffers = buffers_for(&ranges);
        let before = cache.stats();
        file.read_many(&mut requests_of(&ranges, &mut buffers)).unwrap();
        let after = cache.stats();
        assert_eq!(after.reads.misses - before.reads.misses, count as u64);
        assert_eq!(
            after.storage.ring_enters - before.storage.ring_enters,
            calls,
            "{count} requests"
        );
    }
}

//! Readahead: requests of a sequential and a random reader; pages are used before their
//! eviction, nothing is read past the end, and advice is followed.

use std::path::Path;

use crate::support::{PAGE, assert_same, directory, random_file, read, wait_for_stats};
use bifolio::{Access, Cache, Feature, File, OpenOptions};
use fastrand::Rng;

const LENGTH: usize = 32 << 20;

/// Runs a test with io_uring, if the machine has it, and without.
fn for_both_ways(memory_bytes: u64, path: &Path, test: impl Fn(&Cache, &File)) {
    for disabled in [None, Some(Feature::IoUring)] {
        let mut builder = Cache::builder().memory(memory_bytes);
        if let Some(feature) = disabled {
            builder = builder.disable(feature);
        }
        let cache = builder.build().unwrap();
        test(&cache, &cache.open(path, &OpenOptions::new()).unwrap());
    }
}

fn scan(file: &File, bytes: &[u8], block: usize) {
    let mut buffer = vec![0; block];
    for start in (0..bytes.len()).step_by(block) {
        let length = block.min(bytes.len() - start);
        assert_eq!(file.read_at(&mut buffer, start as u64).unwrap(), length);
        assert_same(&buffer[..length], &bytes[start..start + length]);
    }
}

#[test]
fn a_scan_takes_few_requests_and_reads_nothing_twice() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", LENGTH + 1234);
    for block in [512, 4096, 65536, 1 << 20] {
        for_both_ways(8 << 20, &path, |cache, file| {
            scan(file, &bytes, block);
            let stats = cache.stats();
            let pages = (LENGTH as u64 + 1234).div_ceil(PAGE);
            assert_eq!(stats.reads.misses, pages, "{block}: some page was read twice");
            assert_eq!(stats.storage.read_bytes, bytes.len() as u64, "{block}");
            assert_eq!(stats.reads.readahead_unused, 0, "{block}");
            // A request larger than the window brings most of its pages itself.
            assert!(
                stats.reads.readahead_folios > pages / 2 || block > 256 << 10,
                "{block}: {stats:?}"
            );
            assert!(
                stats.storage.read_requests < pages / 16,
                "{block}: {} requests",
                stats.storage.read_requests
            );
            assert!(
                stats.evictions.activated_folios < pages / 50,
                "{block}: a scan makes nothing hot: {stats:?}"
            );
        });
    }
}

/// Scans a file through pins.
fn scan_pinned(file: &File, bytes: &[u8], block: u64, way: &str) {
    let len_bytes = bytes.len() as u64;
    let ranges: Vec<_> = (0..len_bytes)
        .step_by(block as usize)
        .map(|start| start..(start + block).min(len_bytes))
        .collect();
    let check = |start: u64, pin: bifolio::PageRef<'_>| {
        let mut buffer = vec![0; pin.len()];
        pin.copy_to(0, &mut buffer).unwrap();
        assert_same(&buffer, &bytes[start as usize..][..buffer.len()]);
    };
    match way {
        "pin" => ranges.into_iter().for_each(|r| check(r.start, file.pin(r).unwrap())),
        _ => {
            for ranges in ranges.chunks(16) {
                let pins = file.pin_many(ranges).into_iter();
                ranges.iter().zip(pins).for_each(|(r, pin)| check(r.start, pin.unwrap()));
            }
        }
    }
}

#[test]
fn a_scan_through_pins_is_read_ahead_as_one_through_reads() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", LENGTH + 1234);
    for (way, block) in [("pin", 512), ("pin", 4096), ("pin_many", 4096)] {
        for_both_ways(8 << 20, &path, |cache, file| {
            scan_pinned(file, &bytes, block, way);
            let stats = cache.stats();
            let pages = (LENGTH as u64 + 1234).div_ceil(PAGE);
            assert_eq!(stats.reads.misses, pages, "{way} {block}: some page was read twice");
            assert_eq!(stats.reads.readahead_unused, 0, "{way} {block}");
            assert!(stats.storage.read_requests < pages / 16, "{way} {block}: {stats:?}");
            assert!(stats.evictions.activated_folios < pages / 50, "{way} {block}: {stats:?}");
        });
    }
}

#[test]
fn random_pins_read_nothing_ahead() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", LENGTH);
    for_both_ways(8 << 20, &path, |cache, file| {
        let mut random = Rng::with_seed(2);
        for _ in 0..500 {
            let start = random.u64(1..LENGTH as u64 / PAGE) * PAGE;
            file.pin(start..start + 100).unwrap();
            let starts = (0..4).map(|_| random.u64(1..LENGTH as u64 / PAGE) * PAGE);
            let ranges: Vec<_> = starts.map(|start| start..start + 100).collect();
            assert!(file.pin_many(&ranges).iter().all(Result::is_ok));
        }
        let stats = cache.stats();
        assert!(stats.reads.readahead_folios < 200, "{stats:?}");
    });
}

/// Reads the page at `start`, through a pin or a copy.
fn check_page(file: &File, bytes: &[u8], start: u64, is_pinned: bool) {
    let mut page = vec![0; PAGE as usize];
    if is_pinned {
        file.pin(start..start + PAGE).unwrap().copy_to(0, &mut page).unwrap();
    } else {
        file.read_exact_at(&mut page, start).unwrap();
    }
    assert_same(&page, &bytes[start as usize..(start + PAGE) as usize]);
}

/// Ranges of a B-tree: a few pages in order, from a random one on.
#[test]
fn short_runs_are_read_ahead_by_about_as_much_as_they_read() {
    const RUNS: u64 = 300;
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", LENGTH);
    for run_pages in [2, 6, 12, 50] {
        for is_pinned in [false, true] {
            for_both_ways(4 << 20, &path, |cache, file| {
                let mut rng = Rng::with_seed(run_pages);
                for _ in 0..RUNS {
                    let first = rng.u64(1..LENGTH as u64 / PAGE - run_pages);
                    for start in (first..first + run_pages).map(|page| page * PAGE) {
                        check_page(file, &bytes, start, is_pinned);
                    }
                }
                let stats = cache.stats();
                let read_pages = stats.storage.read_bytes / PAGE;
                // The first window has four pages, whatever follows.
                assert!(read_pages <= RUNS * (2 * run_pages + 8), "{run_pages}: {stats:?}");
                assert!(
                    stats.storage.read_requests <= RUNS * (run_pages / 6 + 3),
                    "{run_pages}: {stats:?}"
                );
            });
        }
    }
}

#[test]
fn a_small_window_is_read_in_the_transfer_of_its_reader() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 1 << 20);
    for is_pinned in [false, true] {
        for_both_ways(1 << 20, &path, |cache, file| {
            for page in 100..102 {
                check_page(file, &bytes, page * PAGE, is_pinned);
            }
            // The first page alone, then a window of four. No other thread reads.
            let stats = cache.stats();
            assert_eq!(
                (stats.storage.read_requests, stats.storage.read_bytes / PAGE),
                (2, 5),
                "{stats:?}"
            );
            assert_eq!(
                (stats.reads.readahead_folios, stats.storage.ring_transfers),
                (3, 0),
                "{stats:?}"
            );
            // The next page is a hit that begins the next window.
            check_page(file, &bytes, 102 * PAGE, is_pinned);
            let stats = cache.stats();
            assert_eq!(
                (stats.reads.misses - stats.reads.readahead_folios, stats.reads.readahead_folios),
                (2, 7)
            );
        });
    }
}

/// Pages after a resident page are read ahead early. The resident page was not used before.
#[test]
fn a_scan_makes_nothing_hot_but_what_was_read_before() {
    const BLOCK: usize = 1 << 20;
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", LENGTH);
    let cache = Cache::builder().memory(8 << 20).readahead_max(0).build().unwrap();
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    for start in (0..LENGTH as u64).step_by(BLOCK) {
        let page = start + 100 * PAGE;
        assert_same(&read(&file, page, 4096), &bytes[page as usize..][..4096]);
    }
    scan(&file, &bytes, BLOCK);
    scan(&cache.open(&path, &OpenOptions::new()).unwrap(), &bytes, BLOCK);
    let stats = cache.stats();
    assert_eq!(stats.reads.readahead_unused, 0, "{stats:?}");
    // Once in each scan, and a few near refaults.
    assert!(stats.evictions.activated_folios <= 3 * (LENGTH / BLOCK) as u64, "{stats:?}");
}

#[test]
fn two_scans_of_one_handle_do_not_disturb_each_other() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", LENGTH);
    for_both_ways(64 << 20, &path, |cache, file| {
        let half = LENGTH / 2;
        std::thread::scope(|scope| {
            scope.spawn(|| scan(file, &bytes[..half], 16 << 10));
            let mut buffer = vec![0; 16 << 10];
            for start in (half..LENGTH).step_by(buffer.len()) {
                file.read_exact_at(&mut buffer, start as u64).unwrap();
                assert_same(&buffer, &bytes[start..start + buffer.len()]);
            }
        });
        let stats = cache.stats();
        assert_eq!(stats.reads.misses, LENGTH as u64 / PAGE, "{stats:?}");
        assert!(stats.storage.read_requests < LENGTH as u64 / PAGE / 8, "{stats:?}");
    });
}

/// Threads with a handle each overtake one another, by runs of any length.
#[test]
fn scans_through_several_handles_are_read_ahead_as_one() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", LENGTH);
    for handles in [1, 2, 5, 9] {
        for_both_ways(LENGTH as u64 * 2, &path, |cache, _| {
            let open = || (cache.open(&path, &OpenOptions::new()).unwrap(), 0);
            let mut readers: Vec<_> = (0..handles).map(|_| open()).collect();
            let mut random = Rng::with_seed(3);
            while let Some((file, at)) = readers.iter_mut().min_by_key(|(_, at)| *at) {
                if *at == LENGTH {
                    break;
                }
                // The last one becomes the first.
                for _ in 0..random.usize(1..800) {
                    if *at < LENGTH {
                        check_page(file, &bytes, *at as u64, false);
                        *at += PAGE as usize;
                    }
                }
            }
            let storage = cache.stats().storage;
            let request_bytes = storage.read_bytes / storage.read_requests;
            assert_eq!(storage.read_bytes, LENGTH as u64);
            println!("{handles} handles: {request_bytes} bytes a request");
            assert!(request_bytes > 512 << 10, "{handles} handles: {storage:?}");
        });
    }
}

#[test]
fn windows_of_several_scans_evict_nothing_of_each_other() {
    const SCANS: usize = 4;
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", LENGTH);
    for_both_ways(4 << 20, &path, |cache, file| {
        let mut buffer = vec![0; 16 << 10];
        // None comes so far that its windows reach what the next one has read.
        for turn in (0..LENGTH / SCANS - (1 << 20)).step_by(buffer.len()) {
            for scan in 0..SCANS {
                let start = scan * LENGTH / SCANS + turn;
                file.read_exact_at(&mut buffer, start as u64).unwrap();
                assert_same(&buffer, &bytes[start..start + buffer.len()]);
            }
        }
        let stats = cache.stats();
        assert_eq!(stats.evictions.refaults, 0, "some page was read twice: {stats:?}");
        assert_eq!(stats.reads.readahead_unused, 0, "{stats:?}");
        assert!(stats.reads.readahead_folios > stats.reads.misses / 2, "{stats:?}");
    });
}

#[test]
fn random_reads_and_random_advice_read_nothing_ahead() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", LENGTH);
    for_both_ways(8 << 20, &path, |cache, file| {
        let mut random = Rng::with_seed(1);
        let mut buffer = [0; 4096];
        for _ in 0..2000 {
            let start = random.usize(1..LENGTH / 4096) * 4096;
            file.read_exact_at(&mut buffer, start as u64).unwrap();
            assert_same(&buffer, &bytes[start..start + 4096]);
        }
        let stats = cache.stats();
        assert!(stats.reads.readahead_folios < stats.reads.misses / 20, "{stats:?}");
    });
    for_both_ways(8 << 20, &path, |cache, file| {
        file.set_access(Access::Random);
        scan(file, &bytes[..1 << 20], 4096);
        assert_eq!(
            (cache.stats().reads.readahead_folios, cache.stats().storage.read_requests),
            (0, 256)
        );
        file.set_access(Access::Normal);
    });
}

#[test]
fn will_need_starts_reading_and_does_not_go_past_the_end() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 1_000_001);
    for_both_ways(16 << 20, &path, |cache, file| {
        file.prefetch(500_000..u64::MAX >> 1).unwrap();
        let wanted_bytes = 1_000_001 - 500_000 / PAGE * PAGE;
        let stats = wait_for_stats(cache, "read", |stats| stats.storage.read_bytes == wanted_bytes);
        assert_eq!(stats.reads.misses, wanted_bytes.div_ceil(PAGE));
        file.set_access(Access::Random);
        let mut buffer = vec![0; 500_001];
        file.read_exact_at(&mut buffer, 500_000).unwrap();
        assert_same(&buffer, &bytes[500_000..]);
        assert_eq!(cache.stats().reads.misses, stats.reads.misses, "it was resident");
        assert!(file.prefetch(5..u64::MAX).is_err(), "beyond all files");
    });
}

#[test]
fn sequential_advice_reads_ahead_from_the_first_read_anywhere() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", LENGTH);
    for_both_ways(64 << 20, &path, |cache, file| {
        file.set_access(Access::Sequential);
        file.read_exact_at(&mut [0; 100], 10_000_000).unwrap();
        let least = (64 << 20) / 64 / 2;
        wait_for_stats(cache, "half a window", |stats| stats.storage.read_bytes >= least);
    });
}

#[test]
fn no_readahead_where_none_is_wanted() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 1 << 20);
    let cache = Cache::builder().memory(8 << 20).readahead_max(0).build().unwrap();
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    scan(&file, &bytes, 4096);
    assert_eq!(cache.stats().reads.readahead_folios, 0);
}

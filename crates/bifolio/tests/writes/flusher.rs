//! Write-back in the background: when it writes, which pages it writes together, which threads it
//! delays, and that a sync waits for write-outs of other threads.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::support::{
    PAGE, assert_same, directory, error_of, open, random_file, read_all, sync_after_trouble,
    wait_for_stats, writable,
};
use bifolio::backing::DiskFile;
use bifolio::{Cache, CacheBuilder, ErrorKind, Feature, File, OpenOptions};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking, fill_bytes};
use fastrand::Rng;

/// Returns settings under which the flusher is inactive during a test.
fn quiet(memory_bytes: u64) -> CacheBuilder {
    let half = memory_bytes / 2;
    let builder =
        Cache::builder().memory(memory_bytes).dirty_age_max(Duration::from_millis(3_600_000));
    builder.dirty_background(half).dirty_max(half)
}

/// Returns a cache with io_uring, if the machine has it, and one without.
fn both_ways(builder: &CacheBuilder) -> [Cache; 2] {
    let without = builder.clone().disable(Feature::IoUring);
    [builder.clone().build().unwrap(), without.build().unwrap()]
}

fn on_disk(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

fn faulty_memory(length: usize) -> (Arc<MemoryBacking>, Arc<FaultyBacking>) {
    let memory = Arc::new(MemoryBacking::new(vec![0; length]));
    (memory.clone(), Arc::new(FaultyBacking::over(memory)))
}

#[test]
fn old_dirt_is_written_without_being_asked_for() {
    let directory = directory();
    let (path, mut bytes) = random_file(&directory, "file", 100_000);
    let builder = Cache::builder().memory(16 << 20).dirty_age_max(Duration::from_millis(10));
    for cache in both_ways(&builder) {
        let file = open(&cache, &path);
        let fresh = fill_bytes(9, 5000);
        file.write_all_at(&fresh, 50_000).unwrap();
        bytes[50_000..55_000].copy_from_slice(&fresh);
        let stats = wait_for_stats(&cache, "clean, by two folios", |stats| {
            stats.memory.dirty_bytes == 0 && stats.storage.flusher_folios == 2
        });
        assert_same(&on_disk(&path), &bytes);
        assert_eq!(stats.writes.syncs, 0);
    }
}

#[test]
fn much_dirt_is_written_in_the_background() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 8 << 20);
    let builder = quiet(32 << 20).dirty_background(1 << 20);
    for cache in both_ways(&builder) {
        let file = open(&cache, &path);
        file.write_all_at(&bytes[..1 << 20], 0).unwrap();
        assert_eq!(cache.stats().memory.dirty_bytes, 1 << 20, "that is not too much");
        file.write_all_at(&bytes[1 << 20..], 1 << 20).unwrap();
        // A round is counted when it ends.
        let stats = wait_for_stats(&cache, "less, in rounds of so many folios", |stats| {
            let folios = stats.storage.flusher_folios;
            stats.memory.dirty_bytes <= 1 << 20 && folios >= (7 << 20) / PAGE
        });
        assert_eq!(stats.writes.throttle_waits, 0, "{stats:?}");
        file.sync_data().unwrap();
        assert_same(&on_disk(&path), &bytes);
    }
}

#[test]
fn much_dirt_is_much_however_many_files_it_is_spread_over() {
    let cache = quiet(32 << 20).dirty_background(1 << 20).build().unwrap();
    let files: Vec<_> = (0..40)
        .map(|_| cache.open_backing(faulty_memory(64 << 10).1, &writable()).unwrap())
        .collect();
    for file in &files {
        file.write_all_at(&fill_bytes(2, 64 << 10), 0).unwrap();
    }
    let stats = wait_for_stats(&cache, "less, in a round", |stats| {
        stats.memory.dirty_bytes <= 1 << 20 && stats.storage.flusher_folios > 0
    });
    assert_eq!(stats.writes.syncs, 0, "{stats:?}");
}

#[test]
fn neighbours_leave_in_one_request_of_up_to_a_mebibyte() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 4 << 20);
    for folio_bytes in [4 << 10, 16 << 10, 2 << 20] {
        for cache in both_ways(&quiet(64 << 20)) {
            let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
            let bytes = fill_bytes(folio_bytes, 4 << 20);
            let mut pages: Vec<u64> = (0..1024).collect();
            Rng::with_seed(folio_bytes).shuffle(&mut pages);
            for page in pages {
                let start = (page * PAGE) as usize;
                file.write_all_at(&bytes[start..start + PAGE as usize], page * PAGE).unwrap();
            }
            file.sync_data().unwrap();
            let stats = cache.stats();
            assert!(stats.storage.write_requests <= 8, "{} requests", stats.storage.write_requests);
            assert_eq!(stats.storage.written_bytes, 4 << 20, "each byte once");
            assert_same(&on_disk(&path), &bytes);
        }
    }
}

#[test]
fn writers_that_outrun_the_device_are_throttled() {
    let (memory, backing) = faulty_memory(8 << 20);
    backing.inject(Fault::on(Call::Write).forever().delayed(Duration::from_millis(1)));
    let builder = quiet(8 << 20).dirty_background(512 << 10).dirty_max(1 << 20);
    let cache = builder.build().unwrap();
    let file = cache.open_backing(backing, &writable()).unwrap();
    let bytes = fill_bytes(1, 8 << 20);
    let mut pages: Vec<usize> = (0..2048).collect();
    Rng::with_seed(1).shuffle(&mut pages);
    for page in pages {
        let start = page * PAGE as usize;
        file.write_all_at(&bytes[start..start + PAGE as usize], start as u64).unwrap();
        let dirty_bytes = cache.stats().memory.dirty_bytes;
        assert!(dirty_bytes <= (1 << 20) + 2 * PAGE, "{dirty_bytes} bytes are dirty");
    }
    let stats = cache.stats();
    assert!(stats.writes.throttle_waits > 0, "{stats:?}");
    assert!(
        stats.writes.throttle_ns >= stats.writes.throttle_ns_max
            && stats.writes.throttle_ns_max > 0
    );
    file.sync_data().unwrap();
    assert_same(&memory.bytes(), &bytes);
}

#[test]
fn a_device_that_takes_nothing_refuses_writes_and_loses_nothing() {
    let (memory, backing) = faulty_memory(4 << 20);
    backing.inject(Fault::on(Call::Write).forever().fails(libc::ENOSPC));
    let cache = Cache::builder().memory(1 << 20).build().unwrap();
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    let bytes = fill_bytes(5, 4 << 20);
    let accepted = write_until_refused(&file, &bytes);
    assert!(accepted > 256 << 10, "refused at {accepted} bytes, where there was room for more");
    assert!(accepted <= 512 << 10, "{accepted} bytes: more than may be dirty");
    assert_same(&read_all(&file)[..accepted], &bytes[..accepted]);
    error_of(file.sync_data(), &["os error 28"]);
    backing.heal();
    sync_after_trouble(&file);
    assert_same(&memory.bytes()[..accepted], &bytes[..accepted]);
    file.write_all_at(&bytes, 0).unwrap();
    file.sync_data().unwrap();
    assert_same(&memory.bytes(), &bytes);
}

/// Writes page after page until the dirty limit is reached. Returns the number of bytes.
fn write_until_refused(file: &File, bytes: &[u8]) -> usize {
    for start in (0..bytes.len()).step_by(PAGE as usize) {
        if let Err(error) = file.write_all_at(&bytes[start..start + PAGE as usize], start as u64) {
            assert_eq!(error.kind(), ErrorKind::Unwritable, "{error:?}");
            assert!(!error.to_string().contains(": 0 bytes wait"), "{error}");
            return start;
        }
    }
    panic!("four times the bound was accepted, and nothing written");
}

#[test]
fn a_sync_waits_for_a_write_out_of_another_thread() {
    let (memory, backing) = faulty_memory(1 << 20);
    let builder = quiet(16 << 20).dirty_age_max(Duration::from_millis(5));
    let cache = builder.build().unwrap();
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    let gate = Gate::new();
    backing.inject(Fault::on(Call::Write).held(&gate));
    file.write_all_at(b"acknowledged", 4096).unwrap();
    // The flusher has it in its hands, and does not get on.
    gate.wait_for_arrivals(1);
    std::thread::scope(|scope| {
        let syncs = [scope.spawn(|| file.sync_data()), scope.spawn(|| file.sync_range(4096..4100))];
        std::thread::sleep(Duration::from_millis(30));
        for sync in &syncs {
            assert!(!sync.is_finished(), "acknowledged, but not written");
        }
        gate.open();
        for sync in syncs {
            sync.join().unwrap().unwrap();
        }
    });
    assert_eq!(&memory.bytes()[4096..4108], b"acknowledged");
}

#[test]
fn a_sync_of_a_range_writes_that_range_and_leaves_the_rest() {
    let directory = directory();
    let (path, before) = random_file(&directory, "file", 1 << 20);
    for cache in both_ways(&quiet(16 << 20)) {
        std::fs::write(&path, &before).unwrap();
        let file = open(&cache, &path);
        let bytes = fill_bytes(77, 1 << 20);
        for page in (0..256).step_by(2) {
            let start = page * PAGE as usize;
            file.write_all_at(&bytes[start..start + 4096], start as u64).unwrap();
        }
        file.sync_range(40 * PAGE + 1..50 * PAGE).unwrap();
        let found = on_disk(&path);
        for page in 0..256 {
            let range = page * PAGE as usize..(page + 1) * PAGE as usize;
            let is_new = page % 2 == 0 && (40..50).contains(&page);
            let expected = if is_new { &bytes } else { &before };
            assert_same(&found[range.clone()], &expected[range]);
        }
        assert_eq!(cache.stats().memory.dirty_bytes, 123 * PAGE);
        assert_eq!(cache.stats().writes.syncs, 1);
        #[allow(clippy::reversed_empty_ranges)]
        file.sync_range(10..5).unwrap();
        assert!(file.sync_range(0..u64::MAX).is_err(), "beyond all files");
    }
}

#[test]
fn an_allocation_rarely_writes_by_itself() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 16 << 20);
    for cache in both_ways(&Cache::builder().memory(4 << 20)) {
        let file = open(&cache, &path);
        for start in (0..bytes.len()).step_by(64 << 10) {
            file.write_all_at(&bytes[start..start + (64 << 10)], start as u64).unwrap();
        }
        file.sync_data().unwrap();
        let stats = cache.stats();
        assert_eq!(stats.storage.written_bytes, 16 << 20, "{stats:?}");
        let by_flusher = stats.storage.flusher_folios;
        assert!(by_flusher * 2 > stats.storage.written_folios, "{stats:?}");
        assert_same(&on_disk(&path), &bytes);
    }
}

#[test]
fn one_bad_block_keeps_only_its_own_page_dirty() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 1 << 20);
    let options = OpenOptions::new().write(true);
    let disk = DiskFile::open(&path, &options).unwrap();
    let backing = Arc::new(FaultyBacking::new(disk));
    let cache = quiet(16 << 20).build().unwrap();
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    let bytes = fill_bytes(3, 1 << 20);
    file.write_all_at(&bytes, 0).unwrap();
    let bad = 100 * PAGE..101 * PAGE;
    backing.inject(Fault::on(Call::Write).at(bad.clone()).forever().fails(libc::EIO));
    error_of(file.sync_data(), &["os error 5", &bad.start.to_string()]);
    assert_eq!(cache.stats().memory.dirty_bytes, PAGE);
    let found = on_disk(&path);
    assert_same(&found[..bad.start as usize], &bytes[..bad.start as usize]);
    assert_same(&found[bad.end as usize..], &bytes[bad.end as usize..]);
    backing.heal();
    file.sync_data().unwrap();
    assert_same(&on_disk(&path), &bytes);
}

/// A refused page is dirty again, and the youngest: the round must not write it twice.
#[test]
fn refused_pages_are_tried_once_in_a_round() {
    const PAGES: u64 = 1024;
    let (_, backing) = faulty_memory((2 * PAGES * PAGE) as usize);
    let cache = quiet(32 << 20).dirty_background(1 << 20).build().unwrap();
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
    // None has a neighbour, so that each is refused by itself.
    for page in 0..PAGES {
        file.write_all_at(&fill_bytes(page, 100), 2 * page * PAGE).unwrap();
    }
    wait_for_stats(&cache, "some refused", |stats| stats.storage.write_errors > 0);
    thread::sleep(Duration::from_millis(200));
    // As many rounds as begin while the pages are written; a round that went on would take a
    // second, with a thousand calls a millisecond.
    let calls = backing.calls(Call::Write);
    assert!(calls < 16 * PAGES, "{calls} calls");
    backing.heal();
    error_of(file.sync_data(), &["os error 5"]);
    file.sync_data().unwrap();
    assert_eq!(cache.stats().memory.dirty_bytes, 0);
}

#[test]
fn a_sync_of_more_than_the_queue_holds_writes_all_of_it() {
    const LENGTH: usize = 40 << 20;
    let directory = directory();
    let (path, _) = random_file(&directory, "file", LENGTH);
    for (seed, cache) in both_ways(&quiet(96 << 20)).into_iter().enumerate() {
        let file = open(&cache, &path);
        let mut bytes = fill_bytes(seed as u64, LENGTH);
        file.write_all_at(&bytes, 0).unwrap();
        file.sync_data().unwrap();
        assert_same(&on_disk(&path), &bytes);
        let mut pages: Vec<usize> = (0..LENGTH / PAGE as usize).step_by(3).collect();
        Rng::with_seed(seed as u64).shuffle(&mut pages);
        for page in &pages {
            let start = page * PAGE as usize;
            bytes[start..start + 100].fill(*page as u8);
            file.write_all_at(&bytes[start..start + 100], start as u64).unwrap();
        }
        let enters_before = cache.stats().storage.ring_enters;
        file.sync_data().unwrap();
        let enters = cache.stats().storage.ring_enters - enters_before;
        assert!(enters * 16 < pages.len() as u64, "{enters} calls for {} pages", pages.len());
        assert_same(&on_disk(&path), &bytes);
    }
}

#[test]
fn dirt_settings_that_contradict_each_other_are_refused() {
    let build = |builder: CacheBuilder| error_of(builder.validate(), &["dirty"]);
    let builder = || Cache::builder().memory(64 << 20);
    build(builder().dirty_max(43 << 20));
    build(builder().dirty_background(2 << 20).dirty_max(1 << 20));
    build(builder().dirty_age_max(Duration::from_millis(0)));
    error_of(builder().io_depth(0).validate(), &["io_depth", "1024"]);
    error_of(builder().io_depth(1025).validate(), &["io_depth", "1024"]);
    error_of(builder().readahead_max(2 << 30).validate(), &["readahead_max"]);
}

#[test]
fn two_thirds_of_the_bound_may_be_dirty_and_no_more() {
    let builder = || Cache::builder().memory(3 << 20);
    builder().dirty_max(2 << 20).build().unwrap();
    builder().dirty_background(2 << 20).validate().unwrap();
    let more = (2 << 20) + 1;
    error_of(builder().dirty_max(more).validate(), &["dirty_max", "two thirds"]);
    let background = builder().dirty_background(more);
    error_of(background.validate(), &["dirty_background", "two thirds"]);
}

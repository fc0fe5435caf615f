//! Promises that random runs test too rarely, one by one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bifolio::{Cache, DirectIo, ErrorKind, Feature};
use bifolio_testing::{fill_bytes, skip};
use fastrand::Rng;

use crate::setup::{Setup, check_empty, check_resident};
use crate::support::{PAGE, assert_same, read, writable};

const PAGE_BYTES: usize = PAGE as usize;

#[test]
fn an_allocation_keeps_zeros_that_were_only_pinned() {
    let setup = Setup::new(2 << 20, 4096);
    let cache = setup.cache();
    let file = setup.file(&cache);
    file.set_len(64 * PAGE).unwrap();
    (0..64).for_each(|index| drop(file.pin(index * PAGE..index * PAGE + 1).unwrap()));
    file.allocate(0..64 * PAGE).unwrap();
    cache.set_memory(1 << 20).unwrap();
    check_resident(&cache, 64 * PAGE).unwrap();
}

/// No write of the swap has to allocate storage, which would block all reads there.
#[test]
fn the_swap_file_has_room_before_pages_are_written_to_it() {
    const PAGES: u64 = 2048;
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cache = Cache::builder().memory(2 << 20).build().unwrap();
    let directly = writable().create(true).direct(DirectIo::Require);
    if let Err(error) = cache.open(directory.path().join("direct"), &directly) {
        return skip(Feature::DirectIo, error);
    }
    let cache = Cache::builder().memory(2 << 20).swap_directory(directory.path()).build().unwrap();
    let file = cache.memory_file("scratch").unwrap();
    let page = vec![1; PAGE_BYTES];
    (0..PAGES).for_each(|index| file.write_all_at(&page, index * PAGE).unwrap());
    assert!(cache.stats().storage.swapped_out_pages < PAGES);
    // The swap file has no name: it is found among this process's descriptors.
    let open = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let is_swap = |path: &std::path::PathBuf| {
        let name = std::fs::read_link(path).unwrap_or_default();
        name.starts_with(directory.path()) && !name.ends_with("direct")
    };
    let path = open.into_iter().find(is_swap).expect("the swap file is open");
    let length_bytes = std::fs::metadata(path).unwrap().len();
    assert!(length_bytes > PAGES * PAGE, "{length_bytes}");
}

#[test]
fn an_allocation_of_no_bytes_takes_none() {
    let setup = Setup::new(2 << 20, 4096);
    let cache = setup.cache();
    let file = setup.file(&cache);
    file.allocate(5000..5000).unwrap();
    check_resident(&cache, 0).unwrap();
    assert_eq!(file.len(), 0);
}

#[test]
fn a_refused_allocation_takes_back_nothing_that_was_written() {
    const PAGES: u64 = 2000;
    let setup = Setup::new(1 << 20, 4096);
    let cache = setup.cache();
    let file = setup.file(&cache);
    file.set_len(PAGES * PAGE).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let error = file.allocate(0..PAGES * PAGE).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Full, "{error}");
            }
        });
        let mut random = Rng::with_seed(1);
        let mut lost = None;
        for round in 0..5000 {
            let page = random.u64(..200) * PAGE;
            let bytes = fill_bytes(round, PAGE_BYTES);
            // No slot is free now, or the page had one already.
            if file.write_at(&bytes, page).is_err() {
                continue;
            }
            thread::yield_now();
            if read(&file, page, PAGE_BYTES) != bytes {
                lost = Some(page);
                break;
            }
            file.punch_hole(page..page + PAGE).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(lost, None, "a page was written, and is a hole");
    });
    check_resident(&cache, 0).unwrap();
}

/// Writes of whole pages race with truncations: a page is one write's, zeros, or past the end.
#[test]
fn a_write_that_meets_a_cut_leaves_a_page_or_none() {
    const PAGES: u64 = 8;
    let setup = Setup::new(1 << 20, 4096);
    let cache = setup.cache();
    let file = setup.file(&cache);
    let stop = AtomicBool::new(false);
    let failed = thread::scope(|scope| {
        let (file, stop) = (&file, &stop);
        let write = move |fill: u8| {
            let mut random = Rng::with_seed(u64::from(fill));
            let is_good = |page: u64| {
                let written = file.write_at(&[fill; PAGE_BYTES], page).unwrap();
                let found = read(file, page, PAGE_BYTES);
                let is_whole = found.iter().all(|byte| *byte == found[0] && *byte <= 2);
                written == PAGE_BYTES && is_whole
            };
            while !stop.load(Ordering::Relaxed) && is_good(random.u64(..PAGES) * PAGE) {}
            !stop.load(Ordering::Relaxed)
        };
        let writers = [1, 2].map(|fill| scope.spawn(move || write(fill)));
        for round in 0..20_000 {
            file.set_len(round % 2 * PAGES * PAGE).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        writers.map(|writer| writer.join().unwrap())
    });
    assert_eq!(failed, [false; 2], "a page was a mixture");
    file.set_len(0).unwrap();
    check_resident(&cache, 0).unwrap();
}

/// Free swap slots between used ones are used by folios that do not fill them, and none is lost.
#[test]
fn places_between_others_are_used_and_given_back() {
    const PAGES: u64 = 900;
    let small = Setup::swapping(512 << 10, 4096);
    let large = Setup::swapping(512 << 10, 16 << 10);
    let cache = small.builder().swap_max((PAGES + 20) * PAGE).build().unwrap();
    let (file, other) = (small.file(&cache), large.file(&cache));
    let page_of = |index: u64| fill_bytes(index, PAGE_BYTES);
    (0..PAGES).for_each(|index| file.write_all_at(&page_of(index), index * PAGE).unwrap());
    // Each seventh stays.
    for index in (0..PAGES).step_by(7) {
        file.punch_hole((index + 1) * PAGE..PAGES.min(index + 7) * PAGE).unwrap();
    }
    let bytes = fill_bytes(PAGES, 1_500_000);
    other.write_all_at(&bytes, 0).unwrap();
    assert_same(&read(&other, 0, bytes.len()), &bytes);
    for index in (0..PAGES).step_by(7) {
        assert_same(&read(&file, index * PAGE, PAGE_BYTES), &page_of(index));
    }
    drop((file, other));
    check_empty(&cache, &large, large.folio_bytes).unwrap();
}

/// Chunks that served folios of 64 KiB, and chunks with pinned pages, serve pages again.
#[test]
fn pages_free_between_larger_folios_are_not_full() {
    const MEMORY: u64 = 1 << 20;
    for given_back in [20, 33, 48] {
        let cache = Setup::swapping(MEMORY, PAGE).cache();
        let small = cache.memory_file("small").unwrap();
        small.write_all_at(&vec![1; 200 * PAGE_BYTES], 0).unwrap();
        let is_kept = |page: &u64| *page >= 48 && page.is_multiple_of(16);
        let pin = |page: u64| small.pin(page * PAGE..page * PAGE + 1).unwrap().into_owned();
        let _kept: Vec<_> = (0..200).filter(is_kept).map(pin).collect();
        for page in (0..200).filter(|page| !is_kept(page)) {
            small.punch_hole(page * PAGE..(page + 1) * PAGE).unwrap();
        }
        let large = writable().folio_bytes(64 << 10);
        let large = cache.memory_file_with("large", &large).unwrap();
        large.write_all_at(&[2; 100], 0).unwrap();
        drop(large);
        cache.set_memory(MEMORY - given_back * PAGE).unwrap();
        small.write_all_at(&[3; 100 * PAGE_BYTES], 0).unwrap();
    }
}

/// With a swap that refuses writes, little except the pinned pages is on the lists.
#[test]
fn an_error_counts_each_pinned_page_once() {
    let directory = tempfile::tempdir().unwrap();
    let builder = Cache::builder().memory(600 << 10).reclaim_wait_max(Duration::from_millis(500));
    let builder = builder.swap_directory(directory.path()).swap_max(256 << 10);
    let cache = builder.build().unwrap();
    let file = cache.memory_file("full").unwrap();
    let is_written = |index: &u64| file.write_all_at(&[1; PAGE_BYTES], index * PAGE).is_ok();
    let pages = (0..).take_while(is_written).count() as u64;
    let mut pins = Vec::new();
    let error = (0..pages)
        .find_map(|index| file.pin(index * PAGE..index * PAGE + 1).map(|pin| pins.push(pin)).err());
    let error = error.unwrap();
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    let text = error.to_string();
    let (before, _) = text.split_once(" are pinned").unwrap();
    let pinned_bytes: u64 = before.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(pinned_bytes <= pins.len() as u64 * PAGE, "{error}");
}

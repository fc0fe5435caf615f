//! Faults of the storage of a swap: memory files report each of them.
//!
//! Pages are written until most are swapped out. Then, and meanwhile, transfers fail, are short or
//! late, and bits change. A page that is read is right, or an error that names file and position.

use std::thread;
use std::time::Duration;

use bifolio::backing::Backing;
use bifolio::{Cache, Error, ErrorKind, Feature, File, ReadRequest};
use bifolio_testing::{Call, Fault, Gate, fill_bytes};

use crate::support::{
    Faulty, PAGE, Way, assert_same, cause_of, error_of, files_can_be_mapped, has, writable,
};

const MEMORY_BYTES: u64 = 512 << 10;
/// Four times the capacity of the cache.
const PAGES: u64 = 4 * MEMORY_BYTES / PAGE;

/// Runs `test` over each kind of storage; several transfers at once use io_uring or threads.
fn for_each_storage(test: impl Fn(&Faulty)) {
    for way in [Way::Ring, Way::Threads, Way::Memory] {
        if way == Way::Ring && !has(Feature::IoUring) {
            continue;
        }
        test(&Faulty::new(way, 0, 1));
    }
}

/// Creates a cache that swaps out to this storage, and a file in it.
fn make(storage: &Faulty, folio_bytes: u64) -> (Cache, File) {
    let builder = storage.builder(MEMORY_BYTES).swap_backing(storage.backing.clone());
    // As long as an emulated system takes to write all of it out.
    let cache = builder.reclaim_wait_max(Duration::from_millis(2000)).build().unwrap();
    let file = cache.memory_file_with("scratch", &writable().folio_bytes(folio_bytes)).unwrap();
    (cache, file)
}

fn page_of(index: u64) -> Vec<u8> {
    fill_bytes(index + 1, PAGE as usize)
}

fn fill(file: &File, pages: std::ops::Range<u64>) -> Result<(), Error> {
    pages.into_iter().try_for_each(|index| file.write_all_at(&page_of(index), index * PAGE))
}

fn read_page(file: &File, index: u64) -> Result<Vec<u8>, Error> {
    let mut found = vec![0xEE; PAGE as usize];
    file.read_exact_at(&mut found, index * PAGE).map(|()| found)
}

/// Reads all pages. Returns the failed ones; `check` is called for each error.
fn read_pages(file: &File, pages: std::ops::Range<u64>, check: impl Fn(u64, &Error)) -> Vec<u64> {
    let mut failed = Vec::new();
    for index in pages {
        match read_page(file, index) {
            Ok(found) => assert_same(&found, &page_of(index)),
            Err(error) => {
                check(index, &error);
                failed.push(index);
            }
        }
    }
    failed
}

fn all_are_right(file: &File, pages: std::ops::Range<u64>) {
    let failed = read_pages(file, pages, |index, error| panic!("page {index}: {error}"));
    assert!(failed.is_empty());
}

#[test]
fn waits_for_a_slow_write_out_are_counted() {
    for_each_storage(|storage| {
        let (cache, file) = make(storage, 4096);
        let late = Duration::from_millis(2);
        storage.backing.inject(Fault::on(Call::Write).times(u64::MAX).delayed(late));
        fill(&file, 0..PAGES / 16).unwrap();
        assert_eq!(cache.stats().memory.reclaim_stalls, 0, "there was room");
        fill(&file, 0..PAGES).unwrap();
        let stats = cache.stats();
        assert!(stats.memory.reclaim_stalls > 0, "{stats:?}");
        assert!(
            stats.memory.reclaim_stalls <= 2 * stats.storage.write_requests,
            "few of all: {stats:?}"
        );
    });
}

#[test]
fn waits_for_a_page_under_eviction_are_counted() {
    for mappable in [false, true] {
        if mappable && !files_can_be_mapped() {
            continue;
        }
        // Who lets it go may be faster than who waits.
        let is_counted = (0..20).any(|_| stalls_of_an_evicted_page(mappable) > 0);
        assert!(is_counted, "mappable: {mappable}");
    }
}

/// Writes to a page that is held briefly during its eviction, and restored. Returns the counted
/// stalls.
fn stalls_of_an_evicted_page(mappable: bool) -> u64 {
    let storage = Faulty::new(Way::Threads, 0, 1);
    let builder = storage.builder(MEMORY_BYTES).swap_backing(storage.backing.clone());
    let cache = builder.reclaim_wait_max(Duration::from_millis(1)).build().unwrap();
    let file = cache.memory_file_with("scratch", &writable().mappable(mappable)).unwrap();
    fill(&file, 0..PAGES / 8).unwrap();
    assert_eq!(cache.stats().storage.swapped_out_pages, 0, "there is room");
    let gate = Gate::new();
    storage.backing.inject(Fault::on(Call::Write).forever().held(&gate));
    storage.backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
    thread::scope(|scope| {
        // No call allocates, which would be counted, too: it fails because all pages stay.
        let smaller = scope.spawn(|| cache.set_memory(MEMORY_BYTES / 2));
        gate.wait_for_arrivals(1);
        let is_leaving =
            |page: &u64| file.residency(page * PAGE..(page + 1) * PAGE).unwrap().writeback == 1;
        let leaving = (0..file.len() / PAGE).find(is_leaving).unwrap();
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(5));
            gate.open();
        });
        file.write_all_at(&page_of(leaving), leaving * PAGE).unwrap();
        assert!(smaller.join().unwrap().is_err());
    });
    let stalls = cache.stats().memory.reclaim_stalls;
    all_are_right(&file, 0..PAGES / 8);
    stalls
}

#[test]
fn a_page_whose_write_fails_stays_and_is_written_later() {
    for errno in [libc::EIO, libc::ENOSPC] {
        for_each_storage(|storage| {
            let (cache, file) = make(storage, 4096);
            storage.backing.inject(Fault::on(Call::Write).nth(2).times(3).fails(errno));
            fill(&file, 0..PAGES).unwrap();
            assert_eq!(storage.backing.struck(), 3);
            all_are_right(&file, 0..PAGES);
            assert!(cache.stats().storage.swapped_out_pages > PAGES / 2);
        });
    }
}

#[test]
fn swapped_pages_can_be_read_while_the_device_is_full() {
    for folio_bytes in [PAGE, 4 * PAGE] {
        for_each_storage(|storage| {
            let (cache, file) = make(storage, folio_bytes);
            // Less than the swap may have.
            let end_bytes = 2 * MEMORY_BYTES;
            let beyond = Fault::on(Call::Write).at(end_bytes..u64::MAX);
            storage.backing.inject(beyond.forever().fails(libc::ENOSPC));
            let error = fill(&file, 0..PAGES).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unwritable, "{error}");
            let written = file.len() / folio_bytes * folio_bytes / PAGE;
            assert!(written > (end_bytes + MEMORY_BYTES / 2) / PAGE, "only {written} pages");
            for round in 0..3 {
                all_are_right(&file, 0..written);
                for index in (round..written).step_by(5) {
                    file.write_all_at(&page_of(index), index * PAGE).unwrap();
                }
            }
            storage.backing.heal();
            fill(&file, written..PAGES).unwrap();
            all_are_right(&file, 0..PAGES);
            assert!(cache.stats().memory.used_bytes <= cache.stats().memory.bound_bytes);
        });
    }
}

#[test]
fn a_swap_that_was_cut_is_named_with_its_position() {
    for_each_storage(|storage| {
        let (_cache, file) = make(storage, PAGE);
        fill(&file, 0..PAGES).unwrap();
        // From here on nothing is swapped out, which would make it longer again, by zeros.
        storage.backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
        fill(&file, PAGES..2 * PAGES).unwrap_err();
        let end_bytes = 64 * PAGE;
        storage.set_len_from_outside(end_bytes);
        let swap_name = storage.backing.describe();
        let failed = read_pages(&file, 0..PAGES, |index, error| {
            assert_eq!(error.kind(), ErrorKind::SwapRead, "page {index}: {error}");
            assert_eq!(error.range().unwrap().start, index * PAGE);
            let cause = cause_of(error);
            assert_eq!(cause.file(), Some(swap_name.as_str()));
            assert!(cause.range().unwrap().start >= end_bytes, "{error}");
        });
        assert!(failed.len() as u64 > PAGES / 4, "{} are gone", failed.len());
    });
}

#[test]
fn a_swap_that_takes_nothing_is_no_room_and_loses_nothing() {
    for_each_storage(|storage| {
        let (cache, file) = make(storage, 4096);
        fill(&file, 0..PAGES / 2).unwrap();
        storage.backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
        let error = fill(&file, PAGES / 2..PAGES).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unwritable, "{error}");
        error_of::<()>(Err(error), &["scratch", "position", "os error 5"]);
        let written = file.len() / PAGE;
        assert!(written < PAGES);
        // Those in memory can be read, and room that was given back be used.
        file.punch_hole(0..64 * PAGE).unwrap();
        assert_same(&read_page(&file, 3).unwrap(), &[0; PAGE as usize]);
        storage.backing.heal();
        all_are_right(&file, 64..written);
        fill(&file, 0..PAGES).unwrap();
        all_are_right(&file, 0..PAGES);
        assert!(cache.stats().memory.used_bytes <= cache.stats().memory.bound_bytes);
    });
}

#[test]
fn a_page_is_an_error_while_it_cannot_be_read_back() {
    for_each_storage(|storage| {
        let (_cache, file) = make(storage, 4096);
        fill(&file, 0..PAGES).unwrap();
        storage.backing.inject(Fault::on(Call::Read).forever().fails(libc::EIO));
        let failed = read_pages(&file, 0..PAGES, |index, error| {
            let position = (index * PAGE).to_string();
            assert_eq!(error.kind(), ErrorKind::SwapRead, "{error}");
            assert_eq!(error.range().unwrap().start, index * PAGE);
            assert!(error.to_string().contains(&position), "{error}");
            assert!(error.to_string().contains("scratch"), "{error}");
        });
        assert!(failed.len() as u64 > PAGES / 2, "only {} pages were swapped", failed.len());
        every_way_of_access_fails(&file, failed[1]);
        storage.backing.heal();
        all_are_right(&file, 0..PAGES);
    });
}

/// Checks that each call that needs the bytes of an unreadable page fails and changes nothing.
fn every_way_of_access_fails(file: &File, index: u64) {
    let (start, end) = (index * PAGE, (index + 1) * PAGE);
    let is_right = |error: Error| {
        let is_of_swap = matches!(error.kind(), ErrorKind::SwapRead | ErrorKind::SwapCorrupt);
        assert!(is_of_swap, "{error}");
    };
    is_right(file.pin(start..end).map(|_| ()).unwrap_err());
    is_right(file.pin_mut(start..end).map(|_| ()).unwrap_err());
    is_right(file.write_at(b"part", start + 5).unwrap_err());
    is_right(file.punch_hole(start + 5..start + 9).unwrap_err());
    let mut buffer = [0xEE; 16];
    let mut requests = [ReadRequest::new(&mut buffer, start + 1)];
    file.read_many(&mut requests).unwrap();
    let [request] = requests;
    is_right(request.result.unwrap_err());
    assert_eq!(file.seek_data(start).unwrap(), Some(start), "it has its bytes still");
}

#[test]
fn a_cut_and_a_punch_that_cannot_read_what_stays_change_nothing() {
    for_each_storage(|storage| {
        let (_cache, file) = make(storage, 4096);
        fill(&file, 0..PAGES).unwrap();
        storage.backing.inject(Fault::on(Call::Read).forever().fails(libc::EIO));
        let failed = read_pages(&file, 0..PAGES, |_, _| ());
        let (first, last) = (failed[1], failed[failed.len() / 2]);
        file.set_len(last * PAGE + 7).unwrap_err();
        assert_eq!(file.len(), PAGES * PAGE);
        file.punch_hole(first * PAGE..last * PAGE + 7).unwrap_err();
        file.punch_hole(first * PAGE + 7..last * PAGE).unwrap_err();
        storage.backing.heal();
        all_are_right(&file, 0..PAGES);
        // What needs no bytes needs no reads.
        storage.backing.inject(Fault::on(Call::Read).forever().fails(libc::EIO));
        let failed = read_pages(&file, 0..PAGES, |_, _| ());
        let index = failed[1];
        file.write_all_at(&page_of(7), index * PAGE).unwrap();
        assert_same(&read_page(&file, index).unwrap(), &page_of(7));
        let index = failed[3];
        file.punch_hole(index * PAGE..(index + 1) * PAGE).unwrap();
        assert_same(&read_page(&file, index).unwrap(), &[0; PAGE as usize]);
        file.set_len(failed[2] * PAGE).unwrap();
        storage.backing.heal();
        all_are_right(&file, 0..failed[1]);
    });
}

/// Returns the slots of pages in the swap, found by their bytes.
fn places(storage: &Faulty) -> Vec<(u64, u64)> {
    let stored = storage.stored();
    let known: std::collections::HashMap<_, _> =
        (0..PAGES).map(|index| (page_of(index), index)).collect();
    let slots = stored.chunks_exact(PAGE as usize).zip(0..);
    slots.filter_map(|(bytes, slot)| Some((*known.get(bytes)?, slot * PAGE))).collect()
}

#[test]
fn a_changed_bit_in_the_swap_is_an_error_of_its_page_alone() {
    for folio_bytes in [4 << 10, 64 << 10] {
        for_each_storage(|storage| {
            let (_cache, file) = make(storage, folio_bytes);
            fill(&file, 0..PAGES).unwrap();
            let places = places(storage);
            assert!(places.len() as u64 > PAGES / 2);
            // Each tenth page: the first bit, the last, and some between.
            for (number, (_, place)) in places.iter().enumerate().step_by(10) {
                let byte = [0, 4095, number as u64 % 4096][number / 10 % 3];
                storage.flip_bit(place + byte, number as u32 % 8);
            }
            let bad: Vec<u64> = places.iter().step_by(10).map(|(index, _)| *index).collect();
            let unit = folio_bytes / PAGE;
            let failed = read_pages(&file, 0..PAGES, |index, error| {
                assert_eq!(error.kind(), ErrorKind::SwapCorrupt, "{error}");
                let named = error.range().unwrap().start / PAGE;
                assert_eq!(named / unit, index / unit, "{error}");
                assert!(bad.contains(&named), "{error} names a good page");
                error_of::<()>(Err(read_page(&file, index).unwrap_err()), &["scratch", "corrupt"]);
            });
            assert!(failed.len() > bad.len() / 2, "{} of {} were seen", failed.len(), bad.len());
            let is_near = |index: &u64| bad.iter().any(|bad| bad / unit == index / unit);
            assert!(failed.iter().all(is_near), "a good page is an error");
            every_way_of_access_fails(&file, failed[0]);
            // All at once: up to the first that is bad.
            let mut all = vec![0xEE; (PAGES * PAGE) as usize];
            let count = file.read_at(&mut all, 0).map_or(0, |count| count as u64 / PAGE);
            assert_eq!(count, failed[0] / unit * unit, "reads end where the first error is");
            // It can be replaced.
            let start = failed[0] / unit * unit;
            let new: Vec<_> = (start..start + unit).flat_map(page_of).collect();
            file.write_all_at(&new, start * PAGE).unwrap();
            all_are_right(&file, start..start + unit);
        });
    }
}

#[test]
fn transfers_that_are_short_interrupted_or_late_do_no_harm() {
    for_each_storage(|storage| {
        let (_cache, file) = make(storage, 4096);
        let inject = |call| {
            let backing = &storage.backing;
            backing.inject(Fault::on(call).nth(1).times(5).short_by(1000));
            backing.inject(Fault::on(call).nth(8).times(2).fails(libc::EINTR));
            backing.inject(Fault::on(call).nth(12).times(4).delayed(Duration::from_millis(5)));
        };
        inject(Call::Write);
        fill(&file, 0..PAGES).unwrap();
        inject(Call::Read);
        let mut all = vec![0xEE; (PAGES * PAGE) as usize];
        // Scattered, so that many transfers leave together.
        let order = |page: u64| page * 97 % PAGES;
        let pages = all.chunks_mut(PAGE as usize).zip(0..);
        let mut requests: Vec<_> =
            pages.map(|(page, number)| ReadRequest::new(page, order(number) * PAGE)).collect();
        file.read_many(&mut requests).unwrap();
        assert!(requests.into_iter().all(|request| request.result.unwrap() == PAGE as usize));
        for (found, number) in all.chunks(PAGE as usize).zip(0..) {
            assert_same(found, &page_of(order(number)));
        }
        assert_eq!(storage.backing.submitted() > 0, storage.way == Way::Ring);
        all_are_right(&file, 0..PAGES);
        assert!(storage.backing.struck() > 10, "{}", storage.backing.struck());
    });
}

#[test]
fn a_swap_that_is_full_is_no_room_until_places_are_given_back() {
    for_each_storage(|storage| {
        let builder = storage.builder(MEMORY_BYTES).swap_backing(storage.backing.clone());
        let builder = builder.reclaim_wait_max(Duration::from_millis(500)).swap_max(512 << 10);
        let cache = builder.build().unwrap();
        let file = cache.memory_file("scratch").unwrap();
        for round in 0..3 {
            let error = fill(&file, 0..PAGES).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Full, "{error}");
            let written = file.len() / PAGE;
            assert!(written > 3 * PAGES / 8, "round {round}: only {written} pages");
            // What is swapped out needs room to be read, and has it.
            all_are_right(&file, 0..written);
            assert!(cache.stats().memory.swap_bytes <= 512 << 10);
            file.punch_hole(0..written / 2 * PAGE).unwrap();
            all_are_right(&file, written / 2..written);
            fill(&file, 0..written / 4).unwrap();
            all_are_right(&file, 0..written / 4);
            all_are_right(&file, written / 2..written);
            file.set_len(0).unwrap();
            assert_eq!(cache.stats().memory.swap_bytes, 0);
        }
        drop(file);
        // Another file gets the places.
        let file = cache.memory_file("scratch").unwrap();
        fill(&file, 0..PAGES / 3).unwrap();
        all_are_right(&file, 0..PAGES / 3);
    });
}

//! Batches of write-outs when storage fails: exactly the failed pages stay dirty; every handle is
//! told once; no sync returns Ok while a write-out is late or failed.

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::support::{
    Faulty, PAGE, Way, assert_same, error_of, for_each_way, read, read_all, wait_until,
};
use bifolio::{Cache, ErrorKind, File};
use bifolio_testing::{Call, Fault, Gate, fill_bytes};

/// Runs of dirty neighbours, each a separate transfer, with clean pages between them.
const RUNS: u64 = 8;
const RUN_PAGES: u64 = 3;
const STRIDE_PAGES: u64 = 5;
const LENGTH: usize = (RUNS * STRIDE_PAGES * PAGE) as usize;

fn page(number: u64) -> Range<u64> {
    number * PAGE..(number + 1) * PAGE
}

/// Returns the pages of a run.
fn run(number: u64) -> Range<u64> {
    let first = number * STRIDE_PAGES;
    first..first + RUN_PAGES
}

/// Returns the bytes of a run.
fn run_bytes(number: u64) -> Range<u64> {
    run(number).start * PAGE..run(number).end * PAGE
}

/// Writes all runs again. Returns the content of the file.
fn write_runs(file: &File, seed: u64) -> Vec<u8> {
    let fresh = fill_bytes(seed, LENGTH);
    let mut expected = read_all(file);
    for number in 0..RUNS {
        let bytes = run_bytes(number).start as usize..run_bytes(number).end as usize;
        file.write_all_at(&fresh[bytes.clone()], bytes.start as u64).unwrap();
        expected[bytes.clone()].copy_from_slice(&fresh[bytes]);
    }
    expected
}

fn open(faulty: &Faulty) -> (Cache, File) {
    let cache = faulty.builder(4 << 20).build().unwrap();
    let file = faulty.open(&cache);
    (cache, file)
}

/// Opens a second handle of the same file, if possible.
fn second_handle(faulty: &Faulty, cache: &Cache) -> Option<File> {
    (faulty.way != Way::Memory).then(|| faulty.open(cache))
}

/// Checks that the sync reports that `bad` could not be written.
#[track_caller]
fn assert_told(result: bifolio::Result<()>, bad: Range<u64>, errno: i32) {
    let error = error_of(result, &["write-back", &bad.start.to_string()]);
    assert_eq!((error.kind(), error.range()), (ErrorKind::Writeback, Some(bad)), "{error}");
    assert!(error.to_string().contains(": write of "), "{error}");
    assert_eq!(error.raw_os_error(), Some(errno), "{error}");
}

/// Checks that the device has the bytes of `expected`, except the `bad` ones, which are
/// unspecified.
#[track_caller]
fn assert_stored_but(faulty: &Faulty, expected: &[u8], bad: Range<u64>) {
    let (start, end) = (bad.start as usize, bad.end as usize);
    let stored = &faulty.stored()[..expected.len()];
    assert_same(&stored[..start], &expected[..start]);
    assert_same(&stored[end..], &expected[end..]);
}

fn give_others_time() {
    thread::sleep(Duration::from_millis(20));
}

#[test]
fn a_transfer_that_fails_is_written_again_page_by_page() {
    for_each_way(LENGTH, |faulty| {
        let (cache, file) = open(faulty);
        for (nth, errno) in (1..=RUNS).zip([libc::EIO, libc::ENOSPC].into_iter().cycle()) {
            let expected = write_runs(&file, nth);
            let calls = faulty.backing.calls(Call::Write);
            faulty.backing.inject(Fault::on(Call::Write).nth(nth).fails(errno));
            file.sync_data().unwrap();
            assert_same(&faulty.stored(), &expected);
            assert_eq!(faulty.backing.calls(Call::Write) - calls, RUNS + RUN_PAGES);
        }
        let stats = cache.stats();
        assert_eq!((stats.memory.dirty_bytes, stats.storage.write_errors), (0, 0));
    });
}

#[test]
fn an_unwritable_page_stays_dirty_and_handles_are_told_once() {
    for_each_way(LENGTH, |faulty| {
        let (cache, file) = open(faulty);
        let second = second_handle(faulty, &cache);
        for bad in (0..RUNS).flat_map(run) {
            let expected = write_runs(&file, bad);
            let fault = Fault::on(Call::Write).at(page(bad)).times(2);
            faulty.backing.inject(fault.fails(libc::ENOSPC));
            assert_told(file.sync_data(), page(bad), libc::ENOSPC);
            assert_eq!(cache.stats().memory.dirty_bytes, PAGE);
            assert_stored_but(faulty, &expected, page(bad));
            assert_same(&read_all(&file), &expected);
            file.sync_data().unwrap();
            assert_same(&faulty.stored(), &expected);
            assert_eq!(cache.stats().memory.dirty_bytes, 0);
            if let Some(second) = &second {
                assert_told(second.sync_data(), page(bad), libc::ENOSPC);
                second.sync_data().unwrap();
            }
        }
    });
}

#[test]
fn no_sync_succeeds_before_the_page_is_on_the_device() {
    for_each_way(LENGTH, |faulty| {
        let (cache, file) = open(faulty);
        let second = second_handle(faulty, &cache).unwrap_or_else(|| file.clone());
        let expected = write_runs(&file, 5);
        let bad = run(4).start + 1;
        faulty.backing.inject(Fault::on(Call::Write).at(page(bad)).forever().fails(libc::EIO));
        for handle in [&file, &second, &file, &second] {
            assert_told(handle.sync_data(), page(bad), libc::EIO);
            assert_told(handle.sync_range(run_bytes(4)), page(bad), libc::EIO);
        }
        error_of(cache.close(), &["os error 5"]);
        assert_eq!(cache.stats().memory.dirty_bytes, PAGE);
        faulty.backing.heal();
        // The close was told by itself; each handle is told that it has failed.
        assert_told(file.sync_all(), page(bad), libc::EIO);
        let _told_if_it_is_another = second.sync_all();
        file.sync_all().unwrap();
        second.sync_all().unwrap();
        assert_same(&faulty.stored(), &expected);
    });
}

#[test]
fn a_failure_of_the_flusher_is_told_by_the_next_sync() {
    for_each_way(LENGTH, |faulty| {
        let cache =
            faulty.builder(4 << 20).dirty_age_max(Duration::from_millis(20)).build().unwrap();
        let file = faulty.open(&cache);
        let second = second_handle(faulty, &cache);
        let bad = run(2).start;
        faulty.backing.inject(Fault::on(Call::Write).at(page(bad)).forever().fails(libc::EIO));
        let expected = write_runs(&file, 7);
        wait_until("all but one are clean", || {
            let stats = cache.stats();
            stats.memory.dirty_bytes == PAGE && stats.storage.write_errors > 0
        });
        assert_stored_but(faulty, &expected, page(bad));
        faulty.backing.heal();
        wait_until("it is tried again", || cache.stats().memory.dirty_bytes == 0);
        assert_same(&faulty.stored(), &expected);
        // By whatever sync comes first, also of bytes that are well.
        assert_told(file.sync_range(0..1), page(bad), libc::EIO);
        file.sync_all().unwrap();
        if let Some(second) = second {
            assert_told(second.sync_all(), page(bad), libc::EIO);
            second.sync_all().unwrap();
        }
    });
}

#[test]
fn short_and_interrupted_writes_of_a_batch_are_continued() {
    for_each_way(LENGTH, |faulty| {
        let (cache, file) = open(faulty);
        let expected = write_runs(&file, 3);
        let place = |run: u64| Fault::on(Call::Write).at(run_bytes(run));
        faulty.backing.inject(place(0).short_by(PAGE as usize));
        faulty.backing.inject(place(1).times(2).fails(libc::EINTR));
        faulty.backing.inject(place(2).times(2).short_by(5000));
        faulty.backing.inject(place(3).fails(libc::EAGAIN));
        faulty.backing.inject(place(4).short_by(2 * PAGE as usize));
        faulty.backing.inject(place(4).nth(2).times(2).fails(libc::EINTR));
        file.sync_data().unwrap();
        assert_eq!(faulty.backing.struck(), 9);
        assert_same(&faulty.stored(), &expected);
        let stats = cache.stats();
        assert_eq!((stats.memory.dirty_bytes, stats.storage.write_errors), (0, 0));
    });
}

#[test]
fn a_write_that_moves_nothing_is_a_failure() {
    for_each_way(LENGTH, |faulty| {
        let (cache, file) = open(faulty);
        let expected = write_runs(&file, 3);
        let bad = page(run(6).end - 1);
        faulty.backing.inject(Fault::on(Call::Write).at(bad.clone()).forever().moves_nothing());
        error_of(file.sync_data(), &["write-back", &bad.start.to_string()]);
        assert_eq!(cache.stats().memory.dirty_bytes, PAGE);
        faulty.backing.heal();
        file.sync_data().unwrap();
        assert_same(&faulty.stored(), &expected);
    });
}

#[test]
fn the_device_gets_one_state_of_a_page_at_a_time() {
    for_each_way(LENGTH, |faulty| {
        let (cache, file) = open(faulty);
        let old = write_runs(&file, 11);
        // The first page of each run has been written when the others are held: whatever is in
        // memory by then, the device has the older bytes.
        let gate = Gate::new();
        for number in 0..RUNS {
            let [first, second] = [0, 1].map(|at| page(run(number).start + at));
            faulty.backing.inject(Fault::on(Call::Write).at(first).short_by(2 * PAGE as usize));
            faulty.backing.inject(Fault::on(Call::Write).at(second).nth(2).held(&gate));
        }
        let new = thread::scope(|scope| {
            let late = scope.spawn(|| file.sync_data());
            gate.wait_for_arrivals(1);
            let writer = scope.spawn(|| write_runs(&file, 12));
            let second = scope.spawn(|| file.sync_data());
            give_others_time();
            let early = (writer.is_finished(), second.is_finished());
            gate.open();
            assert!(!early.0, "changed under the device's hands");
            assert!(!early.1, "acknowledged, and on its way");
            late.join().unwrap().unwrap();
            second.join().unwrap().unwrap();
            writer.join().unwrap()
        });
        let stored = faulty.stored();
        for number in 0..LENGTH as u64 / PAGE {
            let bytes = page(number).start as usize..page(number).end as usize;
            let is_old = stored[bytes.clone()] == old[bytes.clone()];
            assert!(is_old || stored[bytes.clone()] == new[bytes], "page {number} is a mixture");
        }
        file.sync_data().unwrap();
        assert_same(&faulty.stored(), &new);
        assert_same(&read_all(&file), &new);
        assert_eq!(cache.stats().memory.dirty_bytes, 0);
    });
}

#[test]
fn bytes_written_during_a_failed_eviction_survive() {
    for_each_way(LENGTH, |faulty| {
        let (cache, file) = open(faulty);
        write_runs(&file, 11);
        let gate = Gate::new();
        let bad = page(run(3).start + 1);
        // The run, and then the page alone, which is late.
        faulty.backing.inject(Fault::on(Call::Write).at(bad.clone()).times(2).fails(libc::EIO));
        faulty.backing.inject(Fault::on(Call::Write).at(bad.clone()).nth(2).held(&gate));
        let expected = thread::scope(|scope| {
            let late = scope.spawn(|| file.sync_data());
            gate.wait_for_arrivals(1);
            let writer = scope.spawn(|| write_runs(&file, 12));
            give_others_time();
            gate.open();
            assert_told(late.join().unwrap(), bad.clone(), libc::EIO);
            writer.join().unwrap()
        });
        assert_eq!(cache.stats().memory.dirty_bytes, RUNS * RUN_PAGES * PAGE, "each of them once");
        file.sync_data().unwrap();
        assert_same(&faulty.stored(), &expected);
        assert_eq!(cache.stats().memory.dirty_bytes, 0);
    });
}

#[test]
fn a_truncation_waits_for_the_batch_and_is_final() {
    for_each_way(LENGTH, |faulty| {
        for fails in [false, true] {
            let (cache, file) = open(faulty);
            let second = second_handle(faulty, &cache);
            let mut expected = write_runs(&file, 21);
            let gate = Gate::new();
            let held = page(run(5).start);
            faulty.backing.inject(Fault::on(Call::Write).at(held.clone()).held(&gate));
            if fails {
                let fault = Fault::on(Call::Write).at(held.clone()).times(2);
                faulty.backing.inject(fault.fails(libc::EIO));
            }
            // In the run before the one that is held.
            let end = run_bytes(4).end - 100;
            let cuts = faulty.backing.calls(Call::SetLen);
            thread::scope(|scope| {
                let sync = scope.spawn(|| file.sync_data());
                gate.wait_for_arrivals(1);
                let cut = scope.spawn(|| file.set_len(end));
                give_others_time();
                let cuts_now = faulty.backing.calls(Call::SetLen);
                gate.open();
                assert_eq!(cuts_now, cuts, "cut under a write");
                cut.join().unwrap().unwrap();
                let synced = sync.join().unwrap();
                if fails { assert_told(synced, held.clone(), libc::EIO) } else { synced.unwrap() }
            });
            assert_eq!(faulty.stored().len() as u64, end);
            assert_eq!(cache.stats().memory.dirty_bytes, 0, "truncated bytes are not dirty");
            file.set_len(LENGTH as u64).unwrap();
            expected[end as usize..].fill(0);
            file.sync_all().unwrap();
            assert_same(&faulty.stored(), &expected);
            assert_same(&read_all(&file), &expected);
            if let Some(second) = second.filter(|_| fails) {
                assert_told(second.sync_all(), held, libc::EIO);
            }
        }
    });
}

#[test]
fn a_sync_of_a_range_fails_only_for_what_is_inside() {
    for_each_way(LENGTH, |faulty| {
        let (cache, file) = open(faulty);
        let expected = write_runs(&file, 8);
        let bad = page(run(1).start + 2);
        faulty.backing.inject(Fault::on(Call::Write).at(bad.clone()).forever().fails(libc::EIO));
        // From the last page of a run, whose other pages are bad, to the first one of another run.
        let good = run_bytes(3).end - 5..run_bytes(6).start + 5;
        let neighbours = run_bytes(3).start..run_bytes(3).end - PAGE;
        faulty.backing.inject(Fault::on(Call::Write).at(neighbours).forever().fails(libc::EIO));
        file.sync_range(good.clone()).unwrap();
        let in_range = good.start as usize..good.end as usize;
        assert_same(&faulty.stored()[in_range.clone()], &expected[in_range]);
        for _ in 0..2 {
            let synced = file.sync_range(run_bytes(0).start..run_bytes(2).end);
            assert_told(synced, bad.clone(), libc::EIO);
            // Told once: others go on, as long as they do not need that page.
            file.sync_range(good.clone()).unwrap();
        }
        assert_stored_but(faulty, &expected[..run_bytes(2).end as usize], bad.clone());
        // The bad page, two before and two behind the range, and the last run.
        assert_eq!(cache.stats().memory.dirty_bytes, (1 + 2 + 2 + RUN_PAGES) * PAGE);
        faulty.backing.heal();
        file.sync_range(bad).unwrap();
        file.sync_data().unwrap();
        assert_same(&faulty.stored(), &expected);
    });
}

#[test]
fn a_cache_is_closed_while_the_flusher_is_writing() {
    for_each_way(LENGTH, |faulty| {
        for fails in [false, true] {
            let cache =
                faulty.builder(4 << 20).dirty_age_max(Duration::from_millis(20)).build().unwrap();
            let file = faulty.open(&cache);
            let gate = Gate::new();
            let bad = page(run(3).start);
            faulty.backing.inject(Fault::on(Call::Write).at(bad.clone()).held(&gate));
            if fails {
                let fault = Fault::on(Call::Write).at(bad).forever().fails(libc::EIO);
                faulty.backing.inject(fault);
            }
            let expected = write_runs(&file, 9 + u64::from(fails));
            gate.wait_for_arrivals(1);
            thread::scope(|scope| {
                let closed = scope.spawn(|| cache.close());
                give_others_time();
                let is_early = closed.is_finished();
                gate.open();
                assert!(!is_early, "closed, and a page is on its way");
                let closed = closed.join().unwrap();
                if fails {
                    error_of(closed, &["write-back", "os error 5"]);
                    // It is still open, and nothing is lost.
                    assert_same(&read_all(&file), &expected);
                    faulty.backing.heal();
                    wait_until("it is tried again", || cache.stats().memory.dirty_bytes == 0);
                    cache.close().unwrap();
                } else {
                    closed.unwrap();
                }
            });
            assert_same(&faulty.stored(), &expected);
            error_of(file.write_at(b"x", 0), &["closed"]);
            drop((file, cache));
            wait_until("given back", || Arc::strong_count(&faulty.backing) == 1);
        }
    });
}

#[test]
fn the_last_handle_goes_while_the_flusher_is_writing() {
    for_each_way(LENGTH, |faulty| {
        let cache =
            faulty.builder(4 << 20).dirty_age_max(Duration::from_millis(20)).build().unwrap();
        let file = faulty.open(&cache);
        let gate = Gate::new();
        faulty.backing.inject(Fault::on(Call::Write).at(page(run(3).start)).held(&gate));
        let expected = write_runs(&file, 9);
        gate.wait_for_arrivals(1);
        thread::scope(|scope| {
            let dropped = scope.spawn(|| drop(file));
            give_others_time();
            let is_early = dropped.is_finished();
            gate.open();
            assert!(!is_early, "gone, and a page is on its way");
            dropped.join().unwrap();
        });
        assert_same(&faulty.stored(), &expected);
        assert_eq!(cache.stats().memory.dirty_bytes, 0);
        wait_until("given back", || Arc::strong_count(&faulty.backing) == 1);
    });
}

/// More than the cache holds.
const LARGE: usize = 2 << 20;

#[test]
fn reclaim_takes_what_can_be_written_and_leaves_the_bad_page() {
    for_each_way(LARGE, |faulty| {
        let cache = faulty.builder(512 << 10).build().unwrap();
        let file = faulty.open(&cache);
        let mut expected = faulty.bytes.clone();
        let bad = page(7);
        faulty.backing.inject(Fault::on(Call::Write).at(bad.clone()).forever().fails(libc::ENOSPC));
        // Every other page: each is a transfer of its own.
        for number in (1..LARGE as u64 / PAGE).step_by(2) {
            let Range { start, end } = page(number);
            expected[start as usize..end as usize].fill(number as u8);
            file.write_all_at(&vec![number as u8; PAGE as usize], start).unwrap();
        }
        assert_same(&read_all(&file), &expected);
        let stats = cache.stats();
        assert!(stats.evictions.folios > 100 && stats.storage.write_errors > 0, "{stats:?}");
        assert_same(&read(&file, bad.start, 4096), &expected[bad.start as usize..][..4096]);
        assert_told(file.sync_data(), bad.clone(), libc::ENOSPC);
        assert_stored_but(faulty, &expected, bad);
        faulty.backing.heal();
        // The flusher, whom reclaim has asked, may have failed once more.
        let _told_of_that = file.sync_data();
        file.sync_data().unwrap();
        assert_same(&faulty.stored(), &expected);
    });
}

#[test]
fn writers_and_batches_of_reads_get_on_when_storage_heals() {
    for_each_way(LARGE, |faulty| {
        let other = Faulty::new(faulty.way, 1 << 20, 2);
        let cache = faulty.builder(512 << 10).build().unwrap();
        let (file, reads) = (faulty.open(&cache), other.open(&cache));
        let gate = Gate::new();
        // The first writes are late, and then they fail; the next ones fail at once.
        faulty.backing.inject(Fault::on(Call::Write).times(8).held(&gate));
        faulty.backing.inject(Fault::on(Call::Write).times(60).fails(libc::ENOSPC));
        let fresh = fill_bytes(4, LARGE);
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for number in (0..LARGE as u64 / PAGE).rev().flat_map(|half| [half / 2, half]) {
                    let Range { start, end } = page(number);
                    let bytes = &fresh[start as usize..end as usize];
                    while let Err(error) = file.write_all_at(bytes, start) {
                        let is_refused = error.kind() == ErrorKind::Unwritable;
                        assert!(is_refused, "{error}");
                    }
                }
            });
            gate.wait_for_arrivals(1);
            let reader = scope.spawn(|| {
                for number in (0..1 << 8).step_by(16) {
                    let ranges: Vec<_> = (number..number + 16).map(page).collect();
                    let mut buffers = vec![vec![0; PAGE as usize]; 16];
                    let mut requests: Vec<_> = ranges
                        .iter()
                        .zip(&mut buffers)
                        .map(|(range, buffer)| bifolio::ReadRequest::new(buffer, range.start))
                        .collect();
                    reads.read_many(&mut requests).unwrap();
                    for request in requests {
                        match request.result {
                            Ok(_) => {
                                let start = request.position as usize;
                                assert_same(request.buffer, &other.bytes[start..][..4096]);
                            }
                            // The other file's pages that cannot be written leave room.
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            });
            give_others_time();
            gate.open();
            writer.join().unwrap();
            reader.join().unwrap();
        });
        error_of(file.sync_data(), &["write-back", "os error 28"]);
        file.sync_data().unwrap();
        assert_same(&faulty.stored(), &fresh);
        assert_same(&read_all(&file), &fresh);
    });
}

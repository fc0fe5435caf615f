//! Readahead that fails, is late, or races with a truncation or a close: only the reader of the
//! page gets the error, no byte is read twice, and no resource leaks.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{
    Faulty, PAGE, assert_same, error_of, for_each_way, read, read_all, wait_for_stats, wait_until,
};
use bifolio::{Cache, ErrorKind, File, ReadRequest};
use bifolio_testing::{Call, Fault, Gate};

/// Slightly more than three transfers.
const LENGTH: usize = (3 << 20) + 5000;
/// In the middle of the second one.
const MIDDLE: u64 = 300 * PAGE;

/// Opens a cache in which all of the file can be read ahead, and the file, which has no other
/// reader.
fn open(faulty: &Faulty) -> (Cache, File) {
    let cache = faulty.builder(16 << 20).build().unwrap();
    let file = faulty.open(&cache);
    (cache, file)
}

fn fault() -> Fault {
    Fault::on(Call::Read).at(MIDDLE..MIDDLE + 1)
}

/// Starts to read all of the file ahead, and waits until the transfer of its middle is held.
fn read_ahead_and_hold(faulty: &Faulty, file: &File) -> Gate {
    let gate = Gate::new();
    faulty.backing.inject(fault().held(&gate));
    file.prefetch(0..LENGTH as u64).unwrap();
    gate.wait_for_arrivals(1);
    gate
}

/// Gives other threads time before the gate opens. The test is correct whatever they do in that
/// time, but shows less if they do nothing.
fn give_others_time() {
    thread::sleep(Duration::from_millis(20));
}

/// Checks that only the test still references the backing.
#[track_caller]
fn assert_given_back(faulty: &Faulty) {
    wait_until("the backing is given back", || Arc::strong_count(&faulty.backing) == 1);
}

#[test]
fn a_failed_readahead_is_no_error_until_the_page_is_read() {
    for_each_way(LENGTH, |faulty| {
        let (cache, file) = open(faulty);
        faulty.backing.inject(fault().forever().fails(libc::EIO));
        file.prefetch(0..LENGTH as u64).unwrap();
        let good = LENGTH as u64 - (1 << 20);
        wait_until("the rest has been read", || cache.stats().storage.read_bytes == good);
        wait_until("the middle has failed", || faulty.backing.struck() == 1);
        file.write_all_at(b"fine", LENGTH as u64).unwrap();
        file.sync_all().unwrap();
        let calls = faulty.backing.calls(Call::Read);
        // The pages of the other transfers are resident.
        assert_same(&read(&file, 0, 1 << 20), &faulty.bytes[..1 << 20]);
        assert_same(&read(&file, 2 << 20, 1 << 20), &faulty.bytes[2 << 20..3 << 20]);
        assert_eq!(faulty.backing.calls(Call::Read), calls);
        // What came with the bad page can be read, and the bad page says what it is.
        for position in [MIDDLE - PAGE, MIDDLE + PAGE] {
            assert_same(&read(&file, position, 4096), &faulty.bytes[position as usize..][..4096]);
        }
        let place = MIDDLE.to_string();
        error_of(file.read_at(&mut [0; 10], MIDDLE + 7), &["4096 bytes", &place, "os error 5"]);
        faulty.backing.heal();
        assert_same(&read_all(&file)[..LENGTH], &faulty.bytes);
        cache.close().unwrap();
    });
}

#[test]
fn a_scan_reads_up_to_the_bad_page_of_a_failed_window() {
    for_each_way(LENGTH, |faulty| {
        let builder = faulty.builder(64 << 20).readahead_max(4 << 20);
        let cache = builder.build().unwrap();
        let file = faulty.open(&cache);
        faulty.backing.inject(fault().forever().fails(libc::EIO));
        let mut found = Vec::new();
        let mut buffer = [0; 4096];
        let error = loop {
            match file.read_at(&mut buffer, found.len() as u64) {
                Ok(count) => found.extend_from_slice(&buffer[..count]),
                Err(error) => break error,
            }
        };
        assert_eq!(found.len() as u64, MIDDLE, "{error}");
        assert_same(&found, &faulty.bytes[..found.len()]);
        assert!(cache.stats().reads.readahead_folios > 0);
        faulty.backing.heal();
        // Several transfers at once, so that all ways are gone.
        file.prefetch(0..LENGTH as u64).unwrap();
        assert_same(&read_all(&file), &faulty.bytes);
    });
}

#[test]
fn a_page_on_its_way_is_waited_for_and_read_once() {
    for_each_way(LENGTH, |faulty| {
        let (cache, file) = open(faulty);
        let gate = read_ahead_and_hold(faulty, &file);
        let range = MIDDLE as usize..MIDDLE as usize + 10_000;
        thread::scope(|scope| {
            let alone = scope.spawn(|| read(&file, MIDDLE, 10_000));
            let pinned = scope.spawn(|| {
                let mut bytes = vec![0; 100];
                let pins = file.pin_many(&[MIDDLE..MIDDLE + 100, 0..100]);
                pins[0].as_ref().unwrap().copy_to(0, &mut bytes).unwrap();
                bytes
            });
            let batched = scope.spawn(|| {
                let mut bytes = vec![0; 10_000];
                let mut requests = [ReadRequest::new(&mut bytes, MIDDLE)];
                file.read_many(&mut requests).unwrap();
                assert_eq!(*requests[0].result.as_ref().unwrap(), 10_000);
                bytes
            });
            give_others_time();
            let is_early = alone.is_finished() || pinned.is_finished() || batched.is_finished();
            gate.open();
            assert!(!is_early, "it had not come yet");
            for found in [alone, batched].map(|thread| thread.join().unwrap()) {
                assert_same(&found, &faulty.bytes[range.clone()]);
            }
            assert_same(&pinned.join().unwrap(), &faulty.bytes[range.start..][..100]);
        });
        assert_same(&read_all(&file), &faulty.bytes);
        assert_eq!(cache.stats().reads.misses, (LENGTH as u64).div_ceil(PAGE));
        assert_eq!(cache.stats().storage.read_bytes, LENGTH as u64);
    });
}

/// More is claimed for an advised range than may be in flight, and none of it completes.
#[test]
fn windows_do_not_wait_behind_what_was_advised() {
    for_each_way(8 << 20, |faulty| {
        let builder = faulty.builder(16 << 20).readahead_max(1 << 20);
        let cache = builder.build().unwrap();
        let file = faulty.open(&cache);
        let gate = Gate::new();
        faulty.backing.inject(Fault::on(Call::Read).at(0..4 << 20).forever().held(&gate));
        file.prefetch(0..4 << 20).unwrap();
        gate.wait_for_arrivals(1);
        let is_in_time = thread::scope(|scope| {
            let reader = scope.spawn(|| {
                for position in (4 << 20..8 << 20).step_by(4096) {
                    read(&file, position, 4096);
                }
            });
            let begun = Instant::now();
            while !reader.is_finished() && begun.elapsed() < Duration::from_secs(30) {
                thread::sleep(Duration::from_millis(1));
            }
            let is_in_time = reader.is_finished();
            gate.open();
            is_in_time
        });
        assert!(is_in_time, "it waits for pages of another file");
        assert!(cache.stats().reads.readahead_folios > 1024, "of both");
        assert_same(&read_all(&file), &faulty.bytes);
    });
}

#[test]
fn a_waiter_of_a_failed_readahead_reads_the_page_itself() {
    for_each_way(LENGTH, |faulty| {
        let (_cache, file) = open(faulty);
        faulty.backing.inject(fault().fails(libc::EIO));
        let gate = read_ahead_and_hold(faulty, &file);
        thread::scope(|scope| {
            let readers = [0, 1, 2, 3].map(|page| {
                let (file, position) = (&file, MIDDLE + page * PAGE);
                (position, scope.spawn(move || read(file, position, 5000)))
            });
            give_others_time();
            gate.open();
            for (position, reader) in readers {
                let found = reader.join().unwrap();
                assert_same(&found, &faulty.bytes[position as usize..][..5000]);
            }
        });
        assert_same(&read_all(&file), &faulty.bytes);
    });
}

/// Truncates the file to `end` bytes while its middle is being read ahead, and extends it again.
fn cut_and_grow(faulty: &Faulty, file: &File, gate: &Gate, end: u64) {
    thread::scope(|scope| {
        let cut = scope.spawn(|| file.set_len(end));
        wait_until("the device is cut", || faulty.stored().len() as u64 == end);
        gate.open();
        cut.join().unwrap().unwrap();
    });
    assert_same(&read_all(file), &faulty.bytes[..end as usize]);
    let mut expected = faulty.bytes.clone();
    expected[end as usize..].fill(0);
    file.set_len(LENGTH as u64).unwrap();
    assert_same(&read_all(file), &expected);
    file.sync_all().unwrap();
    assert_same(&faulty.stored(), &expected);
}

#[test]
fn a_file_truncated_during_readahead_ends_there() {
    let ends = [0, 1 << 20, MIDDLE - PAGE, MIDDLE - PAGE + 100, MIDDLE + 3 * PAGE + 1, 2 << 20];
    for_each_way(LENGTH, |faulty| {
        for end in ends {
            faulty.backing.heal();
            let (_cache, file) = open(faulty);
            file.write_all_at(&faulty.bytes, 0).unwrap();
            drop(file);
            let (_cache, file) = open(faulty);
            let gate = read_ahead_and_hold(faulty, &file);
            cut_and_grow(faulty, &file, &gate, end);
        }
    });
}

#[test]
fn bytes_that_came_before_the_cut_are_not_seen_behind_it() {
    for_each_way(LENGTH, |faulty| {
        let (_cache, file) = open(faulty);
        let gate = Gate::new();
        // Half of the transfer is resident; the rest is late.
        let half = (1 << 20) + (512 << 10);
        faulty.backing.inject(Fault::on(Call::Read).at(half - 1..half).short_by(512 << 10));
        faulty.backing.inject(Fault::on(Call::Read).at(half..half + 1).nth(2).held(&gate));
        file.prefetch(0..LENGTH as u64).unwrap();
        gate.wait_for_arrivals(1);
        cut_and_grow(faulty, &file, &gate, MIDDLE + 10);
    });
}

#[test]
fn the_last_handle_goes_while_pages_are_being_read_ahead() {
    for_each_way(LENGTH, |faulty| {
        let (cache, file) = open(faulty);
        let gate = read_ahead_and_hold(faulty, &file);
        thread::scope(|scope| {
            let dropped = scope.spawn(|| drop(file));
            give_others_time();
            gate.open();
            dropped.join().unwrap();
        });
        // The worker may hold the last folio for a moment after it has unlocked it.
        wait_for_stats(&cache, "the folios are gone", |stats| {
            stats.memory.inactive_bytes + stats.memory.active_bytes == 0
        });
        assert_given_back(faulty);
        let again = faulty.open(&cache);
        assert_same(&read_all(&again), &faulty.bytes);
    });
}

#[test]
fn everything_goes_while_pages_are_being_read_ahead() {
    for_each_way(LENGTH, |faulty| {
        for cache_first in [true, false] {
            let (cache, file) = open(faulty);
            let gate = read_ahead_and_hold(faulty, &file);
            thread::scope(|scope| {
                let dropped = scope.spawn(move || {
                    if cache_first {
                        drop(cache);
                        drop(file);
                    } else {
                        drop(file);
                        drop(cache);
                    }
                });
                give_others_time();
                gate.open();
                dropped.join().unwrap();
            });
            assert_given_back(faulty);
        }
    });
}

#[test]
fn a_cache_is_closed_while_pages_are_being_read_ahead() {
    for_each_way(LENGTH, |faulty| {
        for fails in [false, true] {
            let (cache, file) = open(faulty);
            if fails {
                faulty.backing.inject(fault().fails(libc::EIO));
            }
            let gate = read_ahead_and_hold(faulty, &file);
            thread::scope(|scope| {
                let closed = scope.spawn(|| cache.close());
                let reader = scope.spawn(|| file.read_at(&mut [0; 4096], MIDDLE));
                give_others_time();
                gate.open();
                closed.join().unwrap().unwrap();
                // It came before the close, or after.
                if let Err(error) = reader.join().unwrap() {
                    assert_eq!(error.kind(), ErrorKind::Closed, "{error:?}");
                }
            });
            let error = error_of(file.read_at(&mut [0; 10], 0), &["closed"]);
            assert_eq!(error.kind(), ErrorKind::Closed);
            drop((file, cache));
            assert_given_back(faulty);
        }
    });
}

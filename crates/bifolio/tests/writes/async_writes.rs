//! Asynchronous writes, appends and syncs: the bytes, what they wait for and on which threads, and
//! what a dropped future leaves.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;

use crate::support::{
    PAGE, SMALL_FOLIO_SIZES, assert_same, cache_of, directory, error_of, files_can_be_mapped,
    mappable, open, random_file, read_all, writable,
};
use bifolio::{Cache, ErrorKind, FileFuture, OpenOptions, WriteHint};
use bifolio_testing::{
    Call, Fault, FaultyBacking, Gate, MemoryBacking, block_on, fill_bytes, run_all,
};
use fastrand::Rng;

fn poll_once<T>(future: &mut FileFuture<T>) -> Poll<bifolio::Result<T>> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn is_ready<T: std::fmt::Debug>(future: &mut FileFuture<T>) -> bool {
    match poll_once(future) {
        Poll::Ready(result) => result.is_ok(),
        Poll::Pending => false,
    }
}

/// Threads of this process whose name begins with `name`.
fn threads_named(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|found| found.starts_with(name)).count()
}

#[test]
fn writes_at_random_positions_make_the_file_of_a_model() {
    let mut random = Rng::with_seed(3);
    for folio_bytes in SMALL_FOLIO_SIZES {
        let directory = directory();
        let length = 4 * folio_bytes.max(256 << 10) as usize + 777;
        let (path, mut model) = random_file(&directory, "file", length);
        // The writes of a round do not overlap; many of them replace part of a page.
        let cache = cache_of((3 * folio_bytes).max(512 << 10));
        let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
        for round in 0..4 {
            let mut at = random.usize(..5000);
            let mut writes = Vec::new();
            while at < length + 20_000 {
                let bytes = fill_bytes(random.u64(..), random.usize(1..3 * PAGE as usize));
                writes.push((at, bytes));
                at += 3 * PAGE as usize + random.usize(..9000);
            }
            for (at, bytes) in &writes {
                model.resize(model.len().max(at + bytes.len()), 0);
                model[*at..at + bytes.len()].copy_from_slice(bytes);
            }
            let future =
                |(at, bytes): &(usize, Vec<u8>)| file.write_async(bytes.clone(), *at as u64);
            let mut done = 0;
            run_all(
                writes.iter().map(future).collect(),
                || false,
                |number, written| {
                    assert_same(&written.unwrap(), &writes[number].1);
                    done += 1;
                },
            );
            assert_eq!(done, writes.len());
            if round % 2 == 0 {
                block_on(file.sync_async()).unwrap();
                file.evict(..).unwrap();
            }
            assert_same(&read_all(&file), &model);
        }
        block_on(file.sync_async()).unwrap();
        assert_same(&std::fs::read(&path).unwrap(), &model);
    }
}

#[test]
fn a_write_of_what_is_in_memory_is_ready_at_the_first_poll() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 10 * PAGE as usize);
    let file = open(&cache_of(1 << 20), &path);
    assert!(is_ready(&mut file.write_async(vec![1; PAGE as usize], 0)), "a whole page");
    assert!(is_ready(&mut file.write_async(vec![2; 100], 50)), "part of a resident page");
    assert!(is_ready(&mut file.write_async(vec![3; 100], 20 * PAGE + 9)), "past the end");
    assert!(is_ready(&mut file.write_async(Vec::new(), 7)));
    assert!(!is_ready(&mut file.write_async(vec![4; 100], 5 * PAGE + 9)), "it must be read");
    assert_eq!(file.len(), 20 * PAGE + 109);
    block_on(file.write_async(vec![4; 100], 5 * PAGE + 9)).unwrap();
    let mut found = [0; 200];
    file.read_exact_at(&mut found, 5 * PAGE + 9).unwrap();
    assert_eq!(found[..100], [4; 100]);
    let memory_file = cache_of(1 << 20).memory_file("holes").unwrap();
    assert!(is_ready(&mut memory_file.write_async(vec![1; 100], 50)), "a hole");
    assert_same(&read_all(&memory_file)[..50], &[0; 50]);
}

#[test]
fn writes_fail_as_those_that_wait_do() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 100);
    let cache = cache_of(1 << 20);
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    error_of(block_on(file.write_async(vec![1], 0)), &["not opened for writing"]);
    error_of(block_on(file.append_async(vec![1])), &["not opened for writing"]);
    let file = cache.memory_file_with("short", &writable().len_max(8192)).unwrap();
    let error = error_of(block_on(file.write_async(vec![1; 10], 8190)), &["8192"]);
    assert_eq!(error.kind(), ErrorKind::TooLong);
    error_of(block_on(file.append_async(vec![1; 9000])), &["8192"]);
    error_of(block_on(file.write_async(vec![1], 1 << 63)), &["2^63"]);
    let pin = file.write_at(&[1; 10], 0).and_then(|_| file.pin_mut(0..10)).unwrap();
    // This thread would wait for itself.
    error_of(block_on(file.write_async(vec![1], 0)), &["PageRefMut"]);
    error_of(block_on(file.append_async(vec![1])), &["PageRefMut"]);
    error_of(block_on(file.sync_async()), &["PageRefMut"]);
    drop(pin);
    let mut future = file.write_async(vec![1], 0);
    cache.close().unwrap();
    error_of(block_on(&mut future), &["closed"]);
    error_of(block_on(&mut future), &["polled after it was ready"]);
}

#[test]
fn a_thousand_writes_wait_for_room_without_threads() {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(vec![0; 16 << 20])));
    let gate = Gate::new();
    let cache = Cache::builder().memory(8 << 20).dirty_max(1 << 20).build().unwrap();
    let file = cache.open_backing(Arc::clone(&backing) as _, &writable()).unwrap();
    backing.inject(Fault::on(Call::Write).held(&gate));
    let before = threads_named("bifolio-io");
    let page = |number: u64| fill_bytes(number, PAGE as usize);
    let mut futures: Vec<_> =
        (0..2000).map(|number| file.write_async(page(number), number * PAGE)).collect();
    let waiting = futures.iter_mut().filter_map(|future| match poll_once(future) {
        Poll::Ready(written) => written.err().map(|error| panic!("{error}")),
        Poll::Pending => Some(()),
    });
    let waiting = waiting.count();
    assert!(waiting > 1500, "{waiting} of 2000 wait: a megabyte may be dirty");
    gate.wait_for_arrivals(1);
    // The server of the device, one that waits for room, and some that write.
    let threads = threads_named("bifolio-io") - before;
    assert!(threads <= 40, "{threads} threads for {waiting} writes");
    gate.open();
    backing.heal();
    let mut written = 0;
    futures.retain_mut(|future| poll_once(future).is_pending());
    run_all(
        futures,
        || false,
        |_, result| {
            result.unwrap();
            written += 1;
        },
    );
    assert!(written > 0);
    block_on(file.sync_async()).unwrap();
    for number in 0..2000 {
        let at = (number * PAGE) as usize;
        assert_same(&backing_bytes(&file, at), &page(number));
    }
    let stats = cache.stats();
    assert!(stats.memory.dirty_bytes == 0 && stats.writes.throttle_waits > 0, "{stats:?}");
}

fn backing_bytes(file: &bifolio::File, at: usize) -> Vec<u8> {
    let mut bytes = vec![0; PAGE as usize];
    file.read_exact_at(&mut bytes, at as u64).unwrap();
    bytes
}

#[test]
fn a_device_that_refuses_fails_the_writes_that_wait_for_room() {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(vec![0; 8 << 20])));
    backing.inject(Fault::on(Call::Write).forever().fails(libc::ENOSPC));
    let cache = Cache::builder().memory(4 << 20).dirty_max(1 << 20).build().unwrap();
    let file = cache.open_backing(Arc::clone(&backing) as _, &writable()).unwrap();
    let future = |number: u64| file.write_async(vec![7; PAGE as usize], number * PAGE);
    let (mut refused, mut written) = (0, 0);
    run_all(
        (0..1000).map(future).collect(),
        || false,
        |_, result| match result {
            Ok(_) => written += 1,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unwritable, "{error:?}");
                refused += 1;
            }
        },
    );
    assert!(refused > 0 && written > 0, "{refused} {written}");
    backing.heal();
    file.discard_dirty().unwrap();
}

#[test]
fn a_dropped_write_writes_no_more() {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(vec![0; 8 << 20])));
    let gate = Gate::new();
    let cache = cache_of(4 << 20);
    let file = cache.open_backing(Arc::clone(&backing) as _, &writable()).unwrap();
    backing.inject(Fault::on(Call::Read).held(&gate));
    // The first page is replaced, part of the second must be read.
    let mut future = file.write_async(vec![7; PAGE as usize + 100], 0);
    assert!(poll_once(&mut future).is_pending());
    gate.wait_for_arrivals(1);
    drop(future);
    gate.open();
    file.write_all_at(&[5; 200], PAGE).unwrap();
    let mut found = [0; 200];
    thread::sleep(std::time::Duration::from_millis(20));
    file.read_exact_at(&mut found, PAGE).unwrap();
    assert_eq!(found, [5; 200]);
}

#[test]
fn a_page_under_a_pin_mut_is_written_after_it() {
    let file = cache_of(1 << 20).memory_file("pinned").unwrap();
    file.write_all_at(&[1; 2 * PAGE as usize], 0).unwrap();
    let mut pin = file.pin_mut(0..PAGE).unwrap();
    pin.copy_from(0, &[5; 10]).unwrap();
    let other = file.clone();
    let writing = thread::spawn(move || {
        let mut future = other.write_async(vec![6; 8000], 4);
        assert!(poll_once(&mut future).is_pending());
        block_on(future).unwrap();
    });
    thread::sleep(std::time::Duration::from_millis(10));
    assert!(!writing.is_finished());
    drop(pin);
    writing.join().unwrap();
    let mut found = [0; 20];
    file.read_exact_at(&mut found, 0).unwrap();
    assert_eq!(found, [&[5; 4][..], &[6; 16]].concat()[..]);
}

#[test]
fn a_page_that_is_being_written_out_is_waited_for() {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(vec![0; 1 << 20])));
    let gate = Gate::new();
    let file = cache_of(4 << 20).open_backing(Arc::clone(&backing) as _, &writable()).unwrap();
    file.write_all_at(&[1; PAGE as usize], 0).unwrap();
    backing.inject(Fault::on(Call::Write).held(&gate));
    file.write_out(..).unwrap();
    gate.wait_for_arrivals(1);
    let mut future = file.write_async(vec![2; 100], 0);
    assert!(poll_once(&mut future).is_pending());
    let mut dropped = file.write_async(vec![9; 100], 0);
    assert!(poll_once(&mut dropped).is_pending());
    drop(dropped);
    gate.open();
    block_on(future).unwrap();
    block_on(file.sync_async()).unwrap();
    let mut found = [0; 200];
    file.read_exact_at(&mut found, 0).unwrap();
    assert_eq!((&found[..100], &found[100..]), (&[2; 100][..], &[1; 100][..]));
}

#[test]
fn appends_get_ranges_of_their_own_and_in_order() {
    let file = cache_of(4 << 20).memory_file("log").unwrap();
    let record = |number: usize| vec![number as u8; 100 + number % 300];
    let futures = (0..1000).map(|number| file.append_async(record(number))).collect();
    let mut positions = vec![0; 1000];
    run_all(futures, || false, |number, position| positions[number] = position.unwrap());
    let mut expected = 0;
    for (number, position) in positions.into_iter().enumerate() {
        assert_eq!(position, expected, "in the order of the first polls");
        let mut found = record(0);
        found.resize(record(number).len(), 0);
        file.read_exact_at(&mut found, position).unwrap();
        assert_same(&found, &record(number));
        expected += record(number).len() as u64;
    }
    assert_eq!(file.len(), expected);
}

#[test]
fn appends_of_dropped_futures_are_whole_or_absent() {
    let file = cache_of(4 << 20).memory_file("log").unwrap();
    let mut random = Rng::with_seed(8);
    let record = |number: usize| vec![number as u8; 5000];
    let futures = (0..200).map(|number| file.append_async(record(number))).collect();
    let mut kept = Vec::new();
    run_all(futures, || random.bool(), |number, position| kept.push((number, position.unwrap())));
    // The last append of the thread: what it has begun before is over.
    block_on(file.append_async(vec![255; 5000])).unwrap();
    let bytes = read_all(&file);
    assert!(bytes.chunks(5000).all(|record| record.iter().all(|byte| *byte == record[0])));
    for (number, position) in kept {
        assert_same(&bytes[position as usize..][..5000], &record(number));
    }
}

#[test]
fn a_growing_file_that_can_be_mapped_is_written_asynchronously() {
    if !files_can_be_mapped() {
        return;
    }
    let directory = directory();
    let (path, mut model) = random_file(&directory, "file", 1 << 20);
    let file = cache_of(2 << 20).open(&path, &mappable(writable())).unwrap();
    let future = |number: u64| file.write_async(vec![number as u8; 5000], number * 20_000);
    run_all((0..100).map(future).collect(), || false, |_, written| drop(written.unwrap()));
    model.resize(99 * 20_000 + 5000, 0);
    for number in 0..100 {
        model[number * 20_000..][..5000].fill(number as u8);
    }
    assert_same(&read_all(&file), &model);
}

#[test]
fn syncs_that_wait_together_share_one() {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(vec![0; 1 << 20])));
    let gate = Gate::new();
    let cache = cache_of(4 << 20);
    let file = cache.open_backing(Arc::clone(&backing) as _, &writable()).unwrap();
    file.write_all_at(&[1; 100], 0).unwrap();
    backing.inject(Fault::on(Call::SyncData).held(&gate));
    let mut first = file.sync_async();
    assert!(poll_once(&mut first).is_pending());
    gate.wait_for_arrivals(1);
    file.write_all_at(&[2; 100], 50_000).unwrap();
    let mut others: Vec<_> = (0..100).map(|_| file.sync_async()).collect();
    assert!(others.iter_mut().all(|sync| poll_once(sync).is_pending()));
    gate.open();
    block_on(first).unwrap();
    run_all(others, || false, |_, synced| synced.unwrap());
    let flushes = cache.stats().storage.flushes;
    assert!(flushes <= 3, "{flushes} flushes for 101 syncs");
    assert_eq!(cache.stats().memory.dirty_bytes, 0);
    backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
    file.write_all_at(&[3; 100], 0).unwrap();
    error_of(block_on(file.sync_async()), &["write"]);
    backing.heal();
    block_on(file.sync_async()).unwrap();
}

#[test]
fn a_call_that_is_ready_keeps_no_handle() {
    let directory = directory();
    let cache = cache_of(1 << 20);
    for number in 0..300 {
        let path = directory.path().join(number.to_string());
        let table = cache.open(path, &writable().create(true)).unwrap();
        block_on(table.append_async(b"sorted keys".to_vec())).unwrap();
        if number % 2 == 0 {
            block_on(table.sync_async()).unwrap();
        }
        let table = table.into_immutable().unwrap();
        assert_eq!(block_on(table.pin_async(0..6)).unwrap()[..], *b"sorted");
    }
}

/// Makes calls of all kinds on one file, of which half are dropped at a random moment: afterwards
/// nothing is pinned, dirty or in flight. Returns how many were dropped.
fn drop_calls(rounds: u32) -> u32 {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 4 << 20);
    let cache = Cache::builder().memory(1 << 20).dirty_max(256 << 10).build().unwrap();
    let file = open(&cache, &path);
    let mut random = Rng::with_seed(4);
    let mut dropped = 0;
    for _ in 0..rounds {
        let mut futures: Vec<Pin<Box<dyn Future<Output = ()>>>> = Vec::new();
        for number in 0..100 {
            let at = random.u64(..1024) * PAGE;
            let length = random.usize(1..9000);
            futures.push(match random.u32(0..6) {
                0 => Box::pin(ignore(file.read_async(vec![0; length], at))),
                1 => Box::pin(ignore(file.pin_async(at..at + 100))),
                2 | 3 => Box::pin(ignore(file.write_async(vec![1; length], at + 7))),
                4 => Box::pin(ignore(file.read_many_async([(vec![0; 100], at), (vec![0; 9], 0)]))),
                _ if number % 10 == 0 => Box::pin(ignore(file.sync_async())),
                _ => Box::pin(ignore(
                    file.write_async(vec![2; length], at).write_hint(WriteHint::Once),
                )),
            });
        }
        let mut drops = || {
            let drops = random.bool();
            dropped += u32::from(drops);
            drops
        };
        run_all(futures, &mut drops, |_, ()| {});
    }
    file.sync_data().unwrap();
    crate::support::wait_until("nothing is kept", || {
        let outcome = file.evict(..).unwrap();
        outcome.kept == bifolio::Kept::default()
    });
    assert_eq!(cache.stats().memory.dirty_bytes, 0);
    file.close().unwrap();
    cache.close().unwrap();
    dropped
}

#[test]
fn dropped_calls_of_all_kinds_leave_nothing() {
    assert!(drop_calls(20) > 100);
}

async fn ignore<T>(future: FileFuture<T>) {
    drop(future.await.unwrap());
}

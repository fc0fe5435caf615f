//! Reads without blocking: `try_read_at`, and futures under executors of many kinds: the bytes, the
//! errors, what a dropped future leaves, and what a tiny cache does with thousands of them.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;

use crate::support::{
    PAGE, SMALL_FOLIO_SIZES, assert_same, cache_of, directory, error_of, mappable, open,
    random_file, wait_until, writable,
};
use bifolio::backing::DiskFile;
use bifolio::{Access, Cache, ErrorKind, Feature, File, FileFuture, OpenOptions};
use bifolio_testing::{
    Call, Fault, FaultyBacking, Gate, MemoryBacking, block_on, fill_bytes, run_all,
};
use fastrand::Rng;

/// Polls a future once, with a waker that does nothing.
fn poll_once<T>(future: &mut FileFuture<T>) -> Poll<bifolio::Result<T>> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// Number of descriptors of this process that are files of `directory`.
fn descriptors(directory: &tempfile::TempDir) -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    targets.filter(|target| target.starts_with(directory.path())).count()
}

#[test]
fn only_bytes_in_memory_are_read_without_waiting() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 10 * PAGE as usize + 100);
    let file = open(&cache_of(1 << 20), &path);
    file.set_access(Access::Random);
    let mut buffer = vec![0; 4 * PAGE as usize];
    let needles = ["file", "12288", "without waiting"];
    let error = error_of(file.try_read_at(&mut buffer, 3 * PAGE), &needles);
    assert_eq!((error.kind(), error.range()), (ErrorKind::WouldBlock, Some(12_288..12_289)));
    assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::WouldBlock);
    file.read_exact_at(&mut buffer[..2 * PAGE as usize], 3 * PAGE).unwrap();
    let error = error_of(file.try_read_at(&mut buffer, 3 * PAGE), &["file", "20480"]);
    assert_eq!((error.kind(), error.range()), (ErrorKind::WouldBlock, Some(20_480..20_481)));
    assert_eq!(file.try_read_prefix_at(&mut buffer, 3 * PAGE).unwrap() as u64, 2 * PAGE);
    assert_same(&buffer[..2 * PAGE as usize], &bytes[3 * PAGE as usize..5 * PAGE as usize]);
    let absent = error_of(file.try_read_prefix_at(&mut buffer, 5 * PAGE), &["20480"]);
    assert_eq!(absent.kind(), ErrorKind::WouldBlock);
    let (part, rest) = buffer.split_at_mut(2 * PAGE as usize);
    assert_eq!(file.try_read_at(part, 3 * PAGE).unwrap() as u64, 2 * PAGE);
    assert_eq!(file.try_read_at(&mut rest[..0], 7 * PAGE).unwrap(), 0, "no bytes are all of none");
    file.read_exact_at(&mut [0; 1], 10 * PAGE).unwrap();
    assert_eq!(file.try_read_at(&mut buffer, 10 * PAGE + 40).unwrap(), 60);
    assert_eq!(file.try_read_at(&mut buffer, 11 * PAGE).unwrap(), 0, "past the end");
    assert_eq!(file.try_read_prefix_at(&mut buffer, 10 * PAGE + 40).unwrap(), 60);
    error_of(file.try_read_at(&mut buffer, u64::MAX), &["2^63"]);
}

#[test]
fn a_page_that_a_pin_mut_changes_would_block() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 2 * PAGE as usize);
    let file = open(&cache_of(1 << 20), &path);
    let mut pin = file.pin_mut(0..PAGE).unwrap();
    pin.copy_from(0, &[1; PAGE as usize]).unwrap();
    let blocked = file.try_read_at(&mut [0; 8], 0);
    assert!(blocked.is_err(), "{blocked:?}");
    drop(pin);
    let mut buffer = [0; 8];
    assert_eq!(file.try_read_at(&mut buffer, 0).unwrap(), 8);
    assert_eq!(buffer, [1; 8]);
}

#[test]
fn a_hit_is_ready_at_the_first_poll_and_a_miss_wakes_the_task() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 100_000);
    for disabled in [None, Some(Feature::IoUring)] {
        let builder = Cache::builder().memory(4 << 20);
        let builder = disabled.into_iter().fold(builder, |builder, off| builder.disable(off));
        let cache = builder.build().unwrap();
        let file = open(&cache, &path);
        let read = block_on(file.read_async(vec![0; 10_000], 50_000)).unwrap();
        assert_same(&read, &bytes[50_000..60_000]);
        let Poll::Ready(read) = poll_once(&mut file.read_async(vec![0; 10_000], 50_000)) else {
            panic!("the bytes are in memory");
        };
        assert_same(&read.unwrap(), &bytes[50_000..60_000]);
        let read = block_on(file.read_async(vec![0; 10_000], 99_000)).unwrap();
        assert_same(&read, &bytes[99_000..]);
        assert!(block_on(file.read_async(vec![0; 8], 200_000)).unwrap().is_empty());
        assert!(block_on(file.read_async(Vec::new(), 0)).unwrap().is_empty());
    }
}

#[test]
fn a_future_that_was_ready_returns_an_error() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 100);
    let file = open(&cache_of(1 << 20), &path);
    let mut future = file.read_async(vec![0; 10], 0);
    block_on(&mut future).unwrap();
    error_of(block_on(future), &["FileFuture", "polled after it was ready"]);
    let write_only = OpenOptions::new().write(true).read(false);
    let file = cache_of(1 << 20).open(&path, &write_only).unwrap();
    error_of(block_on(file.read_async(vec![0; 10], 0)), &["not opened for reading"]);
    error_of(block_on(open(&cache_of(1 << 20), &path).read_async(vec![0; 1], 1 << 63)), &["2^63"]);
}

#[test]
fn ten_thousand_reads_complete_in_a_tiny_cache() {
    let mut random = Rng::with_seed(5);
    for folio_bytes in SMALL_FOLIO_SIZES {
        let directory = directory();
        let length = 5 * folio_bytes.max(1 << 20) as usize + 777;
        let (path, bytes) = random_file(&directory, "file", length);
        for disabled in [None, Some(Feature::IoUring)] {
            let builder = Cache::builder().memory((3 * folio_bytes).max(300 << 10));
            let builder = disabled.into_iter().fold(builder, |builder, off| builder.disable(off));
            let cache = builder.build().unwrap();
            let file = cache.open(&path, &OpenOptions::new().folio_bytes(folio_bytes)).unwrap();
            let count = if folio_bytes > PAGE { 300 } else { 10_000 };
            let ranges: Vec<_> = (0..count)
                .map(|_| {
                    let start = random.usize(..length + 100);
                    start..start + random.usize(..3 * PAGE as usize)
                })
                .collect();
            let future = |range: &std::ops::Range<usize>| {
                file.read_async(vec![0; range.len()], range.start as u64)
            };
            let mut ready = 0;
            run_all(
                ranges.iter().map(future).collect(),
                || false,
                |number, read| {
                    let range = &ranges[number];
                    let expected = &bytes[range.start.min(length)..range.end.min(length)];
                    assert_same(&read.unwrap(), expected);
                    ready += 1;
                },
            );
            assert_eq!(ready, count);
            let stats = cache.stats();
            assert!(stats.memory.used_bytes <= stats.memory.bound_bytes);
            file.close().unwrap();
            cache.close().unwrap();
        }
    }
}

#[test]
fn a_read_larger_than_the_cache_completes() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 20 << 20);
    let file = open(&cache_of(1 << 20), &path);
    assert_same(&block_on(file.read_async(vec![0; 20 << 20], 0)).unwrap(), &bytes);
}

#[test]
fn dropped_reads_leave_no_pin_and_no_descriptor() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 4 << 20);
    let before = descriptors(&directory);
    let cache = cache_of(1 << 20);
    let file = open(&cache, &path);
    let mut random = Rng::with_seed(9);
    let pages = bytes.len() / PAGE as usize;
    let drawn: Vec<_> = (0..3000).map(|_| random.usize(..pages) * PAGE as usize).collect();
    let future = |start: &usize| file.read_async(vec![0; PAGE as usize], *start as u64);
    run_all(
        drawn.iter().map(future).collect(),
        || random.u32(0..10) == 0,
        |number, read| {
            assert_same(&read.unwrap(), &bytes[drawn[number]..][..PAGE as usize]);
        },
    );
    // Never polled, and polled once, with the last handle.
    drop(file.read_async(vec![0; 8], 0));
    let mut last = file.read_async(vec![0; 4 << 20], 0);
    drop(file);
    let _ = poll_once(&mut last);
    drop(last);
    // The server may have been looking at the read: another thread closes the file then.
    while descriptors(&directory) > before {
        thread::yield_now();
    }
    let file = open(&cache, &path);
    assert_same(&block_on(file.read_async(vec![0; 4 << 20], 0)).unwrap(), &bytes);
    let outcome = file.evict(0..file.len()).unwrap();
    assert_eq!(outcome.kept.referenced, 0, "{outcome:?}");
    file.close().unwrap();
    cache.close().unwrap();
    assert_eq!(descriptors(&directory), before);
}

#[test]
fn a_page_that_another_thread_reads_is_waited_for_without_a_thread() {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(fill_bytes(3, 1 << 20))));
    let gate = Gate::new();
    backing.inject(Fault::on(Call::Read).held(&gate));
    let cache = cache_of(4 << 20);
    let file = cache.open_backing(Arc::clone(&backing) as _, &OpenOptions::new()).unwrap();
    file.set_access(Access::Random);
    thread::scope(|scope| {
        let reader = scope.spawn(|| file.read_exact_at(&mut [0; 8], 0));
        gate.wait_for_arrivals(1);
        let mut blocked = file.read_async(vec![0; PAGE as usize], 0);
        assert!(poll_once(&mut blocked).is_pending());
        let mut dropped = file.read_async(vec![0; PAGE as usize], 0);
        assert!(poll_once(&mut dropped).is_pending());
        drop(dropped);
        // Another page of the same device is read meanwhile.
        let other = block_on(file.read_async(vec![0; PAGE as usize], 9 * PAGE)).unwrap();
        assert_same(&other, &fill_bytes(3, 1 << 20)[9 * PAGE as usize..][..PAGE as usize]);
        assert!(poll_once(&mut blocked).is_pending());
        gate.open();
        reader.join().unwrap().unwrap();
        let read = block_on(blocked).unwrap();
        assert_same(&read, &fill_bytes(3, 1 << 20)[..PAGE as usize]);
    });
}

#[test]
fn a_page_under_a_pin_mut_is_read_after_it() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 4 * PAGE as usize);
    let file = open(&cache_of(1 << 20), &path);
    let ((let_go, gate), (pin_held, pinned)) = (mpsc::channel::<()>(), mpsc::channel());
    thread::scope(|scope| {
        let file = &file;
        let held = scope.spawn(move || {
            let mut pin = file.pin_mut(0..PAGE).unwrap();
            pin.copy_from(0, &[5; PAGE as usize]).unwrap();
            // This thread would wait for itself.
            error_of(block_on(file.read_async(vec![0; 8], 0)), &["PageRefMut"]);
            pin_held.send(()).unwrap();
            assert!(gate.recv().is_err());
            drop(pin);
        });
        pinned.recv().unwrap();
        let mut future = file.read_async(vec![0; PAGE as usize], 0);
        assert!(poll_once(&mut future).is_pending());
        drop(let_go);
        held.join().unwrap();
        assert_same(&block_on(future).unwrap(), &[5; PAGE as usize]);
    });
}

#[test]
fn an_unreadable_byte_fails_only_its_own_read() {
    let bytes = fill_bytes(4, 1 << 20);
    for over_disk in [false, true] {
        let directory = directory();
        let backing = if over_disk {
            let path = crate::support::file_of(&directory, "file", &bytes);
            let options = OpenOptions::new();
            FaultyBacking::new(DiskFile::open(&path, &options).unwrap())
        } else {
            FaultyBacking::new(MemoryBacking::new(bytes.clone()))
        };
        let bad = 40 * PAGE..40 * PAGE + 512;
        backing.inject(Fault::on(Call::Read).at(bad).forever().fails(libc::EIO));
        let cache = cache_of(4 << 20);
        let file = cache.open_backing(Arc::new(backing), &OpenOptions::new()).unwrap();
        let read = |start: u64, pages: u64| {
            block_on(file.read_async(vec![0; (pages * PAGE) as usize], start * PAGE))
        };
        let error = error_of(read(40, 1), &["163840"]);
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        let good = &bytes[30 * PAGE as usize..40 * PAGE as usize];
        assert_same(&read(30, 20).unwrap(), good);
        error_of(read(40, 20), &["163840"]);
        assert_same(&read(41, 1).unwrap(), &bytes[41 * PAGE as usize..42 * PAGE as usize]);
    }
}

#[test]
fn closing_the_cache_ends_its_reads_with_an_error() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 1 << 20);
    let cache = cache_of(1 << 20);
    let file = open(&cache, &path);
    let mut future = file.read_async(vec![0; 8], 0);
    cache.close().unwrap();
    error_of(block_on(&mut future), &["closed"]);
}

#[test]
fn memory_files_are_read_from_holes_and_from_the_swap() {
    let directory = directory();
    let cache = Cache::builder().memory(1 << 20).swap_directory(directory.path()).build().unwrap();
    let file = cache.memory_file("swapped").unwrap();
    let bytes = fill_bytes(6, 4 << 20);
    file.write_all_at(&bytes, 1 << 20).unwrap();
    let futures = (0..5).map(|part| file.read_async(vec![1; 1 << 20], part << 20)).collect();
    run_all(
        futures,
        || false,
        |part, read| match part {
            0 => assert_same(&read.unwrap(), &[0; 1 << 20]),
            _ => assert_same(&read.unwrap(), &bytes[(part - 1) << 20..part << 20]),
        },
    );
}

#[test]
fn files_that_can_be_mapped_are_read_asynchronously() {
    if !crate::support::files_can_be_mapped() {
        return;
    }
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 3 << 20);
    let file = cache_of(2 << 20).open(&path, &mappable(writable())).unwrap();
    let starts: Vec<_> = (0..700).map(|number| number * 4099 % (3 << 20)).collect();
    let future = |start: &usize| file.read_async(vec![0; 5000], *start as u64);
    run_all(
        starts.iter().map(future).collect(),
        || false,
        |number, read| {
            let expected = &bytes[starts[number]..bytes.len().min(starts[number] + 5000)];
            assert_same(&read.unwrap(), expected);
        },
    );
}

#[test]
fn futures_run_on_tasks_of_tokio() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 1 << 20);
    let file: File = open(&cache_of(300 << 10), &path);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let read = |page: u64| tokio::spawn(file.read_async(vec![0; PAGE as usize], page * PAGE));
        let tasks: Vec<_> = (0..256).map(read).collect();
        tasks[7].abort();
        for (page, task) in tasks.into_iter().enumerate() {
            match task.await {
                Ok(read) => assert_same(&read.unwrap(), &bytes[page * 4096..][..4096]),
                Err(error) => assert!(error.is_cancelled() && page == 7),
            }
        }
    });
}

#[test]
fn pins_are_made_without_waiting_and_without_a_copy() {
    let mut random = Rng::with_seed(6);
    for folio_bytes in SMALL_FOLIO_SIZES {
        let directory = directory();
        let length = 5 * folio_bytes.max(1 << 20) as usize + 777;
        let (path, bytes) = random_file(&directory, "file", length);
        let cache = cache_of((8 * folio_bytes).max(600 << 10));
        let file = cache.open(&path, &OpenOptions::new().folio_bytes(folio_bytes)).unwrap();
        let ranges: Vec<_> = (0..1000)
            .map(|_| {
                let start = random.u64(..length as u64);
                let folio_end = (start / folio_bytes + 1) * folio_bytes;
                start..(start + random.u64(1..5000)).min(folio_end).min(length as u64)
            })
            .collect();
        let mut pinned = 0;
        let pin = |range: &std::ops::Range<u64>| file.pin_async(range.clone());
        run_all(
            ranges.iter().map(pin).collect(),
            || false,
            |number, pin| {
                let range = &ranges[number];
                let expected = &bytes[range.start as usize..range.end as usize];
                assert_same(&pin.unwrap().to_vec(), expected);
                pinned += 1;
            },
        );
        assert_eq!(pinned, 1000);
        let held = block_on(file.pin_async(0..100)).unwrap();
        let Poll::Ready(again) = poll_once(&mut file.pin_async(0..100)) else {
            panic!("the page is in memory");
        };
        assert_eq!(again.unwrap().as_ptr(), held.as_ptr(), "the same bytes");
        error_of(block_on(file.pin_async(length as u64..length as u64 + 1)), &["past the end"]);
        error_of(block_on(file.pin_async(5..5)), &["no bytes"]);
        error_of(block_on(file.pin_async(0..folio_bytes + 1)), &["one folio"]);
        drop(held);
        // A thread that reads ahead puts its reference after it has unlocked the page.
        wait_until("no pin is left", || file.evict(..).unwrap().kept.referenced == 0);
    }
    let holes = cache_of(1 << 20).memory_file("holes").unwrap();
    holes.set_len(1 << 20).unwrap();
    assert_same(&block_on(holes.pin_async(5000..6000)).unwrap().to_vec(), &[0; 1000]);
}

#[test]
fn a_pin_of_a_page_under_a_pin_mut_waits_for_it() {
    let file = cache_of(1 << 20).memory_file("pinned").unwrap();
    file.write_all_at(&[1; 100], 0).unwrap();
    let mut pin = file.pin_mut(0..100).unwrap();
    pin.copy_from(0, &[5; 100]).unwrap();
    let other = file.clone();
    let (polled, is_polled) = mpsc::channel();
    let pinning = thread::spawn(move || {
        let mut future = other.pin_async(0..100);
        assert!(poll_once(&mut future).is_pending());
        polled.send(()).unwrap();
        block_on(future).unwrap().to_vec()
    });
    is_polled.recv().unwrap();
    drop(pin);
    assert_same(&pinning.join().unwrap(), &[5; 100]);
}

#[test]
fn many_reads_of_one_future_have_results_of_their_own() {
    let bytes = fill_bytes(4, 1 << 20);
    let backing = FaultyBacking::new(MemoryBacking::new(bytes.clone()));
    backing.inject(Fault::on(Call::Read).at(40 * PAGE..41 * PAGE).forever().fails(libc::EIO));
    let cache = cache_of(4 << 20);
    let file = cache.open_backing(Arc::new(backing), &OpenOptions::new()).unwrap();
    file.set_access(Access::Random);
    let requests = (0..100).map(|page| (vec![0; PAGE as usize], page * PAGE));
    let mut future = file.read_many_async(requests);
    let reads = block_on(&mut future).unwrap();
    for (page, read) in reads.into_iter().enumerate() {
        match read {
            Ok(read) => assert_same(&read, &bytes[page * PAGE as usize..][..PAGE as usize]),
            Err(error) => assert!(page == 40 && error.raw_os_error() == Some(libc::EIO)),
        }
    }
    error_of(block_on(future), &["polled after it was ready"]);
    assert!(block_on(file.read_many_async([])).unwrap().is_empty());
    // Dropped with some reads complete and others in flight.
    let mut dropped = file.read_many_async((0..256).map(|page| (vec![0; 100], page * PAGE)));
    let _ = poll_once(&mut dropped);
}

/// Reads a million pages, of which a tenth is dropped, beside readers, writers and advice.
#[test]
#[ignore = "takes minutes"]
fn a_million_reads_of_which_a_tenth_is_dropped_leave_nothing() {
    const READS: u64 = 1_000_000;
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 16 << 20);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    {
        let cache = cache_of(2 << 20);
        let file = open(&cache, &path);
        file.set_access(Access::Random);
        let (made, dropped) = (AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            for seed in 0..2 {
                let (file, bytes, made, dropped) = (&file, &bytes, &made, &dropped);
                scope.spawn(move || {
                    let mut random = Rng::with_seed(seed);
                    while made.fetch_add(1000, Ordering::Relaxed) < READS {
                        let starts: Vec<_> =
                            (0..1000).map(|_| random.usize(..4096) * PAGE as usize).collect();
                        let read = |start: &usize| file.read_async(vec![0; 4096], *start as u64);
                        let futures = starts.iter().map(read).collect();
                        let mut drops = Rng::with_seed(random.u64(..));
                        let drops = || {
                            let drops = drops.u32(0..8) == 0;
                            dropped.fetch_add(u64::from(drops), Ordering::Relaxed);
                            drops
                        };
                        run_all(futures, drops, |number, read| {
                            assert_same(&read.unwrap(), &bytes[starts[number]..][..4096]);
                        });
                        file.read_exact_at(&mut [0; 9000], random.u64(..8 << 20)).unwrap();
                        let page = random.usize(..4096) * PAGE as usize;
                        file.write_all_at(&bytes[page..page + 4096], page as u64).unwrap();
                        file.evict(0..1 << 20).unwrap();
                    }
                });
            }
        });
        let dropped = dropped.into_inner();
        assert!(dropped > READS / 11, "{dropped} reads were dropped");
        file.sync_data().unwrap();
        let outcome = file.evict(0..file.len()).unwrap();
        assert_eq!(outcome.kept, Default::default(), "pins are left");
        let stats = cache.stats();
        assert_eq!(stats.memory.inactive_bytes + stats.memory.active_bytes, 0, "frames are left");
        assert!(stats.memory.used_bytes <= stats.memory.bound_bytes);
        file.close().unwrap();
        cache.close().unwrap();
    }
    assert_eq!(descriptors(), before);
}

#[test]
fn a_memory_file_without_a_swap_is_read_after_a_pin_mut() {
    let cache = cache_of(1 << 20);
    let file = cache.memory_file("without a swap").unwrap();
    file.write_all_at(&[1; PAGE as usize], 0).unwrap();
    let (drop_pin, dropped) = mpsc::channel::<()>();
    let (pinned, is_pinned) = mpsc::channel();
    thread::scope(|scope| {
        let file = &file;
        scope.spawn(move || {
            let mut pin = file.pin_mut(0..PAGE).unwrap();
            pin.copy_from(0, &[5; PAGE as usize]).unwrap();
            pinned.send(()).unwrap();
            dropped.recv().expect_err("nothing is sent");
        });
        is_pinned.recv().unwrap();
        let mut future = file.read_async(vec![0; PAGE as usize], 0);
        assert!(poll_once(&mut future).is_pending());
        let abandoned = file.read_async(vec![0; PAGE as usize], 0);
        drop(drop_pin);
        assert_eq!(block_on(future).unwrap(), [5; PAGE as usize]);
        drop(abandoned);
    });
}

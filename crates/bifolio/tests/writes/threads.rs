//! Several threads on one cache: what they may share, which calls wait for which, and which states
//! are never visible.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{
    PAGE, assert_same, cache_of, directory, file_of, open, random_file, read, read_all, writable,
};
use bifolio::{Access, Cache, File, OpenOptions, OwnedPageRef, PageRef, PageRefMut};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking, with_seeds};
use fastrand::Rng;

#[test]
fn types_are_shared_between_threads_as_documented() {
    fn is_shared<T: Send + Sync + Clone + 'static>() {}
    is_shared::<Cache>();
    is_shared::<File>();
    is_shared::<OwnedPageRef>();
    fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<bifolio::Error>();
    is_send_and_sync::<OpenOptions>();
    assert_eq!(size_of::<bifolio::Error>(), size_of::<usize>());

    // Ambiguous, and so refused by the compiler, if the type were `Send`.
    trait NotSend<A> {
        fn holds() {}
    }
    impl<T: ?Sized> NotSend<()> for T {}
    struct IfSend;
    impl<T: ?Sized + Send> NotSend<IfSend> for T {}
    <PageRef<'static> as NotSend<_>>::holds();
    <PageRefMut<'static> as NotSend<_>>::holds();
}

#[test]
fn a_hold_keeps_its_bytes_on_any_thread_whatever_else_happens() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 1 << 20);
    let cache = cache_of(256 << 10);
    let file = cache.open_immutable(&path, &OpenOptions::new()).unwrap();
    let hold = file.pin(5000..8000).unwrap().into_owned();
    let (first, second) = (hold.clone(), hold.clone());
    let expected = bytes[5000..8000].to_vec();
    // Everything else is evicted, several times.
    assert_same(&read_all(&file), &bytes);
    assert_same(&read_all(&file), &bytes);
    drop(hold);
    drop(file);
    let on_thread = {
        let expected = expected.clone();
        thread::spawn(move || assert_same(&first, &expected))
    };
    on_thread.join().unwrap();
    drop(cache);
    assert_same(&second, &expected);
}

#[test]
fn concurrent_misses_of_one_folio_make_one_read() {
    for folio_bytes in [PAGE, 16 << 10] {
        let memory = MemoryBacking::new((0..64_u32 << 10).map(|byte| byte as u8).collect());
        let backing = Arc::new(FaultyBacking::new(memory));
        let cache = cache_of(1 << 20);
        let options = writable().folio_bytes(folio_bytes);
        let file = cache.open_backing(backing.clone(), &options).unwrap();
        // Readahead would read the next folio, too.
        file.set_access(Access::Random);
        let gate = Gate::new();
        backing.inject(Fault::on(Call::Read).forever().held(&gate));
        let started = AtomicU64::new(0);
        thread::scope(|scope| {
            for number in 0..8_u64 {
                let (file, started) = (&file, &started);
                scope.spawn(move || {
                    started.fetch_add(1, Ordering::Relaxed);
                    let at = number * 100;
                    let found = match number % 3 {
                        0 => read(file, at, 1),
                        1 => {
                            let mut found = vec![0];
                            file.pin(at..at + 1).unwrap().copy_to(0, &mut found).unwrap();
                            found
                        }
                        _ => {
                            let mut found = vec![0];
                            file.pin_mut(at..at + 1).unwrap().copy_to(0, &mut found).unwrap();
                            found
                        }
                    };
                    assert_eq!(found, [at as u8]);
                });
            }
            gate.wait_for_arrivals(1);
            while started.load(Ordering::Relaxed) < 8 {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(20));
            assert_eq!(backing.calls(Call::Read), 1);
            gate.open();
        });
        assert_eq!(backing.calls(Call::Read), 1);
        assert_eq!(cache.stats().reads.misses, 1);
    }
}

#[test]
fn a_miss_under_way_does_not_hold_up_other_pages() {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(vec![3; 100_000])));
    let cache = cache_of(1 << 20);
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    let gate = Gate::new();
    backing.inject(Fault::on(Call::Read).at(0..1).held(&gate));
    thread::scope(|scope| {
        let slow = scope.spawn(|| read(&file, 0, 10));
        gate.wait_for_arrivals(1);
        assert_eq!(read(&file, 50_000, 10), [3; 10]);
        file.write_at(&[4; 10], 60_000).unwrap();
        file.sync_data().unwrap();
        assert!(!slow.is_finished());
        gate.open();
        assert_eq!(slow.join().unwrap(), [3; 10]);
    });
}

#[test]
fn a_file_can_be_opened_and_closed_by_many_at_once() {
    const THREADS: usize = 4;
    const SLOT: usize = 3000;
    let directory = directory();
    let path = file_of(&directory, "file", &[0; THREADS * SLOT]);
    let cache = cache_of(256 << 10);
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (cache, path) = (&cache, &path);
            scope.spawn(move || {
                let at = (number * SLOT) as u64;
                let mut expected = vec![0; SLOT];
                for round in 1..150_u8 {
                    // Now and then the last handle goes, and the next open starts from the disk.
                    let file = open(cache, path);
                    assert_same(&read(&file, at, SLOT), &expected);
                    expected.fill(round ^ (number as u8) << 6);
                    file.write_all_at(&expected, at).unwrap();
                    assert_same(&read(&file, at, SLOT), &expected);
                    if round % 16 == 0 {
                        file.sync_data().unwrap();
                    }
                }
            });
        }
    });
    let expected: Vec<_> = (0..THREADS).flat_map(|n| [149 ^ (n as u8) << 6; SLOT]).collect();
    assert_same(&std::fs::read(&path).unwrap(), &expected);
    assert_eq!(cache.stats().memory.dirty_bytes, 0);
    cache.close().unwrap();
}

/// Length of the file while it is truncated and grown again. Odd: it is being changed.
#[derive(Debug, Default)]
struct Phase(Mutex<u64>);

impl Phase {
    fn begin_change(&self) {
        *self.0.lock().unwrap() += 1;
    }

    fn end_change(&self) {
        *self.0.lock().unwrap() += 1;
    }

    fn now(&self) -> u64 {
        *self.0.lock().unwrap()
    }
}

/// Length of the file that is truncated and extended; not a whole number of pages.
const LENGTH: u64 = 30_000;

/// Runs the phases one after the other: full of `fill`, truncated, extended again by zeros.
fn cut_and_grow(file: &File, phase: &Phase, random: &mut Rng) {
    let until = Instant::now() + Duration::from_millis(1500);
    let mut fill = 0_u8;
    while Instant::now() < until {
        fill = fill % 250 + 1;
        let cut = random.u64(1..LENGTH);
        for step in 0..3 {
            phase.begin_change();
            match step {
                0 => file.write_all_at(&[fill; LENGTH as usize], 0).unwrap(),
                1 => file.set_len(cut).unwrap(),
                _ => file.set_len(LENGTH).unwrap(),
            }
            phase.end_change();
            for _ in 0..random.u32(..50) {
                thread::yield_now();
            }
            let bytes = read_all(file);
            let kept = if step == 0 { LENGTH } else { cut } as usize;
            assert!(bytes[..kept].iter().all(|byte| *byte == fill), "step {step}");
            assert!(bytes[kept..].iter().all(|byte| *byte == 0), "stale bytes behind {cut}");
        }
    }
}

/// Reads all the time; a read in a quiet phase must return the bytes of that phase.
fn watch(file: &File, phase: &Phase, stop: &AtomicBool, random: &mut Rng) -> u64 {
    let mut quiet = 0;
    while !stop.load(Ordering::Relaxed) {
        let position = random.u64(..LENGTH + 100);
        let length = random.choice([1, 64, 4096, 20_000]).unwrap();
        let before = phase.now();
        let bytes = read(file, position, length);
        let after = phase.now();
        assert!(bytes.is_empty() || position + bytes.len() as u64 <= LENGTH, "behind any end");
        if before != after || before % 2 == 1 {
            continue;
        }
        quiet += 1;
        // Step 1 made the phase 2, step 2 made it 4, step 3 made it 6, and so on.
        match before / 2 % 3 {
            1 => {
                let expected = LENGTH.saturating_sub(position).min(length as u64);
                assert_eq!(bytes.len() as u64, expected);
                assert!(bytes.iter().all(|byte| *byte == bytes[0] && *byte != 0));
            }
            2 => assert!(bytes.iter().all(|byte| *byte == bytes[0] && *byte != 0)),
            _ => {
                let zeros = bytes.iter().skip_while(|byte| **byte != 0);
                assert!(zeros.clone().all(|byte| *byte == 0), "stale bytes after zeros");
            }
        }
    }
    quiet
}

fn readers_against_cuts(seed: u64, folio_bytes: u64, memory_bytes: u64) {
    let directory = directory();
    let path = file_of(&directory, "file", b"");
    let cache = cache_of(memory_bytes);
    let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
    let (phase, stop) = (Phase::default(), AtomicBool::new(false));
    thread::scope(|scope| {
        let watchers = [1, 2].map(|number| {
            let (file, phase, stop) = (&file, &phase, &stop);
            scope.spawn(move || watch(file, phase, stop, &mut Rng::with_seed(seed ^ number)))
        });
        let cutter = scope.spawn(|| cut_and_grow(&file, &phase, &mut Rng::with_seed(seed)));
        let cut = cutter.join();
        stop.store(true, Ordering::Relaxed);
        let quiet: u64 = watchers.map(|watcher| watcher.join().unwrap()).iter().sum();
        cut.unwrap();
        assert!(quiet > 100, "only {quiet} reads were in a quiet phase");
    });
}

#[test]
fn readers_never_see_bytes_that_were_cut_off() {
    with_seeds(1, |seed| {
        readers_against_cuts(seed, PAGE, 1 << 20);
        readers_against_cuts(seed, 16 << 10, 256 << 10);
    });
}

/// Returns the byte that the appender writes at a position: never zero.
fn appended(position: u64) -> u8 {
    (position % 251) as u8 + 1
}

/// A reader of the whole range against an appender that extends the file in steps of less than a
/// page: a batch whose copy ended at an old length inside a folio must continue in that folio.
fn reader_against_appender(seed: u64, folio_bytes: u64) {
    const END: u64 = 400_000;
    let directory = directory();
    let path = file_of(&directory, "log", b"");
    let cache = cache_of(1 << 20);
    let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Rng::with_seed(seed);
            let mut end = 0;
            while end < END {
                let next = END.min(end + random.u64(1..700));
                let bytes: Vec<_> = (end..next).map(appended).collect();
                file.write_all_at(&bytes, end).unwrap();
                end = next;
            }
        });
        for _ in 0..2 {
            scope.spawn(|| {
                let expected: Vec<_> = (0..END).map(appended).collect();
                let mut random = Rng::with_seed(!seed);
                while file.len() < END {
                    let before = file.len();
                    // From the start, or just from where things happen.
                    let start = random.choice([0, before.saturating_sub(10_000)]).unwrap();
                    let bytes = read(&file, start, (END - start) as usize);
                    let end = start + bytes.len() as u64;
                    assert!(before <= end && end <= file.len());
                    assert_same(&bytes, &expected[start as usize..end as usize]);
                }
            });
        }
    });
    file.sync_data().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &read_all(&file));
}

#[test]
fn a_reader_of_a_growing_file_never_sees_zeros() {
    with_seeds(1, |seed| {
        reader_against_appender(seed, PAGE);
        reader_against_appender(seed, 64 << 10);
    });
}

#[test]
fn a_pin_mut_keeps_others_from_seeing_half_a_change() {
    let directory = directory();
    let path = file_of(&directory, "file", &[0; 16 << 10]);
    let cache = cache_of(1 << 20);
    let file = cache.open(&path, &writable().folio_bytes(16 << 10)).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let bytes = read(&file, 4096, 4096);
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "half a change");
            }
        });
        for round in 0..2000_u32 {
            let mut pin = file.pin_mut(4096..8192).unwrap();
            pin.copy_from(2048, &[round as u8; 2048]).unwrap();
            if round % 64 == 0 {
                thread::yield_now();
            }
            pin.copy_from(0, &[round as u8; 2048]).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
}

#[test]
fn a_close_waits_for_writes_and_loses_none_that_returned() {
    for _ in 0..20 {
        let directory = directory();
        let path = file_of(&directory, "file", &[0; 40_960]);
        let cache = cache_of(1 << 20);
        let file = open(&cache, &path);
        let acknowledged = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut acknowledged = 0;
                for round in 1..=200_u8 {
                    match file.write_at(&[round; 40_960], 0) {
                        Ok(40_960) => acknowledged = round,
                        _ => break,
                    }
                }
                acknowledged
            });
            thread::sleep(Duration::from_millis(1));
            cache.close().unwrap();
            writer.join().unwrap()
        });
        drop((file, cache));
        let found = std::fs::read(&path).unwrap();
        assert!(found.iter().all(|byte| *byte >= acknowledged), "a write was lost");
    }
}

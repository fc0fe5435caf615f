//! How maps begin and end: what is refused; the effects of a truncation, a growth or a hole; what
//! they keep alive, and what they keep resident.
//!
//! # Safety
//! Only bytes of the file are touched, except where a test expects the process to be killed for it.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bifolio::{Cache, ErrorKind, Feature, File, OpenOptions, Result};
use bifolio_testing::fill_bytes;
use fastrand::Rng;

use crate::setup::{Address, Way, load, run_child, store, touch};
use crate::support::{
    PAGE, assert_same, cause_of, directory, error_of, file_of, has, random_file, read, read_all,
    wait_until, writable,
};

const PAGE_USIZE: usize = PAGE as usize;

fn is_past_end<T>(result: &Result<T>) -> bool {
    result.as_ref().err().map(bifolio::Error::kind) == Some(ErrorKind::PastEnd)
}

/// Runs `test` with a memory file and a disk file of these bytes.
fn for_both_files(way: Way, bytes: &[u8], test: impl Fn(&Cache, &File)) {
    let directory = directory();
    let path = file_of(&directory, "mapped", bytes);
    let cache = way.swapping(1 << 20);
    test(&cache, &cache.open(&path, &way.options()).unwrap());
    let file = way.memory_file(&cache, 0);
    file.write_all_at(bytes, 0).unwrap();
    test(&cache, &file);
}

/// Lets the kernel load a byte of a map: it returns an error where it cannot, and no signal is
/// raised.
fn kernel_can_load(start: *const u8, position: u64) -> bool {
    let (read, write) = std::io::pipe().unwrap();
    let source = start.wrapping_add(position as usize);
    // SAFETY: one byte of a map that lives, which the kernel only reads.
    let count = unsafe { libc::write(write.as_raw_fd(), source.cast(), 1) };
    drop(read);
    count == 1
}

const CUT: &str = "lifetimes::a_touch_of_what_was_cut_raises_a_signal";
const CUT_VARIABLE: &str = "BIFOLIO_TEST_MAP_CUT";

/// Touches a truncated page, which kills the process.
fn touch_what_was_cut(way: Way) {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "mapped", 16 * PAGE_USIZE);
    let cache = way.builder(1 << 20).build().unwrap();
    let file = cache.open(&path, &way.options()).unwrap();
    let map = file.map(0..file.len()).unwrap();
    map.populate(0..map.len()).unwrap();
    let len = 5 * PAGE + 100;
    file.set_len(len).unwrap();
    assert!(is_past_end(&map.populate(0..map.len())));
    assert!(is_past_end(&map.pin(5 * PAGE..7 * PAGE)));
    assert!(map.take_error().is_none(), "no page was touched");
    assert_same(&load(map.as_ptr(), 0..len), &bytes[..len as usize]);
    assert_same(&load(map.as_ptr(), len..6 * PAGE), &vec![0; (6 * PAGE - len) as usize]);
    println!("now it dies");
    touch(map.as_ptr(), 6 * PAGE);
    println!("it did not");
}

#[test]
fn a_touch_of_what_was_cut_raises_a_signal() {
    let ways = Way::with_and_without(Feature::FaultPoison);
    if let Ok(number) = std::env::var(CUT_VARIABLE) {
        return touch_what_was_cut(ways[number.parse::<usize>().unwrap()]);
    }
    for (number, way) in ways.iter().enumerate() {
        let output = run_child(CUT, CUT_VARIABLE, &number.to_string());
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("now it dies") && !text.contains("it did not"), "{way:?}: {text}");
        let signal = output.status.signal();
        let expected = if way.masked.is_some() { libc::SIGSEGV } else { libc::SIGBUS };
        assert_eq!(signal, Some(expected), "{way:?}: {}", output.status);
    }
}

#[test]
fn each_map_is_told_once_why_a_page_could_not_be_had() {
    let way = Way::new();
    if Way::whole().is_empty() || !has(Feature::KernelFaults) {
        return;
    }
    for_both_files(way, &fill_bytes(1, 16 * PAGE_USIZE), |_, file| {
        let maps = [(); 2].map(|()| file.map(0..file.len()).unwrap());
        file.set_len(5 * PAGE).unwrap();
        assert!(!kernel_can_load(maps[0].as_ptr(), 7 * PAGE));
        let later = file.map(0..file.len()).unwrap();
        for map in &maps {
            let error = map.take_error().expect("an error");
            assert_eq!(error.kind(), ErrorKind::Fault, "{error:?}");
            assert_eq!(cause_of(&error).kind(), ErrorKind::PastEnd, "{error:?}");
            assert!(map.take_error().is_none(), "told twice");
        }
        assert!(later.take_error().is_none(), "it was before its time");
        // Grown again, the page is one like others.
        file.set_len(16 * PAGE).unwrap();
        assert_eq!(touch(maps[0].as_ptr(), 7 * PAGE), 0);
        assert!(kernel_can_load(maps[0].as_ptr(), 7 * PAGE));
        assert!(maps[0].take_error().is_none());
    });
}

/// Ways of making a file longer.
fn grow(file: &File, way: u32, len: u64) {
    match way {
        0 => file.set_len(len).unwrap(),
        1 => file.write_all_at(&[0], len - 1).unwrap(),
        2 if file.is_memory_file() => file.allocate(len - PAGE..len).unwrap(),
        _ => file.write_all_at(&vec![0; 3 * PAGE_USIZE], len - 3 * PAGE).unwrap(),
    }
    assert_eq!(file.len(), len);
}

#[test]
fn growth_after_a_truncation_brings_zeros() {
    for way in Way::whole() {
        for how in 0..4 {
            let bytes = fill_bytes(2, 20 * PAGE_USIZE);
            for_both_files(way, &bytes, |cache, file| {
                let mut map = file.map_mut(0..file.len()).unwrap();
                store(map.as_mut_ptr(), 0, &[7; 20 * PAGE_USIZE]);
                let len = 9 * PAGE + 1000;
                file.set_len(len).unwrap();
                store(map.as_mut_ptr(), len, &[9; 3096]);
                if how % 2 == 0 {
                    // The page of the end leaves, with what was stored behind it.
                    file.sync_data().unwrap();
                    cache.set_memory(512 << 10).unwrap();
                    read_all(&cache.memory_file_with("other", &writable()).unwrap());
                }
                grow(file, how, 20 * PAGE);
                let mut expected = vec![7; len as usize];
                expected.resize(bytes.len(), 0);
                assert_same(&load(map.as_ptr(), 0..map.len()), &expected);
                assert_same(&read_all(file), &expected);
                store(map.as_mut_ptr(), 12 * PAGE, &[5; 100]);
                assert_same(&read(file, 12 * PAGE, 100), &[5; 100]);
                cache.set_memory(1 << 20).unwrap();
            });
        }
    }
}

#[test]
fn a_hole_is_seen_through_a_map_despite_a_hold() {
    for way in Way::whole() {
        let cache = way.swapping(1 << 20);
        let file = way.memory_file(&cache, 10 * PAGE);
        let mut map = file.map_mut(0..10 * PAGE).unwrap();
        store(map.as_mut_ptr(), 0, &[7; 10 * PAGE_USIZE]);
        let held = file.pin(3 * PAGE..4 * PAGE).unwrap().into_owned();
        file.punch_hole(2 * PAGE..6 * PAGE).unwrap();
        assert_same(&load(map.as_ptr(), 2 * PAGE..6 * PAGE), &[0; 4 * PAGE_USIZE]);
        // What is stored now is the file's, and not of the page that was held.
        store(map.as_mut_ptr(), 3 * PAGE, &[1; 50]);
        let mut found = vec![0xEE; PAGE_USIZE];
        held.copy_to(0, &mut found).unwrap();
        drop(held);
        assert_same(&read(&file, 3 * PAGE, 50), &[1; 50]);
        assert_same(&load(map.as_ptr(), 3 * PAGE..3 * PAGE + 50), &[1; 50]);
    }
}

#[test]
fn holds_of_pages_that_are_cut_stay_readable() {
    for way in Way::whole() {
        let bytes = fill_bytes(3, 10 * PAGE_USIZE);
        for_both_files(way, &bytes, |_, file| {
            let map = file.map(0..file.len()).unwrap();
            let held = file.pin(7 * PAGE..8 * PAGE).unwrap().into_owned();
            let pinned = map.pin(6 * PAGE..9 * PAGE).unwrap();
            file.set_len(5 * PAGE).unwrap();
            let mut found = vec![0; PAGE_USIZE];
            held.copy_to(0, &mut found).unwrap();
            file.set_len(10 * PAGE).unwrap();
            assert_same(&load(map.as_ptr(), 5 * PAGE..10 * PAGE), &[0; 5 * PAGE_USIZE]);
            held.copy_to(0, &mut found).unwrap();
            drop(pinned);
            file.write_all_at(&[4; PAGE_USIZE], 7 * PAGE).unwrap();
            drop(held);
            assert_same(&load(map.as_ptr(), 7 * PAGE..8 * PAGE), &[4; PAGE_USIZE]);
        });
    }
}

#[test]
fn several_maps_calls_and_pins_see_the_same_bytes() {
    for way in Way::whole() {
        let mut bytes = fill_bytes(4, 30 * PAGE_USIZE + 77);
        for_both_files(way, &bytes.clone(), |_, file| {
            let whole = file.map(0..file.len()).unwrap();
            let mut first = file.map_mut(0..file.len()).unwrap();
            // Neither begins nor ends at a page.
            let (start, end) = (5 * PAGE + 123, 9 * PAGE + 17);
            let mut second = file.map_mut(start..end).unwrap();
            assert_eq!(second.len(), end - start);
            assert_same(
                &load(second.as_ptr(), 0..end - start),
                &bytes[start as usize..end as usize],
            );
            store(second.as_mut_ptr(), 0, b"second");
            store(first.as_mut_ptr(), start + 6, b"first");
            file.write_all_at(b"write", start + 11).unwrap();
            file.pin_mut(start + 16..start + 19).unwrap().copy_from(0, b"pin").unwrap();
            let expected = b"secondfirstwritepin";
            for found in [
                load(whole.as_ptr(), start..start + 19),
                load(first.as_ptr(), start..start + 19),
                load(second.as_ptr(), 0..19),
                read(file, start, 19),
            ] {
                assert_eq!(found, expected);
            }
            let old = bytes[start as usize..start as usize + 19].to_vec();
            store(second.as_mut_ptr(), 0, &old);
            assert_same(&read_all(file), &bytes);
            let last = load(whole.as_ptr(), whole.len() - 3..whole.len());
            assert_same(&last, &bytes[bytes.len() - 3..]);
        });
        bytes.clear();
    }
}

#[test]
fn a_cache_with_maps_is_not_closed_and_closes_after_them() {
    for way in Way::whole() {
        let directory = directory();
        let path = file_of(&directory, "mapped", &[1; 3 * PAGE_USIZE]);
        let cache = way.swapping(1 << 20);
        let file = cache.open(&path, &way.options()).unwrap();
        let mut maps = vec![file.map_mut(0..10).unwrap()];
        let read_only = file.map(0..PAGE).unwrap();
        for is_second in [false, true] {
            let error = error_of(cache.close(), &["2 maps or pins of maps are still in use"]);
            assert_eq!(error.kind(), ErrorKind::MapsAlive);
            // It works on.
            store(maps[0].as_mut_ptr(), 1, &[2 + u8::from(is_second)]);
            assert_eq!(read(&file, 0, 3), [1, 2 + u8::from(is_second), 1]);
        }
        drop(read_only);
        error_of(cache.close(), &["1 maps or pins of maps are still in use"]);
        maps.clear();
        cache.close().unwrap();
        assert_eq!(std::fs::read(&path).unwrap()[..3], [1, 3, 1]);
        assert!(error_of(file.map(0..10), &[]).kind() == ErrorKind::Closed);
    }
}

/// A device writes under a pin whose map was dropped.
#[test]
fn a_cache_with_pins_of_maps_is_not_closed() {
    for way in Way::whole() {
        let directory = directory();
        let path = file_of(&directory, "mapped", &[1; 3 * PAGE_USIZE]);
        let cache = way.swapping(1 << 20);
        let file = cache.open(&path, &way.options()).unwrap();
        let map = file.map_mut(0..file.len()).unwrap();
        let read_only = map.pin(0..10).unwrap();
        let mut pin = map.pin_mut(PAGE..PAGE + 10).unwrap();
        drop(map);
        let error = error_of(cache.close(), &["2 maps or pins of maps are still in use"]);
        assert_eq!(error.kind(), ErrorKind::MapsAlive);
        drop(read_only);
        error_of(cache.close(), &["1 maps or pins of maps are still in use"]);
        store(pin.as_mut_ptr(), 0, b"device");
        drop(pin);
        cache.close().unwrap();
        assert_eq!(std::fs::read(&path).unwrap()[PAGE_USIZE..][..7], *b"device\x01");
        assert!(error_of(file.close(), &[]).kind() == ErrorKind::Closed);
    }
}

#[test]
fn a_pin_of_a_map_keeps_its_file_and_its_bytes_reach_the_disk() {
    for (way, has_cache) in Way::whole().into_iter().flat_map(|it| [(it, false), (it, true)]) {
        let directory = directory();
        let path = file_of(&directory, "mapped", &[1; 3 * PAGE_USIZE]);
        let mut cache = Some(way.builder(1 << 20).build().unwrap());
        let file = cache.as_ref().unwrap().open(&path, &way.options()).unwrap();
        let map = file.map_mut(0..file.len()).unwrap();
        let mut pin = map.pin_mut(PAGE..PAGE + 10).unwrap();
        drop(map);
        file.close().unwrap();
        if !has_cache {
            drop(cache.take());
        }
        store(pin.as_mut_ptr(), 0, b"device");
        drop(pin);
        assert_eq!(std::fs::read(&path).unwrap()[PAGE_USIZE..][..7], *b"device\x01");
    }
}

#[test]
fn a_map_keeps_its_file_and_the_last_stores_reach_the_disk() {
    for way in Way::whole() {
        let directory = directory();
        let (path, mut bytes) = random_file(&directory, "mapped", 2_000_000);
        let cache = way.builder(1 << 20).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let mut map = file.map_mut(0..file.len()).unwrap();
        drop(file);
        drop(cache);
        assert_same(&load(map.as_ptr(), 0..map.len()), &bytes);
        for position in (0..bytes.len() - 5).step_by(30_000) {
            store(map.as_mut_ptr(), position as u64, b"later");
            bytes[position..position + 5].copy_from_slice(b"later");
        }
        assert_same(&load(map.as_ptr(), 0..map.len()), &bytes);
        drop(map);
        assert_same(&std::fs::read(&path).unwrap(), &bytes);
    }
}

/// A sync has found the pages that were stored to, and waits for the first one. Meanwhile the
/// second is written out.
#[test]
fn a_page_that_was_written_meanwhile_is_not_marked_again() {
    for way in Way::whole() {
        let directory = directory();
        let (path, _) = random_file(&directory, "mapped", 2 * PAGE_USIZE);
        let cache =
            way.builder(1 << 20).dirty_age_max(Duration::from_millis(600_000)).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let mut map = file.map_mut(0..file.len()).unwrap();
        for page in 0..2 {
            store(map.as_mut_ptr(), page * PAGE, b"stored");
        }
        let pin = file.pin_mut(0..1).unwrap();
        thread::scope(|scope| {
            let syncing = scope.spawn(|| file.sync_data().unwrap());
            thread::sleep(Duration::from_millis(100));
            file.sync_range(PAGE..2 * PAGE).unwrap();
            let before = cache.stats().storage.written_folios;
            drop(pin);
            syncing.join().unwrap();
            // The first page.
            assert_eq!(cache.stats().storage.written_folios, before + 1, "{way:?}");
        });
    }
}

/// The flusher searches for stores to a page whose lock a `PageRefMut` holds, because of its age or
/// of advice. It skips the page, and writes out pages that other threads wait for.
#[test]
fn a_pinned_page_holds_no_other_back_from_its_device() {
    for (way, has_advice) in Way::whole().into_iter().flat_map(|it| [(it, false), (it, true)]) {
        let directory = directory();
        let (path, _) = random_file(&directory, "mapped", 2 * PAGE_USIZE);
        let age_ms_max = if has_advice { 3_600_000 } else { 20 };
        let cache =
            way.builder(1 << 20).dirty_age_max(Duration::from_millis(age_ms_max)).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let mut map = file.map_mut(0..file.len()).unwrap();
        let mut pin = file.pin_mut(0..6).unwrap();
        for text in [b"first!", b"second"] {
            pin.copy_from(0, text).unwrap();
            store(map.as_mut_ptr(), PAGE, text);
            wait_until("the page beside it is on disk", || {
                if has_advice {
                    // Once may not do: the write-out of the first text has perhaps not ended.
                    file.evict(0..2 * PAGE).unwrap();
                }
                std::fs::read(&path).unwrap()[PAGE_USIZE..].starts_with(text)
            });
        }
        drop(pin);
        file.sync_data().unwrap();
        assert!(std::fs::read(&path).unwrap().starts_with(b"second"), "{way:?}");
    }
}

/// Returns `true` if this process has the file open.
fn is_open(path: &std::path::Path) -> bool {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
    descriptors.flatten().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|it| it == path))
}

#[test]
fn a_mapped_file_is_closed_with_its_last_map() {
    for way in Way::whole() {
        let directory = directory();
        let (path, mut bytes) = random_file(&directory, "mapped", 64 * PAGE_USIZE);
        // The flusher looks for stores all the time.
        let cache = way.builder(1 << 20).dirty_age_max(Duration::from_millis(1)).build().unwrap();
        for round in 0..100_usize {
            let file = cache.open(&path, &way.options()).unwrap();
            assert_same(&read_all(&file), &bytes);
            let mut map = file.map_mut(0..file.len()).unwrap();
            for page in 0..64 {
                store(map.as_mut_ptr(), page * PAGE, &round.to_ne_bytes());
            }
            drop(file);
            drop(map);
            assert!(!is_open(&path), "round {round}, {way:?}");
            // By another program.
            bytes[..8].copy_from_slice(&round.to_ne_bytes());
            bytes
                .chunks_mut(PAGE_USIZE)
                .for_each(|page| page[..8].copy_from_slice(&round.to_ne_bytes()));
            bytes[1000] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
        }
    }
}

#[test]
fn pinned_pages_of_a_map_stay_and_raise_no_faults() {
    for way in Way::with_and_without(Feature::VectoredUnmap) {
        let directory = directory();
        let (path, bytes) = random_file(&directory, "mapped", 4 << 20);
        let cache = way.builder(1 << 20).readahead_max(0).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let map = file.map(0..file.len()).unwrap();
        // Whether the pages were evicted by others, and a smaller bound.
        let faults_under_pressure = || {
            cache.set_memory(300 << 10).unwrap();
            assert_same(&read_all(&file), &bytes);
            let faults = cache.stats().maps.faults;
            let (start, end) = (10 * PAGE, 31 * PAGE);
            assert_same(&load(map.as_ptr(), start..end), &bytes[start as usize..end as usize]);
            cache.set_memory(1 << 20).unwrap();
            cache.stats().maps.faults - faults
        };
        map.populate(10 * PAGE..31 * PAGE).unwrap();
        // Once may not be enough: new pages wait in the batch of a CPU that has nothing else to do.
        let is_pressed = (0..50).any(|_| faults_under_pressure() > 0);
        assert!(is_pressed, "no pressure: {:?}", cache.stats());
        let pinned = map.pin(10 * PAGE + 5..30 * PAGE + 1).unwrap();
        assert_eq!(pinned.len() as u64, 20 * PAGE - 4);
        assert_eq!(faults_under_pressure(), 0, "{way:?}");
    }
}

#[test]
fn a_cache_full_of_pinned_maps_says_so_and_recovers() {
    for way in Way::whole() {
        let directory = directory();
        let (path, bytes) = random_file(&directory, "mapped", 4 << 20);
        let cache =
            way.builder(1 << 20).reclaim_wait_max(Duration::from_millis(50)).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let map = file.map(0..file.len()).unwrap();
        let mut pins = Vec::new();
        let error = loop {
            let start = pins.len() as u64 * 16 * PAGE;
            match map.pin(start..start + 16 * PAGE) {
                Ok(pin) => pins.push(pin),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        assert!(pins.len() >= 8, "full with {} pages", pins.len() * 16);
        // A few pages may be left, and can be used one after the other.
        if let Err(error) = map.populate(3 << 20..4 << 20) {
            assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        }
        pins.clear();
        map.populate(3 << 20..4 << 20).unwrap();
        assert_same(&load(map.as_ptr(), 0..map.len()), &bytes);
    }
}

/// Pages that are pinned cannot be swapped out, so they alone must not use up what is kept for
/// overwrites of swapped pages.
#[test]
fn new_pages_beside_pinned_ones_may_use_the_reserve() {
    const PAGES: u64 = 64;
    const PINNED: u64 = 12;
    for way in Way::whole() {
        let cache = way.swapping(256 << 10);
        let file = way.memory_file(&cache, PAGES * PAGE);
        let mut map = file.map_mut(0..PAGES * PAGE).unwrap();
        let _pinned = map.pin_mut(0..PINNED * PAGE).unwrap();
        (0..PINNED).for_each(|page| store(map.as_mut_ptr(), page * PAGE, &[1]));
        for page in PINNED..PAGES {
            let written = file.write_all_at(&[page as u8], page * PAGE);
            written.unwrap_or_else(|error| panic!("page {page}: {error}: {:?}", cache.stats()));
            store(map.as_mut_ptr(), page * PAGE + 1, &[1]);
        }
        for page in PINNED..PAGES {
            let found = load(map.as_ptr(), page * PAGE..page * PAGE + 2);
            assert_eq!(found, [page as u8, 1], "page {page}");
        }
    }
}

#[test]
fn maps_are_made_and_dropped_while_others_fault() {
    for way in Way::whole() {
        let directory = directory();
        let (path, bytes) = random_file(&directory, "mapped", 3 << 20);
        let cache = way.builder(1 << 20).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let readers = [1, 2].map(|seed| {
                let (file, bytes, stop) = (&file, &bytes, &stop);
                scope.spawn(move || {
                    let mut random = Rng::with_seed(seed);
                    let map = file.map(0..file.len()).unwrap();
                    let start = Address(map.as_ptr().cast_mut());
                    while !stop.load(Ordering::Relaxed) {
                        let at = random.usize(..bytes.len());
                        assert_eq!(touch(start.0, at as u64), bytes[at]);
                    }
                })
            });
            let mut random = Rng::with_seed(3);
            for _ in 0..300 {
                let at = random.usize(..bytes.len() - 9);
                let map = file.map(at as u64..at as u64 + 9).unwrap();
                assert_same(&load(map.as_ptr(), 0..9), &bytes[at..at + 9]);
                drop(map);
                if random.u32(..10) == 0 {
                    // A file with its region, fault handlers and all.
                    let other = cache.memory_file_with("other", &way.options());
                    drop(other);
                }
            }
            stop.store(true, Ordering::Relaxed);
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        });
    }
}

#[test]
fn files_that_cannot_be_mapped_are_refused() {
    if Way::whole().is_empty() {
        return;
    }
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 3 * PAGE_USIZE);
    let cache = Cache::builder().memory(1 << 20).build().unwrap();
    let mappable = writable().mappable(true);
    let error = error_of(cache.open(&path, &mappable.clone().folio_bytes(16 << 10)), &["4 KiB"]);
    assert_eq!(error.kind(), ErrorKind::Config);

    let plain = cache.open(&path, &writable()).unwrap();
    let not_mappable = |result: Result<bifolio::Map>| {
        let error = error_of(result, &["file", "mappable"]);
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    };
    not_mappable(plain.map(0..PAGE));
    // The first open decides.
    match cache.open(&path, &mappable) {
        Ok(second) => not_mappable(second.map(0..PAGE)),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}"),
    }
    drop(plain);

    let file = cache.open(&path, &mappable).unwrap();
    let second = cache.open(&path, &OpenOptions::new()).unwrap();
    assert_eq!(second.map(0..PAGE).unwrap().len(), PAGE, "the first open decides");
    let error = error_of(second.map_mut(0..PAGE), &["writ"]);
    assert_eq!(error.kind(), ErrorKind::NotOpenedFor);
    for empty in [0..0, PAGE..PAGE] {
        assert!(error_of(file.map(empty), &[]).kind() == ErrorKind::Config);
    }
    assert!(is_past_end(&file.map(0..3 * PAGE + 1)));
    assert!(is_past_end(&file.map_mut(5 * PAGE..6 * PAGE)));
    assert!(file.map(0..u64::MAX).is_err());
    assert!(file.map_mut(u64::MAX - 1..u64::MAX).is_err());
    let map = file.map_mut(PAGE..2 * PAGE).unwrap();
    for range in [0..PAGE + 1, PAGE + 1..PAGE + 1] {
        for refused in
            [map.populate(range.clone()), map.sync(range.clone()), map.pin(range.clone()).map(drop)]
        {
            assert!(error_of(refused, &["range"]).kind() == ErrorKind::Config);
        }
    }
    let masked = Cache::builder().memory(1 << 20).disable(Feature::UserFaults).build().unwrap();
    let error =
        error_of(masked.memory_file_with("x", &mappable), &["cannot be mapped", "disabled"]);
    assert_eq!(error.kind(), ErrorKind::CannotMap);
}

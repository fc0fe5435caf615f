//! Pages of a map that the program discards with `madvise`: a clean page is read again, a dirty one
//! is an error, and nothing hangs.
//!
//! # Safety
//! Advises the kernel of pages of a map, and touches bytes of it.
#![allow(unsafe_code)]

use std::os::unix::process::ExitStatusExt;

use bifolio::{Cache, File};
use bifolio_testing::{Call, Fault};

use crate::setup::{Way, kernel_loads, load, log_to_stderr, run_child, store, touch};
use crate::support::{self, Faulty, PAGE, assert_same, error_of, read, read_all};

const PAGE_USIZE: usize = PAGE as usize;
const VARIABLE: &str = "BIFOLIO_TEST_DISCARDED";
/// Seconds after which a process counts as hung and is killed by SIGALRM.
const PATIENCE: u32 = 60;

/// Discards the bytes of pages.
fn discard(start: *const u8, pages: std::ops::Range<u64>) {
    let address = start.wrapping_add((pages.start * PAGE) as usize).cast_mut().cast();
    let length = ((pages.end - pages.start) * PAGE) as usize;
    // SAFETY: pages of a map, whose bytes a test does without.
    assert_eq!(unsafe { libc::madvise(address, length, libc::MADV_DONTNEED) }, 0);
}

fn open(way: Way, pages: usize, memory_bytes: u64) -> (Faulty, Cache, File) {
    let storage = Faulty::new(support::Way::Memory, pages * PAGE_USIZE, 5);
    let cache = way.mask(storage.builder(memory_bytes)).build().unwrap();
    let file = cache.open_backing(storage.backing.clone(), &way.options()).unwrap();
    (storage, cache, file)
}

/// Runs `test` in a separate process for each of the `ways`; `name` is that of the calling test.
fn for_each(name: &str, ways: &[Way], test: impl Fn(Way)) {
    if let Ok(number) = std::env::var(VARIABLE) {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(PATIENCE) };
        log_to_stderr();
        test(ways[number.parse::<usize>().unwrap()]);
        return println!("it has ended well");
    }
    for (number, way) in ways.iter().enumerate() {
        let output = run_child(name, VARIABLE, &number.to_string());
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("it has ended well"), "{way:?}: {}: {errors}", output.status);
    }
}

#[test]
fn clean_pages_that_were_discarded_are_read_again() {
    const NAME: &str = "discarded::clean_pages_that_were_discarded_are_read_again";
    for_each(NAME, &Way::all(), |way| {
        let (storage, cache, file) = open(way, 64, 1 << 20);
        let mut map = file.map_mut(0..file.len()).unwrap();
        let (start, mut bytes) = (map.as_mut_ptr(), storage.bytes.clone());
        for round in 0..3 {
            map.populate(0..map.len()).unwrap();
            store(start, 7 * PAGE + 9, &[round; 5]);
            bytes[7 * PAGE_USIZE + 9..][..5].fill(round);
            map.sync(0..map.len()).unwrap();
            discard(start, 0..64);
            assert_eq!(touch(start, 63 * PAGE), bytes[63 * PAGE_USIZE]);
            assert_same(&load(start, 0..32 * PAGE), &bytes[..32 * PAGE_USIZE]);
            assert_same(&read_all(&file), &bytes);
            discard(start, 0..64);
            assert_same(&read(&file, 20 * PAGE + 5, 9000), &bytes[20 * PAGE_USIZE + 5..][..9000]);
            let pin = file.pin(3 * PAGE..3 * PAGE + 10).unwrap();
            discard(start, 3..4);
            let mut found = [0; 10];
            pin.copy_to(0, &mut found).unwrap();
            assert_same(&found, &bytes[3 * PAGE_USIZE..][..10]);
            drop(pin);
            discard(start, 50..60);
            map.populate(50 * PAGE..60 * PAGE).unwrap();
            let is_known = kernel_loads(start, 55 * PAGE);
            assert!(is_known, "prefetch has brought it in");
            store(start, 56 * PAGE, &[round; 8]);
            bytes[56 * PAGE_USIZE..][..8].fill(round);
            file.sync_data().unwrap();
            assert_same(&storage.stored(), &bytes);
        }
        assert!(map.take_error().is_none());
        drop((map, file));
        cache.close().unwrap();
    });
}

#[test]
fn pages_of_a_memory_file_that_were_discarded_are_no_hang() {
    const NAME: &str = "discarded::pages_of_a_memory_file_that_were_discarded_are_no_hang";
    for_each(NAME, &Way::whole(), |way| {
        // All pages fit: none is discarded while it is being evicted, which is not supported.
        let cache = way.swapping(4 << 20);
        let file = way.memory_file(&cache, 300 * PAGE);
        let map = file.map(0..file.len()).unwrap();
        let zeros = vec![0; 300 * PAGE_USIZE];
        for _ in 0..3 {
            assert_same(&load(map.as_ptr(), 0..map.len()), &zeros);
            discard(map.as_ptr(), 0..300);
            assert_same(&read_all(&file), &zeros);
        }
        file.write_all_at(b"kept", 7 * PAGE).unwrap();
        discard(map.as_ptr(), 7..8);
        error_of(map.populate(7 * PAGE..8 * PAGE), &["28672"]);
        assert_eq!(read(&file, 7 * PAGE, 4), [0; 4]);
    });
}

#[test]
fn dirty_pages_that_were_discarded_are_an_error() {
    const NAME: &str = "discarded::dirty_pages_that_were_discarded_are_an_error";
    for_each(NAME, &Way::all(), |way| {
        let (storage, cache, file) = open(way, 64, 1 << 20);
        let map = file.map_mut(0..file.len()).unwrap();
        for page in [3, 10, 11] {
            file.write_all_at(b"dirty", page * PAGE).unwrap();
            discard(map.as_ptr(), page..page + 1);
        }
        // No thread waits for pages that cannot be filled, and nothing is written instead of them.
        error_of(file.sync_data(), &["discarded the page"]);
        assert_same(&storage.stored(), &storage.bytes);
        error_of(map.populate(3 * PAGE..4 * PAGE), &["12288", "discarded the page"]);
        assert_eq!(touch(map.as_ptr(), 3 * PAGE), storage.bytes[3 * PAGE_USIZE]);
        for page in [10, 11] {
            error_of(map.populate(page * PAGE..(page + 1) * PAGE), &["discarded the page"]);
        }
        error_of(file.sync_data(), &["discarded the page"]);
        file.sync_data().unwrap();
        assert_same(&read_all(&file), &storage.bytes);
        drop((map, file));
        cache.close().unwrap();
    });
}

/// The end of the file was never written out: only its length needs the storage to grow.
#[test]
fn a_dirty_end_that_was_discarded_keeps_the_length() {
    const NAME: &str = "discarded::a_dirty_end_that_was_discarded_keeps_the_length";
    for_each(NAME, &Way::whole(), |way| {
        let (storage, cache, file) = open(way, 2, 1 << 20);
        file.append(&[8; 2 * PAGE_USIZE + 100]).unwrap();
        let map = file.map(0..file.len()).unwrap();
        discard(map.as_ptr(), 4..5);
        // If the storage cannot grow, the page stays, and so does its error.
        storage.backing.inject(Fault::on(Call::SetLen).fails(libc::ENOSPC));
        error_of(map.populate(4 * PAGE..4 * PAGE + 100), &["change of length to 16484 bytes"]);
        error_of(file.sync_data(), &["discarded the page"]);
        error_of(map.populate(4 * PAGE..4 * PAGE + 100), &["discarded the page"]);
        error_of(file.sync_data(), &["discarded the page"]);
        file.sync_data().unwrap();
        let expected = [&storage.bytes[..], &[8; 2 * PAGE_USIZE], &[0; 100]].concat();
        assert_same(&read_all(&file), &expected);
        assert_same(&storage.stored(), &expected);
        drop((map, file));
        cache.close().unwrap();
    });
}

#[test]
fn a_touch_of_a_dirty_page_that_was_discarded_is_sigbus() {
    const NAME: &str = "discarded::a_touch_of_a_dirty_page_that_was_discarded_is_sigbus";
    die(NAME, "discarded the page", |file, start| {
        touch(start, 3 * PAGE);
        drop(file);
    });
}

#[test]
fn a_write_to_a_page_that_was_discarded_is_sigbus_no_hang() {
    const NAME: &str = "discarded::a_write_to_a_page_that_was_discarded_is_sigbus_no_hang";
    die(NAME, "inside a call of the cache", |file, _| {
        file.write_all_at(b"more", 3 * PAGE).unwrap()
    });
}

/// Runs `access` to page 3, which was dirty and discarded: the process is killed by SIGBUS, and the
/// log contains `needle`.
fn die(name: &str, needle: &str, access: impl Fn(File, *const u8)) {
    let ways = Way::whole();
    if let Ok(number) = std::env::var(VARIABLE) {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(PATIENCE) };
        log_to_stderr();
        let (_storage, _cache, file) = open(ways[number.parse::<usize>().unwrap()], 64, 1 << 20);
        let map = file.map_mut(0..file.len()).unwrap();
        file.write_all_at(b"dirty", 3 * PAGE).unwrap();
        discard(map.as_ptr(), 3..4);
        return access(file.clone(), map.as_ptr());
    }
    for (number, way) in ways.iter().enumerate() {
        // The thread that dies may do so before another one has written its line.
        let is_named = (0..5).any(|_| {
            let output = run_child(name, VARIABLE, &number.to_string());
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{way:?}: {errors}");
            errors.contains(needle)
        });
        assert!(is_named, "{way:?}: no line names {needle:?}");
    }
}

#[test]
fn pages_that_were_discarded_are_evicted_as_others_are() {
    const NAME: &str = "discarded::pages_that_were_discarded_are_evicted_as_others_are";
    for_each(NAME, &Way::all(), |way| {
        let (storage, cache, file) = open(way, 400, 4 << 20);
        let mut map = file.map_mut(0..file.len()).unwrap();
        let (start, mut bytes) = (map.as_mut_ptr(), storage.bytes.clone());
        map.populate(0..map.len()).unwrap();
        for page in (0..400).step_by(7) {
            store(start, page * PAGE, &[7; 8]);
            bytes[(page * PAGE) as usize..][..8].fill(7);
        }
        file.sync_data().unwrap();
        // Nothing is evicted before: what is thrown away while it is read for that is SIGBUS.
        for pages in [0..100, 150..151, 200..399] {
            discard(start, pages);
        }
        cache.set_memory(1 << 20).unwrap();
        assert!(cache.stats().maps.unmapped_pages > 0);
        assert_same(&read_all(&file), &bytes);
        assert_same(&load(start, 0..map.len()), &bytes);
        drop((map, file));
        cache.close().unwrap();
        assert_same(&storage.stored(), &bytes);
    });
}

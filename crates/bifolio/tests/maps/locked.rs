//! Pages that the program has locked in memory: they are read and evicted like others.
//!
//! # Safety
//! Locks pages of a map, which changes nothing that Rust relies on.
#![allow(unsafe_code)]

use crate::setup::{Way, load, run_child, store, word};
use crate::support::{self, Faulty, assert_same, directory, random_file};
use bifolio::Feature;
use rustix::mm::MlockFlags;
use std::sync::atomic::Ordering;

const PAGES: u64 = 2048;
const PAGE: u64 = 4096;

/// A batch of adjacent pages, one of which, in the middle, is locked.
#[test]
fn a_batch_with_locked_pages_loses_no_store() {
    for way in Way::whole() {
        let cache = way.swapping(4 << 20);
        let file = way.memory_file(&cache, PAGES * PAGE);
        let mut map = file.map_mut(0..PAGES * PAGE).unwrap();
        let start = map.as_mut_ptr();
        // Every 40th page: in most batches there is one, and it is not the first.
        for page in (20..400).step_by(40) {
            let address = start.wrapping_add((page * PAGE) as usize).cast();
            // SAFETY: a page of the map.
            unsafe { rustix::mm::mlock_with(address, PAGE as usize, MlockFlags::ONFAULT) }.unwrap();
        }
        for round in 1..4 {
            for page in 0..PAGES {
                let word = word(start, page * PAGE);
                let expected = if round == 1 { 0 } else { page * 10 + round - 1 };
                let found = word.swap(page * 10 + round, Ordering::Relaxed);
                assert_eq!(found, expected, "page {page} in round {round}, {way:?}");
            }
        }
        assert!(cache.stats().maps.unmapped_pages > PAGES, "{:?}", cache.stats());
    }
}

const NAME: &str = "locked::locked_memory_is_truncated_and_evicted_all_the_same";
const VARIABLE: &str = "BIFOLIO_TEST_LOCKED";

/// Truncates a file that is locked in memory, and evicts it; old bytes are never visible again.
fn use_locked_pages(way: Way) {
    let directory = directory();
    let (path, mut bytes) = random_file(&directory, "mapped", 200 * PAGE as usize);
    let builder = way.builder(512 << 10).memory_max(4 << 20).readahead_max(0);
    let cache = builder.build().unwrap();
    let file = cache.open(&path, &way.options().len_max(4 << 20)).unwrap();
    let mut map = file.map_mut(0..file.len()).unwrap();
    let start = map.as_mut_ptr();
    // SAFETY: the map's own addresses.
    unsafe { rustix::mm::mlock_with(start.cast(), bytes.len(), MlockFlags::ONFAULT) }.unwrap();
    // More than there is memory for.
    assert_same(&load(start, 0..map.len()), &bytes);
    for page in 0..200 {
        store(start, page * PAGE + 100, &page.to_ne_bytes());
        bytes[(page * PAGE + 100) as usize..][..8].copy_from_slice(&page.to_ne_bytes());
    }
    assert_same(&load(start, 0..map.len()), &bytes);
    file.evict(0..map.len()).unwrap();
    file.sync_data().unwrap();
    for pages in [150, 100, 3] {
        file.set_len(pages * PAGE).unwrap();
        file.set_len(200 * PAGE).unwrap();
        bytes[(pages * PAGE) as usize..].fill(0);
        assert_same(&load(start, 0..map.len()), &bytes);
        file.write_all_at(&[pages as u8; 5000], pages * PAGE).unwrap();
        bytes[(pages * PAGE) as usize..][..5000].fill(pages as u8);
        assert_same(&load(start, 0..map.len()), &bytes);
    }
    drop(map);
    drop(file);
    cache.close().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &bytes);
}

#[test]
fn locked_memory_is_truncated_and_evicted_all_the_same() {
    let ways = Way::with_and_without(Feature::VectoredUnmap);
    if let Ok(number) = std::env::var(VARIABLE) {
        // SAFETY: it changes nothing that is mapped.
        assert_eq!(unsafe { libc::mlockall(libc::MCL_FUTURE) }, 0);
        return use_locked_pages(ways[number.parse::<usize>().unwrap()]);
    }
    for (number, way) in ways.iter().enumerate() {
        use_locked_pages(*way);
        let output = run_child(NAME, VARIABLE, &number.to_string());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{way:?}: {}: {text}", output.status);
    }
}

/// Pages with different properties are separate mappings of the kernel, which copies over no border
/// between two of them.
#[test]
fn a_map_of_several_kernel_mappings_is_read_in_as_few_transfers() {
    for way in Way::whole() {
        let storage = Faulty::new(support::Way::Memory, 1024 * PAGE as usize, 3);
        let builder = storage.builder(16 << 20);
        let cache = way.mask(builder).build().unwrap();
        let mut requests = Vec::new();
        for is_split in [false, true] {
            let file = cache.open_backing(storage.backing.clone(), &way.options()).unwrap();
            let map = file.map(0..file.len()).unwrap();
            for page in (5..1024).step_by(97).filter(|_| is_split) {
                let address = map.as_ptr().wrapping_add((page * PAGE) as usize).cast_mut().cast();
                // SAFETY: a page of the map; it only stays out of core dumps.
                let answer = unsafe { libc::madvise(address, PAGE as usize, libc::MADV_DONTDUMP) };
                assert_eq!(answer, 0);
            }
            let before = cache.stats().storage.read_requests;
            map.populate(0..map.len()).unwrap();
            requests.push(cache.stats().storage.read_requests - before);
            assert_same(&load(map.as_ptr(), 0..map.len()), &storage.bytes);
            drop(map);
            file.close().unwrap();
        }
        assert_eq!(requests[0], requests[1], "{way:?}");
    }
}

/// Locking all future memory does not make reserved memory resident.
#[test]
fn with_mlockall_a_cache_stays_within_its_bound() {
    const NAME: &str = "locked::with_mlockall_a_cache_stays_within_its_bound";
    if std::env::var(VARIABLE).is_err() {
        let output = run_child(NAME, VARIABLE, "");
        let text = String::from_utf8_lossy(&output.stderr);
        return assert!(output.status.success(), "{}: {text}", output.status);
    }
    let resident_bytes = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    };
    let before_bytes = resident_bytes();
    // SAFETY: it changes nothing that is mapped.
    assert_eq!(unsafe { libc::mlockall(libc::MCL_FUTURE) }, 0);
    let cache = bifolio::Cache::builder().memory(1 << 20).memory_max(256 << 20).build().unwrap();
    for way in Way::whole() {
        let file = cache.memory_file_with("mapped", &way.options().len_max(256 << 20)).unwrap();
        file.set_len(10 * PAGE).unwrap();
        file.write_all_at(b"bytes", 3 * PAGE).unwrap();
    }
    let grown_bytes = resident_bytes() - before_bytes;
    assert!(grown_bytes < 64 << 20, "{grown_bytes} bytes");
}

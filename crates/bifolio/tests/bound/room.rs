//! Free memory below the bound is usable for pages of every size, however the bound was raised and
//! wherever the memory is.

use crate::support::{PAGE, directory, files_can_be_mapped, writable};
use bifolio::{Cache, File};
use fastrand::Rng;
use std::path::PathBuf;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// Creates a file of holes.
fn sparse_file(directory: &tempfile::TempDir, length: u64) -> PathBuf {
    let path = directory.path().join("sparse");
    std::fs::File::create(&path).unwrap().set_len(length).unwrap();
    path
}

/// Creates a cache whose calls give up after a short wait.
fn impatient(memory_bytes: u64, memory_bytes_max: u64) -> Cache {
    let builder = Cache::builder().memory(memory_bytes).memory_max(memory_bytes_max);
    builder.readahead_max(0).reclaim_wait_max(Duration::from_millis(300)).build().unwrap()
}

fn touch(file: &File, page: u64) {
    file.read_exact_at(&mut [0; 8], page * PAGE).unwrap();
}

#[test]
fn a_bound_that_is_raised_in_small_steps_is_used_to_its_end() {
    for (first, step, last) in [(4 * MIB, MIB, 60 * MIB), (MIB, 3 * MIB / 4, 16 * MIB)] {
        let directory = directory();
        let path = sparse_file(&directory, 2 * last);
        let cache = impatient(first, last);
        let file = cache.open(&path, &writable()).unwrap();
        let mut random = Rng::with_seed(1);
        for bound in (first..=last).step_by(step as usize) {
            cache.set_memory(bound).unwrap();
            // Enough to turn the cache over.
            for _ in 0..bound / PAGE {
                touch(&file, random.u64(..2 * last / PAGE));
            }
            let stats = cache.stats();
            assert!(stats.memory.used_bytes <= bound, "{stats:?}");
            assert!(stats.memory.used_bytes > bound / 8 * 7, "not all of it is used: {stats:?}");
        }
    }
}

#[test]
fn a_bound_that_grows_after_pins_kept_it_small_is_used_again() {
    const BOUND: u64 = 16 * MIB;
    for folio_bytes in [PAGE, 64 << 10] {
        let directory = directory();
        let path = sparse_file(&directory, 4 * BOUND);
        let cache = impatient(BOUND, BOUND);
        let held = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
        let pages = directory.path().join("pages");
        std::fs::File::create(&pages).unwrap().set_len(4 * BOUND).unwrap();
        let small = cache.open(&pages, &writable().folio_bytes(folio_bytes)).unwrap();
        for page in (0..4 * BOUND / PAGE).step_by(7) {
            touch(&small, page);
        }
        // One in each MiB, so that no chunk can be emptied.
        let pins = (BOUND..2 * BOUND).step_by(MIB as usize / 2).map(|at| held.pin(at..at + 8));
        let pins: Vec<_> = pins.map(Result::unwrap).collect();
        cache.set_memory(4 * MIB).unwrap();
        assert!(cache.stats().memory.used_bytes <= 4 * MIB);
        cache.set_memory(BOUND).unwrap();
        for page in 0..4 * BOUND / PAGE {
            touch(&small, page);
        }
        let stats = cache.stats();
        assert!(stats.memory.used_bytes > BOUND / 8 * 7, "not all of it is used: {stats:?}");
        assert!(stats.memory.used_bytes <= BOUND, "{stats:?}");
        drop(pins);
    }
}

#[test]
fn pages_of_maps_find_room_whatever_the_bound() {
    if !files_can_be_mapped() {
        return;
    }
    let directory = directory();
    let path = sparse_file(&directory, 4 * MIB);
    // Somewhere in there, descriptors run out with one page left.
    for bound in (332..340).chain(600..608).map(|kibibytes| kibibytes << 10) {
        let cache = impatient(bound, bound);
        let file = cache.open(&path, &writable().mappable(true)).unwrap();
        let pin = |page: u64| file.pin(page * PAGE..(page + 1) * PAGE);
        let mut pins: Vec<_> = (0..bound / PAGE).map_while(|page| pin(page).ok()).collect();
        let more = pins.len() as u64 + 1;
        pins.pop();
        let answer = file.read_exact_at(&mut [0; 8], more * PAGE);
        assert!(answer.is_ok(), "bound {bound}, after {more} pages: {answer:?}");
    }
}

#[test]
fn folios_that_cannot_leave_do_not_keep_the_rest_from_others() {
    for (bound, kept_bytes, wanted_bytes) in
        [(64 * MIB, 8 << 10, 4 << 10), (16 * MIB, 4 << 10, 16 << 10), (8 * MIB, 64 << 10, 4 << 10)]
    {
        let directory = directory();
        let path = sparse_file(&directory, bound);
        let cache = impatient(bound, bound);
        let kept = cache.memory_file_with("kept", &writable().folio_bytes(kept_bytes)).unwrap();
        for at in (0..bound / 16 * 15).step_by(kept_bytes as usize) {
            kept.write_all_at(&at.to_le_bytes(), at).unwrap();
        }
        // A few folios are left in each chunk.
        for start in (0..bound).step_by(512 << 10) {
            kept.punch_hole(start + kept_bytes..start + (512 << 10)).unwrap();
        }
        let other = cache.open(&path, &writable().folio_bytes(wanted_bytes)).unwrap();
        for page in 0..bound / PAGE {
            touch(&other, page);
        }
        let stats = cache.stats();
        assert!(stats.memory.free_bytes < bound / 4, "much of it is not used: {stats:?}");
        for start in (0..bound / 16 * 15).step_by(512 << 10) {
            let mut found = [0; 8];
            kept.read_exact_at(&mut found, start).unwrap();
            assert_eq!(u64::from_le_bytes(found), start);
        }
        // Those that have nowhere to go make room for one that needs a whole chunk.
        let chunk_bytes = bound / 32;
        let large = cache.memory_file_with("large", &writable().folio_bytes(chunk_bytes)).unwrap();
        large.write_all_at(&[1], 0).unwrap();
        for start in (0..bound / 16 * 15).step_by(512 << 10) {
            let mut found = [0; 8];
            kept.read_exact_at(&mut found, start).unwrap();
            assert_eq!(u64::from_le_bytes(found), start);
        }
    }
}

#[test]
fn large_folios_find_room_between_pages_that_cannot_leave() {
    const LARGE: u64 = 64 << 10;
    for bound in [MIB, 2 * MIB, 5 * MIB] {
        for stride in [8, 16] {
            let cache = impatient(bound, 16 * MIB);
            let kept = cache.memory_file("kept").unwrap();
            let pages = bound / PAGE * 7 / 8;
            for page in 0..pages {
                kept.write_all_at(&page.to_le_bytes(), page * PAGE).unwrap();
            }
            for first in (0..pages).step_by(stride) {
                kept.punch_hole((first + 1) * PAGE..(first + stride as u64) * PAGE).unwrap();
            }
            let large = cache.memory_file_with("large", &writable().folio_bytes(LARGE)).unwrap();
            for number in 0..bound / LARGE / 2 {
                let answer = large.write_all_at(&[number as u8; 9], number * LARGE);
                assert!(answer.is_ok(), "bound {bound}, {stride}, {number}: {answer:?}");
            }
            // And back: what large folios have left serves pages.
            large.set_len(0).unwrap();
            for page in 0..pages * 3 / 4 {
                let answer = kept.write_all_at(&page.to_le_bytes(), page * PAGE);
                assert!(answer.is_ok(), "bound {bound}, {stride}, page {page}: {answer:?}");
            }
            let mut found = [0; 8];
            for page in 0..pages * 3 / 4 {
                kept.read_exact_at(&mut found, page * PAGE).unwrap();
                assert_eq!(u64::from_le_bytes(found), page);
            }
            let stats = cache.stats();
            assert!(stats.memory.used_bytes <= bound, "{stats:?}");
        }
    }
}

#[test]
fn a_large_pinned_folio_blocks_no_small_pages() {
    for bound in [320 << 10, MIB, 2 * MIB] {
        let directory = directory();
        let path = sparse_file(&directory, 8 * MIB);
        let cache = impatient(bound, bound);
        let large = cache.memory_file_with("large", &writable().folio_bytes(64 << 10)).unwrap();
        large.set_len(MIB).unwrap();
        let pin = large.pin_mut(0..64 << 10).unwrap();
        let small = cache.open(&path, &writable()).unwrap();
        for page in 0..8 * MIB / PAGE {
            touch(&small, page);
        }
        drop(pin);
        assert!(cache.stats().memory.used_bytes <= bound);
    }
}

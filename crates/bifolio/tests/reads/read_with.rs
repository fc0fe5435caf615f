//! Reads in place with `read_with`: the result is always that of one state of the bytes.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::support::{
    FOLIO_SIZES, MEMORY_FOR_ALL, PAGE, assert_same, cache_of, directory, error_of, mappable, open,
    random_file, writable,
};
use bifolio::{Cache, ErrorKind, File, OpenOptions, PageView};

/// Returns the first word of the page if all words are equal.
fn word_of_all(page: &PageView<'_>) -> Result<u64, (u64, u64)> {
    let first = u64::from_le_bytes(page.array(0).unwrap());
    for at in (0..page.len()).step_by(8) {
        let word = u64::from_le_bytes(page.array(at).unwrap());
        if word != first {
            return Err((first, word));
        }
    }
    Ok(first)
}

fn words(word: u64, bytes: u64) -> Vec<u8> {
    word.to_le_bytes().repeat((bytes / 8) as usize)
}

#[test]
fn bytes_in_place_are_those_of_the_file_wherever_they_are() {
    let directory = directory();
    for folio_bytes in FOLIO_SIZES {
        let (path, bytes) = random_file(&directory, "file", 4 * folio_bytes as usize + 100);
        for is_mappable in [false, true] {
            let options = OpenOptions::new().folio_bytes(folio_bytes);
            let options = if is_mappable { mappable(options) } else { options };
            let cache = cache_of(MEMORY_FOR_ALL);
            let Ok(file) = cache.open(&path, &options) else { continue };
            // On a miss, on a hit, and after an eviction.
            for round in 0..6 {
                for range in [0..8, 5..4096, 4090..4096, 4 * folio_bytes..4 * folio_bytes + 100] {
                    let mut copy = vec![0; (range.end - range.start) as usize];
                    let read = |page: &PageView<'_>| {
                        let mut copy = vec![0; page.len()];
                        page.copy_to(0, &mut copy).map(|()| copy)
                    };
                    copy.copy_from_slice(&file.read_with(range.clone(), read).unwrap().unwrap());
                    assert_same(&copy, &bytes[range.start as usize..range.end as usize]);
                }
                let whole = file.read_with(0..folio_bytes, |page| {
                    page.compare(0..page.len(), &bytes[..folio_bytes as usize])
                });
                assert_eq!(whole.unwrap(), Some(std::cmp::Ordering::Equal), "{folio_bytes}");
                if round == 3 {
                    file.evict(0..file.len()).unwrap();
                }
            }
        }
    }
}

#[test]
fn ranges_that_cannot_be_pinned_cannot_be_read_in_place() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 10 * PAGE as usize + 100);
    let file = open(&cache_of(1 << 20), &path);
    for _ in 0..3 {
        file.read_with(0..8, |_| ()).unwrap();
        let error = error_of(file.read_with(4090..4100, |_| ()), &["file", "4090"]);
        assert_eq!(error.kind(), ErrorKind::PinSpansFolios);
        let end = 10 * PAGE..10 * PAGE + 101;
        let error = error_of(file.read_with(end, |_| ()), &["file", "40960"]);
        assert_eq!(error.kind(), ErrorKind::PastEnd);
        error_of(file.read_with(8..8, |_| ()), &["no bytes"]);
        #[expect(clippy::reversed_empty_ranges, reason = "a caller's mistake")]
        error_of(file.read_with(8..0, |_| ()), &["reversed"]);
        error_of(file.read_with(u64::MAX - 8..u64::MAX, |_| ()), &["2^63"]);
    }
}

#[test]
fn loads_past_the_end_of_the_range_return_none() {
    let cache = cache_of(1 << 20);
    let file = cache.memory_file("nodes").unwrap();
    file.write_all_at(&[1; 4096], 0).unwrap();
    let check = |page: &PageView<'_>| {
        assert_eq!(page.len(), 13);
        assert_eq!((page.array(12), page.array::<1>(13)), (Some([1]), None));
        assert_eq!(page.array::<1>(usize::MAX), None);
        assert_eq!((page.array(11), page.array::<2>(12)), (Some([1; 2]), None));
        assert_eq!((page.array(8), page.array::<5>(9)), (Some([1; 5]), None));
        assert_eq!((page.array(5), page.array::<8>(6)), (Some([1; 8]), None));
        assert_eq!(page.array::<8>(usize::MAX - 3), None);
        assert_eq!((page.array(13), page.array::<14>(0)), (Some([]), None));
        assert_eq!(page.copy_to(10, &mut [0; 4]), None);
        assert_eq!(page.copy_to(13, &mut []), Some(()));
        assert_eq!(page.compare(10..14, &[1; 4]), None);
        assert_eq!(page.compare(0..13, &[1; 12]), Some(std::cmp::Ordering::Greater));
        assert_eq!(page.compare(0..12, &[1; 13]), Some(std::cmp::Ordering::Less));
        assert_eq!(page.compare(0..12, &[1, 1, 2]), Some(std::cmp::Ordering::Less));
        assert_eq!(
            page.compare(0..9, &[1, 1, 1, 1, 1, 1, 1, 1, 0]),
            Some(std::cmp::Ordering::Greater)
        );
    };
    for _ in 0..3 {
        file.read_with(7..20, check).unwrap();
    }
}

#[test]
fn a_page_that_changes_at_each_attempt_is_read_from_a_copy() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 4 * PAGE as usize);
    let cache = cache_of(1 << 20);
    let file = cache.open(&path, &writable()).unwrap();
    for _ in 0..3 {
        file.read_with(0..8, |_| ()).unwrap();
    }
    let calls = Cell::new(0);
    let found = file.read_with(0..PAGE, |page| {
        calls.set(calls.get() + 1);
        let before = page.array::<8>(0);
        file.write_all_at(&words(calls.get(), PAGE), 0).unwrap();
        (before.map(u64::from_le_bytes), word_of_all(page))
    });
    let calls = calls.get();
    assert!((3..=8).contains(&calls), "{calls} calls");
    // The last one had a copy of what the one before had written.
    assert_eq!(found.unwrap(), (Some(calls - 1), Ok(calls - 1)));
}

/// A folio of the largest size is read where it lies, not from a copy.
#[test]
fn a_large_range_is_read_in_place() {
    let cache = cache_of(64 << 20);
    let folio_bytes = 2 << 20;
    let options = writable().folio_bytes(folio_bytes);
    let file = cache.memory_file_with("large", &options).unwrap();
    file.write_all_at(&words(7, folio_bytes), 0).unwrap();
    for range in [0..folio_bytes, 100 * PAGE..folio_bytes, 8..65 * PAGE] {
        let pin = file.pin(range.clone()).unwrap();
        let read = |page: &PageView<'_>| (page.as_ptr().addr(), word_of_all(page));
        let expected = (pin.as_ptr().addr(), Ok(7));
        assert_eq!(file.read_with(range.clone(), read).unwrap(), expected, "{range:?}");
    }
}

#[test]
fn a_large_copy_counts_in_the_bound() {
    let cache = cache_of(64 << 20);
    let folio_bytes = 2 << 20;
    let options = writable().folio_bytes(folio_bytes);
    let file = cache.memory_file_with("large", &options).unwrap();
    file.write_all_at(&words(0, folio_bytes), 0).unwrap();
    let before = cache.stats().memory.metadata_bytes;
    let attempts = Cell::new(0_u64);
    let (word, charged) = file
        .read_with(0..folio_bytes, |page| {
            // Each attempt in place finds a change.
            attempts.set(attempts.get() + 1);
            file.write_all_at(&words(attempts.get(), folio_bytes), 0).unwrap();
            (word_of_all(page), cache.stats().memory.metadata_bytes - before)
        })
        .unwrap();
    assert_eq!(word, Ok(attempts.get() - 1));
    // A thread that comes to another processor has lists made there, which count, too.
    let lists_max = 256 << 10;
    assert!((folio_bytes..folio_bytes + lists_max).contains(&charged), "{charged}");
    let after = cache.stats().memory.metadata_bytes;
    assert!(after < before + lists_max, "{before} {after}");
}

/// Runs `readers` threads, each until `write` has returned, which gets the number of reads.
fn read_beside(readers: usize, read: impl Fn() + Sync, write: impl FnOnce(&AtomicU64)) {
    let (ended, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..readers {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    read();
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        write(&reads);
        ended.store(true, Ordering::Relaxed);
    });
}

/// Writes until the readers have read `reads_min` times beside at least as many writes.
fn write_beside(reads: &AtomicU64, reads_min: u64, mut write: impl FnMut(u64)) {
    let mut number = 1;
    while number < reads_min || reads.load(Ordering::Relaxed) < reads_min {
        write(number);
        number += 1;
    }
}

#[test]
fn no_reader_sees_half_a_write() {
    let directory = directory();
    for (folio_bytes, is_mappable) in [(PAGE, false), (4 * PAGE, false), (PAGE, true)] {
        let (path, _) = random_file(&directory, "file", 4 * folio_bytes as usize);
        let cache = cache_of(1 << 20);
        let options = writable().folio_bytes(folio_bytes);
        let options = if is_mappable { mappable(options) } else { options };
        let Ok(file) = cache.open(&path, &options) else { continue };
        file.write_all_at(&words(0, folio_bytes), 0).unwrap();
        let torn = AtomicU64::new(0);
        let read = || {
            let found = file.read_with(0..folio_bytes, |page| {
                let found = word_of_all(page);
                torn.fetch_add(u64::from(found.is_err()), Ordering::Relaxed);
                found
            });
            let found = found.unwrap();
            assert!(found.is_ok(), "returned a torn page: {found:x?}");
        };
        read_beside(2, read, |reads| {
            write_beside(reads, 3000, |number| {
                file.write_all_at(&words(number, folio_bytes), 0).unwrap();
                if number % 64 == 0 {
                    let mut pin = file.pin_mut(0..folio_bytes).unwrap();
                    pin.copy_from(0, &words(!number, folio_bytes)).unwrap();
                }
            });
        });
        println!("{} torn pages were seen and discarded", torn.into_inner());
    }
}

#[test]
fn no_reader_sees_another_page_while_pages_are_evicted() {
    const PAGES: u64 = 512;
    let directory = directory();
    let (path, _) = random_file(&directory, "file", (PAGES * PAGE) as usize);
    let bytes: Vec<u8> = (0..PAGES).flat_map(|page| words(page, PAGE)).collect();
    std::fs::write(&path, bytes).unwrap();
    // A quarter of the file.
    let cache = cache_of(512 << 10);
    let file = open(&cache, &path);
    let read = || {
        let page = fastrand::u64(0..PAGES);
        let found = file.read_with(page * PAGE..(page + 1) * PAGE, word_of_all).unwrap();
        assert_eq!(found, Ok(page));
    };
    read_beside(2, read, |reads| {
        write_beside(reads, 3000, |_| {
            let page = fastrand::u64(0..PAGES);
            file.read_exact_at(&mut [0; 64], page * PAGE).unwrap();
            file.evict(page * PAGE..(page + 1) * PAGE).unwrap();
        });
    });
}

#[test]
fn a_truncation_beside_readers_leaves_words_zeros_or_an_error() {
    let directory = directory();
    for options in [writable(), mappable(writable())] {
        let (path, _) = random_file(&directory, "file", 2 * PAGE as usize);
        let cache: Cache = cache_of(1 << 20);
        let Ok(file) = cache.open(&path, &options) else { continue };
        file.write_all_at(&words(7, 2 * PAGE), 0).unwrap();
        let read = |file: &File| match file.read_with(PAGE..2 * PAGE, word_of_all) {
            Ok(word) => assert!([Ok(7), Ok(0)].contains(&word), "{word:?}"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::PastEnd, "{error}");
            }
        };
        read_beside(
            2,
            || read(&file),
            |reads| {
                write_beside(reads, 1500, |_| {
                    file.set_len(PAGE).unwrap();
                    file.set_len(2 * PAGE).unwrap();
                    file.write_all_at(&words(7, PAGE), PAGE).unwrap();
                });
            },
        );
    }
}

#[test]
fn a_view_has_numbers_slices_and_copies_within_its_range() {
    let cache = cache_of(1 << 20);
    let file = cache.memory_file("numbers").unwrap();
    file.write_all_at(&(1..=16).collect::<Vec<u8>>(), 4090).unwrap();
    let mut runs = 0;
    file.read_with(4096..=4105, |page| {
        runs += 1;
        assert_eq!(page.to_vec(), (7..=16).collect::<Vec<u8>>());
        assert_eq!((page.u16_le(8), page.u16_be(8)), (Some(0x100F), Some(0x0F10)));
        assert_eq!((page.u32_le(6), page.u32_be(6)), (Some(0x100F_0E0D), Some(0x0D0E_0F10)));
        assert_eq!((page.u64_le(3), page.u64_le(2)), (None, Some(0x100F_0E0D_0C0B_0A09)));
        assert_eq!(page.u64_be(0), Some(0x0708_090A_0B0C_0D0E));
        assert_eq!((page.u16_le(9), page.u32_be(usize::MAX)), (None, None));
        let part = page.slice(2..6).unwrap();
        assert_eq!((part.to_vec(), part.u16_le(3)), (vec![9, 10, 11, 12], None));
        assert!(part.slice(0..5).is_none() && page.slice(6..11).is_none());
        #[expect(clippy::reversed_empty_ranges, reason = "refused")]
        let reversed = page.slice(6..5);
        assert!(reversed.is_none() && page.slice(10..10).is_some_and(|empty| empty.len() == 0));
    })
    .unwrap();
    assert_eq!(runs, 1, "a closure may change what it captures");
}

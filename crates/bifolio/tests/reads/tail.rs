//! The end of a file: exact on the disk after a sync, zeros where it grew, for every length.

use crate::support::{
    FOLIO_SIZES, MEMORY_FOR_ALL, PAGE, assert_same, cache_of, directory, file_of, length_on_disk,
    open, read, read_all, writable,
};
use bifolio_testing::fill_bytes;

const LENGTHS: [usize; 14] =
    [0, 1, 511, 512, 513, 4095, 4096, 4097, 8191, 8193, 65535, 65537, 2097151, 2097153];

#[test]
fn after_a_sync_the_file_is_exactly_as_long_as_it_was_written() {
    let directory = directory();
    let cache = cache_of(MEMORY_FOR_ALL);
    for folio_bytes in FOLIO_SIZES {
        for length in LENGTHS {
            let path = directory.path().join(format!("{folio_bytes}-{length}"));
            let options = writable().create(true).folio_bytes(folio_bytes);
            let file = cache.open(&path, &options).unwrap();
            let bytes = fill_bytes(folio_bytes, length);
            file.write_all_at(&bytes, 0).unwrap();
            assert_eq!(file.len(), length as u64);
            file.sync_data().unwrap();
            assert_eq!(length_on_disk(&path), length as u64, "folios of {folio_bytes}");
            assert_same(&std::fs::read(&path).unwrap(), &bytes);
        }
    }
}

#[test]
fn a_tail_that_grows_byte_by_byte_is_exact_at_every_sync() {
    let directory = directory();
    let path = file_of(&directory, "grows", b"");
    let cache = cache_of(4 << 20);
    let file = open(&cache, &path);
    let bytes = fill_bytes(1, 10_000);
    let mut end = 0;
    for step in [1, 510, 1, 1, 510, 1, 3071, 1, 1, 4094, 1, 600, 100] {
        file.write_all_at(&bytes[end..end + step], end as u64).unwrap();
        end += step;
        file.sync_data().unwrap();
        assert_same(&std::fs::read(&path).unwrap(), &bytes[..end]);
    }
}

#[test]
fn a_tail_changed_in_place_does_not_change_the_length() {
    let directory = directory();
    let cache = cache_of(MEMORY_FOR_ALL);
    for folio_bytes in FOLIO_SIZES {
        for length in LENGTHS.into_iter().filter(|length| *length > 0) {
            let mut bytes = fill_bytes(7, length);
            let path = file_of(&directory, &format!("{folio_bytes}-{length}"), &bytes);
            let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
            let last = length as u64 - 1;
            file.pin_mut(last..last + 1).unwrap().copy_from(0, b"!").unwrap();
            bytes[length - 1] = b'!';
            file.sync_data().unwrap();
            assert_same(&std::fs::read(&path).unwrap(), &bytes);
        }
    }
}

#[test]
fn a_write_behind_the_end_leaves_zeros_between() {
    let directory = directory();
    let cache = cache_of(MEMORY_FOR_ALL);
    for folio_bytes in FOLIO_SIZES {
        for (old, position) in [(0, 1), (1, 512), (100, 4095), (513, 9000), (5000, 3 << 20)] {
            let start = fill_bytes(3, old);
            let path = file_of(&directory, &format!("{folio_bytes}-{old}"), &start);
            let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
            file.write_all_at(b"end", position as u64).unwrap();
            let expected = [&start, &vec![0; position - old], &b"end"[..]].concat();
            assert_same(&read_all(&file), &expected);
            file.sync_data().unwrap();
            assert_same(&std::fs::read(&path).unwrap(), &expected);
        }
    }
}

#[test]
fn truncated_bytes_read_as_zeros_after_growth() {
    let directory = directory();
    let cache = cache_of(MEMORY_FOR_ALL);
    for folio_bytes in FOLIO_SIZES {
        for (cut, dirty) in [(0, true), (1, false), (1, true), (4097, false), (20_000, true)] {
            let length = 150_001;
            let mut expected = fill_bytes(5, length);
            let path = file_of(&directory, &format!("{folio_bytes}-{cut}-{dirty}"), &expected);
            let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
            if dirty {
                expected = fill_bytes(6, length);
                file.write_all_at(&expected, 0).unwrap();
            } else {
                assert_same(&read_all(&file), &expected);
            }
            file.set_len(cut as u64).unwrap();
            assert_eq!((file.len(), length_on_disk(&path)), (cut as u64, cut as u64));
            assert_eq!(read(&file, cut as u64, 10), [], "bytes beyond the end");
            file.set_len(length as u64).unwrap();
            expected[cut..].fill(0);
            assert_same(&read_all(&file), &expected);
            file.sync_data().unwrap();
            assert_same(&std::fs::read(&path).unwrap(), &expected);
        }
    }
}

#[test]
fn truncated_bytes_read_as_zeros_after_a_write_beyond() {
    let directory = directory();
    let path = file_of(&directory, "file", &vec![1; 3 * PAGE as usize]);
    let cache = cache_of(4 << 20);
    let file = open(&cache, &path);
    file.write_all_at(&vec![2; 3 * PAGE as usize], 0).unwrap();
    file.set_len(100).unwrap();
    file.write_all_at(b"x", 2 * PAGE).unwrap();
    let expected = [&[2; 100][..], &[0; 2 * 4096 - 100], b"x"].concat();
    assert_same(&read_all(&file), &expected);
    file.sync_all().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &expected);
}

#[test]
fn the_disk_never_sees_a_file_longer_than_it_is() {
    let directory = directory();
    let path = file_of(&directory, "file", b"");
    let cache = cache_of(1 << 20);
    let file = open(&cache, &path);
    let mut end = 0;
    for step in 1..400_u64 {
        file.write_all_at(&fill_bytes(step, step as usize * 7), end).unwrap();
        end += step * 7;
        // Evictions and syncs write the tail out; neither may pad it.
        if step % 5 == 0 {
            file.sync_data().unwrap();
            assert_eq!(length_on_disk(&path), end);
        }
        assert!(length_on_disk(&path) <= end);
    }
}

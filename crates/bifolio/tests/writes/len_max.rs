//! Raising the maximum length of an open file: what was refused is accepted, other threads and
//! other handles see the same file throughout, and a refused raise changes nothing.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::support::{
    FOLIO_SIZES, PAGE, assert_same, cache_of, directory, error_of, file_of, files_can_be_mapped,
    mappable, read, read_all, writable,
};
use bifolio::{Cache, ErrorKind, File, OpenOptions, ReadRequest};
use bifolio_testing::{MemoryBacking, fill_bytes};

/// File of each kind, opened with `options` in a cache of 2 MiB.
fn for_each_kind(options: &OpenOptions, test: impl Fn(&Cache, &File)) {
    let directory = directory();
    let path = file_of(&directory, "disk", &[]);
    let swap = Cache::builder().memory(2 << 20).swap_directory(directory.path());
    let swapping = swap.build().unwrap();
    let cache = cache_of(2 << 20);
    test(&cache, &cache.open(&path, options).unwrap());
    let backing = Arc::new(MemoryBacking::new(Vec::new()));
    test(&cache, &cache.open_backing(backing, options).unwrap());
    test(&cache, &cache.memory_file_with("alone", options).unwrap());
    test(&swapping, &swapping.memory_file_with("swapped", options).unwrap());
}

fn is_too_long(error: &bifolio::Error, limit_bytes: u64) -> bool {
    let is_limit = error.to_string().contains(&format!("bytes, only to {limit_bytes} "));
    error.kind() == ErrorKind::TooLong && is_limit
}

#[test]
fn a_file_grows_past_the_old_limit_once_it_is_raised() {
    for folio_bytes in [4096, 64 << 10] {
        let old_bytes = 256 << 10;
        let options = writable().folio_bytes(folio_bytes).len_max(old_bytes);
        for_each_kind(&options, |_, file| {
            let other = file.clone();
            let bytes = fill_bytes(3, 700_000);
            let (before, after) = bytes.split_at(old_bytes as usize);
            file.append(before).unwrap();
            for refused in [
                file.append(&[1]).map(drop),
                file.set_len(old_bytes + 1),
                file.write_all_at(&[1; 2], old_bytes - 1),
            ] {
                let error = error_of(refused, &["raise_len_max", &old_bytes.to_string()]);
                assert!(is_too_long(&error, old_bytes));
            }
            file.raise_len_max(700_000).unwrap();
            assert_eq!((file.len_max(), other.len_max()), (700_000, 700_000));
            assert_eq!(other.append(after).unwrap(), old_bytes);
            let error = error_of(file.append(&[1]), &["700000"]);
            assert!(is_too_long(&error, 700_000));
            // Evicted where they can be, and read again.
            file.sync_data().unwrap();
            file.evict(0..1 << 40).unwrap();
            assert_same(&read_all(&other), &bytes);
            // Across the old limit, at the last byte, and nothing at the end.
            assert_same(&read(file, old_bytes - 10, 20), &bytes[old_bytes as usize - 10..][..20]);
            assert_eq!(read(file, 699_999, 20), [bytes[699_999]]);
            assert!(read(file, 700_000, 0).is_empty() && read(file, 700_000, 1).is_empty());
            let pin = file.pin(old_bytes..old_bytes + 100).unwrap();
            let mut pinned = [0; 100];
            pin.copy_to(0, &mut pinned).unwrap();
            assert_same(&pinned, &after[..100]);
            drop(pin);
            // A truncation and a growth leave zeros.
            file.set_len(old_bytes + 5).unwrap();
            file.set_len(600_000).unwrap();
            assert_same(&read(file, old_bytes, 5), &after[..5]);
            assert!(read(file, old_bytes + 5, 600_000).iter().all(|byte| *byte == 0));
            file.punch_hole(0..old_bytes + 5).unwrap();
            assert!(read_all(file).iter().all(|byte| *byte == 0));
        });
    }
}

#[test]
fn pages_beyond_the_first_limit_are_hits() {
    for_each_kind(&writable().len_max(2 << 20), |cache, file| {
        file.set_len(2 << 20).unwrap();
        file.raise_len_max(1 << 40).unwrap();
        let position = (4 << 20) + 5 * PAGE;
        file.write_all_at(&[7; 4096], position).unwrap();
        // The second use marks the page.
        for _ in 0..2 {
            read(file, position, 100);
        }
        let before = cache.stats();
        for length in [100, 4096] {
            assert_eq!(read(file, position, length), vec![7; length]);
        }
        let after = cache.stats();
        assert_eq!(after.reads.hits_optimistic - before.reads.hits_optimistic, 2);
        assert_eq!(
            (after.reads.hits_slow, after.reads.misses),
            (before.reads.hits_slow, before.reads.misses)
        );
    });
}

#[test]
fn no_limit_is_lowered_and_none_exceeds_the_format() {
    for_each_kind(&writable().len_max(1 << 20), |_, file| {
        for bytes in [0, 4096, 1 << 20] {
            file.raise_len_max(bytes).unwrap();
            assert_eq!(file.len_max(), 1 << 20);
        }
        for bytes in [(4 << 50) + 1, 1 << 63, u64::MAX] {
            let error =
                error_of(file.raise_len_max(bytes), &["len_max: ", "4 PiB", &bytes.to_string()]);
            assert_eq!(error.kind(), ErrorKind::Config);
            assert_eq!(file.len_max(), 1 << 20);
        }
        file.raise_len_max(4 << 50).unwrap();
        file.write_all_at(b"end", 1 << 30).unwrap();
        assert_eq!(read(file, 1 << 30, 9), b"end");
    });
}

#[test]
fn handles_that_cannot_grow_a_file_cannot_raise_its_limit() {
    let directory = directory();
    let path = file_of(&directory, "file", b"0123456789");
    let cache = cache_of(2 << 20);
    let options = OpenOptions::new().len_max(1 << 20);
    let reader = cache.open(&path, &options).unwrap();
    let error = error_of(reader.raise_len_max(1 << 21), &["file"]);
    assert_eq!(error.kind(), ErrorKind::NotOpenedFor);
    let writer = cache.open(&path, &options.clone().write(true)).unwrap();
    writer.raise_len_max(1 << 21).unwrap();
    writer.write_all_at(b"new", (1 << 21) - 3).unwrap();
    assert_eq!(read(&reader, (1 << 21) - 3, 9), b"new");
    let blind = cache.open(&path, &options.clone().read(false).write(true)).unwrap();
    for position in [0, 4096, (1 << 21) - 3] {
        for length in [0, 3] {
            let error = error_of(blind.read_at(&mut vec![0; length], position), &["reading"]);
            assert_eq!(error.kind(), ErrorKind::NotOpenedFor);
        }
    }
    // An open may ask for as much as the file has now.
    let third = cache.open(&path, &options.clone().len_max(1 << 21)).unwrap();
    assert_eq!((third.len_max(), read(&third, (1 << 21) - 3, 9)), (1 << 21, b"new".to_vec()));
    error_of(cache.open(&path, &options.len_max(1 << 22)), &["len_max", "2097152"]);
    cache.close().unwrap();
    let error = error_of(writer.raise_len_max(1 << 30), &[]);
    assert_eq!(error.kind(), ErrorKind::Closed);
    if files_can_be_mapped() {
        let cache = cache_of(2 << 20);
        let options = mappable(writable()).len_max(1 << 20);
        let mapped = cache.memory_file_with("mapped", &options).unwrap();
        let limit = mapped.len_max();
        mapped.raise_len_max(limit).unwrap();
        let error = error_of(mapped.raise_len_max(1 << 30), &["raise len_max"]);
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(mapped.len_max(), limit);
    }
}

/// The sizes at which a table fills whole pages and whole 2 MiB.
#[test]
fn limits_near_the_size_of_a_table_page_are_exact() {
    let cache = cache_of(64 << 20);
    for folio_bytes in FOLIO_SIZES {
        for around in [2_u64 << 20, 4 << 20, 1 << 30, 1 << 40] {
            for old in [around - PAGE, around - 1, around, around + 1, around + PAGE] {
                let options = writable().folio_bytes(folio_bytes).len_max(old);
                let file = cache.memory_file_with("sparse", &options).unwrap();
                file.write_all_at(b"old", old - 3).unwrap();
                let mut limit = old;
                for more in [1, PAGE, folio_bytes, 2 << 20, old] {
                    assert!(is_too_long(&file.append(b"x").unwrap_err(), limit));
                    limit += more;
                    file.raise_len_max(limit).unwrap();
                    file.write_all_at(b"x", limit - 1).unwrap();
                    assert_eq!(file.len(), limit);
                }
                assert_eq!(read(&file, old - 3, 3), b"old");
                assert_eq!(read(&file, limit - 1, 3), b"x");
                assert_eq!(read(&file, old + PAGE, 1), b"x");
            }
        }
    }
}

/// Storage of zeros that forgets writes.
#[derive(Debug, Default)]
struct Sparse(AtomicU64);

impl bifolio::backing::Backing for Sparse {
    fn read_at(
        &self,
        target: &mut bifolio::backing::IoBufMut<'_>,
        position: u64,
    ) -> std::io::Result<usize> {
        let left = self.0.load(Ordering::Relaxed).saturating_sub(position);
        let count = (target.len() as u64).min(left) as usize;
        target.copy_from_slice(0, &vec![0; count]);
        Ok(count)
    }

    fn write_at(
        &self,
        source: &bifolio::backing::IoBuf<'_>,
        position: u64,
    ) -> std::io::Result<usize> {
        self.0.fetch_max(position + source.len() as u64, Ordering::Relaxed);
        Ok(source.len())
    }

    fn sync_data(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> std::io::Result<u64> {
        Ok(self.0.load(Ordering::Relaxed))
    }

    fn set_len(&self, len_bytes: u64) -> std::io::Result<()> {
        self.0.store(len_bytes, Ordering::Relaxed);
        Ok(())
    }

    fn describe(&self) -> String {
        "sparse".to_owned()
    }
}

#[test]
fn a_full_cache_refuses_writes_but_no_raise() {
    let cache = cache_of(512 << 10);
    let backing = Arc::new(MemoryBacking::new(vec![2; 1 << 20]));
    let other = cache.open_backing(backing, &writable()).unwrap();
    let file = cache.memory_file_with("file", &writable().len_max(4096)).unwrap();
    file.set_len(4096).unwrap();
    let pages = (0..1 << 20).step_by(4096);
    let holds: Vec<_> =
        pages.map_while(|at| Some(other.pin(at..at + 4096).ok()?.into_owned())).collect();
    let used_bytes = cache.stats().memory.used_bytes;
    file.raise_len_max(1 << 30).unwrap();
    assert_eq!(cache.stats().memory.used_bytes, used_bytes);
    let error = file.append(b"no memory").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    assert_eq!(file.len(), 4096);
    drop(holds);
    assert_eq!(file.append(b"memory").unwrap(), 4096);
    assert_eq!(read(&file, 4096, 10), b"memory");
}

#[test]
fn tables_stay_within_the_bound_and_end_with_the_file() {
    let cache = cache_of(1 << 20);
    let empty_bytes = cache.stats().memory.metadata_bytes;
    let file = cache.open_backing(Arc::new(Sparse::default()), &writable().len_max(4096)).unwrap();
    let mut limit = 4096_u64;
    for step in 1..=4000_u64 {
        let position = step * (5 << 20);
        if position + 8 > limit {
            limit = position * 3;
            file.raise_len_max(limit).unwrap();
        }
        file.write_all_at(&step.to_le_bytes(), position).unwrap();
        let stats = cache.stats();
        assert!(stats.memory.used_bytes <= 1 << 20, "step {step}: {stats:?}");
    }
    assert_eq!(read(&file, 4000 * (5 << 20), 8), 4000_u64.to_le_bytes());
    assert!(cache.stats().memory.metadata_bytes > empty_bytes);
    file.close().unwrap();
    let after_bytes = cache.stats().memory.metadata_bytes;
    // Descriptors are never freed.
    assert!(after_bytes < empty_bytes + (64 << 10), "{empty_bytes} at first, {after_bytes} now");
}

/// Position `n` of the file holds `n`, once the length has passed it.
#[test]
fn a_limit_is_raised_under_readers_writers_appenders_and_syncs() {
    for_each_kind(&writable().len_max(64 << 10), |cache, file| {
        // What is only in memory must stay small.
        let end = if file.is_memory_file() { 512 << 10 } else { 8 << 20 };
        let word = |position: u64| (position / 8).to_le_bytes();
        let is_over = AtomicBool::new(false);
        let follower = file.clone();
        thread::scope(|scope| {
            let check = |file: &File, seed: u64| {
                let mut random = seed;
                while !is_over.load(Ordering::Relaxed) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed);
                    let words = file.len() / 8;
                    if words == 0 {
                        continue;
                    }
                    let position = (random >> 20) % words * 8;
                    if seed == 1 {
                        let pin = file.pin(position..position + 8).unwrap();
                        let mut found = [0; 8];
                        pin.copy_to(0, &mut found).unwrap();
                        assert_eq!(found, word(position));
                    } else if seed == 2 {
                        file.write_all_at(&word(position), position).unwrap();
                    } else {
                        assert_eq!(read(file, position, 8), word(position), "at {position}");
                    }
                }
            };
            scope.spawn(move || check(&follower, 1));
            scope.spawn(move || check(file, 2));
            scope.spawn(move || check(file, 3));
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    file.sync_data().unwrap();
                    let _ = file.evict(0..1 << 40).unwrap();
                }
            });
            let part = 8 << 10;
            while file.len() < end {
                let start = file.len();
                let bytes: Vec<u8> = (start..start + part).step_by(8).flat_map(word).collect();
                match file.append(&bytes) {
                    Ok(position) => assert_eq!(position, start),
                    Err(error) => {
                        assert!(is_too_long(&error, file.len_max()), "{error}");
                        file.raise_len_max(file.len_max() + (40 << 10)).unwrap();
                    }
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
        let expected: Vec<u8> = (0..end).step_by(8).flat_map(word).collect();
        assert_same(&read_all(file), &expected);
        let stats = cache.stats();
        assert!(stats.memory.used_bytes <= stats.memory.bound_bytes);
    });
}

#[test]
fn concurrent_raises_end_at_the_largest() {
    let cache = cache_of(2 << 20);
    for _ in 0..50 {
        let file = cache.memory_file_with("file", &writable().len_max(4096)).unwrap();
        thread::scope(|scope| {
            for raiser in 0..4_u64 {
                let file = &file;
                scope.spawn(move || {
                    for step in 1..50 {
                        let bytes = (step * 4 + raiser) << 20;
                        file.raise_len_max(bytes).unwrap();
                        assert!(file.len_max() >= bytes);
                        file.write_all_at(&[1], bytes - 1).unwrap();
                        file.punch_hole(bytes - 1..bytes).unwrap();
                    }
                });
            }
        });
        assert_eq!(file.len_max(), (49 * 4 + 3) << 20);
    }
}

#[test]
fn a_raised_limit_ends_with_the_last_handle() {
    let directory = directory();
    let path = file_of(&directory, "file", b"0123456789");
    let cache = Cache::builder().memory(4 << 20).build().unwrap();
    let options = writable().len_max(1 << 20);
    let file = cache.open(&path, &options).unwrap();
    file.raise_len_max(1 << 30).unwrap();
    file.close().unwrap();
    let file = cache.open(&path, &options).unwrap();
    assert_eq!(file.len_max(), 1 << 20);
    assert_eq!(read_all(&file), fs::read(&path).unwrap());
}

/// The table of a file describes at least 2 MiB, and not much more than `len_max`.
#[test]
fn positions_past_the_table_are_past_the_end() {
    for_each_kind(&writable().len_max(64 << 10), |_, file| {
        file.write_all_at(&[7; 6000], 0).unwrap();
        for position in [6000, 64 << 10, 2 << 20, (2 << 20) + 100, 1 << 40, (1 << 62) + 5000] {
            let mut buffers = [[0; 5000], [0; 5000]];
            assert_eq!(file.read_at(&mut buffers[0], position).unwrap(), 0);
            assert_eq!(file.try_read_at(&mut buffers[0], position).unwrap(), 0);
            let [first, second] = &mut buffers;
            let mut requests =
                [ReadRequest::new(first, position), ReadRequest::new(second, position + 4096)];
            file.read_many(&mut requests).unwrap();
            assert!(requests.iter().all(|request| *request.result.as_ref().unwrap() == 0));
            file.pin(position..position + 10).unwrap_err();
            let ranges = [position..position + 10, position + 4096..position + 4097];
            assert!(file.pin_many(&ranges).iter().all(Result::is_err));
            let end = position + 10_000;
            assert_eq!(file.residency(position..end).ok().map_or(0, |found| found.resident), 0);
            file.prefetch(position..end).unwrap();
            file.evict(position..end).unwrap();
            assert_eq!(file.seek_data(position).ok().flatten(), None);
        }
        assert_eq!(file.len(), 6000);
    });
}

#[test]
fn a_mappable_file_that_cannot_grow_names_no_call_that_it_refuses() {
    if !files_can_be_mapped() {
        return;
    }
    let directory = directory();
    let path = file_of(&directory, "mapped", b"0123456789");
    let cache = cache_of(4 << 20);
    let options = mappable(writable().len_max(1 << 20));
    let file = cache.open(&path, &options).unwrap();
    let error = error_of(file.set_len(1 << 21), &["mapped", "1048576", "OpenOptions::len_max"]);
    assert_eq!(error.kind(), ErrorKind::TooLong);
    assert!(!error.to_string().contains("raise_len_max"), "{error}");
    error_of(file.write_all_at(b"x", 1 << 20), &["OpenOptions::len_max of the first open"]);
}

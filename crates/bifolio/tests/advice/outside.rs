//! Files that another program changes: `invalidate`, `update` and `refresh_len`.

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread;

use bifolio::{Cache, ErrorKind, File, OpenOptions};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking, fill_bytes};

use crate::support::{
    PAGE, SMALL_FOLIO_SIZES, cache_of, directory, file_of, files_can_be_mapped, mappable, read,
    wait_until,
};

const MEMORY: u64 = 4 << 20;

fn outside(path: &std::path::Path) -> fs::File {
    fs::File::options().write(true).open(path).unwrap()
}

#[test]
fn invalidated_bytes_are_read_from_the_storage_again() {
    let (directory, cache) = (directory(), cache_of(MEMORY));
    for folio_bytes in SMALL_FOLIO_SIZES {
        let path = file_of(&directory, &folio_bytes.to_string(), &[1; 300_000]);
        let file = cache.open(&path, &OpenOptions::new().folio_bytes(folio_bytes)).unwrap();
        let pin = file.pin(100_000..100_100).unwrap();
        file.populate(..).unwrap();
        outside(&path).write_all_at(&[2; 300_000], 0).unwrap();
        assert_eq!(read(&file, 0, 300_000), [1; 300_000]);
        file.invalidate(0..0).unwrap();
        assert_eq!(read(&file, 100_000, 1), [1]);
        file.invalidate(100_001..100_002).unwrap();
        assert_eq!(read(&file, 100_000, 1), [2], "the whole page is forgotten");
        let unit = 100_000 / folio_bytes * folio_bytes;
        assert_eq!(read(&file, unit - 1, 1), [1], "its neighbour is not");
        file.invalidate(..).unwrap();
        assert_eq!(read(&file, 0, 300_000), [2; 300_000]);
        assert_eq!(pin.len(), 100);
    }
    let kind = |range| {
        let path = file_of(&directory, "kinds", &[1]);
        let file = cache.open(&path, &OpenOptions::new()).unwrap();
        file.invalidate(range).unwrap_err().kind()
    };
    assert_eq!(kind(0..u64::MAX), ErrorKind::OutOfRange);
    let memory = cache.memory_file("memory").unwrap();
    memory.write_all_at(&[7; 5000], 0).unwrap();
    memory.invalidate(..).unwrap();
    assert_eq!((read(&memory, 4999, 1), memory.refresh_len().unwrap()), (vec![7], 5000));
}

#[test]
fn bytes_that_were_not_written_out_stay() {
    let (directory, cache) = (directory(), cache_of(MEMORY));
    let path = file_of(&directory, "file", &[1; 3 * PAGE as usize]);
    let file = cache.open(&path, &OpenOptions::new().write(true)).unwrap();
    file.populate(..).unwrap();
    file.write_all_at(&[3; 10], PAGE).unwrap();
    outside(&path).write_all_at(&[2; 3 * PAGE as usize], 0).unwrap();
    assert_eq!(file.refresh_len().unwrap_err().kind(), ErrorKind::Unsupported);
    file.invalidate(..).unwrap();
    let bytes = read(&file, 0, 3 * PAGE as usize);
    let page = PAGE as usize;
    assert_eq!((bytes[0], bytes[page], bytes[page + 10], bytes[2 * page]), (2, 3, 1, 2));
    file.sync_data().unwrap();
    assert_eq!(file.refresh_len().unwrap(), 3 * PAGE);
}

/// Calls `tell` while a fill of the first page has read old bytes and is not complete: it waits for
/// the fill. Then calls `check`.
fn beside_a_fill(tell: impl Fn(&File) + Sync, check: impl Fn(&File)) {
    let inner = Arc::new(MemoryBacking::new(vec![1; 64 << 10]));
    let backing = Arc::new(FaultyBacking::over(inner));
    let gate = Gate::new();
    backing.inject(Fault::on(Call::Read).at(0..PAGE).held(&gate));
    let cache = Cache::builder().memory(MEMORY).readahead_max(0).build().unwrap();
    let file = cache.open_backing(backing, &OpenOptions::new()).unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(&file, 0, 1));
        gate.wait_for_arrivals(1);
        let telling = scope.spawn(|| tell(&file));
        thread::sleep(std::time::Duration::from_millis(50));
        assert!(!telling.is_finished(), "it does not wait for the fill");
        gate.open();
        telling.join().unwrap();
        reader.join().unwrap();
        check(&file);
    });
}

#[test]
fn a_fill_in_flight_is_waited_for_and_forgotten() {
    let is_gone = |file: &File| assert_eq!(file.residency(0..PAGE).unwrap().resident, 0);
    beside_a_fill(|file| file.invalidate(0..1).unwrap(), is_gone);
}

#[test]
fn an_update_waits_for_a_fill_in_flight() {
    let has_both = |file: &File| {
        assert_eq!(read(file, 0, 11), [[2; 10].as_slice(), &[1]].concat());
    };
    beside_a_fill(|file| file.update(&[2; 10], 0).unwrap(), has_both);
}

#[test]
fn bytes_written_past_the_cache_are_in_memory_without_a_read() {
    for folio_bytes in SMALL_FOLIO_SIZES {
        let inner = Arc::new(MemoryBacking::new(vec![1; 300_000]));
        let backing = Arc::new(FaultyBacking::over(Arc::clone(&inner) as _));
        let cache = Cache::builder().memory(MEMORY).readahead_max(0).build().unwrap();
        let options = OpenOptions::new().folio_bytes(folio_bytes).write(true);
        let file = cache.open_backing(Arc::clone(&backing) as _, &options).unwrap();
        let mut expected = vec![1; 50_000];
        let is_same = |expected: &[u8]| read(&file, 0, expected.len()) == expected;
        assert!(is_same(&expected));
        file.write_all_at(&[9; 5], 200_000).unwrap();
        let reads = backing.calls(Call::Read);
        for (position, length) in [(4090, 10), (8192, 4096), (30_001, 9000)] {
            let bytes = fill_bytes(position, length);
            expected[position as usize..][..length].copy_from_slice(&bytes);
            file.update(&bytes, position).unwrap();
        }
        // What was not written out stays.
        file.update(&[7; 3], 200_001).unwrap();
        assert!(is_same(&expected) && read(&file, 200_000, 5) == [9; 5], "{folio_bytes}");
        assert_eq!(backing.calls(Call::Read), reads, "nothing is read again");
        // Neither absent pages nor bytes behind the end are taken.
        file.update(&[8; 5], 299_998).unwrap();
        assert_eq!(read(&file, 299_990, 20), [1; 10]);
        assert_eq!(file.update(&[1], u64::MAX - 1).unwrap_err().kind(), ErrorKind::OutOfRange);
    }
}

/// A reader of one page sees all of an update or nothing.
#[test]
fn an_update_is_atomic_within_a_page() {
    let cache = cache_of(MEMORY);
    let backing = Arc::new(MemoryBacking::new(vec![0; PAGE as usize]));
    let file = cache.open_backing(backing, &OpenOptions::new()).unwrap();
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            (0..20_000_u32).for_each(|n| file.update(&[n as u8; PAGE as usize], 0).unwrap());
        });
        while !writer.is_finished() {
            let bytes = read(&file, 0, PAGE as usize);
            assert!(bytes.iter().all(|byte| *byte == bytes[0]));
        }
    });
}

#[test]
fn the_length_is_that_of_the_storage() {
    let (directory, cache) = (directory(), cache_of(MEMORY));
    for folio_bytes in SMALL_FOLIO_SIZES {
        let path = file_of(&directory, &format!("length-{folio_bytes}"), &[1; 100]);
        let options = OpenOptions::new().folio_bytes(folio_bytes).len_max(1 << 20);
        let file = cache.open(&path, &options).unwrap();
        assert_eq!(read(&file, 0, 200), [1; 100]);
        outside(&path).write_all_at(&[2; 200_000], 100).unwrap();
        assert_eq!((file.len(), file.refresh_len().unwrap()), (100, 200_100));
        let bytes = read(&file, 0, 300_000);
        assert!(bytes.len() == 200_100 && bytes[100..].iter().all(|byte| *byte == 2));
        outside(&path).set_len(5000).unwrap();
        assert_eq!((file.refresh_len().unwrap(), file.len()), (5000, 5000));
        outside(&path).set_len(9000).unwrap();
        assert_eq!(file.refresh_len().unwrap(), 9000);
        assert_eq!(read(&file, 4999, 9000), [&[2][..], &[0; 4000]].concat());
        outside(&path).set_len(3 << 20).unwrap();
        assert_eq!((file.refresh_len().unwrap(), file.len()), (3 << 20, 3 << 20));
    }
}

#[test]
fn pages_of_maps_are_read_again() {
    if !files_can_be_mapped() {
        return;
    }
    let (directory, cache) = (directory(), cache_of(MEMORY));
    let path = file_of(&directory, "map", &[1; 100_000]);
    let file = cache.open(&path, &mappable(OpenOptions::new())).unwrap();
    let map = file.map(..).unwrap();
    let byte = |position| map.pin(position..position + 1).unwrap().to_vec()[0];
    assert_eq!((byte(0), byte(99_999)), (1, 1));
    outside(&path).write_all_at(&[2; 100_000], 0).unwrap();
    file.invalidate(..).unwrap();
    wait_until("the map shows the new bytes", || byte(0) == 2 && byte(99_999) == 2);
    assert_eq!(read(&file, 50_000, 1), [2]);
}

#[test]
fn a_range_past_the_end_of_a_file_with_maps_has_nothing_to_forget() {
    if !files_can_be_mapped() {
        return;
    }
    let (directory, cache) = (directory(), cache_of(MEMORY));
    let path = file_of(&directory, "map", &[1; 100_000]);
    let file = cache.open(&path, &mappable(OpenOptions::new().write(true))).unwrap();
    let map = file.map(..).unwrap();
    // It stays mapped, and the file ends before it.
    let _pin = map.pin(90_000..90_001).unwrap();
    file.set_len(50_000).unwrap();
    file.invalidate(1 << 20..2 << 20).unwrap();
    file.update(&[2; 10_000], 1 << 20).unwrap();
    assert_eq!(read(&file, 49_999, 1), [1]);
}

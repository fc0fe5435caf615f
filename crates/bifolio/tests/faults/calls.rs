//! The n-th call of the storage fails: the error says what and where, nothing is lost, each handle
//! learns of a failed write-out once, and everything works again when the storage does.

use std::sync::Arc;
use std::thread;

use crate::support::{
    PAGE, assert_same, cache_of, directory, error_of, random_file, read, read_all, wait_for_stats,
    writable,
};
use bifolio::backing::DiskFile;
use bifolio::{Access, ErrorKind, OpenOptions};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking, fill_bytes};
use tempfile::TempDir;

const LENGTH: usize = 100_000;

/// Creates memory that can be made to fail, and its content.
fn memory() -> (Arc<MemoryBacking>, Arc<FaultyBacking>, Vec<u8>) {
    let bytes = fill_bytes(1, LENGTH);
    let memory = Arc::new(MemoryBacking::new(bytes.clone()));
    (memory.clone(), Arc::new(FaultyBacking::over(memory)), bytes)
}

/// Creates a file on the disk that can be made to fail; unlike memory, it can be opened again.
fn disk(directory: &TempDir) -> (std::path::PathBuf, Arc<FaultyBacking>, Vec<u8>) {
    let (path, bytes) = random_file(directory, "file", LENGTH);
    let options = OpenOptions::new().write(true);
    let file = DiskFile::open(&path, &options).unwrap();
    (path, Arc::new(FaultyBacking::new(file)), bytes)
}

#[track_caller]
fn assert_writeback(result: bifolio::Result<()>, position_bytes: u64, errno: i32) {
    let error = error_of(result, &["write-back", &position_bytes.to_string()]);
    assert_eq!(error.kind(), ErrorKind::Writeback, "{error:?}");
    assert!(error.to_string().contains(": write of "), "{error}");
    assert_eq!(error.range().unwrap().start, position_bytes);
    assert_eq!(error.raw_os_error(), Some(errno));
}

#[test]
fn a_read_that_fails_names_its_position_and_affects_no_other() {
    let (_, backing, bytes) = memory();
    let cache = cache_of(1 << 20);
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    backing.inject(Fault::on(Call::Read).at(8192..8193).forever().fails(libc::EIO));
    for _ in 0..3 {
        let error = error_of(file.read_at(&mut [0; 100], 8200), &["position 8192", "os error 5"]);
        assert!(error.to_string().contains(": read of "), "{error}");
        assert_eq!((error.kind(), error.range()), (ErrorKind::Io, Some(8192..8192 + PAGE)));
        // The pages before and behind are fine, and a long read stops before the bad one.
        assert_same(&read(&file, 12288, 5000), &bytes[12288..17288]);
        assert_same(&read(&file, 0, LENGTH), &bytes[..8192]);
    }
    backing.heal();
    assert_same(&read_all(&file), &bytes);
    assert_eq!(cache.stats().memory.dirty_bytes, 0);
}

#[test]
fn a_read_gives_the_bytes_before_the_fault() {
    let (_, backing, bytes) = memory();
    let cache = cache_of(1 << 20);
    let file = cache.open_backing(backing.clone(), &writable().folio_bytes(16 << 10)).unwrap();
    file.set_access(Access::Random);
    // The whole run, then what is left of it behind the first folio, then the second by itself.
    let fault = Fault::on(Call::Read).at(16 << 10..(16 << 10) + 1).times(3);
    backing.inject(fault.fails(libc::EIO));
    let count = file.read_at(&mut [0; LENGTH], 0).unwrap();
    assert_eq!(count, 16 << 10, "what could be read");
    assert_eq!(backing.struck(), 3);
    assert_same(&read_all(&file), &bytes);
}

#[test]
fn short_interrupted_and_refused_transfers_are_continued() {
    for folio_bytes in [PAGE, 64 << 10] {
        let (memory, backing, bytes) = memory();
        let cache = cache_of(1 << 20);
        let options = writable().folio_bytes(folio_bytes);
        let file = cache.open_backing(backing.clone(), &options).unwrap();
        for call in [Call::Read, Call::Write] {
            backing.inject(Fault::on(call).times(5).fails(libc::EINTR));
            backing.inject(Fault::on(call).nth(7).times(3).fails(libc::EAGAIN));
            backing.inject(Fault::on(call).nth(11).times(4).short_by(1000));
            backing.inject(Fault::on(call).nth(15).times(2).short_by(4095));
        }
        assert_same(&read_all(&file), &bytes);
        let bytes = fill_bytes(2, LENGTH);
        file.write_all_at(&bytes, 0).unwrap();
        backing.inject(Fault::on(Call::SyncData).times(2).fails(libc::EINTR));
        file.sync_data().unwrap();
        assert_same(&memory.bytes(), &bytes);
        assert!(backing.struck() >= 14, "only {} faults struck", backing.struck());
    }
}

#[test]
fn every_page_may_fail_once_and_two_syncs_bring_everything_home() {
    for nth in 1..=10 {
        let directory = directory();
        let (path, backing, _) = disk(&directory);
        let cache = cache_of(1 << 20);
        let file = cache.open_backing(backing.clone(), &writable()).unwrap();
        let bytes = fill_bytes(nth, 10 * PAGE as usize);
        file.write_all_at(&bytes, 0).unwrap();
        // All leave in one transfer; when that has failed, each leaves by itself.
        let place = (nth - 1) * PAGE..(nth - 1) * PAGE + 1;
        backing.inject(Fault::on(Call::Write).at(place).times(2).fails(libc::EIO));
        let error = error_of(file.sync_data(), &["file", "os error 5"]);
        assert_eq!(error.kind(), ErrorKind::Writeback, "{error:?}");
        assert_eq!(cache.stats().memory.dirty_bytes, PAGE, "one page stays dirty, and only one");
        assert_same(&read(&file, 0, bytes.len()), &bytes);
        file.sync_data().unwrap();
        assert_eq!(cache.stats().memory.dirty_bytes, 0);
        assert_same(&std::fs::read(&path).unwrap()[..bytes.len()], &bytes);
    }
}

#[test]
fn every_handle_open_at_the_time_is_told_once_by_its_next_sync() {
    let directory = directory();
    let (path, backing, mut bytes) = disk(&directory);
    let cache = cache_of(1 << 20);
    let first = cache.open_backing(backing.clone(), &writable()).unwrap();
    let second = cache.open(&path, &writable()).unwrap();
    let clone = first.clone();
    backing.inject(Fault::on(Call::Write).fails(libc::ENOSPC));
    first.write_at(b"precious", 4096).unwrap();
    bytes[4096..4104].copy_from_slice(b"precious");
    assert_writeback(first.sync_data(), 4096, libc::ENOSPC);
    let late = cache.open(&path, &writable()).unwrap();
    late.sync_data().unwrap();
    first.sync_data().unwrap();
    clone.sync_all().unwrap();
    // The bytes are safe by now, but this handle has not been told yet.
    assert_writeback(second.sync_all(), 4096, libc::ENOSPC);
    second.sync_all().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &bytes);
    assert_eq!(cache.stats().storage.write_errors, 1);
}

#[test]
fn no_sync_succeeds_while_a_page_cannot_be_written() {
    let (memory, backing, mut bytes) = memory();
    let cache = cache_of(1 << 20);
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    backing.inject(Fault::on(Call::Write).at(8192..8193).forever().fails(libc::EIO));
    file.write_all_at(&[9; 3 * 4096], 4096).unwrap();
    bytes[4096..4 * 4096].fill(9);
    for _ in 0..5 {
        assert_writeback(file.sync_data(), 8192, libc::EIO);
        assert_eq!(cache.stats().memory.dirty_bytes, PAGE);
    }
    error_of(cache.close(), &["8192"]);
    // Closing failed: the cache is as usable as before.
    assert_same(&read_all(&file), &bytes);
    file.write_at(&[9; 10], 5000).unwrap();
    backing.heal();
    // The failure during the close is news to the handle; then all is well.
    assert_writeback(file.sync_data(), 8192, libc::EIO);
    file.sync_data().unwrap();
    assert_same(&memory.bytes(), &bytes);
    cache.close().unwrap();
}

#[test]
fn two_syncs_of_one_handle_both_fail_with_the_write() {
    for _ in 0..20 {
        let (_, backing, _) = memory();
        let cache = cache_of(1 << 20);
        let file = cache.open_backing(backing.clone(), &writable()).unwrap();
        let gate = Gate::new();
        backing.inject(Fault::on(Call::Write).forever().held(&gate));
        backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
        file.write_at(b"x", 0).unwrap();
        let results = thread::scope(|scope| {
            let first = scope.spawn(|| file.sync_data());
            gate.wait_for_arrivals(1);
            // The page is on its way; this one can only wait for it.
            let second = scope.spawn(|| file.clone().sync_data());
            while cache.stats().storage.written_folios == 0 && !second.is_finished() {
                thread::sleep(std::time::Duration::from_millis(2));
                gate.open();
            }
            [first.join().unwrap(), second.join().unwrap()]
        });
        for result in results {
            assert!(result.is_err(), "a sync succeeded, and the page is still dirty");
        }
    }
}

#[test]
fn a_write_out_that_fails_during_reclaim_keeps_the_page() {
    let directory = directory();
    let (path, backing, mut bytes) = disk(&directory);
    let cache = cache_of(256 << 10);
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    let (other_path, other_bytes) = random_file(&directory, "other", 1 << 20);
    let other = cache.open(&other_path, &writable()).unwrap();
    backing.inject(Fault::on(Call::Write).forever().fails(libc::ENOSPC));
    file.write_all_at(&[7; 4 * 4096], 4096).unwrap();
    bytes[4096..5 * 4096].fill(7);
    // Four times what fits: the dirty pages are in the way again and again.
    assert_same(&read_all(&other), &other_bytes);
    // The flusher was told, and tries in its own time.
    wait_for_stats(&cache, "a thread tries to write them out and fails", |stats| {
        stats.storage.write_errors > 0 && stats.memory.dirty_bytes == 4 * PAGE
    });
    assert_same(&read_all(&file), &bytes);
    assert_writeback_of_any(file.sync_data(), libc::ENOSPC);
    backing.heal();
    // A write-out that failed between the sync and the healing is reported by one more sync.
    let _ = file.sync_data();
    file.sync_data().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &bytes);
}

#[track_caller]
fn assert_writeback_of_any(result: bifolio::Result<()>, errno: i32) {
    let error = error_of(result, &["write-back"]);
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::Writeback, Some(errno)));
}

#[test]
fn a_file_full_of_unwritable_pages_says_so_and_recovers() {
    let (memory, backing, _) = memory();
    let cache = cache_of(256 << 10);
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    backing.inject(Fault::on(Call::Write).forever().fails(libc::ENOSPC));
    let bytes = fill_bytes(3, 1 << 20);
    let mut written = 0;
    let error = loop {
        match file.write_at(&bytes[written..written + 4096], written as u64) {
            Ok(count) => written += count,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Unwritable, "{error:?}");
    assert!(error.to_string().contains(&format!(": {written} bytes wait for")), "{error}");
    assert_eq!(error.range().unwrap().start, written as u64, "{error}");
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    assert_same(&read(&file, 0, written), &bytes[..written]);
    // Part of a page is refused, too, and the page does not stay beyond the end of the file.
    let behind = written as u64 + 40_000;
    error_of(file.write_at(b"part", behind), &["os error 28"]);
    let outcome = file.evict(written as u64..u64::MAX >> 1).unwrap();
    assert_eq!((outcome.folios, outcome.kept.total()), (0, 0), "{outcome:?}");
    backing.heal();
    file.write_all_at(&bytes[written..], written as u64).unwrap();
    assert_writeback_of_any(file.sync_data(), libc::ENOSPC);
    file.sync_data().unwrap();
    assert_same(&memory.bytes(), &bytes);
}

#[test]
fn a_change_of_length_that_fails_changes_nothing() {
    let (memory, backing, mut bytes) = memory();
    let cache = cache_of(1 << 20);
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    file.write_all_at(&[5; 9000], 50_000).unwrap();
    bytes[50_000..59_000].fill(5);
    for length in [0, 50_001, 1 << 30] {
        backing.inject(Fault::on(Call::SetLen).fails(libc::EIO));
        let error = error_of(file.set_len(length), &[&length.to_string(), "os error 5"]);
        assert_eq!(error.kind(), ErrorKind::Io);
        let operation = format!(": change of length to {length} bytes failed");
        assert!(error.to_string().contains(&operation), "{error}");
        assert_eq!(file.len(), LENGTH as u64);
        assert_same(&read_all(&file), &bytes);
    }
    file.sync_data().unwrap();
    assert_same(&memory.bytes(), &bytes);
}

#[test]
fn pages_written_out_during_a_failed_truncation_survive() {
    let (memory, backing, mut bytes) = memory();
    let cache = cache_of(256 << 10);
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    file.write_all_at(&[5; 9000], 50_000).unwrap();
    bytes[50_000..59_000].fill(5);
    let gate = Gate::new();
    backing.inject(Fault::on(Call::SetLen).held(&gate));
    backing.inject(Fault::on(Call::SetLen).fails(libc::EIO));
    thread::scope(|scope| {
        let cut = scope.spawn(|| file.set_len(100));
        gate.wait_for_arrivals(1);
        // The truncation is in progress, and no thread knows yet that it will fail.
        let sync = scope.spawn(|| file.sync_data());
        thread::sleep(std::time::Duration::from_millis(20));
        gate.open();
        error_of(cut.join().unwrap(), &["100"]);
        sync.join().unwrap().unwrap();
    });
    assert_eq!(file.len(), LENGTH as u64);
    assert_same(&read_all(&file), &bytes);
    file.sync_data().unwrap();
    assert_same(&memory.bytes(), &bytes);
}

#[test]
fn pages_unwritten_at_close_are_found_by_the_next_open() {
    let directory = directory();
    let (path, backing, mut bytes) = disk(&directory);
    let cache = cache_of(1 << 20);
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
    file.write_all_at(&[8; 5000], LENGTH as u64 - 1000).unwrap();
    bytes.resize(LENGTH + 4000, 0);
    bytes[LENGTH - 1000..].fill(8);
    drop(file);
    assert!(cache.stats().memory.dirty_bytes > 0, "they were thrown away");
    error_of(cache.close(), &["os error 5"]);
    let again = cache.open(&path, &writable()).unwrap();
    assert_same(&read_all(&again), &bytes);
    backing.heal();
    again.sync_data().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &bytes);
    cache.close().unwrap();
}

#[test]
fn pages_without_a_handle_go_home_when_the_cache_closes() {
    let directory = directory();
    let (path, backing, mut bytes) = disk(&directory);
    let cache = cache_of(1 << 20);
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
    file.write_at(b"late", 70_000).unwrap();
    bytes[70_000..70_004].copy_from_slice(b"late");
    drop(file);
    backing.heal();
    cache.close().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &bytes);
}

#[test]
fn a_flush_that_fails_is_the_callers_to_know() {
    let (_, backing, _) = memory();
    let cache = cache_of(1 << 20);
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    file.write_at(b"x", 0).unwrap();
    backing.inject(Fault::on(Call::SyncData).fails(libc::EIO));
    let error =
        error_of(file.sync_data(), &["faulty memory", ": sync of data failed", "os error 5"]);
    assert_eq!(error.kind(), ErrorKind::Io);
    backing.inject(Fault::on(Call::SyncAll).fails(libc::ENOSPC));
    let error = error_of(file.sync_all(), &[": sync failed", "os error 28"]);
    assert_eq!(error.kind(), ErrorKind::Io);
    backing.inject(Fault::on(Call::SyncData).fails(libc::EIO));
    error_of(cache.close(), &["os error 5"]);
    file.sync_all().unwrap();
}

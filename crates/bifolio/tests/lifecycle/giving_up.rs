//! `File::close`, and discarding bytes that storage refuses.

use std::sync::Arc;
use std::time::Duration;

use bifolio::{Cache, ErrorKind};
use bifolio_testing::{Call, CrashingBacking, Fault, FaultyBacking};

use crate::support::{
    Faulty, PAGE, Way, assert_same, error_of, read_all, wait_for_stats, writable,
};

const LENGTH: usize = 10 * PAGE as usize + 100;

fn setup() -> (Faulty, Cache) {
    let faulty = Faulty::new(Way::Memory, LENGTH, 7);
    let cache = faulty.builder(4 << 20).build().unwrap();
    (faulty, cache)
}

fn refuse_writes(faulty: &Faulty) {
    faulty.backing.inject(Fault::on(Call::Write).forever().fails(libc::ENOSPC));
}

#[test]
fn a_file_that_is_closed_is_durable() {
    let (faulty, cache) = setup();
    let file = faulty.open(&cache);
    file.write_at(b"written", PAGE).unwrap();
    file.close().unwrap();
    assert_eq!(&faulty.stored()[4096..4103], b"written");
    assert_eq!(faulty.backing.calls(Call::SyncData), 1);
    let file = faulty.open(&cache);
    file.write_at(b"again", PAGE).unwrap();
    file.sync_data().unwrap();
    file.clone().close().unwrap();
    file.close().unwrap();
    assert_eq!(faulty.backing.calls(Call::SyncData), 2, "nothing was left to flush");
    cache.close().unwrap();
}

#[test]
fn pages_of_a_failed_close_are_tried_by_the_cache() {
    let (faulty, cache) = setup();
    let file = faulty.open(&cache);
    refuse_writes(&faulty);
    file.write_at(b"written", PAGE).unwrap();
    let error = error_of(file.close(), &["4096", "os error 28"]);
    assert_eq!(error.kind(), ErrorKind::Writeback, "{error:?}");
    let error = error_of(cache.close(), &["4096 bytes are not written", "os error 28"]);
    assert_eq!(error.kind(), ErrorKind::Close, "{error:?}");
    assert_eq!(error.to_string().matches("bytes are not written").count(), 1, "{error}");
    faulty.backing.heal();
    cache.close().unwrap();
    assert_eq!(&faulty.stored()[4096..4103], b"written");
}

/// On a device that answers late, a close that tried everything again in its drop would take twice
/// as long to fail.
#[test]
fn a_close_that_fails_asks_the_device_only_once() {
    for call in [Call::Write, Call::SyncData] {
        let (faulty, cache) = setup();
        let file = faulty.open(&cache);
        faulty.backing.inject(Fault::on(call).forever().fails(libc::EIO));
        for page in [1, 3, 5] {
            file.write_at(b"written", page * PAGE).unwrap();
        }
        error_of(file.close(), &["os error 5"]);
        let (writes, flushes) = (faulty.backing.calls(Call::Write), faulty.backing.calls(call));
        assert_eq!((writes, flushes), if call == Call::Write { (3, 3) } else { (3, 1) });
        error_of(cache.close(), &["os error 5"]);
        faulty.backing.heal();
        cache.close().unwrap();
        assert_eq!(&faulty.stored()[5 * 4096..][..7], b"written");
    }
}

#[test]
fn a_clone_that_outlives_a_failed_close_tries_anew() {
    let (faulty, cache) = setup();
    let file = faulty.open(&cache);
    refuse_writes(&faulty);
    file.write_at(b"written", PAGE).unwrap();
    error_of(file.clone().close(), &["os error 28"]);
    faulty.backing.heal();
    drop(file);
    assert_eq!(&faulty.stored()[4096..4103], b"written");
    cache.close().unwrap();
}

/// Returns `true` if the cache can be closed after this, and what it costs.
#[test]
fn an_unwritable_file_blocks_no_close_once_it_is_given_up() {
    let (faulty, cache) = setup();
    let file = faulty.open(&cache);
    assert_same(&read_all(&file), &faulty.bytes);
    file.write_at(b"reached the device", 3 * PAGE).unwrap();
    file.sync_data().unwrap();
    refuse_writes(&faulty);
    file.write_at(&[1; 2 * PAGE as usize], 5 * PAGE).unwrap();
    // In the last page, and beyond the end.
    file.write_all_at(&[2; 3 * PAGE as usize], LENGTH as u64 - 50).unwrap();
    error_of(cache.close(), &["os error 28"]);
    error_of(cache.close(), &["os error 28"]);
    let grown_bytes = 3 * PAGE - 50;
    assert_eq!(file.len(), LENGTH as u64 + grown_bytes);
    assert_eq!(file.discard_dirty().unwrap(), 2 * PAGE + 100 + grown_bytes);
    assert_eq!(cache.stats().memory.dirty_bytes, 0);
    let mut expected = faulty.bytes.clone();
    expected[3 * PAGE as usize..][..18].copy_from_slice(b"reached the device");
    assert_same(&read_all(&file), &expected);
    assert_eq!(file.discard_dirty().unwrap(), 0);
    // As good as new, once there is room.
    faulty.backing.heal();
    file.write_at(b"far beyond the end", LENGTH as u64 + PAGE).unwrap();
    cache.close().unwrap();
    expected.resize(LENGTH + PAGE as usize, 0);
    expected.extend(b"far beyond the end");
    assert_same(&faulty.stored(), &expected);
}

#[test]
fn bytes_past_the_storage_are_given_up_even_if_its_length_is_unknown() {
    let (faulty, cache) = setup();
    let file = faulty.open(&cache);
    file.append(&[1; 3 * PAGE as usize]).unwrap();
    faulty.backing.inject(Fault::on(Call::Len).fails(libc::EIO));
    error_of(file.discard_dirty(), &["query of the length", "os error 5"]);
    assert_same(&read_all(&file), &faulty.bytes);
    file.close().unwrap();
    assert_same(&faulty.stored(), &faulty.bytes);
}

#[test]
fn a_file_without_a_handle_is_opened_again_to_be_given_up() {
    let faulty = Faulty::new(Way::Threads, LENGTH, 7);
    let cache = faulty.builder(4 << 20).build().unwrap();
    let (others, _) = setup();
    let open = others.open(&cache);
    for faulty in [&faulty, &others] {
        refuse_writes(faulty);
    }
    let file = faulty.open(&cache);
    file.write_at(&[1; 5000], PAGE).unwrap();
    // In the last page, of which the file has 100 bytes.
    file.write_at(&[1; 10], LENGTH as u64 - 10).unwrap();
    open.write_at(b"kept", 0).unwrap();
    drop(file);
    error_of(cache.close(), &["os error 28"]);
    let again = faulty.open(&cache);
    assert_eq!(again.discard_dirty().unwrap(), 2 * PAGE + 100);
    again.close().unwrap();
    assert_eq!(cache.stats().memory.dirty_bytes, PAGE, "other files keep theirs");
    others.backing.heal();
    cache.close().unwrap();
    assert_same(&faulty.stored(), &faulty.bytes);
    assert_eq!(&others.stored()[..4], b"kept");
}

#[test]
fn a_flush_that_keeps_failing_can_be_given_up() {
    for has_handle in [true, false] {
        let faulty = Faulty::new(Way::Threads, LENGTH, 7);
        let cache = faulty.builder(4 << 20).build().unwrap();
        let mut file = faulty.open(&cache);
        file.write_at(b"written", PAGE).unwrap();
        faulty.backing.inject(Fault::on(Call::SyncData).forever().fails(libc::EIO));
        if !has_handle {
            drop(file);
            error_of(cache.close(), &["0 bytes", "os error 5"]);
            file = faulty.open(&cache);
        }
        error_of(cache.close(), &["0 bytes", "os error 5"]);
        assert_eq!(file.discard_dirty().unwrap(), 0);
        error_of(file.sync_data(), &["os error 5"]);
        cache.close().unwrap();
        assert_eq!(&faulty.stored()[4096..4103], b"written");
    }
}

/// A backing whose flush fails once: what is written after that is flushed by the next one.
#[test]
fn giving_up_a_flush_gives_up_nothing_written_later() {
    for has_handle in [true, false] {
        let crashing = Arc::new(CrashingBacking::new(vec![0; 8 * PAGE as usize]));
        let backing = Arc::new(FaultyBacking::over(crashing.clone()));
        let cache = Cache::builder()
            .memory(4 << 20)
            .dirty_age_max(Duration::from_millis(5))
            .build()
            .unwrap();
        let file = cache.open_backing(backing.clone(), &writable()).unwrap();
        let write_out = |bytes: &[u8], page: u64| {
            file.write_at(bytes, page * PAGE).unwrap();
            wait_for_stats(&cache, "written out", |stats| stats.memory.dirty_bytes == 0);
        };
        write_out(b"given up", 1);
        backing.inject(Fault::on(Call::SyncData).fails(libc::EIO));
        error_of(file.sync_data(), &["os error 5"]);
        write_out(b"written later", 3);
        assert_eq!(file.discard_dirty().unwrap(), 0);
        if has_handle {
            file.close().unwrap();
        } else {
            drop(file);
            cache.close().unwrap();
        }
        assert_eq!(&crashing.durable()[3 * PAGE as usize..][..13], b"written later");
    }
}

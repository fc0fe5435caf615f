//! `Cache::close`: every file is tried, every failure is reported, and then the cache stays open.

use std::thread;
use std::time::Duration;

use bifolio::{ErrorKind, Stats};
use bifolio_testing::{Call, Fault, Gate};

use crate::support::{Faulty, PAGE, Way, assert_same, cache_of, error_of, wait_until, writable};

#[test]
fn the_first_failing_file_does_not_stop_the_syncs_of_others() {
    let files: Vec<_> = (0..8).map(|seed| Faulty::new(Way::Memory, 8192, seed)).collect();
    let cache = files[0].builder(4 << 20).build().unwrap();
    let handles: Vec<_> = files.iter().map(|faulty| faulty.open(&cache)).collect();
    for (faulty, handle) in files.iter().zip(&handles) {
        handle.write_at(b"new", PAGE).unwrap();
        faulty.backing.inject(Fault::on(Call::Write).forever().fails(libc::ENOSPC));
    }
    let good = [2, 5];
    good.iter().for_each(|index: &usize| files[*index].backing.heal());
    error_of(cache.close(), &["os error 28", "4096"]);
    for index in good {
        assert_eq!(&files[index].stored()[4096..4099], b"new", "file {index} was not written");
        assert!(files[index].backing.calls(Call::SyncData) > 0, "file {index} was not flushed");
    }
    files.iter().for_each(|faulty| faulty.backing.heal());
    cache.close().unwrap();
    assert!(files.iter().all(|faulty| &faulty.stored()[4096..4099] == b"new"));
}

/// A write during the close of the cache may fail once the close is far enough.
#[test]
fn a_cache_whose_close_failed_late_is_open() {
    let faulty = Faulty::new(Way::Memory, 8192, 1);
    let cache = faulty.builder(4 << 20).build().unwrap();
    let file = faulty.open(&cache);
    let gate = Gate::new();
    file.write_at(b"first", 0).unwrap();
    faulty.backing.inject(Fault::on(Call::SyncData).held(&gate));
    thread::scope(|scope| {
        let closing = scope.spawn(|| cache.close());
        gate.wait_for_arrivals(1);
        file.write_at(b"second", PAGE).unwrap();
        faulty.backing.inject(Fault::on(Call::Write).forever().fails(libc::ENOSPC));
        gate.open();
        error_of(closing.join().unwrap(), &["os error 28"]);
    });
    file.write_at(b"third", 100).unwrap();
    faulty.backing.heal();
    cache.close().unwrap();
    let mut expected = faulty.bytes.clone();
    expected[..5].copy_from_slice(b"first");
    expected[PAGE as usize..][..6].copy_from_slice(b"second");
    expected[100..105].copy_from_slice(b"third");
    assert_same(&faulty.stored(), &expected);
    let answer = cache.open_backing(faulty.backing.clone(), &writable());
    assert!(error_of(answer, &[]).kind() == ErrorKind::Closed);
}

#[test]
fn a_file_that_was_synced_is_not_flushed_again_by_close() {
    let faulty = Faulty::new(Way::Memory, 8192, 1);
    let cache = cache_of(4 << 20);
    let file = faulty.open(&cache);
    file.write_at(b"first", 0).unwrap();
    file.sync_data().unwrap();
    let before = faulty.backing.calls(Call::SyncData);
    cache.close().unwrap();
    assert_eq!(faulty.backing.calls(Call::SyncData), before);
}

/// The flusher has taken the only dirty page, and cannot write it: nothing is dirty at that moment,
/// and nothing is durable.
#[test]
fn a_close_waits_for_a_write_out_that_is_in_flight() {
    let faulty = Faulty::new(Way::Memory, 10 * PAGE as usize, 8);
    let cache = faulty.builder(4 << 20).dirty_age_max(Duration::from_millis(5)).build().unwrap();
    let file = faulty.open(&cache);
    let gate = Gate::new();
    faulty.backing.inject(Fault::on(Call::Write).held(&gate));
    faulty.backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
    file.write_at(b"precious", 0).unwrap();
    gate.wait_for_arrivals(1);
    thread::scope(|scope| {
        let closing = scope.spawn(|| cache.close());
        // So long that a close which asks only what is dirty has had its answer.
        thread::sleep(Duration::from_millis(200));
        assert!(!closing.is_finished());
        file.read_at(&mut [0; 8], 0).expect("the cache is open until all is durable");
        gate.open();
        error_of(closing.join().unwrap(), &["os error 5"]);
    });
    faulty.backing.heal();
    cache.close().unwrap();
    assert!(faulty.backing.calls(Call::SyncData) > 0, "the device was never flushed");
    assert_eq!(&faulty.stored()[..8], b"precious");
}

/// The bytes of a `PageRefMut` of another thread are written before the close ends.
#[test]
fn a_close_waits_for_what_is_pinned_to_be_changed() {
    for way in [Way::Memory, Way::Threads] {
        let faulty = Faulty::new(way, 2 * PAGE as usize, 9);
        let cache = faulty.builder(4 << 20).build().unwrap();
        let file = faulty.open(&cache);
        file.write_at(b"beside", 0).unwrap();
        let mut pin = file.pin_mut(PAGE..PAGE + 6).unwrap();
        thread::scope(|scope| {
            let closing = scope.spawn(|| cache.close());
            wait_until("the other page is written", || {
                cache.stats().storage.written_folios > 0 || closing.is_finished()
            });
            assert!(!closing.is_finished());
            pin.copy_from(0, b"pinned").unwrap();
            drop(pin);
            closing.join().unwrap().unwrap();
        });
        assert_eq!(&faulty.stored()[PAGE as usize..][..6], b"pinned");
    }
}

#[test]
fn every_counter_and_level_is_documented() {
    let page = include_str!("../../../../docs/counters.md");
    let stats = format!("{:?}", Stats::default());
    let fields = stats.split(['{', ',']).filter_map(|field| field.trim().split_once(": "));
    for (name, _) in fields {
        assert!(page.contains(&format!("`{name}`")), "docs/counters.md lacks `{name}`");
    }
}

#[test]
fn a_sync_of_all_files_writes_each_and_lists_those_that_fail() {
    let files: Vec<_> = (0..5).map(|seed| Faulty::new(Way::Memory, 8192, seed)).collect();
    let cache = files[0].builder(4 << 20).build().unwrap();
    let handles: Vec<_> = files.iter().map(|faulty| faulty.open(&cache)).collect();
    for (faulty, handle) in files.iter().zip(&handles) {
        handle.write_at(b"new", PAGE).unwrap();
        faulty.backing.inject(Fault::on(Call::Write).forever().fails(libc::ENOSPC));
    }
    files[3].backing.heal();
    let error = error_of(cache.sync_all(), &["not everything is durable", "os error 28", "4096"]);
    assert_eq!(error.kind(), ErrorKind::Close);
    assert_eq!(&files[3].stored()[4096..4099], b"new");
    files.iter().for_each(|faulty| faulty.backing.heal());
    // Also what is kept of a file without a handle.
    drop(handles);
    cache.sync_all().unwrap();
    assert!(files.iter().all(|faulty| &faulty.stored()[4096..4099] == b"new"));
    assert!(files.iter().all(|faulty| faulty.backing.calls(Call::SyncData) > 0));
    cache.close().unwrap();
    assert_eq!(error_of(cache.sync_all(), &[]).kind(), ErrorKind::Closed);
}

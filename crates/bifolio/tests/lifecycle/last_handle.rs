//! Effects of dropping the last handle.

use std::thread;
use std::time::Duration;

use bifolio::Cache;
use bifolio_testing::{Call, Fault, Gate};

use crate::logged::{collect_log, logged};
use crate::support::{Faulty, wait_until};
use crate::support::{PAGE, Way, assert_same, error_of};

/// The bytes of a page.
fn page(index: u64) -> std::ops::Range<u64> {
    index * PAGE..(index + 1) * PAGE
}

/// The last handle is dropped while one write-out of the file is in flight and another, of a page
/// whose write failed, is being retried: nothing is dirty at that moment, and nothing is clean.
#[test]
fn a_page_whose_write_out_is_tried_again_is_kept() {
    let faulty = Faulty::new(Way::Memory, 500 * PAGE as usize, 3);
    let cache = faulty.builder(8 << 20).build().unwrap();
    let file = faulty.open(&cache);
    let (of_close, of_retry) = (Gate::new(), Gate::new());
    let write = Fault::on(Call::Write);
    faulty.backing.inject(write.clone().at(page(50)).held(&of_close));
    faulty.backing.inject(write.clone().at(page(0)).times(2).fails(libc::EIO));
    faulty.backing.inject(write.at(page(0)).nth(2).held(&of_retry));
    file.write_at(b"other", 50 * PAGE).unwrap();
    // So much that the close writes it before it joins a round of syncs.
    let many = vec![5; 400 * PAGE as usize];
    file.write_all_at(&many, 60 * PAGE).unwrap();
    thread::scope(|scope| {
        let closing = scope.spawn(|| cache.close());
        of_close.wait_for_arrivals(1);
        file.write_at(b"precious", 0).unwrap();
        // It fails once, and waits for what the close has in flight.
        let dropping = scope.spawn(|| drop(file));
        wait_until("it failed", || cache.stats().storage.write_errors == 1);
        thread::sleep(Duration::from_millis(100));
        cache.evict_all().unwrap();
        of_retry.wait_for_arrivals(1);
        of_close.open();
        thread::sleep(Duration::from_millis(100));
        of_retry.open();
        dropping.join().unwrap();
        // Whatever it answers: the cache that says it is closed has written everything.
        let closed = closing.join().unwrap();
        if closed.is_err() {
            cache.close().unwrap();
        }
    });
    let mut expected = faulty.bytes.clone();
    expected[..8].copy_from_slice(b"precious");
    expected[50 * PAGE as usize..][..5].copy_from_slice(b"other");
    expected[60 * PAGE as usize..][..many.len()].copy_from_slice(&many);
    assert_same(&faulty.stored(), &expected);
}

#[test]
fn pages_of_a_dropped_file_are_durable_after_close() {
    let faulty = Faulty::new(Way::Memory, 10 * PAGE as usize, 4);
    let cache = faulty.builder(4 << 20).build().unwrap();
    let file = faulty.open(&cache);
    file.write_at(b"bytes", 0).unwrap();
    drop(file);
    cache.close().unwrap();
    assert!(faulty.backing.calls(Call::SyncData) > 0, "the device was never flushed");

    // The same if the flusher was faster.
    let cache: Cache =
        faulty.builder(4 << 20).dirty_age_max(Duration::from_millis(5)).build().unwrap();
    let file = faulty.open(&cache);
    let before = faulty.backing.calls(Call::SyncData);
    file.write_at(b"bytes", 0).unwrap();
    wait_until("written", || cache.stats().memory.dirty_bytes == 0);
    drop(file);
    cache.close().unwrap();
    assert!(faulty.backing.calls(Call::SyncData) > before, "the device was never flushed");
}

#[test]
fn a_flush_that_fails_at_the_last_drop_is_told_by_close() {
    let faulty = Faulty::new(Way::Memory, 10 * PAGE as usize, 5);
    let cache = faulty.builder(4 << 20).build().unwrap();
    let file = faulty.open(&cache);
    file.write_at(b"bytes", 0).unwrap();
    faulty.backing.inject(Fault::on(Call::SyncData).forever().fails(libc::EIO));
    drop(file);
    error_of(cache.close(), &["os error 5", "faulty memory"]);
    faulty.backing.heal();
    cache.close().unwrap();
}

#[test]
fn a_drop_logs_the_pages_it_cannot_write() {
    collect_log();
    // No other test of this program has this error.
    let (faulty, cause) = (Faulty::new(Way::Memory, 8192, 6), "os error 122");
    let logged = || logged(cause);
    let cache = faulty.builder(4 << 20).build().unwrap();
    let file = faulty.open(&cache);
    faulty.backing.inject(Fault::on(Call::Write).forever().fails(libc::EDQUOT));
    file.write_at(b"precious", PAGE).unwrap();
    drop(file);
    let lines = logged();
    let [line] = &lines[..] else { panic!("not one line: {lines:?}") };
    for needle in ["faulty memory: 4096 bytes", "position 4096", "kept"] {
        assert!(line.contains(needle), "{line:?} does not name {needle:?}");
    }
    drop(cache);
    let lines = logged();
    let [line] = &lines[..] else { panic!("not one line: {lines:?}") };
    assert!(line.contains("4096 bytes") && line.contains("lost"), "{line:?}");

    // One that can be opened again: its handle will be told by syncs.
    let faulty = Faulty::new(Way::Threads, 8192, 6);
    let cache = faulty.builder(4 << 20).build().unwrap();
    let file = faulty.open(&cache);
    faulty.backing.inject(Fault::on(Call::Write).forever().fails(libc::EDQUOT));
    file.write_at(b"precious", PAGE).unwrap();
    drop(file);
    assert_eq!(logged().len(), 1);
    let file = faulty.open(&cache);
    assert_eq!(logged(), [""; 0], "it was logged when it was kept, and has a handle again");
    error_of(file.sync_data(), &[cause]);
}

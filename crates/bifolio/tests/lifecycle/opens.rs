//! Opens do not wait for what happens to other files.

use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use bifolio::Cache;
use bifolio::backing::FileIdentity;
use bifolio_testing::{Call, Fault, Gate, MemoryBacking};

use crate::support::{
    Faulty, PAGE, Way, cache_of, directory, error_of, random_file, read, writable,
};

/// Runs `test` on a thread, and fails if it is stuck.
fn in_time(what: &str, test: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    let running = thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    match is_done.recv_timeout(Duration::from_secs(30)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what}: stuck"),
        _ => running.join().unwrap(),
    }
}

#[test]
fn a_file_opens_while_the_length_of_another_is_waited_for() {
    in_time("an open", || {
        let slow = Faulty::new(Way::Memory, 8192, 1);
        let fast = Faulty::new(Way::Memory, 8192, 2);
        let cache = fast.builder(4 << 20).build().unwrap();
        let gate = Gate::new();
        slow.backing.inject(Fault::on(Call::Len).held(&gate));
        thread::scope(|scope| {
            let opening = scope.spawn(|| slow.open(&cache));
            gate.wait_for_arrivals(1);
            let file = fast.open(&cache);
            assert_eq!(read(&file, 0, 100), fast.bytes[..100]);
            drop(file);
            gate.open();
            assert_eq!(read(&opening.join().unwrap(), PAGE, 100), slow.bytes[4096..4196]);
        });
    });
}

/// A device does not answer, and all pages that are not pinned are dirty pages of it. A thread that
/// drops a file of that device waits for it, a thread that needs a frame waits for frames, and no
/// other thread waits.
#[test]
fn a_file_opens_while_the_last_close_of_another_waits() {
    in_time("an open", || {
        let (stuck, other) =
            (Faulty::new(Way::Memory, 1 << 20, 1), Faulty::new(Way::Memory, 8192, 2));
        let cache =
            stuck.builder(512 << 10).reclaim_wait_max(Duration::from_millis(500)).build().unwrap();
        let (file, dropped) = (stuck.open(&cache), other.open(&cache));
        read(&dropped, 0, 8192);
        let gate = Gate::new();
        stuck.backing.inject(Fault::on(Call::Write).forever().held(&gate));
        file.write_at(&[7], 0).unwrap();
        file.evict(0..PAGE).unwrap();
        gate.wait_for_arrivals(1);
        let dirty_pages = 20;
        file.write_all_at(&vec![7; dirty_pages * PAGE as usize], PAGE).unwrap();
        thread::scope(|scope| {
            let pinned = file.clone();
            let reader = scope.spawn(move || {
                let mut holds = Vec::new();
                for page in dirty_pages as u64 + 1..250 {
                    match pinned.pin(page * PAGE..(page + 1) * PAGE) {
                        Ok(pin) => holds.push(pin.into_owned()),
                        Err(_) => break,
                    }
                }
            });
            let dropping = scope.spawn(|| drop(dropped));
            reader.join().unwrap();
            dropping.join().unwrap();
            let closing = scope.spawn(|| drop(file));
            gate.wait_for_arrivals(2);
            thread::sleep(Duration::from_millis(100));
            assert!(!closing.is_finished(), "it is dirty, and not written");
            let third = Faulty::new(Way::Memory, 8192, 3);
            let opened = third.open(&cache);
            assert_eq!(opened.len(), 8192);
            assert!(cache.stats().memory.dirty_bytes > 0);
            gate.open();
            closing.join().unwrap();
        });
    });
}

#[test]
fn an_identity_of_ones_own_is_never_that_of_a_file() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 8192);
    let cache = cache_of(4 << 20);
    let file = cache.open(&path, &writable()).unwrap();
    let disk = std::fs::File::open(&path).unwrap();
    let (real, metadata) = (FileIdentity::of_file(&disk).unwrap(), disk.metadata().unwrap());
    let numbers = FileIdentity::custom(metadata.dev(), metadata.ino());
    let open = |byte, identity| {
        let backing = MemoryBacking::new(vec![byte; 100]).identified(identity);
        cache.open_backing(Arc::new(backing), &writable()).unwrap()
    };
    let own = open(1, numbers);
    assert_eq!(read(&own, 0, 10), [1; 10]);
    assert_eq!(read(&open(2, numbers), 0, 10), [1; 10], "the same numbers are the same file");
    assert_eq!(read(&open(3, real), 0, 10), bytes[..10], "it says that it is that file");
    own.write_at(b"x", 0).unwrap();
    assert_eq!(read(&file, 0, 10), bytes[..10]);
}

#[test]
fn a_later_open_for_a_longer_file_is_refused() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 10_000);
    let cache = cache_of(1 << 20);
    let _first = cache.open(&path, &writable().len_max(1 << 20)).unwrap();
    let refused = cache.open(&path, &writable().len_max((1 << 20) + 1));
    error_of(refused, &[path.to_str().unwrap(), "len_max", "1048577", "1048576"]);
    cache.open(&path, &writable().len_max(1 << 20)).unwrap();
    cache.open(&path, &writable().len_max(20_000)).unwrap();
    cache.open(&path, &writable()).unwrap();
}

#[test]
fn a_bound_beyond_what_is_reserved_for_is_refused() {
    let builder = |memory, max| Cache::builder().memory(memory).memory_max(max);
    error_of(builder(2 << 20, 1 << 20).build(), &["memory_max", "1048576", "2097152"]);
    error_of(builder(1 << 20, 1 << 50).build(), &["memory_max", "4 TiB"]);
    builder(1 << 20, 1 << 20).build().unwrap();
}

#[test]
fn the_only_writable_handle_becomes_an_immutable_one() {
    let directory = directory();
    let path = directory.path().join("table");
    let cache = cache_of(4 << 20);
    let options = writable().create(true);
    let conflict = |result: bifolio::Result<bifolio::ImmutableFile>| {
        let error = error_of(result, &["table", "immutable"]);
        assert_eq!(error.kind(), bifolio::ErrorKind::OptionConflict);
    };
    let file = cache.open(&path, &options).unwrap();
    file.write_all_at(b"sorted keys", 0).unwrap();
    let other = cache.open(&path, &options).unwrap();
    conflict(file.into_immutable());
    let clone = other.clone();
    conflict(other.into_immutable());
    let pin = clone.pin(0..6).unwrap().into_owned();
    conflict(clone.into_immutable());
    drop(pin);
    let file = cache.open(&path, &options).unwrap();
    let reader = cache.open(&path, &bifolio::OpenOptions::new()).unwrap();
    file.pin_mut(0..1).unwrap().copy_from(0, b"S").unwrap();
    let dirty = cache.stats().memory.dirty_bytes;
    let table = file.into_immutable().unwrap();
    assert_eq!(cache.stats().memory.dirty_bytes, dirty, "nothing is written or dropped");
    assert_eq!(table.pin(..).unwrap()[..], *b"Sorted keys");
    assert_eq!(read(&reader, 0, 6), b"Sorted");
    let refused = error_of(cache.open(&path, &options), &["writable", "immutable"]);
    assert_eq!(refused.kind(), bifolio::ErrorKind::OptionConflict);
    drop((table, reader));
    assert_eq!(
        std::fs::read(&path).unwrap(),
        b"Sorted keys",
        "the last close writes what is dirty"
    );
    let write_only = writable().read(false);
    let file = cache.open(&path, &write_only).unwrap();
    error_of(file.into_immutable(), &["not opened for reading"]);
    cache.open(&path, &options).unwrap();
}

#[test]
fn ranges_of_every_kind_name_the_same_bytes() {
    use std::ops::Bound::{Excluded, Included};
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 10 * PAGE as usize);
    let cache = cache_of(4 << 20);
    let file = cache.open(&path, &writable()).unwrap();
    let all = (9 * PAGE as usize..10 * PAGE as usize, 9 * PAGE);
    let expected = &bytes[all.0];
    assert_eq!(file.pin(all.1..10 * PAGE).unwrap().to_vec(), expected);
    assert_eq!(file.pin(all.1..).unwrap().to_vec(), expected);
    assert_eq!(file.pin(all.1..=10 * PAGE - 1).unwrap().to_vec(), expected);
    let bounds = (Excluded(all.1 - 1), Included(10 * PAGE - 1));
    assert_eq!(file.read_with(bounds, |page| page.to_vec()).unwrap(), expected);
    file.populate(..).unwrap();
    assert_eq!(file.residency(..).unwrap().resident, 10);
    assert_eq!(file.evict(5 * PAGE..).unwrap().folios, 5);
    assert_eq!(file.evict(..3 * PAGE).unwrap().folios, 3);
    assert_eq!(file.residency(..).unwrap().resident, 2);
    assert_eq!(file.evict(20 * PAGE..).unwrap().folios, 0, "an open range past the end is empty");
    error_of(file.pin(20 * PAGE..), &["no bytes"]);
    error_of(file.residency(..=u64::MAX), &["2^63"]);
    file.punch_hole(8 * PAGE..).unwrap();
    assert_eq!((file.len(), read(&file, 8 * PAGE, 8)), (10 * PAGE, vec![0; 8]));
    let mut pin = file.pin_mut(..8).unwrap();
    assert_eq!(pin.copy_from(1, &[7; 8]), None);
    assert_eq!(pin.copy_from(usize::MAX, &[7; 8]), None);
    pin.copy_from(1, &[7; 7]).unwrap();
    drop(pin);
    assert_eq!(read(&file, 0, 8)[..2], [bytes[0], 7]);
}

//! Maps over storage that fails, is short or late.
//!
//! # Safety
//! Only bytes of the file are touched, except where a test expects the process to be killed for it.
#![allow(unsafe_code)]

use std::os::unix::process::ExitStatusExt;
use std::thread;
use std::time::Duration;

use bifolio::{Cache, ErrorKind, Feature, File, ReadRequest};
use bifolio_testing::{Call, Fault, Gate, fill_bytes};

use crate::setup::{Address, Way, kernel_loads, load, run_child, store, touch};
use crate::support::{
    self, Faulty, PAGE, assert_same, cause_of, error_of, read, read_all, wait_until,
};

const PAGE_USIZE: usize = PAGE as usize;
const NAME: &str = "faults::a_page_that_cannot_be_read_raises_a_signal_until_it_can";
const VARIABLE: &str = "BIFOLIO_TEST_MAP_FAULT";

/// Maximum number of faults of a device served at a time.
const SERVED_MAX: u64 = 4;

fn storage(pages: usize) -> Faulty {
    Faulty::new(support::Way::Memory, pages * PAGE_USIZE, 5)
}

/// Opens the storage as a mappable file, in a cache without background work.
fn open(way: Way, storage: &Faulty, memory_bytes: u64) -> (Cache, File) {
    let cache = way.mask(storage.builder(memory_bytes)).build().unwrap();
    let file = cache.open_backing(storage.backing.clone(), &way.options()).unwrap();
    (cache, file)
}

/// Touches a bad page, which kills the process if `is_to_die` is set.
fn touch_a_bad_page(way: Way, is_to_die: bool) {
    let storage = storage(16);
    let (_cache, file) = open(way, &storage, 1 << 20);
    let map = file.map(0..file.len()).unwrap();
    let other = file.map(0..file.len()).unwrap();
    storage.backing.inject(Fault::on(Call::Read).at(5 * PAGE..6 * PAGE).forever());
    for answer in [map.populate(3 * PAGE..9 * PAGE), map.pin(5 * PAGE..6 * PAGE).map(drop)] {
        let error = error_of(answer, &["20480"]);
        assert_eq!(error.kind(), ErrorKind::Io, "{error:?}");
    }
    assert!(file.read_at(&mut [0; 10], 5 * PAGE + 7).is_err());
    // Its neighbours are resident.
    assert_same(&load(map.as_ptr(), 0..5 * PAGE), &storage.bytes[..5 * PAGE_USIZE]);
    assert_same(&load(map.as_ptr(), 6 * PAGE..16 * PAGE), &storage.bytes[6 * PAGE_USIZE..]);
    assert!(map.take_error().is_none() && other.take_error().is_none(), "no page was touched");
    if is_to_die {
        println!("now it dies");
        touch(map.as_ptr(), 5 * PAGE);
        return println!("it did not");
    }
    storage.backing.heal();
    assert_same(&load(map.as_ptr(), 0..map.len()), &storage.bytes);
}

#[test]
fn a_page_that_cannot_be_read_raises_a_signal_until_it_can() {
    let ways = Way::with_and_without(Feature::FaultPoison);
    if let Ok(number) = std::env::var(VARIABLE) {
        return touch_a_bad_page(ways[number.parse::<usize>().unwrap()], true);
    }
    for (number, way) in ways.iter().enumerate() {
        touch_a_bad_page(*way, false);
        let output = run_child(NAME, VARIABLE, &number.to_string());
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("now it dies") && !text.contains("it did not"), "{way:?}: {text}");
        let expected = if way.masked.is_some() { libc::SIGSEGV } else { libc::SIGBUS };
        assert_eq!(output.status.signal(), Some(expected), "{way:?}: {}", output.status);
    }
}

/// Waits until no thread serves a fault of the file any more. The kernel may send more than one
/// message for one access: a thread that is woken for another reason sends it again.
fn wait_for_services(file: &File) {
    drop(file.map(0..file.len()).unwrap());
}

#[test]
fn a_poisoned_page_is_told_once_and_heals_with_a_prefetch() {
    for way in Way::waiting_with_and_without(Feature::FaultPoison) {
        let storage = storage(16);
        let (_cache, file) = open(way, &storage, 1 << 20);
        let mut map = file.map_mut(0..file.len()).unwrap();
        storage.backing.inject(Fault::on(Call::Read).forever());
        assert!(!kernel_loads(map.as_ptr(), 5 * PAGE), "{way:?}: it was to fail");
        wait_for_services(&file);
        storage.backing.heal();
        assert!(!kernel_loads(map.as_ptr(), 5 * PAGE), "{way:?}: it is poisoned");
        let error = map.take_error().unwrap();
        assert_eq!(error.kind(), ErrorKind::Fault, "{error:?}");
        assert_eq!(cause_of(&error).kind(), ErrorKind::Io, "{error:?}");
        assert!(map.take_error().is_none(), "told twice");
        map.populate(5 * PAGE..6 * PAGE).unwrap();
        assert_same(&load(map.as_ptr(), 0..map.len()), &storage.bytes);
        store(map.as_mut_ptr(), 5 * PAGE, b"stored");
        file.sync_data().unwrap();
        assert_eq!(&storage.stored()[5 * PAGE_USIZE..5 * PAGE_USIZE + 6], b"stored");
        // A call may bring it back, too.
        drop((map, file, _cache));
        let (_cache, file) = open(way, &storage, 1 << 20);
        let map = file.map(0..file.len()).unwrap();
        storage.backing.inject(Fault::on(Call::Read).forever());
        assert!(!kernel_loads(map.as_ptr(), 0));
        storage.backing.heal();
        assert_same(&read(&file, 0, PAGE_USIZE), &storage.bytes[..PAGE_USIZE]);
        assert_eq!(touch(map.as_ptr(), 9), storage.bytes[9]);
    }
}

/// Each waiting thread has sent a message; the first failure is reported to all of them.
#[test]
fn a_page_that_many_wait_for_is_refused_once() {
    for way in Way::waiting_with_and_without(Feature::FaultPoison) {
        let storage = storage(16);
        let (cache, file) = open(way, &storage, 1 << 20);
        let map = file.map(0..file.len()).unwrap();
        let start = Address(map.as_ptr().cast_mut());
        let (first, next) = (Gate::new(), Gate::new());
        storage.backing.inject(Fault::on(Call::Read).held(&first));
        storage.backing.inject(Fault::on(Call::Read).nth(2).held(&next));
        storage.backing.inject(Fault::on(Call::Read).forever());
        let begin = |served| {
            let waiter = thread::spawn(move || kernel_loads({ start }.0, 5 * PAGE));
            wait_until("it is served", || cache.stats().maps.faults >= served);
            waiter
        };
        let mut waiters: Vec<_> = (1..=SERVED_MAX).map(begin).collect();
        // Those that come now wait until a service has ended. Long enough to be read, mostly.
        waiters.extend([(); 4].map(|()| begin(SERVED_MAX)));
        thread::sleep(Duration::from_millis(20));
        first.open();
        for waiter in waiters {
            assert!(!waiter.join().unwrap(), "{way:?}: it was to fail");
        }
        assert!(map.take_error().is_some());
        next.open();
        wait_for_services(&file);
        assert!(map.take_error().is_none(), "{way:?}: told twice");
        let reads = storage.backing.calls(Call::Read);
        assert!(reads <= SERVED_MAX, "{way:?}: read {reads} times");
    }
}

#[test]
fn short_and_late_reads_bring_the_right_bytes() {
    for way in Way::whole() {
        let storage = storage(200);
        let (_cache, file) = open(way, &storage, 512 << 10);
        let map = file.map(0..file.len()).unwrap();
        storage.backing.inject(Fault::on(Call::Read).times(40).short_by(2000));
        let late = Duration::from_millis(2);
        storage.backing.inject(Fault::on(Call::Read).nth(20).times(40).delayed(late));
        storage.backing.inject(Fault::on(Call::Read).nth(5).times(2).fails(libc::EINTR));
        assert_same(&load(map.as_ptr(), 0..map.len()), &storage.bytes);
        assert!(storage.backing.struck() > 60, "{}", storage.backing.struck());
        assert!(map.take_error().is_none());
    }
}

/// Stores to every page of a file of four times the cache, while its pages cannot be written for
/// some time.
fn store_everywhere(file: &File, bytes: &mut [u8], seed: u64) {
    let mut map = file.map_mut(0..file.len()).unwrap();
    for page in 0..file.len() / PAGE {
        let new = fill_bytes(seed ^ page, 100);
        let at = page * PAGE + (seed + page) % 3000;
        store(map.as_mut_ptr(), at, &new);
        bytes[at as usize..at as usize + 100].copy_from_slice(&new);
    }
}

#[test]
fn pages_that_cannot_be_written_at_eviction_stay() {
    for way in Way::whole() {
        for errno in [libc::EIO, libc::ENOSPC] {
            let storage = storage(512);
            let mut bytes = storage.bytes.clone();
            let (cache, file) = open(way, &storage, 512 << 10);
            // More than can be in flight: what failed with others fails again by itself.
            storage.backing.inject(Fault::on(Call::Write).nth(2).times(80).fails(errno));
            storage.backing.inject(Fault::on(Call::Write).nth(100).times(5).short_by(3000));
            store_everywhere(&file, &mut bytes, 3);
            assert!(storage.backing.struck() >= 80, "{way:?}: {}", storage.backing.struck());
            assert!(cache.stats().maps.unmapped_pages > 300, "{:?}", cache.stats());
            let map = file.map(0..file.len()).unwrap();
            assert_same(&load(map.as_ptr(), 0..map.len()), &bytes);
            assert_same(&read_all(&file), &bytes);
            let error = error_of(file.sync_data(), &[]);
            assert_eq!(error.kind(), ErrorKind::Writeback, "{error:?}");
            file.sync_data().unwrap();
            assert_same(&storage.stored(), &bytes);
            assert_same(&load(map.as_ptr(), 0..map.len()), &bytes);
        }
    }
}

/// Copying into a map may fault, and the fault may wait for staging memory that the transfers of
/// the same call hold.
#[test]
fn read_many_fills_no_map_while_its_transfers_are_under_way() {
    const DEPTH: usize = 2;
    let storage = storage(64);
    let cache = storage.builder(1 << 20).io_depth(DEPTH).build().unwrap();
    let way = Way::whole()[0];
    let file = cache.open_backing(storage.backing.clone(), &way.options()).unwrap();
    let last = 63 * PAGE;
    read(&file, last, PAGE_USIZE);
    let hits_before = cache.stats().reads.hits_pinned;
    let gate = Gate::new();
    storage.backing.inject(Fault::on(Call::Read).forever().held(&gate));
    let mut map = way.memory_file(&cache, PAGE).map_mut(0..PAGE).unwrap();
    // SAFETY: these bytes are used only here.
    let mapped = unsafe { map.as_mut_slice() };
    let mut found = vec![0; 8 * PAGE_USIZE];
    let places = (0..8).map(|place| 2 * place * PAGE).chain([last]);
    let mut requests: Vec<_> = places
        .zip(found.chunks_mut(PAGE_USIZE).chain([mapped]))
        .map(|(position, buffer)| ReadRequest::new(buffer, position))
        .collect();
    thread::scope(|scope| {
        scope.spawn(|| file.read_many(&mut requests).unwrap());
        gate.wait_for_arrivals(1);
        let hits = cache.stats().reads.hits_pinned - hits_before;
        gate.open();
        assert_eq!(hits, 1, "what is there is read first");
    });
    for request in &requests {
        let start = request.position as usize;
        assert_same(request.buffer, &storage.bytes[start..start + PAGE_USIZE]);
    }
}

#[test]
fn a_swap_that_fails_during_eviction_loses_nothing() {
    for way in Way::whole() {
        for errno in [libc::EIO, libc::ENOSPC] {
            let storage = Faulty::new(support::Way::Memory, 0, 6);
            let builder = storage.builder(512 << 10).swap_backing(storage.backing.clone());
            let cache = way.mask(builder).build().unwrap();
            let file = way.memory_file(&cache, 512 * PAGE);
            let mut bytes = vec![0; 512 * PAGE_USIZE];
            storage.backing.inject(Fault::on(Call::Write).nth(2).times(6).fails(errno));
            for round in 0..3 {
                store_everywhere(&file, &mut bytes, round);
            }
            assert_eq!(storage.backing.struck(), 6, "{way:?}");
            let map = file.map(0..file.len()).unwrap();
            assert_same(&load(map.as_ptr(), 0..map.len()), &bytes);
            assert_same(&read_all(&file), &bytes);
            // Nor does a page that cannot be read back.
            storage.backing.inject(Fault::on(Call::Read).forever());
            let error = (0..512)
                .find_map(|page| map.populate(page * PAGE..(page + 1) * PAGE).err())
                .expect("a page in the swap");
            assert_eq!(error.kind(), ErrorKind::SwapRead, "{error:?}");
            storage.backing.heal();
            assert_same(&load(map.as_ptr(), 0..map.len()), &bytes);
        }
    }
}

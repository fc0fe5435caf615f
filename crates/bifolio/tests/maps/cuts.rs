//! Files that are truncated, extended and punched while pages of their maps are touched.
//!
//! # Safety
//! A thread touches a page past the end only through the kernel, which returns EFAULT for it. Bytes
//! of a map are compared while no thread stores to it.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bifolio::backing::FileIdentity;
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking};

use crate::setup::{Address, Way, kernel_loads, store, touch};
use crate::support::{PAGE, assert_same, directory, file_of, read_all, wait_until, writable};

/// Lets the kernel load the second page repeatedly.
fn load_until(stop: &AtomicBool, start: Address) {
    while !stop.load(Ordering::Relaxed) {
        kernel_loads(start.0, PAGE);
    }
}

/// A thread that never touches pages past the end never gets an error of a failed fault.
#[test]
fn pages_stored_between_two_cuts_are_never_refused() {
    for way in Way::whole() {
        let directory = directory();
        let path = file_of(&directory, "mapped", &vec![1; 64 * PAGE as usize]);
        let cache = way.builder(4 << 20).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let mut map = file.map_mut(0..file.len()).unwrap();
        for round in 0..4000_u64 {
            let pages = 2 + round % 60;
            file.set_len(pages * PAGE).unwrap();
            for page in 1..pages {
                store(map.as_mut_ptr(), page * PAGE + 8, &[round as u8]);
            }
            file.set_len(PAGE).unwrap();
            let told = map.take_error();
            assert!(told.is_none(), "round {round}, {way:?}: {told:?}");
        }
    }
}

/// A message about a page past the end, served after the file has grown, affects no thread.
#[test]
fn a_page_is_there_at_once_when_the_file_grows() {
    for way in Way::waiting() {
        let cache = way.builder(4 << 20).build().unwrap();
        let file = way.memory_file(&cache, 2 * PAGE);
        let map = file.map(0..2 * PAGE).unwrap();
        let start = Address(map.as_ptr().cast_mut());
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| load_until(&stop, start));
            for round in 0..3000 {
                file.set_len(PAGE).unwrap();
                (0..round % 512).for_each(|_| std::hint::spin_loop());
                file.set_len(2 * PAGE).unwrap();
                let is_there = kernel_loads(start.0, PAGE);
                if !is_there {
                    stop.store(true, Ordering::Relaxed);
                }
                assert!(is_there, "round {round}: a page of the file is refused");
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(touch(map.as_ptr(), PAGE), 0);
    }
}

/// The page is written out, with its old length, between the store and the end of the growth.
#[test]
fn what_is_stored_past_the_end_of_a_growing_file_reaches_its_storage() {
    for way in Way::whole() {
        let memory =
            |number| MemoryBacking::new(vec![7; 5000]).identified(FileIdentity::custom(1, number));
        let (storage, gate) = (Arc::new(memory(1)), Gate::new());
        let full = Arc::new(FaultyBacking::new(memory(2)));
        full.inject(Fault::on(Call::Write).held(&gate).forever());
        let builder = way
            .builder(1 << 20)
            .dirty_age_max(Duration::from_millis(3_600_000))
            .dirty_max(64 << 10);
        let cache = builder.build().unwrap();
        let file = cache.open_backing(storage.clone(), &way.options().len_max(1 << 20)).unwrap();
        let other = cache.open_backing(full.clone(), &writable().len_max(1 << 20)).unwrap();
        let mut map = file.map_mut(0..5000).unwrap();
        let start = Address(map.as_mut_ptr());
        // A device may have three quarters of the limit.
        while cache.stats().memory.dirty_bytes < 48 << 10 {
            other.append(&[1; PAGE as usize]).unwrap();
        }
        store(start.0, 7000, b"zeroed");
        // Not evicted: another fill would find what the storage has.
        let _resident = file.pin(PAGE..PAGE + 1).unwrap();
        thread::scope(|scope| {
            let writer = scope.spawn(|| file.write_all_at(b"end", 20_000).unwrap());
            wait_until("the file starts to grow", || touch(start.0, 7000) == 0);
            store(start.0, 7000, b"stored");
            file.sync_data().unwrap();
            assert_eq!(file.len(), 5000, "the writer waits for the other file");
            gate.open();
            writer.join().unwrap();
        });
        let found = read_all(&file);
        file.sync_data().unwrap();
        assert_same(&storage.bytes(), &found);
        other.sync_data().unwrap();
    }
}

#[test]
fn maps_see_holes_and_what_is_stored_to_them_later() {
    for way in Way::whole() {
        let directory = directory();
        let path = file_of(&directory, "file", &[7; 16 * PAGE as usize]);
        let cache = way.builder(4 << 20).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let mut map = file.map_mut(0..16 * PAGE).unwrap();
        map.populate(0..16 * PAGE).unwrap();
        store(map.as_mut_ptr(), 3 * PAGE, &[8]);
        let pin = file.pin(5 * PAGE..6 * PAGE).unwrap();
        file.punch_hole(PAGE + 1..15 * PAGE).unwrap();
        let mut expected = vec![7; 16 * PAGE as usize];
        expected[PAGE as usize + 1..15 * PAGE as usize].fill(0);
        // SAFETY: no thread stores to the map or changes the file meanwhile.
        assert_same(unsafe { map.as_slice() }, &expected);
        drop(pin);
        for page in [5, 9] {
            store(map.as_mut_ptr(), page * PAGE, &[9]);
            expected[(page * PAGE) as usize] = 9;
        }
        let found = file.seek_data(6 * PAGE).unwrap();
        assert_eq!(found, Some(9 * PAGE), "stored through a map");
        file.sync_data().unwrap();
        assert_same(&std::fs::read(&path).unwrap(), &expected);
        assert_same(&read_all(&file), &expected);
    }
}

//! Files that are truncated and extended while pages of their maps are touched.
//!
//! # Safety
//! A thread touches a page past the end only through the kernel, which returns EFAULT for it.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bifolio::FaultMode;

use crate::setup::{Address, Way, kernel_loads, store, touch};
use crate::support::{PAGE, directory, file_of};

/// Lets the kernel load the second page repeatedly.
fn load_until(stop: &AtomicBool, start: Address) {
    while !stop.load(Ordering::Relaxed) {
        kernel_loads(start.0, PAGE);
    }
}

/// A thread that never touches pages past the end never gets an error of a failed fault.
#[test]
fn pages_stored_between_two_cuts_are_never_refused() {
    for way in Way::modes() {
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
    for way in Way::modes().into_iter().filter(|way| way.faults == FaultMode::Threads) {
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

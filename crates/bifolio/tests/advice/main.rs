//! Advice: which folios it evicts, and why the others stay (`outcomes.rs`); whose LRU batches it
//! drains (`drains.rs`); the other kinds of advice (`kinds.rs`); concurrent calls (`races.rs`);
//! changes of the storage by other programs (`outside.rs`); and
//! what `residency` reports (`residency.rs`).
//!
//! # Safety
//! [`store`] checks its offset against the length of the map, and the page was made resident
//! before.
#![allow(unsafe_code)]

mod drains;
mod kinds;
mod outcomes;
mod outside;
mod races;
mod residency;
#[path = "../support/mod.rs"]
mod support;

use std::cell::RefCell;
use std::thread;

use bifolio::{Cache, Evicted, File, MapMut};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use support::{PAGE, read};

/// Returns the CPUs that this process may use.
fn cpus() -> Vec<usize> {
    let allowed = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect()
}

/// Runs `call` on one CPU. Returns its result.
fn on<T: Send>(cpu: usize, call: impl FnOnce() -> T + Send) -> T {
    let pinned = || {
        let mut set = CpuSet::new();
        set.set(cpu);
        sched_setaffinity(None, &set).unwrap();
        call()
    };
    thread::scope(|scope| scope.spawn(pinned).join().unwrap())
}

/// Runs a test on one CPU: its pages are in no other CPU's batch.
fn on_one(test: impl FnOnce() + Send) {
    on(cpus()[0], test);
}

/// Creates a cache without readahead.
fn quiet_cache(memory_bytes: u64) -> Cache {
    Cache::builder().memory(memory_bytes).readahead_max(0).build().unwrap()
}

/// Reads pages one by one, so that each is added to the batch of the CPU.
fn read_pages(file: &File, pages: impl IntoIterator<Item = u64>) {
    for page in pages {
        assert_eq!(read(file, page * PAGE, 1).len(), 1);
    }
}

/// Stores one byte through a map.
fn store(map: &mut MapMut, position: u64, byte: u8) {
    assert!(position < map.len());
    // SAFETY: see the head of the file.
    let target = unsafe { map.as_mut_ptr().add(position as usize) };
    // SAFETY: as above.
    unsafe { target.write_volatile(byte) };
}

/// Evicts all folios of the file that can be evicted.
fn evict(file: &File) -> Evicted {
    file.evict(0..file.len()).unwrap()
}

/// Advises until `count` folios, and no others, are evicted, and returns the outcome. A folio that
/// another thread read or wrote stays until that thread drops its reference, which is a moment
/// after the thread's result is visible.
#[track_caller]
fn evict_all(file: &File, folios: u64) -> Evicted {
    let sum = RefCell::new(Evicted::default());
    support::wait_until("all folios go", || {
        *sum.borrow_mut() += evict(file);
        sum.borrow().folios >= folios
    });
    let sum = sum.into_inner();
    assert_eq!(sum.folios, folios, "{sum:?}");
    sum
}

/// Returns the number of resident pages of the file.
fn resident_pages(file: &File) -> u64 {
    file.residency(0..file.len()).unwrap().resident
}

/// Checks that the counter of advice agrees with the sum of the outcomes.
#[track_caller]
fn assert_counted(cache: &Cache, sum: &Evicted) {
    assert_eq!(cache.stats().evictions.requested_folios, sum.folios);
}

//! Memory used by a map of a file that is a hundred times as large as the memory.
//!
//! The kernel reports the memory of a whole process, so this runs in a separate process.
//!
//! # Safety
//! Only bytes of the file are touched.
#![allow(unsafe_code)]

use std::sync::Barrier;
use std::thread;

use fastrand::Rng;

use crate::setup::{Address, Way, load, store, touch};
use crate::support::{PAGE, directory, file_of, files_can_be_mapped, run_alone};

const NAME: &str = "memory::a_map_of_a_hundred_times_the_memory_stays_within_the_bound";
const VARIABLE: &str = "BIFOLIO_TEST_MAP_MEMORY";
const MIB: u64 = 1 << 20;
const BOUND: u64 = 16 * MIB;
const LENGTH: u64 = 100 * BOUND;

/// Returns a number of bytes from `/proc/self/status`.
fn process_bytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn roam(way: Way, is_on_disk: bool) {
    let directory = directory();
    let path = file_of(&directory, "sparse", &[]);
    let cache = way.swapping(BOUND);
    let file = if is_on_disk {
        let file = cache.open(&path, &way.options()).unwrap();
        file.set_len(LENGTH).unwrap();
        file
    } else {
        way.memory_file(&cache, LENGTH)
    };
    let mut map = file.map_mut(0..LENGTH).unwrap();
    let mut random = Rng::with_seed(7);
    let mut marked = Vec::new();
    for step in 0..12_000_u64 {
        let page = random.u64(..LENGTH / PAGE);
        touch(map.as_ptr(), page * PAGE);
        if step % 4 == 0 {
            store(map.as_mut_ptr(), page * PAGE + 8, &(page + 1).to_le_bytes());
            marked.push(page);
        }
        let stats = cache.stats();
        assert!(stats.memory.used_bytes <= BOUND, "{stats:?}");
    }
    for page in marked {
        let found = load(map.as_ptr(), page * PAGE + 8..page * PAGE + 16);
        assert_eq!(found, (page + 1).to_le_bytes(), "page {page}");
    }
    let stats = cache.stats();
    assert!(stats.maps.unmapped_pages > BOUND / PAGE, "not turned over: {stats:?}");
    let peak = process_bytes("VmHWM:");
    println!("{way:?}, disk {is_on_disk}: peak {peak} bytes, bound {BOUND}");
    assert!(peak <= BOUND + BOUND / 50 + 8 * MIB, "{peak} bytes were resident, of {BOUND}");
}

#[test]
fn a_map_of_a_hundred_times_the_memory_stays_within_the_bound() {
    if let Ok(case) = std::env::var(VARIABLE) {
        let case: usize = case.parse().unwrap();
        return roam(Way::new(), case == 1);
    }
    for case in 0..2 * Way::whole().len() {
        let output = run_alone(NAME, VARIABLE, &case.to_string());
        print!("{}", String::from_utf8_lossy(&output.stdout));
    }
}

const MANY: &str = "memory::many_threads_over_maps_stay_within_the_bound";
const MANY_VARIABLE: &str = "BIFOLIO_TEST_MAP_MEMORY_MANY";
const THREADS: usize = 64;
/// More stack of a thread than serving a fault uses.
const STACK_BYTES: usize = 256 << 10;

fn use_stack() {
    std::hint::black_box([1_u8; STACK_BYTES]);
}

/// Threads whose stacks and heaps exist already add no more than the bound, whichever thread serves
/// their faults.
fn roam_with_many(way: Way) {
    let cache = way.swapping(BOUND);
    let file = way.memory_file(&cache, LENGTH);
    let mut map = file.map_mut(0..LENGTH).unwrap();
    let start = Address(map.as_mut_ptr());
    let roam = |number: usize, steps: u64| {
        let start = &start;
        let mut random = Rng::with_seed(number as u64);
        for step in 0..steps {
            let page = random.u64(..LENGTH / PAGE);
            touch(start.0, page * PAGE);
            if step % 4 == 0 {
                store(start.0, page * PAGE + 8, &step.to_le_bytes());
            }
        }
    };
    let barrier = Barrier::new(THREADS + 1);
    let (before, used) = thread::scope(|scope| {
        for number in 0..THREADS {
            let (barrier, roam) = (&barrier, &roam);
            let builder = thread::Builder::new().stack_size(4 * STACK_BYTES);
            let run = move || {
                use_stack();
                drop(std::hint::black_box(vec![1_u8; STACK_BYTES / 4]));
                barrier.wait();
                barrier.wait();
                roam(number, 400);
            };
            builder.spawn_scoped(scope, run).unwrap();
        }
        barrier.wait();
        let before = (process_bytes("VmRSS:"), cache.stats().memory.used_bytes);
        barrier.wait();
        before
    });
    assert!(cache.stats().maps.unmapped_pages > BOUND / PAGE, "not turned over");
    let more = process_bytes("VmHWM:").saturating_sub(before);
    println!("{way:?}: {more} bytes more, {used} of {BOUND} were in use");
    // The threads that serve faults have stacks, and the allocator its arenas.
    let rest = 2 * MIB;
    assert!(
        more <= BOUND - used + BOUND / 50 + rest,
        "{more} more bytes, {used} of {BOUND} in use"
    );
}

#[test]
fn many_threads_over_maps_stay_within_the_bound() {
    if std::env::var(MANY_VARIABLE).is_ok() {
        return roam_with_many(Way::new());
    }
    if files_can_be_mapped() {
        let output = run_alone(MANY, MANY_VARIABLE, "");
        print!("{}", String::from_utf8_lossy(&output.stdout));
    }
}

//! Reads and pins of mappable files never raise a signal, whatever other threads do to the file.
//!
//! Each test runs its threads in a child process, which a signal would kill.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bifolio::{Cache, ErrorKind, Feature, File, ReadRequest, Result};
use bifolio_testing::{Call, Fault};
use fastrand::Rng;

use crate::setup::{Way, touch};
use crate::support::{self, Faulty, PAGE, directory, read_all, run_alone};

const VARIABLE: &str = "BIFOLIO_TEST_MAP_READS";
/// Pages of the file.
const PAGES: u64 = 64;
const MEMORY_BYTES: u64 = 512 << 10;
/// Number of truncations.
const ROUNDS: u32 = 1500;
/// Number of failures: after each of them every page is read alone.
const FAILURES: u32 = 60;

/// Ends the readers together with the main thread of the test.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reads in every way until `is_over`; the caller judges errors.
fn read_in_every_way(file: &File, seed: u64, is_over: &AtomicBool, check: impl Fn(Result<usize>)) {
    let mut random = Rng::with_seed(seed);
    let mut buffer = vec![0; 20 * PAGE as usize];
    while !is_over.load(Ordering::Relaxed) {
        let position = random.u64(0..PAGES * PAGE);
        let length = [100, 100, 4096, 80_000][random.usize(0..4)];
        match random.u32(0..12) {
            0 => {
                let mut requests =
                    buffer.chunks_mut(700).take(4).zip([0, 9000, 50_000, 100_000]).map(
                        |(buffer, distance)| {
                            ReadRequest::new(buffer, (position + distance) % (PAGES * PAGE))
                        },
                    );
                let mut requests: Vec<_> = requests.by_ref().collect();
                file.read_many(&mut requests).unwrap();
                requests.into_iter().for_each(|request| check(request.result));
            }
            1 => {
                let page = position / PAGE * PAGE..(position / PAGE + 1) * PAGE;
                check(file.pin(page).map(|pin| {
                    pin.copy_to(0, &mut buffer[..100]).unwrap();
                    100
                }));
            }
            _ => check(file.read_at(&mut buffer[..length as usize], position)),
        }
    }
}

/// Truncates the file, extends it and fills part of it, while other threads read.
fn cuts(way: Way, file: &File, is_punched: bool) {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for seed in 0..2 {
            let is_over = &is_over;
            scope.spawn(move || {
                read_in_every_way(file, seed, is_over, |answer| {
                    let Err(error) = answer else { return };
                    let is_behind = error.kind() == ErrorKind::PastEnd;
                    assert!(is_behind, "{way:?}: {error}");
                });
            });
        }
        let _ends = Ends(&is_over);
        let mut random = Rng::with_seed(7);
        for _ in 0..ROUNDS {
            let length = if random.bool() { 0 } else { random.u64(0..PAGES) * PAGE };
            if is_punched && random.bool() {
                file.punch_hole(length..PAGES * PAGE).unwrap();
            } else {
                file.set_len(length).unwrap();
            }
            file.set_len(PAGES * PAGE).unwrap();
            let position = random.u64(0..PAGES * PAGE - 9000);
            file.write_all_at(&[7; 9000], position).unwrap();
        }
    });
}

/// Runs `body` in a separate process for each way.
fn in_children(name: &str, ways: &[Way], body: impl Fn(Way)) {
    if let Ok(number) = std::env::var(VARIABLE) {
        return body(ways[number.parse::<usize>().unwrap()]);
    }
    for number in 0..ways.len() {
        run_alone(name, VARIABLE, &number.to_string());
    }
}

#[test]
fn reads_of_a_file_that_is_cut_raise_no_signal() {
    let name = "reads::reads_of_a_file_that_is_cut_raise_no_signal";
    in_children(name, &Way::with_and_without(Feature::FaultPoison), |way| {
        let directory = directory();
        let path = support::file_of(&directory, "file", &vec![1; (PAGES * PAGE) as usize]);
        let cache = way.builder(MEMORY_BYTES).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        cuts(way, &file, false);
    });
}

#[test]
fn reads_of_a_memory_file_that_is_cut_raise_no_signal() {
    let name = "reads::reads_of_a_memory_file_that_is_cut_raise_no_signal";
    in_children(name, &Way::whole(), |way| {
        let cache = way.swapping(MEMORY_BYTES);
        let file = way.memory_file(&cache, PAGES * PAGE);
        // Raw writers are looked for.
        drop(file.map_mut(0..PAGE).unwrap());
        cuts(way, &file, true);
    });
}

#[test]
fn reads_of_storage_that_fails_raise_no_signal() {
    let name = "reads::reads_of_storage_that_fails_raise_no_signal";
    in_children(name, &Way::with_and_without(Feature::FaultPoison), |way| {
        let storage = Faulty::new(support::Way::Memory, (PAGES * PAGE) as usize, 5);
        let cache: Cache = way.mask(storage.builder(MEMORY_BYTES)).build().unwrap();
        let file = cache.open_backing(storage.backing.clone(), &way.options()).unwrap();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            for seed in 0..2 {
                let (file, is_over) = (&file, &is_over);
                scope.spawn(move || {
                    read_in_every_way(file, seed, is_over, |answer| {
                        let Err(error) = answer else { return };
                        assert_eq!(error.kind(), ErrorKind::Io, "{way:?}: {error}");
                    });
                });
            }
            let _ends = Ends(&is_over);
            let mut all = vec![0; (PAGES * PAGE) as usize];
            for _ in 0..FAILURES {
                storage.backing.inject(Fault::on(Call::Read).forever());
                file.evict(0..PAGES * PAGE).unwrap();
                storage.backing.heal();
                // Twice: then the pages are marked as used.
                (0..2).for_each(|_| drop(file.read_at(&mut all, 0)));
            }
        });
    });
}

#[test]
fn a_pin_outlives_a_cut_and_growth_and_raises_no_signal() {
    let name = "reads::a_pin_outlives_a_cut_and_growth_and_raises_no_signal";
    in_children(name, &Way::all(), |way| {
        let storage = Faulty::new(support::Way::Memory, (PAGES * PAGE) as usize, 5);
        let cache = way.mask(storage.builder(MEMORY_BYTES)).build().unwrap();
        let file = cache.open_backing(storage.backing.clone(), &way.options()).unwrap();
        // Raw writers are looked for from here on; pages that have maps are not asked to leave.
        let load = || touch(file.map_mut(0..PAGES * PAGE).unwrap().as_ptr(), 5 * PAGE);
        load();
        let pin = file.pin(5 * PAGE..6 * PAGE).unwrap();
        let again = || {
            file.set_len(0).unwrap();
            file.set_len(PAGES * PAGE).unwrap();
        };
        again();
        // What can be read anew only with an error.
        storage.backing.inject(Fault::on(Call::Read).at(5 * PAGE..6 * PAGE).forever());
        let mut buffer = vec![1; PAGE as usize];
        pin.copy_to(0, &mut buffer).unwrap();
        // What the file has now is zeros, through the map as well.
        assert_eq!(load(), 0);
        file.read_exact_at(&mut buffer, 5 * PAGE).unwrap();
        assert!(buffer.iter().all(|byte| *byte == 0));
        // The page is the file's again, and does not leave under the pin.
        file.sync_data().unwrap();
        assert_eq!(file.evict(5 * PAGE..6 * PAGE).unwrap().folios, 0);
        file.write_all_at(&[3; 100], 5 * PAGE).unwrap();
        again();
        // A second holder, of the next page there was.
        file.write_all_at(&[4; 100], 5 * PAGE).unwrap();
        let second = file.pin(5 * PAGE..5 * PAGE + 100).unwrap();
        file.set_len(0).unwrap();
        drop(pin);
        file.set_len(PAGES * PAGE).unwrap();
        second.copy_to(0, &mut buffer[..100]).unwrap();
        drop(second);
        storage.backing.heal();
        file.sync_data().unwrap();
        // Refused only while the write-out that the advice above began still searches for stores.
        support::wait_until("the page is evicted", || {
            file.evict(5 * PAGE..6 * PAGE).unwrap().folios == 1
        });
        assert!(read_all(&file).iter().all(|byte| *byte == 0));
        assert_eq!(load(), 0);
    });
}

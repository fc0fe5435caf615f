//! Stores of several threads while pages are evicted all the time: none is lost.
//!
//! Each thread owns words of the file and counts in them; no other thread stores there. It checks
//! the value that it stored last. An *evictor* reads a second file through the same cache, and
//! makes the cache smaller and larger.
//!
//! # Safety
//! Words of a map are used as atomic ones, by all threads.
#![allow(unsafe_code)]

use std::fs;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bifolio::{Cache, Feature, File};
use fastrand::Rng;

use crate::setup::{Address, Way, word};
use crate::support::{PAGE, assert_same, directory, file_of, open, random_file, read};

const MEMORY_BYTES: u64 = 1 << 20;
const PAGES: u64 = 750;
const THREADS: u64 = 3;

/// The words that a thread owns.
#[derive(Clone, Copy, Debug)]
enum Owns {
    /// All words of every third page.
    Pages,
    /// Every third word of all pages.
    Words,
}

impl Owns {
    /// Returns the position of a word of thread `number`.
    fn place(self, number: u64, random: &mut Rng) -> u64 {
        match self {
            Self::Pages => {
                let page = random.u64(..PAGES / THREADS) * THREADS + number;
                page * PAGE + random.u64(..PAGE / 8) * 8
            }
            Self::Words => {
                let slot = random.u64(..PAGE / 8 / THREADS) * THREADS + number;
                random.u64(..PAGES) * PAGE + slot * 8
            }
        }
    }
}

/// Minimum value of each word, updated before and after each store.
struct Ledger {
    stored: Vec<AtomicU64>,
    /// Number of stores of each thread.
    stores: [AtomicU64; THREADS as usize],
    syncs: AtomicU64,
}

impl Ledger {
    fn new() -> Self {
        let stored = (0..PAGES * PAGE / 8).map(|_| AtomicU64::new(0)).collect();
        Self { stored, stores: Default::default(), syncs: AtomicU64::new(0) }
    }

    fn stores(&self) -> [u64; THREADS as usize] {
        self.stores.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    fn at(&self, place: u64) -> &AtomicU64 {
        &self.stored[place as usize / 8]
    }
}

/// Counts in its own words until the end.
fn count(start: Address, owns: Owns, number: u64, ledger: &Ledger, stop: &AtomicBool) {
    let mut random = Rng::with_seed(number);
    while !stop.load(Ordering::Relaxed) {
        // Several stores near each other, as programs make them.
        let place = owns.place(number, &mut random);
        for _ in 0..random.u32(1..4) {
            let word = word(start.0, place);
            let expected = ledger.at(place).load(Ordering::Relaxed);
            let found = word.load(Ordering::Relaxed);
            assert_eq!(found, expected, "a store to page {} was lost", place / PAGE);
            word.store(found + 1, Ordering::Relaxed);
            // Release: pairs with the Acquire in `sync_and_look`: the store comes first.
            ledger.at(place).store(found + 1, Ordering::Release);
            ledger.stores[number as usize].fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Reads a second file, and changes the bound, until the end.
fn evict(cache: &Cache, other: &File, bytes: &[u8], stop: &AtomicBool) {
    let mut random = Rng::with_seed(99);
    while !stop.load(Ordering::Relaxed) {
        let start = random.usize(..bytes.len() - 60_000);
        assert_same(&read(other, start as u64, 60_000), &bytes[start..start + 60_000]);
        if random.u32(..10) == 0 {
            let bound = random.u64(MEMORY_BYTES / 2..=MEMORY_BYTES);
            cache.set_memory(bound).unwrap();
        }
    }
}

/// Syncs, and reads the file independently, until the end: everything counted before a sync is
/// there after it.
fn sync_and_look(file: &File, path: &Path, ledger: &Ledger, stop: &AtomicBool) {
    // Past the kernel's page cache: pages of it that a reader holds are a collision with our
    // direct writes, which the kernel reports as an error.
    let direct = fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(path);
    let outside = direct.unwrap_or_else(|_| fs::File::open(path).unwrap());
    let length = (PAGES * PAGE) as usize;
    let mut memory = vec![0; length + PAGE as usize];
    let start = memory.as_ptr().align_offset(PAGE as usize);
    let found = &mut memory[start..start + length];
    while !stop.load(Ordering::Relaxed) {
        // Acquire: pairs with the Release in `count`.
        let before: Vec<u64> =
            ledger.stored.iter().map(|word| word.load(Ordering::Acquire)).collect();
        if ledger.syncs.load(Ordering::Relaxed).is_multiple_of(2) {
            file.sync_data().unwrap();
        } else {
            file.sync_range(0..file.len()).unwrap();
        }
        outside.read_exact_at(found, 0).unwrap();
        for ((bytes, before), number) in found.chunks(8).zip(before).zip(0_u64..) {
            let found = u64::from_le_bytes(bytes.try_into().unwrap());
            let page = number * 8 / PAGE;
            assert!(found >= before, "page {page}: {before} was synced, {found} is on the disk");
        }
        ledger.syncs.fetch_add(1, Ordering::Relaxed);
    }
}

/// The storage of the counters.
enum Place {
    Memory,
    Disk,
}

fn run(way: Way, owns: Owns, place: &Place, duration: Duration) {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "other", 3 << 20);
    let counters = file_of(&directory, "counters", &vec![0; (PAGES * PAGE) as usize]);
    fs::File::open(&counters).unwrap().sync_all().unwrap();
    let cache = way.swapping(MEMORY_BYTES);
    let other = open(&cache, &path);
    let file = match place {
        Place::Memory => way.memory_file(&cache, PAGES * PAGE),
        Place::Disk => cache.open(&counters, &way.options()).unwrap(),
    };
    // Each thread has a map of its own.
    let mut maps: Vec<_> = (0..THREADS).map(|_| file.map_mut(0..PAGES * PAGE).unwrap()).collect();
    let (ledger, stop) = (Ledger::new(), AtomicBool::new(false));
    thread::scope(|scope| {
        let (ledger, stop) = (&ledger, &stop);
        scope.spawn(|| evict(&cache, &other, &bytes, stop));
        if let Place::Disk = place {
            scope.spawn(|| sync_and_look(&file, &counters, ledger, stop));
        }
        let threads: Vec<_> = (0..)
            .zip(&mut maps)
            .map(|(number, map)| {
                let start = Address(map.as_mut_ptr());
                scope.spawn(move || {
                    let start = start;
                    count(start, owns, number, ledger, stop)
                })
            })
            .collect();
        // A thread that fails ends the others. On a busy machine it takes longer.
        let begun = Instant::now();
        let is_enough = || {
            let elapsed = begun.elapsed();
            let most = Duration::from_secs(300);
            elapsed > most || elapsed > duration && has_tried_much(&cache, ledger, place)
        };
        while !is_enough() && threads.iter().all(|thread| !thread.is_finished()) {
            thread::sleep(Duration::from_millis(5));
        }
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    let (counts, stats) = (ledger.stores(), cache.stats());
    assert!(has_tried_much(&cache, &ledger, place), "{counts:?} stores, {stats:?}");
    println!("{way:?} {owns:?}: {counts:?} stores, {} late", stats.maps.stored_late_pages);
    drop(maps);
    let expected: Vec<u8> =
        ledger.stored.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
    assert_same(&read(&file, 0, expected.len()), &expected);
    if let Place::Disk = place {
        file.sync_all().unwrap();
        assert_same(&fs::read(&counters).unwrap(), &expected);
    }
    drop(file);
    cache.close().unwrap();
}

/// Minimum number of evicted pages, and of stores per thread; a run with fewer has tested little.
const UNMAPPED_MIN: u64 = 300;
const STORES_MIN: u64 = 100;

/// Returns `true` if a run may end.
fn has_tried_much(cache: &Cache, ledger: &Ledger, place: &Place) -> bool {
    let has_synced = matches!(place, Place::Memory) || ledger.syncs.load(Ordering::Relaxed) > 0;
    let has_stored = ledger.stores().iter().all(|count| *count > STORES_MIN);
    has_synced && has_stored && cache.stats().maps.unmapped_pages > UNMAPPED_MIN
}

const SHORT: Duration = Duration::from_millis(400);

#[test]
fn no_store_to_pages_of_one_thread_is_lost() {
    for way in Way::whole() {
        run(way, Owns::Pages, &Place::Memory, SHORT);
        run(way, Owns::Pages, &Place::Disk, SHORT);
    }
}

#[test]
fn no_store_to_words_of_shared_pages_is_lost() {
    for way in Way::whole() {
        run(way, Owns::Words, &Place::Memory, SHORT);
        run(way, Owns::Words, &Place::Disk, SHORT);
    }
    for way in Way::with_and_without(Feature::VectoredUnmap).into_iter().skip(1) {
        run(way, Owns::Words, &Place::Disk, SHORT);
    }
}

/// All threads count in words of a few pages that are stored to all the time, while these are
/// evicted by a cache that has become too small for them.
#[test]
#[ignore = "takes a minute: stores between the look and the unmapping are rare"]
fn stores_that_come_late_are_found() {
    for way in Way::whole() {
        run(way, Owns::Words, &Place::Memory, Duration::from_secs(20));
    }
}

/// A punched page is a hole, or has the bytes stored since. Its page is accessible: a page that is
/// in the table but not in the address space would fault endlessly.
#[test]
fn pages_punched_while_stored_to_can_be_touched() {
    for way in Way::whole() {
        let cache = way.swapping(MEMORY_BYTES);
        let file = way.memory_file(&cache, 8 * PAGE);
        let mut map = file.map_mut(0..8 * PAGE).unwrap();
        let (start, stop) = (Address(map.as_mut_ptr()), AtomicBool::new(false));
        let stores = thread::scope(|scope| {
            let stop = &stop;
            let storing = scope.spawn(move || {
                let Address(start) = { start };
                let mut stores = 0;
                while !stop.load(Ordering::Relaxed) {
                    stores += 1;
                    let word = word(start, stores % 8 * PAGE);
                    word.store(stores, Ordering::Relaxed);
                    let found = word.load(Ordering::Relaxed);
                    assert!(found == stores || found == 0, "{found} after {stores}");
                }
                stores
            });
            let until = Instant::now() + SHORT;
            while Instant::now() < until {
                file.punch_hole(0..8 * PAGE).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
            storing.join().unwrap()
        });
        assert!(stores > 100, "{stores} stores");
    }
}

/// Pages are read, many at once, while the file is mapped for writing for the first time: those
/// that are installed after the search for stores has begun are tracked like the others.
#[test]
fn stores_to_pages_from_before_the_first_map_are_found() {
    const LEN: u64 = 1 << 20;
    for way in Way::whole() {
        let directory = directory();
        let (path, _) = random_file(&directory, "mapped", LEN as usize);
        let cache = way.builder(8 << 20).build().unwrap();
        for round in 0..60 {
            let file = cache.open(&path, &way.options()).unwrap();
            let readers = file.map(0..LEN).unwrap();
            let mut map = thread::scope(|scope| {
                scope.spawn(|| readers.populate(0..LEN).unwrap());
                thread::sleep(Duration::from_micros(round * 25));
                file.map_mut(0..LEN).unwrap()
            });
            for page in 0..LEN / PAGE {
                word(map.as_mut_ptr(), page * PAGE).store(round * 1000 + page, Ordering::Relaxed);
            }
            file.sync_data().unwrap();
            let stored = fs::read(&path).unwrap();
            for page in 0..LEN / PAGE {
                let at = (page * PAGE) as usize;
                let found = u64::from_le_bytes(stored[at..at + 8].try_into().unwrap());
                assert_eq!(found, round * 1000 + page, "page {page} in round {round}, {way:?}");
            }
        }
    }
}

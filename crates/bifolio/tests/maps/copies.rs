//! Bytes that a backing gets of a file that is mapped for writing: they do not change during a
//! write, whatever is stored through maps meanwhile, and in the end they include every store.
//!
//! # Safety
//! Words of a map are used as atomic ones, by all threads.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bifolio::Cache;
use bifolio::backing::{Backing, IoBuf, IoBufMut};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking};

use crate::setup::{Address, Way, word};
use crate::support::{PAGE, assert_same, files_can_be_mapped, read_all, writable};

const PAGES: u64 = 64;
const LENGTH: usize = (PAGES * PAGE) as usize;

/// A backing that reads the bytes of a write twice, with a pause between.
#[derive(Debug)]
struct Twice {
    stored: MemoryBacking,
    /// Number of times that all pages were stored to.
    rounds: AtomicU64,
    /// Set when no thread stores any more.
    is_over: AtomicBool,
    writes: AtomicU64,
    changed_pages: AtomicU64,
    /// Maximum duration of a pause.
    pause_max: Duration,
}

impl Twice {
    fn new(pause_max: Duration) -> Self {
        Self {
            stored: MemoryBacking::new(vec![0; LENGTH]),
            rounds: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            writes: AtomicU64::new(0),
            changed_pages: AtomicU64::new(0),
            pause_max,
        }
    }

    /// Pauses until every page was stored to.
    fn pause(&self) {
        let (begun, before) = (Instant::now(), self.rounds.load(Ordering::Relaxed));
        let is_over = || {
            self.is_over.load(Ordering::Relaxed)
                || self.rounds.load(Ordering::Relaxed) >= before + 2
                || begun.elapsed() >= self.pause_max
        };
        while !is_over() {
            thread::yield_now();
        }
    }

    /// Stores to every page, round after round, until the end.
    fn store(&self, start: Address) {
        while !self.is_over.load(Ordering::Relaxed) {
            let round = self.rounds.load(Ordering::Relaxed) + 1;
            for page in 0..PAGES {
                word(start.0, page * PAGE + 8 * (page % 512)).store(round, Ordering::Relaxed);
            }
            self.rounds.store(round, Ordering::Relaxed);
        }
    }
}

impl Backing for Twice {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.stored.read_at(target, position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        let look = || {
            let mut bytes = vec![0; source.len()];
            source.copy_to_slice(0, &mut bytes);
            bytes
        };
        let first = look();
        self.pause();
        let second = look();
        let pages = first.chunks(PAGE as usize).zip(second.chunks(PAGE as usize));
        let changed = pages.filter(|(first, second)| first != second).count();
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.changed_pages.fetch_add(changed as u64, Ordering::Relaxed);
        self.stored.write_at(source, position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.stored.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.stored.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        "twice".to_owned()
    }
}

#[test]
fn the_bytes_of_a_write_stand_still_under_stores() {
    for way in Way::whole() {
        // With memory for all pages in one transfer, and for a few in each.
        for memory_bytes in [8 << 20, 1 << 20] {
            let backing = Arc::new(Twice::new(Duration::from_secs(60)));
            let cache = way.builder(memory_bytes).build().unwrap();
            let file = cache.open_backing(backing.clone(), &way.options()).unwrap();
            let mut map = file.map_mut(0..file.len()).unwrap();
            let start = Address(map.as_mut_ptr());
            thread::scope(|scope| {
                let storing = scope.spawn(|| backing.store(start));
                while backing.rounds.load(Ordering::Relaxed) == 0 {
                    thread::yield_now();
                }
                let syncs = (0..5).map(|_| file.sync_data()).collect::<Vec<_>>();
                backing.is_over.store(true, Ordering::Relaxed);
                storing.join().unwrap();
                syncs.into_iter().for_each(|sync| sync.unwrap());
            });
            let changed = backing.changed_pages.load(Ordering::Relaxed);
            let writes = backing.writes.load(Ordering::Relaxed);
            assert_eq!(changed, 0, "pages that changed, {way:?}, {writes} writes");
            assert!(writes > 0, "nothing was written");
            file.sync_data().unwrap();
            assert_same(&backing.stored.bytes(), &read_all(&file));
        }
    }
}

#[test]
fn the_first_map_for_writing_waits_for_write_outs() {
    for way in Way::whole() {
        let backing = Arc::new(Twice::new(Duration::from_millis(300)));
        let cache = way.builder(8 << 20).build().unwrap();
        let file = cache.open_backing(backing.clone(), &way.options()).unwrap();
        file.write_all_at(&vec![7; LENGTH], 0).unwrap();
        thread::scope(|scope| {
            let sync = scope.spawn(|| file.sync_data());
            while cache.stats().storage.write_requests == 0 {
                thread::yield_now();
            }
            let mut map = file.map_mut(0..file.len()).unwrap();
            let start = Address(map.as_mut_ptr());
            let backing = &backing;
            let storing = scope.spawn(move || backing.store(start));
            sync.join().unwrap().unwrap();
            backing.is_over.store(true, Ordering::Relaxed);
            storing.join().unwrap();
        });
        assert_eq!(backing.changed_pages.load(Ordering::Relaxed), 0, "{way:?}");
        file.sync_data().unwrap();
        assert_same(&backing.stored.bytes(), &read_all(&file));
    }
}

#[test]
fn a_stuck_write_of_a_map_holds_up_no_other_file() {
    for way in Way::whole() {
        let cache = way.builder(2 << 20).build().unwrap();
        let gate = Gate::new();
        let [stuck, open, more] = [(); 3].map(|()| Arc::new(MemoryBacking::new(vec![0; LENGTH])));
        let gated = FaultyBacking::over(stuck.clone());
        gated.inject(Fault::on(Call::Write).forever().held(&gate));
        let backings: [Arc<dyn Backing>; 2] = [Arc::new(gated), open.clone()];
        let [stuck_file, open_file] = backings.map(|backing| {
            let file = cache.open_backing(backing, &way.options()).unwrap();
            let mut map = file.map_mut(0..file.len()).unwrap();
            for page in 0..PAGES {
                word(map.as_mut_ptr(), page * PAGE).store(page + 1, Ordering::Relaxed);
            }
            drop(map);
            file
        });
        thread::scope(|scope| {
            // It has all the memory for copies that there is.
            let sync = scope.spawn(|| stuck_file.sync_data());
            gate.wait_for_arrivals(1);
            open_file.sync_data().unwrap();
            assert_same(&open.bytes(), &read_all(&open_file));
            // Nor does it keep pages from being read in.
            let more_file = cache.open_backing(more, &way.options()).unwrap();
            assert_eq!(read_all(&more_file), vec![0; LENGTH]);
            gate.open();
            sync.join().unwrap().unwrap();
        });
        assert_same(&stuck.bytes(), &read_all(&stuck_file));
    }
}

#[test]
fn a_checkpoint_covers_stores_through_maps() {
    if !files_can_be_mapped() {
        return;
    }
    let cache = Cache::builder()
        .memory(4 << 20)
        .dirty_age_max(Duration::from_millis(3_600_000))
        .build()
        .unwrap();
    let storage = Arc::new(MemoryBacking::new(vec![0; PAGE as usize]));
    let file = cache.open_backing(storage.clone(), &writable().mappable(true)).unwrap();
    let mut map = file.map_mut(0..PAGE).unwrap();
    // SAFETY: no other thread uses the map.
    let bytes = unsafe { map.as_mut_slice() };
    bytes[0] = 1;
    file.sync_data().unwrap();
    bytes[0] = 7;
    file.checkpoint().unwrap().sync().unwrap();
    assert_eq!(storage.bytes()[0], 7);
}

//! Concurrent syncs: of a file and of ranges, with the flusher at work, with storage that fails.
//!
//! Each test checks the guarantee of a sync: when it returns `Ok`, everything written before it is
//! on the storage, and no flush that began earlier counts for it.

use crate::support::{PAGE, cache_of, writable};
use bifolio::backing::{Backing, IoBuf, IoBufMut, IoBuffer};
use bifolio::{Cache, File, OpenOptions};
use bifolio_testing::{CrashingBacking, Gate, MemoryBacking};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;
use std::{io, iter};

/// Storage that keeps the first word of each page, and can refuse every n-th write.
#[derive(Debug)]
struct Stamps {
    pages: Vec<AtomicU64>,
    writes: AtomicU64,
    refuses_each: u64,
}

impl Stamps {
    fn new(pages: u64, refuses_each: u64) -> Arc<Self> {
        let pages = (0..pages).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { pages, writes: AtomicU64::new(0), refuses_each })
    }

    fn stamp(&self, page: u64) -> u64 {
        self.pages[page as usize].load(Ordering::Relaxed)
    }
}

impl Backing for Stamps {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        for offset in (0..target.len() as u64).step_by(PAGE as usize) {
            let stamp = self.stamp((position_bytes + offset) / PAGE);
            target.copy_from_slice(offset as usize, &stamp.to_le_bytes());
        }
        Ok(target.len())
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        let nth = self.writes.fetch_add(1, Ordering::Relaxed) + 1;
        if self.refuses_each > 0 && nth.is_multiple_of(self.refuses_each) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let mut bytes = vec![0; source.len()];
        source.copy_to_slice(0, &mut bytes);
        for (page, bytes) in (position_bytes / PAGE..).zip(bytes.chunks(PAGE as usize)) {
            let stamp = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            self.pages[page as usize].store(stamp, Ordering::Relaxed);
        }
        Ok(source.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.pages.len() as u64 * PAGE)
    }

    fn set_len(&self, _length_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn describe(&self) -> String {
        "stamps".to_owned()
    }
}

/// Runs `until_over` repeatedly until `body` has ended.
fn beside(until_over: impl Fn() + Sync, body: impl FnOnce()) {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                until_over();
            }
        });
        body();
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_range_sync_has_its_bytes_on_the_storage() {
    const PAGES: u64 = 16;
    let storage = Stamps::new(PAGES, 0);
    let cache = cache_of(4 << 20);
    let file = cache.open_backing(storage.clone(), &writable()).unwrap();
    let (file, storage) = (&file, &storage);
    // Others take the same pages to the storage meanwhile.
    beside(
        || file.sync_data().unwrap(),
        || {
            for stamp in 1..=20_000_u64 {
                let page = stamp % PAGES;
                file.write_all_at(&stamp.to_le_bytes(), page * PAGE).unwrap();
                let range = page * PAGE..page * PAGE + 8;
                let write = if stamp % 2 == 0 { File::sync_range } else { File::write_back };
                write(file, range).unwrap();
                assert_eq!(storage.stamp(page), stamp, "round {stamp}");
            }
        },
    );
}

/// Pages stay dirty for a while, so that reclaim meets them; it may move clean ones.
#[test]
fn a_range_sync_holds_beside_eviction() {
    const PAGES: u64 = 8192;
    const DIRTY: u64 = 64;
    const ROUNDS: u64 = 300;
    let storage = Stamps::new(PAGES, 0);
    let cache = cache_of(4 << 20);
    let file = cache.open_backing(storage.clone(), &writable()).unwrap();
    let (file, storage) = (&file, &storage);
    let churn = || {
        let mut bytes = [0; 8];
        for _ in 0..256 {
            file.read_exact_at(&mut bytes, fastrand::u64(..PAGES) * PAGE).unwrap();
        }
    };
    beside(churn, || {
        let mut random = fastrand::Rng::with_seed(1);
        for round in 1..=ROUNDS {
            let pages: Vec<u64> = (0..DIRTY).map(|_| random.u64(..PAGES)).collect();
            for page in &pages {
                file.write_all_at(&round.to_le_bytes(), page * PAGE).unwrap();
            }
            for page in &pages {
                file.sync_range(page * PAGE..page * PAGE + 8).unwrap();
                assert_eq!(storage.stamp(*page), round, "page {page}");
            }
        }
    });
}

/// Ranges of few pages, of many, and dirty pages around them.
#[test]
fn a_range_sync_writes_what_lies_in_it_and_no_more() {
    const PAGES: u64 = 4096;
    let ranges = [7..8, 100..612, 100..613, 1000..3000, 0..PAGES];
    for (range, write) in
        iter::zip(ranges, [File::sync_range, File::write_back].into_iter().cycle())
    {
        let storage = Stamps::new(PAGES, 0);
        let cache = Cache::builder()
            .memory(64 << 20)
            .dirty_age_max(Duration::from_millis(600_000))
            .build()
            .unwrap();
        let file = cache.open_backing(storage.clone(), &writable()).unwrap();
        for page in 0..PAGES {
            file.write_all_at(&(page + 1).to_le_bytes(), page * PAGE).unwrap();
        }
        write(&file, range.start * PAGE + 5..range.end * PAGE - 5).unwrap();
        for page in 0..PAGES {
            let expected = if range.contains(&page) { page + 1 } else { 0 };
            assert_eq!(storage.stamp(page), expected, "page {page} and {range:?}");
        }
        let left = (PAGES - (range.end - range.start)) * PAGE;
        assert_eq!(cache.stats().memory.dirty_bytes, left);
    }
}

/// A page whose write-out has failed is dirty again before any call returns the error.
#[test]
fn a_sync_beside_failing_write_outs_is_never_wrongly_ok() {
    let storage = Stamps::new(4, 3);
    let cache = cache_of(1 << 20);
    let file = cache.open_backing(storage.clone(), &writable()).unwrap();
    let (file, storage) = (&file, &storage);
    let sync_often = || {
        let _refused = file.sync_data();
    };
    beside(sync_often, || {
        for stamp in 1..=10_000_u64 {
            file.write_all_at(&stamp.to_le_bytes(), 0).unwrap();
            while file.sync_data().is_err() {}
            assert_eq!(storage.stamp(0), stamp, "round {stamp}");
        }
    });
}

/// A device with a slow flush, which may fail like in a kernel: the writes of a failed flush are
/// lost, and only one caller gets the error.
#[derive(Debug)]
struct SlowFlush {
    inner: CrashingBacking,
    flushes: AtomicU64,
    /// Number of the flush that fails, from 1.
    fails: u64,
    /// Gate at which flushes wait after they have taken their writes.
    gate: Option<Gate>,
    pause: Duration,
}

impl SlowFlush {
    fn new(pages: u64) -> Self {
        Self {
            inner: CrashingBacking::new(vec![0; (pages * PAGE) as usize]),
            flushes: AtomicU64::new(0),
            fails: 0,
            gate: None,
            pause: Duration::from_millis(2),
        }
    }

    fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Relaxed)
    }

    fn durable_stamp(&self, page: u64) -> u64 {
        let at = (page * PAGE) as usize;
        u64::from_le_bytes(self.inner.durable()[at..at + 8].try_into().unwrap())
    }
}

impl Backing for SlowFlush {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.inner.read_at(target, position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        self.inner.write_at(source, position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        let nth = self.flushes.fetch_add(1, Ordering::Relaxed) + 1;
        if nth != self.fails {
            self.inner.sync_data()?;
        }
        if let Some(gate) = &self.gate {
            gate.pass();
        }
        thread::sleep(self.pause);
        if nth == self.fails { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.inner.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.inner.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        "a slow device".to_owned()
    }
}

/// The bytes of a range that were never written are zeros on the storage.
#[test]
fn a_range_is_on_the_storage_though_the_end_of_file_is_not() {
    for write in [File::sync_range, File::write_back] {
        let storage = Arc::new(MemoryBacking::new(Vec::new()));
        let builder = Cache::builder().memory(1 << 20).dirty_age_max(Duration::from_secs(600));
        let file = builder.build().unwrap().open_backing(storage.clone(), &writable()).unwrap();
        file.write_all_at(&[7; PAGE as usize], 9 * PAGE).unwrap();
        write(&file, 0..4 * PAGE).unwrap();
        assert_eq!(storage.len_bytes().unwrap(), 4 * PAGE);
    }
}

#[test]
fn a_write_back_flushes_nothing_and_works_after_a_failed_flush() {
    let storage = SlowFlush { fails: 1, pause: Duration::ZERO, ..SlowFlush::new(4) };
    let storage = Arc::new(storage);
    let (_cache, file) = open(&storage);
    for stamp in 1..=3_u64 {
        file.write_all_at(&stamp.to_le_bytes(), PAGE).unwrap();
        file.write_back(0..2 * PAGE).unwrap();
        let mut found = IoBuffer::new(PAGE as usize);
        storage.read_at(&mut found.target(), PAGE).unwrap();
        assert_eq!(found.as_bytes()[..8], stamp.to_le_bytes());
        assert_eq!(storage.flushes(), stamp - 1);
        assert_eq!(file.sync_data().is_ok(), stamp > 1);
    }
}

fn open(storage: &Arc<SlowFlush>) -> (Cache, File) {
    let cache = cache_of(1 << 20);
    let file = cache.open_backing(storage.clone(), &writable()).unwrap();
    (cache, file)
}

#[test]
fn many_syncs_share_few_flushes_and_each_is_durable() {
    const THREADS: u64 = 8;
    const ROUNDS: u64 = 40;
    let storage = Arc::new(SlowFlush::new(THREADS));
    let (cache, file) = open(&storage);
    let (file, storage) = (&file, &storage);
    thread::scope(|scope| {
        for own in 0..THREADS {
            scope.spawn(move || {
                for stamp in 1..=ROUNDS {
                    file.write_all_at(&stamp.to_le_bytes(), own * PAGE).unwrap();
                    let metadata = (stamp + own).is_multiple_of(3);
                    if metadata {
                        file.sync_all().unwrap()
                    } else {
                        file.sync_data().unwrap()
                    }
                    assert!(storage.durable_stamp(own) >= stamp, "acknowledged and lost");
                }
            });
        }
    });
    let stats = cache.stats();
    assert_eq!((stats.writes.syncs, stats.storage.flushes), (THREADS * ROUNDS, storage.flushes()));
    assert_eq!(stats.storage.flushes + stats.writes.syncs_shared, stats.writes.syncs);
    assert!(stats.storage.flushes * 2 <= stats.writes.syncs, "{} flushes", stats.storage.flushes);
}

#[test]
fn a_flush_under_way_does_not_cover_a_later_write() {
    let gate = Gate::new();
    let storage = Arc::new(SlowFlush { gate: Some(gate.clone()), ..SlowFlush::new(2) });
    let (_cache, file) = open(&storage);
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            file.write_all_at(&1_u64.to_le_bytes(), 0).unwrap();
            file.sync_data().unwrap();
        });
        gate.wait_for_arrivals(1);
        let second = scope.spawn(|| {
            file.write_all_at(&2_u64.to_le_bytes(), PAGE).unwrap();
            file.sync_data().unwrap();
            assert_eq!(storage.durable_stamp(1), 2);
        });
        // The second sync waits for the first one, or will.
        thread::sleep(Duration::from_millis(20));
        assert_eq!(storage.flushes(), 1, "two flushes at a time");
        gate.open();
        first.join().unwrap();
        second.join().unwrap();
    });
    assert_eq!(storage.flushes(), 2);
}

#[test]
fn every_sync_that_shared_a_failed_flush_gets_the_error() {
    let gate = Gate::new();
    let storage = Arc::new(SlowFlush { fails: 2, gate: Some(gate.clone()), ..SlowFlush::new(4) });
    let (_cache, file) = open(&storage);
    let (file, storage) = (&file, &storage);
    thread::scope(|scope| {
        // One flush is in flight while the others write, so that they share the next.
        let first = scope.spawn(|| file.sync_data());
        gate.wait_for_arrivals(1);
        let sync = |own: u64| {
            move || {
                file.write_all_at(&7_u64.to_le_bytes(), own * PAGE).unwrap();
                let answer = file.sync_data();
                let is_durable = storage.durable_stamp(own) == 7;
                assert!(answer.is_err() || is_durable, "bytes are lost without an error");
                answer.is_err()
            }
        };
        let others = [1, 2, 3].map(|own| scope.spawn(sync(own)));
        thread::sleep(Duration::from_millis(50));
        gate.open();
        first.join().unwrap().unwrap();
        let told = others.map(|other| other.join().unwrap());
        let told = told.iter().filter(|told| **told).count() as u64;
        // One that came later, on a slow machine, has another flush.
        let later = storage.flushes() - 2;
        assert!(told >= 1 && told >= 3 - later, "{told} told, {later} flushes later");
    });
}

#[test]
fn a_sync_of_a_read_only_handle_writes_what_another_wrote() {
    let directory = crate::support::directory();
    let path = directory.path().join("shared");
    std::fs::write(&path, vec![0; 8192]).unwrap();
    let cache = cache_of(1 << 20);
    let reader = cache.open(&path, &OpenOptions::new().read(true)).unwrap();
    reader.sync_all().unwrap();
    let writer = cache.open(&path, &OpenOptions::new().read(true).write(true)).unwrap();
    writer.write_all_at(b"news", 4096).unwrap();
    reader.sync_range(4096..4100).unwrap();
    assert_eq!(&std::fs::read(&path).unwrap()[4096..4100], b"news");
}

/// A device whose flush panics.
#[test]
fn a_backing_that_panics_in_a_sync_fails_it_and_others_go_on() {
    #[derive(Debug)]
    struct Panics(MemoryBacking, AtomicU64);
    impl Backing for Panics {
        fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
            self.0.read_at(target, position_bytes)
        }

        fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
            self.0.write_at(source, position_bytes)
        }

        fn sync_data(&self) -> io::Result<()> {
            assert!(self.1.fetch_add(1, Ordering::Relaxed) > 0, "the first one panics");
            Ok(())
        }

        fn len_bytes(&self) -> io::Result<u64> {
            self.0.len_bytes()
        }

        fn set_len(&self, length_bytes: u64) -> io::Result<()> {
            self.0.set_len(length_bytes)
        }

        fn describe(&self) -> String {
            "a bomb".to_owned()
        }
    }
    let storage = Panics(MemoryBacking::new(vec![0; 4096]), AtomicU64::new(0));
    let cache = cache_of(1 << 20);
    let file = cache.open_backing(Arc::new(storage), &writable()).unwrap();
    file.write_all_at(b"x", 0).unwrap();
    let error = file.sync_data().unwrap_err().to_string();
    assert!(error.contains("panicked"), "{error}");
    file.sync_all().unwrap();
}

#[test]
fn a_synced_range_of_a_gap_reaches_the_storage() {
    let storage = Arc::new(MemoryBacking::new(Vec::new()));
    let cache = cache_of(1 << 20);
    let file = cache.open_backing(storage.clone(), &writable()).unwrap();
    file.write_all_at(b"x", 1 << 20).unwrap();
    // Nothing of it is dirty.
    file.sync_range(0..10_000).unwrap();
    assert_eq!(storage.bytes(), vec![0; 10_000]);
    // No further than the file.
    file.sync_range(0..1 << 30).unwrap();
    assert_eq!(storage.bytes().len(), (1 << 20) + 1);
    file.sync_range(0..1 << 30).unwrap();
    assert_eq!(storage.bytes().len(), (1 << 20) + 1);
    assert_eq!(storage.bytes()[1 << 20], b'x');
}

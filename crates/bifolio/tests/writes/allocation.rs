//! Allocation, holes and zeroed ranges of files with a backing: what is on the storage and in
//! memory, concurrent calls, storage that fails, and crashes.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::support::{
    PAGE, assert_same, cache_of, directory, error_of, file_of, open, read, read_all, writable,
};
use bifolio::backing::{Backing, DirectBacking, IoBuf, IoBufMut};
use bifolio::{Cache, ErrorKind, File};
use bifolio_testing::{
    Call, CrashingBacking, Fault, FaultyBacking, Gate, MemoryBacking, SmallDisk, fill_bytes,
};

/// A cache that writes nothing because of its age.
fn quiet() -> Cache {
    let builder = Cache::builder().memory(1 << 20).readahead_max(0);
    builder.dirty_age_max(Duration::from_millis(3_600_000)).build().unwrap()
}

/// Returns the bytes that the file system has allocated for a file.
fn allocated_bytes(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

/// Storage of `pages` pages of sevens that can be made to fail or wait, and a file over it.
fn faulty(cache: &Cache, pages: u64) -> (Arc<FaultyBacking>, Arc<MemoryBacking>, File) {
    let memory = Arc::new(MemoryBacking::new(vec![7; (pages * PAGE) as usize]));
    let backing = Arc::new(FaultyBacking::over(memory.clone()));
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    (backing, memory, file)
}

#[test]
fn allocation_extends_the_file_and_its_storage() {
    let directory = directory();
    let path = file_of(&directory, "file", b"bytes");
    let cache = quiet();
    let file = open(&cache, &path);
    file.write_all_at(b"B", 0).unwrap();
    file.allocate(100..1 << 20).unwrap();
    assert_eq!((file.len(), read(&file, 0, 6)), (1 << 20, b"Bytes\0".to_vec()));
    file.sync_data().unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
    assert!(allocated_bytes(&path) >= (1 << 20) - PAGE, "{}", allocated_bytes(&path));
    file.allocate(0..10).unwrap();
    file.allocate(5 << 20..5 << 20).unwrap();
    assert_eq!(file.len(), 1 << 20, "allocated already; no bytes");
    file.allocate_keep_len(0..2 << 20).unwrap();
    assert_eq!((file.len(), std::fs::metadata(&path).unwrap().len()), (1 << 20, 1 << 20));
    assert!(allocated_bytes(&path) >= (2 << 20) - PAGE, "{}", allocated_bytes(&path));
}

#[test]
fn an_allocation_beyond_the_disk_changes_nothing() {
    let Some(disk) = SmallDisk::mount(1 << 20) else { return };
    let path = disk.path().join("file");
    std::fs::write(&path, b"bytes").unwrap();
    let cache = quiet();
    let file = open(&cache, &path);
    let error = error_of(file.allocate(0..4 << 20), &["allocation of 4194304 bytes", "position 0"]);
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    assert_eq!((file.len(), read_all(&file)), (5, b"bytes".to_vec()));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 5);
    file.allocate(0..512 << 10).unwrap();
    // Every byte has its storage.
    std::fs::write(disk.path().join("rest"), vec![0; 1 << 20]).unwrap_err();
    file.write_all_at(&vec![3; 512 << 10], 0).unwrap();
    file.sync_data().unwrap();
}

#[test]
fn a_failed_allocation_leaves_no_longer_storage() {
    /// Storage that allocates half of what it should, and fails.
    #[derive(Debug)]
    struct Half(MemoryBacking);
    impl Backing for Half {
        fn read_at(&self, target: &mut IoBufMut<'_>, at: u64) -> std::io::Result<usize> {
            self.0.read_at(target, at)
        }

        fn write_at(&self, source: &IoBuf<'_>, at: u64) -> std::io::Result<usize> {
            self.0.write_at(source, at)
        }

        fn sync_data(&self) -> std::io::Result<()> {
            Ok(())
        }

        fn len_bytes(&self) -> std::io::Result<u64> {
            self.0.len_bytes()
        }

        fn set_len(&self, length_bytes: u64) -> std::io::Result<()> {
            self.0.set_len(length_bytes)
        }

        fn describe(&self) -> String {
            "half".to_owned()
        }

        fn as_direct(&self) -> Option<&dyn DirectBacking> {
            Some(self)
        }
    }

    impl DirectBacking for Half {
        fn fallocate(
            &self,
            _: bifolio::backing::FallocateMode,
            bytes: std::ops::Range<u64>,
        ) -> std::io::Result<()> {
            self.0.set_len(bytes.end / 2)?;
            Err(std::io::Error::from_raw_os_error(libc::ENOSPC))
        }
    }
    let backing = Arc::new(Half(MemoryBacking::new(vec![7; 100])));
    let file = quiet().open_backing(backing.clone(), &writable()).unwrap();
    file.allocate(0..1 << 20).unwrap_err();
    assert_eq!((file.len(), backing.0.bytes()), (100, vec![7; 100]));
}

#[test]
fn storage_without_allocation_says_so_and_keeps_its_bytes() {
    let backing = Arc::new(CrashingBacking::new(vec![7; 3 * PAGE as usize]));
    #[derive(Debug)]
    struct Plain(Arc<CrashingBacking>);
    impl Backing for Plain {
        fn read_at(&self, target: &mut IoBufMut<'_>, at: u64) -> std::io::Result<usize> {
            self.0.read_at(target, at)
        }

        fn write_at(&self, source: &IoBuf<'_>, at: u64) -> std::io::Result<usize> {
            self.0.write_at(source, at)
        }

        fn sync_data(&self) -> std::io::Result<()> {
            self.0.sync_data()
        }

        fn len_bytes(&self) -> std::io::Result<u64> {
            self.0.len_bytes()
        }

        fn set_len(&self, length_bytes: u64) -> std::io::Result<()> {
            self.0.set_len(length_bytes)
        }

        fn describe(&self) -> String {
            "plain".to_owned()
        }

        fn as_direct(&self) -> Option<&dyn DirectBacking> {
            Some(self)
        }
    }

    impl DirectBacking for Plain {
        fn sync_all(&self) -> std::io::Result<()> {
            self.0.sync_all()
        }
    }
    let cache = quiet();
    let file = cache.open_backing(Arc::new(Plain(backing.clone())), &writable()).unwrap();
    file.write_all_at(&[8; 10], PAGE).unwrap();
    let before = read_all(&file);
    let range = 5..2 * PAGE + 5;
    for error in [
        file.allocate(0..1 << 20).unwrap_err(),
        file.allocate_keep_len(0..1 << 20).unwrap_err(),
        file.punch_hole(range.clone()).unwrap_err(),
        file.zero_range(range).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        let kind = std::io::Error::from(error).kind();
        assert_eq!(kind, std::io::ErrorKind::Unsupported);
        assert_same(&read_all(&file), &before);
    }
    // All bytes are data.
    assert_eq!(file.seek_data(PAGE + 1).unwrap(), Some(PAGE + 1));
    assert_eq!(file.seek_hole(0).unwrap(), Some(3 * PAGE));
    file.sync_data().unwrap();
    assert_same(&backing.durable(), &before);
}

/// Dirty, clean and absent pages, and parts of pages.
#[test]
fn a_hole_reads_as_zeros_and_frees_its_storage() {
    let directory = directory();
    for (folio_bytes, is_zeroed) in [(PAGE, false), (PAGE, true), (64 << 10, false)] {
        let mut expected = fill_bytes(1, 800_000);
        let path = file_of(&directory, "file", &expected);
        let cache = quiet();
        let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
        let clear = |range| if is_zeroed { file.zero_range(range) } else { file.punch_hole(range) };
        file.write_all_at(&[1; 10_000], 70_000).unwrap();
        read(&file, 300_000, 50_000);
        expected[50_001..600_000].fill(0);
        clear(50_001..600_000).unwrap();
        assert_same(&read_all(&file), &expected);
        assert_eq!(file.len(), 800_000);
        // Nothing dirty reaches the hole later.
        file.sync_data().unwrap();
        assert_same(&std::fs::read(&path).unwrap(), &expected);
        let freed = 800_000_u64.next_multiple_of(PAGE).saturating_sub(allocated_bytes(&path));
        assert_eq!(freed > 400_000, !is_zeroed, "{freed} bytes were freed");
        // Up to the end, and beyond it; parts of one page; nothing.
        expected[700_000..].fill(0);
        clear(700_000..1 << 40).unwrap();
        expected[10..20].fill(0);
        clear(10..20).unwrap();
        clear(1 << 40..1 << 41).unwrap();
        clear(30..30).unwrap();
        assert_same(&read_all(&file), &expected);
        assert_eq!(file.len(), 800_000);
        file.close().unwrap();
        assert_same(&std::fs::read(&path).unwrap(), &expected);
    }
}

#[test]
fn a_dirty_page_in_a_hole_is_data() {
    let directory = directory();
    let path = file_of(&directory, "file", &[]);
    let cache = quiet();
    let file = open(&cache, &path);
    file.set_len(16 << 20).unwrap();
    assert_eq!((file.seek_data(0).unwrap(), file.seek_hole(5).unwrap()), (None, Some(5)));
    let places = [1 << 20, (1 << 20) + 2 * PAGE, 9 << 20];
    for is_written in [false, true] {
        for place in places {
            file.write_all_at(&[7; PAGE as usize], place).unwrap();
        }
        if is_written {
            file.sync_data().unwrap();
        }
        assert_eq!(file.seek_data(0).unwrap(), Some(places[0]), "written: {is_written}");
        assert_eq!(file.seek_data(places[0] + 9).unwrap(), Some(places[0] + 9));
        assert_eq!(file.seek_hole(places[0] + 9).unwrap(), Some(places[0] + PAGE));
        assert_eq!(file.seek_data(places[0] + PAGE).unwrap(), Some(places[1]));
        assert_eq!(file.seek_data(places[2] + PAGE).unwrap(), None);
    }
    file.punch_hole(places[2]..10 << 20).unwrap();
    assert_eq!(file.seek_data(places[1] + PAGE).unwrap(), None);
    let end = file.len();
    assert_eq!(file.seek_hole(end - 1).unwrap(), Some(end - 1));
    assert_eq!((file.seek_hole(end).unwrap(), file.seek_data(end).unwrap()), (None, None));
    file.append(b"data").unwrap();
    assert_eq!(file.seek_hole(end).unwrap(), Some(end + 4));
}

/// The end of the file was never written out: only its length needs the storage to grow.
#[test]
fn a_hole_at_an_end_that_was_not_written_keeps_the_length() {
    let clears = [File::punch_hole, File::zero_range];
    for (clear, range) in clears.into_iter().flat_map(|clear| {
        [(clear, PAGE..20_000), (clear, 2 * PAGE..1 << 20), (clear, PAGE..3 * PAGE)]
    }) {
        let directory = directory();
        let path = file_of(&directory, "file", &[7; 5000]);
        let cache = quiet();
        let file = open(&cache, &path);
        file.append(&[8; 15_000]).unwrap();
        clear(&file, range.clone()).unwrap();
        let mut expected = [vec![7; 5000], vec![8; 15_000]].concat();
        let end = range.end.min(20_000) as usize;
        expected[range.start as usize..end].fill(0);
        assert_same(&read_all(&file), &expected);
        file.close().unwrap();
        assert_same(&std::fs::read(&path).unwrap(), &expected);
    }
}

#[test]
fn a_hole_that_cannot_be_punched_loses_no_byte() {
    let cache = quiet();
    let (backing, memory, file) = faulty(&cache, 8);
    file.write_all_at(&[8; PAGE as usize], 2 * PAGE).unwrap();
    backing.inject(Fault::on(Call::Fallocate).fails(libc::EIO));
    let needles = ["punch of a hole of 24576 bytes at position 4096"];
    let error = error_of(file.punch_hole(PAGE..7 * PAGE), &needles);
    assert_eq!((error.kind(), error.range()), (ErrorKind::Io, Some(PAGE..7 * PAGE)));
    let mut expected = vec![7; 8 * PAGE as usize];
    expected[2 * PAGE as usize..][..PAGE as usize].fill(8);
    assert_same(&read_all(&file), &expected);
    file.sync_data().unwrap();
    assert_same(&memory.bytes(), &expected);
    backing.inject(Fault::on(Call::Fallocate).fails(libc::EINTR));
    file.punch_hole(PAGE..7 * PAGE).unwrap();
    backing.inject(Fault::on(Call::Seek).fails(libc::EIO));
    error_of(file.seek_data(100), &["search for data from position 100"]);
    backing.inject(Fault::on(Call::Seek).fails(libc::EIO));
    error_of(file.seek_hole(100), &["search for a hole from position 100"]);
}

/// Reads and writes pages while the storage punches a hole around them. Returns the file's bytes.
fn use_while_punched(fails: bool) -> (Vec<u8>, Vec<u8>) {
    let cache = quiet();
    let (backing, memory, file) = faulty(&cache, 8);
    file.write_all_at(&[8; PAGE as usize], 2 * PAGE).unwrap();
    let gate = Gate::new();
    backing.inject(Fault::on(Call::Fallocate).held(&gate));
    if fails {
        backing.inject(Fault::on(Call::Fallocate).fails(libc::EIO));
    }
    thread::scope(|scope| {
        let punch = scope.spawn(|| file.punch_hole(PAGE..7 * PAGE));
        gate.wait_for_arrivals(1);
        // Absent pages are zeros already; a part and the whole of a page are written.
        assert_eq!(read(&file, 3 * PAGE, 2), [0; 2]);
        assert_eq!(read(&file, 4 * PAGE, 2), [0; 2]);
        file.write_all_at(&[9; 10], 4 * PAGE).unwrap();
        file.write_all_at(&[9; PAGE as usize], 5 * PAGE).unwrap();
        gate.open();
        assert_eq!(punch.join().unwrap().is_err(), fails);
    });
    let found = read_all(&file);
    file.sync_data().unwrap();
    assert_same(&memory.bytes(), &found);
    drop(file);
    (found, memory.bytes())
}

#[test]
fn pages_written_after_they_were_seen_as_a_hole_stay() {
    let mut expected = vec![7; 8 * PAGE as usize];
    expected[PAGE as usize..7 * PAGE as usize].fill(0);
    expected[4 * PAGE as usize..][..10].fill(9);
    expected[5 * PAGE as usize..6 * PAGE as usize].fill(9);
    let (found, stored) = use_while_punched(false);
    assert_same(&found, &expected);
    assert_same(&stored, &expected);
}

#[test]
fn pages_seen_as_a_hole_that_failed_are_old_or_written() {
    let mut expected = vec![7; 8 * PAGE as usize];
    expected[2 * PAGE as usize..3 * PAGE as usize].fill(8);
    expected[4 * PAGE as usize..5 * PAGE as usize].fill(0);
    expected[4 * PAGE as usize..][..10].fill(9);
    expected[5 * PAGE as usize..6 * PAGE as usize].fill(9);
    let (found, stored) = use_while_punched(true);
    assert_same(&found, &expected);
    assert_same(&stored, &expected);
}

#[test]
fn a_hole_waits_for_a_pin_mut_whose_owner_reads_in_it() {
    let cache = quiet();
    let (_backing, memory, file) = faulty(&cache, 8);
    thread::scope(|scope| {
        let mut pin = file.pin_mut(6 * PAGE..6 * PAGE + 8).unwrap();
        let error = file.punch_hole(0..8 * PAGE).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PinnedByCaller, "{error}");
        let punch = scope.spawn(|| file.punch_hole(0..8 * PAGE));
        // The storage is punched, and the call waits for the pin.
        while memory.bytes()[0] != 0 {
            thread::yield_now();
        }
        assert_eq!(read(&file, 5 * PAGE, 1), [0]);
        pin.copy_from(0, b"old").unwrap();
        drop(pin);
        punch.join().unwrap().unwrap();
    });
    assert_same(&read_all(&file), &[0; 8 * PAGE as usize]);
    file.sync_data().unwrap();
    assert_same(&memory.bytes(), &[0; 8 * PAGE as usize]);
}

#[test]
fn a_synced_hole_survives_every_crash() {
    for seed in 0..20 {
        let backing = Arc::new(CrashingBacking::new(vec![7; 16 * PAGE as usize]));
        let cache = quiet();
        let file = cache.open_backing(backing.clone(), &writable()).unwrap();
        file.write_all_at(&[8; 3 * PAGE as usize], 4 * PAGE).unwrap();
        file.punch_hole(2 * PAGE + 7..9 * PAGE - 7).unwrap();
        let mut expected = vec![7; 16 * PAGE as usize];
        expected[2 * PAGE as usize + 7..9 * PAGE as usize - 7].fill(0);
        assert_same(&read_all(&file), &expected);
        file.sync_data().unwrap();
        assert_same(&backing.crash(seed).live(), &expected);
    }
}

/// Pages that are written, read and punched at the same time. A word of each page has its value.
struct Race {
    file: File,
    /// Number of punches that have begun, and that have ended.
    begun: AtomicU64,
    ended: AtomicU64,
    is_over: AtomicBool,
}

const RACE_PAGES: u64 = 128;

impl Race {
    fn goes_on(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    fn value_at(&self, index: u64) -> u64 {
        let mut word = [0; 8];
        self.file.read_exact_at(&mut word, index * PAGE + 80).unwrap();
        u64::from_le_bytes(word)
    }

    /// Writes every second page, in whole or in part, with values that increase, and reads them if
    /// no punch was in progress.
    fn write(&self, writer: u64) {
        let mut random = fastrand::Rng::with_seed(writer);
        for value in (1_u64..).take_while(|_| self.goes_on()) {
            let index = random.u64(0..RACE_PAGES / 2) * 2 + writer;
            let punches = self.ended.load(Ordering::Acquire);
            let is_quiet = self.begun.load(Ordering::Acquire) == punches;
            if random.bool() {
                let page = value.to_le_bytes().repeat(PAGE as usize / 8);
                self.file.write_all_at(&page, index * PAGE).unwrap();
            } else {
                self.file.write_all_at(&value.to_le_bytes(), index * PAGE + 80).unwrap();
            }
            let found = self.value_at(index);
            if is_quiet && self.begun.load(Ordering::Acquire) == punches {
                assert_eq!(found, value, "page {index}");
            }
        }
    }

    /// Checks that no value comes back after the page was seen punched.
    fn read(&self) {
        let mut seen = [(0, 0); RACE_PAGES as usize];
        let mut random = fastrand::Rng::with_seed(9);
        while self.goes_on() {
            let index = random.u64(0..RACE_PAGES);
            let value = self.value_at(index);
            let (last, punched) = &mut seen[index as usize];
            if value == 0 {
                *punched = *last;
            } else {
                assert!(value >= *last && value > *punched, "{value} after {last}, {punched}");
            }
            *last = value.max(*last);
        }
    }
}

#[test]
fn values_before_a_hole_do_not_come_back() {
    let directory = directory();
    let path = file_of(&directory, "file", &vec![0; (RACE_PAGES * PAGE) as usize]);
    let builder = Cache::builder().memory(256 << 10).dirty_age_max(Duration::from_millis(1));
    let cache = builder.readahead_max(64 << 10).build().unwrap();
    let file = open(&cache, &path);
    let [begun, ended] = [(); 2].map(|()| AtomicU64::new(0));
    let race = Race { file, begun, ended, is_over: AtomicBool::new(false) };
    thread::scope(|scope| {
        for writer in 0..2 {
            let race = &race;
            scope.spawn(move || race.write(writer));
        }
        scope.spawn(|| race.read());
        scope.spawn(|| {
            while race.goes_on() {
                race.file.sync_data().unwrap();
            }
        });
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..300 {
            let [a, b] = [(); 2].map(|()| random.u64(0..RACE_PAGES * PAGE / 8) * 8);
            race.begun.fetch_add(1, Ordering::AcqRel);
            race.file.punch_hole(a.min(b)..a.max(b)).unwrap();
            race.ended.fetch_add(1, Ordering::AcqRel);
            thread::yield_now();
        }
        race.is_over.store(true, Ordering::Relaxed);
    });
    race.file.sync_data().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &read_all(&race.file));
    race.file.punch_hole(0..RACE_PAGES * PAGE).unwrap();
    let zeros = vec![0; (RACE_PAGES * PAGE) as usize];
    assert_same(&read_all(&race.file), &zeros);
    drop(race);
    assert_same(&read_all(&open(&cache_of(1 << 20), &path)), &zeros);
}

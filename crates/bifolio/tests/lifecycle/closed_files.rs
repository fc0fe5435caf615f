//! Closed files whose pages stay in memory (`CacheBuilder::closed_bytes_max`).

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use bifolio::{Advice, Cache, ErrorKind, OpenOptions, WriteGate};
use bifolio_testing::Call;

use crate::support::{
    Faulty, PAGE, Way, directory, file_of, has, open, random_file, read, read_all, wait_until,
    writable,
};

/// Memory that a closed file counts with besides its pages and its table.
const FILE_BYTES: u64 = 10 << 10;
/// Memory that a closed file with one page counts with.
const SMALL_BYTES: u64 = FILE_BYTES + 2 * PAGE;

fn cache_with(closed_bytes_max: u64) -> Cache {
    let builder = Cache::builder().memory(16 << 20).readahead_bytes_max(0);
    builder.closed_bytes_max(closed_bytes_max).build().unwrap()
}

/// Waits until a change of the file gets a later time than the last one.
fn wait_for_tick(path: &Path) {
    let changed = || {
        let found = fs::metadata(path).unwrap();
        UNIX_EPOCH + Duration::new(found.ctime() as u64, found.ctime_nsec() as u32)
    };
    wait_until("a tick", || changed().elapsed().is_ok_and(|age| age > Duration::from_millis(20)));
}

/// Returns the number of descriptors of `path` in this process.
fn descriptors_of(path: &Path) -> usize {
    let all = fs::read_dir("/proc/self/fd").unwrap().flatten();
    all.filter(|found| fs::read_link(found.path()).is_ok_and(|target| target == path)).count()
}

/// Opens, reads and closes a file whose times are past.
fn read_and_close(cache: &Cache, path: &Path, options: &OpenOptions) {
    wait_for_tick(path);
    read_all(&cache.open(path, options).unwrap());
}

/// Returns the pages that a read of the whole file misses.
fn misses_of(cache: &Cache, path: &Path, expected: &[u8]) -> u64 {
    let before = cache.stats().misses;
    assert!(read_all(&open(cache, path)) == expected, "{} has other bytes", path.display());
    cache.stats().misses - before
}

#[test]
fn a_reopened_file_finds_its_pages_and_kept_no_descriptor() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 5 * PAGE as usize + 7);
    let cache = cache_with(8 << 20);
    read_and_close(&cache, &path, &OpenOptions::new());
    assert_eq!(descriptors_of(&path), 0);
    let closed_bytes = cache.stats().closed_bytes;
    assert_eq!(closed_bytes, FILE_BYTES + 7 * PAGE, "6 pages and one of the table");
    assert_eq!(misses_of(&cache, &path, &bytes), 0);
    // Through another kind of handle, and another descriptor.
    let file = cache.open_fd(fs::File::open(&path).unwrap().into(), &OpenOptions::new()).unwrap();
    let before = cache.stats();
    assert_eq!(before.closed_bytes, 0, "it is open");
    assert_eq!(read(&file, PAGE, 100), bytes[PAGE as usize..][..100]);
    assert_eq!(cache.stats().misses, before.misses);
    drop(file);
    assert_eq!(cache.stats().closed_bytes, closed_bytes);
}

#[test]
fn a_cache_keeps_no_closed_file_by_default() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 8192);
    let cache = Cache::builder().memory(4 << 20).build().unwrap();
    read_and_close(&cache, &path, &OpenOptions::new());
    assert_eq!(cache.stats().closed_bytes, 0);
    assert!(misses_of(&cache, &path, &bytes) > 0);
}

#[test]
fn a_file_changed_while_closed_is_read_again() {
    type Change = fn(&Path);
    let in_place: Change = |path| {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(b"changed", 4000).unwrap();
    };
    let in_place_with_old_times: Change = |path| {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(b"changed", 4000).unwrap();
        file.set_modified(modified).unwrap();
    };
    let truncated: Change = |path| {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(5000).unwrap();
    };
    let truncated_and_extended: Change = |path| {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(5000).unwrap();
        file.set_len(3 * PAGE).unwrap();
    };
    let replaced: Change = |path| {
        let other = path.with_extension("new");
        fs::write(&other, vec![9; 3 * PAGE as usize]).unwrap();
        fs::rename(other, path).unwrap();
    };
    let removed_and_created: Change = |path| {
        fs::remove_file(path).unwrap();
        fs::write(path, vec![8; 3 * PAGE as usize]).unwrap();
    };
    let changes = [
        in_place,
        in_place_with_old_times,
        truncated,
        truncated_and_extended,
        replaced,
        removed_and_created,
    ];
    let cache = cache_with(8 << 20);
    for (number, change) in changes.into_iter().enumerate() {
        let directory = directory();
        let (path, _) = random_file(&directory, &format!("file {number}"), 3 * PAGE as usize);
        read_and_close(&cache, &path, &OpenOptions::new());
        assert!(cache.stats().closed_bytes > 0, "change {number}");
        change(&path);
        let pages = fs::metadata(&path).unwrap().len().div_ceil(PAGE);
        assert_eq!(misses_of(&cache, &path, &fs::read(&path).unwrap()), pages, "change {number}");
        cache.advise_all(Advice::DontNeed).unwrap();
    }
}

#[test]
fn a_file_changed_just_before_its_close_is_not_kept() {
    // In a loop, because the clock may tick between the change and the close.
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 8192);
    let cache = cache_with(8 << 20);
    wait_until("a close in the tick of the change", || {
        cache.advise_all(Advice::DontNeed).unwrap();
        let file = open(&cache, &path);
        file.write_all_at(b"changed", 0).unwrap();
        file.sync_data().unwrap();
        // As a write that the close itself makes.
        fs::File::open(&path).unwrap().set_modified(UNIX_EPOCH).unwrap();
        drop(file);
        cache.stats().closed_bytes == 0
    });
}

#[test]
fn a_written_file_is_kept_with_its_new_bytes() {
    let directory = directory();
    let (path, mut bytes) = random_file(&directory, "file", 3 * PAGE as usize);
    let cache = cache_with(8 << 20);
    let file = open(&cache, &path);
    read_all(&file);
    file.write_all_at(b"changed", 4000).unwrap();
    file.append(b"more").unwrap();
    file.sync_data().unwrap();
    wait_for_tick(&path);
    file.close().unwrap();
    bytes[4000..4007].copy_from_slice(b"changed");
    bytes.extend(b"more");
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert_eq!(descriptors_of(&path), 0);
    // First for reading: such a handle opens the file read-only.
    let reader = cache.open(&path, &OpenOptions::new()).unwrap();
    let before = cache.stats().misses;
    assert_eq!(read_all(&reader), bytes);
    let writer = open(&cache, &path);
    writer.write_all_at(b"again", 0).unwrap();
    writer.sync_data().unwrap();
    bytes[..5].copy_from_slice(b"again");
    assert_eq!(cache.stats().misses, before);
    assert_eq!(fs::read(&path).unwrap(), bytes);
    drop((reader, writer));
    cache.close().unwrap();
}

#[test]
fn closed_files_stay_within_their_limit() {
    let directory = directory();
    let cache = cache_with(10 * SMALL_BYTES + 100);
    let files: Vec<_> =
        (0..20).map(|number| random_file(&directory, &number.to_string(), 4000)).collect();
    for (path, _) in &files {
        read_and_close(&cache, path, &OpenOptions::new());
        assert!(cache.stats().closed_bytes <= 10 * SMALL_BYTES);
    }
    assert_eq!(cache.stats().closed_bytes, 10 * SMALL_BYTES);
    // The least recently closed were freed.
    for (path, bytes) in files.iter().skip(10) {
        assert_eq!(misses_of(&cache, path, bytes), 0);
    }
    assert_eq!(misses_of(&cache, &files[3].0, &files[3].1), 1);
    assert_eq!(misses_of(&cache, &files[10].0, &files[10].1), 1, "closed before the others");
    let (large, bytes) = random_file(&directory, "large", 60 * PAGE as usize);
    read_and_close(&cache, &large, &OpenOptions::new());
    assert!(misses_of(&cache, &large, &bytes) > 0, "larger than the limit");
}

#[test]
fn a_closed_file_is_charged_2_kib_besides_its_pages() {
    let directory = directory();
    let paths: Vec<_> =
        (0..500).map(|number| random_file(&directory, &number.to_string(), 100).0).collect();
    wait_for_tick(paths.last().unwrap());
    let cache = cache_with(16 << 20);
    // Descriptors of frames are charged once: here, whichever frames the files get.
    let filler = cache.memory_file("filler").unwrap();
    filler.write_all_at(&[1; 8 << 20], 0).unwrap();
    drop(filler);
    let metadata_of = |paths: &[PathBuf]| {
        for path in paths {
            read(&open(&cache, path), 0, 100);
        }
        let stats = cache.stats();
        (stats.metadata_bytes, stats.closed_bytes)
    };
    // The first 100 files need the first descriptors.
    let (before, _) = metadata_of(&paths[..100]);
    let (after, closed_bytes) = metadata_of(&paths[100..]);
    assert_eq!(after - before, 400 * (2048 + PAGE));
    assert_eq!(closed_bytes, 500 * SMALL_BYTES);
    cache.advise_all(Advice::DontNeed).unwrap();
    assert_eq!(cache.stats().closed_bytes, 0);
    assert_eq!(before - cache.stats().metadata_bytes, 100 * (2048 + PAGE));
}

#[test]
fn pages_of_closed_files_give_way_to_others() {
    let directory = directory();
    let small: Vec<_> =
        (0..300).map(|number| random_file(&directory, &number.to_string(), 4096)).collect();
    wait_for_tick(&small.last().unwrap().0);
    let (path, bytes) = random_file(&directory, "large", 6 << 20);
    let cache = Cache::builder().memory(2 << 20).closed_bytes_max(64 << 20).build().unwrap();
    for (path, _) in &small {
        read_all(&open(&cache, path));
    }
    let large = open(&cache, &path);
    for _ in 0..3 {
        assert_eq!(read_all(&large), bytes);
        let stats = cache.stats();
        assert!(stats.used_bytes <= stats.bound_bytes, "{stats:?}");
    }
    // Metadata makes room, too, once nothing else is left.
    let pins: Vec<_> = large.pins(0..large.len()).map_while(Result::ok).collect();
    assert!(pins.len() > 300, "{} pages pinned: {:?}", pins.len(), cache.stats());
    drop(pins);
    for (path, bytes) in &small {
        assert_eq!(&read_all(&open(&cache, path)), bytes);
    }
    cache.set_memory(1 << 20).unwrap();
    cache.close().unwrap();
}

#[test]
fn an_open_with_other_needs_reads_a_closed_file_again() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 3 * PAGE as usize);
    let cache = cache_with(8 << 20);
    let small = OpenOptions::new().len_max(1 << 30);
    let mut others = vec![
        small.clone().folio_bytes(16 << 10),
        small.clone().len_max(1 << 31),
        small.clone().immutable(true).len_max(1 << 31),
    ];
    if crate::support::files_can_be_mapped() {
        others.push(small.clone().mappable(true));
    }
    for other in others {
        read_and_close(&cache, &path, &small);
        assert!(cache.stats().closed_bytes > 0);
        let before = cache.stats().misses;
        let file = cache.open(&path, &other).unwrap();
        assert_eq!(read_all(&file), bytes);
        assert!(cache.stats().misses > before, "{other:?}");
        drop(file);
        cache.advise_all(Advice::DontNeed).unwrap();
    }
    read_and_close(&cache, &path, &small);
    let before = cache.stats().misses;
    let file = cache.open(&path, &small.clone().immutable(true).len_max(1 << 20)).unwrap();
    assert_eq!(file.pin(0..10).unwrap().as_bytes().unwrap(), &bytes[..10]);
    assert_eq!(cache.stats().misses, before);
    drop(file);
    let file = cache.open(&path, &writable().len_max(1 << 30).truncate(true)).unwrap();
    assert_eq!(read_all(&file), b"");
}

#[test]
fn an_open_that_fails_frees_a_closed_file() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 3 * PAGE as usize);
    let cache = cache_with(8 << 20);
    read_and_close(&cache, &path, &writable());
    let other = Cache::builder().memory(1 << 20).build().unwrap();
    let locked = other.open(&path, &writable().exclusive(true)).unwrap();
    let refused = cache.open(&path, &writable().exclusive(true)).unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::Locked { .. }), "{refused}");
    assert_eq!(cache.stats().closed_bytes, 0);
    drop(locked);
    assert_eq!(misses_of(&cache, &path, &bytes), 3);
}

#[derive(Debug)]
struct OpenGate;

impl WriteGate for OpenGate {
    fn durable_lsn(&self) -> u64 {
        u64::MAX - 1
    }

    fn make_durable(&self, _lsn: u64) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn files_that_a_later_open_cannot_check_are_not_kept() {
    let directory = directory();
    let cache = cache_with(8 << 20);
    // Without a name.
    let (path, _) = random_file(&directory, "unlinked", 8192);
    wait_for_tick(&path);
    let file = open(&cache, &path);
    read_all(&file);
    fs::remove_file(&path).unwrap();
    drop(file);
    assert_eq!(cache.stats().closed_bytes, 0);
    // Changed by another program while it was open here.
    let (path, _) = random_file(&directory, "changed", 8192);
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    read_all(&file);
    fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(b"x", 0).unwrap();
    wait_for_tick(&path);
    drop(file);
    assert_eq!(cache.stats().closed_bytes, 0);
    // With a gate, which the next open would not expect.
    let (path, _) = random_file(&directory, "gated", 8192);
    wait_for_tick(&path);
    let file = open(&cache, &path);
    file.set_gate(Arc::new(OpenGate)).unwrap();
    read_all(&file);
    drop(file);
    assert_eq!(cache.stats().closed_bytes, 0);
    // On a backing of the caller's.
    let faulty = Faulty::new(Way::Memory, 8192, 3);
    read_all(&faulty.open(&cache));
    assert_eq!(cache.stats().closed_bytes, 0);
    assert!(faulty.backing.calls(Call::Read) > 0);
}

#[test]
fn files_are_closed_and_opened_by_many_threads() {
    let directory = directory();
    let files: Vec<_> =
        (0..8).map(|number| file_of(&directory, &number.to_string(), &[number; 9000])).collect();
    wait_for_tick(files.last().unwrap());
    let cache = Cache::builder().memory(1 << 20).closed_bytes_max(192 << 10).build().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let (cache, files) = (&cache, &files);
            scope.spawn(move || {
                for round in 0..300 {
                    let number = (thread + round * 7) % files.len();
                    let file = open(cache, &files[number]);
                    let position = (round as u64 * 1111) % 8000;
                    assert_eq!(read(&file, position, 1000), [number as u8; 1000]);
                    if thread == 0 {
                        file.write_all_at(&[number as u8; 100], position).unwrap();
                    }
                    if round % 50 == 0 {
                        cache.advise_all(Advice::DontNeed).unwrap();
                    }
                }
            });
        }
    });
    assert!(cache.stats().closed_bytes <= 192 << 10);
    cache.close().unwrap();
    let (path, number) = (&files[5], 5);
    assert_eq!(fs::read(path).unwrap(), [number; 9000]);
    assert!(has(bifolio::Feature::DirectIo) || descriptors_of(path) == 0);
}

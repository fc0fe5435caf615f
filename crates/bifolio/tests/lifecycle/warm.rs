//! Lists of hot pages: what a cache has in memory is read again by the next one, into free memory
//! only, whatever has become of the list, the files and the devices.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use bifolio::backing::FileIdentity;
use bifolio::{Access, Cache, ErrorKind, File, HotRestore, OpenOptions, RestoreProgress};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking, fill_bytes, with_seeds};
use fastrand::Rng;
use tempfile::TempDir;

use crate::support::{
    PAGE, assert_same, cache_of, directory, error_of, file_of, files_can_be_mapped, mappable, open,
    random_file, read, read_all, wait_until, without_root, writable,
};

/// Length of a file with many pages, bytes.
const LENGTH: usize = 8 << 20;

fn random_reader(cache: &Cache, path: &Path) -> File {
    let file = cache.open(path, &OpenOptions::new()).unwrap();
    file.set_access(Access::Random);
    file
}

/// Reads single pages.
fn touch(file: &File, pages: impl IntoIterator<Item = u64>) {
    for page in pages {
        file.read_exact_at(&mut [0], page * PAGE).unwrap();
    }
}

fn is_resident(file: &File, page: u64) -> bool {
    file.residency(page * PAGE..(page + 1) * PAGE).unwrap().resident == 1
}

fn resident_pages(file: &File) -> u64 {
    file.residency(..).unwrap().resident
}

/// Saves the pages of a file that a cache of its own has read.
fn save_pages_of(path: &Path, list: &Path, pages: impl IntoIterator<Item = u64>) {
    let cache = cache_of(16 << 20);
    let file = random_reader(&cache, path);
    touch(&file, pages);
    cache.save_hot(list).unwrap();
}

/// Waits for the end of a restore.
fn over(restore: &HotRestore) -> RestoreProgress {
    wait_until("the restore ends", || restore.progress().is_over);
    restore.progress()
}

#[test]
fn a_new_cache_reads_what_the_last_one_had() {
    let directory = directory();
    let list = directory.path().join("hot");
    let files: Vec<_> =
        (0..3).map(|number| random_file(&directory, &format!("{number}"), LENGTH)).collect();
    let mut random = Rng::with_seed(1);
    let pages: Vec<Vec<u64>> =
        (0..3).map(|_| (0..200).map(|_| random.u64(..LENGTH as u64 / PAGE)).collect()).collect();
    let cache = cache_of(16 << 20);
    let open_all = |cache: &Cache| -> Vec<File> {
        files.iter().map(|(path, _)| random_reader(cache, path)).collect()
    };
    let before = open_all(&cache);
    before.iter().zip(&pages).for_each(|(file, pages)| touch(file, pages.iter().copied()));
    let resident: u64 = before.iter().map(resident_pages).sum();
    let saved = cache.save_hot(&list).unwrap();
    assert_eq!((saved.files, saved.page_bytes), (3, resident * PAGE));
    assert_eq!(saved.list_bytes, fs::metadata(&list).unwrap().len());
    assert!(saved.list_bytes < 5 * resident + 3 * 4096, "{saved:?}");
    drop((before, cache));
    // Files that are open, and one that is opened later.
    let cache = cache_of(16 << 20);
    let mut after: Vec<_> =
        files[..2].iter().map(|(path, _)| random_reader(&cache, path)).collect();
    let restore = cache.restore_hot(&list).unwrap();
    let progress = restore.wait();
    assert_eq!((progress.files, progress.files_found), (3, 2));
    assert!(!progress.is_over && !progress.is_cut && !progress.is_full, "{progress:?}");
    assert!(
        after
            .iter()
            .zip(&pages)
            .all(|(file, pages)| { pages.iter().all(|page| is_resident(file, *page)) })
    );
    after.push(random_reader(&cache, &files[2].0));
    let progress = restore.wait();
    assert_eq!((progress.read_bytes, progress.listed_bytes), (resident * PAGE, resident * PAGE));
    assert_eq!(progress.resident_bytes, 0);
    assert!(over(&restore).is_over);
    let misses = cache.stats().reads.misses;
    for ((file, pages), (_, bytes)) in after.iter().zip(&pages).zip(&files) {
        for page in pages {
            let start = (page * PAGE) as usize;
            assert_same(&read(file, page * PAGE, 4096), &bytes[start..start + 4096]);
        }
    }
    assert_eq!(cache.stats().reads.misses, misses);
    assert_eq!(after.iter().map(resident_pages).sum::<u64>(), resident);
}

#[test]
fn a_restore_reads_only_what_is_missing_and_evicts_nothing() {
    let directory = directory();
    let list = directory.path().join("hot");
    let (path, bytes) = random_file(&directory, "file", LENGTH);
    save_pages_of(&path, &list, 0..1000);
    // A part is resident.
    let cache = cache_of(16 << 20);
    let file = random_reader(&cache, &path);
    touch(&file, 500..600);
    let progress = over(&cache.restore_hot(&list).unwrap());
    assert_eq!(progress.resident_bytes, 100 * PAGE, "{progress:?}");
    assert_eq!(progress.read_bytes, 900 * PAGE);
    // A cache that other pages fill.
    let cache = cache_of(2 << 20);
    let (other_path, _) = random_file(&directory, "other", LENGTH);
    let (file, other) = (random_reader(&cache, &path), random_reader(&cache, &other_path));
    touch(&other, 0..2048);
    let progress = over(&cache.restore_hot(&list).unwrap());
    assert!(progress.is_full && progress.read_bytes <= 64 * PAGE, "{progress:?}");
    assert!(resident_pages(&other) > 300);
    // One that is smaller than the list.
    let cache = cache_of(2 << 20);
    let small = random_reader(&cache, &path);
    let progress = over(&cache.restore_hot(&list).unwrap());
    assert!(progress.is_full || progress.is_cut, "{progress:?}");
    assert!(progress.read_bytes > 1 << 20, "{progress:?}");
    let stats = cache.stats();
    assert!(stats.memory.used_bytes <= 2 << 20 && stats.evictions.folios == 0, "{stats:?}");
    assert_same(&read_all(&small), &bytes);
    drop(file);
}

/// Pages that were used again are read first, and stay where a scan passes.
#[test]
fn the_hottest_pages_are_restored_first() {
    const PAGES: u64 = 8192;
    let directory = directory();
    let list = directory.path().join("hot");
    let path = file_of(&directory, "file", &vec![7; (PAGES * PAGE) as usize]);
    let cache = cache_of(4 << 20);
    let file = random_reader(&cache, &path);
    let hot = || (0..2048).step_by(16);
    let mut random = Rng::with_seed(5);
    // The hot ones are used between the others.
    for _ in 0..300 {
        touch(&file, (0..32).map(|_| random.u64(..PAGES)));
        touch(&file, hot());
    }
    let hot: Vec<u64> = hot().filter(|page| is_resident(&file, *page)).collect();
    assert!(hot.len() > 100, "{} of the hot pages stay", hot.len());
    cache.save_hot(&list).unwrap();
    drop((file, cache));
    // Room for a part.
    let cache = cache_of(2 << 20);
    let file = random_reader(&cache, &path);
    let progress = over(&cache.restore_hot(&list).unwrap());
    assert!(progress.read_bytes < progress.listed_bytes, "{progress:?}");
    let restored = |pages: &[u64]| pages.iter().filter(|page| is_resident(&file, **page)).count();
    assert_eq!(restored(&hot), hot.len());
    // The first reads push out the others. Unmarked, the hot ones would go: they came first.
    touch(&file, 6144..6164);
    assert!(restored(&hot) * 2 > hot.len(), "{} of {}", restored(&hot), hot.len());
}

/// A list of every kind of damage: an error, or a part of it is used; and the bytes are those of
/// the file.
#[test]
fn a_damaged_list_never_gives_wrong_bytes() {
    let directory = directory();
    let list = directory.path().join("hot");
    let (path, bytes) = random_file(&directory, "file", 64 * PAGE as usize);
    save_pages_of(&path, &list, (0..64).step_by(3));
    let whole = fs::read(&list).unwrap();
    let cache = cache_of(1 << 20);
    with_seeds(40, |seed| {
        let mut random = Rng::with_seed(seed);
        let mut damaged = whole.clone();
        match random.u32(0..4) {
            0 => damaged.truncate(random.usize(..whole.len())),
            1 => damaged.extend((0..random.usize(1..100)).map(|_| random.u8(..))),
            2 => damaged = (0..random.usize(..1000)).map(|_| random.u8(..)).collect(),
            _ => {
                for _ in 0..random.usize(1..4) {
                    let at = random.usize(..damaged.len());
                    damaged[at] ^= 1 << random.u32(..8);
                }
            }
        }
        fs::write(&list, &damaged).unwrap();
        let file = random_reader(&cache, &path);
        match cache.restore_hot(&list) {
            Ok(restore) => {
                let progress = restore.wait();
                assert!(progress.is_cut || damaged == whole, "{progress:?}");
                let is_listed = |page: u64| page.is_multiple_of(3) || !is_resident(&file, page);
                assert!((0..64).all(is_listed));
                restore.cancel();
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Config, "{error}"),
        }
        assert_same(&read_all(&file), &bytes);
    });
}

#[test]
fn what_is_no_list_is_refused_by_name() {
    let directory = directory();
    let cache = cache_of(1 << 20);
    let absent = directory.path().join("absent");
    let refused = |path: &Path, needles: &[&str]| {
        error_of(cache.restore_hot(path).map(|restore| restore.progress()), needles).kind()
    };
    assert_eq!(refused(&absent, &["absent", "No such file"]), ErrorKind::Open);
    assert_eq!(refused(directory.path(), &["a directory"]), ErrorKind::NotRegular);
    let pipe = directory.path().join("pipe");
    let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &*name, rustix::fs::Mode::RUSR).unwrap();
    assert_eq!(refused(&pipe, &["a named pipe"]), ErrorKind::NotRegular);
    for bytes in [&b""[..], b"bifolio hot pages 2\n", b"#!/bin/sh\n"] {
        let other = file_of(&directory, "other", bytes);
        assert_eq!(refused(&other, &["other", "no list of hot pages"]), ErrorKind::Config);
    }
    cache.close().unwrap();
    assert_eq!(cache.save_hot(&absent).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(refused(&absent, &[]), ErrorKind::Closed);
}

/// The former list stays until the new one is there as a whole.
#[test]
fn a_save_replaces_the_list_or_changes_nothing() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", LENGTH);
    let names = || {
        let found = fs::read_dir(directory.path()).unwrap();
        let mut names: Vec<_> = found.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let cache = cache_of(16 << 20);
    let list = directory.path().join("hot");
    assert_eq!(cache.save_hot(&list).unwrap().files, 0);
    assert_eq!(fs::metadata(&list).unwrap().mode() & 0o777, 0o600);
    let empty = fs::read(&list).unwrap();
    let file = random_reader(&cache, &path);
    touch(&file, 0..100);
    error_of(cache.save_hot("/"), &["no name"]);
    error_of(cache.save_hot(directory.path().join("none/hot")), &["none/hot", "creation failed"]);
    // Only a list is replaced.
    let taken = directory.path().join("taken");
    fs::create_dir(&taken).unwrap();
    error_of(cache.save_hot(&taken), &["taken", "a directory"]);
    error_of(cache.save_hot(&path), &["file", "is not replaced"]);
    assert_eq!(names(), ["file", "hot", "taken"]);
    without_root(|| {
        fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o555))
            .unwrap();
        let refused = cache.save_hot(&list);
        fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        error_of(refused, &["hot", "creation failed"]);
    });
    assert_eq!(fs::read(&list).unwrap(), empty);
    assert_eq!(cache.save_hot(&list).unwrap().page_bytes, 100 * PAGE);
    assert_eq!(names(), ["file", "hot", "taken"]);
    // Several at once: each is whole.
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                (0..20).for_each(|_| assert_eq!(cache.save_hot(&list).unwrap().files, 1))
            });
        }
    });
    let other = cache_of(16 << 20);
    let _file = random_reader(&other, &path);
    assert_eq!(over(&other.restore_hot(&list).unwrap()).read_bytes, 100 * PAGE);
}

/// Another file has the name of a listed one: its pages are not read. A listed one that was
/// changed is read as it is.
#[test]
fn a_file_that_was_replaced_is_left_alone_and_one_that_changed_is_not() {
    let directory = directory();
    let list = directory.path().join("hot");
    let (path, _) = random_file(&directory, "file", LENGTH);
    save_pages_of(&path, &list, 0..1000);
    let restored = |path: &PathBuf| {
        let cache = cache_of(16 << 20);
        let file = random_reader(&cache, path);
        let progress = cache.restore_hot(&list).unwrap().wait();
        (progress, read_all(&file))
    };
    // Written, and cut.
    let mut bytes = fill_bytes(9, 500 * PAGE as usize + 7);
    fs::write(&path, &bytes).unwrap();
    let (progress, found) = restored(&path);
    assert_eq!((progress.files_found, progress.read_bytes), (1, 501 * PAGE), "{progress:?}");
    assert_same(&found, &bytes);
    // Renamed.
    let renamed = directory.path().join("renamed");
    fs::rename(&path, &renamed).unwrap();
    assert_eq!(restored(&renamed).0.files_found, 1);
    // Another file there.
    bytes = fill_bytes(10, LENGTH);
    fs::write(&path, &bytes).unwrap();
    let (progress, found) = restored(&path);
    assert_eq!((progress.files_found, progress.read_bytes), (0, 0), "{progress:?}");
    assert_same(&found, &bytes);
    // One with the number of the listed one, which was deleted, if the file system uses it again.
    let number = fs::metadata(&renamed).unwrap().ino();
    fs::remove_file(&renamed).unwrap();
    for attempt in 0..50 {
        let again = file_of(&directory, &format!("again {attempt}"), &bytes);
        if fs::metadata(&again).unwrap().ino() == number {
            assert_eq!(restored(&again).0.files_found, 0);
        }
    }
}

/// Returns a backing and its bytes, and a list of the pages of it that a cache had in memory.
fn faulty(
    directory: &TempDir,
    pages: impl IntoIterator<Item = u64>,
) -> (Arc<FaultyBacking>, Vec<u8>, PathBuf) {
    let bytes = fill_bytes(3, LENGTH);
    let memory = MemoryBacking::new(bytes.clone()).identified(FileIdentity::custom(7, 7));
    let (backing, list) = (Arc::new(FaultyBacking::new(memory)), directory.path().join("hot"));
    let cache = cache_of(16 << 20);
    let file = open_faulty(&cache, &backing);
    touch(&file, pages);
    cache.save_hot(&list).unwrap();
    (backing, bytes, list)
}

fn open_faulty(cache: &Cache, backing: &Arc<FaultyBacking>) -> File {
    let file = cache.open_backing(Arc::clone(backing) as _, &OpenOptions::new()).unwrap();
    file.set_access(Access::Random);
    file
}

/// A file is closed while its pages are read: the rest follows when it is opened again.
#[test]
fn a_file_that_is_closed_meanwhile_is_continued_at_its_next_open() {
    let directory = directory();
    let (backing, bytes, list) = faulty(&directory, (0..2000).step_by(2));
    let cache = cache_of(16 << 20);
    let restore = cache.restore_hot(&list).unwrap();
    let mut rounds = 0;
    while !restore.progress().is_over {
        let file = open_faulty(&cache, &backing);
        if rounds % 3 == 0 {
            // Some are read, perhaps.
            wait_until("pages are read", || {
                restore.progress().is_over || resident_pages(&file) > 0
            });
        }
        rounds += 1;
        let page = rounds % 2000;
        let start = page as usize * 4096;
        assert_same(&read(&file, page * PAGE, 4096), &bytes[start..start + 4096]);
        drop(file);
    }
    let progress = restore.progress();
    // What `read` or a round before has read is read once more, or not.
    assert!(progress.read_bytes + progress.resident_bytes == 1000 * PAGE, "{progress:?}");
}

/// Neither a restore that its device does not answer, nor one that waits for an open, keeps the
/// cache or a caller.
#[test]
fn a_restore_ends_with_its_cache_even_if_the_device_hangs() {
    let directory = directory();
    let (backing, _, list) = faulty(&directory, 0..1000);

    let idle = cache_of(16 << 20);
    let restore = idle.restore_hot(&list).unwrap();
    assert!(!restore.wait().is_over);
    drop(idle);
    assert!(over(&restore).read_bytes == 0);

    let cancelled = cache_of(16 << 20);
    let restore = cancelled.restore_hot(&list).unwrap();
    restore.cancel();
    assert!(over(&restore).is_over);
    let file = open_faulty(&cancelled, &backing);
    assert_eq!(resident_pages(&file), 0);
    drop((file, cancelled));

    let gate = Gate::new();
    let cache = cache_of(16 << 20);
    let file = open_faulty(&cache, &backing);
    backing.inject(Fault::on(Call::Read).forever().held(&gate));
    let restore = cache.restore_hot(&list).unwrap();
    gate.wait_for_arrivals(1);
    // Others are served.
    let (path, bytes) = random_file(&directory, "other", LENGTH);
    assert_same(&read_all(&open(&cache, &path)), &bytes);
    drop(cache);
    assert!(!restore.progress().is_over);
    gate.open();
    let progress = over(&restore);
    assert!(progress.read_bytes < progress.listed_bytes, "{progress:?}");
    drop(file);
}

#[test]
fn pages_that_cannot_be_read_are_left_out() {
    let directory = directory();
    let (backing, bytes, list) = faulty(&directory, (0..1000).step_by(2));
    let cache = cache_of(16 << 20);
    let file = open_faulty(&cache, &backing);
    backing.inject(Fault::on(Call::Read).at(100 * PAGE..200 * PAGE).forever().fails(libc::EIO));
    let progress = over(&cache.restore_hot(&list).unwrap());
    assert_eq!(progress.read_bytes, 450 * PAGE, "{progress:?}");
    assert_eq!(resident_pages(&file), 450);
    error_of(file.read_exact_at(&mut [0], 100 * PAGE), &["409600", "Input/output"]);
    backing.heal();
    assert_same(&read_all(&file), &bytes);
}

#[test]
fn kept_files_are_listed_and_memory_files_are_not() {
    let directory = directory();
    let list = directory.path().join("hot");
    let (path, _) = random_file(&directory, "file", LENGTH);
    let cache = Cache::builder().memory(16 << 20).kept_files(10).build().unwrap();
    let scratch = cache.memory_file("scratch").unwrap();
    scratch.write_all_at(&[7; 100_000], 0).unwrap();
    let file = random_reader(&cache, &path);
    touch(&file, 0..50);
    drop(file);
    let before = cache.stats().reads.misses;
    touch(&random_reader(&cache, &path), 0..50);
    // Not where closed files cannot be kept.
    let is_kept = cache.stats().reads.misses == before;
    let saved = cache.save_hot(&list).unwrap();
    let pages = if is_kept { 50 } else { 0 };
    assert_eq!(saved.page_bytes, pages * PAGE);
    let other = cache_of(16 << 20);
    let _file = random_reader(&other, &path);
    assert_eq!(other.restore_hot(&list).unwrap().wait().read_bytes, pages * PAGE);
}

#[test]
fn files_of_every_kind_of_folio_and_of_maps_are_restored() {
    let directory = directory();
    let list = directory.path().join("hot");
    let (path, bytes) = random_file(&directory, "file", LENGTH + 5);
    let mut kinds = vec![writable(), OpenOptions::new().folio_bytes(64 << 10)];
    if files_can_be_mapped() {
        kinds.push(mappable(OpenOptions::new()));
    }
    for options in kinds {
        let open = |cache: &Cache| {
            let file = cache.open(&path, &options).unwrap();
            file.set_access(Access::Random);
            file
        };
        let cache = cache_of(32 << 20);
        let file = open(&cache);
        touch(&file, (0..2049).step_by(7));
        let resident = resident_pages(&file);
        let saved = cache.save_hot(&list).unwrap();
        drop((file, cache));
        let cache = cache_of(32 << 20);
        let file = open(&cache);
        let progress = over(&cache.restore_hot(&list).unwrap());
        assert_eq!((progress.read_bytes, progress.is_full), (saved.page_bytes, false));
        assert_eq!(resident_pages(&file), resident, "{options:?}");
        assert_same(&read_all(&file), &bytes);
    }
}

/// Saves and restores beside everything else that callers do.
#[test]
fn saves_and_restores_run_beside_all_other_calls() {
    let directory = directory();
    let files: Vec<_> = (0..3)
        .map(|number| file_of(&directory, &format!("{number}"), &vec![number; 1 << 20]))
        .collect();
    let list = directory.path().join("hot");
    let cache = Cache::builder().memory(1 << 20).kept_files(2).build().unwrap();
    cache.save_hot(&list).unwrap();
    thread::scope(|scope| {
        for thread in 0..3 {
            let (cache, files, list) = (&cache, &files, &list);
            scope.spawn(move || {
                let mut random = Rng::with_seed(thread);
                for _ in 0..150 {
                    let number = random.usize(..files.len());
                    let file = cache.open(&files[number], &OpenOptions::new()).unwrap();
                    for _ in 0..random.usize(..20) {
                        let mut bytes = [9; 5000];
                        let start = random.u64(..(1 << 20) - 5000);
                        file.read_exact_at(&mut bytes, start).unwrap();
                        assert_eq!(bytes, [number as u8; 5000]);
                    }
                    match random.u32(..8) {
                        0 => assert!(cache.save_hot(list).unwrap().list_bytes > 0),
                        1 => drop(cache.restore_hot(list).unwrap()),
                        2 => assert!(cache.restore_hot(list).unwrap().wait().files <= 3),
                        3 => drop(cache.evict_all().unwrap()),
                        4 => {
                            drop(cache.set_memory(if random.bool() { 512 << 10 } else { 1 << 20 }))
                        }
                        _ => {}
                    }
                }
            });
        }
    });
    assert!(cache.stats().memory.used_bytes <= 1 << 20);
    cache.close().unwrap();
}

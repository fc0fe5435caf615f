//! The calls of a directory, one by one: the promises that tantivy's documentation makes for them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::{fs, thread};

use bifolio::{Cache, Feature};
use bifolio_tantivy::BifolioDirectory;
use tantivy::Directory;
use tantivy::directory::error::{
    DeleteError, LockError, OpenDirectoryError, OpenReadError, OpenWriteError,
};
use tantivy::directory::{Lock, TerminatingWrite, WatchCallback};
use tempfile::TempDir;

use super::model::cache;

const FILE: &str = "segment.store";
const META: &str = "meta.json";

fn directory() -> (TempDir, BifolioDirectory) {
    let folder = tempfile::tempdir().unwrap();
    let directory = BifolioDirectory::open(folder.path(), &cache(8 << 20)).unwrap();
    (folder, directory)
}

fn write(directory: &dyn Directory, path: &str, bytes: &[u8]) {
    let mut writer = directory.open_write(Path::new(path)).unwrap();
    writer.write_all(bytes).unwrap();
    writer.terminate().unwrap();
}

fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 + at / 251) as u8).collect()
}

#[test]
fn every_slice_of_a_file_has_its_bytes() {
    let without_maps = Cache::builder().memory(8 << 20).disable(Feature::UserFaults);
    for cache in [cache(8 << 20), without_maps.build().unwrap()] {
        let folder = tempfile::tempdir().unwrap();
        let directory = BifolioDirectory::open(folder.path(), &cache).unwrap();
        let bytes = bytes(1 << 20);
        write(&directory, FILE, &bytes);
        let file = directory.open_read(Path::new(FILE)).unwrap();
        assert_eq!(file.read_bytes().unwrap().as_slice(), bytes);
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..300 {
            let order = random.u32(..=20);
            let length = random.usize(..=1 << order);
            let start = random.usize(..=bytes.len() - length);
            let slice = file.read_bytes_slice(start..start + length).unwrap();
            assert_eq!(slice.as_slice(), &bytes[start..start + length]);
        }
    }
}

#[test]
fn slices_outlive_the_file_handle_and_the_directory() {
    let (folder, directory) = directory();
    let bytes = bytes(1 << 20);
    write(&directory, FILE, &bytes);
    let file = directory.open_read(Path::new(FILE)).unwrap();
    let (short, long) = (file.slice(5..99), file.slice(9..900_000));
    let (short, long) = (short.read_bytes().unwrap(), long.read_bytes().unwrap());
    drop((file, directory, folder));
    assert_eq!(short.as_slice(), &bytes[5..99]);
    assert_eq!(long.as_slice(), &bytes[9..900_000]);
}

#[test]
fn an_empty_file_can_be_read() {
    let (_folder, directory) = directory();
    write(&directory, FILE, &[]);
    assert!(directory.open_read(Path::new(FILE)).unwrap().read_bytes().unwrap().is_empty());
}

#[test]
fn a_file_is_written_once_and_exists_from_its_open_on() {
    let (_folder, directory) = directory();
    let path = Path::new(FILE);
    let missing = directory.open_read(path).unwrap_err();
    assert!(matches!(missing, OpenReadError::FileDoesNotExist(_)), "{missing}");
    assert!(!directory.exists(path).unwrap());
    let writer = directory.open_write(path).unwrap();
    assert!(directory.exists(path).unwrap());
    let is_refused = || {
        let refused = directory.open_write(path).map(drop).unwrap_err();
        assert!(matches!(refused, OpenWriteError::FileAlreadyExists(_)), "{refused}");
    };
    is_refused();
    writer.terminate().unwrap();
    is_refused();
    directory.delete(path).unwrap();
    assert!(!directory.exists(path).unwrap());
    let missing = directory.delete(path).unwrap_err();
    assert!(matches!(missing, DeleteError::FileDoesNotExist(_)), "{missing}");
    write(&directory, FILE, b"again");
}

#[test]
fn readers_keep_a_file_that_is_deleted_and_written_anew() {
    let (_folder, directory) = directory();
    let old = bytes(300_000);
    write(&directory, FILE, &old);
    let file = directory.open_read(Path::new(FILE)).unwrap();
    let long = file.read_bytes().unwrap();
    directory.delete(Path::new(FILE)).unwrap();
    write(&directory, FILE, &[7; 300_000]);
    assert_eq!(long.as_slice(), old);
    assert_eq!(file.read_bytes_slice(200_000..200_100).unwrap().as_slice(), &old[200_000..200_100]);
    let new = directory.open_read(Path::new(FILE)).unwrap();
    assert_eq!(new.read_bytes().unwrap().as_slice(), [7; 300_000]);
}

#[test]
fn a_file_that_is_replaced_is_read_whole() {
    let (folder, directory) = directory();
    let path = Path::new(META);
    let missing = directory.atomic_read(path).unwrap_err();
    assert!(matches!(missing, OpenReadError::FileDoesNotExist(_)), "{missing}");
    for content in [&b"first"[..], b"2"] {
        directory.atomic_write(path, content).unwrap();
        assert_eq!(directory.atomic_read(path).unwrap(), content);
    }
    directory.sync_directory().unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing temporary is left");
}

#[test]
fn the_folder_must_exist_and_be_one() {
    let (folder, _directory) = directory();
    let cache = cache(8 << 20);
    let missing = BifolioDirectory::open(folder.path().join("none"), &cache).unwrap_err();
    assert!(matches!(missing, OpenDirectoryError::DoesNotExist(_)), "{missing}");
    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    let error = BifolioDirectory::open(file, &cache).unwrap_err();
    assert!(matches!(error, OpenDirectoryError::NotADirectory(_)), "{error}");
}

#[test]
fn a_writer_that_is_abandoned_leaves_nothing_dirty() {
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(8 << 20);
    let directory = BifolioDirectory::open(folder.path(), &cache).unwrap();
    let mut writer = directory.open_write(Path::new(FILE)).unwrap();
    writer.write_all(&bytes(100_000)).unwrap();
    drop(writer);
    assert_eq!(cache.stats().memory.dirty_bytes, 0);
    directory.delete(Path::new(FILE)).unwrap();
    drop(directory);
    cache.close().unwrap();
}

fn lock(name: &str, is_blocking: bool) -> Lock {
    Lock { filepath: PathBuf::from(name), is_blocking }
}

#[test]
fn a_lock_is_busy_until_its_owner_drops_it() {
    let (folder, directory) = directory();
    // As another process would, which has another cache.
    let other = BifolioDirectory::open(folder.path(), &cache(8 << 20)).unwrap();
    let held = directory.acquire_lock(&lock("a.lock", false)).unwrap();
    let _other_lock = directory.acquire_lock(&lock("b.lock", false)).unwrap();
    for directory in [&directory, &other] {
        let busy = directory.acquire_lock(&lock("a.lock", false)).map(drop).unwrap_err();
        assert!(matches!(busy, LockError::LockBusy), "{busy}");
    }
    let (locked, told) = mpsc::channel();
    let waiter = thread::spawn(move || {
        let _lock = other.acquire_lock(&lock("a.lock", true)).unwrap();
        locked.send(()).unwrap();
    });
    assert!(told.try_recv().is_err());
    drop(held);
    told.recv().unwrap();
    waiter.join().unwrap();
}

/// Subscribes a callback and returns its end of a channel.
fn watch(directory: &BifolioDirectory) -> (tantivy::directory::WatchHandle, mpsc::Receiver<()>) {
    let (sender, calls) = mpsc::channel();
    let callback = WatchCallback::new(move || sender.send(()).unwrap());
    (directory.watch(callback).unwrap(), calls)
}

#[test]
fn commits_are_told_while_the_watch_exists() {
    let (folder, directory) = directory();
    directory.atomic_write(Path::new(META), b"before").unwrap();
    let (first, first_calls) = watch(&directory);
    assert!(first_calls.try_recv().is_err(), "nothing has changed yet");
    directory.atomic_write(Path::new(META), b"one").unwrap();
    first_calls.recv().unwrap();
    // Another process.
    let other = BifolioDirectory::open(folder.path(), &cache(8 << 20)).unwrap();
    other.atomic_write(Path::new(META), b"two").unwrap();
    first_calls.recv().unwrap();
    let (_second, second_calls) = watch(&directory);
    drop(first);
    directory.atomic_write(Path::new(META), b"three").unwrap();
    second_calls.recv().unwrap();
    assert!(first_calls.try_recv().is_err(), "its watch has ended");
}

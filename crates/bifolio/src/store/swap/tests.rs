//! Tests of the whole swap file: its location, and the pages that are read back from it.

use bifolio_testing::skip;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use super::{SlotRun, Swap, SwapStorage, position_bytes, storage};
use crate::error::ErrorKind;
use crate::io::{DirectBacking, DiskFile, DiskOptions, IoBuffer};
use crate::sys::file;
use crate::sys::memory::PAGE_BYTES;
use crate::sys::probe::Features;

const BYTES_MAX: u64 = 1 << 30;

fn open(place: SwapStorage) -> crate::error::Result<Swap> {
    Swap::open(place, BYTES_MAX, &Features::probe(&[]))
}

fn open_in(directory: &Path) -> Swap {
    open(SwapStorage::In(directory.to_owned())).unwrap()
}

fn page(byte: u8) -> [u8; PAGE_BYTES] {
    [byte; PAGE_BYTES]
}

fn write(swap: &Swap, slot: u32, page: &[u8; PAGE_BYTES]) {
    swap.words.seal(slot, page);
    let buffer = IoBuffer::from_bytes(page);
    let position = position_bytes(slot);
    let count = swap.backing.write_at(&buffer.source(), position).unwrap();
    assert_eq!(count, PAGE_BYTES);
}

fn read(swap: &Swap, slot: u32) -> [u8; PAGE_BYTES] {
    let mut buffer = IoBuffer::new(PAGE_BYTES);
    let position = position_bytes(slot);
    let count = swap.backing.read_at(&mut buffer.target(), position).unwrap();
    assert_eq!(count, PAGE_BYTES);
    *buffer.as_bytes().first_chunk().unwrap()
}

/// Returns the metadata of a file that this process has open.
fn metadata(backing: &dyn DirectBacking) -> fs::Metadata {
    let identity = backing.identity().unwrap();
    let open = fs::read_dir("/proc/self/fd").unwrap();
    let mut statuses = open.filter_map(|entry| fs::metadata(entry.unwrap().path()).ok());
    let is_it = |status: &fs::Metadata| (status.dev(), status.ino()) == identity.numbers();
    statuses.find(is_it).expect("the file is open")
}

#[test]
fn every_kind_of_swap_returns_its_pages_and_rejects_others() {
    let directory = tempfile::tempdir().unwrap();
    let options = DiskOptions { read: true, write: true, create: true, ..DiskOptions::default() };
    let path = directory.path().join("own");
    let own = Arc::new(DiskFile::open_with(&path, &options, &Features::probe(&[])).unwrap());
    for place in [SwapStorage::In(directory.path().to_owned()), SwapStorage::Backing(own)] {
        let swap = open(place.clone()).unwrap();
        assert!(swap.slots.grow());
        let SlotRun { first, pages } = swap.slots.take(3, 3).unwrap();
        assert_eq!((pages, swap.slots.used()), (3, 3));
        for (slot, byte) in (first..).zip([1, 2, 2]) {
            write(&swap, slot, &page(byte));
        }
        for (slot, byte) in (first..).zip([1, 2, 2]) {
            let found = read(&swap, slot);
            assert_eq!(found, page(byte), "{place:?}");
            assert_eq!(swap.words.check(slot, &found), Ok(()));
        }
        assert!(swap.words.check(first, &read(&swap, first + 1)).is_err());
        swap.give_back(first, pages);
        assert_eq!(swap.slots.used(), 0);
    }
}

#[test]
fn a_temporary_file_has_no_name_and_only_its_owner_may_read() {
    let directory = tempfile::tempdir().unwrap();
    let features = Features::probe(&[]);
    let unlinked = storage::open_unlinked(directory.path(), &features).unwrap();
    assert_eq!(metadata(&unlinked).nlink(), 0);
    if let Some(unnamed) = storage::open_unnamed(directory.path(), &features) {
        assert_eq!(metadata(&unnamed).nlink(), 0);
        assert_ne!(unnamed.identity(), unlinked.identity());
    } else {
        skip("tmpfile", directory.path().display());
    }
    let swap = open_in(directory.path());
    assert_eq!(metadata(&*swap.backing).nlink(), 0);
    assert_eq!(metadata(&*swap.backing).mode() & 0o077, 0);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    let name = directory.path().join("(temporary swap file)");
    assert_eq!(swap.name, name.display().to_string());
}

#[test]
fn the_error_names_a_directory_without_a_temporary_file() {
    let directory = tempfile::tempdir().unwrap();
    let (absent, plain) = (directory.path().join("absent"), directory.path().join("plain"));
    fs::write(&plain, "").unwrap();
    for place in [absent, plain] {
        let error = open(SwapStorage::In(place.clone())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::SwapFile, "{error}");
        let message = format!("cannot make a temporary swap file in {}: ", place.display());
        assert!(error.to_string().starts_with(&message), "{error}");
    }
}

#[test]
fn the_file_has_storage_before_the_first_write() {
    let directory = tempfile::tempdir().unwrap();
    let swap = open_in(directory.path());
    let metadata = || metadata(&*swap.backing);
    for _ in 0..2 {
        assert!(swap.slots.grow());
        assert_eq!(metadata().blocks(), 0);
        swap.set_storage_aside();
        // Not a byte more than the slots need.
        let end_bytes = position_bytes(swap.slots.capacity() + 1);
        assert_eq!(metadata().len(), end_bytes);
        assert!(metadata().blocks() * 512 >= end_bytes);
        let run = swap.slots.take(3, 1).unwrap();
        write(&swap, run.first, &page(1));
        assert_eq!(read(&swap, run.first), page(1));
        swap.give_back(run.first, run.pages);
        swap.cut().unwrap();
    }
}

#[test]
fn a_file_on_a_tmpfs_takes_no_memory_ahead() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        return skip("tmpfs", "no directory can be made in /dev/shm");
    };
    if !file::is_on_tmpfs(fs::File::open(directory.path()).unwrap().as_fd()) {
        return skip("tmpfs", "/dev/shm is not a tmpfs");
    }
    let swap = open_in(directory.path());
    assert!(swap.slots.grow());
    swap.set_storage_aside();
    assert_eq!(metadata(&*swap.backing).len(), 0);
}

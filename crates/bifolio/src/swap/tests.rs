//! Tests of the swap file as a whole: where it is, whose it is, and what comes back from it.

use bifolio_testing::skip;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;

use super::{SlotRun, Swap, SwapPlace, place};
use crate::error::{ErrorKind, SwapFileProblem};
use crate::io::{self, Backing, DiskFile, DiskOptions, IoBuffer, OpenDiskError};
use crate::sys::file;
use crate::sys::memory::PAGE_BYTES;
use crate::sys::probe::Features;

const BYTES_MAX: u64 = 1 << 30;

fn open(place: SwapPlace) -> crate::error::Result<Swap> {
    Swap::open(place, BYTES_MAX, &Features::probe(&[]))
}

fn open_file(path: &Path) -> crate::error::Result<Swap> {
    open(SwapPlace::File(path.to_owned()))
}

fn problem_of(result: crate::error::Result<Swap>) -> (PathBuf, SwapFileProblem) {
    match result.unwrap_err().into_kind() {
        ErrorKind::SwapFile { path, problem } => (path, problem),
        other => panic!("{other}"),
    }
}

fn file_in(directory: &TempDir) -> PathBuf {
    directory.path().join("swap")
}

fn page(byte: u8) -> [u8; PAGE_BYTES] {
    [byte; PAGE_BYTES]
}

fn write(swap: &Swap, slot: u32, page: &[u8; PAGE_BYTES]) {
    swap.seal(slot, page);
    let buffer = IoBuffer::from_bytes(page);
    let position = Swap::position_bytes(slot);
    io::write_full(&**swap.backing(), &[buffer.source()], position, None).unwrap();
}

fn read(swap: &Swap, slot: u32) -> [u8; PAGE_BYTES] {
    let mut buffer = IoBuffer::new(PAGE_BYTES);
    let position = Swap::position_bytes(slot);
    io::read_full(&**swap.backing(), &mut [buffer.target()], position, None).unwrap();
    *buffer.as_bytes().first_chunk().unwrap()
}

/// How many names a file has that this process has open.
fn names_of(backing: &dyn Backing) -> u64 {
    let identity = backing.identity().unwrap();
    let open = fs::read_dir("/proc/self/fd").unwrap();
    let mut statuses = open.filter_map(|entry| fs::metadata(entry.unwrap().path()).ok());
    statuses
        .find(|status| {
            status.ino() == identity.inode() && status.dev() == identity.device().number()
        })
        .map(|status| status.nlink())
        .expect("the file is open")
}

#[test]
fn pages_come_back_from_every_place_and_wrong_ones_do_not_pass() {
    let directory = tempfile::tempdir().unwrap();
    let options = DiskOptions { read: true, write: true, create: true, ..DiskOptions::default() };
    let path = directory.path().join("own");
    let own = Arc::new(DiskFile::open(&path, &options, &Features::probe(&[])).unwrap());
    for place in [
        SwapPlace::In(directory.path().to_owned()),
        SwapPlace::File(file_in(&directory)),
        SwapPlace::Backing(own),
    ] {
        let swap = open(place.clone()).unwrap();
        assert!(swap.grow());
        let SlotRun { first, pages } = swap.take(3, 3).unwrap();
        assert_eq!((pages, swap.used_slots()), (3, 3));
        for (slot, byte) in (first..).zip([1, 2, 2]) {
            write(&swap, slot, &page(byte));
        }
        for (slot, byte) in (first..).zip([1, 2, 2]) {
            let found = read(&swap, slot);
            assert_eq!(found, page(byte), "{place:?}");
            assert_eq!(swap.check(slot, &found), Ok(()));
        }
        assert!(swap.check(first, &read(&swap, first + 1)).is_err());
        swap.give_back(first, pages);
        assert_eq!(swap.used_slots(), 0);
    }
}

#[test]
fn a_temporary_file_has_no_name_and_is_not_looked_for_by_others() {
    let directory = tempfile::tempdir().unwrap();
    let features = Features::probe(&[]);
    let unlinked = place::open_unlinked(directory.path(), &features).unwrap();
    assert_eq!(names_of(&unlinked), 0);
    if let Some(unnamed) = place::open_unnamed(directory.path(), &features) {
        assert_eq!(names_of(&unnamed), 0);
        assert_ne!(unnamed.identity(), unlinked.identity());
    } else {
        skip("tmpfile", directory.path().display());
    }
    let swap = open(SwapPlace::In(directory.path().to_owned())).unwrap();
    assert_eq!(names_of(&**swap.backing()), 0);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    let name = directory.path().join("(temporary swap file)");
    assert_eq!(swap.name(), name.display().to_string());
}

#[test]
fn a_directory_without_room_for_a_temporary_file_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let (absent, plain) = (directory.path().join("absent"), directory.path().join("plain"));
    fs::write(&plain, "").unwrap();
    for place in [absent, plain] {
        let (path, problem) = problem_of(open(SwapPlace::In(place.clone())));
        assert_eq!(path, place);
        assert!(matches!(problem, SwapFileProblem::NoTemporaryFile(_)), "{problem}");
    }
}

#[test]
fn a_named_file_is_cut_to_its_header_when_opened_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = file_in(&directory);
    let first = open_file(&path).unwrap();
    let header = fs::read(&path).unwrap();
    assert_eq!(header.len(), PAGE_BYTES);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o077, 0);
    assert!(first.grow());
    let SlotRun { first: slot, .. } = first.take(4, 4).unwrap();
    write(&first, slot + 3, &page(7));
    assert_eq!(fs::metadata(&path).unwrap().len(), 5 * PAGE_BYTES as u64);
    assert_eq!(fs::read(&path).unwrap()[..PAGE_BYTES], header);
    drop(first);
    assert_eq!(fs::metadata(&path).unwrap().len(), 5 * PAGE_BYTES as u64);
    let second = open_file(&path).unwrap();
    assert_eq!(fs::read(&path).unwrap(), header);
    assert!(second.grow());
    write(&second, 9, &page(7));
    second.cut_to_header().unwrap();
    assert_eq!(fs::read(&path).unwrap(), header);
}

#[test]
fn an_empty_file_is_taken_and_keeps_its_rights() {
    let directory = tempfile::tempdir().unwrap();
    let path = file_in(&directory);
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let swap = open_file(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    assert_eq!(swap.name(), path.display().to_string());
}

#[test]
fn a_file_of_somebody_else_is_refused_and_left_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = file_in(&directory);
    drop(open_file(&path).unwrap());
    let header = fs::read(&path).unwrap();
    let mut damaged = header.clone();
    damaged[100] = 1;
    let cases = [vec![7], header[..4095].to_vec(), vec![0; 4096], damaged, vec![1; 100_000]];
    for contents in cases {
        fs::write(&path, &contents).unwrap();
        let (named, problem) = problem_of(open_file(&path));
        assert_eq!(named, path);
        assert!(matches!(problem, SwapFileProblem::Foreign), "{problem}");
        assert_eq!(fs::read(&path).unwrap(), contents);
    }
    let message = open_file(&path).unwrap_err().to_string();
    assert!(message.starts_with(&format!("swap file {}: it holds", path.display())), "{message}");
    // A file that goes on behind our header is ours.
    fs::write(&path, [header, vec![1; 5000]].concat()).unwrap();
    assert!(open_file(&path).is_ok());
}

#[test]
fn paths_that_are_no_files_are_refused_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let error = open_file(directory.path()).unwrap_err().to_string();
    assert!(error.ends_with("it is a directory, and only regular files can be cached"), "{error}");
    let absent = directory.path().join("absent").join("swap");
    let error = open_file(&absent).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Open(_)), "{error}");
    assert!(error.to_string().contains("absent/swap: cannot open"), "{error}");
}

#[test]
fn a_file_serves_one_cache_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let path = file_in(&directory);
    let other_name = directory.path().join("other");
    let first = open_file(&path).unwrap();
    assert!(first.grow());
    write(&first, 1, &page(7));
    fs::hard_link(&path, &other_name).unwrap();
    for name in [&path, &other_name] {
        let (named, problem) = problem_of(open_file(name));
        assert_eq!(&named, name);
        assert!(matches!(problem, SwapFileProblem::InUse), "{problem}");
    }
    assert_eq!(read(&first, 1), page(7), "nobody cut it");
    drop(first);
    assert!(open_file(&other_name).is_ok());
}

#[test]
fn a_file_replaced_during_open_is_not_locked() {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let directory = tempfile::tempdir().unwrap();
    let (a, b) = (directory.path().join("a"), directory.path().join("b"));
    drop([&a, &b].map(|path| open_file(path).unwrap()));
    std::thread::scope(|scope| {
        let exchanging = scope.spawn(|| {
            for _ in 0..20_000 {
                renameat_with(CWD, &a, CWD, &b, RenameFlags::EXCHANGE).unwrap();
            }
        });
        let features = Features::probe(&[]);
        while !exchanging.is_finished() {
            match place::open(SwapPlace::File(a.clone()), &features) {
                Ok(opened) => {
                    let locked = file::status(opened.lock.unwrap().as_fd()).unwrap();
                    assert_eq!(opened.backing.identity().unwrap().inode(), locked.inode);
                }
                Err(error) => {
                    assert!(error.to_string().contains("kept being replaced"), "{error}");
                }
            }
        }
    });
    let made =
        file::open(&b, file::OpenMode { read: true, write: true, create: None, direct: false });
    let error = place::open_same(&a, &made.unwrap(), &Features::probe(&[])).unwrap_err();
    assert!(matches!(error, OpenDiskError::Replaced { .. }), "{error}");
}

#[test]
fn a_page_of_an_earlier_run_does_not_pass() {
    let directory = tempfile::tempdir().unwrap();
    let path = file_in(&directory);
    let first = open_file(&path).unwrap();
    write(&first, 1, &page(7));
    // As if the device had kept what the next open cuts off, and then lost a write.
    let stale = read(&first, 1);
    drop(first);
    let second = open_file(&path).unwrap();
    assert!(second.check(1, &stale).is_err());
    second.seal(1, &page(8));
    let mismatch = second.check(1, &stale).unwrap_err();
    assert_ne!(mismatch.expected, mismatch.found);
    assert_eq!(second.check(1, &page(8)), Ok(()));
}

#[test]
fn the_file_has_storage_before_anybody_writes() {
    let directory = tempfile::tempdir().unwrap();
    let path = file_in(&directory);
    let swap = open_file(&path).unwrap();
    let blocks_bytes = || fs::metadata(&path).unwrap().blocks() * 512;
    for _ in 0..2 {
        assert!(swap.grow());
        assert_eq!(blocks_bytes(), PAGE_BYTES as u64, "the header");
        swap.set_storage_aside();
        // Not a byte more than there are slots.
        let end_bytes = Swap::position_bytes(swap.capacity_slots() + 1);
        assert_eq!(fs::metadata(&path).unwrap().len(), end_bytes);
        assert!(blocks_bytes() >= end_bytes);
        let run = swap.take(3, 1).unwrap();
        write(&swap, run.first, &page(1));
        assert_eq!(read(&swap, run.first), page(1));
        swap.give_back(run.first, run.pages);
        swap.cut_to_header().unwrap();
    }
}

#[test]
fn a_file_on_a_tmpfs_takes_no_memory_ahead() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        return skip("tmpfs", "no directory can be made in /dev/shm");
    };
    if !file::is_on_tmpfs(fs::File::open(directory.path()).unwrap().as_fd()) {
        return skip("tmpfs", "/dev/shm is not one");
    }
    let path = file_in(&directory);
    let swap = open_file(&path).unwrap();
    assert!(swap.grow());
    swap.set_storage_aside();
    assert_eq!(fs::metadata(&path).unwrap().len(), PAGE_BYTES as u64);
}

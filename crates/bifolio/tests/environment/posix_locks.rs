//! A process loses all its POSIX locks (`fcntl`) on a file when it closes any descriptor of that
//! file: the cache closes none while the file is open in it.

use bifolio_testing::skip;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

use crate::support::{
    cache_of, directory, errno_of, error_of, random_file, read, run_alone, with_descriptors_left,
    writable,
};
use bifolio::{Cache, DirectIo, ErrorKind, Feature, OpenOptions};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

/// Set for the process that tries to lock a file.
const PROBED: &str = "BIFOLIO_PROBED_FILE";

/// Set for a test that runs alone.
const ALONE: &str = "BIFOLIO_TEST_POSIX_LOCKS";

/// Returns `true` if another process finds the file locked.
fn is_locked(test: &str, path: &Path) -> bool {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(PROBED, path)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let found = [text.contains("it is locked"), text.contains("it is free")];
    assert!(output.status.success() && found[0] != found[1], "{output:?}");
    found[0]
}

/// Runs the other process; returns `true` if this is that process.
fn probe() -> bool {
    let Some(path) = std::env::var_os(PROBED) else { return false };
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let free = fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
    println!("it is {}", if free { "free" } else { "locked" });
    true
}

/// Opens the file as an engine would, and locks it.
fn lock(path: &Path) -> OwnedFd {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
    file.into()
}

#[test]
fn opens_of_an_open_file_keep_the_locks_of_the_process() {
    if probe() {
        return;
    }
    let test = "posix_locks::opens_of_an_open_file_keep_the_locks_of_the_process";
    let directory = directory();
    let (path, bytes) = random_file(&directory, "locked", 10_000);
    let (other_name, symbolic) = (directory.path().join("other"), directory.path().join("link"));
    std::fs::hard_link(&path, &other_name).unwrap();
    std::os::unix::fs::symlink(&path, &symbolic).unwrap();
    let cache = cache_of(4 << 20);
    let _locked = lock(&path);
    let check = |what: &str| assert!(is_locked(test, &path), "lost by {what}");
    let reader = cache.open(&path, &OpenOptions::new()).unwrap();
    check("the first open");
    drop(cache.open(&path, &OpenOptions::new()).unwrap());
    check("a second handle");
    let writer = cache.open(&path, &writable().create(true)).unwrap();
    check("the first handle that writes");
    writer.write_at(b"new", 100).unwrap();
    assert_eq!(read(&reader, 100, 3), b"new");
    drop(writer);
    check("its end");
    for name in [&other_name, &symbolic] {
        let another = cache.open(name, &writable()).unwrap();
        another.sync_all().unwrap();
        assert_eq!(read(&another, 0, 50), bytes[..50]);
    }
    check("other names");
    error_of(cache.open_immutable(&path, &writable()), &["immutable"]);
    let wrong = cache.open(&path, &writable().folio_bytes(64 << 10));
    assert!(error_of(wrong, &[]).kind() == ErrorKind::OptionConflict);
    let wrong = cache.open(&path, &writable().mappable(true));
    assert!(error_of(wrong, &[]).kind() == ErrorKind::Unsupported);
    check("opens that fail");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..50).for_each(|_| drop(cache.open(&path, &writable()).unwrap())));
        }
    });
    check("many at once");
    // As any close does, if it is the last.
    reader.close().unwrap();
    assert!(!is_locked(test, &path), "the file is closed when the last handle is");
}

#[test]
fn descriptors_that_are_given_keep_the_locks_of_the_process() {
    if probe() {
        return;
    }
    let test = "posix_locks::descriptors_that_are_given_keep_the_locks_of_the_process";
    let directory = directory();
    let (path, bytes) = random_file(&directory, "locked", 10_000);
    let cache = cache_of(4 << 20);
    let _locked = lock(&path);
    let check = |what: &str| assert!(is_locked(test, &path), "lost by {what}");
    let options = std::fs::File::options().read(true).clone();
    let file_of = |options: &std::fs::OpenOptions| OwnedFd::from(options.open(&path).unwrap());
    let reader = cache.open_fd(file_of(&options), &OpenOptions::new()).unwrap();
    drop(cache.open_fd(file_of(&options), &OpenOptions::new()).unwrap());
    drop(cache.open(&path, &OpenOptions::new()).unwrap());
    check("a second handle");
    let both = options.clone().write(true).clone();
    let writer = cache.open_fd(file_of(&both), &writable()).unwrap();
    writer.write_at(b"new", 5000).unwrap();
    drop(cache.open_fd(file_of(&both), &writable()).unwrap());
    error_of(cache.open_fd(file_of(&both), &writable().folio_bytes(64 << 10)), &["4096"]);
    check("handles that write");
    assert_eq!(read(&reader, 4999, 5), [&bytes[4999..5000], b"new", &bytes[5003..5004]].concat());
    drop(reader);
    check("the first of its handles");
    writer.close().unwrap();
    assert!(!is_locked(test, &path), "the file is closed when the last handle is");
    assert_eq!(&std::fs::read(&path).unwrap()[5000..5003], b"new");
}

#[test]
fn refused_descriptors_keep_the_locks_of_the_process() {
    if probe() {
        return;
    }
    let test = "posix_locks::refused_descriptors_keep_the_locks_of_the_process";
    let directory = directory();
    let (path, _) = random_file(&directory, "locked", 10_000);
    let cache = cache_of(4 << 20);
    let _locked = lock(&path);
    let check = |what: &str| assert!(is_locked(test, &path), "lost by {what}");
    let open = |write| {
        let options = std::fs::File::options().read(true).write(write).clone();
        OwnedFd::from(options.open(&path).unwrap())
    };
    let reader = cache.open_immutable(&path, &OpenOptions::new()).unwrap();
    error_of(cache.open_fd(open(false), &writable()), &["not opened for writing"]);
    check("one without the right");
    error_of(cache.open_fd(open(true), &writable()), &["immutable"]);
    check("one to write what must not change");
    drop(reader);
    assert!(!is_locked(test, &path), "the file is closed when the last handle is");
}

/// Writing a file that is open for reading needs further descriptors: a few are available, then
/// none.
#[test]
fn opens_that_find_no_descriptor_keep_the_locks_of_the_process() {
    if probe() {
        return;
    }
    let test = "posix_locks::opens_that_find_no_descriptor_keep_the_locks_of_the_process";
    if std::env::var_os(ALONE).is_none() {
        run_alone(test, ALONE, "1");
        return;
    }
    let directory = directory();
    let mut failed = 0;
    for left in 0..5 {
        let (path, bytes) = random_file(&directory, &format!("locked-{left}"), 10_000);
        let cache = cache_of(4 << 20);
        let _locked = lock(&path);
        let reader = cache.open(&path, &OpenOptions::new()).unwrap();
        let opened = with_descriptors_left(left, || cache.open(&path, &writable()));
        if let Err(error) = opened.map(drop) {
            assert_eq!(errno_of(&error), Some(libc::EMFILE), "{error}");
            assert!(error.to_string().contains("locked-"), "{error}");
            failed += 1;
        }
        assert!(is_locked(test, &path), "lost with {left} descriptors left");
        let writer = cache.open(&path, &writable()).unwrap();
        writer.write_at(b"new", 100).unwrap();
        assert_eq!(read(&reader, 99, 4), [&bytes[99..100], b"new"].concat());
        drop((reader, writer));
        assert!(!is_locked(test, &path), "closed with its last handle");
    }
    assert!((1..5).contains(&failed), "{failed} of 5");
}

#[test]
fn descriptors_that_cannot_be_used_are_refused() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 10_000);
    let cache = cache_of(4 << 20);
    let open = |options: &std::fs::OpenOptions| OwnedFd::from(options.open(&path).unwrap());
    let options = std::fs::File::options;
    let name = path.display().to_string();
    let read_only = open(options().read(true));
    error_of(cache.open_fd(read_only, &writable()), &[&name, "not opened for writing"]);
    let write_only = open(options().write(true));
    error_of(cache.open_fd(write_only, &writable()), &[&name, "not opened for reading"]);
    let appending = open(options().read(true).append(true));
    error_of(cache.open_fd(appending, &writable()), &["O_APPEND"]);
    let (pipe, _writer) = std::io::pipe().unwrap();
    error_of(cache.open_fd(pipe.into(), &OpenOptions::new()), &["named pipe"]);
    let generated = std::fs::File::open("/proc/self/status").unwrap();
    error_of(cache.open_fd(generated.into(), &OpenOptions::new()), &["generated by the kernel"]);
    let flags = rustix::fs::OFlags::PATH;
    let located = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).unwrap();
    error_of(cache.open_fd(located, &OpenOptions::new()), &["not opened for reading"]);
}

/// A descriptor opened with O_DIRECT, and one of a file without a name.
#[test]
fn descriptors_of_all_sorts_of_files_are_opened() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 10_001);
    let cache = cache_of(4 << 20);
    let flags = rustix::fs::OFlags::DIRECT | rustix::fs::OFlags::RDWR;
    match rustix::fs::open(&path, flags, rustix::fs::Mode::empty()) {
        Ok(direct) => {
            let file = cache.open_fd(direct, &writable()).unwrap();
            assert_eq!(read(&file, 0, 20_000), bytes);
            file.write_at(b"end", 10_000).unwrap();
            file.close().unwrap();
            assert_eq!(&std::fs::read(&path).unwrap()[10_000..], b"end");
        }
        Err(error) => skip(Feature::DirectIo, error),
    }
    let unnamed = tempfile::tempfile_in(directory.path()).unwrap();
    let copy = unnamed.try_clone().unwrap();
    let file = cache.open_fd(unnamed.into(), &writable()).unwrap();
    file.write_at(b"no name", 0).unwrap();
    file.close().unwrap();
    let mut found = [0; 7];
    std::os::unix::fs::FileExt::read_exact_at(&copy, &mut found, 0).unwrap();
    assert_eq!(&found, b"no name");
}

#[test]
fn the_first_open_decides_the_way_of_transfers() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 10_000);
    let cache = Cache::builder().memory(4 << 20).build().unwrap();
    let with = |direct| OpenOptions::new().direct(direct);
    let conflict = |direct| {
        let error = error_of(cache.open(&path, &with(direct)), &[&format!("{direct:?}")]);
        assert_eq!(error.kind(), ErrorKind::OptionConflict, "{error:?}");
    };
    let file = cache.open(&path, &with(DirectIo::Never)).unwrap();
    conflict(DirectIo::Require);
    drop(cache.open(&path, &with(DirectIo::Auto)).unwrap());
    drop(file);
    let file = match cache.open(&path, &with(DirectIo::Require)) {
        Ok(file) => file,
        Err(error) => return skip(Feature::DirectIo, error),
    };
    conflict(DirectIo::Never);
    drop(cache.open(&path, &with(DirectIo::Require)).unwrap());
    assert_eq!(read(&file, 0, 20_000), bytes);
}

#[test]
fn an_exclusive_open_refuses_other_caches_until_it_is_closed() {
    let directory = directory();
    let (path, _) = random_file(&directory, "exclusive", 10_000);
    let (first, second) = (cache_of(1 << 20), cache_of(1 << 20));
    let exclusive = writable().exclusive(true);
    let reader = first.open(&path, &OpenOptions::new()).unwrap();
    let file = first.open(&path, &exclusive).unwrap();
    let error = second.open(&path, &exclusive).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
    assert!(error.to_string().contains("exclusive"), "{error}");
    // Handles of one cache share the lock, and the lock is advisory.
    drop(first.open(&path, &exclusive).unwrap());
    drop(second.open(&path, &writable()).unwrap());
    drop(file);
    assert!(second.open(&path, &exclusive).is_err(), "the file is open for reading still");
    drop(reader);
    second.open(&path, &exclusive).unwrap();
}

/// A program that another thread starts has copies of all descriptors until it is executed.
#[test]
fn a_closed_file_is_unlocked_while_copies_of_its_descriptor_exist() {
    let directory = directory();
    let (path, _) = random_file(&directory, "copied", 10_000);
    let path = path.canonicalize().unwrap();
    let exclusive = writable().exclusive(true);
    let file = cache_of(1 << 20).open(&path, &exclusive).unwrap();
    let this = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let numbers = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap());
    let of_file = numbers.filter(|entry| entry.path().read_link().is_ok_and(|name| name == path));
    let numbers: Vec<i32> =
        of_file.map(|entry| entry.file_name().to_str().unwrap().parse().unwrap()).collect();
    let copies: Vec<OwnedFd> = numbers
        .iter()
        .map(|number| pidfd_getfd(&this, *number, PidfdGetfdFlags::empty()).unwrap())
        .collect();
    assert!(!copies.is_empty());
    drop(file);
    cache_of(1 << 20).open(&path, &exclusive).unwrap();
}

#[test]
fn a_file_that_must_be_new_is_created_once_with_its_mode() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let directory = directory();
    let cache = cache_of(1 << 20);
    let create_new = OpenOptions::new().write(true).create_new(true).mode(0o600);
    let path = directory.path().join("new");
    let file = cache.open(&path, &create_new).unwrap();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(errno_of(&cache.open(&path, &create_new).unwrap_err()), Some(libc::EEXIST));
    drop(file);
    assert_eq!(errno_of(&cache.open(&path, &create_new).unwrap_err()), Some(libc::EEXIST));
    let dangling = directory.path().join("dangling");
    symlink(directory.path().join("nowhere"), &dangling).unwrap();
    assert_eq!(errno_of(&cache.open(&dangling, &create_new).unwrap_err()), Some(libc::EEXIST));
    cache.sync_directory(directory.path()).unwrap();
    let error = cache.sync_directory(&path).unwrap_err();
    assert_eq!(errno_of(&error), Some(libc::ENOTDIR));
}

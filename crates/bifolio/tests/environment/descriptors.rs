//! A program without standard streams: no descriptor of the library becomes descriptor 0, 1 or 2,
//! where the next message to standard error would be written into a file of the cache.
//!
//! # Safety
//! Closes and restores descriptors 0 to 2 of a process that runs only one test.
#![allow(unsafe_code)]

use std::fs;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use crate::setup::{load, store};
use crate::support::{PAGE, assert_same, files_can_be_mapped, read, read_all, writable};
use crate::{VARIABLE, in_a_child, open_directory, run};
use bifolio::{Cache, OpenOptions};

const STREAMS: [RawFd; 3] = [0, 1, 2];

/// The closed standard streams, which are restored on drop.
struct Closed([RawFd; 3]);

impl Closed {
    fn new() -> Self {
        let kept = STREAMS.map(|stream| {
            // SAFETY: it duplicates a descriptor.
            let kept = unsafe { libc::fcntl(stream, libc::F_DUPFD_CLOEXEC, 100) };
            // SAFETY: the test uses no standard stream until they are restored.
            unsafe { libc::close(stream) };
            kept
        });
        Self(kept)
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        for (stream, kept) in STREAMS.into_iter().zip(self.0) {
            // SAFETY: it restores what `new` closed.
            unsafe { libc::dup2(kept, stream) };
        }
    }
}

fn path_of(number: RawFd) -> PathBuf {
    format!("/proc/self/fd/{number}").into()
}

/// Checks that the standard streams are closed, and all other descriptors are close-on-exec.
#[track_caller]
fn check_numbers(step: &str) {
    for stream in STREAMS {
        // A look that opens no descriptor itself.
        let found = fs::read_link(path_of(stream));
        assert!(found.is_err(), "{step}: descriptor {stream} is {found:?}");
        // SAFETY: a message of a library that does not know that the stream is closed.
        assert_eq!(unsafe { libc::write(stream, b"a message".as_ptr().cast(), 9) }, -1, "{step}");
    }
    for number in 3..100 {
        // SAFETY: the call only returns flags.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        let is_inherited = flags != -1 && flags & libc::FD_CLOEXEC == 0;
        assert!(!is_inherited || is_of_runner(number), "{step}: {number} is inherited by programs");
    }
}

/// Returns `true` if the descriptor was inherited by this process.
fn is_of_runner(number: RawFd) -> bool {
    let name = fs::read_link(path_of(number)).unwrap_or_default();
    let is_ours = name.starts_with(std::env::temp_dir());
    !is_ours && !name.to_string_lossy().starts_with("anon_inode:")
}

/// Uses a file by every kind of call that opens descriptors.
fn use_cache(directory: &Path) {
    let path = directory.join("file");
    fs::write(&path, [1; 3 * PAGE as usize]).unwrap();
    let cache = Cache::builder().memory(1 << 20).swap_directory(directory).build().unwrap();
    check_numbers("build");
    let file = cache.open(&path, &writable().exclusive(true)).unwrap();
    check_numbers("open");
    let new = cache.open(directory.join("new"), &writable().create(true)).unwrap();
    check_numbers("create");
    let again = cache.open(&path, &OpenOptions::new()).unwrap();
    check_numbers("open again");
    file.write_all_at(&[2; PAGE as usize], 0).unwrap();
    new.write_all_at(&[3; 10], 0).unwrap();
    file.sync_all().unwrap();
    let mut buffers = [[0_u8; 10]; 3];
    let mut requests: Vec<_> = buffers
        .iter_mut()
        .zip(0_u64..)
        .map(|(buffer, page)| bifolio::ReadRequest::new(buffer, page * PAGE))
        .collect();
    again.read_many(&mut requests).unwrap();
    check_numbers("transfers");
    let scratch = cache.memory_file("scratch").unwrap();
    scratch.write_all_at(&vec![4; 4 << 20], 0).unwrap();
    check_numbers("swap");
    assert_eq!(read(&scratch, 3 << 20, 1), [4]);
    assert_same(&fs::read(&path).unwrap(), &read_all(&file));
    drop((again, new, scratch));
    check_numbers("close");
}

fn use_maps(directory: &Path) {
    let path = directory.join("mapped");
    fs::write(&path, [1; 3 * PAGE as usize]).unwrap();
    let cache = Cache::builder().memory(1 << 20).build().unwrap();
    let file = cache.open(&path, &writable().mappable(true)).unwrap();
    let mut map = file.map_mut(0..3 * PAGE).unwrap();
    check_numbers("map_mut");
    store(map.as_mut_ptr(), PAGE, &[5; 10]);
    map.sync(0..3 * PAGE).unwrap();
    check_numbers("stores");
    assert_eq!(load(map.as_ptr(), PAGE..PAGE + 10), [5; 10]);
    assert_same(&fs::read(&path).unwrap(), &read_all(&file));
}

#[test]
fn no_descriptor_of_the_library_is_a_standard_stream() {
    in_a_child("descriptors::no_descriptor_of_the_library_is_a_standard_stream", false, || {
        assert!(std::env::var_os(VARIABLE).is_some());
        let directory = open_directory();
        let can_map = files_can_be_mapped();
        let closed = Closed::new();
        let outcome = std::panic::catch_unwind(|| {
            use_cache(directory.path());
            if can_map {
                use_maps(directory.path());
            }
            drop(run(directory.path(), false));
            check_numbers("the program");
        });
        drop(closed);
        if let Err(panic) = outcome {
            panic!("{:?}", panic.downcast_ref::<String>());
        }
    });
}

/// The process holds a POSIX lock on the file: closing any descriptor of it would end the lock.
#[test]
fn an_open_without_standard_streams_drops_no_lock() {
    in_a_child("descriptors::an_open_without_standard_streams_drops_no_lock", false, || {
        let directory = open_directory();
        let path = directory.path().join("file");
        fs::write(&path, [1; 100]).unwrap();
        let locked = fs::File::options().read(true).write(true).open(&path).unwrap();
        let lock = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&locked);
        // SAFETY: an open descriptor, and a lock that lives during the call.
        assert_eq!(unsafe { libc::fcntl(descriptor, libc::F_SETLK, &raw const lock) }, 0);
        let closed = Closed::new();
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.open(&path, &writable());
        drop(closed);
        let file = file.unwrap();
        assert_eq!(read_all(&file), [1; 100]);
        let locks = fs::read_to_string("/proc/locks").unwrap();
        let own = format!("POSIX  ADVISORY  WRITE {} ", std::process::id());
        assert!(locks.contains(&own), "{locks}");
    });
}

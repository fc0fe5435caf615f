//! Limits of the system: a call that exceeds one returns an error, and everything else continues.
//!
//! # Safety
//! Gives up privileges, or has calls refused, in a separate process.
#![allow(unsafe_code)]

use bifolio::{ErrorKind, Feature, OpenOptions};
use bifolio_testing::skip;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::setup::{Way, refuse_calls, run_child, store, touch};
use crate::support::{PAGE, directory, error_of, file_of, files_can_be_mapped, read, run_alone};

const VARIABLE: &str = "BIFOLIO_TEST_LIMITS";

/// Continues as a user who has no other processes.
fn become_a_user() {
    let user = 54_000 + std::process::id() % 10_000;
    // SAFETY: it changes what this process may do, in all its threads.
    assert_eq!(unsafe { libc::setgid(user) }, 0);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setuid(user) }, 0);
    // SAFETY: lets the process see itself in /proc again.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) }, 0);
}

fn allow_threads(current: Option<u64>) {
    let maximum = getrlimit(Resource::Nproc).maximum;
    setrlimit(Resource::Nproc, Rlimit { current, maximum }).unwrap();
}

fn start_too_many_threads() {
    become_a_user();
    let way = Way::new();
    let cache = way.builder(1 << 20).build().unwrap();
    let plain = cache.memory_file("plain").unwrap();
    plain.write_all_at(b"bytes", 0).unwrap();
    let threads = std::fs::read_dir("/proc/self/task").unwrap().count() as u64;
    for more in 0..3 {
        allow_threads(Some(threads + more));
        let error = error_of(cache.memory_file_with("mapped", &way.options()), &["thread"]);
        assert_eq!(error.kind(), ErrorKind::Thread, "{error:?}");
        assert_eq!(read(&plain, 0, 5), b"bytes");
    }
    allow_threads(getrlimit(Resource::Nproc).maximum);
    let file = way.memory_file(&cache, 8 * PAGE);
    let mut map = file.map_mut(0..8 * PAGE).unwrap();
    store(map.as_mut_ptr(), 5 * PAGE, b"x");
    assert_eq!(touch(map.as_ptr(), 5 * PAGE), b'x');
    drop(map);
    cache.close().unwrap();
    println!("it has ended well");
}

#[test]
fn threads_that_cannot_be_started_are_an_error() {
    const NAME: &str = "limits::threads_that_cannot_be_started_are_an_error";
    if std::env::var(VARIABLE).is_ok() {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(120) };
        return start_too_many_threads();
    }
    if !rustix::process::geteuid().is_root() {
        return skip("root", "only root can become another user");
    }
    if files_can_be_mapped() {
        run_to_a_good_end(NAME);
    }
}

fn run_to_a_good_end(name: &str) {
    let output = run_child(name, VARIABLE, "");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("it has ended well"), "{}: {errors}", output.status);
}

/// Without a way to keep pages beyond their unmapping, there are only read-only maps.
fn forbid_vmsplice() {
    refuse_calls(libc::SYS_vmsplice, None, libc::EPERM);
    for way in Way::whole() {
        let cache = way.builder(512 << 10).build().unwrap();
        let file = way.memory_file(&cache, 50 * PAGE);
        let error = error_of(file.map_mut(0..PAGE), &["for writing", "write protection"]);
        assert_eq!(error.kind(), ErrorKind::CannotMap, "{error:?}");
        file.write_all_at(b"x", 5 * PAGE).unwrap();
        assert_eq!(touch(file.map(0..file.len()).unwrap().as_ptr(), 5 * PAGE), b'x');
        let reports = cache.features();
        let report = reports.iter().find(|it| it.feature == Feature::WriteProtectAsync).unwrap();
        assert!(!report.in_use && report.fallback.contains("reading only"), "{report:?}");
    }
    println!("it has ended well");
}

#[test]
fn maps_for_writing_need_what_evicting_them_needs() {
    const NAME: &str = "limits::maps_for_writing_need_what_evicting_them_needs";
    if std::env::var(VARIABLE).is_ok() {
        return forbid_vmsplice();
    }
    if files_can_be_mapped() {
        run_to_a_good_end(NAME);
    }
}

#[test]
fn hundreds_of_files_can_be_mapped_at_once() {
    for way in Way::whole() {
        let cache = way.builder(16 << 20).build().unwrap();
        let files: Vec<_> = (0..300).map(|_| way.memory_file(&cache, PAGE)).collect();
        let maps: Vec<_> = files.iter().map(|file| file.map_mut(0..PAGE).unwrap()).collect();
        for (number, mut map) in maps.into_iter().enumerate() {
            store(map.as_mut_ptr(), 0, &[number as u8]);
            assert_eq!(touch(map.as_ptr(), 0), number as u8);
        }
    }
}

const MANY: &str = "limits::tables_of_many_memory_files_fail_no_store_to_a_map";

/// Maps many small files, half of them memory files, and stores to all of them, in a cache that the
/// tables of the memory files would fill. Refusals are returned by calls.
fn map_many_files(way: &Way) {
    const FILES: u64 = 1000;
    const LENGTH: u64 = 5 * PAGE;
    let directory = directory();
    let cache = way.builder(1 << 20).swap_directory(directory.path()).build().unwrap();
    let mut maps = Vec::new();
    let mut refused = 0;
    for number in 0..FILES {
        let file = if number % 2 == 0 {
            let path = file_of(&directory, &number.to_string(), &[0; LENGTH as usize]);
            cache.open(&path, &way.options()).unwrap()
        } else {
            cache.memory_file_with(&number.to_string(), &way.options()).unwrap()
        };
        file.set_len(LENGTH).unwrap();
        match file.map_mut(0..LENGTH) {
            Ok(map) => maps.push((number, map)),
            Err(error) => {
                error_of(Err::<(), _>(error), &["full", "descriptors and tables", "set_memory"]);
                refused += 1;
                continue;
            }
        }
        let (number, map) = maps.last_mut().unwrap();
        (0..5).for_each(|page| store(map.as_mut_ptr(), page * PAGE, &number.to_ne_bytes()));
    }
    assert!(refused < FILES / 2, "files on a disk are never refused: {refused}");
    assert!(maps.len() > 550, "{} maps", maps.len());
    for (number, map) in &maps {
        let byte = number.to_ne_bytes()[0];
        (0..5).for_each(|page| assert_eq!(touch(map.as_ptr(), page * PAGE), byte, "{number}"));
    }
    assert!(cache.stats().memory.used_bytes <= cache.stats().memory.bound_bytes);
    println!("it has ended well: {refused} of {FILES} were refused");
}

#[test]
fn tables_of_many_memory_files_fail_no_store_to_a_map() {
    if let Ok(number) = std::env::var(VARIABLE) {
        return map_many_files(&Way::whole()[number.parse::<usize>().unwrap()]);
    }
    if !files_can_be_mapped() {
        return;
    }
    for number in 0..Way::whole().len() {
        let output = run_alone(MANY, VARIABLE, &number.to_string());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("it has ended well"), "{text}");
    }
}

/// A thread that blocks SIGBUS gets an error instead of a map, because its faults would kill it.
#[test]
fn a_thread_that_blocks_the_signal_of_faults_gets_no_map() {
    for way in Way::whole().into_iter().filter(|way| way.is_in_thread()) {
        let cache = way.builder(1 << 20).build().unwrap();
        let file = way.memory_file(&cache, PAGE);
        std::thread::scope(|scope| {
            let blocking = scope.spawn(|| {
                // SAFETY: all zeros is a valid set of signals.
                let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
                // SAFETY: a set of ours.
                assert_eq!(unsafe { libc::sigaddset(&raw mut set, libc::SIGBUS) }, 0);
                // SAFETY: blocks a signal in this thread, which ends with this test.
                let answer = unsafe {
                    libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut())
                };
                assert_eq!(answer, 0);
                error_of(file.map(0..PAGE), &["SIGBUS"])
            });
            let error = blocking.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::Config, "{error:?}");
        });
        assert_eq!(touch(file.map(0..PAGE).unwrap().as_ptr(), 0), 0);
    }
}

#[test]
fn a_file_has_one_kind_of_threads_that_serve_faults() {
    for way in Way::whole() {
        let cache = way.builder(1 << 20).build().unwrap();
        let directory = directory();
        let path = file_of(&directory, "file", &[1; PAGE as usize]);
        let _file = cache.open(&path, &way.options()).unwrap();
        cache.open(&path, &OpenOptions::new().mappable(true)).unwrap();
        cache.open(&path, &way.options()).unwrap();
        let other = if way.is_in_thread() { Way::new() } else { Way::in_thread() };
        let error = error_of(cache.open(&path, &other.options()), &["faults", "InThread"]);
        assert_eq!(error.kind(), ErrorKind::OptionConflict, "{error:?}");
    }
}

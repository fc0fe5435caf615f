//! After a fork every call of the child returns a clear error, and the parent continues unharmed.
//!
//! Each test runs in a separate process: forking a process with other tests in it would prove
//! nothing.
//!
//! # Safety
//! The child of a process with several threads may only do what a signal handler may; the calls
//! tested here must return before they take a lock or allocate much. It ends by `_exit`, and an
//! alarm ends it if it hangs.
#![allow(unsafe_code)]

use crate::support::{assert_same, directory, random_file, read, read_all, run_alone, writable};
use bifolio::{Cache, CacheBuilder, ErrorKind, Feature, File, OpenOptions, Result, Stats};
use bifolio_testing::{Call, Fault};
use std::sync::atomic::{AtomicBool, Ordering};

const VARIABLE: &str = "BIFOLIO_TEST_FORK";
/// The child is killed after this many seconds.
const CHILD_SECONDS_MAX: u32 = 120;

/// Runs `body` in a forked child; its result becomes the child's exit status.
fn in_child(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: see the head of the file.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(CHILD_SECONDS_MAX) };
        let status = body();
        // SAFETY: it ends the process, as it is meant to.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: `status` is ours to write, and `child` is our child.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    assert!(libc::WIFEXITED(status), "the child was killed by signal {}", libc::WTERMSIG(status));
    libc::WEXITSTATUS(status)
}

fn is_forked<T>(result: Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == ErrorKind::Forked)
}

/// Returns the number of the first call with a wrong result, or 0.
fn call_everything(cache: &Cache, file: &File, path: &std::path::Path) -> i32 {
    let mut byte = [0; 1];
    let mut many = [0; 9000];
    let answers = [
        is_forked(file.read_at(&mut byte, 0)),
        is_forked(file.read_at(&mut many, 100)),
        is_forked(file.read_exact_at(&mut byte, 50_000)),
        is_forked(file.write_at(b"x", 0)),
        is_forked(file.pin(0..1)),
        is_forked(file.pin_mut(0..1)),
        is_forked(file.set_len(0)),
        is_forked(file.sync_data()),
        is_forked(file.sync_all()),
        is_forked(cache.open(path, &OpenOptions::new())),
        is_forked(cache.set_memory(1 << 20)),
        is_forked(cache.close()),
    ];
    answers.iter().position(|answer| !answer).map_or(0, |call| call as i32 + 1)
}

/// Checks a child process that only reads the cache's state.
fn look(cache: &Cache) -> i32 {
    i32::from(cache.stats() != Stats::default() || format!("{cache:?}").contains("bytes"))
}

/// Forks from a cache with clean, dirty and pinned pages, while another thread reads.
fn parent(builder: CacheBuilder) {
    let directory = directory();
    let (path, mut bytes) = random_file(&directory, "file", 100_000);
    let cache = builder.memory(1 << 20).build().unwrap();
    let file = cache.open(&path, &writable()).unwrap();
    assert_same(&read_all(&file), &bytes);
    // Twice, so that the next read of it would be a hit on the shortest path.
    assert_same(&read(&file, 0, 1), &bytes[..1]);
    file.write_all_at(b"dirty", 60_000).unwrap();
    bytes[60_000..60_005].copy_from_slice(b"dirty");
    let pin = file.pin(4096..8192).unwrap();

    for _ in 0..3 {
        assert_eq!(in_child(|| call_everything(&cache, &file, &path)), 0, "number of the call");
        assert_eq!(in_child(|| look(&cache)), 0, "it saw something");
    }
    let mut found = vec![0; 4096];
    pin.copy_to(0, &mut found).unwrap();
    assert_same(&found, &bytes[4096..8192]);
    drop(pin);
    assert_same(&read_all(&file), &bytes);
    file.write_all_at(b"after", 0).unwrap();
    bytes[..5].copy_from_slice(b"after");
    file.sync_all().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &bytes);
    cache.set_memory(256 << 10).unwrap();
    assert_same(&read_all(&file), &bytes);
    cache.close().unwrap();
}

/// The child drops what it inherited, as it does when it returns from the function that owns the
/// cache.
fn dropping_child() {
    let directory = directory();
    let (path, mut bytes) = random_file(&directory, "file", 100_000);
    let cache = Cache::builder().memory(1 << 20).build().unwrap();
    let file = cache.open(&path, &writable()).unwrap();
    file.write_all_at(b"dirty", 10).unwrap();
    bytes[10..15].copy_from_slice(b"dirty");
    let kept = (cache.clone(), file.clone(), file.pin(0..10).unwrap().into_owned());
    let mut inherited = Some((cache, file, kept));
    let status = in_child(|| {
        drop(inherited.take());
        0
    });
    assert_eq!(status, 0);
    let (cache, file, kept) = inherited.unwrap();
    drop(kept);
    assert_ne!(&std::fs::read(&path).unwrap()[10..15], b"dirty", "the child wrote it out");
    file.sync_data().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &bytes);
    cache.close().unwrap();
}

/// The child uses a class and memory that it inherited, while another thread of the parent holds
/// the locks that they take.
fn classed_child() {
    const MIB: u64 = 1 << 20;
    let cache = Cache::builder().memory(16 * MIB).build().unwrap();
    let class = cache.class("index").unwrap();
    class.set_floor(4 * MIB).unwrap();
    let mut inherited = Some(cache.reserve(MIB).unwrap());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let class = cache.class("other").unwrap();
            while !is_over.load(Ordering::Relaxed) {
                class.set_order(7);
                class.set_ceiling(Some(8 * MIB)).unwrap();
                drop(cache.reserve(MIB).unwrap());
            }
        });
        // A lock is held at some of many forks.
        let failed = (0..100).find_map(|_| {
            let status = in_child(|| {
                let mut reserved = inherited.take().unwrap();
                class.set_order(1);
                let answers = [
                    is_forked(class.set_floor(0)),
                    is_forked(class.set_ceiling(None)),
                    is_forked(reserved.resize(0)),
                    is_forked(reserved.resize(2 * MIB)),
                    class.stats() == bifolio::ClassStats::default(),
                    reserved.bytes() == MIB,
                ];
                drop(reserved);
                answers.iter().position(|answer| !answer).map_or(0, |call| call as i32 + 1)
            });
            (status != 0).then_some(status)
        });
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(failed, None, "number of the call");
    });
    let stats = class.stats();
    assert_eq!((stats.floor_bytes, stats.order), (4 * MIB, 128));
    assert_eq!(cache.stats().memory.reserved_bytes, MIB);
    drop(inherited);
    assert_eq!(cache.stats().memory.reserved_bytes, 0);
    cache.close().unwrap();
}

/// The child drops a map while a fault on it is being served.
fn dropping_mapped_child() {
    if !crate::support::files_can_be_mapped() {
        return;
    }
    let storage = crate::support::Faulty::new(crate::support::Way::Memory, 100_000, 5);
    let cache = storage.builder(1 << 20).build().unwrap();
    let file = cache.open_backing(storage.backing.clone(), &writable().mappable(true)).unwrap();
    let map = file.map(0..file.len()).unwrap();
    let gate = bifolio_testing::Gate::new();
    storage.backing.inject(Fault::on(Call::Read).times(1).held(&gate));
    let start = map.as_ptr().expose_provenance();
    let toucher = std::thread::spawn(move || {
        // SAFETY: a byte of a map that outlives this thread; it is not changed.
        unsafe { std::ptr::with_exposed_provenance::<u8>(start).read_volatile() }
    });
    gate.wait_for_arrivals(1);
    let mut inherited = Some((map, file, cache));
    let status = in_child(|| {
        drop(inherited.take());
        0
    });
    assert_eq!(status, 0);
    gate.open();
    assert_eq!(toucher.join().unwrap(), storage.bytes[0]);
    let (map, file, cache) = inherited.unwrap();
    assert_same(&read_all(&file), &storage.bytes);
    drop((map, file));
    cache.close().unwrap();
}

/// The child drops inherited pins, which its parent continues to use.
fn unpinning_child() {
    let directory = directory();
    let (path, mut bytes) = random_file(&directory, "file", 100_000);
    let cache = Cache::builder().memory(1 << 20).build().unwrap();
    let file = cache.open(&path, &writable()).unwrap();
    assert_same(&read_all(&file), &bytes);
    let mut pin_mut = file.pin_mut(8192..8200).unwrap();
    pin_mut.copy_from(0, b"changed!").unwrap();
    bytes[8192..8200].copy_from_slice(b"changed!");
    let pins = [0, 0, 20_000].map(|start| file.pin(start..start + 10).unwrap());
    let mut inherited = Some((pin_mut, pins));
    let status = in_child(|| {
        let (pin_mut, pins) = inherited.take().unwrap();
        let mut found = [1; 10];
        pins[0].copy_to(0, &mut found).unwrap();
        drop(pins);
        drop(pin_mut);
        i32::from(found != [0; 10])
    });
    assert_eq!(status, 0);
    let (pin_mut, pins) = inherited.unwrap();
    let mut found = [0; 10];
    pins[2].copy_to(0, &mut found).unwrap();
    assert_same(&found, &bytes[20_000..20_010]);
    drop((pin_mut, pins));
    assert_same(&read_all(&file), &bytes);
    file.sync_data().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &bytes);
    cache.close().unwrap();
}

#[test]
fn a_forked_child_gets_errors_and_the_parent_goes_on() {
    let masked = || Cache::builder().disable(Feature::WipeOnFork);
    match std::env::var(VARIABLE).as_deref() {
        Ok("errors") => parent(Cache::builder()),
        Ok("masked") => parent(masked()),
        Ok("dropping") => dropping_child(),
        Ok("classed") => classed_child(),
        Ok("mapped") => dropping_mapped_child(),
        Ok("unpinning") => unpinning_child(),
        _ => {
            for value in ["errors", "masked", "dropping", "classed", "mapped", "unpinning"] {
                run_alone(
                    "fork::a_forked_child_gets_errors_and_the_parent_goes_on",
                    VARIABLE,
                    value,
                );
            }
        }
    }
}

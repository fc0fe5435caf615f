//! The kernel refuses a call in the middle of an operation: no byte that was visible is lost
//! silently.
//!
//! # Safety
//! Only bytes of the file are touched; descriptors of the cache are broken in a process of its own.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use bifolio::backing::{Backing, IoBuf, IoBufMut};
use bifolio::{Cache, ErrorKind, Feature};
use bifolio_testing::{Call, Fault};

use crate::setup::{Address, Way, kernel_loads, refuse_calls, run_child, store, touch, word};
use crate::support::{self, Faulty, PAGE, cause_of, directory, random_file, wait_until, writable};

const PAGE_USIZE: usize = PAGE as usize;
const VARIABLE: &str = "BIFOLIO_TEST_POISONED";

/// Makes the cache find its pipes empty: the pipes that keep pages do not block. They are open as
/// long as the result lives.
pub fn break_pipes() -> Vec<OwnedFd> {
    let entries: Vec<_> = std::fs::read_dir("/proc/self/fd").unwrap().map(Result::unwrap).collect();
    let null = std::fs::File::open("/dev/null").unwrap();
    let mut readers = Vec::new();
    for entry in entries {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
        // SAFETY: it only looks.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFL) };
        let is_reader = flags & (libc::O_ACCMODE | libc::O_NONBLOCK) == libc::O_NONBLOCK;
        if target.to_string_lossy().starts_with("pipe:") && is_reader {
            // SAFETY: a number that is open; it is not closed meanwhile.
            let reader = unsafe { BorrowedFd::borrow_raw(number) };
            readers.push(reader.try_clone_to_owned().unwrap());
            // SAFETY: what the cache has under this number is another file now, as it may be in a
            // program that closes what is not its own.
            assert!(unsafe { libc::dup2(null.as_raw_fd(), number) } >= 0);
        }
    }
    readers
}

fn is_poisoned<T: std::fmt::Debug>(answer: bifolio::Result<T>) -> bool {
    answer.is_err_and(|error| error.kind() == ErrorKind::Poisoned)
}

fn lose_kept_pages(way: Way) {
    let directory = directory();
    let (path, old) = random_file(&directory, "mapped", 400 * PAGE_USIZE);
    let cache =
        way.builder(512 << 10).dirty_age_max(Duration::from_millis(600_000)).build().unwrap();
    let file = cache.open(&path, &way.options()).unwrap();
    let mut map = file.map_mut(0..file.len()).unwrap();
    for page in 0..40 {
        store(map.as_mut_ptr(), page * PAGE, b"stored");
    }
    let _pipes = break_pipes();
    let error = (40..400).find_map(|page| map.populate(page * PAGE..(page + 1) * PAGE).err());
    let error = error.expect("more pages than there is memory for");
    assert_eq!(error.kind(), ErrorKind::Poisoned, "{error:?}");
    let mut resident = 0;
    for page in 0..400 {
        let mut found = vec![0; PAGE_USIZE];
        match file.read_exact_at(&mut found, page * PAGE) {
            Err(error) => assert_eq!(error.kind(), ErrorKind::Poisoned, "{error:?}"),
            Ok(()) => {
                let mut expected = old[(page * PAGE) as usize..][..PAGE_USIZE].to_vec();
                if page < 40 {
                    expected[..6].copy_from_slice(b"stored");
                }
                assert!(found == expected, "page {page}");
                resident += 1;
            }
        }
    }
    assert!(resident > 0, "what is resident can be read");
    assert!(is_poisoned(file.write_at(b"x", 0)) && is_poisoned(file.set_len(0)));
    assert!(is_poisoned(file.sync_data()) && is_poisoned(file.map(0..PAGE)));
    assert!(is_poisoned(cache.open(directory.path().join("mapped"), &writable())));
    assert!(is_poisoned(cache.set_memory(1 << 20)) && is_poisoned(cache.close()));
    drop((map, file, cache));
    // Written out before, or not at all.
    let disk = std::fs::File::open(&path).unwrap();
    for page in 0..400 {
        let mut found = vec![0; PAGE_USIZE];
        disk.read_exact_at(&mut found, page * PAGE).unwrap();
        let expected = &old[(page * PAGE) as usize..][..PAGE_USIZE];
        assert!(found[6..] == expected[6..], "page {page}");
        assert!(found[..6] == expected[..6] || found[..6] == *b"stored", "page {page}");
    }
    println!("it has ended well");
}

/// Request number of `ioctl`: UFFDIO_COPY.
const COPY: u32 = 0xC028_AA03;

/// Pages cannot be installed when they are read. Nothing is lost.
fn find_no_memory_to_read(way: Way) {
    let storage = Faulty::new(support::Way::Memory, 64 * PAGE_USIZE, 5);
    let cache = way.mask(storage.builder(1 << 20)).build().unwrap();
    let file = cache.open_backing(storage.backing.clone(), &way.options()).unwrap();
    let map = file.map(0..file.len()).unwrap();
    map.populate(0..PAGE).unwrap();
    refuse_calls(libc::SYS_ioctl, Some(COPY), libc::ENOMEM);
    for _ in 0..3 {
        for answer in [map.populate(0..map.len()), file.read_exact_at(&mut [0; 9000], 9 * PAGE)] {
            let error = answer.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Memory, "{error:?}");
        }
    }
    assert!(!kernel_loads(map.as_ptr(), 5 * PAGE));
    // The kernel cannot wait for a page whose faults raise signals: nothing is refused.
    assert_eq!(map.take_error().is_some(), !way.is_in_thread());
    assert_eq!(touch(map.as_ptr(), 7), storage.bytes[7]);
    file.sync_data().unwrap();
    drop((map, file));
    cache.close().unwrap();
    println!("it has ended well");
}

/// Pages are unmapped, cannot be swapped, and cannot be restored.
fn find_no_memory(way: Way) {
    let storage = Faulty::new(support::Way::Memory, 0, 5);
    let builder = storage.builder(512 << 10).swap_backing(storage.backing.clone());
    let cache = way.mask(builder.reclaim_wait_max(Duration::from_millis(50))).build().unwrap();
    let file = way.memory_file(&cache, 400 * PAGE);
    let mut map = file.map_mut(0..file.len()).unwrap();
    // As many as there is memory for, and not half of it later.
    for page in 0..70 {
        store(map.as_mut_ptr(), page * PAGE, b"stored");
    }
    storage.backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
    refuse_calls(libc::SYS_ioctl, Some(COPY), libc::ENOMEM);
    cache.set_memory(256 << 10).unwrap_err();
    // What it has asked for is still tried.
    wait_until("it is poisoned", || is_poisoned(file.sync_data()));
    let error = map.populate(399 * PAGE..400 * PAGE).unwrap_err();
    assert!(error.to_string().contains("put back"), "{error:?}");
    assert!(is_poisoned(file.write_at(b"x", 0)) && is_poisoned(file.sync_data()));
    drop((map, file, cache));
    println!("it has ended well");
}

/// Request number of `ioctl`: PAGEMAP_SCAN.
const SCAN: u32 = 0xC060_6610;

/// The errors that the library logs.
struct Errors(Mutex<Vec<String>>);

impl log::Log for Errors {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() == log::Level::Error
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            self.0.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

static ERRORS: Errors = Errors(Mutex::new(Vec::new()));

/// Stores follow a sync, and the kernel does not report which pages were stored to. Each file ends
/// in another way.
fn end_without_a_look(way: Way, errno: i32) {
    let directory = directory();
    let cache = way.builder(1 << 20).dirty_age_max(Duration::from_millis(600_000)).build().unwrap();
    let other_cache =
        way.builder(1 << 20).dirty_age_max(Duration::from_millis(600_000)).build().unwrap();
    let open = |cache: &Cache, name: &str| {
        let (path, _) = random_file(&directory, name, 8 * PAGE_USIZE);
        let file = cache.open(path, &way.options()).unwrap();
        let mut map = file.map_mut(0..file.len()).unwrap();
        // Makes the page resident and clean.
        store(map.as_mut_ptr(), 3 * PAGE, b"before");
        file.sync_data().unwrap();
        store(map.as_mut_ptr(), 3 * PAGE, b"stored");
        (file, map)
    };
    let (dropped, closed, kept) =
        (open(&cache, "dropped"), open(&cache, "closed"), open(&cache, "kept"));
    let lost = open(&other_cache, "lost");
    refuse_calls(libc::SYS_ioctl, Some(SCAN), errno);

    assert!(dropped.0.sync_data().is_err());
    drop((dropped, kept.1, closed.1));
    assert!(closed.0.close().is_err());
    for _ in 0..2 {
        let error = cache.close().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Close, "{error:?}");
        assert_eq!(cause_of(cause_of(&error)).kind(), ErrorKind::Memory, "{error}");
        assert_eq!(error.raw_os_error(), Some(errno));
        let text = error.to_string();
        assert_eq!(text.matches(&format!("os error {errno}")).count(), 3, "{error}");
        let unwritten: Vec<_> = text.split(" bytes are not written").collect();
        assert_eq!(unwritten.len(), 4, "{error}");
        for before in &unwritten[..3] {
            let bytes: u64 = before.rsplit(' ').next().unwrap().parse().unwrap();
            assert!(bytes >= PAGE, "{error}");
        }
    }
    let again = cache.open(directory.path().join("dropped"), &way.options()).unwrap();
    assert_eq!(support::read(&again, 3 * PAGE, 6), b"stored");
    drop(again);
    // The way out: what may have been stored is given up.
    assert!(kept.0.discard_dirty().unwrap() >= PAGE);
    assert_eq!(support::read(&kept.0, 3 * PAGE, 6), b"before");
    for name in ["dropped", "closed"] {
        let again = cache.open(directory.path().join(name), &way.options()).unwrap();
        assert!(again.discard_dirty().unwrap() >= PAGE, "{name}");
    }
    kept.0.discard_dirty().unwrap();
    cache.close().unwrap();

    drop((lost, other_cache));
    let errors = ERRORS.0.lock().unwrap();
    let told: Vec<_> = errors.iter().filter(|line| line.contains("bytes are lost")).collect();
    assert!(told.len() == 1 && told[0].contains("/lost: "), "{errors:?}");
    println!("it has ended well");
}

#[test]
fn stores_that_cannot_be_looked_for_survive_all_closes() {
    const NAME: &str = "poisoned::stores_that_cannot_be_looked_for_survive_all_closes";
    let ways = Way::whole();
    if let Ok(number) = std::env::var(VARIABLE) {
        log::set_logger(&ERRORS).unwrap();
        log::set_max_level(log::LevelFilter::Error);
        let number: usize = number.parse().unwrap();
        return end_without_a_look(ways[number / 2], [libc::EPERM, libc::ENOMEM][number % 2]);
    }
    run_to_a_good_end(NAME, 2 * ways.len());
}

/// A page can be neither filled nor poisoned.
fn find_no_memory_to_refuse(way: Way) {
    /// Request number of `ioctl`: UFFDIO_POISON.
    const POISON: u32 = 0xC020_AA08;
    let storage = Faulty::new(support::Way::Memory, 8 * PAGE_USIZE, 5);
    let cache = way.mask(storage.builder(1 << 20)).build().unwrap();
    let file = cache.open_backing(storage.backing.clone(), &way.options()).unwrap();
    let map = file.map(0..file.len()).unwrap();
    storage.backing.inject(Fault::on(Call::Read).forever());
    refuse_calls(libc::SYS_ioctl, Some(POISON), libc::ENOMEM);
    let start = Address(map.as_ptr().cast_mut());
    // A thread that touches it can neither continue nor get an error: the process ends.
    thread::spawn(move || touch({ start }.0, 0));
    support::wait_until("the cache is poisoned", || is_poisoned(file.sync_data()));
    println!("it has ended well");
    std::process::exit(0);
}

#[test]
fn a_page_that_cannot_be_refused_poisons_the_cache_in_time() {
    const NAME: &str = "poisoned::a_page_that_cannot_be_refused_poisons_the_cache_in_time";
    if std::env::var(VARIABLE).is_ok() {
        return find_no_memory_to_refuse(Way::new());
    }
    let can_run = support::files_can_be_mapped() && support::has(Feature::FaultPoison);
    run_to_a_good_end(NAME, usize::from(can_run));
}

/// Pages whose last bytes cannot be recovered poison the cache; no thread is killed, waits, or
/// reads wrong bytes.
#[test]
fn kept_pages_that_are_lost_poison_the_cache() {
    const NAME: &str = "poisoned::kept_pages_that_are_lost_poison_the_cache";
    let ways = Way::whole();
    if let Ok(number) = std::env::var(VARIABLE) {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(120) };
        return lose_kept_pages(ways[number.parse::<usize>().unwrap()]);
    }
    run_to_a_good_end(NAME, ways.len());
}

#[test]
fn pages_that_find_no_memory_are_an_error() {
    const NAME: &str = "poisoned::pages_that_find_no_memory_are_an_error";
    let ways = Way::whole();
    if let Ok(number) = std::env::var(VARIABLE) {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(120) };
        return find_no_memory_to_read(ways[number.parse::<usize>().unwrap()]);
    }
    run_to_a_good_end(NAME, ways.len());
}

#[test]
fn pages_that_cannot_be_put_back_poison_the_cache_in_time() {
    const NAME: &str = "poisoned::pages_that_cannot_be_put_back_poison_the_cache_in_time";
    let ways = Way::whole();
    if let Ok(number) = std::env::var(VARIABLE) {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(120) };
        return find_no_memory(ways[number.parse::<usize>().unwrap()]);
    }
    run_to_a_good_end(NAME, ways.len());
}

/// A way of unmapping is refused while the cache is at work.
fn find_no_vectored_unmap(way: Way) {
    let storage = Faulty::new(support::Way::Memory, 400 * PAGE_USIZE, 5);
    let cache = way.mask(storage.builder(512 << 10)).build().unwrap();
    let file = cache.open_backing(storage.backing.clone(), &way.options()).unwrap();
    let mut map = file.map_mut(0..file.len()).unwrap();
    store(map.as_mut_ptr(), 0, &storage.bytes[..8]);
    let is_in_use = || {
        let reports = cache.features();
        reports.into_iter().find(|it| it.feature == Feature::VectoredUnmap).unwrap()
    };
    if !is_in_use().in_use {
        println!("it has ended well");
        return;
    }
    refuse_calls(libc::SYS_process_madvise, None, libc::EPERM);
    support::assert_same(&crate::setup::load(map.as_ptr(), 0..map.len()), &storage.bytes);
    let report = is_in_use();
    assert!(!report.in_use && report.reason.contains("refused"), "{report:?}");
    file.set_len(PAGE).unwrap();
    drop((map, file));
    cache.close().unwrap();
    println!("it has ended well");
}

#[test]
fn an_unmap_call_that_is_refused_later_is_replaced_for_good() {
    const NAME: &str = "poisoned::an_unmap_call_that_is_refused_later_is_replaced_for_good";
    let ways = Way::whole();
    if let Ok(number) = std::env::var(VARIABLE) {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(120) };
        return find_no_vectored_unmap(ways[number.parse::<usize>().unwrap()]);
    }
    run_to_a_good_end(NAME, ways.len());
}

/// Pages cannot be evicted, because the call that keeps their last bytes is refused.
fn find_no_vmsplice(way: Way) {
    let storage = Faulty::new(support::Way::Memory, 400 * PAGE_USIZE, 5);
    let builder = storage.builder(512 << 10).reclaim_wait_max(Duration::from_millis(50));
    let cache = way.mask(builder).build().unwrap();
    let file = cache.open_backing(storage.backing.clone(), &way.options()).unwrap();
    let mut map = file.map_mut(0..file.len()).unwrap();
    store(map.as_mut_ptr(), 0, &storage.bytes[..8]);
    refuse_calls(libc::SYS_vmsplice, None, libc::EPERM);
    let error = support::error_of(map.populate(0..map.len()), &["cannot keep", "os error 1"]);
    assert_eq!(error.kind(), ErrorKind::Full, "{error:?}");
    file.sync_data().unwrap();
    drop((map, file));
    cache.close().unwrap();
    println!("it has ended well");
}

#[test]
fn a_cache_that_can_evict_nothing_names_the_refused_call() {
    const NAME: &str = "poisoned::a_cache_that_can_evict_nothing_names_the_refused_call";
    let ways = Way::whole();
    if let Ok(number) = std::env::var(VARIABLE) {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(120) };
        return find_no_vmsplice(ways[number.parse::<usize>().unwrap()]);
    }
    run_to_a_good_end(NAME, ways.len());
}

/// Runs the test `name` in a separate process for each of the ways.
fn run_to_a_good_end(name: &str, ways: usize) {
    for number in 0..ways {
        let output = run_child(name, VARIABLE, &number.to_string());
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("it has ended well"), "{}: {errors}", output.status);
        assert!(output.status.success() && !errors.contains("panicked"), "{errors}");
    }
}

/// Storage of zeros that makes one page of its read buffer inaccessible, also to the kernel.
#[derive(Debug, Default)]
struct Hostile {
    is_armed: AtomicBool,
    /// The page, until the next read.
    protected: Mutex<Option<usize>>,
}

const PAGES: usize = 8;
/// Index of that page in a transfer.
const BAD_PAGE: usize = 3;

fn protect(address: usize, protection: i32) {
    let page = std::ptr::without_provenance_mut(address);
    // SAFETY: a page of the cache's that it has lent for a read, and that only this test uses.
    assert_eq!(unsafe { libc::mprotect(page, PAGE_USIZE, protection) }, 0);
}

impl Hostile {
    fn heal(&self) {
        if let Some(page) = self.protected.lock().unwrap().take() {
            protect(page, libc::PROT_READ | libc::PROT_WRITE);
        }
    }
}

impl Backing for Hostile {
    fn read_at(&self, target: &mut IoBufMut<'_>, _position: u64) -> io::Result<usize> {
        self.heal();
        let length = target.len();
        target.copy_from_slice(0, &vec![0; length]);
        if length == PAGES * PAGE_USIZE && self.is_armed.swap(false, Ordering::Relaxed) {
            let page = target.as_mut_ptr().addr() + BAD_PAGE * PAGE_USIZE;
            protect(page, libc::PROT_NONE);
            *self.protected.lock().unwrap() = Some(page);
        }
        Ok(length)
    }

    fn write_at(&self, source: &IoBuf<'_>, _position: u64) -> io::Result<usize> {
        Ok(source.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok((PAGES * PAGE_USIZE) as u64)
    }

    fn set_len(&self, _length: u64) -> io::Result<()> {
        Ok(())
    }

    fn describe(&self) -> String {
        "hostile".into()
    }
}

fn is_resident(address: *mut u8) -> bool {
    let mut answer = 0_u8;
    // SAFETY: it only looks.
    unsafe { libc::mincore(address.cast(), PAGE_USIZE, &raw mut answer) == 0 && answer & 1 == 1 }
}

/// Adds to the first word of a map as soon as its page is resident; returns the number of
/// additions.
fn add_at_once(start: Address) -> u64 {
    while !is_resident(start.0) {
        std::hint::spin_loop();
    }
    let count = 100;
    for _ in 0..count {
        word(start.0, 0).fetch_add(1, Ordering::Relaxed);
    }
    count
}

/// Bytes were stored to the first pages of a transfer, and the kernel refuses a later page.
#[test]
fn pages_in_front_of_one_that_is_refused_keep_what_was_stored() {
    for way in Way::whole() {
        for round in 0..100 {
            let cache = way.builder(1 << 20).build().unwrap();
            let backing = Arc::new(Hostile::default());
            backing.is_armed.store(true, Ordering::Relaxed);
            let file = cache.open_backing(backing.clone(), &way.options()).unwrap();
            let mut map = file.map_mut(0..file.len()).unwrap();
            let start = Address(map.as_mut_ptr());
            let added = thread::scope(|scope| {
                let adding = scope.spawn(|| add_at_once(start));
                // One by one they can all be had.
                map.populate(0..map.len()).unwrap();
                adding.join().unwrap()
            });
            assert!(!backing.is_armed.load(Ordering::Relaxed), "no transfer of all pages");
            let found = word(start.0, 0).load(Ordering::Relaxed);
            assert_eq!(found, added, "round {round}, {way:?}");
            backing.heal();
        }
    }
}

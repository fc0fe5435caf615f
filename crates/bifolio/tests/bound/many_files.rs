//! Many files: the cost of opening, keeping and closing a file does not grow with their number.
//!
//! # Safety
//! Queries the kernel whether descriptors are open.
#![allow(unsafe_code)]

use std::fs;
use std::io::Result;
use std::sync::{Arc, Mutex};

use crate::support::{errno_of, run_alone, with_descriptors_left};
use bifolio::backing::{Backing, DirectBacking, FileIdentity, IoBuf, IoBufMut};
use bifolio::{Cache, OpenOptions};

const VARIABLE: &str = "BIFOLIO_TEST_MANY_FILES";
const PAGE: u64 = 4096;

/// Storage of eight bytes in each page, on its own device or on a shared one.
#[derive(Debug)]
struct Page {
    bytes: Mutex<[u8; 8]>,
    identity: Option<FileIdentity>,
}

impl Page {
    fn new(identity: Option<FileIdentity>) -> Arc<Self> {
        Arc::new(Self { bytes: Mutex::default(), identity })
    }
}

impl Backing for Page {
    fn read_at(&self, target: &mut IoBufMut<'_>, position: u64) -> Result<usize> {
        let mut page = vec![0; PAGE as usize];
        page[..8].copy_from_slice(&*self.bytes.lock().unwrap());
        let page = &page[position.min(PAGE) as usize..];
        let count = page.len().min(target.len());
        target.copy_from_slice(0, &page[..count]);
        Ok(count)
    }

    fn write_at(&self, source: &IoBuf<'_>, position: u64) -> Result<usize> {
        assert_eq!(position, 0);
        source.copy_to_slice(0, &mut *self.bytes.lock().unwrap());
        Ok(source.len())
    }

    fn sync_data(&self) -> Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(PAGE)
    }

    fn set_len(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn describe(&self) -> String {
        "a page".into()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for Page {
    fn identity(&self) -> Option<FileIdentity> {
        self.identity
    }
}

/// Returns a number of KiB from `/proc/self/status`.
fn status_kib(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn options() -> OpenOptions {
    OpenOptions::new().read(true).write(true).len_max(1 << 20)
}

/// Opens `count` files in a cache of `memory` bytes, one after the other, reads each, writes every
/// third, and checks all of them again; half are on one device, half on their own devices.
fn keep_open(count: u64, memory: u64) {
    let before_kib = status_kib("RssAnon:");
    let cache = Cache::builder().memory(memory).memory_max(memory).build().unwrap();
    let mut files = Vec::new();
    for number in 0..count {
        let identity = (number % 2 == 0).then(|| FileIdentity::custom(7, number));
        let backing = Page::new(identity);
        let file = cache.open_backing(backing.clone(), &options()).unwrap();
        let mut found = [1; 8];
        file.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(found, [0; 8]);
        if number % 3 == 0 {
            file.write_all_at(&number.to_le_bytes(), 0).unwrap();
        }
        if number % 1024 == 0 {
            file.sync_data().unwrap();
            assert_eq!(
                *backing.bytes.lock().unwrap(),
                (if number % 3 == 0 { number } else { 0 }).to_le_bytes()
            );
        }
        files.push((file, backing));
    }
    let stats = cache.stats();
    assert!(stats.memory.used_bytes <= memory, "{stats:?}");
    for (number, (file, _)) in (0..).zip(&files) {
        let mut found = [1; 8];
        file.read_exact_at(&mut found, 0).unwrap();
        let expected: u64 = if number % 3 == 0 { number } else { 0 };
        assert_eq!(u64::from_le_bytes(found), expected);
    }
    let more_kib = status_kib("RssAnon:").saturating_sub(before_kib);
    let bound_kib = memory / 1024 * 51 / 50 + (8 << 10);
    println!("{count} files in {memory} bytes: {more_kib} KiB, of which {bound_kib} the bound");
    let beside_bytes = more_kib.saturating_sub(bound_kib) * 1024 / count;
    assert!(beside_bytes < FILE_BYTES_MAX, "{beside_bytes} bytes a file");
    cache.close().unwrap();
    for (number, (file, backing)) in (0_u64..).zip(files) {
        drop(file);
        let expected = if number % 3 == 0 { number } else { 0 };
        assert_eq!(u64::from_le_bytes(*backing.bytes.lock().unwrap()), expected);
    }
}

/// Maximum cost of a file outside of the bound, with its backing, in these tests.
const FILE_BYTES_MAX: u64 = 4 << 10;

/// Checks what remains of files that were opened, used and closed.
fn open_and_close() {
    let cache = Cache::builder().memory(1 << 20).memory_max(1 << 20).build().unwrap();
    let mut after_some_kib = 0;
    for number in 0..30_000_u64 {
        let identity = (number % 2 == 0).then(|| FileIdentity::custom(number, number));
        let file = match number % 3 {
            0 => cache.memory_file("scratch").unwrap(),
            _ => cache.open_backing(Page::new(identity), &options()).unwrap(),
        };
        file.write_all_at(&number.to_le_bytes(), 0).unwrap();
        drop(file);
        if number == 5000 {
            after_some_kib = status_kib("RssAnon:");
        }
    }
    let more_kib = status_kib("RssAnon:").saturating_sub(after_some_kib);
    println!("{more_kib} KiB more");
    // At 100 bytes a file it would be 2.4 MiB.
    assert!(more_kib < 1536, "{more_kib} KiB are left of 25,000 files");
}

#[test]
fn closed_files_leave_no_memory_behind() {
    match std::env::var(VARIABLE).as_deref() {
        Ok("closed") => open_and_close(),
        _ => drop(run_alone("many_files::closed_files_leave_no_memory_behind", VARIABLE, "closed")),
    }
}

#[test]
fn thousands_of_files_are_kept_open_in_a_small_cache() {
    match std::env::var(VARIABLE).as_deref() {
        Ok("open") => keep_open(4000, 2 << 20),
        _ => {
            let name = "many_files::thousands_of_files_are_kept_open_in_a_small_cache";
            drop(run_alone(name, VARIABLE, "open"));
        }
    }
}

#[test]
#[ignore = "takes some seconds, and a minute in a debug build: 100,000 files in 64 MiB"]
fn a_hundred_thousand_files_are_kept_open() {
    match std::env::var(VARIABLE).as_deref() {
        Ok("all") => keep_open(100_000, 64 << 20),
        _ => drop(run_alone("many_files::a_hundred_thousand_files_are_kept_open", VARIABLE, "all")),
    }
}

/// Returns the number of open descriptors of this process.
fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Opens files until no descriptor is left.
fn run_out_of_descriptors() {
    let directory = crate::support::directory();
    let paths: Vec<_> = (0..40).map(|number| directory.path().join(number.to_string())).collect();
    let cache = Cache::builder().memory(1 << 20).build().unwrap();
    let create = crate::support::writable().create(true);
    // Creates the rings, and everything else that the first transfers allocate.
    cache.open(&paths[0], &create).unwrap().close().unwrap();
    let files = with_descriptors_left(30, || {
        let mut files = Vec::new();
        let error = loop {
            let before = descriptors_below(256);
            match cache.open(&paths[files.len()], &create) {
                Ok(file) => files.push(file),
                Err(error) => {
                    assert_eq!(descriptors_below(256), before, "left by an open that failed");
                    break error;
                }
            }
        };
        assert_eq!(errno_of(&error), Some(libc::EMFILE), "{error}");
        assert!(error.to_string().contains(paths[files.len()].to_str().unwrap()), "{error}");
        assert!((10..=30).contains(&files.len()), "{} files", files.len());
        for (file, number) in files.iter().zip(0_u64..) {
            file.write_all_at(&number.to_le_bytes(), 0).unwrap();
        }
        for file in &files {
            file.sync_data().unwrap();
        }
        files.pop().unwrap().close().unwrap();
        files.push(cache.open(&paths[files.len()], &create).unwrap());
        files
    });
    for (file, number) in files.iter().zip(0_u64..) {
        let mut found = [0; 8];
        file.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(u64::from_le_bytes(found), number);
        assert_eq!(fs::read(&paths[number as usize]).unwrap(), found);
    }
    let before = descriptors();
    let count = files.len();
    drop(files);
    assert!(descriptors() + count <= before, "they are closed");
    cache.close().unwrap();
}

/// Returns the number of open descriptors below `end`, without opening one.
fn descriptors_below(end: i32) -> usize {
    let is_open = |number: &i32| {
        // SAFETY: it only looks.
        unsafe { libc::fcntl(*number, libc::F_GETFD) != -1 }
    };
    (0..end).filter(is_open).count()
}

#[test]
fn running_out_of_descriptors_loses_nothing() {
    match std::env::var(VARIABLE).as_deref() {
        Ok("descriptors") => run_out_of_descriptors(),
        _ => {
            let name = "many_files::running_out_of_descriptors_loses_nothing";
            drop(run_alone(name, VARIABLE, "descriptors"));
        }
    }
}

//! Scenes of real files that are opened and closed in caches that keep the pages of closed files,
//! while another program changes them.
//!
//! Each word of a page holds the number of the change that has written the page last. A thread with
//! a cache of its own opens a file, reads some words, and closes it. No word may be older than the
//! last change of its page that had ended before the open. (A handle that is held longer may be
//! behind, as may a second one beside it.) Now and then a cache saves a list of its
//! pages, or restores one, of its own or of another thread.
//!
//! # Safety
//! Stores through shared maps that only the storing thread has.
#![allow(unsafe_code)]

use crate::history::Violation;
use crate::watchdog;
use bifolio::{Cache, ErrorKind, OpenOptions};
use fastrand::Rng;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const PAGE_BYTES: usize = 4096;
const THREADS: u64 = 3;
const PAGES_MAX: usize = 40;

/// The work of scenes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub opens: u64,
    /// Opens whose reads found everything in memory.
    pub found: u64,
    /// Changes by another program.
    pub changes: u64,
}

impl Tally {
    /// Adds the work of another scene or thread.
    pub fn add(&mut self, other: Self) {
        self.opens += other.opens;
        self.found += other.found;
        self.changes += other.changes;
    }
}

/// A file that changes.
#[derive(Debug)]
struct Changing {
    path: PathBuf,
    /// Number of the last change that has ended, of each page.
    changes: Vec<AtomicU64>,
    /// Number of the last change that has begun.
    begun: AtomicU64,
}

/// Runs caches on a few files until the time is over.
pub fn play(seed: u64, duration: Duration) -> Result<Tally, Violation> {
    let mut random = Rng::with_seed(seed);
    let failed = |error: io::Error| Violation(format!("the setup failed: {error}"));
    let directory = tempfile::tempdir().map_err(failed)?;
    let mut files = Vec::new();
    for number in 0..random.usize(1..8) {
        let pages = random.usize(1..PAGES_MAX);
        let path = directory.path().join(number.to_string());
        fs::write(&path, vec![0; pages * PAGE_BYTES]).map_err(failed)?;
        let changes = (0..pages).map(|_| AtomicU64::new(0)).collect();
        files.push(Changing { path, changes, begun: AtomicU64::new(0) });
    }
    let ends = AtomicBool::new(false);
    let pause_us = random.choice([10, 1000, 30_000]).unwrap_or(1000);
    let (files, ends) = (&files, &ends);
    thread::scope(|scope| {
        let end = Instant::now() + duration;
        let mut threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let random = Rng::with_seed(seed.wrapping_mul(31) + number);
                scope.spawn(move || {
                    let read = read_until(random, files, || ends.load(Ordering::Relaxed));
                    ends.fetch_or(read.is_err(), Ordering::Relaxed);
                    read
                })
            })
            .collect();
        threads.push(scope.spawn(move || {
            let mut tally = Tally::default();
            while Instant::now() < end && !ends.load(Ordering::Relaxed) {
                let file = &files[random.usize(..files.len())];
                let changed = file.change(&mut random);
                changed.map_err(|error| Violation(format!("a change failed: {error}")))?;
                tally.changes += 1;
                thread::sleep(Duration::from_micros(random.u64(..pause_us)));
            }
            ends.store(true, Ordering::Relaxed);
            Ok(tally)
        }));
        let mut tally = Tally::default();
        for thread in threads {
            let outcome = thread.join();
            tally.add(outcome.unwrap_or_else(|_| Err(Violation("a thread panicked".into())))?);
        }
        Ok(tally)
    })
}

/// Opens, reads and closes files in a cache.
fn read_until(
    mut random: Rng,
    files: &[Changing],
    is_over: impl Fn() -> bool,
) -> Result<Tally, Violation> {
    let told = |what: &str, error: &bifolio::Error| Violation(format!("{what}: {error}"));
    let memory_bytes = 256 << random.u32(10..13);
    let kept_files = random.choice([1, 3, 100]).unwrap_or(3);
    let builder = Cache::builder().memory(memory_bytes).kept_files(kept_files);
    let cache = builder.build().map_err(|error| told("the setup failed", &error))?;
    // Of all threads, whose caches have different bounds.
    let list = files[0].path.with_file_name("hot");
    let mut tally = Tally::default();
    while !is_over() {
        let file = &files[random.usize(..files.len())];
        // Acquire: pairs with the Release in `change`: the change is in the file.
        let least: Vec<_> = file.changes.iter().map(|it| it.load(Ordering::Acquire)).collect();
        let before = cache.stats().reads.misses;
        let open = cache.open(&file.path, &OpenOptions::new());
        let open = open.map_err(|error| told("an open failed", &error))?;
        for _ in 0..random.u32(1..20) {
            let page = random.usize(..least.len());
            let mut word = [0; 8];
            let position = page * PAGE_BYTES + 8 * random.usize(..PAGE_BYTES / 8);
            // It may have been shorter when it was opened.
            if open.read_exact_at(&mut word, position as u64).is_err() {
                continue;
            }
            let (found, begun) = (u64::from_le_bytes(word), file.begun.load(Ordering::Acquire));
            if found < least[page] || found > begun {
                let name = file.path.display();
                return Err(Violation(format!(
                    "{name}, position {position}: found change {found} of up to {begun}, but {} \
                     had ended before the open",
                    least[page]
                )));
            }
        }
        drop(open);
        tally.opens += 1;
        tally.found += u64::from(cache.stats().reads.misses == before);
        match random.u32(..400) {
            0 => drop(cache.evict_all()),
            1 => drop(cache.set_memory(memory_bytes / 2)),
            2 => drop(cache.set_memory(memory_bytes)),
            3..6 => {
                let saved = cache.save_hot(&list);
                saved.map_err(|error| told("a list of hot pages was not saved", &error))?;
            }
            6..12 => match cache.restore_hot(&list) {
                Ok(restore) if random.bool() => {
                    let _progress = restore.wait();
                }
                Err(error) if error.kind() != ErrorKind::Open => {
                    return Err(told("a list of hot pages was not restored", &error));
                }
                _ => {}
            },
            _ => {}
        }
        watchdog::progress();
    }
    cache.close().map_err(|error| told("the close failed", &error))?;
    Ok(tally)
}

impl Changing {
    /// Changes some pages as another program does.
    fn change(&self, random: &mut Rng) -> io::Result<()> {
        let pages = self.changes.len();
        // Release: pairs with the Acquire of readers, which find no later change.
        let number = self.begun.fetch_add(1, Ordering::Release) + 1;
        let words = |pages: usize| number.to_le_bytes().repeat(pages * PAGE_BYTES / 8);
        let start = random.usize(..pages);
        let some = start..random.usize(start + 1..=pages);
        let changed = match random.u32(0..5) {
            0 => {
                let other = self.path.with_extension("new");
                fs::write(&other, words(pages))?;
                fs::rename(&other, &self.path)?;
                0..pages
            }
            1 => {
                let file = File::options().write(true).open(&self.path)?;
                file.set_len(0)?;
                file.write_all_at(&words(pages), 0)?;
                0..pages
            }
            2 => {
                self.store(&some, number, random)?;
                some
            }
            _ => {
                let file = File::options().write(true).open(&self.path)?;
                let found = file.metadata()?;
                file.write_all_at(&words(some.len()), (some.start * PAGE_BYTES) as u64)?;
                if random.bool() {
                    file.set_modified(found.modified()?)?;
                }
                some
            }
        };
        for page in changed {
            // Release: pairs with the Acquire in `read_until`.
            self.changes[page].store(number, Ordering::Release);
        }
        Ok(())
    }

    /// Stores to pages through a map, whose descriptor is closed.
    fn store(&self, pages: &Range<usize>, number: u64, random: &mut Rng) -> io::Result<()> {
        let file = File::options().read(true).write(true).open(&self.path)?;
        let length = pages.end * PAGE_BYTES;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new map, where the kernel has room.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), length, access, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        drop(file);
        let words = start.cast::<u64>();
        for word in pages.start * PAGE_BYTES / 8..length / 8 {
            if random.u32(..5000) == 0 {
                thread::sleep(Duration::from_millis(1));
            }
            // SAFETY: inside of the map, which lives until below; the file is not cut by another
            // thread.
            unsafe { words.wrapping_add(word).write_volatile(number.to_le()) };
        }
        // SAFETY: the map from above, which nothing uses any more.
        unsafe { libc::munmap(start, length) };
        Ok(())
    }
}

//! The kernel writes into a map without the page tables, by direct I/O and by io_uring with
//! registered or unregistered memory, while the pages are synced and evicted: under a `pin_mut`, no
//! byte is lost. An ordinary mapping behaves in the same way.
//!
//! # Safety
//! The kernel gets addresses inside a map, which lives as long as the call; no references to the
//! bytes exist.
#![allow(unsafe_code)]

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bifolio::{Feature, File, MapMut};
use bifolio_testing::{fill_bytes, skip};
use fastrand::Rng;
use io_uring::{IoUring, opcode, types};
use tempfile::TempDir;

use crate::setup::{Address, Way};
use crate::support::{directory, file_of, has, read_all};

const MEMORY_BYTES: u64 = 2 << 20;
/// Length of the file: four times the memory.
const LENGTH: u64 = 8 << 20;
const CHUNK: u64 = 64 << 10;
const ROUNDS: u64 = 3;
const THREADS: u64 = 2;

/// The way in which the kernel reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    Call,
    Ring,
    /// Into memory that is registered with the ring.
    Registered,
}

/// Returns the ways that this system allows.
fn readings() -> Vec<Reading> {
    let mut readings = vec![Reading::Call];
    if has(Feature::IoUring) {
        readings.push(Reading::Ring);
        readings.extend(can_register().then_some(Reading::Registered));
    }
    readings
}

/// Returns `true` if a limit on locked memory allows it.
fn can_register() -> bool {
    let mut memory = vec![0_u8; CHUNK as usize];
    let entry = libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() };
    // SAFETY: the memory outlives the ring, and no call names it.
    IoUring::new(2).is_ok_and(|ring| unsafe { ring.submitter().register_buffers(&[entry]) }.is_ok())
}

/// Creates a ring, with a chunk of memory registered if `is_registered`.
fn ring_for(target: *mut u8, is_registered: bool) -> IoUring {
    let ring = IoUring::new(2).unwrap();
    let memory = libc::iovec { iov_base: target.cast(), iov_len: CHUNK as usize };
    if is_registered {
        // SAFETY: see the head of the file.
        unsafe { ring.submitter().register_buffers(&[memory]) }.unwrap();
    }
    ring
}

/// Reads a chunk with a ring.
fn read_by(ring: &mut IoUring, file: &fs::File, position: u64, target: *mut u8, reading: Reading) {
    let (file, length) = (types::Fd(file.as_raw_fd()), CHUNK as u32);
    let entry = match reading {
        Reading::Registered => {
            opcode::ReadFixed::new(file, target, length, 0).offset(position).build()
        }
        _ => opcode::Read::new(file, target, length).offset(position).build(),
    };
    // SAFETY: see the head of the file; the call ends here.
    unsafe { ring.submission().push(&entry) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), CHUNK as i32);
}

/// Sources of the reads, one round after the other.
struct Sources {
    directory: TempDir,
    files: Vec<fs::File>,
    bytes: Vec<Vec<u8>>,
}

impl Sources {
    /// Creates them; `None` if the directory has no direct I/O.
    fn new() -> Option<Self> {
        let directory = directory();
        let (mut files, mut bytes) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let of_round = fill_bytes(round + 1, LENGTH as usize);
            let path = file_of(&directory, &format!("source {round}"), &of_round);
            let mut options = fs::OpenOptions::new();
            let Ok(file) = options.read(true).custom_flags(libc::O_DIRECT).open(path) else {
                skip(Feature::DirectIo, directory.path().display());
                return None;
            };
            files.push(file);
            bytes.push(of_round);
        }
        Some(Self { directory, files, bytes })
    }

    fn target(&self, name: &str) -> PathBuf {
        file_of(&self.directory, name, &vec![0; LENGTH as usize])
    }

    /// Reads a chunk of a round to its address.
    fn read_to(&self, round: usize, position: u64, target: *mut u8, reading: Reading) {
        if reading != Reading::Call {
            let mut ring = ring_for(target, reading == Reading::Registered);
            return read_by(&mut ring, &self.files[round], position, target, reading);
        }
        let (file, length) = (self.files[round].as_raw_fd(), CHUNK as usize);
        // SAFETY: see the head of the file; the caller's place has room for a chunk.
        let count = unsafe { libc::pread(file, target.cast(), length, position as i64) };
        assert_eq!(count, CHUNK as isize, "{}", std::io::Error::last_os_error());
    }

    /// Reads a whole round, by several threads, while `beside` runs repeatedly.
    fn read_round(&self, round: usize, read: impl Fn(u64) + Sync, beside: impl Fn() + Sync) {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let readers: Vec<_> = (0..THREADS)
                .map(|number| {
                    let read = &read;
                    scope.spawn(move || {
                        let mut chunks: Vec<_> =
                            (0..LENGTH / CHUNK).filter(|chunk| chunk % THREADS == number).collect();
                        Rng::with_seed(round as u64).shuffle(&mut chunks);
                        chunks.into_iter().for_each(|chunk| read(chunk * CHUNK));
                    })
                })
                .collect();
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    beside();
                    thread::sleep(Duration::from_micros(200));
                }
            });
            let results: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
            is_over.store(true, Ordering::Relaxed);
            results.into_iter().for_each(|result| result.unwrap());
        });
    }

    /// Returns the number of pages that differ from a round.
    fn lost_pages(&self, round: usize, found: &[u8]) -> usize {
        assert_eq!(found.len(), LENGTH as usize);
        let pages = found.chunks(4096).zip(self.bytes[round].chunks(4096));
        pages.filter(|(found, expected)| found != expected).count()
    }

    /// Reads all rounds into a map; `on_disk` is the file that has the bytes after a sync.
    fn read_into(&self, file: &File, map: &MapMut, on_disk: Option<&Path>, way: Way) {
        for (round, reading) in (0..ROUNDS as usize).zip(readings().into_iter().cycle()) {
            let read = |position| {
                let mut pin = map.pin_mut(position..position + CHUNK).unwrap();
                self.read_to(round, position, pin.as_mut_ptr(), reading);
            };
            self.read_round(round, read, || {
                file.sync_data().unwrap();
                file.evict(0..LENGTH).unwrap();
            });
            file.sync_data().unwrap();
            if let Some(path) = on_disk {
                let lost = self.lost_pages(round, &fs::read(path).unwrap());
                assert_eq!(lost, 0, "pages lost on disk in round {round}, {reading:?}, {way:?}");
            }
            let lost = self.lost_pages(round, &read_all(file));
            assert_eq!(lost, 0, "pages lost in round {round}, {reading:?}, {way:?}");
        }
    }
}

#[test]
fn direct_reads_into_a_pinned_map_of_a_file_are_kept() {
    let Some(sources) = Sources::new() else { return };
    for way in Way::whole() {
        let path = sources.target("target");
        let cache = way.builder(MEMORY_BYTES).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let map = file.map_mut(0..LENGTH).unwrap();
        sources.read_into(&file, &map, Some(&path), way);
        drop((map, file));
        cache.close().unwrap();
        assert_eq!(sources.lost_pages(ROUNDS as usize - 1, &fs::read(&path).unwrap()), 0);
    }
}

#[test]
fn direct_reads_into_a_pinned_memory_file_are_kept() {
    let Some(sources) = Sources::new() else { return };
    for way in Way::whole() {
        let cache = way.swapping(MEMORY_BYTES);
        let file = way.memory_file(&cache, LENGTH);
        let map = file.map_mut(0..LENGTH).unwrap();
        sources.read_into(&file, &map, None, way);
    }
}

/// Expectations of a program about a mapping.
#[test]
fn direct_reads_into_a_mapping_of_the_kernel_are_kept() {
    let Some(sources) = Sources::new() else { return };
    let path = sources.target("target");
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let (protection, length) = (libc::PROT_READ | libc::PROT_WRITE, LENGTH as usize);
    let (null, descriptor) = (std::ptr::null_mut(), file.as_raw_fd());
    // SAFETY: a new mapping of a file that no other code uses.
    let start = unsafe { libc::mmap(null, length, protection, libc::MAP_SHARED, descriptor, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    let start = Address(start.cast());
    for round in 0..ROUNDS as usize {
        let at = |position: u64| {
            let Address(start) = { start };
            start.wrapping_add(position as usize)
        };
        let read = |position| sources.read_to(round, position, at(position), Reading::Call);
        sources.read_round(round, read, || file.sync_data().unwrap());
        file.sync_data().unwrap();
        assert_eq!(sources.lost_pages(round, &fs::read(&path).unwrap()), 0);
    }
    // SAFETY: it is no longer used.
    assert_eq!(unsafe { libc::munmap(start.0.cast(), length) }, 0);
}

/// While a page is pinned, every sync writes it again, although no store to it can be seen.
#[test]
fn a_sync_writes_what_came_under_a_pin() {
    let Some(sources) = Sources::new() else { return };
    for way in Way::whole() {
        let path = sources.target("target");
        let cache = way.builder(MEMORY_BYTES).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let map = file.map_mut(0..LENGTH).unwrap();
        let pin = map.pin_mut(CHUNK..2 * CHUNK).unwrap();
        let writes = || {
            let before = cache.stats().storage.written_bytes;
            file.sync_range(0..LENGTH).unwrap();
            cache.stats().storage.written_bytes - before
        };
        assert_eq!([writes(), writes()], [CHUNK; 2], "{way:?}");
        drop(pin);
        assert_eq!([writes(), writes()], [CHUNK, 0], "{way:?}");
    }
}

/// Bytes that a device has stored without the page tables since the last sync are dirty when the
/// pin ends, even if the file was truncated and has grown meanwhile, if the page still belongs to
/// it.
#[test]
fn what_came_last_under_a_pin_is_kept_also_after_a_cut() {
    let Some(sources) = Sources::new() else { return };
    if !readings().contains(&Reading::Registered) {
        return skip("io-uring", "no memory can be registered");
    }
    for (way, is_cut) in Way::whole().into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let path = sources.target("target");
        let cache = way.builder(MEMORY_BYTES).build().unwrap();
        let file = cache.open(&path, &way.options()).unwrap();
        let map = file.map_mut(0..LENGTH).unwrap();
        let mut pin = map.pin_mut(CHUNK..2 * CHUNK).unwrap();
        let start = pin.as_mut_ptr();
        let mut ring = ring_for(start, true);
        if is_cut {
            file.set_len(CHUNK).unwrap();
            file.set_len(LENGTH).unwrap();
        }
        // Clean, and protected.
        file.sync_data().unwrap();
        read_by(&mut ring, &sources.files[0], CHUNK, start, Reading::Registered);
        drop((pin, ring, map));
        file.sync_data().unwrap();
        file.evict(0..LENGTH).unwrap();
        let chunk = CHUNK as usize..2 * CHUNK as usize;
        let expected = &sources.bytes[0][chunk.clone()];
        assert!(fs::read(&path).unwrap()[chunk.clone()] == *expected, "{way:?}, cut: {is_cut}");
        assert!(read_all(&file)[chunk] == *expected, "{way:?}, cut: {is_cut}");
    }
}

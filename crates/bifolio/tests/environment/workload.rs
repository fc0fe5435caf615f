//! A small workload in a forked process, whose outcome survives its end: in memory that it shares
//! with its parent, and in a file whose bytes the parent checks.
//!
//! The process may be killed at any time, and may be refused any system call. So it reports by
//! stores to shared memory only.
//!
//! # Safety
//! Shares a page of atomics with forked processes, which end without running the test harness.
#![allow(unsafe_code)]

use std::fmt::{Debug, Display};
use std::fs;
use std::io::Error;
use std::panic;
use std::path::Path;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use bifolio::{Cache, CacheBuilder, OpenOptions, ReadRequest};
use bifolio_testing::block_on;

use crate::setup::store;
use crate::support::{PAGE, writable};

/// Pages of the file that is written in rounds.
pub const PAGES: u64 = 48;
const MEMORY: u64 = 512 << 10;

/// Exit codes of the process.
const WRONG_BYTES: i32 = 97;
const PANICKED: i32 = 98;
pub const UNLISTED_CALL: i32 = 99;
/// Seconds after which a process counts as hung and is killed.
const PATIENCE: u32 = 60;

/// The report of a process: zero at first.
pub struct Report {
    /// Last round whose writes and sync succeeded.
    durable: AtomicU32,
    /// Last round that was begun.
    begun: AtomicU32,
    /// Calls that succeeded and that failed.
    successes: AtomicU32,
    failures: AtomicU32,
    /// A system call that is not listed.
    pub unlisted: AtomicI32,
    text_bytes: AtomicU32,
    text: [AtomicU8; 4000],
}

impl Report {
    /// Creates a report in memory that forked processes share.
    pub fn new() -> &'static Self {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe {
            libc::mmap(std::ptr::null_mut(), size_of::<Self>(), protection, flags, -1, 0)
        };
        assert_ne!(memory, libc::MAP_FAILED, "{}", Error::last_os_error());
        // SAFETY: zeros are valid atomics; the mapping is large enough and stays.
        unsafe { &*memory.cast::<Self>() }
    }

    fn say(&self, text: &str) {
        for byte in text.bytes().chain([b'\n']) {
            let at = self.text_bytes.fetch_add(1, Ordering::Relaxed) as usize;
            if let Some(place) = self.text.get(at) {
                place.store(byte, Ordering::Relaxed);
            }
        }
    }

    /// Returns the failures, a line each.
    pub fn text(&self) -> String {
        let length = (self.text_bytes.load(Ordering::Relaxed) as usize).min(self.text.len());
        let bytes: Vec<u8> =
            self.text[..length].iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Counts the result of a call; its error must be one line.
    fn note<T, E: Display>(&self, step: &str, result: Result<T, E>) -> Option<T> {
        match result {
            Ok(value) => {
                self.successes.fetch_add(1, Ordering::Relaxed);
                Some(value)
            }
            Err(error) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                self.say(&format!("{step}: {error}"));
                None
            }
        }
    }

    /// Ends the process if bytes are not as expected.
    fn expect<T: PartialEq + Debug>(&self, step: &str, found: T, expected: T) {
        if found != expected {
            self.say(&format!("{step}: found {found:?} instead of {expected:?}"));
            exit(WRONG_BYTES);
        }
    }

    /// Returns the number of calls that failed.
    #[cfg(target_arch = "x86_64")]
    pub fn failures(&self) -> u32 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Returns the number of calls that succeeded.
    #[cfg(target_arch = "x86_64")]
    pub fn successes(&self) -> u32 {
        self.successes.load(Ordering::Relaxed)
    }
}

pub fn exit(code: i32) -> ! {
    // SAFETY: the process ends at once, without running destructors of the test harness.
    unsafe { libc::_exit(code) }
}

/// A running process.
pub struct Child {
    process: i32,
    pub report: &'static Report,
}

impl Child {
    /// Runs `work` in a forked process with a time limit. `directory` has the file of the rounds.
    pub fn start(directory: &Path, work: impl FnOnce(&'static Report)) -> Self {
        fs::write(directory.join("rounds"), vec![0; (PAGES * PAGE) as usize]).unwrap();
        let report = Report::new();
        // SAFETY: no other thread of this process holds a lock that the child needs: the other
        // thread of the test harness sleeps.
        let process = unsafe { libc::fork() };
        assert_ne!(process, -1, "{}", Error::last_os_error());
        if process == 0 {
            preheat();
            // SAFETY: it only sets a timer, whose signal ends the process.
            unsafe { libc::alarm(PATIENCE) };
            panic::set_hook(Box::new(|panic| {
                report.say(&format!("panic: {panic}"));
                exit(PANICKED);
            }));
            work(report);
            exit(0);
        }
        Self { process, report }
    }

    /// Waits for the end of the process. Returns why it did not end well.
    pub fn wait(&self) -> Result<(), String> {
        let mut status = 0;
        // SAFETY: a child of this process, and memory for its status.
        assert_eq!(unsafe { libc::waitpid(self.process, &raw mut status, 0) }, self.process);
        let text = self.report.text();
        if status != 0 {
            let why = match (libc::WIFSIGNALED(status), libc::WTERMSIG(status)) {
                (true, libc::SIGALRM) => "it hangs".to_owned(),
                (true, signal) => format!("killed by signal {signal}"),
                _ => match libc::WEXITSTATUS(status) {
                    WRONG_BYTES => "wrong bytes".to_owned(),
                    PANICKED => "it panicked".to_owned(),
                    UNLISTED_CALL => {
                        let number = self.report.unlisted.load(Ordering::Relaxed);
                        format!("system call {number} is not listed")
                    }
                    code => format!("exit code {code}"),
                },
            };
            return Err(format!("{why}; {text}"));
        }
        Ok(())
    }

    /// Waits for the end of the process. Returns why it did not end well, or else checks that no
    /// byte was lost.
    pub fn end(self, directory: &Path) -> Result<(), String> {
        self.wait()?;
        let text = self.report.text();
        let bytes = fs::read(directory.join("rounds")).unwrap();
        let durable = self.report.durable.load(Ordering::Relaxed) as u8;
        let begun = self.report.begun.load(Ordering::Relaxed) as u8;
        for (page, bytes) in bytes.chunks(PAGE as usize).enumerate() {
            let round = bytes[0];
            if bytes.iter().any(|byte| *byte != round) || !(durable..=begun).contains(&round) {
                return Err(format!(
                    "page {page} on the disk is of round {round}, and {durable} is durable; {text}"
                ));
            }
        }
        Ok(())
    }
}

/// Lets the C library take memory for all later allocations: where the kernel refuses it more, a
/// Rust program aborts.
fn preheat() {
    const BYTES: usize = 16 << 20;
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        (libc::M_TOP_PAD, BYTES as libc::c_int),
        (libc::M_TRIM_THRESHOLD, 2 * BYTES as libc::c_int),
        (libc::M_MMAP_THRESHOLD, BYTES as libc::c_int),
    ] {
        // SAFETY: it only changes where the allocator takes memory from.
        assert_eq!(unsafe { libc::mallopt(parameter, value) }, 1);
    }
    drop(vec![1_u8; 1 << 20]);
}

/// Builds the cache of a workload.
pub fn builder(directory: &Path) -> CacheBuilder {
    let builder = Cache::builder()
        .memory(MEMORY)
        .memory_max(2 * MEMORY)
        .reclaim_wait_max(Duration::from_millis(300));
    builder.swap_directory(directory).swap_max(64 << 20)
}

fn options() -> OpenOptions {
    writable().len_max(64 << 20)
}

/// When a process is restricted: before the cache is built, or after the first round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    Start,
    Later,
}

pub const MOMENTS: [Moment; 2] = [Moment::Start, Moment::Later];

/// Uses files in every way but maps.
pub fn use_files(directory: &Path, report: &Report, moment: Moment, restrict: impl FnOnce()) {
    let mut restrict = Some(restrict);
    if moment == Moment::Start {
        restrict.take().into_iter().for_each(|restrict| restrict());
    }
    let Some(cache) = report.note("build", builder(directory).build()) else { return };
    let path = directory.join("rounds");
    let Some(file) = report.note("open", cache.open(&path, &options())) else { return };
    write_round(report, &file, 1);
    restrict.take().into_iter().for_each(|restrict| restrict());
    for round in 2..=3 {
        write_round(report, &file, round);
    }
    report.note("evict", file.evict(0..PAGES * PAGE));
    write_round(report, &file, 4);
    report.note("stats", Ok::<_, Error>(cache.stats()));
    report.note("open again", cache.open(&path, &OpenOptions::new()));
    report.note("read_async", block_on(file.read_async(vec![0; 100], 5 * PAGE)));
    report.note("sync_directory", cache.sync_directory(directory));
    use_second_file(&cache, directory, report);
    use_memory_file(&cache, report);
    report.note("set_memory", cache.set_memory(2 * MEMORY));
    report.note("set_memory", cache.set_memory(MEMORY));
    let other = Cache::builder().memory(MEMORY).memory_max(MEMORY).build();
    if let Some(other) = report.note("build another", other) {
        report.note("memory file", other.memory_file_with("other", &options()));
    }
    let is_whole = write_round(report, &file, 5);
    drop(file);
    if report.note("close", cache.close()).is_some() && is_whole {
        report.durable.store(5, Ordering::Relaxed);
    }
}

/// Overwrites the file, syncs it, and checks what is read. Returns `true` if all was written.
fn write_round(report: &Report, file: &bifolio::File, round: u8) -> bool {
    let oldest = report.durable.load(Ordering::Relaxed) as u8;
    report.begun.store(round.into(), Ordering::Relaxed);
    let mut is_whole = true;
    for page in 0..PAGES {
        let written = file.write_all_at(&[round; PAGE as usize], page * PAGE);
        is_whole &= report.note("write", written).is_some();
    }
    let synced = report.note("sync", file.sync_data()).is_some();
    if is_whole && synced {
        report.durable.store(round.into(), Ordering::Relaxed);
    }
    let mut buffers = vec![[0_u8; 64]; PAGES as usize];
    let buffered = buffers.iter_mut().zip(0..);
    let mut requests: Vec<_> =
        buffered.map(|(buffer, page)| ReadRequest::new(buffer, page * PAGE + 7)).collect();
    let is_read = report.note("read_many", file.read_many(&mut requests)).is_some();
    drop(requests);
    for buffer in buffers.iter().filter(|_| is_read) {
        let is_right = if is_whole { *buffer == [round; 64] } else { buffer[0] >= oldest };
        report.expect("bytes that were read", is_right, true);
    }
    is_whole
}

/// Creates a file and changes its length and its allocation.
fn use_second_file(cache: &Cache, directory: &Path, report: &Report) {
    let options = options().create(true).exclusive(true);
    let opened = cache.open(directory.join("second"), &options);
    let Some(file) = report.note("create", opened) else { return };
    let is_long = report.note("set_len", file.set_len(20 * PAGE)).is_some();
    report.note("append", file.append(&[7; 100]));
    report.note("allocate", file.allocate(0..30 * PAGE));
    report.note("punch_hole", file.punch_hole(2 * PAGE..4 * PAGE));
    report.note("zero_range", file.zero_range(6 * PAGE..7 * PAGE));
    report.note("seek_data", file.seek_data(0));
    report.note("seek_hole", file.seek_hole(0));
    report.note("sync_all", file.sync_all());
    let mut bytes = [9; 100];
    if report.note("read", file.read_exact_at(&mut bytes, 3 * PAGE)).is_some() && is_long {
        report.expect("zeros", bytes, [0; 100]);
    }
    report.note("shrink", file.set_len(10));
    report.note("close of the second", file.close());
}

/// Writes a memory file that is larger than memory, and reads it.
fn use_memory_file(cache: &Cache, report: &Report) {
    let made = cache.memory_file_with("memory", &options());
    let Some(file) = report.note("memory file", made) else { return };
    let byte_of = |page: u64| (page % 250) as u8 + 1;
    let write = |page: &u64| {
        let written = file.write_all_at(&[byte_of(*page); PAGE as usize], page * PAGE);
        report.note("write to memory", written).is_some()
    };
    // Each write that fails has waited.
    let pages = (0..2 * MEMORY / PAGE).take_while(write).count() as u64;
    for page in 0..pages {
        let mut bytes = [0; 8];
        if report.note("read of memory", file.read_exact_at(&mut bytes, page * PAGE)).is_some() {
            report.expect("bytes of memory", bytes, [byte_of(page); 8]);
        }
    }
}

/// Stores to a map of the file. After the restriction, it touches only pages that are resident.
pub fn use_map(directory: &Path, report: &Report, moment: Moment, restrict: impl FnOnce()) {
    let mut restrict = Some(restrict);
    if moment == Moment::Start {
        restrict.take().into_iter().for_each(|restrict| restrict());
    }
    let Some(cache) = report.note("build", builder(directory).build()) else { return };
    let options = options().mappable(true);
    let opened = cache.open(directory.join("rounds"), &options);
    let Some(file) = report.note("open", opened) else { return };
    let Some(mut map) = report.note("map_mut", file.map_mut(0..PAGES * PAGE)) else { return };
    for round in 1..=3 {
        report.begun.store(round, Ordering::Relaxed);
        for page in 0..PAGES {
            store(map.as_mut_ptr(), page * PAGE, &[round as u8; PAGE as usize]);
        }
        if report.note("sync of a map", map.sync(0..PAGES * PAGE)).is_some() {
            report.durable.store(round, Ordering::Relaxed);
        }
        restrict.take().into_iter().for_each(|restrict| restrict());
    }
    report.note("map again", file.map(0..PAGE));
    drop(map);
    report.note("evict", file.evict(0..PAGES * PAGE));
    let mut bytes = [0; 64];
    for page in 0..PAGES {
        if report.note("read", file.read_exact_at(&mut bytes, page * PAGE)).is_some() {
            report.expect("bytes of a map", bytes, [3; 64]);
        }
    }
    drop(file);
    report.note("close", cache.close());
}

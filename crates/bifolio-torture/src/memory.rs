//! The resident memory of a cache, and whether it is empty when no file is open.
//!
//! Anonymous and shared memory count; pages of the program and of files do not, because the kernel
//! can reclaim them. The memory of the harness is what remains after the cache was dropped: the
//! difference is the cache's.
//!
//! # Safety
//! Calls functions of the C library that take numbers.
#![allow(unsafe_code)]

use crate::history::Violation;
use bifolio::{Cache, Stats};
use std::fs;
#[cfg(test)]
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes allowed beyond the bound and 2 % of it.
const SLACK_BYTES: u64 = 8 << 20;
/// Folios in an LRU batch.
const BATCH_FOLIOS: u64 = 31;
/// Maximum time until reclaim is idle.
const PATIENCE: Duration = Duration::from_secs(5);

/// Returns `true` in a build with a sanitizer, which has an allocator of its own and needs memory
/// for itself: resident memory is not judged (`cargo x san`).
fn is_sanitized() -> bool {
    std::env::var_os("BIFOLIO_SANITIZED").is_some()
}

/// Makes the allocator return freed memory at once, for the whole process: what it keeps would
/// count as the cache's if it were returned while the cache is dropped. Does nothing under a
/// sanitizer.
///
/// The C library raises its limits when a large block is freed, up to 64 MiB, and `malloc_trim`
/// leaves the free memory at the end of the heap of each thread. Limits that are set stay.
pub fn keep_no_freed_memory() {
    const LIMIT_BYTES: libc::c_int = 128 << 10;
    if is_sanitized() {
        return;
    }
    for limit in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
        // SAFETY: any numbers are valid arguments.
        let is_set = unsafe { libc::mallopt(limit, LIMIT_BYTES) };
        assert_eq!(is_set, 1, "mallopt({limit}) failed");
    }
}

/// Returns the resident memory, bytes; memory kept by the allocator is released first.
pub fn resident_bytes() -> u64 {
    give_back();
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let field = |name: &str| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|rest| rest.split_whitespace().next());
        number.and_then(|number| number.parse::<u64>().ok()).unwrap_or(0) << 10
    };
    field("Anonymous:") + field("Pss_Shmem:")
}

/// Checks that a cache had no more than it may: `with` was resident when it was at rest, `without`
/// after it was dropped. Always succeeds under a sanitizer.
pub fn check_resident(stats: &Stats, with: u64, without: u64) -> Result<(), Violation> {
    let resident = with.saturating_sub(without);
    let allowed = stats.memory.bound_bytes + stats.memory.bound_bytes / 50 + SLACK_BYTES;
    if resident <= allowed || is_sanitized() {
        return Ok(());
    }
    let bound = stats.memory.bound_bytes;
    let told = format!("{resident} bytes are resident, the bound is {bound}: {stats:?}");
    Err(Violation(told))
}

/// Waits until a cache without open files holds only folios that an LRU batch still references:
/// some folios of each CPU, of `folio_bytes` at most. Reclaim may need a moment.
pub fn check_empty(cache: &Cache, folio_bytes: u64) -> Result<(), Violation> {
    check_empty_within(PATIENCE, cache, folio_bytes)
}

fn check_empty_within(
    patience: Duration,
    cache: &Cache,
    folio_bytes: u64,
) -> Result<(), Violation> {
    let cpus = thread::available_parallelism().map_or(1, usize::from) as u64;
    let batches_bytes = cpus * BATCH_FOLIOS * folio_bytes;
    let begun = Instant::now();
    loop {
        let stats = cache.stats();
        let is_empty = stats.memory.dirty_bytes == 0
            && stats.memory.unswapped_bytes == 0
            && stats.memory.swap_bytes == 0
            && stats.memory.frame_bytes.saturating_sub(stats.memory.free_bytes) <= batches_bytes;
        if is_empty {
            return Ok(());
        }
        if begun.elapsed() > patience {
            return Err(Violation(format!("no file is open, and this is left: {stats:?}")));
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the bytes that this process has from the allocator; 0 under a sanitizer.
pub fn allocated_bytes() -> u64 {
    if is_sanitized() {
        return 0;
    }
    // SAFETY: the call has no arguments.
    let known = unsafe { libc::mallinfo2() };
    (known.uordblks + known.hblkhd) as u64
}

fn give_back() {
    // SAFETY: any number is a valid argument.
    unsafe { libc::malloc_trim(0) };
}

/// Returns a guard for a test that measures memory, or has much of it: the memory measured is the
/// process's, and tests that held none would measure each other's.
#[cfg(test)]
pub fn alone() -> MutexGuard<'static, ()> {
    static MEASURING: Mutex<()> = Mutex::new(());
    MEASURING.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn memory_that_was_touched_is_seen_until_it_is_given_back() {
        let _alone = alone();
        const BYTES: u64 = 256 << 20;
        let before = resident_bytes();
        let touched = std::hint::black_box(vec![1_u8; BYTES as usize]);
        let with = resident_bytes();
        drop(touched);
        let without = resident_bytes();
        // The test harness has memory, too.
        assert!(with > before + BYTES / 4 * 3, "{before} {with}");
        assert!(without < before + BYTES / 4, "{before} {without}");
        let mut stats = Stats::default();
        stats.memory.bound_bytes = BYTES / 2;
        assert!(check_resident(&stats, with, without).is_err());
        stats.memory.bound_bytes = BYTES * 2;
        assert!(check_resident(&stats, with, without).is_ok());
    }

    #[test]
    fn memory_that_a_thread_has_freed_is_not_resident() {
        let _alone = alone();
        const BLOCK_BYTES: usize = 1 << 20;
        const BLOCKS: usize = 24;
        keep_no_freed_memory();
        // Would raise the limits.
        drop(std::hint::black_box(vec![1_u8; BLOCKS * BLOCK_BYTES]));
        let before = resident_bytes();
        let (freed, is_freed) = mpsc::channel();
        let (done, is_done) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            let small = vec![1_u8; 4096];
            let blocks: Vec<_> = (0..BLOCKS).map(|_| vec![1_u8; BLOCK_BYTES]).collect();
            drop(std::hint::black_box(blocks));
            freed.send(()).expect("the test waits");
            // The end of a thread returns memory, too.
            is_done.recv().expect_err("nothing is sent");
            small
        });
        is_freed.recv().expect("the thread sends");
        let after = resident_bytes();
        drop(done);
        thread.join().expect("no panic");
        assert!(after < before + (BLOCKS * BLOCK_BYTES / 2) as u64, "{before} {after}");
    }

    #[test]
    fn a_file_that_is_open_is_something_left() {
        let _alone = alone();
        let cache = Cache::builder().memory(16 << 20).build().unwrap();
        let file = cache.memory_file("file").unwrap();
        file.write_at(&vec![1; 4 << 20], 0).unwrap();
        assert!(check_empty_within(Duration::ZERO, &cache, 4096).is_err());
        drop(file);
        assert!(check_empty(&cache, 4096).is_ok());
    }
}

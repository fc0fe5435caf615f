//! A bound that falls keeps every share: what is used already fits in the new limits before they
//! count, or the old bound stays.

use crate::support::{PAGE, error_of, wait_until, writable};
use bifolio::{Cache, ErrorKind, File, GatedFile, WriteGate};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const LARGE: u64 = 2 << 20;
const SMALL: u64 = 1 << 20;
/// Pages that may be dirty with the large bound, and not with the small one.
const DIRTY_PAGES: u64 = 180;

fn quiet() -> Cache {
    let builder = Cache::builder().memory(LARGE).dirty_age_max(Duration::from_millis(3_600_000));
    builder.dirty_background(SMALL).build().unwrap()
}

fn file_in_memory(cache: &Cache) -> (File, Arc<FaultyBacking>) {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(vec![0; 4 << 20])));
    (cache.open_backing(backing.clone(), &writable()).unwrap(), backing)
}

/// A log in the same cache, as the write gate of a file.
#[derive(Debug)]
struct Log {
    file: File,
    durable: AtomicU64,
    fails: AtomicBool,
}

impl WriteGate for Log {
    fn durable_lsn(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    fn make_durable(&self, lsn: u64) -> io::Result<()> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EDQUOT));
        }
        // A record of its own, as of a checkpoint.
        self.file.append(&[1; 100])?;
        self.file.sync_data()?;
        self.durable.fetch_max(lsn, Ordering::Release);
        Ok(())
    }
}

/// Dirties pages behind a gate, each with a record in the log.
fn dirty_behind_a_gate(cache: &Cache, lsn: impl Fn(u64) -> u64) -> (GatedFile, Arc<Log>) {
    let (log, _) = file_in_memory(cache);
    let (durable, fails) = (AtomicU64::new(0), AtomicBool::new(false));
    let log = Arc::new(Log { file: log, durable, fails });
    let (file, _) = file_in_memory(cache);
    let file = GatedFile::new(file, log.clone()).unwrap();
    for page in 0..DIRTY_PAGES {
        log.file.write_all_at(&[2; 16], page * 16).unwrap();
        file.write_at(&[3; 8], page * PAGE, lsn(page)).unwrap();
    }
    (file, log)
}

#[test]
fn a_log_can_be_written_after_the_bound_has_fallen() {
    let cache = quiet();
    let (file, log) = dirty_behind_a_gate(&cache, |page| page + 1);
    cache.set_memory(SMALL).unwrap();
    // As much as the gated file leaves.
    for _ in 0..16 {
        log.file.append(&[4; PAGE as usize]).unwrap();
    }
    file.sync_data().unwrap();
    log.file.sync_data().unwrap();
    drop((file, log));
    cache.close().unwrap();
}

#[test]
fn a_gate_that_stays_shut_keeps_the_old_bound_and_is_named() {
    for is_committed in [true, false] {
        let cache = quiet();
        let lsn = |page| if is_committed { page + 1 } else { u64::MAX };
        let (file, log) = dirty_behind_a_gate(&cache, lsn);
        log.fails.store(true, Ordering::Relaxed);
        let cause = if is_committed { "os error 122" } else { "GatedFile::assign_lsn" };
        let needles = ["1048576", "write gates", "dirty_max", "memory", cause];
        let error = error_of(cache.set_memory(SMALL), &needles);
        assert_eq!(error.kind(), ErrorKind::BoundInUse, "{error:?}");
        assert_eq!(cache.stats().memory.bound_bytes, LARGE);
        for _ in 0..16 {
            log.file.append(&[4; PAGE as usize]).unwrap();
        }
        log.fails.store(false, Ordering::Relaxed);
        if !is_committed {
            (0..DIRTY_PAGES)
                .for_each(|page| file.assign_lsn(page * PAGE..page * PAGE + 8, 9).unwrap());
        }
        cache.set_memory(SMALL).unwrap();
        file.sync_data().unwrap();
    }
}

#[test]
fn a_hung_device_keeps_the_old_bound_and_no_writer_of_another_waits() {
    let cache = quiet();
    let (hung, backing) = file_in_memory(&cache);
    let gate = Gate::new();
    backing.inject(Fault::on(Call::Write).forever().held(&gate));
    (0..DIRTY_PAGES).for_each(|page| hung.write_all_at(&[5; 8], page * PAGE).unwrap());
    let (healthy, _) = file_in_memory(&cache);
    let slowest = |pages: u64| {
        let write = |page: u64| {
            let begun = Instant::now();
            healthy.write_all_at(&[6; PAGE as usize], page % 1024 * PAGE).unwrap();
            begun.elapsed()
        };
        (0..pages).map(write).max().unwrap()
    };
    std::thread::scope(|scope| {
        let smaller = scope.spawn(|| cache.set_memory(SMALL));
        gate.wait_for_arrivals(1);
        let mut slow = Duration::ZERO;
        while !smaller.is_finished() {
            slow = slow.max(slowest(64));
        }
        let needles = ["1048576", "dirty on one device", "dirty_max", "memory"];
        error_of(smaller.join().unwrap(), &needles);
        assert!(slow < Duration::from_secs(8), "{slow:?}");
    });
    assert_eq!(cache.stats().memory.bound_bytes, LARGE);
    let slow = slowest(4096);
    assert!(slow < Duration::from_secs(8), "{slow:?}");
    gate.open();
    cache.set_memory(SMALL).unwrap();
    hung.sync_data().unwrap();
}

#[test]
fn devices_at_work_do_not_keep_the_bound_from_falling() {
    let cache = Cache::builder().memory(LARGE).build().unwrap();
    let files: Vec<_> = (0..3).map(|_| file_in_memory(&cache).0).collect();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for file in &files {
            scope.spawn(|| {
                let mut page = 0;
                while !is_over.load(Ordering::Relaxed) {
                    page = (page + 7) % 1024;
                    file.write_all_at(&[7; PAGE as usize], page * PAGE).unwrap();
                }
            });
        }
        wait_until("all of them write", || cache.stats().memory.dirty_bytes > LARGE / 4);
        for _ in 0..5 {
            let lowered = cache.set_memory(SMALL);
            let raised = cache.set_memory(LARGE);
            is_over.store(lowered.is_err() || raised.is_err(), Ordering::Relaxed);
            lowered.unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

/// Whatever bound is accepted, memory files leave pages to others.
#[test]
fn memory_files_leave_their_share_of_a_lower_bound_to_others() {
    for swap in [false, true] {
        let refusing = FaultyBacking::new(MemoryBacking::new(Vec::new()));
        refusing.inject(Fault::on(Call::Write).forever().fails(libc::ENOSPC));
        let builder = Cache::builder().memory(LARGE).reclaim_wait_max(Duration::from_millis(1000));
        let cache = match swap {
            true => builder.swap_backing(Arc::new(refusing)),
            false => builder,
        };
        let cache = cache.build().unwrap();
        let scratch = cache.memory_file("scratch").unwrap();
        scratch.write_all_at(&vec![8; SMALL as usize], 0).unwrap();
        let (other, _) = file_in_memory(&cache);
        let mut accepted = 0;
        for bound in (SMALL..SMALL + (256 << 10)).rev().step_by(4096) {
            if cache.set_memory(bound).is_ok() {
                accepted += 1;
                for page in 0..16 {
                    let read = other.read_exact_at(&mut [0; 8], page * 61 * PAGE);
                    read.unwrap_or_else(|error| panic!("swap: {swap}, bound {bound}: {error}"));
                }
            }
        }
        assert!(accepted > 0, "swap: {swap}");
    }
}

/// Busy pages, here of a device that hangs, do not make pins fit.
#[test]
fn a_bound_below_what_is_pinned_is_refused_beside_a_device_that_hangs() {
    let wait_max = Duration::from_secs(60);
    let cache = Cache::builder().memory(LARGE).reclaim_wait_max(wait_max).build().unwrap();
    let (hung, backing) = file_in_memory(&cache);
    let gate = Gate::new();
    backing.inject(Fault::on(Call::Write).forever().held(&gate));
    hung.write_all_at(&[5; 8], 0).unwrap();
    let (pinned, _) = file_in_memory(&cache);
    let pins: Vec<_> =
        (0..300).map(|page| pinned.pin(page * PAGE..(page + 1) * PAGE).unwrap()).collect();
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| hung.sync_data());
        gate.wait_for_arrivals(1);
        let begun = Instant::now();
        let refused = cache.set_memory(SMALL);
        let time = begun.elapsed();
        gate.open();
        assert_eq!(error_of(refused, &["1048576", "pinned"]).kind(), ErrorKind::Full);
        assert!(time < wait_max / 2, "{time:?}");
        syncing.join().unwrap().unwrap();
    });
    assert_eq!(cache.stats().memory.bound_bytes, LARGE);
    drop(pins);
    cache.set_memory(SMALL).unwrap();
}

/// A change that cannot succeed gives up before the calls that wait for its end do.
#[test]
fn calls_that_wait_for_a_change_of_the_bound_outlive_it() {
    let wait_max = Duration::from_secs(20);
    let builder = Cache::builder().memory(LARGE).readahead_max(0);
    let cache = builder.reclaim_wait_max(wait_max).build().unwrap();
    let (hung, backing) = file_in_memory(&cache);
    let gate = Gate::new();
    backing.inject(Fault::on(Call::Read).forever().held(&gate));
    let (healthy, _) = file_in_memory(&cache);
    let (smaller, is_over) = (512 << 10, AtomicBool::new(false));
    std::thread::scope(|scope| {
        // Pages that are being read, together more than the lower bound.
        let readers: Vec<_> = (0..5_u64)
            .map(|nth| {
                let hung = &hung;
                scope.spawn(move || {
                    hung.read_exact_at(&mut vec![0; 256 << 10], nth * (512 << 10)).unwrap();
                })
            })
            .collect();
        wait_until("their pages are claimed", || cache.stats().memory.frame_bytes > smaller);
        let healthy_reader = scope.spawn(|| {
            let mut page = 0;
            while !is_over.load(Ordering::Relaxed) {
                page = (page + 7) % 1024;
                healthy.read_exact_at(&mut [0; 8], page * PAGE)?;
            }
            Ok::<(), bifolio::Error>(())
        });
        let begun = Instant::now();
        let refused = cache.set_memory(smaller);
        let time = begun.elapsed();
        is_over.store(true, Ordering::Relaxed);
        let healthy_reads = healthy_reader.join().unwrap();
        gate.open();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert_eq!(error_of(refused, &["524288"]).kind(), ErrorKind::Full);
        healthy_reads.unwrap();
        assert!(time < wait_max / 4 * 3, "{time:?}");
    });
    assert_eq!(cache.stats().memory.bound_bytes, LARGE);
}

/// Descriptors of pages are never freed: a bound below them is refused before anything is evicted.
#[test]
fn a_bound_below_the_descriptors_is_refused_and_keeps_the_pages() {
    let (first, raised) = (256 << 10, 32 << 20);
    let builder = Cache::builder().memory(first).memory_max(raised).readahead_max(0);
    let cache = builder.build().unwrap();
    cache.set_memory(raised).unwrap();
    let backing = Arc::new(MemoryBacking::new(vec![1; 24 << 20]));
    let file = cache.open_backing(backing, &writable()).unwrap();
    let read_all =
        || (0..6144).for_each(|page| file.read_exact_at(&mut [0; 8], page * PAGE).unwrap());
    read_all();
    let misses = cache.stats().reads.misses;
    let error = error_of(cache.set_memory(first), &["262144", "descriptors"]);
    assert_eq!(error.kind(), ErrorKind::Full);
    read_all();
    assert_eq!(cache.stats().reads.misses, misses);
    cache.set_memory(1 << 20).unwrap();
}

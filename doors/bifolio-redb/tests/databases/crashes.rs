//! Power cuts at any moment: of what no sync covered, the device keeps what it likes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use bifolio_testing::{CrashingBacking, with_seeds};
use redb::Database;

use super::model::{assert_recovered, cache, commit, open_file, writable};

fn open_over(backing: &Arc<CrashingBacking>, cache_bytes: u64) -> Database {
    open_file(cache(cache_bytes).open_backing(backing.clone(), &writable()).unwrap())
}

/// Commits on a thread, and meanwhile looks at crashes.
fn crash_meanwhile(seed: u64, cache_bytes: u64, crashes: u64) {
    let backing = Arc::new(CrashingBacking::new(Vec::new()));
    let (acknowledged, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let database = open_over(&backing, cache_bytes);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                commit(&database, number).unwrap();
                acknowledged.store(number, Ordering::Release);
            }
        });
        for crash in 0..crashes {
            let before = acknowledged.load(Ordering::Acquire);
            let found = Arc::new(backing.crash(seed << 32 | crash));
            assert_recovered(&mut open_over(&found, cache_bytes), before);
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn acknowledged_commits_survive_power_cuts() {
    with_seeds(4, |seed| crash_meanwhile(seed, 1 << 20, 8));
}

#[test]
fn power_cuts_leave_a_database_in_the_smallest_cache() {
    with_seeds(2, |seed| crash_meanwhile(seed, 256 << 10, 6));
}

#[test]
fn a_database_survives_one_power_cut_after_another() {
    with_seeds(3, |seed| {
        let mut backing = Arc::new(CrashingBacking::new(Vec::new()));
        let mut last = 0;
        for cut in 0..12 {
            let mut database = open_over(&backing, 1 << 20);
            last = assert_recovered(&mut database, last);
            for _ in 0..5 {
                commit(&database, last + 1).unwrap();
                last += 1;
            }
            // The commit that is not acknowledged has written a part.
            let transaction = database.begin_write().unwrap();
            super::model::write(&transaction, last + 1).unwrap();
            let found = Arc::new(backing.crash(seed << 32 | cut));
            drop(transaction);
            drop(database);
            backing = found;
        }
    });
}

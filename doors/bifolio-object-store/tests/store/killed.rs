//! Processes of their own: one that is killed while it uses its tier, and one that changes its
//! directory.

use std::env;
use std::io::{BufRead, BufReader};
use std::path::{Path as FilePath, PathBuf};
use std::process::{Child, Command, Stdio};
use std::slice;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bifolio::Cache;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::door::{CacheError, CachedStore};
use crate::support::{PART, TestStore, builder, bytes, put};

/// Directory of the tier of a process that a test has started.
const TIER: &str = "BIFOLIO_TEST_TIER";
const OBJECTS: u64 = 12;
const LENGTH: usize = 9 * PART as usize - 77;
/// Bytes of all objects. The tier of the killed process has room for half of them, so that slots are
/// reused all the time, that of its successor for all of them.
const OBJECTS_BYTES: u64 = OBJECTS * 9 * PART;
const KILLS: u64 = 12;

/// Starts a test of this program as a process of its own.
fn start(test: &str, tier: &FilePath) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([&format!("killed::{test}"), "--exact", "--ignored", "--nocapture"]);
    command.env(TIER, tier).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Returns the tier that this process was started for, if it was started by [`start`].
fn given_tier() -> Option<PathBuf> {
    env::var_os(TIER).map(PathBuf::from)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Opens the same store in every process: its tags depend on the order of its changes only.
async fn open(tier: &FilePath, tier_bytes: u64) -> (Arc<TestStore>, Vec<Path>, CachedStore) {
    let store = TestStore::new();
    let locations: Vec<Path> = (0..OBJECTS).map(|seed| Path::from(format!("{seed}"))).collect();
    for (seed, location) in (0..).zip(&locations) {
        put(&store, location, &bytes(seed, LENGTH)).await;
    }
    let pages = Cache::builder().memory(1 << 20).build().unwrap();
    let started = Instant::now();
    loop {
        match builder(&store, &pages).disk(tier, tier_bytes).build() {
            Ok(cached) => return (store, locations, cached),
            // A program that another test starts has the lock until it is loaded.
            Err(CacheError::DiskInUse { .. }) if started.elapsed().as_secs() < 20 => {
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Reads ranges at random, and checks their bytes.
async fn read_some(cached: &CachedStore, locations: &[Path], random: &mut fastrand::Rng) {
    let seed = random.usize(..locations.len());
    let start = random.usize(..LENGTH);
    let range = start as u64..random.usize(start + 1..=LENGTH) as u64;
    let got = cached.get_ranges(&locations[seed], slice::from_ref(&range)).await.unwrap();
    let expected = &bytes(seed as u64, LENGTH)[start..range.end as usize];
    assert!(got[0] == expected, "wrong bytes of {seed}, {range:?}");
}

/// Reads until it is killed. Prints a line when its tier is full.
#[test]
#[ignore = "a process of the next test"]
fn reads_until_it_is_killed() {
    let Some(tier) = given_tier() else { return };
    runtime().block_on(async {
        let (_store, locations, cached) = open(&tier, OBJECTS_BYTES / 2).await;
        for location in &locations {
            cached.get(location).await.unwrap().bytes().await.unwrap();
        }
        cached.flush().await.unwrap();
        println!("full");
        let mut random = fastrand::Rng::new();
        loop {
            read_some(&cached, &locations, &mut random).await;
        }
    });
}

#[test]
fn a_killed_process_leaves_a_tier_that_others_use() {
    let directory = tempfile::tempdir().unwrap();
    let mut disk_hits = 0;
    for seed in 0..KILLS {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut child = start("reads_until_it_is_killed", directory.path());
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let is_full = lines.any(|line| line.is_ok_and(|line| line.contains("full")));
        thread::sleep(Duration::from_micros(random.u64(..20_000)));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert!(is_full && status.code().is_none(), "{status}");
        runtime().block_on(async {
            let (_store, locations, cached) = open(directory.path(), 2 * OBJECTS_BYTES).await;
            let restored = cached.cached_parts();
            for (seed, location) in (0..).zip(&locations) {
                let got = cached.get(location).await.unwrap().bytes().await.unwrap();
                assert!(got == bytes(seed, LENGTH), "wrong bytes of {seed}");
            }
            for _ in 0..50 {
                read_some(&cached, &locations, &mut random).await;
            }
            cached.flush().await.unwrap();
            println!("{restored} parts: {:?}", cached.metrics());
            disk_hits += cached.metrics().disk_hits;
        });
    }
    assert!(disk_hits > 0, "nothing was left");
}

/// Opens a tier by a relative path, goes elsewhere, and has its file of names rewritten.
#[test]
#[ignore = "a process of the next test"]
fn goes_elsewhere() {
    let Some(tier) = given_tier() else { return };
    env::set_current_dir(tier.parent().unwrap()).unwrap();
    runtime().block_on(async {
        let store = TestStore::new();
        let pages = Cache::builder().memory(1 << 20).build().unwrap();
        let building = builder(&store, &pages).disk(tier.file_name().unwrap(), 1 << 20);
        let cached = building.build().unwrap();
        env::set_current_dir("/").unwrap();
        let folder = ["x".repeat(250), "y".repeat(250), "z".repeat(250)].join("/");
        // A megabyte of names, and more.
        for number in 0..1600 {
            let location = Path::from(format!("{folder}/{number}"));
            put(&store, &location, &bytes(number, 10)).await;
            assert_eq!(cached.get_range(&location, 0..9).await.unwrap(), bytes(number, 9));
        }
        cached.flush().await.unwrap();
        let metrics = cached.metrics();
        assert_eq!((metrics.disk_write_failures, metrics.evicted > 0), (0, true), "{metrics:?}");
    });
}

#[test]
fn a_relative_directory_is_that_of_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = start("goes_elsewhere", &directory.path().join("tier"));
    assert!(child.wait().unwrap().success());
    let names = std::fs::metadata(directory.path().join("tier/names")).unwrap().len();
    assert!(names < 1 << 20, "{names} bytes of names");
}

//! The disk tier: restarts, damage, full, removed and read-only disks.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path as FilePath;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::door::{CacheError, CachedStore};
use bifolio_testing::{SmallDisk, skip};
use futures::StreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::support::{PART, TestStore, builder, bytes, cache, put, wait_for_parts};

const PARTS: usize = 12;
const LENGTH: usize = PARTS * PART as usize - 100;

fn open(store: &Arc<TestStore>, directory: &FilePath) -> CachedStore {
    builder(store, &cache()).disk(directory, 1 << 20).build().unwrap()
}

async fn read(cached: &CachedStore, location: &Path) -> Vec<u8> {
    cached.get(location).await.unwrap().bytes().await.unwrap().to_vec()
}

#[tokio::test]
async fn parts_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let cached = open(&store, directory.path());
    assert_eq!(read(&cached, &location).await, bytes(0, LENGTH));
    wait_for_parts(&cached, PARTS).await;
    drop(cached);
    let gets = store.gets();
    for _ in 0..2 {
        let cached = open(&store, directory.path());
        assert_eq!(cached.cached_parts(), PARTS);
        assert_eq!(read(&cached, &location).await, bytes(0, LENGTH));
        let metrics = cached.metrics();
        assert_eq!(metrics.disk_hits + metrics.memory_hits, PARTS as u64, "{metrics:?}");
        assert!(metrics.disk_hits > 0, "{metrics:?}");
        assert_eq!(store.gets(), gets);
    }
    // A new version is read from the store, although parts of the old one are there.
    put(&store, &location, &bytes(1, LENGTH)).await;
    let cached = open(&store, directory.path());
    assert_eq!(read(&cached, &location).await, bytes(1, LENGTH));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_is_opened_again_at_once_after_a_store_that_was_busy() {
    let directory = tempfile::tempdir().unwrap();
    let (store, location) = (TestStore::new(), Path::from("a"));
    let contents = bytes(0, 3 << 20);
    put(&store, &location, &contents).await;
    for part_bytes in [PART, 256 << 10].repeat(30) {
        let building =
            builder(&store, &cache()).part_bytes(part_bytes).disk(directory.path(), 4 << 20);
        let cached = building.request_bytes_max(8 * part_bytes).build().unwrap();
        assert_eq!(cached.get_range(&location, 0..9).await.unwrap(), contents[..9]);
        // The rest of the parts is on its way into the tier.
        drop(cached);
    }
}

#[tokio::test]
async fn durations_without_end_are_waits_without_end() {
    let directory = tempfile::tempdir().unwrap();
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    // What is multiplied or added to must not overflow.
    for time in [Duration::MAX, Duration::MAX / 10, Duration::from_secs(u64::MAX / 11)] {
        let building = builder(&store, &cache()).disk(directory.path(), 1 << 20);
        let building = building.disk_timeout(time).stall_timeout(time);
        let cached = building.head_age(time).list_age(time).build().unwrap();
        assert_eq!(read(&cached, &location).await, bytes(0, LENGTH));
        assert_eq!(cached.list(None).collect::<Vec<_>>().await.len(), 1);
        wait_for_parts(&cached, PARTS).await;
    }
}

#[tokio::test]
async fn stores_with_names_of_their_own_share_a_directory_and_no_object() {
    let directory = tempfile::tempdir().unwrap();
    let location = Path::from("a");
    let (first, second) = (TestStore::new(), TestStore::new());
    put(&first, &location, &bytes(1, LENGTH)).await;
    put(&second, &location, &bytes(2, LENGTH)).await;
    let open = |store: &Arc<TestStore>, name: &str| {
        builder(store, &cache()).disk(directory.path(), 1 << 20).name(name).build().unwrap()
    };
    let cached = open(&first, "first");
    assert_eq!(read(&cached, &location).await, bytes(1, LENGTH));
    wait_for_parts(&cached, PARTS).await;
    drop(cached);
    assert_eq!(read(&open(&second, "second"), &location).await, bytes(2, LENGTH));
}

#[tokio::test]
async fn damage_anywhere_on_disk_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let fill = async || {
        let cached = open(&store, directory.path());
        assert_eq!(read(&cached, &location).await, bytes(0, LENGTH));
        cached.flush().await.unwrap();
        assert_eq!(cached.cached_parts(), PARTS);
    };
    fill().await;
    for name in ["parts", "index"] {
        let path = directory.path().join(name);
        let used = if name == "parts" { LENGTH } else { 4096 + PARTS * 64 };
        // Every byte of header and records, and one byte in each 64 of the parts.
        let positions = match name {
            "parts" => (0..used).step_by(64 * 37 + 1).collect::<Vec<_>>(),
            _ => (0..40).chain((4096..used).step_by(23)).collect(),
        };
        for position in positions {
            let file = fs::File::options().read(true).write(true).open(&path).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, position as u64).unwrap();
            file.write_all_at(&[byte[0] ^ 0x10], position as u64).unwrap();
            let gets = store.gets();
            fill().await;
            // The last part ends before its slot, which may be any; and a record ends before the next.
            let is_padding = match name {
                "parts" => position % PART as usize >= PART as usize - 100,
                _ => position >= 4096 && position % 64 >= 40,
            };
            assert!(store.gets() > gets || is_padding, "{name} at {position}");
        }
        // All of it at once: zeros, another file, none.
        let length = fs::metadata(&path).unwrap().len() as usize;
        for damage in [vec![0; length], bytes(9, length), bytes(9, 1000), Vec::new()] {
            fs::write(&path, damage).unwrap();
            fill().await;
        }
        fs::remove_file(&path).unwrap();
        fill().await;
    }
}

#[tokio::test]
async fn a_tier_with_other_settings_starts_empty_or_shortened() {
    let directory = tempfile::tempdir().unwrap();
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let cached = open(&store, directory.path());
    read(&cached, &location).await;
    wait_for_parts(&cached, PARTS).await;
    drop(cached);
    let slot = PART + 64;
    for (bytes_max, part_bytes, parts) in [
        (4096 + 5 * slot, PART, 5),
        (4096 + 3 * slot, PART, 3),
        (1 << 20, PART, 3),
        (1 << 20, 2 * PART, 0),
        (1 << 20, PART, 0),
    ] {
        let building = builder(&store, &cache()).part_bytes(part_bytes);
        let cached = building.disk(directory.path(), bytes_max).build().unwrap();
        assert_eq!(cached.cached_parts(), parts);
        assert_eq!(read(&cached, &location).await, bytes(0, LENGTH));
        cached.flush().await.unwrap();
        let file_bytes = fs::metadata(directory.path().join("parts")).unwrap().len();
        assert!(file_bytes <= bytes_max, "{file_bytes}");
        if part_bytes == PART && bytes_max == 1 << 20 {
            // Leaves what the next round expects.
            drop(cached);
            let building = builder(&store, &cache());
            drop(building.disk(directory.path(), 4096 + 3 * slot).build().unwrap());
        }
    }
}

#[tokio::test]
async fn two_stores_cannot_share_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let store = TestStore::new();
    let cached = open(&store, directory.path());
    let error = builder(&store, &cache()).disk(directory.path(), 1 << 20).build().unwrap_err();
    assert!(matches!(error, CacheError::DiskInUse { .. }), "{error}");
    drop(cached);
    open(&store, directory.path());
}

#[tokio::test]
async fn a_full_disk_costs_requests_not_answers() {
    let Some(disk) = SmallDisk::mount(256 << 10) else { return };
    let (store, location) = (TestStore::new(), Path::from("a"));
    let length = 80 * PART as usize;
    put(&store, &location, &bytes(0, length)).await;
    // Memory has room for a part of the object only, so that pages are evicted and read again.
    let small = bifolio::Cache::builder().memory(1 << 20).build().unwrap();
    let building = builder(&store, &small).disk(disk.path(), 2 << 20);
    let cached = building.build().unwrap();
    for _ in 0..3 {
        assert_eq!(read(&cached, &location).await, bytes(0, length));
        cached.flush().await.unwrap();
    }
    assert!(cached.metrics().disk_write_failures > 0, "{:?}", cached.metrics());
    small.close().unwrap();
    drop(cached);
    let cached = open(&store, disk.path());
    assert_eq!(read(&cached, &location).await, bytes(0, length));
}

#[tokio::test]
async fn a_removed_directory_costs_nothing_until_the_restart() {
    let directory = tempfile::tempdir().unwrap();
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let path = directory.path().join("tier");
    let cached = open(&store, &path);
    read(&cached, &location).await;
    wait_for_parts(&cached, PARTS).await;
    fs::remove_dir_all(&path).unwrap();
    assert_eq!(read(&cached, &location).await, bytes(0, LENGTH));
    put(&store, &location, &bytes(1, LENGTH)).await;
    assert_eq!(read(&cached, &location).await, bytes(1, LENGTH));
    cached.flush().await.unwrap();
    drop(cached);
    let cached = open(&store, &path);
    assert_eq!((cached.cached_parts(), path.exists()), (0, true));
    assert_eq!(read(&cached, &location).await, bytes(1, LENGTH));
}

#[tokio::test]
async fn a_disk_that_becomes_read_only_still_serves_its_parts() {
    let Some(disk) = SmallDisk::mount(4 << 20) else { return };
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let cached = open(&store, disk.path());
    read(&cached, &location).await;
    wait_for_parts(&cached, PARTS).await;
    // Files that are open for writing keep a mount from becoming read-only.
    drop(cached);
    let remounted = Command::new("mount").args(["-o", "remount,ro"]).arg(disk.path()).status();
    if !remounted.is_ok_and(|status| status.success()) {
        return skip("root", "cannot make a mount read-only");
    }
    let result = builder(&store, &cache()).disk(disk.path(), 1 << 20).build();
    let error = result.unwrap_err().to_string();
    assert!(error.contains("Read-only file system") && error.contains("lock"), "{error}");
}

#[tokio::test]
async fn a_closed_cache_leaves_reads_to_the_store() {
    let directory = tempfile::tempdir().unwrap();
    for is_on_disk in [false, true] {
        let (store, location) = (TestStore::new(), Path::from("a"));
        put(&store, &location, &bytes(0, LENGTH)).await;
        let pages = cache();
        let mut building = builder(&store, &pages);
        if is_on_disk {
            building = building.disk(directory.path(), 1 << 20);
        }
        let cached = building.build().unwrap();
        read(&cached, &location).await;
        wait_for_parts(&cached, PARTS).await;
        pages.close().unwrap();
        for _ in 0..2 {
            assert_eq!(read(&cached, &location).await, bytes(0, LENGTH));
            let got = cached.get_ranges(&location, &[5..9, 0..2]).await.unwrap();
            assert_eq!((&got[0][..], &got[1][..]), (&bytes(0, 9)[5..], &bytes(0, 2)[..]));
        }
    }
}

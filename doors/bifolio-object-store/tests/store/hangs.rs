//! A disk tier that hangs, or turns read-only, while it is open: reads take longer, no more.

use std::fs;
use std::mem;
use std::path::Path as FilePath;
use std::process::Command;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use crate::door::CachedStore;
use bifolio_testing::skip;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::hanging_disk::HangingDisk;
use crate::support::{PART, TestStore, builder, bytes, cache, put, wait_for_parts};

const PARTS: usize = 12;
const LENGTH: usize = PARTS * PART as usize - 100;

fn open(store: &Arc<TestStore>, directory: &FilePath, disk_timeout: Duration) -> CachedStore {
    let pages = cache();
    pages.class("ends").unwrap();
    let building = builder(store, &pages).head_age(Duration::from_secs(3600));
    // Half of one object is kept: its blocks are in another file of the cache.
    let building = building.keep("ends", 20 * PART, |location, size| match location.as_ref() {
        "a" => size / 2..size,
        _ => 0..0,
    });
    building.disk(directory, 4 << 20).disk_timeout(disk_timeout).build().unwrap()
}

/// Puts an object into the store, and its parts into the tier in `directory`. Returns a cache of
/// that tier with an empty memory.
async fn filled(
    store: &Arc<TestStore>,
    location: &Path,
    directory: &FilePath,
    disk_timeout: Duration,
) -> CachedStore {
    put(store, location, &bytes(0, LENGTH)).await;
    let cached = open(store, directory, disk_timeout);
    read(&cached, location).await;
    wait_for_parts(&cached, PARTS).await;
    drop(cached);
    open(store, directory, disk_timeout)
}

/// What hangs fails the test instead of stopping it.
async fn limited<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), future).await.expect("the test hangs")
}

async fn read(cached: &CachedStore, location: &Path) -> Vec<u8> {
    limited(async { cached.get(location).await.unwrap().bytes().await.unwrap().to_vec() }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_hangs_costs_requests_until_it_answers_again() {
    let Some(disk) = HangingDisk::mount() else { return };
    let (store, location) = (TestStore::new(), Path::from("a"));
    let cached = filled(&store, &location, disk.path(), Duration::from_millis(50)).await;
    assert_eq!(cached.get_range(&location, 0..100).await.unwrap(), bytes(0, LENGTH)[..100]);
    let hang = disk.hang();
    let gets = store.gets();
    assert_eq!(read(&cached, &location).await, bytes(0, LENGTH));
    let metrics = cached.metrics();
    assert!(store.gets() > gets && metrics.disk_late > 0, "{metrics:?}");
    // What is in memory needs no request.
    let gets = store.gets();
    assert_eq!(cached.get_range(&location, 0..100).await.unwrap(), bytes(0, LENGTH)[..100]);
    assert_eq!(store.gets(), gets);
    // Other objects, which the disk cannot take.
    for seed in 1..40 {
        let location = Path::from(format!("b{seed}"));
        put(&store, &location, &bytes(seed, LENGTH)).await;
        assert_eq!(read(&cached, &location).await, bytes(seed, LENGTH));
    }
    assert!(disk.waiting() > 0);
    drop(hang);
    // Once the disk is asked again, nothing is missing.
    limited(async {
        loop {
            let gets = store.gets();
            assert_eq!(read(&cached, &location).await, bytes(0, LENGTH));
            if store.gets() == gets {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    cached.flush().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_hangs_is_not_asked_by_every_read() {
    let Some(disk) = HangingDisk::mount() else { return };
    let (store, location) = (TestStore::new(), Path::from("a"));
    let cached = filled(&store, &location, disk.path(), Duration::from_secs(3)).await;
    let _hang = disk.hang();
    assert_eq!(read(&cached, &location).await, bytes(0, LENGTH));
    let (late, gets) = (cached.metrics().disk_late, store.gets());
    // Readers at the same time share the requests that stand in for the disk.
    let gate = store.hold_gets();
    let reads: Vec<_> = (0..8)
        .map(|_| {
            let (cached, location, range) = (cached.clone(), location.clone(), 0..LENGTH as u64);
            tokio::spawn(async move { cached.get_ranges(&location, &[range]).await })
        })
        .collect();
    limited(async {
        while cached.metrics().shared < 7 * PARTS as u64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    gate.add_permits(1000);
    for read in reads {
        assert_eq!(read.await.unwrap().unwrap()[0], bytes(0, LENGTH));
    }
    assert_eq!(cached.metrics().disk_late, late + 8 * PARTS as u64);
    assert!(store.gets() <= gets + PARTS, "{} requests", store.gets() - gets);
}

#[test]
fn changes_over_a_disk_that_hangs_leave_threads_for_others() {
    let Some(disk) = HangingDisk::mount() else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(80)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = TestStore::new();
        let cached = open(&store, disk.path(), Duration::from_millis(50));
        let locations: Vec<Path> = (0..100).map(|index| Path::from(format!("{index}"))).collect();
        for location in &locations {
            put(&store, location, &bytes(0, 100)).await;
            read(&cached, location).await;
        }
        wait_for_parts(&cached, locations.len()).await;
        let hang = disk.hang();
        for location in &locations {
            cached.put(location, bytes(1, 100).into()).await.unwrap();
            assert_eq!(read(&cached, location).await, bytes(1, 100));
        }
        let job = tokio::task::spawn_blocking(|| 7);
        assert_eq!(limited(job).await.unwrap(), 7);
        drop(hang);
    });
}

/// Builds a store in a thread: what hangs fails the test.
async fn try_open(store: &Arc<TestStore>, directory: &FilePath) -> Result<CachedStore, String> {
    let building = builder(store, &cache()).disk(directory, 4 << 20);
    let building = building.disk_timeout(Duration::from_millis(50));
    let built = limited(tokio::task::spawn_blocking(|| building.build())).await.unwrap();
    built.map_err(|error| error.to_string())
}

/// Builds a store over a disk that answers again: a thread that waited for it still has the tier
/// open for a moment.
async fn open_again(store: &Arc<TestStore>, directory: &FilePath) -> CachedStore {
    limited(async {
        loop {
            match try_open(store, directory).await {
                Ok(cached) => break cached,
                Err(error) => assert!(error.contains("is in use"), "{error}"),
            }
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_is_not_built_over_a_disk_that_hangs() {
    let Some(disk) = HangingDisk::mount() else { return };
    let (store, location) = (TestStore::new(), Path::from("a"));
    drop(filled(&store, &location, disk.path(), Duration::from_secs(2)).await);
    let hang = disk.hang();
    let error = try_open(&store, disk.path()).await.unwrap_err();
    assert!(error.contains("did not answer for 500 ms"), "{error}");
    drop(hang);
    assert_eq!(open_again(&store, disk.path()).await.cached_parts(), PARTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_ends_while_the_disk_hangs() {
    let Some(disk) = HangingDisk::mount() else { return };
    let store = TestStore::new();
    let cached = try_open(&store, disk.path()).await.unwrap();
    let hang = disk.hang();
    for seed in 0..2 {
        let location = Path::from(format!("{seed}"));
        put(&store, &location, &bytes(seed, LENGTH)).await;
        assert_eq!(read(&cached, &location).await, bytes(seed, LENGTH));
        let error = limited(cached.flush()).await.unwrap_err().to_string();
        assert!(error.contains("did not answer for 500 ms"), "{error}");
    }
    assert!(disk.waiting() > 0);
    drop(hang);
    limited(cached.flush()).await.unwrap();
    assert_eq!(cached.cached_parts(), 2 * PARTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_that_is_leaked_holds_up_no_other() {
    let Some(disk) = HangingDisk::mount() else { return };
    let (store, location) = (TestStore::new(), Path::from("a"));
    let cached = filled(&store, &location, disk.path(), Duration::from_secs(5)).await;
    cached.head(&location).await.unwrap();
    let hang = disk.hang();
    // Erases the parts, which waits for the disk.
    cached.put(&location, bytes(1, LENGTH).into()).await.unwrap();
    while disk.waiting() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut flush = Box::pin(cached.flush());
    for _ in 0..20 {
        assert!(flush.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    mem::forget(flush);
    drop(hang);
    assert_eq!(read(&cached, &location).await, bytes(1, LENGTH));
    limited(cached.flush()).await.unwrap();
    assert_eq!(cached.cached_parts(), PARTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_disk_writes_into_no_memory_of_a_read_that_was_dropped_or_leaked() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    for is_leaked in [false, true] {
        let Some(disk) = HangingDisk::mount() else { return };
        let cached = filled(&store, &location, disk.path(), Duration::from_secs(20)).await;
        cached.head(&location).await.unwrap();
        let hang = disk.hang_parts();
        let mut read = Box::pin(cached.get_range(&location, 3 * PART..5 * PART));
        while disk.waiting() == 0 {
            assert!(read.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        match is_leaked {
            true => mem::forget(read),
            false => drop(read),
        }
        // In the memory of the read, if it was freed.
        let buffers: Vec<_> = (0..64).map(|_| vec![0xee_u8; 2 * PART as usize]).collect();
        drop(hang);
        let again = limited(cached.get_range(&location, 3 * PART..5 * PART)).await.unwrap();
        assert_eq!(again, bytes(0, LENGTH)[3 * PART as usize..5 * PART as usize]);
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(buffers.iter().flatten().all(|byte| *byte == 0xee));
        limited(cached.flush()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_drop_ends_while_the_disk_hangs() {
    let Some(disk) = HangingDisk::mount() else { return };
    let (store, location) = (TestStore::new(), Path::from("a"));
    let cached = try_open(&store, disk.path()).await.unwrap();
    let hang = disk.hang_parts();
    // Whole pages, which are not read before they are written.
    let contents = bytes(0, PARTS * PART as usize);
    put(&store, &location, &contents).await;
    assert_eq!(read(&cached, &location).await, contents);
    limited(async {
        while cached.cached_parts() < PARTS || disk.waiting() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    // The threads that inserted the parts drop their handles.
    tokio::time::sleep(Duration::from_millis(200)).await;
    limited(tokio::task::spawn_blocking(|| drop(cached))).await.unwrap();
    let error = try_open(&store, disk.path()).await.unwrap_err();
    assert!(error.contains("is in use"), "{error}");
    drop(hang);
    assert_eq!(open_again(&store, disk.path()).await.cached_parts(), PARTS);
}

/// An ext4 file system on a loop device, which becomes read-only at its first error.
struct FailingDisk {
    directory: tempfile::TempDir,
    device: String,
}

fn run(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

impl FailingDisk {
    fn mount() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
        let (image, target) = (image.to_str().unwrap(), directory.path().join("disk"));
        fs::create_dir(&target).unwrap();
        let mounted = (|| {
            run("mkfs.ext4", &["-q", image])?;
            let device = run("losetup", &["--find", "--show", image])?;
            let options = "errors=remount-ro";
            let target = target.to_str().unwrap();
            if run("mount", &["-t", "ext4", "-o", options, &device, target]).is_none() {
                run("losetup", &["--detach", &device]);
                return None;
            }
            Some(device)
        })();
        if mounted.is_none() {
            skip("root", "cannot mount ext4 on a loop device");
        }
        Some(Self { directory, device: mounted? })
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("disk")
    }

    /// Has the file system find an error.
    fn fail(&self) {
        let name = self.device.trim_start_matches("/dev/");
        fs::write(format!("/sys/fs/ext4/{name}/trigger_fs_error"), "test").unwrap();
        let error = fs::write(self.path().join("file"), "").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    }
}

impl Drop for FailingDisk {
    fn drop(&mut self) {
        run("umount", &["--lazy", self.path().to_str().unwrap()]);
        run("losetup", &["--detach", &self.device]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_becomes_read_only_while_open_costs_requests_not_answers() {
    let Some(disk) = FailingDisk::mount() else { return };
    let store = TestStore::new();
    let locations: Vec<Path> = (0..60).map(|index| Path::from(format!("{index}"))).collect();
    for (seed, location) in (0..).zip(&locations) {
        put(&store, location, &bytes(seed, LENGTH)).await;
    }
    // Memory and tier have room for some of the objects only.
    let small = bifolio::Cache::builder().memory(1 << 20).build().unwrap();
    let building = builder(&store, &small).disk(disk.path(), 3 << 20);
    let cached = building.build().unwrap();
    for (seed, location) in (0..20).zip(&locations) {
        assert_eq!(read(&cached, location).await, bytes(seed, LENGTH));
    }
    cached.flush().await.unwrap();
    disk.fail();
    for _ in 0..3 {
        for (seed, location) in (0..).zip(&locations) {
            assert_eq!(read(&cached, location).await, bytes(seed, LENGTH));
        }
    }
    let changed = &locations[0];
    cached.put(changed, bytes(99, LENGTH).into()).await.unwrap();
    assert_eq!(read(&cached, changed).await, bytes(99, LENGTH));
    assert!(cached.metrics().disk_write_failures > 0, "{:?}", cached.metrics());
}

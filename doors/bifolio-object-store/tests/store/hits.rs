//! Reads from memory: ready at once, one copy, checksums only of what came from the disk.

use std::fs;
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::door::{CachedStore, CachedStoreBuilder};
use bifolio::Cache;
use futures::future::join_all;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::support::{TestStore, builder, bytes, put};

const PART: u64 = 256 << 10;
const BLOCK: u64 = 64 << 10;
const LENGTH: usize = 4 * PART as usize;

fn start(store: &Arc<TestStore>, cache: &Cache) -> CachedStoreBuilder {
    let building = builder(store, cache).part_bytes(PART).request_bytes_max(4 * PART);
    building.head_age(Duration::from_secs(3600))
}

async fn read(cached: &CachedStore, location: &Path) -> Vec<u8> {
    cached.get(location).await.unwrap().bytes().await.unwrap().to_vec()
}

/// Polls a future once.
fn at_first_poll<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("not ready at the first poll"),
    }
}

#[tokio::test]
async fn a_hit_is_ready_at_the_first_poll_without_checksums() {
    let directory = tempfile::tempdir().unwrap();
    let (store, location) = (TestStore::new(), Path::from("a"));
    let contents = bytes(1, LENGTH);
    put(&store, &location, &contents).await;
    for is_on_disk in [false, true] {
        let cache = Cache::builder().memory(8 << 20).build().unwrap();
        let mut building = start(&store, &cache);
        if is_on_disk {
            building = building.disk(directory.path(), 64 << 20);
        }
        let cached = building.build().unwrap();
        assert_eq!(read(&cached, &location).await, contents);
        cached.flush().await.unwrap();
        let before = cached.metrics();
        let slice = |start: u64, end: u64| &contents[start as usize..end as usize];
        // One byte; an odd range of two blocks, and of two parts; everything.
        for (start, end) in [(7, 8), (5, 5 + BLOCK), (PART - 9, PART + BLOCK), (0, 4 * PART)] {
            let got = at_first_poll(cached.get_range(&location, start..end)).unwrap();
            assert_eq!(got, slice(start, end));
        }
        let ranges = [3..9, PART..2 * PART + 1];
        let got = at_first_poll(cached.get_ranges(&location, &ranges)).unwrap();
        assert_eq!((&got[0][..], &got[1][..]), (slice(3, 9), slice(PART, 2 * PART + 1)));
        let metrics = cached.metrics().since(&before);
        assert_eq!((metrics.verified_bytes, metrics.memory_hits), (0, 11), "{metrics:?}");
    }
}

#[tokio::test]
async fn blocks_from_the_disk_are_verified_once() {
    let directory = tempfile::tempdir().unwrap();
    let (store, location) = (TestStore::new(), Path::from("a"));
    let contents = bytes(1, LENGTH);
    put(&store, &location, &contents).await;
    let open = |cache: &Cache| start(&store, cache).disk(directory.path(), 64 << 20).build();
    let cache = Cache::builder().memory(8 << 20).build().unwrap();
    let cached = open(&cache).unwrap();
    read(&cached, &location).await;
    cached.flush().await.unwrap();
    drop(cached);
    let cached = open(&cache).unwrap();
    cached.head(&location).await.unwrap();
    let range = BLOCK + 1..3 * BLOCK - 1;
    for (round, verified) in [(0, 2 * BLOCK), (1, 0), (2, 0)] {
        let before = cached.metrics();
        let got = cached.get_range(&location, range.clone()).await.unwrap();
        assert_eq!(got, contents[range.start as usize..range.end as usize]);
        let metrics = cached.metrics().since(&before);
        assert_eq!(metrics.verified_bytes, verified, "round {round}: {metrics:?}");
    }
    // Read from the disk again, they are verified again.
    cache.evict_all().unwrap();
    let before = cached.metrics();
    cached.get_range(&location, range).await.unwrap();
    let metrics = cached.metrics().since(&before);
    assert_eq!((metrics.disk_hits, metrics.verified_bytes), (1, 2 * BLOCK), "{metrics:?}");
}

#[tokio::test]
async fn damage_is_found_in_blocks_that_were_verified_before_they_were_evicted() {
    let directory = tempfile::tempdir().unwrap();
    let (store, location) = (TestStore::new(), Path::from("a"));
    let contents = bytes(1, LENGTH);
    put(&store, &location, &contents).await;
    let cache = Cache::builder().memory(8 << 20).build().unwrap();
    let cached = start(&store, &cache).disk(directory.path(), 64 << 20).build().unwrap();
    for round in 0..3 {
        let before = cached.metrics();
        for _ in 0..2 {
            assert_eq!(read(&cached, &location).await, contents);
        }
        cached.flush().await.unwrap();
        cache.evict_all().unwrap();
        let parts = fs::File::options().write(true).open(directory.path().join("parts")).unwrap();
        // A page in the middle of a block of each slot.
        for slot in 0..5 {
            parts.write_all_at(&[0xee; 4096], slot * PART + BLOCK + 8192).unwrap();
        }
        parts.sync_all().unwrap();
        assert_eq!(read(&cached, &location).await, contents, "round {round}");
        // After some, the others are not looked at, but fetched.
        let metrics = cached.metrics().since(&before);
        assert!(metrics.corrupt > 0 && metrics.received_bytes >= LENGTH as u64, "{metrics:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_that_are_reused_during_a_read_give_no_bytes_of_others() {
    const PARTS: u64 = 24;
    /// Long, so that slots change while they are copied.
    const PART: u64 = 128 << 10;
    let directory = tempfile::tempdir().unwrap();
    for is_on_disk in [false, true] {
        let store = TestStore::new();
        let objects: Arc<Vec<_>> = Arc::new(
            (0..3)
                .map(|seed| (Path::from(format!("{seed}")), bytes(seed, (PARTS * PART) as usize)))
                .collect(),
        );
        for (location, bytes) in objects.iter() {
            put(&store, location, bytes).await;
        }
        let cache = Cache::builder().memory(16 << 20).build().unwrap();
        let building = builder(&store, &cache).part_bytes(PART).request_bytes_max(8 * PART);
        let mut building = building.head_age(Duration::from_secs(3600));
        // Room for about one of the objects.
        building = match is_on_disk {
            true => building.disk(directory.path(), 4096 + 28 * (PART + 64)),
            false => building.memory(28 * PART),
        };
        let cached = building.build().unwrap();
        let readers = (0..4).map(|seed| {
            let (cached, objects) = (cached.clone(), Arc::clone(&objects));
            tokio::spawn(async move {
                let mut random = fastrand::Rng::with_seed(seed);
                for _ in 0..100 {
                    let (location, bytes) = &objects[random.usize(..objects.len())];
                    let got = cached.get_range(location, 0..PARTS * PART).await.unwrap();
                    assert!(got == bytes, "other bytes in {location}");
                    if random.bool() {
                        tokio::task::yield_now().await;
                    }
                }
            })
        });
        join_all(readers).await.into_iter().for_each(|reader| reader.unwrap());
        let metrics = cached.metrics();
        assert!(metrics.evicted > 100 && metrics.memory_hits > 100, "{metrics:?}");
    }
}

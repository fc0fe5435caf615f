//! Objects that change while they are read: parts of two versions are never mixed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::support::{Fate, PART, TestStore, builder, bytes, cache, put, wait_for_parts};

const LENGTH: usize = 20 * PART as usize;

#[tokio::test]
async fn a_changed_object_is_read_anew_as_a_whole() {
    for store in [TestStore::new(), TestStore::without_tags()] {
        let location = Path::from("a");
        let cached = builder(&store, &cache()).build().unwrap();
        for version in 0..5 {
            // Without ETags the length tells versions apart within one tick of the clock.
            let new = bytes(version, LENGTH + version as usize);
            put(&store, &location, &new).await;
            let part = version * 3 * PART..version * 3 * PART + 10;
            let got = cached.get_range(&location, part.clone()).await.unwrap();
            assert_eq!(got, &new[part.start as usize..part.end as usize]);
            let ranges = [0..10, 5 * PART..5 * PART + 10, 19 * PART..20 * PART];
            let got = cached.get_ranges(&location, &ranges).await.unwrap();
            for (range, got) in ranges.iter().zip(got) {
                assert_eq!(got, &new[range.start as usize..range.end as usize]);
            }
        }
        assert!(cached.metrics().changed >= 4);
    }
}

/// Replaces the object after the first of each pair of requests for bytes.
fn change_between_requests(store: &Arc<TestStore>, location: &Path, times: u64) -> Arc<AtomicU64> {
    let version = Arc::new(AtomicU64::new(0));
    let (own, changer, location) = (Arc::clone(&version), Arc::downgrade(store), location.clone());
    store.decide(move |request| {
        let gets = changer.upgrade().unwrap().gets() as u64;
        if !request.head && gets.is_multiple_of(2) && own.load(Ordering::Relaxed) < times {
            let version = own.fetch_add(1, Ordering::Relaxed) + 1;
            let objects = changer.upgrade().unwrap();
            let put = objects.objects.put(&location, bytes(version, LENGTH).into());
            futures::executor::block_on(put).unwrap();
        }
        Fate::Answer
    });
    version
}

#[tokio::test]
async fn a_change_between_two_requests_restarts_the_read() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    change_between_requests(&store, &location, 1);
    let ranges = [0..PART, 10 * PART..11 * PART];
    let got = cached.get_ranges(&location, &ranges).await.unwrap();
    let new = bytes(1, LENGTH);
    assert_eq!(got[0], &new[..PART as usize]);
    assert_eq!(got[1], &new[10 * PART as usize..11 * PART as usize]);
    assert_eq!(cached.metrics().changed, 1);
}

#[tokio::test]
async fn an_object_that_keeps_changing_is_a_clear_error() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    change_between_requests(&store, &location, u64::MAX);
    let ranges = [0..PART, 10 * PART..11 * PART];
    let error = cached.get_ranges(&location, &ranges).await.unwrap_err();
    assert!(error.to_string().contains("a: the object changed 5 times"), "{error}");
}

#[tokio::test]
async fn a_stream_of_a_changed_object_ends_with_an_error() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    let mut stream = cached.get(&location).await.unwrap().into_stream();
    let first = stream.next().await.unwrap().unwrap();
    assert_eq!(first, &bytes(0, LENGTH)[..8 * PART as usize]);
    put(&store, &location, &bytes(1, LENGTH)).await;
    let error = stream.try_collect::<Vec<_>>().await.unwrap_err();
    assert!(error.to_string().contains("changed"), "{error}");
}

#[tokio::test]
async fn a_version_is_trusted_for_its_age_only() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let cached = builder(&store, &cache()).head_age(Duration::from_secs(3600)).build().unwrap();
    cached.get_range(&location, 0..10).await.unwrap();
    wait_for_parts(&cached, 1).await;
    put(&store, &location, &bytes(1, LENGTH)).await;
    // Cached, and young enough.
    assert_eq!(cached.get_range(&location, 0..10).await.unwrap(), bytes(0, 10));
    // A request finds the new version, and the old part is not returned with the new one.
    let ranges = [0..10, 10 * PART..10 * PART + 1];
    let got = cached.get_ranges(&location, &ranges).await.unwrap();
    assert_eq!(got[0], bytes(1, 10));
    assert_eq!(cached.get_range(&location, 0..10).await.unwrap(), bytes(1, 10));
}

#[tokio::test]
async fn a_shorter_version_is_found_by_ranges_beyond_its_end() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    cached.get(&location).await.unwrap().bytes().await.unwrap();
    put(&store, &location, &bytes(1, 100)).await;
    assert_eq!(cached.get_range(&location, 90..LENGTH as u64).await.unwrap(), bytes(1, 100)[90..]);
    put(&store, &location, &bytes(2, LENGTH)).await;
    let got = cached.get_range(&location, 500..510).await.unwrap();
    assert_eq!(got, &bytes(2, LENGTH)[500..510]);
}

/// Such a store knows no conditions: it refuses a range past the end of what is there now.
#[tokio::test]
async fn a_shorter_version_is_found_without_tags() {
    for (before, after) in [(3 * PART, 10), (2 * PART, 0)] {
        for age in [None, Some(Duration::from_secs(3600))] {
            let (store, location) = (TestStore::without_tags(), Path::from("a"));
            let building = builder(&store, &cache());
            let building = age.into_iter().fold(building, |building, age| building.head_age(age));
            let cached = building.build().unwrap();
            let contents = bytes(before, before as usize);
            put(&store, &location, &contents).await;
            let got = cached.get_range(&location, 0..PART).await.unwrap();
            assert_eq!(got, contents[..PART as usize]);
            wait_for_parts(&cached, 1).await;
            let contents = bytes(after, after as usize);
            put(&store, &location, &contents).await;
            let got = cached.get(&location).await.unwrap().bytes().await.unwrap();
            assert_eq!(got, contents, "{age:?}");
        }
    }
}

#[tokio::test]
async fn a_deleted_object_is_not_found_and_stays_so() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    cached.get_range(&location, 0..10).await.unwrap();
    store.objects.delete(&location).await.unwrap();
    for range in [0..10, 10 * PART..11 * PART] {
        let error = cached.get_range(&location, range).await.unwrap_err();
        assert!(matches!(error, object_store::Error::NotFound { .. }), "{error}");
    }
}

#[tokio::test]
async fn stores_with_different_names_share_no_objects() {
    let directory = tempfile::tempdir().unwrap();
    let location = Path::from("a");
    for (name, seed) in [("one", 1), ("two", 2)] {
        // In-memory ETags are numbers: those of the two objects are equal.
        let store = TestStore::new();
        put(&store, &location, &bytes(seed, LENGTH)).await;
        let building = builder(&store, &cache()).disk(directory.path(), 1 << 20).name(name);
        let cached = building.build().unwrap();
        assert_eq!(cached.get_range(&location, 0..10).await.unwrap(), bytes(seed, 10));
        cached.flush().await.unwrap();
    }
}

#[tokio::test]
async fn more_versions_are_remembered_with_more_memory() {
    const OBJECTS: u64 = 10_000;
    let store = TestStore::new();
    let location = |number| Path::from(format!("{number}"));
    for number in 0..OBJECTS {
        put(&store, &location(number), &[number as u8]).await;
    }
    let pages = bifolio::Cache::builder().memory(1 << 30).build().unwrap();
    let building = builder(&store, &pages).memory(64 * PART);
    let cached = building.head_age(Duration::from_secs(3600)).build().unwrap();
    let listed: Vec<_> = cached.list(None).try_collect().await.unwrap();
    assert_eq!(listed.len() as u64, OBJECTS);
    for number in 0..OBJECTS {
        assert_eq!(cached.get_range(&location(number), 0..1).await.unwrap(), [number as u8][..]);
    }
    assert_eq!((store.heads(), store.gets() as u64), (0, OBJECTS));
}

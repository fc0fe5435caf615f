//! Warming, objects that are cached when they are written, and prefixes that are dropped.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use crate::door::CachedStore;
use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};

use crate::support::{Fate, PART, TestStore, builder, bytes, cache, put, wait_for_parts};

async fn read(cached: &CachedStore, location: &Path) -> Vec<u8> {
    cached.get(location).await.unwrap().bytes().await.unwrap().to_vec()
}

/// Puts objects of some parts under a prefix.
async fn fill(store: &TestStore, prefix: &str, objects: u64, parts: u64) -> Vec<Path> {
    let mut locations = Vec::new();
    for number in 0..objects {
        let location = Path::from(format!("{prefix}/{number}"));
        put(store, &location, &bytes(number, (parts * PART) as usize - 9)).await;
        locations.push(location);
    }
    locations
}

#[tokio::test]
async fn warmed_objects_are_read_without_requests() {
    let store = TestStore::new();
    let locations = fill(&store, "a", 5, 12).await;
    fill(&store, "b", 2, 3).await;
    put(&store, &Path::from("a/empty"), b"").await;
    let cached = builder(&store, &cache()).head_age(Duration::from_secs(60)).build().unwrap();
    // One of them is half there.
    cached.get_range(&locations[1], 0..6 * PART).await.unwrap();
    let warmed = cached.warm(Some(&Path::from("a"))).await.unwrap();
    assert_eq!((warmed.objects, warmed.is_whole), (6, true));
    assert_eq!(warmed.fetched_bytes, 5 * (12 * PART - 9) - 6 * PART);
    wait_for_parts(&cached, 5 * 12).await;
    let (gets, heads) = (store.gets(), store.heads());
    for (number, location) in (0..).zip(&locations) {
        assert_eq!(read(&cached, location).await, bytes(number, 12 * PART as usize - 9));
    }
    // Attributes are not in a list.
    assert_eq!(store.gets(), gets);
    assert!(store.heads() <= heads + 5);
    let again = cached.warm(Some(&Path::from("a"))).await.unwrap();
    assert_eq!((again.objects, again.fetched_bytes), (6, 0));
}

#[tokio::test]
async fn warming_ends_where_the_tier_does() {
    let store = TestStore::new();
    fill(&store, "a", 10, 4).await;
    let cached = builder(&store, &cache()).memory(18 * PART).build().unwrap();
    let warmed = cached.warm(None).await.unwrap();
    assert_eq!((warmed.objects, warmed.is_whole), (4, false));
    wait_for_parts(&cached, 16).await;
    assert_eq!(cached.metrics().evicted, 0);
}

#[tokio::test]
async fn ranges_are_warmed_in_whole_parts() {
    let store = TestStore::new();
    let location = &fill(&store, "a", 1, 20).await[0];
    let cached = builder(&store, &cache()).head_age(Duration::from_secs(60)).build().unwrap();
    let ranges = [19 * PART + 5..20 * PART, 3 * PART..3 * PART + 1, 5..5];
    let warmed = cached.warm_ranges(location, &ranges).await.unwrap();
    assert_eq!(warmed.fetched_bytes, 2 * PART - 9);
    wait_for_parts(&cached, 2).await;
    let gets = store.gets();
    cached.get_range(location, 3 * PART + 7..4 * PART).await.unwrap();
    cached.get_range(location, 19 * PART..20 * PART - 9).await.unwrap();
    assert_eq!(store.gets(), gets);
    let absent = cached.warm_ranges(&Path::from("absent"), &ranges).await.unwrap_err();
    assert!(matches!(absent, object_store::Error::NotFound { .. }), "{absent}");
}

#[tokio::test]
async fn a_warmed_object_that_disappears_is_left_out_and_one_that_changes_is_not() {
    let store = TestStore::new();
    let locations = fill(&store, "a", 3, 2).await;
    let cached = builder(&store, &cache()).build().unwrap();
    let (raced, mut is_first) = (Arc::clone(&store), true);
    let (gone, changed) = (locations[0].clone(), locations[1].clone());
    let changing = store.hold_gets();
    let warming = cached.warm(None);
    let racing = async {
        raced.wait_for_gets(3).await;
        raced.objects.delete(&gone).await.unwrap();
        put(&raced, &changed, &bytes(77, 2 * PART as usize)).await;
        changing.add_permits(100);
    };
    let (warmed, ()) = tokio::join!(warming, racing);
    assert_eq!(warmed.unwrap().objects, 3);
    store.decide(move |request| {
        assert!(request.head || std::mem::take(&mut is_first), "{request:?}");
        Fate::Answer
    });
    wait_for_parts(&cached, 4).await;
    assert_eq!(read(&cached, &changed).await, bytes(77, 2 * PART as usize));
}

#[tokio::test]
async fn written_objects_are_cached_if_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    for (is_on_disk, inserts) in [(false, false), (false, true), (true, true)] {
        let (store, location) = (TestStore::new(), Path::from("a"));
        let mut building = builder(&store, &cache()).insert_on_put(inserts);
        if is_on_disk {
            building = building.disk(directory.path(), 1 << 20);
        }
        let cached = building.build().unwrap();
        // Chunks that end neither with blocks nor with parts, and one that has several of both.
        for (round, chunk) in [(0, 3001), (1, 1 << 20), (2, 2 * PART as usize + 7)] {
            let contents = bytes(round, 5 * PART as usize + 77);
            let chunks = contents.chunks(chunk).map(Bytes::copy_from_slice);
            cached.put(&location, PutPayload::from_iter(chunks)).await.unwrap();
            cached.flush().await.unwrap();
            assert_eq!(cached.cached_parts() > 0, inserts);
            let before = store.gets();
            assert_eq!(read(&cached, &location).await, contents);
            let gets = store.gets() - before;
            assert_eq!(gets == 0, inserts, "{gets} requests");
        }
        assert_eq!(cached.metrics().corrupt, 0);
    }
}

#[tokio::test]
async fn a_written_object_that_the_tier_has_no_room_for_pushes_out_no_other() {
    let store = TestStore::new();
    let building = builder(&store, &cache()).memory(8 * PART).insert_on_put(true);
    let cached = building.head_age(Duration::from_secs(60)).build().unwrap();
    let (small, large) = (Path::from("small"), Path::from("large"));
    cached.put(&small, bytes(0, 4 * PART as usize).into()).await.unwrap();
    wait_for_parts(&cached, 4).await;
    cached.put(&large, bytes(1, 9 * PART as usize).into()).await.unwrap();
    wait_for_parts(&cached, 4).await;
    assert_eq!(read(&cached, &small).await, bytes(0, 4 * PART as usize));
    assert_eq!(store.gets(), 0);
    assert_eq!(read(&cached, &large).await, bytes(1, 9 * PART as usize));
}

#[tokio::test]
async fn written_objects_without_etags_are_not_cached() {
    let (store, location) = (TestStore::without_tags(), Path::from("a"));
    let cached = builder(&store, &cache()).insert_on_put(true).build().unwrap();
    for round in 0..2 {
        cached.put(&location, bytes(round, 3 * PART as usize).into()).await.unwrap();
        cached.flush().await.unwrap();
        assert_eq!(cached.cached_parts(), 0);
        assert_eq!(read(&cached, &location).await, bytes(round, 3 * PART as usize));
    }
}

#[tokio::test]
async fn a_prefix_is_forgotten_also_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    for is_on_disk in [false, true] {
        let store = TestStore::new();
        let dropped = fill(&store, "table/1", 4, 3).await;
        let kept = fill(&store, "table/10", 4, 3).await;
        let open = || {
            let building = builder(&store, &cache()).head_age(Duration::from_secs(60));
            match is_on_disk {
                true => building.disk(directory.path(), 1 << 20).build().unwrap(),
                false => building.build().unwrap(),
            }
        };
        let mut cached = open();
        cached.warm(None).await.unwrap();
        wait_for_parts(&cached, 24).await;
        if is_on_disk {
            drop(cached);
            // Not known to the process, nor to the store.
            for location in &dropped {
                store.objects.delete(location).await.unwrap();
            }
            cached = open();
            assert_eq!(cached.cached_parts(), 24);
        }
        assert_eq!(cached.forget(Some(&Path::from("table/1"))), 12);
        assert_eq!(cached.forget(Some(&Path::from("tab"))), 0);
        wait_for_parts(&cached, 12).await;
        if is_on_disk {
            drop(cached);
            cached = open();
            assert_eq!(cached.cached_parts(), 12);
        }
        let gets = store.gets();
        for (number, location) in (0..).zip(&kept) {
            assert_eq!(read(&cached, location).await, bytes(number, 3 * PART as usize - 9));
        }
        assert_eq!(store.gets(), gets);
        for (number, location) in (0..).zip(&dropped) {
            match is_on_disk {
                true => assert!(cached.get(location).await.is_err()),
                false => {
                    assert_eq!(read(&cached, location).await, bytes(number, 3 * PART as usize - 9));
                }
            }
        }
        cached.flush().await.unwrap();
        assert_eq!(cached.forget(None), if is_on_disk { 12 } else { 24 });
    }
}

#[tokio::test]
async fn parts_without_a_name_are_not_restored() {
    let directory = tempfile::tempdir().unwrap();
    let store = TestStore::new();
    let locations = fill(&store, "a", 3, 2).await;
    let open = || builder(&store, &cache()).disk(directory.path(), 1 << 20).build().unwrap();
    let cached = open();
    cached.warm(None).await.unwrap();
    wait_for_parts(&cached, 6).await;
    drop(cached);
    let names = directory.path().join("names");
    let length = fs::metadata(&names).unwrap().len();
    for (left, parts) in [(length - 1, 4), (1, 0)] {
        fs::File::options().write(true).open(&names).unwrap().set_len(left).unwrap();
        let cached = open();
        assert_eq!(cached.cached_parts(), parts);
        for (number, location) in (0..).zip(&locations) {
            assert_eq!(read(&cached, location).await, bytes(number, 2 * PART as usize - 9));
        }
        wait_for_parts(&cached, 6).await;
        drop(cached);
        assert_eq!(open().cached_parts(), 6);
    }
}

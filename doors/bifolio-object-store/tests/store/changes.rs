//! Changes through the cached store: reads see them at once, whatever age is allowed.

use std::time::Duration;

use futures::StreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::support::{PART, TestStore, builder, bytes, cache, put, wait_for_parts};

const LENGTH: usize = 3 * PART as usize;

#[tokio::test]
async fn changes_are_seen_by_the_next_read() {
    let directory = tempfile::tempdir().unwrap();
    for is_on_disk in [false, true] {
        // Without ETags, and with equal lengths: only the change itself tells.
        let (store, location) = (TestStore::without_tags(), Path::from("a"));
        let other = Path::from("b");
        put(&store, &location, &bytes(0, LENGTH)).await;
        let mut building = builder(&store, &cache()).head_age(Duration::from_secs(3600));
        if is_on_disk {
            building = building.disk(directory.path(), 1 << 20);
        }
        let cached = building.build().unwrap();
        let read =
            async |location: &Path| cached.get(location).await.unwrap().bytes().await.unwrap();
        assert_eq!(read(&location).await, bytes(0, LENGTH));
        wait_for_parts(&cached, 3).await;

        cached.put(&location, bytes(1, LENGTH).into()).await.unwrap();
        assert_eq!(read(&location).await, bytes(1, LENGTH));

        cached.put(&other, bytes(2, LENGTH).into()).await.unwrap();
        assert_eq!(read(&other).await, bytes(2, LENGTH));
        cached.copy(&other, &location).await.unwrap();
        assert_eq!(read(&location).await, bytes(2, LENGTH));

        let mut upload = cached.put_multipart(&location).await.unwrap();
        upload.put_part(bytes(3, LENGTH).into()).await.unwrap();
        assert_eq!(read(&location).await, bytes(2, LENGTH));
        upload.complete().await.unwrap();
        assert_eq!(read(&location).await, bytes(3, LENGTH));

        cached.rename(&location, &other).await.unwrap();
        assert_eq!(read(&other).await, bytes(3, LENGTH));
        assert!(cached.get(&location).await.is_err());
        assert!(cached.head(&location).await.is_err());

        cached.delete(&other).await.unwrap();
        assert!(cached.get(&other).await.is_err());
        cached.flush().await.unwrap();
        assert_eq!(cached.cached_parts(), 0);
    }
}

#[tokio::test]
async fn deletions_count_even_if_their_results_are_dropped() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let cached = builder(&store, &cache()).head_age(Duration::from_secs(3600)).build().unwrap();
    cached.head(&location).await.unwrap();
    let locations = futures::stream::iter([Ok(location.clone())]).boxed();
    let mut deletions = cached.delete_stream(locations);
    deletions.next().await.unwrap().unwrap();
    // Known again, from an answer that began before the end of the deletions.
    drop(deletions);
    assert!(cached.head(&location).await.is_err());
}

/// A change erases slots in a task of the caller's runtime, which may shut down before.
#[test]
fn a_change_whose_runtime_shuts_down_leaves_its_slots_to_others() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (store, location, other) = (TestStore::new(), Path::from("a"), Path::from("b"));
    // Room for one of the objects.
    let cached = builder(&store, &cache()).memory(LENGTH as u64).build().unwrap();
    runtime().block_on(async {
        put(&store, &location, &bytes(0, LENGTH)).await;
        put(&store, &other, &bytes(1, LENGTH)).await;
        cached.get(&location).await.unwrap().bytes().await.unwrap();
        wait_for_parts(&cached, 3).await;
    });
    runtime().block_on(cached.put(&location, bytes(2, LENGTH).into())).unwrap();
    assert_eq!(cached.cached_parts(), 0);
    runtime().block_on(async {
        cached.get(&other).await.unwrap().bytes().await.unwrap();
        wait_for_parts(&cached, 3).await;
    });
}

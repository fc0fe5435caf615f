//! The tests that `object_store` has for stores, over a cached store.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bifolio::Cache;
use object_store::integration;
use object_store::memory::InMemory;
use object_store::{Error, ObjectStore};

use crate::door::{CachedStore, CachedStoreBuilder};

const AGE: Duration = Duration::from_secs(3600);

/// Runs all tests, each over a new store.
async fn run(name: &str, build: impl Fn(CachedStoreBuilder) -> CachedStore) {
    let stores = AtomicU64::new(0);
    let open = || {
        let cache = Cache::builder().memory(16 << 20).build().unwrap();
        cache.class("ends").unwrap().set_floor(1 << 20).unwrap();
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        // The versions of stores in memory have the same tags.
        let number = stores.fetch_add(1, Ordering::Relaxed);
        build(CachedStore::builder(store, &cache).name(format!("{name} {number}")))
    };
    integration::put_get_delete_list(&open()).await;
    integration::put_get_attributes(&open()).await;
    integration::get_opts(&open()).await;
    integration::put_opts(&open(), true).await;
    integration::stream_get(&open()).await;
    integration::list_uses_directories_correctly(&open()).await;
    integration::list_with_delimiter(&open()).await;
    integration::list_with_offset_exclusivity(&open()).await;
    integration::rename_and_copy(&open()).await;
    integration::copy_if_not_exists(&open()).await;
    integration::copy_rename_nonexistent_object(&open()).await;
    integration::multipart_race_condition(&open(), true).await;
    integration::multipart_out_of_order(&open()).await;
    let absent = integration::get_nonexistent_object(&open(), None).await.unwrap_err();
    assert!(matches!(absent, Error::NotFound { .. }), "{name}: {absent}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_the_crate_passes_in_memory() {
    run("by default", |building| building.build().unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_the_crate_passes_with_what_is_remembered() {
    let build = |building: CachedStoreBuilder| {
        let building = building.head_age(AGE).list_age(AGE).insert_on_put(true);
        building.part_bytes(64 << 10).build().unwrap()
    };
    run("remembered", build).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_suite_of_the_crate_passes_over_a_disk_with_kept_ends() {
    let directory = tempfile::tempdir().unwrap();
    // One tier for all of them.
    let build = |building: CachedStoreBuilder| {
        let kept = |_: &object_store::path::Path, size: u64| size.saturating_sub(100)..size;
        let building = building.disk(directory.path(), 4 << 20).keep("ends", 1 << 20, kept);
        building.part_bytes(64 << 10).build().unwrap()
    };
    run("on disk", build).await;
}

//! SlateDB with its bucket behind the cache of objects, without its own caches: a database is read
//! from the tier, also by a process that starts again.
#![allow(missing_docs)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bifolio::Cache;
use bifolio_object_store::v14::CachedStore;
use object_store_14::ObjectStore;
use object_store_14::memory::InMemory;
use slatedb::config::{FlushOptions, FlushType};
use slatedb::{Db, WriteBatch};

const KEYS: u32 = 20_000;
const BATCH: u32 = 500;

fn key(number: u32) -> [u8; 4] {
    number.to_be_bytes()
}

fn value(number: u32) -> Vec<u8> {
    (0..300).map(|index| (number ^ index).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect()
}

fn cached(bucket: &Arc<dyn ObjectStore>, directory: &Path) -> CachedStore {
    let cache = Cache::builder().memory(4 << 20).build().unwrap();
    cache.class("indexes").unwrap().set_floor(1 << 20).unwrap();
    let building = CachedStore::builder(Arc::clone(bucket), &cache).disk(directory, 256 << 20);
    // Filters and indexes are at the end of a table.
    let building =
        building.keep("indexes", 64 << 20, |location, size| match location.extension() {
            Some("sst") => size.saturating_sub(128 << 10)..size,
            _ => 0..0,
        });
    // What one process writes is known to it. Lists are not remembered: others may add manifests.
    let building = building.head_age(Duration::from_secs(3600));
    building.part_bytes(256 << 10).name("bucket").build().unwrap()
}

async fn open(store: &CachedStore) -> Db {
    let store: Arc<dyn ObjectStore> = Arc::new(store.clone());
    Db::builder("db", store).with_db_cache_disabled().build().await.unwrap()
}

async fn check(db: &Db, step: usize) {
    for number in (0..KEYS).step_by(step) {
        let got = db.get(key(number)).await.unwrap();
        assert_eq!(got.as_deref(), Some(&value(number)[..]), "key {number}");
    }
    let mut all = db.scan(..).await.unwrap();
    for number in 0..KEYS {
        let pair = all.next().await.unwrap().expect("a key");
        assert_eq!((&pair.key[..], &pair.value[..]), (&key(number)[..], &value(number)[..]));
    }
    assert!(all.next().await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_is_read_through_the_cache_also_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let store = cached(&bucket, directory.path());
    let db = open(&store).await;
    for first in (0..KEYS).step_by(BATCH as usize) {
        let mut batch = WriteBatch::new();
        (first..first + BATCH).for_each(|number| batch.put(key(number), value(number)));
        db.write(batch).await.unwrap();
    }
    db.flush_with_options(FlushOptions { flush_type: FlushType::MemTable }).await.unwrap();
    check(&db, 97).await;
    let metrics = store.metrics();
    assert!(metrics.memory_hits + metrics.disk_hits > metrics.get_requests, "{metrics:?}");
    db.close().await.unwrap();
    store.flush().await.unwrap();
    drop((db, store));
    // Another process: only the tier and the bucket are left.
    let store = cached(&bucket, directory.path());
    let db = open(&store).await;
    let before = store.metrics();
    check(&db, 97).await;
    let metrics = store.metrics().since(&before);
    println!("after the restart: {metrics:?}");
    // The manifest that the opening wrote.
    assert!(metrics.disk_hits > 0 && metrics.received_bytes < 4096, "{metrics:?}");
    db.close().await.unwrap();
}

//! Parts that are kept: in the tier, in memory, across restarts and other choices.

use std::ops::Range;
use std::path::Path as FilePath;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::door::{CachedStore, CachedStoreBuilder};
use bifolio::Cache;
use object_store::ObjectStoreExt;
use object_store::path::Path;

use crate::support::{PART, TestStore, builder, bytes, put, wait_for_parts};

const AGE: Duration = Duration::from_secs(3600);
/// Length of the tables: the last part is short.
const LENGTH: u64 = 20 * PART + 99;
const FOOTER: u64 = 500;
const TABLES: u64 = 8;

/// Returns a cache with all classes of these tests.
fn cache() -> Cache {
    let cache = crate::support::cache();
    for class in ["footers", "all", "manifests", "kept"] {
        cache.class(class).unwrap();
    }
    cache
}

fn table(number: u64) -> Path {
    Path::from(format!("{number}.parquet"))
}

fn footer(location: &Path, size: u64) -> Range<u64> {
    match location.extension() {
        Some("parquet") => size - FOOTER..size,
        _ => 0..0,
    }
}

/// Returns a store with tables.
async fn tables() -> Arc<TestStore> {
    let store = TestStore::new();
    for number in 0..TABLES {
        put(&store, &table(number), &bytes(number, LENGTH as usize)).await;
    }
    store
}

/// Keeps footers in 16 slots, which are those of 8 footers.
fn keeping(building: CachedStoreBuilder) -> CachedStoreBuilder {
    building.head_age(AGE).keep("footers", 17 * PART, footer)
}

async fn read_footers(cached: &CachedStore) {
    for number in 0..TABLES {
        let range = LENGTH - FOOTER..LENGTH;
        let got = cached.get_range(&table(number), range.clone()).await.unwrap();
        assert_eq!(got, bytes(number, LENGTH as usize)[range.start as usize..]);
    }
}

/// Reads everything but the footers, as a scan does.
async fn scan(cached: &CachedStore) {
    for number in 0..TABLES {
        let range = 0..19 * PART;
        let got = cached.get_range(&table(number), range.clone()).await.unwrap();
        assert_eq!(got, bytes(number, LENGTH as usize)[..range.end as usize]);
        cached.flush().await.unwrap();
    }
}

/// Returns how many requests the footers take after scans.
async fn requests_for_footers(store: &TestStore, cached: &CachedStore) -> usize {
    read_footers(cached).await;
    cached.flush().await.unwrap();
    scan(cached).await;
    scan(cached).await;
    let gets = store.gets();
    read_footers(cached).await;
    store.gets() - gets
}

#[tokio::test]
async fn a_scan_of_more_than_the_tier_has_room_for_takes_no_slot_of_a_kept_part() {
    let directory = tempfile::tempdir().unwrap();
    for on_disk in [false, true] {
        let open = |store: &Arc<TestStore>| match on_disk {
            false => builder(store, &cache()).memory(60 * PART),
            true => builder(store, &cache()).disk(directory.path(), 60 * PART),
        };
        let store = tables().await;
        let kept = keeping(open(&store)).build().unwrap();
        assert_eq!(requests_for_footers(&store, &kept).await, 0);
        drop(kept);
        std::fs::remove_dir_all(directory.path()).unwrap();
        // They need it.
        let store = tables().await;
        let alike = open(&store).head_age(AGE).build().unwrap();
        assert!(requests_for_footers(&store, &alike).await > 0);
    }
}

/// Returns how many reads of footers go to the disk after a scan of more than the memory.
async fn disk_reads_of_footers(is_kept: bool) -> u64 {
    let directory = tempfile::tempdir().unwrap();
    let pages = Cache::builder().memory(1 << 20).build().unwrap();
    pages.class("footers").unwrap().set_floor(256 << 10).unwrap();
    let store = tables().await;
    let building = builder(&store, &pages).disk(directory.path(), 4 << 20);
    let building = if is_kept { keeping(building) } else { building.head_age(AGE) };
    let cached = building.build().unwrap();
    read_footers(&cached).await;
    cached.flush().await.unwrap();
    let kept_bytes = pages.class("footers").unwrap().stats().resident_bytes;
    assert_eq!(kept_bytes >= TABLES * PART, is_kept);
    for _ in 0..3 {
        scan(&cached).await;
    }
    let before = cached.metrics();
    read_footers(&cached).await;
    let metrics = cached.metrics().since(&before);
    assert_eq!((metrics.misses, metrics.corrupt), (0, 0), "{metrics:?}");
    metrics.disk_hits
}

#[tokio::test]
async fn kept_parts_stay_in_memory_below_the_floor_of_their_class() {
    assert_eq!(disk_reads_of_footers(true).await, 0);
    assert!(disk_reads_of_footers(false).await > 0);
}

#[tokio::test]
async fn a_tier_is_opened_with_other_choices_and_returns_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let open = |store: &Arc<TestStore>| builder(store, &cache()).disk(directory.path(), 4 << 20);
    let store = tables().await;
    // Returns the requests for footers and for the rest.
    let check = async |building: CachedStoreBuilder| {
        let cached = building.build().unwrap();
        let before = store.gets();
        scan(&cached).await;
        let scanned = store.gets();
        read_footers(&cached).await;
        cached.flush().await.unwrap();
        assert_eq!(cached.metrics().corrupt, 0);
        (store.gets() - scanned, scanned - before)
    };
    let (footers, rest) = (TABLES as usize, 3 * TABLES as usize);
    assert_eq!(check(open(&store).head_age(AGE)).await, (footers, rest));
    assert_eq!(check(open(&store).head_age(AGE)).await, (0, 0));
    // What was not kept is fetched again, once, into slots whose parts are fetched again.
    assert_eq!(check(keeping(open(&store))).await, (footers, 0));
    assert_eq!(check(keeping(open(&store))).await.0, 0);
    assert_eq!(check(keeping(open(&store))).await, (0, 0));
    let all = || open(&store).head_age(AGE).keep("all", 2 << 20, |_, _| 0..u64::MAX);
    check(all()).await;
    assert_eq!(check(all()).await, (0, 0));
    assert_eq!(check(open(&store).head_age(AGE)).await, (0, 0));
    // Fewer slots, with parts of which some are lost.
    let small = builder(&store, &cache()).disk(directory.path(), 40 * PART);
    let cached = keeping(small).build().unwrap();
    read_footers(&cached).await;
    scan(&cached).await;
    assert_eq!(cached.metrics().corrupt, 0);
}

#[tokio::test]
async fn objects_that_are_kept_whole_are_warmed_inserted_and_forgotten_as_others() {
    let directory = tempfile::tempdir().unwrap();
    let store = tables().await;
    let building = builder(&store, &cache()).disk(directory.path(), 4 << 20).head_age(AGE);
    let building = building.insert_on_put(true).keep("manifests", 32 * PART, |location, size| {
        if location.prefix_matches(&Path::from("manifests")) { 0..size } else { 0..0 }
    });
    let cached = building.build().unwrap();
    let location = Path::from("manifests/1");
    cached.put(&location, bytes(7, 3 * PART as usize).into()).await.unwrap();
    let warmed = cached.warm(None).await.unwrap();
    assert_eq!((warmed.objects, warmed.is_whole), (TABLES + 1, true));
    wait_for_parts(&cached, (TABLES * 21 + 3) as usize).await;
    let gets = store.gets();
    let got = cached.get_range(&location, 5..3 * PART).await.unwrap();
    assert_eq!(got, bytes(7, 3 * PART as usize)[5..]);
    assert_eq!(store.gets(), gets);
    assert_eq!(cached.forget(Some(&Path::from("manifests"))), 3);
    // A new version.
    cached.put(&location, bytes(8, PART as usize).into()).await.unwrap();
    let got = cached.get_range(&location, 0..PART).await.unwrap();
    assert_eq!(got, bytes(8, PART as usize));
    cached.flush().await.unwrap();
    cached.delete(&location).await.unwrap();
    cached.get_range(&location, 0..PART).await.unwrap_err();
    wait_for_parts(&cached, (TABLES * 21) as usize).await;
}

#[tokio::test]
async fn warming_ends_where_the_slots_of_kept_parts_do() {
    let store = TestStore::new();
    for number in 0..10 {
        put(&store, &Path::from(format!("kept/{number}")), &bytes(number, 2 * PART as usize)).await;
    }
    let building = builder(&store, &cache()).memory(60 * PART).head_age(AGE);
    let building = building.keep("kept", 9 * PART, |_, size| 0..size);
    let cached = building.build().unwrap();
    let warmed = cached.warm(None).await.unwrap();
    assert_eq!((warmed.objects, warmed.is_whole), (4, false));
    wait_for_parts(&cached, 8).await;
    // One that is longer than the slots of its class is not put there when it is written.
    let cached = builder(&store, &cache()).memory(60 * PART).insert_on_put(true);
    let cached = cached.keep("kept", 2 * PART, |_, _| 0..u64::MAX).build().unwrap();
    cached.put(&Path::from("long"), bytes(1, 5 * PART as usize).into()).await.unwrap();
    wait_for_parts(&cached, 0).await;
}

#[test]
fn lengths_that_leave_no_room_and_classes_that_cannot_be_are_errors() {
    let (store, directory) = (TestStore::new(), tempfile::tempdir().unwrap());
    let error = |building: CachedStoreBuilder| building.build().unwrap_err().to_string();
    let open = || builder(&store, &cache()).memory(10 * PART);
    assert_eq!(
        error(open().keep("a", PART - 1, |_, _| 0..u64::MAX)),
        "keep: 8191 bytes for \"a\" have no room for a part"
    );
    assert_eq!(
        error(
            open().keep("a", 4 * PART, |_, _| 0..u64::MAX).keep("b", 6 * PART, |_, _| 0..u64::MAX)
        ),
        "keep: 49152 bytes for \"b\" leave no room for other parts in 49152 bytes"
    );
    // In memory there are no classes.
    open().keep("foters", 2 * PART, |_, size| 0..size).build().unwrap();
    let open = || builder(&store, &cache()).disk(directory.path(), 1 << 20);
    for class in ["", "foters"] {
        let unknown = error(open().keep(class, 2 * PART, |_, size| 0..size));
        assert!(unknown.ends_with(&format!("no class `{class}` was made (Cache::class)")));
    }
    // Nothing of it is left open.
    open().build().unwrap();
}

/// A store whose choice of kept parts looks at the store itself, and panics for one object.
fn choosing(store: &Arc<TestStore>, directory: &FilePath) -> (CachedStore, Arc<AtomicU64>) {
    let (calls, own) = (Arc::<AtomicU64>::default(), Arc::<OnceLock<CachedStore>>::default());
    let (counted, handle) = (Arc::clone(&calls), Arc::clone(&own));
    let building = builder(store, &cache()).disk(directory, 4 << 20).head_age(AGE);
    let building = building.keep("footers", 17 * PART, move |location, size| {
        counted.fetch_add(1, Ordering::Relaxed);
        let _ = handle.get().map(CachedStore::cached_parts);
        assert!(location.as_ref() != "panic", "this program has a defect");
        footer(location, size)
    });
    let cached = building.build().unwrap();
    own.set(cached.clone()).unwrap();
    (cached, calls)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_choice_may_use_the_store_and_one_that_panics_holds_up_no_other_read() {
    let directory = tempfile::tempdir().unwrap();
    let store = tables().await;
    put(&store, &Path::from("panic"), &bytes(1, 100)).await;
    let (cached, calls) = choosing(&store, directory.path());
    let late = Duration::from_secs(60);
    let reads = [(); 3].map(|()| {
        let cached = cached.clone();
        tokio::spawn(async move { cached.get_range(&Path::from("panic"), 0..10).await })
    });
    for read in reads {
        let result = tokio::time::timeout(late, read).await.expect("a read hangs");
        assert!(result.unwrap_err().is_panic());
    }
    tokio::time::timeout(late, read_footers(&cached)).await.expect("a read hangs");
    tokio::time::timeout(late, cached.flush()).await.expect("a flush hangs").unwrap();
    assert!(calls.load(Ordering::Relaxed) > 0);
    wait_for_parts(&cached, 2 * TABLES as usize).await;
}

/// A part of four blocks.
const LONG_PART: u64 = 256 << 10;
const BLOCK: u64 = 64 << 10;

fn long_parts(store: &Arc<TestStore>, pages: &Cache, directory: &FilePath) -> CachedStoreBuilder {
    let building = builder(store, pages).part_bytes(LONG_PART).request_bytes_max(8 * LONG_PART);
    building.disk(directory, 8 << 20).head_age(AGE)
}

#[tokio::test]
async fn the_rest_of_a_part_takes_no_memory_of_its_kept_bytes() {
    const SIZE: u64 = 2 * LONG_PART;
    let directory = tempfile::tempdir().unwrap();
    let store = TestStore::new();
    for number in 0..10 {
        put(&store, &table(number), &bytes(number, SIZE as usize)).await;
    }
    let pages = Cache::builder().memory(3 << 20).build().unwrap();
    pages.class("footers").unwrap().set_floor(10 * BLOCK).unwrap();
    let building = long_parts(&store, &pages, directory.path());
    let cached = building.keep("footers", 10 * LONG_PART + (1 << 16), footer).build().unwrap();
    // Footers, then everything else in two scans, also of their parts.
    let ranges = [SIZE - FOOTER..SIZE, 0..SIZE - FOOTER, 0..SIZE - FOOTER, SIZE - FOOTER..SIZE];
    let mut before = cached.metrics();
    for range in ranges {
        before = cached.metrics();
        for number in 0..10 {
            let got = cached.get_range(&table(number), range.clone()).await.unwrap();
            let expected = bytes(number, SIZE as usize);
            assert_eq!(got, expected[range.start as usize..range.end as usize]);
        }
        cached.flush().await.unwrap();
    }
    let metrics = cached.metrics().since(&before);
    assert_eq!((metrics.memory_hits, metrics.disk_hits, metrics.corrupt), (10, 0, 0));
    assert_eq!(store.gets(), 20);
}

#[tokio::test]
async fn slots_whose_parts_have_other_kept_blocks_than_those_before_have_the_right_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let store = TestStore::new();
    let mut random = fastrand::Rng::with_seed(7);
    let sizes: Vec<u64> = (0..24).map(|_| random.u64(1..2 * LONG_PART)).collect();
    for (number, size) in (0..).zip(&sizes) {
        put(&store, &Path::from(format!("{number}")), &bytes(number, *size as usize)).await;
    }
    let pages = Cache::builder().memory(1 << 20).build().unwrap();
    pages.class("footers").unwrap().set_floor(256 << 10).unwrap();
    let building = long_parts(&store, &pages, directory.path());
    // Ranges that differ by object, in three slots.
    let cached = building.keep("footers", 3 * LONG_PART + (1 << 16), |location, size| {
        let seed = location.as_ref().parse().unwrap();
        let start = fastrand::Rng::with_seed(seed).u64(..size);
        start..start + 100
    });
    let cached = cached.build().unwrap();
    for step in 0..150 {
        // More than are written out at a time.
        let reads = (0..12).map(|_| {
            let number = random.usize(..sizes.len());
            let start = random.u64(..sizes[number]);
            let range = start..random.u64(start + 1..=sizes[number]);
            let cached = &cached;
            async move {
                let location = Path::from(format!("{number}"));
                (number, range.clone(), cached.get_range(&location, range).await.unwrap())
            }
        });
        for (number, range, got) in futures::future::join_all(reads).await {
            let expected = bytes(number as u64, sizes[number] as usize);
            assert_eq!(got, expected[range.start as usize..range.end as usize], "step {step}");
        }
    }
    cached.flush().await.unwrap();
    let metrics = cached.metrics();
    assert_eq!(metrics.corrupt, 0, "{metrics:?}");
    assert!(metrics.evicted > 100 && metrics.disk_hits > 100, "{metrics:?}");
}

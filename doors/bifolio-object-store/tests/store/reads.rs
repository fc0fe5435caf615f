//! The bytes of reads, and the requests that bring them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::TryStreamExt;
use futures::future::join_all;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutOptions,
};

use crate::support::{PART, TestStore, builder, bytes, cache, put, wait_for_parts};

const AGE: Duration = Duration::from_secs(3600);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_return_the_bytes_of_the_store() {
    let directory = tempfile::tempdir().unwrap();
    for disk in [None, Some(40 * (PART + 64))] {
        let store = TestStore::new();
        // The tier is smaller than the objects.
        let mut building = builder(&store, &cache()).memory(20 * PART);
        if let Some(bytes) = disk {
            building = building.disk(directory.path(), bytes);
        }
        let cached = building.build().unwrap();
        let mut random = fastrand::Rng::with_seed(7);
        let objects: Vec<_> = [1, 100, PART as usize, 300_001, 40 * PART as usize]
            .map(|length| (Path::from(format!("object {length}")), bytes(length as u64, length)))
            .into();
        for (location, bytes) in &objects {
            put(&store, location, bytes).await;
        }
        for _ in 0..400 {
            let (location, bytes) = &objects[random.usize(..objects.len())];
            let size = bytes.len() as u64;
            let mut range = || {
                let start = random.u64(..size);
                start..random.u64(start + 1..=(start + 100_000).min(size))
            };
            let ranges: Vec<_> = (0..4).map(|_| range()).collect();
            let one = ranges[0].start as usize..ranges[0].end as usize;
            match random.u8(..4) {
                0 => {
                    let got = cached.get_ranges(location, &ranges).await.unwrap();
                    for (range, got) in ranges.iter().zip(got) {
                        assert_eq!(got, &bytes[range.start as usize..range.end as usize]);
                    }
                }
                1 => {
                    let got = cached.get_range(location, ranges[0].clone()).await.unwrap();
                    assert_eq!(got, &bytes[one]);
                }
                2 => {
                    let range = match random.bool() {
                        true => GetRange::Offset(one.start as u64),
                        false => GetRange::Suffix(size - one.start as u64),
                    };
                    let options = GetOptions::new().with_range(Some(range));
                    let got = cached.get_opts(location, options).await.unwrap();
                    assert_eq!(got.range, one.start as u64..size);
                    assert_eq!(got.bytes().await.unwrap(), &bytes[one.start..]);
                }
                _ => {
                    let got = cached.get(location).await.unwrap().bytes().await.unwrap();
                    assert_eq!(got, bytes);
                }
            }
        }
        let metrics = cached.metrics();
        assert!(metrics.memory_hits > 100, "{metrics:?}");
        assert_eq!((metrics.corrupt, metrics.changed), (0, 0), "{metrics:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_misses_of_a_part_are_one_request() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(1, 3 * PART as usize)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    cached.head(&location).await.unwrap();
    let gate = store.hold_gets();
    let reads = (0..20_u64).map(|read| {
        let (cached, location) = (cached.clone(), location.clone());
        tokio::spawn(async move { cached.get_range(&location, read..read + 1).await })
    });
    let reads: Vec<_> = reads.collect();
    store.wait_for_gets(1).await;
    while cached.metrics().shared < 19 {
        tokio::task::yield_now().await;
    }
    gate.add_permits(1);
    let expected = bytes(1, 20);
    for (index, read) in join_all(reads).await.into_iter().enumerate() {
        assert_eq!(read.unwrap().unwrap(), vec![expected[index]]);
    }
    assert_eq!(store.gets(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_an_unknown_object_ask_for_it_once() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(1, 100)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    let gate = store.hold_gets();
    let read = || cached.get_range(&location, 3..5);
    let opened = async {
        while cached.metrics().shared < 9 {
            tokio::task::yield_now().await;
        }
        gate.add_permits(1);
    };
    let (results, ()) = tokio::join!(join_all((0..10).map(|_| read())), opened);
    assert!(results.into_iter().all(|result| result.unwrap() == bytes(1, 100)[3..5]));
    assert_eq!((store.heads(), store.gets()), (1, 1));
}

#[tokio::test]
async fn neighbouring_misses_are_one_ranged_request() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(1, 20 * PART as usize + 5)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    // Parts 1 to 3, the gap of part 4, part 5; then part 8.
    let ranges = [PART + 1..2 * PART, 2 * PART..3 * PART + 1, 5 * PART..5 * PART + 9];
    let mut all = ranges.to_vec();
    all.push(8 * PART..8 * PART + 1);
    cached.get_ranges(&location, &all).await.unwrap();
    assert_eq!(store.ranges(), [PART..6 * PART, 8 * PART..9 * PART]);
    assert!(store.requests.lock().unwrap()[1..].iter().all(|each| each.if_match.is_some()));
    wait_for_parts(&cached, 6).await;
    // What is there is not requested again, and the end is the end of the object.
    cached.get(&location).await.unwrap().bytes().await.unwrap();
    let (end, size) = (20 * PART, 20 * PART + 5);
    let expected = [0..PART, PART..6 * PART, 6 * PART..8 * PART, 8 * PART..9 * PART];
    let expected = [&expected[..], &[9 * PART..16 * PART, 16 * PART..size]].concat();
    assert_eq!((store.ranges(), end), (expected, 20 * PART));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_run_is_several_requests_that_leave_together() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    let contents = bytes(1, 40 * PART as usize);
    put(&store, &location, &contents).await;
    let cached = builder(&store, &cache()).parallel_requests(3).build().unwrap();
    cached.head(&location).await.unwrap();
    // A run of 8 parts; one of three with a gap in the middle, and one with a gap that is left out.
    let wholes = [0..8 * PART, 11 * PART..12 * PART, 13 * PART..14 * PART]
        .into_iter()
        .chain([20 * PART..22 * PART, 23 * PART..25 * PART]);
    let wholes: Vec<_> = wholes.collect();
    let requests = [0..3 * PART, 3 * PART..6 * PART, 6 * PART..8 * PART, 11 * PART..14 * PART];
    let requests = [&requests[..], &[20 * PART..22 * PART, 23 * PART..25 * PART]].concat();
    let gate = store.hold_gets();
    let opened = async {
        store.wait_for_gets(requests.len()).await;
        gate.add_permits(10);
    };
    let (result, ()) = tokio::join!(cached.get_ranges(&location, &wholes), opened);
    for (got, range) in result.unwrap().iter().zip(&wholes) {
        assert_eq!(got[..], contents[range.start as usize..range.end as usize]);
    }
    assert_eq!(store.ranges(), requests);
    wait_for_parts(&cached, 8 + 3 + 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_requests_of_get_ranges_leave_together() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(1, 100 * PART as usize)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    let gate = store.hold_gets();
    let ranges: Vec<_> = (0..10).map(|index| index * 10 * PART..index * 10 * PART + 7).collect();
    let opened = async {
        store.wait_for_gets(10).await;
        gate.add_permits(10);
    };
    let (result, ()) = tokio::join!(cached.get_ranges(&location, &ranges), opened);
    assert_eq!(result.unwrap().len(), 10);
}

#[tokio::test]
async fn a_read_of_cached_parts_asks_for_the_version_only() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(1, 3 * PART as usize)).await;
    for age in [None, Some(AGE)] {
        store.requests.lock().unwrap().clear();
        let building = builder(&store, &cache());
        let building = age.into_iter().fold(building, |building, age| building.head_age(age));
        let cached = building.build().unwrap();
        cached.get(&location).await.unwrap().bytes().await.unwrap();
        wait_for_parts(&cached, 3).await;
        let (gets, heads) = (store.gets(), store.heads());
        assert_eq!((gets, heads), (1, 1));
        for _ in 0..5 {
            assert_eq!(cached.get_range(&location, 5..9).await.unwrap(), bytes(1, 9)[5..]);
        }
        assert_eq!(store.gets(), gets);
        assert_eq!(store.heads(), if age.is_some() { heads } else { heads + 5 });
        let metrics = cached.metrics();
        assert_eq!((metrics.memory_hits, metrics.misses), (5, 3), "{metrics:?}");
    }
}

#[tokio::test]
async fn a_listed_object_is_read_without_a_head() {
    let (store, location) = (TestStore::new(), Path::from("a/b"));
    put(&store, &location, &bytes(1, 100)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    let listed: Vec<_> = cached.list(None).try_collect().await.unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(cached.get_range(&location, 5..9).await.unwrap(), bytes(1, 9)[5..]);
    assert_eq!((store.heads(), store.gets()), (0, 1));
}

#[tokio::test]
async fn lists_are_remembered_on_request_until_a_change() {
    let (store, location) = (TestStore::new(), Path::from("a/b"));
    put(&store, &location, &bytes(1, 100)).await;
    let lists = || store.lists.load(Ordering::Relaxed);
    for (age, expected) in [(None, 4), (Some(AGE), 2)] {
        store.lists.store(0, Ordering::Relaxed);
        let building = builder(&store, &cache());
        let building = age.into_iter().fold(building, |building, age| building.list_age(age));
        let cached = building.build().unwrap();
        for _ in 0..2 {
            let all: Vec<_> = cached.list(None).try_collect().await.unwrap();
            let top = cached.list_with_delimiter(None).await.unwrap();
            assert_eq!((all.len(), top.common_prefixes.len()), (1, 1));
        }
        assert_eq!(lists(), expected);
        cached.put(&Path::from("c"), "c".into()).await.unwrap();
        let all: Vec<_> = cached.list(None).try_collect().await.unwrap();
        assert_eq!(all.len(), 2);
        store.objects.delete(&Path::from("c")).await.unwrap();
    }
}

#[tokio::test]
async fn results_have_the_metadata_of_the_store() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    let mut attributes = Attributes::new();
    attributes.insert(Attribute::ContentType, "text/plain".into());
    let options = PutOptions { attributes: attributes.clone(), ..PutOptions::default() };
    store.objects.put_opts(&location, bytes(1, 100).into(), options).await.unwrap();
    let cached = builder(&store, &cache()).head_age(AGE).build().unwrap();
    let _: Vec<_> = cached.list(None).try_collect().await.unwrap();
    let meta = store.objects.head(&location).await.unwrap();
    for _ in 0..3 {
        let got = cached.get(&location).await.unwrap();
        assert_eq!((&got.meta, &got.attributes, &got.range), (&meta, &attributes, &(0..100)));
        let head = cached.get_opts(&location, GetOptions::new().with_head(true)).await.unwrap();
        assert_eq!((&head.meta, &head.attributes), (&meta, &attributes));
        wait_for_parts(&cached, 1).await;
    }
    assert_eq!((store.heads(), store.gets()), (0, 1));
}

#[tokio::test]
async fn empty_reads_and_absent_objects_are_answered_by_the_store() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, b"").await;
    let cached = builder(&store, &cache()).build().unwrap();
    assert!(cached.get(&location).await.unwrap().bytes().await.unwrap().is_empty());
    assert!(cached.get_ranges(&location, &[]).await.unwrap().is_empty());
    let absent = Path::from("absent");
    let error = cached.get(&absent).await.unwrap_err();
    assert!(matches!(error, object_store::Error::NotFound { .. }), "{error}");
    assert!(cached.get_ranges(&absent, &[0..1, 1..2]).await.is_err());
}

#[test]
fn a_read_outside_of_a_runtime_is_an_error_not_a_panic() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(put(&store, &location, &bytes(1, 100)));
    let cached = builder(&store, &cache()).build().unwrap();
    let error = futures::executor::block_on(cached.get_range(&location, 0..9)).unwrap_err();
    assert!(error.to_string().contains("runtime"), "{error}");
    let given = builder(&store, &cache()).runtime(runtime.handle().clone()).build().unwrap();
    let got = futures::executor::block_on(given.get_range(&location, 0..9)).unwrap();
    assert_eq!(got, bytes(1, 9));
}

#[tokio::test]
async fn invalid_settings_are_refused_with_the_valid_values() {
    let store: Arc<dyn ObjectStore> = TestStore::new();
    let start = || crate::door::CachedStore::builder(Arc::clone(&store), &cache());
    let problems = [
        start().part_bytes(5000).build(),
        start().part_bytes(1 << 30).build(),
        start().request_bytes_max(1000).build(),
        start().part_bytes(64 << 20).request_bytes_max(64 << 20).build(),
        start().disk("/tmp/unused", 1000).build(),
    ];
    let texts = problems.map(|problem| problem.unwrap_err().to_string());
    let expected = ["part_bytes: 5000", "part_bytes: 10", "request_bytes_max", "memory", "disk"];
    for (text, expected) in texts.iter().zip(expected) {
        assert!(text.starts_with(expected), "{text}");
    }
}

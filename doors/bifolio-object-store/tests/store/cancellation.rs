//! Reads that are dropped before they end.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Waker};
use std::time::Duration;

use crate::door::CachedStore;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tokio::sync::Semaphore;

use crate::support::{Fate, PART, TestStore, builder, bytes, cache, put, wait_for_parts};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_reader_does_not_cancel_the_request_of_another() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, 3 * PART as usize)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    cached.head(&location).await.unwrap();
    let gate = store.hold_gets();
    let read = || {
        let (cached, location) = (cached.clone(), location.clone());
        tokio::spawn(async move { cached.get_range(&location, 0..3 * PART).await })
    };
    let first = read();
    store.wait_for_gets(1).await;
    let second = read();
    while cached.metrics().shared < 3 {
        tokio::task::yield_now().await;
    }
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    gate.add_permits(1);
    assert_eq!(second.await.unwrap().unwrap(), bytes(0, 3 * PART as usize));
    assert_eq!((store.gets(), store.aborted.load(Ordering::Relaxed)), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_request_is_aborted_when_all_its_readers_are_dropped() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, 3 * PART as usize)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    cached.head(&location).await.unwrap();
    let gate = store.hold_gets();
    for round in 1..=20 {
        let reads = [(); 3].map(|()| {
            let (cached, location) = (cached.clone(), location.clone());
            tokio::spawn(async move { cached.get_range(&location, 0..3 * PART).await })
        });
        while cached.metrics().shared + cached.metrics().misses < 9 * round {
            tokio::task::yield_now().await;
        }
        for read in reads {
            read.abort();
            assert!(read.await.unwrap_err().is_cancelled());
        }
        while store.aborted.load(Ordering::Relaxed) < store.gets() as u64 {
            tokio::task::yield_now().await;
        }
    }
    // The next reader is not stopped by what the others left.
    gate.add_permits(100);
    let got = cached.get_range(&location, 0..3 * PART).await.unwrap();
    assert_eq!(got, bytes(0, 3 * PART as usize));
    wait_for_parts(&cached, 3).await;
}

#[test]
fn readers_survive_the_runtime_of_the_request_that_they_share() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    let [first, second] = [(); 2].map(|()| {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
    });
    second.block_on(put(&store, &location, &bytes(0, 100)));
    let cached = builder(&store, &cache()).build().unwrap();
    second.block_on(cached.head(&location)).unwrap();
    let gate = store.hold_gets();
    let read = || {
        let (cached, location) = (cached.clone(), location.clone());
        async move { cached.get_range(&location, 0..100).await }
    };
    first.spawn(read());
    second.block_on(store.wait_for_gets(1));
    let shared = second.spawn(read());
    while cached.metrics().shared < 1 {
        std::thread::yield_now();
    }
    drop(first);
    gate.add_permits(100);
    assert_eq!(second.block_on(shared).unwrap().unwrap(), bytes(0, 100));
}

/// A part of four blocks.
const LONG_PART: u64 = 256 << 10;
const BLOCK: u64 = 64 << 10;

/// Has the bodies of requests wait for a permit after so many bytes.
fn hold_bodies(store: &TestStore, length: u64) -> Arc<Semaphore> {
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    store.decide(move |request| match request.head {
        true => Fate::Answer,
        false => Fate::HoldAfter(length as usize, Arc::clone(&held)),
    });
    gate
}

fn long_parts(store: &Arc<TestStore>) -> CachedStore {
    let building = builder(store, &cache()).part_bytes(LONG_PART);
    building.request_bytes_max(2 * LONG_PART).build().unwrap()
}

#[tokio::test]
async fn a_reader_has_its_bytes_before_the_part_is_complete_and_the_part_is_cached() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    let contents = bytes(0, 2 * LONG_PART as usize);
    put(&store, &location, &contents).await;
    let cached = long_parts(&store);
    cached.head(&location).await.unwrap();
    let gate = hold_bodies(&store, LONG_PART + BLOCK + 1);
    let range = BLOCK + 3..LONG_PART + BLOCK - 5;
    let read = cached.get_range(&location, range.clone());
    let got = tokio::time::timeout(Duration::from_secs(20), read).await.expect("hangs").unwrap();
    assert_eq!(got, contents[range.start as usize..range.end as usize]);
    // Another reader joins the request, which goes on without the first.
    let late = cached.get_range(&location, LONG_PART..2 * LONG_PART);
    let (late, ()) = tokio::join!(late, async {
        while cached.metrics().shared < 1 {
            tokio::task::yield_now().await;
        }
        gate.add_permits(1);
    });
    assert_eq!(late.unwrap(), contents[LONG_PART as usize..]);
    wait_for_parts(&cached, 2).await;
    assert_eq!((store.gets(), store.aborted.load(Ordering::Relaxed)), (1, 0));
}

#[tokio::test]
async fn a_request_whose_only_reader_has_its_bytes_is_not_aborted() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, 2 * LONG_PART as usize)).await;
    let cached = long_parts(&store);
    cached.head(&location).await.unwrap();
    let gate = hold_bodies(&store, 2 * BLOCK);
    for start in [5, 0] {
        let got = cached.get_range(&location, start..BLOCK).await.unwrap();
        assert_eq!(got, bytes(0, BLOCK as usize)[start as usize..]);
    }
    gate.add_permits(1);
    wait_for_parts(&cached, 1).await;
    assert_eq!(store.gets(), 1);
    // A change ends it.
    let gate = hold_bodies(&store, BLOCK + 1);
    cached.get_range(&location, LONG_PART..LONG_PART + 1).await.unwrap();
    cached.put(&location, bytes(1, 100).into()).await.unwrap();
    gate.add_permits(1);
    cached.flush().await.unwrap();
    assert_eq!(cached.cached_parts(), 0);
    assert_eq!(cached.get_range(&location, 0..100).await.unwrap(), bytes(1, 100));
}

#[tokio::test]
async fn a_store_that_is_dropped_ends_its_requests_and_leaves_its_directory() {
    let directory = tempfile::tempdir().unwrap();
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, 2 * LONG_PART as usize)).await;
    let gate = hold_bodies(&store, BLOCK + 1);
    let open = || {
        let building = builder(&store, &cache()).part_bytes(LONG_PART);
        building.request_bytes_max(2 * LONG_PART).disk(directory.path(), 8 << 20).build()
    };
    let cached = open().unwrap();
    let other = cached.clone();
    assert_eq!(cached.get_range(&location, 0..BLOCK).await.unwrap(), bytes(0, BLOCK as usize));
    drop(cached);
    assert_eq!(Arc::strong_count(&store), 2);
    // The request has it, too, but no read waits for that.
    drop(other);
    let ended = async {
        while Arc::strong_count(&store) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), ended).await.expect("the request goes on");
    open().unwrap();
    drop(gate);
}

/// Polls a read so often, and gives everything else time between the polls.
async fn after_polls<T>(future: impl Future<Output = T>, polls: usize) -> (impl Sized, bool) {
    let mut future = Box::pin(future);
    for _ in 0..polls {
        let mut context = Context::from_waker(Waker::noop());
        if future.as_mut().poll(&mut context).is_ready() {
            return (future, true);
        }
        tokio::task::yield_now().await;
    }
    (future, false)
}

#[tokio::test]
async fn a_read_that_is_dropped_or_leaked_after_any_poll_leaves_others_their_bytes() {
    let directory = tempfile::tempdir().unwrap();
    for is_leaked in [false, true] {
        let store = TestStore::new();
        let pages = bifolio::Cache::builder().memory(1 << 20).build().unwrap();
        let building = builder(&store, &pages).disk(directory.path(), 1 << 20);
        let cached = building.build().unwrap();
        let mut ended = 0;
        for polls in 0..60 {
            let location = Path::from(format!("{polls}"));
            let contents = bytes(polls, 6 * PART as usize);
            put(&store, &location, &contents).await;
            if polls % 2 == 1 {
                // Parts that are read from the disk.
                cached.get_range(&location, 0..3 * PART).await.unwrap();
                cached.flush().await.unwrap();
                pages.evict_all().unwrap();
            }
            let ranges = [0..2 * PART, PART + 7..6 * PART];
            let read = cached.get_ranges(&location, &ranges);
            let (read, is_over) = after_polls(read, polls as usize / 2).await;
            ended += usize::from(is_over);
            match is_leaked {
                true => mem::forget(read),
                false => drop(read),
            }
            let whole = cached.get_range(&location, 0..6 * PART);
            let whole = tokio::time::timeout(Duration::from_secs(20), whole).await;
            assert_eq!(whole.expect("a read waits for another").unwrap(), contents);
            let flushed = tokio::time::timeout(Duration::from_secs(20), cached.flush()).await;
            flushed.expect("a flush waits for a read").unwrap();
        }
        assert!((1..60).contains(&ended), "{ended} reads ended");
        assert_eq!(cached.metrics().corrupt, 0);
        drop(cached);
        if !is_leaked {
            // No task, thread or entry still has the store.
            let left = async {
                while Arc::strong_count(&store) > 1 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(20), left).await.expect("something is left");
        }
    }
}

#[tokio::test]
async fn a_read_that_is_leaked_while_it_asks_for_the_version_holds_up_no_other() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, 3 * PART as usize)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    let gate = store.hold_heads();
    for is_leaked in [false, true] {
        let (first, is_over) = after_polls(cached.get_range(&location, 0..PART), 3).await;
        assert!(!is_over && store.heads() > 0);
        match is_leaked {
            true => mem::forget(first),
            false => drop(first),
        }
        gate.add_permits(10);
        let second = cached.get_range(&location, 0..3 * PART);
        let second = tokio::time::timeout(Duration::from_secs(20), second).await;
        assert_eq!(second.expect("a read waits").unwrap(), bytes(0, 3 * PART as usize));
        // No version is known after a change.
        cached.put(&location, bytes(0, 3 * PART as usize).into()).await.unwrap();
        gate.forget_permits(100);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_an_unknown_object_share_the_request_for_its_version() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, 3 * PART as usize)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    let gate = store.hold_heads();
    let reads = [(); 8].map(|()| {
        let (cached, location) = (cached.clone(), location.clone());
        tokio::spawn(async move { cached.get_range(&location, 0..3 * PART).await })
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(store.heads(), 1);
    let [first, second, rest @ ..] = reads;
    first.abort();
    drop(second);
    gate.add_permits(1);
    for read in rest {
        assert_eq!(read.await.unwrap().unwrap(), bytes(0, 3 * PART as usize));
    }
    assert_eq!((store.heads(), store.gets()), (1, 1));
}

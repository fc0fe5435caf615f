//! Reads that are dropped before they end.

use std::sync::atomic::Ordering;

use object_store::ObjectStoreExt;
use object_store::path::Path;

use crate::support::{PART, TestStore, builder, bytes, cache, put, wait_for_parts};

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

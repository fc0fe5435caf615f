//! Ranges that no store can answer, and stores that name wrong lengths.

use std::ops::Range;

use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt};

use crate::support::{Fate, PART, TestStore, builder, bytes, cache, put, wait_for_parts};

const LENGTH: u64 = 2 * PART + 100;

/// Not written as literals, which clippy would find to be empty.
fn range(start: u64, end: u64) -> Range<u64> {
    Range { start, end }
}

#[tokio::test]
async fn ranges_outside_of_the_object_are_errors_and_not_panics() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH as usize)).await;
    let cached = builder(&store, &cache()).build().unwrap();
    let cases = [
        vec![range(50, 20)],
        vec![range(0, 100), range(50, 20)],
        vec![range(0, 10), range(LENGTH, LENGTH + 10)],
        vec![range(0, 10), range(LENGTH + 100, LENGTH + 200)],
        vec![range(LENGTH, LENGTH), range(0, 10)],
        vec![range(u64::MAX, 0)],
        vec![range(u64::MAX - 1, u64::MAX), range(1, 2)],
    ];
    for is_cached in [false, true] {
        for ranges in &cases {
            let error = cached.get_ranges(&location, ranges).await.unwrap_err().to_string();
            assert!(error.contains("a: no bytes") && error.contains("16484"), "{error}");
        }
        assert_eq!((store.gets() > 0, cached.metrics().passed_on), (is_cached, 0));
        let whole = cached.get_ranges(&location, &[range(0, u64::MAX)]).await.unwrap();
        assert_eq!(whole[0], bytes(0, LENGTH as usize));
        wait_for_parts(&cached, 3).await;
    }
}

#[tokio::test]
async fn empty_ranges_within_the_object_are_empty_and_cost_nothing() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    let contents = bytes(0, LENGTH as usize);
    put(&store, &location, &contents).await;
    let cached = builder(&store, &cache()).build().unwrap();
    let got = cached.get_ranges(&location, &[range(5, 5), range(PART, PART)]).await.unwrap();
    assert!(got.len() == 2 && got.iter().all(|bytes| bytes.is_empty()));
    assert_eq!(store.gets(), 0);
    let ranges = [range(5, 5), range(0, 10), range(PART, PART), range(3, 7), range(9, 9)];
    for _ in 0..2 {
        let got = cached.get_ranges(&location, &ranges).await.unwrap();
        for (range, got) in ranges.iter().zip(&got) {
            assert_eq!(got, &contents[range.start as usize..range.end as usize]);
        }
        assert_eq!((store.gets(), cached.metrics().passed_on), (1, 0));
        wait_for_parts(&cached, 1).await;
    }
    let error = cached.get_ranges(&Path::from("absent"), &[range(5, 5)]).await.unwrap_err();
    assert!(matches!(error, object_store::Error::NotFound { .. }), "{error}");
}

#[tokio::test]
async fn a_store_that_names_wrong_lengths_gives_right_bytes_or_errors() {
    let (store, location) = (TestStore::new(), Path::from("a"));
    let contents = bytes(0, LENGTH as usize);
    put(&store, &location, &contents).await;
    let sizes = [0, 1, PART, LENGTH - 1, LENGTH + 1, 1 << 40, 1 << 62, u64::MAX - PART, u64::MAX];
    for size in sizes {
        for lies_always in [false, true] {
            store.decide(move |request| match lies_always || request.head {
                true => Fate::Sized(size),
                false => Fate::Answer,
            });
            let cached = builder(&store, &cache()).build().unwrap();
            let ranges = [
                None,
                Some(GetRange::Bounded(0..10)),
                Some(GetRange::Bounded(LENGTH - 5..LENGTH + 5)),
                Some(GetRange::Bounded(u64::MAX - 9..u64::MAX - 3)),
                Some(GetRange::Offset(5)),
                Some(GetRange::Offset(u64::MAX - 5)),
                Some(GetRange::Suffix(10)),
            ];
            for range in ranges {
                let options = GetOptions::new().with_range(range.clone());
                let Ok(result) = cached.get_opts(&location, options).await else { continue };
                let start = result.range.start as usize;
                let Ok(got) = result.bytes().await else { continue };
                let is_right = contents.get(start..start + got.len()) == Some(&got[..]);
                assert!(is_right, "size {size}: {range:?}");
            }
            for range in [0..10, 0..u64::MAX, PART..1 << 41, u64::MAX - 5..u64::MAX - 1] {
                let start = range.start as usize;
                let Ok(got) = cached.get_ranges(&location, &[1..2, range]).await else { continue };
                assert_eq!(Some(&got[0][..]), contents.get(1..2));
                let is_right = contents.get(start..start + got[1].len()) == Some(&got[1][..]);
                assert!(is_right, "size {size} from {start}");
            }
            // Honest again.
            store.decide(|_| Fate::Answer);
            let got = cached.get(&location).await.unwrap().bytes().await.unwrap();
            assert_eq!(got, contents, "size {size}");
        }
    }
}

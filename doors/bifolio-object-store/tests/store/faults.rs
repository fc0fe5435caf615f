//! Faults of the store: a read returns the right bytes or a clear error, never wrong bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::join_all;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::support::{Fate, PART, TestStore, builder, bytes, cache, put};

const LENGTH: usize = 30 * PART as usize + 77;

/// Returns a read's error, where each request for bytes has the same fate.
async fn error_of(fate: Fate) -> object_store::Error {
    let (store, location) = (TestStore::new(), Path::from("a"));
    put(&store, &location, &bytes(0, LENGTH)).await;
    let building = builder(&store, &cache()).stall_timeout(Duration::from_secs(5));
    let cached = building.build().unwrap();
    cached.head(&location).await.unwrap();
    store.decide(move |_| fate.clone());
    cached.get_range(&location, 10..3 * PART).await.unwrap_err()
}

#[tokio::test(start_paused = true)]
async fn errors_say_what_failed_where() {
    for (fate, expected) in [
        (Fate::Refuse(503), "server error 503"),
        (Fate::Refuse(404), "Object at location a not found"),
        (Fate::Refuse(403), "necessary privileges to complete for path a"),
        (Fate::Hang, "a: no bytes of 0..24576 received for 5000 ms"),
        (Fate::HangAfter(100), "a: no bytes of 0..24576 received for 5000 ms"),
        (Fate::CutAfter(100), "connection closed"),
        (Fate::EndAfter(100), "a: 100 bytes received, 24576 expected from position 0"),
        (Fate::Longer(5), "a: 8197 bytes received, 8192 expected from position 16384"),
        (Fate::OtherRange, "a: bytes 1..24577 received, 0..24576 requested"),
    ] {
        let text = error_of(fate).await.to_string();
        assert!(text.contains(expected), "{text}");
    }
    // Of a head, too.
    let (store, location) = (TestStore::new(), Path::from("a"));
    store.decide(|_| Fate::Hang);
    let cached = builder(&store, &cache()).build().unwrap();
    let error = cached.get(&location).await.unwrap_err().to_string();
    assert!(error.contains("a: no metadata received for 30000 ms"), "{error}");
    let refused = error_of(Fate::Refuse(403)).await;
    assert!(matches!(refused, object_store::Error::PermissionDenied { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_body_that_was_cut_is_continued_after_its_last_whole_part() {
    for fate in [Fate::CutAfter(20_000), Fate::EndAfter(20_000), Fate::HangAfter(20_000)] {
        let (store, location) = (TestStore::new(), Path::from("a"));
        put(&store, &location, &bytes(0, LENGTH)).await;
        let cached = builder(&store, &cache()).build().unwrap();
        let mut fates = vec![fate];
        store.decide(move |request| match request.head {
            true => Fate::Answer,
            false => fates.pop().unwrap_or(Fate::Answer),
        });
        let got = cached.get_range(&location, 0..4 * PART).await.unwrap();
        assert_eq!(got, &bytes(0, LENGTH)[..4 * PART as usize]);
        assert_eq!(store.ranges(), [0..4 * PART, 2 * PART..4 * PART]);
        assert_eq!(cached.metrics().retries, 1);
    }
}

fn random_fate(random: &mut fastrand::Rng) -> Fate {
    let length = random.usize(..8 * PART as usize);
    match random.u8(..12) {
        0 => Fate::Refuse(500),
        1 => Fate::Refuse(503),
        2 => Fate::Refuse(403),
        3 => Fate::Refuse(404),
        4 => Fate::Hang,
        5 => Fate::HangAfter(length),
        6 | 7 => Fate::CutAfter(length),
        8 | 9 => Fate::EndAfter(length),
        10 => Fate::Longer(1 + random.usize(..5000)),
        _ => Fate::OtherRange,
    }
}

/// 10,000 faults, and changes of the objects, under four readers at a time. A version's bytes
/// differ from those of all others, so that a mixture is found.
#[tokio::test(start_paused = true)]
async fn ten_thousand_faults_give_right_bytes_or_errors() {
    let directory = tempfile::tempdir().unwrap();
    let store = TestStore::new();
    let faults = Arc::new(AtomicU64::new(0));
    let locations = ["a", "b", "c"].map(Path::from);
    let versions: Vec<Vec<u8>> = (0..4).map(|seed| bytes(seed, LENGTH)).collect();
    for location in &locations {
        put(&store, location, &versions[0]).await;
    }
    // Too small for the objects, so that parts are evicted and requested again.
    let building = builder(&store, &cache()).disk(directory.path(), 4096 + 20 * (PART + 64));
    let cached = building.stall_timeout(Duration::from_millis(200)).build().unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    let (counter, mut own) = (Arc::clone(&faults), random.fork());
    store.decide(move |_| match own.u8(..3) {
        0 => Fate::Answer,
        _ => {
            counter.fetch_add(1, Ordering::Relaxed);
            random_fate(&mut own)
        }
    });
    let (mut right, mut failed) = (0, 0);
    while faults.load(Ordering::Relaxed) < 10_000 {
        let location = &locations[random.usize(..locations.len())];
        if random.u8(..8) == 0 {
            put(&store, location, &versions[random.usize(..versions.len())]).await;
        }
        let mut range = || {
            let start = random.u64(..LENGTH as u64);
            start..random.u64(start + 1..=(start + 6 * PART).min(LENGTH as u64))
        };
        let reads: Vec<_> = (0..4).map(|_| [range(), range(), range()]).collect();
        let reads = reads
            .iter()
            .map(|ranges| async { (ranges.clone(), cached.get_ranges(location, ranges).await) });
        for (ranges, result) in join_all(reads).await {
            let Ok(got) = result else {
                failed += 1;
                continue;
            };
            let is_one_version = versions.iter().any(|version| {
                ranges
                    .iter()
                    .zip(&got)
                    .all(|(range, got)| got == &version[range.start as usize..range.end as usize])
            });
            assert!(is_one_version, "{ranges:?} of {location}");
            right += 1;
        }
    }
    assert!(right > 500 && failed > 500, "{right} right, {failed} failed");
    // Afterwards nothing is left of the faults.
    store.decide(|_| Fate::Answer);
    for location in &locations {
        let expected = store.objects.get(location).await.unwrap().bytes().await.unwrap();
        assert_eq!(cached.get(location).await.unwrap().bytes().await.unwrap(), expected);
    }
}

//! Objects that are written and read through one store at the same time: a read returns the bytes of
//! one version, which was current during it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bifolio::Cache;
use fastrand::Rng;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::door::CachedStore;
use crate::support::{PART, TestStore, builder};

const OBJECTS: usize = 3;
const LENGTH: u64 = 3 * PART + 77;
const WRITES: u64 = 150;
const READERS: usize = 4;
const TURNS: usize = 6;

/// An object, and the numbers of the writes of it that have begun and ended.
struct Written {
    location: Path,
    begun: AtomicU64,
    ended: AtomicU64,
}

/// The word at a position of a version.
fn word(version: u64, index: u64) -> u64 {
    version.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index
}

fn contents(version: u64) -> Vec<u8> {
    // Another length for each version.
    let words = LENGTH / 8 + version % 7;
    (0..words).flat_map(|index| word(version, index).to_le_bytes()).collect()
}

/// Writes versions, one after the other.
async fn write(store: CachedStore, object: Arc<Written>) {
    for version in 2..2 + WRITES {
        object.begun.store(version, Ordering::SeqCst);
        match version % 4 {
            0 => {
                let mut upload = store.put_multipart(&object.location).await.unwrap();
                upload.put_part(contents(version).into()).await.unwrap();
                upload.complete().await.unwrap();
            }
            1 => {
                let other = Path::from(format!("{}-next", object.location));
                store.put(&other, contents(version).into()).await.unwrap();
                store.rename(&other, &object.location).await.unwrap();
            }
            _ => {
                store.put(&object.location, contents(version).into()).await.unwrap();
            }
        }
        object.ended.store(version, Ordering::SeqCst);
        for _ in 0..fastrand::usize(..20) {
            tokio::task::yield_now().await;
        }
    }
}

/// Reads until the writers are done. Returns the number of reads.
async fn read(
    store: CachedStore,
    objects: Arc<Vec<Arc<Written>>>,
    is_over: Arc<AtomicBool>,
) -> u64 {
    let (mut random, mut reads) = (Rng::new(), 0);
    while !is_over.load(Ordering::SeqCst) {
        let object = &objects[random.usize(..OBJECTS)];
        let words = LENGTH / 8;
        let ranges = [(); 2].map(|()| {
            let start = random.u64(..words);
            8 * start..8 * random.u64(start + 1..=words)
        });
        let least = object.ended.load(Ordering::SeqCst);
        let is_whole = random.u8(..4) == 0;
        let result = match is_whole {
            true => match store.get(&object.location).await {
                Ok(result) => result.bytes().await.map(|bytes| vec![(0, bytes)]),
                Err(error) => Err(error),
            },
            false => store
                .get_ranges(&object.location, &ranges)
                .await
                .map(|all| ranges.iter().map(|range| range.start / 8).zip(all).collect()),
        };
        let most = object.begun.load(Ordering::SeqCst);
        reads += 1;
        tokio::task::yield_now().await;
        // An object that changes five times during a read.
        let Ok(all) = result else { continue };
        let mut versions = (least..=most).filter(|version| {
            let is_long = !is_whole || all[0].1.len() == contents(*version).len();
            is_long
                && all.iter().all(|(first, bytes)| {
                    let words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
                    words.zip(*first..).all(|(found, index)| found == word(*version, index))
                })
        });
        assert!(versions.next().is_some(), "no version of {least} to {most}");
    }
    reads
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn reads_return_a_version_that_was_current_during_them() {
    for settings in 0..8 {
        let directory = tempfile::tempdir().unwrap();
        let store = TestStore::new();
        let pages = Cache::builder().memory(2 << 20).build().unwrap();
        let mut building = builder(&store, &pages).insert_on_put(settings & 1 == 0);
        if settings & 2 == 0 {
            building = building.head_age(Duration::from_secs(3600));
        }
        if settings & 4 == 0 {
            building = building.disk(directory.path(), 1 << 20);
        }
        if settings % 3 == 0 {
            pages.class("ends").unwrap();
            building = building.keep("ends", 4 * PART, |_, size| size - PART..size);
        }
        let cached = building.build().unwrap();
        let mut objects = Vec::new();
        for number in 0..OBJECTS {
            let location = Path::from(format!("{number}"));
            cached.put(&location, contents(1).into()).await.unwrap();
            let [begun, ended] = [1, 1].map(AtomicU64::new);
            objects.push(Arc::new(Written { location, begun, ended }));
        }
        store.turns.store(TURNS, Ordering::Relaxed);
        let (objects, is_over) = (Arc::new(objects), Arc::new(AtomicBool::new(false)));
        let readers = [(); READERS].map(|()| {
            tokio::spawn(read(cached.clone(), Arc::clone(&objects), Arc::clone(&is_over)))
        });
        let writers: Vec<_> = objects
            .iter()
            .map(|object| tokio::spawn(write(cached.clone(), Arc::clone(object))))
            .collect();
        for writer in writers {
            writer.await.unwrap();
        }
        is_over.store(true, Ordering::SeqCst);
        let mut reads = 0;
        for reader in readers {
            reads += reader.await.unwrap();
        }
        println!("settings {settings}, {reads} reads: {:?}", cached.metrics());
        assert!(reads > 0);
    }
}

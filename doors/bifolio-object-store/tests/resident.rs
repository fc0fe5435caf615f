//! Memory of a process that reads far more than fits: the bound of the cache, and little besides.
#![allow(missing_docs)]

use std::fmt;
use std::fs;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bifolio::Cache;
use bifolio_object_store::CachedStore;
use bytes::Bytes;
use chrono::DateTime;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

const SIZE: u64 = 256 << 20;
const MEMORY: u64 = 64 << 20;
/// What a client of the store has received, and no one has taken.
const CHUNK: u64 = 8 << 10;

/// The tests measure the process: one at a time.
static PROCESS: Mutex<()> = Mutex::new(());

/// A store with one object, whose bytes tell their position.
#[derive(Debug)]
struct Pattern {
    latency: Duration,
    /// Time in the middle of a body.
    pause: Duration,
}

fn byte_at(position: u64) -> u8 {
    (position / 8191) as u8 ^ position as u8
}

#[async_trait]
impl ObjectStore for Pattern {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let meta = ObjectMeta {
            location: location.clone(),
            last_modified: DateTime::UNIX_EPOCH,
            size: SIZE,
            e_tag: Some("1".into()),
            version: None,
        };
        // So that requests are under way at the same time.
        tokio::time::sleep(self.latency).await;
        let range = options.range.map_or(0..SIZE, |range| range.as_range(SIZE).unwrap());
        let starts = range.clone().step_by(CHUNK as usize);
        let (middle, end, pause) = (range.start.midpoint(range.end), range.end, self.pause);
        let chunks = stream::iter(starts).then(move |start| async move {
            // So that many bodies are half here at the same time.
            if !pause.is_zero() && (start..start + CHUNK).contains(&middle) {
                tokio::time::sleep(pause).await;
            }
            Ok(Bytes::from_iter((start..end.min(start + CHUNK)).map(byte_at)))
        });
        let payload = GetResultPayload::Stream(chunks.boxed());
        Ok(GetResult { payload, meta, range, attributes: Default::default() })
    }

    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        unreachable!("this test only reads")
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        unreachable!("this test only reads")
    }

    fn delete_stream(
        &self,
        _: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        unreachable!("this test only reads")
    }

    fn list(&self, _: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        unreachable!("this test only reads")
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        unreachable!("this test only reads")
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        unreachable!("this test only reads")
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Pattern")
    }
}

fn status_bytes(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn resident_memory_stays_within_the_bound_and_8_mib() {
    let _alone = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    for is_on_disk in [false, true] {
        let cache = Cache::builder().memory(MEMORY).build().unwrap();
        let store = Pattern { latency: Duration::ZERO, pause: Duration::ZERO };
        let mut builder = CachedStore::builder(Arc::new(store), &cache);
        if is_on_disk {
            builder = builder.disk(directory.path(), 2 * SIZE);
        }
        let store = builder.build().unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let before = status_bytes("VmRSS:");
        runtime.block_on(async {
            for round in 0..2 {
                let mut random = fastrand::Rng::with_seed(round);
                for _ in 0..500 {
                    let start = random.u64(..SIZE - (1 << 20));
                    let range = start..start + random.u64(1..1 << 20);
                    let got = store.get_ranges(&Path::from("a"), &[range]).await.unwrap();
                    let is_right =
                        |(index, byte): (usize, &u8)| *byte == byte_at(start + index as u64);
                    assert!(got[0].iter().enumerate().step_by(977).all(is_right));
                }
                store.flush().await.unwrap();
            }
        });
        let grown = status_bytes("VmRSS:").saturating_sub(before);
        let most = MEMORY + MEMORY / 50 + (8 << 20);
        println!("on disk: {is_on_disk}, {:?}, grown by {grown}", store.metrics());
        assert!(grown <= most, "resident memory grew by {grown}, {most} allowed");
    }
}

#[test]
fn answers_of_256_requests_at_a_time_take_bounded_memory() {
    const BOUND: u64 = 16 << 20;
    const FLIGHT: u64 = 4 << 20;
    const READ: u64 = 64 << 10;
    const READS: u64 = 256;
    let _alone = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::builder().memory(BOUND).build().unwrap();
    let slow = Pattern { latency: Duration::from_millis(20), pause: Duration::from_millis(20) };
    let building = CachedStore::builder(Arc::new(slow), &cache).part_bytes(1 << 20);
    let building = building.disk(directory.path(), 2 * SIZE).head_age(Duration::from_secs(3600));
    let store = building.flight_bytes_max(FLIGHT).build().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(store.get_range(&Path::from("a"), 0..1)).unwrap();
    // The largest size from now on.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status_bytes("VmRSS:");
    runtime.block_on(async {
        // The end of each part: its reader needs all of it.
        let reads = (1..=READS).map(|part| {
            let store = store.clone();
            tokio::spawn(async move {
                let end = part << 20;
                let got = store.get_range(&Path::from("a"), end - READ..end).await.unwrap();
                assert!(
                    (end - READ..).zip(&got).step_by(977).all(|(at, byte)| *byte == byte_at(at))
                );
                got
            })
        });
        let reads: Vec<_> = reads.collect();
        for read in reads {
            read.await.unwrap();
        }
        store.flush().await.unwrap();
    });
    let grown = status_bytes("VmHWM:").saturating_sub(before);
    let most = BOUND + BOUND / 50 + FLIGHT + READS * READ + (8 << 20);
    println!("{:?}, grown by {grown}", store.metrics());
    assert!(grown <= most, "resident memory grew by {grown}, {most} allowed");
}

#[test]
fn a_tier_takes_memory_for_the_parts_that_it_has_and_not_for_its_size() {
    let _alone = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::builder().memory(MEMORY).build().unwrap();
    let store = Pattern { latency: Duration::ZERO, pause: Duration::ZERO };
    let before = status_bytes("VmRSS:");
    // Sixteen million parts.
    let building = CachedStore::builder(Arc::new(store), &cache).part_bytes(4096);
    let store = building.disk(directory.path(), 64 << 30).build().unwrap();
    let grown = status_bytes("VmRSS:").saturating_sub(before);
    assert!(grown <= 8 << 20, "resident memory grew by {grown}");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let got = runtime.block_on(store.get_range(&Path::from("a"), 5..9)).unwrap();
    assert!((5..).zip(&got).all(|(at, byte)| *byte == byte_at(at)));
    drop(store);
    // As large as it can be: what the file system refuses is an error.
    let store = Pattern { latency: Duration::ZERO, pause: Duration::ZERO };
    let building = CachedStore::builder(Arc::new(store), &cache);
    drop(building.disk(directory.path().join("other"), u64::MAX).build());
    let grown = status_bytes("VmRSS:").saturating_sub(before);
    assert!(grown <= 24 << 20, "resident memory grew by {grown}");
}

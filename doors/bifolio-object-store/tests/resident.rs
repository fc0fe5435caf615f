//! Memory of a process that reads far more than fits: the bound of the cache, and little besides.
#![allow(missing_docs)]

use std::fmt;
use std::fs;
use std::sync::Arc;

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
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

const SIZE: u64 = 256 << 20;
const MEMORY: u64 = 64 << 20;

/// A store with one object, whose bytes tell their position.
#[derive(Debug)]
struct Pattern;

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
        let range = options.range.map_or(0..SIZE, |range| range.as_range(SIZE).unwrap());
        let starts = range.clone().step_by(64 << 10);
        let end = range.end;
        let chunks = starts.map(move |start| {
            Ok(Bytes::from_iter((start..end.min(start + (64 << 10))).map(byte_at)))
        });
        let payload = GetResultPayload::Stream(stream::iter(chunks).boxed());
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
    let directory = tempfile::tempdir().unwrap();
    for is_on_disk in [false, true] {
        let cache = Cache::builder().memory(MEMORY).build().unwrap();
        let mut builder = CachedStore::builder(Arc::new(Pattern), &cache);
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

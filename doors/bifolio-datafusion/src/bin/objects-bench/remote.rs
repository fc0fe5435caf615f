//! A directory that is as slow as an object store: 20 ms and 100 MiB/s a request. Counts requests.

use std::fmt;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use tokio::time::{Instant, sleep, sleep_until};

pub(crate) const LATENCY: Duration = Duration::from_millis(20);
pub(crate) const BYTES_PER_SECOND: f64 = (100 << 20) as f64;

#[derive(Debug)]
pub(crate) struct Remote {
    files: LocalFileSystem,
    requests: AtomicU64,
    bytes: Arc<AtomicU64>,
}

impl Remote {
    pub(crate) fn open(directory: &FilePath) -> Result<Self> {
        let files = LocalFileSystem::new_with_prefix(directory)?;
        Ok(Self { files, requests: AtomicU64::new(0), bytes: Arc::default() })
    }

    /// Returns the numbers of requests and of bytes sent.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.requests.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}

#[async_trait]
impl ObjectStore for Remote {
    async fn get_opts(
        &self,
        location: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        sleep(LATENCY).await;
        let is_head = options.head;
        let result = self.files.get_opts(location, options).await?;
        let (meta, range) = (result.meta.clone(), result.range.clone());
        let attributes = result.attributes.clone();
        let (counter, started) = (Arc::clone(&self.bytes), Instant::now());
        let mut sent = 0;
        let body = if is_head {
            futures::stream::empty().boxed()
        } else {
            let chunks = result.into_stream().and_then(move |chunk| {
                sent += chunk.len();
                counter.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                let due = started + Duration::from_secs_f64(sent as f64 / BYTES_PER_SECOND);
                async move {
                    // The timer of the runtime has ticks of a millisecond.
                    if due > Instant::now() + Duration::from_millis(1) {
                        sleep_until(due).await;
                    }
                    Ok(chunk)
                }
            });
            chunks.boxed()
        };
        let payload = GetResultPayload::Stream(body);
        Ok(GetResult { payload, meta, range, attributes })
    }

    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.files.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.files.put_multipart_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.files.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let listed = self.files.list(prefix);
        let late = async move {
            sleep(LATENCY).await;
            listed
        };
        futures::stream::once(late).flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        sleep(LATENCY).await;
        self.files.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        self.files.copy_opts(from, to, options).await
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Remote")
    }
}

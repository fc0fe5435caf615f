//! An object store that is cached by foyer: parts of 1 MiB, in memory and on disk.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::path::Path as FilePath;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use async_trait::async_trait;
use bytes::Bytes;
use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder, Source,
};
use futures::StreamExt;
use futures::future::try_join_all;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload,
    PutResult,
};

const PART_BYTES: u64 = 1 << 20;

#[derive(Debug)]
pub(crate) struct FoyerStore {
    store: Arc<dyn ObjectStore>,
    cache: HybridCache<String, Bytes>,
    heads: Mutex<HashMap<Path, ObjectMeta>>,
    /// Parts found in memory, on disk, and in neither.
    lookups: [AtomicU64; 3],
}

impl FoyerStore {
    pub(crate) async fn open(
        store: Arc<dyn ObjectStore>,
        memory_bytes: usize,
        directory: &FilePath,
        disk_bytes: u64,
        is_direct: bool,
    ) -> Result<Self> {
        std::fs::create_dir_all(directory)?;
        let device = FsDeviceBuilder::new(directory).with_capacity(disk_bytes as usize);
        let device = device.with_direct(is_direct).build()?;
        let cache = HybridCacheBuilder::new()
            .memory(memory_bytes)
            .with_weighter(|key: &String, part: &Bytes| key.len() + part.len())
            .storage()
            .with_engine_config(BlockEngineConfig::new(device))
            .build()
            .await?;
        Ok(Self { store, cache, heads: Mutex::default(), lookups: Default::default() })
    }

    /// Returns how many parts were found in memory, on disk, and in neither.
    pub(crate) fn lookups(&self) -> [u64; 3] {
        self.lookups.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Writes what is in memory to the tier, and ends its tasks.
    pub(crate) async fn close(&self) -> Result<()> {
        Ok(self.cache.close().await?)
    }

    async fn meta(&self, location: &Path) -> object_store::Result<ObjectMeta> {
        let known = self.heads.lock().expect("no panic under the lock").get(location).cloned();
        match known {
            Some(meta) => Ok(meta),
            None => {
                let meta = self.store.head(location).await?;
                let mut heads = self.heads.lock().expect("no panic under the lock");
                heads.insert(location.clone(), meta.clone());
                Ok(meta)
            }
        }
    }

    async fn read(&self, meta: &ObjectMeta, range: &Range<u64>) -> object_store::Result<Bytes> {
        let parts = (range.start / PART_BYTES..range.end.div_ceil(PART_BYTES)).map(|part| {
            let (store, location) = (Arc::clone(&self.store), meta.location.clone());
            let bytes = part * PART_BYTES..((part + 1) * PART_BYTES).min(meta.size);
            let start = bytes.start;
            let within = (range.start.max(bytes.start) - start) as usize
                ..(range.end.min(bytes.end) - start) as usize;
            let key = format!("{location}#{part}");
            async move {
                let fetch = || async move { store.get_range(&location, bytes).await };
                let entry = self.cache.get_or_fetch(&key, fetch).await;
                let entry = entry.map_err(|error| object_store::Error::Generic {
                    store: "foyer",
                    source: Box::new(error),
                })?;
                let found = match entry.source() {
                    Source::Memory => 0,
                    Source::Disk => 1,
                    Source::Outer => 2,
                };
                self.lookups[found].fetch_add(1, Ordering::Relaxed);
                Ok::<_, object_store::Error>(entry.value().slice(within))
            }
        });
        let parts = try_join_all(parts).await?;
        match &parts[..] {
            [only] => Ok(only.clone()),
            several => Ok(several.concat().into()),
        }
    }
}

#[async_trait]
impl ObjectStore for FoyerStore {
    async fn get_opts(
        &self,
        location: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        let meta = self.meta(location).await?;
        let range = options.range.unwrap_or(GetRange::Offset(0)).as_range(meta.size);
        let range = range.map_err(|error| object_store::Error::Generic {
            store: "foyer",
            source: Box::new(error),
        })?;
        let bytes = if options.head { Bytes::new() } else { self.read(&meta, &range).await? };
        let payload = futures::stream::once(std::future::ready(Ok(bytes))).boxed();
        let payload = GetResultPayload::Stream(payload);
        Ok(GetResult { payload, meta, range, attributes: Default::default() })
    }

    async fn get_ranges(
        &self,
        location: &Path,
        ranges: &[Range<u64>],
    ) -> object_store::Result<Vec<Bytes>> {
        let meta = self.meta(location).await?;
        try_join_all(ranges.iter().map(|range| self.read(&meta, range))).await
    }

    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.store.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.store.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}

impl fmt::Display for FoyerStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "FoyerStore({})", self.store)
    }
}

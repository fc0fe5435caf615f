//! [`CachedStore`]: the calls of an object store.
//!
//! Reads go through the cache (`read.rs`), unless they have conditions that only the store can
//! answer. Changes go to the store, and what was cached of the object is dropped before and after.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Extensions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions,
    Result, UploadPart,
};

use super::builder::{CachedStoreBuilder, WRITERS_MAX};
use super::error::CacheError;
use super::line;
use super::lists::Lists;
use super::metrics::{Metrics, add};
use super::object::{Began, Object};
use super::object_store;
use super::read::{Shared, resolve_range};
use super::task::in_task;

/// An object store whose objects are cached in memory and on disk. See the [crate](crate).
///
/// Clones are handles of the same store.
#[derive(Clone)]
pub struct CachedStore {
    pub(crate) shared: Arc<Shared>,
    pub(crate) lists: Arc<Lists>,
    _handles: Arc<Handles>,
}

/// What all handles share; dropped with the last of them, before the requests that go on.
struct Handles(Arc<Shared>);

impl Drop for Handles {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

impl CachedStore {
    pub(crate) fn new(shared: Shared, lists: Lists) -> Self {
        let shared = Arc::new(shared);
        let handles = Arc::new(Handles(Arc::clone(&shared)));
        Self { shared, lists: Arc::new(lists), _handles: handles }
    }

    /// Starts to build a cache of the objects of `store`, whose memory is that of `cache`.
    pub fn builder(store: Arc<dyn ObjectStore>, cache: &bifolio::Cache) -> CachedStoreBuilder {
        CachedStoreBuilder::new(store, cache)
    }

    /// Returns the counts since the store was built.
    pub fn metrics(&self) -> Metrics {
        self.shared.counters.snapshot()
    }

    /// Returns how many parts of objects are cached.
    pub fn cached_parts(&self) -> usize {
        self.shared.tier.table().len()
    }

    /// Waits until the parts are in the cache that have been received, or that come for readers that
    /// have their bytes already, and makes the disk tier durable. A tier that is not flushed loses at
    /// most parts, which are fetched again.
    ///
    /// # Errors
    /// The disk refuses to flush, or hangs: it has answered nothing for ten times the
    /// [`disk_timeout`](CachedStoreBuilder::disk_timeout). There is no tokio runtime.
    pub async fn flush(&self) -> Result<()> {
        let (shared, runtime) = (Arc::clone(&self.shared), self.shared.runtime()?);
        let unfinished = shared.tier.table().unfinished();
        let (here, coming): (Vec<_>, Vec<_>) =
            unfinished.into_iter().partition(|part| part.borrow().is_complete());
        // What fails is not waited for longer; what is here may wait for a disk that hangs.
        for mut part in coming.iter().cloned() {
            let _ = part.wait_for(|received| received.is_settled(u64::MAX)).await;
        }
        let flushed = async move {
            for mut part in here.into_iter().chain(coming) {
                // Fails when the part is in its slot.
                while part.changed().await.is_ok() {}
            }
            let permits = shared.inserts_max;
            let inserted = Arc::clone(&shared.inserts).acquire_many_owned(permits).await;
            let written = Arc::clone(&shared.writers).acquire_many_owned(WRITERS_MAX).await;
            let synced = tokio::task::spawn_blocking(move || {
                let _permits = (inserted, written);
                shared.tier.sync()
            });
            synced.await.ok()
        };
        // In a task: it takes all permits.
        let flushed = self.shared.tier.unless_disk_hangs(in_task(&runtime, flushed)).await?;
        let location = String::new();
        Ok(flushed.flatten().unwrap_or(Err(CacheError::Cancelled { location }))?)
    }

    /// Passes a read on to the store.
    async fn pass_on(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let counters = &self.shared.counters;
        add(&counters.passed_on, 1);
        add(if options.head { &counters.head_requests } else { &counters.get_requests }, 1);
        let is_head = options.head;
        let result = self.shared.store.get_opts(location, options).await?;
        if !is_head {
            add(&counters.received_bytes, result.range.end - result.range.start);
        }
        Ok(result)
    }

    /// Returns the metadata of an object: that seen last, if it is young enough.
    async fn get_head(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let now = Instant::now();
        let known =
            self.shared.known.get(location).filter(|object| {
                self.shared.is_current(object, now) && object.attributes.is_some()
            });
        let object = match known {
            Some(object) => object,
            None => self.shared.head(location, &options.extensions).await?,
        };
        let (meta, range) = (object.meta.clone(), 0..object.meta.size);
        let attributes = object.attributes.clone().unwrap_or_default();
        let payload = GetResultPayload::Stream(stream::empty().boxed());
        Ok(line::get_result(payload, meta, range, attributes))
    }

    /// Reads a range through the cache. Returns `None` if the store has to answer itself.
    async fn get_cached(&self, location: &Path, options: &GetOptions) -> Result<Option<GetResult>> {
        let (shared, extensions) = (&self.shared, &options.extensions);
        let window = u64::from(shared.run_parts_max) * shared.tier.layout.part_bytes;
        let matches = |object: &Object| match &options.if_match {
            Some(tag) => object.if_match() == Some(tag),
            None => true,
        };
        let first = |object: &Object| {
            let range = resolve_range(options.range.as_ref(), object)?;
            // A store may name any length.
            let end = (range.start / window + 1).saturating_mul(window);
            let first = range.start..end.min(range.end);
            matches(object).then(|| Vec::from([first]))
        };
        let Some((mut object, mut bytes)) =
            shared.read_current(location, &first, extensions).await?
        else {
            return Ok(None);
        };
        let Some(range) = resolve_range(options.range.as_ref(), &object) else { return Ok(None) };
        if object.attributes.is_none() {
            let seen = shared.head(location, extensions).await?;
            if seen.id != object.id {
                return Ok(None);
            }
            object = seen;
        }
        let first = bytes.swap_remove(0);
        let next = range.start + first.len() as u64;
        let meta = object.meta.clone();
        let attributes = object.attributes.clone().unwrap_or_default();
        let first = stream::once(std::future::ready(Ok(first)));
        let body = if next == range.end {
            first.boxed()
        } else {
            let rest = windows(Arc::clone(shared), object, next..range.end, extensions.clone());
            first.chain(rest).boxed()
        };
        let payload = GetResultPayload::Stream(body);
        Ok(Some(line::get_result(payload, meta, range, attributes)))
    }

    /// Remembers what a list says of an object. Some servers list no ETags, but return them with
    /// objects: the version would seem to change.
    fn learn_listed(&self, meta: &ObjectMeta, began: &Began) {
        let object = Object::new(&self.shared.name, meta.clone(), None, began.at);
        if object.if_match().is_some() || object.meta.version.is_some() {
            self.shared.known.learn(object, began);
        }
    }
}

/// Reads the rest of a long range of one version, two windows at a time.
fn windows(
    shared: Arc<Shared>,
    object: Arc<Object>,
    range: Range<u64>,
    extensions: Extensions,
) -> impl futures::Stream<Item = Result<Bytes>> + Send {
    let window = u64::from(shared.run_parts_max) * shared.tier.layout.part_bytes;
    let starts = (range.start / window..range.end.div_ceil(window))
        .map(move |index| range.start.max(index * window)..range.end.min((index + 1) * window));
    let read = move |range: Range<u64>| {
        let (shared, object) = (Arc::clone(&shared), Arc::clone(&object));
        let extensions = extensions.clone();
        async move {
            // Confirmed when the first window was read; requests have the version as condition.
            let bytes = shared.read_version(&object, &[range], true, &extensions).await;
            let mut bytes = bytes.map_err(|failure| failure.into_error(object.location()))?;
            Ok(bytes.swap_remove(0))
        }
    };
    stream::iter(starts).map(read).buffered(2)
}

#[async_trait]
impl ObjectStore for CachedStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let change = Change::new(&self.shared, location);
        let written = self.shared.inserts_on_put.then(|| payload.clone());
        let result = self.shared.store.put_opts(location, payload, options).await?;
        drop(change);
        if let Some(written) = written {
            self.insert_written(location, written, &result).await;
        }
        Ok(result)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let upload = self.shared.store.put_multipart_opts(location, options).await?;
        let (shared, location) = (Arc::clone(&self.shared), location.clone());
        Ok(Box::new(Upload { upload, shared, location }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let is_conditional = options.version.is_some()
            || options.if_none_match.is_some()
            || options.if_modified_since.is_some()
            || options.if_unmodified_since.is_some();
        if options.head && !is_conditional && options.if_match.is_none() && options.range.is_none()
        {
            return self.get_head(location, options).await;
        }
        if !is_conditional
            && !options.head
            && let Some(result) = self.get_cached(location, &options).await?
        {
            return Ok(result);
        }
        self.pass_on(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        if ranges.is_empty() {
            return Ok(Vec::new());
        }
        let resolve = |object: &Object| {
            let size = object.meta.size;
            let is_valid = ranges.iter().all(|range| is_within(range, size));
            let wanted = ranges.iter().filter(|range| !range.is_empty());
            is_valid.then(|| wanted.map(|range| range.start..range.end.min(size)).collect())
        };
        let extensions = Extensions::default();
        if let Some((_, bytes)) = self.shared.read_current(location, &resolve, &extensions).await? {
            let mut bytes = bytes.into_iter();
            let result = |range: &Range<u64>| match range.is_empty() {
                true => Bytes::new(),
                false => bytes.next().unwrap_or_default(),
            };
            return Ok(ranges.iter().map(result).collect());
        }
        // Not passed on: clients that read neighbouring ranges together panic at an invalid one.
        let size_bytes = self.shared.object(location, &extensions).await?.meta.size;
        if let Some(range) = ranges.iter().find(|range| !is_within(range, size_bytes)) {
            let (location, range) = (location.to_string(), range.clone());
            return Err(CacheError::InvalidRange { location, range, size_bytes }.into());
        }
        add(&self.shared.counters.passed_on, 1);
        add(&self.shared.counters.get_requests, ranges.len() as u64);
        self.shared.store.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let deletions =
            Arc::new(Deletions { shared: Arc::clone(&self.shared), locations: Mutex::default() });
        let begun = Arc::clone(&deletions);
        let locations = locations.inspect_ok(move |location| begun.begin(location)).boxed();
        let deleted = self.shared.store.delete_stream(locations);
        deleted.inspect_ok(move |location| deletions.end(location)).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let key = (prefix.cloned(), false);
        if let Some(list) = self.lists.get(&key, &self.shared.known) {
            return stream::iter(list.objects.clone().into_iter().map(Ok)).boxed();
        }
        add(&self.shared.counters.list_requests, 1);
        let (store, began) = (self.clone(), self.shared.known.begin());
        let seen = Seen { store, began, key, objects: Vec::new(), is_whole: true };
        let listed = self.shared.store.list(prefix);
        stream::try_unfold((listed, seen), |(mut listed, mut seen)| async move {
            match listed.try_next().await? {
                Some(meta) => {
                    seen.add(&meta);
                    Ok(Some((meta, (listed, seen))))
                }
                None => {
                    seen.end();
                    Ok(None)
                }
            }
        })
        .boxed()
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        add(&self.shared.counters.list_requests, 1);
        let (store, began) = (self.clone(), self.shared.known.begin());
        let listed = self.shared.store.list_with_offset(prefix, offset);
        listed.inspect_ok(move |meta| store.learn_listed(meta, &began)).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let key = (prefix.cloned(), true);
        if let Some(list) = self.lists.get(&key, &self.shared.known) {
            return Ok(copied(&list));
        }
        add(&self.shared.counters.list_requests, 1);
        let began = self.shared.known.begin();
        let list = self.shared.store.list_with_delimiter(prefix).await?;
        list.objects.iter().for_each(|meta| self.learn_listed(meta, &began));
        self.lists.put(key, began, copied(&list));
        Ok(list)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let _change = Change::new(&self.shared, to);
        self.shared.store.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        let _changes = (Change::new(&self.shared, from), Change::new(&self.shared, to));
        self.shared.store.rename_opts(from, to, options).await
    }
}

/// Returns `true` if a range starts within an object of `size` bytes, and does not end before.
fn is_within(range: &Range<u64>, size: u64) -> bool {
    range.start <= range.end && range.start < size
}

fn copied(list: &ListResult) -> ListResult {
    let (common_prefixes, objects) = (list.common_prefixes.clone(), list.objects.clone());
    line::list_result(common_prefixes, objects)
}

/// A change of an object: what is cached of it is dropped before and after, even if the caller
/// drops the future of the call.
struct Change<'a> {
    shared: &'a Arc<Shared>,
    location: &'a Path,
}

impl<'a> Change<'a> {
    fn new(shared: &'a Arc<Shared>, location: &'a Path) -> Self {
        shared.change(location);
        Self { shared, location }
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.shared.change(self.location);
    }
}

/// An upload whose end changes an object.
#[derive(Debug)]
struct Upload {
    upload: Box<dyn MultipartUpload>,
    shared: Arc<Shared>,
    location: Path,
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, payload: PutPayload) -> UploadPart {
        self.upload.put_part(payload)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let _change = Change::new(&self.shared, &self.location);
        self.upload.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.upload.abort().await
    }
}

/// The deletions of a stream. Those whose result is unknown count as changes when it is dropped.
struct Deletions {
    shared: Arc<Shared>,
    locations: Mutex<HashSet<Path>>,
}

impl Deletions {
    fn begin(&self, location: &Path) {
        self.shared.change(location);
        let mut locations = self.locations.lock().unwrap_or_else(PoisonError::into_inner);
        locations.insert(location.clone());
    }

    fn end(&self, location: &Path) {
        self.shared.change(location);
        let mut locations = self.locations.lock().unwrap_or_else(PoisonError::into_inner);
        locations.remove(location);
    }
}

impl Drop for Deletions {
    fn drop(&mut self) {
        let locations = self.locations.get_mut().unwrap_or_else(PoisonError::into_inner);
        locations.iter().for_each(|location| self.shared.change(location));
    }
}

/// What was seen of a list.
struct Seen {
    store: CachedStore,
    began: Began,
    key: super::lists::ListKey,
    objects: Vec<ObjectMeta>,
    is_whole: bool,
}

impl Seen {
    fn add(&mut self, meta: &ObjectMeta) {
        self.store.learn_listed(meta, &self.began);
        self.is_whole &= self.store.lists.takes(self.objects.len() + 1);
        if self.is_whole {
            self.objects.push(meta.clone());
        } else {
            self.objects = Vec::new();
        }
    }

    fn end(&mut self) {
        if self.is_whole {
            let objects = std::mem::take(&mut self.objects);
            let list = line::list_result(Vec::new(), objects);
            self.store.lists.put(self.key.clone(), self.began, list);
        }
    }
}

impl fmt::Debug for CachedStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut store = formatter.debug_struct("CachedStore");
        store.field("store", &self.shared.store).field("metrics", &self.metrics()).finish()
    }
}

impl fmt::Display for CachedStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "CachedStore({})", self.shared.store)
    }
}

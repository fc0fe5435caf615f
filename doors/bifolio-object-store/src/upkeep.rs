//! Calls by which a program tells the cache what it knows: what will be read, what was just written,
//! and what is of no use any more.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{Extensions, GetRange, ObjectMeta, ObjectStore, PutPayload, PutResult, Result};

use super::error::{CacheError, Failure};
use super::metrics::add;
use super::object::Object;
use super::object_store;
use super::read::{CHANGES_MAX, Shared, resolve_range};
use super::record::PartKey;
use super::store::CachedStore;
use super::task::in_task;

/// Objects that are warmed at a time.
const WARMED_AT_A_TIME: usize = 4;

/// What [`CachedStore::warm`] or [`CachedStore::warm_ranges`] has found and fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Warmed {
    /// Objects found.
    pub objects: u64,
    /// Bytes fetched from the store, in whole parts; the rest was cached already.
    pub fetched_bytes: u64,
    /// `true` if the cache had room for all of it. Objects that have none are not fetched.
    pub is_whole: bool,
}

impl CachedStore {
    /// Fetches all objects under a prefix that are not cached, up to what the tier has room for, in
    /// the order of the list. Returns when they have come; [`flush`](Self::flush) waits until they
    /// are in the tier.
    ///
    /// An object that disappears meanwhile is left out.
    ///
    /// # Errors
    /// Those of a list and of reads.
    pub async fn warm(&self, prefix: Option<&Path>) -> Result<Warmed> {
        let mut left = self.shared.tier.room();
        let mut warmed = Warmed { is_whole: true, ..Warmed::default() };
        let mut objects: Vec<ObjectMeta> = Vec::new();
        let mut listed = self.list(prefix);
        while let Some(meta) = listed.try_next().await? {
            if !self.shared.take_room(&meta.location, meta.size, &mut left) {
                warmed.is_whole = false;
                break;
            }
            warmed.objects += 1;
            if meta.size > 0 {
                objects.push(meta);
            }
        }
        drop(listed);
        let fetched = stream::iter(objects).map(|meta| async move {
            match self.warm_object(&meta.location, None).await {
                Err(object_store::Error::NotFound { .. }) => Ok(0),
                result => result,
            }
        });
        let fetched = fetched.buffer_unordered(WARMED_AT_A_TIME);
        let fetched_bytes = fetched.try_fold(0, async |sum, bytes| Ok(sum + bytes)).await?;
        Ok(Warmed { fetched_bytes, ..warmed })
    }

    /// Fetches the parts of these ranges of an object that are not cached, such as those of the
    /// footers and indexes of its format. Otherwise like [`warm`](Self::warm).
    ///
    /// # Errors
    /// Those of a read of the ranges.
    pub async fn warm_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Warmed> {
        let fetched_bytes = self.warm_object(location, Some(ranges)).await?;
        Ok(Warmed { objects: 1, fetched_bytes, is_whole: true })
    }

    /// Fetches ranges of an object, or all of it. Returns the number of bytes fetched.
    async fn warm_object(&self, location: &Path, ranges: Option<&[Range<u64>]>) -> Result<u64> {
        let (shared, extensions) = (&self.shared, Extensions::default());
        let since = Instant::now();
        for _ in 0..CHANGES_MAX {
            let mut object = shared.object(location, &extensions).await?;
            if !shared.is_current(&object, since) {
                object = shared.head(location, &extensions).await?;
            }
            if shared.parts_of(&object).is_none() {
                return Ok(0);
            }
            let resolve = |range: &Range<u64>| {
                resolve_range(Some(&GetRange::Bounded(range.clone())), &object)
            };
            let ranges: Vec<Range<u64>> = match ranges {
                Some(ranges) => ranges.iter().filter_map(resolve).collect(),
                None => resolve_range(None, &object).into_iter().collect(),
            };
            let failure = match shared.warm_version(&object, &ranges).await {
                Ok(bytes) => return Ok(bytes),
                Err(failure) => shared.explain(&object, failure, &extensions).await,
            };
            if !matches!(failure, Failure::Changed) {
                return Err(failure.into_error(location));
            }
            shared.known.forget(&object);
        }
        let location = location.to_string();
        Err(CacheError::Changed { location, changes: CHANGES_MAX }.into())
    }

    /// Drops what is cached of all objects under a prefix, in memory and on disk, also of objects
    /// that the store no longer has; `None` drops everything. Returns the number of parts dropped.
    ///
    /// For tables and tenants that are gone. It is not needed for correctness: a changed object is
    /// another version. A read that is under way may put parts back.
    pub fn forget(&self, prefix: Option<&Path>) -> usize {
        let everything = Path::default();
        let prefix = prefix.unwrap_or(&everything);
        let mut ids: HashSet<_> = self.shared.known.change_all(prefix).into_iter().collect();
        let mut table = self.shared.tier.table();
        let cached = table.objects().filter(|(_, location)| location.prefix_matches(prefix));
        ids.extend(cached.map(|(id, _)| id));
        let removed = table.remove_objects(&ids);
        drop(table);
        // Without the lock: the flights may hold the last reference to a request.
        let (slots, _flights) = removed;
        let parts = slots.len();
        self.shared.erase(slots);
        parts
    }

    /// Puts an object that was just written into the cache. Without a strong ETag there is nothing
    /// to identify its version by.
    pub(crate) async fn insert_written(
        &self,
        location: &Path,
        payload: PutPayload,
        result: &PutResult,
    ) {
        let meta = ObjectMeta {
            location: location.clone(),
            last_modified: Default::default(),
            size: payload.content_length() as u64,
            e_tag: result.e_tag.clone(),
            version: result.version.clone(),
        };
        let object = Object::new(&self.shared.name, meta, None, Instant::now());
        if object.if_match().is_none() {
            return;
        }
        // One that the tier has no room for would only push out others.
        let Some(parts) = self.shared.parts_of(&object) else { return };
        if !self.shared.take_room(location, object.meta.size, &mut self.shared.tier.room()) {
            return;
        }
        let Ok(runtime) = self.shared.runtime() else { return };
        let chunks = Chunks { chunks: payload.into_iter().collect(), first: 0, offset: 0 };
        let inserting = Arc::clone(&self.shared).insert_parts(object, parts, chunks);
        in_task(&runtime, inserting).await;
    }
}

impl Shared {
    /// Hands all parts of an object to threads that put them into the cache.
    async fn insert_parts(self: Arc<Self>, object: Object, parts: u32, mut chunks: Chunks) {
        let (layout, kept) = (self.tier.layout, self.kept(&object));
        for number in 0..parts {
            let Some(permit) = self.insert_permit().await else {
                add(&self.counters.not_inserted, u64::from(parts - number));
                return;
            };
            let left = object.meta.size - u64::from(number) * layout.part_bytes;
            let blocks = chunks.take(left.min(layout.part_bytes), layout.block_bytes);
            let place = (PartKey { object: object.id, number }, kept.home(number, &layout));
            let (shared, location) = (Arc::clone(&self), object.location().clone());
            tokio::task::spawn_blocking(move || {
                let inserted = shared.tier.insert(&location, place, &blocks, None);
                shared.end_insert(inserted, blocks, permit);
            });
        }
    }

    /// Fetches ranges of one version, a window at a time.
    async fn warm_version(
        self: &Arc<Self>,
        object: &Arc<Object>,
        ranges: &[Range<u64>],
    ) -> Result<u64, Failure> {
        let window = u64::from(self.run_parts_max) * self.tier.layout.part_bytes;
        let extensions = Extensions::default();
        let mut fetched_bytes = 0;
        for range in ranges {
            let mut start = range.start;
            while start < range.end {
                let end = range.end.min((start / window + 1) * window);
                fetched_bytes += self.warm_range(object, start..end, &extensions).await?;
                start = end;
            }
        }
        Ok(fetched_bytes)
    }
}

/// The bytes of a payload from a position on.
struct Chunks {
    chunks: Vec<Bytes>,
    first: usize,
    offset: usize,
}

impl Chunks {
    /// Returns the next bytes as blocks; those that are in one chunk are not copied.
    fn take(&mut self, length: u64, block_bytes: u64) -> Vec<Bytes> {
        let lengths = (0..length).step_by(block_bytes as usize);
        lengths.map(|start| self.block(block_bytes.min(length - start) as usize)).collect()
    }

    fn block(&mut self, length: usize) -> Bytes {
        let mut block = Vec::new();
        while let Some(chunk) = self.chunks.get(self.first) {
            let rest = chunk.slice(self.offset..);
            let taken = rest.len().min(length - block.len());
            if taken == length {
                self.offset += taken;
                return rest.slice(..taken);
            }
            block.extend_from_slice(&rest[..taken]);
            self.offset += taken;
            if block.len() == length {
                break;
            }
            (self.first, self.offset) = (self.first + 1, 0);
        }
        block.into()
    }
}

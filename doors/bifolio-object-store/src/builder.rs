//! Building a store: settings and their limits.

use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bifolio::Cache;
use object_store::ObjectStore;
use object_store::path::Path;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::error::CacheError;
use super::keep::{self, Keep};
use super::lists::Lists;
use super::metrics::Counters;
use super::object::Known;
use super::object_store;
use super::read::Shared;
use super::record::{HEADER_BYTES, Layout};
use super::store::CachedStore;
use super::tier::Tier;

/// Limits of the length of a part.
const PART_BYTES_MIN: u64 = 4096;
const PART_BYTES_MAX: u64 = 64 << 20;
/// Length of a block, which has a checksum of its own; longer in parts of more than 2 MiB.
const BLOCK_BYTES: u64 = 64 << 10;
/// Blocks in a part: the bits of a [`SlotState`](crate::states::SlotState).
const BLOCKS_MAX: u64 = 32;
/// Bytes of parts on their way into the cache.
const INSERTING_BYTES_MAX: u64 = 4 << 20;
/// Limits of the bytes that requests have in memory, by default a quarter of the cache's bound.
const FLIGHT_BYTES: RangeInclusive<u64> = 4 << 20..=64 << 20;
/// A version of an object is remembered for so much of the cache's bound: about 0.6 % of it.
const KNOWN_PER_BYTES: u64 = 64 << 10;
/// Threads that write parts to the disk; what is left to others is written by the cache.
pub(crate) const WRITERS_MAX: u32 = 2;
/// The part of the cache's memory that parts without a disk tier take by default.
const MEMORY_SHARE: (u64, u64) = (7, 8);

/// Settings of a [`CachedStore`].
#[derive(Clone, Debug)]
pub struct CachedStoreBuilder {
    store: Arc<dyn ObjectStore>,
    cache: Cache,
    name: Option<String>,
    disk: Option<(PathBuf, u64)>,
    keeps: Vec<Keep>,
    memory_bytes: Option<u64>,
    part_bytes: u64,
    request_bytes_max: u64,
    parallel_requests: u32,
    gap_bytes_max: u64,
    head_age: Option<Duration>,
    list_age: Option<Duration>,
    inserts_on_put: bool,
    flight_bytes_max: Option<u64>,
    stall_timeout: Duration,
    disk_timeout: Duration,
    runtime: Option<Handle>,
}

impl CachedStoreBuilder {
    pub(crate) fn new(store: Arc<dyn ObjectStore>, cache: &Cache) -> Self {
        Self {
            store,
            cache: cache.clone(),
            name: None,
            disk: None,
            keeps: Vec::new(),
            memory_bytes: None,
            part_bytes: 1 << 20,
            request_bytes_max: 8 << 20,
            parallel_requests: 4,
            gap_bytes_max: 1 << 20,
            head_age: None,
            list_age: None,
            inserts_on_put: false,
            flight_bytes_max: None,
            stall_timeout: Duration::from_secs(30),
            disk_timeout: Duration::from_secs(2),
            runtime: None,
        }
    }

    /// Keeps up to `bytes` of objects in files in `directory`, which survive the process. It is
    /// created if it does not exist. Each process needs a directory of its own.
    ///
    /// Memory then holds what was used last of the tier, up to the bound of the cache. The table
    /// of parts takes about 300 bytes of memory a part.
    pub fn disk(mut self, directory: impl Into<PathBuf>, bytes: u64) -> Self {
        self.disk = Some((directory.into(), bytes));
        self
    }

    /// Sets how much of the cache's memory parts take without a disk tier, bytes: by default 7/8 of
    /// the bound, which is also the maximum. Use less if the cache has other files.
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory_bytes = Some(bytes);
        self
    }

    /// Keeps bytes of objects, such as footers and indexes: parts with kept bytes have `bytes` of the
    /// tier, which no other part takes, and with a disk tier the kept bytes are in a class of the
    /// page cache, which has been made by [`Cache::class`]. By default all parts are alike.
    ///
    /// `kept` returns which bytes of an object of this name and length are kept; an empty range for
    /// none. It is called without locks, for each read and each part that is inserted, and its result
    /// must depend on its arguments only. Of several calls of this, the first whose `kept` has bytes of
    /// a part counts for it.
    ///
    /// With a disk tier, [`Class::set_floor`](bifolio::Class::set_floor) says how much of the kept
    /// bytes stays in memory, whatever else is read, in blocks of 64 KiB; without one, `bytes` do, in
    /// whole parts. A part with kept bytes takes the slot of another one that was not read lately.
    ///
    /// A disk tier may be opened with other classes than before. A part of which bytes are to be kept
    /// from now on is fetched again when it is read.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::sync::Arc;
    /// # let folder = tempfile::tempdir()?;
    /// # let bucket = Arc::new(object_store::memory::InMemory::new());
    /// use bifolio_object_store::CachedStore;
    ///
    /// let cache = bifolio::Cache::builder().memory(64 << 20).build()?;
    /// cache.class("footers")?.set_floor(16 << 20)?;
    /// let store = CachedStore::builder(bucket, &cache)
    ///     .disk(folder.path(), 10 << 30)
    ///     .keep("footers", 1 << 30, |location, size| match location.extension() {
    ///         Some("parquet") => size.saturating_sub(64 << 10)..size,
    ///         Some("json" | "avro") => 0..size,
    ///         _ => 0..0,
    ///     })
    ///     .build()?;
    /// # drop(store);
    /// # Ok(())
    /// # }
    /// ```
    pub fn keep(
        mut self,
        class: impl Into<String>,
        bytes: u64,
        kept: impl Fn(&Path, u64) -> Range<u64> + Send + Sync + 'static,
    ) -> Self {
        let (class, choose) = (class.into(), Arc::new(kept));
        self.keeps.push(Keep { class, bytes, choose });
        self
    }

    /// Sets the length of a part, in which objects are fetched and kept, bytes: a multiple of 4096
    /// up to 64 MiB, by default 1 MiB. The last part of an object is shorter, and counts as a whole
    /// one; for many small objects use shorter parts.
    pub fn part_bytes(mut self, bytes: u64) -> Self {
        self.part_bytes = bytes;
        self
    }

    /// Sets the longest request, bytes; by default 8 MiB. Longer runs of absent parts are several
    /// requests at the same time.
    pub fn request_bytes_max(mut self, bytes: u64) -> Self {
        self.request_bytes_max = bytes;
        self
    }

    /// Sets into how many requests a run of absent parts is divided, each of at least two parts; by
    /// default 4. They leave at the same time: a connection to most stores has a rate of its own, so
    /// that a read of 8 MiB by four requests takes a quarter of the time after the first byte. With
    /// 1, requests are fewest.
    pub fn parallel_requests(mut self, requests: u32) -> Self {
        self.parallel_requests = requests.max(1);
        self
    }

    /// Sets the longest gap between two absent parts that is requested with them, instead of a
    /// second request, bytes; by default 1 MiB.
    pub fn gap_bytes_max(mut self, bytes: u64) -> Self {
        self.gap_bytes_max = bytes;
        self
    }

    /// Lets reads use the version of an object that was seen within this time, without asking the
    /// store whether there is a newer one. Without it, which is the default, a read of cached parts
    /// costs a request for the metadata.
    ///
    /// Objects that never change, as the files of table formats, can have any age. Changes through
    /// this store are seen at once.
    pub fn head_age(mut self, age: Duration) -> Self {
        self.head_age = Some(age);
        self
    }

    /// Remembers lists for this time. By default none is remembered. Changes through this store
    /// end it.
    pub fn list_age(mut self, age: Duration) -> Self {
        self.list_age = Some(age);
        self
    }

    /// Caches objects when they are written with `put`, so that the first read needs no request for
    /// their bytes. By default, and for multipart uploads, they are cached when they are read.
    ///
    /// The store must return a strong ETag, by which the version is known; otherwise this has no
    /// effect. The `put` returns when its bytes have been handed to the cache.
    pub fn insert_on_put(mut self, insert: bool) -> Self {
        self.inserts_on_put = insert;
        self
    }

    /// Sets how many bytes of answers may be in memory on their way into the cache: by default a
    /// quarter of the cache's bound, from 4 to 64 MiB. Requests leave at once; beyond this, their
    /// answers are received when others are in the cache. At least two parts.
    pub fn flight_bytes_max(mut self, bytes: u64) -> Self {
        self.flight_bytes_max = Some(bytes);
        self
    }

    /// Sets how long the store may send nothing before a request is repeated; by default 30
    /// seconds. After three repetitions the read fails.
    pub fn stall_timeout(mut self, time: Duration) -> Self {
        self.stall_timeout = time;
        self
    }

    /// Sets how long a read waits for the disk tier before it requests the part from the store; by
    /// default 2 seconds. For ten times as long, reads then use only what is in memory, and nothing
    /// is put into the tier.
    ///
    /// A disk that answers nothing for ten times this time hangs: [`build`](Self::build) and
    /// [`flush`](CachedStore::flush) then fail, and dropping the last handle leaves the files to a
    /// thread.
    pub fn disk_timeout(mut self, time: Duration) -> Self {
        self.disk_timeout = time;
        self
    }

    /// Names the store. By default the name is what the store displays, such as its bucket. Objects
    /// of stores with different names are different, even in one disk tier.
    ///
    /// Two stores with one name are one store to a disk tier: an object of the second that has the
    /// path, the ETag and the size of one of the first is read from the parts of the first. So name
    /// stores that display the same, such as one bucket name at two endpoints, or stores in memory.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets the tokio runtime of requests. By default a request belongs to the runtime of the read
    /// that sends it; others that wait for it need that runtime to be driven.
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Builds the store. Blocks while it reads the index of the disk tier.
    ///
    /// # Errors
    /// An invalid setting; a directory that cannot be written, is in use by another store for a second
    /// more, or is on a disk that hangs (see [`disk_timeout`](Self::disk_timeout)).
    pub fn build(self) -> Result<CachedStore, CacheError> {
        let config = |name, problem: String| Err(CacheError::Config { name, problem });
        let part_bytes = self.part_bytes;
        if !part_bytes.is_multiple_of(4096)
            || !(PART_BYTES_MIN..=PART_BYTES_MAX).contains(&part_bytes)
        {
            let problem = format!("{part_bytes} is no multiple of 4096 from 4096 to 64 MiB");
            return config("part_bytes", problem);
        }
        let run_parts = self.request_bytes_max / part_bytes;
        let Some(run_parts_max) = u32::try_from(run_parts).ok().filter(|parts| *parts > 0) else {
            let problem = format!("{} bytes are no whole parts", self.request_bytes_max);
            return config("request_bytes_max", problem);
        };
        let block_bytes = part_bytes.div_ceil(BLOCKS_MAX).next_multiple_of(4096).max(BLOCK_BYTES);
        let mut layout = Layout { part_bytes, block_bytes: block_bytes.min(part_bytes), slots: 0 };
        let counters = Arc::<Counters>::default();
        let regions = |slots, slot_bytes| {
            let regions = keep::regions(&self.keeps, slots, slot_bytes);
            regions.map_err(|problem| CacheError::Config { name: "keep", problem })
        };
        let (timeout, counted) = (self.disk_timeout, Arc::clone(&counters));
        let tier = if let Some((directory, bytes)) = &self.disk {
            let slot_bytes = part_bytes + layout.record_bytes() as u64;
            let slots = bytes.saturating_sub(HEADER_BYTES) / slot_bytes;
            if slots == 0 {
                return config("disk", format!("{bytes} bytes have no room for a part"));
            }
            layout.slots = u32::try_from(slots).unwrap_or(u32::MAX);
            let slots = (layout, regions(layout.slots, slot_bytes)?);
            Tier::on_disk(&self.cache, directory, slots, timeout, counted)?
        } else {
            let bound = self.cache.stats().memory.bound_bytes;
            let most = bound / MEMORY_SHARE.1 * MEMORY_SHARE.0;
            let slots = self.memory_bytes.unwrap_or(most).min(most) / part_bytes;
            if slots == 0 {
                let problem = format!("a cache of {bound} bytes has no room for a part");
                return config("memory", problem);
            }
            layout.slots = u32::try_from(slots).unwrap_or(u32::MAX);
            let slots = (layout, regions(layout.slots, part_bytes)?);
            Tier::in_memory(&self.cache, slots, timeout, counted)?
        };
        let bound_bytes = self.cache.stats().memory.bound_bytes;
        let default_bytes = (bound_bytes / 4).clamp(*FLIGHT_BYTES.start(), *FLIGHT_BYTES.end());
        let flight_bytes = self.flight_bytes_max.unwrap_or(default_bytes);
        // Parts of 64 MiB still take turns.
        let rooms = (flight_bytes / part_bytes).clamp(2, 1 << 16) as usize;
        let inserts_max = (INSERTING_BYTES_MAX / part_bytes).clamp(2, 64) as u32;
        let shared = Shared {
            name: self.name.unwrap_or_else(|| self.store.to_string()),
            store: self.store,
            keeps: self.keeps,
            tier,
            known: Known::new((bound_bytes / KNOWN_PER_BYTES) as usize),
            counters,
            runtime: self.runtime,
            head_age: self.head_age,
            stall_timeout: self.stall_timeout,
            inserts_on_put: self.inserts_on_put,
            run_parts_max,
            parallel_requests: self.parallel_requests,
            gap_parts_max: u32::try_from(self.gap_bytes_max / part_bytes).unwrap_or(u32::MAX),
            inserts: Arc::new(Semaphore::new(inserts_max as usize)),
            rooms: Arc::new(Semaphore::new(rooms)),
            inserts_max,
            writers: Arc::new(Semaphore::new(WRITERS_MAX as usize)),
            is_disk_late: AtomicBool::new(false),
            openings: Mutex::default(),
        };
        Ok(CachedStore::new(shared, Lists::new(self.list_age)))
    }
}

//! A store in memory that counts its requests, and can hold, fail, cut and change their answers.

use std::fmt;
use std::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::door::{CachedStore, CachedStoreBuilder};
use async_trait::async_trait;
use bifolio::Cache;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};
use tokio::sync::Semaphore;

pub const PART: u64 = 8192;

/// What becomes of a request.
#[derive(Clone)]
pub enum Fate {
    Answer,
    /// Waits for a permit of the gate.
    Hold(Arc<Semaphore>),
    /// Fails with the error of a server: its status.
    Refuse(u16),
    /// Never answers.
    Hang,
    /// Answers, and sends nothing after so many bytes.
    HangAfter(usize),
    /// Answers, and sends what comes after so many bytes with a permit of the gate.
    HoldAfter(usize, Arc<Semaphore>),
    /// The connection closes after so many bytes.
    CutAfter(usize),
    /// The body ends after so many bytes, without an error.
    EndAfter(usize),
    /// The body has so many bytes more.
    Longer(usize),
    /// Says that it sent the range shifted by one byte.
    OtherRange,
    /// Says that the object has this length.
    Sized(u64),
}

#[derive(Clone, Debug)]
pub struct Request {
    pub head: bool,
    pub range: Option<GetRange>,
    pub if_match: Option<String>,
}

type Decide = Box<dyn FnMut(&Request) -> Fate + Send>;

pub struct TestStore {
    pub objects: InMemory,
    pub requests: Mutex<Vec<Request>>,
    pub lists: AtomicU64,
    /// Requests whose future was dropped before they were answered.
    pub aborted: Arc<AtomicU64>,
    pub has_tags: bool,
    /// Turns that others may have before and after each read and each write, at random up to this.
    pub turns: AtomicUsize,
    decide: Mutex<Decide>,
}

impl TestStore {
    pub fn new() -> Arc<Self> {
        Arc::new(Self::unshared())
    }

    /// A store without ETags.
    pub fn without_tags() -> Arc<Self> {
        Arc::new(Self { has_tags: false, ..Self::unshared() })
    }

    fn unshared() -> Self {
        Self {
            objects: InMemory::new(),
            requests: Mutex::default(),
            lists: AtomicU64::new(0),
            aborted: Arc::default(),
            has_tags: true,
            turns: AtomicUsize::new(0),
            decide: Mutex::new(Box::new(|_| Fate::Answer)),
        }
    }

    pub fn decide(&self, decide: impl FnMut(&Request) -> Fate + Send + 'static) {
        *self.decide.lock().unwrap() = Box::new(decide);
    }

    /// Holds requests for bytes until a permit is added.
    pub fn hold_gets(&self) -> Arc<Semaphore> {
        self.hold(|request| !request.head)
    }

    /// Holds requests for metadata until a permit is added.
    pub fn hold_heads(&self) -> Arc<Semaphore> {
        self.hold(|request| request.head)
    }

    fn hold(&self, is_held: impl Fn(&Request) -> bool + Send + 'static) -> Arc<Semaphore> {
        let gate = Arc::new(Semaphore::new(0));
        let held = Arc::clone(&gate);
        self.decide(move |request| match is_held(request) {
            true => Fate::Hold(Arc::clone(&held)),
            false => Fate::Answer,
        });
        gate
    }

    pub fn gets(&self) -> usize {
        self.requests.lock().unwrap().iter().filter(|request| !request.head).count()
    }

    pub fn heads(&self) -> usize {
        self.requests.lock().unwrap().iter().filter(|request| request.head).count()
    }

    /// Returns the ranges of all requests for bytes, in order.
    pub fn ranges(&self) -> Vec<Range<u64>> {
        let requests = self.requests.lock().unwrap();
        let ranges = requests.iter().filter_map(|request| match &request.range {
            Some(GetRange::Bounded(range)) => Some(range.clone()),
            _ => None,
        });
        let mut ranges: Vec<_> = ranges.collect();
        ranges.sort_by_key(|range| range.start);
        ranges
    }

    async fn take_turns(&self) {
        for _ in 0..fastrand::usize(..=self.turns.load(Ordering::Relaxed)) {
            tokio::task::yield_now().await;
        }
    }

    pub async fn wait_for_gets(&self, count: usize) {
        while self.gets() < count {
            tokio::task::yield_now().await;
        }
    }
}

struct CountDrop(Arc<AtomicU64>, bool);

impl Drop for CountDrop {
    fn drop(&mut self) {
        if self.1 {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn generic(problem: &str) -> object_store::Error {
    object_store::Error::Generic { store: "test", source: problem.into() }
}

/// Returns the body in chunks of odd lengths.
fn body(bytes: Bytes, end: Option<Result<Bytes>>, hangs: bool) -> GetResultPayload {
    let chunks: Vec<_> = bytes.chunks(3001).map(|chunk| Ok(bytes.slice_ref(chunk))).collect();
    let chunks = stream::iter(chunks).chain(stream::iter(end));
    GetResultPayload::Stream(match hangs {
        true => chunks.chain(stream::pending()).boxed(),
        false => chunks.boxed(),
    })
}

/// Returns a body of two chunks. The second one waits for a permit.
fn held_body(bytes: &Bytes, length: usize, gate: Arc<Semaphore>) -> GetResultPayload {
    let length = length.min(bytes.len());
    let (first, rest) = (bytes.slice(..length), bytes.slice(length..));
    let rest = stream::once(async move {
        gate.acquire().await.unwrap().forget();
        Ok(rest)
    });
    GetResultPayload::Stream(stream::iter([Ok(first)]).chain(rest).boxed())
}

#[async_trait]
impl ObjectStore for TestStore {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let request = Request {
            head: options.head,
            range: options.range.clone(),
            if_match: options.if_match.clone(),
        };
        self.requests.lock().unwrap().push(request.clone());
        let mut guard = CountDrop(Arc::clone(&self.aborted), true);
        let fate = (self.decide.lock().unwrap())(&request);
        match &fate {
            Fate::Hold(gate) => gate.acquire().await.unwrap().forget(),
            Fate::Refuse(404) => {
                guard.1 = false;
                let (path, source) = (location.to_string(), "404".into());
                return Err(object_store::Error::NotFound { path, source });
            }
            Fate::Refuse(403) => {
                guard.1 = false;
                let (path, source) = (location.to_string(), "403".into());
                return Err(object_store::Error::PermissionDenied { path, source });
            }
            Fate::Refuse(status) => {
                guard.1 = false;
                return Err(generic(&format!("server error {status}")));
            }
            Fate::Hang => std::future::pending().await,
            _ => {}
        }
        guard.1 = false;
        let mut options = options;
        if !self.has_tags {
            options.if_match = None;
        }
        self.take_turns().await;
        let mut result = self.objects.get_opts(location, options).await?;
        self.take_turns().await;
        if !self.has_tags {
            result.meta.e_tag = None;
        }
        if let Fate::Sized(size) = fate {
            result.meta.size = size;
        }
        if request.head {
            return Ok(result);
        }
        let range = result.range.clone();
        let none = GetResultPayload::Stream(stream::empty().boxed());
        // A feature of `object_store` adds another kind.
        #[allow(irrefutable_let_patterns)]
        let GetResultPayload::Stream(sent) = mem::replace(&mut result.payload, none) else {
            return Err(generic("not a stream"));
        };
        let bytes = Bytes::from(sent.try_collect::<Vec<_>>().await?.concat());
        let cut = |length: usize| bytes.slice(..length.min(bytes.len()));
        result.payload = match fate {
            Fate::HangAfter(length) => body(cut(length), None, true),
            Fate::CutAfter(length) => {
                body(cut(length), Some(Err(generic("connection closed"))), false)
            }
            Fate::HoldAfter(length, ref gate) => held_body(&bytes, length, Arc::clone(gate)),
            Fate::EndAfter(length) => body(cut(length), None, false),
            Fate::Longer(length) => {
                body(bytes.clone(), Some(Ok(Bytes::from(vec![0xee; length]))), false)
            }
            _ => body(bytes.clone(), None, false),
        };
        if let Fate::OtherRange = fate {
            result.range = range.start + 1..range.end + 1;
        }
        Ok(result)
    }

    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.take_turns().await;
        let mut result = self.objects.put_opts(location, payload, options).await?;
        self.take_turns().await;
        result.e_tag = result.e_tag.filter(|_| self.has_tags);
        Ok(result)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.objects.put_multipart_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.objects.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.lists.fetch_add(1, Ordering::Relaxed);
        self.objects.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.lists.fetch_add(1, Ordering::Relaxed);
        self.objects.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.objects.copy_opts(from, to, options).await
    }
}

impl fmt::Debug for TestStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("TestStore")
    }
}

impl fmt::Display for TestStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("TestStore")
    }
}

/// Returns bytes that differ by position and by `seed`.
pub fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..length).map(|_| random.u8(..)).collect()
}

pub fn cache() -> Cache {
    Cache::builder().memory(8 << 20).build().unwrap()
}

/// Starts a cached store over `store`, with short parts.
pub fn builder(store: &Arc<TestStore>, cache: &Cache) -> CachedStoreBuilder {
    let store: Arc<dyn ObjectStore> = Arc::<TestStore>::clone(store);
    CachedStore::builder(store, cache)
        .part_bytes(PART)
        .request_bytes_max(8 * PART)
        .parallel_requests(1)
        .gap_bytes_max(PART)
}

pub async fn put(store: &TestStore, location: &Path, bytes: &[u8]) {
    store.objects.put(location, bytes.to_vec().into()).await.unwrap();
}

/// Waits until the cache has so many parts.
pub async fn wait_for_parts(store: &CachedStore, parts: usize) {
    store.flush().await.unwrap();
    assert_eq!(store.cached_parts(), parts);
}

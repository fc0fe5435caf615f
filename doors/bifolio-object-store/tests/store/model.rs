//! Random calls of all kinds, to a cached store and to a store without a cache: the answers are the
//! same, whatever the cache remembers, also where others change the objects, and without ETags.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bifolio::Cache;
use fastrand::Rng;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode,
    PutOptions, UpdateVersion,
};

use crate::door::CachedStore;
use crate::support::{PART, TestStore, builder, bytes};

const PATHS: [&str; 6] = ["a", "b", "t/a", "t/b", "t/u/a", "t/u/b"];
const PREFIXES: [&str; 4] = ["t", "t/u", "a", "absent"];
const SEEDS: u64 = 64;
const STEPS: usize = 250;
/// Nothing that is remembered becomes too old.
const AGE: Duration = Duration::from_secs(36_000);

#[derive(Clone, Debug)]
enum Call {
    Put(Path, Vec<u8>, PutOptions),
    /// Of so many parts, completed or not.
    Upload(Path, Vec<Vec<u8>>, bool),
    Delete(Vec<Path>),
    /// `true` if nothing may be at the target.
    Copy(Path, Path, bool),
    Rename(Path, Path, bool),
    Get(Path, GetOptions),
    GetRanges(Path, Vec<Range<u64>>),
    List(Option<Path>, Option<Path>),
    ListWithDelimiter(Option<Path>),
}

impl Call {
    fn is_change(&self) -> bool {
        use Call::{Copy, Delete, Put, Rename, Upload};
        matches!(self, Put(..) | Upload(..) | Delete(..) | Copy(..) | Rename(..))
    }
}

fn described(meta: &ObjectMeta, has_tags: bool) -> String {
    let tag = meta.e_tag.as_ref().filter(|_| has_tags);
    format!("{} {} {tag:?} {:?}", meta.location, meta.size, meta.version)
}

/// Returns the kind of an error.
fn kind(error: &object_store::Error) -> String {
    format!("{error:?}").split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

/// Returns what a store answers to a call, with the tags, if it has them.
async fn answer(store: &dyn ObjectStore, call: &Call, has_tags: bool) -> String {
    let put = |result: object_store::Result<object_store::PutResult>| {
        result.map(|result| format!("{:?} {:?}", result.e_tag.filter(|_| has_tags), result.version))
    };
    let described = |meta: &ObjectMeta| described(meta, has_tags);
    let done = |result: object_store::Result<()>| result.map(|()| String::new());
    let answer = match call {
        Call::Put(to, bytes, options) => {
            put(store.put_opts(to, bytes.clone().into(), options.clone()).await)
        }
        Call::Upload(to, parts, completes) => {
            let mut upload = store.put_multipart(to).await.unwrap();
            for part in parts {
                upload.put_part(part.clone().into()).await.unwrap();
            }
            match completes {
                true => put(upload.complete().await),
                false => done(upload.abort().await),
            }
        }
        Call::Delete(paths) => {
            let paths = stream::iter(paths.clone()).map(Ok).boxed();
            let deleted: Vec<_> = store.delete_stream(paths).collect().await;
            Ok(format!("{} deleted", deleted.iter().filter(|result| result.is_ok()).count()))
        }
        Call::Copy(from, to, false) => done(store.copy(from, to).await),
        Call::Copy(from, to, true) => done(store.copy_if_not_exists(from, to).await),
        Call::Rename(from, to, false) => done(store.rename(from, to).await),
        Call::Rename(from, to, true) => done(store.rename_if_not_exists(from, to).await),
        Call::Get(from, options) => match store.get_opts(from, options.clone()).await {
            Ok(result) => {
                let (meta, range) = (described(&result.meta), result.range.clone());
                let attributes = result.attributes.clone();
                let bytes = match options.head {
                    true => Vec::new(),
                    false => result.bytes().await.unwrap().to_vec(),
                };
                Ok(format!("{meta} {range:?} {attributes:?} {bytes:?}"))
            }
            Err(error) => Err(error),
        },
        Call::GetRanges(from, ranges) => {
            store.get_ranges(from, ranges).await.map(|all| format!("{all:?}"))
        }
        Call::List(prefix, offset) => {
            let listed = match offset {
                Some(offset) => store.list_with_offset(prefix.as_ref(), offset),
                None => store.list(prefix.as_ref()),
            };
            let mut all: Vec<_> =
                listed.map_ok(|meta| described(&meta)).try_collect().await.unwrap();
            all.sort();
            Ok(format!("{all:?}"))
        }
        Call::ListWithDelimiter(prefix) => {
            store.list_with_delimiter(prefix.as_ref()).await.map(|list| {
                let objects: Vec<_> = list.objects.iter().map(described).collect();
                format!("{objects:?} {:?}", list.common_prefixes)
            })
        }
    };
    answer.unwrap_or_else(|error| kind(&error))
}

fn any_path(random: &mut Rng) -> Path {
    Path::from(PATHS[random.usize(..PATHS.len())])
}

fn any_prefix(random: &mut Rng) -> Option<Path> {
    random.bool().then(|| Path::from(PREFIXES[random.usize(..PREFIXES.len())]))
}

fn any_bytes(random: &mut Rng) -> Vec<u8> {
    let lengths = [0, 1, PART - 1, PART, PART + 1, 3 * PART, 3 * PART + 5, random.u64(..5 * PART)];
    bytes(random.u64(..), lengths[random.usize(..lengths.len())] as usize)
}

/// Returns a range that is not empty; one in eight ends before it starts or is far away.
fn any_range(random: &mut Rng) -> Range<u64> {
    let start = random.u64(..4 * PART);
    match random.u8(..16) {
        0 => Range { start: start + 1 + random.u64(..PART), end: start },
        1 => u64::MAX - 1 - start..u64::MAX,
        2 => start..u64::MAX,
        _ => start..start + 1 + random.u64(..3 * PART),
    }
}

async fn any_options(
    random: &mut Rng,
    alone: &InMemory,
    path: &Path,
    has_tags: bool,
) -> GetOptions {
    let range = match random.u8(..6) {
        0 => Some(GetRange::Offset(random.u64(..5 * PART))),
        1 => Some(GetRange::Suffix(random.u64(..5 * PART))),
        2 | 3 => Some(GetRange::Bounded(any_range(random))),
        _ => None,
    };
    let tag = alone.head(path).await.ok().and_then(|meta| meta.e_tag);
    let mut any_tag = |none: u8| match random.u8(..none) {
        0 => Some("wrong".to_owned()),
        1 => Some("*".to_owned()),
        2 => tag.clone(),
        _ => None,
    };
    let (if_match, if_none_match) = (any_tag(8), any_tag(16));
    GetOptions::new()
        .with_range(range)
        .with_if_match(if_match.filter(|_| has_tags))
        .with_if_none_match(if_none_match.filter(|_| has_tags))
        .with_head(random.u8(..6) == 0)
}

async fn any_call(random: &mut Rng, alone: &InMemory, has_tags: bool) -> Call {
    let path = any_path(random);
    match random.u8(..24) {
        0..4 => {
            let tag = alone.head(&path).await.ok().and_then(|meta| meta.e_tag);
            let mode = match random.u8(..4) {
                0 => PutMode::Create,
                1 => PutMode::Update(UpdateVersion {
                    e_tag: tag.filter(|_| random.bool()).or(Some("0".to_owned())),
                    version: None,
                }),
                _ => PutMode::Overwrite,
            };
            let mut attributes = Attributes::new();
            if random.bool() {
                attributes.insert(Attribute::ContentType, "text/plain".into());
            }
            let options = PutOptions { mode, attributes, ..PutOptions::default() };
            Call::Put(path, any_bytes(random), options)
        }
        4 => {
            let parts = (0..random.u8(..4)).map(|_| any_bytes(random)).collect();
            Call::Upload(path, parts, random.u8(..4) > 0)
        }
        5 => Call::Delete((0..random.u8(1..3)).map(|_| any_path(random)).collect()),
        6 => Call::Copy(path, any_path(random), random.bool()),
        7 => Call::Rename(path, any_path(random), random.bool()),
        8..14 => {
            let options = any_options(random, alone, &path, has_tags).await;
            Call::Get(path, options)
        }
        14..20 => {
            let count = random.usize(1..5);
            Call::GetRanges(path, (0..count).map(|_| any_range(random)).collect())
        }
        20 => Call::List(any_prefix(random), Some(any_path(random))),
        21 => Call::ListWithDelimiter(any_prefix(random)),
        _ => Call::List(any_prefix(random), None),
    }
}

/// What the settings of a cached store are by, for one run.
struct Run {
    store: Arc<TestStore>,
    pages: Cache,
    directory: Option<tempfile::TempDir>,
    seed: u64,
}

impl Run {
    fn open(&self) -> CachedStore {
        // Also parts that are no whole blocks, of which the smaller tier has one.
        let part_bytes = [PART, 3 << 12, 17 << 12][self.seed as usize % 3];
        let building = builder(&self.store, &self.pages).part_bytes(part_bytes);
        let mut building = building.request_bytes_max(8 * part_bytes);
        // A tier of nine parts, or of all.
        let parts = if self.seed & 1 == 0 { 9 } else { 100 };
        building = match &self.directory {
            Some(directory) => building.disk(directory.path(), 4096 + parts * (PART + 64)),
            None => building.memory(parts * PART),
        };
        if self.seed & 2 == 0 {
            building = building.head_age(AGE).list_age(AGE);
        }
        if self.seed % 5 < 2 && (parts > 9 || part_bytes < 4 * PART) {
            // Whole objects, and ends of others.
            building = building.keep("a", 3 * part_bytes, |location, size| {
                if location.as_ref() == "a" { 0..size } else { 0..0 }
            });
            building =
                building.keep("ends", 2 * part_bytes, |_, size| size.saturating_sub(99)..size);
        }
        building.insert_on_put(self.seed & 4 == 0).build().unwrap()
    }
}

fn pages() -> Cache {
    let pages = Cache::builder().memory(2 << 20).build().unwrap();
    for class in ["a", "ends"] {
        pages.class(class).unwrap();
    }
    pages
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_calls_are_answered_as_without_a_cache() {
    let mut hits = 0;
    for seed in 0..SEEDS {
        let has_tags = seed & 16 == 0;
        // Nothing is remembered without a question then.
        let others_write = seed & 2 != 0 && seed & 32 == 0;
        let run = Run {
            store: if has_tags { TestStore::new() } else { TestStore::without_tags() },
            pages: pages(),
            directory: (seed & 8 == 0).then(|| tempfile::tempdir().unwrap()),
            seed,
        };
        let (mut random, alone) = (Rng::with_seed(seed), InMemory::new());
        let mut cached = run.open();
        for step in 0..STEPS {
            let call = any_call(&mut random, &alone, has_tags).await;
            let expected = answer(&alone, &call, has_tags).await;
            let got = match others_write && call.is_change() && random.bool() {
                true => answer(&run.store.objects, &call, has_tags).await,
                false => answer(&cached, &call, has_tags).await,
            };
            assert_eq!(got, expected, "seed {seed}, step {step}: {call:?}");
            // Nobody sees what these do.
            match random.u8(..40) {
                0 => cached.flush().await.unwrap(),
                1 => {
                    cached.forget(any_prefix(&mut random).as_ref());
                }
                2 => {
                    cached.warm(any_prefix(&mut random).as_ref()).await.unwrap();
                }
                3 => {
                    run.pages.evict_all().unwrap();
                }
                4 => {
                    cached.flush().await.unwrap();
                    hits += cached.metrics().memory_hits + cached.metrics().disk_hits;
                    drop(cached);
                    cached = run.open();
                }
                _ => {}
            }
        }
        let metrics = cached.metrics();
        assert_eq!((metrics.corrupt, metrics.disk_write_failures), (0, 0), "seed {seed}");
        hits += metrics.memory_hits + metrics.disk_hits;
    }
    assert!(hits > 100, "{hits} hits");
}

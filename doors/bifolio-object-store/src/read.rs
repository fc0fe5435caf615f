//! Reads: which version, which parts, where each part is; and putting the bytes together.
//!
//! A read takes one version of the object and reads all its ranges from parts of that version. It
//! returns them once the store has confirmed the version: by an answer to one of the requests, or to
//! a request for the metadata where all parts are cached. If the version turns out to be old, the
//! read starts again with the new one.
//!
//! The bytes of a range are copied once, from memory or from a request, into the buffer that the
//! caller gets. A read of verified parts in memory is ready when it is polled first.

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::{try_join, try_join_all};
use object_store::path::Path;
use object_store::{Extensions, GetRange, GetResult, ObjectStore, Result};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};

use super::error::{CacheError, Failure};
use super::fetch;
use super::keep::{Keep, Kept};
use super::metrics::{Counters, add};
use super::object::{Began, Known, Object};
use super::object_store;
use super::opening::Openings;
use super::received::Received;
use super::record::PartKey;
use super::table::{Fetch, Place, Snapshot, Table};
use super::tier::{Miss, Tier};

/// Changes of an object during one read after which the read fails.
pub(crate) const CHANGES_MAX: u32 = 5;
/// Times that a part was lost during one read after which the read takes no part from the cache.
const LOST_MAX: u32 = 3;
/// Times that a part was lost during one read after which the read fails.
const LOST_LIMIT: u32 = 12;

/// What all handles of a store share.
pub(crate) struct Shared {
    pub(crate) store: Arc<dyn ObjectStore>,
    /// Which bytes are kept, in the order of the regions of the tier.
    pub(crate) keeps: Vec<Keep>,
    /// Distinguishes the objects of different stores in one disk tier.
    pub(crate) name: String,
    pub(crate) tier: Tier,
    pub(crate) known: Known,
    pub(crate) counters: Arc<Counters>,
    pub(crate) runtime: Option<Handle>,
    pub(crate) head_age: Option<Duration>,
    pub(crate) stall_timeout: Duration,
    /// `true` if objects are cached when they are written.
    pub(crate) inserts_on_put: bool,
    /// Parts in the longest request.
    pub(crate) run_parts_max: u32,
    /// Requests that bring one run of parts at the same time.
    pub(crate) parallel_requests: u32,
    /// Absent parts between two others that are requested with them.
    pub(crate) gap_parts_max: u32,
    /// Permits for threads that insert a part into the cache, or erase parts of changed objects.
    pub(crate) inserts: Arc<Semaphore>,
    /// Permits for parts that are being received, until they are in the cache.
    pub(crate) rooms: Arc<Semaphore>,
    pub(crate) inserts_max: u32,
    /// Permits for threads that write parts to the disk.
    pub(crate) writers: Arc<Semaphore>,
    pub(crate) is_disk_late: AtomicBool,
    pub(crate) openings: Mutex<Openings>,
}

/// The ranges of a read that are valid for a version, or `None` if one is not.
pub(crate) type Resolve<'a> = &'a (dyn Fn(&Object) -> Option<Vec<Range<u64>>> + Sync);

/// The parts of a read, and the requests that bring them.
struct Plan {
    sources: HashMap<u32, Source>,
    /// Kept until the end of the read: a request without readers is aborted.
    fetches: Vec<Arc<Fetch>>,
    /// `true` if a request on its way will confirm the version.
    is_confirmed: bool,
}

#[derive(Clone)]
enum Source {
    Slot(Snapshot),
    Flight(watch::Receiver<Received>),
}

/// A part of a range that is read, and where its bytes go.
struct Piece<'a> {
    key: PartKey,
    source: Option<Source>,
    /// The bytes of the part.
    within: Range<u64>,
    target: &'a mut [u8],
}

/// Why a plan failed.
enum Trouble {
    /// A part left the cache, or its request was aborted.
    Lost,
    Failure(Failure),
}

impl Shared {
    /// Remembers the version in an answer of the store, and returns it.
    pub(crate) fn learn(&self, location: &Path, result: &GetResult, began: &Began) -> Arc<Object> {
        let mut meta = result.meta.clone();
        meta.location.clone_from(location);
        let attributes = Some(result.attributes.clone());
        self.known.learn(Object::new(&self.name, meta, attributes, began.at), began)
    }

    /// Returns the runtime of requests.
    pub(crate) fn runtime(&self) -> Result<Handle> {
        match &self.runtime {
            Some(runtime) => Ok(runtime.clone()),
            None => Ok(Handle::try_current().map_err(|_| CacheError::NoRuntime)?),
        }
    }

    /// Reads ranges of the current version of an object. Returns `None` if `resolve` does, or if
    /// the object has too many parts.
    pub(crate) async fn read_current(
        self: &Arc<Self>,
        location: &Path,
        resolve: Resolve<'_>,
        extensions: &Extensions,
    ) -> Result<Option<(Arc<Object>, Vec<Bytes>)>> {
        let since = Instant::now();
        for _ in 0..CHANGES_MAX {
            let object = self.object(location, extensions).await?;
            let is_current = self.is_current(&object, since);
            let ranges = resolve(&object).filter(|_| self.parts_of(&object).is_some());
            let Some(ranges) = ranges else {
                if is_current {
                    return Ok(None);
                }
                // The version may be old.
                let seen = self.head(location, extensions).await?;
                if seen.id == object.id {
                    return Ok(None);
                }
                continue;
            };
            let failure = match self.read_version(&object, &ranges, is_current, extensions).await {
                Ok(bytes) => {
                    let seen = self.known.get(location).filter(|seen| seen.id == object.id);
                    return Ok(Some((seen.unwrap_or(object), bytes)));
                }
                Err(failure) => self.explain(&object, failure, extensions).await,
            };
            if !matches!(failure, Failure::Changed) {
                return Err(failure.into_error(location));
            }
            add(&self.counters.changed, 1);
            self.known.forget(&object);
        }
        let location = location.to_string();
        Err(CacheError::Changed { location, changes: CHANGES_MAX }.into())
    }

    /// Returns why a read of a version failed. A store that knows no conditions refuses a range that
    /// the object no longer has, and does not say that the object has changed.
    pub(crate) async fn explain(
        &self,
        object: &Object,
        failure: Failure,
        extensions: &Extensions,
    ) -> Failure {
        let Failure::Store(error) = &failure else { return failure };
        match &**error {
            object_store::Error::NotFound { .. } => self.known.forget(object),
            object_store::Error::Generic { .. } => {
                let seen = self.head(object.location(), extensions).await;
                if seen.is_ok_and(|seen| seen.id != object.id) {
                    return Failure::Changed;
                }
            }
            _ => {}
        }
        failure
    }

    /// Reads ranges of one version, and confirms it unless it is current.
    pub(crate) async fn read_version(
        self: &Arc<Self>,
        object: &Arc<Object>,
        ranges: &[Range<u64>],
        is_current: bool,
        extensions: &Extensions,
    ) -> Result<Vec<Bytes>, Failure> {
        let location = object.location();
        let buffers = ranges.iter().map(|range| zeros(location, range.end - range.start));
        let mut buffers = buffers.collect::<Result<Vec<Vec<u8>>, Failure>>()?;
        for lost in 0..LOST_LIMIT {
            let runtime = self.runtime().map_err(|error| Failure::Store(Arc::new(error)))?;
            let plan = self.plan(object, ranges, lost < LOST_MAX, extensions, &runtime);
            let Plan { sources, fetches, is_confirmed } = plan;
            let confirmation = async {
                if is_current || is_confirmed {
                    return Ok(());
                }
                let seen = self.head(location, extensions).await;
                let seen = seen.map_err(|error| Trouble::Failure(Failure::of_request(error)))?;
                if seen.id == object.id {
                    return Ok(());
                }
                Err(Trouble::Failure(Failure::Changed))
            };
            let mut pieces = Vec::new();
            for (range, buffer) in ranges.iter().zip(&mut buffers) {
                self.add_pieces(object, &sources, range, buffer, &mut pieces);
            }
            // Each piece has its own source, which ends with it: blocks stay no longer.
            drop(sources);
            let gathered = self.gather(object, pieces, extensions, &runtime);
            let result = try_join(confirmation, gathered).await;
            match result {
                Ok(((), ())) => {
                    self.keep(fetches);
                    let bytes = buffers.iter().map(|buffer| buffer.len() as u64).sum();
                    add(&self.counters.returned_bytes, bytes);
                    return Ok(buffers.into_iter().map(Bytes::from).collect());
                }
                Err(Trouble::Failure(failure)) => return Err(failure),
                Err(Trouble::Lost) => {}
            }
        }
        let location = location.to_string();
        Err(Failure::Store(Arc::new(CacheError::Cancelled { location }.into())))
    }

    /// Lets requests go on whose reader has its bytes: the rest of their parts gets into the cache.
    pub(crate) fn keep(&self, fetches: Vec<Arc<Fetch>>) {
        if fetches.is_empty() {
            return;
        }
        let mut table = self.tier.table();
        let ended: Vec<_> = fetches.into_iter().map(|fetch| table.keep(fetch)).collect();
        // Without the lock: may drop the last reference to a request.
        drop(table);
        drop(ended);
    }

    /// Ends the requests that no read waits for.
    pub(crate) fn abandon(&self) {
        let kept = self.tier.table().take_kept();
        // Without the lock: these are their last references.
        drop(kept);
    }

    /// Returns the number of parts of a version, if they can be numbered.
    pub(crate) fn parts_of(&self, object: &Object) -> Option<u32> {
        u32::try_from(object.meta.size.div_ceil(self.tier.layout.part_bytes)).ok()
    }

    /// Returns what is kept of an object. Calls the program's choice.
    pub(crate) fn kept(&self, object: &Object) -> Kept {
        Kept::of(&self.keeps, object.location(), object.meta.size)
    }

    /// Takes room for all parts of an object from what is `left` in each region of the tier, parts.
    /// Returns `false`, and takes none, if one has too little.
    pub(crate) fn take_room(&self, location: &Path, bytes: u64, left: &mut [u64]) -> bool {
        let layout = &self.tier.layout;
        let parts = u32::try_from(bytes.div_ceil(layout.part_bytes)).unwrap_or(u32::MAX);
        let mut rest = left.to_vec();
        if u64::from(parts) > rest.iter().sum() {
            return false;
        }
        let kept = Kept::of(&self.keeps, location, bytes);
        for number in 0..parts {
            let room = &mut rest[kept.home(number, layout).region];
            let Some(after) = room.checked_sub(1) else { return false };
            *room = after;
        }
        left.copy_from_slice(&rest);
        true
    }

    /// Finds the parts of the ranges, and sends requests for those that are absent.
    fn plan(
        self: &Arc<Self>,
        object: &Arc<Object>,
        ranges: &[Range<u64>],
        may_use_slots: bool,
        extensions: &Extensions,
        runtime: &Handle,
    ) -> Plan {
        let part_bytes = self.tier.layout.part_bytes;
        let parts_of = |range: &Range<u64>| {
            (range.start / part_bytes) as u32..range.end.div_ceil(part_bytes) as u32
        };
        let mut numbers: Vec<u32> = ranges.iter().flat_map(parts_of).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut plan = Plan { sources: HashMap::new(), fetches: Vec::new(), is_confirmed: false };
        let mut absent = Vec::new();
        // Without the lock: the choice is the program's.
        let kept = self.kept(object);
        let mut table = self.tier.table();
        for number in numbers {
            let key = PartKey { object: object.id, number };
            let place = match may_use_slots {
                true => table.find(&key, &kept.home(number, &self.tier.layout)),
                false => table.find_flight(&key),
            };
            match place {
                Place::Slot(snapshot) => {
                    plan.sources.insert(number, Source::Slot(snapshot));
                }
                Place::Flight(result, fetch) => {
                    add(&self.counters.shared, 1);
                    plan.is_confirmed |= fetch.is_some();
                    plan.fetches.extend(fetch);
                    plan.sources.insert(number, Source::Flight(result));
                }
                Place::Absent => {
                    add(&self.counters.misses, 1);
                    absent.push(number);
                }
            }
        }
        let mut prepared = Vec::new();
        for parts in self.runs(&table, object, &absent) {
            plan.is_confirmed = true;
            let numbers = parts.clone();
            let (fetch, results, run) =
                fetch::prepare(self, &mut table, object, parts, extensions, runtime);
            plan.fetches.push(fetch);
            plan.sources.extend(numbers.zip(results.into_iter().map(Source::Flight)));
            prepared.push(run);
        }
        drop(table);
        // Without the lock: a runtime that has shut down drops a task on this thread.
        prepared.into_iter().for_each(fetch::Run::start);
        plan
    }

    /// Returns the runs of parts to request: adjacent ones, and small gaps of absent ones between. A
    /// connection sends at a rate of its own, so a run is divided into several requests.
    fn runs(&self, table: &Table, object: &Object, absent: &[u32]) -> Vec<Range<u32>> {
        let mut runs: Vec<Range<u32>> = Vec::new();
        for &number in absent {
            if let Some(run) = runs.last_mut() {
                let mut gap = run.end..number;
                let is_joined = gap.len() as u32 <= self.gap_parts_max
                    && number - run.start < self.run_parts_max
                    && gap.all(|number| {
                        let key = PartKey { object: object.id, number };
                        table.is_absent(&key)
                    });
                if is_joined {
                    run.end = number + 1;
                    continue;
                }
            }
            runs.push(number..number + 1);
        }
        let pieces = runs.into_iter().flat_map(|run| divided(run, self.parallel_requests));
        // Without gaps at their ends.
        let trimmed = pieces.filter_map(|piece| {
            let [start, end] =
                [piece.start, piece.end].map(|end| absent.partition_point(|number| *number < end));
            let wanted = &absent[start..end];
            Some(*wanted.first()?..*wanted.last()? + 1)
        });
        trimmed.collect()
    }

    /// Divides a range into the pieces of its parts.
    fn add_pieces<'a>(
        &self,
        object: &Object,
        sources: &HashMap<u32, Source>,
        range: &Range<u64>,
        buffer: &'a mut [u8],
        pieces: &mut Vec<Piece<'a>>,
    ) {
        let part_bytes = self.tier.layout.part_bytes;
        let mut rest = buffer;
        for number in range.start / part_bytes..range.end.div_ceil(part_bytes) {
            let part = number * part_bytes;
            let within = range.start.max(part) - part..range.end.min(part + part_bytes) - part;
            let length = (within.end - within.start) as usize;
            let (target, left) = mem::take(&mut rest).split_at_mut(length);
            rest = left;
            let key = PartKey { object: object.id, number: number as u32 };
            let source = sources.get(&key.number).cloned();
            pieces.push(Piece { key, source, within, target });
        }
    }

    /// Reads all pieces, at the same time.
    async fn gather(
        self: &Arc<Self>,
        object: &Arc<Object>,
        mut pieces: Vec<Piece<'_>>,
        extensions: &Extensions,
        runtime: &Handle,
    ) -> Result<(), Trouble> {
        if pieces.len() == 1
            && let Some(piece) = pieces.pop()
        {
            return self.read_piece(object, piece, extensions, runtime).await;
        }
        let read = |piece| self.read_piece(object, piece, extensions, runtime);
        try_join_all(pieces.into_iter().map(read)).await.map(|_| ())
    }

    async fn read_piece(
        self: &Arc<Self>,
        object: &Arc<Object>,
        piece: Piece<'_>,
        extensions: &Extensions,
        runtime: &Handle,
    ) -> Result<(), Trouble> {
        let Piece { key, source, within, target } = piece;
        match source {
            Some(Source::Slot(snapshot)) => {
                let read = self.tier.read(&key, &snapshot, within.clone(), target, runtime);
                match read.await {
                    Ok(()) => Ok(()),
                    Err(Miss::Lost) => Err(Trouble::Lost),
                    Err(Miss::Late) => {
                        self.read_past_disk(object, key.number, within, target, extensions, runtime)
                            .await
                    }
                }
            }
            Some(Source::Flight(result)) => self.wait(result, within, target).await,
            None => Err(Trouble::Lost),
        }
    }

    /// Requests a part that the disk did not return in time, and copies `range` of it.
    async fn read_past_disk(
        self: &Arc<Self>,
        object: &Arc<Object>,
        number: u32,
        range: Range<u64>,
        target: &mut [u8],
        extensions: &Extensions,
        runtime: &Handle,
    ) -> Result<(), Trouble> {
        let start = u64::from(number) * self.tier.layout.part_bytes;
        let bytes = start + range.start..start + range.end;
        // Kept until the part is here: a request without readers is aborted.
        let Plan { mut sources, fetches, .. } =
            self.plan(object, &[bytes], false, extensions, runtime);
        match sources.remove(&number) {
            Some(Source::Flight(result)) => self.wait(result, range, target).await?,
            _ => return Err(Trouble::Lost),
        }
        self.keep(fetches);
        Ok(())
    }

    /// Waits for `range` of a part, and copies it.
    async fn wait(
        &self,
        mut result: watch::Receiver<Received>,
        range: Range<u64>,
        target: &mut [u8],
    ) -> Result<(), Trouble> {
        let started = Instant::now();
        let pieces = match result.wait_for(|received| received.is_settled(range.end)).await {
            Ok(received) => match received.pieces(&range) {
                Some(pieces) => Ok(pieces),
                None => Err(received.failure().cloned().map_or(Trouble::Lost, Trouble::Failure)),
            },
            Err(_) => Err(Trouble::Lost),
        };
        add(&self.counters.store_wait_us, started.elapsed().as_micros() as u64);
        let mut rest = target;
        for piece in pieces? {
            let (target, left) = mem::take(&mut rest).split_at_mut(piece.len());
            target.copy_from_slice(&piece);
            rest = left;
        }
        Ok(())
    }

    /// Waits until all of a range is in the cache, or its request has failed, and returns nothing of
    /// it. Requests what is absent.
    pub(crate) async fn warm_range(
        self: &Arc<Self>,
        object: &Arc<Object>,
        range: Range<u64>,
        extensions: &Extensions,
    ) -> Result<u64, Failure> {
        let runtime = self.runtime().map_err(|error| Failure::Store(Arc::new(error)))?;
        let Plan { sources, fetches, .. } = self.plan(object, &[range], true, extensions, &runtime);
        let mut fetched_bytes = 0;
        // What is complete already is on its way into its slot.
        let coming = sources.into_values().filter_map(|source| match source {
            Source::Flight(result) if !result.borrow().is_complete() => Some(result),
            _ => None,
        });
        for mut result in coming.collect::<Vec<_>>() {
            let received = result.wait_for(|received| received.is_settled(u64::MAX)).await;
            let received = received.map_err(|_| {
                let location = object.location().to_string();
                Failure::Store(Arc::new(CacheError::Cancelled { location }.into()))
            })?;
            match received.failure() {
                Some(failure) => return Err(failure.clone()),
                None => fetched_bytes += received.len(),
            }
        }
        drop(fetches);
        Ok(fetched_bytes)
    }

    /// Forgets an object that changes through this store.
    pub(crate) fn change(self: &Arc<Self>, location: &Path) {
        let Some(object) = self.known.change(location) else { return };
        let Some(parts) = self.parts_of(&object) else { return };
        let removed = self.tier.table().remove_object(object.id, 0..parts);
        // Without the lock: the flights may hold the last reference to a request.
        let (slots, _flights) = removed;
        self.erase(slots);
    }

    /// Erases slots that were removed from the table, in a thread, and frees them.
    pub(crate) fn erase(self: &Arc<Self>, slots: Vec<u32>) {
        if slots.is_empty() {
            return;
        }
        // Freed even if the runtime shuts down before they are erased.
        let slots = scopeguard::guard((Arc::clone(self), slots), |(shared, slots)| {
            let mut table = shared.tier.table();
            slots.into_iter().for_each(|slot| table.free_slot(slot));
        });
        let Ok(runtime) = self.runtime() else { return self.tier.erase(&slots.1) };
        // A disk that hangs keeps no more threads than there are permits. If there is one now, a
        // flush waits for this.
        let permit = Arc::clone(&self.inserts).try_acquire_owned();
        runtime.spawn(async move {
            let permit = match permit {
                Ok(permit) => Ok(permit),
                Err(_) => Arc::clone(&slots.0.inserts).acquire_owned().await,
            };
            tokio::task::spawn_blocking(move || {
                slots.0.tier.erase(&slots.1);
                drop((slots, permit));
            });
        });
    }
}

/// Returns a buffer for a range. A store that names a wrong length does not end the process.
fn zeros(location: &Path, length_bytes: u64) -> Result<Vec<u8>, Failure> {
    // Shorter ones are there, or the whole process has no memory.
    const TRIED_BYTES: u64 = 64 << 20;
    let length = usize::try_from(length_bytes).unwrap_or(usize::MAX);
    if length_bytes > TRIED_BYTES && Vec::<u8>::new().try_reserve_exact(length).is_err() {
        let location = location.to_string();
        let error = CacheError::NoMemory { location, length_bytes };
        return Err(Failure::Store(Arc::new(error.into())));
    }
    // Zeroed by the kernel, if it is long.
    Ok(vec![0; length])
}

/// Divides a run of parts into at most `most` runs of about the same length, each of two parts at
/// least if the run has them: a shorter request gains less time than it costs.
fn divided(run: Range<u32>, most: u32) -> impl Iterator<Item = Range<u32>> {
    let parts = run.len() as u32;
    let length = parts.div_ceil(most.min(parts / 2).max(1)).max(1);
    let end = run.end;
    run.step_by(length as usize).map(move |start| start..end.min(start.saturating_add(length)))
}

/// Returns the part of a version that a range means, or `None` if it is empty or invalid.
pub(crate) fn resolve_range(range: Option<&GetRange>, object: &Object) -> Option<Range<u64>> {
    let size = object.meta.size;
    let range = match range {
        Some(range) => range.as_range(size).ok()?,
        None => 0..size,
    };
    (!range.is_empty()).then_some(range)
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shared = formatter.debug_struct("Shared");
        shared.field("store", &self.store).field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::divided;

    #[test]
    fn a_run_is_divided_evenly_and_completely() {
        let of = |run, most| divided(run, most).map(|it| (it.start, it.end)).collect::<Vec<_>>();
        assert_eq!(of(3..4, 4), [(3, 4)]);
        assert_eq!(of(3..6, 4), [(3, 6)]);
        assert_eq!(of(0..8, 4), [(0, 2), (2, 4), (4, 6), (6, 8)]);
        assert_eq!(of(0..9, 4), [(0, 3), (3, 6), (6, 9)]);
        assert_eq!(of(7..u32::MAX, 1), [(7, u32::MAX)]);
        let end = u32::MAX;
        assert_eq!(of(end - 5..end, 2), [(end - 5, end - 2), (end - 2, end)]);
    }
}

//! Requests for runs of parts: one task each, which hands each block to its readers, and puts each
//! complete part into the cache.
//!
//! ```text
//! reader: Shared::plan --> prepare, start --> task: receive --> block complete --> readers (watch)
//!           | joins a request                                   part complete --> Tier::insert (a thread)
//!           '--> Flight in the table, until the part is in its slot
//! ```
//!
//! A reader holds a reference to each request that it waits for. The last one that drops aborts the
//! task; parts that are complete by then are still inserted. A reader that has its bytes leaves its
//! reference in the table, so that the rest of its parts gets into the cache. A block is handed on
//! once its last byte has come, the last block of a request once the body has ended where it should.
//!
//! Requests leave at once. A part of an answer is received when it has room (`Shared::rooms`), which
//! it holds until it is in the cache: the memory of requests is bounded, whatever their number.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::StreamExt;
use object_store::{Extensions, GetOptions, GetResult};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::timeout;

use super::error::{CacheError, Failure};
use super::metrics::add;
use super::object::Object;
use super::object_store;
use super::read::Shared;
use super::received::Received;
use super::record::PartKey;
use super::table::{Fetch, Flight, Table};

/// Requests that follow one that was cut or late and brought no part.
pub(crate) const RETRIES_MAX: u32 = 3;
/// Pause before the first of them; it doubles each time.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// How long a request waits for the disk to take parts, before parts pass by the cache.
const INSERT_WAIT_MAX: Duration = Duration::from_secs(1);

/// A part that is expected. Its flight ends when it is dropped.
struct Expected {
    shared: Arc<Shared>,
    key: PartKey,
    flight: u64,
    length_bytes: u64,
    sender: watch::Sender<Received>,
}

impl Expected {
    fn received_bytes(&self) -> u64 {
        self.sender.borrow().len()
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        let ended = self.shared.tier.table().end_flight(&self.key, self.flight);
        // Without the lock: may drop the last reference to the request.
        drop(ended);
    }
}

/// The request of a run of parts.
pub(crate) struct Run {
    shared: Arc<Shared>,
    object: Arc<Object>,
    expected: VecDeque<Expected>,
    /// Room for the part that is being received.
    room: Option<OwnedSemaphorePermit>,
    extensions: Extensions,
    runtime: Handle,
    fetch: Weak<Fetch>,
}

/// Adds a request for adjacent parts to the table. Returns it, to be [started](Run::start) without
/// the lock of the table, and the results of the parts, in their order.
pub(crate) fn prepare(
    shared: &Arc<Shared>,
    table: &mut Table,
    object: &Arc<Object>,
    parts: Range<u32>,
    extensions: &Extensions,
    runtime: &Handle,
) -> (Arc<Fetch>, Vec<watch::Receiver<Received>>, Run) {
    let flight = table.number_flight();
    let last = PartKey { object: object.id, number: parts.end.saturating_sub(1) };
    let fetch = Arc::new(Fetch { task: OnceLock::new(), last, flight });
    let mut expected = VecDeque::with_capacity(parts.len());
    let mut results = Vec::with_capacity(parts.len());
    for number in parts {
        let key = PartKey { object: object.id, number };
        let (sender, result) = watch::channel(Received::default());
        let own = result.clone();
        let weak = Arc::downgrade(&fetch);
        table.add_flight(key, Flight { number: flight, result, fetch: weak, kept: None });
        let part_bytes = shared.tier.layout.part_bytes;
        let length_bytes = part_bytes.min(object.meta.size - u64::from(number) * part_bytes);
        let shared = Arc::clone(shared);
        expected.push_back(Expected { shared, key, flight, length_bytes, sender });
        results.push(own);
    }
    let run = Run {
        shared: Arc::clone(shared),
        object: Arc::clone(object),
        expected,
        room: None,
        extensions: extensions.clone(),
        runtime: runtime.clone(),
        fetch: Arc::downgrade(&fetch),
    };
    (fetch, results, run)
}

impl Run {
    /// Sends the request, in a task of its own.
    pub(crate) fn start(self) {
        let (runtime, fetch) = (self.runtime.clone(), self.fetch.clone());
        let task = runtime.spawn(self.run()).abort_handle();
        // The caller holds a reference.
        if let Some(fetch) = fetch.upgrade() {
            let _ = fetch.task.set(task);
        }
    }

    async fn run(mut self) {
        let mut tries = 0;
        while !self.expected.is_empty() {
            let before = self.expected.len();
            let Err(failure) = self.receive().await else { return };
            if self.expected.len() < before {
                tries = 0;
            }
            // Others may go on meanwhile.
            self.room = None;
            if matches!(failure, Failure::Transient(_)) && tries < RETRIES_MAX {
                add(&self.shared.counters.retries, 1);
                tokio::time::sleep(RETRY_PAUSE * (1 << tries)).await;
                tries += 1;
                continue;
            }
            for part in self.expected.drain(..) {
                part.sender.send_modify(|received| received.finish(Err(failure.clone())));
            }
        }
    }

    /// Sends one request for all blocks that are still expected.
    async fn receive(&mut self) -> Result<(), Failure> {
        let (Some(first), Some(last)) = (self.expected.front(), self.expected.back()) else {
            return Ok(());
        };
        let part_bytes = self.shared.tier.layout.part_bytes;
        let start = u64::from(first.key.number) * part_bytes + first.received_bytes();
        let end = u64::from(last.key.number) * part_bytes + last.length_bytes;
        let result = self.request(start..end).await?;
        let mut body = result.into_stream();
        let object = Arc::clone(&self.object);
        let wrong_length = |got_bytes| CacheError::WrongLength {
            location: object.location().to_string(),
            range: start..end,
            expected_bytes: end - start,
            got_bytes,
        };
        let mut received = 0;
        let (mut block, mut block_length) = (Vec::new(), 0);
        loop {
            let next = timeout(self.shared.stall_timeout, body.next()).await;
            let chunk = match next {
                Err(_) => return Err(self.stalled(start..end)),
                Ok(None) if received == end - start => break,
                Ok(None) => return Err(Failure::transient(wrong_length(received))),
                Ok(Some(Err(error))) => return Err(Failure::Transient(Arc::new(error))),
                Ok(Some(Ok(chunk))) => chunk,
            };
            received += chunk.len() as u64;
            add(&self.shared.counters.received_bytes, chunk.len() as u64);
            if received > end - start {
                return Err(Failure::transient(wrong_length(received)));
            }
            let mut rest = &chunk[..];
            while !rest.is_empty() {
                if block.is_empty() {
                    block_length = self.start_block().await;
                    block.reserve_exact(block_length);
                }
                let taken = rest.len().min(block_length - block.len());
                block.extend_from_slice(&rest[..taken]);
                rest = &rest[taken..];
                let is_last = rest.is_empty() && received == end - start;
                if block.len() == block_length && !is_last {
                    self.hand_on(std::mem::take(&mut block));
                }
            }
        }
        self.hand_on(block);
        Ok(())
    }

    /// Returns the length of the next block. Waits for room before the first one of a part: for as
    /// long as the other requests may be silent, so that a store that hangs does not stop the rest.
    async fn start_block(&mut self) -> usize {
        let front = self.expected.front().expect("the request has the length of its parts");
        let received_bytes = front.received_bytes();
        let length = (front.length_bytes - received_bytes).min(self.shared.tier.layout.block_bytes);
        if self.room.is_none() {
            let started = Instant::now();
            self.room = permit(&self.shared.rooms, self.shared.stall_timeout).await;
            add(&self.shared.counters.room_wait_us, started.elapsed().as_micros() as u64);
        }
        length as usize
    }

    /// Sends a request, and checks that its answer is of the right version and range.
    async fn request(&self, range: Range<u64>) -> Result<GetResult, Failure> {
        let (shared, object) = (&self.shared, &self.object);
        let options = GetOptions {
            range: Some(range.clone().into()),
            if_match: object.if_match().map(str::to_owned),
            extensions: self.extensions.clone(),
            ..GetOptions::default()
        };
        let began = shared.known.begin();
        add(&shared.counters.get_requests, 1);
        let answer = shared.store.get_opts(object.location(), options);
        let Ok(answer) = timeout(shared.stall_timeout, answer).await else {
            return Err(self.stalled(range));
        };
        let result = answer.map_err(Failure::of_request)?;
        let seen = shared.learn(object.location(), &result, &began);
        if seen.id != object.id {
            return Err(Failure::Changed);
        }
        if result.range != range {
            let location = object.location().to_string();
            let error = CacheError::WrongRange { location, range, got: result.range };
            return Err(Failure::Store(Arc::new(error.into())));
        }
        Ok(result)
    }

    fn stalled(&self, range: Range<u64>) -> Failure {
        let location = self.object.location().to_string();
        let waited = self.shared.stall_timeout;
        Failure::transient(CacheError::Stalled { location, range: Some(range), waited })
    }

    /// Gives a block to the readers of its part. The last one completes the part, which then goes into
    /// the cache without the request.
    fn hand_on(&mut self, block: Vec<u8>) {
        let Some(front) = self.expected.front() else { return };
        let block = Bytes::from(block);
        let is_last = front.received_bytes() + block.len() as u64 == front.length_bytes;
        if !is_last {
            front.sender.send_modify(|received| received.push(block));
            return;
        }
        // Before its readers go on, so that a flush of theirs waits for it.
        let permit = self.shared.try_insert_permit();
        let Some(expected) = self.expected.pop_front() else { return };
        expected.sender.send_modify(|received| {
            received.push(block);
            received.finish(Ok(()));
        });
        let object = Arc::clone(&self.object);
        let complete = Complete { expected, object, room: self.room.take(), since: Instant::now() };
        match permit {
            Some(permit) => complete.insert(&self.runtime, permit),
            None => drop(self.runtime.spawn(complete.wait(self.runtime.clone()))),
        }
    }
}

/// A part that has come, on its way into the cache.
struct Complete {
    expected: Expected,
    object: Arc<Object>,
    room: Option<OwnedSemaphorePermit>,
    since: Instant,
}

impl Complete {
    /// Inserts the part when it may, unless the disk takes none.
    async fn wait(self, runtime: Handle) {
        match self.expected.shared.insert_permit().await {
            Some(permit) => self.insert(&runtime, permit),
            None => add(&self.expected.shared.counters.not_inserted, 1),
        }
    }

    /// Inserts the part, in a thread.
    fn insert(self, runtime: &Handle, permit: OwnedSemaphorePermit) {
        runtime.spawn_blocking(move || {
            let Self { expected, object, room, since } = self;
            let blocks = expected.sender.borrow().blocks().to_vec();
            let shared = Arc::clone(&expected.shared);
            let (key, flight) = (expected.key, Some(expected.flight));
            let place = (key, shared.kept(&object).home(key.number, &shared.tier.layout));
            let inserted = shared.tier.insert(object.location(), place, &blocks, flight);
            add(&shared.counters.insert_us, since.elapsed().as_micros() as u64);
            shared.end_insert(inserted, (expected, blocks, room), permit);
        });
    }
}

impl Shared {
    /// Returns a permit to put a part into the cache, if there is one without waiting.
    pub(crate) fn try_insert_permit(&self) -> Option<OwnedSemaphorePermit> {
        if self.tier.is_paused() {
            return None;
        }
        Arc::clone(&self.inserts).try_acquire_owned().ok()
    }

    /// Waits until a part may be put into the cache. Returns `None` if the disk takes none.
    pub(crate) async fn insert_permit(&self) -> Option<OwnedSemaphorePermit> {
        if let Some(permit) = self.try_insert_permit() {
            return Some(permit);
        }
        // Relaxed: a hint.
        if self.tier.is_paused() || self.is_disk_late.load(Ordering::Relaxed) {
            return None;
        }
        let permit = permit(&self.inserts, INSERT_WAIT_MAX).await;
        // Relaxed: a hint.
        self.is_disk_late.store(permit.is_none(), Ordering::Relaxed);
        permit
    }

    /// Frees what an insertion took, and writes its part to the disk, if not too many others are
    /// being written: then the cache does so later. Blocks for the disk.
    pub(crate) fn end_insert(
        self: Arc<Self>,
        inserted: Option<u32>,
        taken: impl Sized,
        permit: OwnedSemaphorePermit,
    ) {
        // Relaxed: a hint; the semaphore decides.
        self.is_disk_late.store(false, Ordering::Relaxed);
        // Before the permit goes, so that a flush waits for it.
        let writer = Arc::clone(&self.writers).try_acquire_owned();
        drop(taken);
        let Ok(writer) = writer else {
            drop((self, permit));
            return;
        };
        drop(permit);
        if let Some(slot) = inserted {
            self.tier.write_out(slot);
        }
        drop((self, writer));
    }
}

/// Takes a permit, unless there is none for this long.
async fn permit(semaphore: &Arc<Semaphore>, wait_max: Duration) -> Option<OwnedSemaphorePermit> {
    if let Ok(permit) = Arc::clone(semaphore).try_acquire_owned() {
        return Some(permit);
    }
    timeout(wait_max, Arc::clone(semaphore).acquire_owned()).await.ok()?.ok()
}

//! Requests for runs of parts: one task each, which hands each part to its readers and puts it into
//! the cache.
//!
//! ```text
//! reader: Shared::plan --> prepare, start --> task: receive --> part complete --> readers (watch)
//!           | joins a request                                                 --> Tier::insert (a thread)
//!           '--> Flight in the table, until the part is in its slot
//! ```
//!
//! A reader holds a reference to each request that it waits for. The last one that drops aborts the
//! task; parts that are complete by then are still inserted. A part is handed on once its last byte
//! has come, the last part of a request once the body has ended where it should.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use object_store::{Extensions, GetOptions, GetResult};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::timeout;

use crate::error::{CacheError, Failure};
use crate::metrics::add;
use crate::object::Object;
use crate::read::Shared;
use crate::record::PartKey;
use crate::table::{Fetch, Flight, PartResult, Table};

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
    sender: watch::Sender<PartResult>,
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.shared.tier.table().end_flight(&self.key, self.flight);
    }
}

/// The request of a run of parts.
pub(crate) struct Run {
    shared: Arc<Shared>,
    object: Arc<Object>,
    expected: VecDeque<Expected>,
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
) -> (Arc<Fetch>, Vec<watch::Receiver<PartResult>>, Run) {
    let flight = table.number_flight();
    let fetch = Arc::<Fetch>::default();
    let mut expected = VecDeque::with_capacity(parts.len());
    let mut results = Vec::with_capacity(parts.len());
    for number in parts {
        let key = PartKey { object: object.id, number };
        let (sender, result) = watch::channel(None);
        let own = result.clone();
        table.add_flight(key, Flight { number: flight, result, fetch: Arc::downgrade(&fetch) });
        expected.push_back(Expected { shared: Arc::clone(shared), key, flight, sender });
        results.push(own);
    }
    let run = Run {
        shared: Arc::clone(shared),
        object: Arc::clone(object),
        expected,
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
            let _ = fetch.0.set(task);
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
            if matches!(failure, Failure::Transient(_)) && tries < RETRIES_MAX {
                add(&self.shared.counters.retries, 1);
                tokio::time::sleep(RETRY_PAUSE * (1 << tries)).await;
                tries += 1;
                continue;
            }
            for part in self.expected.drain(..) {
                part.sender.send_replace(Some(Err(failure.clone())));
            }
        }
    }

    /// Sends one request for all parts that are still expected.
    async fn receive(&mut self) -> Result<(), Failure> {
        let (Some(first), Some(last)) = (self.expected.front(), self.expected.back()) else {
            return Ok(());
        };
        let size = self.object.meta.size;
        let part_bytes = self.shared.tier.layout.part_bytes;
        let start = u64::from(first.key.number) * part_bytes;
        let end = ((u64::from(last.key.number) + 1) * part_bytes).min(size);
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
        let mut part = Vec::new();
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
                if part.len() as u64 == part_bytes {
                    self.hand_on(std::mem::take(&mut part)).await;
                }
                if part.capacity() == 0 {
                    let left = end - start - (received - rest.len() as u64);
                    part.reserve_exact(left.min(part_bytes) as usize);
                }
                let taken = rest.len().min(part_bytes as usize - part.len());
                part.extend_from_slice(&rest[..taken]);
                rest = &rest[taken..];
            }
        }
        self.hand_on(part).await;
        Ok(())
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

    /// Gives a complete part to its readers and to a thread that puts it into the cache. Waits
    /// before if many parts are on their way there.
    async fn hand_on(&mut self, part: Vec<u8>) {
        let permit = self.insert_permit().await;
        let Some(expected) = self.expected.pop_front() else { return };
        let part = Bytes::from(part);
        expected.sender.send_replace(Some(Ok(part.clone())));
        let Some(permit) = permit else {
            add(&self.shared.counters.not_inserted, 1);
            return;
        };
        self.runtime.spawn_blocking(move || {
            expected.shared.tier.insert(expected.key, &part, expected.flight);
            // Relaxed: a hint; the semaphore decides.
            expected.shared.is_disk_late.store(false, Ordering::Relaxed);
            drop((expected, permit));
        });
    }

    async fn insert_permit(&self) -> Option<OwnedSemaphorePermit> {
        if self.shared.tier.is_paused() {
            return None;
        }
        let inserts = &self.shared.inserts;
        if let Ok(permit) = Arc::clone(inserts).try_acquire_owned() {
            return Some(permit);
        }
        // Relaxed: a hint.
        if self.shared.is_disk_late.load(Ordering::Relaxed) {
            return None;
        }
        let permit = timeout(INSERT_WAIT_MAX, Arc::clone(inserts).acquire_owned()).await;
        // Relaxed: a hint.
        self.shared.is_disk_late.store(permit.is_err(), Ordering::Relaxed);
        permit.ok()?.ok()
    }
}

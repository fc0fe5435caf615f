//! Many reads in flight from one thread: the raw ring, and `read_many`.
//!
//! The raw ring works like one of two kinds of callers. `Rolling` starts a read for each that
//! completes: the limit of a call with many more requests than the depth. It sleeps until half of
//! its reads are complete: waking for each costs a quarter more CPU without a gain. `Barrier`
//! starts as many reads as the depth and waits for all of them: the limit of a call with as many
//! requests as the depth.

use std::fs::File;
use std::time::{Duration, Instant};

use super::one_by_one::Load;
use bifolio::ReadRequest;

use crate::error::Result;
use crate::harness::access::PAGE_BYTES;
use crate::harness::checker::Checker;
use crate::harness::intervals::OperationsByInterval;
use crate::harness::latency::Latencies;
use crate::harness::meter::{Cost, Measured, Meter};
use crate::harness::raw_ring::{Completed, RawRing, Transfer};

/// Divisor of the reads in flight for which a rolling ring waits.
const ROLLING_SHARE: usize = 2;

/// Time at which a raw ring starts the next read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Rolling,
    Barrier,
}

/// Reads of the one thread of a trial.
struct Seen {
    started: Instant,
    latencies: Latencies,
    intervals: OperationsByInterval,
    checker: Checker,
    operations: u64,
}

impl Seen {
    fn new(load: &Load<'_>, started: Instant) -> Self {
        Self {
            started,
            latencies: Latencies::default(),
            intervals: OperationsByInterval::new(load.duration),
            checker: Checker::new(load.series),
            operations: 0,
        }
    }

    fn is_over(&self, load: &Load<'_>) -> bool {
        self.started.elapsed() >= load.duration || load.draws.taken() >= load.draw_end
    }

    fn time(&mut self, latency: Duration) {
        self.latencies.add(latency);
        self.intervals.add_latency(self.started.elapsed(), latency);
    }

    fn count(&mut self, operations: u64) {
        self.operations += operations;
        self.intervals.add(self.started.elapsed(), operations);
    }

    fn measured(self, cost: Cost, syscalls_known: u64) -> Result<Measured> {
        Ok(Measured {
            operations: self.operations,
            bytes: self.operations * PAGE_BYTES as u64,
            misses: self.operations,
            syscalls_known,
            cost,
            latencies: self.latencies,
            intervals: self.intervals,
            verified_bytes: self.checker.finish()?,
        })
    }
}

/// Reads pages of `file`, opened past the page cache, `depth` at a time.
pub(crate) fn read_raw(load: &Load<'_>, file: &File, shape: Shape, depth: u16) -> Result<Measured> {
    let mut ring = RawRing::new(file, PAGE_BYTES, depth)?;
    let meter = Meter::start(load.tracepoint)?;
    let mut seen = Seen::new(load, meter.started());
    while !seen.is_over(load) {
        let begin = Instant::now();
        start_all_idle(&mut ring, load)?;
        let wanted = match shape {
            Shape::Rolling => ring.in_flight() / ROLLING_SHARE,
            Shape::Barrier => ring.in_flight(),
        };
        let before = ring.in_flight();
        ring.complete(wanted, |done: Completed<'_>| {
            if shape == Shape::Rolling {
                seen.time(done.latency);
            }
            seen.checker.add(done.bytes, done.pos_bytes)
        })?;
        if shape == Shape::Barrier {
            seen.time(begin.elapsed());
        }
        seen.count((before - ring.in_flight()) as u64);
    }
    let cost = meter.stop()?;
    let enters = ring.enters();
    // Reads that were still in flight do not count, but must be right.
    ring.drain(|done| seen.checker.add(done.bytes, done.pos_bytes))?;
    seen.measured(cost, enters)
}

fn start_all_idle(ring: &mut RawRing, load: &Load<'_>) -> Result<()> {
    while let Some(block) = ring.take_idle() {
        ring.start(block, Transfer::Read, load.access.pos_bytes(load.draws.take()))?;
    }
    Ok(())
}

/// Reads pages of a file in a cache, `requests_per_call` with each call of `read_many`. The result
/// counts every read as a miss, which the caller may correct.
pub(crate) fn read_many(
    load: &Load<'_>,
    file: &bifolio::File,
    requests_per_call: usize,
) -> Result<Measured> {
    let mut buffer = vec![0; requests_per_call * PAGE_BYTES];
    let pages = buffer.chunks_exact_mut(PAGE_BYTES);
    let mut requests: Vec<ReadRequest<'_>> = pages.map(|page| ReadRequest::new(0, page)).collect();
    let meter = Meter::start(load.tracepoint)?;
    let mut seen = Seen::new(load, meter.started());
    while !seen.is_over(load) {
        for request in &mut requests {
            request.position = load.access.pos_bytes(load.draws.take());
            request.result = Ok(0);
        }
        let begin = Instant::now();
        file.read_many(&mut requests)?;
        seen.time(begin.elapsed());
        for request in &mut requests {
            if std::mem::replace(&mut request.result, Ok(0))? != PAGE_BYTES {
                return Err(seen.checker.wrong(request.position));
            }
            seen.checker.add(request.buffer, request.position)?;
        }
        seen.count(requests_per_call as u64);
    }
    let cost = meter.stop()?;
    seen.measured(cost, 0)
}

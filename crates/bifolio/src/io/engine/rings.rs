//! The pool of rings, and the leases by which queues use them, while they have transfers in flight.
//!
//! There are at most twice as many rings as CPUs (a ring is leased while the device works, not the
//! CPU); beyond that, leasing waits. After [`LEASE_TRANSFERS`] transfers
//! ([`Lease::is_over`]) a queue lets its ring drain and leases again, behind the waiters. A queue
//! that has a ring never waits for another (IO-5).
//!
//! A device that hangs may keep every ring. So after [`WAIT_MAX`] without a returned ring the pool
//! is *stalled*, and until one is returned, transfers are made with plain calls.
//!
//! # Safety
//! Passes on the contract of `Ring::push`.
#![allow(unsafe_code)]

use crate::io::request::Span;
use crate::io::{Operation, Submission};
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering};
use crate::sys::process::Origin;
use crate::sys::ring::{Ring, RingCall, RingMemory};
use std::os::fd::AsRawFd;
use std::time::Duration;
use std::{io, thread};

/// How long a queue waits for a ring while none is returned. A lease is shorter unless its
/// transfers are large or the device is slow, and then plain calls are as good.
const WAIT_MAX: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Rings {
    /// Maximum number of rings; 0 without io_uring.
    rings_max: usize,
    depth: usize,
    pool: Mutex<Pool>,
    returned: Condvar,
    pub(super) counts: RingCounts,
    /// Detects a fork: a child must not touch the rings it inherited.
    origin: Origin,
}

#[derive(Debug)]
struct Pool {
    free: Vec<Ring>,
    count: usize,
    waiting: usize,
    /// A wait for a ring timed out, and none was returned since.
    is_stalled: bool,
    is_broken: bool,
}

impl Rings {
    pub(super) fn new(rings_max: usize, depth: usize) -> Self {
        let pool = Pool {
            free: Vec::new(),
            count: 0,
            waiting: 0,
            is_stalled: false,
            is_broken: rings_max == 0,
        };
        Self {
            rings_max,
            depth,
            pool: Mutex::new(pool),
            returned: Condvar::new(),
            counts: RingCounts::default(),
            origin: Origin::here(),
        }
    }

    /// Leases a ring; waits for a bounded time while all are leased. Returns `None` if rings are
    /// unavailable or none is returned in time.
    pub(super) fn lease(&self) -> Option<Lease<'_>> {
        let mut pool = self.pool.lock();
        let mut has_waited = false;
        while !pool.is_broken {
            // Later callers queue behind the waiters.
            let is_next = has_waited || pool.waiting == 0;
            if is_next && let Some(ring) = pool.free.pop().or_else(|| self.make_ring(&mut pool)) {
                if !pool.free.is_empty() {
                    self.returned.notify_one();
                }
                return Some(Lease { rings: self, ring: Some(ring), started: 0, refusals: 0 });
            }
            if pool.count == 0 || pool.is_stalled {
                return None;
            }
            pool.waiting += 1;
            let timed_out = self.returned.wait_for(&mut pool, WAIT_MAX).timed_out();
            pool.waiting -= 1;
            has_waited = true;
            // A ring returned just now is for the waiter that is woken for it.
            pool.is_stalled = timed_out && pool.free.is_empty();
        }
        None
    }

    fn make_ring(&self, pool: &mut Pool) -> Option<Ring> {
        if pool.count >= self.rings_max {
            return None;
        }
        let ring = Ring::open(self.depth as u32)
            .inspect_err(|error| log::debug!("cannot create another ring: {error}"))
            .ok()?;
        pool.count += 1;
        Some(ring)
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        if self.origin.is_forked() {
            // The mappings were not inherited: their addresses may be in use for something else.
            std::mem::forget(std::mem::take(&mut self.pool.get_mut().free));
        }
    }
}

/// Transfers after which a lease is over, if another queue waits.
pub(super) const LEASE_TRANSFERS: u32 = 1024;
/// Sleep after the kernel first refuses to be entered; it doubles with each refusal, to 12 ms.
const REFUSAL_SLEEP_MIN: Duration = Duration::from_micros(100);
const REFUSAL_DOUBLINGS_MAX: u32 = 7;
/// Consecutive refusals for lack of memory after which the ring is given up: 1.2 s together.
const REFUSALS_MAX: u32 = 100;

/// A ring used by one queue, which drops the lease when it has all completions.
#[derive(Debug)]
pub(super) struct Lease<'e> {
    rings: &'e Rings,
    ring: Option<Ring>,
    started: u32,
    refusals: u32,
}

impl Lease<'_> {
    /// Returns `true` if the ring should be passed on to a waiting queue.
    pub(super) fn is_over(&self) -> bool {
        self.started >= LEASE_TRANSFERS && self.rings.pool.lock().waiting > 0
    }

    /// Returns the call for the first part of a transfer: as many whole spans as `submission`
    /// allows, or, if not even one, the beginning of the first.
    pub(super) fn call(
        operation: Operation,
        position_bytes: u64,
        spans: &[Span],
        submission: &Submission<'_>,
    ) -> RingCall {
        let one = |span: &Span, length_bytes| RingMemory::One { start: span.start(), length_bytes };
        let memory = match whole_spans(spans, submission.length_bytes) {
            0 => one(&spans[0], submission.length_bytes.min(spans[0].len())),
            1 => one(&spans[0], spans[0].len()),
            count => {
                let (entries, count) = Span::kernel_entries(&spans[..count]);
                RingMemory::Vector { entries, count }
            }
        };
        let (is_write, file) = (operation == Operation::Write, submission.file.as_raw_fd());
        RingCall { is_write, file, memory, position_bytes }
    }

    /// Queues a call. Returns `false` if the ring is full.
    ///
    /// # Safety
    /// As for `Ring::push`.
    #[must_use]
    pub(super) unsafe fn push(&mut self, call: &RingCall, token: usize) -> bool {
        // SAFETY: the caller's contract.
        let is_queued = unsafe { self.ring().push(call, token as u64) };
        self.started += u32::from(is_queued);
        is_queued
    }

    pub(super) fn unsubmitted(&mut self) -> usize {
        self.ring().unsubmitted()
    }

    /// Submits the pushed calls, and waits for `wanted` completions or an interruption.
    ///
    /// # Errors
    /// Fails if the kernel refuses permanently, or for more than a second.
    pub(super) fn enter(&mut self, wanted: usize) -> io::Result<()> {
        // Relaxed: statistics.
        self.rings.counts.ring_enters.fetch_add(1, Ordering::Relaxed);
        let error = match self.ring().enter(wanted) {
            Ok(()) => {
                self.refusals = 0;
                return Ok(());
            }
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::EINTR) => Ok(()),
            Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) if self.refusals < REFUSALS_MAX => {
                self.pause();
                Ok(())
            }
            _ => Err(error),
        }
    }

    pub(super) fn pause(&mut self) {
        thread::sleep(REFUSAL_SLEEP_MIN * (1 << self.refusals.min(REFUSAL_DOUBLINGS_MAX)));
        self.refusals = self.refusals.saturating_add(1);
    }

    pub(super) fn reap(&mut self) -> Option<(usize, io::Result<usize>)> {
        let (token, answer) = self.ring().reap()?;
        Some((token as usize, answer))
    }

    /// Ends the lease of a ring that failed, with nothing in flight. No ring is used any more.
    pub(super) fn give_up(mut self) {
        let mut pool = self.rings.pool.lock();
        pool.is_broken = true;
        pool.count -= 1;
        self.ring = None;
        self.rings.returned.notify_all();
    }

    fn ring(&mut self) -> &mut Ring {
        self.ring.as_mut().expect("present until the lease ends")
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let Some(ring) = self.ring.take() else { return };
        let mut pool = self.rings.pool.lock();
        pool.free.push(ring);
        pool.is_stalled = false;
        drop(pool);
        self.rings.returned.notify_one();
    }
}

/// Returns how many spans, from the first on, lie completely in the first `length_bytes` bytes.
fn whole_spans(spans: &[Span], length_bytes: usize) -> usize {
    let mut left = length_bytes;
    let whole = spans.iter().take_while(|span| {
        let fits = span.len() <= left;
        left = left.saturating_sub(span.len());
        fits
    });
    whole.count()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EngineCounts {
    pub(crate) ring_enters: u64,
    pub(crate) ring_transfers: u64,
    /// Transfers made with plain calls: alone in their queue, or where there is no ring.
    pub(crate) plain_transfers: u64,
}

#[derive(Debug, Default)]
pub(super) struct RingCounts {
    pub(super) ring_enters: AtomicU64,
    pub(super) ring_transfers: AtomicU64,
    pub(super) plain_transfers: AtomicU64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio_testing::skip;
    use std::ptr::NonNull;
    use std::thread;

    fn one_ring() -> Rings {
        Rings::new(1, 4)
    }

    #[test]
    fn only_whole_spans_and_only_those_from_the_first_on_count() {
        let span = |length| Span::new(NonNull::dangling(), length);
        let spans = [span(10), span(20), span(30)];
        let whole = [0, 9, 10, 29, 30, 59, 60, 99].map(|length| whole_spans(&spans, length));
        assert_eq!(whole, [0, 0, 1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn a_lease_is_over_after_a_while_if_a_queue_waits() {
        let rings = one_ring();
        let Some(mut lease) = rings.lease() else {
            return skip(crate::Feature::IoUring, "no ring can be leased");
        };
        lease.started = LEASE_TRANSFERS;
        assert!(!lease.is_over(), "no queue waits");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| rings.lease().is_some());
            while rings.pool.lock().waiting == 0 {
                thread::yield_now();
            }
            assert!(lease.is_over());
            lease.started = LEASE_TRANSFERS - 1;
            assert!(!lease.is_over(), "the lease is not over yet");
            drop(lease);
            assert!(waiting.join().unwrap());
        });
        assert!(rings.lease().is_some(), "a dropped lease returns its ring");
    }

    #[test]
    fn a_ring_that_was_given_up_is_the_last() {
        let rings = one_ring();
        let Some(lease) = rings.lease() else {
            return skip(crate::Feature::IoUring, "no ring can be leased");
        };
        lease.give_up();
        assert!(rings.lease().is_none());
        assert_eq!(rings.pool.lock().count, 0);
    }
}

//! A ring, while one queue uses it.
//!
//! Given by `rings.rs`; used by `queue.rs`, which pushes first attempts, enters the kernel and
//! reaps answers, and drops the lease when it has them all. Says how a transfer names its file and
//! its memory in this ring.
//!
//! # Safety
//! Passes the contract of `RingQueues::push` on.
#![allow(unsafe_code)]

use std::io;
use std::thread;
use std::time::Duration;

use super::rings::{Ring, Rings};
use crate::io::span::Span;
use crate::io::{Operation, Submission};
use crate::sys::ring::{RingCall, RingMemory};

/// Transfers after which a lease is over, if somebody waits.
pub(super) const TURN_TRANSFERS: u32 = 1024;
/// The sleep after the first refusal of the kernel to be entered; it doubles with each, to 12 ms.
const REFUSAL_SLEEP_MIN: Duration = Duration::from_micros(100);
const REFUSAL_DOUBLINGS_MAX: u32 = 7;

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Lease<'e> {
    rings: &'e Rings,
    /// There until the lease ends.
    ring: Option<Ring>,
    started: u32,
    refusals: u32,
}

impl<'e> Lease<'e> {
    pub(super) fn new(rings: &'e Rings, ring: Ring) -> Self {
        Self { rings, ring: Some(ring), started: 0, refusals: 0 }
    }

    /// Whether the ring should go to somebody who waits for it.
    pub(super) fn is_over(&self) -> bool {
        self.started >= TURN_TRANSFERS && self.rings.is_wanted()
    }

    /// The call for the first part of a transfer: as many whole spans as `submission` allows, or,
    /// if there is none, the beginning of the first.
    pub(super) fn call(
        &mut self,
        operation: Operation,
        position_bytes: u64,
        spans: &[Span],
        submission: &Submission<'_>,
    ) -> RingCall {
        let chunks = self.rings.chunks();
        let tables = &self.ring().tables;
        let file = tables.file(submission);
        let memory = match whole_spans(spans, submission.length_bytes) {
            0 => {
                let length_bytes = submission.length_bytes.min(spans[0].len());
                tables.memory(&spans[0].part(0, length_bytes), chunks)
            }
            1 => tables.memory(&spans[0], chunks),
            count => {
                let (entries, count) = Span::kernel_row(&spans[..count]);
                RingMemory::Row { entries, count }
            }
        };
        RingCall { is_write: operation == Operation::Write, file, memory, position_bytes }
    }

    /// Queues a call. `false`: there is no room.
    ///
    /// # Safety
    /// As for `RingQueues::push`.
    #[must_use]
    pub(super) unsafe fn push(&mut self, call: &RingCall, token: usize) -> bool {
        // SAFETY: the caller's contract.
        let is_queued = unsafe { self.ring().queues.push(call, token as u64) };
        self.started += u32::from(is_queued);
        is_queued
    }

    /// Calls the kernel has not seen.
    pub(super) fn unsubmitted(&mut self) -> usize {
        self.ring().queues.unsubmitted()
    }

    /// Submits what was pushed, and waits for `wanted` answers, or until it is interrupted.
    ///
    /// # Errors
    /// The kernel does not let us in, nor will it later.
    pub(super) fn enter(&mut self, wanted: usize) -> io::Result<()> {
        self.rings.counts().add_ring_enter();
        let error = match self.ring().queues.enter(wanted) {
            Ok(()) => {
                self.refusals = 0;
                return Ok(());
            }
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::EINTR) => Ok(()),
            Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {
                self.pause();
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// Waits a little, longer each time in a row.
    pub(super) fn pause(&mut self) {
        thread::sleep(REFUSAL_SLEEP_MIN * (1 << self.refusals.min(REFUSAL_DOUBLINGS_MAX)));
        self.refusals = self.refusals.saturating_add(1);
    }

    /// Takes the next answer.
    pub(super) fn reap(&mut self) -> Option<(usize, io::Result<usize>)> {
        let (token, answer) = self.ring().queues.reap()?;
        Some((token as usize, answer))
    }

    /// Ends the lease of a ring that cannot be used any more, with nothing in flight.
    pub(super) fn give_up(mut self) {
        if let Some(ring) = self.ring.take() {
            self.rings.give_up(ring);
        }
    }

    fn ring(&mut self) -> &mut Ring {
        self.ring.as_mut().expect("there until the lease ends")
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if let Some(ring) = self.ring.take() {
            self.rings.give_back(ring);
        }
    }
}

/// How many spans, from the first on, lie in the first `length_bytes` bytes as a whole.
fn whole_spans(spans: &[Span], length_bytes: usize) -> usize {
    let mut left = length_bytes;
    let whole = spans.iter().take_while(|span| {
        let fits = span.len() <= left;
        left = left.saturating_sub(span.len());
        fits
    });
    whole.count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::engine::rings::Plan;
    use std::ptr::NonNull;
    use std::thread;

    fn one_ring() -> Rings {
        Rings::new(Plan { rings_max: 1, depth: 4, files: false, chunks: None })
    }

    #[test]
    fn only_whole_spans_and_only_those_from_the_first_on_count() {
        let span = |length| Span::new(NonNull::dangling(), length);
        let spans = [span(10), span(20), span(30)];
        let whole = [0, 9, 10, 29, 30, 59, 60, 99].map(|length| whole_spans(&spans, length));
        assert_eq!(whole, [0, 0, 1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn a_lease_is_over_after_a_turn_if_somebody_waits() {
        let rings = one_ring();
        let Some(mut lease) = rings.lease() else {
            return println!("skipped: there is no io_uring here");
        };
        lease.started = TURN_TRANSFERS;
        assert!(!lease.is_over(), "nobody waits");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| rings.lease().is_some());
            while !rings.is_wanted() {
                thread::yield_now();
            }
            assert!(lease.is_over());
            lease.started = TURN_TRANSFERS - 1;
            assert!(!lease.is_over(), "the turn is not");
            drop(lease);
            assert!(waiting.join().unwrap());
        });
        assert!(rings.lease().is_some(), "a dropped lease gives its ring back");
    }

    #[test]
    fn a_ring_that_was_given_up_is_the_last() {
        let rings = one_ring();
        let Some(lease) = rings.lease() else {
            return println!("skipped: there is no io_uring here");
        };
        lease.give_up();
        assert!(rings.lease().is_none());
        assert!(rings.all().is_empty());
    }
}

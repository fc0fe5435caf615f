//! A queue: the transfers that one thread has in flight, each with its owner: whatever prevents
//! other use of the frames, which the kernel may access from `push` until `complete` returns it.
//!
//! ```text
//!             start                      reap            complete
//!   waiting --------+-> Kernel -----------+-> done ------------> on_done(owner, answer)
//!      |            '-> Helpers ----------'     ^
//!      '-- alone: a plain call, at once --------------'
//! ```
//!
//! A ring makes the first attempt at a transfer if its backing names a file for it. The rest is
//! made with plain calls: by the thread of the queue, or by helpers (`threads.rs`).
//!
//! A queue whose thread also waits for other threads has a [`Bell`] ([`Queue::complete_or_rung`]):
//! the ring reads it, and helpers ring it when they are done.
//!
//! Invariants:
//! - IO-5: while a queue has transfers in flight, its owner blocks on nothing but the queue: no
//!   folio lock, no write-out, no allocation that waits. So queues never wait for each other. Debug
//!   builds check it (`sync/blocking.rs`).
//! - IO-7: a slot holds its owner until the kernel, or the helper, has completed the transfer. A
//!   transfer leaves `Kernel` only when its completion was reaped, or when the ring failed
//!   before the kernel saw the call.
//!
//! # Safety
//! Passes memory to the kernel and to helpers: `push` requires IO-1 until the owner is returned or
//! dropped, and the queue waits for every transfer that a helper has taken.
#![allow(unsafe_code)]

use super::rings::Lease;
use super::threads::{FallbackQueue, Helpers, Urgency};
use super::{Engine, Lane};
use crate::error::Error;
use crate::io::request::range_end;
use crate::io::transfer::{Transfer, TransferResult};
use crate::io::{IoRequest, Operation};
use crate::sync::{Ordering, blocking};
use crate::sys::copy;
use crate::sys::probe::Feature;
use crate::sys::ring::{Bell, RingCall};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

pub(crate) struct Queue<'e, T> {
    engine: &'e Engine,
    waiting: VecDeque<(Transfer, T)>,
    /// Started transfers; a token is an index.
    slots: Vec<TransferSlot<T>>,
    vacant: Vec<usize>,
    in_kernel: usize,
    /// Present while calls are in the kernel.
    lease: Option<Lease<'e>>,
    fallback: Option<Arc<FallbackQueue>>,
    /// Device of the last transfer for helpers.
    lane: Lane,
    /// No ring was available: helpers make the transfers until the queue is empty.
    is_without_ring: bool,
    done: VecDeque<(T, TransferResult)>,
    armed: Option<Arc<Bell>>,
}

/// Wait of a thread that hears a bell for helpers, before it makes a transfer itself.
const HELPER_WAIT_MAX: Duration = Duration::from_millis(10);

/// Slots that a queue reserves for its first transfer, because moving them to a larger allocation
/// costs a batch more than it would save.
const SLOTS_RESERVED: usize = 32;

/// Cache lines of a read that are prefetched, as many as a batched read prefetches.
const READ_LINES: usize = 8;

const BELL_TOKEN: usize = usize::MAX;

enum TransferSlot<T> {
    Vacant,
    /// A ring makes, or will make, the first attempt.
    Kernel(InKernel<T>),
    Helpers(T),
}

struct InKernel<T> {
    transfer: Transfer,
    request: IoRequest,
    owner: T,
}

impl Engine {
    /// Creates a queue for the calling thread. Costs nothing before it is used.
    pub(crate) fn queue<T>(&self) -> Queue<'_, T> {
        Queue {
            engine: self,
            waiting: VecDeque::new(),
            slots: Vec::new(),
            vacant: Vec::new(),
            in_kernel: 0,
            lease: None,
            fallback: None,
            lane: Lane::Alone(0),
            is_without_ring: false,
            done: VecDeque::new(),
            armed: None,
        }
    }
}

impl<T> Queue<'_, T> {
    /// Returns the maximum number of transfers in flight; further ones wait to be started.
    pub(crate) fn depth(&self) -> usize {
        self.engine.depth
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.waiting.len() + self.started() + self.done.len()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.in_flight() >= self.depth()
    }

    /// Adds a transfer; the next [`Self::begin`] or [`Self::complete`] starts it.
    ///
    /// # Safety
    /// IO-1 must hold for its pieces until `complete` has returned `owner`, or the queue's drop has
    /// dropped it.
    pub(crate) unsafe fn push(&mut self, transfer: Transfer, owner: T) {
        blocking::note_pushed();
        self.waiting.push_back((transfer, owner));
    }

    /// Starts the pushed transfers. Waits for no transfer, but perhaps for a ring.
    pub(crate) fn begin(&mut self) {
        self.begin_some(usize::MAX);
    }

    /// Starts some of the pushed transfers if few or none are in flight: few enough for the device
    /// to get them at once, enough to keep it busy until the rest follows.
    pub(crate) fn feed(&mut self) {
        let unseen = self.lease.as_mut().map_or(0, Lease::unsubmitted);
        if self.started() - unseen <= self.depth() / 8 {
            self.begin_some((self.depth() * 3 / 8).max(1));
        }
    }

    fn begin_some(&mut self, most: usize) {
        self.start_some(most);
        self.call_helpers(0);
        self.submit();
    }

    /// Starts the pushed transfers, waits until `wanted` are complete (or all, if fewer), and
    /// returns all complete ones, in unspecified order. With `wanted` 0 it waits for no transfer,
    /// but perhaps for a ring.
    ///
    /// An answer is the number of bytes: for a read those before the end of file, for a write all.
    pub(crate) fn complete(
        &mut self,
        wanted: usize,
        mut on_done: impl FnMut(T, Result<usize, Error>),
    ) {
        let wanted = wanted.min(self.in_flight());
        let mut handed_out = 0;
        loop {
            self.start(handed_out < wanted);
            self.reap();
            if handed_out + self.done.len() >= wanted {
                // The device works while owners are returned.
                self.submit();
            }
            let handed_out_before = handed_out;
            while let Some((owner, answer)) = self.done.pop_front() {
                blocking::note_handed_out(1);
                handed_out += 1;
                on_done(owner, answer);
            }
            if handed_out >= wanted {
                break;
            }
            // The returned transfers made room: more may be started before the wait, and perhaps
            // there is nothing to wait for.
            if handed_out == handed_out_before {
                self.wait(wanted - handed_out);
            }
        }
        self.submit();
        self.call_helpers(0);
        self.release_ring();
    }

    /// Returns the transfers that are complete by now, without waiting: enters the kernel once.
    pub(crate) fn poll(&mut self, on_done: impl FnMut(T, Result<usize, Error>)) {
        if self.in_kernel > 0 {
            self.enter(0);
        }
        self.complete(0, on_done);
    }

    /// Returns exactly `wanted` transfers (or all, if fewer) to `on_done`. Collects pushed
    /// transfers until it waits: few system calls. If few transfers are in flight, starts waiting
    /// ones before it returns anything, so that device and caller work in parallel.
    pub(crate) fn complete_exactly(
        &mut self,
        wanted: usize,
        mut on_done: impl FnMut(T, Result<usize, Error>),
    ) {
        let wanted = wanted.min(self.in_flight());
        self.reap();
        while self.done.len() < wanted {
            self.start(true);
            if self.done.len() < wanted {
                self.wait(wanted - self.done.len());
            }
            self.reap();
        }
        self.feed();
        for (owner, answer) in self.done.drain(..wanted) {
            blocking::note_handed_out(1);
            on_done(owner, answer);
        }
        self.release_ring();
    }

    /// Starts the pushed transfers, waits until one is complete or `bell` is rung, and returns all
    /// complete ones. Transfers that no ring makes are left to helpers, so that this thread hears
    /// the bell, unless no helper comes.
    pub(crate) fn complete_or_rung(
        &mut self,
        bell: &Arc<Bell>,
        mut on_done: impl FnMut(T, Result<usize, Error>),
    ) {
        self.start_some(usize::MAX);
        self.call_helpers(0);
        if let Some(fallback) = self.fallback.as_ref().filter(|_| self.in_helpers() > 0) {
            // Before the look at what is done: a helper that is done later rings.
            fallback.state.lock().bell.get_or_insert_with(|| Arc::clone(bell));
        }
        self.reap();
        if self.done.is_empty() {
            self.wait_or_rung(bell);
            self.reap();
        } else {
            self.submit();
        }
        for (owner, answer) in self.done.drain(..) {
            blocking::note_handed_out(1);
            on_done(owner, answer);
        }
        self.release_ring();
    }

    fn started(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    fn in_helpers(&self) -> usize {
        self.started() - self.in_kernel
    }

    /// Starts waiting transfers, as far as there is room. `waits`: the caller is about to wait.
    fn start(&mut self, waits: bool) {
        if waits && self.in_flight() == 1 && self.waiting.len() == 1 {
            let alone = self.waiting.pop_front();
            return alone.into_iter().for_each(|(transfer, owner)| self.run(transfer, owner));
        }
        self.start_some(usize::MAX);
        self.call_helpers(usize::from(waits));
    }

    /// Starts at most `most` of the waiting transfers; none if other queues wait for the ring.
    fn start_some(&mut self, most: usize) {
        if self.lease.as_ref().is_some_and(Lease::is_over) {
            if self.in_kernel > 0 {
                return;
            }
            self.disarm();
            self.lease = None;
        }
        let pushed_before = self.in_kernel;
        for _ in 0..most.min(self.depth() - self.started()) {
            let Some((transfer, owner)) = self.waiting.pop_front() else { break };
            self.start_one(transfer, owner);
        }
        let pushed = self.in_kernel - pushed_before;
        if pushed > 0 {
            // Relaxed: statistics.
            self.engine.rings.counts.ring_transfers.fetch_add(pushed as u64, Ordering::Relaxed);
        }
    }

    fn run(&mut self, transfer: Transfer, owner: T) {
        // Its transfer no longer counts as in flight, and is not in `done` yet.
        blocking::check_in_queue("a transfer", self.in_flight() + 1);
        // Relaxed: statistics.
        self.engine.rings.counts.plain_transfers.fetch_add(1, Ordering::Relaxed);
        // SAFETY: `push` required IO-1; the owner is here.
        let answer = unsafe { transfer.run(None) };
        self.done.push_back((owner, answer));
    }

    /// Starts a transfer in the ring, or by a helper if no ring can make it.
    fn start_one(&mut self, transfer: Transfer, owner: T) {
        let request = transfer.request();
        let Some(call) = self.ring_call(&transfer, &request) else {
            return self.submit_fallback(transfer, owner);
        };
        let token = self.vacant_slot();
        self.slots[token] = TransferSlot::Kernel(InKernel { transfer, request, owner });
        self.in_kernel += 1;
        let lease = self.lease.as_mut().expect("a ring call implies a lease");
        // SAFETY: `push` required IO-1; the slot keeps the owner, and the backing with its open
        // file, until the completion is reaped (IO-7). Several spans are on the heap, and the slot
        // keeps that, too.
        let is_queued = unsafe { lease.push(&call, token) };
        debug_assert!(is_queued, "a ring has room for as many calls as a queue has in flight");
        if !is_queued && let Some(unseen) = self.take_from_kernel(token) {
            self.submit_fallback(unseen.transfer, unseen.owner);
        }
    }

    /// Returns the ring call for the first attempt; `None` if no ring makes it.
    fn ring_call(&mut self, transfer: &Transfer, request: &IoRequest) -> Option<RingCall> {
        range_end(request.position_bytes, request.length_bytes).ok()?;
        let submission = transfer.backing.submission(request)?;
        if !(1..=request.length_bytes).contains(&submission.length_bytes) {
            return None;
        }
        if self.lease.is_none() && !self.is_without_ring {
            blocking::check_in_queue("a ring", self.in_flight() + 1);
            self.lease = self.engine.rings.lease();
            self.is_without_ring = self.lease.is_none();
        }
        let spans = transfer.pieces.spans();
        self.lease.as_ref()?;
        Some(Lease::call(request.operation, request.position_bytes, spans, &submission))
    }

    fn submit_fallback(&mut self, transfer: Transfer, owner: T) {
        let token = self.vacant_slot();
        self.slots[token] = TransferSlot::Helpers(owner);
        self.lane = super::lane_of(&transfer.backing);
        let fallback = self.fallback.get_or_insert_default();
        fallback.state.lock().submitted.push_back((token, transfer));
    }

    /// Calls helpers for the submitted transfers but `own`, which this thread will take.
    fn call_helpers(&self, own: usize) {
        let Some(fallback) = self.fallback.as_ref().filter(|_| self.in_helpers() > 0) else {
            return;
        };
        for _ in 0..fallback.call_helpers(own) {
            let shared = Arc::clone(fallback);
            let job = move || shared.help();
            if self.engine.spawn(self.lane, Urgency::Whenever, job).is_err() {
                fallback.state.lock().tickets -= 1;
            }
        }
    }

    fn vacant_slot(&mut self) -> usize {
        self.vacant.pop().unwrap_or_else(|| {
            if self.slots.is_empty() {
                self.slots.reserve(SLOTS_RESERVED);
                self.vacant.reserve(SLOTS_RESERVED);
            }
            self.slots.push(TransferSlot::Vacant);
            self.slots.len() - 1
        })
    }

    /// Moves complete transfers to `done`, and makes what is left of short ones.
    fn reap(&mut self) {
        while let Some((token, answer)) = self.lease.as_mut().and_then(Lease::reap) {
            if token == BELL_TOKEN {
                self.armed = None;
                continue;
            }
            let Some(InKernel { transfer, request, owner }) = self.take_from_kernel(token) else {
                debug_assert!(false, "a completion of an unknown call");
                continue;
            };
            if request.operation == Operation::Read {
                // The owner is about to copy the first cache lines.
                let first = transfer.pieces.spans().first();
                first.iter().for_each(|span| copy::prefetch_lines(span.start(), READ_LINES));
            }
            // A call that failed for reasons of the ring is repeated with a plain call.
            let is_canceled = |error: &io::Error| error.raw_os_error() == Some(libc::ECANCELED);
            let first = match answer {
                Err(error) if is_canceled(&error) => Err(io::ErrorKind::Interrupted.into()),
                answer => answer,
            };
            let first = transfer.backing.completed(&request, first);
            // SAFETY: `push` required IO-1; the owner is here, and the kernel has completed the
            // call.
            let answer = unsafe { transfer.run(Some(first)) };
            self.done.push_back((owner, answer));
        }
        if self.in_helpers() > 0 {
            let take = |it: &Arc<FallbackQueue>| std::mem::take(&mut it.state.lock().done);
            for (token, answer) in self.fallback.as_ref().map(take).unwrap_or_default() {
                self.end_submitted(token, answer);
            }
        }
    }

    /// Takes a transfer out of its slot, if the kernel has it, or was about to get it.
    fn take_from_kernel(&mut self, token: usize) -> Option<InKernel<T>> {
        let slot = self.slots.get_mut(token)?;
        match std::mem::replace(slot, TransferSlot::Vacant) {
            TransferSlot::Kernel(in_kernel) => {
                self.vacant.push(token);
                self.in_kernel -= 1;
                Some(in_kernel)
            }
            other => {
                *slot = other;
                None
            }
        }
    }

    fn end_submitted(&mut self, token: usize, answer: TransferResult) {
        if let TransferSlot::Helpers(owner) =
            std::mem::replace(&mut self.slots[token], TransferSlot::Vacant)
        {
            self.vacant.push(token);
            // Relaxed: statistics.
            self.engine.rings.counts.plain_transfers.fetch_add(1, Ordering::Relaxed);
            self.done.push_back((owner, answer));
        }
    }

    /// Waits until more is complete: `wanted` of the calls in the kernel, or one of the transfers
    /// of helpers; or makes one of the latter itself.
    fn wait(&mut self, wanted: usize) {
        blocking::check_in_queue("a transfer", self.in_flight());
        if self.run_submitted() {
        } else if self.in_kernel > 0 {
            self.enter(wanted.min(self.in_kernel));
        } else if let Some(fallback) = &self.fallback {
            fallback.wait_for_done();
        }
    }

    /// Makes a transfer that no helper has taken. Returns `false` if there is none.
    fn run_submitted(&mut self) -> bool {
        let Some((token, transfer)) = self.take_submitted() else { return false };
        self.submit();
        // SAFETY: `push` required IO-1; the slot keeps the owner.
        let answer = unsafe { transfer.run(None) };
        self.end_submitted(token, answer);
        true
    }

    /// Waits like [`Self::wait`] for one transfer, or until `bell` is rung.
    fn wait_or_rung(&mut self, bell: &Arc<Bell>) {
        blocking::check_in_queue("a transfer", self.in_flight());
        if self.in_kernel > 0 {
            self.arm(bell);
            return self.enter(1);
        }
        let Some(fallback) = self.fallback.as_ref().filter(|_| self.in_helpers() > 0) else {
            return;
        };
        match fallback.helpers_for(self.in_helpers()) {
            // A helper that is done rings.
            Helpers::Working => return bell.wait(),
            Helpers::Called if bell.wait_for(HELPER_WAIT_MAX) => return,
            Helpers::Called | Helpers::None => {}
        }
        // Every worker is busy, perhaps with this thread: progress must not depend on them.
        if fallback.helpers_for(self.in_helpers()) != Helpers::Working {
            self.run_submitted();
        }
    }

    /// Lets the ring read `bell`, unless it does so already or is full.
    fn arm(&mut self, bell: &Arc<Bell>) {
        let Some(lease) = self.lease.as_mut().filter(|_| self.armed.is_none()) else { return };
        // SAFETY: `armed` keeps the bell, with its word and its descriptor, until the completion is
        // reaped.
        if unsafe { lease.push(&bell.call(), BELL_TOKEN) } {
            self.armed = Some(Arc::clone(bell));
        }
    }

    /// Ends the call that reads the bell, before the ring goes to another queue.
    fn disarm(&mut self) {
        if let Some(bell) = &self.armed {
            bell.ring();
        }
        while self.armed.is_some() {
            self.enter(1);
            self.reap();
        }
    }

    fn take_submitted(&self) -> Option<(usize, Transfer)> {
        let fallback = self.fallback.as_ref().filter(|_| self.in_helpers() > 0)?;
        fallback.state.lock().submitted.pop_front()
    }

    fn submit(&mut self) {
        if self.lease.as_mut().is_some_and(|lease| lease.unsubmitted() > 0) {
            self.enter(0);
        }
    }

    /// Submits the calls in the ring, and waits for `wanted` completions. If the kernel refuses and
    /// has none of the calls, the ring is given up and helpers make the transfers.
    fn enter(&mut self, wanted: usize) {
        let Some(lease) = &mut self.lease else { return };
        let Err(error) = lease.enter(wanted) else { return };
        if lease.unsubmitted() < self.in_kernel + usize::from(self.armed.is_some()) {
            // The kernel completes the calls that it has; the completions appear without a system
            // call. The bell may be the only one.
            lease.pause();
            return self.armed.iter().for_each(|bell| bell.ring());
        }
        self.engine.features.withdraw(Feature::IoUring, "io_uring_enter", &error);
        self.lease.take().into_iter().for_each(Lease::give_up);
        self.armed = None;
        for token in 0..self.slots.len() {
            // The ring is closed, and the kernel has not seen these calls.
            if let Some(unseen) = self.take_from_kernel(token) {
                self.submit_fallback(unseen.transfer, unseen.owner);
            }
        }
    }

    /// Returns the ring to the pool if no call is in it. After the last transfer the queue may try
    /// a ring again.
    fn release_ring(&mut self) {
        if self.in_kernel == 0 {
            self.disarm();
            self.lease = None;
        }
        if self.started() == 0 {
            self.is_without_ring = false;
        }
    }
}

impl<T> Drop for Queue<'_, T> {
    fn drop(&mut self) {
        blocking::note_handed_out(self.waiting.len());
        self.waiting.clear();
        while let Some((token, transfer)) = self.take_submitted() {
            // Never begun; its owner is dropped with the slot.
            drop(transfer);
            self.slots[token] = TransferSlot::Vacant;
            self.vacant.push(token);
            blocking::note_handed_out(1);
        }
        while self.started() > 0 {
            self.wait(self.started());
            self.reap();
        }
        self.disarm();
        blocking::note_handed_out(self.done.len());
    }
}

impl<T> fmt::Debug for Queue<'_, T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = formatter.debug_struct("Queue");
        parts.field("waiting", &self.waiting.len()).field("in_kernel", &self.in_kernel);
        parts.field("in_helpers", &self.in_helpers()).field("done", &self.done.len()).finish()
    }
}

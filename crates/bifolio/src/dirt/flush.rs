//! Rounds of syncs: a file has at most one in progress, and all syncs that arrive during it share
//! the next one.
//!
//! So many syncs cost one write-out and one flush (group commit). And of two concurrent flushes of
//! one descriptor, the kernel reports a lost write to only one: the other would return `Ok`.
//!
//! PROTOCOL FLUSH, as two columns (model-checked in `loom_flush`):
//!
//! ```text
//!  A SYNC, whose bytes are dirty or written     THE SYNC THAT LEADS
//!  F1 lock; join the open round; add its        F5 close the round: it is led now, and the next
//!     wants                                        one is open; unlock
//!  F2 the round has an answer? take it, unlock  F6 do what all syncs in it want: write out, flush
//!  F3 a round is led? wait (unlocks), then F2   F7 lock; none is led now; store the answer for
//!  F4 more syncs expected? wait, but only for      all syncs that joined; wake all; unlock
//!     a moment, then F2; else continue with F5
//! ```
//!
//! FLUSH-1: a round covers every sync that gets its answer. Their bytes were dirty, or written,
//! before F1 of their sync; F1 precedes F5, since no sync joins a closed round; and F6 follows F5.
//! So a sync that arrives while a flush is in flight does not get the answer of that flush, which
//! may have begun before the bytes of the sync were written. At any time at most one round is open,
//! and it is led by a thread that joined it: no thread waits for an absent leader.
//!
//! FLUSH-2: all syncs that joined a round get its answer, also an error. The backing decides what
//! follows from an error: a file of the kernel stays failed (IO-4).
//!
//! The moment of F4: of threads that commit in a loop, the first would be alone in its round. So a
//! round waits for as many syncs as came to the round before or during it; the last of them leads.
//! If they do not come, the first one leads after 1/8 of the duration of that round, or 1 ms.

use crate::sync::{Condvar, Mutex, blocking};
use std::time::{Duration, Instant};

/// Divisor of the duration of the last round, and the cap, for the moment of F4.
const MOMENT_DIVISOR: u32 = 8;
const MOMENT_MAX: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(crate) struct Flushes<E> {
    state: Mutex<FlushState<E>>,
    ended: Condvar,
}

#[derive(Debug)]
struct FlushState<E> {
    is_led: bool,
    /// Set while a thread that joined the open round waits for the moment of F4 to pass.
    is_awaited: bool,
    /// Number of the open round, the number of syncs that have joined it, and what they want.
    round: u64,
    joined: u64,
    wants: Wants,
    /// Number of syncs that came to the last round or during it, and the duration of that round.
    expected: u64,
    took: Duration,
    /// Answers of ended rounds; no more than waiting threads.
    answers: Vec<Answer<E>>,
}

/// Work of a round besides the flush of data.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wants {
    /// Set if the metadata of the file is flushed, too.
    pub(crate) metadata: bool,
    /// Pages marked dirty before this number are written out first.
    pub(crate) end: u64,
}

#[derive(Debug)]
struct Answer<E> {
    round: u64,
    /// Number of syncs that have not taken the answer yet.
    left: u64,
    result: Result<(), E>,
}

impl<E> Default for Flushes<E> {
    fn default() -> Self {
        let state = FlushState {
            is_led: false,
            is_awaited: false,
            round: 0,
            joined: 0,
            wants: Wants::default(),
            expected: 0,
            took: Duration::ZERO,
            answers: Vec::new(),
        };
        Self { state: Mutex::new(state), ended: Condvar::default() }
    }
}

#[derive(Debug)]
pub(crate) struct Flushed<E> {
    pub(crate) result: Result<(), E>,
    /// Set if another thread led the round.
    pub(crate) is_shared: bool,
}

impl<E: Clone> Flushes<E> {
    /// Makes everything durable that was dirty or had reached the device before the call: either in
    /// a round that another thread leads, or by calling `lead` with the combined wants of all syncs
    /// in the round. `lead` must not panic. Blocks for the device, and for the round before.
    pub(crate) fn flush(
        &self,
        wants: Wants,
        lead: impl FnOnce(Wants) -> Result<(), E>,
    ) -> Flushed<E> {
        blocking::check_user("a flush");
        let mut state = self.state.lock();
        let round = state.round;
        state.joined += 1;
        state.wants.add(wants);
        let mut moment_is_over = false;
        loop {
            if let Some(result) = state.take_answer(round) {
                return Flushed { result, is_shared: true };
            }
            if !state.is_led && (moment_is_over || state.is_complete()) {
                break;
            }
            if state.is_led || state.is_awaited {
                self.ended.wait(&mut state);
            } else {
                state.is_awaited = true;
                let until = Instant::now() + (state.took / MOMENT_DIVISOR).min(MOMENT_MAX);
                moment_is_over = self.ended.wait_until(&mut state, until).timed_out();
            }
        }
        let (came, wants) = state.close_round();
        drop(state);
        let begun = Instant::now();
        let result = lead(wants);
        let took = begun.elapsed();
        let mut state = self.state.lock();
        (state.is_led, state.took) = (false, took);
        state.expected = came + state.joined;
        if came > 1 {
            state.answers.push(Answer { round, left: came - 1, result: result.clone() });
        }
        self.ended.notify_all();
        Flushed { result, is_shared: false }
    }
}

impl Wants {
    fn add(&mut self, other: Self) {
        self.metadata |= other.metadata;
        self.end = self.end.max(other.end);
    }
}

impl<E: Clone> FlushState<E> {
    /// Returns `true` if as many syncs have joined as came to the round before. Always `true` in a
    /// model, which has no time: the length of the wait is no part of the protocol.
    fn is_complete(&self) -> bool {
        self.joined >= self.expected || cfg!(all(test, loom))
    }

    /// F5. Returns the number of syncs that joined the round, and what they want.
    fn close_round(&mut self) -> (u64, Wants) {
        (self.is_led, self.is_awaited) = (true, false);
        self.round += 1;
        (std::mem::take(&mut self.joined), std::mem::take(&mut self.wants))
    }

    /// F2: takes the answer of a round that has ended.
    fn take_answer(&mut self, round: u64) -> Option<Result<(), E>> {
        let at = self.answers.iter().position(|answer| answer.round == round)?;
        let answer = &mut self.answers[at];
        answer.left -= 1;
        if answer.left == 0 {
            return Some(self.answers.swap_remove(at).result);
        }
        Some(answer.result.clone())
    }
}

//! Rounds of syncs: one under way a file, and all who come meanwhile share the next one.
//!
//! The last steps of a sync (S3 to S5 of `dirty.rs`), for every backing, and the only way to
//! [`Backing::sync_data`](crate::Backing::sync_data) and `sync_all`. Two reasons: many syncs cost
//! one write-out and one flush (group commit), and of two flushes of one descriptor at a time only
//! one is told of a write that the kernel has lost: the other would answer `Ok`.
//!
//! PROTOCOL, as two columns (model-checked in `loom_flush`):
//!
//! ```text
//!  A SYNC, whose bytes are dirty or written     THE ONE THAT LEADS
//!  F1 lock; join the round that gathers;        F5 close the round: it is led, and the next one
//!     say what is wanted of it                     gathers; unlock
//!  F2 the round has an answer? take it, unlock  F6 do what all who joined want: write out, flush
//!  F3 a round is led? wait (unlocks), then F2   F7 lock; none is led; give the answer to
//!  F4 others are about to come? wait, but only     all who had joined; wake everybody; unlock
//!     for a moment, then F2; else go on with F5
//! ```
//!
//! FLUSH-1: a round covers everybody who gets its answer. Their bytes were dirty, or written,
//! before F1 of their sync, F1 came before F5, since nobody joins a round that is closed, and F6
//! comes after F5. So who comes while a flush is in flight does not get the answer of that one: it
//! may have begun before his bytes were there. Of each two rounds one at the most is open, and it
//! is led by one of those who joined it: nobody waits for somebody who is not there.
//!
//! FLUSH-2: all who joined a round get its answer, the error too. What follows from an error is the
//! backing's to know: a file of the kernel stays failed (IO-4).
//!
//! The moment of F4: threads that commit in a loop are answered together, and come back one after
//! the other. Were the first of them to begin at once, it would go alone and all others would wait
//! for it. So as many are waited for as came to the round before or while it was led: the last of
//! them leads. If they do not come, the first one leads after an eighth of the time that round
//! took, or a millisecond. Whoever commits alone waits for nobody.

use crate::sync::{Condvar, Mutex, blocking};
use std::time::{Duration, Instant};

/// The moment of F4: a part of the time that the round before took, and at most so long.
const MOMENT_DIVISOR: u32 = 8;
const MOMENT_MAX: Duration = Duration::from_millis(1);

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Flushes<E> {
    state: Mutex<State<E>>,
    /// Signalled when a round has ended.
    ended: Condvar,
}

#[derive(Debug)]
struct State<E> {
    is_led: bool,
    /// One of those who joined the round that gathers waits for the moment of F4 to be over.
    is_awaited: bool,
    /// The round that gathers, how many have joined it, and what they want.
    round: u64,
    joined: u64,
    wants: Wants,
    /// How many came to the round before or while it was led, and how long that took.
    expected: u64,
    took: Duration,
    /// Of rounds that have ended; no more than threads that wait.
    answers: Vec<Answer<E>>,
}

/// Work that a round is to do beside the flush.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wants {
    /// The file's metadata is flushed, too.
    pub(crate) metadata: bool,
    /// Pages that were marked dirty before this number are written out first.
    pub(crate) end: u64,
}

#[derive(Debug)]
struct Answer<E> {
    round: u64,
    /// How many have not taken it yet.
    left: u64,
    result: Result<(), E>,
}

impl<E> Default for Flushes<E> {
    fn default() -> Self {
        let state = State {
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

/// The result of a round.
#[derive(Debug)]
pub(crate) struct Flushed<E> {
    pub(crate) result: Result<(), E>,
    /// Somebody else led it.
    pub(crate) is_shared: bool,
}

impl<E: Clone> Flushes<E> {
    /// Makes durable what was dirty or had reached the device before the call: in a round that
    /// somebody leads who comes at the same time, or by `lead`, which is told what all who came
    /// want, and must not panic. Blocks for the device, and for the round before.
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

impl<E: Clone> State<E> {
    /// Whether as many have joined as came to the round before. Always, in a model: it knows no
    /// time, and how long somebody waits before he leads is no part of the protocol.
    fn is_complete(&self) -> bool {
        self.joined >= self.expected || cfg!(all(test, loom))
    }

    /// F5. Answers how many have joined the round, and what they want.
    fn close_round(&mut self) -> (u64, Wants) {
        (self.is_led, self.is_awaited) = (true, false);
        self.round += 1;
        (std::mem::take(&mut self.joined), std::mem::take(&mut self.wants))
    }

    /// F2.
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

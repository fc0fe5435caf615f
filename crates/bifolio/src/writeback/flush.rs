//! Flushes of the device: one in flight a file, and all who come meanwhile share the next one.
//!
//! The last step of a sync (S5 of `dirty.rs`), for every backing, and the only way to
//! [`Backing::sync_data`](crate::Backing::sync_data) and `sync_all`. Two reasons: many syncs cost
//! one flush (group commit), and of two flushes of one descriptor at a time only one is told of a
//! write that the kernel has lost: the other would answer `Ok`.
//!
//! PROTOCOL, as two columns (model-checked in `loom_flush`):
//!
//! ```text
//!  A SYNC, whose write-outs have ended          THE ONE THAT FLUSHES
//!  F1 lock; join the round that gathers;        F4 close the round: the next one gathers;
//!     say whether metadata is wanted               a flush is in flight; unlock
//!  F2 the round has an answer? take it, unlock  F5 flush; with metadata, if anybody wants that
//!  F3 a flush is in flight? wait (unlocks),     F6 lock; none is in flight; give the answer to
//!     then F2; if none is, go on with F4           all who had joined; wake everybody; unlock
//! ```
//!
//! FLUSH-1: a flush covers the write-outs of everybody who gets its answer. They ended before F1 of
//! their sync, F1 came before F4, since nobody joins a round that is closed, and F5 comes after F4.
//! So who comes while a flush is in flight does not get the answer of that one: it may have begun
//! before his bytes were there. Of each two rounds one at the most is open, and it is flushed by
//! one of those who joined it: nobody waits for somebody who is not there.
//!
//! FLUSH-2: all who joined a round get its answer, the error too. What follows from an error is the
//! backing's to know: a file of the kernel stays failed (IO-4).

use crate::sync::{Condvar, Mutex, blocking};

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Flushes<E> {
    state: Mutex<State<E>>,
    /// Signalled when a flush has ended.
    ended: Condvar,
}

#[derive(Debug)]
struct State<E> {
    is_flushing: bool,
    /// The round that gathers, and how many have joined it.
    round: u64,
    joined: u64,
    wants_metadata: bool,
    /// Of rounds that have ended; no more than threads that wait.
    answers: Vec<Answer<E>>,
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
            is_flushing: false,
            round: 0,
            joined: 0,
            wants_metadata: false,
            answers: Vec::new(),
        };
        Self { state: Mutex::new(state), ended: Condvar::default() }
    }
}

/// What a flush came to.
#[derive(Debug)]
pub(crate) struct Flushed<E> {
    pub(crate) result: Result<(), E>,
    /// Somebody else made it.
    pub(crate) is_shared: bool,
}

impl<E: Clone> Flushes<E> {
    /// Makes durable what had reached the device before the call: by a flush of somebody who comes
    /// at the same time, or by `flush`, which is told whether metadata is wanted, too, and must not
    /// panic. Blocks for the device, and for the flush before.
    pub(crate) fn flush(
        &self,
        metadata: bool,
        flush: impl FnOnce(bool) -> Result<(), E>,
    ) -> Flushed<E> {
        blocking::check("a flush");
        let mut state = self.state.lock();
        let round = state.round;
        state.joined += 1;
        state.wants_metadata |= metadata;
        loop {
            if let Some(result) = state.take_answer(round) {
                return Flushed { result, is_shared: true };
            }
            if !state.is_flushing {
                break;
            }
            self.ended.wait(&mut state);
        }
        let (others, metadata) = state.close_round();
        drop(state);
        let result = flush(metadata);
        let mut state = self.state.lock();
        state.is_flushing = false;
        if others > 0 {
            state.answers.push(Answer { round, left: others, result: result.clone() });
        }
        self.ended.notify_all();
        Flushed { result, is_shared: false }
    }
}

impl<E: Clone> State<E> {
    /// F4. Answers how many others have joined the round, and whether metadata is wanted.
    fn close_round(&mut self) -> (u64, bool) {
        self.is_flushing = true;
        self.round += 1;
        (std::mem::take(&mut self.joined) - 1, std::mem::take(&mut self.wants_metadata))
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

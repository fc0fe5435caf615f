//! Transfers of one queue that threads make, with plain calls: where there is no ring, and for
//! backings that want to be called.
//!
//! The queue's thread submits transfers; workers come as helpers, one for each *ticket*, and take
//! what is left; while the queue's thread has nothing better to do it takes them itself. So the
//! workers only ever make things faster: a queue waits for nobody but those who are at work on one
//! of its transfers, and is served even if every worker is busy, or is the queue's own thread.
//!
//! # Safety
//! A transfer that was taken is made under IO-1: its queue keeps the owner until it is done.
#![allow(unsafe_code)]

use std::collections::VecDeque;

use super::life::{Answer, Transfer};
use crate::sync::{Condvar, Mutex};

/// See the head of the file.
#[derive(Debug, Default)]
pub(super) struct FallbackQueue {
    state: Mutex<State>,
    finished: Condvar,
}

#[derive(Debug, Default)]
struct State {
    submitted: VecDeque<(usize, Transfer)>,
    done: Vec<(usize, Answer)>,
    /// Helpers that were called and have not come yet.
    tickets: usize,
}

impl FallbackQueue {
    /// Submits a transfer; `token` comes back with its answer.
    pub(super) fn submit(&self, token: usize, transfer: Transfer) {
        self.state.lock().submitted.push_back((token, transfer));
    }

    /// How many more helpers should be called, if the queue's thread takes `own` transfers itself.
    /// They count as called.
    pub(super) fn call_helpers(&self, own: usize) -> usize {
        let mut state = self.state.lock();
        let missing = state.submitted.len().saturating_sub(state.tickets + own);
        state.tickets += missing;
        missing
    }

    /// What a helper does: at most one transfer.
    pub(super) fn help(&self) {
        let taken = {
            let mut state = self.state.lock();
            state.tickets -= 1;
            state.submitted.pop_front()
        };
        let Some((token, transfer)) = taken else { return };
        // SAFETY: IO-1: promised to `Queue::push`; the queue waits for every transfer that was
        // taken, and keeps its owner until then.
        let answer = unsafe { transfer.run() };
        self.state.lock().done.push((token, answer));
        self.finished.notify_one();
    }

    /// A helper will not come after all.
    pub(super) fn forget_helper(&self) {
        self.state.lock().tickets -= 1;
    }

    /// A transfer that nobody has taken yet.
    pub(super) fn take(&self) -> Option<(usize, Transfer)> {
        self.state.lock().submitted.pop_front()
    }

    /// The answers that helpers have brought.
    pub(super) fn take_done(&self) -> Vec<(usize, Answer)> {
        std::mem::take(&mut self.state.lock().done)
    }

    /// Waits until there is one. Somebody must be at work.
    pub(super) fn wait_for_done(&self) {
        let mut state = self.state.lock();
        while state.done.is_empty() {
            self.finished.wait(&mut state);
        }
    }
}
